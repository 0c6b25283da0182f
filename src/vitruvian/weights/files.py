"""Reading raw tensors safely from npz, safetensors, PyTorch files and folders: data only, never code."""

from __future__ import annotations

import argparse
import pickle
import warnings
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitruvian.errors import CheckpointError, DamagedFileError
from vitruvian.files import parse_object, read_object

Format = Literal["npz", "safetensors", "torch"]

CARRIED = "vitruvian"
"""Key of the description that files we write carry, invisibly to other readers."""

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
"""What a folder is searched for, in this order."""

GRAPH_ENDINGS = (".onnx", ".xml", ".pt2")
"""Of exported graphs, which have no weights to load."""

SETTING_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json")

WRAPPERS = ("teacher", "model", "state_dict", "model_state_dict", "net", "model_ema", "state_dict_ema")
"""Entries under which training scripts keep the weights, first choice first (DINO evaluates its teacher)."""

MAX_EXPANSION, MAX_FREE_BYTES = 50, 2**30
"""An archive past the second may not unpack to more than the first times its size: weights hardly compress."""

MAX_WRAPPERS = 4
"""Wrappers inside one another; a dictionary may hold itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a file or folder holds, still under its own names; floating-point tensors are float32."""

    path: Path
    format: Format
    tensors: dict[str, Tensor]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The JSON files of a folder, by file name."""
    embedded: Any = None
    """The description inside a file that we wrote."""
    parsed: Any = None
    """The JSON files as the family parsed them."""
    wrapper: str = ""
    """The entry of a PyTorch file under which the tensors were."""
    beside: tuple[str, ...] = ()
    """Other entries of a PyTorch file, such as the optimizer's state."""


def read(path: Path) -> Checkpoint:
    """The tensors of a weights file, or of the weights in a folder with its JSON files."""
    if not path.exists():
        raise CheckpointError("no such file or folder", where=path)
    if path.suffix in GRAPH_ENDINGS:
        raise CheckpointError(
            "an exported graph, for predict, evaluate, serve and bench; this needs the weights", where=path
        )
    weights = path
    if path.is_dir():
        weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), path)
        if weights == path:
            graph = next((file for end in GRAPH_ENDINGS for file in sorted(path.glob(f"*{end}"))), None)
            if graph is not None:
                raise CheckpointError(
                    f"has no weights but an exported graph, for predict, evaluate, serve and bench: {graph}", where=path
                )
            raise CheckpointError(f"the folder has none of {', '.join(WEIGHT_FILES)}", where=path)
    beside = [weights.parent / name for name in SETTING_FILES] if weights.name in WEIGHT_FILES else []
    settings = {file.name: read_object(file, raises=CheckpointError) for file in beside if file.is_file()}
    prefer_processor(settings)
    checkpoint = read_shards(weights) if weights.suffix == ".json" else read_file(weights)
    if not checkpoint.tensors:
        raise CheckpointError("the file holds no tensors", where=weights)
    check_values(checkpoint.tensors, weights)
    tensors = {name: x.float() if x.is_floating_point() else x for name, x in checkpoint.tensors.items()}
    return replace(checkpoint, path=path, tensors=tensors, settings=settings)


def prefer_processor(settings: dict[str, dict[str, Any]]) -> None:
    """Puts the view of a processor for images and text, as transformers prefers it, in place of that for images."""
    of_images = settings.pop("processor_config.json", {}).get("image_processor")
    if isinstance(of_images, dict):
        settings["preprocessor_config.json"] = of_images


def read_file(path: Path) -> Checkpoint:
    """One file, by what it contains, whatever it is called."""
    readers = {"npz": read_npz, "safetensors": read_safetensors, "torch": read_torch}
    kind = sniff(path)
    try:
        return readers[kind](path)
    except CheckpointError:
        raise
    except Exception as error:  # a broken file makes the libraries below raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DamagedFileError(f"broken or truncated {kind} file: {reason}", where=path) from error


def sniff(path: Path) -> Format:
    """The format of a file from its first bytes."""
    if not path.is_file():
        raise CheckpointError("not a regular file", where=path)  # opening a pipe would wait for its writer
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=path) from error
    if not start:
        raise DamagedFileError("the file is empty", where=path)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError("a Git LFS pointer, not the weights; fetch them with `git lfs pull`", where=path)
    if start.startswith(b"PK"):
        return archive_format(path)
    if start[8:9] == b"{":
        return "safetensors"
    if start.startswith(b"\x80"):
        return "torch"
    raise DamagedFileError("not an npz, safetensors or PyTorch file", where=path)


def archive_format(path: Path) -> Format:
    """npz or PyTorch, for a ZIP archive of reasonable size."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise DamagedFileError(f"broken or truncated archive: {error}", where=path) from error
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(MAX_FREE_BYTES, MAX_EXPANSION * path.stat().st_size):
        raise CheckpointError(f"refused, the archive would unpack to {unpacked / 2**30:.1f} GiB", where=path)
    return "npz" if any(member.filename.endswith(".npy") for member in members) else "torch"


def read_npz(path: Path) -> Checkpoint:
    import numpy as np

    tensors: dict[str, Tensor] = {}
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            array = archive[name]
            if array.dtype == np.dtype("V2"):  # bfloat16, which numpy has no name for
                tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            elif array.dtype.kind in "biuf":
                tensors[name] = torch.from_numpy(np.ascontiguousarray(array))
            else:
                raise CheckpointError(f"{name!r} holds {array.dtype}, not numbers", where=path)
    with zipfile.ZipFile(path) as zipped:
        comment = zipped.comment
    ours = comment.startswith(b'{"' + CARRIED.encode())
    embedded = parse_object(comment, path, raises=CheckpointError).get(CARRIED) if ours else None
    return Checkpoint(path=path, format="npz", tensors=tensors, embedded=embedded)


def read_safetensors(path: Path) -> Checkpoint:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    embedded = parse_object(metadata[CARRIED], path, raises=CheckpointError) if CARRIED in metadata else None
    return Checkpoint(path=path, format="safetensors", tensors=tensors, embedded=embedded)


def read_torch(path: Path) -> Checkpoint:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():  # inert options
            warnings.simplefilter("ignore")  # torch's remarks on the file; what matters is an error
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error) and "Unsupported" not in str(error):
            raise
        raise CheckpointError(
            "refused, the file holds Python objects that would run code when opened; "
            "ask for its tensors alone (torch.save(model.state_dict(), ...)) or a safetensors copy",
            where=path,
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"holds a {type(content).__name__}, not a dictionary of tensors", where=path)
    wrapper, beside = "", list[str]()
    for _ in range(MAX_WRAPPERS):
        inner = next((key for key in WRAPPERS if isinstance(content.get(key), dict)), "")
        if not inner:
            break
        wrapper = inner
        beside += [str(key) for key in content if key != wrapper]
        content = content[wrapper]
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"no tensors among its entries {', '.join(map(str, content)) or '(none)'}", where=path)
    beside += [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    embedded = getattr(content, "_metadata", {}).get(CARRIED)
    return Checkpoint(
        path=path,
        format="torch",
        tensors=tensors,
        embedded=parse_object(embedded, path, raises=CheckpointError) if isinstance(embedded, str) else None,
        wrapper=wrapper,
        beside=tuple(beside),
    )


def read_shards(index: Path) -> Checkpoint:
    """The tensors of all files that an index names; they must stand beside it."""
    names = read_object(index, raises=CheckpointError).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError("'weight_map' is missing", where=index)
    tensors: dict[str, Tensor] = {}
    kind: Format = "safetensors"
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name:
            raise CheckpointError(f"refused, {name!r} is not a file beside the index", where=index)
        if not (index.parent / name).is_file():
            raise CheckpointError(f"the part {name!r} is missing", where=index)
        shard = read_file(index.parent / name)
        tensors |= shard.tensors
        kind = shard.format
    absent = [name for name in names if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of its tensors are in none of the parts, such as {absent[0]!r}", where=index
        )
    return Checkpoint(path=index, format=kind, tensors=tensors)


def check_values(tensors: dict[str, Tensor], path: Path) -> None:
    """Refuse tensors without values of their own, and a few values repeated until they fill the memory."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(f"{name!r} is a {kind} tensor, not an array of numbers", where=path)
    unpacked = sum(4 * tensor.numel() for tensor in tensors.values())
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    if unpacked > max(MAX_FREE_BYTES, MAX_EXPANSION * sum(stored.values())):
        raise CheckpointError(f"refused, its tensors would take {unpacked / 2**30:.1f} GiB", where=path)
