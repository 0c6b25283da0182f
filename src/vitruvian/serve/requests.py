"""A request's images and options, from a form with files or from JSON with base64."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from vitruvian.serve.limits import Limits
from vitruvian.serve.schema import Image, Options

O = TypeVar("O", bound=Options)  # noqa: E741
M = TypeVar("M", bound=BaseModel)

MAX_FIELDS = 20


class Refused(Exception):
    """A request that gets no answer: the status, and a sentence for the client."""

    def __init__(self, status: int, text: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Asked(Generic[O]):
    """What a client sent."""

    names: list[str]
    images: list[bytes]
    options: O


async def read_request(request: Request, options: type[O], limits: Limits, *, most_images: int) -> Asked[O]:
    """The images and options of a request; Refused says what is wrong with it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        asked = await read_form(request, options, limits)
    elif kind == "application/json":
        asked = read_json(await request.body(), options, most_images)
    else:
        found = f"not {kind}" if kind else "and it has no Content-Type"
        raise Refused(415, f"send multipart/form-data with files, or application/json with base64, {found}")
    if not asked.images:
        raise Refused(422, "the request has no image; send files in the form's field 'image'")
    check_count(len(asked.images), most_images)
    return asked


def check_count(images: int, most: int) -> None:
    if images > most:
        raise Refused(413, f"{images} images are more than the limit of {most} a request")


async def read_form(request: Request, options: type[O], limits: Limits) -> Asked[O]:
    names: list[str] = []
    images: list[bytes] = []
    fields: dict[str, Any] = {}
    try:
        async with request.form(max_files=limits.max_images + 1, max_fields=MAX_FIELDS) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    if name != "image":
                        raise Refused(422, f"the file is in the field {name!r}; the field of files is 'image'")
                    names.append(value.filename or "")
                    images.append(await value.read())
                elif name == "image":
                    raise Refused(422, "the field 'image' has text, not a file: curl takes -F image=@photo.jpg")
                elif name in fields:
                    raise Refused(422, f"the field {name!r} is there twice")
                else:
                    fields[name] = value
    except HTTPException as error:  # starlette's word for a form that is broken or has too many parts
        raise Refused(400, f"broken form: {error.detail}") from None
    return Asked(names, images, checked(options, fields))


def read_json(body: bytes, options: type[O], most_images: int) -> Asked[O]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not valid JSON") from None
    if not isinstance(content, dict):
        raise Refused(422, 'the body is not a JSON object such as {"images": [{"data": "..."}]}')
    listed = content.pop("images", [])
    if not isinstance(listed, list):
        raise Refused(422, 'images: not a list such as [{"data": "..."}]')
    check_count(len(listed), most_images)  # before each of them is looked at
    images = [checked(Image, image, f"images.{number}") for number, image in enumerate(listed)]
    data = [from_base64(image.data, number) for number, image in enumerate(images)]
    return Asked([image.name for image in images], data, checked(options, content))


def from_base64(text: str, number: int) -> bytes:
    """The bytes of a base64 text or of a data URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, f"images.{number}.data: not base64") from None


def checked(model: type[M], content: object, place: str = "") -> M:
    """The content as what it should be; Refused names the first field that is wrong."""
    if isinstance(content, dict) and len(content) > MAX_FIELDS:
        raise Refused(422, f"{place or 'the request'}: {len(content)} fields are more than the limit of {MAX_FIELDS}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join([*([place] if place else []), *map(str, first["loc"])])
        known = f"; known are {', '.join(model.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise Refused(422, f"{where or 'the request'}: {first['msg']}{known}") from None
