"""Every command on every bad input that concerns it: one line that says what is wrong, and nothing else.

CASES is the table: what a command makes of an input is its exit codes and a pattern of the last line on stderr.
Inputs that could hang or take all memory are tried in a process apart.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys

import bad_inputs
import pytest
import typer

from vitruvian.cli.app import app

ONE = "--workers 0"
COMMANDS = {
    "images": ["predict {bad} -m {good}/model", "explain {bad} -m {good}/model --out {out}"],
    "weights": ["predict {good}/photo.png -m {bad}", "convert {bad} {out} --to native"],
    "models": [
        "predict {good}/photo.png -m {bad}",
        "convert {bad} {out} --to native",
        "evaluate {good}/data -m {bad}",
        "probe {good}/data -m {bad}",
        "explain {good}/photo.png -m {bad} --out {out}",
        f"train {{good}}/data --from {{bad}} --out {{out}} {ONE}",
        f"finetune {{good}}/data --from {{bad}} --out {{out}} {ONE}",
        "serve -m {bad} --port 0",
        "embed {good}/data -m {bad} --out {out}",
        "export {bad} {out}.onnx",
        "segment {good}/data/dark -m {bad} --masks {good}/masks --classes dark,light --out {out}",
        "anomaly --good {good}/data/dark -m {bad} --out {out}",
        "optimize {bad} {out}.onnx --only int8 --calibrate {good}/data --evaluate {good}/data",
        "optimize {bad} {out} --calibrate {good}/data",
    ],
    "data": [
        f"doctor {{bad}} {ONE}",
        f"pack {{bad}} {{out}} {ONE}",
        "evaluate {bad} -m {good}/model",
        "probe {bad} -m {good}/model --only fewshot --shots 1",
        "embed {bad} -m {good}/model --out {out}",
        f"train {{bad}} --from {{good}}/model --out {{out}} --set steps=1 --batch-size 4 {ONE}",
    ],
    "recipes": ["train {good}/data --arch ViT-Ti/16 --recipe {bad} --plan"],
    "runs": ["train --resume {bad}"],
}
"""The commands that take an input of each kind."""

NO_IMAGE = "(not an image|broken [A-Z0-9 ]*image|the file is empty|no such file|no images in|too many levels)"
NO_WEIGHTS = (
    "(not an npz, safetensors or PyTorch file|broken or truncated|the file is empty|no such file or folder|"
    "the folder contains none of|too many levels|cannot be read)"
)
STRANGE = "belong to no known family"
PICKLE = "the file contains Python objects that would run code when opened"
NOT_REGULAR = "(not a regular file|this is a pipe, a device or a socket)"

CASES: dict[str, dict[str, str]] = {
    "images": {
        "bomb.png": "pixels exceed the limit",
        "endless.jpg": f"({NO_IMAGE}|{NOT_REGULAR})",
        "fifo.jpg": NOT_REGULAR,
        "flipped.jpg|flipped.png|flipped.gif|flipped.webp|flipped.tif": f"({NO_IMAGE}|^$)",
        "truncated.jpg|truncated.png|truncated.gif|truncated.webp|truncated.tif": NO_IMAGE,
        "empty.jpg|text.jpg|zeros.jpg|loop.jpg|dangling.jpg|folder.jpg|nothing.png|script.png": NO_IMAGE,
        "text-bomb.png": "broken image: Decompressed data too large",
        "narrow.png|nan.tif|\udcff\udcfe.png|two\nlines.png": "^$",
    },
    "weights": {
        **{f"fifo{s}|endless{s}": NOT_REGULAR for s in (".safetensors", ".pth", ".npz")},
        **{
            f"empty{s}|text{s}|zeros{s}|loop{s}|dangling{s}|folder{s}": NO_WEIGHTS
            for s in (".safetensors", ".pth", ".npz")
        },
        "truncated.safetensors|long-header.safetensors|deep-header.safetensors|truncated.pth": NO_WEIGHTS,
        "overlap.safetensors|huge-shape.safetensors|flipped-header.safetensors": NO_WEIGHTS,
        "bomb.npz": NO_WEIGHTS,
        "stranger.safetensors|stranger.npz|complex.pth": STRANGE,
        "planted.pth|raw-pickle.pth": PICKLE,
        "objects.npz": "(Python objects|pickle)",
        "list.pth|tensor.pth": "contains a (list|Tensor), not a dictionary of tensors",
        "numbers.pth|nothing.pth|itself.pth": "(no tensors|names inside|no known family)",
        "meta.pth": "meta",
        "expanded.pth": "its tensors would expand to 3725.3 GiB",
        "sparse.pth": "is a torch.sparse_coo tensor",
    },
    "models": {
        "deep|deeper": "not valid JSON: nested more than 100 deep",
        "digits": "not valid JSON: a number has thousands of digits",
        "array": "contains a JSON list, not an object",
        "not-json": "not valid JSON",
        "not-utf-8": "not UTF-8 text",
        "escaping-index": "is not a file in the directory of the index",
        "no-weights": NO_WEIGHTS,
        "wide": "width=1000000000 is not between",
        "long": "depth=1000000000 is not between",
        "many-classes": "classes=1000000000000 is not between",
        "huge-image": "image_size=.* has a side above",
        "negative": "image_size=.* is not a positive number",
        "no-heads": "heads=0 is not between",
        "text-width|list-width": "width=.* is not",
        "odd-pool": "pool='guess' is not one of",
        "nan|inf": "(the model produced NaN or infinite outputs|contains NaN or infinity)",
    },
    "data": {
        "empty|empty-classes": "no images in class folders",
        "all-broken": "(^$|no image can be read|can be read|(in a row|images) cannot be read)",
        "empty.csv|no-columns.csv": "no column path",
        "not-utf-8.csv": "not a UTF-8 table",
        "endless.csv|fifo.csv|fifo.tar|loop.csv": "(no such file or folder|not a regular file|too many levels)",
        "deep.jsonl|digits.jsonl": "line 1: not valid JSON",
        "text.parquet|truncated.parquet": "(not|no|cannot) .*[Pp]arquet",
        "bomb.tar|truncated.tar|text.tar|cut.tar": "(not a complete tar file|damaged after byte|truncated after byte)",
        "zeros.tar": "no labeled images",
        "escaping.tar": "(one class|escapes|outside|refused|leaves)",
        "cifar-10-batches-py": "not a pickle of plain data",
        "idx|idx-bomb": "idx",
    },
    "recipes": {
        "deep|deep-key": "not valid TOML: nested more than 100 deep",
        "digits": "not valid TOML: a number has thousands of digits",
        "forever|infinite|not-a-number|seed": "(epochs|lr|seed)=.* is (not between|not a finite|too large)",
        "unknown": "unknown setting 'epocs'; did you mean epochs",
        "twice|text": "not valid TOML",
        "empty": "a recipe needs either epochs or steps",
        "own-base": "base",
        "typed|date": "steps=.* is not an integer",
        "escaping-base": "unknown recipe",
        "not-utf-8": "not UTF-8 text",
        "zeros": "(not valid TOML|not UTF-8)",
        "fifo|endless|folder": NOT_REGULAR,
        "loop|dangling": "cannot be read",
    },
    "runs": {
        "no-record|fifo-run": "not a training run",
        "empty-run|truncated-run|deep-run": "run.json: not valid JSON",
        "flipped-run": "run.json: ",
        "empty-recipe|truncated-recipe|flipped-recipe|deep-recipe|fifo-recipe": "recipe.toml: ",
        "other-lr|other-steps": "when the run began, not .*; restore it, or start a new run",
        "empty-metrics|truncated-metrics|flipped-metrics|deep-metrics|fifo-metrics": "has changed since the checkpoint",
    },
}

FALLS_BACK = [
    f"{damage}-{file}" for damage in ("truncated", "flipped", "fifo", "empty", "deep") for file in ("position", "state")
]
FALLS_BACK += ["before-position", "after-position"]
"""Runs with a damaged newest checkpoint, which go on from the one before it, and say so."""

OPTIONS = {
    "map {good}/data --out {out}": "does not end in .html",
    "map {good}/data --out {out}.html": "expected a folder that `vit embed`",
    "map {empty} --out {out}.html": "(no such|empty)",
    "anomaly {good}/photo.png -m {good}/model --out {out}": "detector",
    "anomaly --good {good}/model -m {good}/model --out {out}": "no image",
    "predict {good}/photo.png -m {good}/model --batch-size 10000000000000000000000000": "--batch-size",
    "predict {good}/photo.png -m {good}/model --top 99999999999999999999999": "(^$|--top)",
    "predict {good}/photo.png -m {good}/model --device meta": "--device 'meta' cannot be used",
    "predict {good}/photo.png -m {good}/model --device nowhere": "--device 'nowhere' cannot be used",
    "predict {good}/photo.png -m {good}/model --num-heads 99999999999999": "--num-heads 99999999999999",
    "predict {good}/photo.png -m {good}/model --image-size 99999": "--image-size",
    "predict {good}/photo.png -m {empty}": "empty",
    "predict {empty} -m {good}/model": "(no such file|empty)",
    "embed {good}/data -m {good}/model --out {good}/photo.png": "not a folder",
    "embed {good}/data -m {good}/model --out {out} --shard 9/4": "'9/4' is not a shard I/N with I from 1 to N",
    "embed {good}/data -m {good}/model --out {out} --split nowhere": "no split 'nowhere'",
    "predict {good}/data -m {good}/model --shard 1/2": "--shard, --on, --split and --merge need a folder as --out",
    "export {good}/model {out}.onnx --batch-size 0": "--batch-size",
    "export {good}/data {out}.onnx": "(the folder contains none of|no such file|no known family)",
    "export {good}/model {good}/photo.png/x.onnx": "(cannot be written|[Nn]ot a directory|not a folder)",
    "optimize {good}/model {out}.onnx --only int8 --calibrate {empty} --evaluate {good}/data": "empty",
    "optimize {good}/model {good}/photo.png --only int8 --calibrate {good}/data --evaluate {good}/data": "must end in .onnx",  # noqa: E501
    "optimize {good}/model {out}.onnx --only int8 --calibrate {good}/data --evaluate {good}/data": "at least 32 are needed",  # noqa: E501
    "optimize {good}/model {good}/data --calibrate {good}/data": "already exists",
    "optimize {good}/model {out} --calibrate {empty}": "empty",
    "optimize {good}/model {out} --only merge --calibrate {good}/data --tome-r x": "neither a number of tokens",
    "optimize {good}/model {out} --only cascade --calibrate {good}/data": "costs as much as the full model",
    "bench --model {good}/model --engine nowhere": "'nowhere' is not one of",
    "bench --model {empty}": "empty",
    "similar {good}/photo.png --in {good}/data": "no job.json in it",
    "convert {empty} {out} --to timm": "empty",
    "convert {good}/model {out} --to native --num-classes 1000000000000": "--num-classes 1000000000000 is not between",
    "convert {good}/model {good}/photo.png/x --to native": "(cannot be written|[Nn]ot a directory)",
    "convert {good}/model {out} --to native --patch-size 1000000000": "patch",
    "predict {good}/photo.png -m {good}/../sweep": "not valid JSON: nested more than 100 deep",
    "finetune {good}/data --from {good}/model --out {good}/../sweep": "not valid JSON: nested more than 100 deep",
    "evaluate {good}/../escaping.csv -m {good}/model": "escaping.csv, line 5: the path .* points outside",
    "evaluate {good}/../absolute.csv -m {good}/model": "absolute.csv, line 5: the path /etc/passwd points outside",
    "doctor {empty}": "empty",
    "pack {empty} {out}": "empty",
    "pack {good}/data {good}/photo.png/x --workers 0": "(cannot be written|[Nn]ot a directory)",
    "pack {good}/data {out} --side 1000000000000 --workers 0": "--side 1000000000000",
    "pack {good}/data {out} --quality 1000 --workers 0": "--quality 1000",
    "evaluate {empty} -m {good}/model": "empty",
    "evaluate {good}/data -m {good}/model --batch-size 10000000000000000000000000": "--batch-size",
    "evaluate {good}/data -m {good}/model --seed 1000000000000000000000000000000": "--seed 10+ is",
    "evaluate {good}/data -m {good}/model --split nowhere": "nowhere",
    "probe {good}/data -m {good}/model --shots 99999999999999999999": "(shots|--shots)",
    "probe {good}/data -m {good}/model --only guess": "guess",
    "explain {good}/photo.png -m {good}/model --layer 1000000000000 --out {out}": "layer",
    "explain {good}/photo.png -m {good}/model --class nobody --out {out}": "nobody",
    "train {good}/data --arch ViT-Ti/16 --plan --set architecture.depth=1000000000": "depth=1000000000 is not",
    "train {good}/data --arch ViT-Ti/16 --plan --set architecture.width=1000000000": "width=1000000000 is not",
    "train {good}/data --arch ViT-Ti/16 --plan --workers 1000000": "--workers 1000000 is not between 0 and 1024",
    "train {good}/data --arch ViT-Ti/16 --epochs 1e308": "--epochs 1e.308 is not between",
    "train {good}/data --arch ViT-Ti/16 --epochs nan": "--epochs nan is not",
    "train {good}/data --arch ViT-Ti/16 --seed 1000000000000000000000000000000": "--seed 10.* is .*(between|large)",
    "train {good}/data --arch ViT-Ti/16 --batch-size 10000000000000000000000": "--batch-size 10.*(between|large)",
    "train {good}/data --arch ViT-Ti/16 --lr inf": "--lr inf is not a finite number",
    "train {good}/data --arch ViT-Ti/16 --set device=meta --epochs 1": "device='meta' cannot be used",
    "train {empty} --arch ViT-Ti/16": "empty",
    "train --resume {empty}": "the name of the run is empty; give its folder",
    "train --resume {good}/data": "not a training run",
    "finetune {good}/data --from {good}/model --lrs 1e999": "is not a list of positive numbers",
    "finetune {good}/data --from {good}/model --steps 10000000000000000000000000": "(--steps|steps)",
    "finetune {good}/data --from {good}/model --out {good}/data": "(exists and is not a sweep|not empty)",
    "train {good}/data --from {good}/model --out {out} --group-by nothing-like-it": "no path matches 'nothing-like-it'",
    "finetune {good}/data --from {good}/model --out {out} --group-by (": "neither a column nor a regular expression",
    "probe {good}/data -m {good}/model --group-by ()": "images have no group, such as",
    "evaluate {good}/data -m {good}/model --by nothing-like-it": "no path matches 'nothing-like-it'",
    "evaluate {good}/data -m {good}/model --by ()": "all .* images have the value ''",
    "evaluate {good}/data -m {good}/model --coverage 2": "--coverage 2.0 is not between 0.5 and 1",
    "evaluate {good}/data -m {good}/model --coverage 0.999": "--coverage 0.999 needs at least 999 images",
    "advise {empty} -m {good}/model": "empty",
    "advise {good}/data -m {empty}": "empty",
    "push {empty} user/name": "empty",
    "push {good}/model a/b/c": "Repo id must be in the form",
    "compare {good}/model": "give at least two",
    "compare {good}/model {good}/model": "not all of these are runs that name their data; give --data",
    "compare {good}/model {good}/nowhere --data {good}/data": "good/nowhere: no such file or folder",
    "compare {good}/model {good}/model --data {good}/nowhere": "good/nowhere: no such file or folder",
    "train {good}/data --from {good}/model --out {out} --folds 1000": "--folds 1000 is not between 2 and",
    "probe {good}/data -m {good}/model --folds 1000": "--folds 1000 is not between 2 and",
    "doctor {good}/data --workers 0 --predictions {good}/photo.png": "not out-of-fold predictions of this data",
    "evaluate {good}/data -m {good}/model --corruptions nothing-like-it": "unknown corruption 'nothing-like-it'",
    "evaluate {good}/data -m {good}/model --unknown {good}/nowhere": "good/nowhere: no such file or folder",
    "study table5 --models {empty}": "give weights to start from",
    "study vtab --models {good}/nowhere --data-root {out}": "good/nowhere: no such file or folder",
    "study data-size {empty}": "empty",
    "study compute {good}/data --columns 0": "a recipe needs either epochs or steps",
    "study table2 --models {empty}": "give weights to start from",
    "study speed --models nothing-like-it": "unknown model 'nothing-like-it'",
    "study shape {good}/nowhere": "good/nowhere: no such file or folder",
    "study few-shot {good}/data --seeds 0": "--seeds",
    "study optimizer {good}/data --recipe nothing-like-it": "unknown recipe 'nothing-like-it'",
    "study head {good}/data --columns nothing-like-it": "unknown column 'nothing-like-it'",
    "study positions {good}/data --set nothing-like-it=1": "unknown setting 'nothing-like-it'",
    "study axial {good}/data --rows nothing-like-it": "unknown row 'nothing-like-it'",
    "study self-supervision {good}/data --rows nothing-like-it": "unknown row 'nothing-like-it'",
    "models nothing-like-it": "unknown model 'nothing-like-it'",
    "datasets nothing-like-it": "unknown task 'nothing-like-it'",
    "demo --set epochs=1e308": "epochs=1e.308 is not between",
    "serve --port 99999": "--port",
    "serve -m {empty}": "empty",
}
"""Commands with bad options, and what they say."""


APART = "fifo|endless|bomb|itself|deep"
"""Names of inputs that are tried in a process apart."""


def cases():
    for kind, table in CASES.items():
        for names, pattern in table.items():
            for name in names.split("|"):
                for place, command in enumerate(COMMANDS[kind]):
                    slow = place or re.search(APART, name)  # all together, not each
                    marks = [pytest.mark.slow] if slow else []
                    known = f"{command.split()[0]}-{kind}-{name!a}"
                    yield pytest.param(kind, name, command, pattern, id=known, marks=marks)


def check(found, pattern):
    """One line that says what is wrong, whatever else happened."""
    last = (found.err.splitlines() or [""])[-1]
    assert found.code in (0, 1, 2), found.err
    assert "Traceback" not in found.err
    assert "internal error" not in found.err
    assert re.search(pattern, last), found.err
    assert sum(line.startswith("error: ") for line in found.err.splitlines()) <= 1
    assert (found.code == 0) <= ("error: " not in found.err)


@pytest.mark.parametrize(("kind", "name", "command", "pattern"), list(cases()))
@pytest.mark.slow
def test_a_bad_input_is_one_line(vit, corpus, tmp_path, kind, name, command, pattern):
    if kind == "recipes":
        name += ".toml"
    words = [
        word.format(bad=corpus / kind / name, good=corpus / "good", out=tmp_path / "out") for word in command.split()
    ]
    apart = bool(re.search(APART, name))
    check(vit(*words, apart=apart), pattern)
    assert not (corpus / "PLANTED").exists()


SKIPPED = {
    "with-fifo": ("skipped 1 non-regular file", ".*pipe.png"),
    "with-loop": ("skipped 1 non-regular file", ".*loop.png"),
    "with-endless": ("skipped 1 non-regular file", ".*zero.png"),
    "with-folder-loop": ("skipped 1 link to a folder that is already listed", ".*again"),
}
"""Data with one member that is not an image, and what every command prints about it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SKIPPED)
@pytest.mark.parametrize("command", COMMANDS["data"], ids=lambda command: command.split()[0])
def test_files_that_are_skipped_are_reported(vit, corpus, tmp_path, name, command):
    values = {"bad": corpus / "data" / name, "good": corpus / "good", "out": tmp_path / "out"}
    found = vit(*(word.format(**values) for word in command.split()), apart=True)
    check(found, "")
    assert found.code == int(command.startswith("doctor"))
    text, path = SKIPPED[name]
    assert re.search(text if found.code else text + path, found.out + found.err)  # the doctor wraps long lines


def test_a_class_whose_name_is_no_text_is_a_class(vit, corpus, tmp_path):
    found = vit("pack", str(corpus / "data" / "odd-names"), str(tmp_path / "out"), "--workers", "0")
    check(found, "^$")
    assert "13 images" in found.out


def answers(vit, corpus, model):
    """What a model says of an image."""
    found = vit("predict", str(corpus / "good" / "photo.png"), "-m", str(corpus / model), "--json", apart=True)
    check(found, "^$")
    return json.loads(found.out)["predictions"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infinite", "no-config", "fifo-config"])
def test_weights_that_describe_themselves_need_no_config_beside_them(vit, corpus, tmp_path, name):
    assert answers(vit, corpus, f"models/{name}") == answers(vit, corpus, "good/model")
    values = {"bad": corpus / "models" / name, "good": corpus / "good", "out": tmp_path / "out"}
    for command in ("convert {bad} {out} --to native", "evaluate {good}/data -m {bad}"):
        found = vit(*(word.format(**values) for word in command.split()), apart=True)
        assert (found.code, "Traceback" in found.err) == (0, False), found.err


STUDY = "study data-size {good}/data --columns 8 --rows ViT --seeds 1 --out {out}"
STUDY += "".join(
    f" --set {s}" for s in ("steps=1", "workers=0", "image_size=16", "batch_size=4", "architecture.depth=1")
)


@pytest.mark.slow
def test_a_damaged_record_of_a_study_costs_nothing_and_that_of_its_run_is_said(vit, corpus, tmp_path):
    words = [word.format(good=corpus / "good", out=tmp_path / "study") for word in STUDY.split()]
    assert vit(*words).code == 0
    record = tmp_path / "study" / "study.json"
    whole = json.loads(record.read_text())
    record.write_text("[" * bad_inputs.DEEP)
    assert vit(*words).code == 0
    assert json.loads(record.read_text()) == whole
    (run,) = tmp_path.glob("study/*/run.json")
    run.write_bytes(run.read_bytes()[:50])
    check(vit(*words), r"run\.json: not valid JSON")


@pytest.mark.slow
@pytest.mark.parametrize("name", FALLS_BACK)
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_continued(vit, corpus, name):
    found = vit("train", "--resume", str(corpus / "runs" / name), apart="fifo" in name)
    assert found.code == 0, found.err
    assert "step-00000005" in found.err


@pytest.mark.parametrize("command", OPTIONS)
@pytest.mark.slow
def test_a_bad_option_is_one_line(vit, corpus, tmp_path, command):
    values = {"good": corpus / "good", "out": tmp_path / "out", "empty": ""}
    check(vit(*(word.format(**values) for word in command.split())), OPTIONS[command])


def test_every_command_is_in_the_table():
    def names(group, before=""):
        for name, command in group.commands.items():
            inner = getattr(command, "commands", None)
            yield from names(command, f"{before}{name} ") if inner else [before + name]

    lines = [*OPTIONS, *(line for lines in COMMANDS.values() for line in lines)]
    missing = [
        name
        for name in names(typer.main.get_command(app))
        if not any(f"{line} ".startswith(f"{name} ") for line in lines)
    ]
    assert missing == []


def test_every_input_of_the_corpus_is_in_the_table(corpus):
    listed = {kind: {name for names in CASES[kind] for name in names.split("|")} for kind in CASES}
    for kind in ("weights", "images", "recipes"):
        found = {os.fsdecode(name) for name in os.listdir(os.fsencode(corpus / kind))}
        assert {name.removesuffix(".toml") for name in found} == listed[kind]


@pytest.mark.slow
def test_a_disk_that_is_full_while_converting_is_one_line(corpus, tmp_path):
    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    command = [sys.executable, "-m", "vitruvian", "convert", corpus / "good" / "model", tmp_path / "out", "--to"]
    found = subprocess.run([*command, "native"], capture_output=True, text=True, preexec_fn=small_disk, timeout=120)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert "internal error" not in found.stderr
    assert found.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_with_stderr_closed_an_error_is_not_printed_elsewhere(corpus):
    command = f"{sys.executable} -m vitruvian predict {corpus}/nowhere.png -m {corpus}/good/model 2>&-"
    found = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, timeout=120)
    assert found.returncode == 1
    assert found.stdout == ""
