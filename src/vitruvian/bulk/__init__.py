"""Work over millions of images: in pieces, by any number of processes, and stopped at any time."""

from vitruvian.bulk import ray
from vitruvian.bulk.job import Job, embed, predict
from vitruvian.bulk.merge import Merged, merge

__all__ = ["Job", "Merged", "embed", "merge", "predict", "ray"]
