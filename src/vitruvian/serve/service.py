"""Models by name, each with its queue: from uploaded bytes to predictions, vectors and explanations."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from vitruvian.config import GraphConfig
from vitruvian.data.decode import CostlyImageError
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.engines.graph import Graph, ImageModel
from vitruvian.engines.runtimes import EngineName, installed
from vitruvian.errors import ConfigError, ImageError, UnknownNameError, VitruvianError
from vitruvian.explain.explainer import Explainer, MapSettings
from vitruvian.explain.overlay import overlay, seen_box
from vitruvian.inference import DECODERS, NOT_FINITE, Classifier, Encoder
from vitruvian.model.batching import map_over_shapes
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.serve.batching import (
    MAX_RETRY_SECONDS,
    Batcher,
    BatchFunction,
    Refused,
    Reservation,
    ServiceLimits,
    queue_full,
)
from vitruvian.serve.decoding import DecodingProcess, Upload, load_upload
from vitruvian.serve.inspection import Json, erase_patches, inspect_image, png_base64
from vitruvian.serve.requests import ExplainOptions, InspectOptions, Options, PredictOptions
from vitruvian.text import printable
from vitruvian.weights.zero_shot import text_encoder

R = TypeVar("R")
PARALLEL_BATCHES = 2  # the second fills the cores while the first ends and its clients send new images
MAX_LABEL_SETS = 16  # cached zero-shot classifiers, one per set of labels
VIT_FACTS = ["depth", "num_heads", "width", "stride", "grid", "prefix_tokens", "cls_token", "reg_tokens", "pool"]
SWITCHING = threading.Lock()  # one model at a time measures engines: several would disturb each other and all requests
log = logging.getLogger("vitruvian.serve")

OnBatch = Callable[[str, int, float], None]  # called with the model's name, the images and the seconds of every batch


class ServedModel:
    """One model, its queue and the functions that it computes."""

    def __init__(
        self, name: str, model: Model | Graph, limits: ServiceLimits, on_batch: OnBatch, engine: EngineName
    ) -> None:
        self.name = name
        self.model = model.eval()
        loaded: object = model
        self.graph = loaded if isinstance(loaded, Graph) else None  # an exported graph has its own engine
        if self.graph is not None and not model.config.num_classes:
            reason = "an exported graph without a head makes no predictions"
            raise ConfigError(reason, where=name, hint="serve its weights")
        model.meta.preprocess.require_rgb("the service")
        engine = engine if self.graph is None else "torch"
        first: EngineName = "torch" if engine == "auto" else engine  # measuring engines may take a minute
        self.kind = Classifier if model.config.num_classes else Encoder
        self.encoder = self.kind(model, engine=first)
        self.switch: threading.Thread | None = None
        if engine == "auto" and len(installed()) > 1 and self.encoder.device == "cpu":
            self.switch = threading.Thread(target=self._switch_engine, args=(limits.batch_size,), daemon=True)
        self.users = 0  # requests; while there are some, the event `unused` is not set
        self.unused = threading.Event()
        self.unused.set()
        self.batcher = Batcher(queue=limits.queue, name=name, on_batch=partial(on_batch, name))
        self.classify = BatchFunction(self._logits, limits.batch_size, PARALLEL_BATCHES)
        self.embed = BatchFunction(self._features, limits.batch_size, PARALLEL_BATCHES)
        self.call: BatchFunction[Callable[[], Any], Any] = BatchFunction(lambda calls: [call() for call in calls], 1)
        self.accepts_labels = False  # whether the model has a text tower for zero-shot classification
        self.no_labels = "has no text tower"  # why not
        self.zero_shot = lru_cache(MAX_LABEL_SETS)(self._zero_shot)
        self.warm = self.batcher.reserve(1).put(self.call, [lambda: self._warm_up(limits.batch_size)])[0]
        self.warm.add_done_callback(self._log_failure)

    def _logits(self, pixels: list[Tensor]) -> tuple[Tensor, ...]:
        return map_over_shapes(self.classifier.logits, pixels).unbind()

    def _features(self, pixels: list[Tensor]) -> tuple[Tensor, ...]:
        return map_over_shapes(self.encoder.features, pixels).unbind()

    def _log_failure(self, warm: Future[None]) -> None:
        if error := warm.exception():
            known = isinstance(error, VitruvianError)
            log.error("%s is not ready: %s", self.name, error, exc_info=None if known else error)

    def _compute_test_image(self, encoder: Encoder, max_batch: int) -> None:
        """Compute a gray image at every batch size: the first batch of a size takes several times as long as the next.

        Raises an error if the encoder cannot compute it.
        """
        preprocess = self.model.meta.preprocess
        pixels = apply_preprocess(Image.new("RGB", preprocess.image_size[::-1], "gray"), preprocess)
        encoder.prepare(torch.stack([pixels] * max_batch))
        encoder.prepare(pixels[None])
        run = encoder.logits if isinstance(encoder, Classifier) else encoder.features
        for size in range(1, max_batch + 1):
            if not torch.isfinite(map_over_shapes(run, [pixels] * size)[0]).all():
                raise ConfigError(NOT_FINITE, where=self.name)

    def _warm_up(self, max_batch: int) -> None:
        self.encoder.compare_precision(False)  # the first request is compared
        self._compute_test_image(self.encoder, max_batch)
        if not self.model.config.num_classes:
            try:
                text_encoder(self.encoder.torch_model)
                self.accepts_labels = True
            except BaseException as error:  # the library of tokenizers panics with an error of its own kind
                log.info("%s does not accept labels: %s", self.name, error)
                self.no_labels = "has no usable text tower (see the log of the service)"
        self.encoder.compare_precision(True)
        if self.switch is not None:
            self.switch.start()

    def _switch_engine(self, max_batch: int) -> None:
        """Choose the fastest engine in the background, and use it. The engine compares its outputs with torch's."""
        try:
            with SWITCHING:
                faster = self.kind(self.model, engine="auto")
                self._compute_test_image(faster, max_batch)
                self.encoder = faster
        except Exception as error:
            log.error("%s continues with torch: %s", self.name, error)

    @property
    def is_ready(self) -> bool:
        """Whether the model has computed a test image."""
        return self.warm.done() and self.warm.exception() is None

    def _zero_shot(self, labels: tuple[str, ...], template: str | None) -> Classifier:
        if not self.accepts_labels:
            raise ImageError(f"the model {self.name!r} {self.no_labels}, so it does not accept labels")
        engine = self.encoder.engine if self.encoder.engine.startswith("torch:") else "torch"
        return Classifier(self.model, labels=labels, template=template, engine=engine)

    @property
    def classifier(self) -> Classifier:
        if not isinstance(self.encoder, Classifier):
            raise ImageError(
                f"the model {self.name!r} has no head, so it returns vectors (/embed) but no predictions; "
                "CLIP and SigLIP predict with `labels`"
            )
        return self.encoder

    def facts(self) -> Json:
        """Description of the model for clients."""
        config, preprocess = self.model.config, self.model.meta.preprocess
        return {
            "name": self.name,
            "ready": self.is_ready,
            "num_classes": config.num_classes,
            "feature_dim": 0 if isinstance(config, GraphConfig) or self.graph is not None else config.feature_width,
            "image_size": list(preprocess.image_size),
            "in_channels": len(preprocess.mean),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "origin": self.model.meta.origin,
            "engine": self.encoder.engine if self.graph is None else self.graph.graph.engine,
            "device": self.encoder.device,
            "accepts_labels": self.accepts_labels,
            "digits": self.model.meta.labels == tuple("0123456789"),
            "vit": {key: getattr(config, key) for key in VIT_FACTS} if isinstance(self.model, ViT) else None,
        }


class Service:
    """All models of a process and the threads that decode images for them."""

    def __init__(
        self, models: Mapping[str, Model | Graph], limits: ServiceLimits, on_batch: OnBatch, engine: EngineName
    ) -> None:
        self.limits = limits
        self._open: Callable[[str, Model | Graph], ServedModel] = partial(
            ServedModel, limits=limits, on_batch=on_batch, engine=engine
        )
        self.models = {name: self._open(name, model) for name, model in models.items()}
        self._turn = threading.Lock()  # between finding a model and replacing it
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._apart = ThreadPoolExecutor(1, thread_name_prefix="decode-apart")  # one other process at a time
        self._costly = 0  # images that wait for it

    @property
    def is_full(self) -> bool:
        return all(served.batcher.is_full for served in self.models.values())

    def retry_seconds(self) -> int:
        """Estimated time until the first of the models has room."""
        return min(served.batcher.retry_seconds() for served in self.models.values())

    def stop(self) -> None:
        """Finish the accepted images, if they take no longer than the time limit, then end all threads."""
        for served in self.models.values():
            served.batcher.stop(self.limits.max_seconds)
        for pool in (self._decoders, self._apart):
            pool.shutdown(wait=False, cancel_futures=True)

    def add(self, name: str, model: Model | Graph) -> None:
        """Serve a model as soon as it has computed a test image. Requests to a model that it replaces are finished."""
        served = self._open(name, model)
        try:
            served.warm.result()
        except BaseException:
            served.batcher.stop()
            raise
        self._exchange(self.models | {name: served})

    def remove(self, name: str) -> bool:
        """Finish the requests to a model and serve it no longer, unless there is no other."""
        others = {other: served for other, served in self.models.items() if other != name}
        if others:
            self._exchange(others)
        return bool(others)

    def _exchange(self, models: dict[str, ServedModel]) -> None:
        with self._turn:
            retired = [served for name, served in self.models.items() if models.get(name) is not served]
            self.models = models
        for served in retired:
            served.unused.wait()
            served.batcher.stop()

    @contextmanager
    def using(self, name: str | None) -> Iterator[ServedModel]:
        """The model of this name, which accepts images until the block ends, also if it is replaced meanwhile."""
        with self._turn:
            served = self.find_model(name)
            served.users += 1
            served.unused.clear()
        try:
            yield served
        finally:
            with self._turn:
                served.users -= 1
                if not served.users:
                    served.unused.set()

    def find_model(self, name: str | None) -> ServedModel:
        """The model of this name, by default the first."""
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise UnknownNameError("model", name, self.models, see=f"(here: {', '.join(self.models)})")
        return self.models[name]

    async def predict(self, served: ServedModel, images: Sequence[bytes], options: PredictOptions) -> list[Json]:
        """The predictions or the error of each image."""

        def predictions(classifier: Classifier, logits: Tensor) -> Json:
            ranked = classifier.rank(logits[None], options.top)[0]
            if not ranked:
                return {"error": NOT_FINITE}
            rejected, classes = classifier.rejects(logits[None])[0], classifier.sets(logits[None])[0]
            more = {} if classes is None else {"prediction_set": classes}
            return {"predictions": [prediction.to_json() for prediction in ranked], "rejected": rejected, **more}

        if options.template is not None and not options.labels:
            raise ImageError("template needs labels")
        if not options.labels:
            result = partial(predictions, served.classifier)
            return await self.process(served, served.classify, images, result, options.erased)
        with served.batcher.reserve(1) as reservation:
            make = partial(served.zero_shot, tuple(options.labels), options.template)
            classifier = await self.call(reservation, served, make)

        head = classifier.torch_model.head
        assert head is not None

        def zero_shot_predictions(vector: Tensor) -> Json:
            with torch.inference_mode():
                return predictions(classifier, head(torch.nn.functional.normalize(vector, dim=-1)))

        return await self.process(served, served.embed, images, zero_shot_predictions, options.erased)

    async def embed(self, served: ServedModel, images: Sequence[bytes], options: Options) -> list[Json]:
        """The feature vector or the error of each image."""
        return await self.process(served, served.embed, images, lambda vector: {"vector": vector.tolist()})

    async def inspect(self, served: ServedModel, images: Sequence[bytes], options: InspectOptions) -> list[Json]:
        """Intermediate results for one image."""
        with served.batcher.reserve(1) as reservation:
            (upload,) = await self._decode(reservation, served, images)
            if not isinstance(upload, Upload):
                raise upload
            pixels = erase_patches(torch.from_numpy(upload.pixels), options.erased, served.encoder)
            choices = options.model_dump(include={"parts", "layer", "target", "token"})
            compute = partial(inspect_image, served.encoder, pixels, **choices)
            if options.parts != ["input"]:
                return [await self.call(reservation, served, compute)]
            frame = {"size": upload.size, "crop": seen_box(upload.size, served.model.meta.preprocess)}
            return [{**compute(), **frame}]  # does not need the model

    async def explain(self, served: ServedModel, images: Sequence[bytes], options: ExplainOptions) -> list[Json]:
        """Maps of one image with their overlays."""
        layer, head, patch, target = options.layer, options.head, options.patch, options.target
        settings = MapSettings(methods=tuple(options.maps), layer=layer, head=head, patch=patch, target=target)
        with served.batcher.reserve(1) as reservation:
            (upload,) = await self._decode(reservation, served, images, preview=True)
            if not isinstance(upload, Upload):
                raise upload
            return [await self.call(reservation, served, partial(explain_upload, served.model, upload, settings))]

    async def call(self, reservation: Reservation, served: ServedModel, function: Callable[[], R]) -> R:
        """Run a function when the model is free."""
        (result,) = await self._wait(reservation.put(served.call, [function]))
        if isinstance(result, BaseException):
            raise result
        return result

    async def process(
        self,
        served: ServedModel,
        function: BatchFunction[Tensor, Tensor],
        images: Sequence[bytes | Tensor],
        result: Callable[[Tensor], Json],
        patches: Sequence[int] = (),
    ) -> list[Json]:
        """Decode and compute images, or compute pixels; one result or error for each, in order."""
        with served.batcher.reserve(len(images)) as reservation:
            decoded: list[Tensor | BaseException] = []
            uploads = iter(
                await self._decode(reservation, served, [item for item in images if isinstance(item, bytes)])
            )
            for image in images:
                upload = image if isinstance(image, Tensor) else next(uploads)
                if isinstance(upload, Upload):
                    upload = erase_patches(torch.from_numpy(upload.pixels), patches, served.encoder)
                decoded.append(upload)
            for pixels in decoded:
                if not isinstance(pixels, Tensor | VitruvianError):
                    raise pixels
            futures = reservation.put(function, [pixels for pixels in decoded if isinstance(pixels, Tensor)])
            outputs: list[Tensor | BaseException] = await self._wait(futures)
        remaining = iter(outputs)
        results: list[Json] = []
        for pixels in decoded:
            output = next(remaining) if isinstance(pixels, Tensor) else pixels
            if isinstance(output, VitruvianError):
                results.append({"error": printable(str(output))})
            elif isinstance(output, BaseException):
                log.error("the model failed on an image", exc_info=output)
                results.append({"error": "the model failed on this image"})
            else:
                results.append(result(output))
        return results

    async def _decode(
        self, reservation: Reservation, served: ServedModel, images: Sequence[bytes], *, preview: bool = False
    ) -> list[Upload | BaseException]:
        """Decode images, a few at a time, so that requests take turns. Those of a client that has gone are not started.

        Images that take long are decoded in another process, one at a time. Meanwhile they take no room in the queue
        of the model, and at most half as many as the queue holds may wait.
        """
        results: list[Upload | BaseException] = []
        costly: list[int] = []
        settings = served.model.meta.preprocess, self.limits.max_pixels, preview
        async with self._time_limit():
            for start in range(0, len(images), DECODERS):
                group = images[start : start + DECODERS]
                results += await self._wait([self._decoders.submit(load_upload, image, *settings) for image in group])
                costly = [index for index, result in enumerate(results) if isinstance(result, CostlyImageError)]
                if costly and self._costly and self._costly + len(costly) > self.limits.queue // 2:
                    raise queue_full(MAX_RETRY_SECONDS)
            reservation.release(len(costly))
            self._costly += len(costly)
            try:
                for index in costly:
                    apart = DecodingProcess(images[index], *settings)
                    try:
                        (results[index],) = await self._wait([self._apart.submit(apart.load)])
                    finally:
                        apart.kill()  # its client may have gone
            finally:
                self._costly -= len(costly)
            reservation.extend(len(costly))
        return results

    @asynccontextmanager
    async def _time_limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limits.max_seconds):
                yield
        except TimeoutError:
            message = f"no result within {self.limits.max_seconds:g} s"
            raise Refused(503, message, headers={"retry-after": "1"}) from None

    async def _wait(self, futures: Iterable[Future[R]]) -> list[R | BaseException]:
        """All results or errors. Cancels the futures if the caller is cancelled or the time is up."""
        waiting = [asyncio.wrap_future(future) for future in futures]
        try:
            async with self._time_limit():
                if waiting:
                    await asyncio.wait(waiting)
            return [future.exception() or future.result() for future in waiting]
        finally:
            for future in waiting:
                future.cancel()


def explain_upload(model: ImageModel, upload: Upload, settings: MapSettings) -> Json:
    """The maps of an image as nested lists, each with its overlay as a PNG file in base64."""
    explained = Explainer(model, settings).explain_pixels(torch.from_numpy(upload.pixels))
    if explained.error:
        raise ImageError(explained.error)
    assert upload.preview is not None
    return {
        "predictions": [prediction.to_json() for prediction in explained.predictions],
        "crop": [round(edge, 3) for edge in seen_box(upload.size, model.meta.preprocess)],
        "maps": [
            {
                "map": map.name,
                "title": map.title,
                "class": map.index,
                "values": [[float(f"{value:.6g}") for value in row] for row in map.values.tolist()],
                "overlay": png_base64(overlay(upload.preview, map.values, model.meta.preprocess, patch=map.patch)),
            }
            for map in explained.maps
        ],
    }
