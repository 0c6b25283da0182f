"""Tensors to one file in the format that its name asks for, with what the model carries beside them."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.files import digest
from vitruvian.weights.files import CARRIED

MAX_COMMENT_BYTES = 65_535
"""What a ZIP archive's comment can hold."""


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


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of a file, or of each weights and settings file in a folder, by name."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    if path.is_dir():
        files += sorted(path.glob("*config.json"))
    return {file.name: digest(file) for file in files}
