"""Attention as it is exported computes the numbers of the model's attention."""

import pytest
import torch

import vitruvian as vt
from vitruvian.engines.export import ExportedAttention, exported_attention

CONFIG = vt.ViTConfig(image_size=16, patch_size=4, depth=2, width=24, mlp_dim=16, num_heads=3, num_classes=3)


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"qk_norm": True}, {"tome_r": 2}])
@pytest.mark.parametrize("first", [1, 2])
def test_few_queries_get_the_output_of_full_attention(changes, first):
    model = vt.build(CONFIG.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    attention = model.blocks[-1].attn
    for parameter in attention.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.5
    x = torch.randn(2, 17, 24, generator=generator)
    sizes = torch.randint(1, 5, (2, 1, 1, 17), generator=generator).float()
    with torch.no_grad():
        expected = [attention(x, first), attention.attend_first(x, first, sizes.log())]
        with exported_attention(model):
            assert type(attention) is ExportedAttention
            result = [attention(x, first), attention.attend_first(x, first, sizes.log())]
    for mine, theirs in zip(result, expected):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)  # float32 sums in another order
