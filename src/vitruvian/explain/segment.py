"""`vit segment`: a linear head on frozen patch tokens that gives each pixel a class, trained on a few masks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.data.decode import ImageInput, decode
from vitruvian.data.preprocess import resize_for_display
from vitruvian.errors import DataError, ImageError
from vitruvian.evaluation.metrics import Interval, bootstrap
from vitruvian.evaluation.probe_classifiers import fit_ridge
from vitruvian.explain.masks import BACKGROUND, IGNORED, CocoPolygons, Mask, open_masks
from vitruvian.explain.patches import MOST_PATCHES, Part, PatchModel, open_reader, to_pixels
from vitruvian.files import write_json, write_text
from vitruvian.progress import Track, no_tracking
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import COLORS
from vitruvian.report.html import PAGE, percent_bar, render, thumbnail, write_image
from vitruvian.settings import Size
from vitruvian.text import plural

# n images, R rows and C columns of patches, F features of a patch, P patches, K classes, H x W pixels

FOLDS = 5
SHOTS = (1, 5, 10, 50)  # numbers of masks to train on, to see how many are needed
MOST_SHOWN = 6  # maximum number of images on the page
NUMBERS, POLYGONS = "segment.json", "polygons.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Segmenter(PatchModel):
    """A ViT with a linear head on its patch tokens. `train_segmenter` makes one, `Segmenter.load` reads it."""

    SETTINGS = "segmenter.json"
    classes: tuple[str, ...]
    weight: Tensor  # (F, K)
    bias: Tensor  # (K,)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.features, len(self.classes)), "bias": (len(self.classes),)}

    @classmethod
    def _parse(cls, stored: dict[str, Any]) -> dict[str, Any]:
        return {"classes": tuple(stored["classes"])}

    def predict(self, image: ImageInput) -> Mask:
        """The index of the class of each pixel (H, W). Raises ImageError if the image cannot be read."""
        decoded = decode(image)
        return assemble(self.tokens(decoded), self.weight, self.bias, decoded.size)

    def colors(self) -> NDArray[np.uint8]:
        """Red, green and blue of each index, (256, 3); black for the background and for ignored pixels."""
        palette = [tuple(bytes.fromhex(color[1:])) for color in COLORS]
        shown = [(0, 0, 0) if name == BACKGROUND else palette[k % len(palette)] for k, name in enumerate(self.classes)]
        return np.array([*shown, *[(0, 0, 0)] * (256 - len(shown))], np.uint8)

    def paint(self, image: Image.Image, mask: Mask) -> Image.Image:
        """The classes of a mask over the image, at a size for the screen."""
        shown = resize_for_display(image)
        colors = self.colors()[np.asarray(Image.fromarray(mask).resize(shown.size, Image.Resampling.NEAREST))]
        levels = np.asarray(shown)
        painted = np.where(colors.any(axis=2, keepdims=True), 0.45 * levels + 0.55 * colors, levels)
        return Image.fromarray(np.rint(painted).astype(np.uint8))


def assemble(parts: Sequence[Part], weight: Tensor, bias: Tensor, size: Size) -> Mask:
    """The class of each pixel (H, W) of an image of `size` (columns, rows) from the tokens of its tiles."""
    scores = to_pixels([(box, tokens.float() @ weight + bias) for box, tokens in parts], size)
    return np.asarray(scores.argmax(dim=0).to(torch.uint8).numpy())


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """An image with its mask and its tokens."""

    path: Path
    mask: Mask
    parts: list[Part]  # in float16

    def pairs(self, K: int) -> tuple[Tensor, Tensor]:
        """Tokens (P, F) and the share of each class in a patch (P, K).

        Patches that are mostly ignored are left out, unless all patches of a tile are, as in masks of a few strokes.
        """
        labels = torch.from_numpy(self.mask.astype(np.int64))
        ones = F.one_hot(labels.where(labels != IGNORED, K), K + 1)[:, :, :K].permute(2, 0, 1).float()
        rows = []
        for (left, top, right, bottom), tokens in self.parts:
            grid = F.adaptive_avg_pool2d(ones[:, top:bottom, left:right], (tokens.shape[0], tokens.shape[1]))
            shares = grid.flatten(1).T
            known = shares.sum(dim=1, keepdim=True)
            counts = known[:, 0] >= 0.5
            counts = counts if counts.any() else known[:, 0] > 0
            rows.append((tokens.flatten(0, 1)[counts], (shares / known)[counts]))
        tokens, shares = (torch.cat(column) for column in zip(*rows))
        return tokens, shares


def fit_head(examples: Sequence[Example], K: int) -> tuple[Tensor, Tensor]:
    """Weight (F, K) and bias (K,) of the ridge regression of the classes' shares in a patch on its tokens.

    At most MOST_PATCHES take part, an equal share of each image, chosen at random with a fixed seed.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for tokens, shares in (example.pairs(K) for example in examples):
        chosen = torch.randperm(len(tokens), generator=generator)[: max(1, MOST_PATCHES // len(examples))]
        rows.append((tokens[chosen], shares[chosen]))
    weight, bias = fit_ridge(*(torch.cat(column) for column in zip(*rows)))
    return weight.float(), bias.float()


@dataclass(frozen=True, kw_only=True, eq=False)
class Segmentation:
    """A trained segmenter, and how good heads are on images that they were not trained on."""

    segmenter: Segmenter
    examples: list[Example]
    predictions: list[Mask]  # of each image, by a head that was trained on others
    confusions: NDArray[np.int64]  # (n, K, K) pixels of each image by true class (row) and predicted class
    curve: dict[int, float]  # mean IoU in percent by the number of masks to train on
    notes: tuple[str, ...]

    def iou(self) -> list[tuple[str, float, Interval]]:
        """Name, IoU in percent and its 95% interval over the images for each class, then for their mean."""
        values = class_iou(self.confusions.sum(axis=0)).tolist()
        ends = bootstrap(lambda counts: class_iou(np.tensordot(counts, self.confusions, 1)), len(self.examples), seed=0)
        return list(zip((*self.segmenter.classes, "mean of the classes"), values, ends))

    def to_json(self) -> dict[str, Any]:
        """The numbers as a JSON object."""
        rows = [] if not self.predictions else self.iou()
        listed = [{"class": name, "iou": v, "interval": ends} for name, v, ends in rows if not np.isnan(v)]
        curve = {str(count): value for count, value in self.curve.items()}
        return {"images": len(self.examples), "iou": listed, "mean_iou_by_masks": curve, "notes": self.notes}

    def save(self, folder: str | Path) -> None:
        """Write the segmenter, `segment.json` and the page `report.html` into a folder."""
        path = Path(folder).expanduser()
        self.segmenter.save(path)
        write_json(path / NUMBERS, self.to_json())
        write_text(path / PAGE, self.page())

    def page(self) -> str:
        """The report: a sentence and a picture, IoU, the curve, and the worst images."""
        rows = self.iou() if self.predictions else []
        means = [class_iou(confusion)[-1] for confusion in self.confusions]
        order = np.argsort(means).tolist()
        images = []
        for index in [*order[len(order) // 2 :][:1], *order[:MOST_SHOWN]]:  # the first one is of median quality
            path, image = self.examples[index].path, decode(self.examples[index].path)
            masks = {"mask": self.examples[index].mask, "prediction": self.predictions[index]}
            pictures = {
                name: thumbnail(self.segmenter.paint(image, mask), f"{name} of {path.name}", side=420, kind="whole")
                for name, mask in masks.items()
            }
            images.append({"name": path.name, "pictures": pictures, "iou": f"{means[index]:.1f}"})
        swatches = [Image.new("RGB", (24, 24), tuple(color)) for color in self.segmenter.colors().tolist()]
        colors = [*(thumbnail(swatch, "color") for swatch in swatches[: len(rows) - 1]), ""]
        points = [(float(count), value) for count, value in self.curve.items()]
        lines = [Line("images not trained on", points)]
        return render(
            "segment.html",
            title="Segmentation",
            subtitle=f"{self.segmenter.vit.meta.origin or 'ViT'}; {plural(len(self.examples), 'image')} with masks",
            mean=rows[-1] if rows else None,
            classes=[(color, name, percent_bar(value, ends)) for color, (name, value, ends) in zip(colors, rows)],
            curve=Chart(title="Mean IoU, %", lines=lines, x_label="masks", y_from=0.0) if len(points) > 1 else None,
            images=images,
            notes=self.notes,
        )


def class_iou(confusion: NDArray[Any]) -> NDArray[np.float64]:
    """IoU of each class and their mean in percent (K + 1) from pixels (K, K); NaN for a class without true pixels."""
    right, truth = np.diag(confusion), confusion.sum(axis=1)
    values = np.where(truth > 0, 100.0 * right / np.maximum(truth + confusion.sum(axis=0) - right, 1), np.nan)
    return np.append(values, values[truth > 0].mean() if truth.any() else np.nan)


def count_pixels(truth: Mask, predicted: Mask, K: int) -> NDArray[np.int64]:
    """Pixels by true and predicted class (K, K), without the ignored ones."""
    known = truth != IGNORED
    return np.bincount(truth[known].astype(np.int64) * K + predicted[known], minlength=K**2).reshape(K, K)


def train_segmenter(
    images: Sequence[str | Path],
    masks: str | Path,
    model: Any,
    *,
    classes: Sequence[str] = (),
    layers: Sequence[int] = (),
    tile: int | None = None,
    image_size: Any = None,
    device: str = "auto",
    track: Track = no_tracking,
) -> Segmentation:
    """Train a segmenter on images with masks, and measure it by cross-validation.

    Args:
        images: Image files.
        masks: A folder of PNG masks that are called like the images, or a COCO file of polygons.
        model: A ViT, or a file, directory or published name to load.
        classes: Names of the classes of PNG masks by their index, or by their color: "cat=#ff8800".
        layers: Layers that the head reads; by default those after a half, three quarters and all of the blocks.
        tile: Cut larger images into overlapping tiles of this side in pixels; by default they are resized.
        image_size: Input size to load the weights for.
        device: Device of the model, as for `Classifier`.
        track: Wraps the iterator over images to show progress.

    Raises:
        ConfigError: The model has no patch tokens, or not these layers; or `tile` is not positive.
        DataError: There are no masks, they do not fit the images, or they show only one class.
    """
    reader = open_reader(model, layers, tile, image_size=image_size, device=device)
    opened = open_masks(Path(masks).expanduser(), classes)
    matched = [Path(image) for image in images if Path(image).stem in opened.readers]
    if len({path.stem for path in matched}) < max(1, len(matched)):
        reason = "two images have the same name" if matched else "no image has a mask of its name"
        raise DataError(reason, where=masks)
    left_out = len(images) - len(matched)
    notes, K = [f"{plural(left_out, 'image')} without a mask left out"] * bool(left_out), len(opened.classes)
    examples = []
    for path in track(matched, len(matched)):
        try:
            image = decode(path)
        except ImageError as error:
            notes.append(f"left out: {error}")
            continue
        mask = opened.read(path, image.size)
        if (mask != IGNORED).any():
            examples.append(Example(path, mask, [(box, tokens.half()) for box, tokens in reader.tokens(image)]))
    indices = sorted({int(index) for example in examples for index in np.unique(example.mask)} - {IGNORED})
    if len(indices) < 2:
        only = f"only the class {opened.classes[indices[0]]!r}" if indices else "no class"
        raise DataError(f"the masks show {only}; a segmenter needs two", where=masks)
    if len(examples) == 1:
        notes.append("not measured: a single mask leaves no other image to measure on")
    measured = cross_validate(examples, K) if len(examples) > 1 else ([], np.zeros((0, K, K), np.int64), {})
    weight, bias = fit_head(examples, K)
    segmenter = Segmenter(**vars(reader), classes=opened.classes, weight=weight, bias=bias)
    results = dict(zip(("predictions", "confusions", "curve"), measured))
    return Segmentation(segmenter=segmenter, examples=examples, notes=tuple(notes), **results)  # type: ignore[arg-type]


def cross_validate(examples: Sequence[Example], K: int) -> tuple[list[Mask], NDArray[np.int64], dict[int, float]]:
    """Predictions and confusions (n, K, K) of images by heads that were trained on others, and the mean IoU by masks.

    In each fold, heads are also trained on the first 1, 5, 10 ... of its training images in random order.
    """
    n, predictions = len(examples), [example.mask for example in examples]
    fold_of = np.random.default_rng(0).permutation(n) % min(FOLDS, n)
    least = n - int(np.bincount(fold_of).max())
    by_count = {count: np.zeros((n, K, K), np.int64) for count in (*(s for s in SHOTS if s < least), least)}
    for fold in range(min(FOLDS, n)):
        order = np.random.default_rng(fold).permutation(np.flatnonzero(fold_of != fold))
        for count, confusions in by_count.items():
            weight, bias = fit_head([examples[index] for index in (order if count == least else order[:count])], K)
            for index in np.flatnonzero(fold_of == fold).tolist():
                mask = examples[index].mask
                predictions[index] = assemble(examples[index].parts, weight, bias, (mask.shape[1], mask.shape[0]))
                confusions[index] = count_pixels(mask, predictions[index], K)
    curve = {count: float(class_iou(confusions.sum(axis=0))[-1]) for count, confusions in by_count.items()}
    return predictions, by_count[least], curve


def segment_images(
    segmenter: Segmenter, images: Sequence[str], out: Path, *, polygons: bool = False
) -> Iterator[dict[str, Any]]:
    """Segment images, write a mask (indices) and an overlay of each, and COCO polygons of all if `polygons`.

    Yields:
        For each image its path with the share of each class and the files, or with an error.
    """
    if len({Path(image).stem for image in images}) < len(images):
        raise DataError("two images have the same name, and so would their masks", where=out)
    regions = CocoPolygons(segmenter.classes) if polygons else None
    for path in images:
        try:
            image = decode(path)
        except ImageError as error:
            yield {"path": path, "error": str(error)}
            continue
        mask, name = segmenter.predict(image), f"{Path(path).stem}.png"
        indexed = Image.fromarray(mask)
        indexed.putpalette(segmenter.colors().flatten().tolist())
        files = {"mask": indexed, "overlay": segmenter.paint(image, mask)}
        written = {kind: str(write_image(out / f"{kind}s" / name, picture)) for kind, picture in files.items()}
        if regions is not None:
            regions.add(Path(path).name, mask)
        counts = np.bincount(mask.ravel(), minlength=len(segmenter.classes)) / mask.size
        yield {"path": path, "shares": dict(zip(segmenter.classes, counts.tolist())), **written}
    if regions is not None:
        write_json(out / POLYGONS, regions.to_json())
