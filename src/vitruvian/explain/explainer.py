"""`vit explain`: predictions of images with maps of what they depend on, as objects, files and a page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import ImageInput
from vitruvian.data.preprocess import apply_preprocess, open_image
from vitruvian.data.stored import draw_stored
from vitruvian.engines.graph import ImageModel
from vitruvian.engines.runtimes import EngineName
from vitruvian.errors import ConfigError, DataError, ImageError, NotFiniteError, UnknownNameError, nearest
from vitruvian.explain.attention import (
    attention_map,
    attention_rollout,
    check_head,
    gradient_attention,
    patch_logits,
    require_vit,
)
from vitruvian.explain.deletion import Curve, deletion_curves
from vitruvian.explain.overlay import file_name, image_with_crop, overlay, paint, seen_box, write_arrays
from vitruvian.explain.patches import Components, default_layer, fit_components, patch_tokens
from vitruvian.files import write_text
from vitruvian.inference import (
    NOT_FINITE,
    Classifier,
    Encoder,
    Loaded,
    Prediction,
    batched,
    image_name,
    load_batches,
    probabilities_of,
)
from vitruvian.model.vit import ViT
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import color_bar
from vitruvian.report.html import embed_image, percent_bar, render, thumbnail, write_image
from vitruvian.settings import check_choice, check_range
from vitruvian.text import brief, plural, printable

Method = Literal["gradient", "rollout", "attention"]
METHODS: tuple[Method, ...] = get_args(Method)
AnyMethod = Literal[Method, "label", "pca"]
SHOWN_PREDICTIONS = 5
MAX_IMAGES = 60  # maximum number of images on the page; files are written for all
PAGE_SIDE = 420  # longest side in pixels of an image on the page
PAGE = "explain.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class MapSettings:
    """Which maps to compute for each image."""

    methods: tuple[AnyMethod, ...] = METHODS
    """Attention maps; `label`: the probability of the class in each patch; and `pca`: principal components of the patch
    tokens, fitted over all images given."""
    layer: int | None = None
    """Layer of the raw attention, None for the last one; for `pca`, None for the one after two thirds of the blocks."""
    head: int | None = None
    """Head of the raw attention; None for the mean over heads."""
    patch: tuple[int, int] | None = None
    """Row and column of the query patch of the raw attention; None for the token that the head reads."""
    target: str = ""
    """Label or index of the class to explain; empty for the predicted classes."""
    top: int = 1
    """Number of predicted classes with a map of gradient-weighted attention, or of their probability in each patch."""
    deletion: bool = False
    """Score the maps by deletion curves."""

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("method", method, get_args(AnyMethod))
        check_range("top", self.top, 1)
        if self.deletion and self.methods == ("pca",):
            raise ConfigError("deletion curves need an attention map: pca does not rank patches")
        if self.target and self.top > 1:
            raise ConfigError(f"top={self.top} cannot be combined with class {self.target!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """One map of one image."""

    name: str  # unique among the maps of the image
    title: str
    values: NDArray[np.float32]  # (R, C), one number per patch; of pca (R, C, 3), colors, NaN for the background
    index: int | None = None  # the class that it explains, if any
    ends: tuple[float, float] | None = None  # values between which colors range, if not between those of the map
    patch: tuple[int, int] | None = None  # row and column of the query patch, if any


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """An image with its maps, or the error that prevented them."""

    path: str
    image: Image.Image | None = None  # the upright image at its original size
    predictions: tuple[Prediction, ...] = ()
    rejected: bool = False  # the image is rejected: it shows none of the classes; the maps are for the nearest one
    maps: tuple[Map, ...] = ()
    curves: dict[str, Curve] = field(default_factory=dict)  # deletion curves by the name of the map, and `random`
    files: dict[str, Path] = field(default_factory=dict)  # overlays by map, `image` and `arrays`, once they are written
    error: str = ""
    preprocess: Preprocess | None = None  # of the model, with what it saw of the image

    def overlays(self) -> dict[str, Image.Image]:
        """The image with the model's crop, and each map drawn over it, by name; none without the image."""
        image, preprocess = self.image, self.preprocess
        if image is None or preprocess is None:
            return {}
        maps = {
            item.name: paint(image, item.values, preprocess)
            if item.values.ndim == 3
            else overlay(image, item.values, preprocess, patch=item.patch, ends=item.ends)
            for item in self.maps
        }
        return {"image": image_with_crop(image, preprocess)} | maps

    def _repr_html_(self) -> str:
        return render("notebook.html", image=image_context(self, self.overlays()))


class Explainer:
    """Computes attention maps, and principal components of patches, of images for a Vision Transformer.

    Args:
        model: A ViT, with or without a head, or a file, directory or published name to load.
        settings: Which maps to compute; by default all methods for the predicted class.
        device: Device of the model, as for `Classifier`.
        engine: Engine for predictions and deletion curves; maps always use torch.

    Raises:
        ConfigError: The model has no attention, or no head and the settings need a class.
    """

    def __init__(
        self,
        model: ImageModel | str | Path,
        settings: MapSettings | None = None,
        *,
        device: str = "auto",
        engine: EngineName = "torch",
    ) -> None:
        self.vit: ViT = require_vit(Encoder(model, device=device).model if isinstance(model, str | Path) else model)
        self.settings = settings or MapSettings()
        self.classifier = Classifier(self.vit, device=device, engine=engine) if self.vit.config.num_classes else None
        only_classes = {"gradient", "label"} >= {*self.settings.methods}
        needs_class = self.settings.deletion or self.settings.target or only_classes
        if self.classifier is None and needs_class:
            raise ConfigError("this model has no head, so no class to explain; choose rollout or attention")
        if self.classifier is not None:
            self.classifier.expect(0)
        # an encoder checks the channels, and moves the model to the device
        self.device = (self.classifier or Encoder(self.vit, device=device)).device
        check_head(self.vit, self.settings.head)
        self.target = self.class_index(self.settings.target) if self.settings.target else None
        self.pca_layer = default_layer(self.vit) if self.settings.layer is None else self.vit.layer(self.settings.layer)
        self.components: Components | None = None
        """Components that `fit_components` found; without, `stream` fits them to its images."""

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

    def fit_components(self, images: Iterable[ImageInput]) -> Components:
        """Fit the colors of `pca` to these images, and keep them for all that follow; unreadable ones are left out."""
        self.components = self._fit(list(images))
        if self.components is None:
            raise DataError("no image can be read, so no components can be fitted")
        return self.components

    def _fit(self, images: Sequence[ImageInput]) -> Components | None:
        pixels = (pixels for _, pixels in self._load(images) if isinstance(pixels, Tensor))
        tokens = (self.patches(image)[0] for image in pixels)
        grids = (grid for grid in tokens if grid.isfinite().all())
        first = next(grids, None)
        return None if first is None else fit_components(chain([first], grids), len(images))

    def patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R, C, D) of the layer that `pca` shows, and its attention sinks (R, C), of one image's pixels."""
        tokens, sinks = patch_tokens(self.vit, pixels[None].to(self.device), [self.pca_layer])
        return tokens[0], sinks[0]

    def stream(self, images: Iterable[ImageInput]) -> Iterator[Explained]:
        """Yield the maps of each image, in order; the next image is decoded meanwhile.

        For `pca`, all images are read twice: first to fit the components.
        """
        components = self.components
        if "pca" in self.settings.methods and components is None:
            images = list(images)
            components = self._fit(images)
        for (path, image), pixels in self._load(images):
            if isinstance(pixels, ImageError):
                yield Explained(path=path, error=str(pixels))
            else:
                explained = self.explain_pixels(pixels, path, components)
                yield explained if explained.error else replace(explained, image=image)

    def _load(self, images: Iterable[ImageInput]) -> Iterator[Loaded[tuple[str, Image.Image | None]]]:
        preprocess = self.vit.meta.preprocess

        def load(_: int, source: ImageInput) -> Loaded[tuple[str, Image.Image | None]]:
            try:
                image = open_image(source, preprocess)
                display = image if isinstance(image, Image.Image) else draw_stored(image)
                return (image_name(source), display), apply_preprocess(image, preprocess)
            except ImageError as error:
                return (image_name(source), None), error

        return (loaded for (loaded,) in load_batches(load, batched(images, 1), threads=1, ahead=2))

    def explain_pixels(self, pixels: Tensor, path: str = "image", components: Components | None = None) -> Explained:
        """Compute the maps of a preprocessed image, normalized pixels (channels, rows, columns).

        Without `components`, and without a call of `fit_components`, `pca` is fitted to this image alone.
        """
        predictions: tuple[Prediction, ...] = ()
        targets: list[Prediction] = []
        rejected = False
        if self.classifier is not None:
            logits = self.classifier.logits(pixels[None])
            ranked = self.classifier.rank(logits, len(self.classifier.labels))[0]
            if not ranked:
                return Explained(path=path, error=f"{printable(path)}: {NOT_FINITE}")
            predictions, rejected = ranked[:SHOWN_PREDICTIONS], self.classifier.rejects(logits)[0]
            targets = list(ranked[: self.settings.top])
            if self.target is not None:
                targets = [prediction for prediction in ranked if prediction.index == self.target]
        maps = tuple(self.maps(pixels, targets, components or self.components))
        curves: dict[str, Curve] = {}
        if self.classifier is not None and self.settings.deletion and maps:
            index = targets[0].index
            ranking = (m for m in maps if m.index in (None, index) and m.name != "pca")
            values = {m.name: torch.from_numpy(m.values) for m in ranking}
            curves = deletion_curves(self.classifier, pixels, values, index)
        facts: Any = {"rejected": rejected, "preprocess": self.vit.meta.preprocess}
        return Explained(path=path, predictions=predictions, maps=maps, curves=curves, **facts)

    def maps(self, pixels: Tensor, targets: list[Prediction], components: Components | None = None) -> Iterator[Map]:
        """The maps of one image's normalized pixels, with gradients for `targets`."""
        batch, vit, settings = pixels[None].to(self.device), self.vit, self.settings
        for method in settings.methods:
            if method == "gradient":
                for rank, target in enumerate(targets, 1):
                    yield Map(
                        name="gradient" if rank == 1 else f"gradient-{rank}",
                        title=f"gradient-weighted attention: {target.label} ({target.text})",
                        values=gradient_attention(vit, batch, [target.index])[0].numpy(),
                        index=target.index,
                    )
            elif method == "label":
                indices = [target.index for target in targets]
                probabilities = probabilities_of(vit, patch_logits(vit, batch)[0])[..., indices]
                for rank, target in enumerate(targets, 1):
                    yield Map(
                        name="label" if rank == 1 else f"label-{rank}",
                        title=f"where it is {target.label}: at most {float(probabilities[..., rank - 1].max()):.0%}",
                        values=probabilities[..., rank - 1].numpy(),
                        index=target.index,
                        ends=(0.0, float(probabilities.max())),
                    )
            elif method == "rollout":
                values = attention_rollout(vit, batch)[0].numpy()
                yield Map(name="rollout", title="attention rollout, all layers", values=values)
            elif method == "pca":
                tokens, sinks = self.patches(pixels)
                if not tokens.isfinite().all():
                    raise NotFiniteError(NOT_FINITE)
                fitted = components or fit_components([tokens], 1)
                title = f"principal components of the patches after layer {self.pca_layer}"
                if count := int(sinks.sum()):
                    title += f"; {plural(count, 'attention sink')} filled in"
                yield Map(name="pca", title=title, values=fitted.colors(tokens))
            else:
                patch, head = settings.patch, settings.head
                values = attention_map(vit, batch, layer=settings.layer, head=head, patch=patch)[0].numpy()
                where = f"layer {vit.layer(-1 if settings.layer is None else settings.layer)}"
                if vit.attn_pool is not None and patch is None:
                    where = "the pooling probe"
                heads = "mean of heads" if head is None else f"head {head}"
                origin = "" if patch is None else f", from patch {patch[0]},{patch[1]}"
                title = f"attention of {where}, {heads}{origin}"
                yield Map(name="attention", title=title, values=values, patch=patch)


def describe_model(vit: ViT) -> str:
    """The model in one line."""
    config, size = vit.config, " x ".join(map(str, vit.config.image_size))
    shape = f"{config.depth} layers of {config.num_heads} heads, patches of {config.stride} pixels at {size}"
    return f"{vit.meta.origin}: {shape}" if vit.meta.origin else shape


def explain_images(explainer: Explainer, images: Sequence[ImageInput], out: Path) -> Iterator[Explained]:
    """Explain images and write their files into `out`, and after the last one the page `explain.html`.

    If no image can be read, nothing is written.
    """
    contexts: list[dict[str, Any]] = []
    unreadable, digits = 0, len(str(len(images)))
    for position, explained in enumerate(explainer.stream(images), 1):
        unreadable += bool(explained.error)
        shown = explained.overlays()
        if len(contexts) < MAX_IMAGES:
            contexts.append(image_context(explained, shown))
        start = out / f"{position:0{digits}d}-{file_name(Path(explained.path).stem)}"
        written = {name: write_image(Path(f"{start}-{name}.png"), image) for name, image in shown.items()}
        if explained.image is not None:
            size = explained.image.height, explained.image.width
            arrays: dict[str, NDArray[Any]] = {item.name: item.values for item in explained.maps}
            arrays |= {"size": np.array(size), "seen_box": np.array(seen_box(size, explainer.vit.meta.preprocess))}
            arrays |= {f"{item.name}_index": np.array(item.index) for item in explained.maps if item.index is not None}
            for name, curve in explained.curves.items():
                arrays |= {"deletion_removed": curve.removed, f"deletion_{name}": curve.probability}
            written["arrays"] = write_arrays(Path(f"{start}.npz"), arrays)
        yield replace(explained, files=written)
    if unreadable < len(images):
        page = render(
            "explain.html",
            title="Model explanations",
            subtitle=f"{describe_model(explainer.vit)}; {plural(len(images), 'image')}",
            images=contexts,
            count=len(images),
            methods=explainer.settings.methods,
            unreadable=unreadable,
            color_bar=embed_image(color_bar(240, 12), "colors from violet (low) to yellow (high)"),
        )
        write_text(out / PAGE, page)


def image_context(explained: Explained, overlays: Mapping[str, Image.Image]) -> dict[str, Any]:
    """Values for the template of one image, with its overlays by the name of their map."""
    captions = {"image": "the image"} | {map.name: map.title for map in explained.maps}
    lines = [  # the legend has the area under each curve
        Line(f"{name} ({curve.area:.3f})", [(100 * x, y) for x, y in zip(curve.removed, curve.probability)])
        for name, curve in explained.curves.items()
    ]
    title, x_label = "Deletion curve: probability", "patches removed, in %"
    return {
        "path": explained.path,
        "error": explained.error,
        "rejected": explained.rejected,
        "overlays": [
            {"image": thumbnail(image, captions[name], side=PAGE_SIDE, kind="whole"), "caption": captions[name]}
            for name, image in overlays.items()
        ],
        "predictions": [
            (item.label, percent_bar(100 * item.probability) if item.value is None else item.text)
            for item in explained.predictions
        ],
        "deletion": Chart(title=title, lines=lines, x_label=x_label, y_from=0.0) if lines else None,
    }
