"""Patch tokens of a frozen model, what reads them, and their principal components as colors for all images."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitruvian.data.preprocess import apply_preprocess
from vitruvian.errors import ConfigError, DataError, NotFiniteError
from vitruvian.files import atomic_path, json_bytes, read_object
from vitruvian.inference import NOT_FINITE, Encoder
from vitruvian.model.batching import eval_mode
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.settings import Range, Size, validate
from vitruvian.weights.checkpoint_files import write_safetensors
from vitruvian.weights.load import load
from vitruvian.weights.save import save

# B images, R rows and C columns of patches, D width, P patches of all images, K values per patch, H x W pixels

OVERLAP = 0.25  # share of a tile that the next one repeats
TENSORS = "head.safetensors"

Tile = Annotated[int, Range(1, 2**20)] | None  # side in pixels; None for the whole image
Box = tuple[int, int, int, int]  # left, top, right, bottom
Part = tuple[Box, Tensor]  # a tile of an image, and its tokens (R, C, F)

SINK = 2.0
"""A patch is an attention sink if its norm exceeds this many times the median of its image.

In ViT-Ti/16 of AugReg, a fiftieth of the patches has more than 20 times the median; the norms of the others reach 1.7.
"""
MOST_PATCHES = 2**16  # components are fitted on at most this many patches, an equal share of each image
PART_COLORS = ("red", "green", "blue")
TAILS = (0.02, 0.98)  # quantiles of a component over the foreground that get the darkest and the brightest level


def patch_tokens(vit: ViT, pixels: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Patch tokens after some layers, normalized so that each has the same influence.

    Attention sinks (Darcet and others, 2024) hold no local information: each is replaced by the mean of the patches
    around it. Tokens before the patches are left out.

    Args:
        vit: A ViT.
        pixels: Normalized pixels (B, channels, height, width).
        layers: Layers from 0, negative from the end. The tokens of several layers are concatenated.

    Returns:
        Tokens (B, R, C, D * layers), and whether a patch is a sink in one of the layers (B, R, C).
    """
    chosen = sorted({vit.layer(layer) for layer in layers})
    with eval_mode(vit), torch.no_grad():
        grids = vit.forward_intermediates(pixels, chosen, stop_early=True, intermediates_only=True)
    tokens, sinks = zip(*(without_sinks(grid.float().cpu()) for grid in grids))
    return torch.cat(tokens, dim=-1), torch.stack(sinks).any(dim=0)


def without_sinks(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Normalized tokens (B, R, C, D) of one layer's grid (B, D, R, C), and its sinks (B, R, C)."""
    norms = grid.norm(dim=1)  # (B, R, C)
    sinks = norms > SINK * norms.flatten(1).median(dim=1).values[:, None, None]
    tokens = F.layer_norm(grid.movedim(1, -1), grid.shape[1:2]).movedim(-1, 1)  # (B, D, R, C)
    known = (~sinks[:, None]).to(tokens)
    sums, counts = (F.avg_pool2d(x, 3, stride=1, padding=1) for x in (tokens * known, known))
    mean = (tokens * known).mean(dim=(2, 3), keepdim=True) / known.mean(dim=(2, 3), keepdim=True)
    around = torch.where(counts > 0, sums / counts.clamp(min=1e-6), mean)
    return torch.where(sinks[:, None], around, tokens).movedim(1, -1), sinks


def require_patches(model: Model) -> ViT:
    if not isinstance(model, ViT):
        raise ConfigError("this model has no patch tokens; use a Vision Transformer")
    return model


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchReader:
    """A frozen ViT, and which of its patch tokens are read."""

    vit: ViT
    layers: tuple[int, ...]  # whose tokens are read
    tile: int | None  # side in pixels of the tiles of larger images; None to resize the whole image

    @property
    def features(self) -> int:
        """Number of features of a patch."""
        return self.vit.config.width * len(self.layers)

    def tokens(self, image: Image.Image) -> list[Part]:
        """The tiles of an upright RGB image, each resized to the model's input without a crop, with their tokens."""
        preprocess = self.vit.meta.preprocess.with_changes({"fit": "squash"})
        device, parts = next(self.vit.parameters()).device, []
        for box in tile_boxes(image.size, self.tile):
            pixels = apply_preprocess(image.crop(box), preprocess)[None].to(device)
            tokens = patch_tokens(self.vit, pixels, self.layers)[0][0]
            if not tokens.isfinite().all():
                raise NotFiniteError(NOT_FINITE)
            parts.append((box, tokens))
        return parts


def open_reader(model: Any, layers: Sequence[int], tile: int | None, **options: Any) -> PatchReader:
    """A reader of a model, or of weights to load with the `options` of `Encoder`.

    By default, it reads the layers after a half, three quarters and all of the blocks.
    """
    validate("tile", Tile, tile)
    vit = require_patches(Encoder(model, **options).torch_model)
    chosen = layers or [max(0, round(vit.config.depth * part) - 1) for part in (0.5, 0.75, 1)]
    return PatchReader(vit=vit, layers=tuple(sorted({vit.layer(layer) for layer in chosen})), tile=tile)


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchModel(PatchReader):
    """A reader with tensors and settings of its own, which a folder keeps."""

    SETTINGS: ClassVar[str]  # the name of the file of settings

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors by their names."""
        raise NotImplementedError

    @classmethod
    def _parse(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """The settings besides layers and tile."""
        raise NotImplementedError

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto") -> Self:
        """What `save` wrote into a folder."""
        path = Path(folder).expanduser()
        stored = read_object(path / cls.SETTINGS)
        try:
            vit = require_patches(Encoder(load(path), device=device).torch_model)
            layers, tile = tuple(map(vit.layer, stored["layers"])), validate("tile", Tile, stored["tile"])
            loaded = cls(vit=vit, layers=layers, tile=tile, **cls._parse(stored), **load_file(path / TENSORS))
            if any(tuple(getattr(loaded, name).shape) != shape for name, shape in loaded._shapes().items()):
                raise DataError("the head does not fit the model", where=path)
        except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
            raise DataError(f"not a complete {Path(cls.SETTINGS).stem}: {error}", where=path) from error
        return loaded

    def save(self, folder: str | Path) -> None:
        """Write the model as `vt.save` does, the tensors and the settings into a folder."""
        tensors = {name: getattr(self, name) for name in self._shapes()}
        settings = {name: value for name, value in vars(self).items() if name != "vit" and name not in tensors}
        with atomic_path(Path(folder).expanduser()) as draft:
            save(self.vit, draft)
            write_safetensors(draft / TENSORS, tensors, {})
            (draft / self.SETTINGS).write_bytes(json_bytes(settings))


def tile_boxes(size: Size, tile: int | None) -> list[Box]:
    """Overlapping tiles that cover an image of `size` (columns, rows); the image itself if it is not larger."""

    def starts(side: int) -> tuple[list[int], int]:
        if tile is None or side <= tile:
            return [0], side
        count = -(-(side - tile) // max(1, int(tile * (1 - OVERLAP)))) + 1
        return np.linspace(0, side - tile, count).round().astype(int).tolist(), tile

    (lefts, width), (tops, height) = starts(size[0]), starts(size[1])
    return [(left, top, left + width, top + height) for top in tops for left in lefts]


def to_pixels(parts: Sequence[Part], size: Size) -> Tensor:
    """Values (K, H, W) of pixels of an image of `size` (columns, rows) from values (R, C, K) of patches of its tiles.

    They are interpolated between the centers of patches, and added where tiles overlap.
    """
    total = torch.zeros(parts[0][1].shape[-1], size[1], size[0])
    for (left, top, right, bottom), values in parts:
        grid = values.permute(2, 0, 1)[None]  # (1, K, R, C)
        total[:, top:bottom, left:right] += F.interpolate(grid, (bottom - top, right - left), mode="bilinear")[0]
    return total


def default_layer(vit: ViT) -> int:
    """The layer whose tokens the components are fitted on: the one after two thirds of the blocks.

    The last layers of a model that classifies by its class token encode less and less of what a patch shows.
    """
    return max(0, round(vit.config.depth * 2 / 3) - 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Components:
    """Principal components of patch tokens, fitted over many images, and how they become colors."""

    mean: Tensor  # (D,)
    first: Tensor  # (D,) the first component of all patches; the foreground is above `threshold`
    threshold: float
    foreground_mean: Tensor  # (D,)
    parts: Tensor  # (D, 3) the first components of the foreground: red, green and blue
    low: Tensor  # (3,) values with the darkest level
    high: Tensor  # (3,) values with the brightest level

    def scores(self, tokens: Tensor) -> Tensor:
        """The first component (...) of tokens (..., D): positive for the foreground."""
        return (tokens.double() - self.mean) @ self.first - self.threshold

    def colors(self, tokens: Tensor) -> NDArray[np.float32]:
        """Levels of red, green and blue from 0 to 1 (..., 3) of tokens (..., D); NaN for the background."""
        values = ((tokens.double() - self.foreground_mean) @ self.parts - self.low) / (self.high - self.low)
        shown = torch.where(self.scores(tokens)[..., None] > 0, values.clamp(0, 1), torch.nan)
        return np.asarray(shown.float().numpy())


def fit_components(grids: Iterable[Tensor], images: int) -> Components:
    """Fit components over the patches of all images, so that a part has the same color in each.

    The first component of all patches separates foreground and background: of its two sides, cut where the variance
    within them is least (Otsu), the foreground is the one with fewer patches at the border of the images. The colors
    are the first three components of the foreground alone, with the signs that make their largest weight positive.

    Args:
        grids: Tokens (R, C, D) of each image.
        images: Number of images, at least as many as there are grids.
    """
    kept, at_border = [], []
    generator = torch.Generator().manual_seed(0)
    for grid in grids:
        rows, columns, width = grid.shape
        border = torch.ones(rows, columns, dtype=torch.bool)
        border[1:-1, 1:-1] = False
        chosen = torch.randperm(rows * columns, generator=generator)[: max(1, MOST_PATCHES // images)]
        kept.append(grid.reshape(-1, width)[chosen])
        at_border.append(border.flatten()[chosen])
    tokens, border = torch.cat(kept).double(), torch.cat(at_border)  # (P, D)
    mean, axes = principal_axes(tokens, 1)
    first = axes[:, 0]
    values = (tokens - mean) @ first
    if border.any() and not border.all() and values[border].mean() > values[~border].mean():
        first, values = -first, -values
    threshold = otsu_threshold(values)
    is_foreground = values > threshold
    foreground = tokens[is_foreground] if is_foreground.sum() > len(PART_COLORS) else tokens
    foreground_mean, parts = principal_axes(foreground, len(PART_COLORS))
    low, high = ((foreground - foreground_mean) @ parts).quantile(torch.tensor(TAILS).double(), dim=0)
    return Components(
        mean=mean,
        first=first,
        threshold=threshold,
        foreground_mean=foreground_mean,
        parts=parts,
        low=low,
        high=torch.maximum(high, low + 1e-6),
    )


def principal_axes(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean (D,) of tokens (P, D), and the components (D, count) of most variance, their largest weight positive."""
    mean = tokens.mean(dim=0)
    centered = tokens - mean
    _, axes = torch.linalg.eigh(centered.T @ centered)
    axes = axes.flip(1)[:, :count]
    strongest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    return mean, axes * strongest.sign()


def otsu_threshold(values: Tensor) -> float:
    """The cut with the least variance within the two sides (Otsu, 1979)."""
    ordered = values.sort().values
    n = len(ordered)
    if n < 2:
        return float(ordered[0]) - 1.0
    below = torch.arange(1, n, dtype=torch.float64)  # number of values below each cut
    sums = ordered.cumsum(dim=0)
    gap = sums[:-1] / below - (sums[-1] - sums[:-1]) / (n - below)
    return float(ordered[int((below * (n - below) * gap.square()).argmax())])
