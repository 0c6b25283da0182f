"""Images of `vit embed` found by words: the cosines of the two towers, and models that have no words."""

import json

import pytest

import vitruvian as vt
from vitruvian.bulk import embed
from vitruvian.bulk.similar import VectorSearch, similar
from vitruvian.cli.app import main
from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError, DataError
from vitruvian.inference import Encoder
from vitruvian.model.build import build

pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")


@pytest.fixture(scope="module", params=["clip", "siglip"])
def store(request, photos, tmp_path_factory):
    """The model's folder, and the vectors that it made of the photos."""
    folder, *_ = request.getfixturevalue(request.param)
    vectors = tmp_path_factory.mktemp("vectors")
    embed(photos, folder, vectors, dtype="float32")
    return folder, vectors


def test_words_find_the_images_whose_embeddings_are_nearest(store, photos):
    folder, vectors = store
    model = vt.load(folder)
    paths = sorted(photos.rglob("*.png"))
    cosines = (vt.embed_images(model, paths) @ vt.embed_texts(model, ["a cat"]).T)[:, 0].tolist()
    (found,) = similar([], vectors, texts=["a cat"], top=4)
    order = sorted(range(4), key=lambda i: -cosines[i])
    assert [neighbor.key for neighbor in found] == [str(paths[i].relative_to(photos)) for i in order]
    assert [neighbor.similarity for neighbor in found] == pytest.approx([cosines[i] for i in order], abs=1e-5)


def test_the_command_takes_images_and_words_together(store, photos, tmp_path, monkeypatch, capsys):
    _, vectors = store
    image = photos / "cat" / "0.png"
    arguments = [image, "--text", "a red dog", "--in", vectors, "--top", 2, "--json", "--out", tmp_path / "page.html"]
    monkeypatch.setattr("sys.argv", ["vit", "similar", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)
    by_image, by_text = map(json.loads, capsys.readouterr().out.splitlines()[:2])
    assert (by_image["path"], by_text["text"]) == (str(image), "a red dog")
    assert by_image["neighbors"][0]["key"] == "cat/0.png"
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img") == 5
    assert "“a red dog”" in page


def test_vectors_of_a_model_without_words_cannot_be_searched_by_text(photos, tmp_path):
    model = build(ViTConfig(image_size=16, patch_size=8, width=16, depth=1, num_heads=2, num_classes=3)).eval()
    vt.save(model, tmp_path / "model")
    embed(photos, tmp_path / "model", tmp_path / "vectors")
    with pytest.raises(DataError, match=r"vectors: cannot be searched by text: .*has no text tower"):
        similar([], tmp_path / "vectors", texts=["a cat"])
    with pytest.raises(DataError, match="was not loaded from weights, so it has no text tower"):
        similar([], tmp_path / "vectors", texts=["a cat"], model=Encoder(model))


def test_nothing_to_look_for_and_empty_words_are_said(store):
    search = VectorSearch(store[1])
    with pytest.raises(ConfigError, match="no query: give an image or text="):
        search.queries([])
    with pytest.raises(ConfigError, match="text= is empty"):
        search.queries([], ["  "])
