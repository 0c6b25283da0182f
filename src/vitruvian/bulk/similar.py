"""Nearest neighbors among the vectors of `vit embed`: exact, or through an index where there are many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.bulk.merge import Result, open_result
from vitruvian.cache import cache_folder, file_lock
from vitruvian.data.decode import ImageInput, decode
from vitruvian.data.doctor.doctor_report import thumbnail_of
from vitruvian.data.formats import open_images
from vitruvian.errors import CheckpointError, ConfigError, DataError, FileError, argument, require
from vitruvian.evaluation.probes.store import model_keys
from vitruvian.files import atomic_path, file_stamp, read_json, write_json, write_text
from vitruvian.inference import Encoder
from vitruvian.progress import print_status
from vitruvian.report.html import render, thumbnail
from vitruvian.settings import check_range
from vitruvian.text import printable

# n vectors, D wide, Q queries

EXACT = 100_000
"""Up to so many vectors, all are compared; above, an index finds candidates."""
CANDIDATES = 256
"""Vectors that the index looks at closely for a query; more find more of the true neighbors, and take longer."""
LINKS = 16
"""Neighbors that each vector of the index is linked to."""
NAMES = ("index", "key", "label", "split")
"""What a neighbor is told by."""
PARTS_KEPT = 1024
"""Parts whose names stay in memory, about 0.1 MB each."""

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
    """Its number in the data."""


class Search:
    """The vectors of one result, ready to be searched."""

    def __init__(self, where: str | Path, *, exact: bool | None = None, track: Tracked | None = None) -> None:
        """In a folder or behind a URL; `exact` says whether to compare all vectors, however many they are."""
        self.result = open_result(where)
        if self.result.job["task"] != "embed":
            raise DataError(f"{where}: answers, not vectors; make them with `vit embed`")
        self.width: int = self.result.job["width"]
        self.exact = self.result.images <= EXACT if exact is None else exact
        if not self.exact and not has_usearch():
            print_status(
                f"{self.result.images:,} vectors without an index, which is slow: pip install 'vitruvian[search]'"
            )
            self.exact = True
        tables = self.result.tables() if track is None else track(self.result.tables(), self.result.parts)
        self._index = None if self.exact else opened_index(self.result, self.width, tables)
        self._all = list(blocks(tables)) if self.exact else []
        self._names = lru_cache(PARTS_KEPT)(lambda part: self.result.table(part, only=NAMES))
        if not (self._all if self._index is None else len(self._index)):
            raise DataError(f"{where}: not one of the {self.result.images:,} images has a vector")

    def nearest(self, queries: Vectors, top: int = 20) -> list[list[Neighbor]]:
        """The `top` nearest images of each query (Q, D), best first."""
        check_range("top", top, 1, 10_000)
        if queries.ndim != 2 or queries.shape[1] != self.width:
            raise ConfigError(f"queries of shape {queries.shape}, wanted (Q, {self.width})")
        found = self._found(normalized(queries), top)
        rows = self._rows(sorted({number for each in found for number, _ in each}))
        return [[Neighbor(similarity=score, **rows[number]) for number, score in each] for each in found]

    def _found(self, queries: Vectors, top: int) -> list[list[tuple[int, float]]]:
        """Numbers and similarities of the nearest of each query, equal ones in the order of the data."""
        if self._index is not None:
            matches = [self._index.search(query, top) for query in queries]
            return [best(found.keys, 1.0 - found.distances, top) for found in matches]
        near: list[list[tuple[int, float]]] = [[] for _ in queries]
        for numbers, block in self._all:
            for place, scores in enumerate(queries @ block.T):
                near[place] += best(numbers, scores, top)
        return [sorted(found, key=lambda pair: (-pair[1], pair[0]))[:top] for found in near]

    def _rows(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What the parts say of these images."""
        found: dict[int, dict[str, Any]] = {}
        for part in sorted({number // self.result.piece for number in numbers}):
            table = self._names(part)
            first = part * self.result.piece
            here = [number - first for number in numbers if number // self.result.piece == part]
            found |= {row["index"]: row for row in table.take(here).to_pylist()}
        return found

    def queries(
        self, images: Sequence[ImageInput], texts: Sequence[str] = (), model: Encoder | str | Path | None = None
    ) -> Vectors:
        """(Q, D) Of images, then of texts, by the model that made the vectors."""
        if not images and not texts:
            raise ConfigError(f"nothing to look for: give an image or {argument('text')}")
        encoder = self.encoder(model)
        found = [encoder.embed(images).numpy()] if images else []
        if texts:
            found.append(vectors_of_texts(texts, encoder, self.result.place))
        return np.concatenate(found)

    def encoder(self, model: Encoder | str | Path | None = None) -> Encoder:
        """The model that made the vectors, or the one given if it is the same."""
        name = self.result.job["model"] if model is None else model
        encoder = name if isinstance(name, Encoder) else Encoder(name)
        if self.result.job.get("model_key") not in model_keys(encoder):
            raise DataError(
                f"{encoder.name}: not the model that made the vectors of {self.result.place} "
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
    """Find the images whose features are nearest to those of each query, by cosine similarity.

    Args:
        images: Query images.
        where: Directory or URL that `embed` wrote.
        texts: Query texts, if the vectors are those of a CLIP or SigLIP.
        model: Where the model of the vectors is now; by default where it was.
        top: Number of neighbors per query.
        exact: Compare all vectors, without an index; by default up to 100,000.

    Returns:
        The neighbors of each image, then of each text, best first.
    """
    search = Search(where, exact=exact)
    return search.nearest(search.queries(list(images), texts, model), top)


def vectors_of_texts(texts: Sequence[str], encoder: Encoder, where: object) -> Vectors:
    """(Q, D) Of the text tower beside the model that made the vectors `where`."""
    from vitruvian.weights.zero_shot import embed_texts  # most searches are by image

    if not all(text.strip() for text in texts):
        raise ConfigError(f"{argument('text')} is empty; wanted words such as 'a red car'")
    try:
        found = embed_texts(encoder.model, texts).numpy()
    except CheckpointError as error:
        raise DataError(f"{where}: cannot be searched by text: {error}") from error
    if found.shape[1] != encoder.model.config.feature_width:
        raise DataError(
            f"{where}: cannot be searched by text: vectors of {encoder.model.config.feature_width} numbers, texts of "
            f"{found.shape[1]}"
        )
    return np.asarray(found)


def best(numbers: NDArray[Any], scores: NDArray[Any], top: int) -> list[tuple[int, float]]:
    """The `top` greatest scores with their numbers, equal ones by number."""
    if len(scores) > top:
        kept = scores >= np.partition(scores, -top)[-top]
        numbers, scores = numbers[kept], scores[kept]
    order = np.lexsort((numbers, -scores))[:top]
    return list(zip(numbers[order].tolist(), scores[order].tolist()))


def normalized(vectors: NDArray[Any]) -> Vectors:
    wide = vectors.astype(np.float64)  # whose squares are finite
    return (wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def blocks(tables: Iterable[Any]) -> Iterator[tuple[NDArray[np.int64], Vectors]]:
    """Numbers and normalized vectors of the images that have one."""
    for table in tables:
        table = table.filter(table["vector"].is_valid())
        if table.num_rows:
            flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            if not np.isfinite(flat).all():
                raise DataError(f"the images from number {table['index'][0]} on have vectors that are not finite")
            yield table["index"].to_numpy(), normalized(flat.reshape(table.num_rows, -1))


def has_usearch() -> bool:
    from importlib.util import find_spec

    return find_spec("usearch") is not None


def is_index(path: Path, made_of: Path, stamps: list[list[Any]]) -> bool:
    """Whether the file is the index that was made of these parts, untouched."""
    try:
        return read_json(made_of) == {"index": file_stamp(path), "parts": stamps}
    except (OSError, FileError):
        return False


def opened_index(result: Result, width: int, tables: Iterable[Any]) -> Any:
    """The index of a result from the cache folder, made on first use, and again if either has changed since."""
    usearch = require("usearch.index", "search")
    path = cache_folder() / "search" / f"{result.identity}-{LINKS}.usearch"
    made_of = path.with_suffix(".json")
    index = usearch.Index(
        ndim=width, metric="cos", dtype="f16", connectivity=LINKS, expansion_add=128, expansion_search=CANDIDATES
    )
    with file_lock(path.with_suffix(".lock")):
        stamps = result.place.stamps("part-")
        if not is_index(path, made_of, stamps):
            for numbers, vectors in blocks(tables):
                index.add(numbers, vectors)
            made_of.unlink(missing_ok=True)
            with atomic_path(path) as new:
                index.save(new)
            write_json(made_of, {"index": file_stamp(path), "parts": stamps})
        index.view(path)
    index.expansion_search = CANDIDATES
    return index


def write_neighbors(
    out: Path, images: Sequence[str], texts: Sequence[str], results: Sequence[Sequence[Neighbor]], result: Result
) -> Path:
    """Write a page with thumbnails of the queries and their neighbors, read again from the data of the job.

    Raises:
        DataError: The data is not what the vectors were computed from.
    """
    name = result.job["data"]
    sources = open_images(name, split=result.job["split"])
    if sum(map(len, sources.values())) < result.images:
        raise DataError(f"{name}: no longer the {result.images:,} images that the vectors were made of")

    def neighbor_context(neighbor: Neighbor) -> dict[str, Any]:
        index = neighbor.index
        for source in sources.values():
            if index < len(source):
                break
            index -= len(source)
        if printable(source.key(index)) != neighbor.key:
            raise DataError(f"{name}: no longer the images that the vectors were made of: {neighbor.key} has moved")
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
