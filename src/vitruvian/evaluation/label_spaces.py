"""Which outputs of a model mean which classes of a dataset, determined by the names on both sides.

A dataset may have some of the model's classes (ImageNet-A, ImageNet-R), use other names (WordNet ids, labels, numbers),
or classes that stand for several outputs (ObjectNet). Only outputs that mean a class of the data compete, and a class
has the largest logit of its outputs. Files with ReaL labels, WordNet ids and ObjectNet's mappings are read here too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.catalog import imagenet_ids, imagenet_labels
from vitruvian.errors import DataError
from vitruvian.files import read_json, read_object, read_text

# B images, K outputs of the model, C classes of the data that the model knows

IMAGENET_21K = (21_841, 21_843)
"""Numbers of outputs of ImageNet-21k heads; the paper's releases have the larger one."""
SAME_NAMES = 0.9
"""Fraction of labels that must equal ImageNet's, in order, for a head of 1000 classes to count as ImageNet's."""


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """The mapping between the classes of a dataset and a model's outputs."""

    classes: tuple[str, ...]
    """(C) Display names of the evaluated classes."""
    outputs: tuple[tuple[int, ...], ...]
    """(C) The outputs that mean each class."""
    labels: NDArray[np.int64]
    """For each class of the dataset its index in `classes`, or -1 if no output means it."""
    total: int
    """K, the number of outputs."""
    about: str
    """How classes and outputs were matched."""
    imagenet: Mapping[int, int] = field(default_factory=dict)
    """ImageNet-1k index of each output that is one of its classes."""

    @property
    def competing(self) -> int:
        """Number of outputs that mean a class of the data."""
        return len({output for group in self.outputs for output in group})

    @property
    def has_imagenet(self) -> bool:
        return len(self.imagenet) == len(imagenet_ids())

    @cached_property
    def _table(self) -> Tensor:
        """(C, most outputs of a class), padded with the first output of each class."""
        most = max(map(len, self.outputs))
        return torch.tensor([[*group, *group[:1] * (most - len(group))] for group in self.outputs])

    def project(self, logits: Tensor) -> Tensor:  # (B, K) -> (B, C)
        """The largest logit among the outputs of each class."""
        table = self._table
        return logits[:, table[:, 0]] if table.shape[1] == 1 else logits[:, table].amax(dim=2)

    def right_among_all(self, logits: Tensor, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(B,) Whether the largest of all K outputs means the class of the label."""
        best = logits.numpy().argmax(axis=1).tolist()
        return np.array([output in self.outputs[label] for output, label in zip(best, labels.tolist())], bool)

    def imagenet_predictions(self, logits: Tensor) -> NDArray[np.int64]:
        """(B,) The best ImageNet-1k class, whatever classes the dataset has."""
        outputs = sorted(self.imagenet, key=lambda output: self.imagenet[output])
        numbers = np.array([self.imagenet[output] for output in outputs])
        return np.asarray(numbers[logits.numpy()[:, outputs].argmax(axis=1)])


@dataclass(frozen=True, slots=True)
class Naming:
    """A naming of the outputs of a model."""

    about: str
    outputs: Mapping[str, int]
    normalize: Callable[[str], str] = str
    """Makes a class name comparable with the names in `outputs`."""

    def match(self, classes: Sequence[str]) -> list[int | None]:
        return [self.outputs.get(self.normalize(name)) for name in classes]


def plain_name(name: str) -> str:
    """The first of several names ("tench, Tinca tinca"), in lower case and without underscores."""
    return re.sub(r"[_\s]+", " ", name.split(",")[0]).strip().casefold()


def plain_number(name: str) -> str:
    """`7` for `007`, and an empty string for anything but a number."""
    return str(int(name)) if name.isascii() and name.isdecimal() else ""


def namings(labels: Sequence[str] | None, total: int, ids: Sequence[str] | None) -> Iterator[Naming]:
    """The possible namings of the outputs, the most reliable first."""
    if labels is not None:
        yield Naming("the model's own labels", {label: i for i, label in enumerate(labels)})
    if ids is not None:
        outputs = {wordnet_id: i for i, wordnet_id in enumerate(ids)}
        yield Naming("WordNet ids", outputs)
        known = [(n, outputs[i]) for n, i in enumerate(imagenet_ids()) if i in outputs]
        yield Naming("ImageNet's names", {plain_name(imagenet_labels()[n]): output for n, output in known}, plain_name)
        yield Naming("ImageNet's class numbers", {str(n): output for n, output in known}, plain_number)
    if labels is not None:
        names = [plain_name(label) for label in labels]
        once = {name for name, count in Counter(names).items() if count == 1}
        yield Naming("the model's own labels", {name: i for i, name in enumerate(names) if name in once}, plain_name)
    elif ids is None and total not in IMAGENET_21K:  # numbers mean classes of ImageNet-1k there
        yield Naming("the numbers of the outputs", {str(i): i for i in range(total)}, plain_number)


def wordnet_ids_of(labels: Sequence[str] | None, total: int) -> tuple[str, ...] | None:
    """The WordNet ids of the outputs, if known from the labels or their number; else None."""
    if labels is not None and all(re.fullmatch(r"n\d{8}", label) for label in labels):
        return tuple(labels)
    if total != len(imagenet_ids()):
        return None
    if labels is None:
        return imagenet_ids()
    same = sum(plain_name(ours) == plain_name(theirs) for ours, theirs in zip(imagenet_labels(), labels))
    return imagenet_ids() if same >= SAME_NAMES * total else None


def label_space(
    classes: Sequence[str],
    *,
    labels: Sequence[str] | None,
    total: int,
    ids: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> LabelSpace:
    """Match the classes of a dataset with the outputs of a model by their names.

    Args:
        classes: Class names of the dataset.
        labels: The model's labels, if it has any.
        total: Number of outputs.
        ids: WordNet id of each output, if the labels do not tell.
        groups: ImageNet-1k indices of each class name, as `read_objectnet` returns them.

    Raises:
        DataError: The classes cannot be matched.
    """
    ids = wordnet_ids_of(labels, total) if ids is None else ids
    order = {wordnet_id: n for n, wordnet_id in enumerate(imagenet_ids())}
    imagenet = {output: order[i] for output, i in enumerate(ids or ()) if i in order}
    if groups is not None:
        return many_to_one(classes, groups, total=total, imagenet=imagenet)
    tried = [(naming, naming.match(classes)) for naming in namings(labels, total, ids)]
    for naming, matches in tried:
        outputs = [output for output in matches if output is not None]
        if len(outputs) == len(set(outputs)) == len(classes):
            return one_to_one(classes, outputs, total=total, about=naming.about, imagenet=imagenet, named=labels)
    if labels is None and ids is None and total == len(classes):
        about = "their order, as the model has no labels"
        return one_to_one(classes, range(total), total=total, about=about, imagenet=imagenet, named=None)
    raise match_error(classes, total, tried)


def one_to_one(
    classes: Sequence[str],
    outputs: Sequence[int],
    *,
    total: int,
    about: str,
    imagenet: Mapping[int, int],
    named: Sequence[str] | None,
) -> LabelSpace:
    """One output per class; classes that are numbers or ids are displayed by name if there is one."""
    bare = all(re.fullmatch(r"n?\d+", name) for name in classes)
    shown = list(classes)
    if bare and named is not None:
        shown = [named[output] for output in outputs]
    elif bare and all(output in imagenet for output in outputs):
        shown = [imagenet_labels()[imagenet[output]] for output in outputs]
    return LabelSpace(
        classes=tuple(shown),
        outputs=tuple((output,) for output in outputs),
        labels=np.arange(len(classes)),
        total=total,
        about=about,
        imagenet=imagenet,
    )


def many_to_one(
    classes: Sequence[str], groups: Mapping[str, Sequence[int]], *, total: int, imagenet: Mapping[int, int]
) -> LabelSpace:
    """Several outputs per class; classes without a group are left out."""
    output_of = {n: output for output, n in imagenet.items()}
    if len(output_of) < len(imagenet_ids()):
        raise DataError(
            f"a mapping to ImageNet-1k needs a model with its 1000 classes; this one has {len(output_of)} of them",
            hint="for a model of ImageNet-21k, pass the WordNet ids of its outputs",
        )
    known = [name for name in classes if groups.get(name)]
    if not known:
        raise DataError(f"the mapping has none of the {len(classes)} classes, such as {classes[0]!r}")
    positions = {name: i for i, name in enumerate(known)}
    return LabelSpace(
        classes=tuple(known),
        outputs=tuple(tuple(output_of[n] for n in groups[name]) for name in known),
        labels=np.array([positions.get(name, -1) for name in classes]),
        total=total,
        about=f"a mapping to ImageNet-1k, {len(known)} of {len(classes)} classes",
        imagenet=imagenet,
    )


def match_error(classes: Sequence[str], total: int, tried: Sequence[tuple[Naming, list[int | None]]]) -> DataError:
    """The error for classes and outputs that do not match."""
    if total in IMAGENET_21K:
        return DataError(
            f"the model's {total} outputs have no names",
            hint="pass a file with one WordNet id per line, in the order of the outputs (imagenet21k_wordnet_ids.txt "
            "of the releases, or timm's imagenet21k_goog_synsets.txt)",
        )
    naming, matches = min(tried, key=lambda pair: pair[1].count(None))
    unknown = [name for name, output in zip(classes, matches) if output is None]
    if not unknown:
        return DataError(f"two classes of the data are the same by {naming.about}", hint="merge them")
    some = ", ".join(map(repr, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
    return DataError(
        f"{len(unknown)} of {len(classes)} classes of the data are not among the model's {total}, such as {some} "
        f"(compared with {naming.about})",
        hint="train a head for them, or probe the model: vit probe",
    )


VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")
"""File names of ImageNet's validation images, which are numbered from 1."""
FOLDERS, CLASSES = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
NAMES, LINES = "imagenet_to_label_2012_v2", "pytorch_to_imagenet_2012_id.json"

RealLabels = list[list[int]]


def read_real(path: Path) -> RealLabels:
    """The ReaL labels (`real.json`): all classes in each of ImageNet's validation images, in order."""
    content = read_json(path, raises=DataError)
    is_valid = isinstance(content, list) and all(
        isinstance(image, list) and all(type(label) is int and 0 <= label < 1000 for label in image)
        for image in content
    )
    if not is_valid:
        raise DataError("not ReaL labels; expected a list of class indices (0 to 999) per image", where=path)
    labels: RealLabels = content
    return labels


def score_real(
    keys: Iterable[str], predictions: NDArray[np.int64], labels: RealLabels
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of the images that have ReaL labels, and whether the prediction for each is among them."""
    rows, right = [], []
    named = 0
    for row, key in enumerate(keys):
        match = VALIDATION_IMAGE.search(key)
        if match is None:
            continue
        named += 1
        image = int(match[1])
        if not 1 <= image <= len(labels):
            raise DataError(f"the ReaL labels end at image {len(labels)}", where=key)
        if labels[image - 1]:
            rows.append(row)
            right.append(int(predictions[row]) in labels[image - 1])
    if not rows:
        raise DataError(
            "no image has a ReaL label"
            if named
            else "no image is called ILSVRC2012_val_ and 8 digits, the names that ReaL labels refer to"
        )
    return np.array(rows), np.array(right)


def read_ids(path: Path, total: int) -> tuple[str, ...]:
    """WordNet ids, one per line, in the order of the outputs; the rest of each line is ignored."""
    lines = read_text(path, raises=DataError).split("\n")
    ids = [line.split()[0] for line in lines if line.strip()]
    invalid = next((name for name in ids if not re.fullmatch(r"n\d{8}", name)), None)
    if invalid is not None:
        raise DataError(f"{invalid!r} is not a WordNet id such as n01440764; expected one per line", where=path)
    if len(ids) != total:
        raise DataError(f"{len(ids)} WordNet ids, but the model has {total} outputs", where=path)
    return tuple(ids)


def read_objectnet(mappings: Path) -> dict[str, tuple[int, ...]]:
    """ImageNet-1k indices of ObjectNet's folders, without the folders that are none of its classes.

    ObjectNet's directory `mappings` has the labels of folders (`folder_to_objectnet_label.json`), the ImageNet names
    of 113 of them, separated by "; " (`objectnet_to_imagenet_1k.json`), these names one per line
    (`imagenet_to_label_2012_v2`), and the line of each class index (`pytorch_to_imagenet_2012_id.json`).
    """

    def table(name: str) -> dict[str, Any]:
        return read_object(mappings / name, raises=DataError)

    names = [line.strip() for line in read_text(mappings / NAMES, raises=DataError).splitlines()]
    try:
        indices = {names[line]: int(n) for n, line in table(LINES).items()}
        labels = {label: folder for folder, label in table(FOLDERS).items()}
        return {
            labels[label]: tuple(indices[name.strip()] for name in imagenet_names.split(";"))
            for label, imagenet_names in table(CLASSES).items()
        }
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{CLASSES}, {FOLDERS}, {NAMES} and {LINES} contradict each other at {error}",
            where=mappings,
            hint="use the directory 'mappings' as ObjectNet ships it",
        ) from error


def mappings_beside(data: str) -> Path | None:
    """The directory of ObjectNet's mappings next to its images, if `data` is ObjectNet."""
    folder = Path(data).expanduser()
    beside = folder.resolve().parent / "mappings"
    is_objectnet = folder.is_dir() and (beside / CLASSES).is_file() and (beside / FOLDERS).is_file()
    return beside if is_objectnet else None
