"""A user's own torch.export of a model: batch and image size stay open, and the numbers stay the same."""

import logging

import pytest
import torch
from torch.export import Dim, export

from vitruvian.config import Numerics, RopeConfig, ViTConfig
from vitruvian.model.build import build
from vitruvian.model.positions import axial_tables, cached

TINY = ViTConfig(image_size=16, patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)
KINDS = {
    "class token": {},
    "mean pool": {"pool": "mean", "cls_token": False, "pos_embed": "sincos"},
    "registers": {"reg_tokens": 2, "numerics": Numerics(position_resize="dino")},
    "rotary": {"pos_embed": "none", "rope": RopeConfig(reference_grid=(2, 2))},
    "two tokens concatenated": {"pool": "prefix_concat", "pool_tokens": 2, "reg_tokens": 2},
    "relative bias": {"pos_embed": "relative_bias"},
    "differential": {"attention": "differential"},
    "factorized": {"pos_embed": "factorized", "numerics": Numerics(square_positions=True)},
    "square positions": {"numerics": Numerics(position_resize="bicubic_antialias", square_positions=True)},
    "MAP head": {"pool": "map", "cls_token": False, "numerics": Numerics(position_resize="bicubic_antialias")},
}


@pytest.fixture(autouse=True)
def quiet_tracer():
    """The tracer writes thousands of lines for developers, which pytest would format and keep."""
    logger = logging.getLogger("torch.__trace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def random_model(**changes):
    model = build(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_an_exported_program_answers_like_the_model_for_every_batch(changes):
    model = random_model(**changes)
    program = export(model, (torch.randn(2, 3, 16, 16),), dynamic_shapes=({0: Dim("batch")},)).module()
    for batch in (1, 3):
        pixels = torch.randn(batch, 3, 16, 16)
        torch.testing.assert_close(program(pixels), model(pixels), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_an_exported_program_resizes_positions_for_every_size():
    model = random_model(**KINDS["registers"])
    shapes = {2: 8 * Dim("rows", min=2, max=64), 3: 8 * Dim("columns", min=2, max=64)}
    program = export(model, (torch.randn(2, 3, 24, 40),), dynamic_shapes=(shapes,)).module()
    for size in ((16, 16), (16, 32), (56, 24)):
        pixels = torch.randn(2, 3, *size)
        torch.testing.assert_close(program(pixels), model(pixels), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_tracing_leaves_no_symbols_in_the_tables_that_are_cached():
    model = random_model(pos_embed="none", rope=RopeConfig(temperature=77.0))
    program = export(model, (torch.randn(2, 3, 16, 16),), dynamic_shapes=({0: Dim("batch")},)).module()
    torch.testing.assert_close(program(torch.ones(3, 3, 16, 16)), model(torch.ones(3, 3, 16, 16)))
    first = cached(axial_tables, model.config.rope, (2, 2), 8)
    assert type(first[0]) is torch.Tensor
    assert cached(axial_tables, model.config.rope, (2, 2), 8) is first
