"""Image recognition with Vision Transformers.

Names are imported when first used, so that importing the package is instant and has no effect.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitruvian.bulk import embed, merge, ray
    from vitruvian.bulk.similar import similar
    from vitruvian.config import ModelConfig, Numerics, Preprocess, ResNetConfig, StemConfig, ViTConfig
    from vitruvian.data.preprocess import preprocess_image
    from vitruvian.data.transform import transform
    from vitruvian.engines.export import export
    from vitruvian.errors import Interrupted, VitruvianError
    from vitruvian.evaluation.fast.optimize import optimize
    from vitruvian.evaluation.fast.quantize import quantize
    from vitruvian.evaluation.measuring.evaluate import evaluate
    from vitruvian.evaluation.probes.probe import probe
    from vitruvian.explain import Explainer, MapSettings
    from vitruvian.model.build import build, create_model
    from vitruvian.model.resnet import ResNet
    from vitruvian.model.vit import ViT
    from vitruvian.predict import Answer, Classifier, Prediction, embed_images, features
    from vitruvian.training import Listener, Recipe, Run, read_recipe
    from vitruvian.training.finetune import finetune, protocol_for
    from vitruvian.training.train import resume, train
    from vitruvian.weights import Certificate, convert, load, save
    from vitruvian.weights.load import with_merging
    from vitruvian.weights.words import embed_texts, with_words

__version__ = "0.1.0"

_NAMES = {
    "bulk": "ray",
    "bulk.run": "embed",
    "bulk.merge": "merge",
    "bulk.similar": "similar",
    "config": "ModelConfig Numerics Preprocess ResNetConfig StemConfig ViTConfig",
    "data.preprocess": "preprocess_image",
    "data.transform": "transform",
    "engines.export": "export",
    "errors": "Interrupted VitruvianError",
    "evaluation.fast.optimize": "optimize",
    "evaluation.fast.quantize": "quantize",
    "evaluation.measuring.evaluate": "evaluate",
    "evaluation.probes.probe": "probe",
    "explain": "Explainer MapSettings",
    "model.build": "build create_model",
    "model.resnet": "ResNet",
    "model.vit": "ViT",
    "predict": "Answer Classifier Prediction embed_images features",
    "training": "Listener Recipe Run read_recipe",
    "training.finetune": "finetune protocol_for",
    "training.train": "resume train",
    "weights": "Certificate convert load save",
    "weights.load": "with_merging",
    "weights.words": "embed_texts with_words",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

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
    "embed",
    "embed_images",
    "embed_texts",
    "evaluate",
    "export",
    "features",
    "finetune",
    "load",
    "merge",
    "optimize",
    "preprocess_image",
    "probe",
    "protocol_for",
    "quantize",
    "ray",
    "read_recipe",
    "resume",
    "save",
    "similar",
    "train",
    "transform",
    "with_merging",
    "with_words",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitruvian' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vitruvian.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
