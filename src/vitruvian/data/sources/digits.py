"""The built-in digits: 1,797 handwritten figures of 8 x 8 pixels, so that training runs with no data at hand.

They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0), in the order and with the 17 levels of gray in
which scikit-learn carries them (`load_digits`). `digits.npz` holds `images` uint8 (1797, 8, 8), 0 to 16, and `labels`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.sources.base import DataSet, RawImage, Source, data_set
from vitruvian.data.sources.subset import hold_out

HELD = 0.2
"""Share of each class in the split `test`; the seed of the choice is 0."""


class DigitsSource(Source):
    """All digits, as gray pixels from 0 to 255, white on black."""

    name = "digits"
    classes = tuple("0123456789")

    def __len__(self) -> int:
        return len(stored()[1])

    def label(self, index: int) -> int:
        return int(stored()[1][index])

    def labels(self) -> NDArray[np.int32]:
        return stored()[1]

    def read(self, index: int) -> RawImage:
        pixels: NDArray[np.uint8] = stored()[0][index]
        return pixels

    def key(self, index: int) -> str:
        return f"digits #{index}"


@lru_cache(maxsize=1)
def stored() -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    with (files("vitruvian.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as content:
        images, labels = content["images"], content["labels"]
    return np.rint(images * (255 / 16)).astype(np.uint8), labels.astype(np.int32)


def open_digits() -> DataSet:
    """The digits, a fifth of them held out as the split `test`."""
    train, test = hold_out(DigitsSource(), HELD, seed=0)
    train.name, test.name = "digits (train)", "digits (test)"
    return data_set("digits", {"train": train, "test": test})
