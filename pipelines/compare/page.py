"""The page of a comparison: one HTML file; see `pipelines.terminal.page.assembly`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image

from extract.analysis.probe.metrics import metric_name
from extract.credentials import without_credentials
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.system.atomic_files import atomic_write
from extract.system.optional_libraries import own_version
from pipelines.compare.comparison import Comparison
from pipelines.compare.files import as_json
from pipelines.terminal.page.assembly import assembled
from pipelines.terminal.page.thumbnail_sheets import LARGEST_PX, ThumbnailSheets, thumbnail_sheets
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import printable

__all__ = ["write_page"]

_PAGE_BYTES = 5_000_000  # at most, about; thumbnails take the rest


def write_page(comparison: Comparison, out: Path, images: str) -> Path:
    """Write the page, and return the file.

    Args:
        comparison: the comparison.
        out: its folder, with the data sets.
        images: location of the images.
    """
    path = out / "compare.html"
    data: dict[str, Any] = _printable(as_json(comparison)) | {
        "title": printable(without_credentials(images).rstrip("/").rpartition("/")[2] or "images"),
        "written": datetime.now(UTC).isoformat(" ", "seconds"),
        "version": own_version(),
        "about_thumbnails": "",
    }
    disputed = [image for task in data["tasks"] for image in task["disputed"]]
    for task in data["tasks"]:
        task["metric_name"] = metric_name(task["metric"]).capitalize()
        data["notes"] += [note if comparison.only_task else f"{task['name']}: {note}" for note in task["notes"]]
    data["classes"] = []  # an image may have a class in each task
    data["rows"] = {image["row"]: [image["path"], -1, ""] for image in disputed}
    data["thumbnails"] = ThumbnailSheets().as_json()
    script = (resources.files("pipelines.compare") / "compare.js").read_text(encoding="utf-8")
    if disputed:
        name = next(entry.name for entry in comparison.backbones if not entry.error)
        sheets, data["about_thumbnails"] = _thumbnails(
            comparison, out / name, images, _PAGE_BYTES - len(assembled("comparison", data, [script]))
        )
        data["thumbnails"] = sheets.as_json()
    with atomic_write(path) as file:
        file.write(assembled("comparison", data, [script]))
    return path


def _thumbnails(comparison: Comparison, data_set: Path, images: str, room: int) -> tuple[ThumbnailSheets, str]:
    """Return thumbnails of the disputed images, and a note about missing ones."""
    rows = list(dict.fromkeys(disputed.row for task in comparison.tasks for disputed in task.disputed))
    with FeatureReader(data_set) as reader:
        source = Pictures(reader, DataSet.open(data_set).images["root"], rows, images)
        if source.why_not:
            return ThumbnailSheets(), printable(f"No pictures: {source.why_not}")

        def pictures() -> Iterator[tuple[int, Image.Image]]:
            for row in rows:
                picture, _ = source.picture(row, LARGEST_PX)
                if picture is not None:
                    yield row, picture

        return thumbnail_sheets(pictures(), len(rows), room), ""


def _printable(value: Any) -> Any:
    """Return JSON-compatible data in which all texts can be printed."""
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value
