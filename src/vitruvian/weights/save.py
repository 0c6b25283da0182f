"""A model to a file or folder, in any family that can express it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitruvian.config import ModelConfig, Preprocess, ResNetConfig, ViTConfig
from vitruvian.errors import ConversionError, argument
from vitruvian.files import atomic_path, json_bytes
from vitruvian.model.build import Model
from vitruvian.weights.description import Description, fingerprint
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.registry import check_writer, suffixes_of, writer, writes_folders
from vitruvian.weights.families.tables import Tensors
from vitruvian.weights.families.text_towers import TextWeights, tokenizer_files, write_text
from vitruvian.weights.store import write_tensors


def save(model: Model, path: str | Path, family: str = "native", *, half: bool = False, text: bool = False) -> None:
    """Write a model as native, google, timm, torchvision or huggingface weights, in float32.

    With `half`, matrices and kernels are stored in float16, which halves the file; they are read as float32 again.
    native and huggingface are folders, google a `.npz`, timm a folder as on its hub or a `.safetensors` (or `.pth`),
    torchvision a `.pth` (or `.safetensors`). What was at `path` stays until the new is complete. Every file also
    carries our description of the model, which other readers do not see, so that `load` gives back the
    same numbers; a model that the family cannot express is a ConversionError. With `text`, the text tower of the
    weights that a CLIP or SigLIP was loaded from is written too, with its tokenizer's files (huggingface).
    """
    check_writer(family)
    destination = Path(path).expanduser()
    beside = text_beside(model) if text else None
    with atomic_path(check_destination(destination, family)) as new:
        write(model, new, family, half=half, text=beside)


def text_beside(model: Model) -> TextWeights:
    from vitruvian.weights.words import read_text_tower

    found = read_text_tower(Path(model.meta.source)) if model.meta.source else None
    if found is None:
        raise ConversionError(
            f"{argument('text', True)}: the weights that this model was loaded from have no text tower"
        )
    return found


ENDINGS = (".safetensors", ".npz", ".pth")
"""Of files, which no folder has."""


def check_destination(path: Path, family: str) -> Path:
    """`path`, if this family's weights can have that name."""
    suffixes, folders = suffixes_of(family), writes_folders(family)
    if path.suffix in suffixes and not path.is_dir():
        return path
    if folders and not path.is_file() and path.suffix not in ENDINGS:
        return path
    if not suffixes:
        raise ConversionError(f"{path}: {family} weights are a folder, give the name of a folder")
    as_folder = ", or a folder" if folders else ""
    raise ConversionError(f"{path}: {family} weights are a file that ends in {' or '.join(suffixes)}{as_folder}")


def write(model: Model, path: Path, family: str, *, half: bool = False, text: TextWeights | None = None) -> list[str]:
    """Write into a place that is not yet used; what other readers should know, in words."""
    description = Description.of(model)
    state = {name: tensor.detach().cpu().float() for name, tensor in model.state_dict().items()}
    state = halved(state) if half else state
    if text is not None and family != "huggingface":
        raise ConversionError(f"{family} cannot hold a text tower beside the image tower; huggingface can")
    if family == "native":
        write_native(path, state, description)
        return []
    member = writer(family, model, path)
    obstacles = list(member.obstacles(model.config))
    if obstacles:
        raise ConversionError(f"{family} cannot express this model: {'; '.join(obstacles)}")
    tensors = foreign_tensors(member, state, model.config)
    stated = member.json_files(model.config, model.meta.labels, model.meta.preprocess)
    if text is not None:
        added = write_text(member, model.config, stated, text)
        tensors |= halved(added) if half else added
    if path.suffix in suffixes_of(family):
        notes = write_tensors(path, tensors, description.to_json(), stated.get("config.json"))
    else:
        notes = write_folder(path, tensors, description, stated)
        for file in tokenizer_files(text):
            shutil.copyfile(file, path / file.name)
    return [*notes, *readers_notes(member, description)]


def halved(state: Tensors) -> Tensors:
    """Matrices and kernels in float16."""
    rounded = {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in state.items()}
    broken = next((name for name, tensor in rounded.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        raise ConversionError(
            f"{argument('half', True)}: {broken!r} holds numbers beyond float16's 65,504; save it in float32"
        )
    return rounded


def foreign_tensors(member: Family, state: Tensors, config: ModelConfig) -> Tensors:
    """A model's tensors under a family's names and in its layouts."""
    if isinstance(config, ViTConfig):
        state = member.write_positions(state, config)
    return member.from_table_names(member.table.write(member.rename_parameters(state, config), config), config)


def write_native(path: Path, state: Tensors, description: Description) -> None:
    path.mkdir()
    header = description.to_json()
    write_tensors(path / "model.safetensors", state, header)
    (path / "config.json").write_bytes(json_bytes(header | {"header": fingerprint(header)}))


def write_folder(path: Path, tensors: Tensors, description: Description, stated: dict[str, Any]) -> list[str]:
    """A folder with the JSON files that its family's own code reads."""
    path.mkdir()
    for name, content in stated.items():
        (path / name).write_bytes(json_bytes(content))
    marks = {name: fingerprint(content) for name, content in stated.items()}
    return write_tensors(path / "model.safetensors", tensors, description.to_json() | {"files": marks})


def readers_notes(member: Family, description: Description) -> Iterator[str]:
    """What another reader of these weights would do differently, and cannot be told by the file."""
    config = description.config
    if isinstance(config, ResNetConfig):
        return
    own = member.reader_config(config)
    assert isinstance(own, ViTConfig)
    if own.numerics.gelu != config.numerics.gelu:
        yield f"{member.name}'s own code computes GELU with {own.numerics.gelu}, this model with {config.numerics.gelu}"
    if own.numerics.norm_eps != config.numerics.norm_eps:
        ours, theirs = config.numerics.norm_eps, own.numerics.norm_eps
        yield f"{member.name}'s own code norms with eps {theirs}, this model with {ours}"
    if own.stem != config.stem:
        yield f"{member.name}'s own code standardizes the stem's convolutions with another epsilon"
    if member.expands_positions(config):
        yield f"{config.pos_embed} positions were written out for a grid of {config.grid[0]}x{config.grid[1]}"
    elif config.pos_embed == "learned" and own.numerics.position_resize != config.numerics.position_resize:
        ways = f"by {own.numerics.position_resize}, this model by {config.numerics.position_resize}"
        yield f"at other image sizes, {member.name}'s own code resamples positions {ways}"
    if config.merges_tokens:
        yield "other readers do not merge tokens"
    if description.meta.temperature != 1.0:
        yield f"other readers do not divide the logits by this model's temperature, {description.meta.temperature:.4g}"
    view = description.meta.preprocess
    assumed = member.reader_preprocess(config, view) if view.stated else view
    if assumed != view:
        yield f"other readers may prepare images otherwise: {differences(assumed, view)}"


def differences(theirs: Preprocess, ours: Preprocess) -> str:
    """Where two views differ, as `fit squash (this model: crop), ...`."""
    pairs = zip(theirs.to_json().items(), ours.to_json().values())
    return ", ".join(f"{name} {value} (this model: {own})" for (name, value), own in pairs if value != own)
