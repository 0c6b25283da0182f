"""`create_model` takes the names and arguments of timm and torchvision, and its models have timm's interface."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch

import vitruvian as vt
from vitruvian.config import NUMERICS
from vitruvian.errors import ConfigError
from vitruvian.weights import create

SMALL = {"depth": 2, "image_size": 32, "num_classes": 3}


def tiny(**changes):
    model = vt.create_model("ViT-Ti/16", **SMALL | changes)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_arguments_heads_intermediates_and_feature_maps_are_those_of_timm():
    command = [sys.executable, str(Path(__file__).with_name("timm_peer.py"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    *differences, count = done.stdout.splitlines()
    assert differences == []
    assert int(count.split()[0]) > 300


def test_a_name_of_another_library_has_its_numerics():
    assert vt.create_model("vit_tiny_patch16_224", **SMALL).config.numerics == NUMERICS["timm"]
    assert create.architecture("vit_b_16").numerics == NUMERICS["torchvision"]
    assert create.architecture("vit_base_patch16_224.augreg_in21k").numerics == NUMERICS["timm"]
    assert create.architecture("ViT-B/16") == vt.ViTConfig()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"in_chans": 1, "in_channels": 3}, "in_chans=1 contradicts in_channels=3; give one"),
        ({"img_size": 32, "image_size": 64}, "img_size=32 contradicts image_size=64; give one"),
        (
            {"drop_rate": 0.1},
            "drop_rate=0.1 is not supported: there is no dropout before the head alone; dropout= acts",
        ),
        ({"checkpoint_path": "a.pth"}, "checkpoint_path='a.pth' is not supported: load the file with vitruvian.load"),
        ({"global_pool": "avgmax"}, "global_pool='avgmax' is not one of token, avg, map"),
        ({"mlp_ratio": 2}, "unknown setting of ViT-Ti/16 'mlp_ratio'"),
        ({"num_clases": 2}, "unknown setting of ViT-Ti/16 'num_clases'; did you mean num_classes"),
        ({"out_indices": 2}, "out_indices= needs features_only=True"),
        ({"features_only": True, "out_indices": []}, "out_indices= is empty; give at least one block"),
        ({"features_only": True, "out_indices": [2]}, "block 2 does not exist: the model has blocks 0 to 1"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(arguments, text):
    with pytest.raises(ConfigError) as error:
        vt.create_model("ViT-Ti/16", depth=2, **arguments)
    assert str(error.value).startswith(text)


def test_equal_values_under_both_names_and_none_are_accepted():
    model = vt.create_model("ViT-Ti/16", depth=1, in_chans=1, in_channels=1, img_size=32, num_classes=None, drop_rate=0)
    assert (model.config.in_channels, model.config.image_size, model.num_classes) == (1, (32, 32), 1000)


def test_resnets_refuse_what_they_do_not_have():
    shape = {"stages": (1,), "width": 32, "image_size": 32}
    with pytest.raises(ConfigError, match="features_only=True is for Vision Transformers; vitruvian"):
        vt.create_model("BiT-R50x1", features_only=True, **shape)
    model = vt.create_model("BiT-R50x1", **shape)
    with pytest.raises(ConfigError, match="gradient checkpointing is for Vision Transformers"):
        model.set_grad_checkpointing()
    with pytest.raises(ConfigError, match="global_pool is for Vision Transformers"):
        model.reset_classifier(2, "avg")
    model.reset_classifier(2)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, model.num_classes) == (1, 2)
    assert model.num_features == model.get_classifier().in_features


def test_models_of_the_builders_name_the_way_of_torchvision():
    model = vt.vit_b_16(patch_size=32, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=16)
    with pytest.raises(ConfigError, match=r"torchvision's models have no reset_classifier; set model\.heads\.head"):
        model.reset_classifier(2)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "BiT-R50x1"])
def test_uint8_pixels_get_a_sentence_that_says_what_to_do(name):
    shape = {"depth": 1} if name == "ViT-Ti/16" else {"stages": (1,), "width": 32}
    model = vt.create_model(name, image_size=32, **shape)
    with pytest.raises(ConfigError) as error:
        model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    assert str(error.value) == (
        "the pixels are uint8, expected floats, normalized as model.meta.preprocess describes; "
        "vitruvian.transform(model)(image) returns them, and vitruvian.Classifier(model) takes images of any kind"
    )


def test_a_model_of_one_channel_predicts_gray_and_color_images():
    model = tiny(in_chans=1)
    gray = np.random.default_rng(0).integers(0, 256, (40, 50), np.uint8)
    assert vt.transform(model)(gray).shape == (1, 32, 32)
    alone, color = vt.Classifier(model).predict([gray, np.stack([gray] * 3, axis=-1)], top=1)
    assert alone == color


def test_a_new_head_leaves_nothing_of_the_old_one():
    model = tiny(representation_size=8).eval()
    model.meta = model.meta.replace(labels=("a", "b", "c"), temperature=2.0)
    model.reset_classifier(4)
    assert (model(torch.rand(2, 3, 32, 32)) == 0).all()
    assert model.meta.labels is None
    assert model.meta.temperature == 1
    assert model.config == vt.create_model("ViT-Ti/16", **SMALL | {"num_classes": 4}).config
    assert model.num_features == model.embed_dim == 192


@pytest.mark.slow
def test_pretrained_weights_are_adapted(tmp_path, monkeypatch):
    saved = tiny().eval()
    vt.save(saved, tmp_path / "saved")
    asked = []

    def load(source, **options):
        asked.append(source)
        return vt.load(tmp_path / "saved", **options)

    monkeypatch.setattr(create, "load", load)
    model = vt.create_model("vit_tiny_patch16_224", pretrained=True, in_chans=1, drop_path_rate=0.1, num_classes=3)
    assert asked == ["vit_tiny_patch16_224.augreg_in21k_ft_in1k"]
    assert model.training
    assert model.blocks[1].drop_path == 0.1
    gray = torch.rand(2, 1, 32, 32)  # the same mean and deviation for all colors: gray is three equal colors
    torch.testing.assert_close(model.eval()(gray), saved(gray.expand(-1, 3, -1, -1)), rtol=0, atol=1e-4)
    assert vt.transform(model)(np.zeros((9, 9), np.uint8)).shape == (1, 32, 32)
    with pytest.raises(ConfigError, match="width= cannot be changed with pretrained=True: the weights do not fit '"):
        vt.create_model("vit_tiny_patch16_224", pretrained=True, width=384)


@pytest.mark.slow
def test_recomputed_activations_give_the_same_gradients_also_of_feature_maps():
    pixels = torch.rand(2, 3, 32, 32)
    for options in ({}, {"features_only": True}):
        gradients = []
        for enabled in (False, True):
            model = vt.create_model("ViT-Ti/16", depth=3, image_size=32, out_indices=None, **options)
            model.set_grad_checkpointing(enabled)
            outputs = model(pixels)
            sum((output - 1).square().sum() for output in outputs).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*gradients))


LEFT_GROUPS = []
"""Process groups that were left: the destructor of a gloo group joins threads that may be waiting for the GIL."""


def test_recomputed_activations_work_in_ddp():
    """One process: torch runs DDP's hooks on the gradients all the same."""
    pixels, labels = torch.rand(2, 3, 32, 32), torch.tensor([0, 2])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    LEFT_GROUPS.append(torch.distributed.group.WORLD)
    try:
        alone, wrapped = tiny(dropout=0.1), tiny(dropout=0.1)
        wrapped.set_grad_checkpointing()
        for model in (alone, torch.nn.parallel.DistributedDataParallel(wrapped)):
            torch.manual_seed(0)
            model(pixels, labels=labels)["loss"].backward()
    finally:
        torch.distributed.destroy_process_group()
    for one, other in zip(alone.parameters(), wrapped.parameters()):
        assert torch.equal(one.grad, other.grad)


def test_names_are_listed_by_pattern():
    published = vt.list_models("*patch16*", pretrained=True)
    assert "vit_base_patch16_224.augreg_in21k" in published
    assert all("patch16" in name for name in published)
    assert published == sorted(published)
    assert "ViT-B/16" in vt.list_models()
    assert vt.list_models("vit-b/*", exclude_filters="*/32") == ["ViT-B/14", "ViT-B/16", "ViT-B/8", "ViT-b/16"]
    assert vt.list_models("nothing*") == []
    for name in vt.list_models():
        create.architecture(name)


def test_labels_give_a_loss_and_the_config_stays_frozen():
    model = tiny()
    pixels, labels = torch.rand(2, 3, 32, 32), torch.tensor([0, 2])
    outputs = model(pixels, labels)
    torch.testing.assert_close(outputs["logits"], model(pixels))
    torch.testing.assert_close(outputs["loss"], torch.nn.functional.cross_entropy(outputs["logits"], labels))
    config = model.config
    assert vt.ViTConfig.from_json(json.loads(config.to_json_string())) == config
    config.use_cache = False
    assert not hasattr(config, "use_cache")
    with pytest.raises(FrozenInstanceError, match=r"make a copy with config.replace\(depth=...\)"):
        config.depth = 3


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_of_transformers_trains_and_saves_the_model(tmp_path, checkpointing):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model, generator = tiny(), torch.Generator().manual_seed(0)
    data = [{"pixels": torch.rand(3, 32, 32, generator=generator), "labels": i % 3} for i in range(8)]
    before = model.head.weight.clone()
    fields = TrainingArguments.__dataclass_fields__  # the option has another name since transformers 5.23
    option = "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True,
        report_to=["tensorboard"] * checkpointing, save_strategy="no", disable_tqdm=True,
        **{option: checkpointing},
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    assert trainer.train().global_step == 2
    assert not torch.equal(model.head.weight, before)
    assert trainer.predict(data).predictions.shape == (8, 3)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(tmp_path / "saved"))
    again = vt.load(tmp_path / "saved" / "model.safetensors", config=model.config)
    pixels = torch.stack([sample["pixels"] for sample in data])
    torch.testing.assert_close(again(pixels), model.eval()(pixels))


@pytest.mark.parametrize("word", ["activation", "gradient"])
def test_checkpointing_is_enabled_by_the_names_of_all_versions_of_transformers(word):
    model = tiny()
    enable = getattr(model, f"{word}_checkpointing_enable")
    enable(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}}, every_n_layers=1, offload=False)
    assert model.grad_checkpointing
    with pytest.raises(ConfigError, match="every_n_layers=2 and offload=False are not supported: every block"):
        enable(every_n_layers=2)
