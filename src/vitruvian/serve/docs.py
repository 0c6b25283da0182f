"""The OpenAPI description as one page that needs nothing from the internet."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Vitruvian: HTTP interface</title><link rel="stylesheet" href="/page/style.css"></head><body class="docs"><main>
<h1>HTTP interface</h1>
<p>Send files as <code>multipart/form-data</code> in the field <code>image</code>, or JSON with base64. Every response
has an <code>X-Request-ID</code>. The description for programs is <a href="/openapi.json">openapi.json</a>; the page is
<a href="/">here</a>.</p>
"""


def docs_page(description: dict[str, Any]) -> str:
    """All routes with their fields and responses."""
    return HEAD + "\n".join(routes(description)) + "\n</main></body></html>\n"


def routes(description: dict[str, Any]) -> Iterator[str]:
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(route['summary'])}</p>"
            content = route.get("requestBody", {}).get("content", {})
            if "multipart/form-data" in content:
                yield fields(content["multipart/form-data"]["schema"])
                yield f"<pre>curl -F image=@photo.jpg http://localhost:8000{escape(path)}</pre>"
            codes = [
                f"<li><code>{code}</code> {escape(each['description'])}</li>"
                for code, each in route["responses"].items()
            ]
            yield f"<details><summary>Responses</summary><ul>{''.join(codes)}</ul></details></section>"


def fields(schema: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(about(field))}</td>"
        f"<td>{'required' if name in schema['required'] else escape(default(field))}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    return f"<table><tr><th>field</th><th>meaning</th><th>default</th></tr>{''.join(rows)}</table>"


def about(field: dict[str, Any]) -> str:
    return str(field.get("description") or ("Files." if field.get("type") == "array" else ""))


def default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value in (None, "", []) else ", ".join(value) if isinstance(value, list) else str(value)
