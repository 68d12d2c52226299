"""Find the images nearest to an image or a text: `layertap search OUT QUERY_IMAGE|ROW -k 10`.

There is no index, and no FAISS: for one query, the flat index of FAISS took 1.2 s to fill and 0.2 s (1 million x 256),
NumPy 1.2 s with reading. An index of a part of the rows (HNSW, IVF) is sometimes wrong, and would be built again after
each pass of `sync`; the files of FAISS are read by code that trusts them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.analysis.probe.nearest_rows import layer_to_search, nearest
from extract.credentials import without_credentials
from extract.errors import InputError
from extract.extraction.reproduce import features_of_file, features_of_text
from extract.row_status import Status
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from extract.system.atomic_files import link_target
from extract.system.torch_state import device_named
from pipelines.terminal.output_paths import PICTURES, check_file
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import counted, printable

__all__ = ["Hit", "SearchResults", "as_json", "print_results", "run_search"]


@dataclass(frozen=True)
class Hit:
    """A result of a search.

    Attributes:
        row: row of the data set.
        cosine: cosine between its feature and the feature of the query.
        path: path of its image.
        name: name of its class; empty: unlabelled.
        split: train, val, test or empty.
    """

    row: int
    cosine: float
    path: str
    name: str
    split: str


@dataclass(frozen=True)
class SearchResults:
    """All results of a search.

    Attributes:
        out: the data set.
        layer: layer whose features were compared.
        query: query row; None if the query is a file or a text.
        path: path of the query image; empty for a text.
        text: query text; empty for an image.
        name: name of the class of the query row; empty: unlabelled, a file or a text.
        note: what else the query may mean; empty: nothing.
        hits: results, nearest first.
        searched: number of rows compared.
        no_pictures: why the figure has no pictures; empty: it has, or no figure was requested.
    """

    out: Path | str
    layer: str
    query: int | None
    path: str
    text: str
    name: str
    note: str
    hits: list[Hit]
    searched: int
    no_pictures: str = ""


def run_search(
    out: Path | str, query: str | None = None, *, text: str | None = None, k: int = 10, layer: str | None = None,
    itself: bool = False, backbone: str | None = None, weights: str | None = None, images: str | None = None,
    device: str = defaults.DEVICE, output: Path | None = None,
) -> SearchResults:  # fmt: skip
    """Search a data set, and draw the results if `output` is given.

    Args:
        out: folder or URL of the data set.
        query: a row number; otherwise the path of an image in the data set; otherwise an image file, whose features are
            computed with the data set's recorded settings.
        text: a text instead of `query`, if the backbone has a text tower.
        k: number of rows to find.
        layer: layer to compare; None: `embedding`, or the only layer.
        itself: whether a query row may be a result.
        backbone: spec of the backbone; required if the backbone is code, since an untrusted data set could name any
            code.
        weights: name or file of the backbone's weights, if the file was moved.
        images: location of the images, for the picture; None: the recorded location, unless images would be fetched
            from a URL.
        device: device to compute on.
        output: PNG, SVG or PDF file to draw into.

    Raises:
        InputError: neither or both of `query` and `text` are given; the row, path or file does not exist; the row has
            no features; a layer must be named; or features of the file or text cannot be computed with the data set's
            recorded settings.
        UnknownNameError: the layer does not exist.
    """
    if output is not None:
        check_file(output, PICTURES)
    if (query is None) == (text is None):
        raise InputError(
            "expected exactly one query: a row number, a path, an image file, or --text TEXT",
            hint=f"for the images most similar to the first one: layertap search {shlex.quote(str(out))} 0",
        )
    dataset = data_set_at(out)
    with FeatureReader(out, check=isinstance(out, Path)) as reader:
        name, row, path, note = "embedding", None, "", ""
        if text is not None:
            if layer not in (None, name):
                raise InputError(f"a text is compared with embeddings, not with {layer}", hint="leave out --layers")
            feature = features_of_text(dataset, reader.provenance, text, backbone, weights, device)
        elif query is not None:
            name = layer_to_search(reader.layers, layer, str(out))
            row, note = _row_of_query(reader, query, out)
            path = query if row is None else reader.paths[row]
            if row is None:
                feature = features_of_file(dataset, reader.provenance, Path(query), backbone, weights, device)[name]
            else:
                _check_good(reader, row)
                feature = reader[name][row]
        good = np.flatnonzero(reader.status == Status.OK)
        without = None if row is None or itself else np.array([row])
        compared_on = "cpu" if device == "auto" else str(device_named(device))  # reading rows takes longer
        neighbours = nearest(reader[name], feature[None], k, among=good, without=without, device=compared_on)
        hits = [
            Hit(near, cosine, reader.paths[near], _class_of(reader, near), reader.splits[near])
            for near, cosine in zip(neighbours.rows[0].tolist(), neighbours.cosines[0].tolist(), strict=True)
            if near >= 0
        ]
        searched, class_name = len(good) - (without is not None), "" if row is None else _class_of(reader, row)
        results = SearchResults(out, name, row, path, text or "", class_name, note, hits, searched)
        if output is not None:
            why_not = _draw(results, reader, dataset.images["root"], images, link_target(output))
            results = replace(results, no_pictures=why_not)
    return results


def _class_of(reader: FeatureReader, row: int) -> str:
    """Return the name of the class of a row; empty: unlabelled."""
    label = int(reader.labels[row])
    return reader.classes[label] if label >= 0 else ""


def _check_good(reader: FeatureReader, row: int) -> None:
    """Raise InputError, with the reason, if a row has no features."""
    if reader.status[row] != Status.OK:
        reason = next(reason for failed, _, _, reason in reader.failures if failed == row)
        status, path = Status(reader.status[row]), printable(reader.paths[row])
        raise InputError(f"row {row} ({path}) has no features: {status.text}: {reason}")


def _row_of_query(reader: FeatureReader, query: str, out: Path | str) -> tuple[int | None, str]:
    """Return the row that a query names, None for a file; and a note on what else the query may mean."""
    is_file = Path(query).is_file()
    file = f"a file has this name, too; to search for the file, write ./{query}" if is_file else ""
    if query.isascii() and query.isdigit():
        row = int(query)
        if row >= len(reader):
            expected = f"expected a row from 0 to {len(reader) - 1:,}" if len(reader) else "the data set is empty"
            raise InputError(f"{out} has no row {row}: {expected}", hint=file)
        return row, file
    rows = np.flatnonzero(_equal(reader.paths, query))
    if not len(rows):
        rows = np.flatnonzero(_equal(reader.paths, without_credentials(query)))
    if len(rows):
        several = f"{len(rows)} rows have this path; the first row is used" if len(rows) > 1 else ""
        return int(rows[0]), "; ".join(text for text in (several, file) if text)
    if not is_file:
        problem = "a folder; name one image" if Path(query).is_dir() else "not a row number, a path in it, or a file"
        example = f", or a path such as {printable(reader.paths[0])}" if len(reader) else ""
        raise InputError(f"{out}: {printable(query)} is {problem}", hint=f"name a row{example}")
    return None, ""


def _equal(paths: Sequence[str], query: str) -> NDArray[np.bool_]:
    encoded = os.fsencode(query)
    return np.fromiter((os.fsencode(path) == encoded for path in paths), np.bool_, len(paths))


def _draw(results: SearchResults, reader: FeatureReader, root: str, images: str | None, output: Path) -> str:
    """Draw the results, and return why there are no pictures, or ""."""
    from pipelines.data_sets.search_gallery import MOST_DRAWN, Tile, draw

    rows = [hit.row for hit in results.hits] + ([] if results.query is None else [results.query])
    pictures = Pictures(reader, root, rows, images)

    def tile(row: int, heading: str, path: str, name: str) -> Tile:
        picture, why = pictures.picture(row)
        return Tile(picture, f"no picture:\n{why}", heading, path, name)

    if results.text:
        query = Tile(None, results.text, "query", "", "")
    elif results.query is None:
        query = Tile(pictures.of_file(Path(results.path)), "", "query", results.path, "")
    else:
        query = tile(results.query, "query", results.path, results.name)
    shown = results.hits[:MOST_DRAWN]
    title = f"Nearest by cosine of {results.layer}"
    if len(shown) < len(results.hits):
        title += f"; the first {len(shown)} of {len(results.hits)}"
    draw(title, query, [tile(hit.row, f"{hit.cosine:.4f}", hit.path, hit.name) for hit in shown], output)
    return pictures.why_not


def print_results(results: SearchResults, echo: Callable[[str], None]) -> None:
    """Print the results."""
    name = f"; class of the query: [{printable(results.name)}]" if results.name else ""
    query = f"the file {results.path}" if results.query is None else f"row {results.query} ({printable(results.path)})"
    if results.text:
        query = f'the text "{printable(results.text)}"'
    searched = counted(results.searched, "row")
    echo(f"{results.out}: nearest to {query} by cosine of {results.layer}, among {searched}{name}")
    if results.note:
        echo(f"  note: {printable(results.note)}")
    if results.no_pictures:
        echo(f"  note: no pictures: {printable(results.no_pictures)}")
    if not results.hits:
        echo("  no other row has features")
    width = max((len(str(hit.row)) for hit in results.hits), default=0)
    for rank, hit in enumerate(results.hits, 1):
        name = f"  [{printable(hit.name)}]" if hit.name else ""
        number = f"{rank:>{len(str(len(results.hits)))}}"
        echo(f"  {number}  {hit.cosine:.6f}  row {hit.row:<{width}}  {printable(hit.path)}{name}")


def as_json(results: SearchResults) -> dict[str, Any]:
    """Return the results as JSON-compatible data."""
    return {
        "out": str(results.out),
        "layer": results.layer,
        "query": {
            "row": results.query,
            "path": results.path or None,
            "text": results.text or None,
            "class": results.name or None,
            "note": results.note,
        },
        "no_pictures": results.no_pictures,
        "searched": results.searched,
        "results": [
            {
                "rank": rank,
                "row": hit.row,
                "cosine": hit.cosine,
                "path": hit.path,
                "class": hit.name or None,
                "split": hit.split or None,
            }
            for rank, hit in enumerate(results.hits, 1)
        ],
    }
