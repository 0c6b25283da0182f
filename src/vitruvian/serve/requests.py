"""Requests and responses: their schema, for validation and OpenAPI, and the parser of forms and JSON."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from vitruvian.explain.explainer import METHODS, Method
from vitruvian.serve.inspection import PARTS, Part
from vitruvian.serve.limits import ServiceLimits
from vitruvian.serve.middleware import Refused

MAX_TOP = 100
MAX_LABELS = 200
MAX_PATCHES = 1 << 16
MAX_FIELDS = 20


def split_commas(value: object) -> object:
    """A list as forms send it, `a,b`, as a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


CommaList = BeforeValidator(split_commas)
LAYER = Field(ge=-1000, lt=1000, description="Layer, from 0; -1 is the last.")
Patch = Annotated[int, Field(ge=0, lt=MAX_PATCHES)]
ErasedPatches = Annotated[
    list[Patch],
    CommaList,
    Field(max_length=MAX_PATCHES, description="Patches (row * columns + column) to replace with the mean color."),
]
Label = Annotated[str, Field(min_length=1, max_length=200)]


class Options(BaseModel):
    """Fields that every request may have in addition to its images."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str | None, Field(description="Name of a model; by default the first.")] = None

    @model_validator(mode="before")
    @classmethod
    def drop_empty(cls, content: Any) -> Any:
        """Form fields that were left empty have their default value."""
        return {k: v for k, v in content.items() if v != ""} if isinstance(content, dict) else content


class PredictOptions(Options):
    top: Annotated[int, Field(ge=1, le=MAX_TOP, description="Predictions per image.")] = 5
    erased: ErasedPatches = []
    labels: Annotated[
        list[Label],
        CommaList,
        Field(max_length=MAX_LABELS, description="Labels for zero-shot classification with CLIP and SigLIP."),
    ] = []
    template: Annotated[
        str | None,
        Field(max_length=200, description="Prompt template for labels: a text with {}, `imagenet` or `imagenet-7`."),
    ] = None


class ExplainOptions(Options):
    maps: Annotated[list[Method], CommaList, Field(min_length=1, max_length=3, description="Maps to compute.")] = list(
        METHODS
    )
    layer: Annotated[int | None, LAYER] = None
    head: Annotated[int | None, Field(ge=0, lt=1000, description="Attention head; by default the mean of all.")] = None
    patch: Annotated[
        tuple[int, int] | None,
        CommaList,
        Field(description="Row and column of the query patch; by default the token that the head reads."),
    ] = None
    target: Annotated[str, Field(max_length=200, description="Class to explain, by label or index.")] = ""


class InspectOptions(Options):
    parts: Annotated[list[Part], CommaList, Field(min_length=1, max_length=len(PARTS), description="Parts to return.")]
    layer: Annotated[int, LAYER] = -1
    target: Annotated[
        int | None, Field(ge=0, lt=2**31, description="Class index for `gradient`; by default the top prediction.")
    ] = None
    erased: ErasedPatches = []


class EncodedImage(BaseModel):
    """One image of a JSON request."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Field(description="The file in base64, or a data URL.")]
    name: Annotated[str, Field(max_length=500, description="Returned in the response.")] = ""


class RankedClass(BaseModel):
    label: str
    index: int
    probability: float


class PredictResult(BaseModel):
    name: str
    predictions: list[RankedClass] | None = None
    rejected: Annotated[bool, Field(description="The image shows none of the model's classes.")] = False
    error: str | None = None


class PredictResponse(BaseModel):
    model: str
    results: list[PredictResult]


class EmbedResult(BaseModel):
    name: str
    vector: list[float] | None = None
    error: str | None = None


class EmbedResponse(BaseModel):
    model: str
    results: list[EmbedResult]


class ExplanationMap(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    map: str
    title: str
    class_: Annotated[int | None, Field(alias="class")]
    values: list[list[float]]
    overlay: Annotated[str, Field(description="PNG in base64.")]


class ExplainResponse(BaseModel):
    model: str
    name: str
    predictions: list[RankedClass]
    crop: Annotated[list[float], Field(description="Left, top, right, bottom of the model's input, in pixels.")]
    maps: list[ExplanationMap]


class ErrorResponse(BaseModel):
    """Every response with a status other than 200."""

    error: str
    request_id: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "model": ErrorResponse}
    for status, description in {
        400: "Malformed body",
        401: "Missing or wrong API key",
        403: "Host or origin not allowed",
        404: "Unknown model",
        408: "The body arrived too slowly",
        413: "Too many bytes or images",
        415: "Neither a form nor JSON",
        422: "Invalid field, or no readable image",
        429: "The queue is full; see Retry-After",
        503: "Shutting down, or timed out",
    }.items()
}


def body_schema(options: type[Options], *, max_images: int) -> dict[str, Any]:
    """The OpenAPI schema of a request body: a form with files, or JSON with base64."""
    fields = options.model_json_schema(ref_template="#/components/schemas/{model}")

    def content(image: dict[str, Any], name: str) -> dict[str, Any]:
        images = {"type": "array", "minItems": 1, "maxItems": max_images, "items": image}
        return {
            "schema": {
                "type": "object",
                "properties": {name: images, **fields["properties"]},
                "required": [name, *fields.get("required", [])],
                "additionalProperties": False,
            }
        }

    form = content({"type": "string", "format": "binary"}, "image")
    return {
        "required": True,
        "content": {
            "multipart/form-data": form,
            "application/json": content(EncodedImage.model_json_schema(), "images"),
        },
    }


O = TypeVar("O", bound=Options)  # noqa: E741
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ImageRequest(Generic[O]):
    """The images of a request with their names, and its options."""

    names: list[str]
    images: list[bytes]
    options: O


async def read_request(request: Request, options: type[O], limits: ServiceLimits, max_images: int) -> ImageRequest[O]:
    """Parse and validate a request; raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        parsed = await read_form(request, options, limits)
    elif kind == "application/json":
        parsed = read_json(await request.body(), options, max_images)
    else:
        problem = f"not {kind}" if kind else "with a Content-Type"
        raise Refused(415, f"send multipart/form-data with files, or application/json with base64, {problem}")
    if not parsed.images:
        raise Refused(422, "no image in the request; send files in the form field 'image'")
    check_count(len(parsed.images), max_images)
    return parsed


def check_count(images: int, max_images: int) -> None:
    if images > max_images:
        raise Refused(413, f"{images} images are more than the limit of {max_images} per request")


async def read_form(request: Request, options: type[O], limits: ServiceLimits) -> ImageRequest[O]:
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
                    raise Refused(422, "the field 'image' has text, not a file; with curl use -F image=@photo.jpg")
                elif name in fields:
                    raise Refused(422, f"the field {name!r} occurs twice")
                else:
                    fields[name] = value
    except HTTPException as error:  # raised by Starlette for a malformed form and for too many fields
        raise Refused(400, f"malformed form: {error.detail}") from None
    return ImageRequest(names, images, validate_fields(options, fields))


def read_json(body: bytes, options: type[O], max_images: int) -> ImageRequest[O]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not valid JSON") from None
    if not isinstance(content, dict):
        raise Refused(422, 'the body is not a JSON object such as {"images": [{"data": "..."}]}')
    items = content.pop("images", [])
    if not isinstance(items, list):
        raise Refused(422, 'images: not a list such as [{"data": "..."}]')
    check_count(len(items), max_images)  # before any of them is validated
    images = [validate_fields(EncodedImage, item, f"images.{index}") for index, item in enumerate(items)]
    data = [decode_base64(image.data, index) for index, image in enumerate(images)]
    return ImageRequest([image.name for image in images], data, validate_fields(options, content))


def decode_base64(text: str, index: int) -> bytes:
    """The bytes of a base64 text or data URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, f"images.{index}.data: not base64") from None


def validate_fields(model: type[M], content: object, where: str = "") -> M:
    """The content as a `model`; raises Refused with the first invalid field."""
    if isinstance(content, dict) and len(content) > MAX_FIELDS:
        raise Refused(422, f"{where or 'the request'}: {len(content)} fields are more than the limit of {MAX_FIELDS}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join([*([where] if where else []), *map(str, first["loc"])])
        known = f"; known fields: {', '.join(model.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise Refused(422, f"{field or 'the request'}: {first['msg']}{known}") from None
