"""The model that a run begins with: from scratch or from weights, with its labels and its view."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vitruvian.catalog import resolve
from vitruvian.config import CHANGEABLE, ModelConfig, ModelMeta, Preprocess, ViTConfig
from vitruvian.data.augment import Augment
from vitruvian.data.sources import Source
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.build import Model, build
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status
from vitruvian.settings import Size
from vitruvian.training.distill import Distilled
from vitruvian.training.distributed import Processes
from vitruvian.training.masked import Colors, MaskedViT
from vitruvian.training.objective import Labels, Objective
from vitruvian.training.optimizer import freeze
from vitruvian.training.recipe import Recipe
from vitruvian.weights.adapt import Changes
from vitruvian.weights.description import Description
from vitruvian.weights.load import check_finite, locate, open_model, published_name, with_config
from vitruvian.weights.parse import LoadHints

MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD: larger blocks go back to the system as soon as they are freed."""
LARGE_BYTES = 1 << 20


def model_for(recipe: Recipe, labels: Sequence[str]) -> Model:
    masked = recipe.objective == "masked"
    labels = () if masked else labels
    model = from_weights(recipe, labels) if recipe.weights else from_scratch(recipe, labels)
    if masked:
        model = MaskedViT.around(model, recipe.seed)
    # what was fitted to the weights that it starts from no longer holds
    preprocess = model.meta.preprocess.with_changes(recipe.view).with_image_size(model.config.image_size)
    model.meta = model.meta.for_new_head(tuple(labels) or None).replace(preprocess=preprocess)
    freeze(model, recipe)
    set_options(model, recipe)
    return model.train()


def objective_for(recipe: Recipe, model: Model, source: Source, processes: Processes) -> Objective:
    """What the model of a recipe learns to answer."""
    if isinstance(model, MaskedViT):
        return Colors(recipe, model)
    return Distilled(recipe, model, source, processes) if recipe.teacher else Labels(recipe, model.config.num_classes)


def model_again(description: Description, recipe: Recipe) -> Model:
    """The model of a run that goes on, without what it started from; a checkpoint will fill it."""
    model = build(description.config)
    if recipe.objective == "masked":
        model = MaskedViT.around(model, recipe.seed)
    model.meta = description.meta
    freeze(model, recipe)
    set_options(model, recipe)
    return model.train()


def config_of(recipe: Recipe, num_classes: int) -> ModelConfig:
    changes = dict(recipe.architecture) | {"num_classes": num_classes}
    if recipe.image_size:
        changes["image_size"] = (recipe.image_size, recipe.image_size)
    found = changed_config(resolve(recipe.model), changes)
    return found.replace(image_size=measured_size(recipe, found))


def changed_config(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    known = config.to_json()
    for key in changes:
        if key not in known:
            raise UnknownNameError("setting", f"architecture.{key}", [f"architecture.{name}" for name in known])
    return config.replace(**changes)


def from_scratch(recipe: Recipe, labels: Sequence[str]) -> Model:
    model = build(config_of(recipe, len(labels)), seed=recipe.seed)
    start_head(model, recipe.head_bias)
    half = (0.5,) * model.config.in_channels
    model.meta = ModelMeta(
        preprocess=Preprocess(image_size=resolve(recipe.model).image_size, mean=half, std=half),
        origin=f"trained from scratch with {recipe.model}",
    )
    return model


def from_weights(recipe: Recipe, labels: Sequence[str]) -> Model:
    """The weights, with their own head where it is for the same classes, else with a fresh one."""
    others = set(recipe.architecture).difference(CHANGEABLE)
    if others:
        raise ConfigError(
            f"architecture.{min(others)} cannot change what weights already have; "
            f"with weights, only {', '.join(sorted(CHANGEABLE))} can"
        )

    def changes(found: Description) -> Changes:
        wanted = measured_size(recipe, found.config)
        if found.meta.preprocess.fit == "naflex":
            shape = "x".join(map(str, wanted))
            print_status(
                f"note: {recipe.weights} keeps each image's shape (NaFlex); here all images are squashed to {shape}"
            )
        size = None if wanted == found.config.image_size else wanted
        if found.meta.labels == tuple(labels):
            return Changes(image_size=size)
        return Changes(image_size=size, num_classes=len(labels), head="new" if labels else "keep")

    hints = LoadHints(name=published_name(recipe.weights))
    model, _ = open_model(locate(recipe.weights), hints, changes)
    check_finite(model, recipe.weights)
    if model.meta.labels is None:
        start_head(model, recipe.head_bias)
    if recipe.architecture and isinstance(model.config, ViTConfig):  # regularizers say nothing about a ResNet
        model = with_config(model, changed_config(model.config, recipe.architecture)).requires_grad_(True)
    origin = f"trained from {recipe.weights}" + (f" ({model.meta.origin})" if model.meta.origin else "")
    model.meta = model.meta.replace(origin=origin)
    return model


def without_shape(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe's architecture holds for weights: only what changes no array."""
    return {key: value for key, value in recipe.architecture.items() if key in CHANGEABLE}


def start_head(model: Model, bias: float) -> None:
    if bias and model.head is not None:
        with torch.no_grad():
            model.head.bias.fill_(bias)


def augment_of(recipe: Recipe, model: Model) -> Augment:
    """The training views: the recipe's, in the values of the evaluation view and at their scale of its size."""
    size, view = scaled(model.config, recipe.train_scale), model.meta.preprocess
    return recipe.augment.replace(image_size=size, mean=view.mean, std=view.std, output="uint8")


def measured_size(recipe: Recipe, config: ModelConfig) -> Size:
    """Of the images that the model is measured with and saved for, where its own are those of `config`."""
    return (recipe.image_size, recipe.image_size) if recipe.image_size else scaled(config, recipe.enlarge)


def scaled(config: ModelConfig, factor: float) -> Size:
    """The model's image size times the factor, in whole patches."""
    unit = config.stride if isinstance(config, ViTConfig) else 1
    rows, columns = (max(1, round(side * factor / unit)) * unit for side in config.image_size)
    return rows, columns


def set_options(model: Model, recipe: Recipe) -> None:
    if isinstance(model, ViT):
        model.patch_drop = recipe.patch_drop
        model.grad_checkpointing = recipe.grad_checkpointing
        if recipe.grad_checkpointing:
            give_back_freed()
    elif recipe.grad_checkpointing:  # patch_drop says nothing about a model without tokens
        raise ConfigError("grad_checkpointing is for Vision Transformers, not for a ResNet")
    if isinstance(model.config, ViTConfig):
        for _, side in recipe.resolutions:
            model.config.grid_of((side, side))  # refuses a side that the patches do not divide


def give_back_freed() -> None:
    """Return large freed tensors on a CPU to the system at once, where the C library is glibc.

    glibc keeps them for later, and over a step with checkpointed activations the gaps between them add up: the
    process then takes twice the memory that its tensors do. Giving back costs a little time.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BYTES)
