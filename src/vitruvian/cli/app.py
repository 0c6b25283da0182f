"""The commands of `vit` in groups, and how a command ends: its exit code and the one line of an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vitruvian import __version__
from vitruvian.cli.bulk import embed, merge, similar
from vitruvian.cli.compress import bench, cascade, optimize, quantize, tome
from vitruvian.cli.data import doctor, pack, tasks
from vitruvian.cli.demo import demo
from vitruvian.cli.evaluate import evaluate, probe
from vitruvian.cli.explain import explain
from vitruvian.cli.models import convert, export, models
from vitruvian.cli.options import Command
from vitruvian.cli.predict import predict
from vitruvian.cli.serve import serve
from vitruvian.cli.study import study
from vitruvian.cli.train import finetune, train
from vitruvian.errors import Interrupted, VitruvianError
from vitruvian.progress import print_status

GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Use a model": (predict, explain, similar, serve, demo),
    "Train and measure": (train, finetune, evaluate, probe),
    "Data": (doctor, pack, tasks, embed, merge),
    "Models and weights": (models, convert, export),
    "Speed": (bench, optimize, quantize, cascade, tome),
}
STUDY_GROUP = "Train and measure"
EXAMPLES = """\b
Examples:
  vit demo                                       # a first look, offline
  vit train photos/                              # one folder per class
  vit predict cat.jpg --model runs/photos-1      # or a published name, see `vit models`
"""


class GroupedCommands(TyperGroup):
    """Lists the commands in groups, without importing rich, which would double the time of `vit --help`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        width = max(map(len, self.commands))
        for name, command in self.commands.items():
            help = command.get_short_help_str(formatter.width)
            groups[command.rich_help_panel].append((name.ljust(width), help))  # type: ignore[attr-defined]
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)


app = typer.Typer(
    name="vit",
    help="Image recognition with Vision Transformers.",
    epilog=EXAMPLES,
    cls=GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group, commands in GROUPS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=group)(command)
app.add_typer(study, name="study", rich_help_panel=STUDY_GROUP)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"vitruvian {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run `vit`. Exit codes: 0 success, 1 an error explained in one line, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="vit")
    except SystemExit as end:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun, exit without closing connections, which may hang
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception as error:
        if os.environ.get("VIT_TRACEBACK"):
            raise
        print_status(error_line(error))
        sys.exit(error.exit_code if isinstance(error, VitruvianError) else 1)


def error_line(error: Exception) -> str:
    """The line that a user sees of an error."""
    if isinstance(error, Interrupted):
        return str(error)
    if isinstance(error, VitruvianError):
        return f"error: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"error: {error.filename or 'output'}: {error.strerror.lower()}"
    text = " ".join(str(error).split())
    return f"internal error: {type(error).__name__}: {text} (set VIT_TRACEBACK=1 to see the traceback)"
