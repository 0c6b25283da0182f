"""What the patch tokens of a frozen model know: parts by `vit explain --map pca`.

python benchmarks/patches.py pca pets/test/beagle MODEL [--image-size 448] [--layer 7]

`beagles.json` has polygons of body and head, drawn by hand on 20 images of Oxford-IIIT Pets (COCO format, for images
whose shorter side is 160 pixels). `pca` prints one line of JSON each for components fitted over all images and over
each image alone: the IoU of the painted patches and the dog; how many parts (head and rest of an image) have a mean
color that is nearer to the mean color of the same part in the other 19 images than to that of the other part; and the
same for patches of the dog, averaged over the parts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import vitruvian as vt
from vitruvian.explain import Explained, seen_box

POLYGONS = Path(__file__).with_name("beagles.json")
BODY, HEAD = 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pca"])
    parser.add_argument("images", type=Path)
    parser.add_argument("model")
    parser.add_argument("--image-size", type=int, default=None)
    parser.add_argument("--layer", type=int, default=None)
    asked = parser.parse_args()
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


if __name__ == "__main__":
    main()
