"""`vit serve`: predictions over HTTP, and a page that shows how the model works."""

import copy
import ipaddress
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import expand_options, import_torch, option
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.errors import ConfigError, require

if TYPE_CHECKING:
    from vitruvian.engines.graph import Graph
    from vitruvian.model.build import Model
    from vitruvian.serve.watch import WatchedFolder

KEY_VARIABLE = "VITRUVIAN_API_KEY"


def parse_host(text: str) -> str:
    """A host name or an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if re.fullmatch(r"\w[\w.-]{0,252}", text, re.ASCII) is None:
            expected = "a host name such as photos.example.org, without http:// and without a port"
            raise typer.BadParameter(f"{text!r} is not {expected}") from None
    return text


MODELS = option("[NAME=]MODEL", "Weights; repeatable [default: a published DeiT III-S].", "--model", "-m")
ADAPTERS = option("[NAME=]DIR", "A LoRA adapter of --model, served as another model; repeatable.", "--adapter")
WATCH = option("FOLDER", "Also serve the models in this folder, and follow its changes while the service runs.")
HOST = option("ADDRESS", "Address to listen on; 0.0.0.0 accepts other machines.", parser=parse_host)
MAX_SECONDS = option("N", "Time limit for receiving a request, and for its response.", min=0.1)
ALLOW_HOST = option("NAME", "Host name that clients may use; repeatable.", parser=parse_host)


@expand_options
def serve(
    options: opt.ModelOptions,
    models: Annotated[list[str] | None, MODELS] = None,
    adapter: Annotated[list[str] | None, ADAPTERS] = None,
    watch: Annotated[Path | None, WATCH] = None,
    host: Annotated[str, HOST] = "127.0.0.1",
    port: Annotated[int, option("N", "Port; 0 chooses a free one.", min=0, max=65535)] = 8000,
    batch_size: opt.Batch = DEFAULT_BATCH_SIZE,
    queue: Annotated[int, option("N", "Maximum number of queued images; more get status 429.", min=1)] = 64,
    max_mb: Annotated[float, option("N", "Maximum size of a request, in megabytes.", min=0.001, max=1e6)] = 20.0,
    max_seconds: Annotated[float, MAX_SECONDS] = 30.0,
    allow_host: Annotated[list[str] | None, ALLOW_HOST] = None,
) -> None:
    """Serve models over HTTP, with a page at / to inspect them.

    Several LoRA adapters of one --model share its weights in memory. They are models of their own beside it, and the
    first of all is the default. With --watch, each file of weights, model directory and finished run in a folder is
    served under its name; no request is lost when it is added, replaced or removed.

    If the environment variable VITRUVIAN_API_KEY is set, clients must send it as their key. On SIGTERM, accepted
    requests are finished first.
    """
    for module in ("uvicorn", "fastapi", "httptools", "python_multipart", "prometheus_client"):
        require(module, "serve")
    import_torch()
    from vitruvian.engines.torch_variant import torch_engine
    from vitruvian.machine import choose_device
    from vitruvian.serve.app import serve as run
    from vitruvian.serve.batching import ServiceLimits
    from vitruvian.serve.watch import WatchedFolder

    device = choose_device(options.device, options.engine)
    engine = torch_engine(options.engine, options.precision, options.compile, device)
    watched = None if watch is None else WatchedFolder(watch.expanduser(), partial(load_model, options=options))
    with ThreadPoolExecutor(1) as loader:  # whose OpenMP workers end with it; see `serve.batching`
        loaded = loader.submit(load_models, models or [], adapter or [], watched, options, engine).result()
    run(
        loaded,
        host=host,
        port=port,
        limits=ServiceLimits(batch_size=batch_size, queue=queue, max_bytes=int(max_mb * 1e6), max_seconds=max_seconds),
        engine=engine,
        api_key=os.environ.get(KEY_VARIABLE, ""),
        hosts=tuple(allow_host or ()),
        watched=watched,
        on_start=lambda url: print(f"serving {url}", file=sys.stderr, flush=True),
    )


def load_model(weights: str | Path, options: opt.ModelOptions) -> "Model | Graph":
    """A model in memory of its own: the arrays of a loaded file are the file's, which may be overwritten."""
    from vitruvian.engines.graph import Graph
    from vitruvian.inference import Encoder
    from vitruvian.weights.load import check_finite

    model = Encoder(weights, **vars(options)).model
    if isinstance(model, Graph):
        return model
    check_finite(model, weights)
    return copy.deepcopy(model)


def load_models(
    models: list[str],
    adapters: list[str],
    watched: "WatchedFolder | None",
    options: opt.ModelOptions,
    engine: str,
) -> dict[str, "Model | Graph"]:
    """The models by name: those of --model, then those with an adapter, then those in a folder."""
    from vitruvian.engines.graph import Graph
    from vitruvian.machine import device_of
    from vitruvian.weights.hub import BUNDLED, default_source
    from vitruvian.weights.load import check_finite

    sources: list[tuple[str, str, str | Path]] = [("--model", *name_and_weights(text)) for text in models]
    sources += [("--adapter", *name_and_weights(text)) for text in adapters]
    if watched is not None:
        sources += [("--watch", name, watched.paths[name]) for name in watched.current]
        if not sources:
            raise ConfigError("contains no model; give one with --model", where=f"--watch {watched.folder}")
    elif not sources:
        default = default_source()
        name = "in-package" if default == str(BUNDLED) else name_and_weights(default)[0]
        sources = [("--model", name, default)]
    loaded: dict[str, Model | Graph] = {}
    for flag, name, path in sources:
        if name in loaded:
            form = "NAME=DIR" if flag == "--adapter" else "NAME=MODEL"
            raise ConfigError(f"two models are called {name!r}; name them with {form}", where=flag)
        if flag != "--adapter":
            loaded[name] = load_model(path, options)
            continue
        base = next(iter(loaded.values()), None)
        if len(models) != 1 or base is None or isinstance(base, Graph):
            raise ConfigError("needs one --model, the weights that the adapters were trained on", where="--adapter")
        merge = not engine.startswith("torch")  # other engines export a graph of each model
        adapted = vt.with_adapter(base, path, image_size=options.image_size, merge=merge).to(device_of(base))
        check_finite(adapted, path)
        loaded[name] = adapted
    return loaded


def name_and_weights(text: str) -> tuple[str, str]:
    """Split `NAME=MODEL`; without NAME, the model is named after its file."""
    name, equals, weights = text.partition("=")
    if equals and name and weights and not os.path.exists(text) and "/" not in name:
        return name, weights
    stem = os.path.basename(text.rstrip("/")) or text
    return stem.removesuffix(".safetensors").removesuffix(".npz").removesuffix(".onnx"), text
