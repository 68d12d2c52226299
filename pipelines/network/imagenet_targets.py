"""True classifier outputs of images, and names of the outputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

from extract.compute.backbone import Backbone
from extract.credentials import text_without_credentials
from extract.errors import InputError
from extract.images import Images
from extract.images.csv_lists import file_and_column
from extract.images.image_list import label_text
from extract.taps.layer_names import named_layers
from pipelines.terminal.image_tables import read_image_table, without_fractions
from pipelines.terminal.text_output import printable

__all__ = ["Targets", "class_name", "n_outputs", "targets_of"]


@dataclass(frozen=True)
class Targets:
    """True outputs of images.

    Attributes:
        numbers: (N,) int64 output of each image; -1 if unknown.
        source: where they come from, in words.
    """

    numbers: NDArray[np.int64]
    source: str


def n_outputs(backbone: Backbone) -> int:
    """Return the number of classes of a backbone; 0 if it has no classifier."""
    if backbone.classifier is None:
        return 0
    head = named_layers(backbone.model)[backbone.classifier]
    return int(getattr(head, "out_features", 0) or getattr(head, "out_channels", 0))


def targets_of(backbone: Backbone, images: Images, labels: str | None = None) -> Targets | None:
    """Return the true output of each image; None if the outputs are unknown.

    Classes of images match the outputs as WordNet ids (n01440764, the names of ImageNet's folders) if the backbone has
    ImageNet's 1,000 classes, or by their order if there are as many classes as outputs. Labels of a file are output
    numbers or WordNet ids.

    Args:
        backbone: backbone with its classifier.
        images: images with their classes.
        labels: FILE.csv[:COLUMN], see `read_image_table`; replaces the classes of the images.

    Raises:
        InputError: the file does not fit the images, or its labels do not fit the backbone.
    """
    width = n_outputs(backbone)
    if labels is not None:
        names, source = _of_file(images, labels), text_without_credentials(labels)
    else:
        names = [images.classes[label] if label >= 0 else None for label in images.labels.tolist()]
        source = "the classes of the images"
    known = {name for name in names if name is not None}
    number_of = {}
    if labels is not None:
        number_of = {name: int(name) for name in known if name.isascii() and name.isdigit() and int(name) < width}
    if width == len(_imagenet()):
        number_of |= {name: _imagenet()[name] for name in known if name in _imagenet()}
    if not known <= set(number_of) and len(images.classes) == width and labels is None:
        number_of = {name: number for number, name in enumerate(images.classes)}
    if labels is None and (not known or not known <= set(number_of)):
        return None
    if unknown := sorted(known - set(number_of)):
        raise InputError(f"{labels}: {unknown[0]!r} is not an output number of {backbone.spec} (0 to {width - 1:,})")
    return Targets(np.array([-1 if name is None else number_of[name] for name in names], np.int64), source)


def _of_file(images: Images, labels: str) -> list[str | None]:
    where, column = file_and_column(labels)
    table = read_image_table(where, column, "labels", images.paths, images.ids, images.root)
    for note in table.notes:
        click.secho(f"note: {printable(note)}", fg="yellow", err=True)
    return [label_text(text) for text in without_fractions(table.texts)]


def class_name(backbone: Backbone, number: int) -> str:
    """Return the number of an output, with its ImageNet name if the backbone has ImageNet's 1,000 classes."""
    if n_outputs(backbone) != len(_imagenet()):
        return f"class {number}"
    from timm.data import ImageNetInfo  # type: ignore[attr-defined]

    return f"{number} {ImageNetInfo().index_to_description(number).partition(',')[0]}"


@functools.cache
def _imagenet() -> dict[str, int]:
    """Return WordNet id -> output, as in all networks trained on ImageNet's 1,000 classes."""
    from timm.data import ImageNetInfo  # type: ignore[attr-defined]

    names: list[str] = ImageNetInfo().label_names()  # type: ignore[no-untyped-call]
    return {name: number for number, name in enumerate(names)}
