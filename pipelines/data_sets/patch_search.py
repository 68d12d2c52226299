"""Find the images with the patch nearest to a patch of an image: `layertap search OUT IMAGE --at X,Y`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.analysis.nearest_patches import nearest_patches, patch_similarity
from extract.errors import InputError
from extract.extraction.reproduce import features_of_file
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from extract.system.atomic_files import link_target
from pipelines.data_sets.search import check_good, class_of, row_of_query
from pipelines.data_sets.search_results import Hit, Overlay, SearchResults
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
        size: (width, height) in pixels.
    """

    row: int | None
    path: str
    note: str
    size: tuple[int, int]


def run_patch_search(
    out: Path | str, query: str, at: tuple[int, int], *, k: int = 10, layer: str | None = None, itself: bool = False,
    backbone: str | None = None, weights: str | None = None, images: str | None = None,
    device: str = defaults.DEVICE, output: Path | None = None,
) -> SearchResults:  # fmt: skip
    """Search the tokens of a data set, and draw the results if `output` is given.

    Args:
        out: folder or URL of the data set.
        query: see `run_search`.
        at: x and y of a pixel in the image of the query, turned as it was decoded, from the upper left corner.
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
        pictures = Pictures(reader, dataset.images["root"], tokens.rows.tolist(), images)
        asked = _query(query, reader, pictures, out)
        cell = _cell(tokens, at, asked)
        excluded = None
        if asked.row is None:
            feature = features_of_file(dataset, reader.provenance, Path(query), backbone, weights, device)[name]
            of_query = tokens.of_feature(feature)
        else:
            image = int(np.searchsorted(tokens.rows, asked.row))
            of_query = _tokens_of(tokens, image)
            excluded = None if itself else image
        nearest = nearest_patches(tokens, of_query[cell], k, without=excluded)
        hits = [
            _hit(reader, tokens, pictures, image, cosine, near)
            for image, cosine, near in zip(
                nearest.images.tolist(), nearest.cosines.tolist(), nearest.cells.tolist(), strict=True
            )
        ]
        sizes_missing = any(hit.box is None for hit in hits)
        results = SearchResults(
            out, name, asked.row, asked.path, "", asked.note, hits, len(tokens.rows) - (excluded is not None),
            name="" if asked.row is None else class_of(reader, asked.row), at=at,
            no_pictures=pictures.why_not if output is not None or sizes_missing else "",
        )  # fmt: skip
        if output is not None:
            _draw(results, tokens, pictures, nearest.images.tolist(), of_query, cell, asked, link_target(output))
    return results


def _layer(reader: FeatureReader, layer: str | None, out: Path | str) -> str:
    if layer is not None:
        return layer
    names = reader.layers_with_tokens()
    if len(names) > 1:
        raise InputError(f"{out} has {len(names)} layers with tokens", hint=f"name one: -l {', -l '.join(names)}")
    return names[0]


def _query(query: str, reader: FeatureReader, pictures: Pictures, out: Path | str) -> _Query:
    row, note = row_of_query(reader, query, out)
    if row is None:
        return _Query(None, query, note, pictures.of_file(Path(query)).size)
    check_good(reader, row)
    size = pictures.size(row)
    if size is None:
        _, why = pictures.picture(row)
        raise InputError(f"the size of {printable(reader.paths[row])} is not available: {pictures.why_not or why}")
    return _Query(row, reader.paths[row], note, size)


def _cell(tokens: TokenArray, at: tuple[int, int], asked: _Query) -> int:
    """Return the cell of the grid with a pixel."""
    (x, y), (width, height) = at, asked.size
    if x >= width or y >= height:
        raise InputError(f"--at {x},{y} is outside {printable(asked.path)}, which has {width} x {height} pixels")
    boxes = tokens.boxes(asked.size)
    inside = (boxes[:, 0] <= x + 0.5) & (x + 0.5 < boxes[:, 2]) & (boxes[:, 1] <= y + 0.5) & (y + 0.5 < boxes[:, 3])
    if not inside.any():
        left, top, right, bottom = (math.ceil(side - 0.5) for side in tokens.window(asked.size))
        raise InputError(
            f"--at {x},{y} is outside the crop of {printable(asked.path)}; its features are those of the pixels from "
            f"{max(0, left)},{max(0, top)} to {min(width, right) - 1},{min(height, bottom) - 1}"
        )
    return int(np.flatnonzero(inside)[0])


def _tokens_of(tokens: TokenArray, image: int) -> NDArray[np.floating]:
    return tokens[image * tokens.per_image : (image + 1) * tokens.per_image]


def _hit(reader: FeatureReader, tokens: TokenArray, pictures: Pictures, image: int, cosine: float, cell: int) -> Hit:
    row = int(tokens.rows[image])
    size, box, at = pictures.size(row), None, None
    if size is not None:
        left, top, right, bottom = tokens.boxes(size)[cell].tolist()
        # The pixel whose centre is nearest to that of the box, inside the picture.
        x, y = math.floor((left + right) / 2), math.floor((top + bottom) / 2)
        box, at = (left, top, right, bottom), (min(max(0, x), size[0] - 1), min(max(0, y), size[1] - 1))
    where = divmod(cell, tokens.grid[1])
    return Hit(row, cosine, reader.paths[row], class_of(reader, row), reader.splits[row], where, box, at)


def _draw(
    results: SearchResults, tokens: TokenArray, pictures: Pictures, images: Sequence[int],
    of_query: NDArray[np.floating], cell: int, asked: _Query, output: Path,
) -> None:  # fmt: skip
    """Draw the query and the first results, with the similarity of their patches to that of the query."""
    from pipelines.data_sets.search_gallery import MOST_DRAWN, draw

    def overlay(of_image: NDArray[np.floating], size: tuple[int, int], where: tuple[int, int]) -> Overlay:
        return Overlay(patch_similarity(of_image, of_query[cell]).reshape(tokens.grid), tokens.window(size), where)

    shown, overlays = [], list[Overlay | None]()
    for hit, image in list(zip(results.hits, images, strict=True))[:MOST_DRAWN]:
        picture, why = pictures.picture(hit.row)
        shown.append((picture, why))
        assert hit.cell is not None
        of_hit = None if picture is None else overlay(_tokens_of(tokens, image), picture.size, hit.cell)
        overlays.append(of_hit)
    query = (pictures.of_file(Path(asked.path)), "") if asked.row is None else pictures.picture(asked.row)
    draw(results, query, shown, output, overlay(of_query, asked.size, divmod(cell, tokens.grid[1])), overlays)
