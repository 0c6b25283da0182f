"""Features of a frozen model: stored on disk by the content of model and image, computed if absent."""

import dataclasses
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray

from vitruvian.cache import cache_folder
from vitruvian.config import DEFAULT_BATCH_SIZE, REGULARIZERS, Preprocess
from vitruvian.data.decode import RawImage, Unreadable
from vitruvian.data.sources import Source
from vitruvian.errors import ConfigError, FileError, ImageError, NotFiniteError
from vitruvian.evaluation.probe_classifiers import Examples
from vitruvian.files import atomic_open, short_hash
from vitruvian.inference import NOT_FINITE, Encoder, batched, check_readable, read_images
from vitruvian.model.lora import plain_state
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import BatchSize, Settings, validate
from vitruvian.targets import TargetTable
from vitruvian.weights.checkpoint_files import tensors_digest

FORMAT = 3  # version of the features; increment it to invalidate stored ones
ROWS_PER_FILE = 512  # features per file; at most this many are lost by an interruption
KEY_BYTES = 16
HEADS = ("head.", "head_dist.")  # prefixes of the weights of heads, which features do not depend on
WITHOUT_EFFECT = {"num_classes", *REGULARIZERS}  # settings that features do not depend on either
LIMIT = "VITRUVIAN_FEATURES_GB"

# n readable images, F features
Features = NDArray[np.float32]


class FeatureStore:
    """Features of one model on disk, by the content of the images.

    Each model has a directory in the cache directory `features`. If they exceed $VITRUVIAN_FEATURES_GB (8 by default),
    those that were not used for the longest time are deleted, but never the one in use.
    """

    def __init__(self, folder: Path | None, width: int) -> None:
        """Open the store in `folder`; with None, nothing is stored."""
        self.folder = folder
        self.row = np.dtype([("key", "u1", (KEY_BYTES,)), ("checksum", "<u4"), ("features", "<f4", (width,))])
        self.damaged = 0  # number of corrupt features
        self._rows: dict[bytes, tuple[np.memmap[Any, Any], int]] = {}
        self._new: list[tuple[bytes, Features]] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
        except OSError:  # without a writable cache, everything is computed
            self.folder = None
        for path in sorted(folder.glob("*.npy")):
            try:
                rows = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError):
                rows = np.empty(0)
            if rows.dtype != self.row or rows.ndim != 1:
                with suppress(OSError):  # not allowed, or another process was faster
                    path.unlink()
                continue
            keys = np.ascontiguousarray(rows["key"]).tobytes()
            for row in range(len(rows)):
                self._rows[keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]] = rows, row

    def find(self, key: bytes) -> Features | None:
        """The features of an image. None if absent or corrupt; a corrupt file is deleted."""
        if key not in self._rows:
            return None
        rows, position = self._rows[key]
        features = np.asarray(rows[position]["features"])
        if checksum(key, features) == rows[position]["checksum"]:
            return features
        self.damaged += 1
        del self._rows[key]
        with suppress(OSError):
            Path(str(rows.filename)).unlink()
        return None

    def add(self, key: bytes, features: Features) -> None:
        self._new.append((key, features))

    def flush(self, *, full: bool = False) -> None:
        """Write new features to a file; with `full`, only if there are enough for one."""
        if full and len(self._new) < ROWS_PER_FILE:
            return
        if self._new and self.folder is not None:
            rows = np.empty(len(self._new), self.row)
            rows["key"] = [np.frombuffer(key, np.uint8) for key, _ in self._new]
            rows["checksum"] = [checksum(*entry) for entry in self._new]
            rows["features"] = [features for _, features in self._new]
            name = hashlib.sha256(rows["key"].tobytes()).hexdigest()[:24]
            try:
                with atomic_open(self.folder / f"{name}.npy") as file:
                    np.save(file, rows)
            except FileError:  # the disk is full: continue without
                self.folder = None
        self._new.clear()


def checksum(key: bytes, features: Features) -> int:
    return zlib.crc32(features.astype("<f4", copy=False).tobytes(), zlib.crc32(key))


def open_store(encoder: Encoder) -> FeatureStore:
    """The store of this model's features; with a callable as preprocessing, nothing is stored."""
    folder = None
    if isinstance(encoder.preprocess, Preprocess):
        # other engines differ in the last bits, and training repeats to the bit what torch computed
        is_torch = encoder.engine.startswith("torch")
        engines = encoder.engine.removeprefix("torch").replace(":", "-") if is_torch else "-engines"
        folder = cache_folder() / "features" / f"{model_key(encoder)}{engines}"
        make_room(folder)
    return FeatureStore(folder, encoder.torch_model.config.feature_width)


def model_key(encoder: Encoder, device: str = "") -> str:
    """A hash of everything that features depend on: weights below the head, settings, device type and versions.

    Settings with their default values are left out, so that a new setting does not change the key. `device` replaces
    the type of the encoder's device.
    """
    model, preprocess = encoder.torch_model, encoder.preprocess
    assert isinstance(preprocess, Preprocess)
    below_head = {name: tensor for name, tensor in plain_state(model).items() if not name.startswith(HEADS)}
    config = {name: value for name, value in changed_settings(model.config).items() if name not in WITHOUT_EFFECT}
    versions = [torch.__version__, PIL.__version__, device or torch.device(encoder.device).type]
    parts = [tensors_digest(below_head), type(model.config).__name__, config, changed_settings(preprocess)]
    return short_hash([*parts, FORMAT, *versions])


def changed_settings(settings: Settings) -> dict[str, Any]:
    """The settings, nested ones included, that differ from their defaults, by name."""
    fields = ((field, getattr(settings, field.name)) for field in dataclasses.fields(settings))  # type: ignore[arg-type]
    return {
        field.name: changed_settings(value) if isinstance(value, Settings) else value
        for field, value in sorted(fields, key=lambda pair: pair[0].name)
        if value != field.default
    }


def image_key(image: RawImage) -> bytes:
    """A hash of the bytes of an image, or of its pixels and their shape."""
    if isinstance(image, bytes):
        return hashlib.sha256(image).digest()[:KEY_BYTES]
    digest = hashlib.sha256(f"pixels {image.shape}".encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()[:KEY_BYTES]


def make_room(keep: Path) -> None:
    """Delete the least recently used directories until the others fit the limit; `keep` stays."""
    text = os.environ.get(LIMIT, "8")
    try:
        limit = float(text) * 2**30
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ConfigError(f"{LIMIT}={text!r} is not a number of gigabytes")
    used: dict[Path, tuple[float, int]] = {}
    for path in keep.parent.glob("*/"):
        with suppress(OSError):  # another process removes it at the same time
            used[path] = path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir())
    total = sum(size for _, size in used.values())
    for path, (_, size) in sorted(used.items(), key=lambda item: item[1]):
        if total > limit and path != keep:
            shutil.rmtree(path, ignore_errors=True)
            total -= size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureSet:
    """The features of the readable images of a split."""

    values: Features  # (n, F)
    labels: NDArray[np.int64]  # (n,)
    classes: tuple[str, ...]
    unreadable: list[Unreadable]
    computed: int  # number of features that were not in the store
    targets: TargetTable | None = None  # if labels are rows of a table

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def examples(self) -> Examples:
        """Features, and labels (n,) or targets (n, K)."""
        return self.values, self.labels if self.targets is None else self.targets.rows(self.labels)


def compute_features(encoder: Encoder, source: Source, store: FeatureStore, **options: Any) -> FeatureSet:
    """The features of all readable images of a source, with the options of `feature_rows`."""
    values, unreadable, computed = feature_rows(encoder, source, store, **options)
    listed = [Unreadable(source.key(index), why) for index, why in unreadable.items()]
    check_readable(source.name, listed, len(source))
    readable = np.setdiff1d(np.arange(len(source)), list(unreadable))
    return FeatureSet(
        values=values[readable] if unreadable else values,
        labels=np.asarray(source.labels())[readable].astype(np.int64),
        classes=source.classes,
        unreadable=listed,
        computed=computed,
        targets=source.targets,
    )


def feature_rows(
    encoder: Encoder,
    source: Source,
    store: FeatureStore,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> tuple[Features, dict[int, str], int]:
    """One row of features per image, from the store or computed and added to it; NaN for an unreadable image.

    Also returns why images cannot be read, and how many features were computed.

    A batch has the images of consecutive indices that are neither stored nor unreadable. So batches, and with them the
    last bits of the features, do not depend on where an earlier call was interrupted.
    """
    validate("batch_size", BatchSize, batch_size)
    values = np.full((len(source), encoder.torch_model.config.feature_width), np.nan, np.float32)
    unreadable: dict[int, str] = {}
    keys: dict[int, bytes] = {}

    def missing(batch: list[tuple[int, RawImage | ImageError]]) -> Iterator[tuple[int, RawImage | ImageError]]:
        for index, image in batch:
            if not isinstance(image, ImageError):
                keys[index] = image_key(image)
                stored = store.find(keys[index])
                if stored is not None:
                    values[index] = stored
                    continue
            yield index, image

    images = track(read_images(source, np.arange(len(source))), len(source))
    batches = (list(missing(batch)) for batch in batched(images, batch_size))
    computed = 0
    try:
        for batch in encoder.run(encoder.features, encoder.load(batches, ahead=2 * batch_size), total=len(source)):
            unreadable |= {index: error.reason for index, error in batch.unreadable}
            for index, row in zip(batch.readable, batch.values.numpy()):
                if not np.isfinite(row).all():
                    raise NotFiniteError(NOT_FINITE, where=source.key(index))
                values[index] = row
                store.add(keys[index], row)
            store.flush(full=True)
            computed += len(batch.readable)
    finally:
        store.flush()
    return values, unreadable, computed
