"""Recipes: the settings of a training run, their TOML files, and changes to them from the command line."""

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from vitruvian.catalog import canonical
from vitruvian.config import LoraConfig, Preprocess, ResNetConfig, ScoreFunction, ViTConfig
from vitruvian.data.augment import AUGREG_LEVELS, Augment
from vitruvian.data.order import Sampling
from vitruvian.errors import ConfigError, FileError, UnknownNameError, argument, short_repr
from vitruvian.files import parse_toml, read_bytes
from vitruvian.progress import print_status
from vitruvian.settings import (
    MAX_SIDE,
    BatchSize,
    Range,
    Seed,
    Settings,
    Share,
    Workers,
    check_choice,
    field_types,
    validate_field,
)
from vitruvian.targets import KINDS, parse_target
from vitruvian.text import package_table

Steps = Annotated[int, Range(0, 10**12)]
Lr = Annotated[float, Range(1e-12, 1e6)]

RecipeChanges = Mapping[str, Any] | Iterable[str]
"""Changes to a recipe: {"epochs": 20, "augment.hflip": 0}, or ["epochs=20", "augment.hflip=0"]."""

CHOICES: dict[str, Mapping[str, Any]] = {}
"""Settings that name a row of a table: `optimizer`, `schedule` and `loss`.

The modules that implement the rows add their tables here, so that this module does not import them.
"""
TABLES: dict[str, tuple[type[Settings], ...]] = {"architecture": (ViTConfig, ResNetConfig), "preprocess": (Preprocess,)}
"""Settings that are tables of changes, and the settings that they may change."""
DESCRIPTION = {"name", "about", "command", "time", "result"}  # settings that describe a recipe and have no effect
LOCAL = {"workers", "device", "compile"}  # settings that may differ between processes
CHECKPOINTING = {"checkpoint_seconds", "checkpoint_steps", "keep_checkpoints", "async_checkpoint"}
HARMLESS = LOCAL | CHECKPOINTING | {"parallel", "shard_size"}
"""Settings that can be changed when resuming: the weights do not depend on them (up to rounding)."""
LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16"}  # of `precision`, as recipes store it
LABEL_SETTINGS = (
    "loss", "label_smoothing", "class_weights", "teacher", "head_init", "head_bias", "patch_drop", "validation", "final"
)  # fmt: skip
"""Settings that must keep their defaults with `objective="masked"`."""
OTHER_CLASSES = "other_classes"  # the data of `eval_fewshot` that `class_range` leaves out
MaskedTarget = Literal["mean_color", "colors_4x4", "pixels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Settings):
    """All settings of a run, except the data and the number of processes."""

    name: str = ""
    """Name of the recipe that this one is, or was changed from."""
    about: str = ""
    """Purpose of the recipe, in one line."""
    command: str = ""
    time: str = ""
    """Expected time, and on which hardware."""
    result: str = ""
    """Expected result."""

    model: str = "ViT-S/16"
    """Name of an architecture to train from scratch; ignored with `weights`."""
    weights: str = ""
    """Weights to start from: a file, a folder or a published name; empty: from scratch (random weights)."""
    image_size: Annotated[int, Range(0, MAX_SIDE)] = 0
    """Side in pixels of the images that the model is evaluated on and saved for; 0: `enlarge` times its own."""
    enlarge: Annotated[float, Range(0.1, 10.0)] = 1.0
    """If `image_size` is 0: the side as a multiple of the model's own, rounded to whole patches."""
    train_scale: Annotated[float, Range(0.1, 10.0)] = 1.0
    """Side of training images as a multiple of `image_size`. Random crops show objects larger than evaluation does:
    smaller training images compensate for that, and are cheaper."""
    architecture: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the settings of the model (see ViTConfig); with `weights`, only settings that do not change the shape
    of any parameter, such as `drop_path` or `tome_r`."""
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the evaluation preprocessing of the model (see Preprocess)."""
    head_bias: Annotated[float, Range(-1e6, 1e6)] | Literal["prior"] = 0.0
    """Initial bias of a new head. `prior`: -ln(K - 1), a probability of 1/K for each of K classes with sigmoids; the
    paper's release has -10, which is this for the 21,841 classes of ImageNet-21k."""
    head_init: Literal["zero", "probe"] = "zero"
    """Initialization of a new head. `probe`: logistic regression on the frozen features, as `vit probe` fits it, or
    ridge regression of numbers."""
    stem_init: Literal["random", "whitening"] = "random"
    """Initialization of a convolutional stem, from scratch only. `whitening`: the first convolution decorrelates the
    pixels of the training images; use `freeze` to keep it fixed."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, such as `embed.*` or `blocks.[0-5].*`."""
    freeze_layers: Share = 0.0
    """Fraction of the layers that are not trained, from the embedding on; the backward pass ends above them."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank updates of frozen weights; `lora=8` is short for `lora.rank=8`."""

    epochs: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Number of epochs."""
    steps: Steps = 0
    """Number of optimizer steps, instead of `epochs`."""
    bit_hyperrule: bool = False
    """Derive steps, warmup, `decay_at`, image size, crop and Mixup from the number and the size of the training images,
    by the BiT-HyperRule; settings that are given explicitly take precedence."""
    batch_size: BatchSize = 128
    """Global batch size."""
    grad_accum_steps: Annotated[int, Range(1, 2**20)] = 1
    """Gradient accumulation: parts into which a process splits its batch to save memory."""
    seed: Seed = 0
    """Random seed (initialization, shuffling, augmentation, dropout)."""

    optimizer: str = "adamw"
    """A key of OPTIMIZERS. `adamw` and `muon` decouple weight decay, `adam` and `sgd` add it to the gradient. `muon`
    makes the momentum of the hidden layers' matrices orthogonal, and uses `adamw` for all other parameters."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    momentum: Share = 0.9
    """Momentum of SGD and Muon."""
    lr: Lr = 1e-3
    """Peak learning rate."""
    model_lrs: tuple[tuple[str, Lr], ...] = ()
    """Peak learning rates of models by name. `lr` follows the model, unless `lr` itself is given."""
    lrs: tuple[Lr, ...] = ()
    """Learning rates that `vit finetune` selects from; empty: only `lr`."""
    schedule: str = "cosine"
    """A key of SCHEDULES."""
    warmup: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Steps of linear learning-rate warmup; below 1, a fraction of all steps."""
    min_lr: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Final learning rate of a linear or cosine schedule."""
    decay_at: tuple[Share, ...] = (0.3, 0.6, 0.9)
    """Fractions of the run after which a step schedule divides the learning rate by 10."""
    cooldown: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Final steps in which a constant or rsqrt schedule decays to `min_lr`; below 1, a fraction of all steps."""
    timescale: Annotated[float, Range(1, 1e12)] = 10_000.0
    """Steps after which an rsqrt schedule has decayed to 0.71 of its peak."""
    weight_decay: Annotated[float, Range(0.0, 1e6)] = 0.0
    decouple_lr: bool = False
    """`weight_decay` is the decay per step at the peak learning rate, whatever that is, as in big_vision."""
    weight_decay_on: Literal["kernels", "all"] = "kernels"
    """`kernels`: only the weights of dense layers and convolutions."""
    layer_decay: Annotated[float, Range(1e-6, 1.0)] = 1.0
    """Layer decay: factor of the learning rate from one layer to the layer below."""
    grad_clip: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Gradient clipping: maximum global norm; 0: no clipping."""

    sam_rho: Annotated[float, Range(0.0, 1e3)] = 0.0
    """Sharpness-aware minimization (SAM): how far to step up the gradient, in the norm of all weights, before the
    gradient is taken; every step then has two passes. 0: off."""
    gsam_alpha: Annotated[float, Range(0.0, 1e3)] = 0.0
    """With `sam_rho`: GSAM's weight of the gradient's part that reduces sharpness alone; 0: SAM."""

    target: str = "auto"
    """What to predict: `single`, `multi`, `number` or `ordinal`, perhaps with columns of a manifest, such as
    `number:age,weight`; `auto`: what the data states."""
    objective: Literal["labels", "masked"] = "labels"
    """`labels`: classification. `masked`: predict the colors of masked patches, which needs no labels and gives a
    model without a head for further training."""
    masked_target: MaskedTarget = "mean_color"
    """With `objective="masked"`: the 3-bit mean color of a patch, 4 x 4 such colors (`colors_4x4`), or its pixels by
    mean squared error."""
    mask_ratio: Annotated[float, Range(0.01, 0.99)] = 0.5
    """With `objective="masked"`: the fraction of the patches that is corrupted."""
    loss: str = "cross_entropy"
    """A key of LOSSES or ROW_LOSSES. `bce`: binary cross-entropy, summed over the classes; `asl`: asymmetric, for
    several labels; `huber`, `l1`, `l2`: for numbers, which are standardized."""
    label_smoothing: Share = 0.0
    """Label smoothing: the fraction of each label that is spread over all classes."""
    teacher: str = ""
    """Weights to distill from: a file, a folder or a published name; empty: no distillation."""
    distillation: Literal["logits", "token"] = "logits"
    """`logits`: the teacher's probabilities; `token`: these for the distillation token and the labels for the class
    token, as in DeiT."""
    distillation_weight: Share = 0.5
    """Weight of the teacher's loss; the labels have the rest."""
    distillation_temperature: Annotated[float, Range(0.0, 1e3)] = 2.0
    """Divides the logits of teacher and student; 0: the teacher's top class is a label (DeiT's hard distillation)."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced`: weight images inversely to the size of their class, or the positive labels of several by the ratio of
    images without and with them."""
    sampling: Sampling = "uniform"
    """`balanced`: sample every class equally often."""
    augment: Augment = field(default_factory=Augment)
    """Training augmentation; size, mean and std are those of the evaluation preprocessing."""
    aug_repeats: Annotated[int, Range(1, 1024)] = 1
    """Augmented copies of each image in a batch."""
    max_train_samples: Steps = 0
    """Maximum number of training images (0: all), balanced over classes; larger subsets contain smaller ones."""
    val_fraction: Annotated[float, Range(0.001, 0.9)] = 0.1
    """Fraction of each class held out for validation if the data has no validation split."""
    split_seed: Seed = 0
    """Decides which images are held out. A run that starts from another run on the same data holds out the same."""
    group_by: str = ""
    """Images of one group, such as those of a patient, are held out together: a column of the manifest, or a regular
    expression on the path. Empty: the column `group`, if there is one."""
    fold: tuple[Annotated[int, Range(0, 1000)], Annotated[int, Range(0, 1000)]] = (0, 0)
    """Cross-validation: (2, 5) holds out the second of five folds of all images but the test split; (0, 0): none."""
    validation: Literal["auto", "dev", "test"] = "auto"
    """`auto`: evaluate on the split `val`, else `test`, else on images held out. `dev`: never on the test split.
    `test`: on the test split, after training on all other images."""
    class_range: tuple[Share, Share] = (0.0, 1.0)
    """Train on the classes between two fractions of the list of classes; (0, 0.5) is the first half. The others can
    measure few-shot accuracy (`eval_fewshot`)."""
    max_unreadable: Share = 0.01
    """Maximum fraction of unreadable images before the run stops."""

    average: Literal["none", "ema", "polyak"] = "none"
    """Average the weights: `ema` exponentially, `polyak` equally. The average is evaluated and saved."""
    ema_decay: Annotated[float, Range(1e-6, 1.0)] = 0.9999
    """Decay of the EMA; smaller in the first steps."""
    polyak_start: Share = 0.5
    """Fraction of the run after which `polyak` starts."""

    precision: Literal["float32", "bfloat16", "float16", "bf16", "fp16", "auto"] = "float32"
    """Autocast dtype. `auto` is a fast one of the device (on a CPU, bf16 with AVX-512 BF16 or AMX)."""
    grad_checkpointing: bool = False
    compile: bool = False
    patch_drop: Annotated[float, Range(0.0, 0.95)] = 0.0
    """Patch dropout: fraction of patch tokens dropped during training."""

    eval_every: Annotated[float, Range(0.0, 1e9)] = 1.0
    """Epochs between evaluations; 0: only after the last step, which is always evaluated."""
    eval_batch_size: Annotated[int, Range(0, 2**20)] = 0
    """0: `batch_size`."""
    eval_fewshot: str = ""
    """Data on which every evaluation also measures few-shot accuracy: a name or a path; `other_classes`: the classes
    that `class_range` leaves out. Empty: none."""
    fewshot_shots: Annotated[int, Range(1, 10_000)] = 5
    """Training images per class of the few-shot accuracy."""
    monitor: Literal["top1", "loss", "map", "f1", "mae", "r2"] = "top1"
    """Metric that decides which evaluation is the best; in place of `top1`, `map` for several labels and `mae` for
    numbers."""
    patience: Steps = 0
    """Early stopping: evaluations without improvement after which the run ends; 0: never."""
    final: Literal["last", "best"] = "last"
    """Which weights to save; `best` never uses the test split to decide, and holds images out if there is no `val`."""

    log_every: Annotated[int, Range(1, 10**9)] = 10
    """Steps between lines of training metrics."""
    checkpoint_seconds: Annotated[float, Range(0.0, 1e9)] = 120.0
    checkpoint_steps: Steps = 0
    """Steps between checkpoints, in addition to `checkpoint_seconds`; 0: by time only."""
    keep_checkpoints: Annotated[int, Range(1, 10**6)] = 2
    async_checkpoint: bool = True
    """Write checkpoints in the background, from a copy of the state in memory."""
    workers: Workers = 2
    """Processes that load images; they do not affect the result."""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """Under torchrun: replicate the model (`ddp`), shard it (`fsdp`), or shard it within groups (`hsdp`)."""
    shard_size: Annotated[int, Range(0, 10**6)] = 0
    """With `hsdp`: processes that share one copy of the model; 0: those of one machine."""
    device: str = "auto"

    def check(self) -> None:
        object.__setattr__(self, "precision", LONG_NAMES.get(self.precision, self.precision))
        for name, table in CHOICES.items():
            check_choice(name, getattr(self, name), table)
        for name, owners in TABLES.items():
            changes = {}
            for key, value in getattr(self, name).items():
                owner = next((owner for owner in owners if key in field_types(owner)), None)
                if owner is None:
                    known = [f"{name}.{field}" for owner in owners for field in field_types(owner)]
                    raise UnknownNameError("setting", f"{name}.{key}", known)
                changes[key] = validate_field(owner, key, value, name)
            object.__setattr__(self, name, changes)
        if (self.epochs > 0) == (self.steps > 0):
            reason = f"a recipe needs either epochs or steps, not {argument('epochs', self.epochs, 'g')}"
            raise ConfigError(f"{reason} and {argument('steps', self.steps)}")
        parse_target(self.target)
        if self.validation == "test" and (self.patience or self.final == "best"):
            raise ConfigError("patience and final='best' would select on the test split (validation='test')")
        if self.fold != (0, 0) and not (1 <= self.fold[0] <= self.fold[1] and self.fold[1] >= 2):
            raise ConfigError(f"fold={self.fold} is not one of at least two folds, such as (1, 5)")
        for model, _ in self.model_lrs:
            canonical(model)
        defaults = {item.name: item.default for item in fields(self)}
        needs_labels = [name for name in LABEL_SETTINGS if getattr(self, name) != defaults[name]]
        needs_labels += ["augment.mixup_alpha and cutmix_alpha"] if self.augment.mixes else []
        needs_labels += ["lora"] if self.lora.rank else []
        if needs_labels and self.objective == "masked":
            raise ConfigError(f"{needs_labels[0]} cannot be set with objective='masked', which uses no labels")
        if self.objective != "masked" and (self.masked_target, self.mask_ratio) != ("mean_color", 0.5):
            raise ConfigError("masked_target and mask_ratio need objective='masked'")
        if self.class_range[0] >= self.class_range[1]:
            raise ConfigError(f"class_range={self.class_range} is empty")
        if self.eval_fewshot == OTHER_CLASSES and self.class_range == (0.0, 1.0):
            raise ConfigError("eval_fewshot='other_classes' needs class_range: all classes are trained on")
        if self.decouple_lr and self.optimizer != "adamw":
            raise ConfigError(f"decouple_lr=true needs optimizer='adamw', not {self.optimizer!r}")
        if self.sam_rho and self.precision in ("float16", "auto"):
            raise ConfigError("sam_rho needs precision='float32' or 'bfloat16': float16 scales the gradients")
        if self.gsam_alpha and not self.sam_rho:
            raise ConfigError(f"gsam_alpha={self.gsam_alpha:g} needs sam_rho")

    def for_target(self, kind: str) -> "tuple[Recipe, list[str]]":
        """The recipe with a loss and a metric for this kind of target, and a note on what that changes.

        Raises:
            ConfigError: A setting does not suit the target.
        """
        row, single = KINDS[kind], KINDS["single"]
        if self.objective == "masked":
            return self, []
        if kind == "single":
            if self.head_init != "zero" and self.loss != "cross_entropy":
                raise ConfigError(f"head_init={self.head_init!r} needs loss='cross_entropy', not {self.loss!r}")
            return self, []
        unsuitable = {
            f"loss={self.loss!r}": self.loss not in (*row.losses, single.losses[0]),
            f"teacher={self.teacher!r}": bool(self.teacher),
            f"class_weights={self.class_weights!r}": self.class_weights != "none" and kind != "multi",
            f"monitor={self.monitor!r}": self.monitor not in (*row.metrics, "loss", single.metrics[0]),
        }
        for setting, is_unsuitable in unsuitable.items():
            if is_unsuitable:
                hint = f"losses are {', '.join(row.losses)}; metrics {', '.join(row.metrics)}"
                raise ConfigError(f"{setting} cannot be used with {row.title}", hint=hint)
        changes: dict[str, Any] = {"label_smoothing": 0.0}
        if self.loss not in row.losses:
            changes["loss"] = row.losses[0]
        if self.monitor == single.metrics[0]:
            changes["monitor"] = row.metrics[0]
        changes = {key: value for key, value in changes.items() if value != getattr(self, key)}
        text = ", ".join(f"{key}={value}" for key, value in changes.items())
        return self.replace(**changes), [f"{text}, because the data has {row.title}"] if text else []

    @property
    def score_function(self) -> ScoreFunction:
        """How the trained model turns logits into probabilities: as its loss does."""
        return "sigmoid" if self.loss == "bce" else "softmax"

    def with_model_lr(self) -> "Recipe":
        """The recipe with the learning rate that it has for its model; a model without one keeps `lr`, with a note."""
        lrs, model = {canonical(name)[0]: lr for name, lr in self.model_lrs}, self.model
        if lrs and canonical(model)[0] not in lrs:
            print_status(f"note: the recipe has no learning rate for {model}; using lr={self.lr:g}")
        return self.replace(lr=lrs.get(canonical(model)[0], self.lr)) if lrs else self

    def report_settings(self) -> dict[str, Any]:
        """The settings that differ from their defaults; without the model name, which `weights` overrides."""
        omitted, defaults = DESCRIPTION | {"model"}, Recipe(steps=1).to_json() | {"steps": 0}
        return {key: value for key, value in changed_values(self.to_json(), defaults).items() if key not in omitted}


def changed_values(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values in a table, and in the tables inside it, that differ from the defaults."""
    return {
        key: changed_values(value, defaults[key]) if isinstance(value, Mapping) and key in defaults else value
        for key, value in table.items()
        if key not in defaults or value != defaults[key]
    }


OWNED = {f"augment.{name}": f"preprocess.{name}" for name in ("mean", "std", "pixels")}
OWNED["augment.image_size"] = "image_size"
"""Settings of the augmentation that are derived from others."""

FROM_DATA = dict.fromkeys(("num_classes", "classes", "num_labels"), "the data, which has one folder or label per class")
"""Settings of other libraries that have no setting here."""


@cache
def names_elsewhere() -> dict[str, str]:
    """Our settings by their names in other libraries."""
    settings = package_table("other_names.toml")["settings"]
    return {other: name for name, others in settings.items() for other in others.split()}


RECIPES = files("vitruvian") / "recipes"


def recipe_names() -> list[str]:
    """The names of the recipes in the package: those for one's own images first, those of the paper last."""
    names = sorted(entry.name.removesuffix(".toml") for entry in RECIPES.iterdir() if entry.name.endswith(".toml"))
    first = ("photos", "finetune-small", "scratch", "masked")
    return [*first, *sorted(set(names).difference(first), key=lambda name: ("paper" in name, "study" in name, name))]


def describe_settings(pattern: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of the settings whose name contains `pattern`; the meaning is their docstring."""
    owners: list[tuple[str, type[Settings]]] = [("", Recipe), ("augment.", Augment), ("lora.", LoraConfig)]
    owners += [(f"{name}.", owner) for name, tables in TABLES.items() for owner in tables[:1]]
    for prefix, owner in owners:
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        docs = {}
        for line, following in itertools.pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[ast.unparse(line.target)] = " ".join(ast.literal_eval(following.value).split())
        for item in fields(owner):  # type: ignore[arg-type]
            name, is_inner = f"{prefix}{item.name}", item.name in ("augment", "lora", *TABLES) and not prefix
            if pattern in name and not is_inner and name not in DESCRIPTION | set(OWNED):
                default = () if item.default is MISSING else item.default  # a list or a table that is empty
                if not isinstance(default, Settings):
                    yield name, "none" if default is None else toml_value(default), docs.get(item.name, "")


def read_recipe(name: str | Path) -> Recipe:
    """The recipe with this name, or from this TOML file.

    Raises:
        ConfigError: the file or one of its settings is invalid, or the name is unknown.
    """
    return recipe_from_table({"name": Path(name).stem} | read_table(name), str(name))


def read_table(name: str | Path, parents: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings in a recipe file, merged into those of the recipe it names as `base`."""
    text = str(name)
    if text.endswith(".toml"):
        content = read_bytes(Path(name), raises=ConfigError)
    elif text in recipe_names():
        content = (RECIPES / f"{text}.toml").read_bytes()
    else:
        raise UnknownNameError("recipe", text, recipe_names(), see="(see `vit train --recipes`)")
    table = parse_toml(content, text, raises=ConfigError)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str) or base in (*parents, text):
        raise ConfigError(f"base={short_repr(base)} is not another recipe", where=text)
    return merge_tables(expand_level(read_table(base, (*parents, text))), expand_level(table))


def recipe_from_table(table: Mapping[str, Any], where: str = "") -> Recipe:
    """The recipe with these settings; an error names the setting, and `where` it is."""
    known, table = field_types(Recipe), expand_level(table)
    inner = [f"{key}.{name}" for key, value in table.items() if isinstance(value, Mapping) for name in value]
    try:
        for key in (key for key in (*table, *inner) if key not in known):
            plain = key.strip().lower().replace("-", "_")
            if plain in FROM_DATA:
                raise ConfigError(f"{key} cannot be set: it comes from {FROM_DATA[plain]}")
            if name := names_elsewhere().get(plain, plain if plain in known else ""):
                raise ConfigError(f"unknown setting {key!r}: called {name} here")
        recipe = Recipe.from_json(table)
        return recipe if "lr" in table else recipe.with_model_lr()
    except ConfigError as error:
        raise (error.replace(where=where) if where else error) from None


def expand_level(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A table with the settings that `augment.level` stands for, in place of it; other settings beside it win.

    `lora=8` stands for `lora.rank=8`.
    """
    if "lora" in table and not isinstance(table["lora"], Mapping | LoraConfig):
        table = {**table, "lora": {"rank": table["lora"]}}
    augment = table.get("augment")
    if not isinstance(augment, Mapping) or "level" not in augment:
        return table
    check_choice("augment.level", augment["level"], AUGREG_LEVELS)
    names = ("mixup_alpha", "rand_augment", "rand_augment_magnitude")
    rest = {key: value for key, value in augment.items() if key != "level"}
    return {**table, "augment": {**dict(zip(names, AUGREG_LEVELS[augment["level"]])), **rest}}


def change_recipe(recipe: Recipe, settings: RecipeChanges) -> Recipe:
    """A copy of the recipe with changes such as `epochs=20` or `augment.hflip=0`."""
    table, changes = recipe.to_json(), parse_changes(settings)
    if changes.keys() >= {"epochs", "steps"}:
        raise ConfigError(f"give {argument('epochs')} or {argument('steps')}, not both")
    for key, value in changes.items():
        if key in OWNED:
            raise ConfigError(f"{key} is derived from {OWNED[key]}; set that instead")
        is_list = key == "lora.targets" or field_types(Recipe).get(key) == tuple[str, ...]
        if isinstance(value, str) and is_list:
            value = [name.strip() for name in value.split(",")]  # freeze=embed.*,blocks.0.*
        for part in reversed(key.split(".")):
            value = {part: value}
        table = merge_tables(table, expand_level(value))
        if key in ("epochs", "steps"):
            table["steps" if key == "epochs" else "epochs"] = 0
    changed = recipe_from_table(table)
    return changed.with_model_lr() if "model" in changes and "lr" not in changes else changed


def parse_changes(settings: RecipeChanges) -> dict[str, Any]:
    """Values by the full names of settings, from changes such as `augment.hflip=0` or from tables, perhaps nested."""
    if isinstance(settings, str):
        raise ConfigError(f"settings={short_repr(settings)} is one string", hint='pass a list or {"epochs": 20}')
    if isinstance(settings, Mapping):
        return dict(flatten(settings))
    changes = {}
    for change in settings:
        key, sign, text = (part.strip() for part in change.partition("="))
        if not sign or not key:
            raise ConfigError(f"{change!r} is not KEY=VALUE")
        try:
            changes[key] = parse_toml(f"value = {text}", "")["value"]
        except FileError:
            changes[key] = text  # not TOML: a plain text
    return dict(flatten(changes))


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables with names such as `augment.hflip`."""
    for key, value in table.items():
        name, value = f"{prefix}{key}", value.to_json() if isinstance(value, Settings) else value
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif value is None:
            raise ConfigError(f"{name}=None is not a value", hint="leave it out for the default")
        else:
            yield name, value.tolist() if hasattr(value, "tolist") else value  # of NumPy or PyTorch


def join_changes(settings: RecipeChanges, keywords: Mapping[str, Any], arguments: Iterable[str]) -> dict[str, Any]:
    """The changes in `settings` and in the keywords of a function, whose other `arguments` errors may suggest."""
    known = field_types(Recipe)
    for key in keywords:
        if key not in known:
            try:
                recipe_from_table({key: ""})
            except UnknownNameError:
                raise UnknownNameError("argument", key, [*arguments, *known]) from None
    changes, more = parse_changes(settings), parse_changes(keywords)
    for key in changes.keys() & more.keys():
        if changes[key] != more[key]:
            raise ConfigError(f"'{key}={more[key]}' contradicts '{key}={changes[key]}' in settings")
    return changes | more


def merge_tables(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a table with changes; nested tables are merged recursively."""
    result = dict(table)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge_tables(result[key], value) if both else value
    return result


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Nested tables of numbers, strings and lists as TOML; None is omitted."""
    values = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            name = f"{path}{key}"
            lines += ["", f"[{name}]", to_toml(value, f"{name}.").rstrip("\n")]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):  # ASCII JSON has surrogate pairs, which are not valid TOML
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else json.dumps(value)
