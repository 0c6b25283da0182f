"""A tiny model whose channels differ in size, images, and timers that pretend."""

import torch

import vitruvian as vt

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=2, width=16, mlp_dim=32, num_heads=2, num_classes=3)
LABELS = ("cat", "dog", "owl")
PIXELS = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def tiny_model(**changes):
    """A model with channels of very different sizes, which plain int8 would not handle."""
    model = vt.build(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if "norm" in name and parameter.dim() == 1:
                parameter[::4] *= 30
    preprocess = vt.Preprocess(image_size=16, mean=(0.4, 0.5, 0.6))
    model.meta = model.meta.replace(labels=LABELS, preprocess=preprocess, temperature=1.5)
    return model


def model_with_an_outlier():
    """One channel behind GELU has values a hundred times those of the others, and small weights."""
    model = tiny_model()
    with torch.no_grad():
        mlp = model.blocks[0].mlp
        mlp.fc1.weight[3] *= 100
        mlp.fc1.bias[3] *= 100
        mlp.fc2.weight[:, 3] /= 100
    return model, PIXELS


def faster(forwards, pixels):
    """A machine on which int8 has twice the speed of float, and fewer tokens are faster still."""
    return {name: 0.5 ** ("int8" in name) / (1 + len(name)) for name in forwards}
