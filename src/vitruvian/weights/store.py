"""Writing weights so that what was there before stays until the new is complete on the disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.errors import CheckpointError
from vitruvian.weights.files import CARRIED, WEIGHT_FILES

MAX_COMMENT_BYTES = 65_535
"""What a ZIP archive's comment can hold."""


@contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """A path of the same name in a temporary folder beside `destination`; the folder is gone afterwards.

    Write there, then `install`. Trouble with the disk becomes a CheckpointError.
    """
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".tmp", dir=destination.parent))
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error.strerror}") from error
    try:
        yield folder / destination.name
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(staged: Path, destination: Path) -> None:
    """Put a staged file or folder in its place; other files of an existing folder stay."""
    for path in [staged] if staged.is_file() else [*staged.iterdir(), staged]:
        sync(path)
    if staged.is_file() or not destination.exists():
        os.replace(staged, destination)
    else:
        for name in sorted(os.listdir(staged), key=lambda name: name not in WEIGHT_FILES):  # weights first
            os.replace(staged / name, destination / name)
        sync(destination)
    sync(destination.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no such call for folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: dict[str, Tensor], carried: dict[str, Any]) -> list[str]:
    """Write one file in the format its name ends with; what could not be carried, in words."""
    own = {name: owned(tensor) for name, tensor in tensors.items()}
    if path.suffix == ".npz":
        return write_npz(path, own, carried)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        path.touch()
        mode = path.stat().st_mode
        save_file(own, path, metadata={"format": "pt", CARRIED: json.dumps(carried)})
        path.chmod(mode)  # safetensors makes files that only their owner can read
    else:
        state = OrderedDict(own)
        # PyTorch keeps versions of modules here and asks only for those it has, so an entry more is not seen.
        state._metadata = OrderedDict({"": {"version": 1}, CARRIED: json.dumps(carried)})  # type: ignore[attr-defined]
        torch.save(state, path)
    return []


def owned(tensor: Tensor) -> Tensor:
    """The tensor with memory of its own: formats store a view's whole storage, or refuse it."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_npz(path: Path, tensors: dict[str, Tensor], carried: dict[str, Any]) -> list[str]:
    import numpy as np

    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    comment, notes = json.dumps({CARRIED: carried}).encode(), []
    if len(comment) > MAX_COMMENT_BYTES:
        comment = json.dumps({CARRIED: carried | {"labels": None}}).encode()
        notes.append(f"the {len(carried['labels'])} labels do not fit into an npz file and were left out")
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment
    return notes


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of a file, or of each weights and settings file in a folder, by name."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    if path.is_dir():
        files += sorted(path.glob("*config.json"))
    found = {}
    for file in files:
        with file.open("rb") as opened:
            found[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found
