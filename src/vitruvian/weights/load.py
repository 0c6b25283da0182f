"""Load a model from a file, a folder or a published name, in any family of weights, and adapt it on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from vitruvian.config import ModelConfig, ModelMeta, Preprocess, ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError, ConfigError, DamagedFileError, argument, nearest, parsing
from vitruvian.files import read_object
from vitruvian.model.build import Model, empty
from vitruvian.model.encoder import fixed_size_error
from vitruvian.model.lora import PARTS, lora_layers, plain_state, set_updates
from vitruvian.model.mae import MaskedAutoencoder
from vitruvian.model.positions import POSITION_TABLES, resize_bias_table, resize_tables
from vitruvian.model.vit import ViT, resize_patch_kernel
from vitruvian.progress import print_status
from vitruvian.settings import Size, as_size, validate_field
from vitruvian.targets import KINDS, LOWER_IS_BETTER
from vitruvian.text import plural
from vitruvian.weights.adapter import is_adapter, read_adapter
from vitruvian.weights.checkpoint_files import Description, read_checkpoint
from vitruvian.weights.families.huggingface import read_bool, read_int
from vitruvian.weights.families.tables import TABLES, Tensors, rename
from vitruvian.weights.parse import LoadHints, check_names, count_blocks, parse_checkpoint, shape_of

RUN_FILE, SWEEP_FILE = "run.json", "sweep.json"
"""Files that mark the folder of a training run, and that of a fine-tuning sweep."""
SOUP_FOLDER = "soup"  # of a sweep, with the average of its seeds' weights

Head = Literal["keep", "new"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Settings to change while loading; None keeps the file's."""

    image_size: int | Size | None = None
    patch_size: int | None = None
    num_classes: int | None = None
    head: Head = "keep"

    def __post_init__(self) -> None:
        if self.head not in ("keep", "new"):
            raise CheckpointError(f"{argument('head', self.head)} is not 'keep' or 'new'")
        for name in ("patch_size", "num_classes"):
            if getattr(self, name) is not None:
                validate_field(ViTConfig, name, getattr(self, name))

    @property
    def size(self) -> Size | None:
        return None if self.image_size is None else as_size(self.image_size)


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
    adapter: str | Path | None = None,
) -> Model:
    """Load a model in evaluation mode.

    Settings that a file does not state and the caller does not pass are assumed, with one warning; they, and arrays
    that the model does not need, are listed in `model.meta.origin`.

    Args:
        source: A weights file, a folder, a training run, or a published name.
        num_heads: Number of attention heads, if the file does not state it.
        image_size: Resample positions for this size (a side, or rows and columns), in the family's own way.
        num_classes: Another number than the file's replaces the head by a zero-initialized linear layer, without a
            pre-logits layer before it; 0 removes the head.
        patch_size: Resample the patch embedding for this size.
        grid: Rows and columns of patches, if the file does not state them.
        family: native, google, big_vision, timm, torchvision, huggingface, open_clip or dino; by default recognized by
            the names in the file. If given, a description that `save` embedded in the file is ignored.
        labels: Class names; by default those of the file.
        head: "new" replaces the head even if the number of classes is the same.
        config: Name of a timm architecture, for a file that does not state it; or settings or the name of a variant,
            for a `torch.save(model.state_dict(), ...)` of our own model.
        preprocess: Preprocessing, if the file does not state it or to replace it.
        adapter: Folder of a LoRA adapter (peft's format), whose updates are merged into the weights and whose head
            replaces theirs. If `source` is such a folder, its base is loaded.

    Raises:
        CheckpointError: The file cannot be read or does not fit.
        HubError: Published weights could not be downloaded.
    """
    changes = Changes(image_size=image_size, patch_size=patch_size, num_classes=num_classes, head=head)
    path = locate(source)
    if adapter is None and is_adapter(path):
        adapter, source = path, read_adapter(path).base
        if not source:
            raise CheckpointError("does not name its base", where=path, hint="load the base with adapter=")
        path = locate(source)
    if adapter is not None and (changes != Changes(image_size=image_size) or labels is not None):
        raise ConfigError("num_classes, patch_size, head and labels cannot be combined with a LoRA adapter")
    hints = LoadHints(
        num_heads=num_heads,
        grid=grid,
        image_size=changes.size,
        family=family,
        config=config,
        preprocess=preprocess,
        name=published_name(source),
    )
    if adapter is not None:
        return with_adapter(open_model(path, hints, Changes())[0], adapter, image_size=changes.size)
    return open_model(path, hints, changes, labels)[0]


def open_model(
    path: Path,
    hints: LoadHints,
    changes: Changes | Callable[[Description], Changes],
    labels: Sequence[str] | None = None,
) -> tuple[Model, str]:
    """Load a model from a path; returns it with the name of its family. Changes may depend on the description."""
    try:
        with parsing(path, CheckpointError):
            family, description, model, state = parse_checkpoint(read_checkpoint(path), hints)
        changes = changes(description) if callable(changes) else changes
        config = description.config
        if isinstance(config, ViTConfig):
            config, state = resize(config, state, changes)
        elif changes.patch_size is not None:
            raise CheckpointError("patch_size does not apply to a ResNet")
        elif changes.size is not None:
            config = config.replace(image_size=changes.size)
        config, state = change_head(config, state, changes)
        if config != description.config:
            model = empty(config)
        labels = choose_labels(description, changes, config.num_classes, labels)
        meta = description.meta.replace(labels=labels, source=str(path))
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
            cached = path.parents[1] if path.is_dir() else path  # a repository's blobs are beside its snapshots
            hint = f"remove {cached} to download it again"
        where = None if is_inside(path, error.where) else path
        raise error.replace(CheckpointError, where=where, hint=hint) from error


def is_inside(path: Path, where: object) -> bool:
    """Whether an error's `where` is this path or a file in it."""
    return where is not None and str(where).startswith(str(path))


def locate(source: str | Path) -> Path:
    """Resolve a source to a path: itself, the model of a run or of a sweep's best trial, or published weights."""
    if not str(source).strip():
        raise CheckpointError("the name of the weights is empty", hint="pass a file, a folder or a published name")
    with parsing(source, CheckpointError):  # a name may contain a NUL
        path = Path(source).expanduser()
        path.exists()
    is_run, is_sweep = (path / RUN_FILE).is_file(), (path / SWEEP_FILE).is_file()
    if is_run or is_sweep:
        run = path if is_run else best_trial(path)
        if not (run / "model").is_dir():
            hint = f"resume it with `vit train --resume {run}`"
            raise CheckpointError("this run has not finished", where=run, hint=hint)
        return run / "model"
    if path.exists():
        return path
    is_local = isinstance(source, Path) or path.is_absolute() or source.startswith((".", "~", "runs/"))
    if is_local or (path.parent != Path() and path.parent.is_dir()):
        siblings = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(str(path), siblings)
        raise CheckpointError("no such file or folder", where=path, hint=f"did you mean {near[0]}?" if near else "")
    from vitruvian.weights import hub

    return hub.resolve_source(str(source))


def run_facts(source: str | Path, data: str) -> tuple[Path, dict[str, Any]] | None:
    """The folder and run.json of the run that trained this model, if it was trained on `data`, a path or a name."""
    path = Path(source).expanduser()
    trials = sorted(path.glob("test-*")) if (path / SWEEP_FILE).is_file() else []
    run = next((folder for folder in (path, path.parent, *trials) if (folder / RUN_FILE).is_file()), None)
    if run is None or not path.is_dir() or not data:
        return None
    facts = read_object(run / RUN_FILE)
    return (run, facts) if facts.get("data") in (data, str(Path(data).expanduser().resolve())) else None


def published_name(source: str | Path) -> str:
    return "" if Path(source).expanduser().exists() else str(source)


def best_trial(sweep: Path) -> Path:
    """The run with the best result of a fine-tuning sweep, which is reported on stderr."""
    record = read_object(sweep / SWEEP_FILE, raises=CheckpointError)
    with parsing(sweep / SWEEP_FILE, CheckpointError):
        tests = [t for t in record.get("trials") or () if t.get("kind") == "test" and t.get("state") == "done"]
        names = (row.metrics[0] for row in KINDS.values())
        metric = next((name for name in names if any(name in trial for trial in tests)), "top1")
        if record.get("metric") == "mean_per_class":
            metric = "mean_per_class"
        results = {str(trial.get("folder")): float(trial[metric]) for trial in tests}
        is_averaged = bool((record.get("soup") or {}).get("kept"))
    if not results:
        reason = "no trial of this fine-tuning has finished"
        raise CheckpointError(reason, where=sweep, hint="run the same `vit finetune` to resume it")
    if is_averaged:
        print_status(f"note: using the average of the seeds in {sweep / SOUP_FOLDER}")
        return sweep / SOUP_FOLDER
    best = (min if metric in LOWER_IS_BETTER else max)(results, key=results.__getitem__)
    count = plural(len(results), "finished trial")
    print_status(f"note: {sweep} has {count}; using {best} with {metric} {results[best]:.4g}")
    return sweep / Path(best).name


def choose_labels(
    description: Description, changes: Changes, num_classes: int, labels: Sequence[str] | None
) -> tuple[str, ...] | None:
    """The caller's labels, or those of the file if its head is kept."""
    if labels is not None:
        if len(labels) != num_classes:
            raise CheckpointError(f"{len(labels)} labels were given for a head of {num_classes} classes")
        return tuple(labels)
    stated = description.meta.labels
    if stated is None or changes.head == "new" or num_classes != description.config.num_classes:
        return None
    if len(stated) != num_classes:
        hint = "correct the labels in its JSON file, or call vitruvian.load with labels=[...]"
        raise CheckpointError(f"the file names {len(stated)} labels for a head of {num_classes} classes", hint=hint)
    return stated


def resize(config: ViTConfig, state: Tensors, changes: Changes) -> tuple[ViTConfig, Tensors]:
    """Resample positions and patch embedding, in the family's own way."""
    patch_size, image_size = changes.patch_size or config.patch_size, changes.size or config.image_size
    new = config.replace(patch_size=patch_size, image_size=image_size)
    method, state = config.numerics.position_resize, dict(state)
    if new.patch_size != config.patch_size:
        state["embed.patch.weight"] = resize_patch_kernel(state["embed.patch.weight"], new.patch_size, method)
    if new.grid == config.grid:
        return new, state
    if config.attention == "mixer":
        raise fixed_size_error(config.grid)
    for module in ("embed", *(f"blocks.{layer}.pos" for layer in range(config.depth))):
        tables = {name: state[f"{module}.{name}"] for name in POSITION_TABLES if f"{module}.{name}" in state}
        state |= {f"{module}.{name}": table for name, table in resize_tables(tables, new.grid, config).items()}
    for name in [name for name in state if name.endswith(".attn.position.offsets")]:
        length = 2 * (new.prefix_tokens + new.grid[0] * new.grid[1]) - 1
        state[name] = F.interpolate(state[name].T[None], length, mode="linear", align_corners=True)[0].T
    for name in [name for name in state if name.endswith(".attn.position.table")]:
        state[name] = resize_bias_table(state[name], config.grid, new.grid, method)
    return new, state


def change_head(config: ModelConfig, state: Tensors, changes: Changes) -> tuple[ModelConfig, Tensors]:
    """Keep the head, remove it, or replace it by a zero-initialized one.

    A new head is a single linear layer, as in the paper's fine-tuning: the pre-logits layer before the old head is
    removed too. Without a head, the pre-logits layer stays, and its output is the features.
    """
    classes = config.num_classes if changes.num_classes is None else changes.num_classes
    if changes.head == "new" and not classes:
        reason = f"{argument('head', 'new')} needs {argument('num_classes')}, because the file has no head"
        raise CheckpointError(reason)
    if changes.head != "new" and classes == config.num_classes:
        return config, state
    state = {name: tensor for name, tensor in state.items() if not name.startswith(("head.", "head_dist."))}
    config = config.replace(num_classes=classes)
    if not classes:
        return config, state
    if isinstance(config, ViTConfig):
        config = config.replace(representation_size=0, projection=False, projection_bias=False, unit_features=False)
        state = {name: tensor for name, tensor in state.items() if not name.startswith("pre_logits.")}
    has_two_heads = not isinstance(config, ResNetConfig) and config.distillation
    for name in ("head", "head_dist") if has_two_heads else ("head",):
        state[f"{name}.weight"] = torch.zeros(classes, config.feature_width)
        state[f"{name}.bias"] = torch.zeros(classes)
    return config, state


def check_finite(model: Model, where: object, *, raises: type[CheckpointError] = CheckpointError) -> None:
    broken = next((name for name, value in model.state_dict().items() if not value.isfinite().all()), None)
    if broken is not None:
        raise raises(f"{broken!r} contains NaN or infinity", where=where)


def with_config(model: Model, config: ModelConfig, **changes: Any) -> Model:
    """A copy in evaluation mode with the same parameters, another config of the same shapes, and changed metadata."""
    return assemble(empty(config), plain_state(model), model.meta.replace(**changes))


def with_adapter(model: Model, adapter: str | Path, *, image_size: Size | None = None, merge: bool = True) -> Model:
    """A copy of a model with a LoRA adapter.

    Args:
        model: The model that the adapter was trained on. It is not changed.
        adapter: Folder of the adapter, in peft's format.
        image_size: Rows and columns of the input; by default those of the adapter, if it states them.
        merge: Add the updates to the weights. Otherwise they stay apart, and the copy shares all other weights with
            the model: several adapters need the memory of one model.

    Raises:
        CheckpointError: The adapter cannot be read, or was trained on another model.
    """
    content = read_adapter(Path(adapter).expanduser())
    stated, weight = content.description, content.head.get("head.weight")
    content.check_base(model)
    tensors = plain_state(model)
    for (block, part), update in content.updates.items():
        name, _, count = PARTS[part]
        shape = shape_of(tensors, f"blocks.{block}.{name}.weight")
        if shape != (len(update.b) * count, update.a.shape[1]):
            reason = f"the update of {part!r} in block {block} does not fit the model"
            raise CheckpointError(reason, where=adapter, hint=f"its base is {content.base or 'not stated'}")
    config, classes = model.config, None if weight is None else len(weight)
    size = image_size or (config.image_size if stated is None else stated.config.image_size)
    is_same = weight is None or (classes == config.num_classes and weight.shape[1:] == (config.feature_width,))
    if stated is not None and isinstance(config, ViTConfig) and isinstance(stated.config, ViTConfig):
        is_same = is_same and config.representation_size == stated.config.representation_size
    changes = Changes(image_size=size, num_classes=classes, head="keep" if is_same else "new")
    try:
        assert isinstance(config, ViTConfig)
        config, state = resize(config, tensors, changes)
        changed, state = change_head(config, state, changes)
        meta = model.meta if is_same else model.meta.for_new_head()
        if stated is not None:
            changed, meta = stated.config.replace(image_size=size), stated.meta
        meta = meta.replace(preprocess=meta.preprocess.with_image_size(size), source=model.meta.source)
        copy = assemble(empty(changed), state | content.head, meta)
    except RuntimeError as error:
        reason = "the adapter's head or architecture does not fit the model"
        raise CheckpointError(reason, where=adapter, hint=f"its base is {content.base or 'not stated'}") from error
    set_updates(copy, content.updates)
    return merged(copy) if merge else copy.eval()


def merged(model: Model) -> Model:
    """The model itself, or with LoRA a plain model with the updates merged into its weights."""
    return with_config(model, model.config) if any(lora_layers(model)) else model


def with_merging(model: Model, r: int | Sequence[int] = 0, *, thresholds: Sequence[float] = ()) -> Model:
    """A copy of the model with token merging (ToMe), without its cascade. The parameters are shared.

    Args:
        model: A Vision Transformer.
        r: Number of tokens to merge in each layer, or one number per layer; 0 merges none.
        thresholds: Merge instead all tokens more similar than this, one threshold per layer.

    Raises:
        ConfigError: The model is not a Vision Transformer.
    """
    if not isinstance(model.config, ViTConfig):
        raise ConfigError(
            f"{argument('tome_r')} is for Vision Transformers with their weights; this model has no tokens to merge"
        )
    merging = {"tome_r": r if isinstance(r, int) else tuple(r), "tome_thresholds": tuple(thresholds)}
    return with_config(model, model.config.replace(**merging), cascade=None)  # it was fitted to other logits


def without_cascade(model: Model) -> Model:
    """A copy of the model without its cascade; the model itself if it has none."""
    return model if model.meta.cascade is None else with_config(model, model.config, cascade=None)


def assemble(model: Model, state: Tensors, meta: ModelMeta) -> Model:
    """Fill an empty model with its tensors and metadata, in evaluation mode.

    `state` is changed: each tensor is replaced by its contiguous copy, so that only one is in memory twice.
    """
    for name, tensor in state.items():
        state[name] = tensor.contiguous()
    model.load_state_dict(state, strict=True, assign=True)
    model.meta = meta
    return model.eval()


DECODER_NAMES = ((r"^decoder_(layers|encoder\.layer)\.", "blocks."), (r"^decoder_", ""))
"""transformers 5 writes `decoder_encoder.layer`, others `decoder_layers`."""


def load_autoencoder(source: str | Path) -> MaskedAutoencoder:
    """Load MAE with its decoder, in evaluation mode.

    Args:
        source: A folder of transformers or a published name.

    Raises:
        CheckpointError: The weights have no decoder, or it cannot be read.
    """
    path = locate(source)
    encoder, checkpoint = load(source), read_checkpoint(path)
    inner = {name.removeprefix("decoder."): t for name, t in checkpoint.tensors.items() if name.startswith("decoder.")}
    settings = checkpoint.settings.get("config.json", {})
    if not inner or settings.get("model_type") != "vit_mae" or not isinstance(encoder, ViT):
        raise CheckpointError("has no MAE decoder (expected a transformers folder of ViTMAEForPreTraining)", where=path)
    try:
        native, unused = TABLES["mae_decoder"].read(rename(inner, DECODER_NAMES))
        embed, fc1 = shape_of(native, "embed.weight"), shape_of(native, "blocks.0.mlp.fc1.weight")
        if len(embed) != 2 or len(fc1) != 2:
            raise CheckpointError("the decoder's first layer or MLP is missing")
        decoder = ViTConfig(
            depth=count_blocks(native, None),
            width=embed[0],
            mlp_dim=fc1[0],
            num_heads=read_int(settings, "decoder_num_attention_heads", 16) or 16,
            qkv_bias="blocks.0.attn.qkv.bias" in native,
            pos_embed="none",
            numerics=encoder.config.numerics,
        )
        model = MaskedAutoencoder(encoder, decoder, normalized_patches=bool(read_bool(settings, "norm_pix_loss")))
        state = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
        check_names(model.state_dict(), state | native, "decoder", unused=unused)
        model.load_state_dict(state | native, assign=True)
    except (ConfigError, RuntimeError) as error:
        raise CheckpointError(f"the decoder cannot be read: {error}", where=path) from error
    return model.eval()
