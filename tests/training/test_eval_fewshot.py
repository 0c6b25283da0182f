"""Few-shot accuracy during training: as `vit probe` measures it, on other data or other classes, and resumable."""

import json

import numpy as np
import pytest
from runs import TINY, StopAt

from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import ClassSubset
from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.probe import probe
from vitruvian.training import Interrupted, resume, train

OTHER = ("eval_fewshot=other_classes", "class_range=[0, 0.5]")
MASKED = ("objective=masked", "architecture.pool=mean")


def run_of(folder, *settings, **more):
    return train("digits", recipe="digits", out=folder, settings=[*TINY, *settings], progress=False, **more)


@pytest.mark.slow
def test_it_is_the_accuracy_that_the_probe_reports_for_the_trained_model(tmp_path):
    run = run_of(tmp_path / "run", "eval_fewshot=digits", "fewshot_shots=3")
    result = probe("digits", run.folder, only=["fewshot"], shots=[3]).results[0]
    assert run.evaluation["fewshot"] == pytest.approx(result.top1, abs=0.3)  # one of 359 images, by rounding
    assert [line["step"] for line in run.metrics("val") if "fewshot" in line] == [9, 12]
    assert "Few-shot accuracy" in (run.folder / "report.html").read_text()


@pytest.mark.parametrize("objective", [(), MASKED])
def test_the_classes_that_are_left_out_are_not_trained_on(tmp_path, objective):
    run = run_of(tmp_path / "run", *OTHER, *objective)
    digits = open_dataset("digits")
    assert run.facts["training_images"] == sum(np.asarray(digits.train.labels()) < 5)
    assert run.evaluation["fewshot"] > 20  # of five classes
    if not objective:
        assert run.facts["classes"] == list(digits.classes[:5])
        assert run.model().config.num_classes == 5


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    whole = run_of(tmp_path / "whole", *OTHER)
    with pytest.raises(Interrupted):
        run_of(tmp_path / "parts", *OTHER, listeners=[StopAt(9)])
    parts = resume(tmp_path / "parts", progress=False)
    keys = ("step", "loss", "top1", "fewshot")
    for one, other in zip(whole.metrics("val"), parts.metrics("val"), strict=True):
        assert [one[key] for key in keys] == [other[key] for key in keys]
    files = [run.folder / "model" / "model.safetensors" for run in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_labels_of_a_class_subset_are_positions_among_its_classes():
    source = open_dataset("digits").train
    part = ClassSubset(source, [7, 2])
    labels = np.asarray(part.labels())
    assert part.classes == (source.classes[7], source.classes[2])
    assert len(part) == sum(np.isin(np.asarray(source.labels()), [2, 7]))
    for index in (0, len(part) - 1):
        assert part.label(index) == labels[index] == {7: 0, 2: 1}[source.label(part.original(index))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["eval_fewshot=other_classes"], "eval_fewshot='other_classes' needs class_range: all classes are trained on"),
        (["class_range=[0.5, 0.5]"], "is empty"),
        (["class_range=[0, 0.1]"], "class_range=\\(0.0, 0.1\\) has 1 of 10 classes"),
        (["eval_fewshot=digits", "fewshot_shots=900"], "900"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, settings, message):
    with pytest.raises((ConfigError, DataError), match=message):
        run_of(tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_measure_what_one_does(tmp_path, parallel):
    from forked import ranks

    settings = [word for setting in (*TINY, *OTHER, "workers=0") for word in ("--set", setting)]
    lines = []
    for count in (1, 2):
        out, more = tmp_path / str(count), (["--set", f"parallel={parallel}"] if count > 1 else [])
        words = ["train", "digits", "--recipe", "digits", *settings, *more, "--out", out]
        done = [process.wait() for process in ranks(*words, count=count)]
        assert done[0].code == 0, done[0].err
        lines.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1]))
    assert lines[1]["fewshot"] == pytest.approx(lines[0]["fewshot"], abs=1.2)  # two of 178 images, by rounding
