"""Nearest neighbors among the vectors of `vit embed`: exact, or with an index if there are many."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.bulk.result import open_result
from vitruvian.bulk.storage import BulkResult
from vitruvian.cache import cache_folder, file_lock
from vitruvian.data.decode import ImageInput
from vitruvian.data.doctor.doctor_report import thumbnail_of
from vitruvian.data.formats import open_images
from vitruvian.data.sources import Concat
from vitruvian.data.stored import display
from vitruvian.errors import CheckpointError, ConfigError, DataError, FileError, argument, install_hint, require
from vitruvian.evaluation.features import model_key
from vitruvian.files import atomic_path, file_stamp, read_json, write_json, write_text
from vitruvian.inference import Encoder
from vitruvian.progress import Track, no_tracking, print_status
from vitruvian.report.html import render, thumbnail
from vitruvian.settings import check_range
from vitruvian.text import printable

# n vectors, D features, Q queries

EXACT = 100_000  # maximum number of vectors to compare exhaustively; for more, an index finds candidates
CANDIDATES = 256  # number of candidates per query from the index; more candidates increase recall and time
LINKS = 16  # links per vector of the index
NAMES = ("index", "key", "label", "split")  # columns of a neighbor
PARTS_KEPT = 1024  # number of parts whose names are cached, about 0.1 MB each

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Neighbor:
    """An image and its cosine similarity to the query."""

    key: str
    similarity: float
    label: str | None
    split: str
    index: int  # its index in the data


class VectorSearch:
    """Nearest-neighbor search in the vectors of a result."""

    def __init__(self, where: str | Path, *, exact: bool | None = None, track: Track = no_tracking) -> None:
        """Open the result in a folder or behind a URL; `exact` compares all vectors, however many there are."""
        self.result = open_result(where, vectors=True)
        self.width: int = self.result.job["width"]
        count = self.result.images
        self.exact = count <= EXACT if exact is None else exact
        if not self.exact and find_spec("usearch") is None:
            print_status(f"{count:,} vectors without an index, which is slow: {install_hint('search')}")
            self.exact = True
        tables = track(self.result.tables(), self.result.parts)
        self._index = None if self.exact else open_index(self.result, self.width, tables)
        self._all = list(blocks(tables)) if self.exact else []
        self._names = lru_cache(PARTS_KEPT)(lambda part: self.result.table(part, only=NAMES))
        if not (self._all if self._index is None else len(self._index)):
            raise DataError(f"none of the {count:,} images has a vector", where=where)

    def nearest(self, queries: Vectors, top: int = 20) -> list[list[Neighbor]]:
        """The `top` nearest images of each query (Q, D), most similar first, ties in the order of the data."""
        check_range("top", top, 1, 10_000)
        if queries.ndim != 2 or queries.shape[1] != self.width:
            raise ConfigError(f"queries of shape {queries.shape}, expected (Q, {self.width})")
        queries = normalize(queries)
        matches: list[list[tuple[int, float]]] = [[] for _ in queries]
        if self._index is not None:
            candidates = [self._index.search(query, top) for query in queries]
            matches = [best(match.keys, 1.0 - match.distances, top) for match in candidates]
        for indices, block in self._all:
            for query, scores in enumerate(queries @ block.T):
                matches[query] += best(indices, scores, top)
        matches = [sorted(near, key=lambda pair: (-pair[1], pair[0]))[:top] for near in matches]
        rows: dict[int, dict[str, Any]] = {}
        wanted = sorted({index for near in matches for index, _ in near})
        for part, group in groupby(wanted, lambda index: index // int(self.result.job["piece"])):
            here = [index - self.result.rows_of(part).start for index in group]
            rows |= {row["index"]: row for row in self._names(part).take(here).to_pylist()}
        return [[Neighbor(similarity=score, **rows[index]) for index, score in near] for near in matches]

    def queries(
        self,
        images: Sequence[ImageInput],
        texts: Sequence[str] = (),
        model: Encoder | str | Path | None = None,
        **options: Any,
    ) -> Vectors:
        """Query vectors (Q, D) of images, then of texts, by the model that made the vectors.

        Without `model`, it is loaded by its name, with the `options` of `Encoder`. Raises DataError if it is another
        one.
        """
        if not images and not texts:
            raise ConfigError(f"no query: give an image or {argument('text')}")
        where, job = self.result.folder, self.result.job
        name = job["model"] if model is None else model
        encoder = name if isinstance(name, Encoder) else Encoder(name, **options)
        devices = ("", "cpu", "cuda", "mps", "xpu")  # the vectors may come from another machine
        if not any(job.get("model_key") == model_key(encoder, device) for device in devices):
            made_by = f"the vectors of {where} ({job['model']}), or with another preprocessing or version of torch"
            raise DataError(f"not the model that made {made_by}", where=encoder.name)
        queries = [encoder.embed(images).numpy()] if images else []
        if texts:
            from vitruvian.weights.zero_shot import embed_texts  # most searches are by image

            if not all(text.strip() for text in texts):
                raise ConfigError(f"{argument('text')} is empty; expected words such as 'a red car'")
            try:
                queries.append(embed_texts(encoder.torch_model, texts).numpy())
            except CheckpointError as error:
                raise DataError(f"cannot be searched by text: {error}", where=where) from error
            if queries[-1].shape[1] != self.width:
                sizes = f"images have {self.width} features, texts {queries[-1].shape[1]}"
                raise DataError(f"cannot be searched by text: {sizes}", where=where)
        return np.concatenate(queries)


def similar(
    images: Iterable[ImageInput],
    where: str | Path,
    *,
    texts: Sequence[str] = (),
    model: Encoder | str | Path | None = None,
    top: int = 20,
    exact: bool | None = None,
) -> list[list[Neighbor]]:
    """Find the nearest images in a result of `vit embed`, by cosine similarity of features.

    Args:
        images: The query images.
        where: The output folder or URL of `vit embed`.
        texts: More queries, after the images; this needs vectors of a CLIP or SigLIP.
        model: The model that made the vectors; by default it is loaded by the name in `job.json`.
        top: Number of neighbors per query.
        exact: Compare all vectors, however many there are; by default up to EXACT.

    Returns:
        The neighbors of each query, most similar first.

    Raises:
        DataError: The result is not one of `vit embed`, is incomplete, or was made by another model.
    """
    search = VectorSearch(where, exact=exact)
    return search.nearest(search.queries(list(images), texts, model), top)


def best(indices: NDArray[Any], scores: NDArray[Any], top: int) -> list[tuple[int, float]]:
    """The `top` greatest scores with their indices, ties in the order of the indices."""
    if len(scores) > top:
        highest = scores >= np.partition(scores, -top)[-top]
        indices, scores = indices[highest], scores[highest]
    order = np.lexsort((indices, -scores))[:top]
    return list(zip(indices[order].tolist(), scores[order].tolist()))


def normalize(vectors: NDArray[Any]) -> Vectors:
    wide = vectors.astype(np.float64)  # the squares of large float16 values would overflow
    return (wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def blocks(tables: Iterable[Any]) -> Iterator[tuple[NDArray[np.int64], Vectors]]:
    """Indices and normalized vectors of the images that have one."""
    for table in tables:
        table = table.filter(table["vector"].is_valid())
        if table.num_rows:
            flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            if not np.isfinite(flat).all():
                raise DataError(f"the vectors from image {table['index'][0]} on are not finite")
            yield table["index"].to_numpy(), normalize(flat.reshape(table.num_rows, -1))


def open_index(result: BulkResult, width: int, tables: Iterable[Any]) -> Any:
    """The index of a result from the cache folder; it is made on first use, and again if a file has changed."""
    usearch = require("usearch.index", "search")
    path = cache_folder() / "search" / f"{result.identity}-{LINKS}.usearch"
    made_of = path.with_suffix(".json")
    settings = {"connectivity": LINKS, "expansion_add": 128, "expansion_search": CANDIDATES}
    index = usearch.Index(ndim=width, metric="cos", dtype="f16", **settings)
    with file_lock(path.with_suffix(".lock")):
        stamps = result.folder.stamps("part-")
        is_current = False
        with suppress(OSError, FileError):
            is_current = read_json(made_of) == {"index": file_stamp(path), "parts": stamps}
        if not is_current:
            for indices, vectors in blocks(tables):
                index.add(indices, vectors)
            made_of.unlink(missing_ok=True)
            with atomic_path(path) as new:
                index.save(new)
            write_json(made_of, {"index": file_stamp(path), "parts": stamps})
        index.view(path)
    index.expansion_search = CANDIDATES
    return index


def write_neighbors(
    out: Path, images: Sequence[str], texts: Sequence[str], results: Sequence[Sequence[Neighbor]], result: BulkResult
) -> Path:
    """Write a page with thumbnails of the queries and their neighbors, read again from the data of the job.

    Raises:
        DataError: The data is not what the vectors were computed from.
    """
    name = result.job["data"]
    source = Concat(list(open_images(name, split=result.job["split"]).values()), name=name)
    if len(source) < result.images:
        raise DataError(f"no longer has the {result.images:,} images that the vectors were computed from", where=name)
    queries = []
    pictures = [(image, thumbnail(display(image), image)) for image in images] + [(f"“{text}”", None) for text in texts]
    for (query, image), neighbors in zip(pictures, results):
        shown = []
        for near in neighbors:
            if printable(source.key(near.index)) != near.key:
                raise DataError(f"{near.key} has moved since the vectors were computed", where=name)
            facts = {"similarity": near.similarity, "label": near.label or "", "key": near.key}
            shown.append({"image": thumbnail_of(source, near.index), **facts})
        queries.append({"name": query, "image": image, "neighbors": shown})
    subtitle = f"{result.images:,} images of {name}, by {result.job['model']}"
    return write_text(out, render("similar.html", title="Similar images", subtitle=subtitle, queries=queries))
