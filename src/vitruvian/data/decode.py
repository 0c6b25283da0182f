"""Decode image files to upright RGB, or raise an ImageError that explains the problem in one line."""

from __future__ import annotations

import importlib
import io
import os
import stat
import struct
from enum import IntEnum, auto
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.errors import ImageError
from vitruvian.text import printable

ImageInput = str | os.PathLike[str] | bytes | BinaryIO | Image.Image | NDArray[np.uint8]

RawImage = bytes | NDArray[np.uint8]
"""An encoded image, or pixels (rows, columns) or (rows, columns, 3) if the format stores pixels."""

MAX_PIXELS = 2 * 89_478_485
"""Maximum size of an image: Pillow's own limit, about 700 MB in memory."""

MAX_STREAM_BYTES = 2**30
"""Maximum bytes read from an input that cannot seek, such as a pipe."""

READERS = {
    # format: the Pillow module that reads it, imported when the formats before it do not match; file extensions.
    # Excluded are formats that run another program (EPS) and those that accept nearly any bytes (TGA, PCX).
    "JPEG": ("JpegImagePlugin", ".jpg .jpeg .jpe .jfif"),
    "PNG": ("PngImagePlugin", ".png .apng"),
    "WEBP": ("WebPImagePlugin", ".webp"),
    "GIF": ("GifImagePlugin", ".gif"),
    "BMP": ("BmpImagePlugin", ".bmp"),
    "TIFF": ("TiffImagePlugin", ".tif .tiff"),
    "AVIF": ("AvifImagePlugin", ".avif"),
    "JPEG2000": ("Jpeg2KImagePlugin", ".jp2 .j2k .jpx"),
    "PPM": ("PpmImagePlugin", ".ppm .pgm .pbm .pnm .pfm"),
    "ICO": ("IcoImagePlugin", ".ico"),
    "QOI": ("QoiImagePlugin", ".qoi"),
}

EXTENSIONS = frozenset(ext for _, extensions in READERS.values() for ext in extensions.split())
"""Extensions, in lower case, of the files in a folder that are images."""

OTHER_FILES = {
    # bytes near the start (in lower case) of files that are mistaken for images: what such a file is
    b"ftyphei": "a HEIC photograph, which Pillow cannot read: convert it to JPEG",
    b"ftypmif1": "a HEIC photograph, which Pillow cannot read: convert it to JPEG",
    b"<html": "a web page, perhaps saved instead of the image",
    b"<!doctype html": "a web page, perhaps saved instead of the image",
    b"<svg": "an SVG drawing, which has no pixels: convert it to PNG",
    b"%pdf": "a PDF document: convert its pages to PNG",
}


class Problem(IntEnum):
    """Kinds of unreadable images, for reports."""

    NONE = 0
    EMPTY = auto()
    TRUNCATED = auto()
    NOT_AN_IMAGE = auto()
    BROKEN = auto()


class UnreadableImageError(ImageError):
    """An ImageError that states the kind of problem."""

    def __init__(self, reason: str, problem: Problem, *, where: object = None, hint: str = "") -> None:
        super().__init__(reason, where=where, hint=hint)
        self.problem = problem


ORIENTATION = 0x0112  # the EXIF tag
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(source: ImageInput, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image to upright RGB.

    Transparent parts become white, as in a browser; an animation gives its first frame; values of more than 8 bits
    are scaled, not clipped.

    Args:
        source: A path, bytes, an open binary file, a Pillow image, or an array of 8-bit values, gray (rows, columns)
            or RGB (rows, columns, 3).
        max_pixels: Limit on the size of the image.

    Raises:
        ImageError: The image cannot be decoded.
    """
    try:
        if isinstance(source, Image.Image):
            return to_rgb(source)
        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.shape[2:] not in ((), (3,)) or source.ndim < 2:
                raise ImageError("not an image of uint8 (rows, columns) or (rows, columns, 3)")
            return to_rgb(Image.fromarray(source))
        if isinstance(source, bytes):
            return read_image(io.BytesIO(source), max_pixels)
        if isinstance(source, str | os.PathLike):
            with open_file(source) as file:
                return read_image(file, max_pixels)
        return read_image(source, max_pixels)
    except ImageError as error:
        raise error.replace(where=name_of(source)) from error
    except Exception as error:  # Pillow raises any kind of error for broken files
        raise ImageError(reason(error), where=name_of(source)) from error


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file. Pipes are refused unless the shell passed them: opening others may block forever."""
    mode = os.stat(path).st_mode
    from_shell = stat.S_ISFIFO(mode) and os.fspath(path).startswith("/dev/")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or from_shell):
        raise ImageError("this is a pipe, a device or a socket, not an image")
    return open(path, "rb")


def name_of(source: ImageInput) -> str:
    """The name of an image in messages."""
    if isinstance(source, bytes):
        return f"image of {len(source)} bytes"
    if isinstance(source, np.ndarray):
        return f"array of {source.dtype} {source.shape}"
    if isinstance(source, str | os.PathLike):
        return printable(os.fspath(source))
    name = getattr(source, "filename", "") or getattr(source, "name", "")
    return printable(name) if isinstance(name, str) and name else "image"


class Unreadable(NamedTuple):
    """An unreadable image."""

    key: str
    """The name of the image in its dataset."""
    reason: str


def reason(error: Exception) -> str:
    """Why an image could not be decoded, in one line."""
    match error:
        case ImageError():
            return str(error)
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "this is a folder, not an image"
        case PermissionError():
            return "no permission to read this file"
        case MemoryError():
            return "not enough memory for an image of this size"
        case OSError(strerror=str(text)):
            return text.lower()
        case _:
            return f"broken image: {printable(str(error)) or type(error).__name__}"


def problem_of(error: Exception) -> Problem:
    """The kind of problem that an error from reading an image means."""
    if isinstance(error, UnreadableImageError):
        return error.problem
    if isinstance(error, IsADirectoryError):
        return Problem.NOT_AN_IMAGE
    return Problem.TRUNCATED if "truncated" in str(error).lower() else Problem.BROKEN  # Pillow's and libjpeg's word


def read_image(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Decode an open file to upright RGB."""
    if not file.seekable():
        data = file.read(MAX_STREAM_BYTES + 1)
        if len(data) > MAX_STREAM_BYTES:
            raise ImageError(f"the stream has more than {MAX_STREAM_BYTES >> 20} MB")
        file = io.BytesIO(data)
    image = identify(file, max_pixels)
    image.load()
    return to_rgb(image)


def identify(file: BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read the header of an image; its pixels are loaded later.

    Used instead of Image.open, which accepts formats that we exclude and warns about large images; that warning could
    be silenced only for all threads of the process.
    """
    file.seek(0)
    start = file.read(1024)
    if not start:
        raise UnreadableImageError("the file is empty", Problem.EMPTY)
    reason, problem = f"not an image ({', '.join(READERS)})", Problem.NOT_AN_IMAGE
    for name, (module, _) in READERS.items():
        try:
            importlib.import_module(f"PIL.{module}")
            reader, accepts = Image.OPEN[name]
            if accepts is not None and accepts(start[:16]) is True:
                file.seek(0)
                image = reader(file, "")
                check_pixels(image, max_pixels)
                return image
        except (ImportError, KeyError):  # this Pillow was built without the format
            continue
        except (SyntaxError, IndexError, TypeError, struct.error) as error:  # how a reader rejects a file
            truncated = isinstance(error, struct.error) or isinstance(error.__cause__, struct.error)
            reason = f"broken {name} image: {'its header is truncated' if truncated else printable(str(error))}"
            problem = Problem.TRUNCATED if truncated else Problem.BROKEN
    for mark, kind in OTHER_FILES.items():
        if mark in start.lower():
            reason, problem = f"this is {kind}", Problem.NOT_AN_IMAGE
            break
    raise UnreadableImageError(reason, problem)


def check_pixels(image: Image.Image, most: int) -> None:
    if image.width * image.height > most:
        raise ImageError(
            f"{image.width}x{image.height} pixels exceed the limit of {most / 1e6:.0f} million",
            hint="scale it down first",
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow image to upright 8-bit RGB, with transparent parts white."""
    flat = image
    if image.mode == "F" or image.mode.startswith("I"):
        flat = deep_to_gray(image)
    if flat.has_transparency_data:
        layer = flat if flat.mode == "RGBA" else flat.convert("RGBA")
        flat = Image.new("RGB", layer.size, "white")
        flat.paste(layer, mask=layer)
    elif flat.mode != "RGB":
        flat = flat.convert("RGB")
    turn = UPRIGHT.get(orientation(image))
    return flat if turn is None else flat.transpose(turn)


def orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 is upright."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the pixels may be fine even if the EXIF block is broken
        return 1


def deep_to_gray(image: Image.Image) -> Image.Image:
    """Convert 16-bit, 32-bit and float gray to 8-bit gray; Pillow's own conversion clips.

    16-bit values range from 0 to 65535, 32-bit integers too if they fit, floats from 0 to 1 or 0 to 255 if they fit;
    other values are stretched from their minimum to their maximum.
    """
    values = np.asarray(image)
    low, high = 0.0, 65535.0
    if not image.mode.startswith("I;16"):
        low, high = value_range(values, (1.0, 255.0) if image.mode == "F" else (65535.0,))
    gray = np.empty(values.shape, np.uint8)
    for top in range(0, len(values), 256):  # in strips, to save memory
        strip = np.nan_to_num(values[top : top + 256].astype(np.float64), nan=low, posinf=high, neginf=low)
        gray[top : top + 256] = np.rint((strip - low) * (255.0 / (high - low)))
    flat = Image.fromarray(gray)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        flat.putalpha(Image.fromarray((values != transparent).astype(np.uint8) * np.uint8(255)))
    return flat


def value_range(values: np.ndarray, tops: tuple[float, ...]) -> tuple[float, float]:
    """0 and the first of `tops` that all values fit below, else minimum and maximum."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low >= 0:
        for top in tops:
            if high <= top:
                return 0.0, top
    return low, max(high, low + 1e-6)


class ReducedImage(NamedTuple):
    """An image at reduced size, and its stored form."""

    upright: Image.Image
    """RGB, as `decode` returns it; a large JPEG at a half, a quarter or an eighth of its size."""
    stored: Image.Image
    """The image as Pillow reads it, with mode, format, frames and EXIF tags of the file."""
    size: tuple[int, int]
    """Columns and rows of the full image, upright."""


def open_reduced(image: RawImage, side: int) -> ReducedImage:
    """Decode an image at reduced size, with both sides at least `side` pixels if the image has that many.

    The entire file is read, so that a broken one raises the same error as in `decode`.
    """
    stored = identify(io.BytesIO(image)) if isinstance(image, bytes) else Image.fromarray(image)
    check_pixels(stored, MAX_PIXELS)
    columns, rows = stored.size
    stored.draft(None, (side, side))
    stored.load()
    size = (rows, columns) if orientation(stored) > 4 else (columns, rows)
    return ReducedImage(to_rgb(stored), stored, size)
