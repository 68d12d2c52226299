"""Findings in the statistics of layers: report the layer at fault, without the consequences in other layers.

A fault in one layer shows in many: channels fed by a dead channel are often dead too, all values after a NaN are NaN,
and no gradient reaches the layers before a saturated layer. Layers are checked in the order of computation, and faults
that an earlier finding explains are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from extract.analysis.network.reports import ParameterReport, TensorReport

__all__ = ["Finding", "findings_of"]

# Images needed to call a channel dead if its constant value is an end of the layer's range: few images may activate it.
_IMAGES_AT_THE_END = 100
_VALUES_FOR_CONSTANT = 20  # values needed to call any other constant channel dead
# Normalisation amplifies rounding errors: a constant channel varies slightly up to the next activation function.
_NEARLY_CONSTANT = 1e-3
_GRAVE_PART = 0.5  # of the channels of a layer
_SATURATED_VALUES, _SATURATED_UNITS = 0.95, 0.5
# In trained networks (efficientnet_lite0, ConvNeXt, MobileNetV3), norms grow by a factor of 5 in a layer, 30 in a
# normalisation, and 400 in a gate whose input is nearly zero; the gate's result does not exceed other activations.
_GROWTH, _ABOVE_OTHERS = 100.0, 100.0
# Gradients of the first layers are 0.0002 to 8 times those of the last (the same networks, ViT, Swin, ResNets).
_VANISHED, _EXPLODED = 1e-5, 1e3


@dataclass(frozen=True)
class Finding:
    """A problem in one layer.

    Attributes:
        kind: "not finite", "dead", "saturated", "exploding", "vanishing gradients", "exploding gradients", "zero
            weight", "frozen" or "no gradient".
        layer: layer where the problem starts.
        text: description of the problem.
        grave: whether the network is unlikely to work; otherwise the finding is for information.
    """

    kind: str
    layer: str
    text: str
    grave: bool = True

    def __str__(self) -> str:
        return f"{self.layer}: {self.text}"


def findings_of(
    tensors: Sequence[TensorReport],
    parameters: Sequence[ParameterReport] = (),
    broken_inputs: Sequence[int] = (),
    name_of: Callable[[int], str] = lambda position: f"image {position}",
) -> list[Finding]:
    """Return the problems of a network: grave findings first, then by kind, each kind in the order of computation.

    Args:
        tensors: in the order of computation.
        parameters: parameters with their gradients, if there was a loss.
        broken_inputs: positions of input images with values that are not finite.
        name_of: function that returns the name of the image at a position.
    """
    findings = [*_not_finite(tensors, broken_inputs, name_of), *_exploding(tensors)]
    findings += _saturated(tensors, exploded=bool(findings))
    findings += [
        Finding("zero weight", tensor.name, "its weight is zero: no signal passes; usual before training", grave=False)
        for tensor in tensors
        if tensor.zero_weight
    ]
    known = {finding.layer for finding in findings}
    findings += [finding for finding in _dead(tensors) if finding.layer not in known]
    known |= {finding.layer for finding in findings}
    if findings:  # layers that get the result of an explosion saturate, and gradients vanish there
        known |= {tensor.name for tensor in tensors if tensor.input_rms > _ABOVE_OTHERS * _usual(tensors)}
    findings += [finding for finding in _gradients(tensors) if finding.layer not in known]
    findings += _parameters(parameters)
    return sorted(findings, key=lambda finding: not finding.grave)


def _not_finite(
    tensors: Sequence[TensorReport], broken_inputs: Sequence[int], name_of: Callable[[int], str]
) -> list[Finding]:
    findings: list[Finding] = []
    explained = set(broken_inputs)
    if explained:
        first = name_of(min(explained))
        findings.append(Finding("not finite", "input", f"{len(explained):,} inputs are not finite, first {first}"))
    for tensor in tensors:
        new = [image for image in tensor.activations.not_finite_images if image not in explained]
        if new:
            activations = tensor.activations
            kinds = ([f"{activations.nan:,} NaN"] if activations.nan else []) + (
                [f"{activations.infinite:,} infinite"] if activations.infinite else []
            )
            location = f"first in {name_of(new[0])}" if tensor.by_image else f"first in batch {new[0]}"
            findings.append(Finding("not finite", tensor.name, f"{' and '.join(kinds)} values, {location}"))
        explained.update(tensor.activations.not_finite_images)
    return findings


def _exploding(tensors: Sequence[TensorReport]) -> list[Finding]:
    usual = _usual(tensors)
    findings: list[Finding] = []
    for tensor in tensors:
        inside = [finding for finding in findings if finding.layer.startswith(f"{tensor.layer}.")]
        if tensor.bounded:
            continue
        if tensor.norm_ratio > _GROWTH and tensor.activations.rms > _ABOVE_OTHERS * usual and not inside:
            text = f"its output is {tensor.norm_ratio:,.0f} times as large as its input"
            text = f"{text} (root mean square {tensor.activations.rms:.3g})"
            findings.append(Finding("exploding", tensor.name, text))
    return findings


def _usual(tensors: Sequence[TensorReport]) -> float:
    """Return the median over tensors of the activations' root mean square."""
    sizes = [tensor.activations.rms for tensor in tensors if tensor.activations.total]
    return float(np.median(sizes)) if sizes else math.nan


def _saturated(tensors: Sequence[TensorReport], *, exploded: bool) -> list[Finding]:
    findings, usual = [], _usual(tensors)
    for tensor in tensors:
        # A single unit may be a switch, and the last layer a prediction: both may be saturated by design.
        if tensor.activations.channels < 2 or tensor is tensors[-1]:
            continue
        if not tensor.bounded or (exploded and tensor.input_rms > _ABOVE_OTHERS * usual):
            continue
        part = float((tensor.activations.saturated >= _SATURATED_VALUES).mean())
        if part >= _SATURATED_UNITS:
            n = round(part * tensor.activations.channels)
            text = f"{n:,} of {tensor.activations.channels:,} units are saturated: their values stay near the bounds"
            findings.append(Finding("saturated", tensor.name, text))
    return findings


def _dead(tensors: Sequence[TensorReport]) -> list[Finding]:
    findings: list[Finding] = []
    before: dict[int, set[int]] = {}  # number of channels -> channels nearly constant in the last tensor of that width
    before_whole = False  # whether the previous tensor was entirely dead, which explains this one
    for tensor in tensors:
        numbers = tensor.activations
        if not tensor.by_image or numbers.channels < 2:
            continue
        zero = (numbers.low == 0) & (numbers.high == 0)
        # A constant channel at an end of the layer's range may be one that few images activate, as after a ReLU.
        at_the_end = ((numbers.low == numbers.min) & (numbers.high == numbers.min)) | (
            (numbers.low == numbers.max) & (numbers.high == numbers.max)
        )
        enough = (numbers.count >= _VALUES_FOR_CONSTANT) & (~at_the_end | (numbers.images >= _IMAGES_AT_THE_END))
        dead = {channel for channel in numbers.dead.tolist() if enough[channel]}
        new = dead - before.get(numbers.channels, set())
        whole = len(dead) == numbers.channels
        # Values at the bounds of a function are reported as saturated.
        if new and not (whole and before_whole) and not tensor.bounded:
            first = sorted(new)
            names = ", ".join(map(str, first[:5])) + (", ..." if len(first) > 5 else "")
            value = "are zero" if zero[first].all() else "are constant"
            text = f"{len(new):,} of {numbers.channels:,} channels {value} on all {numbers.images:,} images ({names})"
            findings.append(Finding("dead", tensor.name, text, grave=len(dead) >= _GRAVE_PART * numbers.channels))
        before[numbers.channels] = set(numbers.constant(_NEARLY_CONSTANT).tolist())
        before_whole = whole
    return findings


def _gradients(tensors: Sequence[TensorReport]) -> list[Finding]:
    """Find where gradients vanish or explode on the way from the loss to the first layers.

    A branch may have small gradients by design while the rest of the network has larger gradients. A place counts only
    if the largest gradient of all tensors before it is small.
    """
    reached = [tensor for tensor in tensors if tensor.gradients is not None]
    broken = [
        tensor
        for tensor in reached
        if tensor.gradients is not None and tensor.gradients.nan + tensor.gradients.infinite
    ]
    if broken:
        if any(tensor.activations.nan + tensor.activations.infinite for tensor in tensors):
            return []
        last = broken[-1]
        return [Finding("not finite", last.name, "the gradient of its output has values that are not finite")]
    norms = np.array([tensor.gradient_norm for tensor in reached])
    if not len(norms):
        return []
    if not norms.any():
        return [Finding("vanishing gradients", reached[-1].name, "all gradients are zero: the loss does not change")]
    largest_before = np.maximum.accumulate(norms)
    end = float(norms[-1]) or float(norms[np.flatnonzero(norms)[-1]])
    small, large = np.flatnonzero(largest_before < _VANISHED * norms.max()), np.flatnonzero(norms > _EXPLODED * end)
    findings = []
    if len(small):
        tensor = reached[small[-1] + 1]
        text = (
            f"gradients vanish: their norm is {tensor.gradient_norm:.1e} at its output, and at most "
            f"{largest_before[small[-1]]:.1e} in the {small[-1] + 1:,} tensors before it"
        )
        findings.append(Finding("vanishing gradients", tensor.name, text))
    if len(large) and large[-1] + 1 < len(reached):
        tensor, before = reached[large[-1] + 1], reached[large[-1]]
        text = (
            f"gradients explode: their norm is {tensor.gradient_norm:.1e} at its output, {before.gradient_norm:.1e} "
            f"before it, and {norms.max():.1e} at most"
        )
        findings.append(Finding("exploding gradients", tensor.name, text))
    return findings


def _parameters(parameters: Sequence[ParameterReport]) -> list[Finding]:
    """Find layers that do not learn while others do."""
    findings = []
    frozen = [parameter for parameter in parameters if not parameter.trainable]
    if len(frozen) < len(parameters):
        for layer in dict.fromkeys(parameter.layer for parameter in frozen):
            names = [parameter.name.rpartition(".")[2] for parameter in frozen if parameter.layer == layer]
            text = f"frozen: {' and '.join(names)} do{'es' if len(names) == 1 else ''} not require gradients"
            findings.append(Finding("frozen", layer, text, grave=False))
    for parameter in parameters:
        if parameter.trainable and not parameter.reached:
            text = f"{parameter.name.rpartition('.')[2]} has no gradient: in eval mode, the loss does not depend on it"
            findings.append(Finding("no gradient", parameter.layer, text, grave=False))
    return findings
