"""From an image to its maps: what the model answers, what that rests on, and how well each map tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.data.decode import ImageInput, decode
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.engines.runtimes import EngineName
from vitruvian.errors import ConfigError, ImageError, UnknownNameError, nearest
from vitruvian.explain.attention import attention_map, attention_rollout, check_head, gradient_attention, require_vit
from vitruvian.explain.deletion import Curve, deletion_curves
from vitruvian.inference import NOT_FINITE, Classifier, Encoder, Loaded, Prediction, batched, image_name, load_batches
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.settings import check_choice, check_range
from vitruvian.text import brief, printable

Method = Literal["gradient", "rollout", "attention"]
METHODS: tuple[Method, ...] = get_args(Method)
ANSWERS = 5
"""Answers that are told of each image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MapSettings:
    """Which maps to compute for each image."""

    methods: tuple[Method, ...] = METHODS
    layer: int | None = None
    """Layer of the raw attention; None for the last one."""
    head: int | None = None
    """Head of the raw attention; None for the mean over heads."""
    patch: tuple[int, int] | None = None
    """Row and column of the query patch of the raw attention; None for the token that the head reads."""
    target: str = ""
    """Label or index of the class to explain; empty for the predicted classes."""
    top: int = 1
    """Number of predicted classes with a map of gradient-weighted attention."""
    deletion: bool = False
    """Score the maps by deletion curves."""

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("method", method, get_args(Method))
        check_range("top", self.top, 1)
        if self.target and self.top > 1:
            raise ConfigError(f"class {self.target!r} is asked for, so the best {self.top} answers have no meaning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """One map of one image."""

    name: str
    """Short, different from the image's other maps."""
    title: str
    values: NDArray[np.float32]
    """(R, C), a number for each patch."""
    index: int | None = None
    """The class it is about, if it is about one."""
    patch: tuple[int, int] | None = None
    """Row and column of the patch it looks from, if it looks from one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """An image with its maps, or the error that stood in the way."""

    path: str
    image: Image.Image | None = None
    """Upright, at its own size."""
    predictions: tuple[Prediction, ...] = ()
    rejected: bool = False
    """The image shows none of the model's classes; the maps are of the nearest one."""
    maps: tuple[Map, ...] = ()
    curves: dict[str, Curve] = field(default_factory=dict)
    """The deletion curves by name of map, and of random orders; empty if not asked for."""
    error: str = ""


class Explainer:
    """Computes attention maps of images for a Vision Transformer.

    Args:
        model: A ViT, with or without a head.
        settings: Which maps to compute; by default all methods for the predicted class.
        device: Device of the model.
        engine: Engine for predictions and deletion curves; maps always use torch.

    Raises:
        ConfigError: The model has no attention, or no head and the settings need a class.
    """

    def __init__(
        self,
        model: Model,
        settings: MapSettings | None = None,
        *,
        device: str = "cpu",
        engine: EngineName = "torch",
    ) -> None:
        self.vit: ViT = require_vit(model)
        self.settings = settings or MapSettings()
        self.classifier = Classifier(model, device=device, engine=engine) if self.vit.config.num_classes else None
        if self.classifier is None:
            if self.settings.deletion or self.settings.target or self.settings.methods == ("gradient",):
                raise ConfigError("this model has no head, so no class to explain; choose rollout or attention")
            Encoder(model, device=device)  # checks channels and device, and moves the model there
        self.device = device
        check_head(self.vit, self.settings.head)
        if self.settings.layer is not None:
            self.vit.layer(self.settings.layer)
        self.target = self.class_index(self.settings.target) if self.settings.target else None

    def class_index(self, name: str) -> int:
        """Index of a class, by its label (in any case) or its index as text."""
        assert self.classifier is not None
        labels = self.classifier.labels
        for index, label in enumerate(labels):
            if label.casefold() == name.casefold():
                return index
        if not name.isdecimal():
            known = "" if nearest(name, labels) else f"(the model has {brief(labels)})"
            raise UnknownNameError("class", name, labels, see=known)
        if int(name) >= len(labels):
            raise ConfigError(f"class {name} does not exist: the model has classes 0 to {len(labels) - 1}")
        return int(name)

    def explain(self, source: ImageInput) -> Explained:
        """Compute the maps of one image. If it cannot be read, the result has an `error`."""
        return next(self.stream([source]))

    def stream(self, images: Iterable[ImageInput]) -> Iterator[Explained]:
        """Yield the maps of each image, in order; the next image is decoded meanwhile."""
        preprocess = self.vit.meta.preprocess

        def load(_: int, source: ImageInput) -> Loaded[tuple[str, Image.Image | None]]:
            try:
                image = decode(source)
                return (image_name(source), image), apply_preprocess(image, preprocess)
            except ImageError as error:
                return (image_name(source), None), error

        for (((path, image), pixels),) in load_batches(load, batched(images, 1), threads=1, ahead=2):
            if isinstance(pixels, ImageError):
                yield Explained(path=path, error=str(pixels))
            else:
                explained = self.explain_view(pixels, path)
                yield explained if explained.error else replace(explained, image=image)

    def explain_view(self, pixels: Tensor, path: str = "image") -> Explained:
        """Compute the maps of a preprocessed image, normalized pixels (channels, rows, columns)."""
        predictions: tuple[Prediction, ...] = ()
        targets: list[Prediction] = []
        rejected = False
        if self.classifier is not None:
            logits = self.classifier.logits(pixels[None])
            ranked = self.classifier.rank(logits, len(self.classifier.labels))[0]
            if not ranked:
                return Explained(path=path, error=f"{printable(path)}: {NOT_FINITE}")
            predictions, rejected = ranked[:ANSWERS], self.classifier.rejects(logits)[0]
            targets = [a for a in ranked if a.index == self.target] if self.target is not None else []
            targets = targets or list(ranked[: self.settings.top])
        maps = self.maps(pixels, targets)
        curves = self.curves(pixels, maps, targets[0].index) if self.settings.deletion and maps else {}
        return Explained(path=path, predictions=predictions, rejected=rejected, maps=maps, curves=curves)

    def maps(self, pixels: Tensor, targets: list[Prediction]) -> tuple[Map, ...]:
        """The maps that the settings ask for, of one image's normalized pixels; gradients are for `targets`."""
        batch = pixels[None].to(self.device)
        found = []
        for method in self.settings.methods:
            if method == "gradient":
                found += [self.gradient_attention(batch, answer, number) for number, answer in enumerate(targets, 1)]
            elif method == "rollout":
                values = attention_rollout(self.vit, batch)[0].numpy()
                found.append(Map(name="rollout", title="attention rollout, all layers", values=values))
            else:
                found.append(self.attention(batch))
        return tuple(found)

    def gradient_attention(self, batch: Tensor, answer: Prediction, number: int) -> Map:
        """The gradient-weighted map of one answer, for a batch of one image."""
        return Map(
            name="gradient" if number == 1 else f"gradient-{number}",
            title=f"gradient-weighted attention: {answer.label} ({answer.probability:.1%})",
            values=gradient_attention(self.vit, batch, [answer.index])[0].numpy(),
            index=answer.index,
        )

    def attention(self, batch: Tensor) -> Map:
        """The raw attention map of the layer, head and patch in the settings."""
        settings = self.settings
        values = attention_map(self.vit, batch, layer=settings.layer, head=settings.head, patch=settings.patch)
        layer = f"layer {self.vit.layer(-1 if settings.layer is None else settings.layer)}"
        if self.vit.attn_pool is not None and settings.patch is None:
            layer = "the pooling probe"
        heads = "mean of heads" if settings.head is None else f"head {settings.head}"
        origin = "" if settings.patch is None else f", from patch {settings.patch[0]},{settings.patch[1]}"
        title = f"attention of {layer}, {heads}{origin}"
        return Map(name="attention", title=title, values=values[0].numpy(), patch=settings.patch)

    def curves(self, pixels: Tensor, maps: tuple[Map, ...], index: int) -> dict[str, Curve]:
        """The deletion curves of the maps that are about this class, or about none."""
        assert self.classifier is not None
        values = {m.name: torch.from_numpy(m.values) for m in maps if m.index in (None, index)}
        return deletion_curves(self.classifier, pixels, values, index)
