"""Options that several commands share: their types and help texts, how they are parsed, and how errors spell them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from typer.core import TyperCommand

from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.errors import VitruvianError, python_spelling
from vitruvian.progress import print_status
from vitruvian.tasks import DATA_VARIABLE, TASKS


class Command(TyperCommand):
    """A command whose errors name options where the library names arguments: `--num-heads` for `num_heads=`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VitruvianError as error:
            error.spell = option_spelling(
                self.params, {name for name, value in ctx.params.items() if value is not None}
            )
            raise


def option_spelling(parameters: Sequence[Any], with_value: Container[str]) -> Callable[[str, str], str]:
    """How the errors of a command spell an argument: `--num-heads`, or `--num-heads 3` if this option has a value.

    The value of an option that is not given and has no default comes from a file and keeps its Python spelling.
    """
    flags = {p.name: p.opts[0] if p.opts[0].startswith("-") else p.metavar for p in parameters}

    def spell(name: str, value: str) -> str:
        if name not in flags or (value and name not in with_value):
            return python_spelling(name, value)
        return f"{flags[name]} {value}".rstrip()

    return spell


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass, such as `ModelOptions`, by the options that are its fields."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    for group in groups.values():
        field_hints = typing.get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            hint, kind = field_hints[field.name], inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=hint))

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            names = [field.name for field in dataclasses.fields(group)]
            arguments[name] = group(**{name: arguments.pop(name) for name in names})
        function(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class InputSize(NamedTuple):
    """Rows and columns, in a type that typer does not take for two arguments."""

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


def parse_tome_r(text: str) -> tuple[int, ...]:
    """`8`, or one count per layer: `16,14,12`."""
    if re.fullmatch(r"\d{1,5}(\s*,\s*\d{1,5})*", text.strip()) is None:
        raise typer.BadParameter(f"{text!r} is neither a number of tokens such as 8 nor one per layer: 16,14,12")
    return tuple(map(int, text.split(",")))


def tome_counts(counts: tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    """One count for all layers, or one per layer."""
    return counts[0] if counts is not None and len(counts) == 1 else counts


def split_names(text: str) -> list[str]:
    """`a, b` as two names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_numbers(text: str, option: str) -> list[int]:
    """`1000,4000,all`; `all` is 0. An error names the option."""
    words = re.split(r"\s*,\s*|\s+", text.strip())
    if not all(word == "all" or (word.isdecimal() and int(word) > 0) for word in words):
        raise typer.BadParameter(f"{text!r} is not a list of positive integers, such as 1,5,10", param_hint=option)
    return list(dict.fromkeys(0 if word == "all" else int(word) for word in words))


def set_data_root(root: Path | None) -> None:
    """Make --data-root the directory of all tasks, for this process and those it starts."""
    if root is not None:
        os.environ[DATA_VARIABLE] = str(root.expanduser().resolve())


def note_replaced(destination: str | Path) -> None:
    """Print what a command will overwrite, while it can still be stopped."""
    path = Path(destination).expanduser()
    with suppress(OSError):
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            print_status(f"note: {path} exists; files of the same names are replaced when the new ones are complete")


class EngineChoice(StrEnum):
    """The engine that runs a model."""

    TORCH = "torch"
    ONNXRUNTIME = "onnxruntime"
    OPENVINO = "openvino"
    AUTO = "auto"


def complete_model(incomplete: str) -> list[str]:
    """Published names for the shell's completion."""
    from vitruvian.catalog import PUBLISHED

    return [name for name in PUBLISHED if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    return [name for name in TASKS if name.startswith(incomplete)]


def model_option(otherwise: str = "") -> Any:
    help = f"Weights: a file, a directory or a published name{otherwise}."
    return typer.Option("--model", "-m", metavar="MODEL", help=help, autocompletion=complete_model)


def data_argument(what: str = "a built-in name") -> Any:
    return typer.Argument(metavar="DATA", help=f"A folder, a manifest, shards, or {what}.")


def json_option(what: str) -> Any:
    return typer.Option("--json", help=f"Print one JSON object{what}.")


# Data and models
Data = Annotated[str, data_argument()]
TaskData = Annotated[str, data_argument("a task (`vit tasks`)")]
Split = Annotated[str | None, typer.Option(metavar="NAME", help="Use only this split of the data.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Directory of all tasks [default: $VITRUVIAN_DATA or ~/vitruvian-data]."),
]
ModelName = Annotated[str, model_option()]
OptionalModel = Annotated[str | None, model_option()]
DefaultModel = Annotated[str | None, model_option(" [default: a published DeiT III-S]")]
Source = Annotated[str, typer.Argument(metavar="SRC", help="Weights: a file, a directory or a published name.")]
Weights = typer.Option(
    "--from",
    metavar="WEIGHTS",
    help="Weights to start from: a file, a directory or a published name.",
    autocompletion=complete_model,
)
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS", help='Labels for a CLIP or SigLIP: "cat, a red car", or a file with one label per line.'
    ),
]
Template = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help='Prompt template: "a photo of a {}.", or the set imagenet or imagenet-7.'),
]

# How a model is loaded and run
NumHeads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of attention heads, if the file does not store it.")
]
ImageSize = Annotated[
    InputSize | None,
    typer.Option(parser=parse_size, metavar="SIZE", help="Input size: 384 or ROWSxCOLUMNS [default: the weights']."),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, or cuda if available.")]
Engine = Annotated[EngineChoice, typer.Option(help="Engine; auto measures once which installed engine is fastest.")]
TomeR = Annotated[
    Any,
    typer.Option(
        parser=parse_tome_r, metavar="R", help="Token merging (ToMe): number of tokens to merge per layer, such as 8."
    ),
]
Readers = Annotated[int, typer.Option("--workers", min=0, max=1024, metavar="N", help="Processes that read images.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, max=65_536, metavar="N", help="Inference batch size.")]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded, as options of a command."""

    num_heads: NumHeads = None
    image_size: ImageSize = None
    device: Device = "cpu"

    @property
    def is_default(self) -> bool:
        return self == type(self)()

    def arguments(self) -> dict[str, Any]:
        """Arguments of `Encoder` and `Classifier`."""
        return {"num_heads": self.num_heads, "image_size": self.image_size, "device": self.device}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """How a model is loaded and run, as options of a command."""

    engine: Engine = EngineChoice.TORCH
    tome_r: TomeR = None

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "engine": self.engine.value, "tome_r": tome_counts(self.tome_r)}


Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe; repeatable.")
]


@dataclass(frozen=True, kw_only=True)
class BulkOptions:
    """How many images are processed in parts, as options of a command."""

    shard: Annotated[
        Any,
        typer.Option(
            parser=parse_shard,
            metavar="I/N",
            help="Process shard I of N; under torchrun, each process takes its own.",
        ),
    ] = None
    on: Annotated[Literal["ray"] | None, typer.Option(metavar="ray", help="Run on a Ray cluster (extra `ray`).")] = None
    split: Split = None
    piece: Annotated[int, typer.Option(min=1, max=2**20, metavar="N", help="Images per part of the result.")] = 4096
    max_unreadable: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Maximum fraction of unreadable images per part.")
    ] = 0.25
    workers: Readers = 0
    batch_size: Batch = DEFAULT_BATCH_SIZE


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The settings of a recipe that have an option of their own, and `--set` for all others."""

    epochs: Annotated[float | None, typer.Option(metavar="N", help="Number of epochs.")] = None
    lr: Annotated[float | None, typer.Option(metavar="LR", help="Peak learning rate.")] = None
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Global batch size, over all processes.")] = None
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Random seed (initialization, shuffling, augmentation, dropout).")
    ] = None
    workers: Annotated[int | None, typer.Option(metavar="N", help="Data loading workers per training process.")] = None
    settings: Changes = None

    def changes(self, **more: object) -> list[str]:
        """All changes to the recipe, with those of `more`; a setting can be given once."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | more
        values = {key: value for key, value in named.items() if key != "settings" and value is not None}
        for change in self.settings or []:
            key = change.partition("=")[0].strip()
            if key in values:
                raise typer.BadParameter(f"{key} is set twice, by --{key.replace('_', '-')} and by --set {change}")
        return [*(self.settings or []), *(f"{key}={value}" for key, value in values.items())]


Seeds = Annotated[int, typer.Option(min=1, metavar="N", help="Number of seeds to average over.")]
Quick = Annotated[bool, typer.Option("--quick", help="Use one learning rate and one seed.")]

# Results
ReportFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Write the results as JSON and report.html.")
]
