"""Files of principal axes: what each was fitted on, and which one a feature takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from extract.backbones import LoadedBackbone
from extract.compute.axes_projection import HINT, opened
from extract.compute.feature_choice import Choice, Feature
from extract.compute.principal_axes import PrincipalAxes
from extract.errors import InputError, LayertapError
from extract.system.atomic_files import write_whole
from extract.system.json_files import check_shape

__all__ = ["AxesSource", "axes_in", "axes_source", "find_axes", "load_given_axes", "source_of", "write_axes"]


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


def source_of(feature: Feature, backbone: LoadedBackbone, fit_on: int = 0, paths_xxh3: str = "") -> AxesSource:
    """Return what the axes of a feature are fitted on."""
    assert feature.poolings.fitted is not None
    before, _ = feature.poolings.fitted
    return AxesSource(
        architecture=backbone.architecture,
        weights_sha256=backbone.weights.sha256,
        layer=str(feature.site),
        poolings=before.name or "none",
        shape=tuple(before.shape if before.steps else feature.activation_shape),
        fit_on=fit_on,
        images=0,
        paths_xxh3=paths_xxh3,
    )


def load_given_axes(choice: Choice, backbone: LoadedBackbone, place: Path) -> None:
    """Load the axes of all features that need some from a file or a folder; raises the errors of `find_axes`."""
    files = axes_in(place)
    for feature in choice.features:
        if feature.principal_axes is not None:
            feature.principal_axes.load(find_axes(feature, source_of(feature, backbone), files))


def axes_in(place: Path) -> list[Path]:
    """Return the files of axes in a folder, or the file that `place` is.

    Raises:
        InputError: there is none.
    """
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not place.exists() or not files:
        problem = "has no principal axes" if place.exists() else "does not exist; expected principal axes"
        raise InputError(f"{place} {problem}", hint=HINT)
    return files


def find_axes(feature: Feature, wanted: AxesSource, files: Sequence[Path]) -> Path:
    """Return the file with the axes for a feature.

    Raises:
        InputError: none of them fits, or a file is not a file of axes.
        LayertapError: a file cannot be read.
    """
    differences = {path: axes_source(path).differences(wanted) for path in files}
    fitting = [path for path in files if not differences[path]]
    if not fitting:
        nearest = min(files, key=lambda path: len(differences[path]))
        raise InputError(
            f"the axes in {nearest} do not fit {feature.name}: they are of {'; '.join(differences[nearest])}"
        )
    return max(fitting, key=lambda path: path.stat().st_size)  # the one with the most axes


def axes_source(path: Path) -> AxesSource:
    """Return what the axes in a file were fitted on.

    Raises:
        InputError: the file is not a file of axes.
        LayertapError: the file cannot be read.
    """
    with opened(path) as file:
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
