"""What a run does: steps, options, early ends, and errors in one line."""

import importlib
import itertools
import json
import random

import numpy as np
import pytest
import torch
from making_weights import tiny_weights
from PIL import Image
from runs import TINY, folder_of, identical, lines, same_model, weights
from safetensors.torch import load_file

from vitruvian.config import CascadeConfig, Preprocess, ResNetConfig
from vitruvian.errors import CheckpointError, ConfigError, DataError, TrainingError, VitruvianError
from vitruvian.inference import Classifier
from vitruvian.model.build import build
from vitruvian.model.vit import ViT
from vitruvian.training import Listener, read_recipe, train
from vitruvian.training.distributed import Processes
from vitruvian.training.initial_model import augment_for, model_for
from vitruvian.training.loop import Trainer
from vitruvian.training.objective import LOSSES
from vitruvian.training.recipe import change_recipe
from vitruvian.training.splits import TrainingBatches, split_data
from vitruvian.weights.load import load
from vitruvian.weights.save import save


def tiny_run(tmp_path, *settings, name="run", **options):
    return train("digits", out=tmp_path / name, settings=[*TINY, *settings], **options)


@pytest.mark.slow
def test_parts_of_a_batch_add_up_to_the_whole_batch(tmp_path):
    whole = weights(tiny_run(tmp_path, "grad_accum_steps=1", "grad_clip=1", name="whole").folder)
    parts = weights(tiny_run(tmp_path, "grad_accum_steps=5", "grad_clip=1", name="parts").folder)
    for name, tensor in whole.items():  # float32 sums in another order, and twelve steps of Adam
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_workers_do_not_change_the_result(tmp_path):
    alone = tiny_run(tmp_path, "workers=0", "augment.random_erasing=0.5", name="alone")
    helped = tiny_run(tmp_path, "workers=2", "augment.random_erasing=0.5", name="helped")
    assert same_model(alone.folder, helped.folder)
    assert lines(alone.folder) == lines(helped.folder)


@pytest.mark.slow
def test_recomputed_activations_give_the_same_weights(tmp_path):
    kept = tiny_run(tmp_path, "architecture.dropout=0.1", name="kept")
    again = tiny_run(tmp_path, "architecture.dropout=0.1", "grad_checkpointing=true", name="again")
    assert same_model(kept.folder, again.folder)


@pytest.mark.slow
def test_the_mean_of_the_weights_is_what_is_evaluated_and_saved(tmp_path):
    plain = tiny_run(tmp_path, "average=none", "lr=0.01", name="plain")
    mean = tiny_run(tmp_path, "average=polyak", "polyak_start=0", "lr=0.01", name="mean")
    losses = [[line["loss"] for line in lines(run.folder) if line["split"] == "train"] for run in (plain, mean)]
    assert losses[0] == losses[1]
    assert not identical(weights(plain.folder), weights(mean.folder))
    assert plain.metrics("val")[-1]["loss"] != mean.metrics("val")[-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "precision=bfloat16",
        "loss=bce",
        "label_smoothing=0.1",
        "class_weights=balanced",
        "sampling=balanced",
        "aug_repeats=2",
        "freeze=['embed.*']",
        "schedule=rsqrt",
        "decouple_lr=true",
        "patch_drop=0.5",
    ],
)
def test_every_option_trains_and_matters(tmp_path, setting):
    run = tiny_run(tmp_path, setting, "weight_decay=0.1", "steps=4")
    plain = tiny_run(tmp_path, "weight_decay=0.1", "steps=4", name="plain")
    assert np.isfinite([line["loss"] for line in run.metrics()]).all()
    assert not identical(weights(run.folder), weights(plain.folder))


def test_frozen_weights_stay(tmp_path):
    run = tiny_run(tmp_path, "freeze=['embed.*']", "average=ema")
    start = model_for(run.recipe, tuple("0123456789"))
    assert torch.equal(run.model().embed.patch.weight, start.embed.patch.weight)
    assert not torch.equal(run.model().head.weight, start.head.weight)


def test_weights_that_are_not_finite_are_refused_before_the_first_step(tmp_path):
    broken = load(tiny_weights(tmp_path / "weights"))
    torch.nn.init.constant_(broken.norm.bias, float("nan"))
    save(broken, tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"broken: 'norm\.bias' contains NaN or infinity"):
        train("digits", weights=tmp_path / "broken", out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "trained", "measured"),
    [
        (("enlarge=1.5",), 12, 12),
        (("enlarge=1.2",), 8, 8),  # less than half a patch
        (("enlarge=2", "train_scale=0.75"), 12, 16),
        (("enlarge=2", "train_scale=0.5", "image_size=24"), 12, 24),
    ],
)
def test_a_model_is_measured_and_saved_for_larger_images_than_it_learns_from(tmp_path, settings, trained, measured):
    weights = tiny_weights(tmp_path / "weights")
    recipe = read_recipe("digits").replace(weights=str(weights), architecture={}, image_size=0)
    recipe = change_recipe(recipe, [*TINY[5:], *settings])
    images = split_data("digits", recipe)
    model = model_for(recipe, images.classes)
    assert model.config.image_size == model.meta.preprocess.image_size == (measured, measured)
    batches = TrainingBatches(images.train, recipe, augment_for(recipe, model), Processes())
    assert next(batches.from_step(0)).pixels.shape[-2:] == (trained, trained)
    run = train("digits", recipe=recipe, out=tmp_path / "run", settings=["steps=2"])
    assert Classifier(run.folder).model.config.image_size == (measured, measured)


def test_with_weights_a_recipe_regularizes_and_merges_tokens_and_leaves_their_shape(tmp_path):
    recipe = read_recipe("digits").replace(architecture={"depth": 5, "drop_path": 0.2, "tome_r": 1})
    settings = ["steps=1", "workers=0"]
    run = train("digits", recipe=recipe, weights=tiny_weights(tmp_path / "w"), out=tmp_path / "run", settings=settings)
    assert run.recipe.architecture == {"drop_path": 0.2, "tome_r": 1}
    config = run.model().config
    assert (config.depth, config.drop_path, config.tome_r) == (1, 0.2, 1)


def test_regularizers_of_a_vit_say_nothing_about_a_resnet(tmp_path):
    resnet = build(ResNetConfig(image_size=32, num_classes=2, stages=(1, 1), width=32))
    resnet.meta = resnet.meta.replace(preprocess=Preprocess(image_size=(32, 32)))
    save(resnet, tmp_path / "w")
    recipe = read_recipe("finetune-small").replace(weights=str(tmp_path / "w"), enlarge=1.0)
    assert "drop_path" in recipe.architecture
    assert model_for(recipe, ("cat", "dog")).config == resnet.config


def test_tokens_are_left_out_while_training_only():
    model = model_for(change_recipe(read_recipe("digits"), ["patch_drop=0.75"]), ["a", "b"])
    assert isinstance(model, ViT)
    pixels = torch.randn(2, 1, 8, 8)
    assert model.forward_features(pixels).shape == (2, 1, 96)
    assert model.eval().forward_features(pixels).shape == (2, 4, 96)


def test_a_loss_that_is_no_number_stops_the_run_and_names_step_and_batch(tmp_path, monkeypatch):
    loss, calls = LOSSES["cross_entropy"], itertools.count(1)

    def broken(logits, targets, label_smoothing):
        return loss(logits, targets, label_smoothing) * (float("nan") if next(calls) == 8 else 1.0)

    monkeypatch.setitem(LOSSES, "cross_entropy", broken)
    with pytest.raises(TrainingError, match=r"the loss of step 8 is NaN or infinite; the batch was digits #\d+,"):
        tiny_run(tmp_path, "checkpoint_steps=3")
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000003", "step-00000006"]


def test_weights_that_are_no_numbers_are_never_kept(tmp_path, monkeypatch):
    take_step = Trainer.step

    def breaking(trainer, batch, step):
        sums = take_step(trainer, batch, step)
        if step == 5:
            torch.nn.init.constant_(trainer.model.head.weight, float("nan"))
        return sums

    monkeypatch.setattr(Trainer, "step", breaking)
    with pytest.raises(TrainingError, match="the weights after step 6 are NaN or infinite"):
        tiny_run(tmp_path, "checkpoint_steps=3")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("recipe", ["digits", "masked"])
def test_training_leaves_the_random_state_of_the_caller_alone(tmp_path, recipe):
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002  (the global generator is what is tested)
    torch.manual_seed(3)

    def random_state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = random_state()
    states = []

    class Watch(Listener):
        def stepped(self, step):
            states.append(torch.get_rng_state().tolist())

    settings = [*TINY, "steps=2", "architecture.dropout=0.1", "architecture.in_channels=1"]
    if recipe == "digits":
        settings += ["augment.mixup_alpha=0.2", "patch_drop=0.25"]
    train("digits", recipe=recipe, out=tmp_path / "run", settings=settings, listeners=[Watch()], progress=False)
    assert random_state() == before
    assert states == [before[2]] * 2


def test_a_run_ends_early_when_it_gets_no_better_and_gives_its_best_model(tmp_path):
    settings = ("steps=300", "lr=1e-12", "patience=2", "final=best", "eval_every=0.05", "average=none")
    run = tiny_run(tmp_path, *settings)
    lines = run.metrics("val")
    best = max(lines, key=lambda line: line["top1"])
    assert len(lines) == lines.index(best) + 3 < 150
    assert run.facts["validation"] == "10% of each class, held out"
    assert identical(weights(run.folder), load_file(run.best(best["step"]) / "trained.safetensors"))


@pytest.mark.slow
def test_the_trained_model_predicts_with_its_labels_and_view(tmp_path):
    run = tiny_run(tmp_path)
    classifier = Classifier(run.folder)
    assert classifier.labels == tuple("0123456789")
    assert classifier.model.meta.preprocess.image_size == (8, 8)
    (answers,) = classifier.predict([Image.new("L", (8, 8))], top=1)
    assert answers[0].label in classifier.labels


@pytest.mark.slow
def test_listeners_hear_every_line_and_the_end(tmp_path):
    class Heard(Listener):
        def __init__(self):
            self.lines, self.steps, self.ended = [], [], 0

        def recorded(self, line):
            self.lines.append(line)

        def stepped(self, step):
            self.steps.append(step)

        def finished(self):
            self.ended += 1

    heard = Heard()
    run = tiny_run(tmp_path, listeners=[heard])
    assert heard.lines == run.metrics()
    assert heard.steps == list(range(1, 13))
    assert heard.ended == 1


@pytest.mark.slow
def test_a_line_of_metrics_has_the_usual_names(tmp_path):
    first, *_, last = tiny_run(tmp_path).metrics()
    assert first.keys() == {"step", "epoch", "split", "loss", "top1", "lr", "images_per_second", "seconds"}
    assert {"step", "epoch", "split", "loss", "top1", "top5", "count", "seconds"} <= last.keys()
    assert (first["split"], first["step"], last["split"], last["count"]) == ("train", 3, "val", 359)
    assert 0 <= first["top1"] <= 100


def on_folder(tmp_path, folder, *settings):
    changes = [*TINY, "architecture.in_channels=3", "steps=2", *settings]
    return train(folder, recipe="digits", out=tmp_path / "run", settings=changes)


def test_a_few_images_make_smaller_batches_and_unreadable_ones_are_listed(tmp_path):
    folder = folder_of(tmp_path / "images", cat=8, dog=8)
    (folder / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    run = on_folder(tmp_path, folder, "val_fraction=0.2", "steps=4")
    assert run.recipe.batch_size == run.facts["training_images"] < 32
    assert f"batch_size is {run.recipe.batch_size}, not 32: there are no more images" in run.facts["notes"]
    assert [key.rpartition("/")[2] for key in run.unreadable] == ["broken.png"]
    assert json.loads((run.folder / "run.json").read_text())["classes"] == ["cat", "dog"]


@pytest.mark.parametrize("classes", [{}, {"cat": 4}])
def test_data_that_cannot_be_learned_from_is_one_line(tmp_path, classes):
    folder = tmp_path / "images"
    folder.mkdir()
    folder_of(folder, **classes)
    with pytest.raises(DataError) as caught:
        on_folder(tmp_path, folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recipe": "digit"}, "unknown recipe 'digit'; did you mean digits"),
        ({"model": "ViT-Q/16"}, "unknown model 'ViT-Q/16'"),
        ({"weights": "/no/such/file"}, "/no/such/file: no such file or folder"),
        (
            {"model": "ViT-S/16", "weights": "x"},
            "model= trains from scratch, weights= starts from weights: give one of the two",
        ),
        ({"settings": ["freeze=['nothing.*']"]}, "unknown parameters to freeze"),
        ({"settings": ["device=tpu"]}, "device='tpu' cannot be used"),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing_behind(tmp_path, options, text):
    with pytest.raises(VitruvianError, match=text) as caught:
        train("digits", out=tmp_path / "run", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_images_of_ones_own_are_trained_from_scratch_with_an_honest_note(tmp_path):
    data = folder_of(tmp_path / "images", cat=4, dog=4)
    small = ["steps=1", "batch_size=2", "workers=0", "image_size=64", "architecture.depth=1"]
    run = train(data, model="ViT-Ti/16", out=tmp_path / "run", settings=small)
    assert run.finished
    assert "from scratch (random weights), 6 images give a poor model; start from weights instead" in str(
        run.facts["notes"]
    )


@pytest.mark.parametrize("what", ["weights", pytest.param("teacher", marks=pytest.mark.slow)])
def test_a_run_behind_this_one_that_held_out_other_images_is_told(tmp_path, capsys, what):
    data = folder_of(tmp_path / "images", cat=8, dog=8)
    small = ["steps=1", "batch_size=2", "workers=0", "image_size=32", "architecture.depth=1", "val_fraction=0.25"]
    first = train(data, model="ViT-Ti/16", out=tmp_path / "first", settings=small)
    further = [*small[:4], "val_fraction=0.25"]

    def again(name, *settings):
        start = {"weights": first.folder} if what == "weights" else {"model": "ViT-Ti/16"}
        given = [] if what == "weights" else [f"teacher={first.folder}"]
        run = train(data, **start, out=tmp_path / name, settings=[*further, *given, *settings])
        return [note for note in run.facts["notes"] if "held out other images" in note]

    assert again("same") == []
    capsys.readouterr()
    assert again("seed", "seed=7") == []  # the split has a seed of its own
    (note,) = again("other", "split_seed=1")
    held_out = "(split_seed=0, val_fraction=0.25; here split_seed=1, val_fraction=0.25)"
    assert f"{first.folder} held out other images {held_out}" in note
    assert "their accuracy will be too high" in note
    assert note in capsys.readouterr().err
    assert "val_fraction=0.5" in str(again("more", "val_fraction=0.5"))


def test_a_run_from_a_run_holds_out_the_same_images_and_repeats_no_augmentation(tmp_path, capsys):
    data = folder_of(tmp_path / "images", cat=8, dog=8)
    small = ["steps=1", "batch_size=2", "workers=0", "image_size=32"]
    held_out = ["architecture.depth=1", "val_fraction=0.5", "split_seed=3"]
    first = train(data, model="ViT-Ti/16", out=tmp_path / "first", settings=[*small, *held_out])
    second = train(data, weights=first.folder, out=tmp_path / "second", settings=small)
    third = train(data, weights=second.folder, out=tmp_path / "third", settings=[*small, "seed=1"])
    assert [(r.recipe.split_seed, r.recipe.val_fraction, r.recipe.seed) for r in (first, second, third)] == [
        (3, 0.5, 0),
        (3, 0.5, 1),
        (3, 0.5, 1),
    ]
    held_out = [split_data(data, run.recipe).validation for run in (first, second)]
    assert [held_out[0].key(i) for i in range(8)] == [held_out[1].key(i) for i in range(8)]
    err = capsys.readouterr().err
    assert f"split_seed=3, val_fraction=0.5, seed=1, because {first.folder} was trained on the same data" in err


def test_an_existing_folder_is_refused_before_the_head_is_fitted(tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.training.initial_model.fit_head", None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    data = folder_of(tmp_path / "images", cat=3, dog=3)
    with pytest.raises(TrainingError, match="run: exists and is not empty; choose another out="):
        train(data, weights=tiny_weights(tmp_path / "weights"), out=tmp_path / "run", settings=["workers=0"])
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"


def test_weights_are_read_once(tmp_path, monkeypatch):
    loading = importlib.import_module("vitruvian.weights.load")  # the package exports its function by this name
    read, seen = loading.read_checkpoint, []
    monkeypatch.setattr(loading, "read_checkpoint", lambda path: seen.append(path) or read(path))
    data = folder_of(tmp_path / "images", cat=3, dog=3)
    start = tiny_weights(tmp_path / "weights")
    seen.clear()
    train(data, weights=start, out=tmp_path / "run", settings=["workers=0", "steps=1", "batch_size=2", "enlarge=2"])
    assert len(seen) == 1


def test_a_run_that_evaluates_at_the_end_alone_says_so_by_0(tmp_path):
    run = tiny_run(tmp_path, "eval_every=0")
    assert [line["step"] for line in run.metrics("val")] == [12]


def test_whitening_needs_a_plain_stem(tmp_path):
    with pytest.raises(ConfigError, match=r"stem_init='whitening' needs architecture.stem.style='conv'"):
        train("digits", out=tmp_path / "run", settings=[*TINY, "stem_init=whitening"])


@pytest.mark.parametrize("classes", [3, 10])
def test_fine_tuning_resets_everything_that_was_fitted_to_the_old_weights(tmp_path, classes):
    labels = tuple("0123456789")[:classes]
    weights = load(tiny_weights(tmp_path / "weights"), num_classes=classes)
    weights.meta = weights.meta.replace(
        labels=labels, temperature=2.0, threshold=0.5, score_function="sigmoid", cascade=CascadeConfig(threshold=0.7)
    )
    save(weights, tmp_path / "cascade")
    settings = ["steps=1", "batch_size=32", "workers=0", "head_init=zero"]
    run = train("digits", weights=tmp_path / "cascade", out=tmp_path / "run", settings=settings, progress=False)
    meta = run.model().meta
    assert (meta.cascade, meta.temperature, meta.threshold, meta.score_function) == (None, 1.0, 0.0, "softmax")
    assert meta.labels == tuple("0123456789")


def test_a_run_from_a_run_does_not_enlarge_the_images_again(tmp_path):
    data = folder_of(tmp_path / "images", cat=4, dog=4)
    small = {"steps": 1, "batch_size": 2, "workers": 0, "enlarge": 2.0}
    shape = {"architecture.depth": 1, "architecture.image_size": (32, 32)}
    first = train(data, model="ViT-Ti/16", recipe=read_recipe("scratch"), out=tmp_path / "a", settings=small | shape)
    recipe = read_recipe("scratch").replace(enlarge=2.0)
    del small["enlarge"]
    second = train(data, weights=first.folder, recipe=recipe, out=tmp_path / "b", settings=small)
    assert first.model().config.image_size == second.model().config.image_size == (64, 64)
    assert any("enlarge=1.0, because" in note for note in second.facts["notes"])
