"""How attention is written in a graph, so that the runtimes find what they compute soonest.

Queries, keys and values have a product each, because ONNX Runtime copies the parts of one product. Softmax stands
between two products, which OpenVINO joins into one kernel, and the scale of the queries is in their weights. The last
block, which has few queries, does not compute keys and values of each token: sums over tokens come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention
from vitruvian.model.positions import Offsets
from vitruvian.settings import Size

# B images, N tokens, D width, H heads of K channels, F tokens that are read


class ThreeProducts(Attention):
    """Attention whose `qkv` holds the layers of `three_layers`."""

    def forward(self, x: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:
        if first is None or self.position is not None:
            return super().forward(x, first, grid)
        return self.few(x, first, None)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        B, N, _ = x.shape
        assert isinstance(self.qkv, nn.ModuleList)
        return tuple(layer(x).view(B, N, self.num_heads, -1).transpose(1, 2) for layer in self.qkv)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:  # each (B, H, N, K)
        scaled = q if scale_in_weights(self) else q * q.shape[-1] ** -0.5
        logits = scaled @ k.transpose(-2, -1)
        return (logits if bias is None else logits + bias).softmax(dim=-1) @ v

    def few(self, x: Tensor, first: int, bias: Tensor | None) -> Tensor:
        """Scores are queries, taken through the weights of the keys, times tokens; values are made of weighted sums.

        What the bias of the keys adds is the same for every token, and softmax does not see it.
        """
        if not scale_in_weights(self):
            return super().few(x, first, bias)
        assert isinstance(self.qkv, nn.ModuleList)
        query, key, value = self.qkv
        assert isinstance(key, nn.Linear)
        assert isinstance(value, nn.Linear)
        B, _, D = x.shape
        H, K = self.num_heads, self.proj.in_features // self.num_heads
        q = query(x[:, :first]).view(B, first, H, K).transpose(1, 2)
        asked = (q @ key.weight.view(H, K, D)).reshape(B, H * first, D)
        logits = asked @ x.transpose(1, 2)  # (B, H F, N)
        # not split into heads before the sums: onnxscript removes reshapes around a product, also where a fixed batch
        # that equals the number of heads then meets them
        shares = (logits if bias is None else logits + bias[:, 0]).softmax(dim=-1)
        sums = (shares @ x).view(B, H, first, D)
        y = sums @ value.weight.view(H, K, D).transpose(1, 2)  # (B, H, F, K)
        return self.joined(y if value.bias is None else y + value.bias.view(H, 1, K))


def scale_in_weights(attention: Attention) -> bool:
    """Whether the queries are what their layer gives, and only keys meet them; a norm would undo the scale, and the
    paper's relative positions would have it twice."""
    return isinstance(attention.q_norm, nn.Identity) and not isinstance(attention.position, Offsets)


def query_scale(attention: Attention) -> float:
    """What the weights of the queries are multiplied with."""
    channels = attention.proj.in_features // attention.num_heads
    return channels**-0.5 if scale_in_weights(attention) else 1.0


def three_layers(attention: Attention) -> list[nn.Linear]:
    """The layers of queries, scaled, keys and values."""
    qkv, layers = attention.qkv, []
    scales = (query_scale(attention), 1.0, 1.0)
    biases = [None] * 3 if qkv.bias is None else qkv.bias.detach().chunk(3)
    for weight, bias, scale in zip(qkv.weight.detach().chunk(3), biases, scales):
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(weight * scale)
        layer.bias = None if bias is None else nn.Parameter(bias * scale)
        layers.append(layer)
    return layers


@contextmanager
def three_products(model: Model) -> Iterator[None]:
    """Attention written for runtimes while a model is traced."""
    held = [(part, part.qkv) for part in model.modules() if type(part) is Attention]
    for attention, _ in held:
        attention.qkv = nn.ModuleList(three_layers(attention))  # type: ignore[assignment]
        attention.__class__ = ThreeProducts
    try:
        yield
    finally:
        for attention, qkv in held:
            attention.__class__ = Attention
            attention.qkv = qkv
