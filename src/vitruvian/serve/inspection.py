"""Intermediate results of a model on one image, as small arrays for the page."""

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.errors import ConfigError
from vitruvian.explain.attention import attention_map, attention_rollout, gradient_attention, require_vit
from vitruvian.explain.deletion import cover_patches, deletion_curves
from vitruvian.explain.reconstruct import to_image, unnormalize
from vitruvian.inference import Classifier, Encoder, probabilities_of
from vitruvian.model.batching import eval_mode
from vitruvian.model.vit import ViT

# L layers, H heads, N tokens (T before the patches), P patches, K classes

Part = Literal["input", "layers", "rollout", "gradient", "attention", "similarity", "heads", "trace", "scores"]
PARTS: tuple[Part, ...] = get_args(Part)
MAX_16_BIT_SIZE = 4_000_000  # larger arrays are sent with 8 bits per number
MAX_SIZE = 32_000_000  # maximum size of an array that is sent
SCORE_STEPS = 5  # of deletion, fewer than in `vit explain`: the page computes them for every image
TOP_CLASSES = 5  # final predictions to follow through the layers, in addition to the best class of each layer

Json = dict[str, Any]


def inspect_image(
    encoder: Encoder,
    pixels: Tensor,
    parts: Sequence[Part],
    *,
    layer: int = -1,
    target: int | None = None,
    token: int = 0,
) -> Json:
    """Intermediate results for normalized pixels (channels, rows, columns), by name.

    Args:
        layer: Layer of `attention` and `similarity`; negative values count from the end.
        target: Class index of `gradient` and `scores`; by default the top prediction.
        token: Token of `trace`, counted from the first token before the patches.
    """
    vit = require_vit(encoder.model)
    batch = pixels[None].to(encoder.device)
    layer = vit.layer(layer)
    targets = None if target is None else [target]
    compute: dict[Part, Callable[[], Any]] = {
        "input": lambda: png_base64(to_image(unnormalize(pixels, vit.meta.preprocess))),
        "layers": lambda: layer_predictions(require_head(encoder), vit, batch),
        "rollout": lambda: pack_array(attention_rollout(vit, batch)[0]),
        "gradient": lambda: pack_array(gradient_attention(vit, batch, targets)[0]),
        "attention": lambda: pack_array(attention_weights(vit, batch, layer)),
        "similarity": lambda: pack_array(patch_similarity(vit, batch, layer), low=-1.0),
        "heads": lambda: head_maps(vit, batch),
        "trace": lambda: token_trace(vit, batch, token),
        "scores": lambda: map_scores(require_head(encoder), vit, pixels, target),
    }
    grid = list(vit.config.grid_of((pixels.shape[1], pixels.shape[2])))
    result: Json = {"grid": grid}
    result |= {part: compute[part]() for part in parts}
    return result | result.get("heads", {})  # which has `received`, too


def require_head(encoder: Encoder) -> Classifier:
    if not isinstance(encoder, Classifier):
        raise ConfigError("this model has no head, so it makes no predictions")
    return encoder


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


def head_maps(vit: ViT, batch: Tensor) -> Json:
    """Attention of all layers, in brief.

    Returns:
        `heads`, what the class token, or without one the mean patch, attends to with each head (L, H, P); and
        `received`, what each patch receives on average over heads and tokens (L, P), which shows attention sinks.
    """
    T, rows, received = vit.config.prefix_tokens, [], []
    reads_token = vit.config.pool not in ("mean", "map")
    with eval_mode(vit), torch.no_grad():
        for _, weights in vit.attention_maps(batch):
            shares = weights[0, :, :, T:]  # (H, N, P)
            rows.append(shares[:, 0] if reads_token else shares[:, T:].mean(dim=1))
            received.append(shares.mean(dim=(0, 1)))
    return {"heads": pack_array(torch.stack(rows)), "received": pack_array(torch.stack(received))}


def token_trace(vit: ViT, batch: Tensor, token: int) -> Json:
    """The vector of one token through the model.

    Returns:
        `vectors` (L + 1, D) after the embedding and after every block; `pooled`, the vector of the image; for a patch
        also its vector without `position`, as `patch`, and `position` if one is added.
    """
    vectors, T, grid = [], vit.config.prefix_tokens, vit.grid_of(batch)
    if token >= T + grid[0] * grid[1]:
        raise ConfigError(f"the tokens are numbered from 0 to {T + grid[0] * grid[1] - 1}", where="token")
    result: dict[str, Tensor] = {}
    with eval_mode(vit), torch.no_grad():
        for name, value in vit.iter_intermediates(batch):
            if name == "embedded" or name.startswith("block_"):
                vectors.append(value[0, token])
            elif name == "pooled":
                result[name] = value[0]
        if token >= T:
            result["patch"] = vit.embed.patches(batch)[0, token - T]
            positions = vit.embed.grid_positions(grid)
            if positions is not None:
                result["position"] = positions.flatten(0, 1)[token - T]
    result["vectors"] = torch.stack(vectors)
    return {name: pack_floats(value) for name, value in result.items()}


def map_scores(classifier: Classifier, vit: ViT, pixels: Tensor, target: int | None) -> dict[str, float]:
    """Deletion scores of the maps, and of random orders; the smaller, the better."""
    batch = pixels[None].to(classifier.device)
    index = int(classifier.logits(batch).argmax()) if target is None else target
    maps = {"class": gradient_attention(vit, batch, [index])[0], "attention": attention_map(vit, batch)[0]}
    if vit.config.attention != "differential":
        maps["rollout"] = attention_rollout(vit, batch)[0]
    curves = deletion_curves(classifier, pixels, maps, index, steps=SCORE_STEPS)
    return {name: round(curve.area, 4) for name, curve in curves.items()}


def layer_predictions(classifier: Classifier, vit: ViT, batch: Tensor) -> Json:
    """Probabilities if the head reads the tokens after the embedding and after every layer.

    Returns:
        `classes`, the model's top predictions and the best class of each layer; `logits` and `probabilities` with a row
        per layer; `best`, the index into `classes` of each layer's best class.
    """
    rows = []
    with eval_mode(vit), torch.no_grad():
        for name, tokens in vit.iter_intermediates(batch):
            if name == "embedded" or name.startswith("block_"):
                normalized = tokens if vit.config.norm_after_pool else vit.norm(tokens)
                rows.append(vit.forward_head(normalized)[0].float().cpu())
    logits = torch.stack(rows)
    probabilities = probabilities_of(vit, logits)  # (L + 1, K)
    top = probabilities[-1].argsort(descending=True, stable=True)[:TOP_CLASSES].tolist()
    best = probabilities.argmax(dim=-1).tolist()
    classes = list(dict.fromkeys([*top, *best]))
    return {
        "classes": [{"label": classifier.labels[index], "index": index} for index in classes],
        "logits": logits[:, classes].tolist(),
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


def pack_floats(values: Tensor) -> Json:
    """An array as little-endian 32-bit floats in base64."""
    array = values.detach().float().cpu().numpy().astype("<f4")
    return {"shape": list(array.shape), "bits": 32, "data": base64.b64encode(array.tobytes()).decode("ascii")}
