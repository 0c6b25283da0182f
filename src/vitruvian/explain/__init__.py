"""What a Vision Transformer looks at: attention, rollout, class maps, an occlusion check, the paper's figures."""

from vitruvian.explain.attention import attention_map, rollout
from vitruvian.explain.distance import attention_distance
from vitruvian.explain.embedding import filter_components, position_similarity
from vitruvian.explain.explainer import Explained, Explainer, Looks, Map
from vitruvian.explain.figures import Figure, figures
from vitruvian.explain.occlusion import Curve, occlusion_curves
from vitruvian.explain.overlay import image_with_crop, overlay, seen_box
from vitruvian.explain.relevance import class_map
from vitruvian.explain.run import Written, draw_figures, explain_images

__all__ = [
    "Curve",
    "Explained",
    "Explainer",
    "Figure",
    "Looks",
    "Map",
    "Written",
    "attention_distance",
    "attention_map",
    "class_map",
    "draw_figures",
    "explain_images",
    "figures",
    "filter_components",
    "image_with_crop",
    "occlusion_curves",
    "overlay",
    "position_similarity",
    "rollout",
    "seen_box",
]
