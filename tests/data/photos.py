"""Made-up photographs, each unlike the others, and folders of them."""

import io

import numpy as np
from PIL import Image


def photo(seed, size=(96, 72)):
    """A colored image of soft shapes with some grain."""
    rng = np.random.default_rng(seed)
    shapes = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    grain = rng.normal(0, 6, (*size[::-1], 3))
    return Image.fromarray(np.clip(np.asarray(shapes) + grain, 0, 255).astype(np.uint8))


def encoded(image, format="JPEG", **settings):
    file = io.BytesIO()
    image.save(file, format, **({"quality": 95} if format == "JPEG" else {}) | settings)
    return file.getvalue()


def make_photos(root, *, each=20, classes=("cat", "dog"), splits=("train",), size=(96, 72)):
    """`each` photographs of every class in every split, no two alike; without split folders if there is one split."""
    seed = 0
    for split in splits:
        for name in classes:
            folder = root / split / name if len(splits) > 1 else root / name
            folder.mkdir(parents=True)
            for number in range(each):
                (folder / f"{number:03d}.jpg").write_bytes(encoded(photo(seed, size)))
                seed += 1
    return root
