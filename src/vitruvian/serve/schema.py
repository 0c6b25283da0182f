"""What requests and responses look like, for checking and for the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vitruvian.explain.explainer import METHODS, Method
from vitruvian.serve.inside import PARTS, Part

MOST_TOP = 100
MOST_LABELS = 200
MOST_PATCHES = 1 << 16


def split(value: object) -> object:
    """A list as one text, as forms send it: `a,b`."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def absent(value: object) -> object:
    """An empty field of a form is one that was not filled in."""
    return None if value == "" else value


Layer = Annotated[int, Field(ge=-1000, lt=1000, description="Layer, from 0; -1 is the last.")]
Erased = Annotated[
    list[Annotated[int, Field(ge=0, lt=MOST_PATCHES)]],
    BeforeValidator(split),
    Field(
        max_length=MOST_PATCHES,
        description="Patches (row * columns + column) painted in the view's mean color first.",
    ),
]


class Options(BaseModel):
    """Fields that every request may have beside its images."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str | None, BeforeValidator(absent), Field(description="Name of a model; else the first.")] = None


class PredictOptions(Options):
    top: Annotated[int, Field(ge=1, le=MOST_TOP, description="Answers for each image.")] = 5
    erased: Erased = []
    labels: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]],
        BeforeValidator(split),
        Field(max_length=MOST_LABELS, description="Words to choose among; for CLIP and SigLIP."),
    ] = []
    template: Annotated[
        Annotated[str, Field(max_length=200)] | None,
        BeforeValidator(absent),
        Field(description="What the words stand in: a text with {}, `imagenet` or `imagenet-7`."),
    ] = None


class ExplainOptions(Options):
    maps: Annotated[
        list[Method], BeforeValidator(split), Field(min_length=1, max_length=3, description="Maps to make.")
    ] = list(METHODS)
    layer: Annotated[Layer | None, BeforeValidator(absent)] = None
    head: Annotated[
        Annotated[int, Field(ge=0, lt=1000)] | None,
        BeforeValidator(absent),
        Field(description="Head of the attention; else the mean."),
    ] = None
    patch: Annotated[
        tuple[int, int] | None,
        BeforeValidator(absent),
        BeforeValidator(split),
        Field(description="Row and column that attention looks from; else where the answer is read."),
    ] = None
    target: Annotated[str, Field(max_length=200, description="Class to explain, by label or number.")] = ""


class InspectOptions(Options):
    parts: Annotated[
        list[Part], BeforeValidator(split), Field(min_length=1, max_length=len(PARTS), description="What to look at.")
    ]
    layer: Layer = -1
    target: Annotated[
        Annotated[int, Field(ge=0, lt=2**31)] | None,
        BeforeValidator(absent),
        Field(description="Class that `gradient` is about; else the best answer."),
    ] = None
    erased: Erased = []


class Image(BaseModel):
    """One image of a JSON request."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Field(description="The file in base64, or a data URL.")]
    name: Annotated[str, Field(max_length=500, description="Comes back in the response.")] = ""


class Answer(BaseModel):
    label: str
    index: int
    probability: float


class Predicted(BaseModel):
    name: str
    answers: list[Answer] | None = None
    none_of_these: Annotated[bool, Field(description="The image shows none of the model's classes.")] = False
    error: str | None = None


class Predictions(BaseModel):
    model: str
    predictions: list[Predicted]


class Embedded(BaseModel):
    name: str
    vector: list[float] | None = None
    error: str | None = None


class Embeddings(BaseModel):
    model: str
    embeddings: list[Embedded]


class Map(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    map: str
    title: str
    class_: Annotated[int | None, Field(alias="class")]
    values: list[list[float]]
    overlay: Annotated[str, Field(description="PNG in base64.")]


class Explanation(BaseModel):
    model: str
    name: str
    answers: list[Answer]
    seen: Annotated[list[float], Field(description="Left, top, right, bottom of what the model sees, in pixels.")]
    maps: list[Map]


class Problem(BaseModel):
    """Every response that is not 200."""

    error: str
    request_id: str


def body_schema(options: type[Options], *, most_images: int) -> dict[str, Any]:
    """OpenAPI's description of a body: a form with files, or JSON with base64."""
    fields = options.model_json_schema(ref_template="#/components/schemas/{model}")
    image = Image.model_json_schema()
    many = {"type": "array", "minItems": 1, "maxItems": most_images}
    required = fields.get("required", [])

    def described(images: dict[str, Any], name: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: {**many, "items": images}, **fields["properties"]},
            "required": [name, *required],
            "additionalProperties": False,
        }

    form = described({"type": "string", "format": "binary"}, "image")
    return {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": form},
            "application/json": {"schema": described(image, "images")},
        },
    }
