"""Attention in exported graphs, in the form that the runtimes execute fastest.

Queries, keys and values have one product each, because ONNX Runtime copies the parts of a joint product. Softmax is
written between two products, which OpenVINO fuses into one kernel, and the scale of the queries is folded into their
weights. The last block, which computes few queries, never computes keys and values for each token: it sums over tokens
first.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention
from vitruvian.model.positions import Offsets
from vitruvian.settings import Size

# B images, N tokens, D width, H heads of K channels, F tokens that are read


class ExportedAttention(Attention):
    """Attention whose `qkv` holds the three layers of `split_qkv`."""

    def forward(self, x: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:
        if first is None or self.position is not None:
            return super().forward(x, first, grid)
        return self.attend_first(x, first, None)

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        B, N, _ = x.shape
        assert isinstance(self.qkv, nn.ModuleList)
        return tuple(layer(x).view(B, N, self.num_heads, -1).transpose(1, 2) for layer in self.qkv)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:  # each (B, H, N, K)
        scaled = q if folds_scale(self) else q * q.shape[-1] ** -0.5
        logits = scaled @ k.transpose(-2, -1)
        return (logits if bias is None else logits + bias).softmax(dim=-1) @ v

    def attend_first(self, x: Tensor, first: int, bias: Tensor | None) -> Tensor:
        """Attention of the first F tokens without keys and values of all N.

        With key weights W_k and value weights W_v, q (x W_k)^T = (q W_k^T) x^T and softmax(..) (x W_v) =
        (softmax(..) x) W_v: the weights are applied to F tokens instead of N. The bias of the keys adds the same number
        to all logits of a query, which softmax ignores.
        """
        if not folds_scale(self):
            return super().attend_first(x, first, bias)
        assert isinstance(self.qkv, nn.ModuleList)
        query, key, value = self.qkv
        assert isinstance(key, nn.Linear)
        assert isinstance(value, nn.Linear)
        B, _, D = x.shape
        H, K = self.num_heads, self.proj.in_features // self.num_heads
        q = query(x[:, :first]).view(B, first, H, K).transpose(1, 2)
        projected = (q @ key.weight.view(H, K, D)).reshape(B, H * first, D)
        logits = projected @ x.transpose(1, 2)  # (B, H F, N)
        # Heads and queries stay one axis up to the sums: onnxscript removes reshapes around a product, even if a fixed
        # batch size that equals the number of heads then meets the wrong axis.
        weights = (logits if bias is None else logits + bias[:, 0]).softmax(dim=-1)
        sums = (weights @ x).view(B, H, first, D)
        y = sums @ value.weight.view(H, K, D).transpose(1, 2)  # (B, H, F, K)
        return self.output(y if value.bias is None else y + value.bias.view(H, 1, K))


def folds_scale(attention: Attention) -> bool:
    """Whether the scale can be folded into the query weights.

    A norm of the queries would undo it, and the paper's relative positions would apply it twice.
    """
    return isinstance(attention.q_norm, nn.Identity) and not isinstance(attention.position, Offsets)


def split_qkv(attention: Attention) -> list[tuple[nn.Linear, float]]:
    """The layers of queries, keys and values, and the factor by which the weights of each were multiplied."""
    qkv, layers = attention.qkv, []
    scale = (attention.proj.in_features // attention.num_heads) ** -0.5 if folds_scale(attention) else 1.0
    biases = [None] * 3 if qkv.bias is None else qkv.bias.detach().chunk(3)
    for weight, bias, factor in zip(qkv.weight.detach().chunk(3), biases, (scale, 1.0, 1.0)):
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(weight * factor)
        layer.bias = None if bias is None else nn.Parameter(bias * factor)
        layers.append((layer, factor))
    return layers


@contextmanager
def exported_attention(model: Model) -> Iterator[None]:
    """Replace the model's attention by ExportedAttention while it is traced."""
    replaced = [(module, module.qkv) for module in model.modules() if type(module) is Attention]
    for attention, _ in replaced:
        attention.add_module("qkv", nn.ModuleList(layer for layer, _ in split_qkv(attention)))
        attention.__class__ = ExportedAttention
    try:
        yield
    finally:
        for attention, qkv in replaced:
            attention.__class__ = Attention
            attention.qkv = qkv
