"""Datasets of other libraries: a map-style `torch.utils.data.Dataset`, or one of Hugging Face `datasets`.

An item is a pair (image, label, ...) or a dictionary with an image and a label. The image is a PIL image, the bytes of
a file, an array (rows, columns[, channels]) or a tensor ([channels,] rows, columns); floats range from 0 to 1. The
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
from vitruvian.errors import DataError

IMAGE_KEYS = ("image", "img", "jpg", "png", "pixel_values")
LABEL_KEYS = ("label", "labels", "fine_label", "cls", "class", "target")
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
        self._last: tuple[int, int | str] = (-1, -1)
        self.classes = named_classes(dataset)
        if not self.classes:  # the labels that occur if they are names, else all indices up to the largest
            labels = list(self._all_labels())
            if any(isinstance(label, str) for label in labels):
                self.classes = tuple(sorted({str(label) for label in labels}))
            else:
                self.classes = tuple(map(str, range(max(map(int, labels), default=0) + 1)))

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> RawImage:
        image, label = image_and_label(self.dataset[index], self.key(index))
        if self._known is not None and self._known[index] != label:
            reason = f"the label is {label}, but {self._known[index]} in the list of all labels"
            raise DataError(reason, where=self.key(index))
        self._last = (index, label)
        return raw_image(image, self.key(index))

    def label(self, index: int) -> int:
        if self._last[0] != index:
            if self._known is not None:
                return int(self._indices([self._known[index]])[0])
            self._last = (index, image_and_label(self.dataset[index], self.key(index))[1])
        return int(self._indices([self._last[1]])[0])

    @cached_property
    def _known(self) -> Sequence[int | str] | None:
        return all_labels(self.dataset)

    @cached_property
    def _labels(self) -> NDArray[np.int32]:  # type: ignore[override]
        """All labels; if the dataset has no list of them, every item is read once."""
        return self._indices(self._all_labels())

    def _all_labels(self) -> Sequence[int | str]:
        if self._known is not None:
            return self._known
        return [image_and_label(self.dataset[index], self.key(index))[1] for index in range(len(self))]

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.classes)}

    def _indices(self, labels: Iterable[int | str]) -> NDArray[np.int32]:
        known = [self._index_of.get(label, -1) if isinstance(label, str) else int(label) for label in labels]
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
    # All splits have the same classes; if classes are only numbered, those of the split with the most.
    longest = max((source.classes for source in sources.values()), key=len, default=())
    for source in sources.values():
        if source.classes != longest[: len(source.classes)]:
            first = next(iter(sources.values()))
            reason = f"{source.name} and {first.name} have different classes"
            raise DataError(reason, hint="give them the same `classes`")
        source.classes = longest
    return make_dataset(name, sources, notes)


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
    if has_features(dataset):
        features = dataset.features
        names = next((getattr(features[key], "names", None) for key in LABEL_KEYS if key in features), None)
        declared = [feature.names for feature in features.values() if type(feature).__name__ == "ClassLabel"]
        names = names or next(iter(declared), None)
    else:
        names = getattr(dataset, "classes", None)
    if names is None:
        for part in (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())[:1]):
            names = None if part is None else named_classes(part)  # Subset, ConcatDataset
    return tuple(name if isinstance(name, str) else ", ".join(map(str, np.ravel(name))) for name in names or ())


def all_labels(dataset: Any) -> Sequence[int | str] | None:
    """All labels of a dataset if it stores them apart from the images, else None."""
    if has_features(dataset):
        column = choose_key(dataset.features, LABEL_KEYS, "ClassLabel")
        return None if column is None else [plain_label(label) for label in dataset.with_format(None)[column]]
    inner, indices, parts = (getattr(dataset, name, None) for name in ("dataset", "indices", "datasets"))
    if inner is not None and indices is not None:  # torch.utils.data.Subset
        labels = all_labels(inner)
        return None if labels is None else [labels[int(index)] for index in indices]
    if parts is not None:  # torch.utils.data.ConcatDataset
        lists = [all_labels(part) for part in parts]
        return None if any(part is None for part in lists) else [label for part in lists for label in part or ()]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    targets = next((getattr(dataset, name) for name in LABEL_LISTS if hasattr(dataset, name)), None)
    if targets is None or len(targets) != len(dataset):
        return None
    try:
        return [plain_label(label) for label in targets]
    except DataError:  # targets of another kind, such as boxes
        return None


def choose_key(keys: Mapping[str, Any], usual: Sequence[str], kind: str = "") -> str | None:
    """The first usual key, or else the first feature of this kind."""
    declared = [key for key, value in keys.items() if type(value).__name__ == kind]
    return next((key for key in (*usual, *declared) if key in keys), None)


def image_and_label(item: Any, where: str) -> tuple[Any, int | str]:
    if isinstance(item, Mapping):
        keys = choose_key(item, IMAGE_KEYS), choose_key(item, LABEL_KEYS)
        if keys[0] is None or keys[1] is None:
            raise DataError(f"the keys are {', '.join(map(str, item))}; expected `image` and `label`", where=where)
        return item[keys[0]], plain_label(item[keys[1]], where)
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], plain_label(item[1], where)
    raise DataError(f"a {type(item).__name__}; expected (image, label) or a dictionary with both", where=where)


def plain_label(label: Any, where: str = "label") -> int | str:
    if isinstance(label, str):
        return label
    values = np.ravel(label)
    if values.size != 1 or values.dtype.kind not in "iub":
        raise DataError(f"the label {str(label)[:40]!r} is not a class index or name", where=where)
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
