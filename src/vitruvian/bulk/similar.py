"""Nearest neighbors among the vectors of `vit embed`: exact, or with an index if there are many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.bulk.result import NOT_VECTORS, BulkResult, open_result
from vitruvian.cache import cache_folder, file_lock
from vitruvian.data.decode import ImageInput, decode
from vitruvian.data.doctor.doctor_report import thumbnail_of
from vitruvian.data.formats import open_images
from vitruvian.errors import CheckpointError, ConfigError, DataError, FileError, argument, require
from vitruvian.evaluation.features import model_key
from vitruvian.files import atomic_path, file_stamp, read_json, write_json, write_text
from vitruvian.inference import Encoder
from vitruvian.progress import print_status
from vitruvian.report.html import render, thumbnail
from vitruvian.settings import check_range
from vitruvian.text import printable

# n vectors, D features, Q queries

EXACT = 100_000
"""Maximum number of vectors to compare exhaustively; for more, an index finds candidates."""
CANDIDATES = 256
"""Number of candidates per query from the index; more candidates increase recall and time."""
LINKS = 16
"""Links per vector of the index."""
NAMES = ("index", "key", "label", "split")
"""Columns of a neighbor."""
PARTS_KEPT = 1024
"""Number of parts whose names are cached, about 0.1 MB each."""

Vectors = NDArray[np.float32]
Tracked = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Neighbor:
    """An image and its cosine similarity to the query."""

    key: str
    similarity: float
    label: str | None
    split: str
    index: int
    """Its index in the data."""


class VectorSearch:
    """Nearest-neighbor search in the vectors of a result."""

    def __init__(self, where: str | Path, *, exact: bool | None = None, track: Tracked | None = None) -> None:
        """Open the result in a folder or behind a URL; `exact` compares all vectors, however many there are."""
        self.result = open_result(where)
        if self.result.job["task"] != "embed":
            raise DataError(NOT_VECTORS, where=where)
        self.width: int = self.result.job["width"]
        self.exact = self.result.images <= EXACT if exact is None else exact
        if not self.exact and not has_usearch():
            print_status(
                f"{self.result.images:,} vectors without an index, which is slow: pip install 'vitruvian[search]'"
            )
            self.exact = True
        tables = self.result.tables() if track is None else track(self.result.tables(), self.result.parts)
        self._index = None if self.exact else open_index(self.result, self.width, tables)
        self._all = list(blocks(tables)) if self.exact else []
        self._names = lru_cache(PARTS_KEPT)(lambda part: self.result.table(part, only=NAMES))
        if not (self._all if self._index is None else len(self._index)):
            raise DataError(f"{where}: none of the {self.result.images:,} images has a vector")

    def nearest(self, queries: Vectors, top: int = 20) -> list[list[Neighbor]]:
        """The `top` nearest images of each query (Q, D), most similar first."""
        check_range("top", top, 1, 10_000)
        if queries.ndim != 2 or queries.shape[1] != self.width:
            raise ConfigError(f"queries of shape {queries.shape}, expected (Q, {self.width})")
        matches = self._search(normalize(queries), top)
        rows = self._rows(sorted({index for nearest in matches for index, _ in nearest}))
        return [[Neighbor(similarity=score, **rows[index]) for index, score in nearest] for nearest in matches]

    def _search(self, queries: Vectors, top: int) -> list[list[tuple[int, float]]]:
        """Indices and similarities of the nearest images of each query, ties in the order of the data."""
        if self._index is not None:
            candidates = [self._index.search(query, top) for query in queries]
            return [best(match.keys, 1.0 - match.distances, top) for match in candidates]
        near: list[list[tuple[int, float]]] = [[] for _ in queries]
        for indices, block in self._all:
            for query, scores in enumerate(queries @ block.T):
                near[query] += best(indices, scores, top)
        return [sorted(matches, key=lambda pair: (-pair[1], pair[0]))[:top] for matches in near]

    def _rows(self, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The columns of these images."""
        rows: dict[int, dict[str, Any]] = {}
        for part in sorted({index // self.result.piece for index in indices}):
            table = self._names(part)
            first = part * self.result.piece
            here = [index - first for index in indices if index // self.result.piece == part]
            rows |= {row["index"]: row for row in table.take(here).to_pylist()}
        return rows

    def queries(
        self, images: Sequence[ImageInput], texts: Sequence[str] = (), model: Encoder | str | Path | None = None
    ) -> Vectors:
        """Query vectors (Q, D) of images, then of texts, by the model that made the vectors."""
        if not images and not texts:
            raise ConfigError(f"no query: give an image or {argument('text')}")
        encoder = self.encoder(model)
        queries = [encoder.embed(images).numpy()] if images else []
        if texts:
            queries.append(text_vectors(texts, encoder, self.result.folder))
        return np.concatenate(queries)

    def encoder(self, model: Encoder | str | Path | None = None) -> Encoder:
        """The model that made the vectors, loaded by its name or given. Raises DataError if it is another one."""
        name = self.result.job["model"] if model is None else model
        encoder = name if isinstance(name, Encoder) else Encoder(name)
        if self.result.job.get("model_key") != model_key(encoder):
            raise DataError(
                f"{encoder.name}: not the model that made the vectors of {self.result.folder} "
                f"({self.result.job['model']}), or with another preprocessing or version of torch"
            )
        return encoder


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


def text_vectors(texts: Sequence[str], encoder: Encoder, where: object) -> Vectors:
    """Vectors (Q, D) of the text tower of the model that made the vectors in `where`."""
    from vitruvian.weights.zero_shot import embed_texts  # most searches are by image

    if not all(text.strip() for text in texts):
        raise ConfigError(f"{argument('text')} is empty; expected words such as 'a red car'")
    try:
        vectors = embed_texts(encoder.torch_model, texts).numpy()
    except CheckpointError as error:
        raise DataError(f"cannot be searched by text: {error}", where=where) from error
    if vectors.shape[1] != encoder.torch_model.config.feature_width:
        raise DataError(
            f"cannot be searched by text: images have {encoder.torch_model.config.feature_width} features, texts "
            f"{vectors.shape[1]}",
            where=where,
        )
    return np.asarray(vectors)


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


def has_usearch() -> bool:
    from importlib.util import find_spec

    return find_spec("usearch") is not None


def is_index(path: Path, made_of: Path, stamps: list[list[Any]]) -> bool:
    """Whether the file is the unchanged index of these parts."""
    try:
        return read_json(made_of) == {"index": file_stamp(path), "parts": stamps}
    except (OSError, FileError):
        return False


def open_index(result: BulkResult, width: int, tables: Iterable[Any]) -> Any:
    """The index of a result from the cache folder; it is made on first use, and again if a file has changed."""
    usearch = require("usearch.index", "search")
    path = cache_folder() / "search" / f"{result.identity}-{LINKS}.usearch"
    made_of = path.with_suffix(".json")
    index = usearch.Index(
        ndim=width, metric="cos", dtype="f16", connectivity=LINKS, expansion_add=128, expansion_search=CANDIDATES
    )
    with file_lock(path.with_suffix(".lock")):
        stamps = result.folder.stamps("part-")
        if not is_index(path, made_of, stamps):
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
    sources = open_images(name, split=result.job["split"])
    if sum(map(len, sources.values())) < result.images:
        raise DataError(f"{name}: no longer has the {result.images:,} images that the vectors were computed from")

    def neighbor_context(neighbor: Neighbor) -> dict[str, Any]:
        index = neighbor.index
        for source in sources.values():
            if index < len(source):
                break
            index -= len(source)
        if printable(source.key(index)) != neighbor.key:
            raise DataError(f"{name}: {neighbor.key} has moved since the vectors were computed")
        image, label = thumbnail_of(source, index), neighbor.label or ""
        return {"image": image, "similarity": neighbor.similarity, "label": label, "key": neighbor.key}

    queries = [(image, thumbnail(decode(image), image)) for image in images] + [(f"“{text}”", None) for text in texts]
    page = render(
        "similar.html",
        title="Similar images",
        subtitle=f"{result.images:,} images of {name}, by {result.job['model']}",
        queries=[
            {"name": query, "image": image, "neighbors": [neighbor_context(neighbor) for neighbor in neighbors]}
            for (query, image), neighbors in zip(queries, results)
        ],
    )
    return write_text(out, page)
