"""Averaged weights: what is averaged, that only a better average is kept, and that the sweep says so."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from making_weights import TINY_RECIPE, tiny_weights

from vitruvian.training import finetune as soup
from vitruvian.training.finetune import finetune, protocol_for
from vitruvian.weights.load import load


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    weights = tiny_weights(tmp_path_factory.mktemp("weights") / "tiny")
    found = protocol_for("digits", weights, settings=TINY_RECIPE, lrs=(1e-2,), seeds=2)
    return replace(found, soup=True)


@pytest.fixture(scope="module")
def kept(protocol, tmp_path_factory):
    """A sweep whose averages are measured, with one that is surely better than no training at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soup, "SHARES", (1.0,))
        patch.setattr(soup.Run, "result", lambda run, *keys: dict.fromkeys(keys, 0.0))
        lines = []
        sweep = finetune(protocol, tmp_path_factory.mktemp("soup") / "sweep", report=lines.append, progress=False)
    return sweep, lines


@pytest.mark.slow
def test_a_better_average_of_the_seeds_is_the_model_of_the_sweep(kept, capsys):
    sweep, lines = kept
    recipes = [trial.recipe for trial in sweep.trials]
    assert [(recipe.validation, recipe.seed) for recipe in recipes] == [
        ("dev", 0),
        ("dev", 1),
        ("test", 0),
        ("test", 1),
    ]
    record = json.loads((sweep.folder / "sweep.json").read_text())["soup"]
    assert (record["kept"], record["name"], record["metric"]) == (True, "average of 2 seeds", "top1")
    assert record["measures"]["count"] == sweep.test[0].measures["count"]
    model = load(sweep.folder)
    assert model.meta.source == str(sweep.folder / "soup" / "model")
    assert "using the average of the seeds" in capsys.readouterr().err
    seeds = [load(trial.folder).state_dict() for trial in sweep.test]
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, (seeds[0][name] + seeds[1][name]) / 2, atol=1e-7)
    text = f"average of 2 seeds: top1 {record['dev']:.4g} on the dev split, the best seed alone 0; kept, with "
    assert lines[-1].startswith(text)
    assert "average of 2 seeds" in (sweep.folder / "report.html").read_text()


@pytest.mark.slow
def test_a_share_of_the_starting_weights_leaves_the_head_alone(kept, protocol):
    sweep, _ = kept
    folder, start = sweep.test[0].folder, load(protocol.recipe.weights).state_dict()
    mixed, tuned = soup.average_weights([folder], 0.75).state_dict(), load(folder).state_dict()
    for name, tensor in mixed.items():
        expected = tuned[name] if name.startswith("head.") else 0.75 * tuned[name] + 0.25 * start[name]
        assert torch.allclose(tensor, expected, atol=1e-6), name


@pytest.mark.slow
def test_an_average_that_is_not_better_is_not_kept(kept, protocol, monkeypatch, tmp_path):
    sweep, folder = kept[0], tmp_path / "sweep"
    shutil.copytree(sweep.folder, folder)
    monkeypatch.setattr(soup.Run, "result", lambda run, *keys: dict.fromkeys(keys, 100.0))
    lines = []
    again = finetune(protocol, folder, report=lines.append, progress=False)
    assert again.soup is not None
    assert not again.soup.kept
    assert again.soup.measures == {}
    assert lines[-1].endswith("the best seed alone 100; not kept")
    assert load(folder).meta.source == str(folder / sweep.test[0].folder.name / "model")
