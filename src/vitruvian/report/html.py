"""HTML reports that need no other file: the Jinja environment, numbers and images in pages, and writing them."""

import base64
import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from vitruvian.files import atomic_open, atomic_path, json_bytes
from vitruvian.text import printable

PAGE = "report.html"  # file name of a report
THUMBNAIL_SIDE = 240  # longest side in pixels, shown at about half of that for high-density screens
TINY_SIDE = 64  # images up to this side are shown with square pixels instead of being smoothed
QUALITY = 82  # JPEG quality of embedded images


@cache
def environment() -> Any:
    """The templates in `report/templates`. All values are escaped, and control characters become visible."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    jinja = Environment(
        loader=PackageLoader("vitruvian.report"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    jinja.filters |= {"flatten": flatten, "number": format_number}
    return jinja


def render(template: str, **context: Any) -> Markup:
    """Render a page or a part of one; as `Markup`, a part can be inserted into another template."""
    return Markup(environment().get_template(template).render(context))


def notebook(heading: str, titles: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> str:
    """A result as notebooks show it, for `_repr_html_`: a table of which titles that begin with `>` are of numbers."""
    return render("notebook.html", heading=heading, titles=titles, rows=list(rows), notes=list(notes))


def script_hash(script: str) -> str:
    """The hash by which the page's content security policy allows this script and no other."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def short_name(name: str) -> str:
    """The last part of an existing path; any other name, such as ViT-B/16, unchanged."""
    return Path(name).name if Path(name).expanduser().exists() else name


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of nested settings, called `outer.inner`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{name}", "none" if value is None or value == "" or value == {} else str(value)


def format_number(value: object) -> object:
    """A number as 12,345, 0.125 or 3e-05; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    return f"{value:.3g}" if 0 < abs(value) < 1 else f"{value:,.2f}"


def percent_bar(percent: float, interval: tuple[float, float] | None = None) -> Markup:
    """A percentage with its interval and a bar; a dash for NaN."""
    if math.isnan(percent):
        return Markup("–")
    ends = (
        ""
        if interval is None
        else Markup(' <small class="soft">({:.0f}&nbsp;to&nbsp;{:.0f})</small>').format(*interval)
    )
    bar = Markup('{0}&nbsp;%{1}<span class="bar"><i style="width:{0}%"></i></span>')
    return bar.format(f"{percent:.1f}", ends)


def embed_image(image: Image.Image, alt: str, *, kind: str = "", exact: bool = False) -> Markup:
    """An <img> of CSS class `kind` with the image inside: JPEG, or PNG if tiny, transparent or `exact`."""
    exact = exact or image.mode == "RGBA" or max(image.size) <= TINY_SIDE
    buffer = io.BytesIO()
    if exact:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.save(buffer, "JPEG", quality=QUALITY)
    data = base64.b64encode(buffer.getvalue()).decode()
    tag = Markup('<img class="{}" alt="{}" width="{}" height="{}" src="data:image/{};base64,{}">')
    return tag.format(kind, printable(alt), image.width, image.height, "png" if exact else "jpeg", data)


def thumbnail(image: Image.Image, alt: str, *, side: int = THUMBNAIL_SIDE, kind: str = "") -> Markup:
    """A smaller copy of the image, at most `side` pixels wide and high, as an <img>."""
    small = image.copy()
    small.thumbnail((side, side))
    return embed_image(small, alt, kind=kind or ("tiny" if max(small.size) <= TINY_SIDE else ""))


def write_image(path: Path, image: Image.Image) -> Path:
    """Write a PNG file atomically."""
    with atomic_open(path) as file:
        image.save(file, "PNG", optimize=True)
    return path


def write_report(folder: Path, *, name: str, numbers: dict[str, Any], page: str) -> Path:
    """Create a folder with the page and its numbers as JSON, called `name`, atomically; returns the page's path."""
    with atomic_path(folder) as draft:
        draft.mkdir()
        (draft / name).write_bytes(json_bytes(numbers))
        (draft / PAGE).write_text(page, encoding="utf-8")
    return folder / PAGE
