"""Cross-validation: every image predicted once by a model without it, resumed exactly, and wrong labels found."""

import csv
import json

import numpy as np
import pytest
from making_weights import TINY_RECIPE, tiny_weights
from PIL import Image
from runs import TINY, StopAt, same_model
from sklearn.metrics import average_precision_score

from mixtures import write_mixtures
from vitruvian.cli.app import app
from vitruvian.data.doctor import diagnose
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import all_but_test
from vitruvian.errors import ConfigError, DataError, TrainingError
from vitruvian.evaluation.metrics import accuracy_interval, wilson
from vitruvian.evaluation.out_of_fold import fold_result
from vitruvian.evaluation.probe import probe
from vitruvian.targets import KINDS
from vitruvian.training import Interrupted
from vitruvian.training.finetune import cross_validate, protocol_for
from vitruvian.training.planning import choose_recipe

SETTINGS = (*TINY, "steps=3", "batch_size=8", "image_size=8", "workers=0", "architecture.in_channels=3")


@pytest.fixture
def photos(tmp_path):
    """Dark and bright images by four people, who took six of each; one bright image is labeled dark."""
    rng = np.random.default_rng(0)
    for label, light in (("bright", 190), ("dark", 60)):
        for person in range(4):
            for number in range(6):
                path = tmp_path / "photos" / label / f"p{person}_{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                wrong = label == "dark" and (person, number) == (2, 3)
                pixels = (190 if wrong else light) + 20 * rng.normal(size=(8, 8, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return tmp_path / "photos"


def recipe_for(photos, *more):
    return choose_recipe(photos, "digits", model="ViT-Ti/16", settings=[*SETTINGS, *more])


def quiet(photos, recipe, folds, out, **more):
    return cross_validate(photos, recipe, folds, out, report=lambda _: None, progress=False, **more)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_each_image_is_predicted_once_by_a_model_without_its_group(tmp_path, photos):
    found = quiet(photos, recipe_for(photos, r'group_by="p(\\d)"'), 4, tmp_path / "out")
    rows = rows_of(found.predictions)
    assert len(rows) == len({row["path"] for row in rows}) == found.result.count == 48
    people = {}
    for row in rows:
        people.setdefault(row["fold"], set()).add(row["path"].split("/")[1][:2])
    assert sorted(people.values(), key=str) == [{f"p{person}"} for person in range(4)]
    right = [row["label"] == row["prediction"] for row in rows]
    assert found.result.value == pytest.approx(100 * np.mean(right))
    assert [run.evaluation["top1"] for run in found.runs] == pytest.approx(list(found.result.runs))
    assert json.loads((tmp_path / "out" / "folds.json").read_text())["result"]["count"] == 48
    with pytest.raises(TrainingError, match="contains a cross-validation with folds=4, not 3"):
        quiet(photos, recipe_for(photos, r'group_by="p(\\d)"'), 3, tmp_path / "out")
    with pytest.raises(ConfigError, match="folds=5 is not between 2 and 4 groups"):
        quiet(photos, recipe_for(photos, r'group_by="p(\\d)"'), 5, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_an_interrupted_cross_validation_continues_where_it_stopped(tmp_path, photos):
    expected = quiet(photos, recipe_for(photos), 2, tmp_path / "whole")
    with pytest.raises(Interrupted):
        quiet(photos, recipe_for(photos), 2, tmp_path / "out", listeners=[StopAt(2)])
    found = quiet(photos, recipe_for(photos), 2, tmp_path / "out")
    assert found.result == expected.result
    assert found.predictions.read_text() == expected.predictions.read_text()
    for ours, theirs in zip(found.runs, expected.runs):
        assert same_model(ours.folder, theirs.folder)


@pytest.mark.slow
def test_fine_tuning_chooses_its_learning_rate_within_each_fold(tmp_path, photos):
    weights = tiny_weights(tmp_path / "weights")
    protocol = protocol_for(photos, weights, lrs=(0.01, 0.1), settings=[*TINY_RECIPE, "batch_size=8"])
    found = quiet(photos, protocol, 2, tmp_path / "out")
    assert found.result.count == 48
    for fold in (1, 2):
        sweep = json.loads((tmp_path / "out" / f"fold-{fold}" / "sweep.json").read_text())
        assert [trial["kind"] for trial in sweep["trials"]] == ["dev", "dev", "test"]
        assert sweep["measured_on"] == f"fold {fold} of 2, held out"


def test_the_interval_draws_images_of_a_group_together():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 10)
    right = np.repeat(rng.random(20) < 0.7, 10)  # all images of a group are right, or none

    def accuracy(drawn):
        return 100 * float(drawn @ right / drawn.sum())

    alone = fold_result("top1", accuracy, accuracy_interval(right), np.arange(200) % 5, None)
    together = fold_result("top1", accuracy, accuracy_interval(right), groups % 5, groups)
    assert alone.value == together.value == pytest.approx(100 * right.mean())
    assert alone.to_json()["top1"] == alone.value
    assert alone.interval == pytest.approx(wilson(right.sum(), 200))
    assert np.ptp(together.interval) > 2 * np.ptp(alone.interval)  # sqrt(10) in theory


def test_a_probe_is_cross_validated_and_the_doctor_finds_the_wrong_label(tmp_path, photos):
    weights = tiny_weights(tmp_path / "weights")
    options = {"only": ["linear", "neighbors", "fewshot"], "group_by": r"p(\d)"}
    report = probe(photos, weights, folds=4, predictions=tmp_path / "out.csv", **options)
    linear = next(result for result in report.results if result.probe == "linear")
    assert (linear.setting, len(linear.runs), report.test_images) == ("4 folds", 4, 48)
    assert linear.interval[0] <= linear.top1 <= linear.interval[1]
    rows = rows_of(tmp_path / "out.csv")
    assert np.mean([row["label"] == row["prediction"] for row in rows]) * 100 == pytest.approx(linear.top1)
    finding = next(f for f in diagnose(photos, predictions=tmp_path / "out.csv").findings if f.check == "label")
    assert finding.level == "warning"
    assert finding.examples[0].images[0].key == "dark/p2_3.png"
    assert finding.examples[0].images[1].label == "bright"
    (tmp_path / "out.csv").write_text("path,split\na,train\n")
    with pytest.raises(DataError, match="not out-of-fold predictions of this data"):
        diagnose(photos, predictions=tmp_path / "out.csv")


def test_unreadable_images_have_no_prediction(tmp_path, photos):
    weights, out = tiny_weights(tmp_path / "weights"), tmp_path / "out.csv"
    (photos / "dark" / "p0_0.png").write_bytes(b"broken")
    report = probe(photos, weights, only=["linear"], folds=2, predictions=out)
    assert report.test_images == len(rows_of(out)) == 47
    assert "dark/p0_0.png" not in {row["path"] for row in rows_of(out)}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "metric"), [("multi:red,green,blue", "map"), ("number:brightness", "mae")])
def test_several_labels_and_numbers_are_cross_validated(tmp_path, target, metric):
    data = write_mixtures(tmp_path / "data")
    recipe = recipe_for(data, "image_size=8").replace(target=target)
    found = quiet(data, recipe, 2, tmp_path / "out")
    assert found.result.metric == metric
    assert [run.evaluation[metric] for run in found.runs] == pytest.approx(list(found.result.runs))
    rows, names = rows_of(found.predictions), target.partition(":")[2].split(",")
    assert found.to_json()[metric] == found.result.value
    images = all_but_test(open_dataset(data, target=target, accepts=KINDS))
    truth = images.targets.rows(np.asarray(images.labels()))
    scores = np.array([[float(row[f"predicted {name}"]) for name in names] for row in rows])
    assert found.result.count == len(rows) == len(truth) == 48
    if metric == "mae":
        expected = np.abs(scores - truth).mean()
    else:
        known = ~np.isnan(truth)
        columns = [(truth[known[:, k], k], scores[known[:, k], k]) for k in range(3)]
        expected = 100 * np.mean([average_precision_score(*column) for column in columns])
    assert found.result.value == pytest.approx(expected, rel=1e-5)  # the table has six decimals
    report = probe(data, tiny_weights(tmp_path / "weights"), folds=2, target=target, only=["linear", "fewshot"])
    assert report.results[-1].metrics[metric] > 0
    assert report.results[-1].setting == "2 folds"


def test_options_that_contradict_folds_are_refused(photos):
    from typer.testing import CliRunner

    for words, text in {
        f"train {photos} --folds 2 --plan": "--folds resumes by itself",
        f"finetune {photos} --from x --folds 2 --seeds 2": "without --seeds",
        f"probe {photos} -m x --predictions a.csv": "--predictions needs --folds",
    }.items():
        ran = CliRunner().invoke(app, words.split())
        assert ran.exit_code == 2
        assert text in " ".join(ran.output.replace("│", " ").split())
