"""Generated images of no class, to fit what "none of these" is: drawn ones, and training images taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Rng = np.random.Generator
Draw = Callable[[Rng, Sequence[Image.Image]], Image.Image]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,-   eeaoin"


def color(rng: Rng, plain: tuple[int, int, int] | None = None) -> tuple[int, ...]:
    """Any color; where a plain one is given, that in two of five cases."""
    return plain if plain is not None and rng.random() < 0.4 else tuple(rng.integers(0, 256, 3).tolist())


def levels(values: NDArray[np.float64]) -> Image.Image:
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def blurred(image: Image.Image, rng: Rng, most: float) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(most * rng.random()))


def text(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """Lines of letters that fill an image."""
    side = int(rng.integers(48, 160))
    image = Image.new("RGB", (side, side), color(rng, (255, 255, 255)))
    height = float(rng.integers(8, side // 2))
    columns, rows = int(side / height / 0.55) + 1, int(side / height) + 1
    lines = ("".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), columns)) for _ in range(rows))
    place, ink = tuple(rng.integers(-8, 8, 2).tolist()), color(rng, (0, 0, 0))
    ImageDraw.Draw(image).multiline_text(place, "\n".join(lines), fill=ink, font_size=height)
    return image


def letter(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """One large letter, digit or sign."""
    image = Image.new("RGB", (64, 64), color(rng, (0, 0, 0)))
    place = int(rng.integers(4, 20)), int(rng.integers(-6, 8))
    sign, ink = chr(int(rng.integers(33, 127))), color(rng, (255, 255, 255))
    ImageDraw.Draw(image).text(place, sign, fill=ink, font_size=float(rng.integers(40, 64)))
    return blurred(image, rng, 1.5)


def noise(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """Gray or colored noise, from white to that of clouds."""
    frequency = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.fftfreq(64))
    frequency[0, 0] = 1.0
    white = rng.standard_normal((3 if rng.random() < 0.5 else 1, 64, 64))
    shaped = np.fft.ifft2(np.fft.fft2(white) / frequency ** (2.2 * rng.random())).real
    shaped -= shaped.min(axis=(1, 2), keepdims=True)
    low, high = np.sort(rng.random(2))
    share = low + (high - low) * shaped / shaped.max(axis=(1, 2), keepdims=True)
    return levels(255 * np.broadcast_to(share, (3, 64, 64)).transpose(1, 2, 0))


def texture(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """Stripes, checks, bricks or rings in two colors, of any direction and scale, perhaps noisy."""
    y, x = np.mgrid[0:64, 0:64] / 64
    angle, turn = np.pi * rng.random(), 2 * np.pi * (2 + 14 * rng.random())
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    joints = np.sin(turn * across + np.pi * np.floor(turn * along / (2 * np.pi)))
    pattern = [
        np.sin(turn * along),
        np.sign(np.sin(turn * along) * np.sin(turn * across)),
        2 * np.maximum(np.sin(turn * along) ** 8, joints**8) - 1,
        np.sin(turn * np.hypot(x - rng.random(), y - rng.random())),
    ][rng.integers(4)]
    grain = 0.1 * rng.random() * rng.standard_normal((64, 64))
    share = np.clip(pattern / 2 + 0.5 + grain, 0, 1)[..., None]
    first, second = rng.integers(0, 256, (2, 3))
    return levels(share * first + (1 - share) * second)


def face(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """A face, drawn with ellipses, lit from a side and blurred; gray in half of the cases."""
    red, tint = float(rng.integers(90, 250)), 0.62 + 0.25 * rng.random()
    skin = (int(red), int(red * tint), int(red * tint * (0.7 + 0.3 * rng.random())))
    hair = tuple((2.5 * rng.random() * np.array([60, 45, 35])).astype(int).tolist())
    image = Image.new("RGB", (128, 128), color(rng))
    pen = ImageDraw.Draw(image)
    x, y = 64 + 5 * rng.normal(), 66 + 5 * rng.normal()
    w, h = rng.uniform(30, 50), rng.uniform(42, 62)

    def ellipse(left: float, top: float, right: float, bottom: float, fill: tuple[int, ...]) -> None:
        pen.ellipse((x + w * left, y + h * top, x + w * right, y + h * bottom), fill=fill)

    ellipse(-1.8, 0.75, 1.8, 2.2, color(rng))  # shoulders, hair, head
    if rng.random() < 0.85:
        ellipse(-1.12, -1.15, 1.12, rng.uniform(0.1, 1.1), hair)
    ellipse(-1, -0.9, 1, 1, skin)
    for side in (-0.42, 0.42):
        ellipse(side - 0.22, -0.36, side + 0.22, -0.28, hair)
        ellipse(side - 0.2, -0.2, side + 0.2, -0.04, (235, 235, 235))
        ellipse(side - 0.1, -0.2, side + 0.1, -0.04, (40, 30, 20))
    ellipse(-0.14, 0.24, 0.14, 0.32, tuple(int(0.7 * level) for level in skin))
    ellipse(-0.38, 0.58 - rng.uniform(0.03, 0.1), 0.38, 0.65, (160, 70, 70))
    light = np.linspace(*rng.uniform(0.4, 1.2, 2), 128)[:, None]
    lit = np.asarray(blurred(image, rng, 4.0), float) * (light if rng.random() < 0.7 else light[:, None])
    edge = int(64 * rng.uniform(0, 0.45))
    seen = levels(lit).crop((edge, edge, 128 - edge, 128 - edge))
    return seen.convert("L").convert("RGB") if rng.random() < 0.5 else seen


def shapes(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """Some polygons and rectangles, perhaps the same on both sides, as clothes are."""
    image = Image.new("RGB", (64, 64), color(rng, (0, 0, 0)))
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(1, 5))):
        gray = int(rng.integers(60, 256))
        x, y = rng.integers(4, 60, (2, int(rng.integers(3, 8)))).tolist()
        corners = [(min(x), min(y)), (max(x), min(y)), (max(x), max(y)), (min(x), max(y))]
        pen.polygon(list(zip(x, y)) if rng.random() < 0.5 else corners, fill=color(rng, (gray, gray, gray)))
    values = np.asarray(image, float)
    return blurred(levels((values + values[:, ::-1]) / 2) if rng.random() < 0.5 else image, rng, 1.5)


def part(rng: Rng, bank: Sequence[Image.Image], least: int = 5, most: int = 13) -> NDArray[np.uint8]:
    """A small square of a training image."""
    image, side = np.asarray(bank[rng.integers(len(bank))]), int(rng.integers(least, most))
    row, column = rng.integers(0, 33 - side, 2)
    return image[row : row + side, column : column + side]


def surface(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """A small part of a training image, enlarged."""
    return Image.fromarray(part(rng, bank)).resize((32, 32), Image.Resampling.BICUBIC)


def tiles(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """A small part of a training image, mirrored and repeated."""
    piece = part(rng, bank, 6, 16)
    row = np.concatenate([piece, piece[:, ::-1]], axis=1)
    return Image.fromarray(np.tile(np.concatenate([row, row[::-1]]), (3, 3, 1))[:32, :32])


def shuffled(rng: Rng, bank: Sequence[Image.Image]) -> Image.Image:
    """The parts of a training image in another order."""
    side = int(rng.choice([4, 8, 16]))
    count = 32 // side
    parts = np.asarray(bank[rng.integers(len(bank))]).reshape(count, side, count, side, 3).swapaxes(1, 2)
    order = rng.permutation(count * count)
    moved = parts.reshape(-1, side, side, 3)[order].reshape(count, count, side, side, 3)
    return Image.fromarray(np.ascontiguousarray(moved.swapaxes(1, 2)).reshape(32, 32, 3))


KINDS: dict[str, Draw] = {
    each.__name__: each for each in (text, letter, noise, texture, face, shapes, surface, tiles, shuffled)
}


def outliers(bank: Sequence[Image.Image], count: int, *, seed: int) -> dict[str, list[Image.Image]]:
    """So many images of each kind; `bank` are training images of 32 x 32 pixels."""
    rng = np.random.default_rng(seed)
    return {kind: [draw(rng, bank) for _ in range(count)] for kind, draw in KINDS.items()}
