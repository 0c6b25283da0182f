"""Token merging: ToMe's own arithmetic, the laws that a merged model keeps, and where it is refused."""

import pytest
import torch
import torch.nn.functional as F

import vitruvian as vt
from vitruvian.cost import multiply_adds, tokens_by_layer
from vitruvian.errors import ConfigError, ConversionError
from vitruvian.explain.attention import attention_map, attention_rollout, gradient_attention
from vitruvian.model.token_merging import Tokens, merge_tokens, token_groups, token_indices, tome_schedule

TINY = vt.ViTConfig(image_size=32, patch_size=4, depth=3, width=32, mlp_dim=64, num_heads=2, num_classes=5)
WAYS = [{"tome_r": 8}, {"tome_r": (20, 0, 9)}, {"tome_thresholds": (0.5, 0.6, 0.3)}]
KINDS = [
    {},
    {"pool": "mean"},
    {"pool": "mean", "cls_token": False, "norm_after_pool": True},
    {"pool": "token_mean", "reg_tokens": 2},
    {"pool": "map", "cls_token": False},
    {"pool": "map", "pool_prefix": True},
    {"distillation": True},
    {"attention": "differential"},
    {"block": "parallel"},
    {"block": "res_post_norm"},
]


def tiny(**changes):
    model = vt.build(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def images(count=3, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def tome_by_loops(model, pixels, counts):
    """Bolya et al.'s Section 3 for one image with one class token, a token at a time; returns logits and sizes."""
    x = list(model.embed(pixels[None])[0])
    sizes = [1.0] * len(x)
    for block, r in zip(model.blocks, counts):
        q, k, v = (each[0] for each in block.attn.project(block.norm1(torch.stack(x)[None])))
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + torch.tensor(sizes).log()
        heads = scores.softmax(-1) @ v  # (H, N, K)
        x = [token + row for token, row in zip(x, block.attn.proj(heads.transpose(0, 1).flatten(1)))]
        metric = F.normalize(k.mean(0), dim=-1)
        a, b = range(0, len(x), 2), range(1, len(x), 2)
        best = {i: max(b, key=lambda j, i=i: float(metric[i] @ metric[j])) for i in a if i}
        edges = sorted(best, key=lambda i: -float(metric[i] @ metric[best[i]]))[:r]
        for i in edges:
            total = sizes[i] + sizes[best[i]]
            x[best[i]] = (x[best[i]] * sizes[best[i]] + x[i] * sizes[i]) / total
            sizes[best[i]] = total
        order = [*(i for i in a if i not in edges), *b]
        x, sizes = [x[i] for i in order], [sizes[i] for i in order]
        x = [token + block.mlp(block.norm2(token)) for token in x]
    return model.head(model.norm(x[0])), sizes


def test_merging_is_tome_written_out_token_by_token():
    model = tiny(tome_r=(12, 10, 7))
    with torch.no_grad():
        found = model(images())
        for pixels, logits in zip(images(), found):
            wanted, sizes = tome_by_loops(model, pixels, (12, 10, 7))
            assert sum(sizes) == 65
            assert len(sizes) == 65 - 12 - 10 - 7
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_merged_model_is_the_whole_one_with_groups_replaced_by_their_mean(kind, way):
    model = tiny(**kind, **way)
    with torch.no_grad():
        logits = model(images())
        groups = token_groups(model.blocks, model.config, model.embed(images()))
        step_by_step = model.forward_intermediates(images(), ["logits", "encoded"])
        torch.testing.assert_close(logits, step_by_step["logits"], atol=3e-5, rtol=1e-5)  # other orders of sums
        features = model.forward_features(images())
    torch.testing.assert_close(features, step_by_step["encoded"], atol=3e-5, rtol=1e-5)
    assert features.shape == (3, model.config.prefix_tokens + 64, 32)
    T = model.config.prefix_tokens
    for means in groups:
        assert torch.equal(means[:, :T, :T], torch.eye(T).expand(3, -1, -1))  # prefix tokens stay themselves
        torch.testing.assert_close(means.sum(-1), torch.ones(3, T + 64))
        torch.testing.assert_close(means @ means, means)


@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize("way", WAYS)
def test_an_image_is_answered_as_if_it_were_alone(kind, way):
    model = tiny(**kind, **way)
    with torch.no_grad():
        alone = torch.cat([model(pixels[None]) for pixels in images()])
        torch.testing.assert_close(model(images()), alone, atol=3e-5, rtol=1e-5)  # other sizes of matrix products


@pytest.mark.parametrize("off", [{"tome_r": 0}, {"tome_r": (0, 0, 0)}])
def test_merging_that_is_off_changes_no_bit(off):
    pixels = images()
    with torch.no_grad():
        assert torch.equal(tiny(**off)(pixels), tiny()(pixels))


def test_thresholds_that_no_key_reaches_merge_nothing():
    with torch.no_grad():
        torch.testing.assert_close(tiny(tome_thresholds=(1.0,) * 3)(images()), tiny()(images()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_sizes_add_up_and_no_more_than_half_of_the_patches_merge(prefix, count):
    x = torch.randn(2, prefix + count, 4)
    k = torch.randn(2, 1, prefix + count, 4)
    for r, threshold in ((3, None), (100, None), (0, -1.0), (0, 0.2)):
        found = merge_tokens(Tokens(x, owners=token_indices(x)), k, prefix, r, threshold)
        sizes = torch.ones(x.shape[:2]) if found.sizes is None else found.sizes
        assert sizes.sum(1).tolist() == [prefix + count] * 2
        assert torch.equal(found.x[:, :prefix], x[:, :prefix])
        if threshold is None:
            assert found.x.shape[1] == prefix + count - min(r, count // 2)
        counts = torch.stack([torch.bincount(row, minlength=found.x.shape[1]) for row in found.owners])
        assert torch.equal(counts.float(), sizes)
        totals = torch.zeros_like(found.x).index_add(1, torch.arange(found.x.shape[1]), found.x * sizes[..., None])
        torch.testing.assert_close(totals.sum(1), x.sum(1))  # means weighted by their sizes keep the sum


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_gradient_reaches_every_parameter_and_is_the_same_with_checkpointing(way, pool):
    gradients = []
    for checkpointing in (False, True):
        model = tiny(pool=pool, **way).train()
        model.grad_checkpointing = checkpointing
        model(images()).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert all(gradient is not None for gradient in gradients[-1])
    assert all(map(torch.equal, *gradients))


def test_the_gradient_is_that_of_finite_differences():
    model = tiny(tome_r=8, depth=2).double()
    direction = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pixels = images().double().requires_grad_()
    (slope,) = torch.autograd.grad(model(pixels).sum(), pixels)
    with torch.no_grad():
        ahead, behind = (model(pixels + step * direction).sum() for step in (1e-6, -1e-6))
    torch.testing.assert_close((slope * direction).sum(), (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-6)


def test_other_image_sizes_merge_too():
    model = tiny(tome_r=8)
    with torch.no_grad():
        assert model(images(2, 16)).isfinite().all()
        assert model(images(2, 4)).isfinite().all()  # a single patch


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tome_r": (8, 8)}, "tome_r has 2 values for 3 layers"),
        ({"tome_r": ()}, "tome_r has 0 values for 3 layers"),
        ({"tome_thresholds": (0.9,)}, "tome_thresholds has 1 values for 3 layers"),
        ({"tome_r": -1}, "tome_r=-1 is not between 0 and"),
        ({"tome_thresholds": (2.0, 1, 1)}, "tome_thresholds=2.0 is not between -1.0 and 1.0"),
        ({"tome_r": 1, "tome_thresholds": (0.9,) * 3}, "tome_r and tome_thresholds cannot be combined"),
        ({"tome_r": 8, "pos_embed": "relative_bias"}, "tome_r cannot be combined with positions inside attention"),
        ({"tome_thresholds": (0.9,) * 3, "pos_embed": "relative"}, "tome_thresholds cannot be combined with positions"),
    ],
)
def test_what_cannot_be_merged_is_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        TINY.replace(**changes)


def test_the_schedules_are_those_of_tome():
    assert tome_schedule(8, 4) == (8, 8, 8, 8)
    assert tome_schedule(8, 5, -1) == (16, 12, 8, 4, 0)
    assert tome_schedule(8, 5, 1) == (0, 4, 8, 12, 16)
    with pytest.raises(ConfigError, match="inflection=2 is not between -1 and 1"):
        tome_schedule(8, 5, 2)


def test_merging_is_saved_and_loaded_with_the_weights(tmp_path):
    model = tiny(tome_r=(12, 10, 7))
    vt.save(model, tmp_path / "merged")
    again = vt.load(tmp_path / "merged")
    assert again.config == model.config
    with torch.no_grad():
        assert torch.equal(again(images()), model(images()))


def test_a_model_gets_merging_and_loses_it_again_with_the_same_weights():
    model = tiny()
    merging = vt.with_merging(model, 8)
    assert merging.config == model.config.replace(tome_r=8)
    assert merging.head.weight.data_ptr() == model.head.weight.data_ptr()
    with torch.no_grad():
        assert torch.equal(vt.with_merging(merging)(images()), model(images()))
        assert not torch.equal(merging(images()), model(images()))
    assert vt.with_merging(model, thresholds=[0.5, 0.6, 0.3]).config.tome_thresholds == (0.5, 0.6, 0.3)


def test_a_classifier_merges_as_it_is_told():
    model, image = tiny(), torch.zeros(20, 20, 3, dtype=torch.uint8).numpy()
    merged_answers, own = (vt.Classifier(model, tome_r=r).predict([image]) for r in (20, None))
    assert own == vt.Classifier(model).predict([image])
    assert merged_answers != own
    with pytest.raises(ConfigError, match="tome_r= is for Vision Transformers"):
        vt.Classifier(vt.build(vt.ResNetConfig(stages=(1,), width=32, image_size=32, num_classes=5)), tome_r=8)


@pytest.mark.parametrize("way", [{"tome_r": 8}, {"tome_thresholds": (0.5, 0.6, 0.3)}])
@pytest.mark.parametrize("kind", [{}, {"pool": "mean"}, {"pool": "map", "cls_token": False}])
def test_maps_of_a_merged_model_cover_the_whole_grid(way, kind):
    model = tiny(**way, **kind)
    rollout = attention_rollout(model, images())
    assert rollout.shape == (3, 8, 8)
    assert (rollout > 0).all()
    if not kind.get("cls_token", True):
        torch.testing.assert_close(rollout.sum((1, 2)), torch.ones(3))  # nothing is lost with the merging
    gradient = gradient_attention(model, images())
    assert gradient.shape == (3, 8, 8)
    # patches that merged first share their token in all later layers
    groups = token_groups(model.blocks, model.config, model.embed(images()))[0]
    T = model.config.prefix_tokens
    together = groups[0, T:, T:] > 0
    row, column = next((i, j) for i in range(64) for j in range(i) if together[i, j])
    last = attention_map(model, images()[:1], layer=-1, patch=(0, 0)).flatten()
    assert last[row] == pytest.approx(float(last[column]), rel=1e-5)


def test_maps_without_groups_are_what_they_were():
    off, plain = tiny(tome_thresholds=(1.0,) * 3), tiny()
    torch.testing.assert_close(
        gradient_attention(off, images()), gradient_attention(plain, images()), atol=1e-6, rtol=1e-3
    )


def test_multiply_adds_are_those_of_the_tokens_that_are_left():
    config = TINY.replace(tome_r=(12, 10, 7))
    D, M = 32, 64
    blocks = [(65, 53), (53, 43), (43, 36)]
    wanted = 64 * 48 * D + D * 5
    wanted += sum(before * 4 * D * D + 2 * before * before * D + after * 2 * D * M for before, after in blocks)
    assert multiply_adds(config) == wanted
    assert tokens_by_layer(TINY.replace(tome_r=100), 65) == (65, 33, 17, 9)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_a_program_that_torch_exports_merges_the_same_tokens(pool):
    model = tiny(tome_r=(8, 0, 12), pool=pool, depth=3)
    program = torch.export.export(model, (images(2),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images(5)), model(images(5)), atol=1e-6, rtol=1e-6)


@pytest.mark.openvino
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_a_graph_merges_the_same_tokens(to, tmp_path):
    report = vt.export(tiny(tome_r=(8, 4), depth=2), tmp_path / ("model.onnx" if to == "onnx" else "model"), to=to)
    assert report.largest_difference < 1e-5  # at batches 1 and 3


def test_a_graph_with_another_number_of_tokens_each_time_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="with tome_thresholds the number of tokens depends on the image"):
        vt.export(tiny(tome_thresholds=(0.5,) * 3), tmp_path / "model.onnx")
    with pytest.raises(ConversionError, match="dynamic_size=True does not support token merging"):
        vt.export(tiny(tome_r=8), tmp_path / "model.onnx", dynamic_size=True)
