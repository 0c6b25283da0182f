"""Recipe files: each is complete and trains; changes are typed, and errors name the setting."""

import dataclasses
import tomllib
from importlib.resources import files

import pytest
import torch

from vitruvian.catalog import resolve
from vitruvian.config import LoraConfig, ResNetConfig, ViTConfig
from vitruvian.cost import parameters
from vitruvian.data.augment import Augment
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.build import build
from vitruvian.training import Recipe, read_recipe, recipe_names, train
from vitruvian.training.initial_model import config_of, model_for
from vitruvian.training.planning import architecture_for, choose_recipe
from vitruvian.training.recipe import change_recipe, to_toml
from vitruvian.weights.save import save

TABLE_3 = {
    # recipe: model, epochs, lr, schedule, weight decay, dropout
    "paper-jft-b": ("ViT-B/16", 7, 8e-4, "linear", 0.1, 0.0),
    "paper-jft-l32": ("ViT-L/32", 7, 6e-4, "linear", 0.1, 0.0),
    "paper-jft-l16": ("ViT-L/16", 7, 4e-4, "linear", 0.1, 0.0),
    "paper-jft-h14": ("ViT-H/14", 14, 3e-4, "linear", 0.1, 0.0),
    "paper-jft-resnet": ("BiT-R50x1", 7, 1e-3, "linear", 0.1, 0.0),
    "paper-jft-r50-b": ("R50+ViT-B/16", 7, 8e-4, "linear", 0.1, 0.0),
    "paper-imagenet21k": ("ViT-B/16", 90, 1e-3, "linear", 0.03, 0.1),
    "paper-imagenet": ("ViT-B/16", 300, 3e-3, "cosine", 0.3, 0.1),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_the_papers_recipes_are_the_rows_of_table_3(name):
    recipe = read_recipe(name)
    found = (recipe.model, recipe.epochs, recipe.lr, recipe.schedule, recipe.weight_decay)
    assert (*found, recipe.architecture.get("dropout", 0.0)) == TABLE_3[name]
    assert (recipe.batch_size, recipe.warmup, recipe.image_size) == (4096, 10_000, 224)
    assert recipe.betas == (0.9, 0.999)
    assert recipe.grad_clip == (1.0 if name == "paper-imagenet" else 0.0)
    if recipe.architecture:  # a ResNet has no layer before its head
        assert recipe.architecture["representation_size"] == resolve(recipe.model).width


TABLE_3_LR = {
    # models on JFT-300M: the learning rate
    "ViT-B/16 ViT-B/32 ViT-b/32 R50+ViT-B/16 R50+ViT-B/32 BiT-R101x1": 8e-4,
    "ViT-L/32 BiT-R152x1 BiT-R152x2": 6e-4,
    "ViT-L/16 R50+ViT-L/16": 4e-4,
    "ViT-H/14": 3e-4,
    "R50+ViT-L/32": 2e-4,
    "BiT-R50x1 BiT-R50x2": 1e-3,
}


@pytest.mark.parametrize(
    ("model", "lr"), [(model, lr) for models, lr in TABLE_3_LR.items() for model in models.split()]
)
@pytest.mark.parametrize("recipe", ["paper-jft-b", "paper-jft-r50-b", "paper-jft-resnet", "paper-jft-h14"])
def test_the_learning_rate_follows_the_model_as_in_table_3(recipe, model, lr):
    assert choose_recipe("x", recipe, model=model).lr == lr
    assert choose_recipe("x", recipe, settings=[f"model={model}"]).lr == lr
    assert choose_recipe("x", recipe, model=model, settings=["lr=0.5"]).lr == 0.5
    assert choose_recipe("x", recipe, settings=["lr=0.5", f"model={model}"]).lr == 0.5
    assert choose_recipe("x", "paper-imagenet", model=model).lr == 3e-3
    assert choose_recipe("x", "paper-imagenet21k", model=model).lr == 1e-3
    assert choose_recipe("x", "paper-masked", model=model).lr == 2e-4


def test_a_model_without_a_learning_rate_in_the_recipe_keeps_that_of_the_recipe_and_says_so(capsys):
    assert choose_recipe("x", "paper-jft-resnet", model="BiT-R200x3").lr == 1e-3
    said = "note: the recipe has no learning rate for BiT-R200x3; using lr=0.001"
    assert capsys.readouterr().err.strip() == said
    assert choose_recipe("x", "paper-jft-resnet", model="BiT-R200x3", settings=["lr=6e-4"]).lr == 6e-4
    assert choose_recipe("x", "paper-jft-resnet", model="R50+ViT-L_32").lr == 2e-4  # by any name
    assert not capsys.readouterr().err


def test_learning_rates_by_model_name_models():
    with pytest.raises(UnknownNameError, match="unknown model 'ViT-X/16'"):
        change_recipe(read_recipe("digits"), ["model_lrs=[['ViT-X/16', 0.1]]"])


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_what_it_is_for_and_its_model_is_known(name):
    recipe = read_recipe(name)
    assert all((recipe.about, recipe.command, recipe.time, recipe.result))
    assert parameters(config_of(recipe, 10)) > 10_000


def smallest(recipe):
    """A recipe's own settings with a model of some thousand parameters."""
    config = config_of(recipe, 10)
    short = {"epochs": 0.0, "steps": 1, "batch_size": 4, "warmup": 0.0, "workers": 0, "bit_hyperrule": False}
    if isinstance(config, ResNetConfig):
        return recipe.replace(architecture={"stages": (1,), "width": 32}, image_size=16, **short)
    shrunk = {"depth": 1, "width": 16, "mlp_dim": 16, "num_heads": 2}
    if recipe.architecture.get("representation_size"):
        shrunk["representation_size"] = 16
    if config.stem:
        shrunk["stem"] = dataclasses.replace(config.stem, stages=config.stem.stages[:1] and (1,), width=32, widths=())
        shrunk["patch_size"] = 1
    small = config.replace(**shrunk, image_size=(224, 224))
    return recipe.replace(
        architecture={**recipe.architecture, **shrunk},
        image_size=2 * small.stride,
        **short,
    )


SAME_WHEN_SMALL = {"imagenet-s16-150", "imagenet-s16-300", "paper-jft-l16", "paper-jft-l32"}
"""Small, these differ from imagenet-s16-90 and paper-jft-b in no more than the learning rate and the image size."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe_names() if name not in SAME_WHEN_SMALL | {"photos"}])
def test_a_small_version_of_every_recipe_takes_a_real_step(tmp_path, name):
    recipe = smallest(read_recipe(name))
    run = train("digits", recipe=recipe, out=tmp_path / "run")
    (line,) = run.metrics("train")
    assert 0 < line["loss"] < 200
    assert run.model().meta.labels == (tuple("0123456789") if recipe.objective == "labels" else None)


@pytest.mark.slow
def test_the_photos_recipe_starts_from_weights_and_replaces_their_head(tmp_path):
    model = build(ViTConfig(image_size=16, patch_size=8, num_classes=5, depth=1, width=16, mlp_dim=16, num_heads=2))
    model.meta = model.meta.replace(labels=tuple("abcde"))
    save(model, tmp_path / "weights")
    settings = ["epochs=0.05", "workers=0", "warmup=0"]
    run = train("digits", weights=tmp_path / "weights", out=tmp_path / "run", settings=settings)
    trained = run.model()
    assert run.recipe.layer_decay < 1
    assert trained.head.weight.shape == (10, 16)
    assert str(tmp_path / "weights") in trained.meta.origin
    assert (trained.embed.patch.weight - model.embed.patch.weight).abs().max() < 0.01


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_survives_its_toml(tmp_path, name):
    recipe = read_recipe(name).replace(weights='C:\\a "quoted"\t\x7f\x00 name/\U0001f60a', freeze=("embed.*", "é"))
    (tmp_path / "recipe.toml").write_text(to_toml(recipe.to_json()), encoding="utf-8")
    assert read_recipe(tmp_path / "recipe.toml").to_json() == recipe.to_json()


def test_a_recipe_file_of_ones_own_can_build_on_another(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "digits"\nepochs = 2\n[architecture]\ndepth = 3\n')
    recipe = read_recipe(path)
    assert (recipe.epochs, recipe.architecture["depth"], recipe.architecture["width"]) == (2.0, 3, 96)


def test_a_change_is_read_in_the_type_of_its_setting():
    recipe = change_recipe(
        read_recipe("digits"),
        ["lr=1", "augment.hflip=0.25", "freeze=['embed.*']", "model=ViT-S/16", "architecture.dropout=0.1", "steps=5"],
    )
    assert (recipe.lr, recipe.augment.hflip, recipe.freeze) == (1.0, 0.25, ("embed.*",))
    assert (recipe.model, recipe.architecture["dropout"], recipe.steps, recipe.epochs) == ("ViT-S/16", 0.1, 5, 0.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("epoch=3", r"unknown setting 'epoch'; did you mean epochs\?"),
        ("learning_rate=1", "unknown setting 'learning_rate': called lr here"),
        ("weight-decay=1", "unknown setting 'weight-decay': called weight_decay here"),
        ("clip_grad=1", "unknown setting 'clip_grad': called grad_clip here"),
        ("amp=true", r"unknown setting 'amp': called precision \(float32, bfloat16 or float16\) here"),
        ("drop_path_rate=0.1", "unknown setting 'drop_path_rate': called architecture.drop_path here"),
        ("augment.flp=0", r"unknown setting 'augment.flp'; did you mean augment.hflip"),
        ("architecture.witdh=3", r"unknown setting 'architecture.witdh'; did you mean architecture.width"),
        ("epochs=many", "epochs='many' is not a number"),
        ("batch_size=1.5", "batch_size=1.5 is not an integer"),
        ("compile=1", "compile=1 is not true or false"),
        ("architecture.depth=two", "architecture.depth='two' is not an integer"),
        ("augment.crop=big", "augment.crop='big' is not one of inception, resized"),
        ("optimizer=lion", "optimizer='lion' is not one of adam, adamw, muon, sgd"),
        ("augment=3", "augment=3 is not a table of settings; write augment.KEY=VALUE"),
        ("augment.mean=[1]", "augment.mean is derived from preprocess.mean; set that instead"),
        ("betas=[0.9]", r"betas=\[0.9\] does not have 2 values"),
        ("epochs", "'epochs' is not KEY=VALUE"),
        ("lr=0", r"lr=0.0 is not between 1e-12 and 1000000.0"),
        ("steps=0", "a recipe needs either epochs or steps, not epochs=0 and steps=0"),
        ("patch_drop=1", "patch_drop=1.0 is not between 0.0 and 0.95"),
    ],
)
def test_a_wrong_change_is_one_line_that_says_what_is_wanted(change, text):
    with pytest.raises(ConfigError, match=text) as caught:
        change_recipe(read_recipe("digits"), [change])
    assert "\n" not in str(caught.value)


def test_a_name_from_elsewhere_stands_for_one_setting_that_exists():
    names = tomllib.loads((files("vitruvian") / "other_names.toml").read_text(encoding="utf-8"))["settings"]
    words = [word for others in names.values() for word in others.split()]
    assert len(set(words)) == len(words)
    assert not {field.name for field in dataclasses.fields(Recipe)}.intersection(words)
    tables = {"": Recipe(epochs=1), "architecture": ViTConfig(), "augment": Augment(), "lora": LoraConfig()}
    for meant in names:
        for name in meant.split(" (")[0].split("=")[0].split(" and "):
            where, _, key = name.rpartition(".")
            assert hasattr(tables[where], key), name


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown recipe 'cifar'; did you mean cifar10\?"):
        read_recipe("cifar")


def test_a_broken_recipe_file_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"mine\.toml: cannot be read: No such file"):
        read_recipe(path)
    path.write_text("epochs = = 3")
    with pytest.raises(ConfigError, match=r"mine\.toml: not valid TOML"):
        read_recipe(path)
    path.write_text('epochs = "three"')
    with pytest.raises(ConfigError, match=r"mine\.toml: epochs='three' is not a number"):
        read_recipe(path)


def test_decay_that_does_not_follow_the_lr_is_for_adamw():
    with pytest.raises(ConfigError, match="decouple_lr=true needs optimizer='adamw', not 'sgd'"):
        Recipe(epochs=1, optimizer="sgd", decouple_lr=True)


def test_the_head_bias_starts_where_the_recipe_says():
    model = model_for(change_recipe(read_recipe("digits"), ["head_bias=-10"]), ["a", "b"])
    assert torch.equal(model.head.bias, torch.tensor([-10.0, -10.0]))


@pytest.mark.parametrize(("classes", "bias"), [(2, 0.0), (10, -2.1972), (18_291, -9.8141), (21_841, -9.9915)])
def test_the_head_of_a_sigmoid_recipe_starts_at_one_class_in_all(classes, bias):
    """-ln(K - 1): each class begins with a probability of 1 / K. The release has -10 for its 21,841 classes."""
    model = model_for(smallest(read_recipe("paper-jft-b")), list(map(str, range(classes))))
    assert model.head.bias.unique().item() == pytest.approx(bias, abs=1e-4)
    assert model.head.bias.sigmoid()[0].item() == pytest.approx(1 / classes)


def test_a_head_bias_is_a_number_or_prior():
    with pytest.raises(ConfigError, match="head_bias='low' is not a number"):
        change_recipe(read_recipe("digits"), ["head_bias=low"])


def test_a_model_by_name_keeps_its_size_and_the_rest_of_the_recipe():
    recipe = choose_recipe("digits", model="ViT-S/16")
    config = config_of(recipe, 10)
    assert (config.depth, config.width, config.patch_size, config.in_channels, config.pool) == (12, 384, 4, 1, "mean")
    assert config_of(choose_recipe("x", "paper-imagenet21k", model="ViT-L/16"), 10).representation_size == 1024
    assert config_of(choose_recipe("x", "paper-imagenet", model="BiT-R50x1"), 10).num_classes == 10


def test_the_view_keeps_its_share_at_another_size():
    model = model_for(change_recipe(read_recipe("imagenet-s16-90"), ["image_size=112"]), ["a", "b"])
    assert (model.meta.preprocess.image_size, model.meta.preprocess.scaled_size) == ((112, 112), (128, 128))


@pytest.mark.parametrize("change", ["lr=nan", "lr=inf", "lrs=[0.1, nan]"])
def test_a_rate_is_a_finite_number(change):
    with pytest.raises(ConfigError, match=r"lrs?=\S+ is not a finite number"):
        change_recipe(read_recipe("finetune-small"), [change])


@pytest.mark.parametrize(("recipe", "size"), [("paper-jft-b", 1024), ("paper-masked", 0)])
def test_another_model_has_the_pre_logits_layer_of_its_own_width_where_the_recipe_has_one(recipe, size):
    assert architecture_for(read_recipe(recipe), "ViT-L/16")["representation_size"] == size
