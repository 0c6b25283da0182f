"""Nearest neighbors through an index: usearch and faiss on the same vectors, beside comparing all.

python benchmarks/similar.py vectors/ [--top 10]
python benchmarks/similar.py VECTORS.npy [--queries 200] [--top 10] [--only usearch,faiss-hnsw,faiss-ivf]

Of a folder of `vit embed`: the share of the nearest images of the split `train` that have the label of the query, over
all of `test`. VECTORS.npy is (n, D) of any float type; its last rows are the queries. One line of JSON each: seconds to
build, megabytes of the index on the disk, recall of the true neighbors, queries a second one at a time, times exact.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.bulk.similar import CANDIDATES, LINKS, best, normalized
from vitruvian.bulk.store import open_store

BLOCK = 4096
Found = Callable[[NDArray[Any], int], NDArray[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vectors", type=Path)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--only", default="usearch,faiss-hnsw,faiss-ivf")
    asked = parser.parse_args()
    if asked.vectors.is_dir():
        print(json.dumps(precision(asked.vectors, asked.top)))
        return
    stored = np.load(asked.vectors, mmap_mode="r")[: asked.count]
    known, queries = normalized(stored[: -asked.queries]), normalized(stored[-asked.queries :])
    blocks = [
        (np.arange(at, min(at + BLOCK, len(known))), known[at : at + BLOCK]) for at in range(0, len(known), BLOCK)
    ]

    def exact(query: NDArray[Any], top: int) -> NDArray[Any]:
        near = [pair for numbers, block in blocks for pair in best(numbers, block @ query, top)]
        return np.array([number for number, _ in sorted(near, key=lambda pair: (-pair[1], pair[0]))[:top]])

    few = queries[: max(5, len(queries) // 10)]
    exact_rate, truth = timed(exact, few, asked.top)
    everything = [exact(query, asked.top) for query in queries]
    assert all(np.array_equal(one, other) for one, other in zip(truth, everything))
    print(json.dumps({"kind": "exact", "vectors": len(known), "width": known.shape[1], "per_second": exact_rate}))
    for name in asked.only.split(","):
        begun = time.perf_counter()
        for setting, size, found in KINDS[name](known):
            built = time.perf_counter() - begun
            rate, near = timed(found, queries, asked.top)
            recall = np.mean([len(set(one) & set(other)) / asked.top for one, other in zip(near, everything)])
            line = {"kind": name, "setting": setting, "build_seconds": built, "index_mb": size / 2**20}
            line |= {"recall": float(recall), "per_second": rate, "times_exact": rate / exact_rate}
            print(json.dumps(line), flush=True)


def precision(folder: Path, top: int) -> dict[str, object]:
    store = open_store(folder)
    splits, labels = np.array(store.splits), np.array(store.labels)
    known, asked = np.flatnonzero(splits == "train"), np.flatnonzero(splits == "test")
    units = normalized(store.values)
    near = np.argsort(-(units[asked] @ units[known].T), axis=1, kind="stable")[:, :top]
    right = labels[known[near]] == labels[asked][:, None]
    return {"queries": len(asked), "among": len(known), "top": top, "precision": float(right.mean())}


def timed(found: Found, queries: NDArray[Any], top: int) -> tuple[float, list[NDArray[Any]]]:
    found(queries[0], top)
    begun = time.perf_counter()
    near = [found(query, top) for query in queries]
    return len(queries) / (time.perf_counter() - begun), near


def usearch(known: NDArray[Any]) -> Iterator[tuple[str, int, Found]]:
    from usearch.index import Index

    index = Index(ndim=known.shape[1], metric="cos", dtype="f16", connectivity=LINKS, expansion_add=128)
    index.add(np.arange(len(known)), known)
    with tempfile.TemporaryDirectory() as folder:
        index.save(f"{folder}/index")
        size = os.path.getsize(f"{folder}/index")
    for candidates in (64, 128, CANDIDATES):
        index.expansion_search = candidates
        yield f"expansion {candidates}", size, lambda query, top: index.search(query, top).keys


def faiss_kind(known: NDArray[Any], description: str, setting: str, values: tuple[int, ...]) -> Iterator[Any]:
    import faiss

    index = faiss.index_factory(known.shape[1], description, faiss.METRIC_INNER_PRODUCT)
    rows = np.random.default_rng(0).permutation(len(known))[:100_000]
    index.train(known[rows])
    if "HNSW" in description:
        index.hnsw.efConstruction = 128
    index.add(known)
    space = faiss.ParameterSpace()
    size = len(faiss.serialize_index(index))
    for value in values:
        space.set_index_parameter(index, setting, value)
        yield f"{description} {setting} {value}", size, lambda query, top: index.search(query[None], top)[1][0]


def faiss_hnsw(known: NDArray[Any]) -> Iterator[Any]:
    return faiss_kind(known, f"HNSW{LINKS},SQfp16", "efSearch", (64, 128, CANDIDATES))


def faiss_ivf(known: NDArray[Any]) -> Iterator[Any]:
    cells = 4 * int(len(known) ** 0.5)
    return faiss_kind(known, f"IVF{cells},SQfp16", "nprobe", (8, 16, 32, 64))


KINDS = {"usearch": usearch, "faiss-hnsw": faiss_hnsw, "faiss-ivf": faiss_ivf}


if __name__ == "__main__":
    main()
