"""Folders as on timm's hub: the architecture that a model is written as, and what its config.json states.

That timm's own code loads them and answers with the same numbers, test_architectures.py shows.
"""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import TOLERANCE, path_of
from safetensors import safe_open
from safetensors.torch import load_file

from vitruvian.catalog import VARIANTS
from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, Preprocess, ResNetConfig, RopeConfig, StemConfig
from vitruvian.errors import CheckpointError, ConversionError
from vitruvian.model.build import build
from vitruvian.weights.families.timm_config import TimmChoice, architectures, choose, crop_pct, ratio
from vitruvian.weights.load import load
from vitruvian.weights.save import convert, save

TIMM = VARIANTS["DeiT-B/16"]
SMALL = {"image_size": 32, "patch_size": 8, "depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 4, "num_classes": 3}


def chosen(config, name=""):
    choice = choose(config, name)
    assert isinstance(choice, TimmChoice), choice
    return choice.architecture.name, choice.arguments


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def randomized(config):
    model = build(config, seed=1).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.slow
def test_every_architecture_is_itself_without_arguments():
    for architecture in architectures():
        assert chosen(architecture.config, architecture.name) == (architecture.name, {}), architecture.name


@pytest.mark.parametrize(
    ("config", "name", "arguments"),
    [
        (TIMM, "vit_base_patch16_224", {}),
        (TIMM.replace(num_classes=37, image_size=384), "vit_base_patch16_384", {"num_classes": 37}),
        (TIMM.replace(image_size=(224, 320)), "vit_base_patch16_224", {"img_size": [224, 320]}),
        (VARIANTS["ViT-B/16"], "vit_base_patch16_224", {"act_layer": "gelu_tanh"}),
        (VARIANTS["DeiT-S/16-distilled"], "deit_small_distilled_patch16_224", {}),
        (VARIANTS["DeiT-III-B/16"], "deit3_base_patch16_224", {}),
        (VARIANTS["CLIP-B/16"], "vit_base_patch16_clip_quickgelu_224", {"num_classes": 0}),
        (VARIANTS["DINOv3-S/16"], "vit_small_patch16_lingbot", {"img_size": 224}),
        (VARIANTS["DINOv2-g/14"], "vit_giant_patch14_dinov2", {}),
        (VARIANTS["BEiT-L/16"], "beit_large_patch16_224", {}),
        (
            VARIANTS["SigLIP-B/16"].replace(image_size=60, patch_size=14, trim=True, num_classes=1000),
            "vit_base_patch32_siglip_256",
            {"img_size": 60, "patch_size": 14, "num_classes": 1000},
        ),
        (TIMM.replace(depth=2, mlp_dim=100), "vit_base_patch16_224", {"depth": 2, "mlp_ratio": 100 / 768}),
    ],
)
def test_a_model_is_the_architecture_with_the_fewest_arguments(config, name, arguments):
    assert chosen(config) == (name, arguments)


def test_an_architecture_that_a_model_came_from_stays_its_name():
    assert chosen(TIMM, "deit_base_patch16_224") == ("deit_base_patch16_224", {})
    assert chosen(TIMM, "beit_base_patch16_224")[0] == "vit_base_patch16_224"


KINDS = {
    "plain": {},
    "mean": {"pool": "mean", "norm_after_pool": True},
    "map": {"pool": "map", "cls_token": False},
    "registers": {"reg_tokens": 2},
    "teacher": {"distillation": True},
    "relative_bias": {"pos_embed": "relative_bias", "pool": "mean", "norm_after_pool": True, "layer_scale": True},
    "rope": {
        "pos_embed": "none", "rope": RopeConfig(kind="normalized", temperature=100.0, half=True), "layer_scale": True,
        "qkv_bias": False, "numerics": TIMM.numerics.replace(norm_eps=1e-5),
    },
    "qk_norm": {"qk_norm": True},
    "hybrid": {"stem": StemConfig(stages=(3, 4, 9), style="timm"), "image_size": 64, "patch_size": 1},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_as_it_was_with_and_without_the_description_it_carries(kind, tmp_path):
    model = randomized(TIMM.replace(**SMALL | KINDS[kind]))
    save(model, tmp_path / "timm", "timm")
    assert sorted(path.name for path in (tmp_path / "timm").iterdir()) == ["config.json", "model.safetensors"]
    pixels = torch.randn(2, 3, *model.config.image_size, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"family": "timm"}):
        again = load(tmp_path / "timm", **options)
        assert again.meta.known_as == f"timm:{config_of(tmp_path / 'timm')['architecture']}" or not options
        torch.testing.assert_close(again(pixels), model(pixels), atol=TOLERANCE, rtol=TOLERANCE)


def test_config_json_states_classes_view_and_labels(tmp_path):
    model = randomized(TIMM.replace(**SMALL, in_channels=1))
    model.meta = model.meta.replace(labels=("a", "b", "c"))
    model.meta = model.meta.replace(
        preprocess=Preprocess(
            image_size=(32, 32), fit="crop", scaled_size=(36, 36), interpolation="bicubic", mean=(0.4,), std=(0.3,)
        )
    )
    save(model, tmp_path / "timm", "timm")
    found = config_of(tmp_path / "timm")
    assert (found["num_classes"], found["label_names"], found["global_pool"]) == (3, ["a", "b", "c"], "token")
    cfg = found["pretrained_cfg"]
    assert (cfg["input_size"], cfg["interpolation"], cfg["crop_pct"], cfg["crop_mode"]) == (
        [1, 32, 32], "bicubic", 0.88, "center",
    )  # fmt: skip
    assert "first_conv" not in cfg  # timm would make one channel of three
    assert load(tmp_path / "timm", family="timm").meta.preprocess == model.meta.preprocess


def test_a_crop_that_is_not_known_is_refused(tmp_path):
    save(randomized(TIMM.replace(**SMALL)), tmp_path / "timm", "timm")
    edited = config_of(tmp_path / "timm")
    edited["pretrained_cfg"] |= {"crop_mode": "border"}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match="crop_mode 'border' is not 'center' or 'squash'"):
        load(tmp_path / "timm")


def test_an_edited_config_json_takes_the_place_of_the_description(tmp_path):
    save(randomized(TIMM.replace(**SMALL)), tmp_path / "timm", "timm")
    edited = config_of(tmp_path / "timm")
    edited["pretrained_cfg"] |= {"mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(edited))
    assert load(tmp_path / "timm").meta.preprocess.mean == IMAGENET_MEAN


def test_a_file_of_a_kind_that_needs_its_architecture_states_it(tmp_path):
    model = randomized(TIMM.replace(**SMALL | KINDS["rope"]))
    save(model, tmp_path / "w.safetensors", "timm")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        stated = json.loads(file.metadata()["config.json"])
    pixels = torch.randn(1, 3, 32, 32)
    assert stated["model_args"]["depth"] == 2
    assert "blocks.0.gamma_1" in load_file(tmp_path / "w.safetensors")
    torch.testing.assert_close(load(tmp_path / "w.safetensors")(pixels), model(pixels), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_conversion_is_certified_with_what_timms_code_would_answer(tmp_path):
    certificate = convert(path_of("google_vit_nohidden"), tmp_path / "timm", to="timm")
    assert certificate.largest_difference <= TOLERANCE
    assert certificate.reader_difference <= TOLERANCE  # act_layer states the GELU, which a file could not
    assert config_of(tmp_path / "timm")["model_args"]["act_layer"] == "gelu_tanh"
    assert (tmp_path / "timm" / "certificate.json").is_file()


def test_a_projection_is_a_head_without_bias_as_in_timms_own_clips(tmp_path):
    model = load(path_of("open_clip"))
    save(model, tmp_path / "timm", "timm")
    found = config_of(tmp_path / "timm")
    assert (found["num_classes"], found["num_features"]) == (16, 32)
    assert found["architecture"] == "vit_base_patch16_clip_quickgelu_224"
    again, stranger = load(tmp_path / "timm"), load(tmp_path / "timm", family="timm")
    assert again.config == model.config
    pixels = torch.randn(1, 3, 32, 32)
    for other in (again, stranger):
        torch.testing.assert_close(other(pixels), model(pixels), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_norm_that_no_architecture_has_is_noted(tmp_path):
    save(randomized(TIMM.replace(**SMALL, numerics=TIMM.numerics.replace(norm_eps=1e-3))), tmp_path / "native")
    certificate = convert(tmp_path / "native", tmp_path / "timm", to="timm")
    assert any("has norms with eps 1e-0" in note and "this model with 0.001" in note for note in certificate.notes)
    assert certificate.reader_difference > TOLERANCE


def test_a_bias_of_keys_that_are_turned_is_not_dropped():
    config = VARIANTS["DINOv3-B/16"]
    assert isinstance(choose(config, key_bias=True), list)
    assert isinstance(choose(config, key_bias=False), TimmChoice)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pos_embed": "relative"}, "pos_embed='learned', this model 'relative'"),
        ({"pool": "token_mean"}, "pool='token', this model 'token_mean'"),
        ({"representation_size": 8}, "representation_size=0, this model 8"),
        ({"unit_features": True}, "unit_features=False, this model True"),
    ],
)
def test_what_no_architecture_has_is_refused_with_the_nearest(changes, reason, tmp_path):
    with pytest.raises(ConversionError, match="timm has no architecture of this shape; nearest is ") as caught:
        save(randomized(TIMM.replace(**SMALL | changes)), tmp_path / "timm", "timm")
    assert reason in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_bit_resnet_has_a_folder_too(tmp_path):
    config = VARIANTS["BiT-R50x1"].replace(num_classes=3)
    model = build(config, seed=1).eval()
    save(model, tmp_path / "timm", "timm")
    assert config_of(tmp_path / "timm")["architecture"] == "resnetv2_50x1_bit"
    assert load(tmp_path / "timm").config == config
    with pytest.raises(ConversionError, match=r"timm has no resnetv2_\*_bit of this shape"):
        save(build(ResNetConfig(stages=(1,), width=32, num_classes=2)), tmp_path / "other", "timm")


@pytest.mark.parametrize("scaled", [224, 225, 235, 248, 249, 255, 256, 292])
def test_the_share_that_a_crop_keeps_gives_the_scaled_size_again(scaled):
    assert int(224 / crop_pct((224, 224), (scaled, scaled))) == scaled


def test_the_ratio_of_an_mlp_gives_its_width_again():
    assert all(int(width * ratio(hidden, width)) == hidden for width in (192, 770) for hidden in range(1, 4000))
