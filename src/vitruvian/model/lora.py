"""LoRA and DoRA: low-rank updates of dense layers, trained while the layers themselves stay frozen.

LoRA (Hu et al., arXiv:2106.09685) replaces W x by W x + s B A x. DoRA (Liu et al., arXiv:2402.09353) also learns the
length of each row of W + s B A. The fused layer of queries, keys and values has an update per part.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import LoraConfig
from vitruvian.errors import ConfigError

# r rank, I inputs and O outputs of a part of a layer

PARTS = {
    "q": ("attn.qkv", 0, 3),
    "k": ("attn.qkv", 1, 3),
    "v": ("attn.qkv", 2, 3),
    "qkv": ("attn.qkv", 0, 1),
    "proj": ("attn.proj", 0, 1),
    "fc1": ("mlp.fc1", 0, 1),
    "fc2": ("mlp.fc2", 0, 1),
}
"""The layer of a block that a target is in, its position there, and the number of such parts."""
TRAINED = ("head.", "head_dist.")  # trained beside the updates


def rows_of(part: str, outputs: int) -> slice:
    """The rows of a layer's weight that belong to a part."""
    _, position, count = PARTS[part]
    size = outputs // count
    return slice(position * size, (position + 1) * size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The update of one part of a layer."""

    a: Tensor  # (r, I)
    b: Tensor  # (O, r)
    scale: float
    magnitude: Tensor | None = None  # (O,), DoRA's lengths of the rows


class LoraLinear(nn.Linear):
    """A dense layer with low-rank updates of some of its parts; `weight` and `bias` are those of `layer`."""

    def __init__(self, layer: nn.Linear, updates: Mapping[str, Update]) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scales = {part: update.scale for part, update in updates.items()}
        self.lora_A = nn.ParameterDict({part: nn.Parameter(update.a) for part, update in updates.items()})
        self.lora_B = nn.ParameterDict({part: nn.Parameter(update.b) for part, update in updates.items()})
        lengths = {part: nn.Parameter(u.magnitude) for part, u in updates.items() if u.magnitude is not None}
        self.lora_magnitude = nn.ParameterDict(lengths)

    def forward(self, x: Tensor) -> Tensor:  # (..., I) -> (..., O)
        if not self.lora_magnitude:
            y = F.linear(x, self.weight, self.bias)
            for part, scale in self.scales.items():
                update = F.linear(F.linear(x, self.lora_A[part]), self.lora_B[part])
                y[..., rows_of(part, self.out_features)].add_(update, alpha=scale)
            return y
        y = F.linear(x, self.weight)
        for part, scale in self.scales.items():
            rows, a, b = rows_of(part, self.out_features), self.lora_A[part], self.lora_B[part]
            with torch.no_grad():  # the norm counts as a constant in the gradient, as in the paper
                norm = (self.weight[rows] + scale * (b @ a)).norm(dim=1)
            updated = torch.add(y[..., rows], F.linear(F.linear(x, a), b), alpha=scale)
            y = torch.cat([y[..., : rows.start], updated * (self.lora_magnitude[part] / norm), y[..., rows.stop :]], -1)
        return y if self.bias is None else y + self.bias

    def merge(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight of a plain layer with the same outputs, from these parameters."""
        weight = tensors["weight"].clone()
        for part, scale in self.scales.items():
            rows = rows_of(part, self.out_features)
            updated = weight[rows] + scale * (tensors[f"lora_B.{part}"] @ tensors[f"lora_A.{part}"])
            magnitude = tensors.get(f"lora_magnitude.{part}")
            weight[rows] = (
                updated if magnitude is None else updated * (magnitude / updated.norm(dim=1).clamp(min=1e-12))[:, None]
            )
        return weight


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The layers with updates, by name; none for a plain model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def set_updates(model: nn.Module, updates: Mapping[tuple[int, str], Update]) -> None:
    """Replace layers of a model by layers with these updates, given by block and part."""
    layers: dict[str, dict[str, Update]] = {}
    for (block, part), update in updates.items():
        layers.setdefault(f"blocks.{block}.{PARTS[part][0]}", {})[part] = update
    for name, parts in layers.items():
        owner, _, attribute = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(model.get_submodule(owner), attribute, LoraLinear(layer, parts))


def add_lora(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> None:
    """Give the dense layers of the blocks low-rank updates, which change no output yet, and freeze all but these.

    The head stays trainable. The model's layers are replaced in place; `save` writes a plain model with all updates
    merged, and `save_adapter` the updates alone.

    Args:
        model: A Vision Transformer.
        config: Rank and layers.
        seed: Seed of the random initialization.

    Raises:
        ConfigError: The model has none of the layers.
    """
    depth, modules = len(getattr(model, "blocks", ())), dict(model.named_modules())
    missing = [part for part in config.parts if not isinstance(modules.get(f"blocks.0.{PARTS[part][0]}"), nn.Linear)]
    if not depth or (missing and "all" not in config.targets) or len(missing) == len(config.parts):
        raise ConfigError(f"lora.targets={list(config.targets)}: this model has no layers {missing or 'of blocks'}")
    generator, updates = torch.Generator().manual_seed(seed), dict[tuple[int, str], Update]()
    for block in range(depth):
        for part in (part for part in config.parts if part not in missing):
            weight: Tensor = modules[f"blocks.{block}.{PARTS[part][0]}"].weight.detach()
            weight = weight[rows_of(part, len(weight))]
            a = torch.empty(config.rank, weight.shape[1])
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            magnitude = weight.norm(dim=1) if config.dora else None
            b = weight.new_zeros(len(weight), config.rank)
            updates[block, part] = Update(a=a.to(weight), b=b, scale=config.scale, magnitude=magnitude)
    set_updates(model, updates)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(TRAINED))


def merge_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a plain model with the same outputs, from the tensors of a model with updates."""
    merged = dict(state)
    for name, layer in lora_layers(model):
        names = [key for key in merged if key.startswith(f"{name}.")]
        tensors = {key.removeprefix(f"{name}."): merged.pop(key) for key in names}
        merged[f"{name}.weight"] = layer.merge(tensors)
        if "bias" in tensors:
            merged[f"{name}.bias"] = tensors["bias"]
    return merged


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()`, with all updates merged if it has any."""
    return merge_state(model, model.state_dict())
