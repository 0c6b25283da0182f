"""The peers' own models holding our weights, for measurements side by side."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import vitruvian as vt

WORDS = {"Ti": "tiny", "S": "small", "B": "base"}
Forward = Callable[[Tensor], Tensor]


def declare_torchvision_operators() -> None:
    """Let torchvision import beside a CPU build of torch: declare the operators its library would bring."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed: run `make bench`, which builds .venv-peers")
    text = Path(spec.origin).with_name("_meta_registrations.py").read_text()
    names = sorted({*re.findall(r'register_meta\("(\w+)"\)', text), *re.findall(r'"torchvision::(\w+)"', text)})
    library = torch.library.Library("torchvision", "DEF")
    for name in names:
        library.define(f"{name}(Tensor x) -> Tensor")
    globals()["_keep"] = library  # the declarations live as long as this object


class _Named(type):
    """A class whose constants are their names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(types.ModuleType):
    """A module that has every name; timm's transforms mention torchvision's, its models use none."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


def make_torchvision_importable() -> None:
    """For timm, which imports it for its transforms: the installed one, or an empty one in its place."""
    if importlib.util.find_spec("torchvision") is not None:
        declare_torchvision_operators()
        return
    for name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".ops", ".ops.misc", ".datasets"):
        module = sys.modules[f"torchvision{name}"] = _Anything(f"torchvision{name}")
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def timm_model(ours: vt.ViT, size: str, folder: Path) -> nn.Module:
    import timm

    vt.save(ours, folder / "timm.safetensors", family="timm")
    return timm.create_model(
        f"vit_{WORDS[size]}_patch16_224",
        checkpoint_path=str(folder / "timm.safetensors"),
    )


def torchvision_model(ours: vt.ViT, folder: Path) -> nn.Module:
    import torchvision

    config = ours.config
    vt.save(ours, folder / "torchvision.pth", family="torchvision")
    model = torchvision.models.VisionTransformer(224, 16, config.depth, config.num_heads, config.width, config.mlp_dim)
    model.load_state_dict(torch.load(folder / "torchvision.pth", weights_only=True))
    return model


def transformers_model(ours: vt.ViT, folder: Path) -> Forward:
    import transformers

    vt.save(ours, folder / "huggingface", family="huggingface")
    model = transformers.ViTForImageClassification.from_pretrained(folder / "huggingface").eval()
    return lambda pixels: model(pixels).logits


def vit_pytorch_model(ours: vt.ViT) -> nn.Module:
    """Of the same shape with weights of its own: it adds two norms around the patch embedding."""
    import vit_pytorch

    config = ours.config
    return vit_pytorch.ViT(
        image_size=224,
        patch_size=16,
        num_classes=config.num_classes,
        dim=config.width,
        depth=config.depth,
        heads=config.num_heads,
        mlp_dim=config.mlp_dim,
        dim_head=config.width // config.num_heads,
    )


def peers_of(ours: vt.ViT, size: str, folder: Path) -> dict[str, Forward]:
    """Each peer's forward pass, in evaluation mode."""
    return {
        "timm": timm_model(ours, size, folder).eval(),
        "torchvision": torchvision_model(ours, folder).eval(),
        "transformers": transformers_model(ours, folder),
        "vit-pytorch": vit_pytorch_model(ours).eval(),
    }
