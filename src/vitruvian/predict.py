"""From images to ranked answers: the one inference path of commands, service and evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitruvian.catalog import title_of
from vitruvian.config import DEFAULT_BATCH_SIZE, CascadeConfig, Preprocess
from vitruvian.data.decode import ImageInput, name_of
from vitruvian.data.preprocess import preprocess_image
from vitruvian.data.transform import EvalTransform, Transform, as_transform
from vitruvian.data.workers import in_threads
from vitruvian.engines.choose import Engine
from vitruvian.engines.graph import Graph, find_graph, open_graph
from vitruvian.engines.runtimes import EngineName, check_engine
from vitruvian.errors import ConfigError, ImageError, argument
from vitruvian.model.build import Model
from vitruvian.model.cores import map_over_cores, map_over_shapes
from vitruvian.model.resnet import ResNet
from vitruvian.settings import BatchSize, Size, check_range, validate
from vitruvian.text import printable
from vitruvian.weights.load import load, with_merging

# B images, K classes, F features

DECODERS = min(4, os.cpu_count() or 1)
"""Threads that decode ahead of the model."""

Item = TypeVar("Item")
Result = TypeVar("Result")

Views = list[tuple[str, Tensor | ImageError]]
"""Paths of images, each with what the model sees, or the error."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class and its probability."""

    label: str
    probability: float
    index: int
    """Index of the class among the model's outputs."""

    def to_json(self) -> dict[str, str | int | float]:
        """The prediction as a JSON object."""
        return {"label": self.label, "index": self.index, "probability": self.probability}


@dataclass(frozen=True, slots=True)
class ImageResult:
    """The predictions for one image, most probable first, or the error that prevented them."""

    path: str
    """The path as given, or a description of an image that has none."""
    predictions: tuple[Prediction, ...] = ()
    error: str = ""
    rejected: bool = False
    """The score is below the model's threshold: the image shows none of its classes."""

    def to_json(self) -> dict[str, object]:
        """The path with either the predictions or the error, as a JSON object."""
        if self.error:
            return {"path": self.path, "error": self.error}
        rejected = {"rejected": True} if self.rejected else {}
        return {"path": self.path, **rejected, "predictions": [prediction.to_json() for prediction in self.predictions]}


class Encoder:
    """A model with its preprocessing, ready to turn images into vectors; it needs no head."""

    view: Preprocess | Transform | None = None
    """What the model sees of an image, where that is not `model.meta.preprocess`."""

    def __init__(
        self,
        model: Model | str | Path,
        *,
        num_heads: int | None = None,
        image_size: int | Size | None = None,
        device: str = "cpu",
        engine: EngineName = "torch",
        tome_r: int | Sequence[int] | None = None,
    ) -> None:
        """From a model, or from a file, folder or published name, loaded with `heads` and `image_size`.

        `engine` (torch, onnxruntime, openvino, or auto for the fastest that is installed) computes the logits. `tome_r`
        tokens merge in each layer (ToMe); 0 is none, also where the model says otherwise.
        """
        self.engine = check_engine(engine, device)
        self._run: Engine | None = None
        self.name = str(model) if isinstance(model, str | Path) else title_of(model.config)
        if isinstance(model, str | Path):
            graph = find_graph(model)
            if graph is None:
                model = load(model, num_heads=num_heads, image_size=image_size)
            else:  # what only a model has, it refuses in a sentence
                if num_heads is not None or device.partition(":")[0] != "cpu":
                    raise ConfigError(
                        f"{argument('num_heads')} and {argument('device')} are for weights; "
                        "an exported graph runs as it is, on the CPU"
                    )
                model = cast(Model, open_graph(graph, engine=engine, image_size=image_size))
                self.engine = "torch"
        elif num_heads is not None or image_size is not None:
            raise ConfigError("num_heads and image_size are for loading weights; this model is already made")
        if tome_r is not None:
            model = with_merging(model, tome_r)
        if len(model.meta.preprocess.mean) != model.config.in_channels:
            raise ConfigError(
                f"the model takes {model.config.in_channels} channels, "
                f"its preprocessing gives {len(model.meta.preprocess.mean)}: set model.preprocess"
            )
        if self.engine != "torch":
            model.meta.preprocess.one_size(argument("engine", engine))
        try:
            if torch.device(device).type == "meta":
                raise RuntimeError("it computes nothing")
            self.model: Model = model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"{argument('device', device)} cannot be used: {str(error).splitlines()[0]}") from None
        self.device = device

    def with_view(self, view: Preprocess | Transform) -> Self:
        """The same model with another view of images: settings, or any callable from a PIL image to a tensor.

        The model itself, and what is saved of it, keeps its own.
        """
        changed = copy(self)
        changed.view = view
        return changed

    @property
    def seen_as(self) -> Preprocess | Transform:
        """The view in use."""
        return self.model.meta.preprocess if self.view is None else self.view

    def views(self, images: Iterable[ImageInput], *, ahead: int) -> Iterator[tuple[str, Tensor | ImageError]]:
        """Each image's path with its view, or with the error, in order; `ahead` of them are under way."""
        view = as_transform(self.seen_as)

        def see(numbered: tuple[int, ImageInput]) -> tuple[str, Tensor | ImageError]:
            number, image = numbered
            path = os.fspath(image) if isinstance(image, str | os.PathLike) else name_of(image)
            try:
                return path, view(image, np.random.default_rng(number))
            except ImageError as error:
                return path, error

        # a transform may draw from the global generators, which threads share
        threads = DECODERS if isinstance(view, EvalTransform) else 1
        yield from in_threads(see, enumerate(images), threads=threads, ahead=ahead)

    def overlapped(self, compute: Callable[[Item], Result], batches: Iterable[Item]) -> Iterator[Result]:
        """`compute(batch)`, which calls this model, of each batch in order.

        Cores that take whole images are not done with a batch at the same time; so they get the next one meanwhile.
        What they compute does not depend on it. The first batch stays alone, as an engine may be chosen by it.
        """
        left, cores = iter(batches), torch.get_num_threads()

        def alike(batch: Item) -> Result:
            if torch.get_num_threads() != cores:  # which a new thread may not have from this one
                torch.set_num_threads(cores)
            return compute(batch)

        yield from map(compute, islice(left, 1))
        if cores > 1 and self._whole_images():
            yield from in_threads(alike, left, threads=2, ahead=3)
        else:
            yield from map(compute, left)

    def _whole_images(self) -> bool:
        """Whether each core takes whole images of a batch, and calls may overlap."""
        plain = isinstance(self.model, Model) and not self.model.training and self.model.meta.cascade is None
        return plain and self.engine == "torch" and torch.device(self.device).type == "cpu"

    def features(self, pixels: Tensor) -> Tensor:
        """What the head reads (B, F) of normalized pixels (B, channels, rows, columns), without dropout."""
        return self.compute(self.model.features, pixels)

    def compute(self, function: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """A part of the model on all cores, in evaluation mode."""
        if isinstance(function, Engine | Graph):  # these share out the cores themselves
            return function(pixels)
        training = self.model.training
        if training:
            self.model.eval()
        try:
            return map_over_cores(function, pixels.to(self.device)).float().cpu()
        finally:
            if training:
                self.model.train()


class Classifier(Encoder):
    """A model with its preprocessing and labels, ready to name what is in images."""

    def __init__(
        self,
        model: Model | str | Path,
        *,
        num_heads: int | None = None,
        image_size: int | Size | None = None,
        device: str = "cpu",
        engine: EngineName = "torch",
        tome_r: int | Sequence[int] | None = None,
        flip: bool = False,
        labels: Iterable[str] | None = None,
        template: str | None = None,
    ) -> None:
        """As an Encoder, of a model with a head, or of a CLIP or SigLIP that answers in the words of `labels`.

        `template` is what the words stand in: text with {}, or the name of a published set (`imagenet`, `imagenet-7`).
        With `flip`, an image and its mirror image are answered together.
        """
        super().__init__(model, num_heads=num_heads, image_size=image_size, device=device, engine=engine, tome_r=tome_r)
        self.flip = flip
        self._first: Classifier | None = None
        if labels is not None:
            from vitruvian.weights.words import with_words  # most models have labels of their own

            self.model = with_words(self.model, labels, template).to(device)
        elif template is not None:
            raise ConfigError(f"{argument('template')} is for {argument('labels')}, which are missing")
        self.labels = labels_of(self.model)

    def predict(
        self, images: Iterable[ImageInput], *, top: int = 5, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> list[list[Prediction]]:
        """The `top` predictions for each image, most probable first; an unreadable image raises ImageError."""
        predictions = []
        for result in self.stream(images, top=top, batch_size=batch_size):
            if result.error:
                raise ImageError(result.error)
            predictions.append(list(result.predictions))
        return predictions

    def stream(
        self, images: Iterable[ImageInput], *, top: int = 5, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> Iterator[ImageResult]:
        """Yield the result for each image, in order, including errors.

        Images are decoded by a few threads, at most two batches ahead of the model, so a million
        of them take no more memory than a hundred.
        """
        if isinstance(images, str | bytes | os.PathLike | Image.Image):
            raise ConfigError("expected a list of images, not one: predict(['a.jpg'])")
        check_range("top", top, 1)
        validate("batch_size", BatchSize, batch_size)
        return self._stream(images, top, batch_size)

    def _stream(self, images: Iterable[ImageInput], top: int, batch_size: int) -> Iterator[ImageResult]:
        views = self.views(images, ahead=2 * batch_size)

        def compute(group: Views) -> tuple[Views, Tensor]:
            pixels = [seen for _, seen in group if isinstance(seen, Tensor)]
            return group, map_over_shapes(self.logits, pixels) if pixels else torch.zeros(0, len(self.labels))

        for group, logits in self.overlapped(compute, iter(lambda: list(islice(views, batch_size)), [])):
            ranked = zip(self.rank(logits, top), self.rejects(logits))
            for path, seen in group:
                if isinstance(seen, ImageError):
                    yield ImageResult(path, error=str(seen))
                    continue
                predictions, rejected = next(ranked)
                if predictions:
                    yield ImageResult(path, predictions, rejected=rejected)
                else:
                    yield ImageResult(path, error=f"{printable(path)}: the model's answer is not a finite number")

    def logits(self, pixels: Tensor) -> Tensor:
        """The model's raw answers (B, K) for normalized pixels (B, channels, rows, columns), without dropout."""
        logits = self._logits(pixels)
        return (logits + self._logits(pixels.flip(-1))) / 2 if self.flip else logits

    def prepare(self, pixels: Tensor) -> None:
        """Get the engine ready for batches like this one: a first answer may need a graph or a measurement."""
        run = self._engine()
        if isinstance(run, Engine):
            run.prepare(pixels)
            if self.model.meta.cascade is not None:
                self._first_pass().prepare(reduced(pixels, self.model.meta.cascade))

    def _logits(self, pixels: Tensor) -> Tensor:
        cascade = self.model.meta.cascade
        if cascade is None:
            return self.compute(self._engine(), pixels)
        logits = self._first_pass().logits(reduced(pixels, cascade)).clone()
        unsure = ~(probabilities_of(self.model, logits).amax(dim=-1) > cascade.threshold)  # also what is not a number
        if unsure.any():
            logits[unsure] = self.compute(self._engine(), pixels[unsure])
        return logits

    def _first_pass(self) -> Classifier:
        """The cheaper model of the cascade, with the same weights."""
        if self._first is None:
            assert self.model.meta.cascade is not None
            whole: nn.Module = self.model
            first = whole.first_pass() if isinstance(whole, Graph) else first_of(self.model, self.model.meta.cascade)
            self._first = Classifier(cast(Model, first), device=self.device, engine=self.engine)
        return self._first

    def _whole_images(self) -> bool:
        if self._run is None or self.model.meta.cascade is not None:
            return super()._whole_images()
        return self._run.whole_images

    def _engine(self) -> Model | Engine:
        if self.engine == "torch":
            return self.model
        if self._run is None:
            self._run = Engine(self.model, self.engine)
        return self._run

    def rejects(self, logits: Tensor) -> list[bool]:
        """Whether images with these logits (B, K) show none of the model's classes."""
        if self.model.meta.threshold_on == "energy":  # how much there is of any class, which probabilities have lost
            score = logits.logsumexp(dim=-1)
        else:
            score = probabilities_of(self.model, logits).amax(dim=-1)
        return (score < self.model.meta.threshold).tolist()

    def rank(self, logits: Tensor, top: int) -> list[tuple[Prediction, ...]]:
        """The `top` predictions for each row, ties in the order of classes; empty if a logit is not finite."""
        probabilities, order = probabilities_of(self.model, logits).sort(dim=-1, descending=True, stable=True)
        finite = logits.isfinite().all(dim=-1).tolist()
        return [
            tuple(Prediction(self.labels[i], p, i) for p, i in zip(row, indices)) if good else ()
            for row, indices, good in zip(probabilities[:, :top].tolist(), order[:, :top].tolist(), finite)
        ]


def probabilities_of(model: Model, logits: Tensor) -> Tensor:
    """Logits (..., K) as probabilities: of one label among all, or with `sigmoid` of each label by itself."""
    scaled = logits / model.meta.temperature
    return scaled.sigmoid() if model.meta.score_function == "sigmoid" else scaled.softmax(dim=-1)


def first_of(model: Model, cascade: CascadeConfig) -> Model:
    """The model as the first pass of a cascade, with the same weights."""
    return with_merging(model, cascade.tome_r)


def reduced(pixels: Tensor, cascade: CascadeConfig) -> Tensor:
    """Normalized pixels (B, channels, rows, columns) as the first pass of a cascade sees them."""
    if cascade.image_size is None:
        return pixels
    return torch.nn.functional.interpolate(pixels, cascade.image_size, mode="bicubic", antialias=True)


def labels_of(model: Model) -> tuple[str, ...]:
    """The model's labels; numbers where it has none."""
    classes = model.config.num_classes
    if classes == 0:
        raise ConfigError(
            "this model has no head, so it gives features but no answers; load it with num_classes=N and train a head, "
            f"or give {argument('labels')} (words) to a CLIP or SigLIP"
        )
    if model.meta.labels is None:
        return tuple(map(str, range(classes)))
    if len(model.meta.labels) != classes:
        raise ConfigError(f"the model has {classes} classes but {len(model.meta.labels)} labels")
    return model.meta.labels


def embed_images(
    model: Model | str | Path, images: Iterable[ImageInput], *, batch_size: int = DEFAULT_BATCH_SIZE
) -> Tensor:
    """Features of images (B, F) of unit length; of CLIP and SigLIP, comparable with those of `embed_texts`."""
    encoder = Encoder(model)
    views = encoder.views(images, ahead=2 * batch_size)
    parts = []
    while group := list(islice(views, batch_size)):
        for _, seen in group:
            if isinstance(seen, ImageError):
                raise seen
        parts.append(map_over_shapes(encoder.features, [seen for _, seen in group if isinstance(seen, Tensor)]))
    found = torch.cat(parts) if parts else torch.zeros(0, encoder.model.config.feature_width)
    return torch.nn.functional.normalize(found, dim=-1)


def features(
    model: Model, images: Tensor | Iterable[ImageInput], *, layers: Iterable[int] | None = None, grid: bool = True
) -> list[Tensor]:
    """What chosen layers give, in their order, as detection, segmentation and retrieval need it.

    `images` are normalized pixels (B, channels, height, width), or images that the model's preprocessing is applied to.
    `layers` count from 0, negative from the end; without them, the last. With `grid`, the patches of each as
    (B, D, rows, columns); else all tokens (B, N, D). Of a ResNet, layers are stages. No final norm is applied.
    """
    if not isinstance(images, Tensor):
        views = [preprocess_image(image, model.meta.preprocess) for image in images]
        if len({view.shape for view in views}) > 1:
            raise ConfigError("these images differ in size (NaFlex): ask for the features of one at a time")
        images = torch.stack(views)
    pixels = images.to(next(model.parameters()).device)
    wanted = [-1] if layers is None else list(layers)
    with torch.no_grad():
        if isinstance(model, ResNet):
            if not grid:
                raise ConfigError("grid=False has no meaning for a ResNet, which has no tokens")
            return model.stage_maps(pixels, wanted)
        names = [f"block_{model.layer(layer)}" for layer in wanted]
        found = model.forward_intermediates(pixels, names)
    if not grid:
        return [found[name] for name in names]
    T, (rows, columns) = model.config.prefix_tokens, model.grid_of(pixels)
    return [found[name][:, T:].transpose(1, 2).reshape(len(pixels), -1, rows, columns) for name in names]
