"""Rows of features in memory or in a file, read as blocks of vectors: the input of every probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from extract.errors import InputError

__all__ = ["FeatureRows", "Labelled", "Scaling", "Source", "mean_of", "moments", "row_products"]

_BLOCK_BYTES = 16 << 20  # of features read at once
_SPARSE = 4  # rows are read one by one if they span more than this many times their number


class Source(Protocol):
    """Source of rows: an array, a memory map, a feature of a `FeatureReader`, or an HDF5 data set."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, *shape)."""

    def __getitem__(self, rows: Any) -> Any:
        """Return a slice of rows, or the rows of a sorted index array."""


@dataclass(frozen=True)
class Scaling:
    """Scaling of each vector.

    Attributes:
        name: "none"; "l2": divide by the length; "standardise": subtract the mean, divide by the standard deviation.
        mean: (D,) float32, for "standardise".
        scale: (D,) float32, for "standardise"; 1 where a column is constant.
    """

    name: str = "none"
    mean: NDArray[np.float32] | None = None
    scale: NDArray[np.float32] | None = None

    def __call__(self, block: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale a block (n, D) in place and return it."""
        if self.name == "l2":
            lengths = np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64)).astype(np.float32)
            block /= np.where(lengths > 0, lengths, 1)[:, None]
        elif self.mean is not None and self.scale is not None:
            block -= self.mean
            block /= self.scale
        return block

    @staticmethod
    def of(name: str, rows: FeatureRows) -> Scaling:
        """Return the named scaling, with the statistics of these rows only."""
        if name != "standardise":
            return Scaling(name)
        mean, variance = moments(rows)
        scale = np.sqrt(variance)
        scale[scale <= 1e-7 * np.abs(mean)] = 1  # a constant column, up to rounding in float32
        return Scaling(name, mean.astype(np.float32), scale.astype(np.float32))


@dataclass(frozen=True)
class _ArrayRows:
    """Rows of several arrays side by side: each row joins the flattened values of all arrays."""

    columns: tuple[Source, ...]
    index: NDArray[np.int64]  # sorted

    def read(self) -> NDArray[np.float32]:
        index = self.index
        first, last = int(index[0]), int(index[-1]) + 1
        blocks = []
        for source in self.columns:
            if last - first == len(index):
                values = source[first:last]
            elif last - first <= _SPARSE * len(index):
                values = source[first:last][index - first]
            else:
                values = source[index]
            blocks.append(np.asarray(values).reshape(len(index), -1))
            if forget := getattr(source, "forget", None):  # keeps a memory map from filling the memory
                forget(first, last)
        if len(blocks) > 1:
            return np.concatenate(blocks, 1, dtype=np.float32)
        return np.array(blocks[0], np.float32, order="C")  # a copy, since scaling changes it in place


@dataclass(frozen=True)
class FeatureRows:
    """Rows (N, D) float32, read in blocks on demand; each stored row is flattened to one vector.

    Rows are in the order of the parts and, inside a part, in the order of the file.
    """

    parts: tuple[_ArrayRows, ...]
    scaling: Scaling = Scaling()

    @staticmethod
    def of(columns: Source | Sequence[Source] | FeatureRows, index: NDArray[np.int64] | None = None) -> FeatureRows:
        """Create rows from an array, or from several arrays side by side; return rows unchanged.

        Args:
            columns: (N, *shape), or several arrays of the same N.
            index: sorted row numbers; None: all rows.

        Raises:
            InputError: an array has less than two axes, no values or no real numbers, or N differs between arrays.
        """
        if isinstance(columns, FeatureRows):
            return columns
        sources = tuple(columns) if isinstance(columns, list | tuple) else (columns,)
        sources = tuple(_numpy(source) if isinstance(source, torch.Tensor) else source for source in sources)
        for source in sources:
            axes = 1 if hasattr(source, "forget") else 2  # the rows of a feature of a data set may be numbers
            if not hasattr(source, "shape") or len(source.shape) < axes:
                shape = getattr(source, "shape", "")
                raise InputError(f"features are {type(source).__name__} {shape}; expected an array of shape (N, D)")
            if np.dtype(getattr(source, "dtype", np.float32)).kind not in "fiub":
                raise InputError(f"features have dtype {source.dtype}; expected real numbers")
            if 0 in source.shape[1:]:
                raise InputError(f"features of shape {tuple(source.shape)} have no values")
            if source.shape[0] != sources[0].shape[0]:
                raise InputError(f"features have {sources[0].shape[0]} and {source.shape[0]} rows; must be equal")
        return FeatureRows((_ArrayRows(sources, np.arange(sources[0].shape[0]) if index is None else index),))

    def __len__(self) -> int:
        return sum(len(part.index) for part in self.parts)

    @property
    def width(self) -> int:
        """Number D of values in a row."""
        return sum(int(np.prod(source.shape[1:])) for source in self.parts[0].columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, D): rows are a `Source` of others, such as those of several layers side by side."""
        return len(self), self.width

    def __getitem__(self, rows: slice) -> NDArray[np.float32]:
        """Return a slice of rows; see `between`."""
        return self.between(*rows.indices(len(self))[:2])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in memory."""
        return len(self) * self.width * 4

    def __add__(self, other: FeatureRows) -> FeatureRows:
        return replace(self, parts=self.parts + other.parts)

    def subset(self, chosen: NDArray[np.int64]) -> FeatureRows:
        """Select rows by their sorted numbers in this object."""
        return self._picked(lambda first, end: chosen[slice(*np.searchsorted(chosen, (first, end)))] - first)

    def _picked(self, places: Callable[[int, int], slice | NDArray[np.int64]]) -> FeatureRows:
        """Return the rows at places of each part, which a function of its first row and its end returns."""
        parts, first = [], 0
        for part in self.parts:
            end = first + len(part.index)
            parts.append(_ArrayRows(part.columns, part.index[places(first, end)]))
            first = end
        return replace(self, parts=tuple(part for part in parts if len(part.index)))

    def scaled(self, scaling: Scaling) -> FeatureRows:
        """Return the same rows with a scaling that is applied on reading."""
        return replace(self, scaling=scaling)

    def held(self) -> FeatureRows:
        """Read the rows into memory once, with the scaling applied.

        Raises:
            InputError: a value is not finite.
        """
        return FeatureRows.of(self.array())

    def array(self) -> NDArray[np.float32]:
        """Return all rows (N, D), with the scaling applied.

        Raises:
            InputError: a value is not finite.
        """
        array = np.empty((len(self), self.width), np.float32)
        for start, block in self.blocks():
            array[start : start + len(block)] = block
        return array

    def between(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return a scaled copy (stop - start, D) of consecutive rows; values may be not finite."""
        picked = self._picked(lambda first, _: slice(max(0, start - first), max(0, stop - first)))
        blocks = [part.read() for part in picked.parts]
        if not blocks:
            return np.empty((0, self.width), np.float32)
        return self.scaling(blocks[0] if len(blocks) == 1 else np.concatenate(blocks))

    def blocks(self, block_bytes: int | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (first row, scaled block (n, D)) over all rows.

        Raises:
            InputError: a value is not finite.
        """
        size = max(1, (block_bytes or _BLOCK_BYTES) // (4 * self.width))
        for start in range(0, len(self), size):
            block = self.between(start, min(start + size, len(self)))
            if not np.isfinite(block).all():
                row = self._stored_row(start + int(np.flatnonzero(~np.isfinite(block).all(1))[0]))
                raise InputError(f"row {row} of the features contains NaN or infinity", hint="leave out such rows")
            yield start, block

    def _stored_row(self, row: int) -> int:
        """Return the number of a row in the array that it is read from."""
        (part,) = self.subset(np.array([row])).parts
        at, source = int(part.index[0]), part.columns[0]
        return source._stored_row(at) if isinstance(source, FeatureRows) else at


@dataclass(frozen=True)
class Labelled:
    """Rows and their targets.

    Attributes:
        rows: (N, D).
        targets: (N,) int64 classes; (N, K) float32 labels of 0 and 1; (N, K) float64 numbers.
        groups: (N,) number of the group of each row; no choice or test divides one. None: each row is a group.
    """

    rows: FeatureRows
    targets: NDArray[Any]
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __add__(self, other: Labelled) -> Labelled:
        groups = None
        if self.groups is not None and other.groups is not None:
            groups = np.concatenate([self.groups, other.groups])
        return Labelled(self.rows + other.rows, np.concatenate([self.targets, other.targets]), groups)

    def subset(self, chosen: NDArray[np.int64]) -> Labelled:
        """Select rows by their sorted numbers."""
        groups = None if self.groups is None else self.groups[chosen]
        return Labelled(self.rows.subset(chosen), self.targets[chosen], groups)

    def held(self) -> Labelled:
        """Read the rows into memory once."""
        return replace(self, rows=self.rows.held())

    @cached_property
    def grouping(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first row (G,) of each group, and the place (N,) of the group of each row among these."""
        if self.groups is None:
            return np.arange(len(self)), np.arange(len(self))
        _, first, places = np.unique(self.groups, return_index=True, return_inverse=True)
        return first, places

    @property
    def n_groups(self) -> int:
        """Number of groups: of rows that are independent of each other."""
        return len(self.grouping[0])

    def in_words(self, rows: str) -> str:
        """Return a part of these rows in words, also that it consists of whole groups."""
        return rows if self.n_groups == len(self) else f"{rows}, in whole groups"


def _numpy(tensor: torch.Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu()
    return np.asarray((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())


def mean_of(rows: FeatureRows) -> NDArray[np.float64]:
    """Return the mean (D,) of columns."""
    sums = sum((block.sum(0, dtype=np.float64) for _, block in rows.blocks()), np.zeros(rows.width))
    return np.asarray(sums / len(rows))


def moments(rows: FeatureRows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean (D,) and variance (D,) of columns, from the differences of the rows and the first one."""
    first, sums, squares = rows.between(0, 1), np.zeros(rows.width), np.zeros(rows.width)
    for _, block in rows.blocks():
        # Of a column that is far from zero, these are small, and their squares keep all digits. In float32, those of
        # large values would overflow.
        differences = np.subtract(block, first, dtype=np.float64)
        sums += differences.sum(0)
        squares += np.einsum("nd,nd->d", differences, differences)
    shift = sums / len(rows)
    return first[0] + shift, np.maximum(squares / len(rows) - shift**2, 0)


def row_products(rows: FeatureRows, work_bytes: int) -> NDArray[np.float64]:
    """Return the products (N, N) of all pairs of rows minus the mean of all.

    Args:
        rows: (N, D), read several times if they do not fit.
        work_bytes: of rows in double precision held at once.
    """
    count, mean = len(rows), mean_of(rows)
    products = np.empty((count, count))
    size = max(1, work_bytes // (8 * rows.width))
    for first in range(0, count, size):
        left = rows.between(first, min(first + size, count)) - mean
        for second in range(0, first + 1, size):
            right = rows.between(second, min(second + size, count)) - mean
            of_block = left @ right.T
            products[first : first + len(left), second : second + len(right)] = of_block
            products[second : second + len(right), first : first + len(left)] = of_block.T
    return products
