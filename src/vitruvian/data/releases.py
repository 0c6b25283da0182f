"""Datasets by name, in the layout in which their authors release them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitruvian.catalog import imagenet_ids
from vitruvian.config import Preprocess
from vitruvian.data.decode import EXTENSIONS, RawImage, decode
from vitruvian.data.folder import FolderSource, class_folders, images, listed, open_lists, read_list
from vitruvian.data.index import Entry
from vitruvian.data.matlab import read_matlab
from vitruvian.data.pixels import cifar_folders, open_cifar
from vitruvian.data.preprocess import FILTERS, geometry, resize
from vitruvian.data.sources import Dataset, LeftOut
from vitruvian.errors import DataError
from vitruvian.files import read_json, read_text
from vitruvian.tasks import TASKS, Task, data_root, download_hint

FLOWER_SPLITS = {"trnid": "train", "valid": "train", "tstid": "test"}
"""The paper trains on the release's training and validation sets together."""

EMOTIONS = (
    "anger", "disgust", "fear", "happiness", "neutral", "sadness", "surprise", "contempt", "anxiety", "helplessness",
    "disappointment",
)  # fmt: skip


def open_flowers(folder: Path) -> Dataset:
    """`jpg/image_00001.jpg` and on, `imagelabels.mat` and `setid.mat`; classes are the release's numbers."""
    try:
        labels = np.ravel(read_matlab(folder / "imagelabels.mat")["labels"]).astype(int)
        sets = read_matlab(folder / "setid.mat")
        numbers = {name: np.ravel(sets[name]).astype(int) for name in FLOWER_SPLITS}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: imagelabels.mat or setid.mat lacks {error}; get them again") from error

    def entries() -> Iterator[Entry]:
        for name, split in FLOWER_SPLITS.items():
            for number in numbers[name].tolist():
                if not 1 <= number <= len(labels):
                    raise DataError(f"{folder}/setid.mat: image {number}, but there are {len(labels)} labels")
                yield Entry(split, f"jpg/image_{number:05d}.jpg", str(labels[number - 1]))

    return listed(str(folder), folder, entries())


def open_pets(folder: Path) -> Dataset:
    """`images/Abyssinian_1.jpg` and on, `annotations/trainval.txt` and `test.txt`; classes in the release's order."""
    rows = {split: pet_rows(folder / "annotations" / f"{name}.txt") for split, name in
            (("train", "trainval"), ("test", "test"))}  # fmt: skip
    breeds = {number: name.rpartition("_")[0] for found in rows.values() for name, number in found}
    entries = (
        Entry(split, f"images/{name}.jpg", breeds[number]) for split, found in rows.items() for name, number in found
    )
    return listed(str(folder), folder, entries, classes=tuple(breeds[number] for number in sorted(breeds)))


def pet_rows(path: Path) -> list[tuple[str, int]]:
    """Name of the image and number of its class: the first two of four columns."""
    found = []
    for number, line in enumerate(read_text(path, raises=DataError).splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) < 2 or not words[1].isdecimal():
            raise DataError(f"{path}, line {number}: wanted a name and the number of its class, found {line!r}")
        found.append((words[0], int(words[1])))
    return found


def open_objectnet(folder: Path) -> Dataset:
    """`images/FOLDER/*.png`; the classes are the names of the folders, by which its `mappings` go."""

    def entries() -> Iterator[Entry]:
        for place in class_folders((folder / "images").iterdir()):
            for path in images(place, LeftOut()):
                yield Entry("test", str(Path(path).relative_to(folder)), place.name)

    return listed(str(folder), folder, entries(), source=BorderedSource)


class BorderedSource(FolderSource):
    """Images whose border of one pixel is not part of them: ObjectNet marks them so against training on them."""

    def read(self, index: int) -> RawImage:
        return np.asarray(decode(self.root / self.key(index)))[1:-1, 1:-1]


def open_vizwiz(folder: Path) -> Dataset:
    """`images/*.jpg` and `annotations.json`: `categories` (id of ImageNet, name) and `images`.

    The public file lists names alone. One with labels has objects of `file_name` and `labels`, ids of ImageNet; the
    first that is a category counts. Classes are WordNet ids.
    """
    path = folder / "annotations.json"
    content = read_json(path, raises=DataError)
    try:
        names = {int(row["id"]): imagenet_ids()[int(row["id"])] for row in content["categories"]}
        found = list(content["images"])
        if any(isinstance(image, str) for image in found):
            raise DataError(
                f"{path}: lists {len(found)} images without labels, as the public file does; the evaluation server "
                "has the labels: write answers with `vit predict --json` and send them there"
            )
        entries = [
            Entry("test", f"images/{image['file_name']}", names[label])
            for image in found
            for label in [number for number in map(int, image["labels"]) if number in names][:1]
        ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not the annotations of VizWiz-Classification ({error!r}); get it again") from error
    return listed(str(folder), folder, entries, classes=tuple(names.values()))


def open_mafw(folder: Path, fold: int) -> Dataset:
    """`frames/CLIP/*.jpg` and the fold's lists of `CLIP.mp4 emotion`; a clip is its middle frame."""
    frames = folder / "data" / "frames" if (folder / "data" / "frames").is_dir() else folder / "frames"
    lists = folder / "Train & Test Set" / "single" / "no_caption" / f"set_{fold}"

    def entries() -> Iterator[Entry]:
        for split in ("train", "test"):
            for clip, emotion in read_list(lists / f"{split}.txt"):
                yield Entry(split, str(middle_frame(frames / clip.split(".")[0]).relative_to(folder)), emotion)

    return listed(f"{folder} (fold {fold})", folder, entries(), classes=EMOTIONS)


def middle_frame(clip: Path) -> Path:
    frames = sorted(path for path in clip.iterdir() if path.suffix.lower() in EXTENSIONS) if clip.is_dir() else []
    if not frames:
        raise DataError(f"{clip}: no frames of this clip; take the clips apart, for instance with ffmpeg")
    return frames[len(frames) // 2]


def open_omni(folder: Path) -> Dataset:
    """One realm: `train.txt`, `val.txt`, `test.txt` as in meta_v2, or `REALM.train/record.txt` and so on."""
    lists: dict[str, Path] = {}
    for split in ("train", "val", "test"):
        for path in (folder / f"{split}.txt", folder / f"{folder.name}.{split}" / "record.txt"):
            if path.is_file():
                lists.setdefault(split, path)
    return open_lists(str(folder), folder, lists)


VTAB_LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


def open_task(task: Task, root: Path | None = None, *, folders: Callable[[Path], Dataset]) -> Dataset:
    """The dataset of a task below `root`, by default the usual one; `folders` opens what is no special layout."""
    root = root or data_root()
    if not task.present(root):
        raise DataError(download_hint(task, root))
    found = open_release(task, task.path(root), root, folders)
    own = {split: source for split, source in found.splits.items() if split in task.splits}
    found = replace(found, name=task.name, splits=own or found.splits)
    return replace(found, notes=(*found.notes, *unlike_release(task, found)))


def open_release(task: Task, folder: Path, root: Path, folders: Callable[[Path], Dataset]) -> Dataset:
    openers: dict[str, Callable[[], Dataset]] = {
        "cifar": lambda: open_cifar([cifar_place(folder)], str(folder)),
        "flowers": lambda: open_flowers(folder),
        "folders": lambda: folders(folder),
        "imagenet": lambda: open_imagenet(folder),
        "lists": lambda: open_lists(
            str(folder), folder, {split: folder / name for split, name in VTAB_LISTS.items()}, classes=task.classes
        ),
        "mafw": lambda: open_mafw(folder, int(task.name[-1])),
        "numbered": lambda: open_numbered(inner(folder, "0")),
        "objectnet": lambda: open_objectnet(inner(folder, "images")),
        "omni": lambda: open_omni(folder),
        "pets": lambda: open_pets(folder),
        "vizwiz": lambda: open_vizwiz(folder),
        "watermark": lambda: open_watermarked(folder, TASKS["imagenet"].path(root)),
        "wordnet": lambda: open_wordnet(inner(folder, "n[0-9]*")),
    }
    return openers[task.layout]()


def cifar_place(folder: Path) -> Path:
    """The folder of CIFAR's files, or the original archive."""
    return next(iter([*cifar_folders(folder), *sorted(folder.glob("cifar-10*.tar.gz"))]), folder)


def inner(folder: Path, pattern: str) -> Path:
    """The folder itself where the pattern matches in it, or else the folder inside that the archive unpacked to."""
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if next(place.glob(pattern), None) is not None:
            return place
    return folder


def unlike_release(task: Task, found: Dataset) -> list[str]:
    """What differs from the release, so that numbers are not taken for those of the whole task."""
    lines = []
    for split, wanted in task.splits.items():
        count = len(found.splits[split]) if split in found.splits else 0
        if wanted and count != wanted:
            lines.append(f"{task.name}: {count:,} images in {split}, the release has {wanted:,}")
    if task.classes and len(found.classes) != task.classes:
        lines.append(f"{task.name}: {len(found.classes):,} classes, the release has {task.classes:,}")
    return lines


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
