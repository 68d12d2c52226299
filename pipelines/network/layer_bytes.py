"""Bytes that the layers of a backbone would take on disk: `layertap layers BACKBONE --bytes IMAGES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from extract.compute.feature_choice import LayerShapes, layer_shapes
from extract.errors import InputError
from extract.images import list_images
from pipelines.network.layers import loaded_for_layers
from pipelines.terminal.tables import print_aligned

__all__ = ["POOLINGS_SHOWN", "LayerBytes", "as_json", "layer_bytes", "print_bytes"]

POOLINGS_SHOWN = ("none", "auto", "grid4", "srp4096")
_VALUE_BYTES = 4  # float32, the default of `embed`


@dataclass(frozen=True)
class LayerBytes:
    """What layers would take on disk.

    Attributes:
        images: number of images.
        layers: the layers, with the shapes that poolings give.
    """

    images: int
    layers: list[LayerShapes]


def layer_bytes(spec: str, patterns: Sequence[str], images: str) -> LayerBytes:
    """Return the sizes of a backbone's layers. Some made-up pictures are computed; none of the images is read.

    Args:
        spec: spec of the backbone.
        patterns: names and globs of layers; empty means every layer.
        images: a number of images; or anything that `embed` takes, whose images are counted.

    Raises:
        UnknownNameError: a pattern matches no layer.
        InputError: there are no images.
    """
    count = int(images) if images.isascii() and images.isdigit() else len(list_images(images))
    if count < 1:
        raise InputError("--bytes is 0; expected a number of images, or a folder or list of images")
    return LayerBytes(count, layer_shapes(loaded_for_layers(spec), patterns, POOLINGS_SHOWN))


def as_json(sizes: LayerBytes) -> dict[str, Any]:
    """Return the sizes as JSON-compatible data."""
    return {
        "images": sizes.images,
        "dtype": "float32",
        "layers": [
            {
                "name": layer.name,
                "poolings": {
                    pooling: {
                        "pooling": name,
                        "shape": list(shape),
                        "bytes_per_image": _VALUE_BYTES * math.prod(shape),
                        "bytes": _VALUE_BYTES * math.prod(shape) * sizes.images,
                    }
                    for pooling, (name, shape) in layer.poolings.items()
                },
                "reason": layer.reason,
            }
            for layer in sizes.layers
        ],
    }


def print_bytes(sizes: LayerBytes, echo: Callable[[str], None]) -> None:
    """Print a table: for each layer and pooling, the bytes of an image and of all images."""
    cells = [["layer", "shape", *(title for pooling in POOLINGS_SHOWN for title in (pooling, "in all"))]]
    totals = dict.fromkeys(POOLINGS_SHOWN, 0)
    for layer in sizes.layers:
        row = [layer.name, "x".join(map(str, layer.poolings["none"][1])) if layer.poolings else "-"]
        for pooling in POOLINGS_SHOWN:
            if pooling not in layer.poolings:
                row += ["-", "-"]
                continue
            size = _VALUE_BYTES * math.prod(layer.poolings[pooling][1])
            totals[pooling] += size
            row += [_text(size), _text(size * sizes.images)]
        cells.append(row)
    if len(sizes.layers) > 1:
        sums = [text for size in totals.values() for text in (_text(size), _text(size * sizes.images))]
        cells.append(["all that fit", "", *sums])
    print_aligned(cells, "<<" + ">" * 2 * len(POOLINGS_SHOWN), echo)
    echo(
        f"{sizes.images:,} images in float32, without compression; --dtype float16 takes half, int8 a quarter. "
        "-: it does not fit"
    )
    for reason, names in _refused(sizes.layers).items():
        echo(f"not stored: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: {reason}")


def _refused(layers: Sequence[LayerShapes]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        if layer.reason:
            reasons.setdefault(layer.reason, []).append(layer.name)
    return reasons


def _text(size: float) -> str:
    """Return a size with three digits.

    >>> _text(3_211_264), _text(999), _text(999_999_999_999)
    ('3.21 MB', '999 B', '1 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if size >= 999.5 else f"{size:.3g} {unit}"
