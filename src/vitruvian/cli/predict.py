"""`vit predict`, `vit embed` and `vit similar`: predictions and features of images, and search in them."""

import itertools
import json
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import expand_options, finish, flag, import_torch, option
from vitruvian.progress import print_status, track
from vitruvian.text import plural, printable

PATHS = typer.Argument(metavar="FILES_OR_FOLDERS", help="Images, URLs, zip archives, folders; with --out, a dataset.")
TABLE = option("FILE", "Write a table: .csv, .jsonl or .parquet; or a folder or URL, for millions of images.")
TEXT = option("WORDS", "Search for a text, in vectors of a CLIP or SigLIP; repeatable.")
MERGE = option(
    "FILE", "Also write all parts as one .csv, .jsonl or .parquet.", "--merge", panel=opt.BULK, dir_okay=False
)
MAX_LABELS = 1000  # columns of labels in a CSV file
EXACT = typer.Option("--exact/--index", help="Compare all vectors, or use an index [default: by size].")
OTHER_TABLES = (".txt", ".tsv", ".xlsx", ".xls", ".json", ".html")  # files that people expect --out to write


@expand_options
def predict(
    paths: Annotated[list[str], PATHS],
    options: opt.ModelOptions,
    bulk: opt.BulkOptions,
    model: opt.DefaultModel = None,
    labels: opt.Labels = None,
    template: opt.Template = None,
    top: Annotated[int, option("N", "Number of predictions per image.", min=1)] = 5,
    as_json: Annotated[bool, flag("--json", "Print one JSON object per image (JSON Lines).")] = False,
    out: Annotated[str | None, TABLE] = None,
    sort_into: Annotated[Path | None, option("DIR", "Copy each image into a folder of its class in DIR.")] = None,
    merged: Annotated[Path | None, MERGE] = None,
) -> None:
    """Classify images, with probabilities.

    Unreadable images are reported and skipped, and the exit code is 1. With a folder as --out, for millions of images:
    the predictions are written in parts, by one process per --shard. The last one verifies that each image is present
    once, and its exit code is 1 if some could not be read.
    """
    from vitruvian.files import is_table, open_table

    table, out = (Path(out), None) if out is not None and is_table(out) else (None, out)
    if out is None and (bulk.shard is not None or bulk.on or bulk.split is not None or merged is not None):
        raise typer.BadParameter("--shard, --on, --split and --merge need a folder as --out")
    check_merged(merged)
    if out is not None and Path(out).suffix.lower() in OTHER_TABLES and not Path(out).is_dir():
        raise typer.BadParameter(f"{out} is not .csv, .jsonl or .parquet, nor a folder", param_hint="--out")
    if table and as_json:
        raise typer.BadParameter("--out writes a file, --json prints: give one of the two")
    if out is not None and sort_into is not None:
        raise typer.BadParameter("--sort-into cannot be used with a folder as --out, only with a table such as all.csv")
    if sort_into is not None and sort_into.exists() and (not sort_into.is_dir() or any(sort_into.iterdir())):
        raise typer.BadParameter(f"{sort_into} exists and is not empty", param_hint="--sort-into")
    if sort_into is not None and any(path.lower().startswith(("http://", "https://")) for path in paths):
        raise typer.BadParameter("--sort-into copies files; download images behind URLs first")
    if bulk.on and (labels or options != opt.ModelOptions()):
        raise typer.BadParameter("--on loads the model on each node: no --labels and no options of the model")
    if out is not None and len(paths) != 1:
        raise typer.BadParameter("a folder as --out takes one dataset; for several paths, write a table: all.csv")
    import_torch()
    from vitruvian.data.folder import find_images, unpack_zip
    from vitruvian.weights.hub import default_source
    from vitruvian.weights.zero_shot import parse_labels

    images = [] if out is not None else find_images(paths)  # before a model is downloaded for them
    archives = [] if out is not None else [path for path in paths if path.lower().endswith(".zip")]
    roots = {str(unpack_zip(Path(path))[0]): path for path in archives if Path(path).is_file()}
    model = default_source() if model is None else model
    words = None if labels is None else parse_labels(labels)
    classifier = model if bulk.on else vt.Classifier(model, labels=words, template=template, **vars(options))
    if out is not None:
        from vitruvian.bulk.job import predict as run_predict

        follow = partial(track, label="images", amount=int)
        run_predict(paths[0], classifier, out, top=top, **vars(bulk), track=follow)
        finish(finish_job(out, merged, f"predictions to {out}", as_json=as_json))
        return
    assert isinstance(classifier, vt.Classifier)
    target = classifier.model.meta.target
    if sort_into is not None and target.kind != "single":
        raise typer.BadParameter("--sort-into needs a model of one class per image")
    failed, write = 0, None
    with ExitStack() as stack:
        if table is not None:
            most = top if target.kind == "single" else MAX_LABELS
            write = stack.enter_context(open_table(table, {"predictions": min(most, len(classifier.labels))}))
        for result in track(classifier.stream(images, top=top, batch_size=bulk.batch_size), len(images), "images"):
            failed += bool(result.error)
            if sort_into is not None and not result.error:
                label = "rejected" if result.rejected else result.predictions[0].label
                copy_into(sort_into / folder_name(label), Path(result.path))
            for root, archive in roots.items():  # the name in the archive, not that of the extracted file
                path, error = (text.replace(root, archive) for text in (result.path, result.error))
                result = replace(result, path=path, error=error)
            if write is not None:
                if target.mean:
                    write([number_row(result, classifier.labels)])
                    if not result.error:
                        continue
                row = {"path": None, "rejected": None, "predictions": None, "error": None} | result.to_json()
                if classifier.model.meta.coverage:
                    row["prediction_set"] = "; ".join(result.prediction_set or ())
                write([row | {"rejected": result.rejected}])
                if not result.error:
                    continue
            print_result(result, as_json)
    if table is not None:
        print(f"wrote predictions for {plural(len(images), 'image')} to {table}")
    if sort_into is not None:
        print(f"copied {plural(len(images) - failed, 'image')} into class folders in {sort_into}")
    finish(failed, len(images))


def number_row(result: "vt.ImageResult", names: Iterable[str]) -> dict[str, object]:
    """A row of a table with a column for each number and the ends of its interval."""
    row: dict[str, object] = {"path": result.path}
    for index, name in enumerate(names):
        prediction = result.predictions[index] if result.predictions else None
        low, high = (prediction.interval if prediction else None) or (None, None)
        row |= {name: prediction and prediction.value, f"{name}_low": low, f"{name}_high": high}
    return row | {"error": result.error or None}


def print_result(result: "vt.ImageResult", as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
    elif result.error:
        print_status(f"error: {result.error}")
    else:
        names = [printable(prediction.label) for prediction in result.predictions]
        width = max(map(len, names), default=0)
        texts = [f"{p.probability:7.2%}" if p.value is None else p.text for p in result.predictions]
        rows = [f"  {label:<{width}}  {text}" for label, text in zip(names, texts)]
        rows = rows or ["  no label above its threshold"]
        rejected = ["  rejected (none of the classes); the nearest:"] if result.rejected else []
        if result.prediction_set is not None:
            members = ", ".join(map(printable, result.prediction_set))
            rows.append(f"  set: {members or 'empty, no class is certain enough'}")
        print("\n".join([printable(result.path), *rejected, *rows]), flush=True)


def folder_name(label: str) -> str:
    """Make a label the name of a folder, neither hidden nor a path."""
    return re.sub(r"[/\\\x00-\x1f]", "_", label).strip().lstrip(".")[:200] or "_"


def copy_into(folder: Path, image: Path) -> None:
    """Copy an image into a folder under its own name, with a number if that is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (folder / f"{image.stem}{f'-{i}' if i > 1 else ''}{image.suffix}" for i in itertools.count(1))
    shutil.copy2(image, next(name for name in names if not name.exists()))


@expand_options
def embed(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder, a manifest, shards, Parquet files or a URL.")],
    model: opt.ModelName,
    out: Annotated[str, option("FOLDER", "Folder or URL to write the parts to.")],
    options: opt.ModelOptions,
    bulk: opt.BulkOptions,
    dtype: Annotated[Literal["float16", "float32"], typer.Option(help="Data type of the vectors.")] = "float16",
    merged: Annotated[Path | None, MERGE] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of text.")] = False,
) -> None:
    """Write the features of images as Parquet parts.

    They are for search, probes and other programs. Existing parts are not computed again, so a killed job resumes
    where it stopped. The command that makes the last part verifies that each image is present once, and its exit code
    is 1 if some could not be read.
    """
    from vitruvian.files import is_table

    if is_table(out):
        raise typer.BadParameter(
            f"a folder of parts; for one file, use --out vectors --merge {out}", param_hint="--out"
        )
    check_merged(merged)
    if bulk.on and options != opt.ModelOptions():
        raise typer.BadParameter("--on loads the model on each node: no options of the model")
    import_torch()
    from vitruvian.inference import Encoder

    encoder = model if bulk.on else Encoder(model, **vars(options))
    vt.embed(data, encoder, out, dtype=dtype, **vars(bulk), track=partial(track, label="images", amount=int))
    failed = finish_job(out, merged, f"vectors to {out}", as_json=as_json)
    print_status(f"`vit similar IMAGE --in {out}` searches them")
    finish(failed)


def check_merged(merged: Path | None) -> None:
    from vitruvian.files import is_table

    if merged is not None and not is_table(str(merged)):
        raise typer.BadParameter(f"{str(merged)!r} is not a .csv, .jsonl or .parquet file", param_hint="--merge")


def finish_job(out: str, merged: Path | None, wrote: str, *, as_json: bool) -> int:
    """Verify all parts of a job and merge them, if this command made the last one; else print how many are missing.

    Returns the number of images with an error.
    """
    from vitruvian.bulk.result import merge, open_result

    result = open_result(out)
    names = set(result.folder.names())
    missing = sum(result.name_of(part) not in names for part in range(result.parts))
    if missing:
        later = "verifies them" if merged is None else f"verifies them and, with --merge, writes {merged}"
        text = f"wrote {wrote}; {missing:,} of {plural(result.parts, 'part')} are missing: the last shard {later}"
        print(json.dumps({"parts": result.parts, "missing": missing}) if as_json else text)
        return 0
    summary = merge(out, merged, track=partial(track, label="verifying"))
    failed, parts = sum(summary.errors.values()), plural(summary.parts, "part")
    if as_json:
        print(json.dumps(summary.to_json()))
        return failed
    images = f"{plural(summary.images, 'image')} in {parts}, each once; {failed:,} with an error"
    print(f"wrote {wrote if merged is None else f'{wrote} and {merged}'}: {images}; model {summary.model}")
    for error, count in summary.errors.items():
        print(f"  {count:,} x {printable(error)}, such as {printable(summary.examples[error])}")
    return failed


@expand_options
def similar(
    where: Annotated[str, option("FOLDER", "Vectors of `vit embed`: a folder or a URL.", "--in")],
    options: opt.ModelOptions,
    images: Annotated[list[str] | None, typer.Argument(metavar="IMAGES", help="Images to search for.")] = None,
    text: Annotated[list[str] | None, TEXT] = None,
    top: Annotated[int, option("N", "Number of neighbors per image.", min=1, max=10_000)] = 20,
    model: Annotated[str | None, option("MODEL", "Model of the vectors, if it has moved.", "--model", "-m")] = None,
    exact: Annotated[bool | None, EXACT] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object per image (JSON Lines).")] = False,
    out: Annotated[Path | None, option("FILE", "Write a page with thumbnails (.html).", dir_okay=False)] = None,
) -> None:
    """Find the images most similar to an image or a text.

    Ranked by cosine similarity of features. Options that `vit embed` had to load the model are needed here, too.
    """
    images, texts = images or [], text or []
    if not images and not texts:
        raise typer.BadParameter("nothing to search for: give an image or --text")
    opt.check_suffix(out, ".html", "--out")
    import_torch()
    from vitruvian.bulk.similar import VectorSearch, write_neighbors

    search = VectorSearch(where, exact=exact, track=partial(track, label="parts"))
    results = search.nearest(search.queries(images, texts, model, **vars(options)), top)
    if out is not None:
        write_neighbors(out, images, texts, results, search.result)
    queries = [("path", image) for image in images] + [("text", words) for words in texts]
    for (kind, name), neighbors in zip(queries, results):
        if as_json:
            rows = [{"key": n.key, "similarity": n.similarity, "label": n.label, "index": n.index} for n in neighbors]
            print(json.dumps({kind: name, "neighbors": rows}), flush=True)
        else:
            lines = [f"  {n.similarity:6.3f}  {printable(n.key)}  {printable(n.label or '')}" for n in neighbors]
            print("\n".join([printable(name), *map(str.rstrip, lines)]), flush=True)
    if out is not None:
        print(f"thumbnails: {out}")
