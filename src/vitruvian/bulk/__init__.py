"""Work over millions of images: in pieces, by any number of processes, and stopped at any time."""

from vitruvian.bulk import ray
from vitruvian.bulk.job import Job
from vitruvian.bulk.merge import Merged, merge
from vitruvian.bulk.run import embed, predict

__all__ = ["Job", "Merged", "embed", "merge", "predict", "ray"]
