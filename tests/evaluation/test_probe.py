"""`vit probe`: what it learns from, what it prints, and how it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
from colors import make_colors, tiny_model
from typer.testing import CliRunner

import vitruvian
from vitruvian.cli.evaluate import probe as command
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ConfigError, DataError, UnknownNameError, VitruvianError
from vitruvian.evaluation.probe import ProbeSettings, probe, probe_sources
from vitruvian.evaluation.probe_classifiers import hold_out_examples
from vitruvian.evaluation.report import write_probe
from vitruvian.inference import Encoder
from vitruvian.weights.save import save

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(command)


def vit_probe(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def weights(tmp_path):
    save(tiny_model(), tmp_path / "weights")
    return tmp_path / "weights"


def test_every_probe_tells_the_colors_apart_and_a_second_time_computes_nothing(tmp_path):
    photos = make_colors(tmp_path / "photos", {"train": 12, "test": 5})
    first, again = (probe(photos, tiny_model()) for _ in range(2))
    assert (first.train_images, first.test_images, first.test_is) == (36, 15, "the split 'test'")
    assert [(r.probe, r.setting.split()[0]) for r in first.results[:3]] == [
        ("few-shot", "1-shot"),
        ("few-shot", "5-shot"),
        ("few-shot", "10-shot"),
    ]
    assert [r.probe for r in first.results[3:]] == ["linear", "neighbors"]
    assert all(result.top1 == result.mean_per_class == 100.0 for result in first.results[1:])
    assert first.notes == ("no few-shot accuracy for 25 shots: class 'blue' has 12 training images",)
    assert (first.computed, again.computed) == (51, 0)
    assert [r.runs for r in first.results] == [r.runs for r in again.results]


def test_accuracies_are_counted_on_the_test_images(tmp_path):
    photos = make_colors(tmp_path / "photos", {"train": 4, "test": 2})
    (photos / "test" / "red" / "000.png").rename(photos / "test" / "blue" / "wrong.png")
    (found,) = probe(photos, tiny_model(), only=["neighbors"], neighbors=3).results
    assert found.top1 == pytest.approx(100 * 5 / 6)
    assert found.mean_per_class == pytest.approx((100 * 2 / 3 + 100 + 100) / 3)
    assert (found.setting, found.tried, found.deviation) == ("3 nearest", {}, 0.0)
    assert found.interval[0] < found.top1 <= found.interval[1]


def test_parts_are_the_splits_that_there_are_or_a_share_held_out(tmp_path):
    train, test, dev = probe_sources(open_dataset(make_colors(tmp_path / "3", {"train": 4, "val": 2, "test": 3})))[0]
    assert (len(train), len(dev), len(test)) == (12, 6, 9)
    (_, test), test_is = probe_sources(open_dataset(make_colors(tmp_path / "2", {"train": 4, "val": 2})))
    assert (len(test), test_is) == (6, "the split 'val'")
    (train, test), test_is = probe_sources(open_dataset(make_colors(tmp_path / "1", {"": 10})))
    assert (len(train), len(test), test_is) == (24, 6, "20% of each class, held out")


def test_a_dev_split_is_learned_from_at_the_end(tmp_path):
    photos = make_colors(tmp_path / "photos", {"train": 4, "val": 2, "test": 3})
    assert probe(photos, tiny_model(), only=["linear"]).train_images == 18


def test_the_share_that_settings_are_chosen_by_has_some_of_each_class_and_never_all():
    labels = np.repeat([0, 1, 2], [10, 2, 1])
    values = np.arange(13)[:, None]
    (train, rest), (dev, held) = hold_out_examples((values, labels), classes=3)
    assert np.bincount(held, minlength=3).tolist() == [2, 1, 0]
    assert sorted([*zip(train[:, 0], rest), *zip(dev[:, 0], held)]) == list(enumerate(labels))
    with pytest.raises(DataError, match="no class has two images, so no setting"):
        hold_out_examples((values[:2], np.array([0, 1])), classes=2)


def test_what_is_wanted_is_checked_before_anything_is_read():
    with pytest.raises(UnknownNameError, match=r"unknown probe 'lineal'; did you mean linear"):
        ProbeSettings(only=("lineal",))
    with pytest.raises(ConfigError, match="no probe given; choose from fewshot, linear, neighbors"):
        ProbeSettings(only=())
    with pytest.raises(ConfigError, match="neighbors=0 is not at least 1"):
        ProbeSettings(neighbors=0)


def test_too_many_shots_are_refused_before_features_are_computed(tmp_path, cache):
    photos = make_colors(tmp_path / "photos", {"train": 3, "test": 1})
    with pytest.raises(DataError, match="class 'blue' has 3 training images, 5 shots need 5"):
        probe(photos, tiny_model(), shots=(1, 5))
    assert not (cache / "features").exists()


def test_the_table_names_probes_settings_and_percentages(weights, tmp_path):
    photos = make_colors(tmp_path / "photos", {"": 10})
    ran = vit_probe(photos, "--model", weights, "--only", "fewshot,neighbors", "--shots", "5", "--neighbors", 3)
    assert ran.exit_code == 0, ran.output
    first, heads, shot, near = ran.stdout.splitlines()
    assert first == "24 training images of 3 classes, 6 test images: 20% of each class, held out"
    assert heads.split() == ["probe", "setting", "top-1", "%", "mean", "per", "class", "%"]
    interval = "95% interval 60.97 to 100.00"  # Wilson's, of 6 images
    assert shot.split() == ["few-shot", "5-shot", "100.00", "±", "0.00,", *interval.split(), "100.00"]
    assert near.split() == ["neighbors", "3", "nearest", "100.00", *interval.split(), "100.00"]


def test_json_and_a_folder_with_the_report_hold_the_same_numbers(weights, tmp_path):
    photos = make_colors(tmp_path / "<photos>", {"train": 6, "test": 2})
    (photos / "test" / "red" / "broken.png").write_bytes(b"x")
    ran = vit_probe(photos, "--model", weights, "--json", "--out", tmp_path / "out" / "report")
    assert ran.exit_code == 0, ran.output
    assert ran.stderr.startswith("skipped 1 unreadable image\n")
    printed = json.loads(ran.stdout)
    assert printed == json.loads((tmp_path / "out" / "report" / "probe.json").read_text())
    assert printed["unreadable"] == {"test/red/broken.png": printed["unreadable"]["test/red/broken.png"]}
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "&lt;photos&gt;" in page
    assert "<photos>" not in page
    assert "test/red/broken.png" in page


def test_python_gives_the_numbers_of_the_command(weights, tmp_path):
    photos = make_colors(tmp_path / "photos", {"train": 6, "test": 5})
    ran = vit_probe(photos, "--model", weights, "--json", "--shots", "1,3", "--neighbors", 2)
    printed, found = (
        json.loads(ran.stdout),
        vitruvian.probe(str(photos), str(weights), shots=[1, 3], neighbors=2).to_json(),
    )
    for report in (printed, found):
        del report["feature_seconds"], report["computed"]
        for result in report["results"]:
            del result["seconds"]
    assert printed == json.loads(json.dumps(found))


def test_a_view_of_ones_own_is_probed_and_its_features_are_not_kept(tmp_path, cache):
    photos = make_colors(tmp_path / "photos", {"train": 6, "test": 5})
    model = tiny_model()
    usual = probe(photos, model, only=["neighbors"], neighbors=2)
    for _ in range(2):
        own = probe(
            photos,
            model,
            only=["neighbors"],
            neighbors=2,
            preprocess=lambda image: vitruvian.preprocess_image(image, model.meta.preprocess),
        )
        assert own.computed == 33
        assert own.results[0].top1 == usual.results[0].top1


def test_a_page_of_one_probe_alone_is_whole(tmp_path):
    photos = make_colors(tmp_path / "photos", {"train": 4, "test": 2})
    found = probe(photos, tiny_model(), only=["fewshot"], shots=[2])
    page = write_probe(found, tmp_path / "out").read_text()
    assert "few-shot, 2-shot" in page
    assert "Shots and settings" not in page


@pytest.mark.parametrize("shots", ["0", "1,,5", "five", "1.5", ""])
def test_shots_that_are_no_numbers_are_wrong_usage(weights, shots):
    ran = vit_probe("digits", "--model", weights, "--shots", shots)
    assert ran.exit_code == 2
    assert "such as 1,5,all" in " ".join(ran.stderr.replace("│", " ").split())  # the box around the error wraps lines


def test_data_that_is_not_there_is_an_error(weights):
    ran = vit_probe("nowhere", "--model", weights)
    assert isinstance(ran.exception, VitruvianError)
    assert "nowhere: no such file or folder" in str(ran.exception)


@pytest.mark.slow
def test_a_frozen_vit_ti_tells_most_pets_after_five_images_of_each(shared):
    """Whole numbers are in docs/probe.md; here a part of the images, the same each time."""
    from vitruvian.data.sources import hold_out
    from vitruvian.evaluation.features import compute_features, open_store
    from vitruvian.evaluation.probe_classifiers import fewshot_predictions

    encoder = Encoder(shared / "weights" / "vit_ti16_imagenet1k.safetensors")
    pets, store = open_dataset(shared / "data" / "pets"), open_store(encoder)
    train, test = (
        compute_features(encoder, hold_out(pets.splits[name], fraction, seed=0)[1], store)
        for name, fraction in (("train", 0.05), ("test", 0.02))
    )
    found = fewshot_predictions(train.examples, test.values, classes=37, shots=5, seed=0)
    assert (found == test.labels).mean() > 0.7


def test_shots_that_unreadable_images_take_away_are_noted(tmp_path):
    data = make_colors(tmp_path / "data", {"train": 6, "test": 2})
    for path in sorted((data / "train" / "red").iterdir())[:4]:
        path.write_bytes(b"no image")
    report = probe(data, tiny_model(), only=["fewshot"])
    assert [result.setting for result in report.results] == ["1-shot"]
    assert report.notes[-1] == "no few-shot accuracy for 5, 10, 25 shots: class 'red' has 2 training images"


def test_the_linear_probe_can_be_saved_as_a_model(weights, tmp_path):
    colors, out = make_colors(tmp_path / "colors", {"train": 12, "test": 8}), tmp_path / "probed"
    words = [colors, "--model", weights, "--only", "linear", "--json", "--save", out]
    probed = json.loads(vit_probe(*words).stdout)
    saved = vitruvian.evaluate(colors, out)
    assert saved.classifier.labels == open_dataset(colors).classes
    assert saved.measures.top1 == pytest.approx(probed["results"][0]["top1"])
    assert "exists" in vit_probe(*words).stderr
