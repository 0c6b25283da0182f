"""Hugging Face folders: their JSON files, and parity with transformers itself, both ways."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import TOLERANCE, largest_difference, path_of
from safetensors.torch import load_file, save_file

from vitruvian import create_model
from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitruvian.data.preprocess import preprocess_image
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.weights.families.huggingface import read_preprocessor, write_preprocessor
from vitruvian.weights.load import load
from vitruvian.weights.save import save

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(path_of("huggingface_vit"), tmp_path / "hf")


def edit(path, **changes):
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}))


class TestConfig:
    @pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh"])
    def test_activation_and_eps_are_those_of_the_file(self, activation, folder):
        edit(folder / "config.json", hidden_act=activation, layer_norm_eps=1e-5)
        assert load(folder).config.numerics.gelu == "tanh"
        assert load(folder).config.numerics.norm_eps == 1e-5

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"hidden_act": ["gelu"]}, "hidden_act"),
            ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of gelu,"),
            ({"layer_norm_eps": "tiny"}, "layer_norm_eps='tiny' is not a number"),
            ({"num_attention_heads": -1}, "num_attention_heads=-1 is not a positive integer"),
            ({"num_hidden_layers": 10**9}, "2 of 1000000000 blocks"),
            ({"image_size": [1, 2, 3]}, r"image_size=\[1, 2, 3\] is not a size"),
            ({"image_size": 64}, "a grid of 8x8 does not fit the 16 positions"),
            ({"model_type": "swin"}, "model_type 'swin'"),
            ({"id2label": {"a": "cat"}}, "id2label has a key that is not a number"),
            ({"id2label": {"0": "cat", "2": "dog"}}, "without gaps"),
            ({"id2label": {"0": "cat"}}, "the settings say num_classes=1, the arrays have 10"),
        ],
    )
    def test_settings_that_cannot_be_are_refused(self, changes, text, folder):
        edit(folder / "config.json", **changes)
        with pytest.raises(CheckpointError, match=text):
            load(folder)

    def test_labels_in_order_of_their_numbers(self, folder):
        edit(folder / "config.json", id2label={str(i): f"name {i}" for i in reversed(range(10))})
        assert load(folder).meta.labels == tuple(f"name {i}" for i in range(10))

    def test_numbered_labels_are_no_labels(self, folder):
        edit(folder / "config.json", id2label={str(i): f"LABEL_{i}" for i in range(10)})
        assert load(folder).meta.labels is None

    def test_a_folder_without_settings_has_the_familys_defaults(self, folder):
        (folder / "config.json").unlink()
        (folder / "preprocessor_config.json").unlink()
        model = load(folder, num_heads=4)
        assert largest_difference(model, "huggingface_vit") < TOLERANCE
        with pytest.raises(ConfigError, match="the preprocessing of this model is unknown"):
            preprocess_image(np.zeros((40, 40, 3), np.uint8), model.meta.preprocess)
        save(model, folder.parent / "again", "huggingface")
        assert not (folder.parent / "again" / "preprocessor_config.json").exists()
        stated = Preprocess(image_size=32, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        assert load(folder, num_heads=4, preprocess=stated).meta.preprocess == stated

    def test_a_dinov2_folder_without_its_view_has_the_usual_one_and_says_so(self, tmp_path, caplog):
        shape = {"depth": 1, "width": 16, "mlp_dim": 64, "num_heads": 2, "patch_size": 8, "image_size": 32}
        save(create_model("DINOv2-S/14", **shape), tmp_path / "hf", family="huggingface")
        (tmp_path / "hf" / "preprocessor_config.json").unlink()
        model = load(tmp_path / "hf")
        assert model.meta.preprocess.mean == IMAGENET_MEAN
        assert model.meta.origin.endswith("assumed: preprocess=(256 -> 224, bicubic, mean 0.485, 0.456, 0.406)")
        assert caplog.text.count("assuming preprocess=(256 -> 224") == 1

    def test_numbers_that_settings_leave_out_are_those_of_transformers(self, folder):
        edit(folder / "config.json", num_attention_heads=None)
        with pytest.raises(CheckpointError, match="width=32 is not divisible by num_heads=12"):
            load(folder)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"num_hidden_layers": 1}, "the settings say 1 layers, the arrays have 2"),
            ({"hidden_size": 64}, "the settings say width=64, the arrays have 32"),
            ({"intermediate_size": 3}, "the settings say mlp_dim=3"),
            ({"id2label": ["cat", "dog"]}, "id2label is a list, not an object"),
        ],
    )
    def test_settings_that_the_arrays_contradict_are_refused(self, changes, text, folder):
        edit(folder / "config.json", **changes)
        with pytest.raises(CheckpointError, match=text):
            load(folder)

    def test_names_without_prefix_and_a_pooler_are_read(self, folder):
        tensors = load_file(folder / "model.safetensors")
        bare = {name.removeprefix("vit."): tensor for name, tensor in tensors.items() if "classifier" not in name}
        save_file(bare | {"pooler.dense.weight": torch.eye(32), "pooler.dense.bias": torch.zeros(32)}, folder / "m")
        (folder / "m").rename(folder / "model.safetensors")
        model = load(folder)
        assert model.config.num_classes == 0
        assert "pooler.dense.weight (pooler, which the classifier bypasses)" in model.meta.origin

    def test_names_as_they_are_in_memory_are_read(self, folder):
        renames = {
            ".encoder.layer.": ".layers.",
            ".attention.attention.query.": ".attention.q_proj.",
            ".attention.attention.key.": ".attention.k_proj.",
            ".attention.attention.value.": ".attention.v_proj.",
            ".attention.output.dense.": ".attention.o_proj.",
            ".intermediate.dense.": ".mlp.fc1.",
            ".output.dense.": ".mlp.fc2.",
        }
        tensors = load_file(folder / "model.safetensors")
        for old, new in renames.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "m")
        (folder / "m").rename(folder / "model.safetensors")
        assert largest_difference(load(folder), "huggingface_vit") < TOLERANCE


class TestPreprocessor:
    @pytest.mark.parametrize(
        ("settings", "view"),
        [
            ({}, Preprocess(image_size=(32, 32))),
            ({"size": 48}, Preprocess(image_size=(48, 48))),
            ({"size": {"height": 48, "width": 64}, "resample": 3},
             Preprocess(image_size=(48, 64), interpolation="bicubic")),
            ({"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True},
             Preprocess(image_size=(32, 32), fit="crop", scaled_size=(36, 36), floor_crop=True)),
            ({"size": {"shortest_edge": 36}},
             Preprocess(image_size=(36, 36), fit="crop", scaled_size=(36, 36), floor_crop=True)),
            ({"size": 36, "crop_size": 32, "do_center_crop": True},
             Preprocess(image_size=(32, 32), fit="crop", scaled_size=(36, 36), floor_crop=True)),
            ({"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)},
             Preprocess(image_size=(32, 32), mean=IMAGENET_MEAN, std=IMAGENET_STD)),
            ({"do_normalize": False}, Preprocess(image_size=(32, 32), mean=(0.0,) * 3, std=(1.0,) * 3)),
            ({"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
             Preprocess(image_size=(32, 32))),
        ],
    )  # fmt: skip
    def test_each_form_of_the_file_means_its_view(self, settings, view):
        assert read_preprocessor(settings, (32, 32)) == view

    @pytest.mark.parametrize(
        "settings", [{"resample": 9}, {"rescale_factor": 0}, {"image_mean": 1}, {"size": {"longest_edge": 3}}]
    )
    def test_a_file_that_cannot_be_read_is_one_line(self, settings):
        with pytest.raises(CheckpointError, match=r"preprocessor_config.json|size"):
            read_preprocessor(settings, (32, 32))

    def test_images_that_are_not_to_be_resized_are_refused(self):
        with pytest.raises(CheckpointError, match=r"do_resize is false, .* set it to true, and state the size"):
            read_preprocessor({"do_resize": False, "size": {"height": 32, "width": 32}}, (32, 32))

    def test_a_written_view_means_the_same_when_read(self):
        views = [
            Preprocess(image_size=(32, 48), interpolation="lanczos"),
            Preprocess(image_size=(224, 224), fit="crop", scaled_size=(256, 256), mean=IMAGENET_MEAN, std=IMAGENET_STD),
        ]
        for view in views:
            assert read_preprocessor(write_preprocessor(view), (1, 1)).replace(floor_crop=False) == view


class TestCarriedDescription:
    def test_it_counts_while_the_files_are_untouched(self, tmp_path):
        save(load(path_of("bigvision_vit_tok"), head="new"), tmp_path / "hf", "huggingface")
        assert load(tmp_path / "hf").meta.preprocess.interpolation == "area"
        assert not load(tmp_path / "hf").config.cls_pos_embed

    def test_an_edited_file_takes_its_place(self, tmp_path):
        save(load(path_of("google_vit_nohidden")), tmp_path / "hf", "huggingface")
        edit(tmp_path / "hf" / "config.json", id2label={str(i): f"name {i}" for i in range(10)})
        model = load(tmp_path / "hf")
        assert model.meta.labels[9] == "name 9"
        assert model.config.numerics.gelu == "tanh"
        assert model.config.numerics.position_resize == "bicubic"

    @pytest.mark.slow
    def test_weights_that_transformers_wrote_again_have_lost_it(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        save(load(path_of("google_vit_nohidden")), tmp_path / "ours", "huggingface")
        peer = transformers.ViTForImageClassification.from_pretrained(tmp_path / "ours")
        peer.save_pretrained(tmp_path / "theirs")
        model = load(tmp_path / "theirs")
        assert model.config.numerics.position_resize == "bicubic"
        assert model.config.numerics.gelu == "tanh"


PEERS = {
    "ViTForImageClassification": ("ViTConfig", {"intermediate_size": 64, "num_labels": 5}),
    "ViTModel": ("ViTConfig", {"intermediate_size": 64, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "DeiTForImageClassification": ("DeiTConfig", {"intermediate_size": 64, "num_labels": 5}),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", {"intermediate_size": 64, "num_labels": 5}),
    "Dinov2ForImageClassification": ("Dinov2Config", {"mlp_ratio": 2, "num_labels": 5}),
    "Dinov2Model": ("Dinov2Config", {"mlp_ratio": 2, "use_swiglu_ffn": True}),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", {"mlp_ratio": 2, "num_labels": 5}),
}


@pytest.mark.parametrize("architecture", PEERS)
def test_answers_are_those_of_transformers_both_ways_and_at_other_sizes(architecture, tmp_path):
    transformers = pytest.importorskip("transformers")
    config, changes = PEERS[architecture]
    torch.manual_seed(0)
    peer = getattr(transformers, architecture)(getattr(transformers, config)(**SHAPE, **changes)).eval()
    for parameter in peer.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape)
    peer.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    for size in ((32, 32), (48, 48), (32, 64)):
        pixels = torch.randn(2, 3, *size)
        assert torch.allclose(model(pixels), answer(peer, pixels), atol=TOLERANCE)
    save(model, tmp_path / "ours", "huggingface")
    again = getattr(transformers, architecture).from_pretrained(tmp_path / "ours").eval()
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.allclose(answer(again, pixels), answer(peer, pixels), atol=TOLERANCE)


@torch.no_grad()
def answer(peer, pixels):
    options = {} if "Dinov2" in type(peer).__name__ else {"interpolate_pos_encoding": True}
    output = peer(pixels, **options)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state[:, 0]
