"""The HTTP API: predictions equal to the library's, limits, refusals, keys, origins, logs."""

from __future__ import annotations

import base64
import io
import json
import logging
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_service import encoded, photo, tiny_vit

import vitruvian as vt
from vitruvian.data.preprocess import preprocess_image
from vitruvian.explain import attention_rollout, gradient_attention
from vitruvian.explain.overlay import seen_box
from vitruvian.inference import Classifier
from vitruvian.serve import service
from vitruvian.serve.batching import ServiceLimits
from vitruvian.serve.middleware import AccessPolicy


def file(content: bytes, name: str = "a.png"):
    return ("image", (name, content, "application/octet-stream"))


def as_json(content: bytes, name: str = "") -> dict[str, str]:
    return {"data": base64.b64encode(content).decode(), "name": name}


def unpacked(packed: dict) -> np.ndarray:
    if packed["bits"] == 32:
        return np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])
    levels = np.frombuffer(base64.b64decode(packed["data"]), "<u2" if packed["bits"] == 16 else "u1")
    values = packed["low"] + (packed["high"] - packed["low"]) * levels.astype(np.float64) / (2 ** packed["bits"] - 1)
    return values.reshape(packed["shape"])


def test_predictions_are_those_of_the_library(client, model):
    images = [photo(seed) for seed in range(5)]
    response = client.post("/predict", files=[file(image, f"{i}.png") for i, image in enumerate(images)])
    assert response.status_code == 200
    found = response.json()
    assert found["model"] == "tiny"
    assert [each["name"] for each in found["results"]] == [f"{i}.png" for i in range(5)]
    for each, expected in zip(found["results"], Classifier(model).predict(images, top=5)):
        assert [(a["label"], a["index"]) for a in each["predictions"]] == [(a.label, a.index) for a in expected]
        # batches of another size round differently
        assert [a["probability"] for a in each["predictions"]] == pytest.approx(
            [a.probability for a in expected], abs=1e-5
        )


@pytest.mark.openvino
def test_an_engine_predicts_and_every_batch_size_is_ready(client_of, model, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path))
    Classifier(model, engine="openvino").prepare(torch.zeros(1, 3, 32, 32))  # torch warns while it exports
    client = client_of({"tiny": model}, engine="openvino", limits=ServiceLimits(batch_size=3))
    monkeypatch.setattr("vitruvian.engines.choose.Session", None)  # no request waits for a graph
    assert client.get("/models").json()["models"][0]["engine"] == "openvino"
    for count in (1, 2, 5):
        images = [photo(seed) for seed in range(count)]
        found = client.post("/predict", files=[file(image) for image in images]).json()["results"]
        for each, expected in zip(found, Classifier(model).predict(images, top=1)):
            assert each["predictions"][0]["label"] == expected[0].label
            assert each["predictions"][0]["probability"] == pytest.approx(expected[0].probability, abs=1e-4)


def test_an_image_below_the_threshold_is_none_of_the_classes(client_of):
    model = tiny_vit()
    model.meta = model.meta.replace(threshold=1.0)
    found = client_of({"sure": model}).post("/predict", files=[file(photo(1))]).json()["results"][0]
    assert found["rejected"] is True
    assert len(found["predictions"]) == 5


def test_json_with_base64_or_data_urls_gives_the_same(client):
    image = photo(3)
    form = client.post("/predict", files=[file(image, "x")], data={"top": "2"}).json()
    plain = client.post("/predict", json={"images": [as_json(image, "x")], "top": 2}).json()
    url = {"data": "data:image/png;base64," + base64.b64encode(image).decode(), "name": "x"}
    assert form == plain == client.post("/predict", json={"images": [url], "top": 2}).json()
    assert len(form["results"][0]["predictions"]) == 2


def test_options_may_be_query_parameters_and_lists_may_be_repeated(client):
    image = photo(3)
    wanted = client.post("/predict", files=[file(image)], data={"top": "2", "erased": "0,1,5"}).json()
    assert len(wanted["results"][0]["predictions"]) == 2
    for request in (
        {"files": [file(image)], "params": {"top": 2, "erased": "0,1,5"}},
        {"files": [file(image)], "params": {"top": 2}, "data": {"erased": ["0", "1", "5"]}},
        {"files": [file(image)], "params": {"top": 2, "erased": [0, 1]}, "data": {"erased": "5"}},
        {"json": {"images": [as_json(image, "a.png")], "erased": [0, 1]}, "params": {"top": 2, "erased": 5}},
    ):
        assert client.post("/predict", **request).json() == wanted


@pytest.mark.parametrize("path", ["/health", "/ready", "/models", "/metrics", "/docs", "/page/main.js"])
def test_unknown_query_parameters_of_get_are_refused_by_name(client, path):
    for request in (client.get, client.head):
        assert request(path, params={"foo": 1, "a'b": 2}).status_code == 422
    response = client.get(path, params={"foo": 1, "a'b": 2})
    assert response.json()["error"] == "unknown query parameter 'foo', \"a'b\": this path has none"
    assert client.get("/", params={"from": "mail"}).status_code == 200


def test_head_has_the_headers_of_get(client):
    for path in ("/", "/health", "/page/main.js", "/models"):
        found, wanted = client.head(path), client.get(path)
        assert (found.status_code, found.content) == (200, b"")
        assert found.headers["content-length"] == wanted.headers["content-length"]
    assert client.head("/predict").status_code == 405


def test_the_page_is_compressed_and_sent_again_only_if_it_changed(client):
    plain = client.get("/page/main.js", headers={"Accept-Encoding": "identity"})
    small = client.get("/page/main.js", headers={"Accept-Encoding": "gzip"})
    assert (small.headers["content-encoding"], small.content) == ("gzip", plain.content)
    assert int(small.headers["content-length"]) < len(plain.content) / 2
    for path in ("/", "/page/main.js", "/page/digit3.png", "/docs"):
        again = client.get(path, headers={"If-None-Match": client.get(path).headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"If-None-Match": small.headers["etag"]}).status_code == 200


def test_refusals_count_under_their_route(client_of, model):
    client = client_of({"tiny": model}, access=AccessPolicy(api_key="k"), limits=ServiceLimits(max_bytes=1000))
    client.post("/predict", files=[file(photo())])
    client.post("/predict", content=b"x" * 2000, headers={"X-API-Key": "k"})
    client.post("/embed", files=[file(b"x")], headers={"Origin": "http://evil.example"})
    client.get("/wp-login.php")
    text = client.get("/metrics", headers={"X-API-Key": "k"}).text
    for route, status in (("/predict", 401), ("/predict", 413), ("/embed", 403), ("other", 401)):
        assert f'vit_requests_total{{route="{route}",status="{status}"}} 1.0' in text


def test_openapi_describes_the_key_and_the_query(client_of, model):
    schema = client_of({"tiny": model}, access=AccessPolicy(api_key="k")).get("/openapi.json").json()
    assert schema["components"]["securitySchemes"]["bearer"] == {"type": "http", "scheme": "bearer"}
    assert schema["paths"]["/predict"]["post"]["security"] == [{"bearer": []}, {"key": []}]
    assert schema["paths"]["/health"]["get"]["security"] == []
    assert "top" in [parameter["name"] for parameter in schema["paths"]["/predict"]["post"]["parameters"]]


def test_the_examples_of_the_documentation_work_as_they_stand(client):
    docs = client.get("http://localhost:8123/docs").text
    commands = re.findall(r"curl (.*?) (http://localhost:8123\S+)</pre>", docs)
    assert [url.rpartition("/")[2] for _, url in commands] == ["predict", "embed", "explain", "inspect"]
    assert "POST /v1/embeddings" in docs
    for options, url in commands:
        data = dict(option.split("=") for option in options.split(" ") if "=" in option and "@" not in option)
        assert client.post(url, files=[file(photo())], data=data).status_code == 200


def test_one_bad_image_does_not_spoil_the_others(client):
    files = [file(photo(1)), file(b"not an image", "bad.txt"), file(photo(2))]
    found = client.post("/predict", files=files).json()["results"]
    assert ["error" in each for each in found] == [False, True, False]
    assert "not an image" in found[1]["error"]
    alone = client.post("/predict", files=files[:1]).json()["results"][0]
    for a, b in zip(found[0]["predictions"], alone["predictions"]):
        assert a["index"] == b["index"]
        assert a["probability"] == pytest.approx(b["probability"], abs=1e-6)  # batches round differently


BAD = {
    "empty": (b"", "the file is empty"),
    "truncated": (photo(0, size=(400, 400), kind="JPEG")[:900], "broken"),
    "text": (b"hello", "not an image"),
    "pickle": (pickle.dumps({"a": torch.zeros(2)}), "not an image"),
    "page": (b"<html><script>alert(1)</script>", "a web page"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("route", ["/predict", "/embed", "/explain", "/inspect"])
def test_a_bad_upload_is_422_with_a_sentence(client, kind, route):
    content, text = BAD[kind]
    response = client.post(route, files=[file(content)], data={"parts": "input"} if route == "/inspect" else {})
    assert response.status_code == 422
    assert text in response.json()["error"]
    assert response.json()["request_id"] == response.headers["x-request-id"]


@pytest.mark.slow
def test_a_bomb_is_refused_before_it_is_unpacked(client_of, model):
    client = client_of({"tiny": model}, limits=ServiceLimits(max_pixels=10_000))
    bomb = encoded(Image.new("L", (20_000, 20_000)))
    assert len(bomb) < 1_000_000
    response = client.post("/predict", files=[file(bomb)])
    assert response.status_code == 422
    assert "20000x20000 pixels" in response.json()["error"]


def test_vectors_are_the_features_the_head_reads(client, model):
    found = client.post("/embed", files=[file(photo(4))]).json()["results"][0]["vector"]
    encoder = Classifier(model)
    pixels = preprocess_image(photo(4), model.meta.preprocess)
    assert found == pytest.approx(encoder.features(pixels[None])[0].tolist(), abs=1e-5)


def test_explanations_have_arrays_and_overlays(client, model):
    found = client.post(
        "/explain", files=[file(photo(5))], data={"maps": "gradient,rollout", "target": "class 2"}
    ).json()
    assert [each["map"] for each in found["maps"]] == ["gradient", "rollout"]
    assert found["maps"][0]["class"] == 2
    pixels = preprocess_image(photo(5), model.meta.preprocess)
    expected = {
        "rollout": attention_rollout(model, pixels[None])[0],
        "gradient": gradient_attention(model, pixels[None], [2])[0],
    }
    for each in found["maps"]:
        np.testing.assert_allclose(each["values"], expected[each["map"]].numpy(), rtol=1e-4, atol=1e-6)
        assert Image.open(io.BytesIO(base64.b64decode(each["overlay"]))).size == (288, 240)


def test_inside_a_model_every_part_is_what_the_model_computes(client, model):
    parts = "input,layers,rollout,gradient,attention,similarity"
    found = client.post("/inspect", files=[file(photo(6))], data={"parts": parts, "layer": "0"}).json()
    pixels = preprocess_image(photo(6), model.meta.preprocess)
    assert found["grid"] == [4, 4]
    attention = unpacked(found["attention"])
    with torch.no_grad():
        _, expected = next(model.attention_maps(pixels[None], [0]))
        blocks = model.forward_intermediates(pixels[None], ["block_0", "logits"])
    np.testing.assert_allclose(attention, expected[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(attention.sum(axis=-1), 1, atol=1e-3)
    np.testing.assert_allclose(unpacked(found["rollout"]), attention_rollout(model, pixels[None])[0].numpy(), atol=1e-4)
    similarity = unpacked(found["similarity"])
    np.testing.assert_allclose(np.diag(similarity), 1, atol=1e-3)
    a, b = blocks["block_0"][0, 1], blocks["block_0"][0, 2]
    assert similarity[0, 1] == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), abs=1e-3)
    layers = found["layers"]
    final = blocks["logits"][0].softmax(dim=-1)
    assert layers["probabilities"][-1][0] == pytest.approx(float(final.max()), abs=1e-5)
    assert len(layers["probabilities"]) == 3
    assert layers["classes"][layers["best"][-1]]["index"] == int(final.argmax())
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["input"]))))
    np.testing.assert_allclose(shown, ((pixels * 0.5 + 0.5) * 255).permute(1, 2, 0).numpy(), atol=0.51)


@pytest.mark.parametrize("settings", [{}, {"cls_token": False, "pool": "mean"}, {"reg_tokens": 4}, {"pre_norm": True}])
def test_the_steps_through_a_model_are_its_intermediates(client_of, settings):
    model = tiny_vit(3, **settings)
    client = client_of({"tiny": model})
    pixels = preprocess_image(photo(6), model.meta.preprocess)[None]
    names = ["embedded", "block_0/attention", "block_0", "block_1/attention", "block_1", "pooled", "logits"]
    with torch.no_grad():
        expected = model.forward_intermediates(pixels, names)
    T = model.config.prefix_tokens
    for token in (0, T + 5):
        fields = {"parts": "trace,heads,layers", "token": str(token)}
        found = client.post("/inspect", files=[file(photo(6))], data=fields).json()
        trace = {name: unpacked(value) for name, value in found["trace"].items()}
        for row, name in enumerate(("embedded", "block_0", "block_1")):
            np.testing.assert_allclose(trace["vectors"][row], expected[name][0, token].numpy(), atol=1e-5)
        np.testing.assert_allclose(trace["pooled"], expected["pooled"][0].numpy(), atol=1e-5)
        assert ("patch" in trace) == (token >= T)
    with torch.no_grad():
        total = torch.from_numpy(trace["patch"] + trace["position"])
        np.testing.assert_allclose(model.embed.norm(total), expected["embedded"][0, token].numpy(), atol=1e-5)
    heads, received = unpacked(found["heads"]), unpacked(found["received"])
    for layer in range(2):
        attention = expected[f"block_{layer}/attention"][0]
        rows = attention[:, 0] if model.config.pool == "token" else attention.mean(dim=1)
        np.testing.assert_allclose(heads[layer], rows[:, T:].numpy(), atol=1e-4)
        np.testing.assert_allclose(received[layer], attention.mean(dim=(0, 1))[T:].numpy(), atol=1e-4)
    order = [each["index"] for each in found["layers"]["classes"]]
    np.testing.assert_allclose(found["layers"]["logits"][-1], expected["logits"][0, order].numpy(), atol=1e-5)
    refused = client.post("/inspect", files=[file(photo(6))], data={"parts": "trace", "token": "99"})
    assert refused.status_code == 422
    assert f"tokens are numbered from 0 to {T + 15}" in refused.text


def test_maps_are_scored_by_deletion_and_the_input_has_its_frame(client, model):
    found = client.post("/inspect", files=[file(photo(6))], data={"parts": "scores", "target": "2"}).json()
    assert set(found["scores"]) == {"class", "rollout", "attention", "random"}
    assert all(0 < score < 1 for score in found["scores"].values())
    found = client.post("/inspect", files=[file(photo(6, size=(60, 40)))], data={"parts": "input"}).json()
    assert found["size"] == [40, 60]
    assert found["crop"] == pytest.approx(seen_box((40, 60), model.meta.preprocess))


def test_erased_patches_change_the_answer_and_all_of_them_leave_the_mean_color(client, model):
    whole = client.post("/predict", files=[file(photo(7))]).json()["results"][0]
    part = client.post("/predict", files=[file(photo(7))], data={"erased": "0,1,5"}).json()["results"][0]
    assert part != whole
    every = ",".join(map(str, range(16)))
    blank = client.post("/predict", files=[file(photo(7))], data={"erased": every}).json()["results"][0]
    pixels = preprocess_image(photo(7), model.meta.preprocess)
    mean = pixels.mean(dim=(1, 2), keepdim=True).expand_as(pixels)
    expected = Classifier(model).logits(mean[None]).softmax(dim=-1)[0]
    assert blank["predictions"][0]["probability"] == pytest.approx(float(expected.max()), abs=1e-5)


def test_a_second_model_is_chosen_by_its_name(client_of, model):
    client = client_of({"one": model, "two": tiny_vit(1)})
    one, two = (
        client.post("/predict", files=[file(photo())], data={"model": name}).json()["results"][0]["predictions"]
        for name in ("one", "two")
    )
    assert one != two
    assert client.post("/predict", files=[file(photo())]).json()["model"] == "one"
    assert [each["name"] for each in client.get("/models").json()["models"]] == ["one", "two"]
    unknown = client.post("/predict", files=[file(photo())], data={"model": "tow"})
    assert unknown.status_code == 404
    assert "unknown model 'tow'; did you mean two" in unknown.json()["error"]


def test_a_model_without_a_head_gives_vectors_and_says_so(client_of):
    client = client_of({"features": tiny_vit(num_classes=0)})
    assert client.post("/embed", files=[file(photo())]).status_code == 200
    response = client.post("/predict", files=[file(photo())])
    assert response.status_code == 422
    assert "has no head" in response.json()["error"]
    assert client.post("/inspect", files=[file(photo())], data={"parts": "layers"}).status_code == 422


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "not text/plain"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "not valid JSON"),
        ({"json": [1]}, 422, "not a JSON object"),
        ({"json": {}}, 422, "no image in the request"),
        ({"json": {"images": [{"data": "%%"}]}}, 422, "images.0.data: not base64"),
        ({"json": {"images": [as_json(b"x")], "tpo": 1}}, 422, "unknown field 'tpo'; did you mean top? (known: "),
        ({"json": {"image": [as_json(b"x")]}}, 422, "unknown field 'image'; did you mean images"),
        (
            {"json": {"images": [as_json(b"x") | {"nmae": ""}]}},
            422,
            "images.0: unknown field 'nmae'; did you mean name",
        ),
        ({"files": [file(b"x")], "data": {"topk": "1"}}, 422, "unknown field 'topk'; did you mean top?"),
        ({"files": [file(b"x")], "params": {"tops": "1"}}, 422, "unknown field 'tops'; did you mean top?"),
        ({"files": [file(b"x")], "params": {"top": "1"}, "data": {"top": "1"}}, 422, "the field 'top' occurs twice"),
        ({"json": {"images": [as_json(b"x")], "erased": 5}, "params": {"erased": "1"}}, 422, "erased: not a list"),
        ({"files": [file(b"x")], "data": {"top": "0"}}, 422, "top: Input should be greater than or equal to 1"),
        ({"files": [file(b"x")], "data": {"erased": "a"}}, 422, "erased.0"),
        ({"files": [("photo", ("a", b"x"))]}, 422, "the field of files is 'image'"),
        ({"data": {"top": "1"}, "files": {"image": (None, "text")}}, 422, "has text, not a file"),
        ({"files": [file(b"x")] * 5}, 413, "5 images are more than the limit of 4"),
        ({"content": b"junk", "headers": {"content-type": "multipart/form-data"}}, 400, "malformed form"),
        ({"files": [file(b"x" * 200_000)]}, 413, "more than 0.1 MB"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(client_of, model, request_, status, text):
    client = client_of({"tiny": model}, limits=ServiceLimits(max_images=4, max_bytes=100_000))
    response = client.post("/predict", **request_)
    assert response.status_code == status
    assert text in response.json()["error"]


def test_a_full_queue_is_429_with_a_time_to_come_back(client_of, model):
    client = client_of({"tiny": model}, limits=ServiceLimits(queue=2))
    too_many = client.post("/predict", files=[file(photo())] * 3)
    assert too_many.status_code == 429
    assert int(too_many.headers["retry-after"]) >= 1
    with client.service.models["tiny"].batcher.reserve(2):
        response = client.post("/predict", files=[file(photo())])
    assert response.status_code == 429
    assert response.json()["error"].startswith("the queue is full; try again in")
    assert client.post("/predict", files=[file(photo())]).status_code == 200


def test_a_full_service_reports_the_shortest_retry_time_of_its_models(client_of, model):
    """Before the body is read it is not known which model is asked for."""
    client = client_of({"slow": model, "quick": tiny_vit(1)}, limits=ServiceLimits(queue=2))
    slow, quick = (client.service.models[name].batcher for name in ("slow", "quick"))
    slow.seconds_per_image, quick.seconds_per_image = 20.0, 2.5
    with slow.reserve(2), quick.reserve(2):
        response = client.post("/predict", files=[file(photo())], data={"model": "quick"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "5")
    with slow.reserve(2):
        response = client.post("/predict", files=[file(photo())], data={"model": "slow"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "40")


def test_a_result_that_takes_too_long_is_given_up(client_of, model):
    client = client_of({"tiny": model}, limits=ServiceLimits(max_seconds=0.2))
    served, gate = client.service.models["tiny"], threading.Event()
    served.batcher.reserve(1).put(served.call, [lambda: gate.wait(20)])
    response = client.post("/predict", files=[file(photo())])
    gate.set()
    assert response.status_code == 503
    assert response.json()["error"] == "no result within 0.2 s"


def test_an_image_that_takes_too_long_to_decode_is_given_up(client_of, model, monkeypatch):
    client = client_of({"tiny": model}, limits=ServiceLimits(max_seconds=0.2))
    gate = threading.Event()
    monkeypatch.setattr(service, "load_upload", lambda *_: gate.wait(20))
    response = client.post("/predict", files=[file(photo())])
    gate.set()
    assert response.status_code == 503
    assert response.json()["error"] == "no result within 0.2 s"
    assert client.service.models["tiny"].batcher.accepted == 0


def test_images_that_take_long_to_decode_delay_no_others(client_of, model, monkeypatch):
    """They wait for a process of their own, outside of the queue."""
    gate, started, load = threading.Event(), threading.Event(), service.DecodingProcess.load

    def gated(process):
        started.set()
        assert gate.wait(60)
        return load(process)

    monkeypatch.setattr(service.DecodingProcess, "load", gated)
    client = client_of({"tiny": model}, limits=ServiceLimits(queue=8))
    costly, small = encoded(Image.new("L", (2100, 2000))), photo()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/predict", files=[file(data) for data in (costly, small, costly, costly)])
        assert started.wait(60)
        refused = client.post("/predict", files=[file(costly), file(costly)])
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        assert [client.post("/predict", files=[file(small)] * 7).status_code for _ in range(3)] == [200] * 3
        gate.set()
        results = waiting.result().json()["results"]
    best = [result["predictions"][0]["index"] for result in results]
    expected = Classifier(model).predict([costly, small, costly, costly], top=1)
    assert best == [predictions[0].index for predictions in expected]
    assert client.service.models["tiny"].batcher.accepted == 0
    assert client.post("/predict", files=[file(costly)] * 2).status_code == 200


def test_an_unforeseen_error_is_500_without_details(client, monkeypatch, caplog):
    def surprise(*_: object) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr(client.service, "find_model", surprise)
    response = client.post("/predict", files=[file(photo())])
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["request_id"]


def test_a_key_is_wanted_where_one_is_set_and_never_logged(client_of, model, caplog):
    client = client_of({"tiny": model}, access=AccessPolicy(api_key="s3cret-key"))
    with caplog.at_level(logging.INFO, "vitruvian.serve.access"):
        refused = client.post("/predict", files=[file(photo())])
        wrong = client.post("/predict", files=[file(photo())], headers={"X-API-Key": "wrong-key"})
        good = client.post("/predict?model=tiny", files=[file(photo())], headers={"X-API-Key": "s3cret-key"})
        bearer = client.post("/predict", files=[file(photo())], headers={"Authorization": "Bearer s3cret-key"})
    assert [r.status_code for r in (refused, wrong, good, bearer)] == [401, 401, 200, 200]
    assert refused.json()["error"] == "an API key is required"
    assert [client.get(path).status_code for path in ("/health", "/ready", "/")] == [200, 200, 200]
    assert [client.get(path).status_code for path in ("/metrics", "/models")] == [401, 401]
    assert "key" not in caplog.text
    assert "s3cret" not in repr(AccessPolicy(api_key="s3cret-key"))


def test_pages_of_another_origin_and_other_hosts_are_refused(client_of, model):
    client = client_of({"tiny": model}, access=AccessPolicy(hosts=("localhost",)))
    for headers, status in [
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "LOCALHOST:8000"}, 200),
    ]:
        response = client.post("/predict", files=[file(photo())], headers=headers)
        assert response.status_code == status, headers
        assert "access-control-allow-origin" not in response.headers
    assert client.options("/predict", headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page//etc/passwd"])
def test_a_path_cannot_escape_the_page(client, path):
    assert client.get(path).status_code == 404


def test_every_request_has_an_id_and_one_line_in_the_log(client, caplog):
    with caplog.at_level(logging.INFO, "vitruvian.serve.access"):
        own = client.post("/predict?top=3", files=[file(photo())], headers={"X-Request-ID": "abc-1"})
        client.get("/health", headers={"X-Request-ID": "bad id\twith spaces"})
    assert own.headers["x-request-id"] == "abc-1"
    first, second = (json.loads(record.message) for record in caplog.records if record.name.endswith("access"))
    assert first["request_id"] == "abc-1"
    assert (first["path"], first["status"], first["images"], first["model"]) == ("/predict", 200, 1, "tiny")
    assert first["bytes"] > 100
    assert "top" not in json.dumps(first)
    assert len(second["request_id"]) == 16


def test_the_states_tell_of_the_service(client):
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/ready").json() == {"ready": True, "warming_up": []}
    client.post("/predict", files=[file(photo())] * 3)
    text = client.get("/metrics").text
    assert 'vit_requests_total{route="/predict",status="200"} 1.0' in text
    assert 'vit_batch_images_bucket{le="4.0",model="tiny"}' in text
    assert 'vit_accepted_images{model="tiny"} 0.0' in text
    facts = client.get("/models").json()["models"][0]
    assert facts["vit"] == {
        "depth": 2,
        "num_heads": 2,
        "width": 16,
        "stride": 8,
        "grid": [4, 4],
        "prefix_tokens": 1,
        "cls_token": True,
        "reg_tokens": 0,
        "pool": "token",
    }
    docs = client.get("/docs").text
    assert "POST /predict" in docs
    assert "<td><code>layer</code></td><td>Layer, from 0; -1 is the last.</td>" in docs
    assert "http" not in docs.replace("http://localhost", "").replace("HTTP", "")
    assert client.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]["content"].keys() == {
        "multipart/form-data",
        "application/json",
    }


def test_a_service_is_not_ready_before_every_batch_size_is_warm(model, monkeypatch):
    from starlette.testclient import TestClient

    from vitruvian.serve.app import create_app

    gate, sizes = threading.Event(), []
    logits = Classifier.logits

    def slow(self: Classifier, pixels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(pixels))
        assert gate.wait(20)
        return logits(self, pixels)

    monkeypatch.setattr(Classifier, "logits", slow)
    app, service = create_app({"tiny": model}, limits=ServiceLimits(batch_size=3))
    with TestClient(app, base_url="http://localhost") as client:
        response = client.get("/ready")
        assert (response.status_code, response.json()) == (503, {"ready": False, "warming_up": ["tiny"]})
        assert client.get("/health").status_code == 200
        gate.set()
        service.models["tiny"].warm.result(20)
        assert client.get("/ready").status_code == 200
    assert sizes == [1, 2, 3]


def test_the_page_has_the_colors_of_the_reports(client):
    from vitruvian.report.color import COLORS, color_map
    from vitruvian.report.html import environment

    base = client.get("/page/base.css").text
    assert base == environment().get_template("base.css").render() + "\n"
    assert all(f"--c{number}: {color};" in base for number, color in enumerate(COLORS))
    assert "page/base.css" in client.get("/").text
    assert "--c0:" not in client.get("/page/style.css").text
    anchors = client.get("/page/arrays.js").text.split("ANCHORS = [")[1].split("]")[0].replace('"', "").split(", ")
    places = np.rint(np.linspace(0, 255, len(anchors))).astype(int)
    found = np.array([list(bytes.fromhex(anchor)) for anchor in anchors])
    np.testing.assert_allclose(found, color_map()[places], atol=2)  # the places are between two of 256 steps


def test_the_page_and_its_files_come_from_the_package(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "https:" not in page.text
    for name, kind in [("main.js", "text/javascript"), ("style.css", "text/css"), ("cat.jpg", "image/jpeg")]:
        assert client.get(f"/page/{name}").headers["content-type"].startswith(kind)
    assert client.get("/page/digit7.png").headers["content-type"] == "image/png"
    assert client.get("/page/digit77.png").status_code == 404


@pytest.mark.slow
def test_an_exported_graph_predicts_and_reports_what_needs_the_weights(client_of, model, tmp_path):
    vt.export(model, tmp_path / "tiny.onnx")
    graph = vt.Classifier(tmp_path / "tiny.onnx").model
    client = client_of({"weights": model, "graph": graph})
    wanted, found = (
        client.post("/predict", files=[file(photo(3))], data={"model": name}).json()["results"][0]["predictions"]
        for name in ("weights", "graph")
    )
    assert [each["label"] for each in found] == [each["label"] for each in wanted]
    assert [each["probability"] for each in found] == pytest.approx([each["probability"] for each in wanted], abs=1e-5)
    facts = next(each for each in client.get("/models").json()["models"] if each["name"] == "graph")
    assert (facts["engine"], facts["vit"], facts["parameters"]) == ("onnxruntime", None, 0)
    messages = {
        "/explain": "an exported graph does not expose its attention",
        "/embed": "exported graphs return logits only",
    }
    for path, message in messages.items():
        assert message in client.post(path, files=[file(photo(3))], data={"model": "graph"}).text


def test_a_model_that_cannot_compute_a_test_image_is_not_ready(model, monkeypatch, caplog):
    from starlette.testclient import TestClient

    from vitruvian.serve.app import create_app

    class Panic(BaseException):
        """Libraries written in Rust raise such errors."""

    broken, panicking = tiny_vit(), tiny_vit()
    broken.meta = broken.meta.replace(preprocess=broken.meta.preprocess.replace(image_size=(40, 33)))
    monkeypatch.setattr(panicking, "forward", lambda *_: (_ for _ in ()).throw(Panic("index out of range")))
    app, service = create_app({"good": model, "broken": broken, "panicking": panicking})
    with TestClient(app, base_url="http://localhost") as client:
        for served in service.models.values():
            served.warm.exception(60)
        response = client.get("/ready")
        assert (response.status_code, response.json()["failed"]) == (503, ["broken", "panicking"])
        assert [facts["ready"] for facts in client.get("/models").json()["models"]] == [True, False, False]
        assert client.post("/predict", files=[file(photo())]).status_code == 200
    assert "broken is not ready: " in caplog.text
    assert "panicking is not ready: Panic: index out of range" in caplog.text


def test_the_fastest_engine_is_chosen_while_torch_serves(client_of, model, monkeypatch):
    gate, prepare = threading.Event(), Classifier.prepare

    def slow(self: Classifier, pixels: torch.Tensor) -> None:
        if self.engine == "auto":
            assert gate.wait(20)
            self._forward = self.model  # no measurement in a test
        prepare(self, pixels)

    monkeypatch.setattr(Classifier, "prepare", slow)
    client = client_of({"tiny": model}, engine="auto", limits=ServiceLimits(batch_size=2))
    served = client.service.models["tiny"]
    assert client.get("/ready").status_code == 200
    before = client.post("/predict", files=[file(photo())]).json()
    assert client.get("/models").json()["models"][0]["engine"] == "torch"
    gate.set()
    served.switch.join(20)
    assert client.get("/models").json()["models"][0]["engine"] == "auto"
    assert client.post("/predict", files=[file(photo())]).json() == before


def test_models_choose_their_engines_one_after_the_other(client_of, model, monkeypatch):
    active, most = [], []

    def prepare(self: Classifier, pixels: torch.Tensor) -> None:
        if self.engine == "auto":
            self._forward = self.model  # no measurement in a test
            active.append(self)
            most.append(len(active))
            threading.Event().wait(0.2)
            active.remove(self)

    monkeypatch.setattr(Classifier, "prepare", prepare)
    client = client_of({"one": model, "two": tiny_vit(1)}, engine="auto", limits=ServiceLimits(batch_size=1))
    for served in client.service.models.values():
        served.switch.join(20)
    assert most == [1] * 4
