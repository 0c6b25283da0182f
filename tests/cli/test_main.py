"""`vit` itself: quick help, exit codes, and one line for every failure."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys

import pytest
import typer

from vitruvian import __version__
from vitruvian.cli.app import app
from vitruvian.cli.options import RecipeOptions, option_spelling
from vitruvian.errors import ConfigError, Interrupted, argument
from vitruvian.training import read_recipe, recipe_names
from vitruvian.training import recipe as recipe_module


def vit_process(*arguments: str, command: str = "from vitruvian.cli.app import main; main()") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("--help",), ("predict", "--help"), ("models",), ("models", "B/16", "--json"), ("tasks",)]
)
def test_help_and_lists_import_neither_torch_nor_numpy_nor_rich(arguments):
    command = (
        "import atexit, sys; from vitruvian.cli.app import main; "
        "atexit.register(lambda: print({'torch', 'numpy', 'rich'} & set(sys.modules), file=sys.stderr)); main()"
    )
    out, err = vit_process(*arguments, command=command).communicate(timeout=60)
    assert out
    assert err == "set()\n"


def test_the_version_is_the_packages(vit):
    assert vit("--version") == (0, f"vitruvian {__version__}\n", "")


OPTIONS = {
    "predict": "--model -m --labels --template --top --json --out --shard --on --split --piece --max-unreadable "
    "--workers --batch-size --num-heads --image-size --device --engine --tome-r",
    "embed": "--model -m --out --shard --on --split --dtype --piece --max-unreadable --workers "
    "--batch-size --num-heads --image-size --device",
    "merge": "--out --json",
    "similar": "--in --text --top --model -m --exact --json --out",
    "models": "--json",
    "convert": "--to --labels --template --num-heads --image-size --patch-size --num-classes --half --config --json",
    "train": "--recipe --arch --from --out --epochs --lr --batch-size --seed --workers --set --resume --plan "
    "--cluster --recipes --auto-resume",
    "finetune": "--from --out --recipe --task --quick --lrs --seeds --steps --image-size --epochs --lr "
    "--batch-size --seed --workers --set --data-root --json",
    "probe": "--model -m --vectors --only --shots --neighbors --json --out "
    "--batch-size --num-heads --image-size --device",
    "evaluate": "--model -m --split --real --wordnet-ids --mappings --calibrated --template --flip --seed --json "
    "--out --batch-size --num-heads --image-size --device --engine --tome-r",
    "explain": "--model -m --out --map --class --top --layer --head --patch --deletion --figures --reconstruct --count "
    "--json --num-heads --image-size --device --engine --tome-r",
    "study table5": "--models --tasks --out --quick --recipe --seeds --set --data-root --json",
    "study vtab": "--models --out --quick --recipe --seeds --set --data-root --json",
    "study data-size": "--sizes --steps --recipes --out --set --plan --json",
    "study compute": "--steps --images --recipes --out --set --plan --json",
    "tasks": "--data-root --json",
    "doctor": "--out --json --workers --vectors --review --apply",
    "pack": "--side --format --quality --shard-mb --workers",
    "export": "--to --batch-size --image-size --dynamic-size --num-heads --json",
    "cascade": "--calibrate --image-size --tome-r --max-loss --split --num-heads --json",
    "tome": "--calibrate --tome-r --split --num-heads",
    "quantize": "--calibrate --evaluate --max-loss --engine --weight-bits --report --batch-size --num-heads --json",
    "optimize": "--calibrate --max-loss --images --minutes --batch-size --num-heads --json",
    "bench": "--model -m --engine --batches --rounds --image --plot --json --num-heads --image-size --tome-r",
    "serve": "--model -m --host --port --batch-size --queue --max-mb --max-seconds --allow-host --image-size --engine",
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
    assert err.startswith("error: --device 'gpu' cannot be used")


def test_a_commands_error_spells_the_default_of_an_option_as_the_option(vit, weights, photos, tmp_path, monkeypatch):
    def fail(*args, max_loss, **options):
        raise ConfigError(f"saves nothing within {argument('max_loss', max_loss, 'g')}, {argument('num_heads', 2)}")

    monkeypatch.setattr("vitruvian.compress.fewer_tokens.fit_cascade", fail)
    code, _, err = vit("cascade", weights, tmp_path / "out", "--calibrate", photos, "--image-size", "16")
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


def test_a_reader_that_leaves_early_is_no_error():
    process = vit_process("models")
    process.stdout.close()  # as `vit models | head -0` does
    assert process.stderr.read() == ""
    process.wait(timeout=60)
    process.stderr.close()


@pytest.mark.parametrize("command", ["train", "finetune"])
@pytest.mark.parametrize("name", ["epochs", "lr", "batch_size", "seed", "workers"])
def test_options_of_the_recipe_are_settings_of_the_recipe(command, name):
    assert name in {option.name for option in dict(commands())[command].params}
    assert name in {field.name for field in dataclasses.fields(recipe_module.Recipe)}


def test_options_of_the_recipe_join_the_other_changes():
    options = RecipeOptions(settings=["augment.flip=0"], epochs=3.0, batch_size=8, seed=0)
    assert options.changes(steps=None) == ["augment.flip=0", "epochs=3.0", "batch_size=8", "seed=0"]


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


@pytest.mark.parametrize("command", [["train", "nowhere", "--from", "w"], ["train", "nowhere", "--recipe", "cifar10"]])
def test_a_missing_package_is_said_before_the_data_are_looked_for(vit, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    found = vit(*command)
    assert (found.code, found.out) == (1, "")
    assert found.err == "error: this needs the package 'simplejpeg': pip install 'vitruvian[train]'\n"
