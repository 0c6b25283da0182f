"""Labelled pictures from folders, manifests, shards, CIFAR, IDX and Parquet files, buckets, and built in."""

from vitruvian.data.sources.base import DataSet, Picture, Source
from vitruvian.data.sources.recognise import BUILT_IN, open_source
from vitruvian.data.sources.subset import Subset, hold_out

__all__ = ["BUILT_IN", "DataSet", "Picture", "Source", "Subset", "hold_out", "open_source"]
