"""The commands of `vit` in groups, and how a command ends: its exit code and the one line of an error."""

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vitruvian import __version__
from vitruvian.cli.compress import bench, optimize
from vitruvian.cli.data import datasets, doctor, pack
from vitruvian.cli.demo import demo
from vitruvian.cli.evaluate import advise, compare, evaluate, probe
from vitruvian.cli.explain import explain
from vitruvian.cli.models import convert, export, models, push
from vitruvian.cli.options import Command
from vitruvian.cli.predict import embed, predict, similar
from vitruvian.cli.segment import anomaly, segment
from vitruvian.cli.serve import serve
from vitruvian.cli.train import finetune, study, train
from vitruvian.cli.vector_map import map as vector_map
from vitruvian.errors import Interrupted, VitruvianError
from vitruvian.progress import print_status
from vitruvian.text import PrintableStream

STUDY = "Paper and demo"
GROUPS: dict[str, dict[Callable[..., None], str]] = {
    "Use a model": {
        predict: "vit predict photos/ --model runs/photos-1 --out labels.csv",
        explain: "vit explain cat.jpg --model runs/photos-1",
        segment: "vit segment photos/ --masks masks/ --model W --out cats/",
        anomaly: "vit anomaly --good good/ --model W --out detector/",
        embed: "vit embed photos/ --model W.safetensors --out vectors/",
        similar: "vit similar cat.jpg --in vectors/ --top 20",
        serve: "vit serve --model runs/photos-1 --port 8000",
    },
    "Train and measure": {
        advise: "vit advise photos/ --minutes 30",
        train: "vit train photos/ --from W.safetensors --epochs 10",
        finetune: "vit finetune photos/ --from W.safetensors --seeds 3",
        evaluate: "vit evaluate photos/ --model runs/photos-1 --out report/",
        compare: "vit compare runs/photos-1 runs/photos-2 --out report/",
        probe: "vit probe photos/ --model W.safetensors",
    },
    "Data": {
        datasets: "vit datasets pets",
        doctor: "vit doctor photos/ --out doctor.html",
        pack: "vit pack photos/ packed/ --side 256",
        vector_map: "vit map vectors/ --out map.html",
    },
    "Models and speed": {
        models: "vit models B/16",
        convert: "vit convert W.safetensors out/ --to huggingface",
        push: "vit push runs/photos-1 user/photos --license mit",
        export: "vit export runs/photos-1 model.onnx",
        bench: "vit bench --model runs/photos-1",
        optimize: "vit optimize runs/photos-1 fast/ --calibrate photos/ --max-loss 0.5",
    },
    STUDY: {demo: "vit demo"},
}
"""The commands by group, each with an example for its help."""
ELSEWHERE = {
    "quantize": "vit optimize SRC DST --only int8",
    "tome": "vit optimize SRC DST --only merge",
    "cascade": "vit optimize SRC DST --only cascade",
    "merge": "the option --merge FILE of vit embed and vit predict",
    "tasks": "vit datasets",
    **dict.fromkeys(("val", "validate", "test", "eval"), "vit evaluate DATA --model MODEL"),
    **dict.fromkeys(("infer", "inference", "classify", "run", "label"), "vit predict IMAGES --model MODEL"),
    **dict.fromkeys(("fit", "distill", "pretrain"), "vit train DATA (`vit train --recipes` lists ways to train)"),
    **dict.fromkeys(("list", "ls", "info", "download", "hub"), "vit models"),
    "version": "vit --version",
    "help": "vit --help",
}
"""Names that people try, and the command that does the job."""
EXAMPLES = """\b
Examples:
  vit demo                                       # a first look, offline
  vit train photos/                              # one folder per class
  vit predict cat.jpg --model runs/photos-1      # or a published name, see `vit models`
"""


class GroupedCommands(TyperGroup):
    """Lists the commands in groups, without importing rich, which would double the time of `vit --help`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in ELSEWHERE:
            print_status(f"error: no command {args[0]}; use {ELSEWHERE[args[0]]}")
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)

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
    if group == STUDY:
        app.add_typer(study, name="study", rich_help_panel=group, epilog="Example: vit study positions digits --plan")
    for function, example in commands.items():
        app.command(cls=Command, rich_help_panel=group, epilog=f"Example: {example}")(function)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"vitruvian {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@cache
def command() -> Any:
    """Build the commands, once for all calls of `main` in a process."""
    return typer.main.get_command(app)


def main() -> None:
    """Run `vit`. Exit codes: 0 success, 1 an error explained in one line, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    streams = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = (stream and PrintableStream(stream, sys.argv[1:]) for stream in streams)
        command()(prog_name="vit")
    except SystemExit as end:
        choose = sys.modules.get("vitruvian.engines.choose")
        if choose and not end.code:
            choose.finish_choices()
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
    finally:
        sys.stdout, sys.stderr = streams
        flush_stdout()


def flush_stdout() -> None:
    """Write the buffered output. Python does so at exit, too, where it cannot report an error in one line."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        if not isinstance(error, BrokenPipeError):  # the reader, such as `head`, has read enough
            print_status(error_line(error))
            sys.exit(1)


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
