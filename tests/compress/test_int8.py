"""Int8 arithmetic: scales, ranges, GPTQ and sensitivities."""

import pytest
import torch
from compress_models import PIXELS, model_with_an_outlier, tiny_model

from vitruvian.compress import int8
from vitruvian.compress.int8 import channel_maxima, dense_layers, gptq, hook_inputs, round_weights, smooth
from vitruvian.errors import ConversionError

VARIANTS = [
    {},
    {"norm": "rms"},
    {"mlp": "swiglu"},
    {"block": "parallel"},
    {"block": "res_post_norm"},
    {"mlp_norm": True, "attn_norm": True},
    {"qkv_bias": False, "dense_bias": False},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_smoothing_changes_no_bit_of_the_outputs(changes):
    model, pixels = tiny_model(**changes), PIXELS
    changed = smooth(model, channel_maxima(model, [pixels]))
    before, after = dense_layers(model), dense_layers(changed)
    assert any(not torch.equal(before[name].weight, after[name].weight) for name in before)
    with torch.no_grad():
        assert torch.equal(model(pixels), changed(pixels))


def test_smoothing_makes_channels_more_alike():
    model, pixels = tiny_model(), PIXELS
    maxima = channel_maxima(model, [pixels])
    after = channel_maxima(smooth(model, maxima), [pixels])
    name = "blocks.0.attn.qkv"
    assert after[name].max() / after[name].median() < maxima[name].max() / maxima[name].median() / 2


def test_a_range_cuts_off_outliers():
    values = torch.cat([torch.linspace(-1, 1, 1_000_000), torch.tensor([3.0])])
    assert int8.best_range(values)[1] == pytest.approx(1, abs=0.01)
    assert int8.best_range(torch.zeros(9)) == (0.0, 1.0)


def test_weights_of_seven_bits_never_saturate_sixteen():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for codes, _ in (round_weights(weight, 7), gptq(weight, torch.eye(32), 7)):
        assert codes.int().abs().max() * 255 * 2 < 2**15


def test_gptq_rounds_to_nearest_if_inputs_are_uncorrelated():
    weight = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    moments = torch.diag(torch.rand(300, generator=torch.Generator().manual_seed(1)) + 0.1)
    for ours, wanted in zip(gptq(weight, moments, 7), round_weights(weight, 7)):
        assert torch.equal(ours, wanted)


def test_gptq_changes_the_output_less_than_rounding_to_nearest():
    """Inputs of 300 channels, more than are rounded together, made of 40."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 300, generator=generator)
    mixed = torch.randn(40, 300, generator=generator)
    inputs = torch.randn(2000, 40, generator=generator) @ mixed + 0.1 * torch.randn(2000, 300, generator=generator)
    errors = []
    for codes, scale in (gptq(weight, inputs.T @ inputs, 7), round_weights(weight, 7)):
        errors.append(float((inputs @ (codes * scale - weight).T).square().mean()))
    assert errors[0] < errors[1] / 4


def test_gptq_accepts_channels_that_are_always_zero():
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    codes, scale = gptq(weight, torch.zeros(8, 8), 7)
    assert torch.equal(codes, round_weights(weight, 7)[0])
    assert scale.isfinite().all()


def test_gptq_accepts_moments_with_rounding_errors():
    """Sums in float32 of thousands of channels may leave an eigenvalue below zero."""
    generator = torch.Generator().manual_seed(0)
    weight, direction = torch.randn(4, 8, generator=generator), torch.randn(8, 1, generator=generator)
    moments = torch.eye(8) - 0.5 * direction @ direction.T
    assert torch.linalg.eigvalsh(moments).min() < -1
    codes, scale = gptq(weight, moments, 7)
    assert codes.int().abs().max() <= 63
    assert scale.isfinite().all()
    with pytest.raises(ConversionError, match="not finite"):
        gptq(weight, moments * torch.nan, 7)


def test_blocks_get_the_inputs_of_the_full_model(monkeypatch):
    """A block after the other gives each layer what the model gives it."""
    model, pixels = tiny_model(), PIXELS
    seen: dict[bytes, torch.Tensor] = {}
    monkeypatch.setattr(
        "vitruvian.compress.int8.gptq",
        lambda weight, moments, bits: seen.update({weight.numpy().tobytes(): moments}) or round_weights(weight, bits),
    )
    entering = int8.fit_inputs(model, [pixels], 7)
    int8.gptq_layers(model, entering, [pixels[:4], pixels[4:]], bits=7)
    wanted: dict[str, torch.Tensor] = {}
    with hook_inputs(dense_layers(model), lambda name, x: wanted.update({name: x.flatten(0, -2)})), torch.no_grad():
        model.forward_features(pixels)
    assert len(seen) == len(wanted) == 8
    for name, layer in dense_layers(model).items():
        each = entering[name]
        x = each.mask(each.quantize(wanted[name]), 0.0)
        given = seen[each.mask(layer.weight.detach(), 0.0).numpy().tobytes()]
        torch.testing.assert_close(given, x.T @ x, rtol=1e-3, atol=1e-3 * float(x.square().sum()))


def test_an_outlier_channel_stays_float():
    model, pixels = model_with_an_outlier()
    _, inputs = int8.prepare(model, [pixels])
    assert inputs["blocks.0.mlp.fc2"].float_channels == (3,)
    assert inputs["blocks.1.mlp.fc2"].float_channels == ()
    x = torch.arange(32.0).repeat(2, 1)
    assert inputs["blocks.0.mlp.fc2"].quantize(x)[0, 3] == 3
    assert inputs["blocks.0.mlp.fc2"].mask(x, 0.0)[1].tolist() == [*range(3), 0, *range(4, 32)]


def test_sensitivity_from_the_middle_equals_that_of_the_full_model():
    model, pixels = tiny_model(), PIXELS
    ready, inputs = int8.prepare(model, [pixels])
    layers = int8.gptq_layers(ready, inputs, [pixels], bits=7)
    found = int8.sensitivity(ready, layers, pixels)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    name = "blocks.1.mlp.fc1"
    with torch.no_grad():
        wanted = ready(pixels).log_softmax(dim=1)
    given = int8.simulate(ready, {name: layers[name]})(pixels).log_softmax(dim=1)
    whole = (wanted.exp() * (wanted - given)).sum(dim=1).mean()
    assert found[name] == pytest.approx(float(whole), rel=1e-3, abs=1e-7)


def test_a_model_that_merges_tokens_has_the_sensitivities_of_its_layers():
    model = tiny_model(tome_r=1)
    pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    ready, inputs = int8.prepare(model, [pixels])
    found = int8.sensitivity(ready, int8.rounded_layers(ready, inputs), pixels)
    assert set(found) == set(dense_layers(model))
    assert all(value >= 0 for value in found.values())
