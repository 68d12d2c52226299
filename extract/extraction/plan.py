"""What a run resolves before it computes: images, backbone, features, data set."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from extract.backbones.preprocessing import Preprocessing
from extract.backbones.sources import SOURCES
from extract.compute.backbone import Backbone
from extract.compute.backends import engine_for
from extract.compute.feature_choice import Choice, Feature, choose_features, with_projection_sizes
from extract.credentials import without_credentials
from extract.errors import InputError
from extract.extraction.fitted_axes import load_axes
from extract.extraction.settings import ExtractionSettings
from extract.images import Decoding, Images, list_images
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.kept_axes import AXES_HASH
from extract.store.format.layout import StoredFeature
from extract.store.places.bucket import Bucket
from extract.system.optional_libraries import installed_version, own_version
from extract.system.torch_state import evaluating, full_float32
from extract.system.urls import is_url

__all__ = ["Plan", "asked_of", "features_of", "how_decoded", "how_made", "plan", "settings_of_existing"]


@dataclass(frozen=True)
class Plan:
    """Everything that a run resolves before it computes.

    Attributes:
        images: listed images.
        backbone: loaded backbone; its preprocessing says how images are decoded.
        choice: features to compute.
        dataset: data set to write.
        settings: requested settings.
        engine: "eager", "inductor", "openvino", or "auto": compiled if that pays.
        provenance: provenance of the data set.
    """

    images: Images
    backbone: Backbone
    choice: Choice
    dataset: DataSet
    settings: ExtractionSettings
    engine: str
    provenance: dict[str, Any]

    @property
    def decoding(self) -> Decoding:
        """How images are decoded."""
        settings = self.settings
        return Decoding.for_preprocessing(
            self.backbone.preprocessing, settings.max_pixels, workers=settings.workers, batch_size=settings.batch_size
        )


def plan(
    images: str | os.PathLike[str] | Images,
    *,
    out: str | os.PathLike[str],
    backbone: Backbone,
    settings: ExtractionSettings,
    choice: Choice | None = None,
    on_fit: Callable[[str], None] = lambda text: None,
) -> Plan:
    """List the images if needed, and choose the features of the layers by trial forwards.

    Nothing is written, except principal axes that are fitted for a pooling `pcaK`; see `load_axes`.

    Args:
        images: see `extract_features`; or listed images.
        out: folder of the data set, or its URL.
        backbone: loaded backbone.
        settings: settings of the run.
        choice: the features of the layers, if they are known, with their axes.
        on_fit: see `load_axes`.
    """
    out, recorded = os.fspath(out), settings.recorded()
    given = without_credentials(os.fspath(images)) if isinstance(images, str | os.PathLike) else images.root
    if isinstance(images, str | os.PathLike):
        images = list_images(images, settings.limit, settings.keep_list)
    # Recorded with their numbers of values: computed for other images later, `srp` is to give as many.
    layers = with_projection_sizes(settings.layer_list, len(images), settings.distortion)
    configuration = {
        "images": given,
        "layers": layers,
        **backbone.asked,
        "weights": _as_found_from_anywhere(backbone.asked.get("weights")),
        **{name: value for name, value in recorded.items() if name != "layers"},
    }
    dtype, precision, shard_rows = settings.dtype, settings.precision, settings.shard_rows
    backbone = _configured(backbone, settings)
    preprocessing = backbone.preprocessing
    existing, _ = _existing(out)
    engine = _engine(settings.compile, precision, backbone, out)
    if choice is None:
        choice = features_of(images, out, backbone, settings, on_fit)
    if taken := {feature.name for feature in choice.features} & images.columns.keys():
        raise InputError(f"keep {min(taken)!r}: a feature has this name", hint="rename the column")
    if whole := [feature.name for feature in choice.features if feature.is_whole]:
        if engine not in ("auto", "eager") or precision != "float32" or preprocessing.fast:
            raise InputError(
                f"{whole[0]} is whole numbers, which are computed exactly: by PyTorch in float32, of exact pixels",
                hint="leave out --compile, --precision and --decode, or this layer",
            )
        engine = "eager"
    computed_in = precision if precision == "float32" else _lower_precision(precision, engine)
    stored = [
        StoredFeature(
            feature.name,
            feature.shape,
            feature.stored_as(dtype),
            {
                "layer": str(feature.site),
                "pooling": feature.pooling,
                **feature.poolings.layout.attributes(),
                "source_dtype": feature.source_dtype if precision == "float32" else computed_in,
                **({AXES_HASH: feature.principal_axes.sha256} if feature.principal_axes else {}),
            },
        )
        for feature in choice.features
    ]
    depends_on = {
        "architecture": backbone.architecture,
        "weights_sha256": backbone.weights.sha256,
        "features": {feature.name: _identity(feature) for feature in choice.features},
        "preprocessing": preprocessing.describe(),
        "decoder": _decoder(preprocessing),
        "precision": computed_in,
        "stored_as": dtype,
    }
    dataset = DataSet(
        out=Path(out),
        depends_on=json.loads(json.dumps(depends_on)),  # as read back from `dataset.json`
        features=stored,
        images={
            "root": images.root,
            "count": len(images),
            "paths_xxh3": images.paths_xxh3,
            "labels_xxh3": images.labels_xxh3,
        },
        shard_rows=min(shard_rows or (existing.shard_rows if existing else shard_rows_for(stored)), len(images)),
    )
    return Plan(images, backbone, choice, dataset, settings, engine, _provenance(backbone, depends_on, configuration))


def features_of(
    images: Images, out: str, backbone: Backbone, settings: ExtractionSettings,
    on_fit: Callable[[str], None] = lambda text: None,
) -> Choice:  # fmt: skip
    """Choose the features of the layers of a run, and load or fit their principal axes; see `plan` and `load_axes`."""
    layers = with_projection_sizes(settings.layer_list, len(images), settings.distortion)
    with evaluating(backbone.model), full_float32():
        choice = choose_features(backbone, layers)
    if any(feature.principal_axes for feature in choice.features):
        load_axes(choice, images, _configured(backbone, settings), out, settings, _existing(out)[0], on_fit)
    return choice


def _configured(backbone: Backbone, settings: ExtractionSettings) -> Backbone:
    """Return the backbone with the preprocessing that the settings ask for."""
    preprocessing = backbone.preprocessing.faster() if settings.decode == "fast" else backbone.preprocessing
    preprocessing = replace(preprocessing, orientation=settings.orientation, icc=settings.icc)
    return replace(backbone, preprocessing=preprocessing)


def _identity(feature: Feature) -> str:
    """Return what a feature is, as named in the fingerprint."""
    text = f"{feature.site} {feature.pooling} {list(feature.shape)}"
    return f"{text} axes {feature.principal_axes.sha256 or 'not fitted'}" if feature.principal_axes else text


def _engine(compile: str, precision: str, backbone: Backbone, out: str | Path) -> str:
    """Return the engine. It is "auto" only in float32: in lower precision features depend on the engine."""
    if compile != "auto":
        return engine_for(compile, backbone.device, precision)
    if precision == "float32":
        return "auto"
    made = settings_of_existing(out)
    if made and made["precision"] == precision:
        return engine_for(made["compile"], backbone.device, precision)
    return "eager"


def _lower_precision(precision: str, engine: str) -> str:
    """Return the precision as named in the fingerprint.

    It includes the engine, because engines compute different parts in lower precision and round at different places.
    """
    return f"{precision} {'autocast' if engine == 'eager' else engine}"


def _existing(out: str | Path) -> tuple[DataSet | None, bool]:
    """Return the existing data set or None, and whether it has rows."""
    if is_url(str(out)):
        bucket = Bucket(str(out))
        dataset = bucket.existing()
        return dataset, dataset is not None and bool(len(bucket.published()))
    if not (Path(out) / "dataset.json").exists():
        return None, False
    dataset = DataSet.open(Path(out))
    return dataset, any(dataset.files())


def settings_of_existing(out: str | Path) -> dict[str, Any] | None:
    """Return `how_made` of the data set at `out`; None if there is none, or an empty one that may be replaced."""
    existing, has_rows = _existing(out)
    if existing is None or not has_rows:
        return None
    try:
        return how_made(existing.depends_on)
    except KeyError:  # other features, which the check of the output folder refuses
        return None


_DECODER = "pillow: EXIF orientation {orientation}, transparency over white"
_ORIENTATIONS = {"exif": "applied", "ignore": "ignored"}
_TO_SRGB = "; ICC profiles converted to sRGB, perceptual"


def _decoder(preprocessing: Preprocessing) -> str:
    """Return the decoder as named in the fingerprint; data sets without the options have the text of the defaults."""
    text = _DECODER.format(orientation=_ORIENTATIONS[preprocessing.orientation])
    text += _TO_SRGB if preprocessing.icc == "srgb" else ""
    return text + ("; JPEG files decoded smaller, to twice the size or more" if preprocessing.fast else "")


def how_decoded(depends_on: dict[str, Any]) -> dict[str, Any]:
    """Return the `orientation` and `icc` of features with this fingerprint.

    Raises:
        KeyError: the entry is missing.
    """
    decoder = str(depends_on["decoder"])
    as_stored = decoder.startswith(_DECODER.format(orientation=_ORIENTATIONS["ignore"]))
    return {"orientation": "ignore" if as_stored else "exif", "icc": "srgb" if _TO_SRGB in decoder else "ignore"}


def how_made(depends_on: dict[str, Any]) -> dict[str, Any]:
    """Return the `precision`, `compile` and `decode` of features with this fingerprint.

    In float32, `compile` is "auto", because features of all engines agree up to rounding.

    Raises:
        KeyError: an entry is missing.
    """
    precision, _, way = str(depends_on["precision"]).partition(" ")
    fast = depends_on["preprocessing"].get("resized_by") == "torchvision"
    compile = "auto" if precision == "float32" else "off" if way == "autocast" else way
    return {"precision": precision, "compile": compile, "decode": "fast" if fast else "exact"}


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


def _as_found_from_anywhere(weights: str | None) -> str | None:
    """Return the name of weights, or the absolute path of a weights file."""
    return str(Path(weights).resolve()) if weights and Path(weights).is_file() else weights


def _provenance(backbone: Backbone, depends_on: dict[str, Any], configuration: dict[str, Any]) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "layertap": own_version()}
    source = SOURCES.get(backbone.spec.partition("/")[0])
    own = [source.library] if source is not None and source.library else []
    for package in ("torch", "torchvision", "timm", "pillow", "numpy", "h5py", "openvino", *own):
        if version := installed_version(package):  # some are optional
            versions[package] = version
    on_gpu = backbone.device.type == "cuda"
    return {
        "backbone": backbone.spec,
        "weights": backbone.weights.source,
        "depends_on": depends_on,
        "configuration": configuration,
        "device": torch.cuda.get_device_name(backbone.device) if on_gpu else str(backbone.device),
        "versions": versions,
        "machine": {"platform": platform.platform(), "host": platform.node()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
