"""Shared by all commands: options and how they are parsed, how errors spell them, and quick imports."""

import copy
import dataclasses
import functools
import gc
import inspect
import os
import re
import signal
import threading
import typing
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer
from typer.core import TyperCommand

from vitruvian import config
from vitruvian.config import DEFAULT_BATCH_SIZE, ENGINE_NAMES
from vitruvian.errors import ConversionError, VitruvianError, python_spelling
from vitruvian.progress import print_status
from vitruvian.text import package_table

ADVANCED = "Advanced"  # the last panel of a command's help
RUNNING = "How the model runs"
BULK = "Millions of images"


def import_torch() -> None:
    """Import torch without garbage collection, and exempt its objects from it.

    They are a million objects that stay alive; traversing them again and again takes a quarter of the time of
    `vit predict` for one image. Ctrl-C exits here without an exception, which an import could swallow.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if handler is signal.default_int_handler and in_main_thread:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
    import logging
    import warnings

    # an image with invalid metadata is decoded anyway, or we raise our own error
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").addHandler(logging.NullHandler())


class Command(TyperCommand):
    """A command whose errors name options where the library names arguments: `--num-heads` for `num_heads=`.

    An option that takes one value cannot be given twice: click would silently use the last value. The help lists
    options in panels, the advanced ones last.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for panel in sorted(panels, key=lambda name: name == ADVANCED):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            used: list[Any] = []
            if not ctx.resilient_parsing:
                _, extra, used = self.make_parser(ctx).parse_args(list(args))
                for name, sign, value in (word.partition("=") for word in extra):
                    if sign and name.isidentifier():  # as hydra and ultralytics write it
                        ctx.fail(f"unexpected argument {name}={value}; options are written --{name} {value}")
        except Exception as error:
            if hasattr(error, "possibilities") and hasattr(error, "option_name"):  # click's NoSuchOption
                names = [name for parameter in self.params for name in (*parameter.opts, parameter.metavar or "")]
                longer = [name for name in names if name.startswith(error.option_name)]
                error.possibilities = options_elsewhere(error.option_name, names) or longer or error.possibilities
            raise
        for parameter in used:
            if used.count(parameter) > 1 and not parameter.multiple and not parameter.is_eager:
                raise typer.BadParameter("given twice, but takes one value", ctx=ctx, param=parameter)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        import logging

        logger = logging.getLogger("vitruvian")
        try:
            logger.addFilter(is_new_note)
            return super().invoke(ctx)
        except VitruvianError as error:
            with_value = {name for name, value in ctx.params.items() if value is not None}
            error.spell = option_spelling(self.params, with_value)
            raise
        finally:
            logger.removeFilter(is_new_note)


def options_elsewhere(name: str, names: Container[str]) -> list[str]:
    """Suggest options of a command for an option of another program, such as `--lr` for `--learning-rate`."""
    tables = package_table("other_names.toml")
    plain = name.strip("-").replace("-", "_").lower()
    for option, others in tables["options"].items():
        if option.split()[-1] in names and plain in others.split():
            return [option]
    for setting, others in tables["settings"].items():
        setting = setting.partition(" ")[0]
        if plain in (setting, setting.rpartition(".")[2], *others.split()):
            option = f"--{setting.replace('_', '-')}"
            return [option] if option in names else [f"--set {setting}"] if "--set" in names else []
    return []


def is_new_note(record: Any) -> bool:
    """Whether no earlier command has printed this warning about a file; the cache remembers those that have."""
    if not hasattr(record, "file"):
        return True
    from vitruvian.cache import cache_folder
    from vitruvian.files import file_stamp, short_hash

    try:
        mark = cache_folder() / "notes" / short_hash([record.getMessage(), file_stamp(record.file)])
        if mark.exists():
            return False
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        pass  # without a cache, the note is printed each time
    return True


def option_spelling(parameters: Sequence[Any], with_value: Container[str]) -> Callable[[str, str], str]:
    """Return how errors of a command name an argument: `--num-heads`, or `--num-heads 3` if it has a value.

    The value of an option that is not given and has no default comes from a file and keeps its Python spelling.
    """
    flags = {p.name: p.opts[0] if p.opts[0].startswith("-") else p.metavar for p in parameters}

    def spell(name: str, value: str) -> str:
        if name not in flags or (value and name not in with_value):
            return python_spelling(name, value)
        return f"{flags[name]} {value}".rstrip()

    return spell


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass, such as `ModelOptions`, by the options that are its fields.

    They are listed in the panel of the dataclass, except those with a panel of their own. An option that the function
    declares itself, in another form, is not part of the group and has its default there.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    fields = {
        name: [field for field in dataclasses.fields(group) if field.name not in hints]
        for name, group in groups.items()
    }
    for name, group in groups.items():
        field_hints = typing.get_type_hints(group, include_extras=True)
        for field in fields[name]:
            kind, info = typing.get_args(field_hints[field.name])
            info = copy.copy(info)
            info.rich_help_panel = info.rich_help_panel or group.panel
            details: Any = {"default": field.default, "annotation": Annotated[kind, info]}
            parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, **details))

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields[name]})
        function(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def match_value(pattern: str, text: str, expected: str) -> re.Match[str]:
    """Match the value of an option; the error says what was expected."""
    match = re.fullmatch(pattern, text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is {expected}")
    return match


def parse_size(text: str) -> tuple[int, int]:
    """Parse a size: `256x192`, or `384` for a square."""
    expected = "neither a side such as 384 nor ROWSxCOLUMNS such as 256x192"
    rows, columns = match_value(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text.lower(), expected).groups()
    return int(rows), int(columns or rows)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard such as `3/64`."""
    expected = "not a shard I/N with I from 1 to N, such as 3/64"
    index, count = map(int, match_value(r"(\d{1,7})/(\d{1,7})", text, expected).groups())
    if not 1 <= index <= count:
        raise typer.BadParameter(f"{text!r} is {expected}")
    return index, count


def parse_tome_r(text: str) -> int | tuple[int, ...]:
    """Parse numbers of tokens: `8` for all layers, or one per layer, `16,14,12`."""
    match_value(r"\d{1,5}(\s*,\s*\d{1,5})*", text, "neither a number of tokens such as 8 nor one per layer: 16,14,12")
    counts = tuple(map(int, text.split(",")))
    return counts[0] if len(counts) == 1 else counts


def parse_engine(text: str) -> str:
    """Check the name of an engine, such as `torch` or `onnxruntime:cuda`; `:cpu` may be left out."""
    if text.removesuffix(":cpu") not in ENGINE_NAMES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(ENGINE_NAMES)}")
    return text.removesuffix(":cpu")


def split_names(text: str) -> list[str]:
    """Split names at commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_numbers(text: str, option: str, example: str) -> list[int]:
    """Parse integers from 1 to 65,536; if the example ends with `all`, that is 0. An error names the option."""
    words, keyword = re.split(r"\s*,\s*|\s+", text.strip()), "|all" * example.endswith("all")
    numbers = [0 if word == "all" else int(word) for word in words if re.fullmatch(rf"0*[1-9]\d{{0,4}}{keyword}", word)]
    if len(numbers) < len(words) or max(numbers) > 2**16:
        reason = f"{text!r} is not a list of integers from 1 to 65,536, such as {example}"
        raise typer.BadParameter(reason, param_hint=option)
    return list(dict.fromkeys(numbers))


def check_suffix(path: Path | None, suffix: str, option: str) -> None:
    """Refuse a file name that does not end in `suffix`: a page in place of a photo would destroy the photo."""
    if path is not None and path.suffix.lower() != suffix:
        raise typer.BadParameter(f"{str(path)!r} does not end in {suffix}", param_hint=option)


def check_new(destination: str | Path, hint: str = "") -> None:
    """Refuse to write over a file or into a folder that is not empty."""
    path = Path(destination).expanduser()
    with suppress(OSError):
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise ConversionError("already exists", where=path, hint=hint or "choose another name or remove it")


def finish(failed: int, total: int = 0) -> None:
    """Exit with 1 if images failed; if there were several, print how many."""
    if failed and total > 1:
        print_status(f"{failed} of {total} images could not be read")
    if failed:
        raise typer.Exit(1)


def complete_model(incomplete: str) -> list[str]:
    """Published names for the shell's completion."""
    from vitruvian.catalog import PUBLISHED

    return [name for name in PUBLISHED if name.startswith(incomplete)]


def option(metavar: str, help: str, *names: str, panel: str | None = None, **settings: Any) -> Any:
    """An option with a value: `top: Annotated[int, option("N", "Number of predictions per image.", min=1)] = 5`."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **settings)


def flag(name: str, help: str, panel: str | None = None) -> Any:
    """An option without a value, such as `--quick`."""
    return typer.Option(name, help=help, rich_help_panel=panel)


def model_option(otherwise: str = "") -> Any:
    return option("MODEL", f"Weights: {WEIGHTS}{otherwise}.", "--model", "-m", autocompletion=complete_model)


def data_argument(what: str = "a built-in name") -> Any:
    return typer.Argument(metavar="DATA", help=f"A folder, a manifest, shards, or {what}.")


# Data and models. An option with a `parser` has the type Any, because typer takes a tuple for several arguments.
WEIGHTS = "a file, a directory or a published name"
Split = Annotated[str | None, option("NAME", "Use only this split of the data.")]
TASK_FOLDER = "Directory of all tasks [default: $VITRUVIAN_DATA or ~/vitruvian-data]."
DataRoot = Annotated[Path | None, option("FOLDER", TASK_FOLDER, panel=ADVANCED)]
ModelName = Annotated[str, model_option()]
OptionalModel = Annotated[str | None, model_option()]
DefaultModel = Annotated[str | None, model_option(" [default: a published DeiT III-S]")]
Source = Annotated[str, typer.Argument(metavar="SRC", help=f"Weights: {WEIGHTS}.")]
STARTING = f"Weights to start from: {WEIGHTS}."
StartingWeights = option("MODEL", STARTING, "--from", "--model", "-m", autocompletion=complete_model)
Labels = Annotated[str | None, option("WORDS", 'Labels for a CLIP or SigLIP: "cat, a red car", or a file of lines.')]
Template = Annotated[str | None, option("TEXT", 'Prompt template: "a photo of a {}.", imagenet or imagenet-7.')]

# How a model is loaded and run
NumHeads = Annotated[
    int | None, option("N", "Attention heads, if the file does not store them.", panel=ADVANCED, min=1)
]
ImageSize = Annotated[Any, option("SIZE", "Input size: 384 or 256x192 [default: the weights'].", parser=parse_size)]
ENGINE_HELP = "torch, onnxruntime or openvino; auto starts with torch and uses the fastest installed for many images."
Engine = Annotated[str, option("NAME", ENGINE_HELP, parser=parse_engine)]
Precision = Annotated[
    config.Precision,
    typer.Option(help="dtype of torch (autocast); the first batch is compared with float32. auto: by the device."),
]
Compile = Annotated[bool, flag("--compile", "Run the model through torch.compile, or without if that fails.")]
Device = Annotated[str, option("NAME", "cuda, mps, xpu or cpu; auto takes an accelerator if there is one.")]
Adapter = Annotated[str | None, option("DIR", "A LoRA adapter to apply to the weights (peft's format).")]
TomeR = Annotated[Any, option("R", "Token merging (ToMe): tokens to merge per layer, such as 8.", parser=parse_tome_r)]
Readers = Annotated[int, option("N", "Processes that read images.", "--workers", panel=ADVANCED, min=0, max=1024)]
Batch = Annotated[int, option("N", "Inference batch size.", "--batch-size", panel=ADVANCED, min=1, max=65_536)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for loading and running a model: the arguments of `Encoder` and `Classifier`."""

    panel: ClassVar = RUNNING
    num_heads: NumHeads = None
    image_size: ImageSize = None
    device: Device = "auto"
    adapter: Adapter = None
    engine: Engine = "auto"
    precision: Precision = "float32"
    compile: Compile = False
    tome_r: TomeR = None


GROUPS = "Hold out whole groups: a manifest's column or a regular expression on the path [default: column group]."
GroupBy = Annotated[str | None, option("COLUMN", GROUPS)]
KINDS = "What to predict: single, multi, number or ordinal, also with columns: number:age [default: by the data]."
TargetName = Annotated[str | None, option("KIND", KINDS)]
Changes = Annotated[
    list[str] | None, option("KEY=VALUE", "Change a setting (`vit train --settings`); repeatable.", "--set")
]


@dataclass(frozen=True, kw_only=True)
class BulkOptions:
    """Options for processing many images in parts."""

    panel: ClassVar = BULK
    shard: Annotated[
        Any, option("I/N", "Process shard I of N; torchrun sets it for each process.", parser=parse_shard)
    ] = None
    on: Annotated[Literal["ray"] | None, option("ray", "Run on a Ray cluster (extra `ray`).")] = None
    split: Split = None
    piece: Annotated[int, option("N", "Images per part of the result.", panel=ADVANCED, min=1, max=2**20)] = 4096
    max_unreadable: Annotated[
        float, option("SHARE", "Unreadable images allowed per part.", panel=ADVANCED, min=0.0, max=1.0)
    ] = 0.25
    workers: Readers = 0
    batch_size: Batch = DEFAULT_BATCH_SIZE


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options for settings of a recipe, and `--set` for all other settings."""

    panel: ClassVar = "Settings of the recipe"
    epochs: Annotated[float | None, option("N", "Number of epochs.")] = None
    lr: Annotated[float | None, option("LR", "Peak learning rate.")] = None
    batch_size: Annotated[int | None, option("N", "Global batch size, over all processes.")] = None
    seed: Annotated[int | None, option("N", "Random seed (initialization, shuffling, augmentation, dropout).")] = None
    image_size: Annotated[int | None, option("PIXELS", "Input size; the position embedding is resized.", min=1)] = None
    freeze: Annotated[
        str | None, option("PATTERNS", "Do not train these, such as 'embed.*,blocks.[0-5].*'.", panel=ADVANCED)
    ] = None
    lora: Annotated[
        int | None, option("RANK", "Train only the head and LoRA updates of this rank, such as 8.", min=1)
    ] = None
    val_fraction: Annotated[float | None, option("SHARE", "Fraction of each class to hold out for validation.")] = None
    group_by: GroupBy = None
    target: TargetName = None
    patience: Annotated[int | None, option("N", "Stop after N evaluations without improvement.", min=1)] = None
    precision: Annotated[
        Literal["float32", "bf16", "fp16", "auto", "bfloat16", "float16"] | None,
        option("DTYPE", "float32, bf16, fp16 or auto (autocast).", panel=ADVANCED),
    ] = None
    device: Annotated[str | None, option("NAME", "cuda, mps, xpu or cpu [default: auto].", panel=ADVANCED)] = None
    workers: Annotated[int | None, option("N", "Data loading workers per training process.", panel=ADVANCED)] = None
    settings: Changes = None

    def changes(self, **more: object) -> dict[str, object]:
        """Return all changes to the recipe, with those of `more`; raises if a setting is given twice."""
        from vitruvian.training.recipe import parse_changes

        named = vars(self) | more | {"settings": None}
        values, changes = {key: value for key, value in named.items() if value is not None}, self.settings or []
        for change in changes:
            key = change.partition("=")[0].strip()
            if key in values:
                raise typer.BadParameter(f"{key} is set twice, by --{key.replace('_', '-')} and by --set {change}")
        return parse_changes(changes) | values


# Results
ReportFolder = Annotated[Path | None, option("FOLDER", "Write the results as JSON and report.html.", file_okay=False)]
