"""`vit serve`: answers over HTTP, and a page on which the model can be understood."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import Batch, Engine, EngineChoice, ImageSize
from vitruvian.cli.start import quick_imports
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import print_status

if TYPE_CHECKING:
    from vitruvian.model.build import Model

KEY_VARIABLE = "VITRUVIAN_API_KEY"


def parse_host(text: str) -> str:
    """A host name or an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if re.fullmatch(r"\w[\w.-]{0,252}", text, re.ASCII) is None:
            raise typer.BadParameter(
                f"{text!r} is not a host name such as photos.example.org, without http:// and without a port"
            ) from None
    return text


def serve(
    models: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="[NAME=]MODEL", help="Weights; may be given again. Else a default."),
    ] = None,
    host: Annotated[
        str, typer.Option(parser=parse_host, metavar="ADDRESS", help="0.0.0.0 for other machines to reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0 takes a free one.")] = 8000,
    batch_size: Batch = DEFAULT_BATCH_SIZE,
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="Images accepted at a time; more get 429.")] = 64,
    max_mb: Annotated[float, typer.Option(min=0.001, metavar="N", help="Megabytes in one request.")] = 20.0,
    max_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="N", help="Seconds for a request to arrive, and for its answer.")
    ] = 30.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(parser=parse_host, metavar="NAME", help="A name clients call it by; may be given again."),
    ] = None,
    image_size: ImageSize = None,
    engine: Engine = EngineChoice.TORCH,
) -> None:
    """Serve models over HTTP, with a page at / to look inside them.

    Clients need the key in the environment variable VITRUVIAN_API_KEY, if it is set. SIGTERM finishes what was
    accepted.
    """
    with quick_imports():
        from vitruvian.engines.graph import Graph
        from vitruvian.errors import ConfigError, require
        from vitruvian.predict import Encoder
        from vitruvian.serve.limits import ServiceLimits
        from vitruvian.serve.server import serve as run
        from vitruvian.weights.hub import BUNDLED, default_source
        from vitruvian.weights.load import check_finite

    require("uvicorn", "serve")
    limits = ServiceLimits(batch_size=batch_size, queue=queue, max_bytes=int(max_mb * 1e6), max_seconds=max_seconds)
    loaded: dict[str, Model] = {}
    if models:
        for name, weights in map(name_and_weights, models):
            if name in loaded:
                raise ConfigError(f"--model: two models are called {name!r}; name them with NAME=MODEL")
            loaded[name] = Encoder(weights, image_size=image_size, engine=engine.value).model
            if not isinstance(loaded[name], Graph):
                check_finite(loaded[name], weights)
    else:
        source = default_source()
        name = "in-package" if source == str(BUNDLED) else name_and_weights(source)[0]
        loaded[name] = Encoder(source, image_size=image_size, engine=engine.value).model
    key = os.environ.get(KEY_VARIABLE, "")
    hosts = tuple(allow_host or ())
    run(
        loaded,
        host=host,
        port=port,
        limits=limits,
        engine=engine.value,
        api_key=key,
        hosts=hosts,
        on_start=lambda url: print_status(f"serving {url}"),
    )


def name_and_weights(text: str) -> tuple[str, str]:
    """`NAME=MODEL`, or a model that is called after its file."""
    name, equals, weights = text.partition("=")
    if equals and name and weights and not os.path.exists(text) and "/" not in name:
        return name, weights
    stem = os.path.basename(text.rstrip("/")) or text
    return stem.removesuffix(".safetensors").removesuffix(".npz").removesuffix(".onnx"), text
