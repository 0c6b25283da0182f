"""Save a model to a file or folder, in any family that can express it; convert weights, with a certificate."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.errors import ConversionError, argument
from vitruvian.files import atomic_path, fingerprint, json_bytes, write_json
from vitruvian.model.batching import eval_mode
from vitruvian.model.build import Model
from vitruvian.model.lora import plain_state
from vitruvian.settings import Record, Seed, Size, validate
from vitruvian.text import plural
from vitruvian.weights.checkpoint_files import Description, digests, write_tensors
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.registry import check_writer, suffixes_of, writer
from vitruvian.weights.families.tables import Tensors
from vitruvian.weights.families.text_towers import (
    TextWeights,
    read_text_tower,
    text_obstacles,
    tokenizer_files,
    write_text,
)
from vitruvian.weights.load import (
    Changes,
    check_finite,
    load,
    locate,
    open_model,
    published_name,
    with_adapter,
    with_config,
)
from vitruvian.weights.parse import LoadHints


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


TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2
"""Largest allowed difference, relative to the largest output if that is above 1: float32 sums in another order, and
weights rounded to the 11 bits of float16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate(Record):
    """Proof that converted weights, read back from disk, give the same outputs as their source."""

    source: str
    source_family: str
    destination: str
    destination_family: str
    largest_difference: float
    """Between the outputs of the source and of the re-read destination."""
    largest_output: float
    """Largest absolute output of the source."""
    compared: Literal["logits", "features"]
    """Features if there is no head, or a head of zeros that would hide every difference."""
    reader_difference: float
    """Largest difference if the destination runs with the numerics of its family's own code."""
    text_difference: float | None
    """Largest difference of text embeddings of random tokens; None if no text tower was written."""
    notes: tuple[str, ...]
    """Differences to the family's own code."""
    batch_shape: tuple[int, ...]
    seed: int
    source_sha256: dict[str, str]
    destination_sha256: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"{self.source_family} -> {self.destination_family}: largest difference {self.largest_difference:.2g} "
            f"among {self.compared} up to {self.largest_output:.3g} (batch {'x'.join(map(str, self.batch_shape))}, "
            f"seed {self.seed})",
        ]
        if self.text_difference is not None:
            lines.append(f"text tower: largest difference {self.text_difference:.2g} among embeddings of random tokens")
        if self.reader_difference > max(self.largest_difference, TOLERANCE * max(1.0, self.largest_output)):
            lines.append(f"{self.destination_family}'s own numerics differ by up to {self.reader_difference:.2g}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def check_other(destination: Path, source: Path) -> None:
    if destination.exists() and destination.samefile(source):
        raise ConversionError("the destination is the source itself", where=destination)


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str = "native",
    half: bool = False,
    labels: Sequence[str] | None = None,
    template: str | None = None,
    family: str | None = None,
    config: str | None = None,
    num_classes: int | None = None,
    num_heads: int | None = None,
    patch_size: int | None = None,
    image_size: int | Size | None = None,
    grid: Size | None = None,
    adapter: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Certificate:
    """Convert weights to another family and verify them: the result is re-read and compared on a random batch.

    The certificate is also written, as `certificate.json` into a folder or as `FILE.certificate.json` beside a file.
    If the re-read weights differ, nothing is written, and an existing destination is kept.

    Args:
        source: As in `load`, like all arguments that are not listed here.
        destination: Path of the converted weights.
        to: native, google, timm, torchvision or huggingface.
        labels: Give a CLIP or SigLIP a zero-shot head for these labels.
        template: Prompt template for `labels`.
        half: Store matrices in float16, as in `save`.
        adapter: Folder of a LoRA adapter to merge into the weights.
        seed: Random seed of the batch.
        progress: Called with a text at each step.

    Raises:
        ConversionError: The family cannot express the model, or the re-read weights differ.
    """
    check_writer(to)
    validate("seed", Seed, seed)
    report = progress or (lambda step: None)
    target, path = Path(destination).expanduser(), locate(source)
    check_other(target, path)
    report(f"reading {path}")
    changes = Changes(image_size=image_size, patch_size=patch_size, num_classes=num_classes)
    name = published_name(source)
    hints = LoadHints(num_heads=num_heads, grid=grid, image_size=changes.size, family=family, config=config, name=name)
    model, source_family = open_model(path, hints, changes if adapter is None else Changes())
    if adapter is not None:
        if changes != Changes(image_size=image_size):
            others = f"{argument('num_classes')} and {argument('patch_size')}"
            raise ConversionError(f"{others} cannot be combined with {argument('adapter')}")
        model = with_adapter(model, adapter, image_size=changes.size)
    if labels is not None:
        from vitruvian.weights.zero_shot import with_words

        report(f"embedding {plural(len(labels), 'label')}")
        model = with_words(model, labels, template)
    elif template is not None:
        raise ConversionError(f"{argument('template')} needs {argument('labels')}")
    check_finite(model, path, raises=ConversionError)
    source_sha256 = digests(path)
    with atomic_path(check_destination(target, to)) as new:
        report(f"writing {to} weights")
        text, text_notes = text_to_write(model, new, to)
        notes = [*write(model, new, to, half=half, text=text), *text_notes]
        notes += ["matrices were rounded to float16"] if half else []
        notes += [] if adapter is None else [f"with the LoRA adapter {adapter}"]
        report("comparing source and result")
        certificate = Certificate(
            source=str(source),
            source_family=source_family,
            destination=str(target),
            destination_family=to,
            **compare(model, load(new), family=to, path=new, seed=seed),
            text_difference=None if text is None else compare_texts(text, new, seed=seed),
            notes=tuple(notes),
            seed=seed,
            source_sha256=source_sha256,
            destination_sha256=digests(new),
        )
        tolerance = HALF_TOLERANCE if half else TOLERANCE
        limits = {
            "text embeddings": (certificate.text_difference or 0.0, tolerance),
            f"{to} weights": (certificate.largest_difference, tolerance * max(1.0, certificate.largest_output)),
        }
        for what, (difference, limit) in limits.items():
            if not difference <= limit:  # also refuses NaN
                reason = f"not written, the re-read {what} differ by {difference:.2g} where {limit:.2g} is allowed"
                raise ConversionError(reason, where=target, hint="please report this")
        is_folder = new.is_dir()
        if is_folder:
            (new / "certificate.json").write_bytes(json_bytes(certificate.to_json()))
    if not is_folder:
        write_json(target.with_name(f"{target.name}.certificate.json"), certificate.to_json())
    return certificate


def compare(model: Model, reread: Model, *, family: str, path: Path, seed: int) -> dict[str, Any]:
    """The certificate's numbers: compare both models, and the family's own numerics, on one random batch."""
    shape = (2, model.config.in_channels, *model.config.image_size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    blank = model.head is None or not model.head.weight.any()
    config = reread.config if family == "native" else writer(family, reread, path).reader_config(reread.config)
    models = [model, reread, reread if config == reread.config else with_config(reread, config)]
    with eval_mode(model), torch.no_grad():
        expected, actual, reader = (m.features(pixels) if blank else m(pixels) for m in models)
    return {
        "largest_difference": float((expected - actual).abs().max()),
        "largest_output": float(expected.abs().max()),
        "reader_difference": float((expected - reader).abs().max()),
        "compared": "features" if blank else "logits",
        "batch_shape": shape,
    }


def text_to_write(model: Model, path: Path, family: str) -> tuple[TextWeights | None, list[str]]:
    """The text tower of the source, or a note with the reason why it cannot be written."""
    if family != "huggingface" or model.head is not None or not model.meta.source:
        return None, []
    text = read_text_tower(Path(model.meta.source))
    if text is None:
        return None, []
    if reasons := list(text_obstacles(writer(family, model, path), model.config, text.tower.config)):
        return None, [f"the text tower was left out: {'; '.join(reasons)}"]
    note = "the source has no tokenizer files, which other libraries need for texts"
    return text, [] if tokenizer_files(text) else [note]


def compare_texts(text: TextWeights, path: Path, *, seed: int) -> float:
    """The largest difference of normalized embeddings of random tokens, by the tower and the one read back."""
    reread = read_text_tower(path)
    config = text.tower.config
    if reread is None or (reread.scale, reread.bias) != (text.scale, text.bias):
        return float("inf")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (2, config.context_length), generator=generator)
    tokens[:, -1] = min(config.eos, config.vocabulary - 1)
    with torch.no_grad():
        pair = [F.normalize(tower(tokens), dim=-1) for tower in (text.tower, reread.tower)]
    return float((pair[0] - pair[1]).abs().max())
