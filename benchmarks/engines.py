"""The fastest engine of our model beside the peers, each as its users run it, and timm's own export in both runtimes.

    python benchmarks/engines.py [--rounds 15] [--sizes Ti,S,B] [--batches 1,16] [--not-compiled]
        [--graphs FOLDER] [--out rows.jsonl]

Every round times each once on the same batch, in an order drawn anew, each in a process of its own; ratios are between
medians of the same rounds.
`ours` is `Classifier(model, engine="auto").logits`, after it has chosen its engine. The runtimes get timm's model at a
fixed shape from `torch.onnx.export(dynamo=True)`; with --graphs, exports stay in that folder for the next run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import vitruvian as vt
from apart import apart, in_turn
from inference import describe, random_model
from peers import Forward, make_torchvision_importable, timm_model, torchvision_model, transformers_model


def ours(size: str) -> Forward:
    return vt.Classifier(random_model(size), engine="auto").logits


def timm(size: str, *, compiled: bool = False) -> Forward:
    with tempfile.TemporaryDirectory() as folder:
        model = timm_model(random_model(size), size, Path(folder)).eval()
    return torch.compile(model) if compiled else model


def timm_compiled(size: str) -> Forward:
    return timm(size, compiled=True)


def torchvision(size: str) -> Forward:
    with tempfile.TemporaryDirectory() as folder:
        return torchvision_model(random_model(size), Path(folder)).eval()


def transformers(size: str) -> Forward:
    with tempfile.TemporaryDirectory() as folder:
        return transformers_model(random_model(size), Path(folder))


def onnxruntime(path: Path) -> Forward:
    """timm's export, on all cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options)
    name = session.get_inputs()[0].name
    return lambda pixels: torch.from_numpy(session.run(None, {name: pixels.numpy()})[0])


def openvino(path: Path) -> Forward:
    """timm's export, on all cores; in float32, as all others: OpenVINO may choose a shorter type by itself."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda pixels: torch.from_numpy(request.infer([pixels.numpy()], share_inputs=True)[0].copy())


def exported(size: str, pixels: torch.Tensor, folder: Path) -> Path:
    """timm's own export at this shape."""
    path = folder / f"timm_{size}_{len(pixels)}.onnx"
    if not path.is_file():
        torch.onnx.export(timm(size), (pixels,), path, dynamo=True, external_data=False, verbose=False)
    return path


def compare(size: str, batch_size: int, rounds: int, *, compiled: bool, graphs: Path) -> list[dict[str, object]]:
    pixels = torch.randn(batch_size, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    path = exported(size, pixels, graphs)
    builders: dict[str, tuple[Any, ...]] = {
        "ours (auto)": (ours, size),
        "timm": (timm, size),
        **({"timm compiled": (timm_compiled, size)} if compiled else {}),
        "torchvision": (torchvision, size),
        "transformers": (transformers, size),
        "ONNX Runtime (timm)": (onnxruntime, path),
        "OpenVINO (timm)": (openvino, path),
    }
    with apart(builders) as libraries:
        seconds, logits = in_turn(libraries, pixels, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = min((name for name in medians if name != "ours (auto)"), key=medians.__getitem__)
    rows: list[dict[str, object]] = []
    for name, median in medians.items():
        rows.append(
            {
                "model": f"ViT-{size}/16",
                "batch": batch_size,
                "library": name,
                "images_per_second": round(batch_size / median, 2),
                "relative_to_fastest_peer": round(medians[fastest] / median, 3),
                "largest_logit_difference": (logits[name] - logits["ours (auto)"]).abs().max().item(),
            }
        )
        print(describe(rows[-1], fastest), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", default="Ti,S,B")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--not-compiled", action="store_true", help="leave out timm compiled, which takes a minute")
    parser.add_argument("--graphs", type=Path, help="an existing folder for timm's exports")
    parser.add_argument("--out", type=Path, help="write the rows as JSON lines")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} interleaved rounds")
    make_torchvision_importable()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        graphs, compiled = arguments.graphs or Path(folder), not arguments.not_compiled
        for size in arguments.sizes.split(","):
            for batch in map(int, arguments.batches.split(",")):
                rows += compare(size, batch, arguments.rounds, compiled=compiled, graphs=graphs)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
