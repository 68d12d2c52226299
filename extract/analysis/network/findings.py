"""Findings in the statistics of layers: report the layer at fault, without the consequences in other layers.

A fault in one layer shows in many: channels fed by a dead channel are often dead too, all values after a NaN are NaN,
and no gradient reaches the layers before a saturated layer. `CAUSES` lists the causes, each a function of the recorded
numbers and of the layers that earlier causes explain. The order matters: inputs come first, then what stops or
distorts the signal, then what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable

from extract.analysis.network.gradient_findings import (
    exploding_gradients,
    frozen_layers,
    layers_without_gradient,
    vanishing_gradients,
)
from extract.analysis.network.input_findings import broken_inputs, equal_inputs, input_scale, wrong_labels
from extract.analysis.network.reports import Evidence, Finding
from extract.analysis.network.signal_findings import (
    dead_channels,
    distortions,
    not_finite,
    one_hot_attention,
    saturated_units,
    uniform_attention,
    vanishing_signal,
    zero_weights,
)

__all__ = ["CAUSES", "Finding", "findings_of"]

# Each returns its findings, given the names of the layers that earlier findings explain.
CAUSES: tuple[Callable[[Evidence, set[str]], list[Finding]], ...] = (
    broken_inputs,
    equal_inputs,
    input_scale,
    not_finite,
    distortions,  # explosions, and running statistics that do not fit
    one_hot_attention,
    uniform_attention,
    saturated_units,
    zero_weights,
    dead_channels,
    vanishing_gradients,
    exploding_gradients,
    vanishing_signal,
    frozen_layers,
    layers_without_gradient,
    wrong_labels,
)


def findings_of(evidence: Evidence) -> list[Finding]:
    """Return the problems of a network: grave findings first, each group in the order of `CAUSES`."""
    findings: list[Finding] = []
    explained: set[str] = set()
    for find in CAUSES:
        new = find(evidence, explained)
        explained |= {layer for finding in new for layer in (finding.layer, *finding.layers)}
        findings += new
    return sorted(findings, key=lambda finding: not finding.grave)
