"""Build a model from its settings or name: empty, to load weights into, or initialized as in the paper's release."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from vitruvian.catalog import resolve
from vitruvian.config import GraphConfig, ModelConfig, ModelMeta, ResNetConfig
from vitruvian.errors import UnknownNameError
from vitruvian.model.encoder import AttentionPool, Block, DifferentialAttention, Mlp, initial_lambda
from vitruvian.model.resnet import PostActivationUnit, PreActivationUnit, ResNet, StdConv
from vitruvian.model.stems import BatchNorm
from vitruvian.model.vit import ViT

Model = ViT | ResNet


class ImageModel(Protocol):
    """The interface that inference needs; `ViT`, `ResNet` and exported graphs have it."""

    @property
    def config(self) -> ModelConfig | GraphConfig: ...

    @property
    def meta(self) -> ModelMeta: ...

    @property
    def training(self) -> bool: ...

    def __call__(self, pixels: Tensor) -> Tensor: ...

    def features(self, pixels: Tensor) -> Tensor: ...

    def train(self, mode: bool = True) -> Self: ...

    def eval(self) -> Self: ...

    def to(self, device: str) -> Self: ...


def create_model(name: str, *, seed: int = 0, **changes: Any) -> Model:
    """A model from scratch, by the name of its architecture.

    Args:
        name: A name of `vit models`, such as "ViT-B/16", or its name in timm or torchvision ("vit_base_patch16_224").
        seed: Seed of the random initialization.
        changes: Settings of the config that differ from the published ones, such as `num_classes` or `image_size`.

    Returns:
        An initialized model. The head is zero, so all logits are 0.

    Raises:
        UnknownNameError: The architecture or a setting does not exist.
    """
    config = resolve(name)
    known = [field.name for field in fields(config)]
    for key in changes:
        if key not in known:
            raise UnknownNameError(f"setting of {name}", key, known)
    return build(config.replace(**changes), seed=seed)


def build(config: ModelConfig, *, seed: int = 0) -> Model:
    """A model from scratch, by its settings.

    Args:
        config: Architecture and numerics.
        seed: Seed of the random initialization.
    """
    model = empty(config).to_empty(device="cpu")
    initialize(model, torch.Generator().manual_seed(seed))
    return model


def empty(config: ModelConfig) -> Model:
    """A model whose parameters have shapes but no memory (device `meta`), to load weights into."""
    with torch.device("meta"):
        return ResNet(config) if isinstance(config, ResNetConfig) else ViT(config)


def initialize(model: Model, generator: torch.Generator) -> None:
    """Fill the parameters: xavier-uniform kernels, LeCun convolutions, head zero, positions normal 0.02,
    class token zero, MLP biases normal 1e-6, LayerScale 1e-4."""
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        for module in model.modules():
            initialize_module(module, generator)
        if isinstance(model, ViT):
            initialize_vit(model, generator)
        if model.head is not None:
            nn.init.zeros_(model.head.weight)


def initialize_module(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, BatchNorm):
        nn.init.zeros_(module.running_mean)
        nn.init.ones_(module.running_var)
        nn.init.ones_(module.weight)
    elif isinstance(module, StdConv | nn.Conv2d):
        lecun_normal(module.weight, generator)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight, generator=generator)
    if isinstance(module, Mlp):
        for bias in (module.fc1.bias, module.fc2.bias):
            if bias is not None:
                nn.init.normal_(bias, std=1e-6, generator=generator)
    elif isinstance(module, PostActivationUnit):  # each residual branch starts at zero
        nn.init.zeros_(module.norm3.weight)
    elif isinstance(module, PreActivationUnit):
        nn.init.zeros_(module.conv3.weight)


def initialize_vit(model: ViT, generator: torch.Generator) -> None:
    embed, config = model.embed, model.config
    for name in ("pos_embed", "row_pos_embed", "col_pos_embed", "prefix_pos_embed", "reg_tokens"):
        if hasattr(embed, name):
            nn.init.normal_(getattr(embed, name), std=0.02, generator=generator)
    if config.distillation:
        nn.init.normal_(embed.dist_token, std=0.02, generator=generator)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        split_xavier(block.attn.qkv.weight, 3, generator)
        for parameter in block.attn.position.parameters() if block.attn.position is not None else ():
            nn.init.normal_(parameter, std=0.02, generator=generator)
        if isinstance(block.attn, DifferentialAttention):
            share = initial_lambda(layer)
            nn.init.constant_(block.attn.subtracted, share)
            nn.init.constant_(block.attn.head_norm.weight, 1 - share)
        for scale in (block.ls1, getattr(block, "ls2", None)):
            if scale is not None:
                nn.init.constant_(scale, 1e-4)
    if isinstance(model.attn_pool, AttentionPool):
        nn.init.xavier_uniform_(model.attn_pool.probe[0], generator=generator)
        split_xavier(model.attn_pool.kv.weight, 2, generator)
    if model.head_dist is not None:
        nn.init.zeros_(model.head_dist.weight)


def split_xavier(weight: Tensor, parts: int, generator: torch.Generator) -> None:
    """Initialize fused projections like the separate ones they replace."""
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)


def lecun_normal(weight: Tensor, generator: torch.Generator) -> None:
    """Truncated normal at two deviations with variance 1 / fan-in, as Flax draws it."""
    fan_in = weight[0].numel()
    std = math.sqrt(1 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
