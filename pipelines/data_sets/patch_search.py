"""Find the images with the patch nearest to a patch of an image: `layertap search OUT IMAGE --at X,Y`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract import defaults
from extract.analysis.nearest_patches import nearest_patches, patch_similarity
from extract.errors import InputError
from extract.extraction.reproduce import features_of_file
from extract.images import decode
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from extract.system.atomic_files import link_target
from pipelines.data_sets.search import class_of, row_of_query
from pipelines.data_sets.search_results import Box, Hit, Overlay, SearchResults
from pipelines.terminal.output_paths import PICTURES, check_file
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import printable

__all__ = ["run_patch_search"]


class _Query(NamedTuple):
    """The image of the query.

    Attributes:
        row: row in the data set; None for a file.
        path: path of the image.
        note: what else the query may mean.
        tokens: (per_image, C).
        size: (width, height) in pixels.
        picture: picture, and why it is missing.
    """

    row: int | None
    path: str
    note: str
    tokens: NDArray[np.floating]
    size: tuple[int, int]
    picture: tuple[Image.Image | None, str]


def run_patch_search(
    out: Path | str, query: str, at: tuple[int, int], *, k: int = 10, layer: str | None = None, itself: bool = False,
    backbone: str | None = None, weights: str | None = None, images: str | None = None,
    device: str = defaults.DEVICE, output: Path | None = None,
) -> SearchResults:  # fmt: skip
    """Search the tokens of a data set, and draw the results if `output` is given.

    Args:
        out: folder or URL of the data set.
        query: see `run_search`.
        at: x and y of a pixel in the image of the query, upright, from the upper left corner.
        k: number of images to find.
        layer: layer whose tokens are compared; None: the only layer with tokens.
        itself: whether the image of a query row may be a result.
        backbone: see `run_search`.
        weights: see `run_search`.
        images: location of the images; None: the recorded location, unless images would be fetched from a URL.
        device: device on which the features of a file are computed.
        output: PNG, SVG or PDF file to draw into.

    Raises:
        InputError: see `run_search`; or there are no tokens, the pixel is outside the image or the crop, or the size of
            the image is not available.
        UnknownNameError: the layer does not exist.
    """
    if output is not None:
        check_file(output, PICTURES)
    dataset = data_set_at(out)
    with FeatureReader(out, check=isinstance(out, Path)) as reader:
        name = _layer(reader, layer, out)
        tokens = reader.tokens(name)
        good = tokens.rows.tolist()
        pictures = Pictures(reader, dataset.images["root"], good, images)
        asked = _query(query, name, tokens, reader, dataset, pictures, backbone, weights, device)
        cell = _cell(tokens, at, asked)
        vector = asked.tokens[cell]
        excluded = asked.row if not itself else None
        nearest = nearest_patches(tokens, vector, k + (excluded is not None))
        hits, overlays = list[Hit](), list[Overlay | None]()
        triples = zip(nearest.images.tolist(), nearest.cosines.tolist(), nearest.cells.tolist(), strict=True)
        for image, cosine, found_cell in triples:
            row = good[image]
            if row != excluded and len(hits) < k:
                size = pictures.size(row)
                where = divmod(found_cell, tokens.grid[1])
                box = None if size is None else _box(tokens, found_cell, size)
                hits.append(Hit(row, cosine, reader.paths[row], class_of(reader, row), reader.splits[row], where, box))
                of_image = tokens[image * tokens.per_image : (image + 1) * tokens.per_image]
                overlays.append(None if size is None else _overlay(tokens, of_image, vector, size, found_cell))
        results = SearchResults(
            out, name, asked.row, asked.path, "", asked.note, hits, len(good) - (excluded is not None),
            name="" if asked.row is None else class_of(reader, asked.row), at=at, no_pictures=pictures.why_not,
        )  # fmt: skip
        if output is not None:
            from pipelines.data_sets.search_gallery import draw

            of_query = _overlay(tokens, asked.tokens, vector, asked.size, cell)
            shown = [pictures.picture(hit.row) for hit in hits]
            draw(results, asked.picture, shown, link_target(output), of_query, overlays)
    return replace(results, no_pictures=results.no_pictures if output is not None else "")


def _layer(reader: FeatureReader, layer: str | None, out: Path | str) -> str:
    if layer is not None:
        return layer
    names = reader.layers_with_tokens()
    if len(names) > 1:
        raise InputError(f"{out} has {len(names)} layers with tokens", hint=f"name one: -l {', -l '.join(names)}")
    return names[0]


def _query(
    query: str, layer: str, tokens: TokenArray, reader: FeatureReader, dataset: DataSet, pictures: Pictures,
    backbone: str | None, weights: str | None, device: str,
) -> _Query:  # fmt: skip
    row, note = row_of_query(reader, query, dataset.out)
    if row is None:
        picture = decode(Path(query).read_bytes())
        feature = features_of_file(dataset, reader.provenance, Path(query), backbone, weights, device)[layer]
        return _Query(None, query, note, tokens.of_feature(feature), picture.size, (picture, ""))
    path = reader.paths[row]
    if reader.status[row] != Status.OK:
        raise InputError(f"row {row} ({printable(path)}) has no features: {Status(reader.status[row]).text}")
    image, why = pictures.picture(row)
    if image is None:
        raise InputError(f"the size of {printable(path)} is not available: {pictures.why_not or why}")
    place = int(np.searchsorted(tokens.rows, row))
    of_row = tokens[place * tokens.per_image : (place + 1) * tokens.per_image]
    return _Query(row, path, note, of_row, image.size, (image, ""))


def _cell(tokens: TokenArray, at: tuple[int, int], asked: _Query) -> int:
    """Return the cell of the grid with a pixel."""
    (x, y), (width, height) = at, asked.size
    if x >= width or y >= height:
        raise InputError(f"--at {x},{y} is outside {printable(asked.path)}, which has {width} x {height} pixels")
    boxes = tokens.boxes(asked.size)
    inside = (boxes[:, 0] <= x + 0.5) & (x + 0.5 < boxes[:, 2]) & (boxes[:, 1] <= y + 0.5) & (y + 0.5 < boxes[:, 3])
    if not inside.any():
        left, top, right, bottom = (round(side) for side in tokens.window(asked.size))
        raise InputError(
            f"--at {x},{y} is outside the crop of {printable(asked.path)}, whose features are those of the pixels from "
            f"{left},{top} to {right},{bottom}"
        )
    return int(np.flatnonzero(inside)[0])


def _box(tokens: TokenArray, cell: int, size: tuple[int, int]) -> Box:
    left, top, right, bottom = tokens.boxes(size)[cell].tolist()
    return left, top, right, bottom


def _overlay(
    tokens: TokenArray, of_image: NDArray[np.floating], vector: NDArray[np.floating], size: tuple[int, int], cell: int
) -> Overlay:
    similarity = patch_similarity(of_image, vector).reshape(tokens.grid)
    return Overlay(similarity, tokens.window(size), _box(tokens, cell, size), size)
