"""Runs with LoRA: the merged model and the adapter agree, frozen weights stay, and resuming is exact."""

import json

import pytest
import torch
from making_weights import TINY_RECIPE, tiny_weights
from PIL import Image
from runs import StopAt, identical, lines, weights
from safetensors.torch import load_file

import vitruvian as vt
from forked import vit
from vitruvian.errors import ConfigError, VitruvianError
from vitruvian.training import Interrupted, Run, read_recipe, resume, train
from vitruvian.training.planning import plan
from vitruvian.training.recipe import change_recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_weights(tmp_path_factory.mktemp("weights") / "tiny")


def lora_run(base, out, *settings, **arguments):
    return train("digits", base, recipe="finetune-small", out=out, settings=[*TINY_RECIPE, *settings], **arguments)


def pixels():
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "settings", [("lora=4",), ("lora.rank=2", "lora.targets=all", "lora.dora=true"), ("lora=4", "final=best")]
)
def test_a_run_saves_a_merged_model_and_a_small_adapter_that_agree(base, tmp_path, settings):
    run = lora_run(base, tmp_path / "run", *settings, "eval_every=0.05", "lr=0.01")
    merged, start = weights(run.folder), load_file(base / "model.safetensors")
    moved = {name for name in start if not torch.equal(merged[name], start[name])} - {"head.weight", "head.bias"}
    assert moved
    assert all(name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")) for name in moved)
    adapted = vt.load(base, adapter=run.folder / "adapter")
    assert adapted.meta.labels == tuple("0123456789")
    assert torch.allclose(adapted(pixels()), run.model()(pixels()), atol=1e-5)
    config = json.loads((run.folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert not Run(run.folder).damage()
    (run.folder / "adapter" / "adapter_config.json").write_text("{}")
    assert Run(run.folder).damage() == "adapter/adapter_config.json has changed"


@pytest.mark.parametrize("kind", ["lora.dora=false", pytest.param("lora.dora=true", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_and_continued_equals_an_unbroken_one(base, tmp_path, kind):
    settings = ("lora=4", kind, "final=best", "average=ema", "architecture.dropout=0.1", "eval_every=0.05")
    whole = lora_run(base, tmp_path / "whole", *settings)
    with pytest.raises(Interrupted):
        lora_run(base, tmp_path / "run", *settings, listeners=[StopAt(5)])
    run = resume(tmp_path / "run")
    assert identical(weights(run.folder), weights(whole.folder))
    adapters = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run.folder, whole.folder)]
    assert identical(*adapters)
    assert lines(run.folder) == lines(whole.folder)


def test_a_finished_run_can_be_trained_longer(base, tmp_path):
    run = lora_run(base, tmp_path / "run", "lora=4", "final=best")
    before = weights(run.folder)
    longer = resume(run.folder, steps=12)
    assert longer.facts["steps"] == 12
    assert longer.recipe.lora.rank == 4
    assert before.keys() == weights(run.folder).keys()


def test_the_updates_have_a_learning_rate_of_their_own(base, tmp_path):
    from vitruvian.training.initial_model import model_for
    from vitruvian.training.optimizer import build_optimizer

    settings = ("lora=4", "layer_decay=0.5", "lora.lr_scale=7")
    recipe = change_recipe(read_recipe("finetune-small").replace(weights=str(base)), [*TINY_RECIPE, *settings])
    model = model_for(recipe, tuple("0123456789"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {names[id(p)]: g["lr_scale"] for g in build_optimizer(model, recipe).param_groups for p in g["params"]}
    assert {name: scale for name, scale in groups.items() if "lora" not in name} == {"head.weight": 1, "head.bias": 1}
    assert {scale for name, scale in groups.items() if "lora" in name} == {7}


def test_a_plan_counts_the_frozen_parameters(base):
    recipe = change_recipe(read_recipe("finetune-small").replace(weights=str(base)), [*TINY_RECIPE, "lora=4"])
    cost = plan("digits", recipe, seconds=0)
    assert cost.parameters - cost.frozen == 16 * 10 + 10  # the head
    full = plan("digits", change_recipe(recipe, ["lora=0"]), seconds=0)
    assert cost.weight_bytes < full.weight_bytes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": "ViT-Ti/16", "lora": 8}, "lora=8 needs weights to start from"),
        (
            {"lora": {"rank": 8}, "objective": "masked", "model": "ViT-Ti/16"},
            "lora cannot be set with objective='masked'",
        ),
        ({"lora": -1}, "lora.rank=-1 is not between 0 and 4096"),
        ({"lora": "big"}, "lora.rank='big' is not an integer"),
        ({"lora_alpha": 2}, "unknown setting 'lora_alpha': called lora.alpha here"),
        ({"lora": {"targets": "q,q"}}, r"lora.targets=\['q', 'q'\] is empty, or has a layer twice"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, arguments, text):
    with pytest.raises(ConfigError, match=text):
        train("digits", out=tmp_path / "run", steps=1, **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_takes_the_rank_and_predicts_with_the_adapter(base, tmp_path):
    words = [word for setting in TINY_RECIPE for word in ("--set", setting)]
    train_words = ["train", "digits", "--from", str(base), "--recipe", "finetune-small", "--lora", "4"]
    trained = vit(*train_words, "--out", tmp_path / "run", *words)
    assert trained.code == 0, trained.err
    assert "LoRA of rank 4 on q, v: 426 parameters train" in trained.err
    Image.new("L", (8, 8), 99).save(tmp_path / "image.png")
    adapter, labels = tmp_path / "run" / "adapter", set()
    for words in [tmp_path / "run"], [adapter], [base, "--adapter", adapter]:
        predicted = vit("predict", tmp_path / "image.png", "--json", "--model", *words)
        labels.add(json.loads(predicted.out)["predictions"][0]["label"])
    assert len(labels) == 1
    with pytest.raises(VitruvianError, match="a LoRA adapter, not a model"):
        train("digits", tmp_path / "run" / "adapter", out=tmp_path / "again", settings=TINY_RECIPE)
