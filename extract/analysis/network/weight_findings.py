"""Findings in weights alone: those that are zero, have few values, or have the same filter again and again."""

from __future__ import annotations

import numpy as np

from extract.analysis.network.reports import Evidence, Finding, WeightReport

__all__ = ["equal_filters", "faint_normalisations", "few_values", "zero_parameters"]

_FILTERS = 8  # fewer equal filters may be equal by design
_VALUES = 256  # weights of fewer values may have few different ones
_FEW = 16  # values of 4 bits
# Outputs of normalisations are 0.1 to 10 times as large as those of others (ResNets, ViT, efficientnet_lite0).
_FAINT = 1e-3
_NORMALISATIONS = 3  # needed to know the usual size


def zero_parameters(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find parameters other than weights and biases, such as position embeddings, that are zero."""
    zero = [weight.name for weight in evidence.weights if weight.zero and not weight.is_of_layer]
    if not zero:
        return []
    text = "this parameter is zero; usual before training"
    return [Finding("zero weight", zero[0], text, grave=False, layers=tuple(zero[1:]))]


def few_values(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find weights with a few different values, as after quantization to few bits."""
    few = [
        w for w in evidence.weights
        if w.filters and w.size >= _VALUES and 1 < w.values <= _FEW and not _repeats(w) and w.layer not in explained
    ]  # fmt: skip
    if not few:
        return []
    names = [weight.layer or weight.name for weight in few]
    text = f"its weight has {few[0].values} different values, as after quantization to few bits"
    return [Finding("few values", names[0], text, grave=False, layers=tuple(names[1:]))]


def equal_filters(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find layers whose filters are mostly the same one."""
    return [
        Finding("equal filters", w.layer, f"{w.equal_filters:,} of {w.filters:,} filters are equal")
        for w in evidence.weights
        if w.is_of_layer and _repeats(w) and not w.zero and w.values > 1 and w.layer not in explained
    ]


def _repeats(weight: WeightReport) -> bool:
    """Return whether rows are mostly the same one, as those of some parameters other than weights at first (Mamba)."""
    return weight.equal_filters >= max(_FILTERS, weight.filters / 2)


def faint_normalisations(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find normalisations whose output is far smaller than that of others, as at the end of a branch that adds nothing.

    That of a weight that is zero is a finding of its own.
    """
    normalising = [tensor for tensor in evidence.tensors if tensor.leaf and "Norm" in tensor.type]
    if len(normalising) < _NORMALISATIONS or evidence.untrained:
        return []
    usual = float(np.median([tensor.activations.rms for tensor in normalising]))
    faint = [
        tensor for tensor in normalising
        if tensor.activations.rms < _FAINT * usual and not tensor.zero_weight and tensor.name not in explained
    ]  # fmt: skip
    if not faint:
        return []
    part, others = faint[0].activations.rms / usual, tuple(tensor.name for tensor in faint[1:])
    text = f"its output is {part:.1g} times as large as that of other normalisations: a sum with others hides it"
    return [Finding("faint", faint[0].name, text, grave=False, layers=others)]
