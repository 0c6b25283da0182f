"""`vit models`."""

from __future__ import annotations

import json

from vitruvian.catalog import VARIANTS


def test_every_model_is_listed_with_its_cost_and_weights(vit):
    code, out, err = vit("models")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["model", "parameters", "multiply-adds", "input", "published", "weights"]
    assert [line.split()[0] for line in lines[1 : 1 + len(VARIANTS)]] == list(VARIANTS)
    (base,) = [line for line in lines if line.startswith("ViT-B/16 ")]
    assert base.split()[1:6] == ["86.6", "M", "17.56", "G", "224x224"]
    assert "more" in base


def test_a_pattern_shows_the_weights_by_name(vit):
    out = vit("models", "ti/16").out
    assert "ViT-Ti/16" in out
    assert "ViT-B/16" not in out
    assert "vit_tiny_patch16_224.augreg_in21k_ft_in1k" in out


def test_a_pattern_may_be_part_of_a_published_name(vit):
    out = vit("models", "google/vit-large").out
    assert "google/vit-large-patch16-224" in out
    assert "vit_large_patch16_224.augreg" not in out


def test_a_name_of_another_dialect_is_understood(vit):
    assert vit("models", "vit_huge_patch8").out.splitlines()[1].startswith("ViT-H/8 ")


def test_json_has_exact_numbers(vit):
    (line,) = vit("models", "ViT-Ti/16", "--json").out.splitlines()[:1]
    model = json.loads(line)
    assert list(model) == ["name", "parameters", "multiply_adds", "image_size", "published"]
    assert (model["name"], model["parameters"], model["image_size"]) == ("ViT-Ti/16", 5_717_416, [224, 224])
    assert {"name", "family", "image_size", "classes"} == set(model["published"][0])


def test_an_unknown_pattern_is_answered_with_near_names(vit):
    code, out, err = vit("models", "VIT-Bb/16")
    assert (code, out) == (1, "")
    assert err.startswith("error: unknown model 'VIT-Bb/16'; did you mean ViT-B/16")
