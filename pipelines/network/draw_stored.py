"""Draw the stored tokens of a data set: `layertap draw tokens OUT [IMAGES] [-l LAYER]`."""

from __future__ import annotations

from pathlib import Path

import click
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
from pipelines.terminal.figures import save_figure
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import printable

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
        layers = reader.layers_with_tokens()
        if config.layers is not None:
            layers = match_layers(reader.layers, config.layers, config.data_set)
        features = {layer: reader.tokens(layer) for layer in layers}
        good = next(iter(features.values())).rows
        count = len(good) if config.sample is None else min(config.sample, len(good))
        if not 0 < count <= MOST_IMAGES:
            hint = f"use --sample {MOST_IMAGES} or less" if count else ""
            raise InputError(f"{count} images do not fit into one figure; expected 1 to {MOST_IMAGES}", hint=hint)
        images = evenly(len(good), count)
        rows = good[images].tolist()
        pictures = Pictures(reader, data_set_at(config.data_set).images["root"], rows, config.images)
        shown = [pictures.picture(row) for row in rows]
        if missing := [why for picture, why in shown if picture is None]:
            why = printable(pictures.why_not or missing[0])
            click.echo(f"note: {len(missing)} of {count} pictures are not available: {why}", err=True)
        for layer, tokens in features.items():
            per_image = tokens.per_image
            maps = np.stack([tokens[image * per_image : (image + 1) * per_image] for image in images])
            colours = principal_colours(torch.from_numpy(maps.reshape(count, *tokens.grid, -1).astype(np.float32)))
            pixels = [_inside_crop(picture, tokens) for picture, _ in shown]
            names = [reader.paths[row] for row in rows]
            title = f"{layer}: main directions of all tokens as red, green and blue"
            figure = draw_figures.side_by_side(pixels, colours, names, title)
            written.append(save_figure(figure, figure_file("tokens", layer, config)))
    return written


def _inside_crop(picture: Image.Image | None, tokens: TokenArray) -> NDArray[np.uint8]:
    """Return the part of a picture that the tokens cover, or white if the picture is not available."""
    if picture is None:
        return np.full((tokens.grid[0], tokens.grid[1], 3), 255, np.uint8)
    try:
        left, top, right, bottom = tokens.window(picture.size)
    except InputError:  # the backbone's library crops in its own way
        small = picture.copy()
        small.thumbnail((_SIDE_PX, _SIDE_PX))
        return np.asarray(small)
    scale = _SIDE_PX / min(right - left, bottom - top)
    size = round((right - left) * scale), round((bottom - top) * scale)
    part = picture.transform(size, Image.Transform.EXTENT, (left, top, right, bottom), Image.Resampling.BILINEAR)
    return np.asarray(part)
