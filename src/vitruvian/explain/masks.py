"""Masks of images: read from PNG files or COCO polygons, and written as polygons."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitruvian.data.decode import identify, reason
from vitruvian.errors import DataError, require
from vitruvian.files import read_object
from vitruvian.text import brief, describe_error

# H rows and W columns of pixels

IGNORED = 255  # index of pixels that count for no class
COLORED = 2**24  # added to the number of a color, to tell it from an index
MOST_CLASSES = 64  # maximum number of colors or indices that are taken for classes if none are named
BACKGROUND = "background"

Mask = NDArray[np.uint8]  # (H, W) indices of classes, or IGNORED


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of images."""

    classes: tuple[str, ...]
    readers: Mapping[str, Callable[[], Mask]]  # by the stem of the image's file name

    def read(self, image: Path, size: tuple[int, int]) -> Mask:
        """The mask of an image of `size` (columns, rows). Raises DataError if it has another size."""
        mask = self.readers[image.stem]()
        if mask.shape != size[::-1]:
            reason = f"the mask has {mask.shape[1]} x {mask.shape[0]} pixels, the image {size[0]} x {size[1]}"
            raise DataError(reason, where=image)
        return mask


def open_masks(path: Path, classes: Sequence[str] = ()) -> Masks:
    """The masks in a folder of PNG files that are called like their images, or in a COCO file of polygons.

    Args:
        path: A folder, or a .json file.
        classes: For PNG files, names of the classes in the order of their indices; of colored masks, each with its
            color ("cat=#ff8800"). By default all indices or colors that occur.

    Raises:
        DataError: There are no masks, or they show anything but these classes.
    """
    if path.suffix.lower() == ".json":
        return open_coco_masks(path)
    # Pets has a hidden file of metadata beside some masks
    paths = [file for file in sorted(path.rglob("*.png")) if not file.name.startswith(".")]
    if not paths:
        hint = "give a folder of PNG files, or a COCO .json file"
        raise DataError("no masks (*.png) in this folder or below it", where=path, hint=hint)
    files = dict(zip(unique_stems(paths, path), paths))
    named = dict(class_code(index, name) for index, name in enumerate(classes))
    check_count(named, path)
    if not named:
        codes = sorted({int(code) for file in files.values() for code in np.unique(read_codes(file))} - {IGNORED})
        if len(codes) > MOST_CLASSES:
            what = f"the masks have {len(codes)} colors or indices, more than {MOST_CLASSES}; were they smoothed?"
            raise DataError(what, where=path, hint="name the classes")
        named = {code_name(code): code for code in codes}
    return Masks(tuple(named), {stem: partial(read_mask, file, named) for stem, file in files.items()})


def unique_stems(files: Iterable[Path], where: Path) -> list[str]:
    """The stems of file names. Raises DataError if two are equal, because an image then has two masks."""
    stems = [file.stem for file in files]
    if twice := next((stem for stem, count in Counter(stems).items() if count > 1), ""):
        raise DataError(f"two masks are called {twice!r}", where=where, hint="give the folder of one of them")
    return stems


def check_count(classes: Collection[str], where: Path) -> None:
    if len(classes) > IGNORED:
        raise DataError(f"{len(classes)} classes, at most {IGNORED} are possible", where=where)


def class_code(index: int, name: str) -> tuple[str, int]:
    """The name of a class, and the code of its pixels: its index, or the color in "cat=#ff8800"."""
    name, _, color = (part.strip() for part in name.partition("="))
    if color and not re.fullmatch(r"#[0-9a-fA-F]{6}", color):
        raise DataError(f"class {name!r} needs a color such as #ff8800, not {color!r}")
    return name, COLORED + int(color[1:], 16) if color else index


def code_name(code: int) -> str:
    return f"#{code - COLORED:06x}" if code >= COLORED else str(code)


def read_mask(file: Path, named: Mapping[str, int]) -> Mask:
    """The index of each pixel's class. Raises DataError for a pixel of none of them."""
    codes = read_codes(file)
    mask = np.full(codes.shape, IGNORED, np.uint8)
    for index, code in enumerate(named.values()):
        mask[codes == code] = index
    unknown = codes[(mask == IGNORED) & (codes != IGNORED)]
    if len(unknown):
        kind = "color" if unknown[0] >= COLORED else "index"
        raise DataError(f"{kind} {code_name(unknown[0])} is none of the classes ({brief(named)})", where=file)
    return mask


def read_codes(file: Path) -> NDArray[np.int64]:
    """Indices (H, W), or colors as numbers from COLORED."""
    try:
        with file.open("rb") as opened:
            image = identify(opened)
            image.load()
        mode = {"RGBA": "RGB", "LA": "L"}.get(image.mode, image.mode)
        pixels = np.asarray(image if mode == image.mode else image.convert(mode)).astype(np.int64)
    except Exception as error:  # Pillow raises any kind of error for broken files
        raise DataError(f"damaged mask: {reason(error)}", where=file) from error
    return pixels if pixels.ndim == 2 else COLORED + (pixels << np.array([16, 8, 0])).sum(axis=2)


def open_coco_masks(path: Path) -> Masks:
    """The polygons of a COCO file, drawn over the background in their order."""
    content = read_object(path, raises=DataError)
    try:
        categories = sorted(content["categories"], key=lambda category: category["id"])
        index = {category["id"]: place for place, category in enumerate(categories, 1)}
        shapes: dict[Any, list[tuple[int, Any]]] = {entry["id"]: [] for entry in content["images"]}
        for annotation in content["annotations"]:
            shapes[annotation["image_id"]].append((index[annotation["category_id"]], annotation["segmentation"]))
        stems = unique_stems([Path(entry["file_name"]) for entry in content["images"]], path)
        sizes = {stem: (entry["width"], entry["height"]) for stem, entry in zip(stems, content["images"])}
        by_stem = {stem: shapes[entry["id"]] for stem, entry in zip(stems, content["images"])}
        names = (BACKGROUND, *(str(category["name"]) for category in categories))
    except (KeyError, TypeError) as error:
        raise DataError(f"not COCO polygons: {error} is missing or of a wrong type", where=path) from error
    if not any(shapes.values()):
        raise DataError("no polygons in this file", where=path)
    check_count(names, path)

    def draw(stem: str) -> Mask:
        if any(not isinstance(polygons, list) for _, polygons in by_stem[stem]):
            raise DataError(f"{stem} has a run-length mask", where=path, hint="convert it to polygons or PNG files")
        try:
            mask = Image.new("L", sizes[stem])
            for value, polygons in by_stem[stem]:
                for polygon in polygons:
                    ImageDraw.Draw(mask).polygon(polygon, fill=value)
        except (TypeError, ValueError, MemoryError, OverflowError) as error:
            raise DataError(f"{stem} has an invalid polygon or size: {describe_error(error)}", where=path) from error
        return np.asarray(mask)

    return Masks(names, {stem: partial(draw, stem) for stem in sizes})


class CocoPolygons:
    """Masks as COCO polygons, an annotation per connected region of a class; the background has none."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.cv2 = require("cv2", "train")
        self.categories = {index: name for index, name in enumerate(classes) if name != BACKGROUND}
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def add(self, name: str, mask: Mask) -> None:
        """Add the mask of the image with this file name."""
        image = {"id": len(self.images), "file_name": name, "width": mask.shape[1], "height": mask.shape[0]}
        self.images.append(image)
        for index in self.categories:
            count, regions, facts, _ = self.cv2.connectedComponentsWithStats((mask == index).astype(np.uint8))
            for region in range(1, count):
                left, top, width, height, area = facts[region].tolist()
                part = (regions[top : top + height, left : left + width] == region).astype(np.uint8)
                ids = {"id": len(self.annotations) + 1, "image_id": image["id"], "category_id": index + 1}
                shape = {"bbox": [left, top, width, height], "area": area, "segmentation": outline(part, left, top)}
                self.annotations.append(ids | shape | {"iscrowd": 0})

    def to_json(self) -> dict[str, Any]:
        categories = [{"id": index + 1, "name": name} for index, name in self.categories.items()]
        return {"images": self.images, "annotations": self.annotations, "categories": categories}


def outline(region: NDArray[np.uint8], left: int, top: int) -> list[list[int]]:
    """Polygons through the outer pixels of a region, moved by `left` and `top`; one with a hole is cut there."""
    cv2 = require("cv2", "train")
    contours, hierarchy = cv2.findContours(region, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    polygons = list[list[int]]()
    for contour, (_, _, hole, parent) in zip(contours, hierarchy[0]):
        if parent < 0 and hole >= 0:
            cut = int(contours[hole][:, 0, 0].mean())
            inside = cv2.drawContours(np.zeros_like(region), [contour], -1, 1, cv2.FILLED) & region
            polygons += outline(inside[:, :cut], left, top) + outline(inside[:, cut:], left + cut, top)
        elif parent < 0:
            points = contour[:, 0] + (left, top)
            polygons.append(np.resize(points, (max(3, len(points)), 2)).ravel().tolist())
    return polygons
