"""Fit principal axes to rows that arrive in batches and do not fit into memory.

The axes are those of an exact eigendecomposition in float64, of the smaller of two matrices:

- n values an image, at most as many as images: their covariance (n, n), added up batch by batch;
- more: the products of all pairs of centred rows (N, N). The rows are written to a temporary file beside the axes, in
  tiles of columns, and read twice: for the products, and to combine the rows to axes.

So memory holds a matrix of N or n squared and one tile, whatever n is, and nothing is random.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from extract.compute.axes_files import AxesSource
from extract.errors import InputError, LayertapError
from extract.system.operating_system import allocate, flush_to_disk

__all__ = ["AxesFit"]

_TILE = 8192  # columns in memory at once, in float64
_MOST = 20_000  # images or values, squared in memory: 3 GB, and as much again for the eigenvectors
_LEAST = 1e-12  # of the largest variance: the rest is rounding
_NAME = "fitting.{}.new"


class AxesFit:
    """Context manager: axes of rows that are added in batches, written into a folder.

    Args:
        folder: folder of the file of axes, and of the temporary file.
        inputs: n, values of a row.
        images: largest number of rows.
        axes: K.
        name: name of the feature, for errors.

    Raises:
        InputError: there are too few images for the axes, or too many to hold the products of all pairs.
    """

    def __init__(self, folder: Path, inputs: int, images: int, axes: int, name: str):
        self._folder, self._inputs, self._images, self._name, self._count = folder, inputs, images, name, 0
        self._axes = axes
        self._check_count(images)
        if (side := min(inputs, images)) > _MOST:
            raise InputError(
                f"{name}: axes of {inputs:,} values fitted on {images:,} images need a matrix of {side:,} x {side:,}",
                hint=f"use --fit-on {_MOST} or less",
            )
        self._by_images = inputs > images
        self._path = folder / _NAME.format(hashlib.sha256(name.encode()).hexdigest()[:16])
        self._file: Any = None

    def __enter__(self) -> Self:
        if self._by_images:
            self._file = self._path.open("wb+", buffering=0)
        else:
            self._sum, self._shift = np.zeros(self._inputs), np.zeros(self._inputs)
            self._products = np.zeros((self._inputs, self._inputs))
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        self._path.unlink(missing_ok=True)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the temporary file and the axes take."""
        return 4 * self._inputs * (self._axes + (self._images if self._by_images else 0))

    def add(self, rows: NDArray[np.float32]) -> None:
        """Add a batch of finite rows, (B, n).

        Raises:
            LayertapError: the disk is full or cannot be written to.
        """
        if not self._by_images:
            if not self._count:
                self._shift = rows.mean(0, dtype=np.float64)  # products of uncentred values would lose digits
            centred = rows - self._shift
            self._sum += centred.sum(0)
            self._products += centred.T @ centred
        else:
            for start in range(0, self._inputs, _TILE):
                tile = np.ascontiguousarray(rows[:, start : start + _TILE], np.float32)
                try:
                    _write_at(self._file, tile, 4 * (start * self._images + self._count * tile.shape[1]))
                except OSError as error:
                    raise LayertapError(f"cannot write to {self._path}: {error.strerror}") from error
        self._count += len(rows)

    def _tile(self, start: int) -> NDArray[np.float64]:
        """Return (N, at most `_TILE`) centred columns, and remember their mean."""
        width = min(_TILE, self._inputs - start)
        self._file.seek(4 * start * self._images)
        tile = np.empty((self._count, width), np.float32)
        left = tile.data.cast("B")
        while left:
            left = left[self._file.readinto(left) :]
        centred = tile.astype(np.float64)
        self._mean[start : start + width] = centred.mean(0)
        centred -= self._mean[start : start + width]
        return centred

    def write(self, source: AxesSource) -> Path:
        """Compute the axes of largest variance, write them, and return the path of the file, named by its content.

        Args:
            source: what the rows are; `images` is replaced by their number.

        Raises:
            InputError: there are too few rows, or they vary along fewer axes.
            LayertapError: the disk is full or cannot be written to.
        """
        axes = self._axes
        self._check_count(self._count)
        self._mean = np.zeros(self._inputs)
        scatter = self._products_of_images() if self._by_images else self._products_of_values()
        values, vectors = np.linalg.eigh(scatter)
        values, vectors = values[::-1][:axes], vectors[:, ::-1][:, :axes]
        varying = int((values > _LEAST * max(values[0], 0.0)).sum())
        if varying < axes:
            raise InputError(
                f"{self._name}: the {self._count:,} images vary along {varying:,} axes only, not {axes:,}",
                hint=f"use pca{max(1, varying)} or less, or fit on more different images",
            )
        source = replace(source, images=self._count)
        variances = values / (self._count - 1), values / np.trace(scatter)
        try:
            return self._written(axes, vectors, values, variances, source)
        except OSError as error:
            raise LayertapError(f"cannot write axes to {self._folder}: {error.strerror}") from error

    def _check_count(self, count: int) -> None:
        if count <= self._axes:
            needed = f"{self._axes:,} axes need at least {self._axes + 1:,} images to fit"
            raise InputError(
                f"{self._name}: {needed}, and there are {count:,}",
                hint="use fewer axes, a larger --fit-on, or more images",
            )

    def _products_of_values(self) -> NDArray[np.float64]:
        mean = self._sum / self._count
        self._mean = self._shift + mean
        products: NDArray[np.float64] = self._products - self._count * np.outer(mean, mean)
        return products

    def _products_of_images(self) -> NDArray[np.float64]:
        products = np.zeros((self._count, self._count))
        for start in range(0, self._inputs, _TILE):
            tile = self._tile(start)
            products += tile @ tile.T
        return products

    def _written(
        self, axes: int, vectors: NDArray[np.float64], values: NDArray[np.float64],
        variances: tuple[NDArray[np.float64], NDArray[np.float64]], source: AxesSource,
    ) -> Path:  # fmt: skip
        """Write the file tile by tile: axes of many values do not fit into memory twice."""
        tensors = {  # of 8 bytes a value first, so that each is aligned
            "explained_variance": ("F64", (axes,), 8),
            "explained_variance_ratio": ("F64", (axes,), 8),
            "components": ("F32", (axes, self._inputs), 4),
            "mean": ("F32", (self._inputs,), 4),
        }
        header: dict[str, Any] = {"__metadata__": {"source": json.dumps(asdict(source))}}
        starts, end = {}, 0
        for name, (kind, shape, size) in tensors.items():
            starts[name], end = end, end + size * int(np.prod(shape))
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [starts[name], end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        path = self._path.with_name(f"axes.{self._path.name}")
        try:
            with path.open("wb+") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.flush()
                allocate(file.fileno(), begin + end)
                self._fill(file, begin + starts["components"], vectors, values)
                for name, content in zip(("explained_variance", "explained_variance_ratio"), variances, strict=True):
                    file.seek(begin + starts[name])
                    file.write(content.tobytes())
                file.seek(begin + starts["mean"])
                file.write(self._mean.astype(np.float32).tobytes())
                file.flush()
                flush_to_disk(file.fileno())
                file.seek(0)
                name = hashlib.file_digest(file, "sha256").hexdigest()[:16]
            return path.replace(self._folder / f"{name}.safetensors")
        finally:
            path.unlink(missing_ok=True)

    def _fill(self, file: Any, begin: int, vectors: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        """Write the axes at a place of a file; then change the sign of those whose largest value is negative."""
        largest = np.zeros(len(values))
        for start in range(0, self._inputs, _TILE):
            if self._by_images:
                tile = (vectors / np.sqrt(values)).T @ self._tile(start)
            else:
                tile = vectors[start : start + _TILE].T
            for axis, part in enumerate(tile.astype(np.float32)):
                _write_at(file, part, begin + 4 * (axis * self._inputs + start))
            peaks = np.take_along_axis(tile, np.abs(tile).argmax(1)[:, None], 1)[:, 0]
            largest = np.where(np.abs(peaks) > np.abs(largest), peaks, largest)
        for axis in np.flatnonzero(largest < 0).tolist():
            place = begin + 4 * axis * self._inputs
            row = np.frombuffer(os.pread(file.fileno(), 4 * self._inputs, place), np.float32)
            _write_at(file, -row, place)


def _write_at(file: Any, values: NDArray[Any], position: int) -> None:
    """Write values at a position of a file, not through a memory map, whose pages would count as memory."""
    left = np.ascontiguousarray(values).data.cast("B")
    while left:
        written = os.pwrite(file.fileno(), left, position)
        left, position = left[written:], position + written
