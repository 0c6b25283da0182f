"""`vit map`: the vectors of `vit embed` as points of a page, where similar images are near each other."""

import base64
import csv
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray

from vitruvian.bulk.result import open_vectors
from vitruvian.bulk.similar import normalize
from vitruvian.errors import DataError, require
from vitruvian.explain.patches import principal_axes
from vitruvian.files import write_text
from vitruvian.progress import Track, no_tracking, print_status
from vitruvian.report.html import render, script_hash, short_name
from vitruvian.text import natural_key, plural

# n vectors, D features

DIRECTIONS = 50  # number of principal components that t-SNE reads
LANDMARKS = 5_000  # maximum number of images that t-SNE places; each other one lies between the most similar of these
NEIGHBORS = 3
PERPLEXITY = 30.0
LEVELS = 2**16 - 1  # steps of a coordinate or a number; as a code, this one stands for a missing value


def vector_map(
    where: str | Path, out: str | Path, *, columns: str | Path | None = None, track: Track = no_tracking
) -> Path:
    """Write a page that shows the vectors of `vit embed` in two dimensions, by t-SNE from the principal components.

    Args:
        where: The output folder or URL of `vit embed`.
        out: The page to write (.html). It needs no other file and no network.
        columns: A CSV file with more columns to color by, such as predictions; its column `key` or `path` names images.
        track: Wraps the iterator over parts to show progress.

    Raises:
        DataError: The result is incomplete or has no vectors, or the columns are not those of its images.
    """
    store = open_vectors(where, track=track)
    known = np.flatnonzero(np.isfinite(store.values[:, 0]))
    if not len(known):
        raise DataError(f"none of the {len(store.keys):,} images has a vector", where=where)
    name, keys = str(store.result.job["data"]), [store.keys[index] for index in known]
    folder = name.rstrip("/") if Path(name).expanduser().is_dir() else ""
    shown = {"label": [store.labels[i] or "" for i in known], "split": [store.splits[i] or "" for i in known]}
    if columns is not None:
        table = Path(columns).expanduser()
        others = read_columns(table, keys, folder)
        shown |= {f"{title} ({table.name})" if title in shown else title: values for title, values in others.items()}
    positions = layout(normalize(np.asarray(store.values[known])))
    low, span = positions.min(axis=0), max(float(np.ptp(positions, axis=0).max()), 1e-12)
    x, y = np.rint((positions - low) / span * LEVELS).T
    content = {
        "keys": keys,
        "folder": folder,
        "x": encode(x),
        "y": encode(y),
        "columns": [encode_column(title, values) for title, values in shown.items() if len(set(values)) > 1],
    }
    script = (files("vitruvian") / "report" / "templates" / "map.js").read_text(encoding="utf-8")
    left_out = len(store.keys) - len(keys)
    page = render(
        "map.html",
        title=f"Map of {name}",
        subtitle=f"{plural(len(keys), 'image')}, by {short_name(store.result.job['model'])}"
        + (f"; {left_out:,} without a vector left out" if left_out else ""),
        content=content,
        script=Markup(script),
        script_hash=script_hash(script),
    )
    return write_text(Path(out).expanduser(), page)


def layout(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Positions (n, 2) of vectors (n, D) in a plane, the same in each run."""
    tokens = torch.from_numpy(vectors).double()
    mean, axes = principal_axes(tokens, DIRECTIONS)
    x = (tokens - mean) @ axes  # (n, 50), most variance first
    n = len(x)
    start = torch.zeros(n, 2, dtype=torch.float64)
    start[:, : min(2, x.shape[1])] = x[:, :2] / max(float(x[:, 0].std(correction=0)), 1e-12)
    if n < 4:
        return np.asarray(start.numpy())
    chosen = np.unique(np.linspace(0, n - 1, min(n, LANDMARKS)).astype(np.int64))
    settings = {"perplexity": min(PERPLEXITY, (len(chosen) - 1) / 3), "random_state": 0}
    t_sne = require("sklearn.manifold", "map").TSNE(2, init=1e-4 * start[chosen].numpy(), **settings)
    placed = torch.from_numpy(t_sne.fit_transform(x[chosen].numpy())).double()
    if len(chosen) == n:
        return np.asarray(placed.numpy())
    rows = []
    for first in range(0, n, 1024):
        distances, nearest = torch.cdist(x[first : first + 1024], x[chosen]).topk(NEIGHBORS, largest=False)
        weights = 1 / distances.clamp(min=1e-6)
        rows.append((weights[:, :, None] * placed[nearest]).sum(dim=1) / weights.sum(dim=1, keepdim=True))
    return np.asarray(torch.cat(rows).numpy())


def read_columns(path: Path, keys: list[str], folder: str) -> dict[str, list[str]]:
    """The columns of a CSV file by their names, a value for each key; empty where the file does not name it.

    The file names images by their keys, or by their paths, which begin with `folder`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot be read as CSV: {error}", where=path) from error
    names = [name for name in (rows[0] if rows else ()) if name]
    by = next((name for name in ("key", "path") if name in names), None)
    if by is None:
        raise DataError("no column 'key' or 'path' that names the images", where=path)
    row_of = {row[by] or "": row for row in rows}
    matches = [row_of.get(key) or row_of.get(f"{folder}/{key}") or {} for key in keys]
    if missing := sum(not row for row in matches):
        print_status(f"note: {path} has no row for {missing:,} of {plural(len(keys), 'image')}")
    if not any(matches):
        raise DataError(f"none of its {by}s is one of the vectors, such as {keys[0]}", where=path)
    return {name: [row.get(name) or "" for row in matches] for name in names if name != by}


def encode_column(name: str, values: list[str]) -> dict[str, Any]:
    """A column as codes: of its numbers between their ends, or of its names."""
    try:
        numbers = np.array([float(value) if value else np.nan for value in values])
        low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
        if low < high and np.isfinite([low, high]).all() and len(set(values)) > 2:
            codes = np.where(np.isnan(numbers), LEVELS, np.rint((numbers - low) / (high - low) * (LEVELS - 1)))
            return {"name": name, "ends": [low, high], "codes": encode(codes)}
    except ValueError:
        pass
    names = sorted(set(values), key=natural_key)
    indices = {value: min(index, LEVELS - 1) for index, value in enumerate(names)}
    return {"name": name, "names": names[:LEVELS], "codes": encode(np.array([indices[value] for value in values]))}


def encode(values: NDArray[Any]) -> str:
    return base64.b64encode(values.astype("<u2").tobytes()).decode()
