"""A model from a file, a folder or a published name, in any family of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitruvian.config import ModelConfig, ModelMeta, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError, ConfigError, DamagedFileError, argument
from vitruvian.files import read_object
from vitruvian.model.build import Model, empty
from vitruvian.progress import print_status
from vitruvian.settings import Size
from vitruvian.text import plural
from vitruvian.weights import files
from vitruvian.weights.adapt import Changes, Head, adapt
from vitruvian.weights.description import Description
from vitruvian.weights.families.tables import Tensors
from vitruvian.weights.parse import LoadHints, parse_checkpoint

RUN_FILE = "run.json"
"""What tells the folder of a training run from other folders."""
SWEEP_FILE = "sweep.json"
"""What tells the folder of a fine-tuning."""


def load(
    source: str | Path,
    *,
    num_heads: int | None = None,
    image_size: int | Size | None = None,
    num_classes: int | None = None,
    patch_size: int | None = None,
    grid: Size | None = None,
    family: str | None = None,
    labels: Sequence[str] | None = None,
    head: Head = "keep",
    config: ModelConfig | str | None = None,
    preprocess: Preprocess | None = None,
) -> Model:
    """A model in evaluation mode from a weights file, a folder or a published name.

    The family is recognized from the names inside. `family` names it instead (native, google, big_vision, timm,
    torchvision, huggingface, open_clip, dino), and then a description that the file carries from an earlier conversion
    is not read. `heads`, `grid` (rows, columns of patches) and `preprocess` tell what a file cannot; what is assumed in
    their place is said once on stderr and in `model.meta.origin`. `image_size` (a side, or rows and columns) and
    `patch_size` resample positions and patch embedding in the family's own way. `classes` other than the file's, or
    `head="new"`, puts a single linear layer of zeros in place of the head and of a pre-logits layer before it;
    `classes=0` leaves the head out. `config` is the name of timm's architecture for a file that does not state it, or
    settings (or the name of a variant) for a state dict that `torch.save` wrote of our own model. What a file held that
    has no place in the model stands in `model.meta.origin`.
    """
    changes = Changes(image_size=image_size, patch_size=patch_size, num_classes=num_classes, head=head)
    path = locate(source)
    name = published_name(source)
    hints = LoadHints(
        num_heads=num_heads,
        grid=grid,
        image_size=changes.size,
        family=family,
        config=config,
        preprocess=preprocess,
        name=name,
    )
    return open_model(path, hints, changes, labels)[0]


def open_model(
    path: Path,
    hints: LoadHints,
    changes: Changes | Callable[[Description], Changes],
    labels: Sequence[str] | None = None,
) -> tuple[Model, str]:
    """A model from a path, and the name of its family; changes may depend on what is found there."""
    try:
        family, description, model, state = parse_checkpoint(files.read(path), hints)
        changes = changes(description) if callable(changes) else changes
        config, state = adapt(description.config, state, changes)
        if config != description.config:
            model = empty(config)
        meta = description.meta.replace(
            labels=fitting_labels(description, changes, num_classes=config.num_classes, given=labels), source=str(path)
        )
        if changes.head == "new" or config.num_classes != description.config.num_classes:
            meta = meta.for_new_head(meta.labels)
        if config.image_size != description.config.image_size:
            meta = meta.replace(cascade=None)  # its threshold was fitted to other logits
        if hints.preprocess is not None:
            meta = meta.replace(preprocess=hints.preprocess)
        elif changes.size or changes.patch_size:
            meta = meta.replace(preprocess=meta.preprocess.with_image_size(changes.size or config.image_size))
        return assemble(model, state, meta), family
    except (CheckpointError, ConfigError) as error:
        hint = ""
        if hints.name and isinstance(error, DamagedFileError):
            cached = path.parents[1] if path.is_dir() else path  # a repository's blobs stand beside its snapshots
            hint = f"remove {cached}, and the next use downloads it again"
        where = None if is_inside(path, error.where) else path
        raise error.replace(CheckpointError, where=where, hint=hint) from error


def is_inside(path: Path, where: object) -> bool:
    """Whether an error's `where` is this path or a file below it."""
    return where is not None and str(where).startswith(str(path))


def locate(source: str | Path) -> Path:
    """The path that a source means: itself, the model of a run or of a sweep's best trial, or of a published name."""
    if not str(source).strip():
        raise CheckpointError("the name of the weights is empty; give a file, a folder or a published name")
    path = Path(source).expanduser()
    if (path / RUN_FILE).is_file():
        return trained(path)
    if (path / SWEEP_FILE).is_file():
        return trained(best_trial(path))
    if path.exists():
        return path
    if isinstance(source, Path) or path.is_absolute() or source.startswith((".", "~")):
        raise CheckpointError("no such file or folder", where=path)
    from vitruvian.weights import hub

    return hub.resolve_source(source)


def run_facts(source: str | Path, data: str) -> tuple[Path, dict[str, Any]] | None:
    """The folder and run.json of the run whose model this is, where it learned from `data`, a path or a name."""
    path = Path(source).expanduser()
    folder = next((place for place in (path, path.parent) if (place / RUN_FILE).is_file()), None)
    if folder is None or not path.is_dir() or not data:
        return None
    facts = read_object(folder / RUN_FILE)
    return (folder, facts) if facts.get("data") in (data, str(Path(data).expanduser().resolve())) else None


def published_name(source: str | Path) -> str:
    """The name of published weights; empty for a path, which has its own."""
    return "" if Path(source).expanduser().exists() else str(source)


def trained(run: Path) -> Path:
    if (run / "model").is_dir():
        return run / "model"
    raise CheckpointError(f"this run has not finished; continue it with `vit train --resume {run}`", where=run)


def best_trial(sweep: Path) -> Path:
    """The run of a fine-tuning whose result is best; said on stderr."""
    record = read_object(sweep / SWEEP_FILE, raises=CheckpointError)
    metric = "mean_per_class" if record.get("metric") == "mean_per_class" else "top1"
    trials = record.get("trials")
    found = [t for t in trials if isinstance(t, dict)] if isinstance(trials, list) else []
    done = {str(t.get("folder")): t[metric] for t in found if t.get("kind") == "test" and t.get("state") == "done"}
    if not done:
        raise CheckpointError("no trial of this fine-tuning has finished; the same `vit finetune` goes on", where=sweep)
    best = max(done, key=done.__getitem__)
    print_status(f"note: {sweep} has {plural(len(done), 'finished trial')}; this is {best}, {done[best]:.2f}% right")
    return sweep / Path(best).name


def fitting_labels(
    description: Description, changes: Changes, *, num_classes: int, given: Sequence[str] | None
) -> tuple[str, ...] | None:
    """The caller's labels, or those of the file as long as its head is kept."""
    if given is not None:
        if len(given) != num_classes:
            raise CheckpointError(f"{len(given)} labels were given for a head of {num_classes} classes")
        return tuple(given)
    if description.meta.labels is None or changes.head == "new" or num_classes != description.config.num_classes:
        return None
    if len(description.meta.labels) != num_classes:
        raise CheckpointError(
            f"the file names {len(description.meta.labels)} labels for a head of {num_classes} classes",
            hint=f"pass {argument('labels')}",
        )
    return description.meta.labels


def check_finite(model: Model, where: object, *, raises: type[CheckpointError] = CheckpointError) -> None:
    """Refuse weights with which nothing can be converted or learned."""
    broken = next((name for name, value in model.state_dict().items() if not value.isfinite().all()), None)
    if broken is not None:
        raise raises(f"{broken!r} holds numbers that are not finite (NaN or infinity)", where=where)


def with_config(model: Model, config: ModelConfig) -> Model:
    """The same weights, ready to answer, under settings that change no array."""
    return assemble(empty(config), model.state_dict(), model.meta)


def with_merging(model: Model, r: int | Sequence[int] = 0, *, thresholds: Sequence[float] = ()) -> Model:
    """The same weights with token merging (ToMe): `r` tokens merge in each layer, or in each layer as many as it says.

    `thresholds` merge instead what is more alike than the layer's number. Without either, nothing merges. A cascade of
    the model is left out.
    """
    if not isinstance(model.config, ViTConfig):
        raise ConfigError(
            f"{argument('tome_r')} is for Vision Transformers with their weights; this model has no tokens to merge"
        )
    counts = r if isinstance(r, int) else tuple(r)
    merging = with_config(model, model.config.replace(tome_r=counts, tome_thresholds=tuple(thresholds)))
    merging.meta = model.meta.replace(cascade=None)  # its threshold was fitted to other logits
    return merging


def without_cascade(model: Model) -> Model:
    """The whole model alone, with the same weights."""
    if model.meta.cascade is None:
        return model
    plain = with_config(model, model.config)
    plain.meta = model.meta.replace(cascade=None)
    return plain


def assemble(model: Model, state: Tensors, meta: ModelMeta) -> Model:
    """Fill an empty model with its tensors and metadata, in evaluation mode."""
    model.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()}, strict=True, assign=True)
    model.meta = meta
    return model.eval()
