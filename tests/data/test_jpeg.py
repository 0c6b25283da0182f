"""Parts of JPEGs: the same pixels as Pillow's, whatever was left out while decoding."""

import io

import numpy as np
import pytest
from PIL import Image

from vitruvian.data.augment import TRANSFORMS, Box, decode_box, read_header, shrink_factor
from vitruvian.data.decode import decode
from vitruvian.errors import ImageError

WHOLE = (10**6, 10**6)  # wanting so many pixels keeps a part at full size


def make_image(rows=75, columns=117, mode="RGB"):
    y, x = np.mgrid[:rows, :columns]
    noise = np.random.default_rng(0).integers(0, 60, (rows, columns))
    levels = np.stack([x * 180 // columns + noise, y * 180 // rows + noise, (x + y) % 190], axis=-1)
    return Image.fromarray(levels.astype(np.uint8)).convert(mode)


def encoded(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 85} | options)
    return buffer.getvalue()


def part(data, box, wanted=WHOLE):
    header = read_header(data)
    assert header is not None
    return decode_box(data, header, box, wanted)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": "4:4:4"}, {"restart_marker_rows": 1}])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_part_equals_the_same_part_of_the_whole_image(mode, options):
    data, box = encoded(make_image(mode=mode), **options), Box(11, 23, 40, 61)
    assert np.array_equal(part(data, box), box.crop(np.asarray(decode(data))))


@pytest.mark.parametrize(("wanted", "side"), [((101, 101), 200), ((100, 51), 100), ((50, 50), 50), ((1, 1), 25)])
def test_a_large_part_is_scaled_down_by_a_power_of_two_but_not_below_what_is_wanted(wanted, side):
    assert part(encoded(make_image(200, 200)), Box(0, 0, 200, 200), wanted).shape == (side, side, 3)


def test_shrinking_covers_what_is_wanted_on_both_sides():
    assert [shrink_factor((100, 400), (10, wanted)) for wanted in (10, 100, 200, 201, 500)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("orientation", [1, *TRANSFORMS])
def test_a_part_is_meant_in_the_upright_image(orientation):
    image, exif = make_image(), Image.Exif()
    exif[0x0112] = orientation
    box = Box(10, 5, 50, 31)
    data = encoded(image, exif=exif)
    whole = np.asarray(decode(data))
    assert read_header(data).size == whole.shape[:2]
    assert np.array_equal(part(data, box), box.crop(whole))


def test_what_is_not_an_ordinary_jpeg_is_left_to_decode():
    png = io.BytesIO()
    make_image().save(png, "PNG")
    ordinary = encoded(make_image())
    twelve_bits = bytearray(ordinary)
    twelve_bits[ordinary.index(b"\xff\xc0") + 4] = 12
    strange = {
        "png": png.getvalue(),
        "cmyk": encoded(make_image(mode="CMYK")),
        "twelve bits": bytes(twelve_bits),
        "empty": b"",
        "cut in the header": ordinary[:300],
        "garbage": b"\xff\xd8" + bytes(range(256)),
    }
    assert [name for name, data in strange.items() if read_header(data) is not None] == []


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 1}])
def test_a_truncated_file_is_an_image_error_even_where_the_part_is_there(options):
    data = encoded(make_image(), **options)
    with pytest.raises(ImageError, match="truncated"):
        part(data[: len(data) * 2 // 3], Box(0, 0, 20, 20))


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 1}])
def test_every_shortened_file_gives_pixels_or_an_image_error(options):
    data = encoded(make_image(40, 40), **options)
    for length in range(0, len(data), 7):
        header = read_header(data[:length])
        if header is not None:
            with pytest.raises(ImageError):
                decode_box(data[:length], header, Box(3, 3, 30, 30), (8, 8))


def test_bytes_behind_the_end_do_not_matter():
    data, box = encoded(make_image(), restart_marker_blocks=1), Box(11, 23, 40, 61)
    assert np.array_equal(part(data + b"\xff\xd0\xff\xd1 and more", box), part(data, box))


def test_a_harmless_flaw_that_pillow_reads_over_is_read_over():
    data, box = encoded(make_image()), Box(11, 23, 40, 61)
    flawed = data[:-2] + b"\0\0\0" + data[-2:]  # stray bytes before the end
    assert np.array_equal(part(flawed, box), box.crop(np.asarray(decode(flawed))))
