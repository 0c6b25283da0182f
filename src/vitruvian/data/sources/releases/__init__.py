"""A task by name: its dataset as its authors release it, and what to do where its images are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitruvian.data.decode import EXTENSIONS, RawImage, decode
from vitruvian.data.sources.base import Dataset, LeftOut
from vitruvian.data.sources.formats.cifar import cifar_folders, open_cifar
from vitruvian.data.sources.formats.folder import (
    FolderSource,
    class_folders,
    images,
    listed,
    open_lists,
    read_list,
)
from vitruvian.data.sources.index import Entry
from vitruvian.data.sources.releases.imagenet import open_imagenet, open_numbered, open_watermarked, open_wordnet
from vitruvian.data.sources.releases.matlab import read_matlab
from vitruvian.errors import DataError
from vitruvian.files import read_json, read_text
from vitruvian.labels import imagenet_ids
from vitruvian.tasks import TASKS, Task, data_root, how_to_get

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
        raise DataError(how_to_get(task, root))
    found = opened(task, task.place(root), root, folders)
    own = {split: source for split, source in found.splits.items() if split in task.splits}
    found = replace(found, name=task.name, splits=own or found.splits)
    return replace(found, notes=(*found.notes, *unlike_release(task, found)))


def opened(task: Task, folder: Path, root: Path, folders: Callable[[Path], Dataset]) -> Dataset:
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
        "watermark": lambda: open_watermarked(folder, TASKS["imagenet"].place(root)),
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
