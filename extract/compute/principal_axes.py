"""Principal axes: fitted to rows, kept in a file, and projected on by the poolings `pcaK` and `pcawK`.

    y = C (x - mean)        C: (K, n), orthonormal rows, the axes along which a sample varies most

The fit is exact, of rows in memory or read in blocks. The axes are the eigenvectors of the smaller of two matrices, the
products of all pairs of columns (n, n) or of rows (N, N). A randomised decomposition would multiply the rows four times
or more by K vectors, which is as much work for samples of some thousand rows, and its axes would depend on a seed.

A file of axes is a safetensors file with the tensors

    components                (K, n) float32, by descending variance; the value of largest magnitude of each is positive
    mean                      (n,) float32
    explained_variance        (K,) float64, of the sample along each axis, with N - 1 in the denominator
    explained_variance_ratio  (K,) float64, as part of the variance of the sample

and metadata with an `AxesSource` as JSON under the key `source`. Names are those of scikit-learn's `PCA`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from extract.errors import InputError, LayertapError, first_line, system_errors_as
from extract.system.atomic_files import write_whole
from extract.system.json_files import check_shape
from extract.system.torch_state import full_float32

__all__ = [
    "AxesProjection", "AxesSource", "PrincipalAxes", "RowBlocks", "axes_in", "axes_source", "find_axes",
    "principal_axes", "too_large", "write_axes",
]  # fmt: skip

_TILE = 8192  # columns or rows in float64 at once
_NEGLIGIBLE = 1e-12  # of the largest variance: the rest is rounding
_HINT = "name a data set with a pooling pcaK, its folder `axes`, or a file in it"
_IMAGES = 16  # projected at once: centred activations of more would take much memory


class RowBlocks(Protocol):
    """Finite rows (N, n) that are read in blocks, such as `FeatureRows`."""

    @property
    def width(self) -> int:
        """Number n of values in a row."""

    def __len__(self) -> int:
        """Number N of rows."""

    def blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (first row, block (b, n)) over all rows."""


@dataclass(frozen=True)
class PrincipalAxes:
    """Principal axes by descending variance.

    Attributes:
        mean: (n,) float64.
        axes: (K, n) float32, orthonormal; the component of largest magnitude of each is positive. An axis of fewer rows
            than values, along which they do not vary, is zero.
        squares: (K,) float64, sum over the rows of the squared distance from the mean along each axis.
        total: sum of the squared distances from the mean.
    """

    mean: Tensor
    axes: Tensor
    squares: Tensor
    total: float

    @property
    def n_varying(self) -> int:
        """Number of axes along which the rows vary by more than rounding."""
        return int((self.squares > _NEGLIGIBLE * self.squares.max()).sum())

    @property
    def shares(self) -> NDArray[np.float64]:
        """(K,) share of the variance along each axis; 0 if all rows are equal."""
        shares: NDArray[np.float64] = (self.squares / self.total if self.total > 0 else self.squares * 0).cpu().numpy()
        return shares


def principal_axes(rows: Tensor | RowBlocks, k: int | None = None, device: str | torch.device = "cpu") -> PrincipalAxes:
    """Compute the K axes along which rows vary most, K = min(k, N, n).

    Products of rows in memory are computed in float64. Those of rows that are read in blocks are computed in float32,
    which takes half the time, and are summed in float64.

    Args:
        rows: (N, n) of any float type, or rows to read once in blocks, with n x n values in memory; N at least 1.
        k: number of axes; None: all.
        device: device to compute on.

    Raises:
        LayertapError: the squares of the values exceed the range of the type.
    """
    # Products square the ratio between the first and the last variance, so they are added up in float64.
    with torch.no_grad(), full_float32():
        if not isinstance(rows, Tensor):
            blocks: Iterable[Tensor] = (torch.from_numpy(block).to(device) for _, block in rows.blocks())
            return _by_columns(blocks, len(rows), rows.width, k, device)
        rows = rows.to(device)
        if rows.shape[1] > len(rows):
            return _by_rows(rows, k)
        starts = range(0, len(rows), _TILE)
        return _by_columns((rows[at : at + _TILE].double() for at in starts), len(rows), rows.shape[1], k, device)


def too_large() -> LayertapError:
    """Return the error for features that float32 cannot sum."""
    return LayertapError(
        "the features are too large to be summed in float32",
        hint="use --scaling standardise (scaling='standardise')",
    )


def _by_columns(
    blocks: Iterable[Tensor], count: int, width: int, k: int | None, device: str | torch.device
) -> PrincipalAxes:
    """Compute axes from the products of columns; moments are merged as in Chan, Golub and LeVeque 1983."""
    seen = 0
    mean = torch.zeros(width, dtype=torch.float64, device=device)
    products = torch.zeros(width, width, dtype=torch.float64, device=device)
    for block in blocks:
        block_mean = block.mean(0, dtype=torch.float64)
        centred = block - block_mean.to(block.dtype)
        shift = block_mean - mean
        total = seen + len(block)
        products += centred.T @ centred
        products += torch.outer(shift, shift) * (seen * len(block) / total)
        mean += shift * (len(block) / total)
        seen = total
    squares, vectors = _largest(products, min(count, width), k)
    return PrincipalAxes(mean, _signed(vectors.T.float()), squares, float(products.trace()))


def _by_rows(rows: Tensor, k: int | None) -> PrincipalAxes:
    """Compute axes from the products of rows, whose eigenvectors combine the centred rows to axes."""
    count, width = rows.shape
    mean = torch.empty(width, dtype=torch.float64, device=rows.device)
    tiles = [slice(start, start + _TILE) for start in range(0, width, _TILE)]
    products = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    for tile in tiles:
        columns = rows[:, tile].double()
        mean[tile] = columns.mean(0)
        centred = columns - mean[tile]
        products += centred @ centred.T
    squares, vectors = _largest(products, count, k)
    varying = squares > _NEGLIGIBLE * squares.max()
    squares = squares * varying
    weights = (vectors * torch.where(varying, squares, 1).rsqrt() * varying).T
    axes = torch.empty(len(squares), width, device=rows.device)
    for tile in tiles:
        axes[:, tile] = weights @ (rows[:, tile].double() - mean[tile])
    return PrincipalAxes(mean, _signed(axes), squares, float(products.trace()))


def _largest(products: Tensor, rank: int, k: int | None) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues (K,), at least 0, and their eigenvectors (n, K)."""
    if not bool(products.isfinite().all()):
        raise too_large()
    count = rank if k is None else min(k, rank)
    squares, vectors = torch.linalg.eigh(products)
    return squares.flip(0)[:count].clamp(min=0), vectors.flip(1)[:, :count]


def _signed(axes: Tensor) -> Tensor:
    """Fix the arbitrary sign of axes (K, n) in place: the component of largest magnitude becomes positive."""
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return axes.mul_(torch.where(largest < 0, -1.0, 1.0))


class AxesProjection:
    """Projects a batch of activations (B, ...) with n values an image to (B, K) float32. It computes after `load`.

    Args:
        inputs: n.
        outputs: K.
        whiten: whether to divide by the standard deviation along each axis.

    Attributes:
        path: file of the axes; None before `load`.
        sha256: hash of that file; empty before `load`.
        explained: part of the variance of the images of the fit that lies along the axes; NaN before `load`.

    Raises:
        InputError: K is 0 or larger than n.
    """

    def __init__(self, inputs: int, outputs: int, whiten: bool):
        self.inputs, self.outputs, self.whiten = inputs, outputs, whiten
        self.path: Path | None = None
        self.sha256 = ""
        self.explained = math.nan
        if not 1 <= outputs <= inputs:
            raise InputError(
                f"{self.name} of {inputs:,} values: there are 1 to {inputs:,} axes",
                hint=f"use K up to {inputs:,}, or none",
            )
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def name(self) -> str:
        """The pooling that this is."""
        return f"pca{'w' if self.whiten else ''}{self.outputs}"

    def load(self, path: Path) -> None:
        """Read the axes from a file, which may have more than K.

        Raises:
            InputError: the file is damaged, has other sizes or fewer axes, or no variance along an axis.
            LayertapError: the file cannot be read.
        """
        with _opened(path) as file:
            components = file.get_slice("components")
            rows, columns = components.get_shape()
            if columns != self.inputs or rows < self.outputs:
                raise InputError(
                    f"{path} has {rows:,} axes of {columns:,} values; {self.name} needs {self.outputs:,} of "
                    f"{self.inputs:,}"
                )
            chosen, mean = components[: self.outputs], file.get_tensor("mean")
            variance = file.get_tensor("explained_variance")[: self.outputs]
            explained = float(file.get_tensor("explained_variance_ratio")[: self.outputs].sum())
        fits = (mean.shape, variance.shape) == ((self.inputs,), (self.outputs,)) and mean.dtype == torch.float32
        if not fits or chosen.dtype != torch.float32 or not bool(mean.isfinite().all() and (variance > 0).all()):
            raise InputError(f"{path} is damaged: its mean or its variances do not fit its axes")
        if self.whiten:
            chosen = chosen / variance.sqrt().float()[:, None]
        self.path, self.sha256, self.explained = path, hashlib.sha256(path.read_bytes()).hexdigest(), explained
        self._on = {torch.device("cpu"): (chosen, mean.float())}

    def __call__(self, activation: Tensor) -> Tensor:
        """Project a batch: (B, ...) of any float type -> (B, K) float32, on its device, which may be "meta".

        Raises:
            InputError: no axes were loaded.
        """
        if activation.is_meta:
            return activation.new_empty(len(activation), self.outputs, dtype=torch.float32)
        components, mean = self._tensors_on(activation.device)
        with torch.autocast(activation.device.type, enabled=False):
            parts = torch.split(activation.reshape(len(activation), self.inputs), _IMAGES)
            return torch.cat([F.linear(part.float() - mean, components) for part in parts])

    def _tensors_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if not self._on:
            raise InputError(f"{self.name} has no axes", hint="fit them with `layertap embed`, and give them as axes")
        if device not in self._on:
            with torch.inference_mode(False):  # the tensors outlive it
                components, mean = (tensor.to(device) for tensor in self._on[torch.device("cpu")])
                self._on[device] = components, mean
        return self._on[device]


@dataclass(frozen=True)
class AxesSource:
    """What principal axes were fitted on.

    Attributes:
        architecture: architecture of the backbone.
        weights_sha256: hash of its weights.
        layer: layer and tensor, as `str` of a `Site`.
        poolings: poolings before the projection; "none" if there are none.
        shape: shape of their result for one image.
        fit_on: number of images asked for.
        images: number of images fitted on.
        paths_xxh3: hash of the paths of all images from which these were taken.
    """

    architecture: str
    weights_sha256: str
    layer: str
    poolings: str
    shape: tuple[int, ...]
    fit_on: int
    images: int
    paths_xxh3: str

    def differences(self, other: AxesSource) -> list[str]:
        """Return what differs in the activations that were fitted: "layer 'layer2' instead of 'layer1'"."""
        return [
            f"{name} {getattr(self, name)!r} instead of {getattr(other, name)!r}"
            for name in ("architecture", "weights_sha256", "layer", "poolings", "shape")
            if getattr(self, name) != getattr(other, name)
        ]


_SHAPE = {
    "architecture": str, "weights_sha256": str, "layer": str, "poolings": str, "shape": [int], "fit_on": int,
    "images": int, "paths_xxh3": str,
}  # fmt: skip


def axes_in(place: Path) -> list[Path]:
    """Return the files of axes of a data set or in a folder, or the file that `place` is.

    Raises:
        InputError: there is none.
    """
    # A data set of `layertap sync` has them in its passes.
    patterns = ("*.safetensors", "axes/*.safetensors", "passes/*/axes/*.safetensors")
    files = sorted(path for each in patterns for path in place.glob(each)) if place.is_dir() else [place]
    if not place.exists() or not files:
        problem = "has no principal axes" if place.exists() else "does not exist; expected principal axes"
        raise InputError(f"{place} {problem}", hint=_HINT)
    return files


def find_axes(name: str, wanted: AxesSource, files: Sequence[Path]) -> Path:
    """Return the file with the axes for a feature of this name.

    Raises:
        InputError: none of them fits, or a file is not a file of axes.
        LayertapError: a file cannot be read.
    """
    differences = {path: axes_source(path).differences(wanted) for path in files}
    fitting = [path for path in files if not differences[path]]
    if not fitting:
        nearest = min(files, key=lambda path: len(differences[path]))
        raise InputError(f"the axes in {nearest} do not fit {name}: they are of {'; '.join(differences[nearest])}")
    return max(fitting, key=lambda path: path.stat().st_size)  # the one with the most axes


def axes_source(path: Path) -> AxesSource:
    """Return what the axes in a file were fitted on.

    Raises:
        InputError: the file is not a file of axes.
        LayertapError: the file cannot be read.
    """
    with _opened(path) as file:
        metadata: dict[str, Any] = json.loads((file.metadata() or {})["source"])
        check_shape(metadata, path, _SHAPE)
        return AxesSource(**{name: metadata[name] for name in _SHAPE} | {"shape": tuple(metadata["shape"])})


def write_axes(folder: Path, fitted: PrincipalAxes, source: AxesSource) -> Path:
    """Write axes that were fitted on `source.images` images; return the path of the file, named by its content.

    Raises:
        LayertapError: the disk is full or cannot be written to.
    """
    from safetensors.torch import save

    tensors = {
        "components": fitted.axes,
        "mean": fitted.mean.float(),
        "explained_variance": fitted.squares / (source.images - 1),
        "explained_variance_ratio": torch.from_numpy(fitted.shares),
    }
    content = save(tensors, {"source": json.dumps(asdict(source))})
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    with system_errors_as(f"cannot write axes to {folder}"):
        write_whole(path, content)
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Context manager: open a file of axes by safetensors; a link to one is followed.

    Raises:
        InputError: it is not a file, so that opening it might wait, as for a pipe, or it is not a file of axes.
        LayertapError: it cannot be read.
    """
    try:
        from safetensors import safe_open

        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path} is not a file; expected principal axes")
        with safe_open(path, "pt") as file:
            yield file
    except LayertapError:
        raise
    except OSError as error:
        raise LayertapError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # of another kind for each way in which a file can be damaged
        raise InputError(f"{path} is not a file of principal axes: {first_line(error)}", hint=_HINT) from error
