"""Bulk inference over millions of images: in parts, by any number of processes, resumable at any time."""

from vitruvian.bulk import ray
from vitruvian.bulk.job import Job, embed, predict
from vitruvian.bulk.result import Merged, merge

__all__ = ["Job", "Merged", "embed", "merge", "predict", "ray"]
