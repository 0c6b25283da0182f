"""Protocols of other services over the same models: OpenAI's embeddings, and the Open Inference Protocol v2."""

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from vitruvian.errors import UnknownNameError
from vitruvian.inference import NOT_FINITE, probabilities_of
from vitruvian.serve.batching import BatchFunction, Refused, ServiceLimits
from vitruvian.serve.inspection import Json
from vitruvian.serve.requests import Options, check_count, decode_base64, parse_json, validate_fields
from vitruvian.serve.service import ServedModel, Service
from vitruvian.weights.zero_shot import text_encoder

MAX_TEXT = 10_000  # characters of a text; the tokenizer uses its first words only
MIN_BASE64 = 64  # characters of an image in base64; a word without spaces is shorter

Shape = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=4)]


class EmbeddingsOptions(Options):
    input: Annotated[
        list[str],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(min_length=1, description="Images as data URLs or in base64, and texts; one of them, or a list."),
    ]
    encoding_format: Annotated[Literal["float", "base64"], Field(description="Form of the vectors.")] = "float"
    dimensions: Annotated[int | None, Field(ge=1, description="Numbers to keep; by default all of them.")] = None
    user: Annotated[str | None, Field(max_length=1000, description="Ignored.")] = None

    def values(self) -> list[Any]:
        return self.input


class Named(BaseModel):
    """Something with a name; parameters are for other servers, and ignored."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] = {}


class InferInput(Named):
    name: Literal["images", "pixels"]
    shape: Annotated[Shape, Field(description="[images], or [images, channels, rows, columns].")]
    datatype: Annotated[Literal["BYTES", "FP32"], Field(description="BYTES for `images`, FP32 for `pixels`.")]
    data: Annotated[list[Any], Field(description="Images in base64, or preprocessed pixels.")]


class InferOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(max_length=200, description="Returned in the response.")] = ""
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[Named], Field(max_length=3, description="By default the first of the model.")] = []
    parameters: dict[str, Any] = {}

    def values(self) -> list[Any]:
        (tensor,) = self.inputs
        is_text = tensor.name == "images"
        if tensor.datatype != ("BYTES" if is_text else "FP32") or len(tensor.shape) != (1 if is_text else 4):
            raise Refused(422, "inputs.0: 'images' is BYTES of shape [N], 'pixels' is FP32 of shape [N, C, H, W]")
        try:
            return list(np.array(tensor.data, object if is_text else np.float32).reshape(tensor.shape))
        except (ValueError, TypeError, OverflowError):
            raise Refused(422, f"inputs.0.data: not {tensor.datatype} of shape {tensor.shape}") from None


async def read_values(
    request: Request, options: type[EmbeddingsOptions] | type[InferOptions], limits: ServiceLimits, max_images: int
) -> tuple[list[str], list[Any], EmbeddingsOptions | InferOptions]:
    """The values of a request and its options; raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", ""):  # Triton's client sends JSON without a type
        raise Refused(415, "send application/json; with Triton's client, set binary_data=False for every input")
    fields = validate_fields(options, parse_json(await request.body()))
    values = fields.values()
    check_count(len(values), max_images)
    return [], values, fields


def finite(vector: Tensor) -> Json:
    return {"vector": vector} if torch.isfinite(vector).all() else {"error": NOT_FINITE}


Images = dict[str, bytes | Tensor]  # files or pixels by the name of their field


async def vectors(
    service: Service, served: ServedModel, function: BatchFunction[Tensor, Tensor], images: Images
) -> list[Tensor]:
    """The vector of each image; raises Refused if there is none."""
    results = await service.process(served, function, list(images.values()), finite) if images else []
    for name, result in zip(images, results):
        if "error" in result:
            raise Refused(422, f"{name}: {result['error']}")
    return [result["vector"] for result in results]


async def embeddings(
    service: Service, served: ServedModel, values: Sequence[str], options: EmbeddingsOptions
) -> list[Json]:
    """Normalized vectors of images and texts."""
    images: Images = {}
    texts: dict[str, str] = {}
    for index, value in enumerate(values):
        name, is_text = f"input.{index}", len(value) < MIN_BASE64 or not value.isascii() or " " in value
        if served.accepts_labels and is_text and not value.startswith("data:"):
            texts[name] = value
        else:
            images[name] = decode_base64(value, name)
    if any(len(text) > MAX_TEXT for text in texts.values()):
        raise Refused(422, f"a text has more than {MAX_TEXT:,} characters")
    embeddings = dict(zip(images, await vectors(service, served, served.embed, images)))
    if texts:
        with served.batcher.reserve(1) as reservation:
            encode = partial(text_encoder(served.encoder.torch_model).embed, list(texts.values()))
            embeddings |= zip(texts, await service.call(reservation, served, encode))
    results: list[Json] = []
    for index in range(len(values)):
        vector = embeddings[f"input.{index}"].float().cpu()
        if options.dimensions is not None and options.dimensions > len(vector):
            raise Refused(422, f"dimensions: at most {len(vector)}, the length of this model's vectors")
        vector = torch.nn.functional.normalize(vector[: options.dimensions], dim=0)
        packed = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        results.append({"embedding": packed if options.encoding_format == "base64" else vector.tolist()})
    return results


def embeddings_response(served: ServedModel, names: object, results: list[Json], options: object) -> Json:
    data = [{"object": "embedding", "index": index, **result} for index, result in enumerate(results)]
    return {"object": "list", "model": served.name, "data": data, "usage": {"prompt_tokens": 0, "total_tokens": 0}}


Output = tuple[BatchFunction[Tensor, Tensor], Callable[[Tensor], Tensor], int]  # function, what follows, width


def outputs_of(served: ServedModel) -> dict[str, Output]:
    """The outputs of a model by name; the first is the default."""
    config = served.model.config
    outputs: dict[str, Output] = {}
    if config.num_classes:
        outputs["logits"] = (served.classify, Tensor.float, config.num_classes)
        outputs["probabilities"] = (served.classify, partial(probabilities_of, served.model), config.num_classes)
    if width := served.facts()["feature_dim"]:
        outputs["features"] = (served.embed, Tensor.float, width)
    return outputs


def metadata(served: ServedModel) -> Json:
    """Inputs and outputs of a model."""
    preprocess = served.model.meta.preprocess
    shape = [-1, len(preprocess.mean), *preprocess.image_size]
    images = {"name": "images", "datatype": "BYTES", "shape": [-1]}
    outputs = outputs_of(served).items()
    return {
        "name": served.name,
        "versions": [],
        "platform": "pytorch",
        "inputs": [images, {"name": "pixels", "datatype": "FP32", "shape": shape}],
        "outputs": [{"name": name, "datatype": "FP32", "shape": [-1, width]} for name, (_, _, width) in outputs],
    }


async def infer(service: Service, served: ServedModel, values: Sequence[Any], options: InferOptions) -> list[Json]:
    """The requested outputs for images or pixels."""
    outputs = outputs_of(served)
    names = [output.name for output in options.outputs] or list(outputs)[:1]
    for name in names:
        if name not in outputs:
            raise Refused(422, str(UnknownNameError("output", name, outputs, see=f"(here: {', '.join(outputs)})")))
    preprocess = served.model.meta.preprocess
    shape = (len(preprocess.mean), *preprocess.image_size)
    images: Images = {}
    for index, value in enumerate(values):
        where = f"inputs.0.data.{index}"
        if isinstance(value, np.ndarray) and (value.shape != shape or not np.isfinite(value).all()):
            raise Refused(422, f"{where}: expected finite pixels of shape {list(shape)}")
        images[where] = torch.from_numpy(value) if isinstance(value, np.ndarray) else decode_base64(value, where)
    functions = {outputs[name][0] for name in names}
    rows = {function: await vectors(service, served, function, images) for function in functions}
    results: list[Json] = []
    for name in names:
        function, finish, _ = outputs[name]
        output = finish(torch.stack(rows[function])).float().cpu()
        data = output.flatten().tolist()
        results.append({"name": name, "datatype": "FP32", "shape": list(output.shape), "data": data})
    return results


def infer_response(served: ServedModel, names: object, results: list[Json], options: InferOptions) -> Json:
    return {"model_name": served.name, **({"id": options.id} if options.id else {}), "outputs": results}


ROUTES: dict[str, tuple[Any, Any, Any]] = {  # by path: fields, function and response
    "/v1/embeddings": (EmbeddingsOptions, embeddings, embeddings_response),
    "/v2/models/{name}/infer": (InferOptions, infer, infer_response),
}
