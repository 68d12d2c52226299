"""A page of one HTML file, with its content as JSON.

The scripts show the content, and insert all text as text, not as HTML. The page's security policy forbids loading, and
permits only the script whose hash it contains. So names of files and classes cannot run code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from extract.system.json_files import without_nan

__all__ = ["assembled", "is_page"]


def assembled(kind: str, data: dict[str, Any], room: str, scripts: Sequence[str]) -> bytes:
    """Return a page.

    Args:
        kind: what it is, such as "report".
        data: its content; `elements.js` says what the scripts of all pages need.
        room: package with the scripts.
        scripts: names of the scripts that show the content, after `elements.js` and `charts.js`.
    """
    page, style, *shared = _texts("pipelines.terminal.page", ["page.html", "page.css", "elements.js", "charts.js"])
    script = "".join([*shared, *_texts(room, scripts)])
    sha256 = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "KIND": kind, "SCRIPT": script, "STYLE": style, "HASH": f"'sha256-{sha256}'", "DATA": _as_data(data),
    }  # fmt: skip
    return _header(kind) + b"".join(_filled(page, parts))


def _texts(room: str, names: Sequence[str]) -> list[str]:
    return [(resources.files(room) / name).read_text(encoding="utf-8") for name in names]


def is_page(kind: str, path: Path) -> bool:
    """Return whether a file is such a page."""
    header = _header(kind)
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _header(kind: str) -> bytes:
    return f"<!doctype html>\n<!-- layertap {kind} -->\n".encode()


def _filled(page: str, parts: dict[str, str]) -> Iterator[bytes]:
    """Yield the page with each `{{NAME}}` replaced; inserted text is not searched for further names."""
    for number, text in enumerate(page.replace("}}", "{{").split("{{")):
        yield (parts[text] if number % 2 else text).encode()


def _as_data(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside a <script> element: it cannot end the element or start a comment or an entity."""
    text = json.dumps(without_nan(data), separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
