"""Tiny images of red, green and blue light in any mixture, with labels, numbers and levels in one manifest."""

import csv

import numpy as np
from PIL import Image

COLORS = ("red", "green", "blue")


def write_mixtures(folder, count=48, side=8):
    """Write images and list.csv: labels, a column per color (some unknown), and the brightness."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        lit = generator.random(3) < 0.5
        light = np.where(lit, generator.integers(150, 255, 3), generator.integers(0, 60, 3))
        noise = generator.integers(-20, 20, (side, side, 3))
        Image.fromarray((light + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")
        cells = [("" if generator.random() < 0.1 else int(value)) for value in lit]
        names = ";".join(name for name, value in zip(COLORS, lit) if value)
        split = "val" if index % 3 == 0 else "train"
        level = ("dark", "medium", "light")[min(2, int(light.mean() // 60))]
        rows.append((f"{index}.png", split, names, *cells, round(float(light.mean()), 2), level))
    with open(folder / "list.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "split", "label", *COLORS, "brightness", "level"))
        writer.writerows(rows)
    return folder / "list.csv"
