"""Stored channels: every file gives the values that were written, at their depth, or one line that says why not."""

import io
import sys
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from vitruvian.config import Preprocess
from vitruvian.data.augment import Augment, train_transform
from vitruvian.data.decode import decode
from vitruvian.data.doctor import diagnose
from vitruvian.data.preprocess import apply_preprocess, preprocess_image
from vitruvian.data.stored import channel_statistics, display, lost_by_rgb, read_stored
from vitruvian.errors import ConfigError, DataError, ImageError, MissingExtraError

tifffile = pytest.importorskip("tifffile")
pydicom = pytest.importorskip("pydicom")
cv2 = pytest.importorskip("cv2")

rng = np.random.default_rng(0)
BANDS = rng.integers(0, 65535, (20, 30, 4), dtype=np.uint16)
FIRST = np.moveaxis(BANDS, 2, 0)  # channels first
HOUNSFIELD = rng.integers(-1000, 3000, (20, 30), dtype=np.int16)


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def tiff(array, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, array, **{"photometric": "minisblack", **options})
    return file.getvalue()


def png(array):
    colors = array if array.ndim == 2 else array[..., [2, 1, 0, 3][: array.shape[2]]]  # OpenCV writes BGR
    return cv2.imencode(".png", colors)[1].tobytes()


def dicom(array, syntax="1.2.840.10008.1.2.1", bits=16, colors="MONOCHROME2", **elements):
    content = pydicom.Dataset()
    content.file_meta = pydicom.dataset.FileMetaDataset()
    content.file_meta.TransferSyntaxUID = syntax
    content.file_meta.MediaStorageSOPClassUID, content.file_meta.MediaStorageSOPInstanceUID = "1.2.840", "1.2.3"
    content.Rows, content.Columns = array.shape[-2:]
    if array.ndim == 3:
        content.NumberOfFrames = len(array)
    content.SamplesPerPixel, content.PhotometricInterpretation = 1, colors
    content.BitsAllocated, content.BitsStored, content.HighBit = 16, bits, bits - 1
    content.PixelRepresentation, content.PixelData = int(array.dtype.kind == "i"), array.tobytes()
    for name, value in elements.items():
        setattr(content, name, value)
    file = io.BytesIO()
    pydicom.dcmwrite(file, content, enforce_file_format=True)
    return file.getvalue()


FILES = {
    "npy": npy(BANDS),
    "npy, channels first": npy(FIRST),
    "npy, Fortran": npy(np.asfortranarray(BANDS)),
    "npz": npz(anything=BANDS),
    "npz, several": npz(image=BANDS, mask=BANDS[..., 0]),
    "tiff": tiff(BANDS, planarconfig="contig"),
    "tiff, planes": tiff(FIRST, planarconfig="separate"),
    "tiff, pages": tiff(FIRST),
    "tiff, shaped": tiff(BANDS),
    "tiff, RGB and another": tiff(BANDS, photometric="rgb"),
    "tiff, deflate": tiff(BANDS, planarconfig="contig", compression="zlib", predictor=True),
    "tiff, tiles": tiff(BANDS, planarconfig="contig", tile=(16, 16)),
    "tiff, big and big-endian": tiff(BANDS, planarconfig="contig", bigtiff=True, byteorder=">"),
    "tiff, ImageJ": tiff(FIRST, imagej=True),
    "tiff, OME": tiff(FIRST, ome=True, metadata={"axes": "CYX"}),
    "png": png(BANDS),
    "array": BANDS,
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_written_values(name):
    assert np.array_equal(read_stored(FILES[name], 4), BANDS.astype(np.float32) / np.float32(65535))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_keeps_16_bits_of_every_channel(channels):
    array = BANDS[..., 0] if channels == 1 else BANDS[..., :channels]
    values = read_stored(png(array), channels)
    assert np.array_equal(values, (array.astype(np.float32) / np.float32(65535)).reshape(20, 30, channels))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[0, 255]], np.uint8), [0, 1]),
        (np.array([[0, 65535]], np.uint16), [0, 1]),
        (np.array([[-32767, 32767]], np.int16), [-1, 1]),
        (np.array([[-3.5, 700]], np.float64), [-3.5, 700]),
        (np.array([[False, True]]), [0, 1]),
        (Image.fromarray(np.array([[0, 65535]], np.uint16)), [0, 1]),
        (Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1"), [0, 1]),
    ],
)
def test_integers_are_divided_by_the_largest_of_their_type_and_floats_stay(array, expected):
    assert read_stored(array, 1).ravel().tolist() == expected


def test_dicom_values_are_rescaled_and_windowed():
    """The linear window of the standard: PS3.3, C.11.2.1.2.1."""
    data = dicom(HOUNSFIELD + 1024, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=[40, 9], WindowWidth=[400, 9])
    expected = np.clip((HOUNSFIELD - 39.5) / 399 + 0.5, 0, 1)
    assert np.abs(read_stored(data, 1)[..., 0] - expected).max() < 1e-6  # float32
    counts = rng.integers(0, 4096, (5, 20, 30), dtype=np.uint16)
    assert np.abs(read_stored(dicom(counts, bits=12), 5) - np.moveaxis(counts, 0, 2) / 4095).max() < 1e-6
    inverted = read_stored(dicom(counts[0], bits=12, colors="MONOCHROME1"), 1)[..., 0]
    assert np.abs(inverted - (1 - counts[0] / 4095)).max() < 1e-6


def zip_bomb():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", b"")
    data = bytearray(file.getvalue())
    position = data.index(b"PK\1\2") + 24  # the stated size
    data[position : position + 4] = (2**31).to_bytes(4, "little")
    return bytes(data)


def deflate_bomb():
    """A TIFF of 16 x 16 pixels whose only strip unpacks to a gigabyte."""
    strip = zlib.compressobj(9)
    packed = b"".join(strip.compress(bytes(2**24)) for _ in range(64)) + strip.flush()
    data = bytearray(tiff(np.zeros((16, 16), np.uint8), compression="zlib"))
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages[0]
        tags = [page.tags["StripOffsets"].valueoffset, page.tags["StripByteCounts"].valueoffset]
    for offset, value in zip(tags, (len(data), len(packed))):
        data[offset : offset + 4] = value.to_bytes(4, "little")
    return bytes(data) + packed


HUGE = npy(np.zeros((4, 4, 4), np.uint8)).replace(b"(4, 4, 4)", b"(99999999, 99999, 4)")
PLAIN, DEFLATED, RLE = b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.1.99", b"1.2.840.10008.1.2.5\0"

REFUSED = [
    (npy(BANDS[..., :3]), 4, r"shape \(20, 30, 3\): neither its first nor its last axis has the model's 4 channels"),
    (npy(np.zeros((4, 9, 4))), 4, "both its first and its last axis have the model's 4 channels"),
    (npy(np.zeros((4, 9))), 4, "1 channel, the model takes 4"),
    (npy(np.zeros((2, 2, 2, 4))), 4, "expected .rows, columns., and channels before or after them"),
    (npy(np.full((4, 5), np.nan)), 1, "contains NaN, infinity or numbers beyond float32; replace them"),
    (npy(np.full((4, 5), 1e300)), 1, "numbers beyond float32"),
    (npy(np.array([[None]]), allow_pickle=True), 1, "expected numbers"),
    (HUGE, 4, "buffer is smaller than requested size"),
    (npz(a=BANDS, b=BANDS), 4, r"an .npz file with 2 arrays \(a, b\); expected one, or 'image'"),
    (zip_bomb(), 4, "its array is larger than 1024 MB"),
    (tiff(FIRST)[:700], 4, "broken image|1 channel|a TIFF"),
    (b"II*\0" + b"\xff" * 100, 4, "a TIFF without an image"),
    (tiff(np.zeros((2, 3, 20, 30), np.uint8), metadata={"axes": "TCYX"}), 4, "one axis of channels"),
    (tiff(FIRST, extratags=[(274, "H", 1, 6, True)]), 4, "a TIFF with a rotation, which is not supported"),
    (deflate_bomb(), 1, "unpacks to more data than its images have"),
    (dicom(HOUNSFIELD)[:300], 1, "broken image"),
    (dicom(HOUNSFIELD)[:-9], 1, "less than expected"),
    (dicom(HOUNSFIELD).replace(PLAIN, DEFLATED), 1, "compressed as a whole, which is not supported"),
    (dicom(HOUNSFIELD).replace(PLAIN, RLE), 1, "compressed pixels .RLE Lossless., which is not supported"),
    (b"text", 4, "not an image"),
    (b"", 4, "the file is empty"),
]


@pytest.mark.parametrize(("data", "channels", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_read_is_one_line(data, channels, words):
    with pytest.raises(ImageError, match=words) as caught:
        read_stored(data, channels)
    assert len(str(caught.value).splitlines()) == 1


def test_damaged_files_end_with_an_image_error():
    for data, channels in (
        (tiff(FIRST), 4),
        (tiff(FIRST, compression="zlib"), 4),
        (dicom(HOUNSFIELD), 1),
        (npz(a=BANDS), 4),
    ):
        for _ in range(60):
            damaged = bytearray(data)
            for position in rng.integers(0, min(len(data), 3000), 4):
                damaged[position] = rng.integers(0, 256)
            with suppress(ImageError):
                assert read_stored(bytes(damaged), channels).shape[2] == channels


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(MissingExtraError, match=r"'tifffile'.*imaging"):
        read_stored(tiff(FIRST), 4)


def test_evaluation_resizes_each_channel_and_normalizes():
    settings = Preprocess(image_size=(20, 30), mean=(0.1, 0.2, 0.3, 0.4), std=(1.0, 2.0, 3.0, 4.0))
    pixels = preprocess_image(npy(FIRST), settings).numpy()
    expected = (FIRST / np.float32(65535) - np.array(settings.mean)[:, None, None]) / np.array(settings.std)[
        :, None, None
    ]
    assert np.abs(pixels - expected).max() < 1e-6  # float32
    small = preprocess_image(npy(FIRST), settings.with_image_size((10, 15))).numpy()
    one = preprocess_image(npy(FIRST[2]), Preprocess(image_size=(10, 15), mean=(0.3,), std=(3.0,), pixels="stored"))
    assert np.array_equal(small[2], one[0])


def test_what_needs_colors_refuses_stored_channels_and_the_other_way_round():
    settings = Preprocess(image_size=8, pixels="stored")
    with pytest.raises(ConfigError, match="works with 8-bit RGB or gray images; this model reads stored channels"):
        apply_preprocess(Image.new("RGB", (8, 8)), settings)
    with pytest.raises(ImageError, match="an array of NumPy: only models that read stored channels take it"):
        decode(npy(BANDS))
    with pytest.raises(ImageError, match="a DICOM file: only models that read stored channels take it"):
        decode(dicom(HOUNSFIELD))


GEOMETRY = {"crop": "resized", "scale": (0.3, 1.0)}, {"crop": "pad", "padding_mode": "reflect"}, {"crop": "inception"}


@pytest.mark.parametrize("channels", [1, 2, 4, 13])
@pytest.mark.parametrize("geometry", GEOMETRY)
def test_geometric_augmentation_treats_all_channels_alike(channels, geometry):
    plane = rng.random((40, 50), np.float32)
    mean, std = (0.0,) * channels, (1.0,) * channels
    transform = train_transform(Augment(image_size=(16, 16), pixels="stored", mean=mean, std=std, **geometry))
    pixels = transform(npy(np.repeat(plane[..., None], channels, axis=2)), np.random.default_rng(3)).numpy()
    assert pixels.shape == (channels, 16, 16)
    assert np.array_equal(pixels, np.repeat(pixels[:1], channels, axis=0))
    again = transform(npy(np.repeat(plane[..., None], channels, axis=2)), np.random.default_rng(3)).numpy()
    assert np.array_equal(pixels, again)


@pytest.mark.parametrize(
    "changes",
    [{"rand_augment": 2}, {"color_jitter": (0.1, 0, 0, 0)}, {"ops": (("invert", 1, 1),)}, {"random_erasing": 0.1}],
)
def test_operations_on_colors_are_refused(changes):
    name = next(iter(changes))
    with pytest.raises(ConfigError, match=f"augment.{name} needs 8-bit images of 1 or 3 channels.*set augment.{name}="):
        Augment(mean=(0.5,) * 4, std=(0.5,) * 4, pixels="stored", **changes)
    with pytest.raises(ConfigError, match="need one value for each of 1 or 3 channels"):
        Augment(mean=(0.5,) * 4, std=(0.5,) * 4)


@pytest.mark.parametrize(
    ("data", "lost"),
    [
        (png(BANDS[..., :3]), "16 bits per channel"),
        (png(BANDS[..., 0]), "16 bits per channel"),
        (tiff(BANDS[..., :3], photometric="rgb"), "16 bits per channel"),
        (tiff(np.zeros((5, 8, 9), np.uint8)), "5 pages"),
        (tiff(np.zeros((8, 9, 3), np.uint8), photometric="rgb"), ""),
        (png(np.zeros((8, 9, 3), np.uint8)), ""),
        (b"broken", ""),
        (np.zeros((8, 9), np.uint8), ""),
    ],
)
def test_what_rgb_does_not_keep_is_said(data, lost):
    assert lost_by_rgb(data) == lost


class Arrays:
    name = "arrays"

    def __init__(self, *files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def read(self, index):
        return self.files[index]


def test_statistics_are_those_of_all_pixels():
    files = [npy(rng.integers(0, 65535, (9, 9 + i, 4), dtype=np.uint16)) for i in range(3)]
    mean, std = channel_statistics(Arrays(*files, b"broken"), 4)
    values = np.concatenate([read_stored(data, 4).reshape(-1, 4) for data in files]).astype(np.float64)
    assert np.allclose(mean, values.mean(0))
    assert np.allclose(std, values.std(0))
    constant = BANDS.copy()
    constant[..., 2] = 7
    with pytest.raises(DataError, match="channel 2 has the same value in all training images"):
        channel_statistics(Arrays(npy(constant)), 4)
    with pytest.raises(ImageError, match="not an image"):
        channel_statistics(Arrays(b"broken"), 4)


def test_stored_channels_are_displayed_with_the_first_three_as_colors():
    plane = np.linspace(-5, 5, 600).reshape(20, 30)
    image = np.asarray(display(npy(np.stack([plane, -plane, 0 * plane, plane], axis=2))))
    assert image[0, 0].tolist() == [0, 255, 0]
    assert image[-1, -1].tolist() == [255, 0, 0]
    with pytest.raises(ImageError, match="image of 6 bytes: not an image"):
        display(b"broken")


def test_the_doctor_examines_stored_channels(tmp_path):
    for index in range(4):
        folder = tmp_path / f"class{index % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index}.npy").write_bytes(npy(rng.random((13, 40, 40))))
        (folder / f"{index}.tif").write_bytes(tiff(rng.random((40, 40, 13)), planarconfig="contig"))
    (tmp_path / "class0" / "copy.npy").write_bytes((tmp_path / "class0" / "0.npy").read_bytes())
    checks = {finding.check: finding.count for finding in diagnose(tmp_path).findings}
    assert "readable" in checks
    assert checks["duplicate"] == 1
