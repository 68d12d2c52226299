"""What a run has resolved before it computes: images, backbone, features, data set."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from extract import defaults
from extract.compute.backbone import Backbone
from extract.compute.backends import engine_for
from extract.compute.feature_choice import Choice, choose_features
from extract.compute.pooling import POOLINGS
from extract.errors import InputError, unknown_name
from extract.images import ImageList, list_images
from extract.store.format.copying import COMPRESSIONS
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.store.format.layout import StoredFeature
from extract.store.format.untrusted import need_libraries
from extract.store.places.bucket import Bucket
from extract.system.torch_state import evaluating, full_float32
from extract.system.urls import is_url

__all__ = ["Plan", "asked_of", "how_begun", "how_made", "plan", "plan_for"]

DTYPES = ("float32", "float16")
DECODE = ("exact", "fast")
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Plan:
    """Everything a run has resolved before it computes."""

    images: ImageList
    backbone: Backbone
    choice: Choice
    dataset: DataSet
    batch_size: int
    workers: int
    max_pixels: int
    precision: str
    engine: str  # "eager", "inductor", "openvino", or "auto": compiled if that pays
    min_cosine: float
    compress: str | None
    sync_s: float
    provenance: dict[str, Any]


def plan(
    images: str | os.PathLike[str] | ImageList,
    *,
    out: str | os.PathLike[str],
    backbone: Backbone,
    layers: str | Sequence[str] = defaults.LAYERS,
    batch_size: int = defaults.BATCH_SIZE,
    workers: int = defaults.WORKERS,
    decode: str = defaults.DECODE,
    dtype: str = defaults.DTYPE,
    precision: str = defaults.PRECISION,
    compile: str = defaults.COMPILE,
    min_cosine: float = defaults.MIN_COSINE,
    limit: int | None = None,
    max_pixels: int = defaults.MAX_PIXELS,
    shard_rows: int | None = None,
    compress: str | None = None,
    sync_s: float = defaults.SYNC_S,
) -> Plan:
    """List the images, if they are not listed yet, and find out what the layers give; as of `extract_features`.

    Nothing is written. `sync_s` is how many seconds of work a power cut may cost; 0 forces each batch to the disk.
    """
    if compress is not None and compress not in COMPRESSIONS:
        raise unknown_name("compression", compress, COMPRESSIONS)
    need_libraries(compress)
    for kind, given, known in (
        ("dtype", dtype, DTYPES),
        ("precision", precision, PRECISIONS),
        ("decode", decode, DECODE),
    ):
        if given not in known:
            raise unknown_name(kind, given, known)
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("limit", limit, 1),
                               ("max_pixels", max_pixels, 1), ("shard_rows", shard_rows, 1)):  # fmt: skip
        if value is not None and value < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")
    if not -1 <= min_cosine <= 1:
        raise InputError(f"min_cosine is {min_cosine}; a cosine lies between -1 and 1")
    configuration = {
        "images": os.fspath(images) if isinstance(images, str | os.PathLike) else images.root,
        "layers": [layers] if isinstance(layers, str) else list(layers),
        **backbone.asked,
        "weights": _as_found_from_anywhere(backbone.asked.get("weights")),
        "batch_size": batch_size,
        "workers": workers,
        "decode": decode,
        "dtype": dtype,
        "precision": precision,
        "compile": compile,
        "min_cosine": min_cosine,
        "limit": limit,
        "max_pixels": max_pixels,
        "shard_rows": shard_rows,
        "compress": compress,
    }
    found = list_images(images, limit) if isinstance(images, str | os.PathLike) else images
    return plan_for(found, os.fspath(out), backbone, configuration, sync_s)


def plan_for(
    images: ImageList,
    out: str | Path,
    backbone: Backbone,
    configuration: dict[str, Any],
    sync_s: float = defaults.SYNC_S,
) -> Plan:
    """The plan for images that are listed already.

    Args:
        images: as listed.
        out: folder of the data set, or its URL.
        backbone: as loaded.
        configuration: `layers`, `batch_size`, `workers`, `decode`, `dtype`, `precision`, `compile`, `min_cosine`,
            `max_pixels`, `shard_rows` and `compress`, checked; it goes into the provenance.
        sync_s: as of `plan`.
    """
    dtype, precision, shard_rows = (configuration[name] for name in ("dtype", "precision", "shard_rows"))
    if configuration["decode"] == "fast":
        backbone = replace(backbone, preprocessing=backbone.preprocessing.faster())
    existing, _ = _existing(out)
    engine = _engine(configuration["compile"], precision, backbone, out)
    with evaluating(backbone.model), full_float32():
        choice = choose_features(backbone, configuration["layers"])
    computed_in = precision if precision == "float32" else _lower_precision(precision, engine)
    stored = [
        StoredFeature(
            feature.name,
            feature.shape,
            dtype,
            {
                "layer": str(feature.site),
                "pooling": feature.pooling,
                "axes": POOLINGS[feature.pooling].axes(feature.layout),
                "source_dtype": feature.source_dtype if precision == "float32" else computed_in,
            },
        )
        for feature in choice.features
    ]
    depends_on = {
        "architecture": backbone.architecture,
        "weights_sha256": backbone.weights.sha256,
        "features": {f.name: f"{f.site} {f.pooling} {list(f.shape)}" for f in choice.features},
        "preprocessing": backbone.preprocessing.describe(),
        "decoder": "pillow: EXIF orientation applied, transparency over white"
        + ("; JPEG files decoded smaller, to twice the size or more" if backbone.preprocessing.fast else ""),
        "precision": computed_in,
        "stored_as": dtype,
    }
    dataset = DataSet(
        out=Path(out),
        depends_on=json.loads(json.dumps(depends_on)),  # as it will be read back
        features=stored,
        images={
            "root": images.root,
            "count": len(images),
            "paths_xxh3": images.paths_xxh3,
            "labels_xxh3": images.labels_xxh3,
        },
        shard_rows=min(shard_rows or (existing.shard_rows if existing else shard_rows_for(stored)), len(images)),
    )
    provenance = _provenance(backbone, depends_on, configuration)
    return Plan(
        images,
        backbone,
        choice,
        dataset,
        configuration["batch_size"],
        configuration["workers"],
        configuration["max_pixels"],
        precision,
        engine,
        configuration["min_cosine"],
        configuration["compress"],
        sync_s,
        provenance,
    )


def _engine(compile: str, precision: str, backbone: Backbone, out: str | Path) -> str:
    """What runs the forward; in lower precision it must be known beforehand, since the features depend on it."""
    if compile != "auto":
        return engine_for(compile, backbone.device, precision)
    if precision == "float32":
        return "auto"
    made = how_begun(out)
    if made and made["precision"] == precision:
        return engine_for(made["compile"], backbone.device, precision)
    return "eager"


def _lower_precision(precision: str, engine: str) -> str:
    """How the fingerprint calls it: each engine computes other parts in lower precision, and rounds at other places."""
    return f"{precision} {'autocast' if engine == 'eager' else engine}"


def _existing(out: str | Path) -> tuple[DataSet | None, bool]:
    """The data set that is there already, if there is one, and whether it has rows."""
    if is_url(str(out)):
        bucket = Bucket(str(out))
        found = bucket.existing()
        return found, found is not None and bool(len(bucket.published()))
    if not (Path(out) / "dataset.json").exists():
        return None, False
    found = DataSet.open(Path(out))
    return found, any(found.files())


def how_begun(out: str | Path) -> dict[str, str] | None:
    """As of `how_made`, of the data set at a place; None: there is none, or it has no rows and gives way."""
    existing, has_rows = _existing(out)
    return how_made(existing.depends_on) if existing is not None and has_rows else None


def how_made(depends_on: dict[str, Any]) -> dict[str, str]:
    """The `precision`, `compile` and `decode` of features that have this fingerprint.

    In float32, "auto": whatever computes them, they are the same but for rounding.
    """
    precision, _, way = str(depends_on["precision"]).partition(" ")
    fast = depends_on["preprocessing"].get("resized_by") == "torchvision"
    compile = "auto" if precision == "float32" else "off" if way == "autocast" else way
    return {"precision": precision, "compile": compile, "decode": "fast" if fast else "exact"}


def asked_of(configuration: dict[str, Any], weights: str | None = None) -> dict[str, Any]:
    """What `load_backbone` was told, as a data set's provenance has it.

    Args:
        configuration: of the provenance.
        weights: a name or file instead of those, if the file was moved.

    Raises:
        KeyError: it is not there.
    """
    asked = {name: configuration[name] for name in ("weights", "seed", "allow_missing_head")}
    asked["preprocessing"] = configuration.get("preprocessing")
    return asked | ({"weights": weights} if weights else {})


def _as_found_from_anywhere(weights: str | None) -> str | None:
    """The name of weights, or the whole path of their file."""
    return str(Path(weights).resolve()) if weights and Path(weights).is_file() else weights


def _provenance(backbone: Backbone, depends_on: dict[str, Any], configuration: dict[str, Any]) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in ("layertap", "torch", "torchvision", "timm", "pillow", "numpy", "h5py", "openvino"):
        with contextlib.suppress(PackageNotFoundError):  # some are optional
            versions[package] = version(package)
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
