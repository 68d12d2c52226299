"""The images of a data set that are nearest to an image or a text: `layertap search OUT QUERY_IMAGE|ROW -k 10`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.analysis.nearest_rows import layer_to_search, nearest
from extract.errors import InputError
from extract.extraction.reproduce import features_of_file, features_of_text
from extract.images import decode
from extract.row_status import Status
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from extract.system.atomic_files import link_target
from pipelines.data_sets.search_results import Found, Hit
from pipelines.data_sets.thumbnails import Pictures
from pipelines.terminal.output_paths import PICTURES, check_file
from pipelines.terminal.text_output import printable

__all__ = ["as_json", "print_found", "run_search"]


def run_search(
    out: Path | str, query: str | None = None, *, text: str | None = None, k: int = 10, layer: str | None = None,
    itself: bool = False, backbone: str | None = None, weights: str | None = None, images: str | None = None,
    device: str = defaults.DEVICE, output: Path | None = None,
) -> Found:  # fmt: skip
    """Search, and draw what was found, if that is asked for.

    Args:
        out: folder of the data set, or its URL.
        query: a row; else the path of an image in the data set; else an image file, whose features are computed as
            those of the data set were.
        text: instead of it: a text, for data sets of backbones that have a text tower beside them.
        k: rows to find.
        layer: None: `embedding`, or the only one.
        itself: whether a query that is a row may find itself.
        backbone: its spec; to be given where it is code, which a stranger's data set could name any of.
        weights: name or file of its weights, if the file was moved.
        images: where the images lie now, for the picture; None: where they lay.
        device: to compute on.
        output: PNG, SVG or PDF file to draw into.

    Raises:
        InputError: neither or both of query and text are given; no such row, path or file; a row without features; a
            layer must be named; or a file or text whose features cannot be computed as those of the data set were.
        UnknownNameError: no such layer.
    """
    if output is not None:
        check_file(output, PICTURES)
    if (query is None) == (text is None):
        raise InputError("search for one thing: a row, path or image file, or --text TEXT")
    dataset = data_set_at(out)
    with FeatureReader(out) as reader:
        name, row, path, note = "embedding", None, "", ""
        if text is not None:
            if layer not in (None, name):
                raise InputError(f"a text is compared with embeddings, not with {layer}; leave out --layer")
            feature = features_of_text(dataset, reader.provenance, text, backbone, weights, device)
        elif query is not None:
            name = layer_to_search(reader.layers, layer, str(out))
            row, note = _row_of(reader, query, out)
            path = query if row is None else reader.paths[row]
            if row is None:
                feature = features_of_file(dataset, reader.provenance, Path(query), backbone, weights, device)[name]
            else:
                feature = _feature_of_row(reader, name, row)
        good = np.flatnonzero(reader.status == Status.OK)
        without = None if row is None or itself else np.array([row])
        near = nearest(reader[name], feature[None], k, among=good, without=without, device=_device(device))
        classes, labels, splits = reader.classes, reader.labels, reader.splits
        hits = [
            Hit(one, cosine, reader.paths[one], classes[labels[one]] if labels[one] >= 0 else "", splits[one])
            for one, cosine in zip(near.rows[0].tolist(), near.cosines[0].tolist(), strict=True)
            if one >= 0
        ]
        found = Found(out, name, row, path, text or "", note, hits, len(good) - (without is not None))
        if output is not None:
            _draw(found, reader, images or dataset.images["root"], link_target(output))
    return found


def _feature_of_row(reader: FeatureReader, layer: str, row: int) -> NDArray[Any]:
    if reader.status[row] != Status.OK:
        reason = next(reason for failed, _, _, reason in reader.failures if failed == row)
        status, path = Status(reader.status[row]), printable(reader.paths[row])
        raise InputError(f"row {row} ({path}) has no features: {status.text}: {reason}")
    feature: NDArray[Any] = reader[layer][row]
    return feature


def _row_of(reader: FeatureReader, query: str, out: Path | str) -> tuple[int | None, str]:
    """The row that a query means, or None for a file; and what else it might have meant."""
    is_file = Path(query).is_file()
    file = f"there is a file of this name, too, which ./{query} would mean" if is_file else ""
    if query.isascii() and query.isdigit():
        row = int(query)
        if row >= len(reader):
            there = f"it has rows 0 to {len(reader) - 1:,}" if len(reader) else "it has none"
            raise InputError(f"{out} has no row {row}: {there}" + (f"; {file}" if file else ""))
        return row, file
    rows = np.flatnonzero(_equal(reader.paths, query))
    if len(rows):
        several = f"{len(rows)} rows have this path, and the first was taken" if len(rows) > 1 else ""
        return int(rows[0]), "; ".join(text for text in (several, file) if text)
    if not is_file:
        what = "a folder; name one image" if Path(query).is_dir() else "no row, no path of an image in it, and no file"
        raise InputError(f"{out}: {printable(query)} is {what}")
    return None, ""


def _equal(paths: list[str], query: str) -> NDArray[np.bool_]:
    wanted = os.fsencode(query)
    return np.fromiter((os.fsencode(path) == wanted for path in paths), np.bool_, len(paths))


def _device(device: str) -> str:
    """Where rows are compared: reading them takes longer than comparing them, so on a GPU only if it is asked for."""
    return device if device != "auto" else "cpu"


def _draw(found: Found, reader: FeatureReader, root: str, output: Path) -> None:
    from pipelines.data_sets.search_gallery import draw

    rows = [hit.row for hit in found.hits] + ([] if found.query is None else [found.query])
    pictures = Pictures(reader, root, rows)
    if found.query is not None:
        query = pictures.picture(found.query)
    else:
        query = (None, "") if found.text else (decode(Path(found.path).read_bytes()), "")
    draw(found, query, [pictures.picture(hit.row) for hit in found.hits], output)


def print_found(found: Found, echo: Callable[[str], None]) -> None:
    """What was found, for people."""
    taken = f"the file {found.path}" if found.query is None else f"row {found.query} ({printable(found.path)})"
    if found.text:
        taken = f'the text "{printable(found.text)}"'
    echo(f"{found.out}: nearest to {taken} by cosine of {found.layer}, of {found.searched:,} rows")
    if found.note:
        echo(f"  note: {printable(found.note)}")
    if not found.hits:
        echo("  no other row has features")
    width = max((len(str(hit.row)) for hit in found.hits), default=0)
    for rank, hit in enumerate(found.hits, 1):
        name = f"  [{printable(hit.name)}]" if hit.name else ""
        number = f"{rank:>{len(str(len(found.hits)))}}"
        echo(f"  {number}  {hit.cosine:.6f}  row {hit.row:<{width}}  {printable(hit.path)}{name}")


def as_json(found: Found) -> dict[str, Any]:
    """What was found, for machines."""
    return {
        "out": str(found.out),
        "layer": found.layer,
        "query": {"row": found.query, "path": found.path or None, "text": found.text or None, "note": found.note},
        "searched": found.searched,
        "results": [
            {
                "rank": rank,
                "row": hit.row,
                "cosine": hit.cosine,
                "path": hit.path,
                "class": hit.name or None,
                "split": hit.split or None,
            }
            for rank, hit in enumerate(found.hits, 1)
        ],
    }
