"""How good features are: linear probes and others on arrays. They are in `extract.analysis.probe`."""

from extract.analysis.probe import PROTOCOLS, LinearProbe, ProbeResult, linear_cka, linear_probe, rsa

__all__ = ["PROTOCOLS", "LinearProbe", "ProbeResult", "linear_cka", "linear_probe", "rsa"]
