"""`vit map`: the images of `vit embed` as a map."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vitruvian.cli.options import check_suffix, import_torch, option
from vitruvian.progress import track

WHERE = typer.Argument(metavar="VECTORS", help="Vectors of `vit embed`: a folder or a URL.")
COLUMNS = option("FILE", "More columns to color by (.csv), such as predictions of `vit predict --out`.", exists=True)


def map(
    where: Annotated[str, WHERE],
    out: Annotated[Path, option("FILE", "The page to write (.html).", dir_okay=False)] = Path("map.html"),
    columns: Annotated[Path | None, COLUMNS] = None,
) -> None:
    """Draw all images as points of a page, similar ones near each other.

    The page needs no network. Points are colored by label, split or another column, and a selection can be downloaded.
    """
    check_suffix(out, ".html", "--out")
    import_torch()
    from vitruvian.bulk.vector_map import vector_map

    print(f"map: {vector_map(where, out, columns=columns, track=partial(track, label='parts'))}")
