"""layertap's library: compute features of images with any backbone, and store them on disk.

from extract import Taps, load_backbone, extract_features, FeatureReader
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "layertap does not run on Windows: it uses file locks and memory maps of POSIX. Install it in the Windows "
        "Subsystem for Linux (wsl --install)"
    )

if TYPE_CHECKING:
    from extract.analysis.network.inspection import inspect_model
    from extract.analysis.network.monitors import ActivationMonitor, GradientMonitor
    from extract.analysis.row_findings import Finding, findings
    from extract.backbones import load_text_tower
    from extract.compute.backbone import Backbone, load_backbone
    from extract.errors import DisagreementError, InputError, LayertapError, LockedError, UnknownNameError
    from extract.extraction.check import Cause, Check, check
    from extract.extraction.feature_writer import FeatureWriter
    from extract.extraction.run import extract_features
    from extract.row_status import Status
    from extract.store.reader import FeatureReader
    from extract.taps.record import Record, Site
    from extract.taps.taps import Taps

# Imported on first use, so that `from extract import FeatureReader` does not load torch.
_HOMES = {
    "ActivationMonitor": "extract.analysis.network.monitors",
    "GradientMonitor": "extract.analysis.network.monitors",
    "Finding": "extract.analysis.row_findings",
    "findings": "extract.analysis.row_findings",
    "inspect_model": "extract.analysis.network.inspection",
    "Backbone": "extract.compute.backbone",
    "load_backbone": "extract.compute.backbone",
    "load_text_tower": "extract.backbones",
    "InputError": "extract.errors",
    "LayertapError": "extract.errors",
    "DisagreementError": "extract.errors",
    "LockedError": "extract.errors",
    "UnknownNameError": "extract.errors",
    "Cause": "extract.extraction.check",
    "Check": "extract.extraction.check",
    "check": "extract.extraction.check",
    "extract_features": "extract.extraction.run",
    "Record": "extract.taps.record",
    "Site": "extract.taps.record",
    "Taps": "extract.taps.taps",
    "Status": "extract.row_status",
    "FeatureReader": "extract.store.reader",
    "FeatureWriter": "extract.extraction.feature_writer",
}

__all__ = [
    "ActivationMonitor",
    "Backbone",
    "Cause",
    "Check",
    "DisagreementError",
    "FeatureReader",
    "FeatureWriter",
    "Finding",
    "GradientMonitor",
    "InputError",
    "LayertapError",
    "LockedError",
    "Record",
    "Site",
    "Status",
    "Taps",
    "UnknownNameError",
    "check",
    "extract_features",
    "findings",
    "inspect_model",
    "load_backbone",
    "load_text_tower",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'extract' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
