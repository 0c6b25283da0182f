"""Cascades and token merging: their laws, how they are saved, and their errors."""

import copy

import numpy as np
import pytest
import torch
from compress_models import tiny_model
from PIL import Image

import vitruvian as vt
from vitruvian.compress import fewer_tokens
from vitruvian.compress.fewer_tokens import fit_cascade, fit_merging
from vitruvian.config import CascadeConfig
from vitruvian.errors import CheckpointError, ConfigError, DataError
from vitruvian.inference import first_pass_pixels, probabilities_of

TINY = vt.ViTConfig(image_size=32, patch_size=4, depth=2, width=16, mlp_dim=32, num_heads=2, num_classes=5)


@pytest.fixture(scope="module")
def model():
    model = vt.build(TINY).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)
    model.meta = model.meta.replace(preprocess=vt.Preprocess(image_size=32))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of two classes, which no label space knows."""
    root, rng = tmp_path_factory.mktemp("calibration"), np.random.default_rng(0)
    for number in range(24):
        (root / "ab"[number % 2]).mkdir(exist_ok=True)
        levels = rng.integers(0, 256, (4 + number % 5, 6, 3), np.uint8)
        Image.fromarray(levels).resize((40, 36)).save(root / "ab"[number % 2] / f"{number}.png")
    return root


def with_cascade(model, **settings):
    changed = vt.with_merging(model)
    changed.meta = changed.meta.replace(cascade=CascadeConfig(**settings))
    return changed


PIXELS = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_at_threshold_1_a_cascade_is_the_whole_model_and_at_0_its_first_pass(model):
    whole = vt.Classifier(model).logits(PIXELS)
    settings = {"image_size": 16, "tome_r": 3}
    torch.testing.assert_close(vt.Classifier(with_cascade(model, threshold=1.0, **settings)).logits(PIXELS), whole)
    cascade = CascadeConfig(threshold=0.0, **settings)
    first = vt.Classifier(vt.with_merging(model, cascade.tome_r)).logits(first_pass_pixels(PIXELS, cascade))
    found = vt.Classifier(with_cascade(model, threshold=0.0, **settings)).logits(PIXELS)
    assert torch.equal(found, first)
    assert not torch.equal(found, whole)


def test_other_merging_leaves_a_cascade_out(model):
    """Its threshold was fitted to other answers, and tome_r=0 promises the whole model."""
    cascade = with_cascade(model, threshold=0.0, tome_r=3)
    assert torch.equal(vt.Classifier(cascade, tome_r=0).logits(PIXELS), vt.Classifier(model).logits(PIXELS))
    assert vt.with_merging(cascade, 3).meta.cascade is None
    assert cascade.meta.cascade is not None


def test_each_image_has_the_answer_of_the_pass_that_its_certainty_asks_for(model):
    first = vt.Classifier(vt.with_merging(model, 12)).logits(PIXELS)
    certainty = probabilities_of(model, first).amax(1)
    threshold = float(certainty.sort().values[4:6].mean())  # no image lies on it, where the last bit would decide
    whole = vt.Classifier(model).logits(PIXELS)
    found = vt.Classifier(with_cascade(model, threshold=threshold, tome_r=12)).logits(PIXELS)
    wanted = torch.where((certainty > threshold)[:, None], first, whole)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)  # batches of another size
    alone = torch.cat(
        [vt.Classifier(with_cascade(model, threshold=threshold, tome_r=12)).logits(each[None]) for each in PIXELS]
    )
    torch.testing.assert_close(alone, wanted, atol=1e-5, rtol=1e-5)


def test_a_cascade_is_saved_and_loaded_as_one_folder(model, tmp_path):
    cascade = with_cascade(model, threshold=0.4, image_size=(16, 16), tome_r=(2, 1))
    vt.save(cascade, tmp_path / "cascade")
    again = vt.load(tmp_path / "cascade")
    assert again.meta.cascade == cascade.meta.cascade
    answers = [vt.Classifier(each).logits(PIXELS) for each in (again, cascade)]
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-5)  # where an array lies in memory changes its last bit
    assert vt.load(tmp_path / "cascade", image_size=64).meta.cascade is None  # fitted to other answers
    assert vt.load(tmp_path / "cascade", num_classes=3).meta.cascade is None


def test_a_fitted_cascade_keeps_within_the_expected_loss_on_its_images(model, folder):
    found = [fit_cascade(model, folder, tome_r=12, max_loss=loss) for loss in (100.0, 2.0)]
    assert found[0].again == 0
    assert found[0].cascade.threshold == 0
    assert found[1].expected_loss <= 2.0
    assert found[1].images == 24
    assert found[1].again >= found[0].again
    with pytest.raises(ConfigError, match="the first pass costs as much as the full model"):
        fit_cascade(model, folder)


def test_a_cascade_that_saves_nothing_is_refused(model, folder):
    with pytest.raises(ConfigError, match="this cascade saves nothing"):
        fit_cascade(model, folder, image_size=8, max_loss=0.0)


def test_weights_that_are_not_finite_are_refused(model, folder):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match=r"'head\.weight' contains NaN or infinity"):
        fit_cascade(broken, folder, tome_r=1)
    with pytest.raises(CheckpointError, match=r"'head\.weight' contains NaN or infinity"):
        fit_merging(broken, folder, 1)


def test_fitted_thresholds_merge_as_many_tokens_as_asked_on_average(model, folder):
    fitted = fit_merging(model, folder, (10, 6))
    thresholds = fitted.config.tome_thresholds
    assert len(thresholds) == 2
    images = [vt.preprocess_image(path, model.meta.preprocess) for path in sorted(folder.glob("*/*.png"))]
    left = []

    def count(block, given, tokens):
        left.append(given[0].shape[1])

    hook = fitted.blocks[1].norm1.register_forward_hook(count)
    with torch.no_grad():
        for image in images:
            fitted(image[None])
    hook.remove()
    assert np.mean(left) == pytest.approx(65 - 10, abs=0.5)
    assert len(set(left)) > 1  # each image its own number


def test_images_without_classes_suffice_to_fit_on(model, folder, tmp_path):
    (tmp_path / "flat").mkdir()
    for path in folder.glob("*/*.png"):
        (tmp_path / "flat" / path.name).write_bytes(path.read_bytes())
    wanted = fit_cascade(model, folder, tome_r=12, max_loss=50)
    assert fit_cascade(model, tmp_path / "flat", tome_r=12, max_loss=50) == wanted
    found = fit_merging(model, tmp_path / "flat", 8).config.tome_thresholds
    assert found == pytest.approx(fit_merging(model, folder, 8).config.tome_thresholds, abs=1e-6)
    with pytest.raises(DataError, match="tset"):
        fit_merging(model, folder, 8, split="tset")


def test_merging_needs_no_head_and_something_to_merge(model, folder):
    bare = vt.build(TINY.replace(num_classes=0)).eval()
    assert len(fit_merging(bare, folder, 8).config.tome_thresholds) == 2
    with pytest.raises(ConfigError, match="tome_r=0 merges no tokens"):
        fit_merging(model, folder, 0)


def test_the_commands_write_models_that_predict_uses(model, folder, tmp_path, capsys):
    from typer.testing import CliRunner

    from vitruvian.cli.app import app

    vt.save(model, tmp_path / "whole")
    for arguments in (["cascade", "--tome-r", "12", "--max-loss", "50"], ["merge", "--tome-r", "8"]):
        kind, options = arguments[0], ["--calibrate", str(folder), "--only", *arguments]
        ran = CliRunner().invoke(app, ["optimize", str(tmp_path / "whole"), str(tmp_path / kind), *options])
        assert ran.exit_code == 0, ran.output
        assert "wrote" in ran.output
        own = CliRunner().invoke(app, ["optimize", str(tmp_path / "whole"), str(tmp_path / "whole"), *options])
        assert "the destination is the source itself" in str(own.exception)
    assert vt.load(tmp_path / "cascade").meta.cascade.tome_r == 12
    assert len(vt.load(tmp_path / "merge").config.tome_thresholds) == 2


def test_tokens_merge_where_the_outputs_change_the_least():
    model = tiny_model(depth=6, image_size=64)
    pixels = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    candidates = fewer_tokens.candidate_blocks(6)
    assert candidates == [(1, 2, 3), (2, 3, 4)]
    expected = fewer_tokens.log_probabilities(model, pixels)
    costs = {}
    for blocks in candidates:
        counts = fewer_tokens.merge_counts(blocks, 6, 64, fewer_tokens.COMPARED_SHARE)
        costs[blocks] = fewer_tokens.merging_cost(model, counts, pixels, expected)
    best = min(costs, key=costs.__getitem__)
    assert len(set(costs.values())) == 2
    steps = fewer_tokens.merging_steps(model, pixels)
    assert all(tuple(block for block, r in enumerate(counts) if r) == best for counts in steps)
    amounts = [max(counts) for counts in steps]
    assert amounts == sorted(set(amounts))
    assert amounts[-1] == round(0.2 * 64)


def test_models_that_need_all_patches_merge_nothing():
    pixels = torch.zeros(2, 3, 16, 16)
    assert fewer_tokens.merging_steps(tiny_model(pos_embed="relative"), pixels) == []
    assert fewer_tokens.merging_steps(vt.with_merging(tiny_model(), 1), pixels) == []
    assert fewer_tokens.merging_steps(tiny_model(depth=1), pixels) == []
