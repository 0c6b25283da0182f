"""Training augmentation: its settings, the transform of one image, mixing of batches, and the operations.

Operations take and return uint8 images, (rows, columns, 3) RGB or (rows, columns) gray, and leave their argument
unchanged. Color operations have Pillow's meaning: those that depend on each value alone go through a table of 256
entries and equal Pillow bit for bit; blends of two images are rounded where Pillow truncates, and may be 1 higher.
"""

import functools
import io
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.config import Interpolation
from vitruvian.data.decode import MAX_PIXELS, RawImage, check_scans, decode, identify, orientation
from vitruvian.data.preprocess import cover_size, level_tables
from vitruvian.data.stored import read_stored
from vitruvian.errors import ConfigError, ImageError, UnknownNameError, require
from vitruvian.settings import Range, Settings, Share, Size, check_range

Span = tuple[float, float]  # minimum and maximum


@dataclass(frozen=True, kw_only=True, slots=True)
class Augment(Settings):
    """Augmentation of training images, applied in the order of the fields; 0 disables a step."""

    image_size: Size = (224, 224)
    """Rows and columns of the result, in pixels; a single number means a square."""
    crop: Literal["inception", "resized", "pad", "random", "center", "none"] = "inception"
    """`inception`: a crop with uniform height and aspect ratio, as TensorFlow draws it for the paper; `resized`: a crop
    with uniform area and log-uniform aspect ratio, the RandomResizedCrop of torchvision and timm; both are resized to
    `image_size`. `pad`: resize to just cover `image_size`, pad, and crop at a random position, like RandomCrop;
    `random`: squash to `precrop` times `image_size`, and crop at a random position; `center`: the largest center crop
    with the aspect ratio of `image_size`; `none`: squash the full image."""
    scale: Span = (0.05, 1.0)
    """Minimum and maximum area fraction of an `inception` or `resized` crop; the paper uses 0.05, others 0.08."""
    ratio: Span = (3 / 4, 4 / 3)
    """Minimum and maximum aspect ratio (width / height) of that crop."""
    padding: Annotated[int, Range(0, 1024)] = 4
    """Pixels added on each side for `pad`."""
    precrop: Annotated[float, Range(1.0, 4.0)] = 8 / 7
    """Side of the squashed image before a `random` crop, as a multiple of `image_size`."""
    padding_mode: Literal["constant", "reflect"] = "constant"
    """`constant`: black."""
    interpolation: Interpolation = "bilinear"
    """Filter for resizing; a crop at least twice as large as the result is first averaged down by a power of two."""
    hflip: Share = 0.5
    """Probability of a horizontal flip."""
    alternate_flip: bool = False
    """Instead of `hflip`, flip each image in every other epoch, half of them in the first."""
    rand_augment: Annotated[int, Range(0, 16)] = 0
    """Number of random operations of RandAugment per image."""
    rand_augment_magnitude: Annotated[float, Range(0.0, 20.0)] = 10.0
    """Magnitude from 0 to 10 (AugReg: 20), in the ranges of big_vision, not those of torchvision and timm."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Brightness, contrast, saturation: a factor between 1 - x and 1 + x; hue: a shift by up to x of the circle."""
    ops: tuple[tuple[str, Share, Share], ...] = ()
    """Further operations of the table OPS, in this order: name, probability, strength from 0 to 1."""
    random_erasing: Share = 0.0
    """Probability that a rectangle of 2 to 33% of the image is replaced by noise."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from values between 0 and 1; one number for gray images, three for RGB."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    pixels: Literal["rgb", "stored"] = "rgb"
    """As `Preprocess.pixels`. Stored channels are cropped, resized, padded and flipped as floats."""
    output: Literal["float32", "uint8"] = "float32"
    """`uint8` leaves normalization to `normalize_batch`: a quarter of the bytes from worker to training process."""
    mixup_alpha: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Parameter of the Beta distribution of the mixing ratio."""
    cutmix_alpha: Annotated[float, Range(0.0, 1e6)] = 0.0
    mixup_prob: Share = 1.0
    """Probability that a batch is mixed if an alpha is set; with two alphas, half of it for each."""

    def check(self) -> None:
        for name, span, low, high in (("scale", self.scale, 1e-4, 1.0), ("ratio", self.ratio, 0.01, 100.0)):
            if len(span) != 2 or not low <= span[0] <= span[1] <= high:
                raise ConfigError(f"{name}={span} is not (minimum, maximum) between {low} and {high}")
        for op, _, _ in self.ops:
            if op not in OPS:
                raise UnknownNameError("operation in augment.ops", op, OPS)
        for name, strength, most in zip(
            ("brightness", "contrast", "saturation", "hue"), self.color_jitter, (1.0, 1.0, 1.0, 0.5)
        ):
            check_range(f"color_jitter {name}", strength, 0.0, most)
        names = ("rand_augment", "color_jitter", "ops", "random_erasing")
        used = next((name for name in names if getattr(self, name) not in (0, (), (0, 0, 0, 0))), None)
        if self.pixels == "stored" and used:
            reason = f"augment.{used} needs 8-bit images of 1 or 3 channels; this model reads stored channels"
            raise ConfigError(reason, hint=f"set augment.{used}={'[]' if used == 'ops' else 0}")
        is_known = len(self.mean) in (1, 3) or (self.pixels == "stored" and self.mean)
        if not is_known or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ConfigError(f"mean={self.mean} and std={self.std} need one value for each of 1 or 3 channels")

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed, so that their targets are soft."""
        return self.mixup_prob > 0 and max(self.mixup_alpha, self.cutmix_alpha) > 0


AUGREG_LEVELS: dict[str, tuple[float, int, float]] = {
    # mixup_alpha, rand_augment, rand_augment_magnitude
    "none": (0.0, 0, 0.0),
    "light0": (0.0, 2, 0.0),
    "light1": (0.2, 2, 10.0),
    "medium1": (0.2, 2, 15.0),
    "medium2": (0.5, 2, 15.0),
    "strong1": (0.5, 2, 20.0),
    "strong2": (0.8, 2, 20.0),
}
"""`augment.level` of a recipe: the levels of "How to train your ViT?", as its file names call them."""


# Decoding a part of a JPEG by libjpeg-turbo (simplejpeg), at half, quarter or eighth size if that is large enough

Levels = NDArray[np.uint8]  # pixel values of 0 to 255: (rows, columns, 3) RGB, or (rows, columns) gray
SEQUENTIAL, PROGRESSIVE = (0xFFC0, 0xFFC1), 0xFFC2  # frames with Huffman codes
SCAN, APP1 = 0xFFDA, 0xFFE1
TWO_WORDS, FRAME = struct.Struct(">HH").unpack_from, struct.Struct(">BHHB").unpack_from

# EXIF orientation: whether to transpose, then the flip code of cv2.flip
TRANSFORMS = {2: (False, 1), 3: (False, -1), 4: (False, 0), 5: (True, None), 6: (True, 1), 7: (True, -1), 8: (True, 0)}


class Box(NamedTuple):
    """Part of an upright image, in pixels."""

    top: int
    left: int
    rows: int
    columns: int

    def crop(self, levels: Levels) -> Levels:
        return levels[self.top : self.top + self.rows, self.left : self.left + self.columns]


class JpegHeader(NamedTuple):
    """The header of a JPEG."""

    stored: Size
    orientation: int

    @property
    def size(self) -> Size:
        """Rows and columns of the upright image."""
        rows, columns = self.stored
        return (columns, rows) if self.orientation > 4 else (rows, columns)


def read_header(data: bytes) -> JpegHeader | None:
    """The header of an ordinary 8-bit gray or color JPEG; None for other files, which `decode` handles."""
    frame, has_exif, position = 0, False, 2
    try:
        while True:
            marker, length = TWO_WORDS(data, position)
            if marker == SCAN:
                break
            if marker in SEQUENTIAL or marker == PROGRESSIVE:
                frame = position
            elif marker == APP1:
                has_exif = True
            elif marker < 0xFF00:
                return None
            position += 2 + length
        precision, rows, columns, components = FRAME(data, frame + 4)
        if not frame or precision != 8 or components not in (1, 3) or not 0 < rows * columns <= MAX_PIXELS:
            return None
        if 0xFF00 + data[frame + 1] == PROGRESSIVE or data[position + 4] != components:  # several scans
            check_scans(data, rows * columns, MAX_PIXELS)
        rotation = orientation(identify(io.BytesIO(data))) if has_exif else 1
        return JpegHeader((rows, columns), rotation if rotation in TRANSFORMS else 1)
    except Exception:  # broken bytes raise any kind of error; `decode` explains them
        return None


def decode_box(data: bytes, header: JpegHeader, box: Box, size: Size) -> Levels:
    """RGB of the part `box`, scaled down by 1, 2, 4 or 8 but not below `size` rows and columns.

    At full size it is bit-identical to the same part of `decode(data)`, which also decodes the files that libjpeg-turbo
    rejects.
    """
    codec, factor = require("simplejpeg", "train"), shrink_factor((box.rows, box.columns), size, most=8)
    try:
        rows, columns = (-(-side // factor) for side in header.stored)
        levels = codec.decode_jpeg(data, "RGB", min_height=rows, min_width=columns)
    except (ValueError, IndexError):
        return box.crop(np.asarray(decode(data)))
    transposed, flip_code = TRANSFORMS.get(header.orientation, (False, None))  # to upright
    if transposed:
        levels = opencv().transpose(levels)
    if flip_code is not None:
        levels = opencv().flip(levels, flip_code)
    return Box(*(round(side / factor) for side in box)).crop(levels)


def shrink_factor(size: Size, target: Size, most: int = 2**16) -> int:
    """The largest power of two by which `size` can be divided and still cover `target`."""
    factor = 1
    while 2 * factor <= min(most, size[0] // target[0], size[1] // target[1]):
        factor *= 2
    return factor


@functools.cache
def opencv() -> Any:
    """The module cv2 without its own threads: workers use the other cores, and threads do not survive a fork."""
    module = require("cv2", "train")
    module.setNumThreads(0)
    return module


TrainImage = RawImage | Image.Image  # an encoded image, pixel values (rows, columns[, 3]), or a Pillow image


def train_transform(settings: Augment) -> "TrainTransform":
    """The transform with these settings; a missing package raises here, not later in a worker."""
    require_packages()
    return TrainTransform(settings)


def require_packages() -> None:
    """Raise MissingExtraError if a package that augmentation needs is not installed."""
    opencv()
    require("simplejpeg", "train")


@dataclass(frozen=True, slots=True)
class TrainTransform:
    """`transform(image, rng)` returns an augmented tensor (channels, rows, columns), random only through `rng`."""

    settings: Augment

    def __call__(self, image: TrainImage, rng: np.random.Generator) -> Tensor:
        """Normalized float32, or uint8 if the settings ask for it."""
        levels, s = self.levels(image, rng), self.settings
        if s.pixels == "stored":
            mean, std = (np.array(value, np.float32)[:, None, None] for value in (s.mean, s.std))
            channels_first = np.moveaxis(levels.reshape(*levels.shape[:2], s.channels), 2, 0)
            return torch.from_numpy((channels_first - mean) / std)
        rows, columns, *_ = levels.shape
        planes = np.empty((levels.size // (rows * columns), rows, columns), np.uint8)  # channels first
        opencv().split(levels, list(planes))
        if s.output == "uint8":
            return torch.from_numpy(planes)
        pixels = np.empty(planes.shape, np.float32)
        for plane, table, target in zip(planes, level_tables(s.mean, s.std), pixels):  # as in evaluation preprocessing
            opencv().LUT(plane, table, dst=target)
        return torch.from_numpy(pixels)

    def levels(self, image: TrainImage, rng: np.random.Generator) -> Levels:
        """The augmented image before normalization: uint8 RGB or gray, or the stored channels as floats."""
        s, cv2 = self.settings, opencv()
        if s.pixels == "stored":
            levels: Any = read_stored(image, s.channels)
            box, size = choose_crop(levels.shape[:2], s, rng)
            levels = box.crop(levels)
        elif isinstance(image, bytes) and (header := read_header(image)) is not None:
            box, size = choose_crop(header.size, s, rng)
            levels = decode_box(image, header, box, size)
        else:
            levels = as_levels(image)
            box, size = choose_crop(levels.shape[:2], s, rng)
            levels = box.crop(levels)
        levels = resize_levels(levels, size, s.interpolation)
        if s.pixels == "rgb":
            levels = to_gray(levels) if s.channels == 1 else to_rgb_levels(levels)
        if s.crop == "pad":
            border = cv2.BORDER_CONSTANT if s.padding_mode == "constant" else cv2.BORDER_REFLECT_101
            levels = cv2.copyMakeBorder(levels, s.padding, s.padding, s.padding, s.padding, border)
        if s.crop in ("pad", "random"):
            levels = _random_position(s.image_size, levels.shape[:2], rng.random(2).tolist()).crop(levels)
        if s.hflip and not s.alternate_flip and rng.random() < s.hflip:
            levels = cv2.flip(levels, 1)
        if s.rand_augment:
            levels = rand_augment(levels, s.rand_augment, s.rand_augment_magnitude, rng)
        if any(s.color_jitter):
            levels = color_jitter(levels, s.color_jitter, rng)
        for op, probability, strength in s.ops:
            if rng.random() < probability:
                levels = OPS[op](levels, strength, rng)
        if s.random_erasing and rng.random() < s.random_erasing:
            levels = random_erasing(levels, rng)
        return levels


MAX_ASPECT = 64  # maximum aspect ratio for `pad`; of a longer image only the center is used, to save memory


def choose_crop(size: Size, settings: Augment, rng: np.random.Generator) -> tuple[Box, Size]:
    """The box to crop from an image of `size`, and the size to resize it to."""
    full = Box(0, 0, *size)
    match settings.crop:
        case "inception":
            return inception_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "resized":
            return random_resized_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "pad":
            longest = (MAX_ASPECT, 1) if size[0] > size[1] else (1, MAX_ASPECT)
            part = full if max(size) <= MAX_ASPECT * min(size) else center_box(size, longest)
            return part, cover_size((part.rows, part.columns), settings.image_size)
        case "random":
            rows, columns = (round(settings.precrop * side) for side in settings.image_size)
            return full, (rows, columns)
        case "center":
            return center_box(size, settings.image_size), settings.image_size
        case _:
            return full, settings.image_size


def as_levels(image: TrainImage) -> Levels:
    """The full image as uint8 RGB, or gray for a gray array."""
    if not isinstance(image, np.ndarray):
        return np.asarray(decode(image))
    levels = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    if levels.dtype != np.uint8 or levels.ndim not in (2, 3) or levels.shape[2:] not in ((), (3,)) or not levels.size:
        expected = "expected uint8 (rows, columns) or (rows, columns, 3)"
        raise ImageError(f"an array of {image.dtype} {image.shape} is not an image; {expected}")
    return levels


def normalize_batch(pixels: Tensor, settings: Augment) -> Tensor:
    """Normalize uint8 images (..., channels, rows, columns) to float32 (v / 255 - mean) / std, on their device."""
    mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (settings.mean, settings.std))
    return pixels.float().div_(255).sub_(mean).div_(std)


def mix(
    pixels: Tensor,
    labels: Tensor,
    *,
    classes: int,
    settings: Augment,
    rng: np.random.Generator,
    smoothing: float = 0.0,
    repeats: int = 1,
) -> tuple[Tensor, Tensor]:
    """Mix a batch by Mixup or CutMix.

    One draw from `rng` is used for the batch. Image 2i is mixed with 2i + 1 and vice versa, an odd last one with
    itself: processes that share a batch in even, contiguous parts and have equal generators mix like one process.

    Args:
        pixels: Normalized float images (B, C, H, W).
        labels: Class indices (B,), or targets (B, K).
        classes: Number of classes K.
        settings: The probabilities and alphas.
        smoothing: Share of each label that is distributed over all classes.
        repeats: Consecutive images that are versions of one image, which are not mixed with each other.

    Returns:
        Mixed images (B, C, H, W), and targets (B, K); those of class indices add up to one.
    """
    if not pixels.is_floating_point():
        raise ConfigError(f"mixing needs normalized pixels, not {pixels.dtype}: call normalize_batch first")
    targets = labels
    if labels.dim() == 1:
        targets = F.one_hot(labels, classes).float().mul_(1.0 - smoothing).add_(smoothing / classes)
    if not settings.mixes or rng.random() >= settings.mixup_prob:
        return pixels, targets
    partners = mixing_partners(len(pixels), repeats).to(pixels.device)
    has_cutmix = settings.cutmix_alpha > 0
    if rng.random() < has_cutmix / (has_cutmix + (settings.mixup_alpha > 0)):  # one half if both have an alpha
        H, W = pixels.shape[2:]
        box = cutmix_box((H, W), rng.beta(settings.cutmix_alpha, settings.cutmix_alpha), rng)
        share = 1.0 - box.rows * box.columns / (H * W)
        rows, columns = slice(box.top, box.top + box.rows), slice(box.left, box.left + box.columns)
        pixels = pixels.clone()
        pixels[:, :, rows, columns] = pixels[:, :, rows, columns][partners]
    else:
        share = rng.beta(settings.mixup_alpha, settings.mixup_alpha)
        pixels = pixels[partners].lerp_(pixels, share)
    return pixels, targets[partners].lerp_(targets, share)


def mixing_partners(count: int, repeats: int = 1) -> Tensor:
    """1, 0, 3, 2, ... in groups of `repeats`; an image without a partner is mixed with itself."""
    indices = torch.arange(count)
    partners = (indices // repeats ^ 1) * repeats + indices % repeats
    return torch.where(partners < count, partners, indices)


def cutmix_box(size: Size, share: float, rng: np.random.Generator) -> Box:
    """About 1 - `share` of an image, with its aspect ratio, around a random point and clipped at the edges."""
    side = math.sqrt(1.0 - share)
    spans = []
    for length, draw in zip(size, rng.random(2).tolist()):
        middle, reach = int(draw * length), int(side * length) / 2
        start, stop = max(0, math.floor(middle - reach)), min(length, math.floor(middle + reach))
        spans.append((start, stop - start))
    (top, rows), (left, columns) = spans
    return Box(top, left, rows, columns)


GRAY = 128  # value of pixels that are moved in from outside the image

# the values of cv2.INTER_NEAREST_EXACT, _LINEAR, _CUBIC, _AREA, _LANCZOS4
FILTERS: dict[Interpolation, int] = {"nearest": 6, "bilinear": 1, "bicubic": 2, "area": 3, "lanczos": 4}

ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 10 / 3)  # as in the paper on random erasing and in timm


def inception_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box:
    """A crop with uniform aspect ratio, and a height uniform among those that fit the area and the image.

    The algorithm of tf.image.sample_distorted_bounding_box without object boxes, which the paper's code calls.
    """
    least, most = area[0] * size[0] * size[1], area[1] * size[0] * size[1]
    for _ in range(100):
        draws = rng.random(4).tolist()
        shape = ratio[0] + draws[0] * (ratio[1] - ratio[0])
        tallest = min(round(math.sqrt(most / shape)), int((size[1] + 0.5) / shape), size[0])
        shortest = min(round(math.sqrt(least / shape)), tallest)
        rows = shortest + int(draws[1] * (tallest - shortest + 1))
        columns = round(rows * shape)
        if rows > 0 and 0 < columns <= size[1] and least <= rows * columns <= most:
            return _random_position((rows, columns), size, draws[2:])
    return Box(0, 0, *size)


def random_resized_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box:
    """A crop with uniform area and log-uniform aspect ratio, as in torchvision's RandomResizedCrop."""
    shape = min(max(size[1] / size[0], ratio[0]), ratio[1])
    return _random_box(size, area, ratio, rng) or center_box(size, (1.0, shape))


def _random_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box | None:
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        draws = rng.random(4).tolist()
        pixels = (area[0] + draws[0] * (area[1] - area[0])) * size[0] * size[1]
        shape = math.exp(low + draws[1] * (high - low))
        rows, columns = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < rows <= size[0] and 0 < columns <= size[1]:
            return _random_position((rows, columns), size, draws[2:])
    return None


def _random_position(part: Size, size: Size, draws: list[float]) -> Box:
    """A box of the size `part` at a random position in an image of `size`."""
    rows, columns = part
    return Box(int(draws[0] * (size[0] - rows + 1)), int(draws[1] * (size[1] - columns + 1)), rows, columns)


def center_box(size: Size, shape: tuple[float, float]) -> Box:
    """The largest box with the aspect ratio of `shape`, in the center."""
    rows = min(size[0], max(1, round(size[1] * shape[0] / shape[1])))
    columns = min(size[1], max(1, round(size[0] * shape[1] / shape[0])))
    return Box((size[0] - rows) // 2, (size[1] - columns) // 2, rows, columns)


def resize_levels(levels: Levels, size: Size, interpolation: Interpolation) -> Levels:
    """Resize to `size` rows and columns, after averaging down by a power of two if that leaves enough pixels."""
    cv2 = opencv()
    factor = shrink_factor(levels.shape[:2], size)
    if factor > 1:
        rows, columns = levels.shape[0] // factor, levels.shape[1] // factor
        levels = scale(levels, (rows, columns), cv2.INTER_AREA)
    return levels if levels.shape[:2] == size else scale(levels, size, FILTERS[interpolation])


def scale(levels: Levels, size: Size, flag: int) -> Levels:
    """Resize by OpenCV, which averages at most four channels at a time and drops the axis of a single one."""
    if levels.ndim == 2 or levels.shape[2] == 3:
        return opencv().resize(levels, size[::-1], interpolation=flag)
    planes = [np.ascontiguousarray(plane) for plane in np.moveaxis(levels, 2, 0)]
    return np.stack([opencv().resize(plane, size[::-1], interpolation=flag) for plane in planes], axis=2)


def affine(levels: Levels, matrix: tuple[float, float, float, float, float, float]) -> Levels:
    """The image whose pixel at (x, y) is the nearest to (ax + by + c, dx + ey + f) in `levels`, or gray outside.

    Coordinates are those of Pillow's Image.transform: the first pixel spans 0 to 1.
    """
    cv2 = opencv()
    a, b, c, d, e, f = matrix
    centered = np.array([[a, b, c + (a + b - 1) / 2], [d, e, f + (d + e - 1) / 2]])
    rows, columns = levels.shape[:2]
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(levels, centered, (columns, rows), flags=flags, borderValue=(GRAY,) * 3)


def rotate(levels: Levels, degrees: float) -> Levels:
    """Rotate counter-clockwise about the center."""
    angle, y, x = math.radians(degrees), levels.shape[0] / 2, levels.shape[1] / 2
    cos, sin = math.cos(angle), math.sin(angle)
    return affine(levels, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def random_erasing(levels: Levels, rng: np.random.Generator) -> Levels:
    """Fill a random rectangle with noise."""
    box = _random_box(levels.shape[:2], ERASED_AREA, ERASED_RATIO, rng)
    if box is None:
        return levels
    changed = levels.copy()
    hole = box.crop(changed)
    hole[...] = rng.integers(0, 256, hole.shape, dtype=np.uint8)
    return changed


RAMP = np.arange(256, dtype=np.float32)
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's ImageFilter.SMOOTH


def look_up(levels: Levels, table: NDArray[np.float32] | NDArray[np.intp]) -> Levels:
    """Replace every value by its entry in `table`, (256,) or (256, channels), clipped to 0 to 255."""
    entries = table.clip(0, 255).astype(np.uint8)
    return opencv().LUT(levels, entries[None] if entries.ndim == 2 else entries)


def blend(degenerate: Levels, levels: Levels, factor: float) -> Levels:
    """`degenerate` at factor 0, `levels` at 1, extrapolated above 1."""
    return opencv().addWeighted(levels, factor, degenerate, 1.0 - factor, 0.0)


def to_gray(levels: Levels) -> Levels:
    """Luma (rows, columns), with the weights of ITU-R 601."""
    return levels if levels.ndim == 2 else opencv().cvtColor(levels, opencv().COLOR_RGB2GRAY)


def to_rgb_levels(levels: Levels) -> Levels:
    """Three channels; equal ones from gray."""
    return levels if levels.ndim == 3 else opencv().cvtColor(levels, opencv().COLOR_GRAY2RGB)


def brightness(levels: Levels, factor: float) -> Levels:
    return look_up(levels, RAMP * np.float32(factor))


def contrast(levels: Levels, factor: float) -> Levels:
    """Scale the distance from the mean luma; big_vision uses the number of pixels / 256 for that mean by mistake."""
    middle = np.float32(int(opencv().mean(to_gray(levels))[0] + 0.5))
    return look_up(levels, middle + np.float32(factor) * (RAMP - middle))


def saturation(levels: Levels, factor: float) -> Levels:
    return levels if levels.ndim == 2 else blend(to_rgb_levels(to_gray(levels)), levels, factor)


def sharpness(levels: Levels, factor: float) -> Levels:
    """Smooth below factor 1, sharpen above; the outermost pixels stay."""
    smooth = levels.copy()
    smooth[1:-1, 1:-1] = opencv().filter2D(levels, -1, SMOOTH)[1:-1, 1:-1]
    return blend(smooth, levels, factor)


def hue(levels: Levels, shift: float) -> Levels:
    """Shift every hue by this fraction of the color circle."""
    if levels.ndim == 2:
        return levels
    cv2 = opencv()
    hsv = cv2.cvtColor(levels, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(round(shift * 255) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def autocontrast(levels: Levels) -> Levels:
    """Stretch each channel to the range from 0 to 255."""
    tables = []
    for counts in histograms(levels):
        present = np.flatnonzero(counts)
        low, high = int(present[0]), int(present[-1])
        scale = 255 / max(high - low, 1)
        stretched = np.trunc(RAMP.astype(np.float64) * scale - low * scale)
        tables.append(RAMP if low == high else stretched.astype(np.float32))
    return look_up(levels, np.stack(tables, axis=1))


def equalize(levels: Levels) -> Levels:
    """Equalize the histogram of each channel."""
    tables = []
    for counts in histograms(levels):
        step = int(counts.sum() - counts[counts > 0][-1]) // 255
        below = np.cumsum(counts) - counts
        tables.append(((step // 2 + below) // step).astype(np.float32) if step else RAMP)
    return look_up(levels, np.stack(tables, axis=1))


def histograms(levels: Levels) -> list[NDArray[np.intp]]:
    """Counts of the 256 values, per channel."""
    channels = range(1 if levels.ndim == 2 else levels.shape[2])
    cv2 = opencv()
    return [cv2.calcHist([levels], [c], None, [256], [0, 256]).ravel().astype(np.intp) for c in channels]


def color_jitter(levels: Levels, strengths: tuple[float, float, float, float], rng: np.random.Generator) -> Levels:
    """Change brightness, contrast, saturation and hue by random amounts, in random order."""
    *factors, shift = strengths
    ranges = [*((1 - strength, 1 + strength) for strength in factors), (-shift, shift)]
    amounts = [low + draw * (high - low) for draw, (low, high) in zip(rng.random(4).tolist(), ranges)]
    for index in rng.permutation(4).tolist():
        if strengths[index]:
            levels = (brightness, contrast, saturation, hue)[index](levels, amounts[index])
    return levels


# Operations by name, and RandAugment as in big_vision (Cubuk et al. 2019, arXiv:1909.13719). "RandAugment(2, 10)" of
# the plain-ViT baseline is two operations of magnitude 10 of 10. At that magnitude: rotation by 30 degrees, shear by
# 0.3, shift by 100 pixels of 224 (scaled with the image), factors of 1.9 for brightness, contrast, color and sharpness,
# 4 bits for posterize, 110 for solarize_add, a hole of 80 pixels of 224. As there, more is not always stronger:
# posterize keeps more bits, solarize inverts fewer values, and factors are below 1 under magnitude 5. Differences to
# big_vision: at least one bit stays, and contrast is Pillow's.

Operation = Callable[[Levels, float, np.random.Generator], Levels]
SHIFT, HOLE = 100 / 224, 40 / 224  # relative to the image's side at full strength; HOLE is half a side


def _sign(amount: float, rng: np.random.Generator) -> float:
    return amount if rng.random() < 0.5 else -amount


def _shift(levels: Levels, axis: int, strength: float, rng: np.random.Generator) -> float:
    return _sign(SHIFT * strength * levels.shape[axis], rng)


def _factor(strength: float) -> float:
    return 0.1 + 1.8 * strength


def cutout(levels: Levels, strength: float, rng: np.random.Generator) -> Levels:
    """Draw a gray square around a random pixel, clipped at the edges."""
    rows, columns = levels.shape[:2]
    reach = int(HOLE * strength * min(rows, columns))
    y, x = (int(draw * side) for draw, side in zip(rng.random(2).tolist(), (rows, columns)))
    top, left = max(0, y - reach), max(0, x - reach)
    changed = levels.copy()
    Box(top, left, y + reach - top, x + reach - left).crop(changed)[...] = GRAY
    return changed


def gaussian_blur(levels: Levels, strength: float, rng: np.random.Generator) -> Levels:
    """Blur with a standard deviation of 0.1 to 2 pixels at full strength, as in BYOL and DeiT III."""
    return opencv().GaussianBlur(levels, (0, 0), 0.1 + 1.9 * strength * rng.random())


RAND_AUGMENT: dict[str, Operation] = {
    # strength is magnitude / 10
    "autocontrast": lambda levels, strength, rng: autocontrast(levels),
    "equalize": lambda levels, strength, rng: equalize(levels),
    "invert": lambda levels, strength, rng: look_up(levels, 255 - RAMP),
    "rotate": lambda levels, strength, rng: rotate(levels, _sign(30 * strength, rng)),
    # keep the highest bits of each value
    "posterize": lambda levels, strength, rng: levels & np.uint8(256 - (1 << (8 - max(1, int(4 * strength))))),
    # invert values from a threshold on
    "solarize": lambda levels, strength, rng: look_up(levels, np.where(int(256 * strength) > RAMP, RAMP, 255 - RAMP)),
    "color": lambda levels, strength, rng: saturation(levels, _factor(strength)),
    "contrast": lambda levels, strength, rng: contrast(levels, _factor(strength)),
    "brightness": lambda levels, strength, rng: brightness(levels, _factor(strength)),
    "sharpness": lambda levels, strength, rng: sharpness(levels, _factor(strength)),
    "shear_x": lambda levels, strength, rng: affine(levels, (1, _sign(0.3 * strength, rng), 0, 0, 1, 0)),
    "shear_y": lambda levels, strength, rng: affine(levels, (1, 0, 0, _sign(0.3 * strength, rng), 1, 0)),
    "translate_x": lambda levels, strength, rng: affine(levels, (1, 0, _shift(levels, 1, strength, rng), 0, 1, 0)),
    "translate_y": lambda levels, strength, rng: affine(levels, (1, 0, 0, 0, 1, _shift(levels, 0, strength, rng))),
    "cutout": cutout,
    # make dark values brighter
    "solarize_add": lambda levels, strength, rng: look_up(
        levels, np.where(RAMP < 128, RAMP + int(110 * strength), RAMP)
    ),
}

OPS: dict[str, Operation] = {
    # the operations for `augment.ops`; strength is 0 to 1
    **RAND_AUGMENT,
    "gaussian_blur": gaussian_blur,
    "grayscale": lambda levels, strength, rng: saturation(levels, 1.0 - strength),
}


def rand_augment(levels: Levels, num_ops: int, magnitude: float, rng: np.random.Generator) -> Levels:
    """Apply `num_ops` random operations of this magnitude, from 0 to 20."""
    operations = tuple(RAND_AUGMENT.values())
    for draw in rng.random(num_ops).tolist():
        levels = operations[int(draw * len(operations))](levels, magnitude / 10, rng)
    return levels
