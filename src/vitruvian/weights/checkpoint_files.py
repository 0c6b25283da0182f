"""Files of tensors: npz, safetensors, PyTorch and folders, read without running code, and written.

Files that we write also contain a description of the model as JSON. A native folder has `config.json` and
`model.safetensors`, whose header contains the description too. `config.json` has the header's fingerprint: while they
agree, `config.json` is used, so that users can edit labels; otherwise a save was interrupted between the two files, and
the header belongs to the weights.
"""

import argparse
import hashlib
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitruvian.config import MODEL_KINDS, ModelConfig, ModelMeta
from vitruvian.errors import CheckpointError, ConfigError, DamagedFileError
from vitruvian.files import check_pickle, digest, fingerprint, parse_object, read_object
from vitruvian.model.build import Model
from vitruvian.text import describe_error

if TYPE_CHECKING:
    import numpy as np

Format = Literal["npz", "safetensors", "torch"]

METADATA_KEY = "vitruvian"  # of the description that we embed in files; other libraries ignore it

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
"""Weights in a folder, in order of preference."""
GRAPH_ENDINGS = (".onnx", ".xml", ".pt2")  # suffixes of exported graphs, which have no weights to load
SETTING_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
"""Files of a tokenizer that a folder may contain."""
WRAPPERS = ("teacher", "model", "state_dict", "model_state_dict", "net", "model_ema", "state_dict_ema")
"""Entries under which training scripts store weights, in order of preference (DINO evaluates its teacher)."""
MAX_WRAPPERS = 4  # limit of nested wrappers; a dictionary may contain itself
MIN_MAPPED_BYTES = 2**16
MAX_EXPANSION, MAX_FREE_BYTES = 50, 2**28
"""Content larger than the second may be at most the first times the file's size: weights hardly compress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The content of a file or folder under its own names; floating-point tensors are float32."""

    path: Path
    format: Format
    tensors: dict[str, Tensor]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # the JSON files of a folder, by file name
    embedded: Any = None  # the description inside a file that we wrote
    wrapper: str = ""  # the entry of a PyTorch file that contains the tensors
    other_entries: tuple[str, ...] = ()  # other entries of a PyTorch file, such as the optimizer's state


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a weights file, or the weights and JSON files of a folder."""
    if not path.exists():
        raise CheckpointError("no such file or folder", where=path)
    if path.suffix in GRAPH_ENDINGS and not path.is_dir():
        reason = "an exported graph works with predict, evaluate, serve and bench; this needs the weights"
        raise CheckpointError(reason, where=path)
    weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), path)
    if weights.is_dir():
        reason = f"the folder contains none of {', '.join(WEIGHT_FILES)}"
        if (path / "adapter_config.json").is_file():
            reason = "a LoRA adapter, not a model; `vit predict --adapter` and vitruvian.load apply it to its base"
        if graph := next((file for end in GRAPH_ENDINGS for file in sorted(path.glob(f"*{end}"))), None):
            reason = f"has no weights, only a graph, which works with predict, evaluate, serve and bench: {graph}"
        raise CheckpointError(reason, where=path)
    json_files = [weights.parent / name for name in SETTING_FILES] if weights.name in WEIGHT_FILES else []
    settings = {file.name: read_object(file, raises=CheckpointError) for file in json_files if file.is_file()}
    prefer_processor(settings)
    checkpoint = read_shards(weights) if weights.suffix == ".json" else read_file(weights)
    if not checkpoint.tensors:
        raise CheckpointError("the file contains no tensors", where=weights)
    check_values(checkpoint.tensors, weights)
    tensors = {name: x.float() if x.is_floating_point() else x for name, x in checkpoint.tensors.items()}
    return replace(checkpoint, path=path, tensors=tensors, settings=settings)


def prefer_processor(settings: dict[str, dict[str, Any]]) -> None:
    """Replace the image preprocessor by that of a processor for images and text, as transformers does."""
    image_processor = settings.pop("processor_config.json", {}).get("image_processor")
    if isinstance(image_processor, dict):
        settings["preprocessor_config.json"] = image_processor


def read_file(path: Path) -> Checkpoint:
    """Read one file by its content, whatever its name."""
    readers = {"npz": read_npz, "safetensors": read_safetensors, "torch": read_torch}
    kind = sniff(path)
    try:
        return readers[kind](path)
    except CheckpointError:
        raise
    except Exception as error:  # a broken file can make the libraries raise anything
        raise DamagedFileError(f"broken or truncated {kind} file: {describe_error(error)}", where=path) from error


def sniff(path: Path) -> Format:
    """The format of a file from its first bytes; raises if an archive would unpack to an unreasonable size."""
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
        raise CheckpointError("a Git LFS pointer, not the weights", where=path, hint="fetch them with `git lfs pull`")
    if start.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise DamagedFileError(f"broken or truncated archive: {error}", where=path) from error
        unpacked = sum(member.file_size for member in members)
        if unpacked > max(MAX_FREE_BYTES, MAX_EXPANSION * path.stat().st_size):
            raise CheckpointError(f"the archive would unpack to {unpacked / 2**30:.1f} GiB", where=path)
        endings = {member.filename.rpartition(".")[2] for member in members}
        if not endings & {"npy", "pkl"}:
            raise DamagedFileError("a zip archive without weights", where=path, hint="unpack it and pass what is in it")
        return "npz" if "npy" in endings else "torch"
    if start[8:9] == b"{":
        return "safetensors"
    if start.startswith(b"\x80"):
        return "torch"
    raise DamagedFileError("not an npz, safetensors or PyTorch file", where=path)


def read_npz(path: Path) -> Checkpoint:
    import numpy as np

    tensors: dict[str, Tensor] = {}
    with np.load(path, allow_pickle=False) as archive, path.open("rb") as file:
        if damaged := archive.zip.testzip():  # mapped memory is not checked later
            raise DamagedFileError(f"{damaged!r} has another checksum than stated", where=path)
        members = {member.filename.removesuffix(".npy"): member for member in archive.zip.infolist()}
        for name in archive.files:
            array = map_array(file, members[name])
            array = archive[name] if array is None else array
            if array.dtype == np.dtype("V2"):  # bfloat16, which numpy does not know
                tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            elif array.dtype.kind in "biuf":
                tensors[name] = torch.from_numpy(np.ascontiguousarray(array))
            else:
                raise CheckpointError(f"{name!r} contains {array.dtype}, not numbers", where=path)
    with zipfile.ZipFile(path) as zipped:
        comment = zipped.comment
    is_ours = comment.startswith(b'{"' + METADATA_KEY.encode())
    embedded = parse_object(comment, path, raises=CheckpointError).get(METADATA_KEY) if is_ours else None
    return Checkpoint(path=path, format="npz", tensors=tensors, embedded=embedded)


def map_array(file: BinaryIO, member: zipfile.ZipInfo) -> "np.ndarray[Any, Any] | None":
    """Memory-map an array of an npz file, so that it takes memory only where it is read; None if it is compressed."""
    import numpy as np

    if member.compress_type != zipfile.ZIP_STORED or member.file_size < MIN_MAPPED_BYTES:
        return None
    file.seek(member.header_offset + 26)  # the lengths of the member's name and of its extra field
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    start = file.seek(name + extra, os.SEEK_CUR)
    has_short_header = np.lib.format.read_magic(file) == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if has_short_header else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    offset = file.tell()
    if dtype.hasobject or offset - start + math.prod(shape) * dtype.itemsize != member.file_size:
        return None  # numpy's own reader explains what is wrong
    return np.memmap(file, dtype, "c", offset, shape, "F" if is_fortran else "C")


def read_safetensors(path: Path) -> Checkpoint:
    import numpy as np

    with safe_open(path, framework="pt") as file, path.open("rb") as raw:  # the first checks the header
        metadata, length = file.metadata() or {}, int.from_bytes(raw.read(8), "little")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(raw.read(length))
    # a mapping for each large tensor: those of one mapping stay in memory until the last of them is dropped
    for name, tensor in tensors.items():
        begin, end = header[name]["data_offsets"]
        if end - begin < MIN_MAPPED_BYTES:
            tensors[name] = tensor.clone()
        else:
            mapped = torch.from_numpy(np.memmap(path, np.uint8, "c", 8 + length + begin, end - begin))
            tensors[name] = mapped.view(tensor.dtype).view(tensor.shape)
    embedded = parse_object(metadata[METADATA_KEY], path, raises=CheckpointError) if METADATA_KEY in metadata else None
    return Checkpoint(path=path, format="safetensors", tensors=tensors, embedded=embedded)


def read_torch(path: Path) -> Checkpoint:
    check_pickles(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():  # inert options
            warnings.simplefilter("ignore")  # torch's remarks; anything that matters is an error
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error) and "Unsupported" not in str(error):
            raise
        reason = "the file contains Python objects that would run code when opened"
        hint = "ask its author for torch.save(model.state_dict(), ...) or a safetensors file"
        raise CheckpointError(reason, where=path, hint=hint) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"contains a {type(content).__name__}, not a dictionary of tensors", where=path)
    wrapper, others = "", list[str]()
    for _ in range(MAX_WRAPPERS):
        inner = next((key for key in WRAPPERS if isinstance(content.get(key), dict)), "")
        if not inner:
            break
        wrapper = inner
        others += [str(key) for key in content if key != wrapper]
        content = content[wrapper]
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"no tensors among its entries {', '.join(map(str, content)) or '(none)'}", where=path)
    others += [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    embedded = getattr(content, "_metadata", {}).get(METADATA_KEY)
    return Checkpoint(
        path=path,
        format="torch",
        tensors=tensors,
        embedded=parse_object(embedded, path, raises=CheckpointError) if isinstance(embedded, str) else None,
        wrapper=wrapper,
        other_entries=tuple(others),
    )


def check_pickles(path: Path) -> None:
    """Raise if a pickle in a PyTorch file would exhaust the memory or the stack; old files begin with five of them."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    with archive.open(name) as member:
                        check_pickle(member, path, raises=CheckpointError)
        return
    with path.open("rb") as file:
        for _ in range(5):
            if file.tell() < path.stat().st_size:
                check_pickle(file, path, raises=CheckpointError)


def read_shards(index: Path) -> Checkpoint:
    """Read all files that an index lists; they must be in its directory."""
    names = read_object(index, raises=CheckpointError).get("weight_map")
    if not isinstance(names, dict) or not names:
        reason = "not an index of weights: 'weight_map' is missing"
        raise CheckpointError(reason, where=index, hint=f"pass the folder {index.parent}, or a file of weights")
    tensors: dict[str, Tensor] = {}
    kind: Format = "safetensors"
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name:
            raise CheckpointError(f"{name!r} is not a file in the directory of the index", where=index)
        if not (index.parent / name).is_file():
            raise CheckpointError(f"the part {name!r} is missing", where=index)
        shard = read_file(index.parent / name)
        tensors |= shard.tensors
        kind = shard.format
    if missing := [name for name in names if name not in tensors]:
        reason = f"{len(missing)} of its tensors are in none of the parts, such as {missing[0]!r}"
        raise CheckpointError(reason, where=index)
    return Checkpoint(path=index, format=kind, tensors=tensors)


def check_values(tensors: dict[str, Tensor], path: Path) -> None:
    """Raise for tensors without values, and for views that would expand a few values to fill the memory."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            kind = "nested" if tensor.is_nested else kind
            raise CheckpointError(f"{name!r} is a {kind} tensor, not an array of numbers", where=path)
    unpacked = sum(4 * tensor.numel() for tensor in tensors.values())
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    if unpacked > max(MAX_FREE_BYTES, MAX_EXPANSION * sum(stored.values())):
        reason = f"its tensors would expand to {unpacked / 2**30:.1f} GiB, far more than the file stores"
        raise CheckpointError(reason, where=path)


MAX_COMMENT_BYTES = 65_535  # limit of a ZIP archive's comment


def write_tensors(
    path: Path, tensors: dict[str, Tensor], description: dict[str, Any], config_json: dict[str, Any] | None = None
) -> list[str]:
    """Write one file in the format of its suffix, and return notes about what could not be written.

    Args:
        path: The file.
        tensors: Its content.
        description: Embedded in the file's metadata.
        config_json: Content of a folder's `config.json`, stored as text under that name in the metadata.
    """
    # the formats would write, or refuse to, the entire storage of a view
    arrays = {name: tensor.contiguous() for name, tensor in tensors.items()}
    arrays = {name: x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for name, x in arrays.items()}
    if path.suffix == ".npz":
        return write_npz(path, arrays, description)
    header = {METADATA_KEY: json.dumps(description)}
    header |= {"config.json": json.dumps(config_json)} if config_json else {}
    if path.suffix == ".safetensors":
        write_safetensors(path, arrays, {"format": "pt"} | header)
    else:
        state = OrderedDict(arrays)
        # PyTorch stores the versions of modules here and looks up only modules it has, so it ignores our entry
        state._metadata = OrderedDict({"": {"version": 1}, **header})  # type: ignore[attr-defined]
        with disk_errors(path):
            torch.save(state, path)
    return []


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file whose bytes depend on the content only; safetensors itself orders metadata randomly."""
    path.touch()
    mode = path.stat().st_mode
    with disk_errors(path):
        save_file(tensors, path, metadata=metadata)
    path.chmod(mode)  # safetensors makes files that only the owner can read
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
    """Raise the OSError that safetensors and PyTorch hide in other errors."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        code = re.search(r"os error (\d+)", str(error))
        if code:
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        with path.open("ab") as file:  # fails as the write before did
            file.write(bytes(2**20))
        raise


def write_npz(path: Path, tensors: dict[str, Tensor], description: dict[str, Any]) -> list[str]:
    import numpy as np

    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]
    comment, notes = json.dumps({METADATA_KEY: description}).encode(), []
    if len(comment) > MAX_COMMENT_BYTES:
        comment = json.dumps({METADATA_KEY: description | {"labels": None}}).encode()
        notes.append(f"the {len(description['labels'])} labels do not fit into an npz file and were left out")
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = comment
    return notes


def digests(path: Path) -> dict[str, str]:
    """SHA-256 by file name, of a file or of the weights and settings files in a folder."""
    patterns = ("*.safetensors", "*.bin", "*config.json")
    files = [path] if path.is_file() else [file for pattern in patterns for file in sorted(path.glob(pattern))]
    return {file.name: digest(file) for file in files if file.is_file()}


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and bytes."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


FORMAT = 1
"""Version of the JSON; later ones are refused."""
ANCHORS = ("embed.patch.weight", "root.weight")
"""Arrays of every native ViT, and of every native ResNet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """Saved architecture and metadata of a model."""

    config: ModelConfig
    meta: ModelMeta

    @classmethod
    def of(cls, model: Model) -> Self:
        return cls(config=model.config, meta=model.meta)

    def to_json(self) -> dict[str, Any]:
        kind = next(kind for kind, config in MODEL_KINDS.items() if isinstance(self.config, config))
        return {"format": FORMAT, "kind": kind, "architecture": self.config.to_json(), **self.meta.to_json()}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """Parse the output of `to_json`; an error names `where`."""
        if not isinstance(data, dict) or not isinstance(data.get("architecture"), dict):
            raise CheckpointError("not a description of a model: 'architecture' is missing", where=where)
        version, kind = data.get("format"), data.get("kind")
        if not isinstance(version, int) or version > FORMAT:
            reason = f"format {version!r} is not known, this version reads up to {FORMAT}"
            raise CheckpointError(reason, where=where, hint="upgrade vitruvian")
        if not isinstance(kind, str) or kind not in MODEL_KINDS:
            raise CheckpointError(f"kind {kind!r} is not one of {', '.join(MODEL_KINDS)}", where=where)
        saved = {field.name for field in fields(ModelMeta)} - {"source"}
        try:
            config: ModelConfig = MODEL_KINDS[kind].from_json(data["architecture"])
            meta = ModelMeta.from_json({name: value for name, value in data.items() if name in saved})
        except ConfigError as error:
            raise error.replace(CheckpointError, where=where) from error
        return cls(config=config, meta=meta)


def is_native(checkpoint: Checkpoint) -> bool:
    return checkpoint.format != "npz" and any(name in checkpoint.tensors for name in ANCHORS)


def describe_native(checkpoint: Checkpoint) -> Description | None:
    config, header = checkpoint.settings.get("config.json"), checkpoint.embedded
    if config is None and header is None:
        return None
    if config is None or (header is not None and config.get("header") != fingerprint(header)):
        return Description.from_json(header, "the header of model.safetensors")
    return Description.from_json(config, "config.json")
