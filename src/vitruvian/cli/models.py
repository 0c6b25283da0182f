"""`vit models`, `vit convert` and `vit export`: the known models, and their weights in other formats."""

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import check_new, flag, import_torch, option
from vitruvian.errors import UnknownNameError
from vitruvian.progress import print_status
from vitruvian.text import table

CONVERTED = "A folder for native, huggingface and timm, or a file: .npz (google), .safetensors (timm), .pth."
FAMILIES = ("native", "google", "timm", "torchvision", "huggingface")
HEADINGS = ("model", ">top-1", ">params", ">mult-adds", ">pixels", "speed", "license")
AUGREG_HEADINGS = ("weights", "model", "data", ">upstream %", "fine-tuned on", ">input", ">accuracy %")
AUGREG_TERMS = option("TERMS", 'List AugReg checkpoints with all terms, such as "S/16, imagenet, 300ep".')
SHOWN = 20
NUM_CLASSES = option("N", "Replace the head by a zero-initialized one; 0 removes it.", min=0)
CONFIG = option("NAME", "Architecture of SRC, such as ViT-B/16, if it is a bare state dict.")
PATTERN = typer.Argument(metavar="PATTERN", help="Part of a name, such as B/16, augreg or dinov2.")
DESTINATION = typer.Argument(metavar="DST", help="A .onnx, .pt2 (torch) or .pte (executorch) file, or a folder.")
GRAPH_FORMAT = typer.Option(help="Format to write; web is a page that runs the model in the browser.")
BATCH_SIZE = option("N", "Fixed batch size [default: dynamic].", "--batch-size", min=1, max=65_536)
DYNAMIC_SIZE = flag("--dynamic-size", "Accept any image size; the graph resizes the position embedding.")
OVERWRITE = flag("--overwrite", "Replace DST if it exists; in a folder, the files of the same names.")


def models(
    pattern: Annotated[str, PATTERN] = "",
    augreg: Annotated[str | None, AUGREG_TERMS] = None,
    index: Annotated[str | None, option("FILE", "The index.csv of the AugReg release [default: in the cache].")] = None,
    license: Annotated[str, option("NAME", "Only weights under this license: apache-2.0, mit ..., or unknown.")] = "",
    as_json: Annotated[bool, flag("--json", "Print one JSON object per model (JSON Lines).")] = False,
) -> None:
    """List models: accuracy, size, speed, license, published weights.

    With a PATTERN, all matching published names are listed; `--model` accepts these names. Speed is by multiply-adds:
    fast below 3 G, medium below 10 G, slow below 40 G. Accuracy is the published top-1 on ImageNet, if one is known.
    """
    if augreg is not None or index is not None:
        if augreg is None or pattern or license:
            raise typer.BadParameter("--augreg TERMS takes no PATTERN and no --license, and --index FILE needs it")
        list_augreg(augreg, index, as_json=as_json)
        return
    from vitruvian.catalog import PUBLISHED, RECOMMENDED, VARIANTS, canonical, find_published, published_for
    from vitruvian.cost import multiply_adds, parameters, speed_class

    part, matches = pattern.lower(), {}
    for name in VARIANTS:  # all weights if the model's name matches, else those that match
        weights = published_for(name)
        named = [row for row in weights if any(part in alias.lower() for alias in (row.name, *row.aliases))]
        if named or part in name.lower():
            matches[name] = weights if part in name.lower() else named
    if not matches:
        name, _ = canonical(pattern)
        matches[name] = published_for(name)
    if license:
        known_licenses = sorted({row.license or "unknown" for row in PUBLISHED.values()})
        if license.lower() not in map(str.lower, known_licenses):
            raise UnknownNameError("license", license, known_licenses, see=f"(known: {', '.join(known_licenses)})")
        is_wanted = {name: (row.license or "unknown").lower() == license.lower() for name, row in PUBLISHED.items()}
        licensed = {name: [row for row in weights if is_wanted[row.name]] for name, weights in matches.items()}
        matches = {name: weights for name, weights in licensed.items() if weights}
        if not matches:
            raise typer.BadParameter(f"no weights of {pattern!r} have the license {license!r}")
    rows, published = [], []
    for name, weights in matches.items():
        config = VARIANTS[name]
        work = multiply_adds(config)
        known = [row.top1 for row in weights if row.top1]
        facts: dict[str, Any] = {
            "name": name,
            "top1": max(known, default=None),
            "parameters": parameters(config),
            "multiply_adds": work,
            "speed": speed_class(work),
            "image_size": config.image_size,
            "licenses": sorted({row.license or "unknown" for row in weights}),
            "recommended": RECOMMENDED in [row.name for row in weights],
            "published": [
                {
                    "name": row.name,
                    "family": row.family,
                    "top1": row.top1,
                    "image_size": row.image_size,
                    "num_classes": row.classes,
                    "speed": speed_class(multiply_adds(config, row.image_size)),
                    "license": row.license or "unknown",
                    "trained_on": row.note,
                    "recommended": row.name == RECOMMENDED,
                }
                for row in weights
            ],
        }
        if as_json:
            print(json.dumps(facts))
            continue
        size = f"{facts['parameters'] / 1e6:.1f}M", f"{work / 1e9:.2f}G", str(config.image_size[0])
        licenses = {0: "-", 1: "".join(facts["licenses"])}.get(len(facts["licenses"]), "several")
        mark = " *" * facts["recommended"]
        top1 = f"{facts['top1']:.1f}" if known else "-"
        rows.append((name + mark, top1, *size, facts["speed"], licenses))
        published += facts["published"]
    if as_json:
        return
    print(table(HEADINGS, rows))
    default = find_published(RECOMMENDED)
    assert default is not None
    if any(row[0].endswith("*") for row in rows):
        reason = f"{default.top1:.1f}% top-1 at the cost of ViT-S/16, and its license is {default.license}"
        print(f"\n* recommended to start with: {RECOMMENDED}\n  {reason}.")
    if pattern and published:
        print("\n" + "\n".join(map(describe_weights, published)))
    elif not pattern:
        print("\n`vit models PATTERN` lists weights by name, for instance `vit models B/16`.")


def describe_weights(row: dict[str, Any]) -> str:
    """Format a published name, with its facts on the lines below."""
    top1 = "" if row["top1"] is None else f"{row['top1']:.1f}% top-1, "
    classes = f"{row['num_classes']:,} classes" if row["num_classes"] else "features only"
    recommended = " *" * row["recommended"]
    text = f"{top1}{row['image_size']} pixels, {row['speed']}, {classes}, license {row['license']}; {row['trained_on']}"
    facts = textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    ")
    return f"{row['name']}{recommended}\n{facts}"


def list_augreg(terms: str, index: str | None, *, as_json: bool) -> None:
    """Print the AugReg checkpoints with these terms."""
    from vitruvian.weights.hub import AUGREG_COLUMNS, find_augreg

    rows = find_augreg(terms, index)
    if as_json:
        print("\n".join(json.dumps(row) for row in rows))
        return
    cells = [(row["weights"], *(format_cell(row[name]) for name in AUGREG_COLUMNS[:6])) for row in rows[:SHOWN]]
    print(table(AUGREG_HEADINGS, cells))
    more = f" The first {SHOWN} of {len(rows):,}; --json prints all." if len(rows) > SHOWN else ""
    print(f"\n`--model` and `--from` accept these names.{more}")


def format_cell(value: str) -> str:
    """Format an accuracy as a percentage; return other values unchanged."""
    return f"{100 * float(value):.2f}" if value.startswith("0.") else value


def parse_family(text: str) -> str:
    if text in ("onnx", "openvino", "torch", "executorch", "web"):
        raise typer.BadParameter(f"{text} is a graph, not weights; use `vit export SRC DST --to {text}`")
    if text not in FAMILIES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(FAMILIES)}")
    return text


def convert(
    source: opt.Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help=CONVERTED)],
    to: Annotated[str, option("FORMAT", f"Format to write: {', '.join(FAMILIES)}.", parser=parse_family)] = "native",
    labels: opt.Labels = None,
    template: opt.Template = None,
    num_heads: opt.NumHeads = None,
    adapter: opt.Adapter = None,
    image_size: opt.ImageSize = None,
    patch_size: Annotated[int | None, option("N", "Resample the patch embedding to this patch size.", min=1)] = None,
    num_classes: Annotated[int | None, NUM_CLASSES] = None,
    half: Annotated[bool, flag("--half", "Store matrices in float16: half the size.")] = False,
    config: Annotated[str | None, CONFIG] = None,
    card: Annotated[bool, flag("--card", "Write only the model card, a Markdown file.")] = False,
    overwrite: Annotated[bool, OVERWRITE] = False,
    as_json: Annotated[bool, flag("--json", "Print the certificate as one JSON object.")] = False,
) -> None:
    """Convert weights to another format, and compare the outputs.

    The written weights are read back and compared with the source on a random batch; a certificate with the largest
    difference is printed and saved beside the weights. With --labels, the texts become the head of a CLIP or SigLIP:
    an ordinary classifier that no longer needs its text tower.
    """
    if not overwrite:
        check_new(destination, "choose another name, or replace it with --overwrite")
    import_torch()
    from vitruvian.weights.zero_shot import parse_labels

    if card:
        from vitruvian.files import write_text
        from vitruvian.training.integrations import card_of

        write_text(Path(destination).expanduser(), card_of(vt.load(source), source))
        print(f"wrote {destination}")
        return
    words: Any = {"labels": None if labels is None else parse_labels(labels), "template": template}
    read: Any = {"config": config, "num_heads": num_heads, "image_size": image_size, "patch_size": patch_size}
    read |= {"adapter": adapter}
    write: Any = {"num_classes": num_classes, "half": half, "progress": lambda step: print_status(f"{step} ...")}
    certificate = vt.convert(source, destination, to=to, **words, **read, **write)
    print(json.dumps(certificate.to_json()) if as_json else f"{certificate}\nwrote {certificate.destination}")


def push(
    source: opt.Source,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the Hugging Face Hub: user/name.")],
    private: Annotated[bool, flag("--private", "Make a new repository private.")] = False,
    license: Annotated[str, option("NAME", "License, such as mit [default: that of the first weights].")] = "",
    report: Annotated[Path | None, option("FOLDER", "A report of vit evaluate, for the model card.")] = None,
) -> None:
    """Upload a model to the Hugging Face Hub, with a model card.

    transformers, timm and `vit` open the repository, as far as they can express the model. The card states the data,
    the accuracy with its interval, the settings and the command of the run, and nothing that was not measured.
    """
    import_torch()
    print(f"pushed {vt.push(source, name, private=private, license=license, report=report)}")


def export(
    source: opt.Source,
    destination: Annotated[str, DESTINATION],
    to: Annotated[Literal["onnx", "openvino", "torch", "executorch", "web"], GRAPH_FORMAT] = "onnx",
    batch_size: Annotated[int | None, BATCH_SIZE] = None,
    image_size: opt.ImageSize = None,
    dynamic_size: Annotated[bool, DYNAMIC_SIZE] = False,
    features: Annotated[bool, flag("--features", "Add an output with the features that the head reads.")] = False,
    num_heads: opt.NumHeads = None,
    adapter: opt.Adapter = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    as_json: Annotated[bool, flag("--json", "Print the checks as one JSON object.")] = False,
) -> None:
    """Write a model as ONNX, OpenVINO, torch, ExecuTorch or a web page.

    The graph is run at several shapes and compared with the model before anything is written. It contains
    preprocessing and labels, so that `vit predict --model model.onnx` works. `--to web` writes a folder for any web
    server, such as `python -m http.server`.
    """
    if not overwrite:
        check_new(destination, "choose another name, or replace it with --overwrite")
    import_torch()
    print_status("tracing the model and comparing the graph with it ...")
    shape: Any = {"batch_size": batch_size, "image_size": image_size, "dynamic_size": dynamic_size}
    load: Any = {"num_heads": num_heads, "adapter": adapter}
    certificate = vt.export(source, destination, to=to, features=features, **load, **shape)
    print(json.dumps(certificate.to_json()) if as_json else f"{certificate}\nwrote {certificate.path}")
