"""Advice on a dataset: every column, numbers that the commands repeat, and a recommendation that follows from them."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitruvian as vt
from vitruvian import catalog
from vitruvian.cli.app import app, error_line
from vitruvian.config import ViTConfig
from vitruvian.data.formats import open_dataset
from vitruvian.errors import VitruvianError
from vitruvian.model.build import build
from vitruvian.study import advise as module
from vitruvian.study.advise import HEADINGS, TOLERANCE, Option, ProbedWeights, recommend
from vitruvian.training.planning import choose_recipe, plan
from vitruvian.weights.hub import cached_names
from vitruvian.weights.save import save

TINY = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2)


def write_images(folder, classes, count):
    rng = np.random.default_rng(0)
    for color, name in zip(np.linspace(60, 200, len(classes)), classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = (color + 40 * rng.normal(size=(16, 16, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def photos(tmp_path):
    return write_images(tmp_path / "photos", ("dark", "gray", "light"), 10)


@pytest.fixture
def weights(tmp_path):
    save(build(TINY, seed=0), tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture(autouse=True)
def no_workers(monkeypatch):
    monkeypatch.setattr(module, "choose_recipe", lambda *a, **k: choose_recipe(*a, **k).replace(workers=0))


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(module, "finetunings", lambda *_: iter(()))


def vit(*arguments):
    """Exit code and stdout; stderr, or the line of an error."""
    ran = CliRunner().invoke(app, [str(word) for word in arguments])
    error = ran.exception
    known = isinstance(error, VitruvianError)
    return (error.exit_code if known else ran.exit_code), ran.stdout, error_line(error) if known else ran.stderr


def options(*rows):
    """Options from pairs of accuracy and minutes."""
    return [
        Option(f"option {n}", "W", top1, (0.0, 100.0), True, "", minutes, 1, 1.0, "MIT", f"vit {n}")
        for n, (top1, minutes) in enumerate(rows)
    ]


@pytest.mark.slow
def test_the_table_has_every_column_and_one_of_its_commands_is_recommended(photos, weights, tmp_path):
    page = tmp_path / "advice.html"
    code, out, err = vit("advise", photos, "--model", weights, "--html", page)
    assert code == 0, err
    heading = next(line for line in out.splitlines() if line.startswith("option"))
    for name in HEADINGS:
        assert name.removeprefix(">") in heading
    rows = [line for line in out.splitlines() if "  measured on 6 " in line]
    starts = ("few-shot, 5 per class  tiny", "linear probe", "fine-tuning, 6 epochs")  # so few images take no time
    assert all(row.startswith(start) for row, start in zip(rows, starts, strict=True))
    command = out.splitlines()[-1].strip()
    assert any(row.endswith(command) for row in rows)
    assert all("  unknown  " in row for row in rows)  # the license of a file
    text = page.read_text()
    assert text.count('class="example views"') == 24
    assert text.count("<img") >= 3 * 24
    assert command.replace("'", "&#39;") in text


@pytest.mark.slow
def test_measured_numbers_are_those_of_the_commands(photos, weights, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    advice = vt.advise(photos, [weights])
    for option in advice.options:
        assert option.is_measured
        words = shlex.split(option.command)[1:]
        if words[0] == "probe":
            _, out, _ = vit(*words[:-1], tmp_path / option.name, "--json")
            assert json.loads(out)["results"][-1]["top1"] == option.top1
        else:
            run = vt.train(words[1], words[3], settings=words[5:6], workers=0, progress=False)
            assert run.evaluation["top1"] == option.top1


@pytest.mark.slow
def test_a_saved_few_shot_probe_predicts_as_the_first_draw(photos, weights, tmp_path):
    words = ["probe", photos, "--model", weights, "--only", "fewshot", "--shots", "5", "--engine", "torch"]
    code, out, err = vit(*words, "--save", tmp_path / "few", "--json")
    assert code == 0, err
    held_out = module.probe_sources(open_dataset(photos))[0][1]
    measured = vt.evaluate(held_out, tmp_path / "few").measures.top1
    assert measured == pytest.approx(json.loads(out)["results"][0]["runs"][0])


@pytest.mark.slow
def test_what_there_is_no_time_for_is_predicted_with_its_basis(photos, weights, no_training, monkeypatch):
    monkeypatch.setattr(module, "FEATURE_SHARE", 1e-9)
    monkeypatch.setattr(module, "LEAST_IMAGES", 18)
    advice = vt.advise(photos, [weights])
    assert "examined 24 of 30 images to stay within 30 minutes" in advice.notes
    assert not any(option.is_measured for option in advice.options)
    assert all("80% of the images and the learning curve" in option.basis for option in advice.options)


@pytest.mark.slow
def test_a_short_fine_tuning_is_measured_and_the_long_one_predicted(photos, weights, monkeypatch):
    monkeypatch.setattr(module, "LEAST_STEPS", 1)
    monkeypatch.setattr(module, "plan", lambda *a, **k: replace((p := plan(*a, **k)), step_seconds=600 / p.steps))
    short, long = vt.advise(photos, [weights], minutes=15).options[-2:]
    assert (short.name, short.is_measured) == ("fine-tuning, 1 epochs", True)
    assert (long.name, long.is_measured) == ("fine-tuning, 6 epochs", False)
    assert "--epochs 1" in short.command
    assert long.basis == f"{short.top1:.1f}% after 1 epochs"
    assert long.top1 == pytest.approx(100 - (100 - short.top1) * 6**-module.EXPONENT)
    assert long.interval[1] - long.interval[0] > short.interval[1] - short.interval[0]


@pytest.mark.slow
def test_a_clip_is_tried_with_the_names_of_the_classes(photos, no_training, tmp_path):
    from two_towers import save_clip  # needs transformers

    save_clip(tmp_path / "clip")
    advice = vt.advise(photos, [tmp_path / "clip"])
    assert advice.options[0].name == "zero-shot"
    assert advice.options[0].minutes == 0
    assert advice.options[0].command == f"vit evaluate {photos} --model {tmp_path / 'clip'}"


def test_the_recommendation_is_never_much_worse_than_another_that_ends_in_time():
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows = options(*zip(rng.uniform(80, 90, 5).tolist(), rng.exponential(20, 5).tolist()))
        chosen, reason = recommend(rows, 30)
        in_time = [row for row in rows if row.minutes <= 30]
        if not in_time:
            assert chosen is None
            assert reason.startswith("no option fits in 30 minutes")
            continue
        assert chosen in in_time
        assert chosen.top1 >= max(row.top1 for row in in_time) - TOLERANCE
        assert TOLERANCE <= 1


def test_a_quicker_option_is_preferred_to_a_slightly_better_one_and_the_reason_says_so():
    chosen, reason = recommend(options((90.0, 0.2), (90.3, 25.0), (94.0, 60.0)), 30)
    assert chosen.name == "option 0"
    assert "option 1 takes 25.0 minutes for 0.3 points more" in reason
    assert reason.endswith("option 2 is expected to reach 94.0% in 60 minutes")


@pytest.mark.parametrize("top1", [0.0, 3.0, 50.0, 97.0, 100.0])
def test_the_interval_of_a_prediction_contains_that_of_a_measurement(top1):
    report = type("Report", (), {"test_images": 80})()
    found = ProbedWeights(None, 1.0, report, 90.0, 1.0)
    (low, high), (lower, higher) = found.interval(top1, 1.0), found.interval(top1, module.UNSURE)
    assert 0 <= lower <= low <= top1 <= high <= higher <= 100


def test_weights_in_the_caches_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "own"))
    assert cached_names() == []
    rows = catalog.PUBLISHED
    ours = next(row for row in rows.values() if row.location.startswith("https://"))
    theirs = rows[catalog.RECOMMENDED]
    files = (
        tmp_path / "own" / ours.location.removeprefix("https://"),
        tmp_path
        / "hub"
        / ("models--" + theirs.location.removeprefix("hf://").replace("/", "--") + "/snapshots/abc/model.safetensors"),
    )
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    assert {ours.name, theirs.name} <= set(cached_names())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "no images"),
        ({"cat": 4}, "one class"),
        ({"cat": 1, "dog": 1}, "no class has two images"),
        ("path,labels\ncat/0.png,cat;dog\ndog/0.png,dog\n", "one class per image"),
        ("path,age\ncat/0.png,1.5\ndog/0.png,2.5\n", "the data has numbers; this works with one class per image"),
    ],
    ids=["empty", "one class", "one image per class", "several labels", "numbers"],
)
def test_unsuitable_data_gets_one_line(tmp_path, weights, content, reason):
    folder = tmp_path / "data"
    folder.mkdir()
    data = folder
    if isinstance(content, str):
        write_images(folder / "images", ("cat", "dog"), 1)
        data = folder / "images" / "list.csv"
        data.write_text(content)
    else:
        for name, count in content.items():
            write_images(folder / "x", (name,), count)
            (folder / "x" / name).rename(folder / name)
            (folder / "x").rmdir()
    code, out, err = vit("advise", data, "--model", weights)
    assert (code, out) == (1, "")
    assert reason in err
    assert err.count("\n") <= 1


def test_two_images_of_a_class_are_enough(tmp_path, weights, no_training):
    data = write_images(tmp_path / "two", ("cat", "dog"), 2)
    advice = vt.advise(data, [weights])
    assert [option.name for option in advice.options] == ["few-shot, 1 per class"]
    assert advice.recommended is advice.options[0]


def test_labels_are_escaped_and_the_callers_random_state_is_kept(tmp_path, weights, no_training):
    data = write_images(tmp_path / "odd", ("<b>x", "y"), 5)
    state = torch.get_rng_state()
    vt.advise(data, [weights], html=tmp_path / "page.html")
    assert "<b>x" not in (tmp_path / "page.html").read_text()
    assert torch.equal(state, torch.get_rng_state())
