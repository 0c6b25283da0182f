"""The settings of one training run: what a recipe file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitruvian.config import Preprocess, ResNetConfig, ViTConfig
from vitruvian.data.augment import Augment
from vitruvian.data.sampling import Sampling
from vitruvian.errors import ConfigError, UnknownNameError, argument
from vitruvian.settings import (
    MAX_SIDE,
    BatchSize,
    Range,
    Seed,
    Settings,
    Share,
    Workers,
    check_choice,
    hints_of,
    validate_field,
)
from vitruvian.training.distill import DISTILLATIONS
from vitruvian.training.objective import LOSSES
from vitruvian.training.optimizer import OPTIMIZERS
from vitruvian.training.schedule import SCHEDULES

AverageName = Literal["none", "ema", "polyak"]
Precision = Literal["float32", "bfloat16", "float16"]
Parallel = Literal["ddp", "fsdp", "hsdp"]
Monitor = Literal["top1", "loss"]
Validation = Literal["auto", "dev", "test"]
HeadInit = Literal["zero", "least_squares", "probe"]
ObjectiveName = Literal["labels", "masked"]
Steps = Annotated[int, Range(0, 10**12)]
Lr = Annotated[float, Range(1e-12, 1e6)]

CHOICES: dict[str, Mapping[str, Any]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "loss": LOSSES,
    "distillation": DISTILLATIONS,
}
"""Settings that name a row of a table."""
TABLES: dict[str, tuple[type[Settings], ...]] = {"architecture": (ViTConfig, ResNetConfig), "view": (Preprocess,)}
"""Tables of changes, and the settings that they may change."""
DESCRIPTION = {"about", "command", "time", "result"}
"""Settings that tell of a recipe and change nothing."""
LOCAL = {"workers", "device", "compile"}
"""Settings that may differ from process to process."""
HARMLESS = LOCAL | {
    "checkpoint_seconds",
    "checkpoint_steps",
    "keep_checkpoints",
    "async_checkpoint",
    "parallel",
    "shard_size",
}
"""Settings that a continued run may change, because its weights do not depend on them (to within rounding)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Settings):
    """Everything that decides a run except the data and the number of processes."""

    about: str = ""
    """What the recipe is for, in a line."""
    command: str = ""
    time: str = ""
    """How long it should take, and on what."""
    result: str = ""
    """What it should reach."""

    model: str = "ViT-S/16"
    """Name in the catalog; `weights` say their own."""
    weights: str = ""
    """What to start from: a file, a folder or a published name; empty starts from scratch."""
    image_size: Annotated[int, Range(0, MAX_SIDE)] = 0
    """Side in pixels of the images that the model is measured with and saved for; 0 is `enlarge` times its own."""
    enlarge: Annotated[float, Range(0.1, 10.0)] = 1.0
    """Where `image_size` is 0: the side as a multiple of the model's own, in whole patches."""
    train_scale: Annotated[float, Range(0.1, 10.0)] = 1.0
    """Side of training views as a multiple of the measured one. Training crops show things larger than they are in
    whole images: smaller views make up for it, and are cheaper."""
    architecture: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of the model than its own, by name (see ViTConfig); of weights, only what changes
    no array can, such as `drop_path` or `tome_r`, and nothing of a ResNet's."""
    view: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of the evaluation view than its own, by name (see Preprocess)."""
    head_bias: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Where the biases of a fresh head start; the paper takes -10 with 21k classes."""
    head_init: HeadInit = "zero"
    """Of a fresh head. `probe`: where logistic regression on the frozen features ends, as `vit probe` fits it;
    `least_squares`: where ridge regression ends, which is quicker with many classes."""
    stem_init: Literal["random", "whitening"] = "random"
    """Of a stem of plain convolutions, from scratch. `whitening`: the first convolution decorrelates the pixels of the
    training images; `freeze` can keep it so. `weights` have a stem of their own."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names that do not learn, such as `embed.*` or `blocks.[0-5].*`."""
    freeze_layers: Share = 0.0
    """Share of the layers that do not learn, from the embedding on; the backward pass ends above them."""

    epochs: Annotated[float, Range(0.0, 1e6)] = 0.0
    """How often every image is trained on."""
    steps: Steps = 0
    """In place of `epochs`: steps of the optimizer."""
    batch_size: BatchSize = 128
    """Images in a step, over all processes."""
    grad_accum_steps: Annotated[int, Range(1, 2**20)] = 1
    """Parts in which a process works through its share of a batch, to need less memory."""
    seed: Seed = 0
    """Random seed of the fresh weights, the order of the images, their views and dropout."""

    optimizer: str = "adamw"
    """A key of OPTIMIZERS. `adamw` and `muon` keep weight decay out of the gradient, `adam` and `sgd` add it. `muon`
    makes the momentum of hidden layers' matrices orthogonal, and is `adamw` for all else."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    momentum: Share = 0.9
    """Of SGD and Muon."""
    lr: Lr = 1e-3
    """The highest learning rate."""
    lrs: tuple[Lr, ...] = ()
    """Those that `vit finetune` chooses among; without any, `lr` alone."""
    schedule: str = "cosine"
    """A key of SCHEDULES."""
    warmup: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Learning rate (lr) warmup: steps in which it rises from 0; below 1 their share of all steps."""
    min_lr: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Where a linear or cosine schedule ends."""
    cooldown: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Steps at the end in which a constant or reciprocal-root learning rate falls to `min_lr`; below 1 a share."""
    timescale: Annotated[float, Range(1, 1e12)] = 10_000.0
    """Steps after which a reciprocal-root learning rate has fallen to 0.71 of its height."""
    weight_decay: Annotated[float, Range(0.0, 1e6)] = 0.0
    decouple_lr: bool = False
    """A step takes `weight_decay` off the weights at the highest learning rate, whatever that is, as in big_vision."""
    weight_decay_on: Literal["kernels", "all"] = "kernels"
    """`kernels`: the matrices of dense layers and convolutions alone."""
    layer_decay: Annotated[float, Range(1e-6, 1.0)] = 1.0
    """Layer decay: factor of the learning rate from each layer to the one before it."""
    grad_clip: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Gradient clipping: the largest norm of all gradients together; 0 for any."""

    objective: ObjectiveName = "labels"
    """`labels`: the class of each image. `masked`: the colors of patches that are hidden, which needs no labels and
    gives a model without a head to train further."""
    loss: str = "cross_entropy"
    """A key of LOSSES. `bce`: binary cross-entropy, each class on its own, summed over the classes."""
    label_smoothing: Share = 0.0
    """Label smoothing: share of each label that is spread over all classes."""
    teacher: str = ""
    """Knowledge distillation from these weights: a file, a folder or a published name; empty for none."""
    distillation: str = "logits"
    """A key of DISTILLATIONS. `logits`: the teacher's probabilities; `token`: the same for the distillation token,
    as in DeiT, and the labels for the class token; `features`: similarities of the images of a batch."""
    distillation_weight: Share = 0.5
    """The teacher's share of the loss."""
    distillation_temperature: Annotated[float, Range(0.0, 1e3)] = 2.0
    """Divides the logits of both; at 0, the teacher's best class is a label (DeiT's hard distillation)."""
    teacher_view: Literal["same", "fixed"] = "same"
    """`same`: the teacher sees what the student sees, in each step. `fixed`: it sees the evaluation view of each image
    once, and its features are kept on disk."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced`: an image counts more the rarer its class is, one in the mean."""
    sampling: Sampling = "uniform"
    """`balanced`: every class comes up equally often."""
    augment: Augment = field(default_factory=Augment)
    """Training views; their size, mean and deviation are those of the evaluation view."""
    aug_repeats: Annotated[int, Range(1, 1024)] = 1
    """Views of each image in a batch."""
    max_train_samples: Steps = 0
    """To train on no more than so many, the classes as equal as they allow; fewer are always among more. 0 for all."""
    val_fraction: Annotated[float, Range(0.001, 0.9)] = 0.1
    """Share of each class held out for validation where the data has no such split."""
    validation: Validation = "auto"
    """`auto`: on the split `val`, or else `test`, or else on what is held out. `dev`: never on the test split. `test`:
    on the test split, after training on all other images."""
    max_unreadable: Share = 0.01
    """Share of images that may be unreadable before the run stops."""

    average: AverageName = "none"
    """`ema`: an exponential mean of the weights; `polyak`: their plain mean. The mean is what is evaluated and used."""
    ema_decay: Annotated[float, Range(1e-6, 1.0)] = 0.9999
    """Decay of the EMA; less in the first steps."""
    polyak_start: Share = 0.5
    """Share of the run after which `polyak` begins."""

    precision: Precision = "float32"
    """What autocast computes in; weights stay float32."""
    grad_checkpointing: bool = False
    compile: bool = False
    patch_drop: Annotated[float, Range(0.0, 0.95)] = 0.0
    """Patch dropout: share of patch tokens left out while training."""
    resolutions: tuple[tuple[Share, Annotated[int, Range(1, MAX_SIDE)]], ...] = ()
    """Pairs of a share of the run and the side in pixels from there on; before and without them, `image_size`."""

    eval_every: Annotated[float, Range(0.0, 1e9)] = 1.0
    """In epochs; 0 for the last step alone, which is always evaluated."""
    eval_batch_size: Annotated[int, Range(0, 2**20)] = 0
    """0: as in training."""
    monitor: Monitor = "top1"
    """What the best evaluation is best in."""
    patience: Steps = 0
    """Evaluations without a better one after which the run ends early; 0 for never."""
    final: Literal["last", "best"] = "last"
    """Which weights become the model; `best` needs images apart from the test split, and holds some out."""

    log_every: Annotated[int, Range(1, 10**9)] = 10
    """Steps that a line of metrics covers."""
    checkpoint_seconds: Annotated[float, Range(0.0, 1e9)] = 120.0
    checkpoint_steps: Steps = 0
    """Also every so many steps; 0 leaves it to the clock."""
    keep_checkpoints: Annotated[int, Range(1, 10**6)] = 2
    async_checkpoint: bool = True
    """Steps go on while a copy of the state is written, which takes its memory; False makes them wait."""
    workers: Workers = 2
    """Processes that read images; the result does not depend on them."""
    parallel: Parallel = "ddp"
    """Under torchrun: copies of the model (`ddp`), one in parts (`fsdp`), or copies in parts (`hsdp`)."""
    shard_size: Annotated[int, Range(0, 10**6)] = 0
    """With `hsdp`: processes that hold a copy of the model together; 0 for those of one machine."""
    device: str = "auto"

    def check(self) -> None:
        for name, table in CHOICES.items():
            check_choice(name, getattr(self, name), table)
        for name, owners in TABLES.items():
            changes = {key: typed_change(owners, key, value, name) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, changes)
        if (self.epochs > 0) == (self.steps > 0):
            raise ConfigError(
                f"a recipe has epochs or steps, not {argument('epochs', self.epochs, 'g')} "
                f"and {argument('steps', self.steps)}"
            )
        if self.head_init != "zero" and self.loss != "cross_entropy":
            raise ConfigError(f"head_init={self.head_init!r} is for loss='cross_entropy', not for {self.loss!r}")
        if self.validation == "test" and (self.patience or self.final == "best"):
            raise ConfigError("patience and final='best' choose by what is measured, which the test split is not for")
        if self.objective == "masked":
            self.check_masked()
        if self.decouple_lr and self.optimizer != "adamw":
            raise ConfigError(f"decouple_lr=true is for optimizer='adamw', not for {self.optimizer!r}")
        if [share for share, _ in self.resolutions] != sorted({share for share, _ in self.resolutions}):
            raise ConfigError(f"resolutions={self.resolutions} do not begin one after the other")

    def shown(self) -> dict[str, Any]:
        """The settings that hold, for people: without the model, which weights and `architecture` overrule."""
        left_out = DESCRIPTION | {"model"} | ({"weights"} if not self.weights else set())
        return {key: value for key, value in self.to_json().items() if key not in left_out}

    def check_masked(self) -> None:
        """Refuse what has no meaning where no labels are learned."""
        given = {
            "loss": self.loss != "cross_entropy",
            "label_smoothing": self.label_smoothing > 0,
            "class_weights": self.class_weights != "none",
            "teacher": bool(self.teacher),
            "augment.mixup_alpha and cutmix_alpha": self.augment.mixes,
            "head_init": self.head_init != "zero",
            "head_bias": self.head_bias != 0,
            "patch_drop": self.patch_drop > 0,
            "validation": self.validation != "auto",
            "final": self.final != "last",
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"{name} cannot be set with objective='masked', which learns colors and no labels")


def typed_change(owners: tuple[type[Settings], ...], key: str, value: Any, where: str) -> Any:
    """The value of a field of the first of these settings that has it."""
    for owner in owners:
        if key in hints_of(owner):
            return validate_field(owner, key, value, where)
    raise UnknownNameError(
        "setting", f"{where}.{key}", [f"{where}.{name}" for owner in owners for name in hints_of(owner)]
    )
