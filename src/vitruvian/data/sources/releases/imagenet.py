"""ImageNet as it is distributed, and the sets of images made after it.

`train/WORDNET-ID/*.JPEG`; `val/` the same, or flat with the development kit's ground truth. The classes are always the
1000 WordNet ids in the order that every published head uses, however many of them have images here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitruvian.config import Preprocess
from vitruvian.data.decode import EXTENSIONS, RawImage, decode
from vitruvian.data.preprocess import FILTERS, geometry, resize
from vitruvian.data.sources.base import Dataset, LeftOut
from vitruvian.data.sources.formats.folder import FolderSource, class_folders, images, listed
from vitruvian.data.sources.index import Entry
from vitruvian.data.sources.releases.matlab import read_matlab
from vitruvian.errors import DataError
from vitruvian.labels import imagenet_ids

KIT = "ILSVRC2012_devkit_t12/data"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
FLAT = re.compile(r"ILSVRC2012_val_(\d{8})\.")

FONT = "fonts/SourceHanSerifSC-ExtraLight.otf"
WATERMARK = "捷径捷径捷径"
"""Of ImageNet-W: "shortcut" three times, as the release draws it."""
FONT_PIXELS = 36
OPACITY = 0.5
LEFT, TOP = 0.01, 0.4
"""Where the watermark begins, as shares of the image."""
RELEASED_VIEW = Preprocess(image_size=(224, 224), fit="crop", scaled_size=(256, 256))


def open_imagenet(folder: Path) -> Dataset:
    """The splits `train` and `val`, as far as they are there."""
    entries = chain(wordnet_entries(folder, folder / "train", "train"), val_entries(folder, "val"))
    return listed(str(folder), folder, entries, classes=imagenet_ids())


def val_entries(folder: Path, split: str) -> Iterator[Entry]:
    if any((folder / "val").glob("n[0-9]*/")):
        yield from wordnet_entries(folder, folder / "val", split)
    elif (folder / "val").is_dir():
        yield from flat_entries(folder, split)


def wordnet_entries(root: Path, top: Path, split: str) -> Iterator[Entry]:
    """The images of folders named by WordNet ids; folders of other names are an error, not a class."""
    known = set(imagenet_ids())
    for place in class_folders(top.iterdir()) if top.is_dir() else []:
        if place.name not in known:
            raise DataError(f"{place}: not the WordNet id of one of ImageNet's 1000 classes, such as n01440764")
        for path in images(place, LeftOut()):
            yield Entry(split, str(Path(path).relative_to(root)), place.name)


def flat_entries(folder: Path, split: str) -> Iterator[Entry]:
    """The validation images as the archive has them, labeled by the development kit."""
    truth = ground_truth(folder / KIT)
    for path in sorted((folder / "val").iterdir()):
        match = FLAT.match(path.name)
        if match is None:
            continue
        number = int(match.group(1))
        if not 1 <= number <= len(truth):
            raise DataError(f"{path}: the ground truth has labels for images 1 to {len(truth)} only")
        yield Entry(split, f"val/{path.name}", truth[number - 1])


def ground_truth(kit: Path) -> list[str]:
    """The WordNet id of each validation image; the kit numbers the classes in an order of its own."""
    if not (kit / GROUND_TRUTH).is_file() or not (kit / "meta.mat").is_file():
        raise DataError(
            f"{kit.parent.parent / 'val'}: the images lie in one folder, so {kit / GROUND_TRUTH} and "
            f"{kit / 'meta.mat'} are needed (ILSVRC2012_devkit_t12.tar.gz); or sort them into val/WORDNET-ID/"
        )
    try:
        synsets = read_matlab(kit / "meta.mat")["synsets"]
        ids = {int(np.ravel(row["ILSVRC2012_ID"])[0]): str(row["WNID"]) for row in synsets}
        return [ids[int(line)] for line in (kit / GROUND_TRUTH).read_text().split()]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{kit}: not the development kit of ILSVRC 2012 ({error!r}); get it again") from error


def open_wordnet(folder: Path) -> Dataset:
    """Images for testing in folders of WordNet ids; the classes are those that are there."""
    return listed(str(folder), folder, wordnet_entries(folder, folder, "test"))


def open_numbered(folder: Path) -> Dataset:
    """Images for testing in folders named 0 to 999, the numbers of ImageNet's classes."""
    return listed(str(folder), folder, numbered_entries(folder), classes=imagenet_ids())


def numbered_entries(folder: Path) -> Iterator[Entry]:
    ids = imagenet_ids()
    for place in class_folders(folder.iterdir()):
        if not place.name.isdecimal() or int(place.name) >= len(ids):
            raise DataError(f"{place}: wanted folders called 0 to {len(ids) - 1}")
        for path in sorted(place.iterdir()):
            if path.suffix.lower() in EXTENSIONS:
                yield Entry("test", f"{place.name}/{path.name}", ids[int(place.name)])


def open_watermarked(folder: Path, imagenet: Path) -> Dataset:
    """ImageNet-W: the validation images of `imagenet` with the watermark; `folder` holds the font."""
    if not (imagenet / "val").is_dir():
        raise DataError(f"{imagenet}: no validation images, which ImageNet-W is made of")
    marked = partial(WatermarkedSource, font=str(folder / FONT))
    return listed(str(folder), imagenet, val_entries(imagenet, "test"), classes=imagenet_ids(), source=marked)


class WatermarkedSource(FolderSource):
    """The images as ImageNet-W's release shows them to a model of 224 pixels."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, root: Path, font: str) -> None:
        super().__init__(name, classes, folder, root=root)
        self.font = font

    def read(self, index: int) -> RawImage:
        return watermarked(decode(self.root / self.key(index)), self.font)


def watermarked(image: Image.Image, font: str) -> RawImage:
    """Shorter side 256, center 224, and the text over it in white, half transparent."""
    scaled, box = geometry((image.height, image.width), RELEASED_VIEW)
    view = resize(image, scaled, box, FILTERS["bilinear"]).convert("RGBA")
    over = Image.new("RGBA", view.size, (255, 255, 255, 0))
    place = (LEFT * view.width, TOP * view.height)
    fill = (255, 255, 255, round(OPACITY * 255))
    ImageDraw.Draw(over).text(place, WATERMARK, fill=fill, font=ImageFont.truetype(font, FONT_PIXELS))
    return np.asarray(Image.alpha_composite(view, over).convert("RGB"))
