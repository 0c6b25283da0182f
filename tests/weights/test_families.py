"""Older, newer, wrapped and stacked ways in which each family's files were written all give the same model."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from checkpoints import PEERS, TOLERANCE, arrays_of, expected, largest_difference, path_of
from safetensors.torch import load_file, save_file

from vitruvian.config import IMAGENET_MEAN, NUMERICS, ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.model.build import build
from vitruvian.weights.load import load
from vitruvian.weights.save import save


def same_answers(path, name, **options):
    """The model at `path`, which must answer like the fixture it was made from."""
    model = load(path, **options)
    assert largest_difference(model, name) < TOLERANCE
    return model


def write_npz(path, arrays):
    np.savez(path, **arrays)
    return path


def renamed(tensors, *rules):
    out = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        out[name] = tensor
    return out


def timm_tensors(name="timm_vit"):
    return load_file(path_of(name))


def told(model):
    """Where a model came from, without what was assumed."""
    return model.meta.origin.split("; assumed")[0]


class TestGoogle:
    @pytest.mark.parametrize("prefix", ["opt/target/", "params/", "params/img/"])
    def test_names_may_have_a_prefix(self, prefix, tmp_path):
        arrays = {prefix + name: array for name, array in arrays_of("google_vit").items()}
        model = same_answers(write_npz(tmp_path / "w.npz", arrays), "google_vit")
        assert told(model) == "google weights from w.npz"

    def test_optimizer_state_and_text_tower_are_left_out_by_name_and_recorded(self, tmp_path):
        arrays = {"params/img/" + name: array for name, array in arrays_of("google_vit").items()}
        extra = {"opt/state/step": np.ones(1), "params/txt/head/kernel": np.ones((2, 2)), "params/t": np.ones(1)}
        model = same_answers(write_npz(tmp_path / "w.npz", arrays | extra), "google_vit")
        assert "opt/state/step (optimizer state)" in model.meta.origin
        assert "params/txt/head/kernel (text tower)" in model.meta.origin

    def test_group_norm_arrays_may_be_four_dimensional(self, tmp_path):
        arrays = arrays_of("google_hybrid")
        arrays = {n: a.reshape(1, 1, 1, -1) if "/gn" in n or n.startswith("gn_root") else a for n, a in arrays.items()}
        same_answers(write_npz(tmp_path / "w.npz", arrays), "google_hybrid")

    def test_bfloat16_saved_as_raw_bytes_is_read(self, tmp_path):
        arrays = arrays_of("google_vit_nohidden")
        raw = {n: torch.from_numpy(a).bfloat16().view(torch.int16).numpy().view("V2") for n, a in arrays.items()}
        exact = {n: torch.from_numpy(a).bfloat16().float().numpy() for n, a in arrays.items()}
        half = load(write_npz(tmp_path / "half.npz", raw))
        full = load(write_npz(tmp_path / "full.npz", exact))
        assert all(torch.equal(a, b) for a, b in zip(half.state_dict().values(), full.state_dict().values()))
        assert next(half.parameters()).dtype == torch.float32

    def test_a_file_without_head_gives_features(self, tmp_path):
        arrays = {name: array for name, array in arrays_of("google_vit_nohidden").items() if "head" not in name}
        model = load(write_npz(tmp_path / "w.npz", arrays))
        assert model.config.num_classes == 0
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 32)


class TestBigVision:
    def test_blocks_stacked_by_scan_are_taken_apart(self, tmp_path):
        arrays = arrays_of("bigvision_vit_map")
        pattern = re.compile(r"params/Transformer/encoderblock_(\d)/(.*)")
        kept = {name: array for name, array in arrays.items() if not pattern.match(name)}
        inner = {match[2] for name in arrays if (match := pattern.match(name))}
        for name in inner:
            blocks = [arrays[f"params/Transformer/encoderblock_{i}/{name}"] for i in (0, 1)]
            kept[f"params/Transformer/encoderblock/{name}"] = np.stack(blocks)
        same_answers(write_npz(tmp_path / "w.npz", kept), "bigvision_vit_map")

    def test_a_position_row_of_the_class_token_is_added_to_it(self, tmp_path):
        arrays = arrays_of("bigvision_vit_tok")
        row = np.full((1, 1, 32), 0.25, dtype=np.float32)
        arrays["params/cls"] = arrays["params/cls"] - row
        arrays["params/pos_embedding"] = np.concatenate([row, arrays["params/pos_embedding"]], axis=1)
        same_answers(write_npz(tmp_path / "w.npz", arrays), "bigvision_vit_tok")

    def test_positions_and_attention_pooling_may_stand_where_old_code_had_them(self, tmp_path):
        rules = (r"params/pos_embedding", "params/Transformer/pos_embedding"), (r"params/MAPHead_0/", "params/")
        arrays = renamed(arrays_of("bigvision_vit_map"), *rules)
        same_answers(write_npz(tmp_path / "w.npz", arrays), "bigvision_vit_map")

    def test_fixed_positions_take_any_image_size_and_default_to_224(self):
        path = path_of("bigvision_vit_gap_sincos")
        assert load(path).config.image_size == (224, 224)
        assert load(path, image_size=(32, 64)).config.grid == (4, 8)


class TestBit:
    def test_numbered_convolutions_and_a_missing_prefix_are_read(self, tmp_path):
        model = build(ResNetConfig(stages=(1, 1), width=32, num_classes=5, image_size=64)).eval()
        save(model, tmp_path / "bit.npz", "google")
        with np.load(tmp_path / "bit.npz") as archive:
            names = set(archive.files)
            arrays = renamed(dict(archive), (r"standardized_conv2d/", "standardized_conv2d_7/"), (r"^resnet/", ""))
        assert {
            "resnet/root_block/standardized_conv2d/kernel",
            "resnet/block2/unit01/a/proj/standardized_conv2d/kernel",
            "resnet/block1/unit01/b/group_norm/gamma",
            "resnet/head/conv2d/kernel",
        } <= names
        again = load(write_npz(tmp_path / "other.npz", arrays))
        assert told(again) == "bit weights from other.npz"
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))

    def test_settings_of_patches_are_refused(self, tmp_path):
        save(build(ResNetConfig(stages=(1,), width=32, num_classes=2)), tmp_path / "bit.npz", "google")
        for option in ({"num_heads": 4}, {"grid": (2, 2)}, {"patch_size": 8}):
            with pytest.raises(CheckpointError, match="not apply to a ResNet"):
                load(tmp_path / "bit.npz", **option)
        assert load(tmp_path / "bit.npz", image_size=480, num_classes=3).config.image_size == (480, 480)


class TestTimm:
    @pytest.mark.parametrize("prefix", ["module.", "backbone.", "model.", "_orig_mod."])
    @pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
    def test_names_may_be_wrapped_and_prefixed(self, prefix, wrapper, tmp_path):
        tensors = {prefix + name: tensor for name, tensor in timm_tensors().items()}
        torch.save({wrapper: tensors, "epoch": 3} if wrapper else tensors, tmp_path / "w.pth")
        model = same_answers(tmp_path / "w.pth", "timm_vit", num_heads=4)
        assert told(model) == "timm weights from w.pth" + ("; not used: epoch" if wrapper else "")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_any_floating_point_becomes_float32(self, dtype, tmp_path):
        tensors = timm_tensors()
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "w.safetensors")
        found = load(tmp_path / "w.safetensors", num_heads=4).state_dict()["norm.weight"]
        assert torch.equal(found, tensors["norm.weight"].to(dtype).float())

    def test_layer_scale_of_the_first_deit3_files_is_read(self, tmp_path):
        tensors = renamed(timm_tensors("timm_deit3"), (r"ls(\d)\.gamma", r"gamma_\1"))
        torch.save({"model": tensors}, tmp_path / "w.pth")
        same_answers(tmp_path / "w.pth", "timm_deit3", num_heads=4)

    def test_a_pre_logits_layer_of_older_files_is_kept(self, tmp_path):
        tensors = timm_tensors()
        hidden = {"pre_logits.fc.weight": torch.eye(32), "pre_logits.fc.bias": torch.zeros(32)}
        save_file(tensors | hidden, tmp_path / "w.safetensors")
        model, plain = load(tmp_path / "w.safetensors", num_heads=4), load(path_of("timm_vit"), num_heads=4)
        pixels = expected("timm_vit")[0][0]
        assert torch.allclose(model.features(pixels), plain.features(pixels).tanh(), atol=1e-6)

    def test_a_lone_distillation_token_stays_in_its_place(self, tmp_path):
        """DeiT fine-tuned without a teacher: the answer is the first head's alone."""
        tensors = timm_tensors("timm_deit_distilled")
        save_file({n: t for n, t in tensors.items() if "head_dist" not in n}, tmp_path / "w.safetensors")
        model, both = load(tmp_path / "w.safetensors", num_heads=4), load(path_of("timm_deit_distilled"), num_heads=4)
        pixels = expected("timm_deit_distilled")[0][0]
        assert torch.allclose(model(pixels), both.head(both.features(pixels)), atol=1e-6)

    def test_a_distilled_model_without_its_heads_is_refused(self, tmp_path):
        tensors = timm_tensors("timm_deit_distilled")
        save_file({n: t for n, t in tensors.items() if not n.startswith("head")}, tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match="keep the heads and pass num_classes=0"):
            load(tmp_path / "w.safetensors", num_heads=4)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda found: {f"fc_{n}" if n.startswith("norm.") else n: t for n, t in found.items()},
             "'fc_norm', which timm's code does not apply.*fc_norm=False"),
            (lambda found: found | {"reg_token": torch.zeros(1, 2, 32)}, "'reg_token', which timm's code ignores"),
        ],
    )  # fmt: skip
    def test_parts_of_a_distilled_model_that_timm_leaves_out_are_refused(self, change, words, tmp_path):
        save_file(change(timm_tensors("timm_deit_distilled")), tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path / "w.safetensors", num_heads=4)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("blocks.0.attn.q_norm.weight", "normalized queries and keys"),
            ("norm_pre.weight", "a norm before the blocks"),
        ],
    )
    def test_other_architectures_are_refused_by_what_they_have(self, name, reason, tmp_path):
        save_file(timm_tensors() | {name: torch.ones(32)}, tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match=f"the weights have {reason}.*{name}"):
            load(tmp_path / "w.safetensors", num_heads=4)

    def test_norms_before_and_after_the_mean_are_refused(self, tmp_path):
        more = {"norm.weight": torch.ones(32), "norm.bias": torch.zeros(32)}
        save_file(timm_tensors("timm_vit_gap") | more, tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match="both 'norm' and 'fc_norm'"):
            load(tmp_path / "w.safetensors", num_heads=4)

    def test_a_folder_from_the_hub_says_how_to_prepare_images(self, tmp_path):
        save_file(timm_tensors(), tmp_path / "model.safetensors")
        cfg = {"mean": [0.4] * 3, "std": [0.2] * 3, "interpolation": "bilinear", "crop_pct": 0.5, "crop_mode": "center"}
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit", "pretrained_cfg": cfg}))
        view = load(tmp_path, num_heads=4).meta.preprocess
        assert (view.mean, view.interpolation, view.scaled_size) == ((0.4,) * 3, "bilinear", (64, 64))

    @pytest.mark.parametrize(
        ("name", "wrapper", "mean"),
        [
            ("timm_vit", None, (0.5,) * 3),
            ("timm_vit", "model", IMAGENET_MEAN),
            ("timm_deit_distilled", None, IMAGENET_MEAN),
            ("timm_deit3", None, IMAGENET_MEAN),
        ],
    )
    def test_statistics_follow_what_tells_augreg_from_deit(self, name, wrapper, mean, tmp_path):
        torch.save({wrapper: timm_tensors(name)} if wrapper else timm_tensors(name), tmp_path / "w.pth")
        assert load(tmp_path / "w.pth", num_heads=4).meta.preprocess.mean == mean


class TestTorchvision:
    def test_older_names_of_the_mlp_are_read(self, tmp_path):
        tensors = torch.load(path_of("torchvision_vit"), weights_only=True)
        old = renamed(tensors, (r"mlp\.0\.", "mlp.linear_1."), (r"mlp\.3\.", "mlp.linear_2."))
        torch.save(old, tmp_path / "w.pth")
        same_answers(tmp_path / "w.pth", "torchvision_vit", num_heads=4)


class TestDino:
    def test_the_teacher_of_a_training_checkpoint_is_read(self):
        model = load(path_of("dino"), num_heads=4)
        assert model.meta.origin.startswith("dino weights from dino.pth")
        assert "head.mlp.0.weight (projection head of the training)" in model.meta.origin
        assert "epoch" in model.meta.origin
        assert model.meta.preprocess.mean == IMAGENET_MEAN

    def test_the_prefix_of_parallel_training_is_stripped_from_all_names(self, tmp_path):
        teacher = torch.load(path_of("dino"), weights_only=True)["teacher"]
        torch.save({"teacher": {f"module.{n}": t for n, t in teacher.items()}}, tmp_path / "w.pth")
        same_answers(tmp_path / "w.pth", "dino", num_heads=4)

    def test_a_bare_backbone_in_a_pth_is_dino_and_in_safetensors_timm(self, tmp_path):
        tensors = timm_tensors("timm_headless")
        torch.save(tensors, tmp_path / "w.pth")
        assert load(tmp_path / "w.pth", num_heads=4).config.numerics.position_resize == "dino"
        assert load(path_of("timm_headless"), num_heads=4).config.numerics.position_resize == "bicubic_antialias"
        assert load(path_of("timm_headless"), num_heads=4, family="dino").config.numerics.position_resize == "dino"

    def test_dinov2_gated_registered_and_chunked_is_read(self, tmp_path):
        """DINOv2's own names on timm's numbers: LayerScale and gated MLP, registers after a placed class token."""
        tensors = timm_tensors("timm_swiglu") | {"mask_token": torch.zeros(1, 32)}
        rules = (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"), (r"^blocks\.0\.", "blocks.0.0.")
        torch.save({"teacher": renamed(tensors, *rules, (r"^(?!head)", "backbone."))}, tmp_path / "w.pth")
        model = same_answers(tmp_path / "w.pth", "timm_swiglu", num_heads=4)
        assert (
            model.meta.origin.split("; assumed")[0]
            == "dinov2 weights from w.pth; not used: mask_token (token of masked training)"
        )
        assert model.config.numerics.position_resize == "dino"

    def test_dinov2_registers_bring_antialiased_resizing(self, tmp_path):
        tensors = renamed(timm_tensors("timm_registers"), (r"reg_token", "register_tokens"))
        save_file(tensors | {"mask_token": torch.zeros(1, 32)}, tmp_path / "w.safetensors")
        model = same_answers(tmp_path / "w.safetensors", "timm_registers", num_heads=4)
        assert model.config.numerics.position_resize == "bicubic_antialias"
        assert model.config.reg_tokens == 2


class TestOpenClip:
    def test_a_tower_of_timm_answers_as_timms_own_folder(self, tmp_path):
        config = ViTConfig(image_size=32, patch_size=8, depth=1, width=32, mlp_dim=64, num_heads=2, num_classes=0)
        save(build(config.replace(numerics=NUMERICS["timm"]), seed=1), tmp_path / "w.safetensors", "timm")
        tensors = load_file(tmp_path / "w.safetensors")
        alone, beside = tmp_path / "timm", tmp_path / "open_clip"
        for folder in (alone, beside):
            folder.mkdir()
        save_file(tensors, alone / "model.safetensors")
        (alone / "config.json").write_text(json.dumps({"architecture": "test_vit", "global_pool": "token"}))
        trunk = {f"visual.trunk.{name}": tensor for name, tensor in tensors.items()}
        text = {"text.transformer.resblocks.0.ln_1.weight": torch.ones(4), "logit_scale": torch.ones(())}
        save_file(trunk | text, beside / "open_clip_model.safetensors")
        tower = {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 32}
        (beside / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"vision_cfg": tower}}))
        one, other = load(alone), load(beside)
        pixels = torch.randn(1, 3, 32, 32)
        assert one.config.num_heads == other.config.num_heads == 2
        torch.testing.assert_close(one(pixels), other(pixels), atol=TOLERANCE, rtol=0)
        assert "(text tower)" in other.meta.origin

    def test_without_its_settings_it_is_refused(self, tmp_path):
        save_file(load_file(path_of("open_clip") / "open_clip_model.safetensors"), tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match=r"without open_clip_config\.json, which states their heads"):
            load(tmp_path / "w.safetensors")


class TestBitOfTimm:
    def test_answers_are_those_of_timm_and_come_back(self, tmp_path):
        expected = load_file(PEERS / "timm_bit.logits.safetensors")
        model = load(PEERS / "timm_bit.safetensors")
        assert model.config == ResNetConfig(stages=(2,), width=32, num_classes=5, style="timm_bit")
        with torch.no_grad():
            torch.testing.assert_close(model(expected["pixels"]), expected["logits"], atol=TOLERANCE, rtol=TOLERANCE)
        save(model, tmp_path / "w.safetensors", "timm")
        written, original = load_file(tmp_path / "w.safetensors"), load_file(PEERS / "timm_bit.safetensors")
        assert written.keys() == original.keys()
        assert all(torch.equal(written[name], original[name]) for name in original)

    def test_a_folder_states_size_and_view_and_no_other_architecture(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes((PEERS / "timm_bit.safetensors").read_bytes())
        cfg = {"input_size": [3, 64, 64], "crop_pct": 1.0, "interpolation": "bilinear"}
        config = {"architecture": "resnetv2_50x1_bit", "pretrained_cfg": cfg}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = load(tmp_path)
        assert model.config.image_size == model.meta.preprocess.image_size == (64, 64)
        assert model.meta.preprocess.interpolation == "bilinear"
        (tmp_path / "config.json").write_text(json.dumps(config | {"architecture": "resnetv2_50"}))
        with pytest.raises(CheckpointError, match=r"'resnetv2_50' is not one of timm's resnetv2_\*_bit"):
            load(tmp_path)
