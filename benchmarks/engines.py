"""The fastest engine of our model beside the peers, each as its users run it, and timm's own export in both runtimes.

    python benchmarks/engines.py [--rounds 15] [--sizes Ti,S,B] [--batches 1,16] [--not-compiled]
        [--graphs FOLDER] [--out rows.jsonl]

Every round times each once on the same batch, in an order drawn anew; ratios are between medians of the same rounds.
`ours` is `Classifier(model, engine="auto").logits`, after it has chosen its engine. The runtimes get timm's model at a
fixed shape from `torch.onnx.export(dynamo=True)`; with --graphs, exports stay in that folder for the next run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

import vitruvian as vt
from inference import describe, interleaved, random_model
from peers import Forward, declare_torchvision_operators, timm_model, torchvision_model, transformers_model


def runtimes(model: torch.nn.Module, pixels: torch.Tensor, path: Path) -> dict[str, Forward]:
    """timm's model in both runtimes, on all cores."""
    import onnxruntime
    import openvino

    if not path.is_file():
        torch.onnx.export(model, (pixels,), path, dynamo=True, external_data=False, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options)
    name = session.get_inputs()[0].name
    # float32, as all others: left to itself, OpenVINO may choose a shorter type where the processor has one
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    request = compiled.create_infer_request()
    return {
        "ONNX Runtime (timm)": lambda pixels: torch.from_numpy(session.run(None, {name: pixels.numpy()})[0]),
        "OpenVINO (timm)": lambda pixels: torch.from_numpy(
            request.infer([pixels.numpy()], share_inputs=True)[0].copy()
        ),
    }


def compare(size: str, batch: int, rounds: int, *, compiled: bool, graphs: Path | None) -> list[dict[str, object]]:
    model = random_model(size)
    classifier = vt.Classifier(model, engine="auto")
    pixels = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timm = timm_model(model, size, folder).eval()
        peers: dict[str, Forward] = {
            "timm": timm,
            **({"timm compiled": torch.compile(timm)} if compiled else {}),
            "torchvision": torchvision_model(model, folder).eval(),
            "transformers": transformers_model(model, folder),
            **runtimes(timm, pixels, (graphs or folder) / f"timm_{size}_{batch}.onnx"),
        }
    forwards: dict[str, Forward] = {"ours (auto)": classifier.logits, **peers}
    with torch.inference_mode():
        ours = classifier.logits(pixels)
        differences = {name: (forward(pixels) - ours).abs().max().item() for name, forward in forwards.items()}
    medians = {name: statistics.median(s) for name, s in interleaved(forwards, pixels, rounds).items()}
    fastest = min(peers, key=medians.__getitem__)
    for name, seconds in medians.items():
        rows.append(
            {
                "model": f"ViT-{size}/16",
                "batch": batch,
                "library": name,
                "images_per_second": round(batch / seconds, 2),
                "relative_to_fastest_peer": round(medians[fastest] / seconds, 3),
                "largest_logit_difference": differences[name],
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
    declare_torchvision_operators()
    rows: list[dict[str, object]] = []
    for size in arguments.sizes.split(","):
        for batch in arguments.batches.split(","):
            rows += compare(
                size, int(batch), arguments.rounds, compiled=not arguments.not_compiled, graphs=arguments.graphs
            )
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
