"""An image's file or bytes as an upright RGB image, or one line that says why not."""

from __future__ import annotations

import importlib
import io
import os
import stat
import struct
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.errors import ImageError
from vitruvian.text import printable

ImageInput = str | os.PathLike[str] | bytes | BinaryIO | Image.Image | NDArray[np.uint8]

RawImage = bytes | NDArray[np.uint8]
"""An encoded image, or pixels (rows, columns) or (rows, columns, 3) where the format holds pixels."""

MAX_PIXELS = 2 * 89_478_485
"""Pixels of the largest image that is decoded: where Pillow itself stops, about 700 MB in memory."""

MAX_STREAM_BYTES = 2**30
"""Bytes taken from what cannot seek, such as a pipe."""

READERS = {
    # format: the Pillow module that reads it, imported when the formats before it do not fit; endings of its files.
    # Left out are formats that run another program (EPS) and those for which nearly any bytes pass (TGA, PCX).
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

EXTENSIONS = frozenset(ending for _, endings in READERS.values() for ending in endings.split())
"""Endings, in lower case, by which an image is known in a folder."""

STRANGERS = {
    # bytes near the start (in lower case) of files that people take for images: what such a file is
    b"ftyphei": "a HEIC photograph, which Pillow does not read: convert it to JPEG",
    b"ftypmif1": "a HEIC photograph, which Pillow does not read: convert it to JPEG",
    b"<html": "a web page, perhaps saved in place of the image",
    b"<!doctype html": "a web page, perhaps saved in place of the image",
    b"<svg": "an SVG drawing, which has no pixels: convert it to PNG",
    b"%pdf": "a PDF document: convert its pages to PNG",
}

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
    """The image as upright RGB, from a path, bytes, an open binary file, a Pillow image or an array.

    Transparent parts become white, as a browser shows them; an animation gives its first frame;
    values of more than 8 bits are scaled, not clipped. An array holds 8-bit gray levels (rows, columns) or RGB
    (rows, columns, 3). ImageError names the image and the reason.
    """
    try:
        if isinstance(source, Image.Image):
            return to_rgb(source)
        if isinstance(source, np.ndarray):
            return to_rgb(image_of(source))
        if isinstance(source, bytes):
            return read(io.BytesIO(source), max_pixels)
        if isinstance(source, str | os.PathLike):
            with open_file(source) as file:
                return read(file, max_pixels)
        return read(source, max_pixels)
    except Exception as error:  # Pillow's readers raise whatever broken bytes lead them to
        raise ImageError(reason(error), where=name_of(source)) from error


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """An open file; of pipes, only one that the shell hands over, as others may wait for ever for their other end."""
    mode = os.stat(path).st_mode
    handed_over = stat.S_ISFIFO(mode) and os.fspath(path).startswith("/dev/")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or handed_over):
        raise ImageError("this is a pipe, a device or a socket, not an image")
    return open(path, "rb")


def image_of(levels: NDArray[np.uint8]) -> Image.Image:
    if levels.dtype != np.uint8 or levels.ndim not in (2, 3) or (levels.ndim == 3 and levels.shape[2] != 3):
        raise ImageError("not an image of uint8 (rows, columns) or (rows, columns, 3)")
    return Image.fromarray(levels)


def name_of(source: ImageInput) -> str:
    """What to call an image in a line of text."""
    if isinstance(source, bytes):
        return f"image of {len(source)} bytes"
    if isinstance(source, np.ndarray):
        return f"array of {source.dtype} {source.shape}"
    if isinstance(source, str | os.PathLike):
        return printable(os.fspath(source))
    name = getattr(source, "filename", "") or getattr(source, "name", "")
    return printable(name) if isinstance(name, str) and name else "image"


class Unreadable(NamedTuple):
    """An image that cannot be read."""

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


def read(file: BinaryIO, max_pixels: int) -> Image.Image:
    """The image in an open file as upright RGB."""
    if not file.seekable():
        data = file.read(MAX_STREAM_BYTES + 1)
        if len(data) > MAX_STREAM_BYTES:
            raise ImageError(f"the stream gives more than {MAX_STREAM_BYTES >> 20} MB")
        file = io.BytesIO(data)
    image = identify(file, max_pixels)
    image.load()
    return to_rgb(image)


def identify(file: BinaryIO, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image with its header read and its pixels not yet.

    In place of Image.open, which knows formats we do not want and warns about large images; that
    warning could be silenced only for all threads of the process at once.
    """
    file.seek(0)
    start = file.read(1024)
    if not start:
        raise ImageError("the file is empty")
    problem = ""
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
        except (SyntaxError, IndexError, TypeError, struct.error) as error:  # how a reader says "not mine"
            cut_short = isinstance(error, struct.error) or isinstance(error.__cause__, struct.error)
            problem = f"broken {name} image: {'its header is cut short' if cut_short else printable(str(error))}"
    stranger = next((what for mark, what in STRANGERS.items() if mark in start.lower()), "")
    if stranger:
        raise ImageError(f"this is {stranger}")
    raise ImageError(problem or f"not an image ({', '.join(READERS)})")


def check_pixels(image: Image.Image, most: int) -> None:
    if image.width * image.height > most:
        raise ImageError(
            f"{image.width}x{image.height} pixels are more than the limit of {most / 1e6:.0f} million; "
            "scale it down first"
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as upright 8-bit RGB, transparent parts white."""
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
    """EXIF's word on how the image was held: 1 is upright."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a broken EXIF block says nothing about the pixels
        return 1


def deep_to_gray(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float gray as 8-bit gray; Pillow's own conversion clips.

    16-bit values mean 0 to 65535, integers of 32 bits the same if they fit, floats 0 to 1 or 0 to 255 if
    they fit; anything else is stretched from its least to its greatest finite value.
    """
    values = np.asarray(image)
    low, high = 0.0, 65535.0
    if not image.mode.startswith("I;16"):
        low, high = value_range(values, (1.0, 255.0) if image.mode == "F" else (65535.0,))
    gray = np.empty(values.shape, np.uint8)
    for top in range(0, len(values), 256):  # in strips, for the memory
        strip = np.nan_to_num(values[top : top + 256].astype(np.float64), nan=low, posinf=high, neginf=low)
        gray[top : top + 256] = np.rint((strip - low) * (255.0 / (high - low)))
    flat = Image.fromarray(gray)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        flat.putalpha(Image.fromarray((values != transparent).astype(np.uint8) * np.uint8(255)))
    return flat


def value_range(values: np.ndarray, tops: tuple[float, ...]) -> tuple[float, float]:
    """From 0 to the first of `tops` that holds all values, else the least and greatest value."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low >= 0:
        for top in tops:
            if high <= top:
                return 0.0, top
    return low, max(high, low + 1e-6)


class Reduced(NamedTuple):
    """An image and what its file says about it."""

    upright: Image.Image
    """RGB, as `decode` gives it; a large JPEG at a half, a quarter or an eighth of its size."""
    stored: Image.Image
    """As Pillow reads it from the file: its mode, format, frames and EXIF tags."""
    size: tuple[int, int]
    """Columns and rows of the whole image, upright."""


def open_reduced(image: RawImage, side: int) -> Reduced:
    """An encoded image, or an array of pixels, with both sides at least `side` pixels if the whole has that.

    All of the file is read, so that a broken one raises here what it raises in `decode`.
    """
    stored = identify(io.BytesIO(image)) if isinstance(image, bytes) else Image.fromarray(image)
    check_pixels(stored, MAX_PIXELS)
    columns, rows = stored.size
    stored.draft(None, (side, side))
    stored.load()
    size = (rows, columns) if orientation(stored) > 4 else (columns, rows)
    return Reduced(to_rgb(stored), stored, size)
