"""The stored channels of an image at their depth: NumPy, TIFF and DICOM files, PNG of 16 bits, and ordinary images."""

import functools
import io
import logging
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.data.decode import (
    MAX_PIXELS,
    MAX_READS,
    UPRIGHT,
    ImageInput,
    LimitedFile,
    RawImage,
    UnreadableImageError,
    check_size,
    decode,
    identify,
    image_errors,
    open_input,
    orientation,
)
from vitruvian.errors import DataError, ImageError, MissingExtraError, require
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Size

# H rows, W columns, C channels

Array = NDArray[Any]
Floats = NDArray[np.float32]
Parsed = tuple[Array, int | None]  # values, and the axis of channels if the file states it
MAX_VALUES = 2**28  # of one image: 1 GB as float32
MAX_BYTES = 2**30  # of a file
NPY_HEADER_BYTES = 16  # enough to contain the part of an `.npy` header that states its length
NPY, ZIP, PNG = b"\x93NUMPY", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n"
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PLAIN, DEFLATE, LZW = 1, (8, 32946), 5  # compressions of a TIFF
DEFLATED_DICOM = b"1.2.840.10008.1.2.1.99"  # the transfer syntax that compresses the file itself
DEFAULT_NAME = "image"  # of the array that is read from an `.npz` file with several


def read_stored(source: ImageInput, channels: int | None = None) -> Floats:
    """The channels of an image as they are stored, as floats (H, W, C).

    Integers are divided by the largest value of their type; floats stay as they are.

    Args:
        source: What `decode` accepts, or an array of any numeric type, (H, W), (H, W, C) or (C, H, W).
        channels: The number of channels that is expected. It decides which axis of an array has the channels.

    Raises:
        ImageError: The image cannot be read, or has another number of channels.
    """
    with image_errors(source):
        if isinstance(source, np.ndarray):
            values, axis = source, None
        elif isinstance(source, Image.Image):
            values, axis = pillow_values(source), 2
        else:
            with open_input(source) as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ImageError(f"the file is larger than {MAX_BYTES >> 20} MB")
            values, axis = reader_of(data)(data)
        return to_floats(channels_last(values, axis, channels))


def reader_of(data: bytes) -> Callable[[bytes], Parsed]:
    """The function that reads such a file."""
    if data.startswith(NPY):
        return lambda data: (read_npy(data), None)
    if data.startswith(ZIP):
        return read_npz
    if data.startswith(TIFF):
        return read_tiff
    if data[128:132] == b"DICM":
        return read_dicom
    return read_pillow


def display(image: ImageInput) -> Image.Image:
    """An image for the screen: upright RGB, or stored channels that Pillow cannot read."""
    try:
        return decode(image)
    except UnreadableImageError:
        drawn = display_stored(image)
        if drawn is None:
            raise
        return drawn


def display_stored(image: ImageInput) -> Image.Image | None:
    """Stored channels as `draw_stored` draws them; None if they cannot be read."""
    with suppress(ImageError, MissingExtraError):
        return draw_stored(read_stored(image))
    return None


def channels_last(values: Array, axis: int | None, channels: int | None) -> Array:
    """An image as (H, W, C); raises ImageError unless it has this number of channels."""
    shape = values.shape
    if values.ndim == 2:
        values, axis = values[..., None], 2
    if values.ndim != 3 or not values.size:
        raise ImageError(f"an array of shape {shape}; expected (rows, columns), and channels before or after them")
    if axis is None and channels is None:
        axis = 0 if shape[0] < shape[2] else 2
    if axis is None:
        matches = [candidate for candidate in (2, 0) if shape[candidate] == channels]
        if len(matches) != 1:
            which = "both its first and its last axis have" if matches else "neither its first nor its last axis has"
            raise ImageError(f"an array of shape {shape}: {which} the model's {channels} channels")
        (axis,) = matches
    if channels is not None and values.shape[axis] != channels:
        count = values.shape[axis]
        raise ImageError(f"{count} channel{'s' * (count != 1)}, the model takes {channels}")
    values = np.moveaxis(values, axis, 2)
    check_shape(values.shape[:2], math.prod(values.shape))
    return values


def check_shape(size: Size, count: int) -> None:
    """Raise ImageError if an image of this size with `count` values is too large."""
    check_size((size[1], size[0]), MAX_PIXELS)
    if count > MAX_VALUES:
        raise ImageError(f"{count / 1e6:,.0f} million values exceed the limit of {MAX_VALUES / 1e6:,.0f} million")


def to_floats(values: Array) -> Floats:
    kind = values.dtype.kind
    if kind in "iu":
        return (values / np.float32(np.iinfo(values.dtype).max)).astype(np.float32)
    if kind not in "fb":
        raise ImageError(f"values of type {values.dtype}; expected numbers")
    with np.errstate(over="ignore"):  # infinity is reported below
        floats = values.astype(np.float32)
    if not np.isfinite(floats).all():
        raise ImageError("contains NaN, infinity or numbers beyond float32", hint="replace them, for example by 0")
    return floats


def read_npy(data: bytes) -> Array:
    """The array in an `.npy` file, without copying its bytes."""
    stream = io.BytesIO(data[:NPY_HEADER_BYTES])
    np.lib.format.read_magic(stream)
    length = int.from_bytes(stream.read(2 if data[6] == 1 else 4), "little")
    start = stream.tell() + length
    shape, fortran, dtype = npy_header(data[:start])
    values = np.frombuffer(data, dtype, count=math.prod(shape), offset=start)
    return values.reshape(shape, order="F" if fortran else "C")


@functools.lru_cache(maxsize=4096)
def npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type in an `.npy` header. Cached: parsing is slow, and a dataset has few shapes."""
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.kind not in "biuf" or min(shape, default=0) < 1:
        raise ValueError(f"{dtype} {shape}; expected numbers (rows, columns) or with channels")
    return shape, fortran, dtype


def read_npz(data: bytes) -> Parsed:
    """The only array of an `.npz` file, or the one called `image`."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        name = DEFAULT_NAME if len(members) != 1 else next(iter(members))
        if name not in members:
            names = ", ".join(sorted(members)[:5]) or "none"
            raise ImageError(f"an .npz file with {len(members)} arrays ({names}); expected one, or {DEFAULT_NAME!r}")
        if members[name].file_size > MAX_BYTES:
            raise ImageError(f"its array is larger than {MAX_BYTES >> 20} MB")
        return read_npy(archive.read(members[name])), None


def read_pillow(data: bytes) -> Parsed:
    """The channels of a file that Pillow reads; of a PNG of 16 bits per channel by OpenCV, as Pillow drops half."""
    image = identify(io.BytesIO(data))
    image.load()
    if data.startswith(PNG) and data[24] == 16 and data[25] != 0:  # bits per channel, and the type of colors: 0 is gray
        if data[25] == 4 or orientation(image) != 1:
            what = "gray with alpha" if data[25] == 4 else "rotated by EXIF"
            raise ImageError(f"a PNG of 16 bits that is {what}, which is not supported", hint="save it as TIFF")
        cv2 = require("cv2", "train")
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)  # a damaged file is one line, ours
        values = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        if values is None:
            raise ImageError("broken PNG image")
        return values[..., [2, 1, 0, 3][: values.shape[2]]], 2  # from blue, green, red
    return pillow_values(image), 2


def pillow_values(image: Image.Image) -> Array:
    """The upright values of a Pillow image."""
    turn = UPRIGHT.get(orientation(image))
    if image.mode in ("1", "P", "PA"):
        image = image.convert("L" if image.mode == "1" else "RGBA" if image.has_transparency_data else "RGB")
    values = np.asarray(image if turn is None else image.transpose(turn))
    if image.mode != "I":
        return values
    if values.min() < 0 or values.max() > 65535:
        raise ImageError("32-bit integers beyond 16 bits, whose range is unknown", hint="pass an array of floats")
    return values.astype(np.uint16)  # Pillow's mode of a PGM of 16 bits


def read_tiff(data: bytes) -> Parsed:
    """The only image of a TIFF: rows, columns, and one axis of samples, planes or pages."""
    tifffile = require("tifffile", "imaging")
    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # it also raises what it logs
    file: Any = LimitedFile(io.BytesIO(data))
    file.reads = MAX_READS + len(data) // 100
    with tifffile.TiffFile(file) as tiff:
        if len(tiff.series) != 1:
            what = f"with {len(tiff.series)} images of different kinds" if tiff.series else "without an image"
            raise ImageError(f"a TIFF {what}", hint="save one image alone")
        series, page = tiff.series[0], tiff.series[0].keyframe
        sizes = [(axis, size) for axis, size in zip(series.axes, series.shape) if axis in "YX" or size > 1]
        axes = "".join(axis for axis, _ in sizes)
        others = axes.replace("Y", "").replace("X", "")
        if len(axes) - len(others) != 2 or len(others) > 1:
            raise ImageError(f"a TIFF with the axes {series.axes}; expected rows, columns and one axis of channels")
        shape = [size for _, size in sizes]
        check_shape((shape[axes.index("Y")], shape[axes.index("X")]), math.prod(shape))
        colors, turn = page.photometric.name, page.tags.get("Orientation")
        problem = ""
        if colors not in ("MINISBLACK", "MINISWHITE", "RGB", "SEPARATED"):
            problem = f"the colors {colors}"
        elif page.compression not in (PLAIN, *DEFLATE, LZW):
            problem = f"the compression {getattr(page.compression, 'name', page.compression)}"
        elif turn is not None and turn.value != 1:
            problem = "a rotation"
        if problem:
            raise ImageError(f"a TIFF with {problem}, which is not supported", hint="save it without")
        if page.compression in DEFLATE:
            check_segments(data, series, MAX_VALUES * page.dtype.itemsize)
        values = series.asarray().reshape(shape)
    if colors == "MINISWHITE":
        values = np.iinfo(values.dtype).max - values if values.dtype.kind == "u" else ~values
    if others == "Q":  # an array of unknown axes
        return values, None
    order = [axes.index("Y"), axes.index("X"), *(axes.index(axis) for axis in others)]
    return values.transpose(order), 2


def check_segments(data: bytes, series: Any, limit: int) -> None:
    """Raise ImageError if the compressed parts of a TIFF are longer than `limit` bytes together."""
    for page in series.pages:
        for offset, count in zip(page.dataoffsets, page.databytecounts):
            decompressor = zlib.decompressobj()
            limit -= len(decompressor.decompress(data[offset : offset + count], limit))
            if decompressor.unconsumed_tail or limit <= 0:
                raise ImageError("a TIFF that unpacks to more data than its images have")


@functools.cache
def dicom_package() -> ModuleType:
    module = require("pydicom", "imaging")
    warnings.filterwarnings("ignore", module="pydicom")  # about values that it reads nevertheless
    return module


def read_dicom(data: bytes) -> Parsed:
    """The frames of a DICOM file between 0 and 1: rescaled, and within its first window, or else of its full range."""
    pydicom = dicom_package()
    if DEFLATED_DICOM in data:
        raise ImageError("a DICOM file that is compressed as a whole, which is not supported", hint="unpack it")
    file: Any = LimitedFile(io.BytesIO(data))
    file.reads = 50 * MAX_READS
    content = pydicom.dcmread(file)
    frames, samples = int(content.get("NumberOfFrames") or 1), int(content.SamplesPerPixel)
    check_shape((int(content.Rows), int(content.Columns)), content.Rows * content.Columns * frames * samples)
    colors, syntax = content.PhotometricInterpretation, content.file_meta.TransferSyntaxUID
    problem = ""
    if syntax.is_compressed:
        problem = f"compressed pixels ({syntax.name})"
    elif colors not in ("MONOCHROME1", "MONOCHROME2", "RGB") or (samples > 1 and frames > 1):
        problem = f"{frames} frames of the colors {colors}"
    elif "ModalityLUTSequence" in content or ("VOILUTSequence" in content and "WindowCenter" not in content):
        problem = "a lookup table"
    if problem:
        hint = "convert it to plain pixels, for example with `gdcmconv --raw`"
        raise ImageError(f"a DICOM file with {problem}, which is not supported", hint=hint)
    values = pydicom.pixels.apply_modality_lut(content.pixel_array, content)
    if samples == 1 and "WindowCenter" in content and "WindowWidth" in content:
        values = pydicom.pixels.apply_windowing(values, content)
    bits, is_signed = int(content.BitsStored), int(content.PixelRepresentation)
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if is_signed else [0, 2**bits - 1], np.float64)
    if "RescaleSlope" in content:
        ends = np.sort(ends * float(content.RescaleSlope) + float(content.RescaleIntercept))
    values = (values.astype(np.float64) - ends[0]) / (ends[1] - ends[0])
    values = 1 - values if colors == "MONOCHROME1" else values
    return values, 2 if samples > 1 else 0


def draw_stored(values: Floats) -> Image.Image:
    """An image for the screen: the first channel, or the first three as colors, each stretched to its range."""
    chosen = values[..., :3] if values.shape[2] > 2 else values[..., :1]
    low, high = chosen.min((0, 1)), chosen.max((0, 1))
    levels = np.rint((chosen - low) * (255 / np.maximum(high - low, 1e-30))).astype(np.uint8)
    return Image.fromarray(levels if levels.shape[2] == 3 else levels[..., 0]).convert("RGB")


def lost_by_rgb(data: RawImage) -> str:
    """What 8-bit RGB does not keep of an image, such as "16 bits per channel"; empty if nothing."""
    if isinstance(data, np.ndarray):
        return ""
    with suppress(ImageError):
        image = identify(io.BytesIO(data))
        bits = max(getattr(image, "tag_v2", {}).get(258, (8,))) if image.format == "TIFF" else 8  # BitsPerSample
        bits = data[24] if data.startswith(PNG) else bits
        if bits > 8 or image.mode == "F" or image.mode.startswith("I"):
            return f"{max(bits, 16)} bits per channel"
        if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
            return f"{image.n_frames} pages"  # type: ignore[attr-defined]
    return ""


def channel_statistics(source: Any, channels: int, track: Track = no_tracking) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel over the readable images of a source."""
    sums, count = np.zeros((2, channels)), 0
    for index in track(range(len(source)), len(source)):
        try:
            values = read_stored(source.read(index), channels).reshape(-1, channels).astype(np.float64)
        except (ImageError, OSError):  # training reports it
            continue
        sums += values.sum(axis=0), np.square(values).sum(axis=0)
        count += len(values)
    if not count:
        read_stored(source.read(0), channels)  # raises
    mean, squares = sums / count
    std = np.sqrt(np.maximum(squares - mean**2, 0))
    constant = np.flatnonzero(std <= 1e-6 * np.maximum(np.abs(mean), 1e-6))
    if len(constant):
        reason = f"channel {constant[0]} has the same value in all training images"
        raise DataError(reason, where=source.name, hint="leave the channel out")
    return mean.tolist(), std.tolist()
