"""The command `vit`: each subcommand parses, calls one library function and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from vitruvian import __version__
from vitruvian.cli.bench import bench
from vitruvian.cli.convert import convert
from vitruvian.cli.demo import demo
from vitruvian.cli.doctor import doctor
from vitruvian.cli.embed import embed, merge
from vitruvian.cli.evaluate import evaluate
from vitruvian.cli.explain import explain
from vitruvian.cli.export import export
from vitruvian.cli.fewer import cascade, tome
from vitruvian.cli.finetune import finetune
from vitruvian.cli.models import models
from vitruvian.cli.options import Command
from vitruvian.cli.pack import pack
from vitruvian.cli.predict import predict
from vitruvian.cli.probe import probe
from vitruvian.cli.quantize import optimize, quantize
from vitruvian.cli.serve import serve
from vitruvian.cli.similar import similar
from vitruvian.cli.study import study
from vitruvian.cli.tasks import tasks
from vitruvian.cli.train import train
from vitruvian.errors import Interrupted, VitruvianError
from vitruvian.progress import print_status

app = typer.Typer(
    name="vit",
    help="Image recognition with Vision Transformers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(predict, models, convert, train, finetune, probe, evaluate, explain),
    *(tasks, doctor, pack, embed, merge, similar, export, quantize, optimize, cascade, tome, bench, serve, demo),
)
for command in COMMANDS:
    app.command(cls=Command)(command)
app.add_typer(study, name="study")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"vitruvian {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run `vit`: exit code 0 done, 1 a failure said in one line, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="vit")
    except SystemExit as done:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a process of torchrun leaves without taking its connections apart
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(done.code if isinstance(done.code, int) else int(done.code is not None))
        raise
    except Exception as error:
        if os.environ.get("VIT_TRACEBACK"):
            raise
        print_status(one_line(error))
        sys.exit(error.exit_code if isinstance(error, VitruvianError) else 1)


def one_line(error: Exception) -> str:
    """The one line a user sees of an error."""
    if isinstance(error, Interrupted):
        return str(error)
    if isinstance(error, VitruvianError):
        return f"error: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"error: {error.filename or 'output'}: {error.strerror.lower()}"
    text = " ".join(str(error).split())
    return f"internal error: {type(error).__name__}: {text} (set VIT_TRACEBACK=1 to see the traceback)"
