"""Which outputs of a model mean which classes of a dataset, told from the names on both sides.

A dataset may hold some of the model's classes (ImageNet-A, ImageNet-R), call them otherwise (WordNet ids, names,
numbers), or mean several outputs by one class (ObjectNet). Only outputs that mean a class of the data compete, and
the best of a class's outputs speaks for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.catalog import imagenet_ids, imagenet_labels
from vitruvian.errors import DataError

# B images, K outputs of the model, C classes of the data that the model knows

IMAGENET_21K = (21_841, 21_843)
"""Outputs of heads of ImageNet-21k; the paper's releases have the larger number."""
SAME_NAMES = 0.9
"""Share of ImageNet's names, each in its place, that tells its head from another one of 1000 classes."""


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """The classes of a dataset in terms of a model's outputs."""

    classes: tuple[str, ...]
    """(C) The classes that are evaluated, as reports call them."""
    outputs: tuple[tuple[int, ...], ...]
    """(C) The outputs that mean each of them."""
    labels: NDArray[np.int64]
    """For each class of the dataset its place in `classes`; -1 where no output means it."""
    total: int
    """K"""
    about: str
    """How classes and outputs were matched, in words."""
    imagenet: Mapping[int, int] = field(default_factory=dict)
    """Number in ImageNet-1k of each output that is one of its classes."""

    @property
    def competing(self) -> int:
        """Outputs that mean a class of the data."""
        return len({output for group in self.outputs for output in group})

    @property
    def has_imagenet(self) -> bool:
        return len(self.imagenet) == len(imagenet_ids())

    @cached_property
    def _table(self) -> Tensor:
        """(C, most outputs of a class), filled up with each class's first output."""
        most = max(map(len, self.outputs))
        return torch.tensor([[*group, *group[:1] * (most - len(group))] for group in self.outputs])

    def project(self, logits: Tensor) -> Tensor:  # (B, K) -> (B, C)
        """For each class the largest logit of its outputs."""
        table = self._table
        return logits[:, table[:, 0]] if table.shape[1] == 1 else logits[:, table].amax(dim=2)

    def right_among_all(self, logits: Tensor, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(B,) Whether the largest of all K outputs means the class of the label."""
        best = logits.numpy().argmax(axis=1).tolist()
        return np.array([output in self.outputs[label] for output, label in zip(best, labels.tolist())], bool)

    def imagenet_answers(self, logits: Tensor) -> NDArray[np.int64]:
        """(B,) The best class of ImageNet-1k, by its number, whatever classes the dataset has."""
        outputs = sorted(self.imagenet, key=lambda output: self.imagenet[output])
        numbers = np.array([self.imagenet[output] for output in outputs])
        return np.asarray(numbers[logits.numpy()[:, outputs].argmax(axis=1)])


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to call the outputs of a model."""

    about: str
    outputs: Mapping[str, int]
    normal: Callable[[str], str] = str
    """What makes a class's name comparable with the names in `outputs`."""

    def match(self, classes: Sequence[str]) -> list[int | None]:
        return [self.outputs.get(self.normal(name)) for name in classes]


def plain(name: str) -> str:
    """A name without regard to case and underscores, and only the first of several ("tench, Tinca tinca")."""
    return re.sub(r"[_\s]+", " ", name.split(",")[0]).strip().casefold()


def number(name: str) -> str:
    """`007` as `7`: numbers count by value, in whatever order folders are listed."""
    return str(int(name)) if name.isascii() and name.isdecimal() else ""


def spellings(labels: Sequence[str] | None, total: int, ids: Sequence[str] | None) -> Iterator[Spelling]:
    """The ways in which the outputs can be called, the surest first."""
    if labels is not None:
        yield Spelling("the model's own labels", {label: i for i, label in enumerate(labels)})
    if ids is not None:
        places = {word_net_id: i for i, word_net_id in enumerate(ids)}
        yield Spelling("WordNet ids", places)
        known = [(n, places[i]) for n, i in enumerate(imagenet_ids()) if i in places]
        yield Spelling("ImageNet's names", {plain(imagenet_labels()[n]): output for n, output in known}, plain)
        yield Spelling("ImageNet's class numbers", {str(n): output for n, output in known}, number)
    if labels is not None:
        names = [plain(label) for label in labels]
        once = {name for name, count in Counter(names).items() if count == 1}
        yield Spelling("the model's own labels", {name: i for i, name in enumerate(names) if name in once}, plain)
    elif ids is None and total not in IMAGENET_21K:  # whose users mean the numbers of ImageNet-1k
        yield Spelling("the numbers of the outputs", {str(i): i for i in range(total)}, number)


def word_net_ids(labels: Sequence[str] | None, total: int) -> tuple[str, ...] | None:
    """What a head's outputs are in WordNet, where its labels or its size tell."""
    if labels is not None and all(re.fullmatch(r"n\d{8}", label) for label in labels):
        return tuple(labels)
    if total != len(imagenet_ids()):
        return None
    if labels is None:
        return imagenet_ids()
    same = sum(plain(ours) == plain(theirs) for ours, theirs in zip(imagenet_labels(), labels))
    return imagenet_ids() if same >= SAME_NAMES * total else None


def label_space(
    classes: Sequence[str],
    *,
    labels: Sequence[str] | None,
    total: int,
    ids: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> LabelSpace:
    """The outputs that mean the classes of a dataset; DataError where they cannot be told.

    `labels` are the model's, of its `total` outputs. `ids` says what each output is in WordNet, where the labels do
    not. `groups` gives for the name of a class all its numbers in ImageNet-1k (`label_files.read_objectnet`).
    """
    ids = word_net_ids(labels, total) if ids is None else ids
    order = {word_net_id: n for n, word_net_id in enumerate(imagenet_ids())}
    imagenet = {output: order[i] for output, i in enumerate(ids or ()) if i in order}
    if groups is not None:
        return grouped(classes, groups, total=total, imagenet=imagenet)
    tried = [(spelling, spelling.match(classes)) for spelling in spellings(labels, total, ids)]
    for spelling, found in tried:
        outputs = [output for output in found if output is not None]
        if len(outputs) == len(set(outputs)) == len(classes):
            return one_to_one(classes, outputs, total=total, about=spelling.about, imagenet=imagenet, named=labels)
    if labels is None and ids is None and total == len(classes):
        about = "their order, as the model names no classes"
        return one_to_one(classes, range(total), total=total, about=about, imagenet=imagenet, named=None)
    raise DataError(unmatched(classes, total, tried))


def one_to_one(
    classes: Sequence[str],
    outputs: Sequence[int],
    *,
    total: int,
    about: str,
    imagenet: Mapping[int, int],
    named: Sequence[str] | None,
) -> LabelSpace:
    """Each class is one output; what is called by a number or an id is shown by its name where there is one."""
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


def grouped(
    classes: Sequence[str], groups: Mapping[str, Sequence[int]], *, total: int, imagenet: Mapping[int, int]
) -> LabelSpace:
    """Classes that mean several outputs each; a class without a group is left out."""
    place = {n: output for output, n in imagenet.items()}
    if len(place) < len(imagenet_ids()):
        raise DataError(
            f"a mapping to ImageNet-1k wants a model that has its 1000 classes, found {len(place)} of them in {total} "
            "outputs; for a model of ImageNet-21k pass the WordNet ids of its outputs"
        )
    known = [name for name in classes if groups.get(name)]
    if not known:
        raise DataError(f"the mapping knows none of the {len(classes)} classes, such as {classes[0]!r}")
    numbers = {name: i for i, name in enumerate(known)}
    return LabelSpace(
        classes=tuple(known),
        outputs=tuple(tuple(place[n] for n in groups[name]) for name in known),
        labels=np.array([numbers.get(name, -1) for name in classes]),
        total=total,
        about=f"a mapping to ImageNet-1k, {len(known)} of {len(classes)} classes",
        imagenet=imagenet,
    )


def unmatched(classes: Sequence[str], total: int, tried: Sequence[tuple[Spelling, list[int | None]]]) -> str:
    """Why classes and outputs do not fit together, and what to do."""
    if total in IMAGENET_21K:
        return (
            f"the model's {total} outputs have no names; pass a file with the WordNet id of each, one a line, in their "
            "order (imagenet21k_wordnet_ids.txt of the releases, or timm's imagenet21k_goog_synsets.txt)"
        )
    spelling, found = min(tried, key=lambda pair: pair[1].count(None))
    unknown = [name for name, output in zip(classes, found) if output is None]
    some = ", ".join(map(repr, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
    if not unknown:
        return f"two classes of the data are the same one by {spelling.about}; merge them"
    return (
        f"{len(unknown)} of {len(classes)} classes of the data are none of the model's {total}, such as {some} "
        f"(compared with {spelling.about}); train a head for them, or probe the model: vit probe"
    )
