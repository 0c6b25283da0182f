"""Comparisons of models on the same images: known differences, their intervals, and what is printed and written."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from typer.testing import CliRunner

from mixtures import write_mixtures
from vitruvian.cli.app import app
from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.evaluate import evaluate
from vitruvian.model.build import build
from vitruvian.study.compare import compare, mcnemar, paired_difference, write_comparison
from vitruvian.targets import Target
from vitruvian.training import train
from vitruvian.weights.save import save

TINY = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2, num_classes=2)
RUN = ("architecture.depth=1", "architecture.width=16", "architecture.mlp_dim=16", "architecture.num_heads=2")
RUN += ("architecture.patch_size=4", "steps=4", "batch_size=32", "workers=0")


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for name, color in (("dark", 90), ("light", 160)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = (color + 60 * rng.normal(size=(16, 16, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def model_of(seed):
    model = build(TINY, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
    model.meta = model.meta.replace(labels=("dark", "light"))
    return model


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (3, 3), (1, 9), (40, 12), (1000, 1100)])
def test_mcnemars_test_is_the_binomial_one(lost, gained):
    expected = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_a_paired_difference_contains_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        draw = rng.choice(4, size=150, p=[0.6, 0.1, 0.2, 0.1])  # both, only the first, only the second, neither
        low, high = paired_difference("", np.isin(draw, (0, 1)), np.isin(draw, (0, 2))).interval
        hits += low <= 10.0 <= high
    assert hits / 400 == pytest.approx(0.95, abs=0.03)  # three standard errors
    equal = paired_difference("", np.ones(50, bool), np.ones(50, bool))
    assert (equal.difference, equal.p) == (0.0, 1.0)
    assert equal.interval[0] < 0 < equal.interval[1]  # 50 images prove no equality


def test_two_models_are_compared_image_by_image(tmp_path, photos):
    result = compare([model_of(1), model_of(2)], photos)
    first, second = (compare([model_of(s), model_of(s)], photos).values[0] for s in (1, 2))
    assert result.values == pytest.approx((first, second))
    (pair,) = result.pairs
    assert pair.difference == pytest.approx(second - first)
    assert pair.difference == pytest.approx(100 * (pair.only_this - pair.only_first) / 40)
    assert pair.only_this + pair.only_first == len(result.images)  # of two classes, one is right
    assert all(image.predictions[0] != image.predictions[1] for image in result.images)
    for name, count, values in result.classes:
        assert count == 20
        assert name in ("dark", "light")
        assert abs(values[0] - values[1]) <= 100
    page = write_comparison(result, tmp_path / "out").read_text()
    assert "Images that differ" in page
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["pairs"][0]["p"] == pair.p


def test_a_model_does_not_differ_from_itself(photos):
    result = compare([model_of(1), model_of(1), model_of(1)], photos)
    assert [(pair.difference, pair.p) for pair in result.pairs] == [(0.0, 1.0)] * 2
    assert (result.images, result.settings) == ((), {})
    assert len(set(result.models)) == 3


@pytest.mark.slow
def test_runs_are_compared_on_what_they_held_out_and_by_their_settings(tmp_path, photos):
    start = {"model": "ViT-Ti/16", "progress": False}
    sizes = {"image_size": 16, "val_fraction": 0.4}
    for name, more in {"a": {}, "b": {"lr": 0.01}, "c": {"split_seed": 5}}.items():
        train(photos, **start, out=tmp_path / name, settings=RUN, **sizes, **more)
    result = compare([tmp_path / "a", tmp_path / "b"])
    assert result.count == 16
    assert result.images_are == "40% of each class, held out"
    assert result.settings["lr"] == ("default", "0.01")
    assert result.models == ("a", "b")
    with pytest.raises(DataError, match="the runs held out different images; give data= to compare them on"):
        compare([tmp_path / "a", tmp_path / "c"])
    save(model_of(1), tmp_path / "model")
    with pytest.raises(ConfigError, match="not all of these are runs"):
        compare([tmp_path / "a", tmp_path / "model"])


def test_the_command_prints_the_difference(tmp_path, photos):
    for seed in (1, 2):
        save(model_of(seed), tmp_path / f"model{seed}")
    words = ["compare", *(str(tmp_path / f"model{seed}") for seed in (1, 2)), "--data", str(photos)]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert "model2 - model1: " in ran.output
    assert "images have different predictions" in ran.output


@pytest.mark.parametrize(("target", "metric"), [("multi:red,green,blue", "map"), ("number:brightness", "mae")])
def test_models_of_several_labels_and_of_numbers_are_compared_by_their_metric(tmp_path, target, metric):
    data = write_mixtures(tmp_path / "data", count=30)
    kind, names = target.split(":")
    models = []
    for seed in (1, 2):
        model = build(TINY.replace(num_classes=3 if kind == "multi" else 1), seed=0)
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
        score = "sigmoid" if kind == "multi" else "identity"
        saved = Target(kind=kind) if kind == "multi" else Target(kind=kind, mean=(100.0,), std=(30.0,))
        model.meta = model.meta.replace(labels=tuple(names.split(",")), target=saved, score_function=score)
        save(model, tmp_path / f"model-{seed}")
        models.append(tmp_path / f"model-{seed}")
    result = compare(models, data)
    expected = [evaluate(data, model).measures for model in models]
    assert (result.metric, result.values) == (metric, pytest.approx([m.scalars()[metric] for m in expected]))
    (pair,) = result.pairs
    assert pair.difference == pytest.approx(result.values[1] - result.values[0])
    assert pair.interval[0] <= pair.difference <= pair.interval[1]
    assert {row[0] for row in result.classes} == set(names.split(","))
    assert result.to_json()[metric] == result.values
    assert all(image.predictions[0] != image.predictions[1] for image in result.images)
    same = compare([models[0], models[0]], data)
    assert (same.pairs[0].interval, same.images) == ((0.0, 0.0), ())
    page = write_comparison(result, tmp_path / "out").read_text()
    assert "model-2 - model-1: " in page
    ran = CliRunner().invoke(app, ["compare", *map(str, models), "--data", str(data)])
    assert ran.exit_code == 0, ran.output
    assert "McNemar" not in ran.output
    with pytest.raises(DataError):
        compare([models[0], model_of(1)], data)


def test_the_labels_of_images_are_the_names_of_the_classes(tmp_path, photos):
    for folder, name in (("dark", "n01440764"), ("light", "n01443537")):
        (photos / folder).rename(photos / name)
    first, second = model_of(1), model_of(2)
    for seed, model in enumerate((first, second)):
        config = model.config.replace(num_classes=1000)
        other = build(config, seed=0)
        torch.nn.init.normal_(other.head.weight, generator=torch.Generator().manual_seed(seed))
        model.meta = model.meta.replace(labels=None)
        model.config, model.head = config, other.head
    result = compare([first, second], photos)
    assert {image.label for image in result.images} <= {"tench", "goldfish"}


def test_models_cannot_be_compared_by_images_without_a_label(tmp_path):
    (tmp_path / "data").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "list.csv").write_text("path,red,green\na.png,0,0\n")
    model = model_of(1)
    model.meta = model.meta.replace(labels=("red", "green"), target=Target(kind="multi"), score_function="sigmoid")
    with pytest.raises(DataError, match="the map of these images is undefined: none has a known label"):
        compare([model, model], tmp_path / "data" / "list.csv")
