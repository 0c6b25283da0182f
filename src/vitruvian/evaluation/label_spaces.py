"""Which outputs of a model mean which classes of a dataset, determined by the names on both sides.

A dataset may have some of the model's classes (ImageNet-A, ImageNet-R), use other names (WordNet ids, labels, numbers),
or classes that stand for several outputs (ObjectNet). Only outputs that mean a class of the data compete, and a class
has the largest logit of its outputs. `compute_logits` stores those of a whole dataset in a memory-mapped file, so that
datasets of any size can be evaluated. Files with ReaL labels, WordNet ids and ObjectNet's mappings are read here too.
"""

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

from vitruvian.cache import scratch_folder
from vitruvian.catalog import imagenet_ids, imagenet_labels
from vitruvian.config import ScoreFunction
from vitruvian.data.decode import Unreadable
from vitruvian.data.sources import Source
from vitruvian.errors import DataError, NotFiniteError
from vitruvian.evaluation.metrics import Measures, class_measures, score_logits
from vitruvian.files import read_json, read_object, read_text
from vitruvian.inference import NOT_FINITE, Classifier
from vitruvian.progress import Track, no_tracking
from vitruvian.text import printable

# B images of a batch, n readable images, K outputs of the model, C classes of the data that the model knows

PIECE = 1024  # rows of logits that are in memory at a time

IMAGENET_21K = (21_841, 21_843)  # numbers of outputs of ImageNet-21k heads; the paper's releases have the larger one
SAME_NAMES = 0.9  # fraction of labels that must equal ImageNet's, in order, for 1000 classes to count as ImageNet's


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """The mapping between the classes of a dataset and a model's outputs."""

    classes: tuple[str, ...]  # (C) display names of the evaluated classes
    outputs: tuple[tuple[int, ...], ...]  # (C) the outputs that mean each class
    labels: NDArray[np.int64]  # for each class of the dataset its index in `classes`, or -1 if no output means it
    total: int  # K, the number of outputs
    about: str  # how classes and outputs were matched
    imagenet: Mapping[int, int] = field(default_factory=dict)  # ImageNet-1k index of each output that has one
    is_mapped: bool = False  # by a mapping, as for ObjectNet, whose results are reported with all outputs competing

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

    def rank_among_all(self, logits: Tensor, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """(B,) Number of all K outputs before the best one that means the class; equal logits rank in their order."""
        outputs = self._table[torch.from_numpy(labels)].to(logits.device)  # (B, most outputs of a class)
        values, order = logits.gather(1, outputs)[:, :, None], torch.arange(logits.shape[1], device=logits.device)
        every = logits[:, None]
        before = (every > values) | ((every == values) & (order < outputs[:, :, None]))
        return np.asarray(before.sum(dim=2).amin(dim=1).cpu())

    def imagenet_predictions(self, logits: Tensor) -> NDArray[np.int64]:
        """(B,) The best ImageNet-1k class, whatever classes the dataset has."""
        outputs = sorted(self.imagenet, key=lambda output: self.imagenet[output])
        numbers = np.array([self.imagenet[output] for output in outputs])
        return np.asarray(numbers[logits.numpy()[:, outputs].argmax(axis=1)])


def plain_name(name: str) -> str:
    """The first of several names ("tench, Tinca tinca"), in lower case and without underscores."""
    return re.sub(r"[_\s]+", " ", name.split(",")[0]).strip().casefold()


def plain_number(name: str) -> str:
    """`7` for `007`, and an empty string for anything but a number."""
    return str(int(name)) if name.isascii() and name.isdecimal() else ""


Naming = tuple[str, Mapping[str, int], Callable[[str], str]]
"""A description, the output of each name, and a function that makes a class name comparable with these names."""


def namings(labels: Sequence[str] | None, total: int, ids: Sequence[str] | None) -> Iterator[Naming]:
    """The possible namings of the outputs, the most reliable first."""
    if labels is not None:
        yield "the model's own labels", {label: i for i, label in enumerate(labels)}, str
    if ids is not None:
        outputs = {wordnet_id: i for i, wordnet_id in enumerate(ids)}
        yield "WordNet ids", outputs, str
        known = [(n, outputs[i]) for n, i in enumerate(imagenet_ids()) if i in outputs]
        yield "ImageNet's names", {plain_name(imagenet_labels()[n]): output for n, output in known}, plain_name
        yield "ImageNet's class numbers", {str(n): output for n, output in known}, plain_number
    if labels is not None:
        names = [plain_name(label) for label in labels]
        once = {name for name, count in Counter(names).items() if count == 1}
        yield "the model's own labels", {name: i for i, name in enumerate(names) if name in once}, plain_name
    elif ids is None and total not in IMAGENET_21K:  # numbers mean classes of ImageNet-1k there
        yield "the numbers of the outputs", {str(i): i for i in range(total)}, plain_number


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
    known = list(classes)
    if groups is not None:
        output_of = {n: output for output, n in imagenet.items()}
        if len(output_of) < len(imagenet_ids()):
            raise DataError(
                f"a mapping to ImageNet-1k needs a model with its 1000 classes; this one has {len(output_of)} of them",
                hint="for a model of ImageNet-21k, pass the WordNet ids of its outputs",
            )
        known = [name for name in classes if groups.get(name)]
        if not known:
            raise DataError(f"the mapping has none of the {len(classes)} classes, such as {classes[0]!r}")
        shown, outputs = known, [tuple(output_of[n] for n in groups[name]) for name in known]
        about = f"a mapping to ImageNet-1k, {len(known)} of {len(classes)} classes"
    else:
        about, single = match_names(classes, labels, total, ids)
        shown, outputs = known, [(output,) for output in single]
        if all(re.fullmatch(r"n?\d+", name) for name in classes):  # displayed by name if there is one
            if labels is not None:
                shown = [labels[output] for output in single]
            elif all(output in imagenet for output in single):
                shown = [imagenet_labels()[imagenet[output]] for output in single]
    positions = {name: i for i, name in enumerate(known)}
    return LabelSpace(
        classes=tuple(shown),
        outputs=tuple(outputs),
        labels=np.array([positions.get(name, -1) for name in classes]),
        total=total,
        about=about,
        imagenet=imagenet,
        is_mapped=groups is not None,
    )


def match_names(
    classes: Sequence[str], labels: Sequence[str] | None, total: int, ids: Sequence[str] | None
) -> tuple[str, Sequence[int]]:
    """The first naming by which each class is another output, and the output of each class."""
    tried: list[tuple[str, list[int | None]]] = []
    for about, names, normalize in namings(labels, total, ids):
        matches = [names.get(normalize(name)) for name in classes]
        outputs = [output for output in matches if output is not None]
        if len(outputs) == len(set(outputs)) == len(classes):
            return about, outputs
        tried.append((about, matches))
    if labels is None and ids is None and total == len(classes):
        return "their order, as the model has no labels", range(total)
    if total in IMAGENET_21K:
        raise DataError(
            f"the model's {total} outputs have no names",
            hint="pass a file with one WordNet id per line, in the order of the outputs (imagenet21k_wordnet_ids.txt "
            "of the releases, or timm's imagenet21k_goog_synsets.txt)",
        )
    about, matches = min(tried, key=lambda pair: pair[1].count(None))
    unknown = [name for name, output in zip(classes, matches) if output is None]
    if not unknown:
        raise DataError(f"two classes of the data are the same by {about}", hint="merge them")
    some = ", ".join(map(repr, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
    hint = "train a head for them, or probe the model: vit probe"
    if labels is not None and all(name.isdecimal() for name in classes):
        hint = f"if these are numbers of classes, list the names in a file classes.txt beside the data; or {hint}"
    raise DataError(
        f"{len(unknown)} of {len(classes)} classes of the data are not among the model's {total}, such as {some} "
        f"(compared with {about})",
        hint=hint,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetLogits:
    """The logits of each readable image."""

    indices: NDArray[np.int64]  # (n,) indices of the images in the source
    labels: NDArray[np.int64]  # (n,) their classes in the label space
    logits: NDArray[np.float32]  # (n, C) not yet divided by a temperature
    rank_among_all: NDArray[np.int64]  # (n,) number of all outputs of the model before the best that means the class
    imagenet: NDArray[np.int64]  # (n,) the best class of ImageNet-1k; empty for models that do not have all of them
    unreadable: list[Unreadable]
    left_out: int  # number of images of classes that the label space does not have
    score_function: ScoreFunction  # how these logits become probabilities

    def __len__(self) -> int:
        return len(self.indices)

    def pieces(self, rows: NDArray[np.int64] | None = None) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Rows, all by default, with their logits in float64, PIECE at a time."""
        rows = np.arange(len(self)) if rows is None else rows
        for start in range(0, len(rows), PIECE):
            part = rows[start : start + PIECE]
            yield part, torch.from_numpy(self.logits[part]).double()

    def measures(self, temperature: float = 1.0, rows: NDArray[np.int64] | None = None) -> Measures:
        """The metrics of these rows, all by default, at a temperature."""
        kind: Any = {"classes": self.logits.shape[1], "score_function": self.score_function}
        scored = []
        for part, logits in self.pieces(rows):
            truth, indices = torch.from_numpy(self.labels[part]), torch.from_numpy(self.indices[part])
            scored.append(score_logits(logits / temperature, truth, indices, **kind))
        return class_measures([torch.cat(column) for column in zip(*scored)], **kind)


def compute_logits(
    classifier: Classifier, source: Source, space: LabelSpace, *, batch_size: int, track: Track = no_tracking
) -> DatasetLogits:
    """Run the model on every image of a source whose class is in the label space.

    Raises:
        DataError: No image has a known class, or too many images cannot be read.
        NotFiniteError: The model produced NaN or infinite outputs.
    """
    labels = space.labels[np.asarray(source.labels())]
    known = np.flatnonzero(labels >= 0)
    if not len(known):
        raise DataError("no image has a class that the model knows", where=source.name)
    stored = np.memmap(scratch_folder() / "logits.f32", np.float32, "w+", shape=(len(known), len(space.classes)))
    unreadable: list[Unreadable] = []
    done: list[int] = []
    among_all: list[NDArray[np.int64]] = []
    imagenet: list[NDArray[np.int64]] = []
    for indices, logits in classifier.run_source(
        classifier.logits, source, known, unreadable=unreadable, batch_size=batch_size, track=track
    ):
        broken = (~logits.isfinite()).any(dim=1).nonzero()
        if len(broken):
            raise NotFiniteError(NOT_FINITE, where=printable(source.key(indices[int(broken[0])])))
        stored[len(done) : len(done) + len(indices)] = space.project(logits).numpy()
        among_all.append(space.rank_among_all(logits, labels[indices]))
        if space.has_imagenet:
            imagenet.append(space.imagenet_predictions(logits))
        done += indices
    return DatasetLogits(
        indices=np.array(done),
        labels=labels[done],
        logits=stored[: len(done)],
        rank_among_all=np.concatenate(among_all),
        imagenet=np.concatenate(imagenet) if imagenet else np.empty(0, np.int64),
        unreadable=unreadable,
        left_out=len(labels) - len(known),
        score_function=classifier.model.meta.score_function,
    )


VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")  # ImageNet's validation images, numbered from 1
FOLDERS, CLASSES = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
NAMES, LINES = "imagenet_to_label_2012_v2", "pytorch_to_imagenet_2012_id.json"

RealLabels = list[list[int]]


def read_real(path: Path) -> RealLabels:
    """The ReaL labels (`real.json`): all classes in each of ImageNet's validation images, in order."""
    labels: RealLabels = read_json(path, raises=DataError)
    if not isinstance(labels, list) or not all(
        isinstance(image, list) and all(type(label) is int and 0 <= label < 1000 for label in image) for image in labels
    ):
        raise DataError("not ReaL labels; expected a list of class indices (0 to 999) per image", where=path)
    return labels


def score_real(keys: Iterable[str], predictions: NDArray[np.int64], labels: RealLabels) -> NDArray[np.bool_]:
    """Whether the prediction for each image that has ReaL labels is among them."""
    right, named = [], 0
    for row, key in enumerate(keys):
        match = VALIDATION_IMAGE.search(key)
        if match is None:
            continue
        named += 1
        image = int(match[1])
        if not 1 <= image <= len(labels):
            raise DataError(f"the ReaL labels end at image {len(labels)}", where=key)
        if labels[image - 1]:
            right.append(int(predictions[row]) in labels[image - 1])
    if not right:
        raise DataError(
            "no image has a ReaL label"
            if named
            else "no image is called ILSVRC2012_val_ and 8 digits, the names that ReaL labels refer to"
        )
    return np.array(right)


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
    names = [line.strip() for line in read_text(mappings / NAMES, raises=DataError).splitlines()]
    lines, folders, classes = (read_object(mappings / name, raises=DataError) for name in (LINES, FOLDERS, CLASSES))
    try:
        indices = {names[line]: int(n) for n, line in lines.items()}
        labels = {label: folder for folder, label in folders.items()}
        return {
            labels[label]: tuple(indices[name.strip()] for name in imagenet_names.split(";"))
            for label, imagenet_names in classes.items()
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
    return beside if folder.is_dir() and all((beside / name).is_file() for name in (CLASSES, FOLDERS)) else None
