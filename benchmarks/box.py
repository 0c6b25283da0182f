"""The model in the package, from a finished run: its temperature, its threshold, its card.

    vit train cifar10/ --recipe cifar10-hybrid --out runs/box
    python benchmarks/box.py runs/box cifar10/ --imagenet val/ --pets pets/test --unknown faces/ --out src/vitruvian/box

Temperature and threshold are chosen on the images that the run has held out, and on no others. Then the test set is
measured once, as are photos of the ten classes and images of none (`unknown.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import vitruvian as vt
from unknown import ANSWERED, known_photos, logits_of, rightly, unknown_images
from vitruvian.evaluation.measuring.calibration import fitted_temperature
from vitruvian.evaluation.measuring.evaluate import space_for
from vitruvian.evaluation.measuring.inference import answers_of
from vitruvian.predict import Classifier
from vitruvian.training.images import images_for


def prepared(run: vt.Run) -> Classifier:
    """The model of a run with the temperature and the threshold that suit the images which the run has held out."""
    model = vt.load(run.folder)
    model.preprocess = model.preprocess.changed({"fit": "crop"})
    model.origin = "trained from scratch on CIFAR-10; see card.md"
    classifier = Classifier(model)
    held_out = images_for(run.facts["data"], run.recipe).validation
    answers = answers_of(classifier, held_out, space_for(held_out.classes, model, ids=None, mappings=None), batch=100)
    model.temperature = fitted_temperature(answers, np.arange(len(answers))) or 1.0
    logits = np.asarray(answers.logits, np.float64)
    energy = np.log(np.exp(logits).sum(axis=1))
    model.threshold_on, model.threshold = "energy", round(float(np.quantile(energy, 1 - ANSWERED)), 3)
    return classifier


def measured(classifier: Classifier, given: argparse.Namespace) -> dict[str, Any]:
    """Shares of photos that are answered right and wrong, and of unknown images that are refused."""
    photos, refused = {}, {}
    for name, some in known_photos(given.imagenet, given.pets).items():
        logits = logits_of(classifier, [image for image, _ in some])
        right, kept = rightly(classifier, logits, some), ~np.array(classifier.none_of_these(logits))
        photos[name] = len(some), float((right & kept).mean()), float((~right & kept).mean())
    for name, images in unknown_images(given.imagenet, given.unknown).items():
        refused[name] = len(images), float(np.mean(classifier.none_of_these(logits_of(classifier, images))))
    return {"photos": photos, "refused": refused}


def card(run: vt.Run, found: vt.Evaluation, flipped: float, threshold: float, shares: dict[str, Any], time: str) -> str:
    facts, low, high = run.facts, *found.intervals["top1"]
    unknown = "\n".join(f"| {name} | {count} | {share:.0%} |" for name, (count, share) in shares["refused"].items())
    photos = "\n".join(
        f"| {name} | {count} | {right:.0%} | {wrong:.0%} | {1 - right - wrong:.0%} |"
        for name, (count, right, wrong) in shares["photos"].items()
    )
    return f"""# The model in the package

Ten classes: {", ".join(found.space.classes)}.
It answers where no model is named and none can be downloaded.

- Data: CIFAR-10, {facts["training_images"]:,} of its training images; {facts["validation_images"]:,} others were held
  out for all choices.
- Recipe: `{run.recipe.command}`, {run.recipe.epochs:g} epochs, seed {run.recipe.seed}, no teacher.
- Size: {facts["parameters"]:,} parameters, stored in float16.
- Time: {time or f"{run.evaluation['seconds'] / 60:.0f} minutes"}.
- Accuracy: {found.measures.top1:.2f}% of the 10,000 test images (95% interval {low:.2f} to {high:.2f}), measured once;
  {flipped:.2f}% if each image and its mirror image are answered together (`--flip`).
- Calibration error on the test images: {found.calibration.now.error:.2f}%.
- Threshold: an image is "none of these" if its energy, log(sum(exp(logits))), is less than {threshold:g};
  {ANSWERED:.0%} of the held-out images have more. A probability says which class is likelier than the others; the
  energy says how much of any class there is.

Photos of the ten classes, whose middle is reduced to 32 x 32 pixels:

| photos | number | right | wrong | "none of these" |
|---|---|---|---|---|
{photos}

Images of none of the ten classes, all unseen in training and in the choice of the threshold:

| images | number | "none of these" |
|---|---|---|
{unknown}

Limits: it sees 32 x 32 pixels, so what is small in a photo is lost; what it has never seen can look like one of its
classes, other animals above all. Not for decisions that matter.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("data")
    parser.add_argument("--imagenet", type=Path)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--unknown", type=Path, nargs="*", default=[])
    parser.add_argument("--time", default="", help="what the run has taken, and on what")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    run = vt.Run.open(given.run)
    model = prepared(run).model
    vt.save(model, given.out, half=True)
    found = vt.evaluate(given.data, given.out, split="test", batch=100)
    flipped = vt.evaluate(given.data, given.out, split="test", flip=True, batch=100).measures.top1
    shares = measured(Classifier(given.out), given)
    (given.out / "card.md").write_text(card(run, found, flipped, model.threshold, shares, given.time))
    print(json.dumps({"test": found.measures.top1, "flipped": flipped, "threshold": model.threshold} | shares))


if __name__ == "__main__":
    main()
