"""Every kind of image file gives the colors a viewer shows, or one line that says why not."""

from __future__ import annotations

import io
import os
import re
import struct
import threading
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from vitruvian.data import decode as decode_module
from vitruvian.data.decode import MAX_PIXELS, decode
from vitruvian.errors import ImageError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, kind: str, **settings: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def colors(image: Image.Image) -> list[tuple[int, ...]]:
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


def deep_png(color_type: int, values: list[int], columns: int) -> bytes:
    """A PNG of one row with 16 bits a value, which Pillow cannot write for color."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", columns, 1, 16, color_type, 0, 0, 0)
    row = b"\0" + struct.pack(f">{len(values)}H", *values)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def huge_png_header(columns: int, rows: int) -> bytes:
    data = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + data + struct.pack(">I", zlib.crc32(b"IHDR" + data))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("L", (1, 1), 77), "PNG", (77, 77, 77)),
        (Image.new("LA", (1, 1), (77, 255)), "PNG", (77, 77, 77)),
        (Image.new("LA", (1, 1), (0, 0)), "PNG", WHITE),
        (Image.new("1", (1, 1), 1), "PNG", WHITE),
        (Image.new("RGB", (1, 1), RED), "BMP", RED),
        (Image.new("RGBA", (1, 1), (255, 0, 0, 255)), "PNG", RED),
        (Image.new("RGBA", (1, 1), (255, 0, 0, 0)), "WEBP", WHITE),
        (Image.new("RGBA", (1, 1), (0, 0, 0, 51)), "PNG", (204, 204, 204)),
        (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF", RED),
        (Image.new("RGB", (1, 1), (200, 30, 60)).convert("YCbCr"), "TIFF", (198, 30, 59)),
        (Image.new("RGB", (1, 1), (200, 30, 60)).convert("LAB"), "TIFF", (199, 31, 60)),
    ],
)
def test_each_mode_gives_the_color_a_viewer_shows(image, kind, expected):
    assert colors(decode(encoded(image, kind))) == [expected]


@pytest.mark.parametrize("mode", ["RGBa", "RGBX", "HSV", "PA", "P", "I;16L", "I;16B", "I;16N"])
def test_modes_that_only_live_in_memory_are_converted_too(mode):
    assert decode(Image.new(mode, (3, 2))).mode == "RGB"


def test_a_palette_is_looked_up_and_its_transparent_entries_are_white():
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    image.putdata([0, 1, 2])
    assert colors(decode(encoded(image, "PNG"))) == [RED, GREEN, BLUE]
    assert colors(decode(encoded(image, "PNG", transparency=1))) == [RED, WHITE, BLUE]
    assert colors(decode(encoded(image, "PNG", transparency=bytes([255, 0, 255])))) == [RED, WHITE, BLUE]
    assert colors(decode(encoded(image, "GIF", transparency=0))) == [WHITE, GREEN, BLUE]


def test_a_transparent_color_without_a_palette_is_white():
    image = Image.new("RGB", (2, 1), RED)
    image.putpixel((1, 0), BLUE)
    assert colors(decode(encoded(image, "PNG", transparency=BLUE))) == [RED, WHITE]


def test_adobe_cmyk_jpeg_is_not_inverted():
    red, _, blue = decode(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)).getpixel((8, 8))
    assert red > 250
    assert blue < 5


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_16_bit_gray_is_scaled_and_not_clipped(dtype):
    image = Image.fromarray(np.array([[0, 257, 32768, 65535]], dtype))
    kind = "PNG" if dtype is np.uint16 else "TIFF"
    assert [r for r, _, _ in colors(decode(encoded(image, kind)))] == [0, 1, 128, 255]


def test_big_endian_16_bit_gray_is_scaled():
    image = Image.frombytes("I;16B", (2, 1), struct.pack(">2H", 257 * 3, 65535))
    assert [r for r, _, _ in colors(decode(encoded(image, "TIFF")))] == [3, 255]


def test_16_bit_gray_keeps_its_transparent_level():
    image = Image.fromarray(np.array([[0, 257]], np.uint16))
    assert [r for r, _, _ in colors(decode(encoded(image, "PNG", transparency=0)))] == [255, 1]


def test_16_bit_color_is_scaled():
    data = deep_png(2, [65535, 0, 0, 32768, 32768, 32768], columns=2)
    assert colors(decode(data)) == [RED, (128, 128, 128)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([1000.0, float("nan"), 3000.0], [0, 0, 255]),
        ([0.0, float("inf"), 0.5], [0, 255, 128]),
    ],
)
def test_float_gray_fills_the_range(values, expected):
    image = Image.fromarray(np.array([values], np.float32))
    assert [r for r, _, _ in colors(decode(encoded(image, "TIFF")))] == expected


def test_32_bit_gray_beyond_16_bits_is_stretched():
    image = Image.fromarray(np.array([[-100_000, 0, 100_000]], np.int32))
    assert [r for r, _, _ in colors(decode(encoded(image, "TIFF")))] == [0, 128, 255]


HELD = {
    # EXIF orientation: what a camera held that way does to the scene
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", HELD)
def test_exif_orientation_is_undone(kind, orientation):
    scene = Image.new("RGB", (48, 32), RED)
    scene.paste(BLUE, (0, 0, 16, 16))  # the corner at the top left
    turn = HELD[orientation]
    held = scene if turn is None else scene.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    seen = decode(encoded(held, kind, exif=exif))
    assert seen.size == (48, 32)
    red, _, blue = seen.getpixel((4, 4))
    assert blue > 200 > 50 > red
    red, _, blue = seen.getpixel((44, 28))
    assert red > 200 > 50 > blue


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, GREEN, BLUE)]
    settings = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **settings)
    assert set(colors(decode(data))) == {RED}


def test_a_broken_exif_block_does_not_spoil_the_image():
    data = encoded(Image.new("RGB", (8, 8), RED), "PNG", exif=b"Exif\0\0not really exif")
    assert colors(decode(data))[0] == RED


def test_paths_bytes_files_and_images_all_work(tmp_path):
    data = encoded(Image.new("RGB", (2, 1), RED), "PNG")
    path = tmp_path / "red.png"
    path.write_bytes(data)
    with path.open("rb") as file:
        sources = [path, str(path), data, io.BytesIO(data), file, Image.open(io.BytesIO(data))]
        assert [colors(decode(source)) for source in sources] == [[RED, RED]] * 6


def test_a_pipe_can_be_decoded():
    out, into = os.pipe()
    with os.fdopen(out, "rb") as file:
        os.write(into, encoded(Image.new("RGB", (1, 1), BLUE), "PNG"))
        os.close(into)
        assert colors(decode(file)) == [BLUE]


@pytest.mark.slow
def test_a_large_legal_image_is_decoded_without_a_warning():
    data = encoded(Image.new("1", (10_000, 9_000)), "PNG")  # more than Pillow's 89 million; warnings are errors here
    assert decode(data).size == (10_000, 9_000)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the file is empty"),
        (b"hello world, I am text", "not an image (JPEG, PNG, "),
        (b"\xff\xd8\xff\xe0", "broken JPEG image: "),
        (b"\x89PNG\r\n\x1a\n", "broken PNG image: its header is truncated"),
        (b"GIF89a", "broken GIF image: its header is truncated"),
        (b"<!DOCTYPE html><html>", "this is a web page, perhaps saved instead of the image"),
        (b"<?xml version='1.0'?><svg>", "this is an SVG drawing, which has no pixels: convert it to PNG"),
        (b"%PDF-1.4", "this is a PDF document: convert its pages to PNG"),
        (huge_png_header(30_000, 30_000), "30000x30000 pixels exceed the limit of 179 million"),
    ],
)
def test_what_is_no_image_is_one_line_that_says_why(tmp_path, data, text):
    path = tmp_path / "broken.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        decode(path)
    assert str(caught.value).startswith(f"{path}: {text}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "QOI"])
def test_a_truncated_file_of_any_format_is_one_line(kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    assert decode(data).size == (64, 64)
    with pytest.raises(ImageError, match=r"^image of \d+ bytes: .*broken"):
        decode(data[: len(data) // 2])


def test_a_limit_can_be_set():
    data = encoded(Image.new("L", (20, 10)), "PNG")
    assert decode(data, max_pixels=200).size == (20, 10)
    with pytest.raises(ImageError, match="20x10 pixels exceed"):
        decode(data, max_pixels=199)
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(ImageError, match=r"nothing\.jpg: no such file$"):
        decode(tmp_path / "nothing.jpg")
    with pytest.raises(ImageError, match=r": this is a folder, not an image$"):
        decode(tmp_path)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.jpg").write_bytes(b"x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)  # root, who runs tests in containers, may read everything
    with pytest.raises(ImageError, match=r"^secret\.jpg: no permission to read this file$"):
        decode("secret.jpg")


def test_odd_names_stay_one_line():
    with pytest.raises(ImageError) as caught:
        decode("a\nb\x1b[31m\udcff.jpg")
    assert str(caught.value) == r"a\nb\x1b[31m\udcff.jpg: no such file"


def test_many_threads_decode_at_once():
    data = encoded(Image.new("RGB", (64, 64), GREEN), "PNG")
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(set(colors(decode(data))) == {GREEN})) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 8


def test_the_error_of_a_broken_image_does_not_hold_its_pixels():
    """Errors are stored in results and futures; each frame of their tracebacks would keep the pixels decoded so far."""
    buffer = io.BytesIO()
    Image.new("RGB", (640, 480), "red").save(buffer, "JPEG")
    with pytest.raises(ImageError) as raised:
        decode(buffer.getvalue()[:-200])
    error = raised.value
    while error := error.__context__:
        assert error.__traceback__ is None


def progressive_jpeg(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encoded(Image.new("L", (side, side), 90), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]


def inserted(kind: str, place: int, part: bytes, times: int) -> bytes:
    """A small image with a part of its file repeated many times."""
    data = encoded(Image.new("RGB" if kind != "GIF" else "P", (8, 8)), kind)
    return data[:place] + part * times + data[place:]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (progressive_jpeg(64, 2000), "a JPEG of more than 100 scans, for this size"),
        (progressive_jpeg(1000, 30), "a JPEG of more than 20 scans, for this size"),
        (inserted("JPEG", 2, b"\xff\xe1\x00\x10Exif\0\0" + bytes(8), 100_000), "too many small parts"),
        (inserted("JPEG", 2, b"\xff", 1_000_000), "too many small parts"),
        (inserted("JPEG", -2, b"\xff\xfe\0\2", 100_000), "a JPEG of more than 2,000 segments"),
        (inserted("GIF", 19, b"\x21\xfe\1a\0", 100_000), "too many small parts"),
        (inserted("PNG", 33, b"\0\0\0\0IDAT5\xaf\x06\x1e", 100_000), "too many small parts"),
        (b"qoif\0\0\3\xe8\0\0\3\xe8\3\0" + b"\x55" * 4_000_000, "a compressed QOI image has more than 4 MB"),
        (huge_png_header(1, 1_000_000), "1x1000000 pixels exceed the limit of 262,144 per side"),
        (huge_png_header(170_000_000, 1), "170000000x1 pixels exceed the limit of 262,144 per side"),
        (b"P3 1000 1000 9 " + b"1 " * 3_000_000, "a PNM written as text has more than 4 MB or 100 comments"),
        (b"P2 700 700 9 " + b"1#\n" * 300_000, "a PNM written as text has more than 4 MB or 100 comments"),
    ],
    ids=[
        "scans",
        "scans of a large image",
        "Exif",
        "padding",
        "segments",
        "GIF",
        "PNG",
        "QOI",
        "tall",
        "wide",
        "plain",
        "comments",
    ],
)
def test_a_small_file_that_would_take_long_to_decode_is_refused_at_once(data, text):
    started = time.process_time()
    with pytest.raises(ImageError, match=re.escape(text)):
        decode(data, max_pixels=MAX_PIXELS if "per side" in text else 1_000_000)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (progressive_jpeg(64, 40), (64, 64)),
        (encoded(Image.new("L", (64, 64)), "JPEG") + b"\xff\xda\xff\xfe" * 9000, (64, 64)),  # phones append a video
        (b"qoif\0\0\1\0\0\0\1\0\3\0" + b"\x55" * 65536 + bytes(7) + b"\1", (256, 256)),
        (encoded(Image.new("L", (65_000, 40)), "PNG"), (65_000, 40)),
        (b"P3 # made by hand\n2 1 255 0 0 0 9 9 9", (2, 1)),
    ],
    ids=["progressive", "video", "QOI", "panorama", "plain"],
)
def test_unusual_but_honest_files_are_decoded(data, size):
    assert decode(data, max_pixels=8_000_000).size == size


def test_a_heic_photograph_without_its_package_names_the_pip_command(monkeypatch):
    monkeypatch.setattr(decode_module, "HAS_HEIF", False)
    with pytest.raises(ImageError, match=r"this is a HEIC photograph, .* pip install pillow-heif, or convert to JPEG"):
        decode(b"\0\0\0\x18ftypheic\0\0\0\0")


def test_a_heic_photograph_is_read_upright_and_its_damage_is_one_line(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    image = Image.new("RGB", (64, 32), "red")
    image.paste("blue", (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.heic"
    heif.from_pillow(image).save(path, exif=exif.tobytes(), quality=90)
    photo = decode(path)
    assert (photo.mode, photo.size) == ("RGB", (32, 64))
    assert photo.getpixel((16, 8))[2] > 200 > 60 > photo.getpixel((16, 8))[0]
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:40], whole[:12], whole[:200] + bytes(len(whole) - 200)):
        with pytest.raises(ImageError) as caught:
            decode(content)
        assert "\n" not in str(caught.value)
    with pytest.raises(ImageError, match=r"64x32 pixels exceed the limit|32x64 pixels exceed the limit"):
        decode(whole, max_pixels=100)
