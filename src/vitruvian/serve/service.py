"""Models by name, each with its queue: from uploaded bytes to answers, vectors and explanations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitruvian.engines.graph import Graph
from vitruvian.engines.sessions import EngineName
from vitruvian.errors import ConfigError, ImageError, UnknownNameError, VitruvianError
from vitruvian.explain.explainer import Explainer, MapSettings
from vitruvian.explain.overlay import overlay
from vitruvian.model.build import Model
from vitruvian.model.cores import map_over_shapes
from vitruvian.model.vit import ViT
from vitruvian.predict import DECODERS, Classifier, Encoder, Prediction
from vitruvian.serve.batching import Batcher, Place, Work
from vitruvian.serve.decoding import Upload, decode_upload, decode_view
from vitruvian.serve.inside import Json, Part, erased, inspect, png
from vitruvian.serve.limits import Limits
from vitruvian.serve.schema import PredictOptions
from vitruvian.text import printable
from vitruvian.weights.words import text_of

R = TypeVar("R")
AT_ONCE = 2
"""Batches in progress: the cores compute the second one where the first ends and while its clients ask again."""
KEPT_WORDS = 16
"""Lists of labels whose heads are kept."""
log = logging.getLogger("vitruvian.serve")

Told = Callable[[str, int, float], None]
"""Hears the model's name, the images and the seconds of every batch."""


class TookTooLong(Exception):
    """An answer that was not there in time."""


class Served:
    """One model, its queue and the kinds of work it does."""

    def __init__(self, name: str, model: Model, limits: Limits, told: Told, engine: EngineName) -> None:
        self.name = name
        self.model = model.eval()
        given: object = model
        self.graph = given if isinstance(given, Graph) else None
        """The model, where it is an exported graph, which has an engine of its own."""
        if self.graph is not None and not model.config.num_classes:
            raise ConfigError(f"{name}: an exported graph without a head has no answers; serve its weights")
        chosen = engine if self.graph is None else "torch"
        self.encoder = Classifier(model, engine=chosen) if model.config.num_classes else Encoder(model)
        self.batcher = Batcher(queue=limits.queue, name=name, told=lambda images, s: told(name, images, s))
        self.classify: Work[Tensor, Tensor] = Work(self._logits, limits.batch_size, at_once=AT_ONCE)
        self.embed: Work[Tensor, Tensor] = Work(self._features, limits.batch_size, at_once=AT_ONCE)
        self.look: Work[Callable[[], Any], Any] = Work(lambda calls: [call() for call in calls], 1)
        self.speaks = False
        """Whether it has a text tower, and so takes labels."""
        self._words: dict[tuple[tuple[str, ...], str | None], Classifier] = {}
        self.warm = self.batcher.reserve(1).put(self.look, [lambda: self._warm(limits.batch_size)])[0]

    def _logits(self, pixels: list[Tensor]) -> tuple[Tensor, ...]:
        return map_over_shapes(self.classifier.logits, pixels).unbind()

    def _features(self, pixels: list[Tensor]) -> tuple[Tensor, ...]:
        return map_over_shapes(self.encoder.features, pixels).unbind()

    def _warm(self, largest: int) -> None:
        """Compute every batch size once: the first of each takes several times as long as the next."""
        blank = torch.zeros(len(self.model.preprocess.mean), *self.model.preprocess.image_size)
        run = self.embed.run
        if isinstance(self.encoder, Classifier):
            run = self.classify.run
            self.encoder.prepare(torch.stack([blank] * largest))
            self.encoder.prepare(blank[None])
        for size in range(1, largest + 1):
            run([blank] * size)
        if not self.model.config.num_classes:
            try:
                text_of(self.model)
                self.speaks = True
            except VitruvianError as error:
                log.info("%s takes no labels: %s", self.name, error)

    def answering(self, labels: tuple[str, ...], template: str | None) -> Classifier:
        """The model with a head of these words; called by the model's thread alone, which keeps the latest."""
        if not self.speaks:
            raise ImageError(f"the model {self.name!r} has no text tower, so it takes no labels")
        found = self._words.pop((labels, template), None)
        found = found or Classifier(self.model, labels=labels, template=template)
        self._words[labels, template] = found
        if len(self._words) > KEPT_WORDS:
            del self._words[next(iter(self._words))]
        return found

    @property
    def classifier(self) -> Classifier:
        if not isinstance(self.encoder, Classifier):
            raise ImageError(
                f"the model {self.name!r} has no head, so it gives vectors (/embed) but no answers; "
                "a CLIP or SigLIP answers in the words of `labels`"
            )
        return self.encoder

    def facts(self) -> Json:
        """What a client needs to know of the model."""
        config, preprocess = self.model.config, self.model.preprocess
        facts: Json = {
            "name": self.name,
            "ready": self.warm.done(),
            "classes": config.num_classes,
            "features": config.feature_width if self.graph is None else 0,
            "image_size": list(preprocess.image_size),
            "channels": len(preprocess.mean),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "origin": self.model.origin,
            "engine": self.encoder.engine if self.graph is None else self.graph.graph.engine,
            "words": self.speaks,
            "digits": self.model.labels == tuple("0123456789"),
            "vit": None,
        }
        if isinstance(self.model, ViT):
            vit = self.model.config
            facts["vit"] = {
                "layers": vit.depth,
                "heads": vit.num_heads,
                "width": vit.width,
                "patch": vit.stride,
                "grid": list(vit.grid),
                "prefix_tokens": vit.prefix_tokens,
                "pool": vit.pool,
            }
        return facts


class Service:
    """All models of a process and the threads that decode for them."""

    def __init__(
        self,
        models: Mapping[str, Model],
        limits: Limits,
        told: Told = lambda name, images, seconds: None,
        engine: EngineName = "torch",
    ) -> None:
        self.limits = limits
        self.models = {name: Served(name, model, limits, told, engine) for name, model in models.items()}
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")

    @property
    def ready(self) -> bool:
        """Whether every batch size of every model has been computed once."""
        return all(served.warm.done() for served in self.models.values())

    @property
    def full(self) -> bool:
        return all(served.batcher.accepted >= served.batcher.queue for served in self.models.values())

    def stop(self) -> None:
        """Finish what was accepted, then end all threads."""
        for served in self.models.values():
            served.batcher.stop()
        self._decoders.shutdown()

    def named(self, name: str | None) -> Served:
        """The model of this name, the first one without a name."""
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise UnknownNameError("model", name, self.models, see=f"(here: {', '.join(self.models)})")
        return self.models[name]

    async def predict(self, served: Served, images: Sequence[bytes], options: PredictOptions) -> list[Json]:
        """Of each image its answers, or its error."""

        def answers(classifier: Classifier, logits: Tensor) -> Json:
            ranked = classifier.rank(logits[None], options.top)[0]
            if not ranked:
                return {"error": "the model's answer is not a finite number"}
            return {"answers": as_json(ranked), "none_of_these": classifier.rejects(logits[None])[0]}

        if options.template is not None and not options.labels:
            raise ImageError("template is for labels, which are missing")
        if not options.labels:
            return await self._each(
                served, served.classify, images, partial(answers, served.classifier), options.erased
            )
        with served.batcher.reserve(1) as place:
            words = (tuple(options.labels), options.template)
            classifier = await self._look(place, served, lambda: served.answering(*words))

        head = classifier.model.head
        assert head is not None

        def compared(vector: Tensor) -> Json:
            with torch.inference_mode():
                return answers(classifier, head(torch.nn.functional.normalize(vector, dim=-1)))

        return await self._each(served, served.embed, images, compared, options.erased)

    async def embed(self, served: Served, images: Sequence[bytes]) -> list[Json]:
        """Of each image its feature vector, or its error."""
        return await self._each(served, served.embed, images, lambda vector: {"vector": vector.tolist()})

    async def inspect(
        self, served: Served, image: bytes, parts: Sequence[Part], *, layer: int, target: int | None, patches: list[int]
    ) -> Json:
        """What happens inside the model on the way to its answer."""
        with served.batcher.reserve(1) as place:
            pixels = (await self._decoded([lambda: self._view(served, image, patches)]))[0]
            if isinstance(pixels, VitruvianError):
                raise pixels
            if list(parts) == ["view"]:  # nothing to compute
                return inspect(served.encoder, pixels, parts)
            return await self._look(
                place, served, lambda: inspect(served.encoder, pixels, parts, layer=layer, target=target)
            )

    async def explain(self, served: Served, image: bytes, settings: MapSettings) -> Json:
        """Maps of one image with their overlays."""
        with served.batcher.reserve(1) as place:
            most = self.limits.max_pixels
            upload = (await self._decoded([lambda: decode_upload(image, served.model, most)]))[0]
            if isinstance(upload, VitruvianError):
                raise upload
            return await self._look(place, served, lambda: explained(served.model, upload, settings))

    async def _look(self, place: Place, served: Served, call: Callable[[], R]) -> R:
        (found,) = await self._results(place.put(served.look, [call]))
        if isinstance(found, BaseException):
            raise found
        return found

    async def _each(
        self,
        served: Served,
        work: Work[Tensor, Tensor],
        images: Sequence[bytes],
        result: Callable[[Tensor], Json],
        patches: Sequence[int] = (),
    ) -> list[Json]:
        """One result for each image, in order; an image that cannot be decoded gets its error instead."""
        with served.batcher.reserve(len(images)) as place:
            calls = [lambda image=image: self._view(served, image, patches) for image in images]
            seen = await self._decoded(calls)
            futures = place.put(work, [pixels for pixels in seen if isinstance(pixels, Tensor)])
            results: list[Tensor | BaseException] = await self._results(futures)
        rows = iter(results)
        found: list[Json] = []
        for pixels in seen:
            row = pixels if isinstance(pixels, VitruvianError) else next(rows)
            if isinstance(row, VitruvianError):
                found.append({"error": printable(str(row))})
            elif isinstance(row, BaseException):
                log.error("the model failed on an image", exc_info=row)
                found.append({"error": "the model failed on this image"})
            else:
                found.append(result(row))
        return found

    def _view(self, served: Served, image: bytes, patches: Sequence[int]) -> Tensor:
        return erased(decode_view(image, served.model, self.limits.max_pixels), patches, served.encoder)

    async def _decoded(self, calls: Iterable[Callable[[], R]]) -> list[R | VitruvianError]:
        """Each call's value, or the error of its image, from the decoding threads."""

        def safely(call: Callable[[], R]) -> R | VitruvianError:
            try:
                return call()
            except VitruvianError as error:
                return error

        loop = asyncio.get_running_loop()
        under_way = asyncio.gather(*(loop.run_in_executor(self._decoders, safely, call) for call in calls))
        return list(await self._in_time(under_way))

    async def _results(self, futures: Iterable[Future[R]]) -> list[R | BaseException]:
        """The results or errors when all are there; those that nobody waits for any more are cancelled."""
        waiting = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        try:
            return await self._in_time(waiting)
        finally:
            for future in futures:
                future.cancel()

    async def _in_time(self, result: Awaitable[R]) -> R:
        try:
            return await asyncio.wait_for(result, self.limits.max_seconds)
        except TimeoutError:
            raise TookTooLong(f"no answer within {self.limits.max_seconds:g} s") from None


def explained(model: Model, upload: Upload, settings: MapSettings) -> Json:
    """The maps of an image as nested lists, each with its overlay as a PNG file in base64."""
    found = Explainer(model, settings).explain_view(upload.pixels)
    if found.error:
        raise ImageError(found.error)
    return {
        "answers": as_json(found.predictions),
        "seen": [round(edge, 3) for edge in upload.seen],
        "maps": [
            {
                "map": each.name,
                "title": each.title,
                "class": each.index,
                "values": [[float(f"{value:.6g}") for value in row] for row in each.values.tolist()],
                "overlay": png(overlay(upload.shown, each.values, model.preprocess, patch=each.patch)),
            }
            for each in found.maps
        ],
    }


def as_json(predictions: Iterable[Prediction]) -> list[Json]:
    return [prediction.to_json() for prediction in predictions]
