"""Runs on several labels per image, on numbers and on levels: losses, masks, resumption, what the model has saved."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import TINY, StopAt, lines, same_model

from mixtures import COLORS, write_mixtures
from vitruvian.data.augment import Augment, mix
from vitruvian.errors import ConfigError, DataError
from vitruvian.training import Interrupted, read_recipe, resume, train
from vitruvian.training.finetune import finetune, protocol_for
from vitruvian.training.objective import ROW_LOSSES, TargetRows, asl
from vitruvian.training.recipe import Recipe
from vitruvian.weights.load import load

MULTI = f"target='multi:{','.join(COLORS)}'"
NUMBER = "target='number:brightness'"
SMALL = (*TINY, "model='ViT-Ti/16'", "image_size=8", "batch_size=16", "lr=0.01", "workers=0", "eval_every=2")
PLAIN = ("augment.rand_augment=0", "augment.mixup_alpha=0", "augment.cutmix_alpha=0", "augment.random_erasing=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_mixtures(tmp_path_factory.mktemp("mixtures"))


def run_on(data, folder, *settings, **options):
    return train(data, recipe="scratch", out=folder, settings=[*SMALL, *settings], progress=False, **options)


@pytest.mark.slow
def test_several_labels_are_learned_and_their_thresholds_saved(data, tmp_path):
    run = run_on(data, tmp_path / "run", MULTI, "steps=40")
    assert run.evaluation["map"] > 90
    assert {"map", "map_micro", "f1", "hamming", "coverage", "map_low", "map_high"} <= run.evaluation.keys()
    meta = load(run.folder).meta
    assert (meta.labels, meta.target.kind, meta.score_function) == (COLORS, "multi", "sigmoid")
    assert len(meta.target.thresholds) == 3
    assert run.recipe.loss == "bce"
    page = (run.folder / "report.html").read_text()
    assert "Each label" in page
    assert "Worst predictions" in page


@pytest.mark.slow
def test_numbers_are_standardized_and_get_intervals(data, tmp_path):
    run = run_on(data, tmp_path / "run", NUMBER, "steps=60", *PLAIN)
    target = load(run.folder).meta.target
    assert run.evaluation["mae"] < target.std[0] / 2
    assert target.kind == "number"
    assert target.margins[0] > 0
    assert 50 < target.mean[0] < 150
    assert "predicted minus true" in (run.folder / "report.html").read_text()


def test_levels_are_numbers_with_names(data, tmp_path):
    text = data.read_text().replace("label", "tags").replace(",level", ",label")
    (data.parent / "levels.csv").write_text(text)
    (tmp_path / "classes.txt").write_text("dark\nmedium\nlight\n")
    run = run_on(data.parent / "levels.csv", tmp_path / "run", "target='ordinal'", "steps=4")
    assert load(run.folder).meta.target.levels == ("dark", "light", "medium")
    assert any("the order of the 3 classes is dark, light, medium" in note for note in run.facts["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (MULTI, "loss='asl'", "class_weights='balanced'", "augment.mixup_alpha=0.2", "average='ema'", "final='best'"),
        (NUMBER, "loss='l1'"),
    ],
)
def test_a_stopped_run_continues_exactly(data, tmp_path, settings):
    expected = run_on(data, tmp_path / "whole", *settings)
    with pytest.raises(Interrupted):
        run_on(data, tmp_path / "run", *settings, listeners=[StopAt(7)])
    continued = resume(tmp_path / "run", progress=False)
    assert same_model(continued.folder, expected.folder)
    assert lines(continued.folder) == lines(expected.folder)


def test_the_same_call_continues_a_run_whose_recipe_was_fitted_to_the_target(data, tmp_path):
    first = run_on(data, tmp_path / "run", MULTI, auto_resume=True)
    assert run_on(data, tmp_path / "run", MULTI, auto_resume=True).folder == first.folder


@pytest.mark.slow
def test_a_head_begins_as_a_probe_of_the_features(data, tmp_path):
    start = run_on(data, tmp_path / "start", MULTI, "steps=2")
    for target, metric in ((NUMBER, "r2"), (MULTI.replace(",blue", ""), "map")):
        settings = [*TINY[5:], target, "head_init=probe", "lr=1e-9", "steps=1", "workers=0", "batch_size=16"]
        options = {"recipe": "scratch", "settings": settings, "progress": False}
        run = train(data, start.folder, out=tmp_path / metric, **options)
        assert run.evaluation[metric] > {"r2": 0.5, "map": 80}[metric]


@pytest.mark.slow
def test_a_sweep_selects_by_mean_average_precision(data, tmp_path):
    start = run_on(data, tmp_path / "start", NUMBER, "steps=2")
    settings = ["epochs=1", "workers=0", "batch_size=16", "head_init=zero", "enlarge=1", "train_scale=1"]
    for target, metric in ((MULTI, "map"), (NUMBER, "mae")):
        protocol = protocol_for(data, start.folder, settings=[*settings, target], lrs=[1e-9, 1e-2], seeds=1)
        sweep = finetune(protocol, tmp_path / metric, progress=False)
        assert sweep.metric == metric
        best = (min if metric == "mae" else max)(sweep.dev, key=lambda trial: trial.measures[metric])
        assert sweep.chosen_lr == best.recipe.lr
        assert sweep.to_json()[metric]["mean"] > 0
        assert load(sweep.folder).meta.source == str(sweep.test[0].folder / "model")


def objective(target="multi", **settings):
    """The losses of a run, without the run."""
    rows = TargetRows.__new__(TargetRows)
    rows.recipe, rows.positive = Recipe(steps=1, **settings), None
    return rows


@pytest.mark.parametrize("loss", ROW_LOSSES)
def test_unknown_targets_change_neither_loss_nor_gradient(loss):
    outputs = torch.tensor([[0.3, -1.2, 2.0]], requires_grad=True)
    losses = objective(loss=loss).row_losses(outputs, torch.tensor([[1.0, torch.nan, 0.0]]))
    losses.sum().backward()
    assert outputs.grad[0, 1] == 0
    kept = objective(loss=loss).row_losses(outputs[:, [0, 2]], torch.tensor([[1.0, 0.0]]))
    assert torch.equal(losses, kept)
    assert objective(loss=loss).row_losses(outputs, torch.full((1, 3), torch.nan)).item() == 0


def test_the_asymmetric_loss_is_that_of_its_paper():
    outputs = torch.linspace(-6, 6, 13, dtype=torch.float64)
    p = outputs.sigmoid()
    shifted = (1 - p + 0.05).clamp(max=1)  # as the authors' code has it
    assert torch.allclose(asl(outputs, torch.ones(13)), -p.log())
    assert torch.allclose(asl(outputs, torch.zeros(13)), -shifted.log() * (1 - shifted) ** 4)


def test_mixed_targets_are_mixed_and_stay_unknown():
    targets = torch.tensor([[1.0, 0.0], [0.0, torch.nan]])
    settings = Augment(mixup_alpha=1.0)
    pixels = torch.rand(2, 3, 4, 4)
    mixed, soft = mix(pixels, targets, classes=2, settings=settings, rng=np.random.default_rng(0))
    share = ((mixed[0] - pixels[1]) / (pixels[0] - pixels[1])).mean()
    assert torch.allclose(soft[0, 0], share.float(), atol=1e-4)
    assert soft[:, 1].isnan().all()


def test_positive_labels_weigh_by_the_ratio_of_images_without_and_with_them():
    rows = objective(loss="bce")
    rows.positive = torch.tensor([3.0, 1.0])
    outputs, targets = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    expected = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=rows.positive, reduction="sum")
    assert rows.row_losses(outputs, targets)[0] == pytest.approx(expected.item())


def test_settings_that_do_not_suit_the_target_are_refused():
    recipe = read_recipe("finetune-small")
    fitted, notes = recipe.for_target("multi")
    assert (fitted.loss, fitted.label_smoothing, fitted.monitor) == ("bce", 0.0, "map")
    assert notes == ["label_smoothing=0.0, loss=bce, monitor=map, because the data has several labels per image"]
    assert fitted.for_target("multi") == (fitted, [])
    assert recipe.for_target("single") == (recipe, [])
    with pytest.raises(
        ConfigError, match="loss='l1' cannot be used with several labels per image; losses are bce, asl"
    ):
        recipe.replace(loss="l1").for_target("multi")
    with pytest.raises(ConfigError, match="class_weights='balanced' cannot be used with numbers"):
        recipe.replace(class_weights="balanced").for_target("number")
    with pytest.raises(ConfigError, match="unknown target 'many'"):
        recipe.replace(target="many")


def test_a_number_that_never_varies_cannot_be_learned(data, tmp_path):
    lines = data.read_text().splitlines()
    path = data.parent / "same.csv"
    path.write_text("\n".join(["path,split,age", *(",".join([*line.split(",")[:2], "7"]) for line in lines[1:])]))
    with pytest.raises(DataError, match="all images have the same value of 'age', so that it cannot be learned"):
        run_on(path, tmp_path / "run", "target='number:age'")
