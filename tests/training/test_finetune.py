"""The paper's protocol: who learns from what, which learning rate is chosen, and a sweep that goes on after a kill."""

import json
import shutil
import signal
import statistics

import pytest
from making_weights import TINY_RECIPE, tiny_weights
from runs import TINY, folder_of

from forked import Forked, ranks, vit
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ConfigError, TrainingError
from vitruvian.tasks import get_task
from vitruvian.training import Interrupted, Listener, read_recipe
from vitruvian.training.finetune import Protocol, finetune, mean_and_std, protocol_for
from vitruvian.training.run_folder import Run
from vitruvian.training.splits import split_data
from vitruvian.training.train import train


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tiny_weights(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="module")
def protocol(weights):
    return protocol_for("digits", weights, settings=TINY_RECIPE, lrs=(1e-3, 1e-2), seeds=2)


@pytest.fixture(scope="module")
def whole(protocol, tmp_path_factory):
    return finetune(protocol, tmp_path_factory.mktemp("whole") / "sweep")


@pytest.fixture(scope="module")
def quick(protocol, tmp_path_factory):
    """A sweep of one trial, which tests only look at."""
    return finetune(protocol.quick(), tmp_path_factory.mktemp("quick") / "sweep")


def folders(root, splits):
    """Images of two classes; `splits` say how many a class."""
    from PIL import Image

    for split, count in splits.items():
        for label, level in (("dark", 40), ("light", 200)):
            place = root / split / label
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (8, 8), level + number).save(place / f"{split}{number}.png")
    return root


def keys(source):
    return {source.key(index) for index in range(len(source))}


def test_a_recipe_that_learns_no_labels_is_refused(weights):
    with pytest.raises(ConfigError, match="pre-train with `vit train`, then fine-tune from its run"):
        protocol_for("digits", weights, recipe="masked")


@pytest.mark.parametrize(
    ("splits", "dev", "test"),
    [
        ({"train": 20, "test": 5}, (36, 4), (40, 10)),
        ({"train": 20, "val": 6, "test": 5}, (40, 12), (52, 10)),
        ({"train": 20, "val": 6}, (36, 4), (40, 12)),  # as ImageNet
        ({"": 20}, (32, 4), (36, 4)),
    ],
)
def test_dev_never_sees_the_test_split_and_test_learns_from_all_else(tmp_path, splits, dev, test):
    folders(tmp_path / "data", splits)
    recipe = read_recipe("finetune-small")
    first = split_data(tmp_path / "data", recipe.replace(validation="dev"))
    second = split_data(tmp_path / "data", recipe.replace(validation="test"))
    assert (len(first.train), len(first.validation)) == dev
    assert (len(second.train), len(second.validation)) == test
    assert keys(first.train) | keys(first.validation) == keys(second.train)
    assert not keys(second.train) & keys(second.validation)
    again = split_data(tmp_path / "data", recipe.replace(validation="test", seed=7))
    assert keys(again.validation) == keys(second.validation)


@pytest.mark.parametrize(
    ("name", "steps", "lrs", "dev", "warmup"),
    [
        ("imagenet", 20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500),
        ("cifar10", 10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500),
        ("cifar100", 10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500),
        ("pets", 500, (0.001, 0.003, 0.01, 0.03), 0.1, 100),
        ("flowers102", 500, (0.001, 0.003, 0.01, 0.03), 0.1, 100),
        ("vtab-dtd", 2500, (0.01,), 0.1, 500),
    ],
)
def test_the_recipe_of_a_task_is_the_papers_table_4(weights, name, steps, lrs, dev, warmup):
    found = protocol_for(name, weights)
    recipe = found.recipe
    assert (recipe.steps, found.lrs, recipe.val_fraction, recipe.warmup) == (steps, lrs, dev, warmup)
    assert (recipe.optimizer, recipe.momentum, recipe.batch_size, recipe.image_size) == ("sgd", 0.9, 512, 384)
    assert (recipe.schedule, recipe.weight_decay, recipe.grad_clip, recipe.head_init) == ("cosine", 0.0, 1.0, "zero")
    assert (recipe.preprocess["fit"], found.seeds) == ("squash", 3)


def test_table_2_adds_pixels_and_averaged_weights(weights):
    recipe = protocol_for("imagenet", weights, recipe="finetune-paper-table2").recipe
    assert (recipe.image_size, recipe.average, recipe.ema_decay) == (512, "ema", 0.9999)


def test_other_data_has_the_small_recipe_or_a_tasks(weights, tmp_path):
    folders(tmp_path / "data", {"train": 2})
    assert protocol_for(tmp_path / "data", weights).recipe.optimizer == "adamw"
    found = protocol_for(tmp_path / "data", weights, task=get_task("mafw"))
    assert (found.recipe.steps, found.metric) == (500, "mean_per_class")


def test_warmup_keeps_its_share_of_a_shorter_run(weights):
    assert protocol_for("pets", weights, settings=["steps=20"]).recipe.warmup == 0.2
    assert protocol_for("pets", weights, settings=["steps=20", "warmup=3"]).recipe.warmup == 3


@pytest.mark.slow
def test_a_whole_sweep_chooses_on_dev_and_averages_on_test(whole):
    sweep = whole
    assert [trial.recipe.validation for trial in sweep.trials] == ["dev", "dev", "test", "test"]
    best = max(sweep.dev, key=lambda trial: trial.measures["top1"])
    assert sweep.chosen_lr == best.recipe.lr
    assert [trial.recipe.seed for trial in sweep.test] == [0, 1]
    record = json.loads((sweep.folder / "sweep.json").read_text())
    values = [Run(trial.folder).metrics("val")[-1]["top1"] for trial in sweep.test]
    assert record["top1"] == {"mean": statistics.fmean(values), "deviation": statistics.stdev(values), "count": 2}
    assert record["finished"] is True
    digits = open_dataset("digits")
    assert [trial.measures["count"] for trial in sweep.test] == [len(digits.splits["test"])] * 2
    facts = Run(sweep.test[0].folder).facts
    assert facts["training_images"] == len(digits.train)
    assert Run(sweep.dev[0].folder).facts["training_images"] < len(digits.train)
    assert len(Run(sweep.test[0].folder).metrics("val")) == 1  # the test split is measured once
    page = (sweep.folder / "report.html").read_text()
    assert all(trial.folder.name in page for trial in sweep.trials)
    assert f"<dt>lr</dt><dd>{sweep.chosen_lr}</dd>" in page
    assert f"<dt>lrs</dt><dd>{', '.join(map(str, sweep.protocol.lrs))}</dd>" in page


class Counting(Listener):
    def __init__(self):
        self.begun = []

    def started(self, *, folder, steps, done):
        self.begun.append((folder.name, done))


@pytest.mark.slow
def test_finished_trials_are_not_repeated_and_more_can_be_asked_for(protocol, quick, tmp_path):
    """A folder in which a trial was cut off before it was on record: that one begins anew."""
    shutil.copytree(quick.folder, tmp_path / "sweep")
    (tmp_path / "sweep" / "dev-lr-0.001" / "checkpoints").mkdir(parents=True)
    assert [trial.recipe.validation for trial in quick.trials] == ["test"]
    counting = Counting()
    sweep = finetune(protocol, tmp_path / "sweep", listeners=[counting])
    assert sweep.dev[0].state == "done"
    names = [name for name, _ in counting.begun]
    assert quick.test[0].folder.name not in names
    assert len(names) == len([trial for trial in sweep.trials if trial.folder.name != quick.test[0].folder.name])
    counting.begun.clear()
    said = []
    finetune(protocol, tmp_path / "sweep", listeners=[counting], report=said.append)
    assert counting.begun == []
    assert all(text.endswith("(already done)") for text in said)


class StopAt(Listener):
    def __init__(self, trial, step):
        self.trial, self.step, self.folder = trial, step, ""

    def started(self, *, folder, steps, done):
        self.folder = folder.name

    def stepped(self, step):
        if (self.folder, step) == (self.trial, self.step):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on_in_the_middle_of_a_trial(protocol, whole, tmp_path):
    with pytest.raises(Interrupted, match=r"stopped in dev-lr-0\.01; run the same command"):
        finetune(protocol, tmp_path / "sweep", listeners=[StopAt("dev-lr-0.01", 3)])
    counting = Counting()
    sweep = finetune(protocol, tmp_path / "sweep", listeners=[counting])
    assert counting.begun[0] == ("dev-lr-0.01", 3)
    for one, other in zip(whole.trials, sweep.trials):
        assert {**one.measures, "seconds": 0} == {**other.measures, "seconds": 0}


@pytest.mark.slow
def test_a_lr_at_which_training_diverges_is_left_out(weights, tmp_path):
    wild = protocol_for("digits", weights, settings=[*TINY_RECIPE, "grad_clip=0"], lrs=(1e-3, 1e6), seeds=1)
    sweep = finetune(wild, tmp_path / "sweep")
    assert [trial.state for trial in sweep.dev] == ["done", "failed"]
    assert sweep.chosen_lr == 1e-3
    assert "Training diverged in dev-lr-1000000.0" in (tmp_path / "sweep" / "report.html").read_text()
    hopeless = protocol_for("digits", weights, settings=[*TINY_RECIPE, "grad_clip=0"], lrs=(1e6,), seeds=1)
    with pytest.raises(TrainingError, match="training diverged with every seed, in test-lr-1000000"):
        finetune(hopeless, tmp_path / "other")


def test_another_sweep_in_the_folder_is_refused_and_named(protocol, weights, quick, tmp_path):
    other = protocol_for("digits", weights, settings=[*TINY_RECIPE, "steps=9"])
    with pytest.raises(TrainingError, match="contains a sweep with steps=8, not 9; choose another out="):
        finetune(other, quick.folder)
    reseeded = protocol_for("digits", weights, settings=[*TINY_RECIPE, "seed=5"], lrs=(1e-3, 1e-2), seeds=2)
    with pytest.raises(TrainingError, match="contains a sweep with seed=0, not 5; choose another out="):
        finetune(reseeded, quick.folder)  # its dev trials would be those of seed 0
    fewer = protocol_for("digits", weights, settings=[*TINY_RECIPE, "max_train_samples=90"])
    with pytest.raises(
        TrainingError, match="contains a sweep with no max_train_samples, not max_train_samples=90; choose"
    ):
        finetune(fewer, quick.folder)
    other = protocol_for("digits", weights, settings=[*TINY_RECIPE, "augment.hflip=0.5"])
    with pytest.raises(TrainingError, match=r"contains a sweep with augment\.hflip=0\.0, not 0\.5; choose"):
        finetune(other, quick.folder)  # a setting of a table is named alone
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").touch()
    with pytest.raises(TrainingError, match="exists and is not a sweep; choose another out="):
        finetune(protocol, tmp_path / "full")


@pytest.mark.slow
def test_without_out_the_same_sweep_is_found_again(protocol, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert finetune(protocol.quick()).folder.as_posix() == "runs/digits-finetune-1"
    assert finetune(protocol.quick()).folder.as_posix() == "runs/digits-finetune-1"
    other = protocol_for("digits", weights, settings=[*TINY_RECIPE, "steps=9"]).quick()
    assert finetune(other).folder.as_posix() == "runs/digits-finetune-2"


@pytest.mark.parametrize(
    ("length", "seen", "advice"),
    [
        (["steps=4000"], "128,000", "at most N, the recipe finetune-small is made for such machines"),
        (["epochs=100"], "143,800", "max_train_samples=N trains on at most N"),
    ],
)
def test_a_recipe_for_gpus_is_questioned_without_one(weights, tmp_path, length, seen, advice):
    said = []
    long = protocol_for(
        "digits", weights, settings=[*(s for s in TINY_RECIPE if not s.startswith("steps=")), *length, "device=cpu"]
    ).quick()
    with pytest.raises(Interrupted):
        finetune(long, tmp_path / "sweep", listeners=[StopAt("test-lr-0.0003-seed-0", 1)], report=said.append)
    assert said[0].startswith(f"note: each trial trains on {seen} images without a GPU, which may take days")
    assert said[0].endswith(advice)


def test_nothing_is_written_where_weights_or_data_are_missing(protocol, tmp_path):
    with pytest.raises(Exception, match="no such file or folder"):
        finetune(protocol_for("digits", "./none.pth"), tmp_path / "sweep")
    with pytest.raises(Exception, match="no such file or folder"):
        finetune(protocol_for("nodata", protocol.recipe.weights), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_what_cannot_be_asked_for_is_said(weights):
    with pytest.raises(TrainingError, match="seeds=0 is not at least 1"):
        protocol_for("digits", weights, seeds=0)
    with pytest.raises(TrainingError, match=r"lrs=\[-1\.0\] must be one or more positive numbers"):
        protocol_for("digits", weights, lrs=(-1.0,))
    with pytest.raises(ConfigError, match="final='best' would select on the test split"):
        protocol_for("digits", weights, settings=["final=best"])
    with pytest.raises(TrainingError, match="fine-tuning needs weights to start from; give weights="):
        Protocol(data="digits", recipe=read_recipe("digits"), lrs=(1.0,))


def test_one_value_has_no_deviation():
    assert mean_and_std([90.0]) == {"mean": 90.0, "deviation": None, "count": 1}
    assert mean_and_std([89.0, 91.0])["deviation"] == pytest.approx(2**0.5)


def test_a_view_may_give_up_the_crop_of_the_weights(weights, tmp_path):
    run = train("digits", recipe="digits", out=tmp_path / "run", settings=[*TINY, "steps=1", "preprocess.fit=crop"])
    assert run.model().meta.preprocess.fit == "crop"
    again = train("digits", recipe="finetune-small", weights=run.folder, out=tmp_path / "again",
                  settings=["steps=1", "preprocess.fit=squash", "workers=0"])  # fmt: skip
    assert (again.model().meta.preprocess.fit, again.model().meta.preprocess.scaled_size) == ("squash", None)


def command(weights, out, *settings):
    changes = [word for setting in (*TINY_RECIPE, *settings) for word in ("--set", setting)]
    return ["finetune", "digits", "--from", weights, "--out", out, "--lrs", "0.001,0.01", "--json", *changes]


@pytest.mark.slow
def test_a_sweep_killed_half_way_continues_and_ends_as_an_unbroken_one(weights, tmp_path):
    settings = ("steps=30", "checkpoint_steps=5", "eval_every=1")
    protocol = protocol_for("digits", weights, settings=[*TINY_RECIPE, *settings], lrs=(1e-3, 1e-2), seeds=2)
    finetune(protocol, tmp_path / "whole")
    words = [*command(weights, tmp_path / "sweep", *settings), "--seeds", "2"]
    for place in ("dev-lr-0.01", "test-lr-*-seed-1"):
        process = Forked(*words)
        process.until(lambda: list((tmp_path / "sweep").glob(f"{place}/checkpoints/step-*"))).kill()  # noqa: B023
    ended = vit(*words)
    assert ended.code == 0, ended.err
    assert ended.err.count("(already done)") == 3
    assert "seed 1, for the result (resuming)" in ended.err
    found, expected = [json.loads((tmp_path / name / "sweep.json").read_text()) for name in ("sweep", "whole")]
    for record in (found, expected):
        for trial in record["trials"]:
            trial.pop("seconds")
    assert found == expected
    assert json.loads(ended.out)["top1"] == expected["top1"]


@pytest.mark.slow
def test_two_processes_share_the_trials_of_a_sweep(weights, whole, tmp_path):
    ended, _ = (process.wait() for process in ranks(*command(weights, tmp_path / "two"), "--seeds", "1"))
    assert ended.code == 0, ended.err
    assert ended.err.count("trial 3 of 3") == 1  # one process speaks
    found = json.loads((tmp_path / "two" / "sweep.json").read_text())
    assert found["chosen_lr"] == whole.chosen_lr
    assert [trial["state"] for trial in found["trials"]] == ["done"] * 3
    for trial, other in zip(found["trials"], whole.trials):
        assert trial["loss"] == pytest.approx(other.measures["loss"], abs=1e-3)  # sums in another order


@pytest.mark.slow
def test_a_rate_whose_last_step_spoils_the_weights_is_left_out(weights, tmp_path):
    """No later step has a loss that could tell: the answers to the dev split do."""
    one_step = [*TINY_RECIPE, "steps=1", "warmup=0", "grad_clip=0", "eval_every=1", "precision=float16"]
    sweep = finetune(protocol_for("digits", weights, settings=one_step, lrs=(1e-3, 1e6), seeds=1), tmp_path / "sweep")
    assert [trial.state for trial in sweep.dev] == ["done", "failed"]
    assert "the weights after step 1 give NaN or infinite outputs" in sweep.to_json()["trials"][1]["why"]


def test_a_split_that_a_run_does_not_use_is_noted(tmp_path):
    from PIL import Image

    data = tmp_path / "data.csv"
    for index in range(6):
        Image.new("RGB", (8, 8), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    splits = ["train", "train", "train", "train", "validaton", "validaton"]
    rows = [f"{index}.png,{'ab'[index % 2]},{split}" for index, split in enumerate(splits)]
    data.write_text("\n".join(["path,label,split", *rows]))
    notes = split_data(data, read_recipe("finetune-small")).notes
    assert notes == ["not used: the split 'validaton' (2 images); the splits of a run are train, val and test"]


def test_a_class_that_only_the_measured_split_has_is_noted(tmp_path):
    data = folders(tmp_path / "data", {"train": 20, "test": 5})
    (data / "test" / "light").rename(data / "test" / "unheard")
    notes = split_data(data, read_recipe("finetune-small").replace(validation="test")).notes
    assert (
        notes[-1] == "1 class has validation images but no training images: 'unheard'; they will all be misclassified"
    )


def test_a_sweep_from_a_run_tests_on_the_images_that_the_run_held_out(tmp_path, capsys):
    data = folder_of(tmp_path / "images", cat=12, dog=12)
    small = ["steps=1", "batch_size=2", "workers=0", "image_size=32", "head_init=zero"]
    given = [*small, "architecture.depth=1", "split_seed=3", "val_fraction=0.25"]
    first = train(data, model="ViT-Ti/16", out=tmp_path / "first", settings=given)
    protocol = protocol_for(data, first.folder, settings=small, lrs=(1e-3, 1e-2), seeds=1)
    assert f"split_seed=3, val_fraction=0.25, seed=1, because {first.folder} was trained on" in capsys.readouterr().err
    held_out = keys(split_data(data, first.recipe).validation)
    assert held_out == keys(split_data(data, protocol.recipe.replace(validation="test")).validation)
    dev = split_data(data, protocol.recipe.replace(validation="dev"))
    assert not held_out & (keys(dev.train) | keys(dev.validation))
    sweep = finetune(protocol, tmp_path / "sweep")
    assert [note for trial in sweep.trials for note in Run(trial.folder).facts["notes"] if "other images" in note] == []
    again = protocol_for(data, sweep.folder, settings=small, seeds=1)  # from a sweep as from a run
    assert held_out == keys(split_data(data, again.recipe.replace(validation="test")).validation)
    other = protocol_for(data, first.folder, settings=[*small, "split_seed=0"], lrs=(1e-3,), seeds=1)
    (trial,) = finetune(other, tmp_path / "other").trials
    assert "held out other images (split_seed=3" in str(Run(trial.folder).facts["notes"])
