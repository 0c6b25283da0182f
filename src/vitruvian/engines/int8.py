"""Eight-bit integers for a model's dense layers: ranges, what each layer's rounding changes, and the graph.

Activations have one scale a layer, found on calibration images; weights have one a channel. Sums, norms, softmax, the
patch embedding and the head stay float. Weights use seven of the eight bits: processors without VNNI add two products
in 16 bits, which larger weights make saturate, and a file that was right on one machine would be wrong on another.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.engines.export import Forward
from vitruvian.engines.layout import three_layers
from vitruvian.engines.smooth import channel_maxima, dense_layers, smoothed, watched
from vitruvian.errors import ConfigError, ConversionError, require
from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention
from vitruvian.model.vit import ViT
from vitruvian.progress import Track, untracked
from vitruvian.settings import Size

LEVELS = 255
"""Steps of an activation."""
WEIGHT_BITS = 7
SAMPLED = 65_536
"""Values of a layer's input that are looked at, of each batch."""
SHARES = (1.0, 0.9999, 0.999, 0.998, 0.995)
"""Quantiles of the values among which the range is chosen."""
VNNI = {"avx512_vnni", "avx_vnni", "asimddp"}
"""Flags of processors that multiply eight-bit numbers and add them in 32 bits."""

Range = tuple[float, float]


def has_vnni() -> bool:
    """Whether the processor adds eight-bit products without saturation, as far as the system tells."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
        return bool(VNNI & set(flags.split()))
    return False


def check_bits(bits: int) -> None:
    if bits not in (7, 8):
        raise ConfigError(f"weight_bits={bits} is neither 7 nor 8")
    if bits == 8 and not has_vnni():
        raise ConfigError("weight_bits=8 saturates on this processor, which has no VNNI; leave it out for 7")


def prepared(model: Model, batches: Sequence[Tensor]) -> tuple[ViT, dict[str, Range]]:
    """The model with scales moved into its weights, and the range of what enters each dense layer of it."""
    dense_layers(model)  # refuses what is no Vision Transformer
    assert isinstance(model, ViT)
    ready = smoothed(model, channel_maxima(model, batches)).eval()
    return ready, ranges(ready, batches)


def ranges(model: ViT, batches: Sequence[Tensor]) -> dict[str, Range]:
    """For each dense layer the range whose rounding and clipping leave the least mean squared error."""
    samples: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(0)

    def see(name: str, x: Tensor) -> None:
        flat = x.detach().flatten()
        picked = torch.randint(len(flat), (min(SAMPLED, len(flat)),), generator=generator)
        samples.setdefault(name, []).append(torch.cat([flat[picked], torch.stack(list(flat.aminmax()))]))

    with watched(dense_layers(model), see), torch.inference_mode():
        for pixels in batches:
            model(pixels)
    return {name: best_range(torch.cat(values)) for name, values in samples.items()}


def best_range(values: Tensor) -> Range:
    ordered = values.sort().values
    found: dict[Range, float] = {}
    for share in SHARES:
        cut = round((1 - share) / 2 * (len(ordered) - 1))
        ends = min(0.0, float(ordered[cut])), max(0.0, float(ordered[len(ordered) - 1 - cut]))
        if ends[0] < ends[1]:
            found[ends] = float(F.mse_loss(rounded(values, ends), values))
    return min(found, key=found.__getitem__) if found else (0.0, 1.0)


def rounded(x: Tensor, ends: Range) -> Tensor:
    """As an activation of eight bits has it."""
    scale = (ends[1] - ends[0]) / LEVELS
    return torch.fake_quantize_per_tensor_affine(x, scale, round(-ends[0] / scale), 0, LEVELS)


def rounded_weight(weight: Tensor, bits: int) -> Tensor:
    """(O, D) as integers of so many bits have it, with a scale for each output."""
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
    return (weight / scale).round().clamp(-most, most) * scale


def simulated(
    model: ViT, layers: Iterable[str], found: Mapping[str, Range], bits: int, run: Forward | None = None
) -> Forward:
    """The model, or a part of it, with these layers rounded as int8 rounds them, computed in float."""
    chosen = {name: layer for name, layer in dense_layers(model).items() if name in set(layers)}

    def forward(pixels: Tensor) -> Tensor:
        kept = {name: layer.weight.data for name, layer in chosen.items()}
        try:
            for layer in chosen.values():
                layer.weight.data = rounded_weight(layer.weight.data, bits)
            with watched(chosen, lambda name, x: rounded(x, found[name])), torch.no_grad():
                return (run or model)(pixels)
        finally:
            for name, layer in chosen.items():
                layer.weight.data = kept[name]

    return forward


def sensitivity(
    model: ViT, found: Mapping[str, Range], pixels: Tensor, *, bits: int, track: Track = untracked
) -> dict[str, float]:
    """How far each layer alone in int8 moves the answers: mean Kullback-Leibler divergence in nats, largest first."""
    inputs: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        for block in model.blocks:
            seen = block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
            stack.callback(seen.remove)
        wanted = model(pixels).log_softmax(dim=-1)
    moved: dict[str, float] = {}
    for name in track(list(found), len(found)):
        number = int(name.split(".")[1])
        rest = partial(from_block, model, number, model.grid_of(pixels))
        given = simulated(model, [name], found, bits, rest)(inputs[number]).log_softmax(dim=-1)
        moved[name] = float(F.kl_div(given, wanted, log_target=True, reduction="batchmean"))
    return dict(sorted(moved.items(), key=lambda pair: -pair[1]))


def from_block(model: ViT, number: int, grid: Size, x: Tensor) -> Tensor:
    """The answers (B, K) from what enters a block (B, N, D)."""
    for block in model.blocks[number:]:
        x = block(x, model.tokens_read if block is model.blocks[-1] else None, grid)
    return model.forward_head(x if model.config.norm_after_pool else model.norm(x))


def write_int8(graph: Path, path: Path, model: ViT, chosen: Mapping[str, Range], *, bits: int) -> None:
    """An exported ONNX file of the model with these layers in int8, for ONNX Runtime and OpenVINO."""
    onnx = require("onnx", "onnx")
    tools = require("onnxruntime.quantization", "onnx")
    quantizers = require("onnxruntime.quantization.qdq_quantizer", "onnx")
    loaded = onnx.load(str(graph))
    del loaded.graph.value_info[:]  # stated shapes would contradict the quantizer's own
    nodes = nodes_of(loaded, model)
    missing = [name for name in chosen if name not in nodes]
    if missing:
        raise ConversionError(f"{path}: not written, the graph does not show the product of {missing[0]}")
    for name in chosen:
        for number, node in enumerate(nodes[name]):
            node.name = f"{name}.{number}"
    ends = {node.input[0]: tuple(map(np.float32, chosen[name])) for name in chosen for node in nodes[name]}
    options = {
        "WeightSymmetric": True,
        "ActivationSymmetric": False,
        "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
        "DefaultTensorType": onnx.TensorProto.FLOAT,
    }
    settings: dict[str, Any] = {
        "per_channel": True,
        "reduce_range": bits == WEIGHT_BITS,
        "weight_qType": tools.QuantType.QInt8,
        "activation_qType": tools.QuantType.QUInt8,
        "tensors_range": tools.calibrate.TensorsData(tools.CalibrationMethod.MinMax, ends),
        "nodes_to_quantize": [node.name for name in chosen for node in nodes[name]],
        "nodes_to_exclude": [],
        "op_types_to_quantize": ["MatMul", "Gemm"],
        "extra_options": options,
    }
    quantizer = quantizers.QDQQuantizer(loaded, **settings)
    quantizer.quantize_model()
    onnx.save(quantizer.model.model, str(path))


def nodes_of(loaded: Any, model: ViT) -> dict[str, list[Any]]:
    """The product of each dense layer in a graph, told by its weights; three of queries, keys and values."""
    from onnx.numpy_helper import to_array

    names: dict[bytes, str] = {}
    for name, layer in dense_layers(model).items():
        attention = model.get_submodule(name.rpartition(".")[0])
        parts = [layer]
        if type(attention) is Attention and layer is attention.qkv:
            parts = three_layers(attention)
        for each in parts:
            names[digest(each.weight.detach().numpy().T)] = name
    held = {each.name: each for each in loaded.graph.initializer}
    found: dict[str, list[Any]] = {}
    for node in loaded.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in held:
            array = to_array(held[node.input[1]])
            turned = any(each.name == "transB" and each.i for each in node.attribute)
            known = names.get(digest(array.T if turned else array))
            if known is not None:
                found.setdefault(known, []).append(node)
    return found


def digest(array: Any) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()


def check_runs(path: Path, engine: str, image: Sequence[int]) -> None:
    """Run a graph in its own process, at several batches: a runtime may use instructions that a virtual machine lacks.

    `image` is (channels, rows, columns).
    """
    code = (
        "import sys, torch; from pathlib import Path; from vitruvian.engines.sessions import open_session; "
        f"run = open_session(Path(sys.argv[1]), {engine!r}); "
        f"[run(torch.zeros(batch, *{tuple(image)!r})) for batch in (1, 2, 7, 16, 32)]"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = (
            signal.Signals(-done.returncode).name if done.returncode < 0 else lines[-1] if lines else "no reason given"
        )
        raise ConversionError(f"{engine} cannot run int8 on this machine ({why}); take engine='onnxruntime'")
