"""The model that a run starts from: random weights or given ones, a fitted head, a whitened stem.

A new head can start as a linear probe of the frozen features. Its regularization is selected on a part of the training
images that it holds out, so nothing is selected on the images it was fitted to.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitruvian.catalog import resolve
from vitruvian.config import (
    CHANGEABLE,
    DEFAULT_BATCH_SIZE,
    ROOT_CHANNELS,
    ModelConfig,
    ModelMeta,
    Preprocess,
    ViTConfig,
)
from vitruvian.data.augment import Augment
from vitruvian.data.formats import open_dataset
from vitruvian.data.loader import Loader
from vitruvian.data.sources import Concat, Source, take
from vitruvian.data.stored import channel_statistics
from vitruvian.data.transform import as_transform
from vitruvian.errors import ConfigError, DataError, UnknownNameError, argument
from vitruvian.evaluation import probe_classifiers as classifiers
from vitruvian.evaluation.features import HEADS, FeatureSet, compute_features, open_store
from vitruvian.evaluation.probe import probe_sources
from vitruvian.inference import Encoder
from vitruvian.model.build import Model, build, empty
from vitruvian.model.lora import add_lora, plain_state
from vitruvian.model.resnet import ConvStem, whitening_kernels
from vitruvian.model.vit import ViT
from vitruvian.progress import no_tracking, print_status, track
from vitruvian.settings import Size
from vitruvian.targets import KINDS, SINGLE, Target
from vitruvian.text import plural
from vitruvian.training.distributed import Processes
from vitruvian.training.masked import MaskedViT
from vitruvian.training.optimizer import freeze
from vitruvian.training.recipe import Recipe
from vitruvian.training.splits import subsample
from vitruvian.weights.checkpoint_files import Description
from vitruvian.weights.create import adapt
from vitruvian.weights.load import Changes, assemble, check_finite, locate, open_model, published_name, with_config
from vitruvian.weights.parse import LoadHints

# N images, D features, K classes

STEM_IMAGES = 2_000  # number of images to compute the whitening from; a patch has few values, and an image many patches
CHANNEL_IMAGES = 10_000  # maximum number of images to measure the mean and deviation of channels on
HEAD_IMAGES = 20_000  # maximum number of images to fit a head to

Head = tuple[Tensor, Tensor]  # weight (D, K) and bias (K,): logits = features @ weight + bias


def initial_model(
    recipe: Recipe, labels: Sequence[str], source: Source, processes: Processes, report: Callable[[str], None]
) -> Model:
    """The model of a new run, on its device, with its stem and head initialized from the training images."""
    model = model_for(recipe, labels, target_of(source)).to(processes.device)
    is_new = not recipe.weights or "in_channels" in recipe.architecture or "pixels" in recipe.preprocess
    if model.meta.preprocess.is_stored and is_new and "mean" not in recipe.preprocess:
        measure_channels(model, source, report)
    if recipe.stem_init == "whitening" and not recipe.weights:
        whiten_stem(model, source)
    if recipe.head_init != "zero" and is_fresh(model):
        fit_head(model, source, recipe, processes=processes, report=report)
    return model


def measure_channels(model: Model, source: Source, report: Callable[[str], None]) -> None:
    """Set the mean and deviation of the preprocessing to those of the training images."""
    images, channels = subsample(source, CHANNEL_IMAGES), model.config.in_channels
    report(f"measuring the mean and deviation of {plural(channels, 'channel')} on {plural(len(images), 'image')}")
    mean, std = channel_statistics(images, channels, partial(track, label="measuring"))
    preprocess = model.meta.preprocess.replace(mean=tuple(mean), std=tuple(std), pixels="stored")
    model.meta = model.meta.replace(preprocess=preprocess)


def target_of(source: Source) -> Target:
    """The training target for these images, with the mean and standard deviation of numbers."""
    if source.targets is None:
        return Target()
    kind, levels = source.target, source.targets.levels
    if KINDS[kind].score_function != "identity":
        return Target(kind=kind)
    known, mean, std = source.targets.statistics(np.asarray(source.labels()))
    for name, count, deviation in zip(source.classes, known, std):
        if not count or not deviation > 0:
            what = "all images have the same" if count else "no image has a"
            raise DataError(f"{what} value of {name!r}, so that it cannot be learned", where=source.name)
    return Target(kind=kind, mean=tuple(mean.tolist()), std=tuple(std.tolist()), levels=levels)


def model_for(recipe: Recipe, labels: Sequence[str], target: Target = SINGLE) -> Model:
    """The model of a recipe, in training mode, without anything that depends on the images."""
    is_masked = recipe.objective == "masked"
    labels = () if is_masked else labels
    if recipe.weights:
        model = from_weights(recipe, labels, target)
    else:
        model = build(config_of(recipe, len(labels)), seed=recipe.seed)
        half = (0.5,) * model.config.in_channels
        preprocess = Preprocess(image_size=resolve(recipe.model).image_size, mean=half, std=half)
        model.meta = ModelMeta(preprocess=preprocess, origin=f"trained from scratch with {recipe.model}")
    if model.head is not None and model.meta.labels is None:  # the head is new
        nn.init.constant_(model.head.bias, head_bias(recipe, len(labels)))
    if is_masked:
        model = MaskedViT.around(model, recipe)
    # Temperature, threshold and cascade were fitted to the weights before training.
    preprocess = model.meta.preprocess.with_changes(recipe.preprocess).with_image_size(model.config.image_size)
    if model.meta.labels is not None and model.meta.target.mean:  # the head is kept, with the unit of its numbers
        target = target.replace(mean=model.meta.target.mean, std=model.meta.target.std)
    meta = model.meta.for_new_head(tuple(labels) or None)
    score = recipe.score_function if target.kind == "single" else KINDS[target.kind].score_function
    model.meta = meta.replace(preprocess=preprocess, score_function=score, target=target)
    return prepare(model, recipe)


def rebuild_model(description: Description, recipe: Recipe) -> Model:
    """The model of a resumed run, before its checkpoint is loaded; the weights it started from are not needed."""
    model = build(description.config)
    if recipe.objective == "masked":
        model = MaskedViT.around(model, recipe)
    model.meta = description.meta
    return prepare(model, recipe)


def prepare(model: Model, recipe: Recipe) -> Model:
    """Freeze parameters, add LoRA's, and set the options of training."""
    if recipe.lora.rank:
        if not recipe.weights:
            reason = "needs weights to start from: it trains small updates of them"
            raise ConfigError(f"{argument('lora', recipe.lora.rank)} {reason}")
        add_lora(model, recipe.lora, seed=recipe.seed)
    freeze(model, recipe)
    if isinstance(model, ViT):
        model.patch_drop = recipe.patch_drop
        model.grad_checkpointing = recipe.grad_checkpointing
    elif recipe.grad_checkpointing:  # a recipe for both kinds of models may have patch_drop
        raise ConfigError("grad_checkpointing is for Vision Transformers, not for a ResNet")
    return model.train()


def config_of(recipe: Recipe, num_classes: int) -> ModelConfig:
    """The config of a recipe's model, trained from scratch."""
    changes = dict(recipe.architecture) | {"num_classes": num_classes}
    if recipe.image_size:
        changes["image_size"] = (recipe.image_size, recipe.image_size)
    config = change_config(resolve(recipe.model), changes)
    return config.replace(image_size=evaluation_size(recipe, config))


def change_config(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    known = config.to_json()
    if unknown := [key for key in changes if key not in known]:
        raise UnknownNameError("setting", f"architecture.{unknown[0]}", [f"architecture.{name}" for name in known])
    return config.replace(**changes)


def from_weights(recipe: Recipe, labels: Sequence[str], target: Target) -> Model:
    """The model of the weights, with their own head if it has the same classes, else with a new one."""
    fixed = set(recipe.architecture).difference(CHANGEABLE, ("in_channels",))
    if fixed:
        allowed = ", ".join(sorted((*CHANGEABLE, "in_channels")))
        raise ConfigError(f"architecture.{min(fixed)} cannot be changed when starting from weights, only {allowed}")

    def changes(description: Description) -> Changes:
        size = evaluation_size(recipe, description.config)
        if description.meta.preprocess.fit == "naflex":
            squashed = f"here all images are squashed to {'x'.join(map(str, size))}"
            print_status(f"note: {recipe.weights} keeps the aspect ratio (NaFlex); {squashed}")
        image_size = None if size == description.config.image_size else size
        before = description.meta.target
        is_same = (before.kind, before.levels) == (target.kind, target.levels)
        if description.meta.labels == tuple(labels) and is_same:
            return Changes(image_size=image_size)
        return Changes(image_size=image_size, num_classes=len(labels), head="new" if labels else "keep")

    model, _ = open_model(locate(recipe.weights), LoadHints(name=published_name(recipe.weights)), changes)
    check_finite(model, recipe.weights)
    if "in_channels" in recipe.architecture:
        model = adapt(model, {"in_channels": recipe.architecture["in_channels"]}).requires_grad_(True)
    if recipe.architecture and isinstance(model.config, ViTConfig):  # a ResNet has no such settings
        model = with_config(model, change_config(model.config, recipe.architecture)).requires_grad_(True)
    origin = f"trained from {recipe.weights}" + (f" ({model.meta.origin})" if model.meta.origin else "")
    model.meta = model.meta.replace(origin=origin)
    return model


def without_shape(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe's architecture that applies to given weights: settings that change no parameter's shape."""
    return {key: value for key, value in recipe.architecture.items() if key in CHANGEABLE}


def head_bias(recipe: Recipe, num_classes: int) -> float:
    return -math.log(max(1, num_classes - 1)) if recipe.head_bias == "prior" else float(recipe.head_bias)


def augment_for(recipe: Recipe, model: Model) -> Augment:
    """The recipe's augmentation with the size, mean and std of the model's preprocessing."""
    size, preprocess = scale_size(model.config, recipe.train_scale), model.meta.preprocess
    changes: dict[str, Any] = {"pixels": "stored"} if preprocess.is_stored else {"output": "uint8"}
    return recipe.augment.replace(image_size=size, mean=preprocess.mean, std=preprocess.std, **changes)


def evaluation_size(recipe: Recipe, config: ModelConfig) -> Size:
    """The size of evaluation images, and of the saved model."""
    return (recipe.image_size, recipe.image_size) if recipe.image_size else scale_size(config, recipe.enlarge)


def scale_size(config: ModelConfig, factor: float) -> Size:
    """The model's image size times `factor`, rounded to whole patches."""
    unit = config.stride if isinstance(config, ViTConfig) else 1
    rows, columns = (max(1, round(side * factor / unit)) * unit for side in config.image_size)
    return rows, columns


def whiten_stem(model: Model, source: Source) -> None:
    """Set the first convolution of the stem to the principal directions of the patches of the training images."""
    stem = model.embed.stem if isinstance(model, ViT) else None
    if not isinstance(stem, ConvStem):
        raise ConfigError("stem_init='whitening' needs architecture.stem.style='conv'")
    weight = stem.root.weight
    sums = torch.zeros(weight[0].numel(), weight[0].numel(), dtype=torch.float64)
    images, transform = subsample(source, STEM_IMAGES), as_transform(model.meta.preprocess)
    with closing(Loader(images, transform=transform, batch_size=100, training=False)) as loader:
        for batch in loader.batches(0):
            patches = F.unfold(batch.pixels, weight.shape[-1], stride=2).transpose(1, 2).flatten(0, 1).double()
            sums += patches.T @ patches
    kernels = whitening_kernels(sums / sums.trace() * len(sums), ROOT_CHANNELS // 2)
    with torch.no_grad():
        weight[: len(kernels)] = kernels.view(-1, *weight.shape[1:]).to(weight)


def is_fresh(model: Model) -> bool:
    """Whether the head is new, which means all zeros."""
    return model.head is not None and not bool(model.head.weight.any())


def fit_head(
    model: Model, source: Source, recipe: Recipe, *, processes: Processes, report: Callable[[str], None]
) -> Head:
    """Fit the model's head to its frozen features, which come from the feature store that probes share."""
    was_training = model.training
    encoder = Encoder(model.eval(), device=str(processes.device))
    images = subsample(source, HEAD_IMAGES)
    report(f"fitting the head to {len(images):,} images")
    try:
        feature_set = shared_features(encoder, images, processes)
    finally:
        model.train(was_training)
    head = fit_probe(feature_set, model.meta.target)
    set_head(model, head, head_bias(recipe, len(source.classes)))
    return head


def shared_features(encoder: Encoder, source: Source, processes: Processes) -> FeatureSet:
    """The features of all images. Each process computes a part and reads the others from the feature store.

    Machines that do not share a cache folder compute all of them.
    """
    follow = partial(track, label="fitting the head") if processes.is_main else no_tracking
    if processes.is_distributed:
        part = take(source, np.arange(processes.rank, len(source), processes.world_size), source.name)
        compute_features(encoder, part, open_store(encoder), track=follow)
        processes.barrier()
    return compute_features(encoder, source, open_store(encoder), track=follow)


@torch.no_grad()
def set_head(model: Model, head: Head, added: float = 0.0) -> None:
    """Replace the weights of a new head, and add to its bias.

    A distilled model averages two: the second stays zero, the first doubles.
    """
    assert model.head is not None
    heads = 2 if isinstance(model, ViT) and model.head_dist is not None else 1
    weight, bias = head
    model.head.weight.copy_(heads * weight.T)
    model.head.bias.copy_(heads * bias + added)


def with_head(model: Model, head: Head, classes: Sequence[str], origin: str, target: Target = SINGLE) -> Model:
    """A copy of a model in evaluation mode with this head, which reads the same features, for these outputs."""
    config = model.config.replace(num_classes=len(classes))
    state = {name: tensor.cpu() for name, tensor in plain_state(model).items() if not name.startswith(HEADS)}
    for prefix in HEADS if isinstance(config, ViTConfig) and config.distillation else HEADS[:1]:
        state |= {f"{prefix}weight": torch.zeros(len(classes), config.feature_width)}
        state |= {f"{prefix}bias": torch.zeros(len(classes))}
    meta = model.meta.for_new_head(tuple(classes)).replace(origin=origin, target=target)
    if target != SINGLE:
        meta = meta.replace(score_function=KINDS[target.kind].score_function)
    copy = assemble(empty(config), state, meta)
    set_head(copy, head)
    return copy


def fit_probe(features: FeatureSet, target: Target) -> Head:
    """A linear probe as a head: logistic regression, or ridge regression of numbers in the units of the target."""
    if KINDS[target.kind].score_function != "identity":
        return fit_logistic(features)
    values, numbers = features.examples
    return classifiers.fit_numbers(values, (numbers - np.array(target.mean)) / np.array(target.std))


def fit_logistic(features: FeatureSet) -> Head:
    """Logistic regression as `vit probe` fits it, as a head for features that are not normalized.

    If no class has two images, the regularization cannot be selected and is the strongest.
    """
    classes, l2 = len(features.classes), max(classifiers.L2_GRID)
    if features.targets is not None or np.bincount(features.labels).max() > 1:
        parts = classifiers.hold_out_examples(features.examples, classes=classes)
        l2, _ = classifiers.choose_l2(*parts, classes=classes)
    return head_of_probe(classifiers.fit_linear(*features.examples, classes=classes, l2=l2))


def head_of_probe(probe: classifiers.LinearClassifier) -> Head:
    """A classifier of standardized features as a head."""
    weight = probe.weights[:-1] / probe.std[:, None]
    return weight, probe.weights[-1] - probe.mean @ weight


def probe_model(
    data: object,
    encoder: Encoder,
    *,
    shots: int = 0,
    group_by: str = "",
    target: str = "auto",
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> Model:
    """The encoder's model with the linear probe of `vit probe` as its head, or with the few-shot probe of `shots`."""
    sources, test_is = probe_sources(open_dataset(data, target=target, accepts=KINDS), group_by)
    train, _, *dev = sources
    source = Concat([train, *dev], name=train.name) if dev else train
    features = compute_features(encoder, source, open_store(encoder), batch_size=batch_size)
    if features.targets is not None and shots:
        raise DataError("of several labels or numbers, only the linear probe can be saved", where=source.name)
    goal = target_of(source)
    name, head, classes = "linear", fit_probe(features, goal), len(source.classes)
    if shots:
        orders = classifiers.shuffle_classes(features.labels, classes=classes, seed=classifiers.SEEDS[0])
        few = [part[np.concatenate([order[:shots] for order in orders])] for part in features.examples]
        name, head = "few-shot", head_of_probe(classifiers.fit_fewshot(*few, classes=classes))
    origin = f"{name} probe of {encoder.name} on {source.name}, {len(features):,} images; not fitted to {test_is}"
    return with_head(encoder.torch_model, head, source.classes, origin, goal)
