"""Explain Vision Transformers: attention, rollout and gradient-weighted maps, deletion curves, figures."""

from vitruvian.explain.attention import attention_map, attention_rollout, gradient_attention
from vitruvian.explain.deletion import Curve, deletion_curves
from vitruvian.explain.explainer import Explained, Explainer, Map, MapSettings, explain_images
from vitruvian.explain.figures import Figure, attention_distance, draw_figures, filter_components, position_similarity
from vitruvian.explain.overlay import image_with_crop, overlay, seen_box

__all__ = [
    "Curve", "Explained", "Explainer", "Figure", "Map", "MapSettings", "attention_distance",
    "attention_map", "attention_rollout", "deletion_curves", "draw_figures", "explain_images", "filter_components",
    "gradient_attention", "image_with_crop", "overlay", "position_similarity", "seen_box",
]  # fmt: skip
