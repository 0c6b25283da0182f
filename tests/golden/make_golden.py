"""Tiny checkpoints of other libraries with the answers their own models give, for tests without those libraries.

Run in an environment with timm and open_clip (1.0.30 and 3.3.0 made the files here):

    python tests/golden/make_golden.py

Each `peers/NAME.safetensors` (or `.pth`) is a checkpoint; `peers/NAME.expected.safetensors` holds `input_HxW` and
`output_HxW`: logits, or features where there is no head.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.layers import GluMlp, GroupNormAct, StdConv2d, StdConv2dSame
from timm.models import save_for_hf
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import HybridEmbed
from torch import Tensor, nn

OUT = Path(__file__).parent / "peers"
SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4, "mlp_ratio": 2, "num_classes": 5}

CONV = partial(StdConv2dSame, eps=1e-8)
GATED = {"mlp_layer": partial(GluMlp, gate_last=False), "act_layer": nn.SiLU, "mlp_ratio": 4}


def stem_with_stages(**_: object) -> nn.Module:
    return ResNetV2(
        layers=(1,), channels=(128,), stem_chs=32, num_classes=0, global_pool="", preact=False, stem_type="same",
        conv_layer=CONV,
    )  # fmt: skip


def stem_alone() -> nn.Module:
    return create_resnetv2_stem(3, 32, stem_type="same", conv_layer=CONV, preact=False)


TIMM = {
    "timm_registers": {"reg_tokens": 2, "no_embed_class": True},
    "timm_registers_placed": {"reg_tokens": 2},
    "timm_map": {"global_pool": "map", "class_token": False},
    "timm_mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "timm_swiglu": {"init_values": 0.1, **GATED},
    "timm_without_bias": {"qkv_bias": False},
    "timm_oblong": {"img_size": (32, 64)},
    "timm_headless": {"num_classes": 0},
    "timm_hybrid": {"img_size": 32, "patch_size": 1, "embed_layer": partial(HybridEmbed, backbone=stem_with_stages())},
    "timm_stem": {"img_size": 32, "patch_size": 2, "embed_layer": partial(HybridEmbed, backbone=stem_alone())},
}

VARIANTS = (
    # timm's name of an architecture with parts that no other here has; made small, and saved as for its hub
    "aimv2_large_patch14_224",
    "beit_base_patch16_224",
    "beit3_base_patch16_224",
    "eva02_base_patch14_224",
    "vit_base_patch16_18x2_224",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_base_patch16_dinov3_qkvb",
    "vit_base_patch16_rope_ape_224",
    "vit_base_patch16_rope_mixed_224",
    "vit_base_patch16_rpn_224",
    "vit_base_patch16_xp_224",
    "vit_base_patch32_siglip_256",
    "vit_pe_core_base_patch16_224",
    "vit_so150m_patch16_reg4_map_256",
)

# Not (64, 32) for the oblong: as many patches as before, which timm then leaves as they are.
OTHER_SIZES = {"timm_oblong": [(48, 64), (64, 48)], "timm_registers": [(48, 48)], "timm_registers_placed": [(48, 48)]}


def randomise(model: nn.Module) -> nn.Module:
    """Weights large enough that every part of the model shows in the answers."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 1 / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 and "token" not in name else 0.3
        offset = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def images(rows: int, columns: int) -> Tensor:
    return torch.randn(2, 3, rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))


@torch.no_grad()
def make_timm(name: str, changes: dict[str, object]) -> None:
    expected = {}
    size = changes.get("img_size", 32)
    for rows, columns in [size if isinstance(size, tuple) else (size, size), *OTHER_SIZES.get(name, [])]:
        model = randomise(VisionTransformer(**(SHAPE | changes)))
        if not expected:
            save_file({k: tensor.contiguous() for k, tensor in model.state_dict().items()}, OUT / f"{name}.safetensors")
        else:
            model.set_input_size((rows, columns))
        expected[f"input_{rows}x{columns}"] = images(rows, columns)
        expected[f"output_{rows}x{columns}"] = model(images(rows, columns)).contiguous()
    save_file(expected, OUT / f"{name}.expected.safetensors")


@torch.no_grad()
def make_variant(name: str) -> None:
    shape = SHAPE | ({"num_heads": 2} if "18x2" in name else {})  # of each of two attentions
    model = randomise(timm.create_model(name, **shape))
    save_for_hf(model, OUT / name, model_args=shape, safe_serialization=True)
    config = json.loads((OUT / name / "config.json").read_text())
    config["pretrained_cfg"]["input_size"] = [3, 32, 32]
    (OUT / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    expected = {"input_32x32": images(32, 32), "output_32x32": model(images(32, 32)).contiguous()}
    save_file(expected, OUT / f"{name}.expected.safetensors")


@torch.no_grad()
def make_open_clip() -> None:
    """open_clip's own tower with CLIP's activation, beside a text tower."""
    import open_clip

    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 8, "patch_size": 8, "mlp_ratio": 2.0}
    text = {"context_length": 4, "vocab_size": 8, "width": 8, "heads": 1, "layers": 1}
    settings = {"embed_dim": 16, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    model = randomise(open_clip.model.CLIP(**settings))
    (OUT / "open_clip").mkdir(exist_ok=True)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(state, OUT / "open_clip" / "open_clip_model.safetensors")
    statistics = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}
    view = {**statistics, "interpolation": "bicubic", "resize_mode": "shortest"}
    (OUT / "open_clip" / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": settings, "preprocess_cfg": view}, indent=2) + "\n"
    )
    expected = {"input_32x32": images(32, 32), "output_32x32": model.encode_image(images(32, 32)).contiguous()}
    save_file(expected, OUT / "open_clip.expected.safetensors")
    make_texts("open_clip", model, torch.tensor([[6, 1, 7, 0], [6, 7, 0, 0], [6, 2, 3, 7]]))


@torch.no_grad()
def make_open_clip_siglip() -> None:
    """Texts as open_clip's SigLIP has them: no causal mask, biases of the projection and of the logits."""
    import open_clip

    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 8, "patch_size": 8, "mlp_ratio": 2.0}
    text = {
        "context_length": 4, "vocab_size": 8, "width": 8, "heads": 2, "layers": 1, "no_causal_mask": True,
        "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"},
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP2", "tokenizer_kwargs": {"clean": "canonicalize"},
    }  # fmt: skip
    settings = {"embed_dim": 16, "init_logit_bias": -10, "vision_cfg": vision, "text_cfg": text}
    model = randomise(open_clip.model.CustomTextCLIP(**settings))
    folder = OUT / "open_clip_siglip"
    folder.mkdir(exist_ok=True)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": settings | {"custom_text": True}}, indent=2))
    make_texts("open_clip_siglip", model, torch.tensor([[2, 3, 1, 0], [4, 1, 0, 0], [5, 6, 7, 1]]))


@torch.no_grad()
def make_texts(name: str, model: torch.nn.Module, tokens: Tensor) -> None:
    """What a two-tower model makes of images and token numbers."""
    logits = model.get_logits(images(32, 32), tokens)[0]
    expected = {"pixels": images(32, 32), "tokens": tokens, "logits_per_image": logits.contiguous()}
    save_file(expected, OUT / f"{name}.texts.safetensors")


@torch.no_grad()
def make_bit() -> None:
    """A BiT ResNet under timm's names, small."""
    model = randomise(
        ResNetV2(
            layers=(2,), channels=(128,), stem_chs=32, num_classes=5, stem_type="fixed",
            conv_layer=partial(StdConv2d, eps=1e-8), act_layer=nn.ReLU, norm_layer=partial(GroupNormAct, num_groups=32),
        )
    )  # fmt: skip
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(state, OUT / "timm_bit.safetensors")
    expected = {"pixels": images(32, 48), "logits": model(images(32, 48)).contiguous()}
    save_file(expected, OUT / "timm_bit.logits.safetensors")


@torch.no_grad()
def make_mixer() -> None:
    model = randomise(MlpMixer(img_size=32, patch_size=8, num_blocks=2, embed_dim=24, num_classes=5))
    save_file(dict(model.state_dict()), OUT / "timm_mixer.safetensors")
    save_file({"input": images(32, 32), "logits": model(images(32, 32))}, OUT / "timm_mixer.logits.safetensors")


@torch.no_grad()
def make_dino() -> None:
    """DINO's layout and its way with positions, on timm's blocks: a scale factor with 0.1 added to the new side."""
    model = randomise(VisionTransformer(**(SHAPE | {"num_classes": 0})))
    state = model.state_dict()
    training = {"teacher": {f"backbone.{key}": value for key, value in state.items()}, "epoch": 3}
    training["teacher"]["head.mlp.0.weight"] = torch.zeros(4, 4)
    torch.save(training, OUT / "dino.pth")
    expected = {}
    for rows, columns in ((32, 32), (48, 48), (32, 64)):
        expected[f"input_{rows}x{columns}"] = images(rows, columns)
        expected[f"output_{rows}x{columns}"] = dino_forward(model, images(rows, columns)).contiguous()
    save_file(expected, OUT / "dino.expected.safetensors")


def dino_forward(model: VisionTransformer, pixels: Tensor) -> Tensor:
    grid = pixels.shape[-2] // 8, pixels.shape[-1] // 8
    positions = model.pos_embed[:, 1:]
    if grid != (4, 4):
        square = positions.reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
        factors = ((grid[0] + 0.1) / math.sqrt(16), (grid[1] + 0.1) / math.sqrt(16))
        positions = F.interpolate(square, scale_factor=factors, mode="bicubic").permute(0, 2, 3, 1).reshape(1, -1, 32)
    patches = model.patch_embed.proj(pixels).flatten(2).transpose(1, 2) + positions
    tokens = (model.cls_token + model.pos_embed[:, :1]).expand(len(pixels), -1, -1)
    return model.norm(model.blocks(torch.cat([tokens, patches], dim=1)))[:, 0]


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name, changes in TIMM.items():
        make_timm(name, changes)
    for name in VARIANTS:
        make_variant(name)
    make_open_clip()
    make_open_clip_siglip()
    make_bit()
    make_mixer()
    make_dino()
