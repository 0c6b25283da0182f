"""Every family gives the numbers of its own implementation, read and carried through the others."""

from __future__ import annotations

import pytest
import torch
from checkpoints import DESTINATIONS, FIXTURE_NAMES, PEER_NAMES, TOLERANCE, expected, largest_difference, path_of

from vitruvian.errors import ConversionError
from vitruvian.weights.load import load
from vitruvian.weights.save import convert, save

GRIDS = {"timm_oblong": (4, 8)}

EXPRESSED_BY = {
    # the paper's model without a pre-logits layer goes everywhere; each other shape where its parts exist
    "google_vit_nohidden": "native google timm torchvision huggingface",
    "huggingface_vit": "native google timm torchvision huggingface",
    "timm_vit": "native google timm torchvision huggingface",
    "torchvision_vit": "native google timm torchvision huggingface",
    "google_vit": "native google torchvision",
    "torchvision_vit_hidden": "native google torchvision",
    "bigvision_vit_tok": "native google torchvision",
    "google_vit_gap": "native google timm huggingface",
    "bigvision_vit_gap_sincos": "native google timm huggingface",
    "google_hybrid": "native google timm",
    "bigvision_vit_map": "native timm",
    "timm_deit_distilled": "native timm huggingface",
    "timm_deit3": "native timm",
    "timm_vit_gap": "native timm",
    "timm_vit_gap_fcnorm": "native timm huggingface",
    "dino": "native google timm huggingface",
    "timm_headless": "native google timm huggingface",
    "timm_oblong": "native google timm huggingface",
    "timm_without_bias": "native timm huggingface",
    "timm_hybrid": "native google timm",
    "timm_stem": "native google timm",
    "timm_mean": "native google timm huggingface",
    "timm_map": "native timm",
    "timm_registers": "native timm",
    "timm_registers_placed": "native timm",
    "timm_swiglu": "native timm",
    "open_clip": "native timm huggingface",
    "aimv2_large_patch14_224": "native timm",
    "beit_base_patch16_224": "native timm huggingface",
    "beit3_base_patch16_224": "native timm",
    "eva02_base_patch14_224": "native timm",
    "vit_base_patch16_18x2_224": "native timm",
    "vit_base_patch16_clip_quickgelu_224": "native timm",
    "vit_base_patch16_dinov3_qkvb": "native timm",
    "vit_base_patch16_rope_ape_224": "native timm",
    "vit_base_patch16_rope_mixed_224": "native timm",
    "vit_base_patch16_rpn_224": "native timm",
    "vit_base_patch16_xp_224": "native timm",
    "vit_base_patch32_siglip_256": "native timm",
    "vit_pe_core_base_patch16_224": "native timm",
    "vit_so150m_patch16_reg4_map_256": "native timm",
}

ALL_NAMES = [*FIXTURE_NAMES, *PEER_NAMES]


def test_each_checkpoint_has_its_place_in_the_table_of_families():
    assert sorted(EXPRESSED_BY) == sorted(ALL_NAMES)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_answers_are_those_of_the_familys_own_implementation_at_every_size(name):
    model = load(path_of(name), num_heads=4, grid=GRIDS.get(name))
    assert largest_difference(model, name) < TOLERANCE


@pytest.mark.parametrize("name", ALL_NAMES)
def test_resizing_at_load_time_gives_the_same_answers_as_resizing_while_running(name):
    for pixels, answer in expected(name):
        size = (pixels.shape[-2], pixels.shape[-1])
        model = load(path_of(name), num_heads=4, grid=GRIDS.get(name), image_size=size)
        assert model.config.image_size == model.meta.preprocess.image_size == size
        with torch.no_grad():
            assert float((model(pixels) - answer).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", DESTINATIONS)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_model_comes_back_unchanged_from_each_family_that_can_express_it(name, family, tmp_path):
    model = load(path_of(name), num_heads=4, grid=GRIDS.get(name))
    destination = tmp_path / DESTINATIONS[family]
    if family not in EXPRESSED_BY[name].split():
        with pytest.raises(ConversionError, match=f"{family} cannot express this model: "):
            save(model, destination, family)
        assert not list(tmp_path.iterdir())
        return
    save(model, destination, family)
    again = load(destination)
    assert largest_difference(again, name) < TOLERANCE
    assert (again.config, again.meta.preprocess, again.meta.labels) == (
        model.config,
        model.meta.preprocess,
        model.meta.labels,
    )
    assert again.meta.origin == model.meta.origin


@pytest.mark.parametrize("name", [name for name in ALL_NAMES if "timm" in EXPRESSED_BY[name].split()])
def test_a_model_comes_back_unchanged_from_a_folder_for_timm(name, tmp_path):
    model = load(path_of(name), num_heads=4, grid=GRIDS.get(name))
    if name.startswith(("google_hybrid", "timm_hybrid", "timm_stem")):  # of fewer stages than any architecture of timm
        with pytest.raises(ConversionError, match=r"nearest is .*, which has stem="):
            save(model, tmp_path / "timm", "timm")
        return
    save(model, tmp_path / "timm", "timm")
    again = load(tmp_path / "timm")
    assert largest_difference(again, name) < TOLERANCE
    assert (again.config, again.meta.preprocess, again.meta.labels) == (
        model.config,
        model.meta.preprocess,
        model.meta.labels,
    )


@pytest.mark.parametrize("family", DESTINATIONS)
@pytest.mark.parametrize("name", ["google_vit_nohidden", "huggingface_vit", "timm_vit", "torchvision_vit"])
def test_read_as_its_new_family_alone_a_model_has_that_familys_numerics(name, family, tmp_path):
    """What another reader sees: at most the GELU (4.7e-4 an element) and eps apart, not the weights."""
    model = load(path_of(name), num_heads=4)
    save(model, tmp_path / DESTINATIONS[family], family)
    stranger = load(tmp_path / DESTINATIONS[family], num_heads=4, family=family)
    pixels, answer = next(pair for pair in expected(name) if pair[0].shape[-1] == 32)
    with torch.no_grad():
        assert float((stranger(pixels) - answer).abs().max()) < 1e-3
    if family in ("google", "timm", "torchvision"):
        assert stranger.meta.origin.startswith(f"{family} weights from")


@pytest.mark.slow
@pytest.mark.parametrize("family", DESTINATIONS)
def test_real_weights_answer_the_same_in_every_family(family, tmp_path, shared):
    source = shared / "weights" / "vit_ti16_imagenet1k.safetensors"
    certificate = convert(source, tmp_path / DESTINATIONS[family], to=family)
    assert certificate.largest_difference <= TOLERANCE * certificate.largest_output
    assert load(tmp_path / DESTINATIONS[family]).meta.preprocess == load(source).meta.preprocess
