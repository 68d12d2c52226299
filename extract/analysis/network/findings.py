"""Findings in the statistics of layers: report the layer at fault, without the consequences in other layers.

A fault in one layer shows in many: channels fed by a dead channel are often dead too, all values after a NaN are NaN,
and no gradient reaches the layers before a saturated layer. `CAUSES` lists the causes, each a function of the recorded
numbers and of the layers that earlier causes explain. The order matters: inputs come first, then what stops or
distorts the signal, then what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from extract.analysis.network import signal_findings as signal
from extract.analysis.network.reports import Evidence, Finding, ParameterReport, TensorReport

__all__ = ["CAUSES", "Finding", "findings_of"]

# Inputs normalised by mean and standard deviation have negative values, and a root mean square of about 1.
_NORMALISED_RMS = (0.3, 3.0)
_PIXELS = (100.0, 255.5)  # range of the largest value of 8-bit pixels that are not scaled
_GROWTH_BEFORE = 100.0  # of outputs by inputs; that of layers with usual weights is about 1
# Branches may have small gradients by design (LayerScale of ConvNeXt: 1e-10 of the others), so that gradients vanish
# only if those of all earlier tensors are small. Gradients of the first layers are 0.0002 to 8 times those of the last
# (efficientnet_lite0, ConvNeXt, MobileNetV3, ViT, Swin, ResNets).
_VANISHED = 1e-5
_EXPLODED = 1e3


def findings_of(evidence: Evidence) -> list[Finding]:
    """Return the problems of a network: grave findings first, each group in the order of `CAUSES`."""
    findings: list[Finding] = []
    explained: set[str] = set()
    for find in CAUSES:
        new = find(evidence, explained)
        explained |= {layer for finding in new for layer in (finding.layer, *finding.layers)}
        findings += new
    return sorted(findings, key=lambda finding: not finding.grave)


def broken_inputs(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find inputs with values that are not finite."""
    broken = evidence.inputs.broken
    if not broken:
        return []
    first = evidence.name_of(min(broken))
    return [Finding("not finite", "input", f"{len(broken):,} inputs are not finite, first {first}")]


def equal_inputs(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find that all inputs are the same, which explains channels that look dead, and everything behind them."""
    inputs = evidence.inputs
    if not inputs.equal:
        return []
    least = inputs.values.min
    value = f", and all values are {least:.3g}" if least == inputs.values.max else ""
    text = f"all {inputs.count:,} inputs are equal{value}: nothing that depends on the input can be judged"
    return [Finding("equal inputs", "input", text, layers=tuple(tensor.name for tensor in evidence.tensors))]


def input_scale(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find inputs on another scale than in training: pixels of 0 to 255, or of 0 to 1 without normalisation.

    The running statistics of the first batch normalisation say what the inputs were in training. Without a batch
    normalisation, only pixels of 0 to 255 that a convolution gets directly are a finding.
    """
    values, tensors = evidence.inputs.values, evidence.tensors
    if "input" in explained or not tensors or not values.total or len(evidence.inputs.shape) != 3:
        return []
    now = f"the inputs have mean {values.mean:.3g}, standard deviation {values.std:.3g}"
    now = f"{now} and range {values.min:.3g} to {values.max:.3g}"
    affected = tuple(tensor.name for tensor in tensors)
    normalised = values.min < 0 and _NORMALISED_RMS[0] < values.rms < _NORMALISED_RMS[1]
    looks_like = ": they look like pixels that were not normalised" if values.min >= 0 else ""
    if all(tensor.running is None for tensor in tensors):
        pixels = values.min >= 0 and _PIXELS[0] < values.max <= _PIXELS[1]
        text = f"{now}{looks_like}; networks are usually trained on inputs of mean 0 and standard deviation 1"
        are_raw_pixels = pixels and tensors[0].type.startswith("Conv")
        return [Finding("input scale", "input", text, layers=affected)] if are_raw_pixels else []
    misfit = signal.first_misfit(tensors)
    if misfit is None or misfit.variance_is_zero or misfit.position != misfit.first_position or normalised:
        return []
    if any(tensor.norm_ratio > _GROWTH_BEFORE for tensor in tensors[: misfit.position]):
        return []  # a layer before the batch normalisation is at fault
    text = (
        f"{now}{looks_like}; the values at {tensors[misfit.position].name} vary {misfit.ratio_in_words} as in training"
    )
    return [Finding("input scale", "input", text, layers=affected)]


def _with_gradients(evidence: Evidence) -> list[TensorReport]:
    """Return the tensors with gradients; none if activations are not finite or equal for all inputs."""
    broken = any(tensor.activations.nan + tensor.activations.infinite for tensor in evidence.tensors)
    if evidence.inputs.equal or broken:
        return []
    return [tensor for tensor in evidence.tensors if tensor.gradients is not None]


def vanishing_gradients(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find where gradients vanish, or are not finite, on the way from the loss to the first layers.

    A branch may have small gradients by design while the rest of the network has larger gradients. A place counts only
    if the largest gradient of all tensors before it is small.
    """
    reached = _with_gradients(evidence)
    broken = [tensor for tensor in reached if tensor.gradients and tensor.gradients.nan + tensor.gradients.infinite]
    if broken:
        return [Finding("not finite", broken[-1].name, "the gradient of its output has values that are not finite")]
    # With initial running statistics, a batch normalisation does not normalise, as it will in training.
    if not reached or any(tensor.running is not None and tensor.running.initial for tensor in evidence.tensors):
        return []
    norms = np.array([tensor.gradient_norm for tensor in reached])
    if not norms.any():
        zero = Finding("vanishing gradients", reached[-1].name, "all gradients are zero: the loss does not change")
        return [] if zero.layer in explained else [zero]
    largest_before = np.maximum.accumulate(norms)
    small = np.flatnonzero(largest_before < _VANISHED * norms.max())
    if not len(small) or reached[small[-1] + 1].name in explained:
        return []
    tensor, before = reached[small[-1] + 1], reached[: small[-1] + 1]
    text = (
        f"gradients vanish: their norm is {tensor.gradient_norm:.1e} at its output, and at most "
        f"{largest_before[small[-1]]:.1e} in the {len(before):,} layers before it"
    )
    return [Finding("vanishing gradients", tensor.name, text, layers=tuple(other.name for other in reversed(before)))]


def exploding_gradients(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find where gradients grow on the way from the loss to the first layers."""
    reached = _with_gradients(evidence)
    norms = np.array([tensor.gradient_norm for tensor in reached])
    if not np.isfinite(norms).all() or not norms.any():
        return []
    end = float(norms[-1]) or float(norms[np.flatnonzero(norms)[-1]])
    large = np.flatnonzero(norms > _EXPLODED * end)
    if not len(large) or large[-1] + 1 >= len(reached):
        return []
    tensor, before = reached[large[-1] + 1], reached[large[-1]]
    if tensor.name in explained:
        return []
    text = (
        f"gradients explode: their norm is {tensor.gradient_norm:.1e} at its output, {before.gradient_norm:.1e} "
        f"before it, and {norms.max():.1e} at most"
    )
    names = tuple(reached[position].name for position in reversed(large))
    return [Finding("exploding gradients", tensor.name, text, layers=names)]


def frozen_layers(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find parameters that do not require gradients while others do."""
    frozen = [parameter for parameter in evidence.parameters if not parameter.trainable]
    if not frozen or len(frozen) == len(evidence.parameters):
        return []
    names, verb = _parameters_of_first(frozen)
    return _by_layer("frozen", frozen, f"frozen: {names} do{verb} not require gradients")


def layers_without_gradient(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find parameters that the loss does not depend on."""
    unused = [parameter for parameter in evidence.parameters if parameter.trainable and not parameter.reached]
    if not unused:
        return []
    if unused[0].layer in evidence.never_ran:
        return _by_layer("no gradient", unused, "the layer never runs, so it gets no gradient")
    names, verb = _parameters_of_first(unused)
    has, it = ("has", "it") if verb else ("have", "them")
    text = f"{names} {has} no gradient: in eval mode, the loss does not depend on {it}"
    return _by_layer("no gradient", unused, text)


def _parameters_of_first(parameters: Sequence[ParameterReport]) -> tuple[str, str]:
    """Return the names of the parameters of the first layer, and the ending of a verb for them."""
    names = [parameter.name.rpartition(".")[2] for parameter in parameters if parameter.layer == parameters[0].layer]
    return " and ".join(names), "es" if len(names) == 1 else ""


def _by_layer(kind: str, parameters: Sequence[ParameterReport], text: str) -> list[Finding]:
    first, *others = dict.fromkeys(parameter.layer for parameter in parameters)
    also = f"; the same in {len(others):,} other layers" if others else ""
    return [Finding(kind, first, text + also, grave=False, layers=tuple(others))]


# Each returns its findings, given the names of the layers that earlier findings explain. Without causes, 31 ReLUs with
# the default initialisation gave 37 findings. `python -m tests.extract.analysis.network.planted_faults` plants 63
# faults, fixed beforehand, and inspects 16 healthy networks: all 63 are named first at their layer, and none is false.
CAUSES: tuple[Callable[[Evidence, set[str]], list[Finding]], ...] = (
    broken_inputs,
    equal_inputs,
    input_scale,
    signal.not_finite,
    signal.distortions,  # explosions, and running statistics that do not fit
    signal.one_hot_attention,
    signal.uniform_attention,
    signal.saturated_units,
    signal.zero_weights,
    signal.dead_channels,
    vanishing_gradients,
    exploding_gradients,
    signal.vanishing_signal,
    frozen_layers,
    layers_without_gradient,
)
