"""Single data sets as their authors release them: Flowers-102, Pets, ObjectNet, VizWiz, MAFW, OmniBenchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.data.decode import EXTENSIONS, decode
from vitruvian.data.sources.base import DataSet, LeftOut, RawImage
from vitruvian.data.sources.folder import FolderSource, identity, images
from vitruvian.data.sources.index import Entry
from vitruvian.data.sources.lists import in_order, listed, open_lists, read_list
from vitruvian.data.sources.matlab import read_matlab
from vitruvian.errors import DataError
from vitruvian.labels import imagenet_ids

FLOWER_SPLITS = {"trnid": "train", "valid": "train", "tstid": "test"}
"""The paper trains on the release's training and validation sets together."""

EMOTIONS = (
    "anger", "disgust", "fear", "happiness", "neutral", "sadness", "surprise", "contempt", "anxiety", "helplessness",
    "disappointment",
)  # fmt: skip


def open_flowers(folder: Path) -> DataSet:
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


def open_pets(folder: Path) -> DataSet:
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
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) < 2 or not words[1].isdecimal():
            raise DataError(f"{path}, line {number}: wanted a name and the number of its class, found {line!r}")
        found.append((words[0], int(words[1])))
    return found


def open_objectnet(folder: Path) -> DataSet:
    """`images/FOLDER/*.png`; the classes are the names of the folders, by which its `mappings` go."""

    def entries() -> Iterator[Entry]:
        for place in in_order((folder / "images").iterdir()):
            for path in images(place, LeftOut(), (identity(place),)):
                yield Entry("test", str(Path(path).relative_to(folder)), place.name)

    return listed(str(folder), folder, entries(), source=BorderedSource)


class BorderedSource(FolderSource):
    """Images whose border of one pixel is not part of them: ObjectNet marks them so against training on them."""

    def read(self, index: int) -> RawImage:
        return np.asarray(decode(self.root / self.key(index)))[1:-1, 1:-1]


def open_vizwiz(folder: Path) -> DataSet:
    """`images/*.jpg` and `annotations.json`: `categories` (id of ImageNet, name) and `images`.

    The public file lists names alone. One with labels has objects of `file_name` and `labels`, ids of ImageNet; the
    first that is a category counts. Classes are WordNet ids.
    """
    path = folder / "annotations.json"
    content = read_json(path)
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


def open_mafw(folder: Path, fold: int) -> DataSet:
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


def open_omni(folder: Path) -> DataSet:
    """One realm: `train.txt`, `val.txt`, `test.txt` as in meta_v2, or `REALM.train/record.txt` and so on."""
    lists: dict[str, Path] = {}
    for split in ("train", "val", "test"):
        for path in (folder / f"{split}.txt", folder / f"{folder.name}.{split}" / "record.txt"):
            if path.is_file():
                lists.setdefault(split, path)
    return open_lists(str(folder), folder, lists)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a JSON file that can be read ({error}); get it again") from error
