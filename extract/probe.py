"""Linear probes and other measures of feature quality, on arrays. Aliases of names in `extract.analysis`."""

from extract.analysis.alikeness import MOST_COLUMNS, Alikeness, alikeness
from extract.analysis.dense import DEPTH, SEGMENTATION, depth_probe, segmentation_probe
from extract.analysis.probe import PROTOCOLS, LinearProbe, ProbeResult, linear_cka, linear_probe, rsa

__all__ = [
    "DEPTH",
    "MOST_COLUMNS",
    "PROTOCOLS",
    "SEGMENTATION",
    "Alikeness",
    "LinearProbe",
    "ProbeResult",
    "alikeness",
    "depth_probe",
    "linear_cka",
    "linear_probe",
    "rsa",
    "segmentation_probe",
]
