"""Coverage of conformal prediction sets on images that they were not fitted on, over many random halves of a dataset.

    python benchmarks/conformal.py cifar10/ --model src/vitruvian/bundled [--split test] [--halves 200]

For each promise, the threshold is fitted on one half and the coverage measured on the other. Printed are the mean and
the standard deviation of the coverage over the halves, its largest distance from the promise, and the mean set size.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

import vitruvian as vt
from vitruvian.evaluation.conformal import conformal_threshold
from vitruvian.evaluation.evaluate import evaluate_classes
from vitruvian.evaluation.metrics import probabilities

PROMISES = (0.8, 0.9, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", required=True)
    parser.add_argument("--split")
    parser.add_argument("--halves", type=int, default=200)
    options = parser.parse_args()
    found = evaluate_classes(options.data, vt.Classifier(options.model), split=options.split)
    outputs, temperature = found.outputs, found.classifier.model.meta.temperature
    logits = torch.from_numpy(np.asarray(outputs.logits)).double()
    scores = probabilities(logits / temperature, outputs.score_function).numpy()  # (n, K)
    own = scores[np.arange(len(scores)), outputs.labels]
    print(f"{len(own):,} images, top-1 {found.measures.top1:.2f}%, {options.halves} random halves")
    for promise in PROMISES:
        coverages, sizes = [], []
        for seed in range(options.halves):
            order = np.random.default_rng(seed).permutation(len(own))
            fit, rest = order[: len(own) // 2], order[len(own) // 2 :]
            threshold = conformal_threshold(own[fit], promise)
            coverages.append(100 * float((own[rest] >= threshold).mean()))
            sizes.append(float((scores[rest] >= threshold).sum(axis=1).mean()))
        mean, deviation = np.mean(coverages), np.std(coverages, ddof=1)
        within = 100 * np.mean(np.abs(np.array(coverages) - 100 * promise) <= 1.5)
        print(
            f"promise {100 * promise:g}%: coverage {mean:.2f} ± {deviation:.2f}%, from {min(coverages):.2f} to "
            f"{max(coverages):.2f}, within 1.5 points in {within:.1f}% of halves, {np.mean(sizes):.2f} classes in a set"
        )


if __name__ == "__main__":
    main()
