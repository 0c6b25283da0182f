"""The model in the package, from a finished run: its temperature, its threshold, its card.

    vit train cifar10/ --recipe cifar10-hybrid --out runs/box
    python benchmarks/box.py runs/box cifar10/ --unknown foods/ stones/ --out src/vitruvian/box

Temperature and threshold are chosen on the images that the run has held out and on the first half of each kind of
unknown image: the built-in digits, drawn text and textures, and the folders given. Then the test set is measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import vitruvian as vt
from vitruvian.data.decode import ImageInput
from vitruvian.data.sources import open_dataset
from vitruvian.data.sources.formats.folder import find_images
from vitruvian.evaluation.measuring.calibration import fitted_temperature
from vitruvian.evaluation.measuring.evaluate import space_for
from vitruvian.evaluation.measuring.inference import answers_of
from vitruvian.predict import Classifier
from vitruvian.training.images import images_for

DRAWN = 400
"""Images of each kind that are drawn."""

REFUSED = 0.75
"""Of the unknown images, at least."""

Shares = NDArray[np.float64]


def text_image(rng: np.random.Generator) -> Image.Image:
    """Some lines of letters in one color on another."""
    paper, ink = (tuple(rng.integers(0, 256, 3).tolist()) for _ in range(2))
    image = Image.new("RGB", (96, 96), paper)
    letters = [chr(97 + number) for number in rng.integers(0, 26, 60)]
    lines = "\n".join("".join(letters[start : start + 12]) for start in range(0, 60, 12))
    ImageDraw.Draw(image).multiline_text((4, 4), lines, fill=ink, font_size=float(rng.integers(10, 28)))
    return image


def texture_image(rng: np.random.Generator) -> Image.Image:
    """Stripes, checks or noise in two colors, of any direction and scale."""
    y, x = np.mgrid[0:64, 0:64] / 64
    angle, waves = rng.random() * np.pi, 2 + 14 * rng.random()
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    kinds = [
        np.sin(2 * np.pi * waves * along),
        np.sign(np.sin(2 * np.pi * waves * along) * np.sin(2 * np.pi * waves * across)),
        rng.standard_normal((64, 64)),
    ]
    pattern = np.clip(kinds[rng.integers(3)] / 2 + 0.5, 0, 1)[..., None]
    first, second = rng.integers(0, 256, (2, 3))
    return Image.fromarray((pattern * first + (1 - pattern) * second).astype(np.uint8))


def best_probabilities(classifier: Classifier, images: list[ImageInput]) -> Shares:
    return np.array([answers[0].probability for answers in classifier.predict(images, top=1, batch=100)])


def unknown_images(folders: list[Path]) -> dict[str, list[ImageInput]]:
    rng = np.random.default_rng(0)
    digits = open_dataset("digits").train
    found: dict[str, list[ImageInput]] = {
        "digits": [Image.fromarray(np.asarray(digits.read(number))).resize((64, 64)) for number in range(DRAWN)],
        "text": [text_image(rng) for _ in range(DRAWN)],
        "textures": [texture_image(rng) for _ in range(DRAWN)],
    }
    return found | {folder.name: list(find_images([str(folder)])) for folder in folders}


def chosen_threshold(unknown: list[Shares]) -> float:
    """The least one that refuses three quarters of the unknown images, each kind counting alike."""
    tried = np.linspace(0.1, 0.99, 90)
    return next(round(float(t), 2) for t in tried if np.mean([(each < t).mean() for each in unknown]) >= REFUSED)


def prepared(run: vt.Run) -> tuple[Classifier, Shares]:
    """The model of a run with its temperature, and the best probability of each image that the run has held out."""
    model = vt.load(run.folder)
    model.preprocess = model.preprocess.changed({"fit": "crop"})
    model.origin = "trained from scratch on CIFAR-10; see card.md"
    classifier = Classifier(model)
    held_out = images_for(run.facts["data"], run.recipe).validation
    answers = answers_of(classifier, held_out, space_for(held_out.classes, model, ids=None, mappings=None), batch=100)
    model.temperature = fitted_temperature(answers, np.arange(len(answers))) or 1.0
    scaled = torch.from_numpy(np.asarray(answers.logits)).double() / model.temperature
    return classifier, scaled.softmax(dim=1).amax(dim=1).numpy()


def card(run: vt.Run, found: vt.Evaluation, known: float, refused: dict[str, float], threshold: float) -> str:
    facts, low, high = run.facts, *found.intervals["top1"]
    held, machine = facts["validation_images"], facts["environment"].get("processor", "a CPU")
    rows = "\n".join(f"| {name} | {share:.0%} |" for name, share in refused.items())
    return f"""# The model in the package

Ten classes: {", ".join(found.space.classes)}.
It answers where no model is named and none can be downloaded.

- Data: CIFAR-10, {facts["training_images"]:,} of its training images; {held:,} others were held out for all choices.
- Recipe: `{run.recipe.command}`, {run.recipe.epochs:g} epochs.
- Size: {facts["parameters"]:,} parameters, stored in float16.
- Time: {run.evaluation["seconds"] / 60:.0f} minutes on {machine}, two processes beside other work.
- Accuracy: {found.measures.top1:.2f}% of the 10,000 test images (95% interval {low:.2f} to {high:.2f}), measured once.
- Calibration error on the test images: {found.calibration.now.error:.2f}%.
- Threshold: an image whose best answer has less than {threshold:.0%} is "none of these". {known:.1%} of the held-out
  images have more. Of images of none of the ten classes, apart from those it was chosen with, so many are refused:

| images | "none of these" |
|---|---|
{rows}

Limits: it sees 32 x 32 pixels, so what is small in a photo is lost; what it has never seen can look like one of its
classes. Not for decisions that matter.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("data")
    parser.add_argument("--unknown", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    run = vt.Run.open(given.run)
    classifier, known = prepared(run)
    unknown = {name: best_probabilities(classifier, images) for name, images in unknown_images(given.unknown).items()}
    threshold = chosen_threshold([each[: len(each) // 2] for each in unknown.values()])
    classifier.model.threshold = threshold
    vt.save(classifier.model, given.out, half=True)
    found = vt.evaluate(given.data, given.out, split="test", batch=100)
    refused = {name: float((each[len(each) // 2 :] < threshold).mean()) for name, each in unknown.items()}
    answered = float((known >= threshold).mean())
    (given.out / "card.md").write_text(card(run, found, answered, refused, threshold))
    print(json.dumps({"test": found.measures.top1, "threshold": threshold, "answered": answered, "refused": refused}))


if __name__ == "__main__":
    main()
