"""Options that several commands share, how their text is read, and how errors name them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand

from vitruvian.errors import VitruvianError, python_spelling
from vitruvian.tasks import DATA_VARIABLE, TASKS


class Command(TyperCommand):
    """A command whose errors name its options where the library names its arguments: `--num-heads` for `heads=`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VitruvianError as error:
            options = {p.name for p in self.params if ctx.get_parameter_source(p.name).name == "COMMANDLINE"}
            error.spell = option_spelling(self.params, options)
            raise


def option_spelling(parameters: Sequence[Any], options: Container[str]) -> Callable[[str, str], str]:
    """How the errors of a command spell an argument: `--heads`, or `--heads 3` if it is among the `options` used.

    A value that no option has set comes from a file and keeps its Python spelling.
    """
    flags = {p.name: p.opts[0] if p.opts[0].startswith("-") else p.metavar for p in parameters}

    def spell(name: str, value: str) -> str:
        if name not in flags or (value and name not in options):
            return python_spelling(name, value)
        return f"{flags[name]} {value}".rstrip()

    return spell


class InputSize(NamedTuple):
    """A `config.Size` that typer does not take for two arguments."""

    rows: int
    columns: int


def parse_size(text: str) -> InputSize:
    """`256x192`, or `384` for a square."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is neither a side such as 384 nor ROWSxCOLUMNS such as 256x192")
    rows, columns = match.groups()
    return InputSize(int(rows), int(columns or rows))


def parse_shard(text: str) -> tuple[int, int]:
    """`3/64`."""
    match = re.fullmatch(r"(\d{1,7})/(\d{1,7})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter(f"{text!r} is not a shard such as 3/64: one of 1/64 to 64/64")
    return int(match[1]), int(match[2])


def parse_counts(text: str) -> tuple[int, ...]:
    """`8`, or a number for each layer: `16,14,12`."""
    if re.fullmatch(r"\d{1,5}(\s*,\s*\d{1,5})*", text.strip()) is None:
        raise typer.BadParameter(f"{text!r} is neither a number of tokens such as 8 nor one for each layer: 16,14,12")
    return tuple(map(int, text.split(",")))


def tome_of(counts: tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    """One number for all layers, or one for each."""
    return counts[0] if counts is not None and len(counts) == 1 else counts


def names_in(text: str) -> list[str]:
    """`a, b` as two names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_numbers(text: str) -> list[int]:
    """`1000,4000,all`; `all` is 0."""
    words = re.split(r"\s*,\s*|\s+", text.strip())
    if not all(word == "all" or (word.isdecimal() and int(word) > 0) for word in words):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers above 0, such as 1,5,10")
    return list(dict.fromkeys(0 if word == "all" else int(word) for word in words))


def place_data(root: Path | None) -> None:
    """Make the folder that was asked for the one of all tasks, also for the processes that this one starts."""
    if root is not None:
        os.environ[DATA_VARIABLE] = str(root.expanduser().resolve())


def everyday(name: str, metavar: str) -> Any:
    """The option of a recipe's setting; its help is the text below the field in `Recipe`, which is not imported."""
    source = (files("vitruvian") / "training" / "recipe.py").read_text(encoding="utf-8")
    found = re.search(rf'^    {name}: .*\n    """([^"]*)"""', source, re.MULTILINE)
    assert found is not None, name
    return typer.Option(metavar=metavar, help=" ".join(found[1].split()))


def with_everyday(settings: list[str] | None, everyday: Mapping[str, object]) -> list[str]:
    """Changes to a recipe from `--set` and from options of their own, of which each setting has one."""
    given = {key: value for key, value in everyday.items() if value is not None}
    for change in settings or []:
        key = change.partition("=")[0].strip()
        if key in given:
            raise typer.BadParameter(f"{key} is set twice, by --{key.replace('_', '-')} and by --set {change}")
    return [*(settings or []), *(f"{key}={value}" for key, value in given.items())]


class EngineChoice(StrEnum):
    """What computes a model."""

    TORCH = "torch"
    ONNXRUNTIME = "onnxruntime"
    OPENVINO = "openvino"
    AUTO = "auto"


def published_names(incomplete: str) -> list[str]:
    """What a shell offers for weights, beside files."""
    from vitruvian.catalog import PUBLISHED

    return [name for name in PUBLISHED if name.startswith(incomplete)]


def task_names(incomplete: str) -> list[str]:
    return [name for name in TASKS if name.startswith(incomplete)]


def model_option(otherwise: str = "") -> Any:
    help = f"Weights: a file, a folder or a published name{otherwise}."
    return typer.Option("--model", "-m", metavar="MODEL", help=help, autocompletion=published_names)


ModelName = Annotated[str, model_option()]
OptionalModel = Annotated[str | None, model_option()]
DefaultModel = Annotated[str | None, model_option("; else a default")]
"""Where none is named, `weights.hub.default_source` says which."""
FROM = typer.Option(
    "--from",
    metavar="WEIGHTS",
    help="Weights to start from: a file, a folder or a name.",
    autocompletion=published_names,
)
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS", help='Words to choose among, for CLIP or SigLIP: "cat, a red car" or a file, one a line.'
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help='What the words stand in: "a photo of a {}.", or the set imagenet or imagenet-7.'
    ),
]
Heads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Attention heads, for files that do not tell them; else as published."),
]
ImageSize = Annotated[
    InputSize | None,
    typer.Option(parser=parse_size, metavar="SIZE", help="Input size, 384 or ROWSxCOLUMNS; else the weights' own."),
]
Batch = Annotated[
    int, typer.Option("--batch-size", min=1, max=65_536, metavar="N", help="How many images the model takes at a time.")
]
Shard = Annotated[
    Any,
    typer.Option(
        parser=parse_shard,
        metavar="I/N",
        help="Do the I-th of N shares of the work; under torchrun, that of each process.",
    ),
]
On = Annotated[
    Literal["ray"] | None, typer.Option(metavar="ray", help="Do all the work on a Ray cluster (extra `ray`).")
]
Piece = Annotated[int, typer.Option(min=1, max=2**20, metavar="N", help="Images in one part of the result.")]
Readers = Annotated[int, typer.Option("--workers", min=0, max=1024, metavar="N", help="Processes that read images.")]
Split = Annotated[str | None, typer.Option(metavar="NAME", help="Only this split of the data.")]
MaxUnreadable = Annotated[
    float, typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Share of a part's images that may be unreadable.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe.")
]
Epochs = Annotated[float | None, everyday("epochs", "N")]
LearningRate = Annotated[float | None, everyday("lr", "LR")]
BatchSize = Annotated[int | None, everyday("batch_size", "N")]
Seed = Annotated[int | None, everyday("seed", "N")]
Workers = Annotated[int | None, everyday("workers", "N")]
DataRoot = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder of all tasks; else $VITRUVIAN_DATA or ~/vitruvian-data.")
]
Engine = Annotated[
    EngineChoice,
    typer.Option(help="What computes the answers; auto is the fastest that is installed, measured once."),
]
TomeR = Annotated[
    Any,
    typer.Option(
        parser=parse_counts, metavar="R", help="Token merging (ToMe): how many tokens merge in each layer, such as 8."
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, or cuda on a machine that has it.")]
ReportFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Write the numbers as JSON and report.html.")
]
