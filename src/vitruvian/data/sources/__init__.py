"""Labeled images from folders, manifests, shards, CIFAR, IDX and Parquet files, buckets, and built in."""

from vitruvian.data.sources.base import DataSet, RawImage, Source
from vitruvian.data.sources.recognize import BUILT_IN, open_source
from vitruvian.data.sources.subset import Subset, hold_out

__all__ = ["BUILT_IN", "DataSet", "RawImage", "Source", "Subset", "hold_out", "open_source"]
