"""The page of `layertap report`: one HTML file with its content as JSON.

The scripts show the content, and insert all text as text, not as HTML. The page's security policy forbids loading, and
permits only the script whose hash it contains. So names of files and classes cannot run code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from extract.errors import InputError
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.system.atomic_files import atomic_write, link_target
from pipelines.data_sets.report.content import ReportContent
from pipelines.data_sets.show import describe

__all__ = ["run_report"]

PAGE_BYTES = 10_000_000  # at most; thumbnails take the rest
_HEADER = b"<!doctype html>\n<!-- layertap report -->\n"
_SCRIPTS = ("elements.js", "charts.js", "map.js", "sections.js")  # joined in this order


def run_report(
    out: Path, other: Path | None = None, *, output: Path | None = None, layer: str | None = None,
    maps: Sequence[str] = ("tsne", "pca"), probe_results: Sequence[Path] = (), images: str | None = None,
    thumbnails: int = 5000, seed: int = 0, say: Callable[[str], None] = lambda text: None,
) -> Path:  # fmt: skip
    """Write the page and return its path.

    Args:
        out: folder of the data set, which may be incomplete.
        other: folder of another data set to compare with.
        output: HTML file; None: OUT/report.html.
        layer: layer by which images are compared; None: `embedding`, or the last layer.
        maps: some of pca, tsne and umap; the page opens on the first.
        probe_results: folders or files of results besides OUT/probe.
        images: location of the images; None: the recorded location, unless images would be fetched from a URL.
        thumbnails: maximum number of thumbnails; 0: no thumbnails.
        seed: seed of random choices.
        say: receives a line about each step.

    Raises:
        InputError: `out` is not a data set, the layer does not exist, or the file cannot be written.
        LayertapError: a library for a map is missing, or the data set cannot be read.
    """
    output, written_to = (out / "report.html",) * 2 if output is None else (output, link_target(output))
    if output.is_dir() or not output.resolve().parent.is_dir():
        problem = "it is a folder" if output.is_dir() else "no such folder"
        raise InputError(f"{output} cannot be written: {problem}")
    if output.is_file() and not _is_report(output):
        raise InputError(f"{output} already exists and is not a layertap report", hint="name another file")
    say("reading the description")
    described = describe(out)
    dataset = DataSet.open(out)
    with FeatureReader(out, partial=not described["complete"], check=True) as reader:
        content = ReportContent(reader, described, dataset, layer, seed, say)
        content.fill(maps, probe_results)
        if other is not None:
            say(f"comparing with {other}")
            content.compare_with(out, other)
        content.list_rows()
        say("making thumbnails")
        room = PAGE_BYTES - len(_assembled(content.data)) - 200_000  # for the list of the thumbnails
        content.add_thumbnails(dataset.images["root"], images, thumbnails, room)
    with atomic_write(written_to) as file:
        file.write(_assembled(content.data))
    return output


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEADER)) == _HEADER


def _assembled(data: dict[str, Any]) -> bytes:
    """Return the page with this content."""
    folder = resources.files("pipelines.data_sets.report")
    page, style = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    parts = {"SCRIPT": script, "STYLE": style, "HASH": f"'sha256-{_sha256(script)}'", "DATA": _as_data(data)}
    return _HEADER + b"".join(_filled(page, parts))


def _filled(page: str, parts: dict[str, str]) -> Iterator[bytes]:
    """Yield the page with each `{{NAME}}` replaced; inserted text is not searched for further names."""
    for number, text in enumerate(page.replace("}}", "{{").split("{{")):
        yield (parts[text] if number % 2 else text).encode()


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _as_data(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside a <script> element: it cannot end the element or start a comment or an entity."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(content: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
