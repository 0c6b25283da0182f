"""Attention, computed in two ways."""

import pytest
import torch
import torch.nn.functional as F

from vitruvian.config import ViTConfig
from vitruvian.model import encoder
from vitruvian.model.encoder import attend_with_stored_weights


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 3, 2, 5, 4)])
def test_attention_with_stored_weights_has_the_gradients_of_the_fused_kernel(shape):
    rng = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(5, 5, generator=rng, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, generator=rng, dtype=torch.float64)
    stored = attend_with_stored_weights(*parts, bias, 0.0)
    fused = F.scaled_dot_product_attention(*parts, attn_mask=bias)
    torch.testing.assert_close(stored, fused, rtol=0, atol=1e-14)
    for ours, theirs in zip(*(torch.autograd.grad(y, (*parts, bias), upstream) for y in (stored, fused))):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_training_in_bfloat16_on_a_cpu_stores_the_weights_of_small_images_only(monkeypatch):
    calls = []
    monkeypatch.setattr(encoder, "attend_with_stored_weights", lambda q, *rest: calls.append(q.shape) or q)
    attention = encoder.Attention(ViTConfig(width=8, num_heads=2, depth=1))
    q = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    attention.attend(q, q, q, None)
    assert not calls, "inference uses the fused kernel"
    full = q.float().requires_grad_()
    attention.attend(full, full, full, None)
    assert not calls, "in float32, the fused kernel is as fast"
    attention.attend(q.requires_grad_(), q, q, None)
    assert len(calls) == 1
    monkeypatch.setattr(encoder, "MAX_STORED_WEIGHTS", 17)
    attention.attend(q, q, q, None)
    assert len(calls) == 1
