"""Features on disk, found again by the content of model and image, in files that are whole or not there.

They lie in `features` of the cache folder ($VITRUVIAN_CACHE, else `~/.cache/vitruvian`), a folder for each model.
Past $VITRUVIAN_FEATURES_GB (8 unless told) the folders that were not used for longest go, never the one in use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray

from vitruvian.cache import cache_folder
from vitruvian.config import REGULARIZERS, Preprocess
from vitruvian.data.decode import RawImage
from vitruvian.errors import ConfigError, FileError
from vitruvian.files import atomic_open, short_hash
from vitruvian.inference import Encoder
from vitruvian.settings import Settings
from vitruvian.weights.checkpoint_files import tensors_digest

FORMAT = 3
"""Raised when features come out differently, so that older ones are not used."""
EARLIER_FORMAT = 2
EARLIER_FIELDS = (
    "image_size patch_size channels layers width mlp_width heads attention_width pool norm_after_pool class_token "
    "distillation registers positions rope class_position representation_size projection unit_features block "
    "attention norm patch_norm pre_norm final_norm qk_norm attention_norm mlp mlp_norm patch_bias qkv_bias "
    "dense_bias layer_scale mlp_scale pool_heads pool_mlp_width pool_prefix stem tome_r tome_thresholds numerics "
    "stages widths style kind temperature reference_grid offset columns_first half fit scaled_size floor_crop "
    "interpolation antialias mean std stated gelu norm_eps position_resize square_positions "
)
"""Settings in keys of that format, which had all that there were, with their defaults."""
ROWS_A_FILE = 512
"""So many features are written at a time; more are never lost by an interruption."""
KEY_BYTES = 16
HEADS = ("head.", "head_dist.")
"""Weights that only answer from features."""
WITHOUT_EFFECT = {"num_classes", *REGULARIZERS}
"""Settings that features do not depend on."""
GIGABYTE = 2**30
LIMIT = "VITRUVIAN_FEATURES_GB"

Features = NDArray[np.float32]


class FeatureStore:
    """The known features of one model, by the content of images."""

    def __init__(self, folder: Path | None, width: int) -> None:
        """In this folder; None keeps nothing."""
        self.folder = folder
        self.row = np.dtype([("key", "u1", (KEY_BYTES,)), ("checksum", "<u4"), ("features", "<f4", (width,))])
        self.damaged = 0
        """Features that were found and could not be used."""
        self._places: dict[bytes, tuple[np.memmap[Any, Any], int]] = {}
        self._new: list[tuple[bytes, Features]] = []
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
        except OSError:  # a cache that cannot be written saves no time, and nothing else changes
            self.folder = None
        for path in sorted(folder.glob("*.npy")):
            try:
                rows = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError):
                rows = np.empty(0)
            if rows.dtype != self.row or rows.ndim != 1:
                remove(path)
                continue
            keys = np.ascontiguousarray(rows["key"]).tobytes()
            for number in range(len(rows)):
                self._places[keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]] = rows, number

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: bytes) -> Features | None:
        """The features of an image; None where they are not known, or not as they were written: that file goes."""
        place = self._places.get(key)
        if place is None:
            return None
        rows, number = place
        row = rows[number]
        features = np.asarray(row["features"])
        if checksum(key, features) == row["checksum"]:
            return features
        self.damaged += 1
        del self._places[key]
        remove(Path(str(rows.filename)))
        return None

    def add(self, key: bytes, features: Features) -> None:
        self._new.append((key, features))

    def flush(self, *, full: bool = False) -> None:
        """Write new features to a file; with `full`, only if there are enough for one."""
        if full and len(self._new) < ROWS_A_FILE:
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
            except FileError:  # a full disk: go on without
                self.folder = None
        self._new.clear()


def checksum(key: bytes, features: Features) -> int:
    return zlib.crc32(features.astype("<f4", copy=False).tobytes(), zlib.crc32(key))


def features_folder() -> Path:
    return cache_folder() / "features"


def open_store(encoder: Encoder) -> FeatureStore:
    """The store of this model's features; makes room for it first. Nothing tells one callable view from another."""
    if not isinstance(encoder.preprocess, Preprocess):
        return FeatureStore(None, encoder.model.config.feature_width)
    folder = features_folder() / model_key(encoder)
    make_room(folder)
    return FeatureStore(folder, encoder.model.config.feature_width)


def model_key(encoder: Encoder) -> str:
    """Of all that changes features: weights below the head, settings, view, device, versions of what computes."""
    return model_keys(encoder)[0]


def model_keys(encoder: Encoder) -> tuple[str, str]:
    """The key of a model, and the one that earlier versions wrote for the same model.

    A setting that has its default value is not in the key, so that a new setting leaves it as it is.
    """
    model, view = encoder.model, encoder.preprocess
    assert isinstance(view, Preprocess)
    below = tensors_digest({n: tensor for n, tensor in model.state_dict().items() if not n.startswith(HEADS)})
    versions = [torch.__version__, PIL.__version__, torch.device(encoder.device).type]
    settings = [{key: value for key, value in changed(model.config).items() if key not in WITHOUT_EFFECT}]
    known = frozenset(EARLIER_FIELDS.split())
    earlier = [only(model.config.to_json(), known), only(view.to_json(), known - {"patch_size"})]  # views had none
    return (
        short_hash([below, type(model.config).__name__, *settings, changed(view), FORMAT, *versions]),
        short_hash([below, *earlier, EARLIER_FORMAT, *versions]),
    )


def changed(settings: Settings) -> dict[str, Any]:
    """The settings, also within settings, that have another value than their default, by name."""
    fields = ((field, getattr(settings, field.name)) for field in dataclasses.fields(settings))  # type: ignore[arg-type]
    return {
        field.name: changed(value) if isinstance(value, Settings) else value
        for field, value in sorted(fields, key=lambda pair: pair[0].name)
        if value != field.default
    }


def only(values: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The values with these names, also within values."""
    return {n: only(value, names) if isinstance(value, dict) else value for n, value in values.items() if n in names}


def image_key(image: RawImage) -> bytes:
    """Of an image's bytes, or of its pixels and their shape."""
    if isinstance(image, bytes):
        return hashlib.sha256(image).digest()[:KEY_BYTES]
    digest = hashlib.sha256(f"pixels {image.shape}".encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()[:KEY_BYTES]


def remove(path: Path) -> None:
    """Remove a file, unless that is not allowed or another process was faster."""
    with suppress(OSError):
        path.unlink()


def make_room(keep: Path) -> None:
    """Remove the folders not used for longest until the others fit; `keep` stays."""
    limit = limit_bytes()
    used: dict[Path, tuple[float, int]] = {}
    for path in features_folder().glob("*/"):
        with suppress(OSError):  # another process removes it at the same time
            used[path] = path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir())
    total = sum(size for _, size in used.values())
    for path, (_, size) in sorted(used.items(), key=lambda item: item[1]):
        if total > limit and path != keep:
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def limit_bytes() -> float:
    text = os.environ.get(LIMIT, "8")
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise ConfigError(f"{LIMIT}={text!r} is not a number of gigabytes")
    return gigabytes * GIGABYTE
