"""Intermediate results of a model on one image, as small arrays for the page."""

import base64
import io
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.errors import ConfigError
from vitruvian.explain.attention import attention_rollout, gradient_attention, require_vit
from vitruvian.explain.deletion import cover_patches
from vitruvian.explain.reconstruct import to_image, unnormalize
from vitruvian.inference import Classifier, Encoder, probabilities_of
from vitruvian.model.cores import eval_mode
from vitruvian.model.vit import ViT

# L layers, H heads, N tokens (T before the patches), P patches, K classes

Part = Literal["input", "layers", "rollout", "gradient", "attention", "similarity"]
PARTS: tuple[Part, ...] = get_args(Part)
NEED_HEAD = frozenset({"layers", "gradient"})
MAX_16_BIT_SIZE = 4_000_000  # larger arrays are sent with 8 bits per number
MAX_SIZE = 32_000_000  # maximum size of an array that is sent
TOP_CLASSES = 5  # final predictions to follow through the layers, in addition to the best class of each layer

Json = dict[str, Any]


def inspect_image(
    encoder: Encoder, pixels: Tensor, parts: Sequence[Part], *, layer: int = -1, target: int | None = None
) -> Json:
    """Intermediate results for normalized pixels (channels, rows, columns), by name.

    Args:
        layer: Layer of `attention` and `similarity`; negative values count from the end.
        target: Class index of `gradient`; by default the top prediction.
    """
    vit = require_vit(encoder.model)
    for part in parts:
        if part in NEED_HEAD and not isinstance(encoder, Classifier):
            raise ConfigError("this model has no head, so it makes no predictions", where=part)
    batch = pixels[None].to(encoder.device)
    layer = vit.layer(layer)
    result: Json = {"grid": list(vit.config.grid_of((pixels.shape[1], pixels.shape[2])))}
    if "input" in parts:
        result["input"] = png_base64(to_image(unnormalize(pixels, vit.meta.preprocess)))
    if "layers" in parts:
        assert isinstance(encoder, Classifier)
        result["layers"] = layer_predictions(encoder, vit, batch)
    if "rollout" in parts:
        result["rollout"] = pack_array(attention_rollout(vit, batch)[0])
    if "gradient" in parts:
        result["gradient"] = pack_array(gradient_attention(vit, batch, None if target is None else [target])[0])
    if "attention" in parts:
        result["attention"] = pack_array(attention_weights(vit, batch, layer))
    if "similarity" in parts:
        result["similarity"] = pack_array(patch_similarity(vit, batch, layer), low=-1.0)
    return result


def erase_patches(pixels: Tensor, patches: Sequence[int], encoder: Encoder) -> Tensor:
    """Replace these patches (row * columns + column) with the mean color of the image."""
    if not patches:
        return pixels
    grid = require_vit(encoder.model).config.grid_of((pixels.shape[1], pixels.shape[2]))
    count = grid[0] * grid[1]
    if not 0 <= min(patches) <= max(patches) < count:
        raise ConfigError(f"patches are numbered from 0 to {count - 1}", where="erased")
    return cover_patches(pixels, np.asarray(patches, dtype=np.int64), grid)


def attention_weights(vit: ViT, batch: Tensor, layer: int) -> Tensor:  # (H, N, N)
    tokens = vit.config.prefix_tokens + batch.shape[2] * batch.shape[3] // vit.config.stride**2
    if vit.config.num_heads * tokens**2 > MAX_SIZE:
        reason = f"{vit.config.num_heads} heads of {tokens} x {tokens} numbers are too many to send"
        raise ConfigError(reason, where="attention", hint="serve the model with a smaller --image-size")
    with eval_mode(vit), torch.no_grad():
        return next(weights[0] for _, weights in vit.attention_maps(batch, [layer]))


def patch_similarity(vit: ViT, batch: Tensor, layer: int) -> Tensor:
    """Cosine similarity of all pairs of patch tokens after a layer, (P, P)."""
    with eval_mode(vit), torch.no_grad():
        tokens = next(value[0] for name, value in vit.iter_intermediates(batch) if name == f"block_{layer}")
    unit = torch.nn.functional.normalize(tokens[vit.config.prefix_tokens :].float(), dim=-1)
    return unit @ unit.T


def layer_predictions(classifier: Classifier, vit: ViT, batch: Tensor) -> Json:
    """Probabilities if the head reads the tokens after the embedding and after every layer.

    Returns:
        `classes`, the model's top predictions and the best class of each layer; `probabilities` with a row per layer;
        `best`, the index into `classes` of each layer's best class.
    """
    rows = []
    with eval_mode(vit), torch.no_grad():
        for name, tokens in vit.iter_intermediates(batch):
            if name == "embedded" or name.startswith("block_"):
                normalized = tokens if vit.config.norm_after_pool else vit.norm(tokens)
                rows.append(vit.forward_head(normalized)[0].float().cpu())
    probabilities = probabilities_of(vit, torch.stack(rows))  # (L + 1, K)
    top = probabilities[-1].argsort(descending=True, stable=True)[:TOP_CLASSES].tolist()
    best = probabilities.argmax(dim=-1).tolist()
    classes = list(dict.fromkeys([*top, *best]))
    return {
        "classes": [{"label": classifier.labels[index], "index": index} for index in classes],
        "probabilities": [[round(value, 6) for value in row] for row in probabilities[:, classes].tolist()],
        "best": [classes.index(index) for index in best],
    }


def png_base64(image: Image.Image) -> str:
    """The image as a PNG file in base64."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def pack_array(values: Tensor, low: float = 0.0) -> Json:
    """An array as little-endian integers in base64: value = low + (high - low) * integer / (2**bits - 1)."""
    array: NDArray[np.float32] = np.nan_to_num(values.detach().float().cpu().numpy())
    high = max(float(array.max()), low + 1e-12)
    bits = 16 if array.size <= MAX_16_BIT_SIZE else 8
    levels = np.rint((array - low).clip(0) / (high - low) * (2**bits - 1)).astype("<u2" if bits == 16 else "u1")
    data = base64.b64encode(levels.tobytes()).decode("ascii")
    return {"shape": list(array.shape), "bits": bits, "low": low, "high": high, "data": data}
