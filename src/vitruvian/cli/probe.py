"""`vit probe`: how much does a model already know of these images?"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import Batch, Device, Heads, ImageSize, OptionalModel, ReportFolder, names_in, parse_numbers
from vitruvian.cli.start import quick_imports
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import print_status, track

if TYPE_CHECKING:
    from vitruvian.evaluation.probes.probe import ProbeReport


def probe(
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="A folder, a manifest, shards, or a built-in name.")
    ] = None,
    model: OptionalModel = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Vectors of `vit embed`, instead of DATA and a model.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="NAMES", help="Which probes, separated by commas.")
    ] = "fewshot,linear,neighbors",
    shots: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Images a class of the few-shot probe; else 1,5,10,25.")
    ] = None,
    neighbors: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many neighbors vote; else chosen.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the table.")] = False,
    out: ReportFolder = None,
    batch_size: Batch = DEFAULT_BATCH_SIZE,
    num_heads: Heads = None,
    image_size: ImageSize = None,
    device: Device = "cpu",
) -> None:
    """Measure frozen features: few-shot, linear, nearest neighbors.

    Features are computed once and kept in the cache folder ($VITRUVIAN_CACHE); probing again takes seconds.
    """
    if vectors is None and (data is None or model is None):
        raise typer.BadParameter("give DATA and --model, or --vectors")
    if vectors is not None and (data is not None or model is not None):
        raise typer.BadParameter("--vectors stands for DATA and --model, which its job.json names")
    wanted_shots = None if shots is None else parse_numbers(shots)
    with quick_imports():
        from vitruvian.evaluation.probes.probe import probe as run_probe
        from vitruvian.evaluation.report import write_probe
        from vitruvian.predict import Encoder

    if vectors is not None:
        from vitruvian.bulk.store import probe_vectors

        reading = partial(track, label="parts")
        report = probe_vectors(vectors, only=names_in(only), shots=wanted_shots, neighbors=neighbors, track=reading)
    else:
        assert model is not None
        report = run_probe(
            data,
            Encoder(model, num_heads=num_heads, image_size=image_size, device=device),
            only=names_in(only),
            shots=wanted_shots,
            neighbors=neighbors,
            batch_size=batch_size,
            track=partial(track, label="features"),
        )
    print(json.dumps(report.to_json()) if as_json else as_table(report))
    if report.unreadable:
        print_status(f"{len(report.unreadable)} images could not be read and were left out")
    if out is not None:
        print_status(f"the report is {write_probe(report, out)}")


def as_table(report: ProbeReport) -> str:
    from vitruvian.evaluation.report import probe_summary
    from vitruvian.text import table

    rows = []
    for found in report.results:
        spread = f"± {found.deviation:.2f}" if len(found.runs) > 1 else ""
        rows.append((found.probe, found.setting, f"{found.top1:.2f}", spread, f"{found.mean_per_class:.2f}"))
    notes = [f"note: {note}" for note in report.notes]
    return "\n".join(
        [probe_summary(report), *notes, table(("probe", "setting", ">top-1 %", "", ">mean per class %"), rows)]
    )
