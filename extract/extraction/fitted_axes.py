"""The principal axes of a run: of its data set, of another data set or a file, or fitted to its images.

A data set keeps its axes in the folder `axes`: a file for each layer and the poolings before the projection, named by
its hash. `extract/compute/principal_axes.py` describes the format. The hash is an attribute of the feature and part of
the fingerprint, so the axes must be known before the first row. Several workers would fit them several times, on
different CPUs to different bits. They therefore take axes that one process has fitted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from extract.backbones import LoadedBackbone
from extract.compute.backends import open_forward
from extract.compute.feature_choice import Choice, Feature
from extract.compute.forward import Values
from extract.compute.principal_axes import (
    AxesProjection,
    AxesSource,
    axes_in,
    axes_source,
    find_axes,
    principal_axes,
    write_axes,
)
from extract.errors import InputError, LockedError
from extract.extraction.settings import ExtractionSettings
from extract.images import Decoding, Images, load_batches
from extract.images.loading import stop_on_machine_errors
from extract.row_status import Status
from extract.store.format.dataset import DataSet, check_usable
from extract.store.format.kept_axes import AXES_HASH, axes_file, recorded_axes
from extract.store.format.layout import AXES_FOLDER, AXES_NAMES
from extract.system.atomic_files import discard, locked, own_folder
from extract.system.torch_state import evaluating, full_float32
from extract.system.urls import is_url

__all__ = ["FIT_BYTES", "load_axes"]

FIT_BYTES = 4 << 30  # of activations, axes, and the matrix whose eigenvectors they are
_BATCH = 8  # images in a forward of the fit: whole activations of more take much memory


def load_axes(
    choice: Choice,
    images: Images,
    backbone: LoadedBackbone,
    out: str,
    settings: ExtractionSettings,
    existing: DataSet | None = None,
    on_fit: Callable[[str], None] = lambda text: None,
) -> None:
    """Load the axes of every feature that is projected on some and has none yet.

    They are taken from `settings.axes`, or from an existing data set with rows. Otherwise they are fitted in
    eager float32 to `settings.fit_on` images, spread evenly over all images, and written to the folder of the data set.

    Args:
        choice: features; their axes are loaded.
        images: listed images.
        backbone: loaded backbone.
        out: folder or URL of the data set.
        settings: settings of the run.
        existing: the data set there, if it has rows.
        on_fit: called with a line of text before axes are fitted.

    Raises:
        InputError: axes are missing, are of other activations, or cannot be fitted.
        LockedError: another process writes to the folder, or has written rows there meanwhile.
        LayertapError: the disk is full, or a file cannot be read.
    """
    given = [] if settings.axes is None else axes_in(Path(settings.axes))
    fits: dict[AxesSource, list[Feature]] = {}
    for feature in choice.features:
        axes = feature.principal_axes
        if axes is None or axes.sha256:
            continue
        source = feature.axes_source(backbone, settings.fit_on or 0, images.paths_xxh3)
        if settings.axes is not None:
            axes.load(find_axes(feature.name, source, given))
        elif existing is not None and not is_url(out):
            path = _recorded(existing, feature, source, settings.fit_on)
            if path is None:
                return  # other features are stored there, which the check of the folder refuses
            axes.load(path)
        else:
            fits.setdefault(source, []).append(feature)
    for features in fits.values():
        features.sort(key=lambda feature: -_axes(feature).outputs)
    if fits:
        _fit(fits, images, backbone, out, settings, on_fit)


def _recorded(existing: DataSet, feature: Feature, wanted: AxesSource, fit_on: int | None) -> Path | None:
    """Return the file that a data set with rows has recorded for a feature; None if it has no such axes.

    Raises:
        InputError: the file is missing or was changed, or its axes were fitted to another number of these images.
    """
    attributes = next((stored.attributes for stored in existing.features if stored.name == feature.name), {})
    recorded = attributes.get(AXES_HASH)
    if recorded not in recorded_axes(existing) or attributes.get("pooling") != feature.pooling:
        return None
    path = axes_file(existing, recorded)
    source = axes_source(path)
    if source.differences(wanted):
        return None
    if fit_on is not None and source.fit_on != fit_on and source.paths_xxh3 == wanted.paths_xxh3:
        raise InputError(
            f"{existing.out}: the axes of {feature.name} were fitted on {source.fit_on:,} images, not {fit_on:,}",
            hint=f"use --fit-on {source.fit_on}, or choose another output folder",
        )
    return path


def _fit(
    fits: dict[AxesSource, list[Feature]], images: Images, backbone: LoadedBackbone, out: str,
    settings: ExtractionSettings, on_fit: Callable[[str], None],
) -> None:  # fmt: skip
    """Fit axes to each activation, write them into the folder of the data set, and load them.

    `fits` has for each activation the features that are projected on some of its axes, most axes first.
    """
    firsts = [features[0] for features in fits.values()]
    if settings.fit_on is None or is_url(out):
        raise InputError(
            f"{firsts[0].name}: {firsts[0].pooling} needs principal axes, and this run does not fit any",
            hint="fit them with `layertap embed` in one process into a folder, then add --axes with that folder",
        )
    rows = np.linspace(0, len(images) - 1, min(settings.fit_on, len(images))).round().astype(np.int64).tolist()
    _check_memory(firsts, len(rows))
    on_fit(f"fitting the axes of {', '.join(feature.name for feature in firsts)} to {len(rows):,} images ...")
    with _folder(Path(out)) as folder:
        activations = [np.empty((len(rows), _axes(feature).inputs), np.float32) for feature in firsts]
        count = 0
        for values in _activations(firsts, images, rows, backbone, settings):
            flat = [values[feature.name].reshape(len(values[feature.name]), -1) for feature in firsts]
            is_finite = np.all([np.isfinite(each).all(1) for each in flat], axis=0)
            for each, held in zip(flat, activations, strict=True):
                held[count : count + is_finite.sum()] = each[is_finite]
            count += int(is_finite.sum())
        if count < len(rows):
            on_fit(f"{len(rows) - count:,} of these images have no finite activation, and are left out of the fit")
        for (source, features), held in zip(fits.items(), activations, strict=True):
            path = _written(features[0], source, held[:count], folder)
            for feature in features:
                _axes(feature).load(path)
            axes = _axes(features[0])
            on_fit(f"{features[0].name}: {axes.outputs:,} axes explain {axes.explained:.1%} of the variance")


def _axes(feature: Feature) -> AxesProjection:
    assert feature.principal_axes is not None
    return feature.principal_axes


def _written(feature: Feature, source: AxesSource, activations: NDArray[np.float32], folder: Path) -> Path:
    """Fit the axes of a feature to activations (N, n), and write them."""
    n_images, n_axes = len(activations), _axes(feature).outputs
    if n_images <= n_axes:
        raise InputError(
            f"{feature.name}: {n_axes:,} axes need at least {n_axes + 1:,} images to fit, and there are {n_images:,}",
            hint="use fewer axes, a larger --fit-on, or more images",
        )
    fitted = principal_axes(torch.from_numpy(activations), n_axes)
    if fitted.n_varying < n_axes:
        raise InputError(
            f"{feature.name}: the {n_images:,} images vary along {fitted.n_varying:,} axes only, not {n_axes:,}",
            hint=f"use pca{max(1, fitted.n_varying)} or less, or fit on more different images",
        )
    return write_axes(folder, fitted, replace(source, images=n_images))


def _check_memory(features: list[Feature], n_images: int) -> None:
    """Check that the activations, the axes, and the largest matrix and its eigenvectors fit into `FIT_BYTES`."""
    inputs = [_axes(feature).inputs for feature in features]
    held = sum(4 * _axes(feature).inputs * (n_images + _axes(feature).outputs) for feature in features)
    needed = held + 16 * min(max(inputs), n_images) ** 2
    if needed > FIT_BYTES:
        widest = features[int(np.argmax(inputs))]
        raise InputError(
            f"{widest.name}: axes of {max(inputs):,} values fitted on {n_images:,} images take {needed / 1e9:,.1f} GB "
            f"of memory; at most {FIT_BYTES / 1e9:.1f} GB are used",
            hint=f"pool before the projection, such as {widest.name}:grid4:pca64, use srp in place of pca, which is "
            "not fitted, or a smaller --fit-on",
        )


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """Context manager: the folder of axes in a locked data set that may not exist yet, without leftovers."""
    check_usable(out)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        # `existing` was read before the folder was locked: the axes of rows that were stored meanwhile stay.
        if (out / "dataset.json").exists() and DataSet.open(out).has_rows:
            raise LockedError(f"another process has written rows to {out}", hint="run again to resume them")
        folder = own_folder(out / AXES_FOLDER)
        # Of fits that were interrupted, or whose data set has no rows: it is replaced.
        for left in folder.iterdir():
            if AXES_NAMES.match(left.name):
                discard(left)
        yield folder


def _activations(
    features: list[Feature], images: Images, rows: list[int], backbone: LoadedBackbone, settings: ExtractionSettings
) -> Iterator[Values]:
    """Yield the features, without the projection, of the images that can be decoded, batch by batch."""
    choice = Choice([replace(each, poolings=each.poolings.before_axes) for each in features], [])
    preprocessing = replace(backbone.preprocessing, fast=False)
    decoding = Decoding.for_preprocessing(
        preprocessing, settings.max_pixels, workers=settings.workers, batch_size=_BATCH
    )
    batches = [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
    loaded = load_batches(images, batches, decoding)
    with (
        contextlib.closing(loaded),
        evaluating(backbone.model),
        full_float32(),
        open_forward(backbone, choice, "float32") as forward,
    ):
        for batch in stop_on_machine_errors(loaded, images.source):
            good = np.flatnonzero(batch.status == Status.OK).tolist()
            if good:
                yield forward(batch.select(good).images)
