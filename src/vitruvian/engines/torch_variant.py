"""PyTorch in lower precision, compiled, or both: the engines `torch:bf16`, `torch:compile` and their siblings."""

import threading
from typing import get_args

import torch
from torch import Tensor

from vitruvian.config import Precision
from vitruvian.engines.export import Forward
from vitruvian.engines.runtimes import FEATURES
from vitruvian.errors import ConfigError, argument
from vitruvian.machine import choose_precision, device_of
from vitruvian.model.batching import map_over_cores
from vitruvian.model.build import Model
from vitruvian.progress import print_status
from vitruvian.settings import check_choice
from vitruvian.text import describe_error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def torch_engine(engine: str, precision: str, compile: bool, device: str) -> str:
    """The engine with these settings of torch, such as `torch:bf16`; unchanged in float32 and without `compile`."""
    check_choice("precision", precision, get_args(Precision))
    precision = choose_precision(precision, device)
    settings = [name for name in (precision, "compile" * compile) if name not in ("float32", "")]
    if settings and engine not in ("auto", "torch"):
        needs = argument("compile" if compile else "precision")
        raise ConfigError(f"{needs} needs {argument('engine', 'torch')}, not {engine}")
    return f"torch:{'+'.join(settings)}" if settings else engine


class TorchVariant:
    """The outputs of a model by one of these engines; the weights stay float32 (autocast).

    In lower precision, the first batch is also computed in float32, and a line on stderr says what has changed.
    """

    def __init__(self, model: Model, engine: str) -> None:
        self.model, settings = model, engine.partition(":")[2].split("+")
        self.precision = next((name for name in settings if name in DTYPES), "float32")
        self.compiles, self.compares = "compile" in settings, self.precision != "float32"
        self.device = device_of(model).type
        self._compiled: dict[str, Forward] = {}
        self._turn = threading.Lock()
        try:
            self._autocast()
        except RuntimeError as error:
            raise ConfigError(f"{argument('precision', self.precision)}: {describe_error(error)}") from error

    def __call__(self, pixels: Tensor, output: str = "") -> Tensor:
        """(B, channels, rows, columns) -> logits (B, K) or features (B, F), float32 in the memory of the CPU."""
        function: Forward = self.model.features if output == FEATURES else self.model
        values = self._run(function, pixels, output).float().cpu()
        if self.compares:
            self.compares = False
            print_status(self._difference(values, map_over_cores(function, pixels).float().cpu(), output))
        return values

    def _autocast(self) -> torch.autocast:
        dtype = DTYPES.get(self.precision)
        return torch.autocast(self.device, dtype or torch.bfloat16, enabled=dtype is not None)

    def _run(self, function: Forward, pixels: Tensor, output: str) -> Tensor:
        if self.compiles:
            try:
                with self._turn, torch.inference_mode(), self._autocast():
                    compiled = self._compiled.setdefault(output, torch.compile(function))
                    return compiled(pixels)
            except Exception as error:  # of any kind: a missing compiler, an unsupported operation
                self.compiles = False
                print_status(f"note: torch.compile failed, continuing without it: {describe_error(error)}")

        def run(piece: Tensor) -> Tensor:  # autocast belongs to a thread
            with self._autocast():
                return function(piece)

        return map_over_cores(run, pixels)

    def _difference(self, values: Tensor, expected: Tensor, output: str) -> str:
        if output == FEATURES or self.model.meta.score_function == "identity":
            largest = float((values - expected).abs().max() / expected.abs().max())
            what = f"{output or 'outputs'} by {largest:.2g} of the largest"
        else:
            same = (values.argmax(dim=1) == expected.argmax(dim=1)) & values.isfinite().all(dim=1)
            changed, count = len(values) - int(same.sum()), len(values)
            what = f"{changed} of {count} top-1 predictions ({changed / count:.1%})"
        return f"precision: {self.precision} changes {what} in the first batch, compared with float32"
