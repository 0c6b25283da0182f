"""What happens inside a model on the way to its answer, as small arrays for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.errors import ConfigError
from vitruvian.explain.attention import attention_rollout, gradient_attention, inference, require_vit
from vitruvian.explain.deletion import covered
from vitruvian.model.vit import ViT
from vitruvian.predict import Classifier, Encoder, probabilities_of

# L layers, H heads, N tokens (T before the patches), P patches, K classes

Part = Literal["view", "layers", "rollout", "gradient", "attention", "similarity"]
PARTS: tuple[Part, ...] = get_args(Part)
NEED_HEAD = frozenset({"layers", "gradient"})
MAX_EXACT = 4_000_000
"""Numbers in an array that is sent with 16 bits each; larger ones get 8."""
MAX_NUMBERS = 32_000_000
"""Numbers in the largest array that is sent."""
ANSWERS = 5
"""Classes that are followed through the layers, beside each layer's own best."""

Json = dict[str, Any]


def inspect(
    encoder: Encoder, pixels: Tensor, parts: Sequence[Part], *, layer: int = -1, target: int | None = None
) -> Json:
    """The asked parts of one view (channels, rows, columns), by name.

    `layer` counts from 0, negative from the end; it is for attention and similarity. `target` is the class of
    `gradient`, the best answer if not given.
    """
    vit = require_vit(encoder.model)
    for part in parts:
        if part in NEED_HEAD and not isinstance(encoder, Classifier):
            raise ConfigError(f"{part}: this model has no head, so it has no answers to look at")
    batch = pixels[None].to(encoder.device)
    number = vit.layer(layer)
    found: Json = {"grid": list(vit.config.grid_of((pixels.shape[1], pixels.shape[2])))}
    if "view" in parts:
        found["view"] = png(shown(pixels, vit.preprocess))
    if "layers" in parts:
        assert isinstance(encoder, Classifier)
        found["layers"] = layer_answers(encoder, vit, batch)
    if "rollout" in parts:
        found["rollout"] = packed(attention_rollout(vit, batch)[0])
    if "gradient" in parts:
        found["gradient"] = packed(gradient_attention(vit, batch, None if target is None else [target])[0])
    if "attention" in parts:
        found["attention"] = packed(attention(vit, batch, number))
    if "similarity" in parts:
        found["similarity"] = packed(similarity(vit, batch, number), low=-1.0)
    return found


def erased(pixels: Tensor, patches: Sequence[int], encoder: Encoder) -> Tensor:
    """The view with these patches (row * columns + column) painted in its mean color."""
    if not patches:
        return pixels
    grid = require_vit(encoder.model).config.grid_of((pixels.shape[1], pixels.shape[2]))
    count = grid[0] * grid[1]
    if not 0 <= min(patches) <= max(patches) < count:
        raise ConfigError(f"erased: patches are numbered from 0 to {count - 1}")
    return covered(pixels, np.asarray(patches, dtype=np.int64), grid)


def attention(vit: ViT, batch: Tensor, layer: int) -> Tensor:  # (H, N, N)
    tokens = vit.config.prefix_tokens + batch.shape[2] * batch.shape[3] // vit.config.stride**2
    if vit.config.num_heads * tokens**2 > MAX_NUMBERS:
        raise ConfigError(
            f"attention: {vit.config.num_heads} heads of {tokens} x {tokens} numbers are too many to send; "
            "serve the model with a smaller --image-size"
        )
    with inference(vit):
        return next(weights[0] for _, weights in vit.attention_maps(batch, [layer]))


def similarity(vit: ViT, batch: Tensor, layer: int) -> Tensor:
    """The cosine between the tokens of any two patches after a layer, (P, P)."""
    with inference(vit):
        tokens = next(value[0] for name, value in vit.iter_intermediates(batch) if name == f"block_{layer}")
    unit = torch.nn.functional.normalize(tokens[vit.config.prefix_tokens :].float(), dim=-1)
    return unit @ unit.T


def layer_answers(classifier: Classifier, vit: ViT, batch: Tensor) -> Json:
    """The head read after the embedding and after every layer: of the classes that matter, their probability.

    `classes` are the best answers of the whole model and the best of each layer, `probabilities` a row for each
    layer, `best` the place in `classes` of each layer's own answer.
    """
    rows = []
    with inference(vit):
        for name, tokens in vit.iter_intermediates(batch):
            if name == "embedded" or name.startswith("block_"):
                read = tokens if vit.config.norm_after_pool else vit.norm(tokens)
                rows.append(vit.forward_head(read)[0].float().cpu())
    probabilities = probabilities_of(vit, torch.stack(rows))  # (L + 1, K)
    last = probabilities[-1].argsort(descending=True, stable=True)[:ANSWERS].tolist()
    each = probabilities.argmax(dim=-1).tolist()
    classes = list(dict.fromkeys([*last, *each]))
    return {
        "classes": [{"label": classifier.labels[index], "index": index} for index in classes],
        "probabilities": [[round(value, 6) for value in row] for row in probabilities[:, classes].tolist()],
        "best": [classes.index(index) for index in each],
    }


def shown(pixels: Tensor, preprocess: Preprocess) -> Image.Image:
    """What the model sees, as an image again."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    levels = ((pixels * std + mean) * 255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    return Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels)


def png(image: Image.Image) -> str:
    """The image as a PNG file in base64."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def packed(values: Tensor, low: float = 0.0) -> Json:
    """An array as little-endian integers in base64: value = low + (high - low) * integer / (2**bits - 1)."""
    exact: NDArray[np.float32] = values.detach().float().cpu().numpy()
    exact = np.nan_to_num(exact)
    high = max(float(exact.max()), low + 1e-12)
    bits = 16 if exact.size <= MAX_EXACT else 8
    levels = np.rint((exact - low).clip(0) / (high - low) * (2**bits - 1)).astype("<u2" if bits == 16 else "u1")
    data = base64.b64encode(levels.tobytes()).decode("ascii")
    return {"shape": list(exact.shape), "bits": bits, "low": low, "high": high, "data": data}
