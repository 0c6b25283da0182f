"""`vit models`."""

from __future__ import annotations

import json

from vitruvian.catalog import RECOMMENDED, VARIANTS


def test_every_model_is_listed_with_accuracy_size_speed_and_license_in_80_columns(vit):
    code, out, err = vit("models")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["model", "top-1", "params", "mult-adds", "pixels", "speed", "license"]
    assert [line.split()[0] for line in lines[1 : 1 + len(VARIANTS)]] == list(VARIANTS)
    (base,) = [line for line in lines if line.startswith("ViT-B/16 ")]
    assert base.split()[1:] == ["86.0", "86.6M", "17.56G", "224", "slow", "several"]
    assert [line for line in lines if " * " in line] == [line for line in lines if line.startswith("DeiT-III-S/16 ")]
    assert f"* recommended to start with: {RECOMMENDED}" in out


def test_a_pattern_shows_the_weights_by_name(vit):
    out = vit("models", "ti/16").out
    assert "ViT-Ti/16" in out
    assert "ViT-B/16" not in out
    assert "vit_tiny_patch16_224.augreg_in21k_ft_in1k" in out
    assert max(len(line) for line in out.splitlines() if line.startswith(" ")) <= 80
    assert "78.2% top-1, 384 pixels, medium, 1,000 classes, license Apache-2.0; ImageNet-21k" in " ".join(out.split())


def test_a_pattern_may_be_part_of_a_published_name(vit):
    out = vit("models", "google/vit-large").out
    assert "google/vit-large-patch16-224" in out
    assert "vit_large_patch16_224.augreg" not in out


def test_a_name_of_another_dialect_is_understood(vit):
    assert vit("models", "vit_huge_patch8").out.splitlines()[1].startswith("ViT-H/8 ")


def test_json_has_exact_numbers(vit):
    (line,) = vit("models", "ViT-Ti/16", "--json").out.splitlines()[:1]
    model = json.loads(line)
    facts = ["top1", "parameters", "multiply_adds", "speed", "image_size", "licenses", "recommended", "published"]
    assert list(model) == ["name", *facts]
    assert (model["top1"], model["speed"], model["licenses"], model["recommended"]) == (
        78.22,
        "fast",
        ["Apache-2.0"],
        False,
    )
    assert (model["name"], model["parameters"], model["image_size"]) == ("ViT-Ti/16", 5_717_416, [224, 224])
    rows = {"name", "family", "image_size", "num_classes", "top1", "speed", "license", "trained_on", "recommended"}
    assert rows == set(model["published"][0])


def test_the_license_of_weights_that_state_none_is_unknown(vit):
    assert "license unknown" in vit("models", "facebook/vit-mae-base").out
    assert "license CC-BY-NC-4.0" in vit("models", "IMAGENET1K_SWAG_E2E_V1").out


def test_an_unknown_pattern_is_answered_with_near_names(vit):
    code, out, err = vit("models", "VIT-Bb/16")
    assert (code, out) == (1, "")
    assert err.startswith("error: unknown model 'VIT-Bb/16'; did you mean ViT-B/16")


def test_a_license_keeps_the_weights_under_it(vit):
    lines = [json.loads(line) for line in vit("models", "--license", "apache-2.0", "--json").out.splitlines()]
    assert {tuple(line["licenses"]) for line in lines} == {("Apache-2.0",)}
    assert {row["license"] for line in lines for row in line["published"]} == {"Apache-2.0"}
    assert "DINOv3-S/16" not in [line["name"] for line in lines]
    assert vit("models", "--license", "dinov3").out.splitlines()[1].startswith("DINOv3-S/16 ")


def test_a_license_that_no_weights_have_is_said(vit):
    code, out, err = vit("models", "--license", "gpl")
    assert (code, out) == (1, "")
    assert "unknown license 'gpl' (known: Apache-2.0, BSD-3-Clause, CC-BY-NC-4.0, DINOv3, MIT, unknown)" in err
    code, out, err = vit("models", "ti/16", "--license", "dinov3")
    assert (code, out) == (2, "")
    assert "no weights of 'ti/16' have the license 'dinov3'" in err
