"""Image recognition with Vision Transformers.

Names are imported when first used, so that importing the package is instant and has no effect.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitruvian.config import ModelConfig, Numerics, Preprocess, ResNetConfig, StemConfig, ViTConfig
    from vitruvian.data.preprocess import preprocess_image
    from vitruvian.errors import Interrupted, VitruvianError
    from vitruvian.evaluation.measuring.evaluate import evaluate
    from vitruvian.evaluation.probes.probe import probe
    from vitruvian.explain import Explainer, MapSettings
    from vitruvian.model.build import build, create_model
    from vitruvian.model.resnet import ResNet
    from vitruvian.model.vit import ViT
    from vitruvian.predict import Answer, Classifier, Prediction, features
    from vitruvian.training import Listener, Recipe, Run, read_recipe
    from vitruvian.training.finetune import finetune, protocol_for
    from vitruvian.training.train import resume, train
    from vitruvian.weights import Certificate, convert, load, save

__version__ = "0.1.0"

_HOMES = {
    "Answer": "predict",
    "Certificate": "weights",
    "Classifier": "predict",
    "Explainer": "explain",
    "Interrupted": "errors",
    "Listener": "training",
    "MapSettings": "explain",
    "ModelConfig": "config",
    "Numerics": "config",
    "Prediction": "predict",
    "Preprocess": "config",
    "Recipe": "training",
    "ResNet": "model.resnet",
    "ResNetConfig": "config",
    "Run": "training",
    "StemConfig": "config",
    "ViT": "model.vit",
    "ViTConfig": "config",
    "VitruvianError": "errors",
    "build": "model.build",
    "convert": "weights",
    "create_model": "model.build",
    "evaluate": "evaluation.measuring.evaluate",
    "features": "predict",
    "finetune": "training.finetune",
    "load": "weights",
    "preprocess_image": "data.preprocess",
    "probe": "evaluation.probes.probe",
    "protocol_for": "training.finetune",
    "read_recipe": "training",
    "resume": "training.train",
    "save": "weights",
    "train": "training.train",
}

__all__ = [
    "Answer",
    "Certificate",
    "Classifier",
    "Explainer",
    "Interrupted",
    "Listener",
    "MapSettings",
    "ModelConfig",
    "Numerics",
    "Prediction",
    "Preprocess",
    "Recipe",
    "ResNet",
    "ResNetConfig",
    "Run",
    "StemConfig",
    "ViT",
    "ViTConfig",
    "VitruvianError",
    "build",
    "convert",
    "create_model",
    "evaluate",
    "features",
    "finetune",
    "load",
    "preprocess_image",
    "probe",
    "protocol_for",
    "read_recipe",
    "resume",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitruvian' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vitruvian.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
