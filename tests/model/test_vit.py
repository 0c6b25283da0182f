"""Laws of the Vision Transformer: what every option must do, whatever the weights."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from vitruvian.config import Numerics, RopeConfig, StemConfig, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.batching import even_pieces, map_over_cores, single_threaded_pool
from vitruvian.model.build import build

TINY = ViTConfig(image_size=32, patch_size=8, depth=3, width=32, mlp_dim=48, num_heads=4, num_classes=5)
SHAPES = {
    "token": {},
    "mean": {"pool": "mean"},
    "mean without class token": {"pool": "mean", "cls_token": False},
    "map": {"pool": "map", "cls_token": False},
    "token and mean": {"pool": "token_mean"},
    "norm after pool": {"pool": "mean", "norm_after_pool": True},
    "no positions": {"pos_embed": "none"},
    "2-D positions": {"pos_embed": "learned_2d"},
    "relative": {"pos_embed": "relative"},
    "positions in every layer": {"pos_embed_at": "every_layer", "reg_tokens": 1},
    "2-D positions shared by all layers": {"pos_embed": "learned_2d", "pos_embed_at": "every_layer_shared"},
    "axial": {"attention": "axial", "pool": "mean", "cls_token": False},
    "sin-cos": {"pos_embed": "sincos"},
    "pre-logits layer": {"representation_size": 12},
    "distilled": {"distillation": True},
    "registers and layer scale": {"reg_tokens": 3, "layer_scale": True, "cls_pos_embed": False},
    "gated": {"mlp": "swiglu", "qkv_bias": False},
    "rotary": {"pos_embed": "none", "rope": RopeConfig(reference_grid=(2, 2), columns_first=True)},
    "rotary beside positions": {"reg_tokens": 1, "rope": RopeConfig(kind="normalized", temperature=100.0, half=True)},
    "mixed rotary": {"rope": RopeConfig(kind="mixed")},
    "relative bias": {"pos_embed": "relative_bias"},
    "norms of CLIP": {"pre_norm": True, "patch_bias": False, "numerics": Numerics(gelu="quick")},
    "norms of EVA-02": {"qk_norm": True, "attn_norm": True, "mlp_norm": True, "mlp": "swiglu"},
    "norms after branches": {"block": "res_post_norm", "layer_scale": True},
    "parallel": {"block": "parallel", "layer_scale": True},
    "root mean square": {"norm": "rms", "dense_bias": False, "final_norm": False},
    "map beside tokens": {"pool": "map", "reg_tokens": 2, "pool_num_heads": 2, "pool_mlp_dim": 8},
    "map of all tokens": {"pool": "map", "pool_prefix": True},
    "mean of class and register tokens": {"pool": "prefix_mean", "reg_tokens": 2},
    "two tokens concatenated": {"pool": "prefix_concat", "pool_tokens": 2, "reg_tokens": 2},
    "projection": {"representation_size": 12, "projection": True},
    "wide attention": {"attn_dim": 48, "num_heads": 6, "qk_norm": True, "attn_norm": True},
    "unit features": {"unit_features": True},
    "differential": {"attention": "differential", "qk_norm": True},
    "differential and parallel": {"attention": "differential", "block": "parallel"},
    "factorized": {"pos_embed": "factorized", "numerics": Numerics(square_positions=True)},
    "ResNet-D": {"stem": StemConfig(style="resnet_d", stages=(1, 1), width=8), "patch_size": 1},
    "stem of MobileCLIP": {"stem": StemConfig(style="mobile_clip", stages=(), width=8), "patch_size": 1},
    "gray": {"in_channels": 1},
    "non-square": {"image_size": (16, 40)},
}


def random_model(seed=0, **changes):
    """A tiny model in which no parameter is zero, so that nothing is hidden."""
    model = build(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def pixels(model, batch=2, size=None):
    rows, columns = size or model.config.image_size
    return torch.randn(batch, model.config.in_channels, rows, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_every_shape_answers_and_trains(changes):
    model = random_model(**changes)
    model.train()
    logits = model(pixels(model))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_an_image_is_answered_alone_as_in_a_batch(changes):
    model = random_model(**changes)
    images = pixels(model, batch=3)
    with torch.no_grad():
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_other_image_sizes_are_answered(changes):
    model = random_model(**changes)
    with torch.no_grad():
        assert model(pixels(model, size=(48, 24))).isfinite().all()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_intermediates_end_where_the_forward_pass_does(changes):
    model = random_model(**changes)
    images = pixels(model)
    with torch.no_grad():
        found = model.forward_intermediates(images, model.intermediate_names)
        # the forward pass multiplies fewer rows at a time in the last block, so sums round differently
        torch.testing.assert_close(found["logits"], model(images), atol=1e-5, rtol=0)
        torch.testing.assert_close(found["features"], model.features(images), atol=1e-5, rtol=0)
    assert list(found) == model.intermediate_names


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_first_tokens_are_the_same_without_the_others(changes):
    model = random_model(**changes)
    images = pixels(model)
    every, first = model.forward_features(images), model.forward_features(images, 2)
    torch.testing.assert_close(first, every[:, :2], atol=1e-5, rtol=0)  # float32 sums in another order
    expected = torch.autograd.grad(every[:, :2].square().sum(), model.blocks[0].mlp.fc1.weight)
    torch.testing.assert_close(
        torch.autograd.grad(first.square().sum(), model.blocks[0].mlp.fc1.weight), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_attention_maps_are_the_attention_that_was_paid(changes):
    """Rows sum to one, and values mixed by the map give what the block's attention gives."""
    model = random_model(**changes)
    with torch.no_grad():
        x = model.embed(pixels(model))
        for layer, weights in model.attention_maps(pixels(model)):
            block = model.blocks[layer]
            normed = block.attn_input(block.add_positions(x, None))
            shared = 1 - getattr(
                block.attn, "subtracted", torch.zeros(())
            )  # one, or what differential attention leaves
            torch.testing.assert_close(weights.sum(-1), shared.expand(weights.shape[:-1]))
            _, _, v = block.attn.project(normed)
            mixed = block.attn.output(weights @ v)
            torch.testing.assert_close(mixed, block.attn(normed), atol=1e-5, rtol=1e-5)
            x = block(x)


def test_a_hook_on_the_last_block_sees_every_token_when_the_block_is_not_shortened():
    model, seen = random_model(), []
    images = pixels(model)
    model.blocks[-1].register_forward_hook(lambda block, inputs, output: seen.append(output))
    with torch.no_grad():
        short = model(images)
        model.shorten_last_block = False
        whole = model(images)
    assert [output.shape[1] for output in seen] == [1, 1 + model.config.grid[0] * model.config.grid[1]]
    torch.testing.assert_close(short, whole, atol=1e-5, rtol=0)  # float32 sums in another order


def test_the_head_gives_what_it_reads_when_asked_for_pre_logits():
    model = random_model(representation_size=12)
    with torch.no_grad():
        tokens = model.forward_features(pixels(model))
        features = model.forward_head(tokens, pre_logits=True)
        torch.testing.assert_close(model.head(features), model.forward_head(tokens))
    assert features.shape[-1] == 12


def test_attention_maps_come_one_layer_at_a_time_and_only_those_asked_for():
    model = random_model()
    assert [layer for layer, _ in model.attention_maps(pixels(model), [0, -1])] == [0, 2]
    with pytest.raises(ConfigError, match="layer 3 does not exist: the model has layers 0 to 2"):
        next(model.attention_maps(pixels(model), [3]))


def test_an_unknown_intermediate_is_answered_with_the_nearest():
    model = random_model()
    with pytest.raises(UnknownNameError, match="unknown intermediate 'block_9'; did you mean block_"):
        model.forward_intermediates(pixels(model), ["block_9"])


def test_wrong_pixels_are_refused_with_both_shapes():
    model = random_model()
    with pytest.raises(ConfigError, match=r"pixels have shape \(2, 1, 32, 32\), expected \(B, 3, height"):
        model(torch.zeros(2, 1, 32, 32))
    with pytest.raises(ConfigError, match="image of 33x32 pixels is not divisible by the patch of 8"):
        model(torch.zeros(2, 3, 33, 32))


def test_without_positions_the_order_of_patches_does_not_matter():
    model, images = random_model(pos_embed="none"), None
    images = pixels(model)
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8)  # (B, 3, 4, 4, 8, 8)
    shuffled = patches.flatten(2, 3)[:, :, torch.randperm(16, generator=torch.Generator().manual_seed(3))]
    moved = shuffled.unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).reshape(images.shape)
    with torch.no_grad():
        torch.testing.assert_close(model(moved), model(images), atol=1e-5, rtol=1e-5)
        learned = random_model()
        assert (learned(moved) - learned(images)).abs().max() > 1e-2


def test_gelu_forms_differ_as_little_as_they_should():
    erf = random_model(numerics=Numerics(gelu="erf"))
    tanh = random_model(numerics=Numerics(gelu="tanh"))
    with torch.no_grad():
        difference = (erf(pixels(erf)) - tanh(pixels(tanh))).abs().max()
    assert 1e-6 < difference < 1e-2


def test_stochastic_depth_grows_with_depth_and_rests_in_evaluation():
    model = random_model(drop_path=0.5, depth=3)
    assert [block.drop_path for block in model.blocks] == [0.0, 0.25, 0.5]
    images = pixels(model)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(images), atol=0, rtol=0)
        model.train()
        torch.manual_seed(0)
        assert (model(images) - model(images)).abs().max() > 0


def test_dropout_acts_while_training_only():
    model = random_model(dropout=0.3, attention_dropout=0.3)
    images = pixels(model)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(images), atol=0, rtol=0)
        model.train()
        torch.manual_seed(0)
        assert (model(images) - model(images)).abs().max() > 0


@pytest.mark.parametrize("batch", [1, 2, 7, 16])
def test_images_spread_over_cores_are_answered_in_order(batch, two_threads):
    model = random_model()
    images = pixels(model, batch=batch)
    with torch.no_grad():
        torch.testing.assert_close(map_over_cores(model, images), model(images), atol=1e-5, rtol=1e-5)
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2


def test_threads_that_compute_whole_images_use_one_core_each(two_threads):
    """Otherwise they share the cores, and their helper threads slow down every later single image."""
    pool = single_threaded_pool(os.getpid(), 2)
    assert list(pool.map(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
    assert torch.get_num_threads() == 2


def test_pieces_keep_every_core_busy_and_lose_no_image():
    for batch in range(1, 40):
        sizes = [len(piece) for piece in even_pieces(torch.zeros(batch, 1), 2)]
        assert sum(sizes) == batch
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("block", ["pre_norm", "res_post_norm", "parallel"])
def test_forward_hooks_see_what_each_module_returned(block):
    """Inference adds and activates in place, but never in a tensor that a hook may have stored."""
    model = random_model(block=block)
    modules = {
        name: module
        for name, module in model.named_modules()
        if name.startswith("blocks.") and not isinstance(module, nn.Identity | nn.Dropout)
    }
    at_call, stored = {}, {}

    def remember(name):
        def hook(module, inputs, output):
            at_call[name], stored[name] = output.clone(), output

        return hook

    for name, module in modules.items():
        module.register_forward_hook(remember(name))
    with torch.no_grad():
        logits = model(pixels(model))
    assert {"blocks.0.attn", "blocks.0.mlp", "blocks.0.mlp.fc1"} <= stored.keys()
    for name in stored:
        torch.testing.assert_close(stored[name], at_call[name], rtol=0, atol=0, msg=f"{name} was changed afterwards")
    plain = random_model(block=block)
    with torch.no_grad():
        torch.testing.assert_close(plain(pixels(plain)), logits, rtol=0, atol=0)
