"""`vit predict`: what is in these images?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import Batch, Device, Heads, ImageSize, ModelName
from vitruvian.cli.start import quick_imports, quiet_pillow
from vitruvian.config import BATCH
from vitruvian.progress import tell, track

if TYPE_CHECKING:
    from vitruvian.predict import Prediction


def predict(
    paths: Annotated[list[str], typer.Argument(metavar="FILES_OR_FOLDERS", help="Images, or folders of them.")],
    model: ModelName,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="How many answers an image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each image.")] = False,
    batch: Batch = BATCH,
    heads: Heads = None,
    image_size: ImageSize = None,
    device: Device = "cpu",
) -> None:
    """Name what is in images, with probabilities.

    An image that cannot be read is reported, the others are still answered, and the exit code is 1.
    """
    with quick_imports():
        from vitruvian.data.sources.formats.folder import find_images
        from vitruvian.predict import Classifier

    quiet_pillow()
    images = find_images(paths)
    classifier = Classifier(model, heads=heads, image_size=image_size, device=device)
    failed = 0
    for prediction in track(classifier.stream(images, top=top, batch=batch), len(images), "images"):
        failed += bool(prediction.error)
        show(prediction, as_json=as_json)
    if failed:
        if len(images) > 1:
            tell(f"{failed} of {len(images)} images could not be read")
        raise typer.Exit(1)


def show(prediction: Prediction, *, as_json: bool) -> None:
    """An image's answers on stdout; without JSON, an error goes to stderr."""
    if as_json:
        print(as_line(prediction), flush=True)
    elif prediction.error:
        tell(f"error: {prediction.error}")
    else:
        print(as_table(prediction), flush=True)


def as_line(prediction: Prediction) -> str:
    if prediction.error:
        return json.dumps({"path": prediction.path, "error": prediction.error})
    answers = [{"label": a.label, "index": a.index, "probability": a.probability} for a in prediction.answers]
    return json.dumps({"path": prediction.path, "answers": answers})


def as_table(prediction: Prediction) -> str:
    """The path, and below it a line for each answer with the percentages in one column."""
    from vitruvian.text import printable

    labels = [printable(answer.label) for answer in prediction.answers]
    width = max(map(len, labels))
    rows = [f"  {label:<{width}}  {a.probability:7.2%}" for label, a in zip(labels, prediction.answers)]
    return "\n".join([printable(prediction.path), *rows])
