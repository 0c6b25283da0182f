"""The page of a probe: accuracies, how they grow with the shots, and what settings were chosen from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vitruvian.evaluation.pages.sections import unreadable_parts
from vitruvian.evaluation.probes.probe import ProbeReport, ProbeResult
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import (
    Html,
    columns,
    heading,
    page,
    paragraph,
    section,
    short_name,
    table,
    tiles,
    write_report,
)


def write_probe(report: ProbeReport, folder: Path) -> Path:
    """Write probe.json and report.html into a folder, and give the path of the page."""
    title = f"{short_name(report.model)} probed on {Path(report.data).name}"
    made = page(title, sections(title, report))
    return write_report(folder, name="probe.json", numbers=report.to_json(), page=made)


def sections(title: str, report: ProbeReport) -> Iterator[Html]:
    yield heading(title, summary(report))
    yield tiles({f"{result.probe}, {result.setting}": f"{result.top1:.2f} %" for result in report.results})
    titles = ["probe", "setting", "top-1 %", "deviation", "mean per class %"]
    note = "Frozen features. Few-shot: means and standard deviations of three draws of the images."
    yield section("Accuracy", table(titles, map(row, report.results)), note=note)
    shots = [(float(r.setting.split()[0]), r.top1) for r in report.results if r.probe == "few-shot"]
    parts = [
        table([f"{result.probe}: setting", "chosen by, %"], result.tried.items())
        for result in report.results
        if result.tried
    ]
    if len(shots) > 1:
        chart = Chart(title="Few-shot top-1, %", lines=[Line("mean of the seeds", shots)], x_label="images a class")
        parts.insert(0, chart.svg())
    if parts:
        note = "Settings are chosen on images that are not in the test, by the accuracy in the last column."
        yield section("Shots and settings", columns(*parts), note=note)
    problems = [*map(paragraph, report.notes), *unreadable_parts(report.unreadable)]
    if problems:
        yield section("Data", *problems)


def row(result: ProbeResult) -> tuple[object, ...]:
    spread = Html(f"{result.deviation:.2f}") if len(result.runs) > 1 else Html("–")
    return result.probe, result.setting, result.top1, spread, result.mean_per_class


def summary(report: ProbeReport) -> str:
    """What was learned from and tested on, in a line."""
    return (
        f"{report.train_images:,} images of {report.classes:,} classes to learn from, "
        f"{report.test_images:,} to test on: {report.test_is}"
    )
