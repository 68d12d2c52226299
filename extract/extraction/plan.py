"""Resolve a run before it computes: settings, images, a backbone and the data set that exists become one `Plan`."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from extract import defaults
from extract.backbones.preprocessing import Preprocessing
from extract.backbones.sources import SOURCES
from extract.compute.backbone import Backbone
from extract.compute.backends import WITH_WEIGHTS, engine_for
from extract.compute.feature_choice import Choice, Feature, choose_features, with_projection_sizes
from extract.errors import InputError, LayertapError
from extract.extraction.fitted_axes import load_axes
from extract.extraction.settings import ExtractionSettings
from extract.images import Decoding, Images
from extract.store.format.dataset import UNFINISHED_HINT, DataSet, check_usable, shard_rows_for
from extract.store.format.kept_axes import AXES_HASH
from extract.store.format.layout import StoredFeature
from extract.store.places.bucket import Bucket
from extract.store.row_selection import read_one_version
from extract.system.optional_libraries import installed_version, own_version
from extract.system.torch_state import evaluating, full_float32
from extract.system.urls import is_url

__all__ = ["Existing", "Plan", "asked_of", "default_batch_size", "existing_at", "how_decoded", "how_made", "resolve"]


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

    Nothing is written, except principal axes that are fitted for a pooling `pcaK`; see `load_axes`.

    Args:
        settings: settings of the run.
        images: listed images.
        backbone: loaded backbone.
        existing: from `existing_at`.
        on_fit: see `load_axes`.

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
        choice = choose_features(backbone, layers)
    if any(feature.principal_axes for feature in choice.features):
        stored = existing.dataset if existing.has_rows else None
        load_axes(choice, images, backbone, existing.out, settings, stored, on_fit)
    for feature in choice.features if existing.layers else ():
        if feature.principal_axes and not feature.principal_axes.sha256:
            raise InputError(
                f"{feature.name}: {feature.pooling} needs principal axes, which are not fitted while layers are added",
                hint="fit them with `layertap embed` into another folder, then add --axes with that folder",
            )
    return _plan(settings, images, backbone, existing, engine, choice)


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
    versions = {"python": platform.python_version(), "layertap": own_version()}
    source = SOURCES.get(backbone.spec.partition("/")[0])
    libraries = [source.library] if source is not None and source.library else []
    for package in ("torch", "torchvision", "timm", "pillow", "numpy", "h5py", "openvino", *libraries):
        if version := installed_version(package):  # some are optional
            versions[package] = version
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
            "layers": settings.layer_list,
            **backbone.asked,
            "weights": weights,
            **settings.recorded(),
        },
        "device": torch.cuda.get_device_name(backbone.device) if on_gpu else str(backbone.device),
        "versions": versions,
        "machine": {"platform": platform.platform(), "host": platform.node()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
