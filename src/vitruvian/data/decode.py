"""Decode image files to upright RGB, or raise an ImageError that explains the problem in one line."""

import bisect
import importlib
import importlib.util
import io
import math
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.errors import ImageError, MissingExtraError
from vitruvian.text import printable

ImageInput = str | os.PathLike[str] | bytes | BinaryIO | Image.Image | NDArray[Any]
RawImage = bytes | NDArray[np.uint8]  # an encoded image, or pixels (rows, columns[, 3]) if the format stores them
MAX_PIXELS = 2 * 89_478_485  # maximum size of an image: Pillow's own limit, about 700 MB in memory
MAX_STREAM_BYTES = 2**30  # maximum bytes read from an input that cannot seek, such as a pipe

MAX_URL_BYTES = 2**26  # of an image behind a URL
URL_WAIT_SECONDS, URL_SECONDS = 10.0, 60.0  # to wait for its next bytes, and for all of them

# Limits on the time and memory of decoding a small file; ordinary files stay far below them.
MAX_SIDE = 2**18  # pixels; Pillow and its filters need memory for each row and column
MAX_SCANS = 100  # of a JPEG, which decodes the whole image once per scan; progressive JPEGs have about 10
MAX_SCANS_OF_LARGEST = 20  # of an image of `max_pixels`
MAX_SEGMENTS = 2000  # of a JPEG
MAX_READS = 2000  # of a header: Pillow reads segments, chunks and comments one by one, and joins some of them
BYTES_PER_READ = 500  # of the pixels of a PNG, on average; it is read chunk by chunk
MAX_SLOW_BYTES, MAX_COMMENTS = 4_000_000, 100  # of formats that Pillow decodes in Python, and of a PNM as text

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
    "QOI": ("QoiImagePlugin", ".qoi"),
}

HEIF_EXTENSIONS = frozenset((".heic", ".heif", ".hif"))
HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))
HAS_HEIF = importlib.util.find_spec("pillow_heif") is not None
NEEDS_HEIF = "pip install pillow-heif, or convert to JPEG"

NEEDS_STORED = "only models that read stored channels take it (preprocess.pixels=stored, architecture.in_channels)"

EXTENSIONS = frozenset(extension for _, extensions in READERS.values() for extension in extensions.split())
EXTENSIONS |= HEIF_EXTENSIONS if HAS_HEIF else frozenset()
EXTENSIONS |= frozenset((".npy", ".npz", ".dcm", ".dicom"))  # for models that read stored channels (`data.stored`)
"""Extensions, in lower case, of the files in a folder that are images."""

OTHER_FILES = {
    # bytes near the start (in lower case) of files that are mistaken for images: what such a file is
    b"ftyphei": f"a HEIC photograph, which Pillow alone cannot read: {NEEDS_HEIF}",
    b"ftypmif1": f"a HEIC photograph, which Pillow alone cannot read: {NEEDS_HEIF}",
    b"<html": "a web page, perhaps saved instead of the image",
    b"<!doctype html": "a web page, perhaps saved instead of the image",
    b"<svg": "an SVG drawing, which has no pixels: convert it to PNG",
    b"\x93numpy": f"an array of NumPy: {NEEDS_STORED}",
    b"dicm": f"a DICOM file: {NEEDS_STORED}",
    b"%pdf": "a PDF document: convert its pages to PNG",
}


Problem = IntEnum("Problem", "NONE EMPTY TRUNCATED NOT_AN_IMAGE BROKEN", start=0)  # kinds of unreadable images


class UnreadableImageError(ImageError):
    """An ImageError that states the kind of problem."""

    def __init__(self, reason: str, problem: Problem, *, where: object = None, hint: str = "") -> None:
        super().__init__(reason, where=where, hint=hint)
        self.problem = problem


class CostlyImageError(ImageError):
    """An image that takes longer to decode than the caller allows."""


class LimitedFile:
    """A file with a limited number of reads, because a parser may loop for minutes over a malicious file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.reads = file, MAX_READS

    def read(self, size: int = -1) -> bytes:
        self.reads -= 1
        if self.reads < 0:
            raise UnreadableImageError("the file has too many small parts", Problem.BROKEN, hint="save it again")
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


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


def decode(source: ImageInput, *, max_pixels: int = MAX_PIXELS, max_cost: float = math.inf) -> Image.Image:
    """Decode an image to upright RGB.

    Transparent parts become white, as in a browser; an animation gives its first frame; values of more than 8 bits
    are scaled, not clipped.

    Args:
        source: A path, the URL of an image (http or https), bytes, an open binary file, a Pillow image, or an array of
            8-bit values, gray (rows, columns) or RGB (rows, columns, 3).
        max_pixels: Limit on the size of the image.
        max_cost: Limit on the time of decoding encoded bytes, in pixels of an ordinary JPEG.

    Raises:
        ImageError: The image cannot be decoded.
        CostlyImageError: Decoding would exceed `max_cost`.
    """
    with image_errors(source):
        if isinstance(source, Image.Image):
            return to_rgb(source)
        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.shape[2:] not in ((), (3,)) or source.ndim < 2:
                raise ImageError("not an image of uint8 (rows, columns) or (rows, columns, 3)")
            return to_rgb(Image.fromarray(source))
        with open_input(source) as file:
            image = identify(file, max_pixels, max_cost)
            image.load()
            return to_rgb(image)


@contextmanager
def image_errors(source: ImageInput) -> Iterator[None]:
    """In this block, any error becomes an ImageError that names the image, except that of a missing package."""
    try:
        yield
    except MissingExtraError:
        raise
    except Exception as error:  # Pillow raises any kind of error for broken files
        drop_frames(error)
        if isinstance(error, ImageError):
            raise error.replace(where=name_of(source)) from error
        raise ImageError(reason(error), where=name_of(source)) from error


@contextmanager
def open_input(source: str | os.PathLike[str] | bytes | BinaryIO) -> Iterator[BinaryIO]:
    """An encoded image as a file that can seek."""
    if isinstance(source, bytes):
        yield io.BytesIO(source)
    elif isinstance(source, str) and is_url(source):
        yield io.BytesIO(fetch_image(source))
    elif isinstance(source, str | os.PathLike):
        mode = os.stat(source).st_mode  # opening a pipe that the shell did not pass may block forever
        from_shell = stat.S_ISFIFO(mode) and os.fspath(source).startswith("/dev/")
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or from_shell):
            raise ImageError("this is a pipe, a device or a socket, not an image")
        with open(source, "rb") as file:
            yield as_seekable(file)
    elif not hasattr(source, "seekable"):
        raise ImageError(f"a {type(source).__name__} is not an image, a path, bytes, an open file or a NumPy array")
    else:
        yield as_seekable(source)


def as_seekable(file: BinaryIO) -> BinaryIO:
    if file.seekable():
        return file
    data = file.read(MAX_STREAM_BYTES + 1)
    if len(data) > MAX_STREAM_BYTES:
        raise ImageError(f"the stream is larger than {MAX_STREAM_BYTES >> 20} MB")
    return io.BytesIO(data)


def drop_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and its causes: their frames hold the pixels for as long as the error lives."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


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

    key: str  # the name of the image in its dataset
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


def identify(file: BinaryIO, max_pixels: int = MAX_PIXELS, max_cost: float = math.inf) -> Image.Image:
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
                limited: Any = LimitedFile(file)
                image = reader(limited, "")
                check_size(image.size, max_pixels)
                check_cost(file, image, max_pixels, max_cost)
                size = file.seek(0, os.SEEK_END)
                limited.reads = MAX_READS + size // BYTES_PER_READ if image.format == "PNG" else sys.maxsize
                return image
        except (ImportError, KeyError):  # this Pillow was built without the format
            continue
        except (SyntaxError, IndexError, TypeError, struct.error) as error:  # how a reader rejects a file
            truncated = isinstance(error, struct.error) or isinstance(error.__cause__, struct.error)
            reason = f"broken {name} image: {'its header is truncated' if truncated else printable(str(error))}"
            problem = Problem.TRUNCATED if truncated else Problem.BROKEN
    if HAS_HEIF and start[4:8] == b"ftyp" and start[8:12] in HEIF_BRANDS:
        return open_heif(file, max_pixels)
    for mark, kind in OTHER_FILES.items():
        if mark in start.lower():
            reason, problem = f"this is {kind}", Problem.NOT_AN_IMAGE
            break
    raise UnreadableImageError(reason, problem)


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raise ImageError if an image of `size` (columns, rows) is too large."""
    width, height = size
    if width * height > max_pixels or max(size) > MAX_SIDE:
        limit = f"{max_pixels / 1e6:.0f} million" if width * height > max_pixels else f"{MAX_SIDE:,} per side"
        raise ImageError(f"{width}x{height} pixels exceed the limit of {limit}", hint="scale it down first")


def check_cost(file: BinaryIO, image: Image.Image, max_pixels: int, max_cost: float) -> None:
    """Raise ImageError if decoding would take too long for the size of the image or for the caller."""
    pixels = image.width * image.height
    cost = 4 * pixels
    position = file.tell()
    file.seek(0)
    if image.format in ("JPEG", "MPO"):
        scans = check_scans(file.read(), pixels, max_pixels)
        cost = pixels if scans < 2 else pixels * max(4, scans // 5)
    elif image.format in ("PPM", "QOI", "BMP"):
        data = file.read(MAX_SLOW_BYTES + 1)
        is_text = data[:2] in (b"P1", b"P2", b"P3")
        if is_text or image.format == "QOI" or image.info.get("compression"):
            if len(data) > MAX_SLOW_BYTES or (is_text and data.count(b"#") > MAX_COMMENTS):
                limit = f"{MAX_SLOW_BYTES / 1e6:.0f} MB" + f" or {MAX_COMMENTS} comments" * is_text
                kind = "PNM written as text" if is_text else f"compressed {image.format} image"
                raise ImageError(f"a {kind} has more than {limit}", hint="convert it to PNG")
            cost += 50 * len(data)
    file.seek(position)
    if cost > max_cost:
        raise CostlyImageError("takes too long to decode")


def check_scans(data: bytes, pixels: int, max_pixels: int) -> int:
    """The number of scans of a JPEG; raises ImageError if there are too many of them or of its segments."""
    codes = np.frombuffer(data, np.uint8)
    starts = np.flatnonzero(codes[:-1] == 0xFF)  # numpy is ten times as fast as bytes.count
    kinds = codes[starts + 1]
    is_marker = (kinds != 0) & (kinds != 0xFF) & (kinds & 0xF8 != 0xD0)  # neither data, padding nor a restart
    starts, kinds = starts[is_marker].tolist(), kinds[is_marker].tolist()
    limit = min(MAX_SCANS, MAX_SCANS_OF_LARGEST * max_pixels // pixels)
    position = scans = segments = 0
    while segments <= MAX_SEGMENTS and scans <= limit:
        index = bisect.bisect_left(starts, position)
        if index == len(starts) or kinds[index] == 0xD9:  # the end; phones append a video, which is no image
            return scans
        segments += 1
        scans += kinds[index] == 0xDA
        position = starts[index] + 2
        if kinds[index] not in (0x01, 0xD8):  # these two have no length
            position += max(2, int.from_bytes(data[position : position + 2]))
    too_many = f"{limit} scans, for this size" if scans > limit else f"{MAX_SEGMENTS:,} segments"
    raise ImageError(f"a JPEG of more than {too_many}", hint="save it again")


def open_heif(file: BinaryIO, max_pixels: int) -> Image.Image:
    """A HEIC photograph, read by pillow-heif, which also rotates it; the reader is not registered with Pillow."""
    file.seek(0)
    try:
        image: Image.Image = importlib.import_module("pillow_heif").HeifImageFile(file, "")
    except Exception as error:  # it raises several kinds for broken files
        raise UnreadableImageError(f"broken HEIC image: {printable(str(error))}", Problem.BROKEN) from error
    check_size(image.size, max_pixels)
    return image


def is_url(name: str) -> bool:
    return re.match(r"https?://", name, re.IGNORECASE) is not None


def fetch_image(url: str) -> bytes:
    """The content of an image behind a URL, of limited size and time; redirects stay with http and https."""
    from http.client import HTTPException
    from urllib import request
    from urllib.error import HTTPError

    opener = request.OpenerDirector()  # without the handlers of file: and ftp: that `urlopen` has
    protocols = request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler
    statuses = request.HTTPDefaultErrorHandler, request.HTTPRedirectHandler, request.HTTPErrorProcessor
    for handler in (*protocols, *statuses):
        opener.add_handler(handler())
    deadline, data = time.monotonic() + URL_SECONDS, bytearray()
    try:
        headers = {"User-Agent": "vitruvian", "Accept": "image/*"}
        with opener.open(request.Request(url, headers=headers), timeout=URL_WAIT_SECONDS) as response:
            while part := response.read1(2**16):
                data += part
                if len(data) > MAX_URL_BYTES:
                    raise ImageError(f"more than {MAX_URL_BYTES >> 20} MB", hint="download it first")
                if time.monotonic() > deadline:
                    raise ImageError(f"not received within {URL_SECONDS:g} s", hint="download it first")
            stated = response.length  # what is still missing of the stated length
    except (OSError, ValueError, HTTPException) as error:  # a URLError is an OSError
        cause = getattr(error, "reason", None) or str(error) or type(error).__name__
        code = f"HTTP {error.code}, " if isinstance(error, HTTPError) else ""
        if isinstance(error, HTTPError):
            error.close()
        raise ImageError(f"cannot be downloaded ({code}{printable(str(cause))})") from error
    if stated:
        raise UnreadableImageError(f"{stated:,} bytes are missing", Problem.TRUNCATED)
    return bytes(data)


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
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        tops = [top for top in ((1.0, 255.0) if image.mode == "F" else (65535.0,)) if low >= 0 and high <= top]
        low, high = (0.0, tops[0]) if tops else (low, max(high, low + 1e-6))
    gray = np.empty(values.shape, np.uint8)
    for top in range(0, len(values), 256):  # in strips, to save memory
        strip = np.nan_to_num(values[top : top + 256].astype(np.float64), nan=low, posinf=high, neginf=low)
        gray[top : top + 256] = np.rint((strip - low) * (255.0 / (high - low)))
    flat = Image.fromarray(gray)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        flat.putalpha(Image.fromarray((values != transparent).astype(np.uint8) * np.uint8(255)))
    return flat


class ReducedImage(NamedTuple):
    """An image at reduced size, and its stored form."""

    upright: Image.Image  # RGB, as `decode` returns it; a large JPEG at a half, a quarter or an eighth of its size
    stored: Image.Image  # the image as Pillow reads it, with mode, format, frames and EXIF tags of the file
    size: tuple[int, int]  # columns and rows of the full image, upright


def open_reduced(image: RawImage, side: int) -> ReducedImage:
    """Decode an image at reduced size, with both sides at least `side` pixels if the image has that many.

    The entire file is read, so that a broken one raises the same error as in `decode`.
    """
    stored = identify(io.BytesIO(image)) if isinstance(image, bytes) else Image.fromarray(image)
    check_size(stored.size, MAX_PIXELS)
    columns, rows = stored.size
    stored.draft(None, (side, side))
    stored.load()
    size = (rows, columns) if orientation(stored) > 4 else (columns, rows)
    return ReducedImage(to_rgb(stored), stored, size)
