"""Arrays into one file: npz, safetensors or PyTorch's format, with the description that they carry; and digests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vitruvian.files import digest
from vitruvian.weights.files import CARRIED

MAX_COMMENT_BYTES = 65_535
"""What a ZIP archive's comment can hold."""


def write_tensors(
    path: Path, tensors: dict[str, Tensor], carried: dict[str, Any], stated: dict[str, Any] | None = None
) -> list[str]:
    """Write one file in the format its name ends with; what could not be carried, in words.

    `stated` is what a folder's `config.json` would have: the header has it as text under that name.
    """
    own = {name: owned(tensor) for name, tensor in tensors.items()}
    header = {"config.json": json.dumps(stated)} if stated else {}
    if path.suffix == ".npz":
        return write_npz(path, own, carried)
    if path.suffix == ".safetensors":
        write_safetensors(path, own, {"format": "pt", CARRIED: json.dumps(carried)} | header)
    else:
        state = OrderedDict(own)
        # PyTorch keeps versions of modules here and asks only for those it has, so an entry more is not seen.
        state._metadata = OrderedDict({"": {"version": 1}, CARRIED: json.dumps(carried)} | header)  # type: ignore[attr-defined]
        with disk_errors(path):
            torch.save(state, path)
    return []


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The same bytes for the same content: safetensors writes metadata in an order that changes from run to run."""
    path.touch()
    mode = path.stat().st_mode
    with disk_errors(path):
        save_file(tensors, path, metadata=metadata)
    path.chmod(mode)  # safetensors makes files that only their owner can read
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | header
        ordered = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(ordered) <= length:
            file.seek(8)
            file.write(ordered.ljust(length))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the operating system refused, as the OSError that safetensors and PyTorch hide in errors of their own."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        number = re.search(r"os error (\d+)", str(error))
        if number:
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        with path.open("ab") as file:  # fails as the write before did
            file.write(bytes(2**20))
        raise


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


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of a file, or of each weights and settings file in a folder, by name."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    if path.is_dir():
        files += sorted(path.glob("*config.json"))
    return {file.name: digest(file) for file in files if file.is_file()}


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes and bytes."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
