"""Linear probes and other measures of feature quality, on arrays. Aliases of names in `extract.analysis`."""

from extract.analysis.dense import DEPTH, SEGMENTATION, depth_probe, segmentation_probe
from extract.analysis.encoding.encoding import FITS, STRENGTHS, Encoding, LayerScores, encoding
from extract.analysis.probe import PROTOCOLS, LinearProbe, ProbeResult, linear_probe
from extract.analysis.rsa import RdmComparison, compare_rdms, odd_one_out
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
    "DEPTH", "FITS", "MOST_COLUMNS", "PROTOCOLS", "SEGMENTATION", "STRENGTHS", "Alikeness", "Encoding",
    "FeatureSimilarity", "LayerScores", "LinearProbe", "ProbeResult", "RdmComparison", "alikeness", "compare_rdms",
    "depth_probe", "encoding", "feature_similarity", "linear_cka", "linear_probe", "odd_one_out", "rsa",
    "segmentation_probe",
]  # fmt: skip
