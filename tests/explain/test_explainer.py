"""A run over images: what is explained, and what stands in the folder afterwards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reference import random_model

from vitruvian.config import ResNetConfig
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.explain import (
    Explainer,
    MapSettings,
    attention_map,
    attention_rollout,
    explain_images,
    gradient_attention,
)
from vitruvian.explain.figures import filters_figure, positions_figure, spread
from vitruvian.explain.overlay import file_name
from vitruvian.model.build import build
from vitruvian.weights.load import load
from vitruvian.weights.save import save

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENLESS = (".expected", ".texts", ".logits", "_bit", "_mixer")
"""In names of files that are no weights, or weights of a ResNet or an MLP-Mixer."""
WEIGHTS = [
    path
    for path in (*GOLDEN.glob("fixtures/*"), *GOLDEN.glob("peers/*"))
    if not any(part in path.name for part in TOKENLESS)
]
GRIDS = {"timm_oblong.safetensors": (4, 8)}
"""What the file does not tell."""


def make_image(size=(60, 40), seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def named(**changes):
    model = random_model(**changes)
    model.meta = model.meta.replace(labels=("ant", "bee", "cat", "Dog", "eel"))
    return model


def test_maps_are_those_of_the_functions_for_the_models_own_answer():
    model = named()
    explained = Explainer(model).explain(make_image())
    pixels = apply_preprocess(make_image(), model.meta.preprocess)[None]
    best = explained.predictions[0]
    assert best.index == int(model(pixels).argmax())
    maps = {each.name: each for each in explained.maps}
    assert list(maps) == ["gradient", "rollout", "attention"]
    np.testing.assert_array_equal(maps["gradient"].values, gradient_attention(model, pixels, [best.index])[0].numpy())
    np.testing.assert_array_equal(maps["rollout"].values, attention_rollout(model, pixels)[0].numpy())
    assert maps["gradient"].title == f"gradient-weighted attention: {best.label} ({best.probability:.1%})"
    assert maps["attention"].title == "attention of layer 2, mean of heads"


def test_weights_are_loaded_from_their_path(tmp_path):
    model = named()
    save(model, tmp_path / "native")
    expected, loaded = (Explainer(source).explain(make_image()) for source in (model, tmp_path / "native"))
    assert [best.label for best in loaded.predictions] == [best.label for best in expected.predictions]
    for one, two in zip(expected.maps, loaded.maps, strict=True):
        assert one.name == two.name
        np.testing.assert_allclose(
            one.values, two.values, atol=1e-6
        )  # the memory of weights can have another alignment


@pytest.mark.parametrize("target", ["dog", "3"])
def test_a_class_can_be_asked_for_by_label_or_number(target):
    explained = Explainer(named(), MapSettings(methods=("gradient",), target=target)).explain(make_image())
    assert [each.index for each in explained.maps] == [3]


def test_several_answers_get_a_class_map_each():
    explained = Explainer(named(), MapSettings(methods=("gradient",), top=2)).explain(make_image())
    assert [each.name for each in explained.maps] == ["gradient", "gradient-2"]
    assert [each.index for each in explained.maps] == [answer.index for answer in explained.predictions[:2]]


@pytest.mark.parametrize(
    ("changes", "looks", "title"),
    [
        ({}, MapSettings(methods=("attention",), layer=-2, head=1), "attention of layer 1, head 1"),
        (
            {"pool": "map", "cls_token": False},
            MapSettings(methods=("attention",)),
            "attention of the pooling probe, mean of heads",
        ),
        ({}, MapSettings(methods=("attention",), patch=(1, 2)), "attention of layer 2, mean of heads, from patch 1,2"),
    ],
)
def test_attention_says_where_it_was_taken(changes, looks, title):
    (found,) = Explainer(named(**changes), looks).explain(make_image()).maps
    assert found.title == title


def test_a_model_without_head_still_shows_its_attention():
    explained = Explainer(random_model(num_classes=0)).explain(make_image())
    assert explained.predictions == ()
    assert [each.name for each in explained.maps] == ["rollout", "attention"]
    for looks in (MapSettings(methods=("gradient",)), MapSettings(deletion=True), MapSettings(target="1")):
        with pytest.raises(ConfigError, match="this model has no head, so no class to explain"):
            Explainer(random_model(num_classes=0), looks)


def test_what_cannot_be_explained_is_said_before_any_image_is_read():
    with pytest.raises(ConfigError, match="a BiT ResNet has no attention"):
        Explainer(build(ResNetConfig(image_size=32, stages=(1,), width=32, num_classes=2)))
    with pytest.raises(UnknownNameError, match="unknown class 'doge'; did you mean Dog"):
        Explainer(named(), MapSettings(target="doge"))
    with pytest.raises(ConfigError, match="class 5 does not exist: the model has classes 0 to 4"):
        Explainer(named(), MapSettings(target="5"))
    with pytest.raises(ConfigError, match="layer 7 does not exist"):
        Explainer(named(), MapSettings(layer=7))
    with pytest.raises(ConfigError, match="top=2 cannot be combined with class 'bee'"):
        MapSettings(target="bee", top=2)
    with pytest.raises(ConfigError, match="method='gradcam' is not one of gradient, rollout, attention"):
        MapSettings(methods=("gradcam",))


def test_the_deletion_check_scores_what_is_about_the_answer():
    explained = Explainer(named(), MapSettings(top=2, deletion=True)).explain(make_image())
    assert list(explained.curves) == ["gradient", "rollout", "attention", "random"]


@pytest.mark.openvino
def test_an_engine_computes_the_same_answers_and_curves(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path))
    model, image = named(), make_image()
    wanted, found = (
        Explainer(model, MapSettings(deletion=True), engine=engine).explain(image) for engine in ("torch", "openvino")
    )
    assert list((tmp_path / "engines").glob("*/model.onnx"))
    assert [a.label for a in found.predictions] == [a.label for a in wanted.predictions]
    for name, curve in wanted.curves.items():
        np.testing.assert_allclose(found.curves[name].probability, curve.probability, rtol=0, atol=1e-4)


def test_an_answer_that_is_not_a_number_is_an_error():
    model = named()
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    assert Explainer(model).explain(make_image()).error == "image: the model produced NaN or infinite outputs"


def test_a_run_writes_overlays_arrays_and_a_page(tmp_path):
    source = tmp_path / "wide <b> image.png"
    make_image((90, 30)).save(source)
    broken = tmp_path / "broken.jpg"
    broken.write_text("hello")
    out = tmp_path / "new" / "folder"
    first, second = explain_images(Explainer(named(), MapSettings(deletion=True)), [source, broken], out)
    stem = "1-wide-b-image"
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted([*(path.name for path in first.files.values()), "explain.html"])
    assert list(first.files) == ["image", "gradient", "rollout", "attention", "arrays"]
    assert all(path.name.startswith(stem) for path in first.files.values())
    with Image.open(first.files["gradient"]) as shown:
        assert shown.size == (270, 90)  # three times as wide as high, as the image
    with np.load(first.files["arrays"], allow_pickle=False) as arrays:
        assert arrays["gradient"].shape == arrays["rollout"].shape == (2, 3)
        assert arrays["size"].tolist() == [30, 90]
        assert arrays["gradient_index"] == first.predictions[0].index
        np.testing.assert_array_equal(arrays["deletion_gradient"], first.curves["gradient"].probability)
    assert second.files == {}
    page = (out / "explain.html").read_text(encoding="utf-8")
    assert "wide &lt;b&gt; image.png" in page
    assert "broken.jpg: not an image" in page
    assert "1 of 2 images could not be read." in page
    assert "http" not in page.replace("http-equiv", "")


def test_labels_are_drawn_where_they_are_on_one_scale():
    explained = Explainer(named(), MapSettings(methods=("label",), top=2, deletion=True)).explain(make_image())
    first, second = explained.maps
    assert [first.name, second.name] == ["label", "label-2"]
    assert [first.index, second.index] == [prediction.index for prediction in explained.predictions[:2]]
    assert first.ends == second.ends == (0.0, pytest.approx(max(first.values.max(), second.values.max())))
    assert first.title == f"where it is {explained.predictions[0].label}: at most {first.values.max():.0%}"
    assert list(explained.curves) == ["label", "random"]
    with pytest.raises(ConfigError, match="no class to explain"):
        Explainer(random_model(num_classes=0), MapSettings(methods=("label",)))


@pytest.mark.slow
def test_the_page_shows_the_first_images_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.explain.explainer.MAX_IMAGES", 2)
    explainer = Explainer(named(), MapSettings(methods=("rollout",)))
    assert len(list(explain_images(explainer, [make_image(seed=i) for i in range(3)], tmp_path))) == 3
    page = (tmp_path / "explain.html").read_text(encoding="utf-8")
    assert "The first 2 images are on this page; the files next to it cover all 3." in page
    assert page.count("<section>") == 2


def test_file_names_are_plain():
    assert file_name("a b/ü\n.x") == "a-b-.x"
    assert file_name("...") == "image"
    assert len(file_name("x" * 500)) == 60


def test_images_for_a_mean_are_chosen_evenly():
    assert spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert spread([1, 2], 4) == [1, 2]


@pytest.mark.parametrize("name", sorted(path.name for path in WEIGHTS), ids=str)
def test_weights_of_every_family_are_explained(name):
    model = load(next(path for path in WEIGHTS if path.name == name), num_heads=4, grid=GRIDS.get(name))
    pixels = torch.randn(1, 3, *model.config.image_size, generator=torch.Generator().manual_seed(0))
    maps = [attention_rollout(model, pixels), attention_map(model, pixels)]
    maps += [gradient_attention(model, pixels)] if model.config.num_classes else []
    for values in maps:
        assert values.shape == (1, *model.config.grid)
        assert values.isfinite().all()
        assert values.sum() > 0
    assert all(values.sum() < 1 + 1e-5 for values in maps[:2])
    assert filters_figure(model).image is not None
    inside_attention = model.config.pos_embed in ("none", "relative_bias")
    assert (positions_figure(model).image is None) == inside_attention
