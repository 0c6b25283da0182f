"""Requests and responses: their schema, for validation and OpenAPI, and the parser of forms and JSON."""

import base64
import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response

from vitruvian.errors import UnknownNameError
from vitruvian.explain.explainer import METHODS, Method
from vitruvian.serve.batching import Refused, ServiceLimits
from vitruvian.serve.inspection import PARTS, Part

MAX_TOP = 100
MAX_LABELS = 200
MAX_PATCHES = 1 << 16
MAX_FIELDS = 20


def split_commas(value: object) -> object:
    """Split a list that a form sends as `a,b`."""
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
        int | None, Field(ge=0, lt=2**31, description="Class index for maps; by default the top prediction.")
    ] = None
    token: Annotated[int, Field(ge=0, lt=2 * MAX_PATCHES, description="Token of `trace`.")] = 0
    erased: ErasedPatches = []


class EncodedImage(BaseModel):
    """One image of a JSON request."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Field(description="The file in base64, or a data URL.")]
    name: Annotated[str, Field(max_length=500, description="Returned in the response.")] = ""


@cache
def api() -> dict[str, Any]:
    """The routes with examples and schemas of their responses, and the responses to errors, for OpenAPI."""
    content: dict[str, Any] = json.loads((files("vitruvian.serve") / "api.json").read_text(encoding="utf-8"))
    return content


def describe(path: str, *statuses: int) -> dict[str, Any]:
    """Summary and responses of a route: an example with its schema, and errors of these or else all kinds."""
    route, content = (
        api()["routes"][path],
        {"schema": {"$ref": "#/components/schemas/Problem"}, "example": api()["problem"]},
    )
    kind = "text/plain" if isinstance(route["response"], str) else "application/json"
    responses: dict[int | str, dict[str, Any]] = {
        200: {"content": {kind: {"schema": route["schema"], "example": route["response"]}}}
    }
    for status in statuses or map(int, api()["errors"]):
        about = api()["errors"][str(status)]
        responses[status] = {"description": about, "content": {"application/problem+json": content}}
    return {"summary": route["summary"], "responses": responses, "response_model": None, "response_class": Response}


def request_schema(options: type[Options], example: object, *, max_images: int) -> dict[str, Any]:
    """The OpenAPI schema of a request: a form with files, or JSON with base64; options may be query parameters."""
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
    as_json = {**content(EncodedImage.model_json_schema(), "images"), "example": example}
    body = {"required": True, "content": {"multipart/form-data": form, "application/json": as_json}}
    parameters = [
        {"name": name, "in": "query", "description": field.get("description", ""), "schema": field}
        for name, field in fields["properties"].items()
    ]
    return {"requestBody": body, "parameters": parameters}


O = TypeVar("O", bound=Options)  # noqa: E741
M = TypeVar("M", bound=BaseModel)
Parsed = tuple[list[str], list[bytes], dict[str, Any]]  # names and contents of the images, and the other fields
Pairs = Iterable[tuple[str, str]]  # names and values of form fields and query parameters; a name may occur repeatedly


async def read_request(
    request: Request, options: type[O], limits: ServiceLimits, max_images: int
) -> tuple[list[str], list[bytes], O]:
    """The names and the contents of the images of a request, and its options; raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        names, images, fields = await read_form(request, options, limits)
        field = "image"
    elif kind == "application/json":
        names, images, fields = read_json(await request.body(), max_images)
        field = "images"
    else:
        problem = f"not {kind}" if kind else "with a Content-Type"
        raise Refused(415, f"send multipart/form-data with files, or application/json with base64, {problem}")
    add_fields(options, fields, request.query_params.multi_items())
    validated = validate_fields(options, fields, known=(field,))
    if not images:
        raise Refused(422, "no image in the request; send files in the form field 'image'")
    check_count(len(images), max_images)
    return names, images, validated


def check_count(images: int, max_images: int) -> None:
    if images > max_images:
        raise Refused(413, f"{images} images are more than the limit of {max_images} per request")


def add_fields(options: type[Options], fields: dict[str, Any], pairs: Pairs) -> None:
    """Add pairs to the fields. A list, such as `labels`, may be repeated and grows; other fields occur once."""
    for name, value in pairs:
        if name not in fields:
            fields[name] = value
            continue
        before = split_commas(fields[name])
        if name not in options.model_fields or CommaList not in options.model_fields[name].metadata:
            raise Refused(422, f"the field {name!r} occurs twice")
        if not isinstance(before, list):
            raise Refused(422, f"{name}: not a list")
        fields[name] = [*before, *value.split(",")]


async def read_form(request: Request, options: type[Options], limits: ServiceLimits) -> Parsed:
    names: list[str] = []
    images: list[bytes] = []
    pairs: list[tuple[str, str]] = []
    fields: dict[str, Any] = {}
    try:
        async with request.form(max_files=limits.max_images + 1, max_fields=MAX_LABELS + MAX_FIELDS) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    if name != "image":
                        raise Refused(422, f"the file is in the field {name!r}; the field of files is 'image'")
                    names.append(value.filename or "")
                    images.append(await value.read())
                elif name == "image":
                    raise Refused(422, "the field 'image' has text, not a file; with curl use -F image=@photo.jpg")
                else:
                    pairs.append((name, value))
    except HTTPException as error:  # raised by Starlette for a malformed form and for too many fields
        raise Refused(400, f"malformed form: {error.detail}") from None
    add_fields(options, fields, pairs)
    return names, images, fields


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not valid JSON") from None
    if not isinstance(content, dict):
        raise Refused(422, 'the body is not a JSON object such as {"images": [{"data": "..."}]}')
    return content


def decode_base64(text: object, where: str) -> bytes:
    """The bytes of base64 or of a data URL."""
    try:
        if not isinstance(text, str):
            raise ValueError
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except ValueError:
        raise Refused(422, f"{where}: not base64") from None


def read_json(body: bytes, max_images: int) -> Parsed:
    content = parse_json(body)
    items = content.pop("images", [])
    if not isinstance(items, list):
        raise Refused(422, 'images: not a list such as [{"data": "..."}]')
    check_count(len(items), max_images)  # before any of them is validated
    images = [validate_fields(EncodedImage, item, f"images.{index}") for index, item in enumerate(items)]
    data = [decode_base64(image.data, f"images.{index}.data") for index, image in enumerate(images)]
    return [image.name for image in images], data, content


def validate_fields(model: type[M], content: object, where: str = "", known: tuple[str, ...] = ()) -> M:
    """The content as a `model`; raises Refused with the first invalid field. `known` are fields beside the model's."""
    if isinstance(content, dict) and len(content) > MAX_FIELDS:
        raise Refused(422, f"{where or 'the request'}: {len(content)} fields are more than the limit of {MAX_FIELDS}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "extra_forbidden":
            known = (*known, *model.model_fields)
            see = f"(known: {', '.join(known)})"
            unknown = UnknownNameError("field", str(first["loc"][0]), known, see=see, where=where or None)
            raise Refused(422, str(unknown)) from None
        field = ".".join([*([where] if where else []), *map(str, first["loc"])])
        raise Refused(422, f"{field or 'the request'}: {first['msg']}") from None
