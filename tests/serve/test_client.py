"""`vt.Client` gets from a service what the library computes itself."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from processes import Process
from tiny_service import photo, tiny_vit

import vitruvian as vt
from vitruvian.errors import ImageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    for seed, name in enumerate(("one", "two")):
        vt.save(tiny_vit(seed), folder / name)
    models = [part for name in ("one", "two") for part in ("--model", f"{name}={folder / name}")]
    running = Process(*models, "--engine", "torch", environment={"VITRUVIAN_API_KEY": "key"})
    yield running
    running.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_client_gets_what_the_library_computes(service, tmp_path, seed):
    client = vt.Client(service.url + "/", model=("one", "two")[seed], api_key="key")
    path, model = tmp_path / "a photo.png", tiny_vit(seed)
    path.write_bytes(photo(3))
    expected = vt.Classifier(model).predict([path], top=3)[0]
    for image in (path, str(path), path.read_bytes()):
        result = client.predict(image, top=3)
        assert [p.label for p in result.predictions] == [p.label for p in expected]
        assert [p.probability for p in result.predictions] == pytest.approx([p.probability for p in expected], abs=1e-5)
        assert (result.error, result.rejected) == ("", False)
    assert client.predict(path).path == str(path)
    np.testing.assert_allclose(client.embed(path), vt.Classifier(model).embed([path])[0].numpy(), atol=1e-4)
    explained, wanted = client.explain(path, maps=["rollout"]), vt.Explainer(model).explain(path)
    assert [m.name for m in explained.maps] == ["rollout"]
    np.testing.assert_allclose(explained.maps[0].values, wanted.maps[1].values, atol=1e-4)
    assert explained.predictions[0].label == wanted.predictions[0].label


def test_a_client_awaits_several_images_at_once(service):
    client = vt.Client(service.url, api_key="key")

    async def run() -> list[object]:
        image = photo(4)
        return await asyncio.gather(
            client.predict_async(image, top=1), client.embed_async(image), client.explain_async(image)
        )

    result, vector, explained = asyncio.run(run())
    assert result == client.predict(photo(4), top=1)
    np.testing.assert_allclose(vector, client.embed(photo(4)), atol=1e-5)
    assert len(explained.maps) == 3


def test_a_client_raises_one_line_for_every_failure(service, tmp_path):
    client = vt.Client(service.url, api_key="key")
    (tmp_path / "text.jpg").write_text("hello")
    with pytest.raises(ImageError, match="not an image"):
        client.predict(tmp_path / "text.jpg")
    with pytest.raises(ImageError, match=r"missing\.jpg: cannot be read"):
        client.predict(tmp_path / "missing.jpg")
    with pytest.raises(vt.VitruvianError, match="an API key is required"):
        vt.Client(service.url).predict(photo(1))
    with pytest.raises(vt.VitruvianError, match="unknown model 'three'"):
        vt.Client(service.url, model="three", api_key="key").embed(photo(1))
    for url in ("http://127.0.0.1:1", "no address"):
        with pytest.raises(vt.VitruvianError, match=f"{url}: no response: "):
            vt.Client(url, timeout=5).predict(photo(1))
