"""Features of a frozen model in every process of a run: each computes a share, and takes the others' from the store."""

from __future__ import annotations

from functools import partial

import numpy as np

from vitruvian.cache import scratch_folder
from vitruvian.data.sources import Source, Subset
from vitruvian.evaluation.probes.features import FeatureSet, features_of
from vitruvian.evaluation.probes.store import open_store
from vitruvian.inference import Encoder
from vitruvian.progress import no_tracking, track
from vitruvian.training.distributed import Processes


def shared_features(encoder: Encoder, source: Source, processes: Processes, *, label: str) -> FeatureSet:
    """The features of all images of a source. Machines that do not share a cache folder compute them all."""
    follow = partial(track, label=label) if processes.is_main else no_tracking
    if processes.is_distributed:
        features_of(encoder, share(source, processes), open_store(encoder), track=follow)
        processes.barrier()
    return features_of(encoder, source, open_store(encoder), track=follow)


def share(source: Source, processes: Processes) -> Source:
    """Every image whose number has this process as its remainder."""
    path = scratch_folder() / "share.i64"
    np.arange(processes.rank, len(source), processes.world_size, dtype="i8").tofile(path)
    return Subset(source, path, name=source.name)
