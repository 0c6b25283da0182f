"""What the paper reports, for the tables that stand beside what was measured; top-1 in percent."""

from __future__ import annotations

TABLE5_TASKS = ("cifar10", "cifar100", "imagenet", "imagenet-real", "flowers102", "pets")
"""The columns of Table 5 by the names of their tasks."""

TABLE5: dict[tuple[str, str], tuple[float, ...]] = {
    # pre-trained on, model: CIFAR-10, CIFAR-100, ImageNet, ReaL, Flowers, Pets; fine-tuned at 384
    ("ImageNet", "B/16"): (98.13, 87.13, 77.91, 83.57, 89.49, 93.81),
    ("ImageNet", "B/32"): (97.77, 86.31, 73.38, 79.56, 85.43, 92.04),
    ("ImageNet", "L/16"): (97.86, 86.35, 76.53, 82.19, 89.66, 93.64),
    ("ImageNet", "L/32"): (97.94, 87.07, 71.16, 77.83, 86.36, 91.35),
    ("ImageNet-21k", "B/16"): (98.95, 91.67, 83.97, 88.35, 99.38, 94.43),
    ("ImageNet-21k", "B/32"): (98.79, 91.97, 81.28, 86.63, 99.11, 93.02),
    ("ImageNet-21k", "L/16"): (99.16, 93.44, 85.15, 88.40, 99.61, 94.73),
    ("ImageNet-21k", "L/32"): (99.13, 93.04, 80.99, 85.65, 99.19, 93.09),
    ("ImageNet-21k", "H/14"): (99.27, 93.82, 85.13, 88.70, 99.51, 94.82),
    ("JFT-300M", "B/16"): (99.00, 91.87, 84.15, 88.85, 99.56, 95.80),
    ("JFT-300M", "B/32"): (98.61, 90.49, 80.73, 86.27, 99.27, 93.40),
    ("JFT-300M", "L/16"): (99.38, 94.04, 87.12, 89.99, 99.56, 97.11),
    ("JFT-300M", "L/32"): (99.19, 92.52, 84.37, 88.28, 99.45, 95.83),
    ("JFT-300M", "H/14"): (99.50, 94.55, 88.04, 90.33, 99.68, 97.56),
}

VTAB_MEAN = 77.63
"""Table 2: H/14 pre-trained on JFT-300M, mean over the 19 tasks."""


def published(task: str) -> dict[tuple[str, str], float]:
    """The paper's numbers of one task, by data and model; empty where Table 5 has none."""
    if task not in TABLE5_TASKS:
        return {}
    return {row: values[TABLE5_TASKS.index(task)] for row, values in TABLE5.items()}
