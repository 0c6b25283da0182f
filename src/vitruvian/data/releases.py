"""Datasets by name, in the layout in which their authors release them, with a reader of MATLAB files (level 5).

The reader knows the arrays, texts, cells and structures that datasets use, and refuses sparse arrays, objects and
functions. `scipy.io.loadmat` is not used because damaged files crash it with a segmentation fault.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitruvian.catalog import imagenet_ids
from vitruvian.config import Preprocess
from vitruvian.data.decode import EXTENSIONS, RawImage, decode
from vitruvian.data.folder import FolderSource, list_images, open_entries, open_lists, read_list
from vitruvian.data.index import Entry
from vitruvian.data.pixels import find_cifar, open_cifar
from vitruvian.data.preprocess import FILTERS, geometry, resize
from vitruvian.data.sources import Dataset, SkippedFiles
from vitruvian.errors import DataError, parsing
from vitruvian.files import read_bytes, read_json, read_text
from vitruvian.tasks import Task, all_tasks, data_root, download_hint
from vitruvian.text import natural_key

Label = Callable[[Path], str]  # the class of a folder
VTAB_LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


def open_task(task: Task, root: Path | None = None, *, folders: Callable[[Path], Dataset]) -> Dataset:
    """The dataset of a task below `root`, by default the usual data folder.

    `folders` opens datasets in one of the common formats. Differences to the release are notes of the dataset, so that
    results are not mistaken for those of the full task.
    """
    root = root or data_root()
    if not task.present(root):
        raise DataError(download_hint(task, root))
    dataset = open_release(task, task.path(root), root, folders)
    splits = {split: source for split, source in dataset.splits.items() if split in task.splits}
    dataset = replace(dataset, name=task.name, splits=splits or dataset.splits)
    notes = []
    for split, expected in task.splits.items():
        count = len(dataset.splits[split]) if split in dataset.splits else 0
        if expected and count != expected:
            notes.append(f"{task.name}: {count:,} images in {split}, the release has {expected:,}")
    if task.classes and len(dataset.classes) != task.classes:
        notes.append(f"{task.name}: {len(dataset.classes):,} classes, the release has {task.classes:,}")
    return replace(dataset, notes=(*dataset.notes, *notes))


def open_release(task: Task, folder: Path, root: Path, folders: Callable[[Path], Dataset]) -> Dataset:
    name = str(folder)
    openers: dict[str, Callable[[], Dataset]] = {
        "cifar": lambda: open_cifar(find_cifar(folder) or sorted(folder.glob("cifar-10*.tar.gz")) or [folder], name),
        "flowers": lambda: open_flowers(folder),
        "folders": lambda: folders(folder),
        "imagenet": lambda: open_imagenet(folder),
        "lists": lambda: open_lists(
            name, folder, {split: folder / file for split, file in VTAB_LISTS.items()}, classes=task.classes
        ),
        "mafw": lambda: open_mafw(folder, int(task.name[-1])),
        "numbered": lambda: open_classes(folder, "0", numbered_label, classes=imagenet_ids()),
        "objectnet": lambda: open_classes(folder, "images", lambda path: path.name, "images", source=BorderedSource),
        "omni": lambda: open_omni(folder),
        "pets": lambda: open_pets(folder),
        "vizwiz": lambda: open_vizwiz(folder),
        "watermark": lambda: open_watermarked(folder, all_tasks()["imagenet"].path(root)),
        "wordnet": lambda: open_classes(folder, "n[0-9]*", wordnet_label),
    }
    return openers[task.layout]()


def open_classes(folder: Path, pattern: str, label: Label, top: str = "", **options: Any) -> Dataset:
    """Test images in the class folders of `top`; the classes are those that are present, or in the options.

    The pattern matches in the folder itself, or in the folder inside that the archive unpacks to.
    """
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    root = next((path for path in (folder, *inner) if next(path.glob(pattern), None) is not None), folder)
    return open_entries(str(root), root, class_entries(root, root / top, "test", label), **options)


def class_entries(root: Path, top: Path, split: str, label: Label) -> Iterator[Entry]:
    """The images in the class folders of `top`, with keys relative to `root`; `label` names the class of a folder."""
    folders = [path for path in top.iterdir() if path.is_dir() and path.name[0] != "."] if top.is_dir() else []
    for folder in sorted(folders, key=lambda path: natural_key(path.name)):
        name = label(folder)
        for path in list_images(folder, SkippedFiles()):
            yield Entry(split, str(Path(path).relative_to(root)), name)


FLOWER_SPLITS = {"trnid": "train", "valid": "train", "tstid": "test"}  # the paper trains on both


def open_flowers(folder: Path) -> Dataset:
    """`jpg/image_00001.jpg` and so on, `imagelabels.mat` and `setid.mat`; classes are the release's numbers."""
    with parsing(folder, DataError, reason="imagelabels.mat or setid.mat is incomplete", hint="download them again"):
        labels = np.ravel(read_matlab(folder / "imagelabels.mat")["labels"]).astype(int)
        sets = read_matlab(folder / "setid.mat")
        images = {name: np.ravel(sets[name]).astype(int) for name in FLOWER_SPLITS}

    def entries() -> Iterator[Entry]:
        for name, split in FLOWER_SPLITS.items():
            for image in images[name].tolist():
                if not 1 <= image <= len(labels):
                    raise DataError(f"image {image}, but there are {len(labels)} labels", where=f"{folder}/setid.mat")
                yield Entry(split, f"jpg/image_{image:05d}.jpg", str(labels[image - 1]))

    return open_entries(str(folder), folder, entries())


def open_pets(folder: Path) -> Dataset:
    """`images/Abyssinian_1.jpg` and so on, `annotations/trainval.txt` and `test.txt`; classes in their order there."""
    rows: list[tuple[str, str, int]] = []
    for split, stem in (("train", "trainval"), ("test", "test")):
        path = folder / "annotations" / f"{stem}.txt"
        for line_number, line in enumerate(read_text(path, raises=DataError).splitlines(), 1):
            words = line.split()  # name of the image, index of its class, and two more columns
            if not words or line.startswith("#"):
                continue
            if len(words) < 2 or not words[1].isdecimal():
                where = f"{path}, line {line_number}"
                raise DataError(f"{line!r} is not a name and the index of its class", where=where)
            rows.append((split, words[0], int(words[1])))
    breeds = {index: name.rpartition("_")[0] for _, name, index in rows}
    entries = (Entry(split, f"images/{name}.jpg", breeds[index]) for split, name, index in rows)
    return open_entries(str(folder), folder, entries, classes=tuple(breeds[index] for index in sorted(breeds)))


class BorderedSource(FolderSource):
    """Images without their border of one pixel, with which ObjectNet marks them against use in training.

    They are `images/FOLDER/*.png`; the classes are the names of the folders, which its `mappings` use.
    """

    def read(self, index: int) -> RawImage:
        return np.asarray(decode(self.root / self.key(index)))[1:-1, 1:-1]


def open_vizwiz(folder: Path) -> Dataset:
    """`images/*.jpg` and `annotations.json`: `categories` (ImageNet index, name) and `images`.

    The public file lists names only. One with labels has objects of `file_name` and `labels`, ImageNet indices; the
    first that is a category counts. Classes are WordNet ids.
    """
    path = folder / "annotations.json"
    content = read_json(path, raises=DataError)
    with parsing(path, DataError, reason="not the annotations of VizWiz-Classification", hint="download it again"):
        names = {int(row["id"]): imagenet_ids()[int(row["id"])] for row in content["categories"]}
        images = list(content["images"])
        if any(isinstance(image, str) for image in images):
            raise DataError(
                f"lists {len(images)} images without labels, like the public file",
                where=path,
                hint="the labels are on the evaluation server: write predictions with `vit predict --json` and send "
                "them there",
            )
        entries = [
            Entry("test", f"images/{image['file_name']}", names[label])
            for image in images
            for label in [index for index in map(int, image["labels"]) if index in names][:1]
        ]
    return open_entries(str(folder), folder, entries, classes=tuple(names.values()))


EMOTIONS = (
    "anger", "disgust", "fear", "happiness", "neutral", "sadness", "surprise", "contempt", "anxiety", "helplessness",
    "disappointment",
)  # fmt: skip


def open_mafw(folder: Path, fold: int) -> Dataset:
    """`frames/CLIP/*.jpg` and the fold's lists of `CLIP.mp4 emotion`; a clip is represented by its middle frame."""
    frames = folder / "data" / "frames" if (folder / "data" / "frames").is_dir() else folder / "frames"
    lists = folder / "Train & Test Set" / "single" / "no_caption" / f"set_{fold}"

    def entries() -> Iterator[Entry]:
        for split in ("train", "test"):
            for name, emotion in read_list(lists / f"{split}.txt"):
                clip = frames / name.split(".")[0]
                paths = sorted(path for path in clip.glob("*") if path.suffix.lower() in EXTENSIONS)
                if not paths:
                    raise DataError("no frames of this clip", where=clip, hint="extract them, for instance with ffmpeg")
                yield Entry(split, str(paths[len(paths) // 2].relative_to(folder)), emotion)

    return open_entries(f"{folder} (fold {fold})", folder, entries(), classes=EMOTIONS)


def open_omni(folder: Path) -> Dataset:
    """One realm: `train.txt`, `val.txt`, `test.txt` as in meta_v2, or `REALM.train/record.txt` and so on."""
    lists: dict[str, Path] = {}
    for split in ("train", "val", "test"):
        for path in (folder / f"{split}.txt", folder / f"{folder.name}.{split}" / "record.txt"):
            if path.is_file():
                lists.setdefault(split, path)
    return open_lists(str(folder), folder, lists)


# ImageNet and the datasets derived from it. `train/WORDNET-ID/*.JPEG`; `val/` likewise, or flat with the development
# kit's ground truth. The classes are always the 1000 WordNet ids in the order of every published head, however many
# of them have images.

KIT = "ILSVRC2012_devkit_t12/data"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
FLAT = re.compile(r"ILSVRC2012_val_(\d{8})\.")


def open_imagenet(folder: Path) -> Dataset:
    """The splits `train` and `val`, if present."""
    entries = chain(class_entries(folder, folder / "train", "train", wordnet_label), val_entries(folder, "val"))
    return open_entries(str(folder), folder, entries, classes=imagenet_ids())


def wordnet_label(path: Path) -> str:
    """The WordNet id that a folder is named by; other folders are an error, not a class."""
    if path.name not in imagenet_ids():
        raise DataError("not the WordNet id of one of ImageNet's 1000 classes, such as n01440764", where=path)
    return path.name


def numbered_label(path: Path) -> str:
    """The class of a folder named 0 to 999, the indices of ImageNet's classes."""
    ids = imagenet_ids()
    if not path.name.isdecimal() or int(path.name) >= len(ids):
        raise DataError(f"expected folders called 0 to {len(ids) - 1}", where=path)
    return ids[int(path.name)]


def val_entries(folder: Path, split: str) -> Iterator[Entry]:
    """The validation images: in class folders, or flat as in the archive, labeled by the development kit."""
    if any((folder / "val").glob("n[0-9]*/")):
        yield from class_entries(folder, folder / "val", split, wordnet_label)
    elif (folder / "val").is_dir():
        truth = ground_truth(folder / KIT)
        for path in sorted((folder / "val").iterdir()):
            match = FLAT.match(path.name)
            if match is None:
                continue
            image = int(match.group(1))
            if not 1 <= image <= len(truth):
                raise DataError(f"the ground truth has labels for images 1 to {len(truth)} only", where=path)
            yield Entry(split, f"val/{path.name}", truth[image - 1])


def ground_truth(kit: Path) -> list[str]:
    """The WordNet id of each validation image; the kit numbers the classes in another order."""
    if not (kit / GROUND_TRUTH).is_file() or not (kit / "meta.mat").is_file():
        reason = f"the images are in one folder, so {kit / GROUND_TRUTH} and {kit / 'meta.mat'} are needed"
        hint = "or sort them into val/WORDNET-ID/"
        raise DataError(f"{reason} (ILSVRC2012_devkit_t12.tar.gz)", where=kit.parent.parent / "val", hint=hint)
    with parsing(kit, DataError, reason="not the development kit of ILSVRC 2012", hint="download it again"):
        synsets = read_matlab(kit / "meta.mat")["synsets"]
        ids = {int(np.ravel(row["ILSVRC2012_ID"])[0]): str(row["WNID"]) for row in synsets}
        return [ids[int(line)] for line in (kit / GROUND_TRUTH).read_text().split()]


FONT = "fonts/SourceHanSerifSC-ExtraLight.otf"
FONT_PIXELS = 36
WATERMARK = "捷径捷径捷径"  # the watermark of ImageNet-W: "shortcut" three times, as the release draws it
OPACITY = 0.5
LEFT, TOP = 0.01, 0.4  # position of the watermark, relative to the size of the image
RELEASE_PREPROCESS = Preprocess(image_size=(224, 224), fit="crop", scaled_size=(256, 256))


def open_watermarked(folder: Path, imagenet: Path) -> Dataset:
    """ImageNet-W: the validation images of `imagenet` with a watermark; `folder` contains the font."""
    if not (imagenet / "val").is_dir():
        raise DataError("the validation images are missing, from which ImageNet-W is made", where=imagenet)
    source = partial(WatermarkedSource, font=str(folder / FONT))
    return open_entries(str(folder), imagenet, val_entries(imagenet, "test"), classes=imagenet_ids(), source=source)


class WatermarkedSource(FolderSource):
    """The images as in the release of ImageNet-W for a model of 224 pixels."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, root: Path, font: str) -> None:
        super().__init__(name, classes, folder, root=root)
        self.font = font

    def read(self, index: int) -> RawImage:
        """Resize the shorter side to 256, crop the center of 224, and draw the text in half-transparent white."""
        image = decode(self.root / self.key(index))
        scaled, box = geometry((image.height, image.width), RELEASE_PREPROCESS)
        cropped = resize(image, scaled, box, FILTERS["bilinear"]).convert("RGBA")
        overlay = Image.new("RGBA", cropped.size, (255, 255, 255, 0))
        position = (LEFT * cropped.width, TOP * cropped.height)
        fill = (255, 255, 255, round(OPACITY * 255))
        ImageDraw.Draw(overlay).text(position, WATERMARK, fill=fill, font=ImageFont.truetype(self.font, FONT_PIXELS))
        return np.asarray(Image.alpha_composite(cropped, overlay).convert("RGB"))


HEADER_BYTES = 128
MAX_BYTES = 2**28  # maximum size of a file, and of its decompressed variables
MATRIX, COMPRESSED = 14, 15  # types of data elements
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8", 16: "u1"}
"""Types of stored numbers; 16 is UTF-8 text."""

CELL, STRUCTURE, TEXT, NUMERIC = 1, 2, 4, range(6, 16)  # classes of arrays
Element = tuple[int, bytes]  # type and content of a data element


def read_matlab(path: Path) -> dict[str, Any]:
    """The variables of a file by name: arrays (rows, columns), texts, lists (cells) or lists of dictionaries."""
    content, variables, remaining = read_bytes(path, raises=DataError, most=MAX_BYTES), dict[str, Any](), MAX_BYTES
    if content[126:128] != b"IM":
        reason = "not a MATLAB file of level 5 (MATLAB 5 to 7, little-endian)"
        raise DataError(reason, where=path, hint="download it again")
    with parsing(path, DataError, reason="damaged MATLAB file", hint="download it again"):
        for kind, body in elements(content[HEADER_BYTES:]):
            if kind == COMPRESSED:
                decompressor = zlib.decompressobj()
                unpacked = decompressor.decompress(body, max(remaining, 1))
                if decompressor.unconsumed_tail:
                    raise ValueError("its variables are too large")
                kind, body = next(elements(unpacked))
            if kind != MATRIX:
                raise ValueError(f"a variable of type {kind}")
            remaining -= len(body)
            name, value = matrix(body)
            variables[name] = value
    return {name: value for name, value in variables.items() if name}


def elements(content: bytes) -> Iterator[Element]:
    """Consecutive data elements; each starts at a multiple of 8 bytes, except after a compressed one."""
    offset = 0
    while offset + 8 <= len(content):
        kind, size = struct.unpack_from("<II", content, offset)
        if kind >> 16:  # a small element: type and size share four bytes, the content has the other four
            kind, size = kind & 0xFFFF, kind >> 16
            yield kind, content[offset + 4 : offset + 4 + size]
            offset += 8
            continue
        body = content[offset + 8 : offset + 8 + size]
        if len(body) < size:
            raise ValueError("it is truncated")
        yield kind, body
        offset += 8 + size + (0 if kind == COMPRESSED else -size % 8)


def matrix(body: bytes) -> tuple[str, Any]:
    """Name and value of an array; structures are dictionaries from field to value."""
    if not body:
        return "", np.empty((0, 0))
    pieces = elements(body)
    flags = int(numbers(next(pieces))[0]) & 0xFF
    shape = tuple(int(side) for side in numbers(next(pieces)))
    name = next(pieces)[1].decode("latin-1")
    if flags == CELL:
        return name, [matrix(piece)[1] for _, piece in pieces]
    if flags == STRUCTURE:
        length, packed = int(numbers(next(pieces))[0]), next(pieces)[1]
        if not packed:
            return name, []
        fields = [packed[i : i + length].split(b"\0")[0].decode("latin-1") for i in range(0, len(packed), length)]
        count = int(np.prod(shape))
        return name, [{field: matrix(next(pieces)[1])[1] for field in fields} for _ in range(count)]
    if flags == TEXT:
        kind, text = next(pieces)
        return name, text.decode("utf-8") if kind in (1, 2, 16) else "".join(map(chr, numbers((kind, text))))
    if flags not in NUMERIC:
        raise ValueError(f"an array of class {flags}, which is not supported")
    return name, numbers(next(pieces)).reshape(shape, order="F")


def numbers(element: Element) -> np.ndarray[Any, np.dtype[Any]]:
    kind, body = element
    if kind not in NUMBERS:
        raise ValueError(f"numbers of type {kind}")
    return np.frombuffer(body, "<" + NUMBERS[kind])
