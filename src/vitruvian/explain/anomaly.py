"""`vit anomaly`: find what good images do not show, by the distance of each patch to the nearest patch of good images.

As in PatchCore (Roth et al., 2022) and AnomalyDINO (Damm et al., 2025), nothing is trained: patch tokens of good images
are kept, of many only a coreset that covers the others, and an image is as anomalous as its most distant patches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
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
from vitruvian.errors import DataError, ImageError, require
from vitruvian.evaluation.metrics import bootstrap
from vitruvian.explain.masks import COLORED, read_codes
from vitruvian.explain.overlay import file_name
from vitruvian.explain.patches import MOST_PATCHES, Part, PatchModel, open_reader, to_pixels
from vitruvian.files import write_json, write_text
from vitruvian.inference import image_name
from vitruvian.progress import Track, no_tracking
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import apply_color_map
from vitruvian.report.html import PAGE, render, thumbnail, write_image
from vitruvian.settings import Size, check_range
from vitruvian.text import plural

# n images, R rows and C columns of patches, F features of a patch, P patches, H x W pixels

FOLDS = 5
MOST_KEPT = 10_000  # maximum number of patches of good images that are kept
PROJECTED = 128  # number of random directions in which the coreset is chosen
MOST_DISTANT = 0.01  # fraction of the patches of an image whose mean distance is its score
FALSE_ALARMS = 0.05
GOOD = "good"  # name of a folder with good images, as in MVTec AD
MASK_SIDE = 256  # longest side in pixels of the maps and masks that are compared
PRO_LIMIT = 0.3  # false positive rate up to which the overlap per region (PRO) is averaged
SCALE, OPACITY = 1.25, 0.85  # of a map: the brightest color stands for SCALE times the threshold
MOST_SHOWN = 24  # maximum number of images on the page
NUMBERS = "anomaly.json"


@dataclass(frozen=True, slots=True, eq=False)
class ScoredImage:
    """How far the patches of an image are from those of good images, or the error that prevented it."""

    path: str
    score: float = 0.0
    is_anomalous: bool = False
    parts: list[Part] = field(default_factory=list)  # distances (R, C, 1) in the tiles of the image
    size: Size = (0, 0)  # columns and rows of the image
    error: str = ""

    def pixels(self) -> NDArray[np.float32]:
        """The distance at each pixel (H, W)."""
        parts = [(box, torch.cat([values, torch.ones_like(values)], dim=2)) for box, values in self.parts]
        total, count = to_pixels(parts, self.size)
        return np.asarray((total / count).numpy())

    def to_json(self) -> dict[str, Any]:
        """The path with the score, or with the error."""
        judged = {"score": self.score, "anomalous": self.is_anomalous}
        return {"path": self.path} | ({"error": self.error} if self.error else judged)


@dataclass(frozen=True, kw_only=True, eq=False)
class AnomalyDetector(PatchModel):
    """A ViT with patches of good images. `train_anomaly_detector` makes one, `AnomalyDetector.load` reads it."""

    SETTINGS = "detector.json"
    bank: Tensor  # (P, F) unit vectors
    threshold: float  # an image with a larger score is anomalous
    typical: float  # median distance of the patches of good images

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"bank": (len(self.bank), self.features)}

    @classmethod
    def _parse(cls, stored: dict[str, Any]) -> dict[str, Any]:
        return {name: float(stored[name]) for name in ("threshold", "typical")}

    def check(self, image: ImageInput) -> ScoredImage:
        """Score an image. Raises ImageError if it cannot be read."""
        decoded = decode(image)
        finding = score(image_name(image), self.tokens(decoded), self.bank, decoded.size)
        return replace(finding, is_anomalous=finding.score > self.threshold)

    def paint(self, image: Image.Image, finding: ScoredImage) -> Image.Image:
        """The map over the image, at a size for the screen; colors mean the same for all images."""
        shown = resize_for_display(image)
        heat = (finding.pixels() - self.typical) / (SCALE * max(self.threshold - self.typical, 1e-6))
        weights = np.asarray(Image.fromarray(heat.clip(0, 1)).resize(shown.size))[:, :, None]
        mixed = OPACITY * weights * apply_color_map(weights[:, :, 0]) + (1 - OPACITY * weights) * np.asarray(shown)
        return Image.fromarray(np.rint(mixed).astype(np.uint8))


def score(path: str, parts: Sequence[Part], bank: Tensor, size: Size) -> ScoredImage:
    """The distances of the patches to the nearest in `bank`: one minus the cosine similarity."""
    distances = []
    for box, tokens in parts:
        unit = F.normalize(tokens.float().flatten(0, 1), dim=1)
        nearest = [(unit[i : i + 1024] @ bank.T).amax(dim=1) for i in range(0, len(unit), 1024)]
        distances.append((box, (1 - torch.cat(nearest)).clamp(min=0).view(*tokens.shape[:2], 1)))
    values = torch.cat([grid.flatten() for _, grid in distances])
    most = values.topk(ceil(MOST_DISTANT * len(values))).values.mean()
    return ScoredImage(path, float(most), parts=distances, size=size)


def choose_coreset(tokens: Tensor, count: int) -> Tensor:
    """Indices of `count` patches of tokens (P, F) that cover the others.

    Each next one is the one farthest from those before (greedy k-center), in a random projection, as in PatchCore.
    """
    if len(tokens) <= count:
        return torch.arange(len(tokens))
    projection = torch.randn(tokens.shape[1], PROJECTED, generator=torch.Generator().manual_seed(0))
    x = tokens.float() @ projection
    squares, chosen = x.square().sum(dim=1), []
    nearest = (x - x.mean(dim=0)).square().sum(dim=1)  # the first is the farthest from the mean
    for step in range(count):
        index = int(nearest.argmax())
        chosen.append(index)
        apart = squares + squares[index] - 2 * (x @ x[index])
        nearest = apart if step == 0 else torch.minimum(nearest, apart)
    return torch.tensor(chosen)


def build_bank(images: Sequence[Sequence[Part]], count: int) -> Tensor:
    """At most `count` tokens (P, F) of images, chosen among at most MOST_PATCHES, an equal share of each image."""
    generator, rows = torch.Generator().manual_seed(0), []
    for parts in images:
        tokens = torch.cat([tokens.flatten(0, 1) for _, tokens in parts])
        rows.append(tokens[torch.randperm(len(tokens), generator=generator)[: max(1, MOST_PATCHES // len(images))]])
    tokens = F.normalize(torch.cat(rows).float(), dim=1)
    return tokens[choose_coreset(tokens, count)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Anomalies:
    """What a detector found in images. `train_anomaly_detector` scores its good images by the patches of others."""

    detector: AnomalyDetector
    findings: Sequence[ScoredImage]
    notes: Sequence[str] = ()
    measured: dict[str, Any] = field(default_factory=dict)  # AUROC and PRO in percent, if the truth is known

    def to_json(self) -> dict[str, Any]:
        """The numbers as a JSON object."""
        facts = {"threshold": self.detector.threshold, "patches": len(self.detector.bank), "measured": self.measured}
        return facts | {"images": [finding.to_json() for finding in self.findings], "notes": self.notes}

    def save(self, folder: str | Path) -> None:
        """Write the detector, and what `write` writes, into a folder."""
        self.detector.save(folder)
        self.write(Path(folder).expanduser())

    def write(self, folder: Path) -> None:
        """Write `anomaly.json` and the page `report.html` into a folder."""
        write_json(folder / NUMBERS, self.to_json())
        write_text(folder / PAGE, self.page())

    def page(self) -> str:
        """The result in a sentence, the scores in order, and the images with the largest scores."""
        threshold = self.detector.threshold
        ordered = sorted((each for each in self.findings if not each.error), key=lambda finding: -finding.score)
        shown = []
        for finding in ordered[:MOST_SHOWN]:
            image, name = decode(finding.path), Path(finding.path).name
            pictures = {name: image, f"map of {name}": self.detector.paint(image, finding)}
            images = {caption: thumbnail(one, caption, side=420, kind="whole") for caption, one in pictures.items()}
            shown.append({"pictures": images, "score": finding.score, "is_anomalous": finding.is_anomalous})
        points = [(float(rank), finding.score) for rank, finding in enumerate(ordered, 1)]
        ends = [(1.0, threshold), (float(len(ordered)), threshold)]
        return render(
            "anomaly.html",
            title="Anomalies",
            subtitle=f"{self.detector.vit.meta.origin or 'ViT'}; {len(self.detector.bank):,} patches of good images",
            above=sum(finding.is_anomalous for finding in ordered),
            images=plural(len(ordered), "image"),
            measured=self.measured,
            threshold=threshold,
            chart=Chart(
                title="Score",
                lines=[Line("image", points, scatter=True), Line("threshold", ends)],
                x_label="images, from the most anomalous",
                y_from=0.0,
            ),
            shown=shown,
            notes=[*self.notes, *(finding.error for finding in self.findings if finding.error)],
        )


def train_anomaly_detector(
    images: Sequence[str | Path],
    model: Any,
    *,
    layers: Sequence[int] = (),
    tile: int | None = None,
    image_size: Any = None,
    patches: int = MOST_KEPT,
    false_alarms: float = FALSE_ALARMS,
    device: str = "auto",
    track: Track = no_tracking,
) -> Anomalies:
    """Make an anomaly detector from good images alone.

    Args:
        images: Good images.
        model: A ViT, or a file, directory or published name to load.
        layers: Layers whose tokens are compared; by default those after a half, three quarters and all of the blocks.
        tile: Cut larger images into overlapping tiles of this side in pixels; by default they are resized.
        image_size: Input size to load the weights for.
        patches: Maximum number of patches to keep.
        false_alarms: Fraction of good images that may score above the threshold.
        device: Device of the model, as for `Classifier`.
        track: Wraps the iterator over images to show progress.

    Raises:
        ConfigError: The model has no patch tokens, or not these layers; or an argument is out of range.
        DataError: Fewer than two images can be read.
    """
    check_range("patches", patches, 1)
    check_range("false_alarms", false_alarms, 0, 1)
    reader = open_reader(model, layers, tile, image_size=image_size, device=device)
    notes, read = [], []
    for path in track(images, len(images)):
        try:
            image = decode(path)
        except ImageError as error:
            notes.append(f"left out: {error}")
            continue
        tokens = [(box, tokens.half()) for box, tokens in reader.tokens(image)]
        read.append((image_name(path), image.size, tokens))
    if len(n_parts := [parts for *_, parts in read]) < 2:
        raise DataError(f"{plural(len(read), 'good image')}; a threshold needs at least two")
    fold_of = np.random.default_rng(0).permutation(len(read)) % min(FOLDS, len(read))
    held_out: dict[int, ScoredImage] = {}
    for fold in track(range(min(FOLDS, len(read))), min(FOLDS, len(read))):
        bank = build_bank([n_parts[index] for index in np.flatnonzero(fold_of != fold)], patches)
        for index in np.flatnonzero(fold_of == fold).tolist():
            path, size, parts = read[index]
            held_out[index] = score(path, parts, bank, size)
    scores = sorted(finding.score for finding in held_out.values())
    # of n good images and one more, all orders of scores are equally likely, so this threshold keeps the rate
    rank = ceil((len(scores) + 1) * (1 - false_alarms))
    if rank > len(scores):
        notes.append(
            f"{len(scores)} good images are too few for {false_alarms:.0%} false alarms: the threshold is their "
            f"largest score, which {1 / (len(scores) + 1):.0%} of good images exceed"
        )
    threshold = scores[max(1, min(rank, len(scores))) - 1]
    distances = torch.cat([grid.flatten() for finding in held_out.values() for _, grid in finding.parts])
    bank, typical = build_bank(n_parts, patches), float(distances.median())
    detector = AnomalyDetector(**vars(reader), bank=bank, threshold=threshold, typical=typical)
    findings = [replace(finding, is_anomalous=finding.score > threshold) for _, finding in sorted(held_out.items())]
    return Anomalies(detector=detector, findings=findings, notes=tuple(notes))


def find_anomalies(detector: AnomalyDetector, images: Sequence[str], out: Path) -> Iterator[ScoredImage]:
    """Score images, and write the map of each over it into the folder `overlays` in `out`."""
    digits = len(str(len(images)))
    for position, path in enumerate(images, 1):
        try:
            image = decode(path)
        except ImageError as error:
            yield ScoredImage(path, error=str(error))
            continue
        finding = replace(detector.check(image), path=path)
        name = f"{position:0{digits}d}-{file_name(Path(path).stem)}.png"
        write_image(out / "overlays" / name, detector.paint(image, finding))
        yield finding


def measure(findings: Sequence[ScoredImage], masks: Path | None = None) -> dict[str, Any]:
    """AUROC of images with its 95% interval, and of pixels, and PRO, in percent; nothing if the truth is not known.

    Args:
        findings: What was found in the images.
        masks: PNG files that are called like their image, or like it with `_mask`, not black where there is an anomaly;
            an image without one is good. Without, images in a folder `good` are good and the others are not, if there
            are both.
    """
    findings = [finding for finding in findings if not finding.error]
    if not findings:
        return {}
    paths = [Path(finding.path) for finding in findings]
    files = find_masks(paths, masks) if masks is not None else {}
    truths = {path: read_truth(file, findings[paths.index(path)].size) for path, file in files.items()}
    in_good = np.array([path.parent.name == GOOD for path in paths])
    truth = ~in_good if masks is None else np.array([path in truths and bool(truths[path].any()) for path in paths])
    if masks is not None and not truth.any():
        raise DataError("the masks show no anomaly", where=masks)
    scores, numbers = np.array([finding.score for finding in findings]), dict[str, Any]()

    def image_auroc(counts: NDArray[np.float64]) -> float:
        return roc_area(scores, counts * truth, counts * ~truth)

    if truth.any() and not truth.all():
        numbers["image_auroc"] = image_auroc(np.ones(len(scores)))
        numbers["interval"] = bootstrap(image_auroc, len(scores), seed=0)
    if masks is None:
        return numbers
    cv2 = require("cv2", "train")
    values, anomalous, by_region = [], [], []
    for path, finding in zip(paths, findings):
        scale = min(1.0, MASK_SIDE / max(finding.size))
        size = max(1, round(finding.size[0] * scale)), max(1, round(finding.size[1] * scale))
        small = Image.fromarray(truths.get(path, np.zeros(finding.size[::-1], bool))).resize(size)
        count, regions = cv2.connectedComponents(np.asarray(small).astype(np.uint8))
        areas = np.bincount(regions.ravel(), minlength=count)
        values.append(np.asarray(Image.fromarray(finding.pixels()).resize(size)).ravel())
        anomalous.append(regions.ravel() > 0)
        by_region.append(np.where(anomalous[-1], 1 / areas[regions.ravel()], 0.0))
    pixels, positive = np.concatenate(values), np.concatenate(anomalous)
    numbers["pixel_auroc"] = roc_area(pixels, positive, ~positive)
    numbers["pro"] = roc_area(pixels, np.concatenate(by_region), ~positive, PRO_LIMIT)
    return numbers


def find_masks(images: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """The mask of each image that has one: of its name, in a folder of the same name or directly in `folder`."""
    files = {
        (file.parent.name if file.parent != folder else "", file.stem.removesuffix("_mask")): file
        for file in sorted(folder.rglob("*.png"))
        if not file.name.startswith(".")
    }
    keys = [(path, (folder_name, path.stem)) for path in images for folder_name in ("", path.parent.name)]
    mask_of = {path: files[key] for path, key in keys if key in files}
    if len(set(mask_of.values())) < max(1, len(mask_of)):
        raise DataError("two images have the same mask" if mask_of else "no image has a mask of its name", where=folder)
    return mask_of


def read_truth(file: Path, size: Size) -> NDArray[np.bool_]:
    """Whether each pixel (H, W) is anomalous."""
    codes = read_codes(file)
    if codes.shape != size[::-1]:
        shape = f"{codes.shape[1]} x {codes.shape[0]}"
        raise DataError(f"the mask has {shape} pixels, the image {size[0]} x {size[1]}", where=file)
    return np.asarray(codes % COLORED > 0)


def roc_area(scores: NDArray[Any], positive: NDArray[Any], negative: NDArray[Any], limit: float = 1.0) -> float:
    """The area in percent under the curve of true positives over false positives up to `limit`, given their weights.

    With weights of one, it is the AUROC. With anomalous pixels weighted by one over the area of their region, it is the
    overlap per region (PRO).
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # the last of equal scores
    sums = (np.cumsum(weights[order], dtype=np.float64)[ends] for weights in (positive, negative))
    true, false = (np.append(0.0, values) for values in sums)
    if not (true[-1] and false[-1]):
        return float("nan")
    true, false = true / true[-1], false / false[-1]
    inside = false <= limit
    true, false = np.append(true[inside], np.interp(limit, false, true)), np.append(false[inside], limit)
    return 100.0 * float(np.trapezoid(true, false)) / limit
