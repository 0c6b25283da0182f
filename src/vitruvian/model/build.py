"""Build a model from its settings: empty, to load weights into, or initialized as in the paper's release."""

import math

import torch
from torch import Tensor, nn

from vitruvian.config import ModelConfig, ResNetConfig
from vitruvian.model.encoder import Block, DifferentialAttention, Mlp, TokenMixing, initial_lambda
from vitruvian.model.resnet import BatchNorm, LineAttention, PostActivationUnit, PreActivationUnit, ResNet
from vitruvian.model.vit import ViT

Model = ViT | ResNet


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
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | BatchNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Conv2d):
                # LeCun, as Flax draws it: variance 1 / fan-in, truncated at two deviations
                std = math.sqrt(1 / module.weight[0].numel()) / 0.87962566103423978
                nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
            if isinstance(module, BatchNorm):
                nn.init.zeros_(module.running_mean)
                nn.init.ones_(module.running_var)
            elif isinstance(module, Mlp):
                for bias in (module.fc1.bias, module.fc2.bias):
                    if bias is not None:
                        nn.init.normal_(bias, std=1e-6, generator=generator)
            elif isinstance(module, PostActivationUnit):  # each residual branch starts at zero
                nn.init.zeros_(module.norm3.weight)
            elif isinstance(module, PreActivationUnit):
                nn.init.zeros_(module.conv3.weight)
            elif isinstance(module, LineAttention):
                nn.init.normal_(module.position.offsets, std=0.02, generator=generator)
        if isinstance(model, ViT):
            initialize_vit(model, generator)
        if model.head is not None:
            nn.init.zeros_(model.head.weight)


def initialize_vit(model: ViT, generator: torch.Generator) -> None:
    for name in ("pos_embed", "row_pos_embed", "col_pos_embed", "prefix_pos_embed", "reg_tokens", "dist_token"):
        if hasattr(model.embed, name):
            nn.init.normal_(getattr(model.embed, name), std=0.02, generator=generator)
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if not isinstance(block.attn, TokenMixing):
            split_xavier(block.attn.qkv.weight, 3, generator)
        for positions in (block.pos, getattr(block.attn, "position", None)):
            for parameter in positions.parameters() if positions is not None else ():
                nn.init.normal_(parameter, std=0.02, generator=generator)
        if isinstance(block.attn, DifferentialAttention):
            share = initial_lambda(layer)
            nn.init.constant_(block.attn.subtracted, share)
            nn.init.constant_(block.attn.head_norm.weight, 1 - share)
        for scale in (block.ls1, getattr(block, "ls2", None)):
            if scale is not None:
                nn.init.constant_(scale, 1e-4)
    if model.attn_pool is not None:
        nn.init.xavier_uniform_(model.attn_pool.probe[0], generator=generator)
        split_xavier(model.attn_pool.kv.weight, 2, generator)
    if model.head_dist is not None:
        nn.init.zeros_(model.head_dist.weight)


def split_xavier(weight: Tensor, parts: int, generator: torch.Generator) -> None:
    """Initialize fused projections like the separate ones they replace."""
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part, generator=generator)
