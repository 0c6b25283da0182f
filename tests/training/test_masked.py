"""Masked-patch pre-training: what is corrupted, what is asked, that it learns, goes on exactly, and can be used."""

import numpy as np
import pytest
import torch
from runs import TINY, changes, lines, same_model, weights

from forked import ranks
from vitruvian.config import Preprocess, ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.inference import Classifier, Encoder
from vitruvian.model.build import build
from vitruvian.model.resnet import ResNet
from vitruvian.training import Interrupted, read_recipe, resume, train
from vitruvian.training.checkpoint import Checkpoints
from vitruvian.training.distributed import Processes
from vitruvian.training.finetune import finetune, protocol_for
from vitruvian.training.integrations import Listener
from vitruvian.training.masked import (
    Colors,
    MaskedViT,
    color_levels,
    colors_of,
    corrupt,
    corruption_of,
    draw_example,
    draws_for,
)
from vitruvian.training.recipe import Recipe
from vitruvian.weights.load import load

MASKED = (*TINY, "objective=masked")
SMALL = ViTConfig(image_size=(8, 8), patch_size=4, depth=1, width=8, mlp_dim=8, num_heads=2, num_classes=0)


def small_model(recipe=None, **changes):
    return MaskedViT.around(build(SMALL.replace(**changes)), recipe or Recipe(steps=1, objective="masked"))


def pixels_and_draws(count=3, seed=1):
    pixels = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return pixels, draws_for(range(count), 4, seed)


def test_half_of_the_patches_are_corrupted_in_shares_of_80_10_and_10():
    found = corruption_of(draws_for(range(2000), 16, seed=0))
    assert found.chosen.sum(dim=1).eq(8).all()
    own = torch.arange(16).expand_as(found.taken_from)
    exchanged = found.taken_from != own
    assert not (found.masked & exchanged).any()
    assert not ((found.masked | exchanged) & ~found.chosen).any()
    # 16,000 draws: four standard deviations are 0.013 and 0.0095
    assert found.masked.sum().item() / 16_000 == pytest.approx(0.8, abs=0.013)
    assert exchanged.sum().item() / 16_000 == pytest.approx(0.1, abs=0.0095)
    assert set(found.taken_from[exchanged].tolist()) == set(range(16))


def test_of_an_odd_number_of_patches_the_smaller_half_is_corrupted():
    assert corruption_of(draws_for([0], 9, seed=0)).chosen.sum() == 4


@pytest.mark.parametrize(
    ("patches", "ratio", "count"),
    [(7, 0.15, 1), (9, 0.15, 1), (13, 0.15, 1), (14, 0.15, 2), (20, 0.15, 3), (100, 0.29, 29), (50, 0.58, 29)],
)
def test_a_fraction_of_a_small_number_of_patches_is_rounded_down_as_a_decimal(patches, ratio, count):
    """0.29 * 100 is 28.999... in floating point."""
    corruption = corruption_of(draws_for(range(3), patches, seed=0), ratio)
    assert corruption.chosen.sum(dim=1).tolist() == [count] * 3


def test_a_corrupted_patch_is_the_mask_or_the_patch_it_is_taken_from():
    patches, mask = torch.arange(32.0).view(2, 16, 1), torch.tensor([[[-1.0]]])
    corruption = corruption_of(draws_for([4, 5], 16, seed=0))
    found = corrupt(patches, mask, corruption)
    for image in range(2):
        for place in range(16):
            expected = -1.0 if corruption.masked[image, place] else 16 * image + corruption.taken_from[image, place]
            assert found[image, place] == expected


def test_draws_depend_on_the_image_and_not_on_its_batch():
    together, alone = draws_for([3, 8], 16, 0, 5), draws_for([8], 16, 0, 5)
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(draws_for([8], 16, 0, 6), alone)


@pytest.mark.parametrize("channels", [1, 3])
def test_colors_are_three_bits_of_each_channels_mean_level(channels):
    levels = np.random.default_rng(0).integers(0, 256, (2, channels, 8, 12))
    levels[0, :, :4, :4] = 255
    mean, std = (0.3, 0.5, 0.7)[:channels], (0.2, 0.25, 0.3)[:channels]
    view = Preprocess(image_size=(8, 12), mean=mean, std=std)
    shape = (-1, 1, 1)
    normalized = (levels / 255 - np.reshape(mean, shape)) / np.reshape(std, shape)
    found = colors_of(torch.from_numpy(normalized).float(), 4, view)
    for image in range(2):
        for row in range(2):
            for column in range(3):
                expected = 0
                for channel in range(channels):
                    patch = levels[image, channel, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                    expected = 8 * expected + int(patch.mean()) // 32
                assert found[image, 3 * row + column, 0] == expected
    assert found[0, 0, 0] == 8**channels - 1


def test_a_color_is_shown_in_the_middle_of_its_class():
    assert color_levels(torch.tensor([0, 7 * 64 + 1]), 3).tolist() == [[16, 16, 16], [240, 16, 48]]


def test_the_loss_counts_corrupted_patches_alone():
    model, (pixels, draws) = small_model(), pixels_and_draws()
    with torch.no_grad():
        model.colors.weight.normal_(generator=torch.Generator().manual_seed(2))
    objective = Colors(Recipe(steps=1, objective="masked"), model, Processes())
    losses, _ = objective.losses(model, pixels, draws, torch.empty(0))
    corruption = corruption_of(draws)
    seen = corrupt(model.embed.patches(pixels), model.mask_embedding, corruption)
    tokens = model.forward_blocks(model.embed.with_positions(seen, (2, 2)))[:, 1:]
    scores = model.colors(tokens).log_softmax(dim=-1)
    colors = colors_of(pixels, 4, model.meta.preprocess)
    for image in range(3):
        places = corruption.chosen[image].nonzero()[:, 0].tolist()
        expected = -sum(scores[image, place, colors[image, place, 0]] for place in places) / len(places)
        assert losses[image].item() == pytest.approx(expected.item(), rel=1e-5)


TARGET_LEVELS = np.random.default_rng(3).integers(0, 256, (2, 3, 16, 24))


@pytest.mark.parametrize("target", ["mean_color", "colors_4x4", "pixels"])
@pytest.mark.parametrize("ratio", [0.5, 0.34])  # three or two of six patches
def test_each_target_has_the_loss_of_an_independent_implementation(target, ratio):
    recipe = Recipe(steps=1, objective="masked", masked_target=target, mask_ratio=ratio)
    model = small_model(recipe, image_size=(16, 24), patch_size=8, in_channels=3)
    with torch.no_grad():
        model.colors.weight.normal_(generator=torch.Generator().manual_seed(2))
    draws = draws_for(range(2), 6, 5)
    normalized = TARGET_LEVELS / 255 / 0.5 - 1
    pixels = torch.from_numpy(normalized).float()
    losses, _, levels = Colors(recipe, model, Processes()).patch_losses(model, pixels, draws)
    outputs = model(pixels, draws).detach().double().numpy()
    for image in range(2):
        order = draws[image, 0].numpy()
        places = sorted(np.argsort(order, kind="stable")[: 3 if ratio == 0.5 else 2].tolist())
        for index, place in enumerate(places):
            top, left = 8 * (place // 3), 8 * (place % 3)
            patch = TARGET_LEVELS[image, :, top : top + 8, left : left + 8]
            output = outputs[image, index]
            if target == "pixels":
                expected = ((output - normalized[image, :, top : top + 8, left : left + 8].ravel()) ** 2).mean()
            else:
                side = 4 if target == "colors_4x4" else 1
                cells = patch.reshape(3, side, 8 // side, side, 8 // side).mean(axis=(2, 4)).reshape(3, -1)
                classes = [64 * (r // 32) + 8 * (g // 32) + b // 32 for r, g, b in cells.astype(int).T]
                logits = output.reshape(side * side, 512)
                norms = np.log(np.exp(logits).sum(axis=1))
                expected = np.mean([norms[cell] - logits[cell, color] for cell, color in enumerate(classes)])
            assert losses[image, index].item() == pytest.approx(expected, rel=1e-4)
    assert levels.shape[2:] == {"mean_color": (3, 1, 1), "colors_4x4": (3, 4, 4), "pixels": (3, 8, 8)}[target]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["colors_4x4", "pixels"])
def test_the_other_targets_are_learned_and_shown(tmp_path, target):
    settings = [*MASKED, "lr=0.003", f"masked_target={target}", "mask_ratio=0.3"]
    run = train("digits", out=tmp_path / "run", settings=settings)
    measured = run.metrics("val")
    assert measured[-1]["loss"] < measured[0]["loss"]
    assert measured[-1]["patches"] == 359  # one of four patches
    assert 'alt="predicted ' in (run.folder / "report.html").read_text()


def test_settings_of_masking_are_refused_with_labels():
    with pytest.raises(ConfigError, match="masked_target and mask_ratio need objective='masked'"):
        Recipe(steps=1, mask_ratio=0.15)


def test_what_is_masked_is_not_seen():
    model, (pixels, draws) = small_model(), pixels_and_draws(1)
    torch.nn.init.normal_(model.colors.weight)
    draws[:, 1] = 0.0  # all corrupted ones are masked
    hidden = corruption_of(draws).chosen[0].view(2, 2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    other = torch.where(hidden, torch.full_like(pixels, 0.9), pixels)
    assert torch.equal(model(pixels, draws), model(other, draws))
    assert not torch.equal(model(pixels, draws), model(pixels + 0.1, draws))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": "bce"}, "loss cannot be set with objective='masked'"),
        (
            {"label_smoothing": 0.1},
            "label_smoothing cannot be set with objective='masked', which uses no labels",
        ),
        ({"patch_drop": 0.5}, "patch_drop cannot be set"),
        ({"final": "best"}, "final cannot be set"),
        ({"validation": "test"}, "validation cannot be set"),
    ],
)
def test_settings_about_labels_are_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        Recipe(steps=1, objective="masked", **change)


def test_models_without_patches_of_their_own_are_refused():
    from vitruvian.config import ResNetConfig, StemConfig

    with torch.device("meta"), pytest.raises(ConfigError, match="a ResNet has no patches"):
        MaskedViT.around(ResNet(ResNetConfig()), Recipe(steps=1))
    hybrid = SMALL.replace(patch_size=1, stem=StemConfig(stages=(), width=32))
    for config, text in [
        (hybrid, "the stem of a hybrid mixes neighboring patches"),
        (SMALL.replace(pool="map"), "attention pooling would not be trained"),
        (SMALL.replace(representation_size=8), "set architecture.representation_size=0"),
        (SMALL.replace(patch_size=8), "mask_ratio=0.5 of 1 patches is less than one patch"),
    ]:
        with pytest.raises(ConfigError, match=text):
            MaskedViT.around(build(config), Recipe(steps=1))


class StopAt(Listener):
    def __init__(self, step):
        self.step = step

    def stepped(self, step):
        if step == self.step:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRUVIAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        return train("digits", out=tmp_path_factory.mktemp("run") / "run", settings=[*MASKED, "lr=0.003"])


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 9])
def test_a_run_stopped_and_continued_equals_an_unbroken_one(tmp_path, pretrained, step):
    with pytest.raises(Interrupted):
        train("digits", out=tmp_path / "run", settings=[*MASKED, "lr=0.003"], listeners=[StopAt(step)])
    assert "mask_embedding" in " ".join(checkpoint_names(tmp_path / "run"))
    continued = resume(tmp_path / "run")
    assert same_model(continued.folder, pretrained.folder)
    assert lines(continued.folder) == lines(pretrained.folder)


def checkpoint_names(run):
    from safetensors import safe_open

    from vitruvian.training.distributed import Processes

    last = Checkpoints(run / "checkpoints", Processes()).all()[-1]
    with safe_open(last / "state.safetensors", "pt") as file:
        return list(file.keys())


def test_it_learns_and_says_how_well_on_held_out_images(pretrained):
    measured = pretrained.metrics("val")
    assert measured[-1]["loss"] < measured[0]["loss"]
    assert measured[-1]["count"] == 359
    assert measured[-1]["patches"] == 359 * 2  # of four patches
    assert 0 < measured[-1]["top1"] <= 100


def test_the_model_has_no_head_and_nothing_of_the_pre_training(pretrained):
    model = load(pretrained.folder)
    assert model.config.num_classes == 0
    assert model.meta.labels is None
    assert not set(MaskedViT.own_names) & set(weights(pretrained.folder))
    assert Encoder(model).features(torch.zeros(1, 1, 8, 8)).shape == (1, 16)
    with pytest.raises(ConfigError, match="this model has no classification head"):
        Classifier(pretrained.folder)


@pytest.mark.slow
def test_training_and_fine_tuning_start_from_it(tmp_path, pretrained):
    start = weights(pretrained.folder)
    settings = ["steps=2", "batch_size=32", "lr=1e-9", "workers=0", "average=none"]
    run = train("digits", weights=pretrained.folder, out=tmp_path / "run", settings=settings)
    assert run.model().config.num_classes == 10
    found = weights(run.folder)
    name = "blocks.0.mlp.fc1.weight"
    assert torch.allclose(found[name], start[name], atol=1e-6)
    protocol = protocol_for(
        "digits", pretrained.folder, settings=["steps=3", "batch_size=32", "workers=0", "max_train_samples=200"]
    ).quick()
    assert finetune(protocol, tmp_path / "sweep").values()[0] > 10  # chance


def test_the_report_shows_predicted_colors_and_no_classes(pretrained):
    page = (pretrained.folder / "report.html").read_text()
    assert "Predicted colors" in page
    assert "color accuracy" in page
    assert 'alt="input of the model"' in page
    assert "Confusion matrix" not in page
    assert "Classes</h2>" not in page


def test_the_three_images_of_an_example_are_image_corruption_and_prediction():
    levels = np.arange(4, dtype=np.uint8).repeat(4).reshape(1, 4, 4) * 60  # rows 0, 60, 120, 180
    draws = np.array([[0.9, 0.1, 0.2, 0.8], [0.0, 0.0, 0.85, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    pixels = (levels / 255 - 0.5).astype(np.float32) / np.float32(0.5)
    view = Preprocess(image_size=(4, 4), mean=(0.5,), std=(0.5,))
    corruption = corruption_of(torch.from_numpy(draws)[None]).row(0)
    predicted = torch.tensor([240, 16], dtype=torch.uint8).view(2, 1, 1, 1)
    example = draw_example(0, torch.from_numpy(pixels)[None], corruption, predicted, view, 2)
    image, seen, said = example.image, example.seen, example.predicted
    assert np.array_equal(image, levels[0])
    assert (seen[:2, 2:] == 128).all()  # patch 1 is masked
    assert np.array_equal(seen[2:, :2], image[2:, 2:])  # patch 2 is patch 3
    assert (said[:2, 2:] == 240).all()
    assert (said[2:, :2] == 16).all()
    assert np.array_equal(said[2:, 2:], image[2:, 2:])


def test_the_papers_recipe_has_the_papers_numbers():
    recipe = read_recipe("paper-masked")
    assert (recipe.model, recipe.lr, recipe.batch_size, recipe.objective) == ("ViT-B/16", 2e-4, 4096, "masked")
    assert (recipe.steps, recipe.warmup, recipe.schedule) == (1_000_000, 10_000, "cosine")  # Appendix B.1.2
    assert read_recipe("masked").objective == "masked"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_learns(tmp_path, pretrained, parallel):
    settings = changes("objective=masked", "lr=0.003", f"parallel={parallel}")
    for process in ranks("train", "digits", "--out", tmp_path / "run", *settings):
        ended = process.wait()
        assert ended.code == 0, ended.err
    one, two = ([line["loss"] for line in lines(run)] for run in (pretrained.folder, tmp_path / "run"))
    # Float32 gradients summed in another order differ in the last bits; twelve steps of Adam make that a little more.
    assert two == pytest.approx(one, rel=2e-4)
