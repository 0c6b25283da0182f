"""Reports of `vit quantize` and `vit optimize`: speed against accuracy loss, and the sensitivity of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import render, write_report

LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
LOSS_NOTE = (
    "Maximum points lost: the larger of two estimates, one from the labels, one from the model's own probabilities for "
    "changed predictions plus 1.645 standard errors. Measured on images that nothing was fitted on."
)


def optimize_page(title: str, numbers: Mapping[str, Any], rows: Sequence[Sequence[object]], note: str) -> str:
    """Speed against loss of all candidates."""
    candidates, allowed = numbers["candidates"], numbers["max_loss"]
    points: dict[str, list[tuple[float, float]]] = {}
    for candidate in candidates:
        points.setdefault(candidate["engine"], []).append((candidate["loss"]["points"], candidate["speedup"]))
    lines = [Line(engine, values, scatter=True) for engine, values in sorted(points.items())]
    lines.append(Line("frontier", frontier([point for values in points.values() for point in values])))
    lost = next(c["loss"]["points"] for c in candidates if c["name"] == numbers["chosen"])
    return render(
        "optimize.html",
        title=title,
        subtitle=f"{numbers['images']}; batch size {numbers['batch_size']}, at most {allowed:g} points may be lost",
        chosen=numbers["chosen"],
        tile_values={"speedup over torch": f"{numbers['speedup']:.2f}", "max. points lost": f"{lost:.2f}"},
        loss_note=LOSS_NOTE,
        chart=Chart(title="speedup over torch", lines=lines, x_label="points lost"),
        candidates=rows,
        note=note,
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto frontier of (loss, speed), from the smallest loss."""
    best: list[tuple[float, float]] = []
    for loss, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speed > best[-1][1]:
            best.append((loss, speed))
    return best


def write_quantized(folder: Path, numbers: dict[str, Any], summary: str) -> Path:
    """Write quantize.json and report.html into a new folder; returns the path of the page."""
    loss, sensitivity = numbers["loss"], numbers["sensitivity"]
    tiles = {
        "same predictions": f"{loss['agreement']:.1f} %",
        "max. points lost": f"{loss['points']:.2f}",
        f"speedup over float, batch size {numbers['batch_size']}": f"{numbers['speedup']:.2f}",
        "size": f"{numbers['bytes_after'] / 1e6:.1f} of {numbers['bytes_before'] / 1e6:.1f} MB",
    }
    if loss["top1_before"] is not None:
        tiles["top-1"] = f"{loss['top1_before']:.2f} -> {loss['top1_after']:.2f} %"
    page = render(
        "quantize.html",
        title=Path(numbers["path"]).name,
        subtitle=summary.replace("\n", "; "),
        tile_values=tiles,
        chart=sensitivity_chart(sensitivity),
        layers=[(n, 1000 * v, "float" if n in numbers["float_layers"] else "int8") for n, v in sensitivity.items()],
        loss_note=LOSS_NOTE,
        tried=numbers["tried"],
    )
    return write_report(folder, name="quantize.json", numbers=numbers, page=page)


def sensitivity_chart(sensitivity: Mapping[str, float]) -> Chart:
    """Divergence of each layer over the blocks, in millinats."""
    lines = []
    for layer in LAYERS:
        blocks = {name.split(".")[1]: value for name, value in sensitivity.items() if name.endswith(layer)}
        lines.append(Line(layer, sorted((float(block), 1000 * value) for block, value in blocks.items())))
    return Chart(title="divergence in millinats", lines=lines, x_label="block", log_y=True)
