"""How an image is prepared for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from vitruvian.config.parts import Fit, Interpolation
from vitruvian.errors import ConfigError, argument
from vitruvian.settings import Range, Settings, Size, as_size

BATCH = 16
"""Images that a model answers at a time, unless told."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocess(Settings):
    """The evaluation preprocessing that a checkpoint expects.

    Apply it with `vitruvian.preprocess_image(image, preprocess)` or `vitruvian.transform(preprocess)`.
    """

    image_size: Size = (224, 224)
    fit: Fit = "squash"
    """`squash`: straight to `scaled_size`; `crop`: scale to just cover `scaled_size`. Then the center is cut.
    `naflex`: each image keeps its shape, in whole patches, so that images differ in size."""
    scaled_size: Size | None = None
    """None means `image_size`. Shorter side 256, crop 224 is (256, 256)."""
    patch_size: Annotated[int, Range(1, 2**14)] | None = None
    max_num_patches: Annotated[int, Range(1, 2**20)] | None = None
    """Of `naflex`: an image has as many whole patches of this size as its shape allows, at most so many."""
    floor_crop: bool = False
    """A center that falls between two pixels is cut from the first (transformers), not from the even (torchvision)."""
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    """False samples without a low-pass filter, as TensorFlow's resize does."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from values between 0 and 1."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    stated: bool = True
    """False where no file says how images are prepared and models of the family differ: to prepare one is an error."""

    def check(self) -> None:
        if {self.patch_size is not None, self.max_num_patches is not None} != {self.fit == "naflex"}:
            raise ConfigError(
                f"fit='naflex' needs {argument('patch_size')} and max_num_patches=, other fits have neither"
            )
        scaled = self.scaled_size or self.image_size
        if scaled[0] < self.image_size[0] or scaled[1] < self.image_size[1]:
            raise ConfigError(
                f"scaled_size={self.scaled_size} does not cover {argument('image_size', self.image_size)}"
            )
        if len(self.mean) != len(self.std) or not self.std or not all(0 < x < 1e9 for x in self.std):
            raise ConfigError(f"mean={self.mean} and std={self.std} do not fit together")

    def brief(self) -> str:
        """The view in one phrase, for a line of text."""
        size = "x".join(map(str, dict.fromkeys(self.image_size)))
        scaled = "x".join(map(str, dict.fromkeys(self.scaled_size or self.image_size)))
        cut = f"{scaled} -> {size}" if self.fit == "crop" or scaled != size else size
        flexible = f"naflex, at most {self.max_num_patches} patches of {self.patch_size}"
        how = {"crop": cut, "squash": f"squash {cut}", "naflex": flexible}[self.fit]
        return f"({how}, {self.interpolation}, mean {', '.join(f'{m:g}' for m in dict.fromkeys(self.mean))})"

    def changed(self, changes: Mapping[str, Any]) -> Preprocess:
        """The view with other settings by name; one that squashes has nothing to cut from."""
        reset = {"scaled_size": None} if changes.get("fit") == "squash" else {}
        return (self.at(self.image_size) if "fit" in changes else self).replace(**reset, **changes)

    def one_size(self, what: str) -> Size:
        """The size of all images; `what` needs one, and is refused where each image has its own."""
        if self.fit == "naflex":
            raise ConfigError(
                f"{what} needs images of one size, and this model keeps each image's shape (NaFlex): "
                f"load it with {argument('image_size', self.image_size[0])}, which squashes all images to that size"
            )
        return self.image_size

    def at(self, image_size: int | Size) -> Preprocess:
        """The same view for another input size, the same for all images; the share that the crop keeps is as before."""
        size = as_size(image_size)
        if self.fit == "naflex":
            return self.replace(image_size=size, fit="squash", patch_size=None, max_num_patches=None)
        if self.scaled_size is None or size == self.image_size:
            return self.replace(image_size=size)
        scaled = tuple(max(new, new * old // was) for new, old, was in zip(size, self.scaled_size, self.image_size))
        return self.replace(image_size=size, scaled_size=scaled)
