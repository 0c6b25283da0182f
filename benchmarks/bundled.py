"""The model in the package, from a trained one: its temperature, the energy of its head, its threshold, its card.

    vit train cifar10/ --recipe cifar10-hybrid --out runs/box
    python benchmarks/bundled.py runs/box cifar10/ --imagenet val/ --pets pets/test --unknown faces/ \
        --time "two hours on one core" --out src/vitruvian/bundled

Temperature and threshold are chosen on the images that the recipe holds out; the energy is fitted to training images
and to generated images of no class (`outliers.py`). Then the test set is measured once, as are photos of the ten
classes and images of none (`unknown.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import vitruvian as vt
from outliers import KINDS
from unknown import ANSWERED, known_photos, logits_of, rightly, shift, unknown_images
from vitruvian.cost import parameters
from vitruvian.evaluation.calibration import fit_temperature
from vitruvian.evaluation.label_spaces import compute_logits, label_space
from vitruvian.inference import Classifier
from vitruvian.model.build import Model
from vitruvian.training.recipe import read_recipe
from vitruvian.training.splits import Splits, split_data


def prepared(model: Model, images: Splits) -> Model:
    """The model with the energy, the temperature and the threshold of the package."""
    model.meta = model.meta.replace(preprocess=model.meta.preprocess.with_changes({"fit": "crop"}))
    model.meta = model.meta.replace(origin="trained on CIFAR-10; see card.md")
    classifier = Classifier(model)
    shift(classifier, images.train)
    held_out = images.validation
    space = label_space(held_out.classes, labels=model.meta.labels, total=model.config.num_classes)
    answers = compute_logits(classifier, held_out, space, batch_size=100)
    model.meta = model.meta.replace(temperature=fit_temperature(answers, np.arange(len(answers))) or 1.0)
    energy = np.logaddexp.reduce(np.asarray(answers.logits, np.float64), axis=1)
    model.meta = model.meta.replace(threshold_on="energy", threshold=round(float(np.quantile(energy, 1 - ANSWERED)), 3))
    return model


def measured(classifier: Classifier, given: argparse.Namespace) -> dict[str, Any]:
    """Shares of photos that are answered right and wrong, and of unknown images that are refused."""
    photos, refused = {}, {}
    for name, some in known_photos(given.imagenet, given.pets).items():
        logits = logits_of(classifier, [image for image, _ in some])
        right, kept = rightly(classifier, logits, some), ~np.array(classifier.rejects(logits))
        photos[name] = len(some), float((right & kept).mean()), float((~right & kept).mean())
    for name, images in unknown_images(given.imagenet, given.unknown).items():
        refused[name] = len(images), float(np.mean(classifier.rejects(logits_of(classifier, images))))
    return {"photos": photos, "refused": refused}


def card(
    given: argparse.Namespace, images: Splits, found: vt.Evaluation, flipped: float, shares: dict[str, Any]
) -> str:
    recipe, model, (low, high) = read_recipe(given.recipe), vt.load(given.out), found.intervals["top1"]
    taught = f"teacher {recipe.teacher}" if recipe.teacher else "no teacher"
    unknown = "\n".join(f"| {name} | {count} | {share:.0%} |" for name, (count, share) in shares["refused"].items())
    photos = "\n".join(
        f"| {name} | {count} | {right:.0%} | {wrong:.0%} | {1 - right - wrong:.0%} |"
        for name, (count, right, wrong) in shares["photos"].items()
    )
    return f"""# The bundled model

Ten classes: {", ".join(found.space.classes)}.
The commands use it if no model is given and the default cannot be downloaded.

- Data: CIFAR-10, {len(images.train):,} of its training images; {len(images.validation):,} others were held
  out for all choices.
- Recipe: `{recipe.command}`, {recipe.epochs:g} epochs, seed {recipe.seed}, {taught}.
- Size: {parameters(model.config):,} parameters, stored in float16.
- Time: {given.time}.
- Accuracy: {found.measures.top1:.2f}% of the 10,000 test images (95% interval {low:.2f} to {high:.2f}), measured once;
  {flipped:.2f}% with the logits of each image and its mirror image averaged (`--flip`).
- Calibration error on the test images: {found.calibration.now.error:.2f}%.
- Threshold: an image is rejected if its energy, log(sum(exp(logits))), is less than {model.meta.threshold:g};
  {ANSWERED:.0%} of the held-out images have more. The head was fitted to it: logistic regression between 8,000 training
  images and 2,250 generated images of no class ({", ".join(KINDS)}) gives a
  linear term, the same in all logits, which changes the energy and no probability (`benchmarks/bundled.py`).

Photos of the ten classes, center crop reduced to 32 x 32 pixels:

| photos | count | correct | wrong | rejected |
|---|---|---|---|---|
{photos}

Images of none of the ten classes. Text and textures are drawn similarly to some of the generated ones; the other kinds
were not used in the fit. The share of {ANSWERED:.0%} and the regularization were chosen with these numbers in view:

| images | count | rejected |
|---|---|---|
{unknown}

Limits: its input has 32 x 32 pixels, so small objects are lost. Unknown objects can look like one of its classes,
above all other animals. Do not use it for decisions that matter.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--recipe", default="cifar10-hybrid", help="what the model was trained with")
    parser.add_argument("--imagenet", type=Path)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--unknown", type=Path, nargs="*", default=[])
    parser.add_argument("--time", required=True, help="what the training has taken, and on what")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    images = split_data(given.data, read_recipe(given.recipe))
    vt.save(prepared(vt.load(given.model), images), given.out, half=True)
    shares = measured(Classifier(given.out), given)
    found = vt.evaluate(given.data, given.out, split="test", batch_size=100)
    flipped = vt.evaluate(given.data, given.out, split="test", flip=True, batch_size=100).measures.top1
    (given.out / "card.md").write_text(card(given, images, found, flipped, shares))
    print(json.dumps({"test": found.measures.top1, "flipped": flipped} | shares))


if __name__ == "__main__":
    main()
