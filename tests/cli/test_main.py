"""`vit` itself: quick help, exit codes, and one line for every failure."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile

import pytest
import typer

from vitruvian import __version__
from vitruvian.cli.app import app
from vitruvian.cli.options import BulkOptions, ModelOptions, RecipeOptions, option_spelling
from vitruvian.errors import ConfigError, Interrupted, argument
from vitruvian.training import read_recipe, recipe_names
from vitruvian.training import recipe as recipe_module


def vit_process(*arguments: str, command: str = "from vitruvian.cli.app import main; main()") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("--help",), ("predict", "--help"), ("models",), ("models", "B/16", "--json"), ("datasets",)]
)
def test_help_and_lists_import_neither_torch_nor_numpy_nor_rich(arguments):
    command = (
        "import atexit, sys; from vitruvian.cli.app import main; "
        "atexit.register(lambda: print({'torch', 'numpy', 'rich'} & set(sys.modules), file=sys.stderr)); main()"
    )
    out, err = vit_process(*arguments, command=command).communicate(timeout=60)
    assert out
    assert err == "set()\n"


@pytest.mark.slow
def test_the_help_reads_no_file():
    command = (
        "import atexit, sys; from vitruvian.cli.app import main; "
        "atexit.register(lambda: print({'vitruvian.files', 'tomllib'} & set(sys.modules), file=sys.stderr)); main()"
    )
    assert vit_process("--help", command=command).communicate(timeout=60)[1] == "set()\n"


def test_the_version_is_the_packages(vit):
    assert vit("--version") == (0, f"vitruvian {__version__}\n", "")


TRAINED_STUDY = "--out --set --json --recipe --rows --columns --seeds --plan"
OPTIONS = {
    "predict": "--model -m --labels --template --top --json --out --sort-into --merge --shard --on --split --piece "
    "--max-unreadable --workers --batch-size --num-heads --image-size --adapter --device --engine --precision "
    "--compile --tome-r",
    "embed": "--model -m --out --merge --json --shard --on --split --dtype --piece --max-unreadable --workers "
    "--batch-size --num-heads --image-size --adapter --device --engine --precision --compile --tome-r",
    "similar": "--in --text --top --model -m --exact --json --out --num-heads --image-size --adapter "
    "--device --engine --precision --compile --tome-r",
    "models": "--json --augreg --index --license",
    "convert": "--adapter --to --labels --template --num-heads --image-size --patch-size --num-classes --half --config "
    "--json --card --overwrite",
    "push": "--private --license --report",
    "train": "--json --folds --track "
    "--recipe --arch --from --model -m --out --epochs --lr --batch-size --seed --image-size --freeze --lora "
    "--val-fraction --group-by --patience --precision --device --workers --set --resume --plan --cluster --recipes "
    "--settings --auto-resume --minutes --add-classes --target",
    "finetune": "--folds --track "
    "--from --model -m --out --recipe --task --quick --lrs --seeds --soup --steps --image-size --freeze --lora "
    "--val-fraction --group-by --patience --precision --device --epochs --lr --batch-size --seed --workers --set "
    "--data-root --json --minutes --target",
    "probe": "--folds --predictions --target "
    "--model -m --vectors --only --shots --neighbors --group-by --json --save --out "
    "--batch-size --num-heads --image-size --adapter --device --engine --precision --compile --tome-r",
    "evaluate": "--unknown "
    "--corruptions --sample "
    "--model -m --split --real --wordnet-ids --mappings --calibrated --template --flip --seed --json "
    "--by --coverage --out --batch-size --num-heads --image-size --adapter --device --engine --precision "
    "--compile --tome-r",
    "advise": "--model -m --minutes --html --json",
    "compare": "--data --split --json --out --batch-size --num-heads --image-size --adapter --device "
    "--engine --precision --compile --tome-r",
    "explain": "--model -m --out --map --labels --template --class --top --layer --head --patch --deletion --figures "
    "--reconstruct --count --json --num-heads --image-size --adapter --device --engine --precision "
    "--compile --tome-r",
    "anomaly": "--good --masks --layers --tile --patches --false-alarms --model -m --out --image-size --device --json",
    "segment": "--masks --classes --layers --tile --polygons --model -m --out --image-size --device --json",
    "study table2": "--models --tasks --out --set --json --quick --recipe --seeds --data-root",
    "study table5": "--models --tasks --out --set --json --quick --recipe --seeds --data-root",
    "study vtab": "--models --out --set --json --quick --recipe --seeds --data-root",
    "study speed": "--models --sizes --batches --memory --rounds --device --out --json",
    "study data-size": TRAINED_STUDY,
    "study compute": TRAINED_STUDY,
    "study few-shot": TRAINED_STUDY,
    "study optimizer": TRAINED_STUDY,
    "study shape": TRAINED_STUDY,
    "study head": TRAINED_STUDY,
    "study positions": TRAINED_STUDY,
    "study axial": TRAINED_STUDY,
    "study self-supervision": TRAINED_STUDY,
    "datasets": "--data-root --json",
    "doctor": "--target --predictions --device --out --json --workers --model -m --drop --vectors --review --apply "
    "--against --num-heads --image-size --adapter --engine --precision --compile --tome-r --batch-size",
    "map": "--out --columns",
    "pack": "--side --format --quality --shard-mb --workers",
    "export": "--adapter --to --batch-size --image-size --dynamic-size --features --num-heads --overwrite --json",
    "optimize": "--calibrate --max-loss --only --images --minutes --evaluate --engine --weight-bits "
    "--tome-r --image-size --split --batch-size --num-heads --json",
    "bench": "--model -m --engine --batches --rounds --image --json --num-heads --image-size --tome-r --device "
    "--precision --compile --csv --adapter",
    "serve": "--watch --model -m --adapter --host --port --batch-size --queue --max-mb --max-seconds --allow-host "
    "--image-size --engine --device --precision --compile --num-heads --tome-r",
    "demo": "--out --set",
}


def commands(group=None, before=""):
    """Every command by its words, also those of groups."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def test_commands_and_their_options_are_these():
    found = {
        name: {flag for option in command.params for flag in option.opts if flag.startswith("-")} - {"--help"}
        for name, command in commands()
    }
    assert found == {name: set(flags.split()) for name, flags in OPTIONS.items()}


def flags_of(group) -> set[str]:
    names = {field.name.replace("_", "-") for field in dataclasses.fields(group)}
    return {"--set" if name == "settings" else f"--{name}" for name in names}


SIBLINGS = {
    # what some commands do: the options for it, and the commands
    "run a model": (
        {*flags_of(ModelOptions), "--model", "--batch-size", "--json"},
        "predict explain segment anomaly embed similar serve evaluate compare probe doctor bench",
    ),
    "load weights": ({"--num-heads", "--image-size", "--adapter"}, "convert export optimize push"),
    "train with a recipe": (
        {*flags_of(RecipeOptions), "--from", "--out", "--recipe", "--minutes", "--folds", "--track", "--json"},
        "train finetune",
    ),
    "fine-tune on tasks": (
        {"--models", "--out", "--set", "--json", "--quick", "--recipe", "--seeds", "--data-root"},
        "table2 table5 vtab",
    ),
    "process millions of images": ({*flags_of(BulkOptions), "--out", "--merge"}, "predict embed"),
    "report what they measured": ({"--out", "--json"}, "evaluate compare probe doctor explain similar"),
    "measure on a split": ({"--split"}, "evaluate compare embed predict"),
    "write weights or a graph": ({"--overwrite", "--json", "--to"}, "convert export"),
    "describe images with words": ({"--labels", "--template"}, "predict convert"),
}
TOKENS_ONLY = "--num-heads --adapter --engine --precision --compile --tome-r --batch-size"  # tokens of layers, in torch
MISSING = {
    # command: options of its siblings that would have no meaning
    "explain": "--batch-size",  # one image after the other
    **dict.fromkeys(
        ("segment", "anomaly"), "--num-heads --adapter --engine --precision --compile --tome-r --batch-size"
    ),
    "similar": "--batch-size",  # a few images
    "serve": "--json",  # its results are responses
    "compare": "--model",  # its arguments
    "bench": "--batch-size",  # --batches
    "optimize": "--adapter",  # of weights that `vit convert --adapter` has written
    "push": "--num-heads --image-size --adapter",  # the same
}


@pytest.mark.parametrize("what", SIBLINGS)
def test_no_option_of_a_command_is_missing_for_its_siblings(what):
    expected, names = SIBLINGS[what]
    for name in names.split():
        has = set(OPTIONS.get(name, OPTIONS.get(f"study {name}", "")).split())
        assert expected - has <= set(MISSING.get(name, "").split()), name
        assert not has & set(MISSING.get(name, "").split()), name


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_name_only_options_that_exist(name):
    recipe = read_recipe(name)
    training = {*OPTIONS["train"].split(), *OPTIONS["finetune"].split()}
    command = recipe.command.removeprefix("torchrun --nproc-per-node 8 -m ")
    assert set(re.findall(r"--[a-z-]+", f"{recipe.about} {command}")) <= training
    assert set(re.findall(r"--[a-z-]+", f"{recipe.time} {recipe.result}")) <= {*training, "--flip"}


def test_what_a_command_does_is_said_whole_in_the_list_of_commands(vit):
    _, out, _ = vit("--help")
    assert "  predict   Classify images, with probabilities." in out
    assert "..." not in out.partition("Use a model:")[2]


def test_help_lists_every_command_in_a_group_and_three_examples(vit):
    _, out, _ = vit("--help")
    groups = re.findall(r"(?m)^(\w[\w ]+):\n((?:  \w.*\n)+)", out)
    listed = [line.split()[0] for name, rows in groups if name != "Options" for line in rows.splitlines()]
    assert sorted(listed) == sorted({name.split()[0] for name in OPTIONS})
    assert len([line for line in out.partition("Examples:")[2].splitlines() if line.strip().startswith("vit ")]) == 3


def test_the_paper_and_the_demo_come_last(vit):
    _, out, _ = vit("--help")
    assert re.findall(r"(?m)^  (\w+)  +\S", out)[-2:] == ["demo", "study"]


@pytest.mark.parametrize("name", [name for name in OPTIONS if not name.startswith("study")])
def test_the_help_of_a_command_ends_with_an_example_that_parses(vit, name):
    example = re.findall(r"Example: vit (.+)\n", vit(name, "--help").out)
    assert len(example) == 1
    words = example[0].split()
    command = dict(commands())[words[0]]
    assert words[0] == name
    with command.make_context(name, words[1:]) as context:
        assert context.params


@pytest.mark.parametrize("name", ["predict", "embed", "train", "finetune", "optimize"])
def test_advanced_options_are_the_last_panel(vit, name):
    panels = re.findall(r"(?m)^([A-Z].*|int8.*):$", vit(name, "--help").out)
    assert panels[:2] == ["Arguments", "Options"]
    assert panels[-1] == "Advanced"
    assert len(panels) > 3


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("quantize", "vit optimize SRC DST --only int8"),
        ("tome", "vit optimize SRC DST --only merge"),
        ("cascade", "vit optimize SRC DST --only cascade"),
        ("merge", "the option --merge FILE of vit embed and vit predict"),
        ("tasks", "vit datasets"),
        ("val", "vit evaluate DATA --model MODEL"),
        ("classify", "vit predict IMAGES --model MODEL"),
        ("help", "vit --help"),
    ],
)
def test_names_that_people_try_point_to_the_command(vit, name, instead):
    assert vit(name, "x", "--y") == (2, "", f"error: no command {name}; use {instead}\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--only int8", "--only int8 needs --evaluate"),
        ("--only merge", "--only merge needs --tome-r"),
        ("--tome-r 8", "--tome-r has no effect without --only; it is for --only merge and --only cascade"),
        ("--only merge --tome-r 8 --max-loss 1", "--max-loss has no effect with --only merge"),
        ("--only cascade --tome-r 8 --minutes 1", "--minutes has no effect with --only cascade; it is for the search"),
    ],
)
def test_optimize_refuses_options_that_have_no_effect(vit, options, text):
    code, _, err = vit("optimize", "w", "out", "--calibrate", "photos", *options.split())
    assert code == 2
    assert text in " ".join(err.split())


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_and_option_has_help(vit, command):
    assert vit(*command.split(), "--help").code == 0
    parameters = dict(commands())[command].params
    assert all(parameter.help for parameter in parameters if parameter.name != "help")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["predikt"], "No such command 'predikt'. Did you mean 'predict'?"),
        (["predict"], "Missing"),
        (["probe", "digits"], "give DATA and --model, or --vectors"),
        (["predict", "a.jpg", "--model", "m", "--top", "0"], "Invalid value for '--top'"),
        (["predict", "a.jpg", "--model", "m", "--top", "-3"], "Invalid value for '--top'"),
        (["predict", "a.jpg", "--model", "m", "--batch-size", "0"], "Invalid value for '--batch-size'"),
        (
            ["predict", "a.jpg", "--model", "m", "--batch", "4"],
            "option: --batch (Possible options: --batch-size)",
        ),
        (["predict", "a.jpg", "--model", "m", "--num-heads", "x"], "Invalid value for '--num-heads'"),
        (
            ["predict", "a.jpg", "--model", "m", "--image-size", "0"],
            "'0' is neither a side such as 384 nor ROWSxCOLUMNS",
        ),
        (["predict", "a.jpg", "--model", "m", "--image-size", "1x2x3"], "'1x2x3' is neither a side such as 384"),
        (["convert", "a", "b", "--to", "jax"], "Invalid value for '--to'"),
        (["doctor", "digits", "--out", "cat.jpg"], "Invalid value for --out: 'cat.jpg' does not end in .html"),
        (
            ["doctor", "digits", "--review", "notes.csv"],
            "--review: 'notes.csv' does not end in .html",
        ),
        (["similar", "a.jpg", "--in", "v", "--out", "cat.jpg"], "--out: 'cat.jpg' does not end in .html"),
        (["serve", "--allow-host", ""], "'' is not a host name such as photos.example.org"),
        (["serve", "--allow-host", "*"], "'*' is not a host name"),
        (["serve", "--allow-host", "http://photos.example.org:8000"], "without http:// and without a port"),
        (["serve", "--host", ""], "'' is not a host name"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(vit, arguments, text):
    code, out, err = vit(*arguments)
    assert code == 2
    assert out == ""
    assert text in err


def test_an_error_is_one_line_without_traceback(vit, tmp_path):
    code, out, err = vit("predict", tmp_path, "--model", "m")
    assert code == 1
    assert out == ""
    assert err.startswith(f"error: {tmp_path}: no images in this folder")
    assert err.count("\n") == 1


def test_an_error_about_an_odd_path_is_one_line_too(vit, photos):
    code, _, err = vit("predict", photos, "--model", "./no\nmodel")
    assert code == 1
    assert err == "error: no\\nmodel: no such file or folder\n"


def test_a_surprise_is_one_line_that_tells_how_to_see_more(vit, monkeypatch):
    def surprise(paths: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("vitruvian.data.folder.find_images", surprise)
    code, _, err = vit("predict", "a.jpg", "--model", "m")
    assert code == 1
    assert err == "internal error: RuntimeError: two lines (set VIT_TRACEBACK=1 to see the traceback)\n"
    monkeypatch.setenv("VIT_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        vit("predict", "a.jpg", "--model", "m")


def test_a_stopped_run_is_its_own_line_and_128_more_than_the_signal(vit, monkeypatch):
    def stopped(paths: object) -> None:
        raise Interrupted("stopped after step 3 of 9", signal.SIGINT)

    monkeypatch.setattr("vitruvian.data.folder.find_images", stopped)
    assert vit("predict", "a.jpg", "--model", "m") == (130, "", "stopped after step 3 of 9\n")


@pytest.mark.parametrize(
    ("command", "name", "value", "expected"),
    [
        ("predict", "num_heads", "", "--num-heads"),
        ("predict", "num_heads", "3", "--num-heads 3"),
        ("predict", "device", "'meta'", "--device 'meta'"),
        ("convert", "head", "'new'", "head='new'"),
        ("train", "weights", "", "--from"),
        ("train", "width", "96", "width=96"),
        ("explain", "target", "'cat'", "--class 'cat'"),
        ("doctor", "data", "''", "SRC ''"),
    ],
)
def test_a_commands_error_spells_arguments_as_options(command, name, value, expected):
    spell = option_spelling(dict(commands())[command].params, {"num_heads", "device", "target", "data"})
    assert spell(name, value) == expected


def test_a_value_from_a_file_is_not_spelled_as_an_option():
    error = ConfigError(
        f"{argument('num_heads', 0)} is not above 0", where="config.json", hint=f"pass {argument('num_heads')}"
    )
    error.spell = option_spelling(dict(commands())["predict"].params, set())
    assert str(error) == "config.json: num_heads=0 is not above 0; pass --num-heads"


def test_a_commands_error_names_its_option(vit, photos, weights):
    code, _, err = vit("predict", photos, "--model", weights, "--device", "gpu")
    assert code == 1
    assert err == (
        "error: --device 'gpu' cannot be used; devices are auto, cpu, cuda (cuda:1 is the second), mps and xpu\n"
    )


def test_a_commands_error_spells_the_default_of_an_option_as_the_option(vit, weights, photos, tmp_path, monkeypatch):
    def fail(*args, max_loss, **options):
        raise ConfigError(f"saves nothing within {argument('max_loss', max_loss, 'g')}, {argument('num_heads', 2)}")

    monkeypatch.setattr("vitruvian.compress.fewer_tokens.fit_cascade", fail)
    options = ("--only", "cascade", "--calibrate", photos, "--image-size", "16")
    code, _, err = vit("optimize", weights, tmp_path / "out", *options)
    assert (code, err) == (1, "error: saves nothing within --max-loss 0.5, num_heads=2\n")


def test_completion_is_offered_and_knows_options_and_published_names(vit, monkeypatch):
    def completed(words: str) -> str:
        monkeypatch.setenv("_VIT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        return vit().out

    assert "--image-size" in completed("vit predict --im")
    assert "vit_base_patch16_224" in completed("vit predict a.jpg --model vit_base")
    assert "pets" in completed("vit finetune x --task pe")


def test_a_note_about_a_file_is_printed_by_the_first_command_alone(vit, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "weights.pth"

    def note(paths: object) -> None:
        logging.getLogger("vitruvian").warning("assuming num_heads=3", extra={"file": weights})
        raise ConfigError("stop")

    monkeypatch.setattr("vitruvian.data.folder.find_images", note)
    for content, notes in (("a", 1), ("a", 1), ("bc", 2)):  # another file under the same name is another file
        if not weights.exists() or weights.read_text() != content:
            weights.write_text(content)
        assert vit("predict", "a.jpg", "--model", "m").err == "error: stop\n"
        assert caplog.text.count("assuming num_heads=3") == notes


def test_a_full_disk_is_one_line(vit, monkeypatch):
    def full(paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitruvian.data.folder.find_images", full)
    assert vit("predict", "a.jpg", "--model", "m") == (1, "", "error: output: no space left on device\n")


def test_ctrl_c_exits_with_130_and_nothing_more(vit, monkeypatch):
    def interrupted(paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitruvian.data.folder.find_images", interrupted)
    assert vit("predict", "a.jpg", "--model", "m") == (130, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with vit_process("models") as process:
        process.stdout.close()  # as `vit models | head -0` does
        assert process.stderr.read() == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_on_a_full_disk_is_one_line(monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-c", "from vitruvian.cli.app import main; main()", "models"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: output: no space left on device\n")


@pytest.mark.parametrize("command", ["train", "finetune"])
@pytest.mark.parametrize("name", ["epochs", "lr", "batch_size", "seed", "workers"])
def test_options_of_the_recipe_are_settings_of_the_recipe(command, name):
    assert name in {option.name for option in dict(commands())[command].params}
    assert name in {field.name for field in dataclasses.fields(recipe_module.Recipe)}


def test_options_of_the_recipe_join_the_other_changes():
    options = RecipeOptions(settings=["augment.flip=0"], epochs=3.0, batch_size=8, seed=0)
    assert options.changes(steps=None) == {"augment.flip": 0, "epochs": 3.0, "batch_size": 8, "seed": 0}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["train", "digits", "--lr", "1", "--set", "lr=2"], 2, "lr is set twice, by --lr and by --set lr=2"),
        (["train", "digits", "--batch-size", "9", "--set", "batch_size = 8"], 2, "by --batch-size and by --set"),
        (["finetune", "digits", "--from", "w", "--epochs", "1", "--steps", "1"], 1, "give --epochs or --steps, not"),
        (["finetune", "digits", "--from", "w", "--lr", "1", "--lrs", "1,2"], 1, "give --lr 1 or --lrs to select from"),
        (["train", "digits", "--epochs", "-3"], 1, "--epochs"),
        (["train", "digits", "--batch-size", "0"], 1, "error: --batch-size 0 is"),
        (["train", "digits", "--workers", "-1"], 1, "error: --workers -1 is"),
    ],
)
def test_a_setting_that_contradicts_itself_is_one_line(vit, arguments, code, text):
    found = vit(*arguments)
    assert (found.code, found.out) == (code, "")
    assert text in found.err


def test_a_wrong_setting_is_reported_before_the_default_weights_are_downloaded(vit, photos, monkeypatch):
    monkeypatch.setattr("vitruvian.weights.hub.default_source", lambda _: pytest.fail("downloaded"))
    for name in ("cat", "dog"):
        shutil.copytree(photos, photos.parent / "sorted" / name)
    code, _, err = vit("train", photos.parent / "sorted", "--set", "epoch=1")
    assert (code, err) == (1, "error: unknown setting 'epoch'; did you mean epochs?\n")


@pytest.mark.parametrize("command", [["train", "nowhere", "--from", "w"], ["train", "nowhere", "--recipe", "cifar10"]])
def test_a_missing_package_is_said_before_the_data_are_looked_for(vit, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    found = vit(*command)
    assert (found.code, found.out) == (1, "")
    assert (
        found.err
        == "error: this needs the package 'simplejpeg': run pip install '.[train]' in a copy of the repository\n"
    )


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ("train photos --learning-rate 0.1", "--lr"),
        ("train photos --weights w.pth", "--model"),
        ("train photos --imgsz 224", "--image-size"),
        ("train photos --optimizer sgd", "--set optimizer"),
        ("train photos --weight-decay 0.1", "--set weight_decay"),
        ("train photos --drop-path 0.1", "--set architecture.drop_path"),
        ("train photos --fp16", "--precision"),
        ("train photos --output-dir runs/a", "--out"),
        ("train --data photos", "no option but the argument DATA"),
        ("train photos --num-classes 3", "none, the classes come from DATA"),
        ("predict --source cat.jpg", "no option but the argument FILES_OR_FOLDERS"),
        ("predict cat.jpg --topk 3", "--top"),
        ("predict cat.jpg -o a.csv", "--out"),
        ("evaluate photos --checkpoint w.pth", "--model"),
        ("export w.pth --format onnx", "--to"),
        ("explain cat.jpg --method rollout", "--map"),
    ],
)
def test_options_of_other_programs_are_answered_with_ours(vit, arguments, instead):
    code, out, err = vit(*arguments.split())
    assert (code, out) == (2, "")
    assert err.endswith(f" (Possible options: {instead})\n")


@pytest.mark.parametrize("arguments", [("--model", "a", "-m", "b"), ("--json", "--json"), ("--top", "1", "--top=2")])
def test_an_option_that_takes_one_value_is_refused_when_given_twice(vit, arguments):
    code, out, err = vit("predict", "cat.jpg", *arguments)
    assert (code, out) == (2, "")
    assert "given twice, but takes one value" in err
    assert arguments[0] in err


def test_an_option_that_can_be_repeated_is_not_refused(vit, tmp_path):
    assert (
        "no such folder" in vit("train", "--resume", tmp_path / "run", "--set", "workers=0", "--set", "device=cpu").err
    )


MISTAKES = {
    "--val": (("train", "photos", "--val", "0.2"), 2, "--val-fraction"),
    "weights as an architecture": (("train", "photos", "--arch", "vit_base_patch16_224"), 1, "give --from"),
    "an architecture as weights": (
        ("train", "digits", "--model", "ViT-B/16"),
        1,
        "`vit train DATA --arch ViT-B/16` trains",
    ),
    "a misspelled run": (("predict", "a.jpg", "--model", "runs/photos-11"), 1, "did you mean runs/photos-1?"),
    "a list as text": (("train", "digits", "--plan", "--set", "freeze=3"), 1, 'is not a list, such as ["a", "b"]'),
    "num_classes": (
        ("train", "digits", "--set", "num_classes=3"),
        1,
        "num_classes cannot be set: it comes from the data",
    ),
    "onnx": (("convert", "a", "b", "--to", "onnx"), 2, "use `vit export SRC DST --to onnx`"),
    "a zip": (("train", "photos.zip"), 1, "download it again, or unpack it and pass the folder"),
    "a URL": (("predict", "https://example.org/cat.jpg"), 1, "https://example.org/cat.jpg: cannot be downloaded"),
    "a misspelled run beside the data": (("predict", "a.jpg", "--model", "pets-11"), 1, "did you mean pets-1 "),
    "a run as data": (("train", "pets-1"), 1, "pets-1: a training run, not images; `--from pets-1` starts from its"),
    "the record of a run": (
        ("predict", "a.jpg", "--model", "pets-1/run.json"),
        1,
        "pass the folder pets-1, or a file of",
    ),
    "a zip as weights": (
        ("predict", "a.jpg", "--model", "w.zip"),
        1,
        "w.zip: a zip archive without weights; unpack it",
    ),
    "a list of images": (
        ("predict", "m.csv"),
        1,
        "m.csv: a dataset, not an image; `vit predict` takes it with a folder",
    ),
    "settings of hydra": (("train", "digits", "epochs=3"), 2, "epochs=3; options are written --epochs 3"),
    "an option without effect": (("train", "digits", "--plan", "--out", "run"), 2, "--out has no effect with --plan"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_typical_mistake_is_answered_with_what_to_do(vit, tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.zip").touch()
    (tmp_path / "a.jpg").touch()
    (tmp_path / "runs" / "photos-1").mkdir(parents=True)
    (tmp_path / "pets-1").mkdir()
    (tmp_path / "pets-1" / "run.json").write_text("{}")
    (tmp_path / "pets-1" / "metrics.jsonl").write_text("{}")
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        archive.writestr("cat/1.jpg", b"")
    arguments, code, answer = MISTAKES[mistake]
    ran = vit(*arguments)
    assert ran.code == code
    assert answer in ran.err
    assert len(ran.err.strip().splitlines()[-1]) < 400


@pytest.mark.slow
def test_train_prints_its_result_as_one_object(vit, tmp_path):
    tiny = "depth=1 width=16 mlp_dim=16 num_heads=2 patch_size=4"
    changes = [f"--set=architecture.{change}" for change in tiny.split()]
    changes += [f"--set={change}" for change in ("steps=2", "batch_size=8", "warmup=0")]
    result = json.loads(vit("train", "digits", "--out", tmp_path / "run", *changes, "--workers", "0", "--json").out)
    assert result["folder"] == str(tmp_path / "run")
    assert (result["step"], result["steps"], result["count"], result["unreadable"]) == (2, 2, 359, 0)
    assert 0 <= result["top1"] <= 100


def test_train_lists_its_settings_with_their_meaning(vit):
    listed = vit("train", "--settings", "lr").out
    assert "lr = 0.001\n    Peak learning rate.\n" in listed
    assert "layer_decay = " not in listed
    everything = vit("train", "--settings").out
    for name in ("augment.hflip", "architecture.drop_path", "preprocess.fit", "split_seed"):
        assert f"\n{name} = " in everything


def test_the_recipes_fit_80_columns_and_begin_with_what_people_need(vit):
    lines = vit("train", "--recipes").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")][:3] == ["photos", "finetune-small", "scratch"]
