"""Resolve a run before it computes: settings, images, backbone, existing data set and axes become one `Plan`."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from extract import defaults
from extract.backbones import LoadedBackbone
from extract.backbones.preprocessing import Preprocessing
from extract.backbones.sources import SOURCES
from extract.compute.backbone import Backbone
from extract.compute.backends import WITH_WEIGHTS, engine_for, open_forward
from extract.compute.feature_choice import Choice, Feature, choose_features, with_projection_sizes
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
from extract.errors import InputError, LayertapError, LockedError
from extract.extraction.settings import ExtractionSettings
from extract.images import Decoding, Images, load_batches
from extract.images.image_list import are_frames
from extract.images.loading import stop_on_machine_errors
from extract.images.part_names import has_boxes
from extract.row_status import Status
from extract.store.format.dataset import UNFINISHED_HINT, DataSet, check_usable, shard_rows_for
from extract.store.format.kept_axes import AXES_HASH, axes_file, recorded_axes
from extract.store.format.layout import AXES_FOLDER, AXES_NAMES, StoredFeature
from extract.store.places.bucket import Bucket
from extract.store.row_selection import read_one_version
from extract.system.atomic_files import discard, locked, own_folder
from extract.system.optional_libraries import installed_version, own_version
from extract.system.torch_state import evaluating, full_float32
from extract.system.urls import is_url

__all__ = [
    "Existing",
    "Plan",
    "asked_of",
    "default_batch_size",
    "existing_at",
    "how_decoded",
    "how_made",
    "resolve",
    "where_made",
]

FIT_BYTES = 4 << 30  # of activations, axes, and the matrix whose eigenvectors they are
_FIT_BATCH = 8  # images in a forward of the fit: whole activations of more take much memory


@dataclass(frozen=True)
class Existing:
    """What is at the place of a data set before a run.

    Attributes:
        out: folder or URL of the data set.
        dataset: the data set there; None if there is none.
        has_rows: whether it has rows, or is of `layertap sync`.
        layers: the recorded layers of a complete data set to which others are added; empty: none are.
    """

    out: str
    dataset: DataSet | None = None
    has_rows: bool = False
    layers: tuple[str, ...] = ()

    @property
    def features(self) -> set[str]:
        """Names of the features to which others are added."""
        return {feature.name for feature in self.dataset.features} if self.dataset and self.layers else set()

    @property
    def made(self) -> dict[str, Any] | None:
        """`how_made` of its rows; None if it has none."""
        if self.dataset is None or not self.has_rows:
            return None
        try:
            return how_made(self.dataset.depends_on)
        except KeyError:  # other features, which `check` refuses
            return None

    def check(self, dataset: DataSet) -> None:
        """Check that a run may write a data set here; nothing is written, nor read again.

        Raises:
            InputError: see `DataSet.check`.
        """
        dataset.check_size()
        check_usable(dataset.out)
        if self.dataset is not None:
            same = dataset.with_features(self.features) if self.layers else dataset
            same.check_compatible(self.dataset, dataset.out, replaceable=not self.has_rows)


def existing_at(out: str | Path, *, add_layers: bool = False) -> Existing:
    """Open the data set in a folder or behind a URL, if there is one; with `add_layers`, to add layers to its rows.

    Raises:
        InputError, LayertapError: its description cannot be read, or layers cannot be added.
    """
    out = str(out)
    if is_url(out):
        bucket = Bucket(out)
        dataset = bucket.existing()
        return Existing(out, dataset, dataset is not None and bool(len(bucket.published())))
    if not (Path(out) / "dataset.json").exists():
        return Existing(out)
    return read_one_version(Path(out), lambda dataset: _existing(out, dataset, add_layers))


def _existing(out: str, dataset: DataSet, add_layers: bool) -> Existing:
    existing = Existing(out, dataset, dataset.has_rows)
    # To a data set of `layertap sync`, no run adds rows: it is refused for that.
    add_layers = add_layers and existing.has_rows and dataset.version is None
    return replace(existing, layers=_recorded_layers(dataset)) if add_layers else existing


def _recorded_layers(dataset: DataSet) -> tuple[str, ...]:
    """Return the layers of a complete data set, as they were asked for."""
    shard_files = dataset.shard_files()
    if any(files.published is None or files.part is not None for files in shard_files):
        raise LayertapError(f"{dataset.out} is unfinished, and layers are added to all rows", hint=UNFINISHED_HINT)
    with dataset.open_shard(0, dataset.path(0, shard_files[0].published or 0)) as shard:
        layers = shard.provenance.get("configuration", {}).get("layers", [])
    return tuple(layers)  # if there are none, the check of the place refuses other layers


@dataclass(frozen=True)
class Plan:
    """Everything that a run resolves before it computes.

    Attributes:
        settings: requested settings.
        images: listed images.
        backbone: loaded backbone; its preprocessing says how images are decoded.
        existing: what is at the place of the data set.
        chosen: features of the data set.
        dataset: data set to write.
        engine: "eager", "inductor", "openvino", or "auto": compiled if that pays.
        provenance: provenance of the data set.
    """

    settings: ExtractionSettings
    images: Images
    backbone: Backbone
    existing: Existing
    chosen: Choice
    dataset: DataSet
    engine: str
    provenance: dict[str, Any]

    @property
    def choice(self) -> Choice:
        """Features to compute: all, or those that are added to a data set."""
        stored = self.existing.features
        return replace(self.chosen, features=[each for each in self.chosen.features if each.name not in stored])

    @property
    def computed(self) -> list[StoredFeature]:
        """The features of `choice`, as they are stored."""
        return [feature for feature in self.dataset.features if feature.name not in self.existing.features]

    @property
    def decoding(self) -> Decoding:
        """How images are decoded."""
        settings = self.settings
        return Decoding.for_preprocessing(
            self.backbone.preprocessing, settings.max_pixels, workers=settings.workers, batch_size=self.batch_size
        )

    @property
    def batch_size(self) -> int:
        """Images per forward."""
        return self.settings.batch_size or default_batch_size(self.backbone.device)

    def computed_otherwise(self, **options: Any) -> Plan:
        """Return the plan of the same features with another `precision`, `compile`, `decode` or `batch_size`."""
        settings = replace(self.settings, **options)
        backbone = _decoding(self.backbone, settings.decode)
        engine = _engine(settings, backbone, self.existing)
        return _plan(settings, self.images, backbone, self.existing, engine, self.chosen)


def resolve(
    settings: ExtractionSettings,
    images: Images,
    backbone: Backbone,
    existing: Existing,
    on_fit: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Choose the features of the layers by trial forwards, and describe the data set that a run writes.

    Nothing is written, except principal axes that are fitted for a pooling `pcaK`; see `_load_axes`.

    Args:
        settings: settings of the run.
        images: listed images.
        backbone: loaded backbone.
        existing: from `existing_at`.
        on_fit: see `_load_axes`.

    Raises:
        InputError, UnknownNameError, LayertapError: see `extract_features`.
    """
    # Recorded with their numbers of values: computed for other images later, `srp` is to give as many.
    stored_on = existing.dataset.depends_on if existing.dataset else {}
    if existing.layers and stored_on.get("architecture") != backbone.architecture:
        existing = replace(existing, layers=())  # the check of the place names both backbones
    asked = dict.fromkeys([*existing.layers, *settings.layer_list])
    layers = with_projection_sizes(list(asked), len(images), settings.distortion)
    settings = replace(settings, layers=layers, batch_size=settings.batch_size or default_batch_size(backbone.device))
    preprocessing = replace(backbone.preprocessing, orientation=settings.orientation, icc=settings.icc)
    backbone = _decoding(replace(backbone, preprocessing=preprocessing), settings.decode)
    engine = _engine(settings, backbone, existing)
    with evaluating(backbone.model), full_float32():
        boxes = partial(has_boxes, images.paths)
        choice = choose_features(backbone, layers, in_order=bool(existing.layers), has_boxes=boxes)
    if choice.is_of_boxes:
        backbone = replace(backbone, preprocessing=backbone.preprocessing.for_boxes())
    _load_axes(choice, images, backbone, existing, settings, on_fit)
    return _plan(settings, images, backbone, existing, engine, choice)


def _load_axes(
    choice: Choice,
    images: Images,
    backbone: LoadedBackbone,
    existing: Existing,
    settings: ExtractionSettings,
    on_fit: Callable[[str], None],
) -> None:
    """Load the axes of every feature that is projected on some and has none yet.

    They are taken from `settings.axes`, or from an existing data set with rows. Otherwise they are fitted in
    eager float32 to `settings.fit_on` images, spread evenly over all images, and written to the folder of the data set.

    A data set keeps its axes in the folder `axes`, in a file for each feature, which is named by its hash.
    `extract/compute/principal_axes.py` describes the format. The hash is an attribute of the feature and part of the
    fingerprint, so the axes must be known before the first row. Several workers would fit them several times, on
    different CPUs to different bits. They therefore take axes that one process has fitted.

    Args:
        choice: features; their axes are loaded.
        images: listed images.
        backbone: loaded backbone.
        existing: what is at the place of the data set.
        settings: settings of the run.
        on_fit: called with a line of text before axes are fitted.

    Raises:
        InputError: axes are missing, are of other activations, or cannot be fitted.
        LockedError: another process writes to the folder, or has written rows there meanwhile.
        LayertapError: the disk is full, or a file cannot be read.
    """
    stored = existing.dataset if existing.has_rows else None
    fits: _Fits = {}
    for feature in choice.features:
        axes = feature.principal_axes
        if axes is None or axes.sha256:
            continue
        source = feature.axes_source(backbone, settings.fit_on or 0, images.paths_xxh3)
        if settings.axes is not None:
            axes.load(find_axes(feature.name, source, axes_in(Path(settings.axes))))
        elif stored is not None and not is_url(existing.out):
            path = _recorded(stored, feature, source, settings.fit_on)
            if path is None and existing.layers:
                raise _not_fitted(feature)
            if path is None:
                return  # other features are stored there, which the check of the folder refuses
            axes.load(path)
        else:
            fits.setdefault(source, []).append((feature, axes))
    if fits:
        _fit(fits, images, backbone, existing.out, settings, on_fit)


def _recorded(existing: DataSet, feature: Feature, wanted: AxesSource, fit_on: int | None) -> Path | None:
    """Return the file that a data set with rows has recorded for a feature; None if it has no such axes.

    Raises:
        InputError: the file is missing or was changed, or its axes were fitted to another number of these images.
    """
    of = {"layer": str(feature.site), "pooling": feature.pooling}.items()
    attributes = next((stored.attributes for stored in existing.features if of <= stored.attributes.items()), {})
    recorded = attributes.get(AXES_HASH)
    if recorded not in recorded_axes(existing):
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


# What axes are fitted on -> the features that are projected on some of them, and their axes without values.
_Fits = dict[AxesSource, list[tuple[Feature, AxesProjection]]]


def _fit(
    fits: _Fits, images: Images, backbone: LoadedBackbone, out: str, settings: ExtractionSettings,
    on_fit: Callable[[str], None],
) -> None:  # fmt: skip
    """Fit axes to each activation, write them into the folder of the data set, and load them."""
    widest = [max(sharing, key=lambda each: each[1].outputs) for sharing in fits.values()]  # the one with the most axes
    features = [feature for feature, _ in widest]
    if settings.fit_on is None or is_url(out):
        raise _not_fitted(features[0])
    rows = np.linspace(0, len(images) - 1, min(settings.fit_on, len(images))).round().astype(np.int64).tolist()
    _check_memory(widest, len(rows))
    on_fit(f"fitting the axes of {', '.join(feature.name for feature in features)} to {len(rows):,} images ...")
    with _folder(Path(out)) as folder:
        activations = [np.empty((len(rows), axes.inputs), np.float32) for _, axes in widest]
        counts = [0] * len(features)
        for values in _activations(features, images, rows, backbone, settings):
            for i, feature in enumerate(features):
                flat = values[feature.name].reshape(len(values[feature.name]), -1)
                finite = flat[np.isfinite(flat).all(1)]
                activations[i][counts[i] : counts[i] + len(finite)] = finite
                counts[i] += len(finite)
        for i, (source, sharing) in enumerate(fits.items()):
            feature, most = widest[i]
            path = _written(feature.name, most.outputs, source, activations[i][: counts[i]], folder)
            for _, axes in sharing:
                axes.load(path)
            left_out = len(rows) - counts[i]
            note = f"; {left_out:,} of the images have no finite activation, and are left out" if left_out else ""
            on_fit(f"{feature.name}: {most.outputs:,} axes explain {most.explained:.1%} of the variance{note}")


def _not_fitted(feature: Feature) -> InputError:
    return InputError(
        f"{feature.name}: {feature.pooling} needs principal axes, and this run does not fit any",
        hint="fit them with `layertap embed` in one process into another folder, then add --axes with that folder",
    )


def _written(name: str, n_axes: int, source: AxesSource, activations: NDArray[np.float32], folder: Path) -> Path:
    """Fit the axes of a feature to activations (N, n), and write them."""
    n_images = len(activations)
    if n_images <= n_axes:
        raise InputError(
            f"{name}: {n_axes:,} axes need at least {n_axes + 1:,} images to fit, and there are {n_images:,}",
            hint="use fewer axes, a larger --fit-on, or more images",
        )
    fitted = principal_axes(torch.from_numpy(activations), n_axes)
    if fitted.n_varying < n_axes:
        raise InputError(
            f"{name}: the {n_images:,} images vary along {fitted.n_varying:,} axes only, not {n_axes:,}",
            hint=f"use pca{max(1, fitted.n_varying)} or less, or fit on more different images",
        )
    return write_axes(folder, fitted, replace(source, images=n_images))


def _check_memory(fits: list[tuple[Feature, AxesProjection]], n_images: int) -> None:
    """Check that the activations, the axes, and the largest matrix and its eigenvectors fit into `FIT_BYTES`."""
    widest, axes = max(fits, key=lambda fit: fit[1].inputs)
    held = sum(4 * axes.inputs * (n_images + axes.outputs) for _, axes in fits)
    needed = held + 16 * min(axes.inputs, n_images) ** 2
    if needed > FIT_BYTES:
        raise InputError(
            f"{widest.name}: axes of {axes.inputs:,} values fitted on {n_images:,} images take {needed / 1e9:,.1f} GB "
            f"of memory; at most {FIT_BYTES / 1e9:.1f} GB are used",
            hint=f"pool before the projection, such as {widest.site}:grid4:pca64, use srp in place of pca, which is "
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
        preprocessing, settings.max_pixels, workers=settings.workers, batch_size=_FIT_BATCH
    )
    batches = [rows[start : start + _FIT_BATCH] for start in range(0, len(rows), _FIT_BATCH)]
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


def _plan(
    settings: ExtractionSettings, images: Images, backbone: Backbone, existing: Existing, engine: str, choice: Choice
) -> Plan:
    """Return the plan of a backbone with its final preprocessing, for features with their axes."""
    preprocessing, precision = backbone.preprocessing, settings.precision
    if taken := {feature.name for feature in choice.features} & images.columns.keys():
        raise InputError(f"keep {min(taken)!r}: a feature has this name", hint="rename the column")
    if whole := [feature.name for feature in choice.features if feature.is_whole]:
        if engine not in ("auto", "eager") or precision != "float32" or not preprocessing.is_exact:
            raise InputError(
                f"{whole[0]} is whole numbers, which are computed exactly: by PyTorch in float32, of exact pixels",
                hint="leave out --compile, --precision and --decode, or this layer",
            )
        engine = "eager"
    # Engines compute different parts in lower precision and round at different places: the fingerprint names them.
    by_autocast = engine == "eager" and precision not in ("tf32", WITH_WEIGHTS)
    lower = f"{precision} {'autocast' if by_autocast else engine}"
    computed_in = precision if precision == "float32" else lower
    stored = [_stored(feature, settings.dtype, computed_in) for feature in choice.features]
    depends_on = {
        "architecture": backbone.architecture,
        "weights_sha256": backbone.weights.sha256,
        "features": {feature.name: _identity(feature) for feature in choice.features},
        "preprocessing": preprocessing.describe(),
        "decoder": _decoder(preprocessing),
        "precision": computed_in,
        "stored_as": settings.dtype,
    }
    shard_rows = settings.shard_rows or (existing.dataset.shard_rows if existing.dataset else shard_rows_for(stored))
    dataset = DataSet(
        out=Path(existing.out),
        depends_on=json.loads(json.dumps(depends_on)),  # as read back from `dataset.json`
        features=stored,
        images={
            "root": images.root,
            "count": len(images),
            "paths_xxh3": images.paths_xxh3,
            "labels_xxh3": images.labels_xxh3,
        },
        shard_rows=min(shard_rows, len(images)),
    )
    provenance = _provenance(settings, images, backbone, depends_on)
    return Plan(settings, images, backbone, existing, choice, dataset, engine, provenance)


def default_batch_size(device: torch.device) -> int:
    """Return the default number of images per forward."""
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= defaults.LARGE_GPU_BYTES:
        return defaults.BATCH_SIZE_OF_LARGE_GPU
    return defaults.BATCH_SIZE


def _decoding(backbone: Backbone, decode: str) -> Backbone:
    """Return the backbone with the preprocessing that decodes exactly, fast, or on its GPU."""
    preprocessing = backbone.preprocessing.exact()
    if decode == "fast":
        preprocessing = preprocessing.faster()
    elif decode == "gpu":
        preprocessing = preprocessing.on_gpu(backbone.device)
    return replace(backbone, preprocessing=preprocessing)


def _engine(settings: ExtractionSettings, backbone: Backbone, existing: Existing) -> str:
    """Return the engine. It is "auto" only in float32: in lower precision features depend on the engine.

    The fingerprint names it, so it must be known before the first batch, and a compiler that fails later would end a
    run for which none was requested: in lower precision, "auto" is autocast, or the engine of the stored rows.
    """
    compile, precision = settings.compile, settings.precision
    if compile == "auto" and precision == "float32":
        return "auto"
    if compile == "auto":
        made = existing.made
        compile = made["compile"] if made and made["precision"] == precision else "off"
    return engine_for(compile, backbone.device, precision)


def _stored(feature: Feature, dtype: str, computed_in: str) -> StoredFeature:
    attributes = {
        "layer": str(feature.site),
        "pooling": feature.pooling,
        **feature.poolings.layout.attributes(),
        "source_dtype": feature.source_dtype if computed_in == "float32" else computed_in,
    }
    if feature.principal_axes:
        attributes[AXES_HASH] = feature.principal_axes.sha256
    return StoredFeature(feature.name, feature.shape, feature.stored_as(dtype), attributes)


def _identity(feature: Feature) -> str:
    """Return what a feature is, as named in the fingerprint."""
    text = f"{feature.site} {feature.pooling} {list(feature.shape)}"
    return f"{text} axes {feature.principal_axes.sha256 or 'not fitted'}" if feature.principal_axes else text


_ORIENTATIONS = {"exif": "orientation applied", "ignore": "orientation ignored"}
_TO_SRGB = "; ICC profiles converted to sRGB, perceptual"


def _decoder(preprocessing: Preprocessing) -> str:
    """Return the decoder as named in the fingerprint; data sets without the options have the text of the defaults."""
    text = f"pillow: EXIF {_ORIENTATIONS[preprocessing.orientation]}, transparency over white"
    text += _TO_SRGB if preprocessing.icc == "srgb" else ""
    if preprocessing.device:
        return text + "; JPEG files decoded by nvJPEG"
    return text + ("; JPEG files decoded smaller, to twice the size or more" if preprocessing.fast else "")


def how_decoded(depends_on: dict[str, Any]) -> dict[str, Any]:
    """Return the `orientation` and `icc` of features with this fingerprint.

    Raises:
        KeyError: the entry is missing.
    """
    decoder = str(depends_on["decoder"])
    as_stored = _ORIENTATIONS["ignore"] in decoder
    return {"orientation": "ignore" if as_stored else "exif", "icc": "srgb" if _TO_SRGB in decoder else "ignore"}


_DECODE_BY = {"torchvision": "fast", "torchvision on a GPU": "gpu"}


def how_made(depends_on: dict[str, Any]) -> dict[str, Any]:
    """Return the `precision`, `compile` and `decode` of features with this fingerprint.

    In float32, `compile` is "auto", because features of all engines agree up to rounding.

    Raises:
        KeyError: an entry is missing.
    """
    precision, _, way = str(depends_on["precision"]).partition(" ")
    decode = _DECODE_BY.get(depends_on["preprocessing"].get("resized_by"), "exact")
    compile = "auto" if precision == "float32" else "off" if way in ("autocast", "eager") else way
    return {"precision": precision, "compile": compile, "decode": decode}


def asked_of(configuration: dict[str, Any], weights: str | None = None) -> dict[str, Any]:
    """Return the arguments of `load_backbone` that a data set's provenance records.

    Args:
        configuration: configuration in the provenance.
        weights: a name or file instead of the recorded weights, if the file was moved.

    Raises:
        KeyError: an argument is missing in the configuration, or the weights are no text.
    """
    asked = {name: configuration[name] for name in ("weights", "seed", "allow_missing_head")}
    if not isinstance(asked["weights"], str | None):
        raise KeyError("weights")
    asked["preprocessing"] = configuration.get("preprocessing")
    return asked | ({"weights": weights} if weights else {})


def _provenance(
    settings: ExtractionSettings, images: Images, backbone: Backbone, depends_on: dict[str, Any]
) -> dict[str, Any]:
    source = SOURCES.get(backbone.spec.partition("/")[0])
    libraries = [source.library] if source is not None and source.library else []
    libraries += ["av"] if are_frames(settings) else []
    on_gpu = backbone.device.type == "cuda"
    weights = backbone.asked.get("weights")
    if weights and Path(weights).is_file():
        weights = str(Path(weights).resolve())  # valid from any working directory
    return {
        "backbone": backbone.spec,
        "weights": backbone.weights.source,
        "depends_on": depends_on,
        "configuration": {
            "images": images.root,
            **backbone.asked,
            "weights": weights,
            **settings.recorded(),
        },
        "device": torch.cuda.get_device_name(backbone.device) if on_gpu else str(backbone.device),
        **where_made(["torch", "torchvision", "timm", "pillow", "numpy", "h5py", "openvino", *libraries]),
    }


def where_made(packages: Iterable[str]) -> dict[str, Any]:
    """Return for a provenance: the versions of packages that are installed, the machine, and the time."""
    versions = {"python": platform.python_version(), "layertap": own_version()}
    versions |= {package: version for package in packages if (version := installed_version(package))}
    machine = {"platform": platform.platform(), "host": platform.node()}
    return {"versions": versions, "machine": machine, "started": datetime.now(UTC).isoformat(timespec="seconds")}
