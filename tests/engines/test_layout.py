"""Attention as graphs have it gives the numbers of attention as the module has it."""

import pytest
import torch

import vitruvian as vt
from vitruvian.engines import sessions
from vitruvian.engines.choose import Way, measure
from vitruvian.engines.layout import ThreeProducts, three_products

CONFIG = vt.ViTConfig(image_size=16, patch_size=4, depth=2, width=24, mlp_dim=16, num_heads=3, num_classes=3)


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"qk_norm": True}, {"tome_r": 2}])
@pytest.mark.parametrize("first", [1, 2])
def test_few_queries_answer_as_if_every_key_and_value_were_computed(changes, first):
    model = vt.build(CONFIG.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    attention = model.blocks[-1].attn
    for parameter in attention.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.5
    x = torch.randn(2, 17, 24, generator=generator)
    sizes = torch.randint(1, 5, (2, 1, 1, 17), generator=generator).float()
    with torch.no_grad():
        wanted = [attention(x, first), attention.few(x, first, sizes.log())]
        with three_products(model):
            assert type(attention) is ThreeProducts
            found = [attention(x, first), attention.few(x, first, sizes.log())]
    for mine, theirs in zip(found, wanted):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)  # float32 sums in another order


def test_a_measurement_that_takes_too_long_has_few_rounds():
    ways = {Way("one"): lambda pixels: pixels, Way("other"): lambda pixels: pixels}
    assert {len(found) for found in measure(ways, torch.zeros(1), 5, 0.0).values()} == {3}
    assert {len(found) for found in measure(ways, torch.zeros(1), 5).values()} == {5}


def test_pieces_of_a_batch_that_is_cut_evenly_have_a_graph_of_their_own(tmp_path, monkeypatch):
    opened = []

    def open_session(path, engine, *, split, batch_size):
        opened.append(batch_size)
        return lambda pixels: torch.full((len(pixels), 1), float(batch_size))

    monkeypatch.setattr(sessions, "open_session", open_session)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run = sessions.WholeImages(tmp_path / "model.onnx", "onnxruntime")
    answers = [float(run(torch.zeros(batch, 3, 2, 2))[0]) for batch in (16, 8, 5, 12, 4, 16)]
    assert answers == [4, 4, 1, 1, 1, 4]  # 12 and 4 would want a third graph: pieces of 3 and of 2
    assert opened == [4, 1]
