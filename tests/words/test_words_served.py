"""`labels` in a request to the service are words for CLIP and SigLIP."""

from __future__ import annotations

import shutil

import pytest

import vitruvian as vt

pytest.importorskip("fastapi")


@pytest.fixture(scope="module")
def client(clip):
    from starlette.testclient import TestClient

    from vitruvian.serve.app import create_app

    plain = vt.create_model("ViT-Ti/16", depth=1, num_classes=3, image_size=32)
    app, service = create_app({"clip": vt.load(clip[0]), "plain": plain})
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        for served in service.models.values():
            served.warm.result(30)
        yield client


def test_a_request_brings_its_own_words(client, clip, photos):
    image = min(photos.rglob("*.png"))
    words = ["cat", "a dog", "bird"]
    (wanted,) = vt.Classifier(clip[0], labels=words, template="art of the {}.").predict([image])
    for form in (
        {"labels": "cat, a dog, bird"},
        {"labels": "bird, cat, a dog", "top": 2},
        {"labels": "cat, a dog, bird"},
    ):
        fields = form | {"template": "art of the {}."}
        response = client.post("/predict", files=[("image", ("a.png", image.read_bytes()))], data=fields)
        assert response.status_code == 200, response.text
        found = response.json()["results"][0]["predictions"]
        assert {a["label"]: a["probability"] for a in found} == pytest.approx(
            {a.label: a.probability for a in wanted[: form.get("top", 3)]}, abs=1e-5
        )


def test_models_say_whether_they_take_words(client):
    assert {each["name"]: each["accepts_labels"] for each in client.get("/models").json()["models"]} == {
        "clip": True,
        "plain": False,
    }


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {},
            "so it returns vectors (/embed) but no predictions; CLIP and SigLIP predict with `labels`",
        ),
        ({"labels": "cat", "model": "plain"}, "the model 'plain' has no text tower, so it does not accept labels"),
        ({"template": "a {}"}, "template needs labels"),
        ({"labels": "cat, dog, cat"}, "'cat' twice"),
        ({"labels": "cat", "template": "imagent"}, "did you mean imagenet"),
        ({"labels": ",".join(map(str, range(201)))}, "at most 200 items"),
    ],
)
def test_words_that_cannot_be_are_refused_with_a_sentence(client, photos, fields, text):
    image = min(photos.rglob("*.png")).read_bytes()
    response = client.post("/predict", files=[("image", ("a.png", image))], data=fields)
    assert response.status_code == 422
    assert text in response.json()["error"]


def test_a_damaged_tokenizer_leaves_vectors_and_is_not_called_a_missing_tower(clip, tmp_path, photos):
    from starlette.testclient import TestClient

    from vitruvian.serve.app import create_app

    shutil.copytree(clip[0], tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer.json").write_text('{"version": ')
    app, service = create_app({"clip": vt.load(tmp_path / "clip")})
    image = [("image", ("a.png", min(photos.rglob("*.png")).read_bytes()))]
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        service.models["clip"].warm.result(30)
        assert client.post("/embed", files=image).status_code == 200
        response = client.post("/predict", files=image, data={"labels": "cat"})
    assert response.status_code == 422
    assert "has no usable text tower (see the log of the service)" in response.json()["error"]
