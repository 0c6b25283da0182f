"""Vectors of `vit embed` used again: the numbers of a probe that computes them, and better doubts of the doctor."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from vitruvian.bulk import embed, predict
from vitruvian.bulk.result import open_vectors, probe_vectors
from vitruvian.cli.app import main
from vitruvian.data.doctor import diagnose
from vitruvian.data.doctor.checks import SIMILAR
from vitruvian.errors import DataError
from vitruvian.evaluation.probe import probe
from vitruvian.inference import Encoder

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def vectors(images, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    embed(images, model, folder, piece=5, batch_size=2, dtype="float32")
    return folder


def test_a_probe_of_vectors_gives_the_numbers_of_one_that_reads_the_images(images, model, vectors):
    wanted = {"only": ["fewshot", "neighbors"], "shots": [2], "neighbors": 3}
    theirs, ours = probe(images, Encoder(model), **wanted), probe_vectors(vectors, **wanted)
    assert [(r.probe, r.setting, r.runs, r.mean_per_class) for r in ours.results] == [
        (r.probe, r.setting, r.runs, r.mean_per_class) for r in theirs.results
    ]
    assert (ours.train_images, ours.test_images, ours.classes) == (theirs.train_images, theirs.test_images, 2)
    assert ours.test_is == theirs.test_is
    assert list(ours.unreadable) == list(theirs.unreadable) == ["a/05.png"]
    assert ours.computed == 0


def test_answers_and_images_without_classes_cannot_be_probed(images, model, tmp_path):
    predict(images, model, tmp_path / "answers", piece=50)
    with pytest.raises(DataError, match="predictions, not vectors"):
        probe_vectors(tmp_path / "answers")
    embed(images / "b", model, tmp_path / "plain", piece=50)
    with pytest.raises(DataError, match="the images have no classes; a probe needs labels"):
        probe_vectors(tmp_path / "plain")


def test_vectors_of_other_images_are_refused(images, model, vectors, tmp_path):
    store = open_vectors(vectors)
    store.check_data(images)
    other = shutil.copytree(images, tmp_path / "images")
    (other / "b" / "23.png").rename(other / "b" / "99.png")
    with pytest.raises(DataError, match=r"whose image 23 is b/23\.png; in .* it is b/99\.png; compute"):
        store.check_data(other)
    (other / "b" / "99.png").unlink()
    with pytest.raises(DataError, match=r"24 images; .* has 23; compute the vectors again"):
        store.check_data(other)
    with pytest.raises(DataError, match="23 images, but 24 vectors"):
        diagnose(other, vectors=store.values)


def test_labels_that_vectors_contradict_are_found_where_edges_and_colors_say_nothing(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / "images" / "ab"[number // 20] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(path)
    vectors = rng.normal(0, 0.3, (40, 8)).astype(np.float32)
    vectors[:20, 0] += 2
    vectors[20:, 1] += 2
    vectors[3, :2] = 0, 3  # an `a` among the `b`
    vectors[30] = np.nan  # as of an image that could not be read
    vectors[7] = 2 * vectors[12]
    found = {finding.check: finding for finding in diagnose(tmp_path / "images", vectors=vectors).findings}
    assert [example.images[0].key for example in found["label"].examples] == ["a/03.png"]
    assert "the features separate all 2 classes" in found["label"].text
    pairs = {frozenset(image.key for image in example.images) for example in found["alike"].examples}
    assert frozenset({"a/07.png", "a/12.png"}) in pairs
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert found["alike"].count == (np.triu(units @ units.T, 1) >= SIMILAR).sum()
    unchecked = {finding.check: finding for finding in diagnose(tmp_path / "images").findings}["labels"]
    assert (unchecked.level, unchecked.text) == ("unchecked", "labels: edges and colors do not separate these classes")


def test_the_commands_take_vectors(images, vectors, tmp_path, monkeypatch, capsys):
    def vit(*words):
        monkeypatch.setattr("sys.argv", ["vit", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, capsys.readouterr()

    code, said = vit("probe", "--vectors", vectors, "--only", "fewshot", "--shots", "2", "--json")
    assert code == 0
    assert json.loads(said.out)["classes"] == 2
    code, said = vit("probe", images, "--model", "m", "--vectors", vectors)
    assert code == 2
    assert "--vectors replaces DATA and --model" in said.err
    words = ["doctor", images, "--vectors", vectors, "--review", tmp_path / "review.html", "--workers", 0, "--json"]
    code, said = vit(*words)
    assert code == 1  # one image cannot be read
    assert "alike" in {finding["check"] for finding in json.loads(said.out)["findings"]}
    assert (tmp_path / "review.html").exists()
    code, said = vit("doctor", images, "--apply", tmp_path / "c.json")
    assert code == 2
    assert "--apply needs --out corrected.csv" in said.err
