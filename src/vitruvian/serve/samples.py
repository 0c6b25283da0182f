"""The page's own files and the images to try it with, all from inside the package.

`cat.jpg` (Stefan van der Walt) and `coffee.jpg` (Rachel Michetti) are CC0, `rocket.jpg` (SpaceX) is in the public
domain; the digits are those of `vitruvian.data`.
"""

from __future__ import annotations

import io
from functools import cache
from importlib.resources import files

import numpy as np
from fastapi import FastAPI
from PIL import Image
from starlette.responses import Response

from vitruvian.data.formats import open_dataset
from vitruvian.serve.requests import Refused

PHOTOS = ("cat", "coffee", "rocket")
DIGITS = 10
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "jpg": "image/jpeg", "svg": "image/svg+xml"}
"""Of the files that are sent, by ending; text is UTF-8."""
REVALIDATE = {"cache-control": "no-cache"}


@cache
def page_files() -> dict[str, bytes]:
    """The files of the page by name; what is not here cannot be asked for."""
    folder = files("vitruvian.serve") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in TYPES}


@cache
def digit_png(digit: int) -> bytes:
    """The first held-out image of a digit, as the model sees it: white on black, 8 x 8 pixels."""
    held = open_dataset("digits").splits["test"]
    pixels = held.read(int(np.flatnonzero(held.labels() == digit)[0]))
    assert isinstance(pixels, np.ndarray)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def add_page(app: FastAPI) -> None:
    """Routes of the page, its files and its samples."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page_files()["index.html"], media_type="text/html", headers=REVALIDATE)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in page_files():
            raise Refused(404, "the page has no such file")
        kind = TYPES[name.rpartition(".")[2]]
        return Response(page_files()[name], media_type=kind, headers=REVALIDATE)

    @app.get("/page/digit/{digit}", include_in_schema=False)
    async def digit_file(digit: str) -> Response:
        if digit not in tuple("0123456789"):
            raise Refused(404, "the digits are 0 to 9")
        return Response(digit_png(int(digit)), media_type="image/png", headers=REVALIDATE)
