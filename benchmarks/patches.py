"""What the patch tokens of a frozen model know: parts by `vit explain --map pca`, classes by `vit segment`.

python benchmarks/patches.py pca pets/test/beagle MODEL [--image-size 448] [--layer 7]
python benchmarks/patches.py label pets/test/beagle MODEL [--image-size 448]
python benchmarks/patches.py segment pets/test/beagle MODEL [--image-size 448] [--masks trimaps/] [--count 100]

`beagles.json` has polygons of body and head, drawn by hand on 20 images of Oxford-IIIT Pets (COCO format, for images
whose shorter side is 160 pixels). `pca` prints one line of JSON each for components fitted over all images and over
each image alone: the IoU of the painted patches and the dog; how many parts (head and rest of an image) have a mean
color that is nearer to the mean color of the same part in the other 19 images than to that of the other part; and the
same for patches of the dog, averaged over the parts.

`label` prints how well the probability of "beagle" in each patch separates the pixels of the dog from the others (AUROC
in percent, mean over the images), by the values of the last block as in `vit explain --map label`, by the tokens after
the last block, and by gradient-weighted attention.

`segment` compares the head of `vit segment` with scikit-learn's logistic regression on the same tokens, in the same
folds: each patch has the class of most of its pixels, tokens are standardized, and scores are interpolated to pixels.
One line of JSON with the IoU in percent, of logistic regression for three strengths of regularization. `--masks` is a
folder or a COCO file instead of `beagles.json`.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import vitruvian as vt
from vitruvian.explain import Explained, gradient_attention, patch_logits, seen_box, segment
from vitruvian.explain.anomaly import roc_area
from vitruvian.explain.masks import open_masks
from vitruvian.inference import probabilities_of

POLYGONS = Path(__file__).with_name("beagles.json")
BODY, HEAD = 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pca", "segment", "label"])
    parser.add_argument("images", type=Path)
    parser.add_argument("model")
    parser.add_argument("--image-size", type=int, default=None)
    parser.add_argument("--layer", type=int, default=None)
    parser.add_argument("--masks", type=Path, default=POLYGONS)
    parser.add_argument("--count", type=int, default=None)
    asked = parser.parse_args()
    if asked.what == "segment":
        compare_heads(sorted(asked.images.rglob("*.jpg")), asked.masks, asked.model, asked.image_size, asked.count)
        return
    if asked.what == "label":
        measure_labels(asked.images, vt.load(asked.model, image_size=asked.image_size))
        return
    measure_components(asked.images, vt.load(asked.model, image_size=asked.image_size), asked.layer)


def draw_masks(images: Path) -> dict[Path, Image.Image]:
    """The mask of each image with polygons, in its own size: 0 for the background, then the ids of the categories."""
    coco = json.loads(POLYGONS.read_text())
    masks = {}
    for entry in coco["images"]:
        path = images / entry["file_name"]
        mask = Image.new("L", (entry["width"], entry["height"]))
        for annotation in coco["annotations"]:
            if annotation["image_id"] == entry["id"]:
                for polygon in annotation["segmentation"]:
                    ImageDraw.Draw(mask).polygon(polygon, fill=annotation["category_id"])
        with Image.open(path) as image:
            masks[path] = mask.resize(image.size, Image.Resampling.NEAREST)
    return masks


def measure_components(folder: Path, model: Any, layer: int | None) -> None:
    explainer = vt.Explainer(model, vt.MapSettings(methods=("pca",), layer=layer))
    masks = draw_masks(folder)
    together = list(explainer.stream(masks))
    for fitted, explained in (("together", together), ("one by one", [explainer.explain(path) for path in masks])):
        parts = [on_grid(masks[Path(item.path)], item, model.meta.preprocess) for item in explained]
        colors = [item.maps[0].values for item in explained]
        print(json.dumps({"fitted": fitted, "layer": layer} | consistency(np.stack(colors), np.stack(parts))))


def measure_labels(folder: Path, model: Any) -> None:
    index = model.meta.labels.index("beagle")
    preprocess, areas = model.meta.preprocess, dict[str, list[float]]()
    for path, mask in draw_masks(folder).items():
        box = tuple(map(round, seen_box((mask.height, mask.width), preprocess)))
        dog = (np.asarray(mask.crop(box)) > 0).ravel()
        pixels = vt.transform(model)(path)[None]
        with torch.no_grad():
            tokens = model.forward_features(pixels)[0, model.config.prefix_tokens :]
            by_token = probabilities_of(model, model.head(model.pre_logits(tokens)))[:, index]
        maps = {
            "values of the last block": probabilities_of(model, patch_logits(model, pixels))[0, ..., index],
            "tokens after the last block": by_token.view(model.grid_of(pixels)),
            "gradient-weighted attention": gradient_attention(model, pixels, [index])[0],
        }
        for name, values in maps.items():
            shown = Image.fromarray(values.numpy()).resize(
                (box[2] - box[0], box[3] - box[1]), Image.Resampling.BILINEAR
            )
            areas.setdefault(name, []).append(roc_area(np.asarray(shown).ravel(), dog, ~dog))
    print(json.dumps({name: round(float(np.mean(values)), 2) for name, values in areas.items()}))


def on_grid(mask: Image.Image, explained: Explained, preprocess: Any) -> NDArray[Any]:
    """The category of each patch (R, C)."""
    rows, columns = explained.maps[0].values.shape[:2]
    seen = mask.crop(tuple(map(round, seen_box((mask.height, mask.width), preprocess))))
    return np.asarray(seen.resize((columns, rows), Image.Resampling.NEAREST))


def consistency(colors: NDArray[Any], parts: NDArray[Any]) -> dict[str, float]:
    """How well colors (B, R, C, 3), NaN for background, agree with categories (B, R, C)."""
    painted, dog = ~np.isnan(colors[..., 0]), parts > 0
    same, patches = [], []
    for index in range(len(colors)):
        others = np.arange(len(colors)) != index
        means = {part: colors[others][(painted & (parts == part))[others]].mean(axis=0) for part in (BODY, HEAD)}
        for part, other in ((BODY, HEAD), (HEAD, BODY)):
            here = colors[index][painted[index] & (parts[index] == part)]
            if len(here) >= 3:
                near, far = (np.linalg.norm(here - means[which], axis=1) for which in (part, other))
                patches.append(float((near < far).mean()))
                mean = here.mean(axis=0)
                same.append(np.linalg.norm(mean - means[part]) < np.linalg.norm(mean - means[other]))
    iou = (painted & dog).sum() / (painted | dog).sum()
    return {
        "iou_of_the_dog": round(float(iou), 3),
        "parts": len(same),
        "parts_with_the_same_color": int(sum(same)),
        "patches_with_the_same_color": round(float(np.mean(patches)), 3),
    }


def compare_heads(paths: list[Path], masks: Path, model: str, image_size: int | None, count: int | None) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    paths = [path for path in paths if path.stem in open_masks(masks).readers][:count]

    def logistic(examples: list[Any], num_classes: int, C: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (F, K) and bias (K,) by the book."""
        rows, labels = [], []
        for example in examples:
            tokens, shares = example.pairs(num_classes)
            rows.append(tokens.float().numpy())
            labels.append(shares.argmax(dim=1).numpy())
        pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=300))
        pipeline.fit(np.concatenate(rows), np.concatenate(labels))
        scaler, head = pipeline[0], pipeline[1]
        coefficients, bias = head.coef_, head.intercept_
        if len(head.classes_) == 2:  # scikit-learn has one row for two classes
            coefficients, bias = np.stack([-coefficients[0], coefficients[0]]), np.stack([-bias[0], bias[0]])
        weight = np.zeros((coefficients.shape[1], num_classes))
        offset = np.full(num_classes, -np.inf)
        weight[:, head.classes_] = (coefficients / scaler.scale_).T
        offset[head.classes_] = bias - (coefficients / scaler.scale_) @ scaler.mean_
        return torch.from_numpy(weight).float(), torch.from_numpy(offset).float().clamp(min=-1e9)

    trained = segment.train_segmenter(paths, masks, model, image_size=image_size)
    names = [name for name, _, _ in trained.iou()]
    results = {"ridge": [value for _, value, _ in trained.iou()]}
    segment.SHOTS = ()
    for C in (1e-4, 1e-3, 1e-2):
        segment.fit_head = partial(logistic, C=C)
        _, confusions, _ = segment.cross_validate(trained.examples, len(trained.segmenter.classes))
        results[f"logistic, C={C:g}"] = segment.class_iou(confusions.sum(axis=0)).tolist()
    shown = {how: dict(zip(names, np.round(values, 2).tolist())) for how, values in results.items()}
    curve = {count: round(value, 2) for count, value in trained.curve.items()}
    print(json.dumps({"images": len(paths), **shown, "interval": trained.iou()[-1][2], "curve": curve}))


if __name__ == "__main__":
    main()
