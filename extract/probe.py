"""Linear probes and other measures of feature quality, on arrays. Aliases of names in `extract.analysis`."""

from extract.analysis.dense import DEPTH, SEGMENTATION, depth_probe, segmentation_probe
from extract.analysis.probe import PROTOCOLS, LinearProbe, ProbeResult, linear_probe
from extract.analysis.similarity import (
    MOST_COLUMNS,
    Alikeness,
    FeatureSimilarity,
    alikeness,
    feature_similarity,
    linear_cka,
    rsa,
)

__all__ = [
    "DEPTH", "MOST_COLUMNS", "PROTOCOLS", "SEGMENTATION", "Alikeness", "FeatureSimilarity", "LinearProbe",
    "ProbeResult", "alikeness", "depth_probe", "feature_similarity", "linear_cka", "linear_probe", "rsa",
    "segmentation_probe",
]  # fmt: skip
