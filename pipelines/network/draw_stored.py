"""Draw the stored tokens of a data set: `layertap draw tokens OUT [IMAGES] [-l LAYER]`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from extract.analysis.network.attribution import principal_colours
from extract.errors import InputError
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from extract.system.urls import is_url
from extract.taps.layer_names import match_layers
from pipelines.network import draw_figures
from pipelines.network.config import StoredTokensConfig
from pipelines.network.draw import MOST_IMAGES, figure_file
from pipelines.network.image_sample import evenly
from pipelines.terminal.figures import drawable, save_figure
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.pictures import Pictures, part_of
from pipelines.terminal.text_output import print_line, printable

__all__ = ["draw_stored_tokens"]

_SIDE_PX = 320  # shorter side of a picture


def draw_stored_tokens(config: StoredTokensConfig) -> list[Path]:
    """Draw one figure per layer and return the files.

    Raises:
        InputError: there are no tokens, or too many images for a figure.
        UnknownNameError: a layer does not exist.
    """
    check_folder(config.out)
    written = []
    with FeatureReader(config.data_set, check=not is_url(config.data_set)) as reader:
        features = {layer: reader.tokens(layer) for layer in _layers(reader, config)}
        good = next(iter(features.values())).rows
        if not len(good):
            raise InputError(f"no row of {config.data_set} has features")
        count = len(good) if config.sample is None else min(config.sample, len(good))
        if count > MOST_IMAGES:
            raise InputError(f"{count} images do not fit into one figure", hint=f"use --sample {MOST_IMAGES} or less")
        images = evenly(len(good), count)
        rows = good[images].tolist()
        shown, names = _shown(reader, config, rows), [reader.paths[row] for row in rows]
        for layer, tokens in features.items():
            per_image = tokens.per_image
            maps = np.stack([tokens[image * per_image : (image + 1) * per_image] for image in images])
            colours = principal_colours(torch.from_numpy(maps.reshape(count, *tokens.grid, -1).astype(np.float32)))
            source = f"{drawable(Path(config.data_set).name, 60)}, {draw_figures.drawable_layer(layer, 60)}"
            title = f"{source}: main directions of all tokens as red, green and blue"
            if not tokens.has_places:
                title += "; pictures are whole, as their crop is not known"
            pixels = [_inside_crop(picture, tokens) for picture in shown]
            figure = draw_figures.side_by_side(pixels, colours, names, title)
            written.append(save_figure(figure, figure_file("tokens", layer, config)))
    return written


def _layers(reader: FeatureReader, config: StoredTokensConfig) -> list[str]:
    """Return the requested layers; globs match the layers with tokens."""
    names = reader.layers_with_tokens()
    if config.layers is None:
        return names
    without = [name for name in config.layers if name in reader.layers and name not in names]
    return match_layers([*names, *without], config.layers, config.data_set)


def _shown(reader: FeatureReader, config: StoredTokensConfig, rows: list[int]) -> list[Image.Image | None]:
    """Return the pictures of rows, and print a note if some are not available."""
    pictures = Pictures(reader, data_set_at(config.data_set).images["root"], rows, config.images)
    shown = [pictures.picture(row) for row in rows]
    missing = [(row, why) for row, (picture, why) in zip(rows, shown, strict=True) if picture is None]
    if missing:
        row, why = missing[0]
        # The place of images is an argument of this command, not an option.
        whole = pictures.why_not.replace("--images", f"layertap draw tokens {config.data_set}")
        reason = whole or f"{reader.paths[row]}: {why}"
        print_line(f"note: {len(missing)} of {len(rows)} pictures are not available: {printable(reason)}", err=True)
    return [picture for picture, _ in shown]


def _inside_crop(picture: Image.Image | None, tokens: TokenArray) -> NDArray[np.uint8]:
    """Return the part of a picture that the tokens cover, if it is known, or white if there is no picture."""
    if picture is None:
        return np.full((tokens.grid[0], tokens.grid[1], 3), 255, np.uint8)
    if tokens.has_places:
        return np.asarray(part_of(picture, tokens.window(picture.size), _SIDE_PX))
    small = picture.copy()
    small.thumbnail((_SIDE_PX, _SIDE_PX))
    return np.asarray(small)
