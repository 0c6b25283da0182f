"""Settings are validated when made and survive JSON."""

import json
from pathlib import Path

import numpy as np
import pytest

from vitruvian.config import Numerics, Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitruvian.data.augment import Augment
from vitruvian.data.pack import PackSettings
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.serve.batching import ServiceLimits
from vitruvian.training.recipe import Recipe


@pytest.mark.parametrize(
    "settings",
    [
        ViTConfig(image_size=(256, 192), patch_size=4, stem=StemConfig(stages=(2, 2)), numerics=Numerics(gelu="erf")),
        ViTConfig(image_size=64, patch_size=8, pool="map", cls_token=False, pos_embed="sincos"),
        ResNetConfig(stages=(1, 2), width=32),
        Preprocess(fit="crop", scaled_size=(256, 256), mean=(0.1,), std=(0.2,)),
    ],
)
def test_settings_come_back_from_json_as_they_were(settings):
    text = json.dumps(settings.to_json())
    assert type(settings).from_json(json.loads(text)) == settings


def test_an_unknown_setting_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown setting 'patchsize'; did you mean patch_size"):
        ViTConfig.from_json({"patchsize": 8})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"width": 100, "num_heads": 12}, "width=100 is not divisible by num_heads=12"),
        ({"image_size": 225}, "image of 225x225 pixels is not divisible by the patch of 16"),
        ({"image_size": (224, 8)}, "image of 224x8 pixels is not divisible"),
        ({"image_size": (1, 2, 3)}, "is not a positive number or"),
        ({"pool": "max"}, "pool='max' is not one of token, mean, map, token_mean"),
        ({"pos_embed": "sin"}, "pos_embed='sin' is not one of"),
        ({"cls_token": False}, "pool='token' needs cls_token=True"),
        ({"distillation": True, "pool": "mean"}, "distillation=True needs"),
        ({"dropout": 1.0}, "dropout=1.0 is not between 0.0 and 0.99"),
        ({"num_classes": -1}, "num_classes=-1 is not between 0 and 1000000"),
        ({"pos_embed": "sincos", "width": 6, "num_heads": 2}, "pos_embed='sincos' needs a width divisible by 4"),
        ({"width": 10**9}, "width=1000000000 is not between 1 and 65536"),
        ({"image_size": 10**5}, "image_size=100000 has a side above 16384"),
        (
            {"pool": "token_mean", "norm_after_pool": True},
            "norm_after_pool=True cannot be combined with pool='token_mean'",
        ),
        ({"stem": StemConfig(stages=(3, 4, 9)), "patch_size": 16}, "patch and stem stride together of 256"),
    ],
)
def test_impossible_models_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        ViTConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"std": (0.5, 0.0, 0.5)}, "must have equal lengths, and std must be positive"),
        ({"mean": (0.5,)}, "must have equal lengths, and std must be positive"),
        ({"scaled_size": 200, "fit": "crop"}, "does not cover image_size"),
        ({"interpolation": "cubic"}, "interpolation='cubic' is not one of"),
        ({"fit": "naflex"}, "needs patch_size= and max_num_patches="),
        ({"fit": "naflex", "patch_size": 16}, "needs patch_size= and max_num_patches="),
        ({"patch_size": 16}, "other fits have neither"),
    ],
)
def test_impossible_views_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        Preprocess(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schedule": "consine"}, "schedule='consine' is not one of .*cosine.*; did you mean 'cosine'\\?"),
        ({"precision": "bfloat"}, "precision='bfloat' is not one of .*; did you mean 'bfloat16'\\?"),
        ({"epochs": 1e308}, r"epochs=1e\+308 is not between 0.0 and 1000000.0"),
        ({"epochs": float("nan")}, "epochs=nan is not a finite number"),
        ({"seed": 10**30}, "seed=10{30} is too large"),
        ({"seed": -(10**5000)}, r"seed=-10\*\*5000 is too large"),
        ({"batch_size": 10**25}, "batch_size=10{25} is too large"),
        ({"workers": 10**6}, "workers=1000000 is not between 0 and 1024"),
        ({"workers": "2"}, "workers='2' is not an integer"),
        ({"lr": 10**400}, r"lr=10\*\*400 is too large"),
        ({"compile": 1}, "compile=1 is not true or false"),
        ({"betas": (0.9,)}, r"betas=\[0.9\] does not have 2 values"),
        ({"architecture": {"depth": 10**9}}, "architecture.depth=1000000000 is not between 1 and 1024"),
        (
            {"architecture": {"witdh": 8}},
            r"unknown setting 'architecture.witdh'; did you mean architecture.width or .*\?",
        ),
        (
            {"preprocess": {"fit": "crp"}},
            r"preprocess.fit='crp' is not one of squash, crop, naflex; did you mean 'crop'\?",
        ),
        ({"augment": {"hflip": 2}}, "augment.hflip=2.0 is not between 0.0 and 1.0"),
        ({"about": 3}, "about=3 is not a string"),
    ],
)
def test_a_recipe_is_checked_when_it_is_made(changes, text):
    with pytest.raises(ConfigError, match=f"^{text}$") as caught:
        Recipe(**({"epochs": 1} | changes))
    assert "\n" not in str(caught.value)


def test_numbers_of_other_libraries_become_pythons_own():
    made = ViTConfig(width=np.int64(768), dropout=np.float32(0.5), image_size=(np.int32(224), 224))
    assert type(made.width) is int
    assert type(made.dropout) is float
    assert type(made.image_size[0]) is int
    assert json.dumps(made.to_json())
    assert Recipe(epochs=3, weights=Path("a")).weights == "a"
    assert ViTConfig(num_heads=12.0).num_heads == 12


def test_every_number_of_every_setting_has_limits():
    for settings in (
        Numerics,
        StemConfig,
        ViTConfig,
        ResNetConfig,
        Preprocess,
        Augment,
        PackSettings,
        Recipe,
        ServiceLimits,
    ):
        needed = {"epochs": 1} if settings is Recipe else {}
        for name, value in settings(**needed).to_json().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                for wrong in (10**5000, -(10**30), float("nan"), float("inf"), 1e308):
                    with pytest.raises(ConfigError, match=f"^{name}="):
                        settings(**(needed | {name: wrong}))


def test_a_view_at_another_size_keeps_the_share_of_its_crop():
    view = Preprocess(image_size=224, fit="crop", scaled_size=256)
    assert view.with_image_size(448).scaled_size == (512, 512)
    assert view.with_image_size((224, 112)).scaled_size == (256, 128)
    assert Preprocess().with_image_size(384) == Preprocess(image_size=384)


def test_a_view_that_comes_to_squash_forgets_what_it_cut_from():
    cut = Preprocess(image_size=224, fit="crop", scaled_size=256)
    assert cut.with_changes({"fit": "squash"}) == Preprocess(image_size=224, fit="squash")
    assert cut.with_changes({}) == cut
