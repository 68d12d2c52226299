"""Which rows of an activation belong to which image: measured in trial forwards, never assumed.

Most layers have the batch on axis 0, with one row per image. Sequence-first attention has it on axis 1; Swin's windows
give several rows per image. A trial runs the pictures together, in one order and in the reverse order, then each alone.
The batch axis is the one axis whose length follows the number of pictures. The rows of a picture must equal its output
alone, but for rounding. A network that amplifies rounding is refused, too: its features would depend on the batch. With
random weights, timm's efficientnetv2_rw_t differs by a fortieth of the distance between two pictures.

A layer may sort the pictures of a batch by their content. One order may happen to be sorted already; the reverse order
is not. The first batch of a run checks for effects that only other pictures show (`extract.compute.forward`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from extract.errors import InputError
from extract.taps.record import Record, Site, What
from extract.taps.taps import Taps

__all__ = ["BatchAxis", "Trial"]

# The same picture in another batch differs by rounding: by at most this part of its distance to the nearest other
# picture, or, where pictures hardly differ, by at most this many roundings of the largest value.
_OF_ANOTHER_PICTURE = 0.005
_ROUNDINGS = 100
_OTHER_IN_BATCH = (
    "its output for a picture differs in a batch from the picture alone, as that of a random network does, and of one "
    "that amplifies rounding, such as some with random weights: its rows are not the images"
)
_WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_NO_DIFFERENCE = 4  # roundings; pictures within this distance cannot be distinguished


@dataclass(frozen=True)
class BatchAxis:
    """Position of the images of a batch in an activation.

    Attributes:
        axis: the batch axis.
        per_image: number of neighbouring rows on that axis for each image.
    """

    axis: int = 0
    per_image: int = 1

    def by_image(self, activation: Tensor) -> Tensor:
        """Return the activation with the images on axis 0: (B, ...), or (B, per_image, ...) if `per_image` > 1.

        Raises:
            InputError: the number of rows is not a multiple of `per_image`.
        """
        moved = activation.movedim(self.axis, 0)
        if not torch.compiler.is_compiling() and moved.shape[0] % self.per_image:
            raise InputError(
                f"a layer returned {moved.shape[0]:,} rows; expected {self.per_image} for each image: the number of "
                "rows depends on the images, so they cannot be stored"
            )
        return moved if self.per_image == 1 else moved.reshape(-1, self.per_image, *moved.shape[1:])


class Trial:
    """Records of a few pictures: together in two orders, and each alone.

    Two orders together are not enough: a layer that reverses its batch passes with the pictures (0, 1, 2) and (2, 0).

    Args:
        model: in eval mode.
        pictures: (B, 3, H, W), all different, at least 2.
        layers: (name, what) pairs to keep.
    """

    def __init__(self, model: nn.Module, pictures: Tensor, layers: Sequence[tuple[str, What]]):
        self._count = len(pictures)
        if self._count < 2:
            raise InputError(f"{self._count} picture given; at least 2 are needed to assign rows to images")
        taps = Taps(model)
        for layer, what in dict.fromkeys(layers):
            taps.keep(layer, what)
        with torch.no_grad(), taps:
            taps(pictures.flip(0))  # a copy, since a model may write into its input
            self._reversed: Record = taps.record
            taps(pictures.clone())
            self.record: Record = taps.record
            self._alone: list[Record] = []
            for number in range(self._count):
                # A single picture cannot be confused with another, even if a layer reorders the batch.
                taps(pictures[number : number + 1].clone())
                self._alone.append(taps.record)

    def rows(self, site: Site) -> BatchAxis:
        """Return the position of the images in one tensor.

        Raises:
            InputError: the rows of the tensor are not the images, or it is missing in some forwards, empty, not dense,
                or neither floating point nor whole numbers.
        """
        together = self.record[site]
        if site not in self._reversed.sites.values():
            raise InputError("it does not run for every order of the pictures")
        lone = [record[site] for record in self._alone if site in record.sites.values()]
        if len(lone) < len(self._alone):
            raise InputError("it does not run for every picture")
        if together.is_nested or together.layout is not torch.strided or together.is_meta:
            raise InputError("its output is not a dense tensor with values")
        if not together.is_floating_point() and together.dtype not in _WHOLE:
            raise InputError(f"its output is {together.dtype}; features must be floating point or whole numbers")
        if not together.numel():
            raise InputError(f"its output is empty, {tuple(together.shape)} for {self._count} images")
        backwards = self._reversed[site]
        if together.dtype in _WHOLE:  # differences of whole numbers could overflow
            together, backwards, lone = together.double(), backwards.double(), [output.double() for output in lone]
        rows = self._axis(together, lone[0])
        alone = [rows.by_image(output)[0] for output in lone]
        # Distance of each picture to the nearest other picture.
        apart = [min(_distance(output, other) for other in alone if other is not output) for output in alone]
        self._check(rows, together, alone, apart)
        self._check(rows, backwards, alone[::-1], apart[::-1])
        return rows

    def _check(self, rows: BatchAxis, together: Tensor, alone: Sequence[Tensor], apart: Sequence[float]) -> None:
        """Check that each picture of a batch has the same rows as alone.

        Args:
            rows: position of the images.
            together: output for the batch.
            alone: output for each picture alone, in the order of the batch.
            apart: distance of each output in `alone` to the nearest other output.

        Raises:
            InputError: the rows differ.
        """
        if together.shape[rows.axis] != len(alone) * rows.per_image:
            raise InputError("the number of its rows depends on the order of the pictures: its rows are not the images")
        largest = _distance(together, torch.zeros_like(together))
        rounding = torch.finfo(together.dtype).eps * largest
        for picture, batched in enumerate(rows.by_image(together)):
            expected, nearest = alone[picture], apart[picture]
            own = _distance(batched, expected)
            same_gaps = torch.equal(batched.isfinite(), expected.isfinite())
            # If 3 * own <= nearest, every other picture is at least 2 * own away (triangle inequality).
            nearer = 3 * own <= nearest or max(own, nearest) <= _NO_DIFFERENCE * rounding
            if same_gaps and not nearer:
                nearer = 2 * own <= min(_distance(batched, other) for i, other in enumerate(alone) if i != picture)
            if not same_gaps or not nearer or own > max(_OF_ANOTHER_PICTURE * nearest, _ROUNDINGS * rounding):
                # 100 roundings of a 16-bit value are as large as the value.
                if same_gaps and max(own, nearest) <= min(_ROUNDINGS * rounding, _OF_ANOTHER_PICTURE * largest):
                    raise InputError(
                        "its outputs for different pictures differ by rounding only: its rows cannot be assigned to "
                        "the images"
                    )
                raise InputError(_OTHER_IN_BATCH)

    def _axis(self, together: Tensor, alone: Tensor) -> BatchAxis:
        many, single = tuple(together.shape), tuple(alone.shape)
        axes = [axis for axis in range(len(many)) if len(single) == len(many) and many[axis] != single[axis]]
        if len(axes) != 1 or many[axes[0]] != self._count * single[axes[0]]:
            raise InputError(
                f"its output is {many} for {self._count} images and {single} for 1: "
                "its rows are not the images, so they cannot be stored"
            )
        return BatchAxis(axes[0], single[axes[0]])


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, where both are finite."""
    wide = torch.float32 if a.element_size() < 4 else a.dtype
    if a.numel():  # subtraction of close values is exact
        low, high = torch.aminmax(a.to(wide) - b.to(wide))
        if math.isfinite(largest := max(abs(float(low)), abs(float(high)))):
            return largest
    difference = (a.double() - b.double()).abs()
    return float(difference[difference.isfinite()].max()) if difference.isfinite().any() else 0.0
