"""Find the images nearest to an image or a text: `layertap search OUT QUERY_IMAGE|ROW -k 10`.

There is no index, and no FAISS: for one query, the flat index of FAISS took 1.2 s to fill and 0.2 s (1 million x 256),
NumPy 1.2 s with reading. An index of a part of the rows (HNSW, IVF) is sometimes wrong, and would be built again after
each pass of `sync`; the files of FAISS are read by code that trusts them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from extract import defaults
from extract.analysis.probe.nearest_rows import layer_to_search, nearest
from extract.credentials import without_credentials
from extract.errors import InputError
from extract.extraction.reproduce import features_of_file, features_of_text
from extract.images.part_names import file_of
from extract.row_status import Status
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from extract.system.atomic_files import link_target
from extract.system.torch_state import device_named
from pipelines.terminal.output_paths import PICTURES, check_file
from pipelines.terminal.text_output import counted, printable

__all__ = ["print_results", "run_search"]


def run_search(
    out: Path | str, query: str | None = None, *, text: str | None = None, k: int = 10, layer: str | None = None,
    itself: bool = False, backbone: str | None = None, weights: str | None = None, images: str | None = None,
    device: str = defaults.DEVICE, output: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Search a data set, draw the results if `output` is given, and return them as JSON-compatible data.

    Args:
        out: folder or URL of the data set.
        query: a row number; otherwise the path of an image in the data set; otherwise an image file, or the name of a
            part of one, whose features are computed with the data set's recorded settings.
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
        name, row, path = "embedding", None, ""
        if text is not None:
            if layer not in (None, name):
                raise InputError(f"a text is compared with embeddings, not with {layer}", hint="leave out --layers")
            feature = features_of_text(dataset, reader.provenance, text, backbone, weights, device)
        elif query is not None:
            name = layer_to_search(reader.layers, layer, str(out))
            row = _row_of_query(reader, query, out)
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
        found = zip(neighbours.rows[0].tolist(), neighbours.cosines[0].tolist(), strict=True)
        results = {
            "out": str(out),
            "layer": name,
            "query": {
                "row": row,
                "path": path or None,
                "text": text,
                "class": None if row is None else _class_of(reader, row),
            },
            "no_pictures": "",
            "searched": len(good) - (without is not None),
            "results": [
                {
                    "rank": rank,
                    "row": near,
                    "cosine": cosine,
                    "path": reader.paths[near],
                    "class": _class_of(reader, near),
                    "split": reader.splits[near] or None,
                }
                for rank, (near, cosine) in enumerate(found, 1)
                if near >= 0
            ],
        }
        if output is not None:
            from pipelines.data_sets.search_gallery import draw  # imports matplotlib

            results["no_pictures"] = draw(results, reader, dataset.images["root"], images, link_target(output))
    return results


def _class_of(reader: FeatureReader, row: int) -> str | None:
    """Return the name of the class of a row; None: unlabelled."""
    label = int(reader.labels[row])
    return reader.classes[label] if label >= 0 else None


def _check_good(reader: FeatureReader, row: int) -> None:
    """Raise InputError, with the reason, if a row has no features."""
    if reader.status[row] != Status.OK:
        reason = next(reason for failed, _, _, reason in reader.failures if failed == row)
        status, path = Status(reader.status[row]), printable(reader.paths[row])
        raise InputError(f"row {row} ({path}) has no features: {status.text}: {reason}")


def _row_of_query(reader: FeatureReader, query: str, out: Path | str) -> int | None:
    """Return the row that a query names, the first if several have its path; None for a file."""
    if query.isascii() and query.isdigit():
        if int(query) >= len(reader):
            expected = f"expected a row from 0 to {len(reader) - 1:,}" if len(reader) else "the data set is empty"
            raise InputError(f"{out} has no row {query}: {expected}")
        return int(query)
    for path in (query, without_credentials(query)):
        row = next((row for row, stored in enumerate(reader.paths) if stored == path), None)
        if row is not None:
            return row
    if not Path(file_of(query)).is_file():
        problem = "a folder; name one image" if Path(query).is_dir() else "not a row number, a path in it, or a file"
        example = f", or a path such as {printable(reader.paths[0])}" if len(reader) else ""
        raise InputError(f"{out}: {printable(query)} is {problem}", hint=f"name a row{example}")
    return None


def print_results(content: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the results."""
    query, hits = content["query"], content["results"]
    if query["text"]:
        asked = f'the text "{printable(query["text"])}"'
    elif query["row"] is None:
        asked = f"the file {query['path']}"
    else:
        asked = f"row {query['row']} ({printable(query['path'])})"
    of_class = f"; class of the query: [{printable(query['class'])}]" if query["class"] else ""
    searched = counted(content["searched"], "row")
    echo(f"{content['out']}: nearest to {asked} by cosine of {content['layer']}, among {searched}{of_class}")
    if content["no_pictures"]:
        echo(f"  note: no pictures: {printable(content['no_pictures'])}")
    if not hits:
        echo("  no other row has features")
    rank_width, row_width = (max((len(str(hit[key])) for hit in hits), default=0) for key in ("rank", "row"))
    for hit in hits:
        name = f"  [{printable(hit['class'])}]" if hit["class"] else ""
        echo(
            f"  {hit['rank']:>{rank_width}}  {hit['cosine']:.6f}  row {hit['row']:<{row_width}}  "
            f"{printable(hit['path'])}{name}"
        )
