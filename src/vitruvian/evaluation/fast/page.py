"""The pages of `vit quantize` and `vit optimize`: speed against loss, and how sensitive each layer is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import Html, heading, page, remark, section, table, tiles, write_report

PARTS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
EXPLAINED = (
    "Points lost at most: the larger of what the labels say and of what the model's own probabilities say of answers "
    "that changed, with 1.645 standard errors added to the second. Images that nothing was fitted on."
)


def frontier_page(title: str, numbers: Mapping[str, Any], rows: Sequence[Sequence[object]], note: str) -> str:
    """Speed against loss of all that was tried."""
    tried, allowed = numbers["candidates"], numbers["max_loss"]
    groups = {name: [each for each in tried if each["engine"] == name] for name in {each["engine"] for each in tried}}
    lines = [
        Line(name, [(each["loss"]["points"], each["speedup"]) for each in found], joined=False)
        for name, found in sorted(groups.items())
    ]
    steps = frontier([(each["loss"]["points"], each["speedup"]) for each in tried])
    chart = Chart(title="times the speed of torch", lines=[*lines, Line("frontier", steps)], x_label="points lost")
    lost = next(each["loss"]["points"] for each in tried if each["name"] == numbers["chosen"])
    titles = ["", "images/s", "times torch", "points lost at most", "same answers %", "top-1", ""]
    parts = [
        heading(title, f"{numbers['images']}; batch {numbers['batch']}, at most {allowed:g} points may be lost"),
        remark(f"Written: {numbers['chosen']}."),
        tiles({"times the speed of torch": f"{numbers['speedup']:.2f}", "points lost at most": f"{lost:.2f}"}),
        section("Speed against loss", chart.svg(), note=EXPLAINED),
        section("All that was tried", table(titles, rows), remark(note)),
    ]
    return page(title, parts)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (loss, speed) those that nothing with as small a loss exceeds in speed, from the smallest loss."""
    found: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: (each[0], -each[1])):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found


def write_quantized(folder: Path, numbers: dict[str, Any], words: str) -> Path:
    """What each layer's rounding changes, and what came of it."""
    loss = numbers["loss"]
    shown = {
        "same answers": f"{loss['agreement']:.1f} %",
        "points lost at most": f"{loss['points']:.2f}",
        f"times float, batch {numbers['batch']}": f"{numbers['speedup']:.2f}",
        "size": f"{numbers['bytes_after'] / 1e6:.1f} of {numbers['bytes_before'] / 1e6:.1f} MB",
    }
    if loss["top1_before"] is not None:
        shown["top-1"] = f"{loss['top1_before']:.2f} -> {loss['top1_after']:.2f} %"
    steps = table(["layers left float", "points lost at most"], numbers["tried"])
    parts = [
        heading(Path(numbers["path"]).name, words.replace("\n", "; ")),
        tiles(shown),
        section("Sensitivity", sensitivity_chart(numbers["sensitivity"]).svg(), layers(numbers), note=MEANING),
        section("Layers left float", steps, note=EXPLAINED),
    ]
    made = page(Path(numbers["path"]).name, parts)
    return write_report(folder, name="quantize.json", numbers=numbers, page=made)


MEANING = (
    "How far the answers move when this layer alone is in int8: mean Kullback-Leibler divergence from the float model, "
    "in thousandths of a nat, on calibration images."
)


def sensitivity_chart(found: Mapping[str, float]) -> Chart:
    def of(part: str) -> list[tuple[float, float]]:
        named = {name: value for name, value in found.items() if name.endswith(part)}
        return sorted((float(name.split(".")[1]), 1000 * value) for name, value in named.items())

    lines = [Line(part, of(part)) for part in PARTS]
    return Chart(title="divergence, thousandths of a nat", lines=lines, x_label="block", log_y=True)


def layers(numbers: Mapping[str, Any]) -> Html:
    kept = set(numbers["float_layers"])
    rows = [(name, 1000 * v, "float" if name in kept else "int8") for name, v in numbers["sensitivity"].items()]
    return table(["layer", "thousandths of a nat", ""], rows, tall=True)
