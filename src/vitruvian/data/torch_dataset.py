"""Datasets of other libraries: a map-style `torch.utils.data.Dataset`, or one of Hugging Face `datasets`.

An item is a pair (image, label, ...) or a dictionary with an image and a label. Several labels are a list of names or
indices, or an array of 0 and 1 for each class. The image is a PIL image, the bytes of a file, an array (rows, columns[,
channels]) or a tensor ([channels,] rows, columns); floats range from 0 to 1. The
loader seeds the global generators of Python, NumPy and PyTorch for each sample, so that random transforms inside a
dataset do not depend on workers or on resuming. Workers need a picklable dataset.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.data.decode import RawImage, decode
from vitruvian.data.names import split_name
from vitruvian.data.sources import Dataset, Source, make_dataset, read_file
from vitruvian.data.tables import IMAGE_COLUMNS, LABEL_COLUMNS, absent_labels, join_labels
from vitruvian.data.transform import seed_globally
from vitruvian.errors import DataError

IMAGE_KEYS, LABEL_KEYS = (*IMAGE_COLUMNS, "pixel_values"), (*LABEL_COLUMNS, "target")
Label = int | str | tuple[str, ...]  # a class, or the names of several
MAX_CLASSES = 2**31
LABEL_LISTS = ("targets", "labels", "_labels")  # attributes with all labels, in torchvision's datasets and others


class DatasetSource(Source):
    """The items of a map-style dataset as labeled images."""

    draws = True

    def __init__(self, dataset: Any, *, name: str) -> None:
        for method in ("__getitem__", "__len__"):
            if not hasattr(dataset, method):
                reason = f"a {type(dataset).__name__} without {method}; expected a map-style dataset"
                raise DataError(reason, where=name)
        self.name = name
        self.dataset = without_decoding(dataset)
        self._last: tuple[int, Label] = (-1, -1)
        self.classes = self.names = named_classes(dataset)
        if self._known is not None:
            first = self._known[:1]
        else:  # an item that draws leaves the caller's generators alone
            with seed_globally(np.random.default_rng(0)):
                first = [self._item(index)[1] for index in range(min(1, len(self)))]
        self.several = any(isinstance(label, tuple) for label in first)
        if self.several or not self.classes:
            labels = list(self._all_labels())
            if self.several or any(
                isinstance(label, str) for label in labels
            ):  # a list is one class until it is parsed
                self.classes = tuple(sorted({self._text(label) for label in labels}))
            else:  # all indices up to the largest
                self.classes = tuple(map(str, range(max((n for n in labels if isinstance(n, int)), default=0) + 1)))

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> RawImage:
        image, label = self._item(index)
        if self._known is not None and self._known[index] != label:
            reason = f"the label is {label}, but {self._known[index]} in the list of all labels"
            raise DataError(reason, where=self.key(index))
        self._last = (index, label)
        return raw_image(image, self.key(index))

    def label(self, index: int) -> int:
        if self._last[0] != index:
            if self._known is not None:
                return int(self._indices([self._known[index]])[0])
            self._last = (index, self._item(index)[1])
        return int(self._indices([self._last[1]])[0])

    @cached_property
    def _known(self) -> Sequence[Label] | None:
        return all_labels(self.dataset, self.names)

    @cached_property
    def _labels(self) -> NDArray[np.int32]:  # type: ignore[override]
        """All labels; if the dataset has no list of them, every item is read once."""
        return self._indices(self._all_labels())

    def _all_labels(self) -> Sequence[Label]:
        return [self._item(index)[1] for index in range(len(self))] if self._known is None else self._known

    def _item(self, index: int) -> tuple[Any, Label]:
        return image_and_label(self.dataset[index], self.names, self.key(index))

    def _text(self, label: Label) -> str:
        if isinstance(label, tuple) != self.several:
            reason = f"some images have a list of labels, others one label, such as {label!r:.40}"
            raise DataError(reason, where=self.name, hint="use a list for each")
        return join_labels(label, self.name) if isinstance(label, tuple) else str(label)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.classes)}

    def _indices(self, labels: Iterable[Label]) -> NDArray[np.int32]:
        index_of = self._index_of
        known = [
            label if isinstance(label, int) and not self.several else index_of.get(self._text(label), -1)
            for label in labels
        ]
        indices = np.array(known, np.int64)
        wrong = np.flatnonzero((indices < 0) | (indices >= len(self.classes)))
        if len(wrong):
            raise DataError(f"label {known[wrong[0]]}, but there are {len(self.classes)} classes", where=self.name)
        return indices.astype(np.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": (-1, -1)}


def open_datasets(data: object) -> Dataset:
    """The dataset in an object of another library, or in a mapping from splits to such objects."""
    parts = data if isinstance(data, Mapping) else {"train": data}
    if isinstance(data, str | bytes | int | float | type(None)) or not parts:
        hint = "pass a path, a name, a torch.utils.data.Dataset or a mapping of them"
        raise DataError(f"{data!r} is not a dataset", hint=hint)
    name = " and ".join(dict.fromkeys(type(part).__name__ for part in parts.values()))
    sources: dict[str, Source] = {}
    notes = []
    for split, part in parts.items():
        if has_features(part) and set(all_labels(part) or ()) == {-1}:
            notes.append(f"skipped the split {split}, whose labels are withheld (-1)")
            continue
        source = part if isinstance(part, Source) else DatasetSource(part, name=f"{name} ({split})")
        sources[split_name(str(split)) or str(split)] = source
    several = [source for source in sources.values() if isinstance(source, DatasetSource) and source.several]
    combined = tuple(sorted({text for source in several for text in source.classes}))
    notes += absent_labels(list(dict.fromkeys(name for source in several for name in source.names)), combined)
    for source in several:
        source.classes = combined
    # All splits have the same classes; if classes are only numbered, those of the split with the most.
    longest = max((source.classes for source in sources.values()), key=len, default=())
    for source in sources.values():
        if source.classes != longest[: len(source.classes)]:
            first = next(iter(sources.values()))
            reason = f"{source.name} and {first.name} have different classes"
            raise DataError(reason, hint="give them the same `classes`")
        source.classes = longest
    return make_dataset(name, sources, notes, target="multi" if several else "single")


def has_features(dataset: Any) -> bool:
    """Whether this is a dataset of Hugging Face, which describes its columns."""
    return isinstance(getattr(dataset, "features", None), Mapping)


def without_decoding(dataset: Any) -> Any:
    """A Hugging Face dataset that returns the bytes of image files, which we decode faster."""
    if not has_features(dataset) or getattr(dataset, "format", {}).get("type") is not None:
        return dataset
    for column, feature in dataset.features.items():
        if type(feature).__name__ == "Image":
            dataset = dataset.cast_column(column, type(feature)(decode=False))
    return dataset


def named_classes(dataset: Any) -> tuple[str, ...]:
    """The class names that a dataset states; empty if it has none."""
    is_described = has_features(dataset)
    names = getattr(label_feature(dataset)[1], "names", None) if is_described else getattr(dataset, "classes", None)
    if names is None:
        for part in (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())[:1]):
            names = None if part is None else named_classes(part)  # Subset, ConcatDataset
    return tuple(name if isinstance(name, str) else ", ".join(map(str, np.ravel(name))) for name in names or ())


def label_feature(dataset: Any) -> tuple[str | None, Any]:
    """The column of labels of a Hugging Face dataset, and its feature, or that inside a list."""
    features = {}
    for column, feature in dataset.features.items():
        item = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        features[column] = feature if item is None else item
    column = choose_key(features, LABEL_KEYS, "ClassLabel")
    return column, None if column is None else features[column]


def all_labels(dataset: Any, names: Sequence[str] = ()) -> Sequence[Label] | None:
    """All labels of a dataset if it stores them apart from the images, else None."""
    if has_features(dataset):
        column, _ = label_feature(dataset)
        return None if column is None else [plain_label(label, names) for label in dataset.with_format(None)[column]]
    inner, indices, parts = (getattr(dataset, name, None) for name in ("dataset", "indices", "datasets"))
    if inner is not None and indices is not None:  # torch.utils.data.Subset
        labels = all_labels(inner, names)
        return None if labels is None else [labels[int(index)] for index in indices]
    if parts is not None:  # torch.utils.data.ConcatDataset
        lists = [all_labels(part, names) for part in parts]
        return None if any(part is None for part in lists) else [label for part in lists for label in part or ()]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    targets = next((getattr(dataset, name) for name in LABEL_LISTS if hasattr(dataset, name)), None)
    if targets is None or len(targets) != len(dataset):
        return None
    try:
        return [plain_label(label, names) for label in targets]
    except DataError:  # targets of another kind, such as boxes
        return None


def choose_key(keys: Mapping[str, Any], usual: Sequence[str], kind: str = "") -> str | None:
    """The first usual key, or else the first feature of this kind."""
    declared = [key for key, value in keys.items() if type(value).__name__ == kind]
    return next((key for key in (*usual, *declared) if key in keys), None)


def image_and_label(item: Any, names: Sequence[str], where: str) -> tuple[Any, Label]:
    if isinstance(item, Mapping):
        keys = choose_key(item, IMAGE_KEYS), choose_key(item, LABEL_KEYS)
        if keys[0] is None or keys[1] is None:
            raise DataError(f"the keys are {', '.join(map(str, item))}; expected `image` and `label`", where=where)
        return item[keys[0]], plain_label(item[keys[1]], names, where)
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], plain_label(item[1], names, where)
    raise DataError(f"a {type(item).__name__}; expected (image, label) or a dictionary with both", where=where)


def plain_label(label: Any, names: Sequence[str], where: str = "label") -> Label:
    """A label in its plain form; indices in a list become names, or text if the classes have none."""
    if isinstance(label, str):
        return label
    if isinstance(label, list | tuple):
        texts = dict[str, None]()  # in their order, each once
        for part in [plain_label(part, names, where) for part in label]:
            if isinstance(part, tuple) or (isinstance(part, int) and not 0 <= part < (len(names) or MAX_CLASSES)):
                reason = f"{str(part)[:40]} in the list of labels is not one of the {len(names) or ''} classes"
                raise DataError(reason.replace("  ", " "), where=where)
            texts[part if isinstance(part, str) else names[part] if names else str(part)] = None
        return tuple(texts)
    values = np.ravel(label)
    if values.size > 1 and np.ndim(label) == 1 and np.isin(values, (0, 1)).all():
        if names and len(names) != len(values):
            raise DataError(f"{len(values)} values of 0 and 1, but {len(names)} classes", where=where)
        return plain_label(np.flatnonzero(values).tolist(), names, where)
    if values.size != 1 or values.dtype.kind not in "iub":
        reason = f"the label {str(label)[:40]!r} is not a class index or name, a list of them, or an array of 0 and 1"
        raise DataError(reason, where=where)
    return int(values[0])


def raw_image(image: Any, where: str) -> RawImage:
    """An image of any kind as the bytes of a file, or as uint8 (rows, columns[, 3])."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):  # Hugging Face with decode=False
        return bytes(image["bytes"])
    if isinstance(image, Mapping) and image.get("path"):
        return read_file(image["path"])
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("L") if image.mode in ("1", "L") else decode(image))
    values = np.asarray(image)
    if not isinstance(image, np.ndarray) and values.ndim == 3:  # a tensor: channels first
        values = values.transpose(1, 2, 0)
    if values.ndim not in (2, 3) or values.shape[2:] not in ((), (1,), (3,), (4,)) or not values.size:
        expected = "expected a PIL image, an array (rows, columns, 3) or a tensor (3, rows, columns)"
        raise DataError(f"{type(image).__name__} of shape {tuple(np.shape(image))}; {expected}", where=where)
    if values.dtype.kind == "f":
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):
            reason = f"values from {low:.3g} to {high:.3g}; expected floats from 0 to 1, or uint8"
            raise DataError(reason, where=where, hint="move Normalize from the dataset to the transform")
        values = np.rint(values * 255).astype(np.uint8)
    if values.dtype != np.uint8:
        raise DataError(f"values of type {values.dtype}; expected uint8, or floats from 0 to 1", where=where)
    if values.shape[2:] == (4,):
        return np.asarray(decode(Image.fromarray(values)))
    return np.ascontiguousarray(values[..., 0] if values.shape[2:] == (1,) else values)
