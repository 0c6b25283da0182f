"""Raw attention and rollout: their laws, and a slow reference in float64."""

import pytest
import torch
from reference import SHAPES, TOLERANCE, forward, random_model, random_pixels

from vitruvian.config import ResNetConfig
from vitruvian.errors import ConfigError
from vitruvian.explain import attention_map, attention_rollout, patch_logits
from vitruvian.explain.attention import readout, roll, token_shares
from vitruvian.model.build import build


def reference_readout(model, attentions):
    """The row (1, N) in which the answer is read, as the documentation says it."""
    config = model.config
    N, T = attentions[0].shape[-1], config.prefix_tokens
    if config.pool == "map":
        return attentions.pop().mean(0)
    row = torch.zeros(1, N, dtype=torch.float64)
    patches = torch.tensor([[0.0] * T + [1 / (N - T)] * (N - T)], dtype=torch.float64)
    if config.distillation:
        row[0, 0] = row[0, 1] = 0.5
    elif config.pool != "mean":
        row[0, 0] = 1.0
    return {"token": row, "mean": patches, "token_mean": (row + patches) / 2}[config.pool]


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_rollout_is_that_of_a_slow_reference(changes):
    model = random_model(**changes)
    pixels = random_pixels(model)
    found = attention_rollout(model, pixels)
    assert found.shape == (2, *model.config.grid)
    for image, values in zip(pixels, found):
        attentions, _ = forward(model, image)
        row = reference_readout(model, attentions)
        for attention in reversed(attentions):
            row = 0.5 * row + 0.5 * row @ attention.mean(0)
        wanted = row[0, model.config.prefix_tokens :].view_as(values).detach()
        torch.testing.assert_close(values.double(), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("patch", [None, (1, 2)])
def test_attention_of_a_layer_and_head_is_that_of_a_slow_reference(changes, patch):
    model = random_model(**changes)
    pixels = random_pixels(model)
    probed = model.attn_pool is not None and patch is None
    found = attention_map(model, pixels, layer=None if probed else 1, head=1, patch=patch)
    for image, values in zip(pixels, found):
        attentions, _ = forward(model, image)
        T = model.config.prefix_tokens
        if probed:
            row = attentions[-1][1, 0]
        elif patch:
            row = attentions[1][1, T + 1 * 3 + 2]
        else:
            row = (reference_readout(model, attentions) @ attentions[1][1])[0]
        torch.testing.assert_close(values.double(), row[T:].view_as(values).detach(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_every_row_of_attention_sums_to_one(changes):
    model = random_model(**changes)
    with torch.no_grad():
        for _, attention in model.attention_maps(random_pixels(model)):
            sums = attention.sum(dim=-1)
            torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=0)
        tokens = model.forward_features(random_pixels(model))
        torch.testing.assert_close(readout(model, tokens).sum(dim=-1), torch.ones(2), atol=1e-5, rtol=0)


def test_rollout_of_uniform_attention_is_uniform():
    model = random_model()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()  # equal queries and keys: every key gets the same
            block.attn.qkv.bias.zero_()
    values = attention_rollout(model, random_pixels(model))
    N, share = 7, 1 - 0.5**3  # the class token keeps half of itself in each of three layers
    torch.testing.assert_close(values, torch.full((2, 2, 3), share / N))


def test_rolled_rows_sum_to_one_and_without_attention_to_others_nothing_moves():
    scores = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    rolled = roll(scores, roll(scores))
    torch.testing.assert_close(rolled.sum(dim=-1), torch.ones(2, 5))
    identity = torch.eye(5).expand(2, 3, 5, 5)
    torch.testing.assert_close(roll(identity, roll(identity)), torch.eye(5).expand(2, 5, 5))


def test_the_mean_over_heads_is_the_mean_of_the_heads_maps():
    model = random_model()
    pixels = random_pixels(model)
    alone = torch.stack([attention_map(model, pixels, layer=0, head=head) for head in range(2)])
    torch.testing.assert_close(attention_map(model, pixels, layer=0), alone.mean(dim=0))
    torch.testing.assert_close(attention_map(model, pixels), attention_map(model, pixels, layer=2))


def test_maps_follow_another_input_size():
    model = random_model()
    pixels = torch.randn(1, 3, 32, 40, generator=torch.Generator().manual_seed(0))
    assert attention_rollout(model, pixels).shape == attention_map(model, pixels, patch=(3, 4)).shape == (1, 4, 5)


def test_shares_of_tokens_are_those_of_the_pooling():
    assert token_shares(random_model(distillation=True), 8).tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert token_shares(random_model(pool="mean"), 7).tolist() == pytest.approx([0] + [1 / 6] * 6)
    assert token_shares(random_model(pool="token_mean"), 7).tolist() == pytest.approx([1 / 2] + [1 / 12] * 6)


def test_a_model_in_training_is_explained_without_dropout_and_left_in_training():
    model = random_model(dropout=0.5)
    still = attention_rollout(model, random_pixels(model))
    model.train()
    torch.testing.assert_close(attention_rollout(model, random_pixels(model)), still)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"layer": 3}, "layer 3 does not exist: the model has layers 0 to 2"),
        ({"head": 2}, "head 2 does not exist: the model has heads 0 to 1"),
        ({"patch": (2, 0)}, "patch 2,0 does not exist: the grid has rows 0 to 1 and columns 0 to 2"),
    ],
)
def test_what_the_model_does_not_have_is_named(choice, text):
    model = random_model()
    with pytest.raises(ConfigError, match=text):
        attention_map(model, random_pixels(model), **choice)


def test_a_layer_of_a_model_read_by_a_probe_needs_a_patch():
    model = random_model(pool="map", cls_token=False)
    with pytest.raises(ConfigError, match=r"layer 1: the head reads a pooling probe .* choose a query patch"):
        attention_map(model, random_pixels(model), layer=1)
    assert attention_map(model, random_pixels(model), layer=1, patch=(0, 0)).shape == (2, 2, 3)


def test_a_resnet_is_refused():
    model = build(ResNetConfig(image_size=32, stages=(1,), width=32, num_classes=2))
    with pytest.raises(ConfigError, match="a BiT ResNet has no attention to explain"):
        attention_rollout(model, torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["token", "mean", "map", "registers"])
def test_the_logits_of_a_patch_are_those_of_its_values(name):
    """By the matrices: the values' part of qkv, the projection, and the head on each patch as if it was the image."""
    model, pixels = random_model(**SHAPES[name]), torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    config, block = model.config, model.blocks[-1]
    D, P, T = config.width, 6, config.prefix_tokens
    with torch.no_grad():
        x = dict(model.iter_intermediates(pixels))["block_1"]
        weight, bias = block.attn.qkv.weight[2 * D :], block.attn.qkv.bias[2 * D :]
        y = block.norm1(x) @ weight.T @ block.attn.proj.weight.T + block.attn.proj.weight @ bias + block.attn.proj.bias
        y = y if block.ls1 is None else y * block.ls1
        expected = []
        for image in y[:, T:]:
            for patch in image:
                tokens = model.norm(patch.expand(1, T + P, D))  # all tokens are this patch
                expected.append(model.forward_head(tokens)[0])
    logits = patch_logits(model, pixels)
    assert logits.shape == (2, 2, 3, 5)
    torch.testing.assert_close(logits.view(-1, 5), torch.stack(expected), rtol=TOLERANCE, atol=TOLERANCE)


def test_patches_that_no_head_reads_are_refused():
    pixels = torch.zeros(1, 3, 16, 24)
    with pytest.raises(ConfigError, match="this model has no head"):
        patch_logits(random_model(num_classes=0), pixels)
    for changes in ({"pool": "token_mean"}, {"attention": "differential"}):
        with pytest.raises(ConfigError, match="cannot read single patches; use gradient attention"):
            patch_logits(random_model(**changes), pixels)
