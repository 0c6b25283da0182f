"""The inference pipeline: from images to features, logits and ranked predictions.

Everything that runs a model over many images composes the same two stages. `load_batches` reads, decodes and
preprocesses images in threads (or worker processes) ahead of the model. `Encoder.run` computes them, one batch per
image shape, with batches overlapping on the cores. Results come in the order of the images, including those that cannot
be read.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import length_hint
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.catalog import title_of
from vitruvian.config import DEFAULT_BATCH_SIZE, CascadeConfig, GraphConfig, Precision, Preprocess
from vitruvian.data.decode import ImageInput, RawImage, Unreadable, name_of, reason
from vitruvian.data.preprocess import preprocess_image
from vitruvian.data.sources import Source
from vitruvian.data.transform import EvalTransform, SeededTransform, Transform
from vitruvian.data.workers import in_order, in_threads
from vitruvian.engines.choose import Engine, fastest_engine
from vitruvian.engines.graph import LOGITS_ONLY, Graph, ImageModel, find_graph, open_graph, single_graph
from vitruvian.engines.runtimes import FEATURES, EngineName, check_engine
from vitruvian.engines.torch_variant import TorchVariant, torch_engine
from vitruvian.errors import ConfigError, DataError, ImageError, argument
from vitruvian.machine import announce_device, choose_device, device_of
from vitruvian.model.batching import eval_mode, map_over_cores, map_over_shapes
from vitruvian.model.build import Model
from vitruvian.model.resnet import ResNet
from vitruvian.progress import Track, no_tracking
from vitruvian.report.html import notebook
from vitruvian.settings import BatchSize, Size, check_range, validate
from vitruvian.targets import Target
from vitruvian.tasks import preprocess_for
from vitruvian.text import printable
from vitruvian.weights.load import load, with_merging

# B images, K classes, F features

DECODERS = min(4, os.cpu_count() or 1)  # threads that decode ahead of the model
CHUNK = 16  # number of images that a worker process loads per task
LOOK_AHEAD = 256  # number of images that a remote source prefetches
MAX_UNREADABLE = 0.25  # default limit for the fraction of unreadable images
NOT_FINITE = "the model produced NaN or infinite outputs"

Item = TypeVar("Item")
Details = TypeVar("Details")
Result = TypeVar("Result")

Loaded = tuple[Details, Tensor | ImageError]  # the caller's details, and pixels (channels, rows, columns)
Images = list[tuple[Details, ImageError | None]]  # every image in order; unreadable images have an error
Load = Callable[[int, Item], Loaded[Details]]  # loads an item, given its position in the stream


@dataclass(frozen=True, slots=True)
class Outputs(Generic[Details]):
    """The outputs of one batch."""

    images: Images[Details]
    values: Tensor  # (n, F), one row per readable image

    @property
    def readable(self) -> list[Details]:
        return [details for details, error in self.images if error is None]

    @property
    def unreadable(self) -> list[tuple[Details, ImageError]]:
        return [(details, error) for details, error in self.images if error is not None]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class or label and its probability, or a number."""

    label: str
    probability: float
    index: int
    """Index of the class among the model's outputs."""
    predicted: bool | None = None
    """For several labels, whether the probability reaches the threshold of this one."""
    value: float | None = None
    """For a number, its value; the probability is then 0."""
    interval: tuple[float, float] | None = None
    """For a number, an interval that contains the true value with a probability of `Target.coverage`."""

    @property
    def text(self) -> str:
        """The probability, or the number with its interval."""
        if self.value is None:
            return f"{self.probability:.1%}"
        return f"{self.value:.4g}" + (" ({:.4g} to {:.4g})".format(*self.interval) if self.interval else "")

    def to_json(self) -> dict[str, object]:
        """The prediction as a JSON object."""
        described: dict[str, object] = {"label": self.label, "index": self.index}
        if self.value is not None:
            return described | {"value": self.value, "interval": self.interval and list(self.interval)}
        flag = {} if self.predicted is None else {"predicted": self.predicted}
        return described | {"probability": self.probability} | flag


class Predictions(list[Prediction]):
    """The predictions for one image, most probable first."""

    def _repr_html_(self) -> str:
        return notebook("", ("class", ">probability"), [(p.label, p.text) for p in self])


@dataclass(frozen=True, slots=True)
class ImageResult:
    """The predictions for one image, most probable first, or the error that prevented them."""

    path: str
    """The path as given, or a description of an image that has none."""
    predictions: tuple[Prediction, ...] = ()
    error: str = ""
    rejected: bool = False
    """The score is below the model's threshold: the image shows none of its classes."""
    prediction_set: tuple[str, ...] | None = None
    """The conformal prediction set, which may be empty; None if the model has none (`ModelMeta.coverage`)."""

    def _repr_html_(self) -> str:
        notes = [self.error] * bool(self.error) + ["rejected (none of the classes)"] * self.rejected
        notes += [] if self.prediction_set is None else [f"set: {', '.join(self.prediction_set) or 'empty'}"]
        return notebook(self.path, ("class", ">probability"), [(p.label, p.text) for p in self.predictions], notes)

    def to_json(self) -> dict[str, object]:
        """The path with either the predictions or the error, as a JSON object."""
        if self.error:
            return {"path": self.path, "error": self.error}
        more: dict[str, object] = {"rejected": True} if self.rejected else {}
        more |= {} if self.prediction_set is None else {"prediction_set": list(self.prediction_set)}
        return {"path": self.path, **more, "predictions": [prediction.to_json() for prediction in self.predictions]}


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Consecutive lists of `size` items; the last one may be shorter."""
    remaining = iter(items)
    return iter(lambda: list(islice(remaining, size)), [])


def load_batches(
    load: Load[Item, Details],
    batches: Iterable[Sequence[Item]],
    *,
    ahead: int,
    threads: int = DECODERS,
    workers: int = 0,
) -> Iterator[list[Loaded[Details]]]:
    """Load the items of each batch, in order, with at most `ahead` items in progress or waiting.

    Empty batches are left out. With worker processes instead of threads, `load` must be picklable.
    """
    sizes: deque[int] = deque()  # of the batches in progress

    def positions() -> Iterator[tuple[int, Item]]:
        position = 0
        for batch in batches:
            if batch:
                sizes.append(len(batch))
            for item in batch:
                yield position, item
                position += 1

    loaded: Iterator[Loaded[Details]]
    if workers:
        packed = in_order(partial(load_packed, load), batched(positions(), CHUNK), workers=workers)
        loaded = (result for chunk in packed for result in unpack(*chunk))
    else:
        loaded = in_threads(lambda numbered: load(*numbered), positions(), threads=threads, ahead=ahead)
    batch: list[Loaded[Details]] = []
    for result in loaded:
        batch.append(result)
        if len(batch) == sizes[0]:
            sizes.popleft()
            yield batch
            batch = []


def load_packed(load: Load[Item, Details], items: list[tuple[int, Item]]) -> tuple[Images[Details], list[Tensor]]:
    """`load` in a worker process: images of one shape are sent as one tensor, since each costs a file descriptor."""
    loaded = [load(position, item) for position, item in items]
    pixels = [image for _, image in loaded if isinstance(image, Tensor)]
    stacks = [torch.stack(list(same)) for _, same in groupby(pixels, key=lambda image: image.shape)]
    return [(details, None if isinstance(image, Tensor) else image) for details, image in loaded], stacks


def unpack(images: Images[Details], stacks: list[Tensor]) -> list[Loaded[Details]]:
    pixels = (image for stack in stacks for image in stack)
    return [(details, next(pixels) if error is None else error) for details, error in images]


def read_images(source: Source, indices: NDArray[np.int64]) -> Iterator[tuple[int, RawImage | ImageError]]:
    """Indices and encoded images of a source, or the error of an unreadable one; items for `Encoder.load`."""
    for position, index in enumerate(indices.tolist()):
        if source.blocks is not None and position % LOOK_AHEAD == 0:
            source.announce(indices[position : position + 2 * LOOK_AHEAD])
        try:
            yield index, source.read(index)
        except (ImageError, OSError) as error:
            yield index, ImageError(reason(error))


def image_name(image: ImageInput) -> str:
    return os.fspath(image) if isinstance(image, str | os.PathLike) else name_of(image)


def check_readable(
    name: str, unreadable: Sequence[Unreadable], total: int, *, max_unreadable: float = MAX_UNREADABLE
) -> None:
    """Raise DataError if more than `max_unreadable` of `total` images cannot be read."""
    count = len(unreadable)
    if count > max_unreadable * total:
        some = f"{count:,} of {total:,} images cannot be read, more than {100 * max_unreadable:g}%"
        which = "no image can be read" if count == total else some
        raise DataError(f"{which}, such as {unreadable[0].key}: {unreadable[0].reason}", where=name)


class Encoder:
    """A model with its preprocessing, ready to turn images into feature vectors. The model needs no head."""

    def __init__(
        self,
        model: ImageModel | str | Path,
        *,
        num_heads: int | None = None,
        image_size: int | Size | None = None,
        device: str = "auto",
        engine: EngineName = "torch",
        tome_r: int | Sequence[int] | None = None,
        adapter: str | Path | None = None,
        precision: Precision = "float32",
        compile: bool = False,
    ) -> None:
        """Load or wrap a model; for the arguments see `Classifier`."""
        graph = find_graph(model) if isinstance(model, str | Path) else None
        if device == "auto" and graph is not None:
            device = "cpu"
        elif device == "auto":
            device = choose_device(device, engine) if isinstance(model, str | Path) else str(device_of(model))
        engine = torch_engine(engine, precision, compile, device)
        self.engine, is_loaded = check_engine(engine, device), isinstance(model, str | Path)
        self._preprocess: Preprocess | Transform | None = None
        self._first: Classifier | None = None  # the first pass of a cascade
        self._single: Path | None = None  # a graph for single images beside the weights
        self.name = str(model)
        if not isinstance(model, str | Path):
            self.name = model.meta.origin if isinstance(model.config, GraphConfig) else title_of(model.config)
            if num_heads is not None or image_size is not None or adapter is not None:
                what = "num_heads, image_size and adapter apply when weights are loaded"
                raise ConfigError(f"{what}; this model is already built")
        elif graph is None:
            if image_size is None and adapter is None and tome_r is None:  # it belongs to the weights as they are
                self._single = single_graph(Path(model).expanduser())
            model = load(model, num_heads=num_heads, image_size=image_size, adapter=adapter)
        else:
            refused = {"num_heads": num_heads is not None, "adapter": adapter is not None, "compile": compile}
            refused |= {"precision": engine.startswith("torch:"), "device": device.partition(":")[0] != "cpu"}
            for name in (name for name, is_given in refused.items() if is_given):
                reason = "an exported graph has a fixed architecture and precision, and runs on the CPU"
                raise ConfigError(f"{argument(name)} is for weights; {reason}")
            model = open_graph(graph, engine=engine, image_size=image_size)
            self.engine = "torch"
        if tome_r is not None:
            model = with_merging(require_weights(model), tome_r)
        if len(model.meta.preprocess.mean) != model.config.in_channels:
            problem = f"the model takes {model.config.in_channels} channels,"
            raise ConfigError(f"{problem} its preprocessing gives {len(model.meta.preprocess.mean)}: set model.meta")
        if self.engine == "auto" and model.meta.preprocess.fit == "naflex":
            self.engine = "torch"  # engines need one image size
        elif not self.engine.startswith("torch"):
            model.meta.preprocess.require_one_size(argument("engine", engine))
        self.device = choose_device(device)
        if is_loaded:
            announce_device(self.device)
        self.model: ImageModel = model.to(self.device)
        self._forward = self._open_engine()

    def __repr__(self) -> str:
        size = "x".join(map(str, self.model.config.image_size))
        classes = f"{self.model.config.num_classes} classes, " if isinstance(self, Classifier) else ""
        return f"{type(self).__name__}({self.name}, {classes}{size} pixels, {self.engine} on {self.device})"

    def _open_engine(self) -> ImageModel | Engine | TorchVariant:
        if self.engine.startswith("torch:"):
            return TorchVariant(self.torch_model, self.engine)
        return self.model if self.engine == "torch" else Engine(self.torch_model, self.engine, self._single)

    @property
    def torch_model(self) -> Model:
        """The model with its weights. Raises ConfigError for an exported graph, which has none."""
        return require_weights(self.model)

    @property
    def preprocess(self) -> Preprocess | Transform:
        """The preprocessing: the model's own, unless `with_preprocess` replaced it."""
        return self.model.meta.preprocess if self._preprocess is None else self._preprocess

    def with_preprocess(self, preprocess: Preprocess | Transform) -> Self:
        """A copy that shares the model, with other settings or any callable from a PIL image to a tensor."""
        changed = copy(self)
        changed._preprocess = preprocess.preprocess if isinstance(preprocess, EvalTransform) else preprocess
        return changed

    def with_task_preprocess(self, data: object, preprocess: Preprocess | Transform | None) -> Self:
        """A copy with `preprocess` if given, else with the preprocessing of the task that `data` names, if any."""
        default = self.preprocess
        if preprocess is None and isinstance(data, str) and isinstance(default, Preprocess):
            preprocess = default.with_changes(preprocess_for(data))
        return self if preprocess is None else self.with_preprocess(preprocess)

    def load(
        self, batches: Iterable[Sequence[tuple[Details, ImageInput | ImageError]]], *, ahead: int
    ) -> Iterator[list[Loaded[Details]]]:
        """Decode and preprocess batches of images in threads; `ahead` images are loaded before they are needed.

        Images may be any input that `decode` accepts, or the error that prevented reading them.
        """
        preprocess = self.preprocess

        def load(position: int, item: tuple[Details, ImageInput | ImageError]) -> Loaded[Details]:
            details, image = item
            if isinstance(image, ImageError):
                return details, image
            try:
                if isinstance(preprocess, Preprocess):
                    return details, preprocess_image(image, preprocess)
                return details, SeededTransform(preprocess)(image, np.random.default_rng(position))
            except ImageError as error:
                return details, error

        # a user's transform may draw from the global generators, which threads share
        return load_batches(load, batches, threads=DECODERS if isinstance(preprocess, Preprocess) else 1, ahead=ahead)

    def run(
        self, forward: Callable[[Tensor], Tensor], batches: Iterable[list[Loaded[Details]]], *, total: int = 0
    ) -> Iterator[Outputs[Details]]:
        """Compute `forward`, such as `self.features`, of loaded batches; one call per batch and image shape.

        `total` is the number of images if it is known; the engine `auto` is chosen by it.
        """
        self.expect(total)

        def compute(batch: list[Loaded[Details]]) -> Outputs[Details]:
            pixels = [image for _, image in batch if isinstance(image, Tensor)]
            images = [(details, image if isinstance(image, ImageError) else None) for details, image in batch]
            return Outputs(images, map_over_shapes(forward, pixels) if pixels else torch.empty(0, 0))

        return self._overlap(compute, batches)

    def expect(self, images: int) -> None:
        """Announce a job of this many images, or 0 if it is not known: the engine `auto` is chosen during it."""
        if isinstance(self._forward, Engine):
            self._forward.expect(images)

    def run_source(
        self,
        forward: Callable[[Tensor], Tensor],
        source: Source,
        indices: NDArray[np.int64],
        *,
        unreadable: list[Unreadable],
        batch_size: int = DEFAULT_BATCH_SIZE,
        track: Track = no_tracking,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Indices and outputs (B, F) of `forward` for the images of a source, batch by batch.

        Unreadable images are added to `unreadable`; more than MAX_UNREADABLE of them raise DataError.
        """
        validate("batch_size", BatchSize, batch_size)
        images = track(read_images(source, indices), len(indices))
        loaded = self.load(batched(images, batch_size), ahead=2 * batch_size)
        for batch in self.run(forward, loaded, total=len(indices)):
            unreadable += [Unreadable(source.key(index), error.reason) for index, error in batch.unreadable]
            if len(batch.values):
                yield batch.readable, batch.values
        check_readable(source.name, unreadable, len(indices))

    def _overlap(self, compute: Callable[[Item], Result], batches: Iterable[Item]) -> Iterator[Result]:
        """`compute(batch)` for each batch in order; two at a time if each core computes whole images.

        Cores that compute whole images do not finish a batch at the same time, so they start on the next one. This
        does not change the results. The first batch runs alone, as it may decide which engine is used.
        """
        remaining, cores = iter(batches), torch.get_num_threads()

        def compute_on_all_cores(batch: Item) -> Result:
            if torch.get_num_threads() != cores:  # a new thread does not always inherit the setting
                torch.set_num_threads(cores)
            return compute(batch)

        yield from map(compute, islice(remaining, 1))
        if cores > 1 and self._maps_whole_images():
            yield from in_threads(compute_on_all_cores, remaining, threads=2, ahead=3)
        else:
            yield from map(compute, remaining)

    def _maps_whole_images(self) -> bool:
        """Whether each core computes whole images, so that calls may overlap."""
        if self.model.meta.cascade is not None:
            return False
        if isinstance(self._forward, Engine):  # it lets calls wait for each other where all cores share one
            return not self.model.training or self.engine != "auto"
        plain = isinstance(self.model, Model) and not self.model.training
        maps = self.engine.startswith("torch") and "compile" not in self.engine
        return plain and maps and torch.device(self.device).type == "cpu"

    def embed(self, images: Iterable[ImageInput], *, batch_size: int = DEFAULT_BATCH_SIZE) -> Tensor:
        """Features (n, F) of images. An unreadable image raises ImageError."""
        items = ((image_name(image), image) for image in images)
        parts, loaded = [], self.load(batched(items, batch_size), ahead=2 * batch_size)
        for batch in self.run(self.features, loaded, total=length_hint(images)):
            for _, error in batch.unreadable:
                raise error
            parts.append(batch.values)
        return torch.cat(parts) if parts else torch.zeros(0, self.torch_model.config.feature_width)

    def features(self, pixels: Tensor) -> Tensor:
        """The inputs of the head (B, F) for normalized pixels (B, channels, rows, columns), without dropout."""
        return self.compute(FEATURES, pixels)

    def prepare(self, pixels: Tensor) -> None:
        """Get the engine ready for batches of this size: the first call may export a graph or measure engines."""
        if isinstance(self._forward, Engine):
            self._forward.prepare(pixels)

    def compare_precision(self, wanted: bool) -> None:
        """Compare the next batch with float32 or not, if the precision is lower; by default the first one is."""
        if isinstance(self._forward, TorchVariant):
            self._forward.compares = wanted and self._forward.precision != "float32"

    def fastest_engine(self, images: int, batch_size: int) -> EngineName:
        """The engine that `auto` chooses for a job of this many images; measured now if it repays that."""
        shape = (batch_size, self.model.config.in_channels, *self.model.meta.preprocess.image_size)
        return fastest_engine(self.torch_model, torch.zeros(shape), images)

    def with_engine(self, engine: EngineName, batch_size: int) -> Self:
        """A copy that computes every batch with one engine in one mode, so that a repetition has the same bits."""
        changed = copy(self)
        changed.engine = check_engine(engine, self.device)
        changed._forward, changed._first = changed._open_engine(), None
        changed.prepare(torch.zeros(batch_size, self.model.config.in_channels, *self.model.meta.preprocess.image_size))
        return changed

    def compute(self, output: str, pixels: Tensor) -> Tensor:
        """The logits or features of the engine or, on all cores and in evaluation mode, of the model."""
        training, forward = self.model.training, self._forward
        if isinstance(forward, Engine):
            if not training or self.engine != "auto":
                return forward(pixels, output)
            forward = self.model  # the weights of a model in training change
        if isinstance(forward, Graph):  # distributes images over the cores itself
            return forward.features(pixels) if output == FEATURES else forward(pixels)
        with eval_mode(self.model) if training else nullcontext():
            if isinstance(forward, TorchVariant):
                return forward(pixels.to(self.device), output)
            function: Callable[[Tensor], Tensor] = forward.features if output == FEATURES else forward
            return map_over_cores(function, pixels.to(self.device)).float().cpu()


class Classifier(Encoder):
    """A model with its preprocessing and labels, ready to classify images."""

    def __init__(
        self,
        model: ImageModel | str | Path,
        *,
        image_size: int | Size | None = None,
        num_heads: int | None = None,
        labels: Iterable[str] | None = None,
        template: str | None = None,
        tome_r: int | Sequence[int] | None = None,
        flip: bool = False,
        engine: EngineName = "torch",
        device: str = "auto",
        adapter: str | Path | None = None,
        precision: Precision = "float32",
        compile: bool = False,
    ) -> None:
        """Load or wrap a model with a classification head, or a CLIP or SigLIP used zero-shot with `labels`.

        Args:
            model: A model, or a file, directory or published name to load.
            image_size: Input size to load the weights for.
            num_heads: Number of attention heads, if the file does not store it.
            labels: Class names for zero-shot classification.
            template: Prompt template: text with {}, or the name of a published set (`imagenet`, `imagenet-7`).
            tome_r: Tokens to merge per layer (ToMe). 0 turns merging off; None keeps the model's own setting.
            flip: Average the logits of each image and its mirror image.
            engine: What computes logits and features: "torch", "onnxruntime", "openvino", or "auto" for the fastest
                installed, which is chosen while torch computes the first images. The engines other than torch use
                the weights as they were when the first image was computed, and call no hooks.
            device: A PyTorch device. "auto" is an accelerator (cuda, mps, xpu) if there is one, else the CPU; a model
                that is already built stays where it is. The engines other than torch run on the CPU.
            adapter: Folder of a LoRA adapter to apply to the loaded weights.
            precision: "bf16" or "fp16" compute in this dtype (autocast), and a line on stderr says how many top-1
                predictions of the first batch that changes. "auto" is one that the device computes fast: bf16 on a CPU
                with AVX-512 BF16 or AMX, float32 on another.
            compile: Run the model through torch.compile; if that fails, a line says so and it runs without.

        Raises:
            CheckpointError: The weights cannot be loaded.
            ConfigError: The model has no head and no `labels` are given, or a setting cannot be used.
        """
        read: Any = {"num_heads": num_heads, "image_size": image_size, "adapter": adapter, "tome_r": tome_r}
        super().__init__(model, **read, device=device, engine=engine, precision=precision, compile=compile)
        self.flip = flip
        if labels is not None:
            from vitruvian.weights.zero_shot import with_words  # most models have their own labels

            self.model, self._single = with_words(self.torch_model, labels, template).to(self.device), None
            self._forward = self._open_engine()
        elif template is not None:
            raise ConfigError(f"{argument('template')} needs {argument('labels')}")
        classes, known = self.model.config.num_classes, self.model.meta.labels
        if classes == 0:
            what = "this model has no classification head, only features"
            hint = f"load it with num_classes=N and train a head, or give {argument('labels')} to a CLIP or SigLIP"
            raise ConfigError(what, hint=hint)
        if known is not None and len(known) != classes:
            raise ConfigError(f"the model has {classes} classes but {len(known)} labels")
        self.labels: tuple[str, ...] = tuple(map(str, range(classes))) if known is None else known

    def __call__(
        self, images: ImageInput | Iterable[ImageInput], *, top: int = 5, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> list[Prediction] | list[list[Prediction]]:
        """The predictions for one image, or for each image of a list as `predict` returns them.

        An array with two or three axes is one image.
        """
        is_array = isinstance(images, np.ndarray) and images.ndim < 4
        if is_array or isinstance(images, str | bytes | os.PathLike | Image.Image) or hasattr(images, "read"):
            return self.predict([images], top=top, batch_size=batch_size)[0]  # type: ignore[list-item]
        return self.predict(images, top=top, batch_size=batch_size)

    def predict(
        self, images: Iterable[ImageInput], *, top: int = 5, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> list[list[Prediction]]:
        """Classify images.

        Args:
            images: Paths, URLs (http or https), bytes, open files, Pillow images or 8-bit arrays.
            top: Number of predictions per image.
            batch_size: Number of images per batch; changes speed and memory, not the predictions.

        Returns:
            For each image its most probable classes, best first.

        Raises:
            ImageError: An image cannot be read, or its outputs are not finite.
        """
        predictions: list[list[Prediction]] = []
        for result in self.stream(images, top=top, batch_size=batch_size):
            if result.error:
                raise ImageError(result.error)
            predictions.append(Predictions(result.predictions))
        return predictions

    def stream(
        self, images: Iterable[ImageInput], *, top: int = 5, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> Iterator[ImageResult]:
        """Yield the result for each image, in order; an unreadable image has an error instead of predictions.

        Images are decoded at most two batches ahead of the model, so memory does not grow with their number.
        """
        if isinstance(images, str | bytes | os.PathLike | Image.Image):
            raise ConfigError("expected a list of images, not one: predict(['a.jpg'])")
        check_range("top", top, 1)
        validate("batch_size", BatchSize, batch_size)
        items = ((image_name(image), image) for image in images)
        loaded = self.load(batched(items, batch_size), ahead=2 * batch_size)
        batches = self.run(self.logits, loaded, total=length_hint(images))
        return (result for batch in batches for result in self._results(batch, top))

    def _results(self, batch: Outputs[str], top: int) -> Iterator[ImageResult]:
        logits = batch.values
        ranked = zip(self.rank(logits, top), self.rejects(logits), self.sets(logits)) if len(logits) else iter(())
        for path, error in batch.images:
            if error is not None:
                yield ImageResult(path, error=str(error))
                continue
            predictions, rejected, prediction_set = next(ranked)
            if predictions:
                predictions = tuple(prediction for prediction in predictions if prediction.predicted is not False)
                yield ImageResult(path, predictions, rejected=rejected, prediction_set=prediction_set)
            else:
                yield ImageResult(path, error=f"{printable(path)}: {NOT_FINITE}")

    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (B, K) for normalized pixels (B, channels, rows, columns), without dropout."""
        logits = self._logits(pixels)
        return (logits + self._logits(pixels.flip(-1))) / 2 if self.flip else logits

    def prepare(self, pixels: Tensor) -> None:
        super().prepare(pixels)
        if isinstance(self._forward, Engine) and self.model.meta.cascade is not None:
            self._first_pass().prepare(first_pass_pixels(pixels, self.model.meta.cascade))

    def _logits(self, pixels: Tensor) -> Tensor:
        cascade = self.model.meta.cascade
        if cascade is None or (len(pixels) == 1 and isinstance(self.model, Graph) and self.model.single is not None):
            return self.compute("", pixels)
        logits = self._first_pass().logits(first_pass_pixels(pixels, cascade)).clone()
        unsure = ~(probabilities_of(self.model, logits).amax(dim=-1) > cascade.threshold)  # also NaN
        if unsure.any():
            logits[unsure] = self.compute("", pixels[unsure])
        return logits

    def _first_pass(self) -> "Classifier":
        """The cheaper model that a cascade runs first, with the same weights."""
        if self._first is None:
            assert self.model.meta.cascade is not None
            model, cascade = self.model, self.model.meta.cascade
            first = model.first_pass() if isinstance(model, Graph) else with_merging(model, cascade.tome_r)
            self._first = Classifier(first, device=self.device, engine=self.engine)
            if isinstance(self._first._forward, Engine):
                self._first._forward.quiet = True
                self._first.expect(0)
        return self._first

    def rejects(self, logits: Tensor) -> list[bool]:
        """Whether each image with these logits (B, K) is rejected: its score is below the model's threshold."""
        if self.model.meta.score_function == "identity":
            return [False] * len(logits)
        if self.model.meta.threshold_on == "energy":  # which the softmax removes
            score = logits.logsumexp(dim=-1)
        else:
            score = probabilities_of(self.model, logits).amax(dim=-1)
        return (score < self.model.meta.threshold).tolist()

    def sets(self, logits: Tensor) -> Sequence[tuple[str, ...] | None]:
        """The conformal prediction set of each image with these logits (B, K), most probable first."""
        meta = self.model.meta
        if not meta.coverage:
            return [None] * len(logits)
        values, order = probabilities_of(self.model, logits).sort(dim=-1, descending=True, stable=True)
        sizes = (values >= meta.set_threshold).sum(dim=-1).tolist()
        return [tuple(self.labels[i] for i in row[:size]) for row, size in zip(order.tolist(), sizes)]

    def rank(self, logits: Tensor, top: int) -> list[tuple[Prediction, ...]]:
        """The `top` predictions for each row, ties in the order of classes; empty if a logit is not finite.

        Of several labels these are all that reach their thresholds, and others up to `top`; of numbers, all.
        """
        target, meta = self.model.meta.target, self.model.meta
        finite = logits.isfinite().all(dim=-1).tolist()
        if meta.score_function == "identity":
            return [
                tuple(map(partial(self.number, target), range(len(row)), row)) if is_finite else ()
                for row, is_finite in zip(probabilities_of(self.model, logits).tolist(), finite)
            ]
        if target.kind == "multi":
            least = torch.tensor(target.thresholds or (0.5,))
            probabilities = probabilities_of(self.model, logits)
            rows = []
            for row, said, is_finite in zip(probabilities, probabilities >= least, finite):
                values, order = row.sort(descending=True, stable=True)
                ranked = zip(values.tolist(), order.tolist(), said[order].tolist())
                listed = [(p, i, flag) for rank, (p, i, flag) in enumerate(ranked) if flag or rank < top]
                rows.append(tuple(Prediction(self.labels[i], p, i, flag) for p, i, flag in listed) if is_finite else ())
            return rows
        probabilities, order = probabilities_of(self.model, logits).sort(dim=-1, descending=True, stable=True)
        return [
            tuple(Prediction(self.labels[i], p, i) for p, i in zip(row, indices)) if good else ()
            for row, indices, good in zip(probabilities[:, :top].tolist(), order[:, :top].tolist(), finite)
        ]

    def number(self, target: Target, index: int, value: float) -> Prediction:
        """The prediction of a number; of ordinal classes, the nearest class."""
        ends = (value - target.margins[index], value + target.margins[index]) if target.margins else None
        nearest = min(max(round(value), 0), len(target.levels) - 1)
        label = target.levels[nearest] if target.levels else self.labels[index]
        return Prediction(label, 0.0, index, value=value, interval=ends)


def require_weights(model: ImageModel) -> Model:
    if isinstance(model, Graph):
        raise ConfigError(LOGITS_ONLY)
    return model


def probabilities_of(model: ImageModel, logits: Tensor) -> Tensor:
    """Probabilities of logits (..., K): softmax over the classes, or a sigmoid per class; or numbers in their units."""
    target = model.meta.target
    if model.meta.score_function == "identity":
        mean, std = (torch.tensor(values, dtype=logits.dtype) for values in (target.mean or (0,), target.std or (1,)))
        return logits * std.to(logits.device) + mean.to(logits.device)
    scaled = logits / model.meta.temperature
    return scaled.sigmoid() if model.meta.score_function == "sigmoid" else scaled.softmax(dim=-1)


def first_pass_pixels(pixels: Tensor, cascade: CascadeConfig) -> Tensor:
    """Normalized pixels (B, channels, rows, columns) at the size of a cascade's first pass."""
    if cascade.image_size is None:
        return pixels
    return torch.nn.functional.interpolate(pixels, cascade.image_size, mode="bicubic", antialias=True)


def embed_images(
    model: Model | str | Path, images: Iterable[ImageInput], *, batch_size: int = DEFAULT_BATCH_SIZE
) -> Tensor:
    """Unit-length features of images; those of CLIP and SigLIP can be compared with `embed_texts`.

    Args:
        model: A model, or a file, directory or published name to load.
        images: Paths, bytes, open files, Pillow images or 8-bit arrays.
        batch_size: Number of images per batch.

    Returns:
        Features (n, F).

    Raises:
        ImageError: An image cannot be read.
    """
    return torch.nn.functional.normalize(Encoder(model).embed(images, batch_size=batch_size), dim=-1)


def features(
    model: Model, images: Tensor | Iterable[ImageInput], *, layers: Iterable[int] | None = None, grid: bool = True
) -> list[Tensor]:
    """Intermediate features, for detection, segmentation and retrieval. The final norm is not applied.

    Args:
        model: A model; the layers of a ResNet are its stages.
        images: Normalized pixels (B, channels, height, width), or images to preprocess as the model needs.
        layers: Layer indices from 0; negative ones count from the end. The last layer by default.
        grid: Return the patch tokens as a grid instead of all tokens as a sequence.

    Returns:
        One tensor per layer, in the order of `layers`: (B, D, rows, columns), or (B, N, D) without `grid`.

    Raises:
        ConfigError: A layer does not exist, or preprocessed images differ in size (NaFlex).
    """
    if not isinstance(images, Tensor):
        inputs = [preprocess_image(image, model.meta.preprocess) for image in images]
        if len({image.shape for image in inputs}) > 1:
            what = "these images differ in size (NaFlex)"
            raise ConfigError(what, hint="compute the features of one image at a time")
        images = torch.stack(inputs)
    pixels = images.to(next(model.parameters()).device)
    chosen = [-1] if layers is None else list(layers)
    with torch.no_grad():
        if isinstance(model, ResNet):
            if not grid:
                raise ConfigError("a ResNet has no tokens: grid=False cannot be used")
            return model.stage_maps(pixels, chosen)
        names = [f"block_{model.layer(layer)}" for layer in chosen]
        tokens = model.forward_intermediates(pixels, names)
    if not grid:
        return [tokens[name] for name in names]
    T, (rows, columns) = model.config.prefix_tokens, model.grid_of(pixels)
    return [tokens[name][:, T:].transpose(1, 2).reshape(len(pixels), -1, rows, columns) for name in names]
