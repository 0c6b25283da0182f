"""Clients of other services: OpenAI's, Triton's for the Open Inference Protocol, and problem details for all errors."""

from __future__ import annotations

import base64
import json

import httpx
import jsonschema
import numpy as np
import pytest
import torch
from processes import Process
from tiny_service import photo, tiny_vit
from two_towers import save_clip

import vitruvian as vt
from vitruvian.data.preprocess import preprocess_image
from vitruvian.inference import Classifier

KEY = "sk-test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    vt.save(tiny_vit(), folder / "tiny")
    save_clip(folder / "clip")
    return folder


@pytest.fixture(scope="module")
def running(folder):
    models = ("--model", f"tiny={folder / 'tiny'}", "--model", f"clip={folder / 'clip'}", "--engine", "torch")
    process = Process(*models, environment={"VITRUVIAN_API_KEY": KEY})
    process.client.headers["x-api-key"] = KEY
    yield process
    process.close()


def text_of(image: bytes, prefix: str = "") -> str:
    return prefix + base64.b64encode(image).decode()


@pytest.fixture(scope="module")
def openai(running):
    package = pytest.importorskip("openai")
    with package.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def triton(running):
    package = pytest.importorskip("tritonclient.http")
    with package.InferenceServerClient(running.url.removeprefix("http://")) as client:
        yield client


def unit(vectors: object) -> np.ndarray:
    values = np.asarray(vectors)
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


@pytest.mark.slow
def test_the_openai_client_embeds_images_and_texts(openai, folder):
    image, texts = photo(1), ["a cat", "a dog " * 20]
    model = vt.load(folder / "clip")
    wanted = np.concatenate([unit(vt.embed_images(model, [image])), vt.embed_texts(model, texts).numpy()])
    inputs = [text_of(image, "data:image/png;base64,"), *texts]
    for form in (openai_default := {}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        response = openai.embeddings.create(model="clip", input=inputs, **form)
        assert [entry.index for entry in response.data] == [0, 1, 2]
        found = [entry.embedding for entry in response.data]
        if form.get("encoding_format") == "base64":
            found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
        np.testing.assert_allclose(np.array(found), wanted, atol=1e-5)
    assert not openai_default
    plain = openai.embeddings.create(model="clip", input=text_of(image)).data[0].embedding
    np.testing.assert_allclose(plain, wanted[0], atol=1e-5)


@pytest.mark.slow
def test_dimensions_are_the_first_numbers_normalized_again(openai, folder):
    whole, short = (
        np.array(openai.embeddings.create(model="tiny", input=[text_of(photo(2))], **more).data[0].embedding)
        for more in ({}, {"dimensions": 4})
    )
    wanted = vt.embed_images(vt.load(folder / "tiny"), [photo(2)])[0]
    np.testing.assert_allclose(whole, unit(wanted), atol=1e-5)
    np.testing.assert_allclose(short, unit(whole[:4]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": "no", "input": "a"}, 404, "unknown model 'no'"),
        ({"model": "tiny", "input": "a text is no image"}, 422, "input.0: not base64"),
        ({"model": "tiny", "input": [text_of(photo(1)), text_of(b"no")]}, 422, "input.1: image of 2 bytes: not an"),
        ({"model": "tiny", "input": text_of(photo(1)), "dimensions": 17}, 422, "dimensions: at most 16, the length of"),
        ({"model": "clip", "input": "x " * 6000}, 422, "more than 10,000 characters"),
        ({"model": "clip", "input": [[1, 2]]}, 422, "input.0: Input should be a valid string"),
        ({"model": "clip", "input": ["a"] * 33}, 413, "33 images are more than the limit of 32"),
    ],
)
def test_errors_of_the_openai_client_have_our_sentence(openai, fields, status, text):
    package = pytest.importorskip("openai")
    with pytest.raises(package.APIStatusError) as refused:
        openai.embeddings.create(**fields)
    assert refused.value.status_code == status
    assert text in refused.value.message


@pytest.mark.slow
def test_the_triton_client_infers_from_images_and_from_pixels(triton, folder):
    package = pytest.importorskip("tritonclient.http")
    key, model, images = {"x-api-key": KEY}, vt.load(folder / "tiny"), [photo(seed) for seed in range(3)]
    assert triton.is_server_live(headers=key)
    assert triton.is_server_ready(headers=key)
    assert triton.is_model_ready("tiny", headers=key)
    assert not triton.is_model_ready("absent", headers=key)
    about = triton.get_model_metadata("tiny", headers=key)
    assert about["inputs"][1] == {"name": "pixels", "datatype": "FP32", "shape": [-1, 3, 32, 32]}
    pixels = torch.stack([preprocess_image(image, model.meta.preprocess) for image in images])
    first = package.InferInput("images", [3], "BYTES")
    first.set_data_from_numpy(np.array([text_of(image) for image in images], object), binary_data=False)
    second = package.InferInput("pixels", [3, 3, 32, 32], "FP32")
    second.set_data_from_numpy(pixels.numpy(), binary_data=False)
    classifier = Classifier(model)
    logits = classifier.logits(pixels)
    wanted = {
        "logits": logits,
        "probabilities": logits.softmax(dim=-1),
        "features": classifier.features(pixels),
    }
    assert [output["name"] for output in about["outputs"]] == list(wanted)
    outputs = [package.InferRequestedOutput(name, binary_data=False) for name in wanted]
    for given in (first, second):
        result = triton.infer("tiny", [given], outputs=outputs, request_id="7", headers=key)
        assert result.get_response()["id"] == "7"
        for name, values in wanted.items():
            np.testing.assert_allclose(result.as_numpy(name), values.numpy(), atol=1e-5)
    with pytest.raises(
        package.InferenceServerException if hasattr(package, "InferenceServerException") else Exception
    ) as e:
        triton.infer("tiny", [second], outputs=[package.InferRequestedOutput("logit", binary_data=False)], headers=key)
    assert "unknown output 'logit'; did you mean logits" in str(e.value)


def tensor(name: str, datatype: str, shape: list[int], data: list) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        ({"inputs": []}, 422, "inputs: List should have at least 1 item"),
        ({"inputs": [tensor("images", "FP32", [1], ["x"])]}, 422, "'images' is BYTES of shape [N]"),
        ({"inputs": [tensor("images", "BYTES", [2], ["x"])]}, 422, "inputs.0.data: not BYTES of shape [2]"),
        ({"inputs": [tensor("images", "BYTES", [1], [5])]}, 422, "inputs.0.data.0: not base64"),
        ({"inputs": [tensor("pixels", "FP32", [1, 3, 2, 2], [0.0] * 12)]}, 422, "pixels of shape [3, 32, 32]"),
        ({"inputs": [tensor("pixels", "FP32", [1, 3, 2, 2], [[0.0], [1.0, 2.0]])]}, 422, "not FP32 of shape"),
        ({"inputs": [tensor("pixels", "FP32", [1, 3, 32, 32], [None] * 3072)]}, 422, "expected finite pixels"),
        ({"inputs": [tensor("images", "BYTES", [1], ["x"])], "model": "tiny"}, 422, "unknown field 'model'"),
        ({"inputs": [tensor("images", "BYTES", [33], ["x"] * 33)]}, 413, "33 images are more"),
    ],
)
def test_an_invalid_tensor_is_refused_with_a_sentence(client, content, status, text):
    response = client.post("/v2/models/tiny/infer", json=content)
    assert (response.status_code, text in response.json()["detail"]) == (status, True), response.text


def test_protocols_take_json_and_no_query(client):
    refused = client.post("/v2/models/tiny/infer", content=b"x", headers={"content-type": "application/octet-stream"})
    assert (refused.status_code, "binary_data=False" in refused.json()["detail"]) == (415, True)
    assert client.post("/v1/embeddings?model=tiny", json={"input": "a"}).status_code == 422
    assert client.get("/v2/models/absent").status_code == 404


def test_every_error_is_problem_details(client):
    for response in (
        client.get("/absent"),
        client.delete("/predict"),
        client.get("/health?a=1"),
        client.post("/predict", json={"images": [], "tpo": 1}),
        client.post("/predict", content=b"{", headers={"content-type": "application/json"}),
    ):
        problem = response.json()
        assert response.headers["content-type"] == "application/problem+json"
        assert (problem["type"], problem["status"]) == ("about:blank", response.status_code)
        assert problem["detail"] == problem["error"]
        assert problem["title"] in {
            "Not Found",
            "Method Not Allowed",
            "Unprocessable Entity",
            "Unprocessable Content",
        } | {"Bad Request"}
        assert problem["request_id"] == response.headers["x-request-id"]


def test_openapi_has_an_example_for_every_route_that_fits_its_schema(client):
    schema = client.get("/openapi.json").json()
    operations = [operation for methods in schema["paths"].values() for operation in methods.values()]
    assert len(operations) == 15
    for operation in operations:
        contents = [response["content"] for response in operation["responses"].values()]
        body = operation.get("requestBody", {"content": {}})["content"].get("application/json")
        for content in [each for kinds in contents for each in kinds.values()] + ([body] if body else []):
            jsonschema.validate(content["example"], {**content["schema"], "components": schema["components"]})


def test_responses_fit_the_schema(client):
    schema = client.get("/openapi.json").json()
    image = {"images": [{"data": text_of(photo(1))}]}
    bodies = {
        "/predict": image,
        "/embed": image,
        "/explain": image,
        "/inspect": {**image, "parts": ["layers"]},
        "/v1/embeddings": {"input": text_of(photo(1))},
        "/v2/models/{name}/infer": {"inputs": [tensor("images", "BYTES", [1], [text_of(photo(1))])]},
    }
    for path, methods in schema["paths"].items():
        url = path.replace("{name}", "tiny")
        response: httpx.Response = client.post(url, json=bodies[path]) if path in bodies else client.get(url)
        assert response.status_code == 200, response.text
        (operation,) = methods.values()
        ((kind, content),) = operation["responses"]["200"]["content"].items()
        value = response.text if kind == "text/plain" else json.loads(response.content)
        jsonschema.validate(value, {**content["schema"], "components": schema["components"]})
