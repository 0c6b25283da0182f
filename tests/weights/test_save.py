"""Writing: complete or not at all, readable by others, and refused with the reason where a family cannot."""

from __future__ import annotations

import importlib
import json
import os

import numpy as np
import pytest
import torch
from checkpoints import DESTINATIONS, TOLERANCE, largest_difference, path_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vitruvian import files
from vitruvian.config import ResNetConfig, StemConfig, ViTConfig
from vitruvian.errors import CheckpointError, ConversionError, FileError, UnknownNameError
from vitruvian.model.build import build
from vitruvian.weights.load import load
from vitruvian.weights.save import save

saving = importlib.import_module("vitruvian.weights.save")  # the module, where the package exports its function

SHAPE = ViTConfig(image_size=32, patch_size=8, depth=1, width=32, mlp_dim=64, num_heads=4, num_classes=3)


@pytest.fixture
def model():
    return load(path_of("timm_vit"), num_heads=4)


class TestReplacing:
    @pytest.mark.parametrize("family", DESTINATIONS)
    def test_a_failure_in_the_middle_leaves_the_old_weights_and_nothing_else(
        self, family, model, tmp_path, monkeypatch
    ):
        destination = tmp_path / DESTINATIONS[family]
        save(model, destination, family)
        before = contents(tmp_path)
        other = load(path_of("torchvision_vit"), num_heads=4)

        def fail(*args, **options):
            written(*args, **options)
            raise OSError(28, "No space left on device")

        written = saving.write_tensors
        monkeypatch.setattr(saving, "write_tensors", fail)
        with pytest.raises(FileError, match="cannot be written: No space left on device"):
            save(other, destination, family)
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("family", DESTINATIONS)
    def test_new_weights_take_the_place_of_old_ones(self, family, model, tmp_path):
        destination = tmp_path / DESTINATIONS[family]
        save(load(path_of("torchvision_vit"), num_heads=4), destination, family)
        save(model, destination, family)
        assert largest_difference(load(destination), "timm_vit") < TOLERANCE

    def test_other_files_of_a_folder_stay(self, model, tmp_path):
        (tmp_path / "native").mkdir()
        (tmp_path / "native" / "notes.txt").write_text("mine")
        save(model, tmp_path / "native")
        assert (tmp_path / "native" / "notes.txt").read_text() == "mine"

    @pytest.mark.parametrize("replaced", [0, 1])
    def test_a_native_folder_interrupted_between_its_two_files_is_wholly_old_or_new(
        self, replaced, tmp_path, monkeypatch
    ):
        save(load(path_of("torchvision_vit"), num_heads=4), tmp_path / "native")
        real, count = os.replace, 0

        def replace(source, destination):
            nonlocal count
            if count == replaced:
                raise KeyboardInterrupt
            count += 1
            real(source, destination)

        monkeypatch.setattr(files.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save(load(path_of("google_vit_nohidden")), tmp_path / "native")
        monkeypatch.undo()
        name = "google_vit_nohidden" if replaced else "torchvision_vit"
        assert largest_difference(load(tmp_path / "native"), name) < TOLERANCE

    def test_files_can_be_read_by_others_as_the_umask_says(self, model, tmp_path):
        save(model, tmp_path / "native")
        plain = tmp_path / "plain"
        plain.touch()
        assert (tmp_path / "native" / "model.safetensors").stat().st_mode == plain.stat().st_mode

    def test_a_place_that_cannot_be_written_is_one_line(self, model, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(FileError, match="cannot be written: "):
            save(model, tmp_path / "file" / "native")


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestNative:
    def test_a_folder_holds_a_description_for_people_and_tensors_under_our_names(self, model, tmp_path):
        save(model, tmp_path / "native")
        assert sorted(path.name for path in (tmp_path / "native").iterdir()) == ["config.json", "model.safetensors"]
        config = json.loads((tmp_path / "native" / "config.json").read_text())
        assert config["kind"] == "vit"
        assert config["architecture"]["numerics"]["position_resize"] == "bicubic_antialias"
        tensors = load_file(tmp_path / "native" / "model.safetensors")
        assert tensors["embed.pos_embed"].shape == (4, 4, 32)

    def test_an_edited_config_counts(self, model, tmp_path):
        save(model, tmp_path / "native")
        path = tmp_path / "native" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"labels": [f"name {i}" for i in range(10)]}))
        assert load(tmp_path / "native").meta.labels[2] == "name 2"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"labels": ["cat"]}))
        with pytest.raises(CheckpointError, match="1 labels for a head of 10 classes; correct the labels in its JSON"):
            load(tmp_path / "native")

    def test_the_weights_file_alone_is_enough(self, model, tmp_path):
        save(model, tmp_path / "native")
        (tmp_path / "native" / "model.safetensors").rename(tmp_path / "moved.safetensors")
        assert largest_difference(load(tmp_path / "moved.safetensors"), "timm_vit") < TOLERANCE

    def test_a_resnet_comes_back(self, tmp_path):
        model = build(ResNetConfig(stages=(1, 1), width=32, num_classes=3, image_size=64)).eval()
        save(model, tmp_path / "native")
        again = load(tmp_path / "native")
        assert again.config == model.config
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"format": 99}, "format 99 is not known, this version reads up to 1; upgrade vitruvian"),
            ({"kind": "gan"}, "kind 'gan' is not one of vit, resnet"),
            ({"labels": "cat"}, "labels='cat' is not a list"),
            ({"architecture": 3}, "'architecture' is missing"),
            ({"architecture": {"widht": 3}}, "unknown setting 'widht'; did you mean width"),
            ({"architecture": {"width": "wide"}}, "width='wide' is not an integer"),
            ({"architecture": {"width": True}}, "width=True is not an integer"),
            ({"architecture": {"depth": 10**9}}, "depth=1000000000 is not between 1 and 1024"),
            ({"architecture": {"image_size": 10**12}}, "has a side above 16384"),
            ({"architecture": {"numerics": None}}, "numerics=None is not a table of settings"),
            ({"kind": ["vit"]}, r"kind \['vit'\] is not one of"),
            ({"preprocess": {"mean": "gray"}}, "mean"),
        ],
    )
    def test_a_description_that_cannot_be_is_one_line(self, changes, text, model, tmp_path):
        save(model, tmp_path / "native")
        path = tmp_path / "native" / "config.json"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            config[key] = config[key] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=text) as caught:
            load(tmp_path / "native")
        assert type(caught.value) is CheckpointError

    def test_names_that_do_not_fit_are_listed(self, model, tmp_path):
        save(model, tmp_path / "native")
        path = tmp_path / "native" / "model.safetensors"
        tensors = load_file(path)
        del tensors["norm.bias"]
        save_file(tensors | {"surprise": torch.ones(1)}, path)
        with pytest.raises(CheckpointError, match=r"1 not found: norm.bias; 1 not used: surprise"):
            load(tmp_path / "native")


class TestOtherReaders:
    def test_google_names_are_those_of_the_papers_release(self, model, tmp_path):
        save(model, tmp_path / "w.npz", "google")
        with np.load(tmp_path / "w.npz", allow_pickle=False) as archive:
            shapes = {name: archive[name].shape for name in archive.files}
        assert shapes["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"] == (32, 4, 8)
        assert shapes["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/out/kernel"] == (4, 8, 32)
        assert shapes["Transformer/posembed_input/pos_embedding"] == (1, 17, 32)
        assert shapes["embedding/kernel"] == (8, 8, 3, 32)

    @pytest.mark.parametrize(("family", "name"), [("timm", "timm_vit"), ("torchvision", "torchvision_vit")])
    def test_names_and_numbers_are_those_the_family_writes(self, family, name, tmp_path):
        save(load(path_of(name), num_heads=4), tmp_path / DESTINATIONS[family], family)
        read = load_file if family == "timm" else (lambda path: torch.load(path, weights_only=True))
        ours, theirs = read(tmp_path / DESTINATIONS[family]), read(path_of(name))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    def test_a_module_with_the_same_names_takes_a_pth_without_a_word(self, tmp_path):
        save(load(path_of("torchvision_vit"), num_heads=4), tmp_path / "w.pth", "torchvision")
        module = torch.nn.Module()
        module.conv_proj = torch.nn.Conv2d(3, 32, 8)
        state = torch.load(tmp_path / "w.pth", weights_only=True)
        assert module.load_state_dict(state, strict=False).missing_keys == []

    def test_safetensors_headers_keep_what_transformers_asks_for(self, model, tmp_path):
        save(model, tmp_path / "w.safetensors", "timm")
        with safe_open(tmp_path / "w.safetensors", "pt") as file:
            assert file.metadata()["format"] == "pt"

    @pytest.mark.parametrize("family", DESTINATIONS)
    def test_labels_that_do_not_fit_the_head_are_refused(self, family, model, tmp_path):
        model.meta = model.meta.replace(labels=("cat", "dog"))
        with pytest.raises(ConversionError, match=f"the model has {model.config.num_classes} classes but 2 labels"):
            save(model, tmp_path / DESTINATIONS[family], family)
        assert not list(tmp_path.iterdir())

    def test_labels_too_many_for_an_npz_are_left_out(self, tmp_path):
        model = build(SHAPE.replace(num_classes=9000)).eval()
        model.meta = model.meta.replace(labels=tuple(f"a rather long name, number {i}" for i in range(9000)))
        notes = saving.write(model, tmp_path / "w.npz", "google")
        assert "the 9000 labels do not fit into an npz file and were left out" in notes
        assert load(tmp_path / "w.npz").meta.labels is None

    def test_a_description_that_no_longer_fits_its_tensors_is_refused_or_ignored_on_request(self, model, tmp_path):
        save(model, tmp_path / "w.pth", "timm")
        state = torch.load(tmp_path / "w.pth", weights_only=True)
        state["head.weight"], state["head.bias"] = torch.zeros(3, 32), torch.zeros(3)
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(
            CheckpointError, match="classes is 10, the tensors have 3; pass family= to ignore the description"
        ):
            load(tmp_path / "w.pth")
        assert load(tmp_path / "w.pth", family="timm", num_heads=4).config.num_classes == 3

    def test_a_position_that_another_tool_gave_the_class_token_is_added_to_it(self, tmp_path):
        save(load(path_of("bigvision_vit_tok")), tmp_path / "w.pth", "torchvision")
        state = torch.load(tmp_path / "w.pth", weights_only=True)
        assert not state["encoder.pos_embedding"][:, 0].any()
        state["encoder.pos_embedding"][:, 0] = 0.25
        state["class_token"] -= 0.25
        torch.save(state, tmp_path / "w.pth")
        assert largest_difference(load(tmp_path / "w.pth"), "bigvision_vit_tok") < TOLERANCE

    def test_fixed_positions_that_were_changed_are_not_believed(self, tmp_path):
        save(load(path_of("bigvision_vit_gap_sincos")), tmp_path / "w.pth", "timm")
        state = torch.load(tmp_path / "w.pth", weights_only=True)
        state["pos_embed"] += 1
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(CheckpointError, match="pos_embed='sincos', but its position array has other values"):
            load(tmp_path / "w.pth")


PLAIN = ["google", "timm", "torchvision", "huggingface"]


class TestExpression:
    @pytest.mark.parametrize("family", PLAIN)
    @pytest.mark.parametrize("positions", ["learned_2d", "sincos", "none"])
    def test_positions_of_every_sort_are_written_out_and_come_back(self, family, positions, tmp_path):
        model = build(SHAPE.replace(pos_embed=positions), seed=1).eval()
        model.head.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        save(model, tmp_path / DESTINATIONS[family], family)
        for options in ({}, {"family": family, "num_heads": 4}):
            again = load(tmp_path / DESTINATIONS[family], **options)
            pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
            assert torch.allclose(again.eval()(pixels), model(pixels), atol=1e-3 if options else TOLERANCE)
            assert again.config.pos_embed == ("learned" if options else positions)

    @pytest.mark.parametrize(
        ("changes", "family", "reason"),
        [
            ({"pos_embed": "relative"}, "google", "google has no relative positions"),
            ({"pos_embed": "relative"}, "timm", "timm has no relative positions"),
            ({"pos_embed": "relative"}, "torchvision", "torchvision has no relative positions"),
            ({"pos_embed": "relative"}, "huggingface", "huggingface has no relative positions"),
            ({"layer_scale": True}, "google", "google has no LayerScale"),
            ({"layer_scale": True}, "torchvision", "torchvision has no LayerScale"),
            ({"layer_scale": True}, "huggingface", "reads class token and mean concatenated"),
            ({"distillation": True}, "google", "google has no distillation token"),
            ({"distillation": True}, "torchvision", "torchvision has no distillation token"),
            ({"distillation": True, "layer_scale": True}, "huggingface", "no LayerScale beside a distillation token"),
            ({"distillation": True, "reg_tokens": 1}, "timm", "no register tokens beside a distillation token"),
            ({"reg_tokens": 2}, "google", "google has no register tokens"),
            ({"reg_tokens": 2}, "torchvision", "torchvision has no register tokens"),
            ({"reg_tokens": 2}, "huggingface", "register tokens only with LayerScale"),
            ({"pool": "map"}, "google", r"google has no attention pooling \(MAP\)"),
            ({"pool": "map"}, "torchvision", r"torchvision has no attention pooling \(MAP\)"),
            ({"pool": "map"}, "huggingface", r"SigLIP of transformers has num_classes=0, this model 3"),
            ({"pool": "map", "norm_after_pool": True}, "timm", "normalizes the tokens before attention pooling"),
            ({"pool": "mean"}, "google", "no class token with mean pooling"),
            ({"pool": "mean"}, "torchvision", "always pools the class token"),
            ({"pool": "mean"}, "huggingface", "no mean pooling with a class token"),
            ({"pool": "mean", "norm_after_pool": True}, "google", "normalizes every token before the mean"),
            ({"pool": "token_mean"}, "timm", "no head on class token and mean concatenated"),
            ({"pool": "token_mean"}, "google", "no head on class token and mean concatenated"),
            ({"pool": "token_mean"}, "huggingface", "only with LayerScale"),
            ({"mlp": "swiglu"}, "google", r"no gated MLP \(SwiGLU\)"),
            ({"mlp": "swiglu"}, "torchvision", r"no gated MLP \(SwiGLU\)"),
            ({"mlp": "swiglu"}, "huggingface", "gated MLPs .* only with LayerScale"),
            ({"mlp_dim": 60, "layer_scale": True, "num_classes": 0}, "huggingface", "no MLP of 60 at a width of 32"),
            ({"representation_size": 8}, "timm", "timm has no pre-logits layer before the head"),
            ({"representation_size": 8}, "huggingface", "huggingface has no pre-logits layer before the head"),
            ({"qkv_bias": False}, "google", "query, key and value always have a bias"),
            ({"qkv_bias": False}, "torchvision", "query, key and value always have a bias"),
            ({"num_classes": 0}, "torchvision", "torchvision's model always has a head"),
            ({"in_channels": 1}, "torchvision", "takes 3 channels, this one 1"),
            ({"image_size": (32, 64)}, "torchvision", "square images only"),
            ({"stem": StemConfig(stages=(), width=32)}, "torchvision", "no hybrids with a ResNet stem"),
            ({"stem": StemConfig(stages=(), width=32)}, "huggingface", "no hybrids with a ResNet stem"),
            ({"distillation": True, "norm_after_pool": True}, "timm", "no norm after the pooling of two tokens"),
        ],
    )
    def test_what_a_family_cannot_express_is_refused_with_the_reason(self, changes, family, reason, tmp_path):
        model = build(SHAPE.replace(**changes))
        with pytest.raises(ConversionError, match=f"{family} cannot express this model: .*{reason}"):
            save(model, tmp_path / DESTINATIONS[family], family)
        assert not list(tmp_path.iterdir())
        save(model, tmp_path / "native")
        assert load(tmp_path / "native").config == model.config

    @pytest.mark.parametrize("family", ["torchvision", "huggingface"])
    def test_a_resnet_is_refused_by_families_of_transformers(self, family, tmp_path):
        model = build(ResNetConfig(stages=(1,), width=32, num_classes=2))
        with pytest.raises(ConversionError, match=f"{family} has Vision Transformers only, this is a ResNet"):
            save(model, tmp_path / DESTINATIONS[family], family)

    @pytest.mark.parametrize(
        ("family", "name", "text"),
        [
            ("google", "w.safetensors", "google weights are a file with suffix .npz"),
            ("timm", "w.npz", "timm weights are a file with suffix .safetensors or .pth or .pt or .bin, or a folder"),
            ("native", "w.safetensors", "native weights are a folder"),
            ("huggingface", "w.npz", "huggingface weights are a folder"),
        ],
    )
    def test_a_name_that_another_family_would_have_is_refused(self, family, name, text, model, tmp_path):
        with pytest.raises(ConversionError, match=text):
            save(model, tmp_path / name, family)

    def test_an_unknown_family_is_answered_with_the_nearest(self, model, tmp_path):
        with pytest.raises(UnknownNameError, match="unknown family to write 'gogle'; did you mean google"):
            save(model, tmp_path / "w.npz", "gogle")

    def test_half_precision_is_written_as_float32(self, model, tmp_path):
        save(model.half(), tmp_path / "native")
        assert load_file(tmp_path / "native" / "model.safetensors")["norm.weight"].dtype == torch.float32
