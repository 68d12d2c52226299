"""Linear probes and other measures of feature quality, on arrays. Aliases of names in `extract.analysis`."""

from extract.analysis.dense import SEGMENTATION, segmentation_probe
from extract.analysis.probe import PROTOCOLS, LinearProbe, ProbeResult, linear_cka, linear_probe, rsa

__all__ = [
    "PROTOCOLS",
    "SEGMENTATION",
    "LinearProbe",
    "ProbeResult",
    "linear_cka",
    "linear_probe",
    "rsa",
    "segmentation_probe",
]
