"""Gradient-weighted attention: a slow reference in float64, and the laws of gradients behind it."""

import sys
from pathlib import Path

import pytest
import torch
from reference import SHAPES, TOLERANCE, forward, random_model, random_pixels
from test_attention_maps import reference_readout

from forked import Forked
from vitruvian import create_model
from vitruvian.errors import ConfigError
from vitruvian.explain import attention_rollout, gradient_attention


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_it_is_that_of_a_slow_reference_with_the_whole_graph_at_once(changes):
    model = random_model(**changes)
    pixels = random_pixels(model)
    found = gradient_attention(model, pixels, [3, 0])
    for image, index, values in zip(pixels, [3, 0], found):
        attentions, logits = forward(model, image)
        slopes = torch.autograd.grad(logits[index], attentions)
        speaking = [(a * slope).clamp(min=0).mean(0).detach() for a, slope in zip(attentions, slopes)]
        row = speaking.pop() if model.attn_pool is not None else reference_readout(model, attentions)
        N = speaking[0].shape[-1]
        relevance = torch.eye(N, dtype=torch.float64)
        for layer in speaking:
            relevance = relevance + layer @ relevance
        wanted = (row @ relevance)[0, model.config.prefix_tokens :].view_as(values)
        torch.testing.assert_close(values.double(), wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_it_changes_with_the_class_and_is_not_negative(changes):
    model = random_model(**changes)
    pixels = random_pixels(model)
    one, other = gradient_attention(model, pixels, [0, 0]), gradient_attention(model, pixels, [1, 1])
    assert (one - other).abs().amax(dim=(1, 2)).min() > 1e-4
    assert min(one.min(), other.min()) >= 0


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_blocks_and_pools_in_the_open_give_the_forward_passes_numbers(changes):
    model = random_model(**changes)
    with torch.no_grad():
        x = model.embed(random_pixels(model))
        for block in model.blocks:
            y, weights = block.forward_with_weights(x)
            torch.testing.assert_close(weights, block.attention_weights(x))
            x = block(x)
            torch.testing.assert_close(y, x, atol=1e-5, rtol=1e-5)  # float32 sums in another order
        if model.attn_pool is not None:
            torch.testing.assert_close(
                model.attn_pool.forward_with_weights(x)[0], model.attn_pool(x), atol=1e-5, rtol=1e-5
            )


def test_without_classes_it_explains_each_images_own_answer():
    model = random_model()
    pixels = random_pixels(model, batch_size=4)
    with torch.no_grad():
        answers = model(pixels).argmax(dim=1)
    torch.testing.assert_close(gradient_attention(model, pixels), gradient_attention(model, pixels, answers))


def test_a_term_that_all_logits_share_is_not_explained_where_a_threshold_is_on_the_energy():
    model = random_model()
    pixels = random_pixels(model)
    model.meta = model.meta.replace(threshold_on="energy")
    before = gradient_attention(model, pixels, [0, 1])
    with torch.no_grad():
        model.head.weight += 3 * torch.randn_like(model.head.weight[:1])
        model.head.bias += 1
    # float32 rounding of weights that are several times as large
    torch.testing.assert_close(gradient_attention(model, pixels, [0, 1]), before, atol=1e-5, rtol=1e-3)


def test_it_leaves_no_gradients_behind_and_works_on_frozen_models_without_gradients():
    model = random_model()
    wanted = gradient_attention(model, random_pixels(model), [1, 2])
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_(False)
    with torch.no_grad():
        torch.testing.assert_close(gradient_attention(model, random_pixels(model), [1, 2]), wanted)


@pytest.mark.parametrize(
    ("classes", "text"),
    [([1], r"expected one class per image \(2\)"), ([0, 5], r"classes \[0, 5\]: the model has classes 0 to 4")],
)
def test_classes_that_do_not_fit_are_named(classes, text):
    model = random_model()
    with pytest.raises(ConfigError, match=text):
        gradient_attention(model, random_pixels(model), classes)


def test_a_model_without_head_has_no_class_to_explain():
    model = random_model(num_classes=0)
    with pytest.raises(ConfigError, match="this model has no head, so there is no class to explain"):
        gradient_attention(model, random_pixels(model))


def peak_kilobytes():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_vit_l16_at_384_stays_under_four_gigabytes():
    """Measured with 4 of its 24 layers, each of which adds as much: a sixth of what 1.2 GB of weights leave."""

    def explained():
        model = create_model("ViT-L/16", image_size=384, depth=4).eval()
        torch.nn.init.normal_(model.head.weight, std=0.02)
        pixels, before = torch.randn(1, 3, 384, 384), peak_kilobytes()
        for maps in (attention_rollout(model, pixels), gradient_attention(model, pixels, [7])):
            assert maps.shape == (1, 24, 24)
            assert maps.isfinite().all()
        print(peak_kilobytes() - before)

    ran = Forked(work=explained).wait()
    assert ran.code == 0, ran.err
    assert int(ran.out) * 1024 < (4e9 - 1.2e9) / 6
