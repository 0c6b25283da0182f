"""Nearest neighbors through an index: usearch and faiss on the same vectors, beside comparing all.

python benchmarks/similar.py vectors/ [--top 10]
python benchmarks/similar.py VECTORS.npy [--queries 200] [--top 10] [--only similar,usearch,faiss-hnsw,faiss-ivf]
python benchmarks/similar.py VECTORS.npy --make IMAGES MODEL [--count 1000000]

Of a folder of `vit embed`: the share of the nearest images of the split `train` that have the label of the query, over
all of `test`. VECTORS.npy is (n, D) of any float type; its last rows are the queries. One line of JSON each: seconds to
build, megabytes of the index on the disk, recall of the true neighbors, queries a second one at a time, times exact.
`similar` is all of `vit similar` but the model: the same vectors as the parts of a result, searched by `VectorSearch`
with its index, and exactly. With `--make`, the vectors are what the model's last block gives for the patches of images.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import vitruvian as vt
from vitruvian.bulk.result import open_vectors
from vitruvian.bulk.similar import CANDIDATES, LINKS, VectorSearch, best, normalize
from vitruvian.bulk.storage import JOB_FILE, BulkResult, OutputFolder, RowDetails
from vitruvian.files import json_bytes
from vitruvian.inference import Encoder, batched
from vitruvian.model.build import Model

BLOCK = 4096
Found = Callable[[NDArray[Any], int], NDArray[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vectors", type=Path)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--only", default="similar,usearch,faiss-hnsw,faiss-ivf")
    parser.add_argument("--make", nargs=2, type=Path, metavar=("IMAGES", "MODEL"))
    asked = parser.parse_args()
    if asked.make:
        make_vectors(asked.vectors, *asked.make, asked.count or 1_000_000)
        return
    if asked.vectors.is_dir():
        print(json.dumps(precision(asked.vectors, asked.top)))
        return
    stored = np.load(asked.vectors, mmap_mode="r")[: asked.count]
    only = asked.only.split(",")
    if "similar" in only:
        only.remove("similar")
        searched(stored, asked.queries, asked.top)
    if not only:
        return
    known, queries = normalize(stored[: -asked.queries]), normalize(stored[-asked.queries :])
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
    for name in only:
        begun = time.perf_counter()
        for setting, size, found in KINDS[name](known):
            built = time.perf_counter() - begun
            rate, near = timed(found, queries, asked.top)
            recall = np.mean([len(set(one) & set(other)) / asked.top for one, other in zip(near, everything)])
            line = {"kind": name, "setting": setting, "build_seconds": built, "index_mb": size / 2**20}
            line |= {"recall": float(recall), "per_second": rate, "times_exact": rate / exact_rate}
            print(json.dumps(line), flush=True)


def patch_tokens(model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda pixels: vt.features(model, pixels, grid=False)[0]


def make_vectors(out: Path, images: Path, model: Path, count: int) -> None:
    """Patches of the images one after the other, in an order that depends on nothing but their names."""
    encoder = Encoder(model)
    files = sorted(images.rglob("*.jpg"), key=lambda path: hashlib.sha256(path.name.encode()).digest())
    loaded = encoder.load(batched(((None, file) for file in files), 32), ahead=64)
    made, stored = 0, None
    for batch in encoder.run(partial(encoder.compute, patch_tokens(encoder.model)), loaded):
        if made >= count:
            break
        tokens = batch.values
        flat = tokens[:, encoder.model.config.prefix_tokens :].flatten(0, 1).numpy().astype(np.float16)[: count - made]
        if stored is None:
            stored = np.lib.format.open_memmap(out, "w+", np.float16, (count, flat.shape[1]))
        stored[made : made + len(flat)] = flat
        made += len(flat)
    if made < count:
        raise SystemExit(f"{images}: enough for {made:,} vectors, wanted {count:,}")


def searched(stored: NDArray[Any], queries: int, top: int) -> None:
    """`VectorSearch` over the vectors but the last, which are the queries, exact and with its index."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITRUVIAN_CACHE"] = f"{folder}/cache"
        write_result(stored[:-queries], OutputFolder(f"{folder}/vectors"))
        asked = np.asarray(stored[-queries:], np.float32)
        found: dict[bool, tuple[float, list[NDArray[Any]]]] = {}
        for exact in (False, True):
            begun = time.perf_counter()
            search = VectorSearch(f"{folder}/vectors", exact=exact)
            opened = time.perf_counter() - begun
            if not exact:
                search.nearest(asked, top)  # the names in the parts are read once
            found[exact] = timed(partial(near_in, search), asked, top)
            line = {"kind": "similar", "exact": exact, "vectors": len(stored) - queries, "per_second": found[exact][0]}
            print(json.dumps({**line, "open_seconds": opened}), flush=True)
        pairs = zip(found[False][1], found[True][1])
        recall = np.mean([len(set(one) & set(other)) / top for one, other in pairs])
        print(json.dumps({"recall": float(recall), "times_exact": found[False][0] / found[True][0]}), flush=True)


def near_in(search: VectorSearch, query: NDArray[Any], top: int) -> NDArray[Any]:
    return np.array([each.index for each in search.nearest(query[None], top)[0]])


def write_result(vectors: NDArray[Any], place: OutputFolder) -> None:
    """The vectors as `vit embed` would have written them."""
    job = {"task": "embed", "dtype": "float16", "width": vectors.shape[1], "images": len(vectors), "piece": BLOCK}
    job |= {"model": "", "data": "", "split": None}
    place.write(JOB_FILE, json_bytes(job))
    result = BulkResult(place, job)
    for part in range(result.parts):
        chunk = vectors[part * BLOCK : (part + 1) * BLOCK]
        names = [f"images/{part * BLOCK + number:08}.jpg" for number in range(len(chunk))]
        result.write(part, [(RowDetails(name, "train", None), vector, None) for name, vector in zip(names, chunk)])


def precision(folder: Path, top: int) -> dict[str, object]:
    store = open_vectors(folder)
    splits, labels = np.array(store.splits), np.array(store.labels)
    known, asked = np.flatnonzero(splits == "train"), np.flatnonzero(splits == "test")
    units = normalize(store.values)
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
