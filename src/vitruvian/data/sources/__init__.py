"""Labeled images from folders, manifests, shards, CIFAR, IDX and Parquet files, buckets, and built in."""

from vitruvian.data.decode import RawImage
from vitruvian.data.sources.base import Dataset, Source
from vitruvian.data.sources.open import BUILT_IN, open_dataset
from vitruvian.data.sources.subset import Subset, hold_out

__all__ = ["BUILT_IN", "Dataset", "RawImage", "Source", "Subset", "hold_out", "open_dataset"]
