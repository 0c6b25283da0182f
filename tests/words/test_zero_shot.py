"""Words instead of classes, by the commands and from Python: predict, evaluate, convert, train."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from two_towers import without
from typer.testing import CliRunner

import vitruvian as vt
from vitruvian.cli.app import app
from vitruvian.errors import CheckpointError, ConfigError, ConversionError, DataError
from vitruvian.explain import patch_logits
from vitruvian.inference import probabilities_of
from vitruvian.weights.zero_shot import check_labels, find_templates, parse_labels, published_templates

WORDS = ["cat", "a red dog", "bird"]


def vit(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def answers(result):
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return [{a["label"]: a["probability"] for a in row["predictions"]} for row in rows]


@torch.no_grad()
def peers_answers(peer, tokenizer, folder, images, texts, **padding):
    """Probabilities as the transformers pipeline would give them: its own model on our pixels."""
    transform = vt.transform(vt.load(folder))
    pixels = torch.stack([transform(image) for image in images])
    inputs = tokenizer(texts, truncation=True, max_length=16, return_tensors="pt", **padding)
    logits = peer(pixel_values=pixels, **inputs).logits_per_image
    return logits.sigmoid() if "Siglip" in type(peer).__name__ else logits.softmax(dim=-1)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_predict_answers_in_the_words_that_are_given(kind, request, photos, tmp_path):
    folder, peer, tokenizer = request.getfixturevalue(kind)
    images = sorted(photos.rglob("*.png"))
    padding = {"padding": True} if kind == "clip" else {"padding": "max_length"}
    wanted = peers_answers(peer, tokenizer, folder, images, WORDS, **padding)
    (tmp_path / "names.txt").write_text("\n".join([*WORDS, ""]))
    for labels in (", ".join(WORDS), tmp_path / "names.txt"):
        found = answers(vit("predict", photos, "-m", folder, "--json", "--labels", labels))
        for row, probabilities in zip(found, wanted.tolist()):
            assert row == pytest.approx(dict(zip(WORDS, probabilities)), abs=1e-5)


def test_a_template_is_averaged_over_its_texts(clip):
    folder = clip[0]
    one = vt.Classifier(folder, labels=["cat", "dog"], template="art of the {}.")
    head = vt.embed_texts(folder, ["art of the cat.", "art of the dog."])
    torch.testing.assert_close(torch.nn.functional.normalize(one.model.head.weight, dim=-1), head)
    seven = vt.Classifier(folder, labels=["cat"], template="imagenet-7").model.head.weight
    texts = [template.format("cat") for template in published_templates()["imagenet-7"]]
    mean = vt.embed_texts(folder, texts).mean(dim=0)
    torch.testing.assert_close(torch.nn.functional.normalize(seven[0], dim=-1), mean / mean.norm())


def test_the_published_templates_are_eighty_and_the_seven_of_them():
    sets = published_templates()
    assert [len(templates) for templates in sets.values()] == [80, 7]
    assert sets["imagenet"][0] == "a bad photo of a {}."
    assert {*sets["imagenet-7"]} <= {*sets["imagenet"]}
    assert all(template.count("{}") == 1 for template in sets["imagenet"])


def test_words_and_templates_that_cannot_be_are_named(clip, photos, tmp_path):
    with pytest.raises(ConfigError, match=r"unknown template 'imagenet_7'; did you mean imagenet-7"):
        find_templates("imagenet_7")
    with pytest.raises(ConfigError, match="labels= has 'cat' twice"):
        parse_labels("cat, dog, cat")
    with pytest.raises(ConfigError, match="labels= is empty"):
        parse_labels(" , ")
    with pytest.raises(ConfigError, match="labels= has 'word 99998' twice"):  # at once
        check_labels([*(f"word {number}" for number in range(99_999)), "word 99998"])
    with pytest.raises(ConfigError, match=r"the text 'a \\\\udcff' is not Unicode"):
        vt.embed_texts(clip[0], ["a \udcff"])
    for arguments, line in {
        (photos, "-m", clip[0]): "this model has no classification head",
        (photos, "-m", clip[0], "--template", "a {}"): "--template needs --labels",
        (photos, "-m", clip[0], "--labels", tmp_path / "absent.txt"): "absent.txt",
    }.items():
        result = vit("predict", *arguments)
        assert result.exit_code == 1
        assert line in str(result.exception)
        assert "\n" not in str(result.exception)
    assert "--labels" in str(vit("predict", photos, "-m", clip[0]).exception)


def test_labels_for_a_model_without_a_text_tower_are_refused_in_one_line(photos, tmp_path):
    vt.save(vt.create_model("ViT-Ti/16", depth=1, num_classes=3, image_size=32), tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"plain: has no text tower; use a CLIP or SigLIP"):
        vt.Classifier(tmp_path / "plain", labels=["cat"])


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_convert_bakes_words_into_an_ordinary_classifier(kind, request, photos, tmp_path):
    folder = request.getfixturevalue(kind)[0]
    result = vit("convert", folder, tmp_path / "out", "--labels", ",".join(WORDS), "--template", "a {}", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["compared"] == "logits"
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["score_function"] == {"clip": "softmax", "siglip": "sigmoid"}[kind]
    assert settings["labels"] == WORDS
    alone = answers(vit("predict", photos, "-m", tmp_path / "out", "--json"))
    beside = answers(vit("predict", photos, "-m", folder, "--labels", ",".join(WORDS), "--template", "a {}", "--json"))
    for one, other in zip(alone, beside):
        assert one == pytest.approx(other, abs=1e-6)
    with pytest.raises(ConversionError, match="timm has no features of unit length"):
        vt.save(vt.load(tmp_path / "out"), tmp_path / "w.safetensors", family="timm")


def test_evaluate_measures_zero_shot_with_the_names_of_the_classes(clip, photos):
    result = vit("evaluate", photos, "-m", clip[0], "--json", "--template", "a photo of a {}.")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["class"] for row in found["classes"]] == ["cat", "red_dog"]
    words = vt.Classifier(clip[0], labels=["cat", "red_dog"], template="a photo of a {}.")
    torch.testing.assert_close(
        torch.nn.functional.normalize(words.model.head.weight, dim=-1),
        vt.embed_texts(clip[0], ["a photo of a cat.", "a photo of a red dog."]),
    )
    ranked = words.predict(sorted(photos.rglob("*.png")), top=1)
    right = sum(answer[0].label == label for answer, label in zip(ranked, ["cat", "cat", "red_dog", "red_dog"]))
    assert found["top1"] == pytest.approx(25.0 * right)
    with pytest.raises(ConfigError, match=r"template= is for a CLIP or SigLIP without a classification head"):
        vt.evaluate(photos, words, template="a {}")


def test_no_temperature_of_a_softmax_is_saved_for_sigmoids(siglip, photos, tmp_path):
    from vitruvian.evaluation.evaluate import save_calibrated

    with pytest.raises(DataError, match="not written"):
        save_calibrated(vt.evaluate(photos, siglip[0]), tmp_path / "out")


def test_training_may_begin_with_the_words(siglip, photos, tmp_path):
    """The head is kept where its words are the classes; what is trained by softmax answers by softmax."""
    from vitruvian.training.initial_model import model_for

    vt.convert(siglip[0], tmp_path / "baked", labels=["cat", "red_dog"])
    recipe = vt.Recipe(weights=str(tmp_path / "baked"), epochs=1)
    model = model_for(recipe, ["cat", "red_dog"])
    torch.testing.assert_close(model.head.weight, vt.load(tmp_path / "baked").head.weight)
    assert model.config.unit_features
    assert model.meta.score_function == "softmax"
    other = model_for(recipe, ["one", "two", "three"])
    assert not other.config.unit_features
    assert not other.head.weight.any()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"padding_side": "up"}, "padding_side='up' is not one of left, right"),
        ({"padding_side": 5}, "padding_side=5 is not one of"),
        ({"model_input_names": 5}, "model_input_names=5 is not a list"),
    ],
)
def test_a_damaged_description_of_a_tokenizer_is_one_line(clip, tmp_path, changes, line):
    folder = shutil.copytree(clip[0], tmp_path / "copy")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=line):
        vt.embed_texts(folder, ["a cat"])


def test_without_the_library_the_extra_is_named(clip, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(vt.VitruvianError, match=r"pip install '\.\[text\]'"):
        vt.embed_texts(without(clip[0], tmp_path / "copy"), ["a cat"])


def test_a_zero_shot_head_keeps_where_the_weights_came_from(clip):
    model = vt.load(clip[0])
    zero_shot = vt.with_words(model, ["cat", "dog"])
    assert zero_shot.meta.source == model.meta.source == str(clip[0])
    assert vt.with_words(zero_shot, ["bird"]).meta.labels == ("bird",)  # reads the text tower again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_words_are_drawn_where_they_are(name, request, photos, tmp_path):
    folder = request.getfixturevalue(name)[0]
    arguments = ["explain", photos / "cat", "--model", folder, "--labels", ",".join(WORDS), "--out", tmp_path, "--json"]
    ran = vit(*arguments)
    assert ran.exit_code == 0, ran.output
    first, _ = map(json.loads, ran.stdout.splitlines())
    assert [each["map"] for each in first["maps"]] == ["label", "label-2", "label-3"]
    assert [each["class"] for each in first["maps"]] == [each["index"] for each in first["predictions"]]
    arrays = np.load(first["arrays"])
    model = vt.with_words(vt.load(folder), WORDS)
    logits = patch_logits(model, vt.transform(model)(photos / "cat" / "0.png")[None])
    for each in first["maps"]:
        expected = probabilities_of(model, logits)[0, ..., each["class"]].numpy()
        np.testing.assert_allclose(arrays[each["map"]], expected, atol=1e-5)
    ran = vit(*arguments[:4], "--labels", "cat,dog,bird", "--top", "2", "--out", tmp_path, "--json")
    assert [each["map"] for each in json.loads(ran.stdout.splitlines()[0])["maps"]] == ["label", "label-2"]
    assert vit(*arguments[:4], "--figures", "--labels", "cat").exit_code == 2
    assert "--template needs --labels" in str(vit(*arguments[:4], "--template", "a {}", "--out", tmp_path).exception)
