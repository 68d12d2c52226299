"""Evaluation of features in arrays by linear and other probes, following protocols of the literature.

result = linear_probe(x_train, y_train, x_test, y_test, protocol="clip")
result.metrics["top1"].value
result.model.predict(x_new)
"""

from extract.analysis.probe.model import LinearProbe
from extract.analysis.probe.probing import ProbeResult, linear_probe
from extract.analysis.probe.protocols import PROTOCOLS

__all__ = ["PROTOCOLS", "LinearProbe", "ProbeResult", "linear_probe"]
