"""Principal axes of activations: the poolings `pcaK` and `pcawK`.

    y = C (x - mean)        C: (K, n), orthonormal rows, the axes along which a sample varies most

A file of axes is a safetensors file with the tensors

    components                (K, n) float32, by descending variance; the value of largest magnitude of each is positive
    mean                      (n,) float32
    explained_variance        (K,) float64, of the sample along each axis, with N - 1 in the denominator
    explained_variance_ratio  (K,) float64, as part of the variance of the sample

and metadata with an `AxesSource` as JSON under the key `source`. Names are those of scikit-learn's
`PCA`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from extract.compute.principal_axes import PrincipalAxes
from extract.errors import InputError, LayertapError, first_line
from extract.system.atomic_files import write_whole
from extract.system.json_files import check_shape

__all__ = ["AxesProjection", "AxesSource", "axes_in", "axes_source", "find_axes", "write_axes"]

_HINT = "name a data set with a pooling pcaK, its folder `axes`, or a file in it"

_IMAGES = 16  # projected at once: centred activations of more would take much memory


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
        InputError: K is larger than n.
    """

    def __init__(self, inputs: int, outputs: int, whiten: bool):
        self.inputs, self.outputs, self.whiten = inputs, outputs, whiten
        self.path: Path | None = None
        self.sha256 = ""
        self.explained = math.nan
        if outputs > inputs:
            raise InputError(
                f"{self.name} of {inputs:,} values: there are no more axes than values",
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
        self.path, self.sha256, self.explained = path, _hash_of(path), explained
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
    shape: Sequence[int]
    fit_on: int
    images: int
    paths_xxh3: str

    def differences(self, other: AxesSource) -> list[str]:
        """Return what differs in the activations that were fitted: "layer 'layer2' instead of 'layer1'"."""
        names = ("architecture", "weights_sha256", "layer", "poolings", "shape")
        own, others = asdict(self), asdict(other)
        return [
            f"{name} {own[name]!r} instead of {others[name]!r}"
            for name in names
            if json.dumps(own[name]) != json.dumps(others[name])
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
        return AxesSource(**{name: metadata[name] for name in _SHAPE})


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
    try:
        write_whole(path, content)
    except OSError as error:
        raise LayertapError(f"cannot write axes to {folder}: {error.strerror}") from error
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


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
