"""A sample of images with the backbone's own preprocessing: the input of `inspect` and `draw`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.compute.backbone import Backbone
from extract.errors import InputError
from extract.images import Decoding, Images, list_images, load_batches
from extract.row_status import Status
from pipelines.network.config import LookConfig
from pipelines.terminal.text_output import SHOWN, print_line, printable

__all__ = ["Sample", "SampleBatch", "evenly", "sample_of"]


class SampleBatch(NamedTuple):
    """A batch of images that could be decoded.

    Attributes:
        inputs: (B, 3, H, W) on the device.
        rows: (B,) row numbers.
        pixels: (B, H, W, 3) uint8, the images as the backbone sees them.
    """

    inputs: Tensor
    rows: NDArray[np.int64]
    pixels: NDArray[np.uint8]


@dataclass
class Sample:
    """Selected rows of a list of images.

    Attributes:
        images: all images; only the selected images if the list is a plan.
        n_listed: number of images in the list.
        backbone: backbone whose preprocessing is applied.
        rows: selected rows of `images`.
        config: batch size, processes and limit of pixels; see `embed`.
        decoded: rows decoded so far, in order.
        failed: row -> why it could not be decoded.
    """

    images: Images
    n_listed: int
    backbone: Backbone
    rows: list[int]
    config: LookConfig
    decoded: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def batches(self) -> Iterator[SampleBatch]:
        """Yield the batches; the next batch is decoded while the current batch is in use.

        Raises:
            InputError: no image can be decoded.
        """
        preprocessing = self.backbone.preprocessing
        size = self.config.batch_size
        batches = [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
        workers = self.config.workers if len(batches) > 1 else 0
        decoding = Decoding.for_preprocessing(preprocessing, self.config.max_pixels, workers, size)
        loaded = load_batches(self.images, batches, decoding)
        self.decoded.clear()
        with contextlib.closing(loaded):
            for batch in loaded:
                decoded_rows = batch.rows[batch.status == Status.OK]
                self.decoded += decoded_rows.tolist()
                self.failed |= batch.reasons
                if len(decoded_rows):
                    inputs = preprocessing.to_input(batch.images.to(self.backbone.device))
                    yield SampleBatch(inputs, decoded_rows, _pixels(batch.images))
        if not self.decoded:
            row, reason = next(iter(self.failed.items()))
            first = f"{printable(self.images.paths[row])}: {printable(reason)}"
            raise InputError(f"none of the images can be decoded; {first}")

    def with_targets(self, targets: NDArray[np.int64] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of each batch and their targets (B,), from the targets of all `images`; None: -1 for all."""
        for batch in self.batches():
            numbers = np.full(len(batch.rows), -1) if targets is None else targets[batch.rows]
            yield batch.inputs, torch.from_numpy(numbers).to(batch.inputs.device)

    def name(self, position: int) -> str:
        """Return the path of an image by its position among the decoded images."""
        return printable(self.images.paths[self.decoded[position]])

    def print_failures(self) -> None:
        """Print the images that could not be decoded on stderr."""
        for row, reason in list(self.failed.items())[:SHOWN]:
            print_line(f"left out: {printable(self.images.paths[row])}: {printable(reason)}", err=True)
        if len(self.failed) > SHOWN:
            print_line(f"          ... and {len(self.failed) - SHOWN:,} more", err=True)


def sample_of(config: LookConfig, backbone: Backbone) -> Sample:
    """Return the sample that a configuration selects."""
    images = list_images(config.images)
    for note in images.notes:
        print_line(f"note: {note}", fg="yellow", err=True)
    count = len(images) if config.sample is None else min(config.sample, len(images))
    sampled, rows = images.select(evenly(len(images), count)), list(range(count))
    return Sample(sampled, len(images), backbone, rows, config)


def _pixels(prepared: Tensor) -> NDArray[np.uint8]:
    """Return (B, H, W, 3) uint8 pixels of prepared images.

    Outputs of a library's transform are scaled from the minimum and maximum of each image.
    """
    if prepared.dtype == torch.uint8:
        return prepared.numpy()
    low, high = prepared.amin((1, 2, 3), keepdim=True), prepared.amax((1, 2, 3), keepdim=True)
    scaled = (prepared - low) / (high - low).clamp(min=1e-12)
    pixels: NDArray[np.uint8] = (scaled * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return pixels


def evenly(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced integers from 0 to `total` - 1."""
    return [int(number) for number in np.linspace(0, total - 1, count).round()]
