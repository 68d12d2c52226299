"""Measurements of `--fast`, kept in the user's cache folder as JSON: one file for a machine, a backbone and its layers.

`rm -r ~/.cache/layertap/measurements` deletes them, so that the next job measures again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import torch

from extract import defaults
from extract.compute.agreement import Agreement
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import Choice
from extract.compute.kept_programs import cpu_features, library_versions
from extract.errors import InputError
from extract.extraction.forward_rates import ComputeOption, Measured
from extract.system.json_files import parse_json
from extract.system.user_cache import keep_newest, read_cached, write_cached

__all__ = ["Measurements", "keep_measurements", "kept_measurements"]

_FOLDER = "measurements"
_FORMAT = 1  # raise it when the meaning of the numbers changes
_MOST_BYTES = 4 << 20  # of all files


@dataclass(frozen=True)
class Measurements:
    """What was measured for a backbone and its layers.

    Attributes:
        measured: the forward with each option, in the order in which equally fast ones are preferred.
        decode_s: "exact" and perhaps "fast" -> seconds of one core to decode an image.
        eager_s: seconds of an eager forward in float32 for an image.
        on_cpu: whether decoding and the forward share the cores.
        batch_size: images per batch.
    """

    measured: list[Measured]
    decode_s: dict[str, float]
    eager_s: float
    on_cpu: bool
    batch_size: int


_AGREEMENTS = {str: {"min_cosine": float, "max_deviation": float}}
_SHAPE = {
    "format": int,
    "depends_on": dict,
    "measured": [
        {
            "way": {"precision": str, "engine": str},
            "images_per_s": float,
            "start_s": float,
            "starting_again_s": float,
            "agreement": _AGREEMENTS,
            "decoding": _AGREEMENTS,
            "why_not": str,
            "why_not_fast": str,
        }
    ],
    "decode_s": {str: float},
    "eager_s": float,
    "on_cpu": bool,
    "batch_size": int,
}


def kept_measurements(backbone: Backbone, choice: Choice, what: dict[str, Any]) -> Measurements | None:
    """Return the measurements of an earlier job on this machine; None if there are none.

    Args:
        backbone: loaded backbone.
        choice: features to compute.
        what: what was asked to be measured; JSON-compatible.
    """
    depends_on = _depends_on(backbone, choice, what)
    content = read_cached(_name(depends_on))
    if content is None:
        return None
    try:
        kept = parse_json(content, _name(depends_on), _SHAPE)
    except InputError:
        return None
    rates = [rate["images_per_s"] > 0 or rate["why_not"] for rate in kept["measured"]]
    if kept["format"] != _FORMAT or kept["depends_on"] != depends_on or not all(rates) or not kept["batch_size"]:
        return None
    measured = [
        Measured(**(rate | {"way": ComputeOption(**rate["way"])} | {
            name: {feature: Agreement(**values) for feature, values in rate[name].items()}
            for name in ("agreement", "decoding")
        }))
        for rate in kept["measured"]
    ]  # fmt: skip
    return Measurements(measured, kept["decode_s"], kept["eager_s"], kept["on_cpu"], kept["batch_size"])


def keep_measurements(backbone: Backbone, choice: Choice, what: dict[str, Any], measurements: Measurements) -> None:
    """Keep measurements for later jobs; if they cannot be written, the next job measures again."""
    depends_on = _depends_on(backbone, choice, what)
    content = {"format": _FORMAT, "depends_on": depends_on, **dataclasses.asdict(measurements)}
    if write_cached(_name(depends_on), (json.dumps(content, indent=1) + "\n").encode()):
        keep_newest(_FOLDER, _MOST_BYTES)


def _name(depends_on: dict[str, Any]) -> str:
    return f"{_FOLDER}/{hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()}.json"


def _depends_on(backbone: Backbone, choice: Choice, what: dict[str, Any]) -> dict[str, Any]:
    """Return all that the measurements depend on, but the images, as read back from JSON."""
    device, on_gpu = backbone.device, backbone.device.type == "cuda"
    depends_on = {
        "machine": {
            "device": torch.cuda.get_device_name(device) if on_gpu else str(device),
            "cpu": cpu_features(),
            "cores": defaults.CORES,
            "threads": torch.get_num_threads(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        },
        "backbone": backbone.spec,
        "architecture": backbone.architecture,
        "weights_sha256": backbone.weights.sha256,
        "features": {f.name: f"{f.site} {f.pooling} {list(f.shape)}" for f in choice.features},
        "preprocessing": backbone.preprocessing.describe(),
        "versions": library_versions(),
        **what,
    }
    content: dict[str, Any] = json.loads(json.dumps(depends_on))
    return content
