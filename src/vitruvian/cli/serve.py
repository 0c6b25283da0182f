"""`vit serve`: predictions over HTTP, and a page that shows how the model works."""

import ipaddress
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
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
HOST = option("ADDRESS", "Address to listen on; 0.0.0.0 accepts other machines.", parser=parse_host)
MAX_SECONDS = option("N", "Time limit for receiving a request, and for its response.", min=0.1)
ALLOW_HOST = option("NAME", "Host name that clients may use; repeatable.", parser=parse_host)


@expand_options
def serve(
    options: opt.ModelOptions,
    models: Annotated[list[str] | None, MODELS] = None,
    adapter: Annotated[list[str] | None, ADAPTERS] = None,
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
    first of all is the default.

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

    device = choose_device(options.device, options.engine)
    with ThreadPoolExecutor(1) as loader:  # whose OpenMP workers end with it; see `serve.batching`
        loaded = loader.submit(load_models, models, adapter, options).result()
    run(
        loaded,
        host=host,
        port=port,
        limits=ServiceLimits(batch_size=batch_size, queue=queue, max_bytes=int(max_mb * 1e6), max_seconds=max_seconds),
        engine=torch_engine(options.engine, options.precision, options.compile, device),
        api_key=os.environ.get(KEY_VARIABLE, ""),
        hosts=tuple(allow_host or ()),
        on_start=lambda url: print(f"serving {url}", file=sys.stderr, flush=True),
    )


def load_models(
    models: list[str] | None, adapters: list[str] | None, options: opt.ModelOptions
) -> dict[str, "Model | Graph"]:
    """The models by name, those with an adapter last."""
    from vitruvian.engines.graph import Graph
    from vitruvian.inference import Encoder
    from vitruvian.weights.hub import BUNDLED, default_source
    from vitruvian.weights.load import check_finite

    loaded: dict[str, Model | Graph] = {}
    for name, weights in map(name_and_weights, models or [default_source()]):
        name = "in-package" if weights == str(BUNDLED) and not models else name
        if name in loaded:
            raise ConfigError(f"two models are called {name!r}; name them with NAME=MODEL", where="--model")
        encoder = Encoder(weights, **vars(options))
        loaded[name] = encoder.model
        if models and not isinstance(encoder.model, Graph):
            check_finite(encoder.model, weights)
    base = next(iter(loaded.values()))
    for name, folder in map(name_and_weights, adapters or ()):
        if len(models or ()) != 1 or isinstance(base, Graph):
            raise ConfigError("needs one --model, the weights that the adapters were trained on", where="--adapter")
        if name in loaded:
            raise ConfigError(f"two models are called {name!r}; name them with NAME=DIR", where="--adapter")
        merge = not encoder.engine.startswith("torch")  # other engines export a graph of each model
        adapted = vt.with_adapter(base, folder, image_size=options.image_size, merge=merge).to(encoder.device)
        check_finite(adapted, folder)
        loaded[name] = adapted
    return loaded


def name_and_weights(text: str) -> tuple[str, str]:
    """Split `NAME=MODEL`; without NAME, the model is named after its file."""
    name, equals, weights = text.partition("=")
    if equals and name and weights and not os.path.exists(text) and "/" not in name:
        return name, weights
    stem = os.path.basename(text.rstrip("/")) or text
    return stem.removesuffix(".safetensors").removesuffix(".npz").removesuffix(".onnx"), text
