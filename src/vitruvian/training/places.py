"""Names of data and weights as a record keeps them: they hold from whatever folder a run goes on in."""

from __future__ import annotations

from pathlib import Path

from vitruvian.data.sources import BUILT_IN

RUNS = Path("runs")
"""Where runs, sweeps and studies go that are given no folder."""


def lasting_path(name: str | Path) -> str:
    """A path that exists, in full; a published name as it is."""
    place = Path(name).expanduser()
    return str(place.resolve() if place.exists() else name)


def lasting_data(data: str | Path) -> str:
    """A path that exists, in full; a built-in name, a task or an address as it is."""
    return str(data) if str(data) in BUILT_IN else lasting_path(data)
