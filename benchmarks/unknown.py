"""Which score tells photos of the model's ten classes from images of none: AUROC, and how many of each are answered.

    python benchmarks/unknown.py MODEL cifar10/ --imagenet val/ --pets pets/test --unknown faces/ [--squash] [--shift]

For each score, the threshold is the one that answers 93% of the images that the recipe holds out; unknown images are
the built-in digits, drawn text and textures, ImageNet's other classes, and the folders given, such as the faces of
scikit-image's `lfw_subset` or Fashion-MNIST. With `--shift` the head
is first fitted to generated outliers, as `bundled.py` does for the model in the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

import vitruvian as vt
from outliers import outliers
from vitruvian.data.decode import ImageInput
from vitruvian.data.folder import find_images
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Source
from vitruvian.evaluation.calibration import shift_energy
from vitruvian.inference import Classifier, batched
from vitruvian.training.recipe import read_recipe
from vitruvian.training.splits import split_data

ANSWERED = 0.93
"""Share of the held-out images that the threshold lets pass."""
MOST = 300
"""Images of each kind that are drawn or read."""

TEN: dict[str, list[int]] = {
    "airplane": [404, 895],
    "automobile": [436, 468, 511, 609, 627, 656, 661, 751, 817],
    "bird": [*range(7, 25), *range(80, 101), *range(127, 147)],
    "cat": [*range(281, 286)],
    "dog": [*range(151, 269)],
    "frog": [30, 31, 32],
    "horse": [339],
    "ship": [403, 484, 510, 554, 625, 628, 724, 780, 814, 871, 914],
    "truck": [555, 569, 675, 717, 864, 867],
}
"""ImageNet's classes that belong to one of CIFAR-10's; there is no deer among them."""

UNCLEAR = {*range(269, 281), *range(286, 294), 340, 351, 352, 353, 407, 408, 472, 475, 479, 536, 537, 547, 561, 575}
UNCLEAR |= {576, 581, 586, 595, 603, 654, 671, 705, 734, 757, 779, 803, 829, 833, 847, 866, 874, 908, 913}
"""ImageNet's classes that are near one of them (wolves, antelopes, buses, parts of cars), and count as neither."""

Scores = NDArray[np.float64]
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "probability": lambda logits: logits.softmax(dim=1).amax(dim=1),
    "largest logit": lambda logits: logits.amax(dim=1),
    "energy": lambda logits: logits.logsumexp(dim=1),
}
"""By name: the more, the likelier an image of some class."""


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


def numbers_read(source: Source) -> list[ImageInput]:
    """Images of a source that are arrays, such as IDX files."""
    return [Image.fromarray(np.asarray(source.read(number))) for number in range(min(MOST, len(source)))]


def unknown_images(imagenet: Path | None, folders: Iterable[Path]) -> dict[str, list[ImageInput]]:
    """Images of none of the ten classes, by kind."""
    rng = np.random.default_rng(0)
    found: dict[str, list[ImageInput]] = {
        "digits": [image.resize((64, 64)) for image in numbers_read(open_dataset("digits").train)],
        "text": [text_image(rng) for _ in range(MOST)],
        "textures": [texture_image(rng) for _ in range(MOST)],
    }
    for folder in folders:
        if any(folder.glob("*ubyte*")):
            found[folder.name] = numbers_read(open_dataset(str(folder)).splits["test"])
        else:
            found[folder.name] = list(find_images([str(folder)]))[:MOST]
    if imagenet:
        known = {number for numbers in TEN.values() for number in numbers} | UNCLEAR
        found["other photos"] = [file for number in range(1000) if number not in known for file in of(imagenet, number)]
    return found


def of(imagenet: Path, number: int) -> list[str]:
    return sorted(map(str, (imagenet / f"{number:03}").iterdir()))


def known_photos(imagenet: Path | None, pets: Path | None) -> dict[str, list[tuple[ImageInput, str]]]:
    """Ordinary photos with their class, by data set; breeds of cats are capitalized in Oxford-IIIT Pets."""
    found: dict[str, list[tuple[ImageInput, str]]] = {}
    if pets:
        files = sorted(pets.rglob("*.jpg"))[::3]
        found["Pets"] = [(str(file), "cat" if file.parent.name[0].isupper() else "dog") for file in files]
    if imagenet:
        found["ImageNet"] = [(file, name) for name in TEN for number in TEN[name] for file in of(imagenet, number)]
    return found


def logits_of(classifier: Classifier, images: Iterable[ImageInput]) -> Tensor:
    """Logits (B, K) of images that can all be read."""
    loaded = classifier.load(batched(((None, image) for image in images), 100), ahead=200)
    return torch.cat([batch.values for batch in classifier.run(classifier.logits, loaded)])


def some_of(source: Source, most: int) -> list[Image.Image]:
    """So many images of a source at equal distances, or all."""
    numbers = np.linspace(0, len(source) - 1, min(most, len(source))).astype(int)
    return [Image.fromarray(np.asarray(source.read(int(number)))) for number in numbers]


def features_of(classifier: Classifier, images: Iterable[ImageInput]) -> Tensor:
    """What the head reads (B, F) of images that can all be read."""
    return classifier.embed(images, batch_size=100)


def shift(classifier: Classifier, training: Source) -> None:
    """Fit the energy of a model's head to training images and to generated images of no class."""
    head = classifier.model.head
    assert head is not None
    others = outliers(some_of(training, 2000), 250, seed=7)
    unknown = [features_of(classifier, some) for some in others.values()]
    shift_energy(head, features_of(classifier, some_of(training, 8000)), unknown)


def rightly(classifier: Classifier, logits: Tensor, photos: Iterable[tuple[ImageInput, str]]) -> NDArray[np.bool_]:
    """Whether the best answer is the class of each photo."""
    best = [classifier.labels[index] for index in logits.argmax(dim=1).tolist()]
    return np.array([found == wanted for found, (_, wanted) in zip(best, photos)])


def area_under_curve(known: Scores, unknown: Scores) -> float:
    """How often a known image has more than an unknown one."""
    ranks = np.concatenate([known, unknown]).argsort().argsort()[: len(known)]
    return float(ranks.sum() - len(known) * (len(known) - 1) / 2) / (len(known) * len(unknown))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--recipe", default="cifar10-hybrid", help="says which images are held out")
    parser.add_argument("--imagenet", type=Path)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--unknown", type=Path, nargs="*", default=[])
    parser.add_argument("--squash", action="store_true", help="the whole photo, not its middle")
    parser.add_argument("--shift", action="store_true", help="fit the energy to generated outliers")
    given = parser.parse_args()
    images = split_data(given.data, read_recipe(given.recipe))
    model = vt.load(given.model)
    model.meta = model.meta.replace(
        preprocess=model.meta.preprocess.with_changes({"fit": "squash" if given.squash else "crop"})
    )
    classifier = Classifier(model)
    if given.shift:
        shift(classifier, images.train)
    held = logits_of(classifier, some_of(images.validation, len(images.validation)))
    others = unknown_images(given.imagenet, given.unknown)
    unknown = {kind: logits_of(classifier, some) for kind, some in others.items()}
    photos = known_photos(given.imagenet, given.pets)
    seen = {name: logits_of(classifier, [image for image, _ in some]) for name, some in photos.items()}
    for name, score in SCORES.items():
        known = score(held).double().numpy()
        threshold = float(np.quantile(known, 1 - ANSWERED))
        print(f"{name}: threshold {threshold:.3f}")
        for kind, logits in unknown.items():
            other = score(logits).double().numpy()
            print(f"  {kind:14} AUROC {area_under_curve(known, other):.1%}, refused {(other < threshold).mean():.0%}")
        for kind, logits in seen.items():
            right, kept = rightly(classifier, logits, photos[kind]), (score(logits) >= threshold).numpy()
            shares = f"right {(right & kept).mean():.0%}, wrong {(~right & kept).mean():.0%}"
            print(f"  {kind:14} {shares}; without a threshold {right.mean():.0%} right")


if __name__ == "__main__":
    main()
