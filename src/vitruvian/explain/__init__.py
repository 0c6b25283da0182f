"""Explain Vision Transformers: attention maps, principal components of patches, deletion curves, figures."""

from vitruvian.explain.attention import attention_map, attention_rollout, gradient_attention, patch_logits
from vitruvian.explain.deletion import Curve, deletion_curves
from vitruvian.explain.explainer import Explained, Explainer, Map, MapSettings, explain_images
from vitruvian.explain.figures import Figure, attention_distance, draw_figures, filter_components, position_similarity
from vitruvian.explain.overlay import image_with_crop, overlay, paint, seen_box
from vitruvian.explain.patches import Components, fit_components, patch_tokens

__all__ = [
    "Components", "Curve", "Explained", "Explainer", "Figure", "Map", "MapSettings", "attention_distance",
    "attention_map", "attention_rollout", "deletion_curves", "draw_figures", "explain_images", "filter_components",
    "fit_components", "gradient_attention", "image_with_crop", "overlay", "paint", "patch_logits", "patch_tokens",
    "position_similarity", "seen_box",
]  # fmt: skip
