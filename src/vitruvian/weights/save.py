"""Save a model to a file or folder, in any family that can express it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.errors import ConversionError, argument
from vitruvian.files import atomic_path, fingerprint, json_bytes
from vitruvian.model.build import Model
from vitruvian.model.lora import plain_state
from vitruvian.weights.checkpoint_files import Description, write_tensors
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.registry import check_writer, suffixes_of, writer
from vitruvian.weights.families.tables import Tensors
from vitruvian.weights.families.text_towers import TextWeights, read_text_tower, tokenizer_files, write_text


def save(model: Model, path: str | Path, family: str = "native", *, half: bool = False, text: bool = False) -> None:
    """Write a model in float32.

    Files of all families also contain our description of the model, which other libraries ignore, so that `load`
    restores the same model. A former file or folder at `path` is replaced when the new one is complete.

    Args:
        model: A model.
        path: A folder for native, huggingface and timm; a `.npz` file for google; a `.safetensors` or `.pth` file for
            timm and torchvision.
        family: native, google, timm, torchvision or huggingface.
        half: Store matrices and kernels in float16, which halves the size; `load` converts them to float32.
        text: Also write the text tower and tokenizer of the CLIP or SigLIP that the model was loaded from
            (huggingface only).

    Raises:
        ConversionError: The family cannot express the model, or the labels do not fit its head.
    """
    check_writer(family)
    destination = Path(path).expanduser()
    tower = read_text_tower(Path(model.meta.source)) if text and model.meta.source else None
    if text and tower is None:
        reason = "the weights that this model was loaded from have no text tower"
        raise ConversionError(f"{argument('text', True)}: {reason}")
    with atomic_path(check_destination(destination, family)) as new:
        write(model, new, family, half=half, text=tower)


FILE_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".ckpt", ".bin", ".onnx", ".pt2", ".h5")  # refused for a folder


def check_destination(path: Path, family: str) -> Path:
    """Return `path` if it is a valid name for this family's weights, else raise."""
    suffixes = suffixes_of(family)
    folders = not suffixes or family == "timm"
    if path.suffix in suffixes and not path.is_dir():
        return path
    if folders and not path.is_file() and path.suffix not in FILE_SUFFIXES:
        return path
    hint = f"`vit export SRC {path}` writes graphs" if path.suffix in (".onnx", ".pt2") else ""
    if not suffixes:
        raise ConversionError(f"{family} weights are a folder, not a file", where=path, hint=hint)
    or_folder = ", or a folder" if folders else ""
    raise ConversionError(f"{family} weights are a file with suffix {' or '.join(suffixes)}{or_folder}", where=path)


def write(
    model: Model, path: Path, family: str, *, half: bool = False, text: TextWeights | None = None, config: Any = None
) -> list[str]:
    """Write the weights to a new path, and `config` into their config.json; returns notes for other libraries."""
    labels, classes = model.meta.labels, model.config.num_classes
    if labels is not None and len(labels) != classes:
        raise ConversionError(f"the model has {classes} classes but {len(labels)} labels")
    description = Description.of(model)
    header = description.to_json()
    state = {name: tensor.detach().cpu().float() for name, tensor in plain_state(model).items()}
    outputs = len(state.get("head.weight", ()))
    if outputs != classes:
        reason = f"the head has {outputs} outputs, model.config has num_classes={classes}"
        raise ConversionError(reason, hint="build the model with its number of classes, or save its state_dict()")
    state = to_half(state) if half else state
    if text is not None and family != "huggingface":
        raise ConversionError(f"{family} cannot store a text tower; huggingface can")
    if family == "native":
        return write_folder(path, state, header, {"config.json": header | {"header": fingerprint(header)}})
    member = writer(family, model, path)
    if isinstance(model.config, ResNetConfig) and family not in ("google", "timm"):
        obstacles = [f"{family} has Vision Transformers only, this is a ResNet"]
    else:
        obstacles = member.obstacles(model.config)
    if obstacles:
        raise ConversionError(f"{family} cannot express this model: {'; '.join(obstacles)}")
    if isinstance(model.config, ViTConfig):
        state = member.write_positions(state, model.config)
    tensors = member.table.write(member.rename_parameters(state, model.config), model.config)
    tensors = member.from_table_names(tensors, model.config)
    stated = member.json_files(model.config, model.meta)
    if config:
        stated["config.json"] = {**config, **stated["config.json"]}
    if text is not None:
        added = write_text(member, model.config, stated, text)
        tensors |= to_half(added) if half else added
    if path.suffix in suffixes_of(family):
        notes = write_tensors(path, tensors, header, stated.get("config.json"))
    else:
        hashes = {name: fingerprint(content) for name, content in stated.items()}
        notes = write_folder(path, tensors, header | {"files": hashes}, stated)
        for file in tokenizer_files(text):
            shutil.copyfile(file, path / file.name)
    return [*notes, *reader_notes(member, description)]


def to_half(state: Tensors) -> Tensors:
    rounded = {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in state.items()}
    broken = next((name for name, tensor in rounded.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        reason = f"{argument('half', True)}: {broken!r} has values beyond float16's 65,504"
        raise ConversionError(reason, hint="save it in float32")
    return rounded


def write_folder(path: Path, tensors: Tensors, header: dict[str, Any], files: dict[str, Any]) -> list[str]:
    """Write weights with an embedded description, and the JSON files of their family."""
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(json_bytes(content))
    return write_tensors(path / "model.safetensors", tensors, header)


def reader_notes(member: Family[Any], description: Description) -> Iterator[str]:
    """Notes on what other libraries compute differently from these weights, since the file cannot state it."""
    config = description.config
    if isinstance(config, ResNetConfig):
        return
    reader = member.reader_config(config)
    assert isinstance(reader, ViTConfig)
    theirs, ours = reader.numerics, config.numerics
    if theirs.gelu != ours.gelu:
        yield f"{member.name}'s code computes GELU with {theirs.gelu}, this model with {ours.gelu}"
    if theirs.norm_eps != ours.norm_eps:
        yield f"{member.name}'s code has norms with eps {theirs.norm_eps}, this model with {ours.norm_eps}"
    if reader.stem != config.stem:
        yield f"{member.name}'s code standardizes the stem's convolutions with another epsilon"
    if member.expands_positions(config):
        yield f"{config.pos_embed} positions were expanded for a grid of {config.grid[0]}x{config.grid[1]}"
    elif config.pos_embed == "learned" and theirs.position_resize != ours.position_resize:
        yield (
            f"at other image sizes, {member.name}'s code resamples positions by {theirs.position_resize}, "
            f"this model by {ours.position_resize}"
        )
    if config.merges_tokens:
        yield "other libraries do not merge tokens"
    if description.meta.temperature != 1.0:
        yield f"other libraries do not divide the logits by this model's temperature {description.meta.temperature:.4g}"
    preprocess = description.meta.preprocess
    read = member.reader_preprocess(config, preprocess) if preprocess.stated else preprocess
    pairs = zip(read.to_json().items(), preprocess.to_json().values())
    changes = [f"{name} {theirs} (this model: {ours})" for (name, theirs), ours in pairs if theirs != ours]
    if changes:
        yield f"other libraries may preprocess differently: {', '.join(changes)}"
