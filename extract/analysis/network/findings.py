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
    found = [*_not_finite(tensors, broken_inputs, name_of), *_exploding(tensors)]
    found += _saturated(tensors, exploded=bool(found))
    found += [
        Finding("zero weight", tensor.name, "its weight is zero, as before some trainings; no signal passes", grave=False)
        for tensor in tensors
        if tensor.zero_weight
    ]
    known = {finding.layer for finding in found}
    found += [finding for finding in _dead(tensors) if finding.layer not in known]
    known |= {finding.layer for finding in found}
    if found:  # layers that get the result of an explosion saturate, and gradients vanish there
        known |= {one.name for one in tensors if one.input_rms > _ABOVE_OTHERS * _usual(tensors)}
    found += [finding for finding in _gradients(tensors) if finding.layer not in known]
    found += _parameters(parameters)
    return sorted(found, key=lambda finding: not finding.grave)


def _not_finite(
    tensors: Sequence[TensorReport], broken_inputs: Sequence[int], name_of: Callable[[int], str]
) -> list[Finding]:
    found: list[Finding] = []
    explained = set(broken_inputs)
    if explained:
        first = name_of(min(explained))
        found.append(Finding("not finite", "input", f"{len(explained):,} inputs are not finite, first {first}"))
    for one in tensors:
        new = [image for image in one.activations.not_finite_images if image not in explained]
        if new:
            numbers = one.activations
            kinds = ([f"{numbers.nan:,} NaN"] if numbers.nan else []) + (
                [f"{numbers.infinite:,} infinite"] if numbers.infinite else []
            )
            where = f"first in {name_of(new[0])}" if one.by_image else f"first in batch {new[0]}"
            found.append(Finding("not finite", one.name, f"{' and '.join(kinds)} values, {where}"))
        explained.update(one.activations.not_finite_images)
    return found


def _exploding(tensors: Sequence[TensorReport]) -> list[Finding]:
    usual = _usual(tensors)
    found: list[Finding] = []
    for one in tensors:
        inside = [finding for finding in found if finding.layer.startswith(f"{one.layer}.")]
        if one.bounded:
            continue
        if one.norm_ratio > _GROWTH and one.activations.rms > _ABOVE_OTHERS * usual and not inside:
            text = f"its output is {one.norm_ratio:,.0f} times as large as its input"
            found.append(Finding("exploding", one.name, f"{text} (root mean square {one.activations.rms:.3g})"))
    return found


def _usual(tensors: Sequence[TensorReport]) -> float:
    """Return the median over tensors of the activations' root mean square."""
    sizes = [one.activations.rms for one in tensors if one.activations.total]
    return float(np.median(sizes)) if sizes else math.nan


def _saturated(tensors: Sequence[TensorReport], *, exploded: bool) -> list[Finding]:
    found, usual = [], _usual(tensors)
    for one in tensors:
        # A single unit may be a switch, and the last layer a prediction: both may be saturated by design.
        if one.activations.channels < 2 or one is tensors[-1]:
            continue
        if not one.bounded or (exploded and one.input_rms > _ABOVE_OTHERS * usual):
            continue
        part = float((one.activations.saturated >= _SATURATED_VALUES).mean())
        if part >= _SATURATED_UNITS:
            n = round(part * one.activations.channels)
            text = f"{n:,} of {one.activations.channels:,} units are saturated: their values stay near the bounds"
            found.append(Finding("saturated", one.name, text))
    return found


def _dead(tensors: Sequence[TensorReport]) -> list[Finding]:
    found: list[Finding] = []
    before: dict[int, set[int]] = {}  # number of channels -> channels nearly constant in the last tensor of that width
    before_whole = False  # whether the previous tensor was entirely dead, which explains this one
    for one in tensors:
        numbers = one.activations
        if not one.by_image or numbers.channels < 2:
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
        if new and not (whole and before_whole) and not one.bounded:
            first = sorted(new)
            names = ", ".join(map(str, first[:5])) + (", ..." if len(first) > 5 else "")
            what = "zero" if zero[first].all() else "constant"
            text = f"{len(new):,} of {numbers.channels:,} channels {what} on all {numbers.images:,} images ({names})"
            found.append(Finding("dead", one.name, text, grave=len(dead) >= _GRAVE_PART * numbers.channels))
        before[numbers.channels] = set(numbers.constant(_NEARLY_CONSTANT).tolist())
        before_whole = whole
    return found


def _gradients(tensors: Sequence[TensorReport]) -> list[Finding]:
    """Find where gradients vanish or explode on the way from the loss to the first layers.

    A branch may have small gradients by design while the rest of the network has larger gradients. A place counts only
    if the largest gradient of all tensors before it is small.
    """
    came = [one for one in tensors if one.gradients is not None]
    broken = [one for one in came if one.gradients is not None and one.gradients.nan + one.gradients.infinite]
    if broken:
        if any(one.activations.nan + one.activations.infinite for one in tensors):
            return []
        last = broken[-1]
        return [Finding("not finite", last.name, "the gradient of its output has values that are not finite")]
    norms = np.array([one.gradient_norm for one in came])
    if not len(norms):
        return []
    if not norms.any():
        return [Finding("vanishing gradients", came[-1].name, "all gradients are zero: the loss does not change")]
    largest_before = np.maximum.accumulate(norms)
    end = float(norms[-1]) or float(norms[np.flatnonzero(norms)[-1]])
    small, large = np.flatnonzero(largest_before < _VANISHED * norms.max()), np.flatnonzero(norms > _EXPLODED * end)
    found = []
    if len(small):
        at = came[small[-1] + 1]
        text = (
            f"gradients vanish: their norm is {at.gradient_norm:.1e} at its output, and at most "
            f"{largest_before[small[-1]]:.1e} in the {small[-1] + 1:,} tensors before it"
        )
        found.append(Finding("vanishing gradients", at.name, text))
    if len(large) and large[-1] + 1 < len(came):
        at, one = came[large[-1] + 1], came[large[-1]]
        text = (
            f"gradients explode: their norm is {at.gradient_norm:.1e} at its output, {one.gradient_norm:.1e} before "
            f"it, and {norms.max():.1e} at most"
        )
        found.append(Finding("exploding gradients", at.name, text))
    return found


def _parameters(parameters: Sequence[ParameterReport]) -> list[Finding]:
    """Find layers that do not learn while others do."""
    found = []
    frozen = [one for one in parameters if not one.trainable]
    if len(frozen) < len(parameters):
        for layer in dict.fromkeys(one.layer for one in frozen):
            names = [one.name.rpartition(".")[2] for one in frozen if one.layer == layer]
            text = f"frozen: {' and '.join(names)} do{'es' if len(names) == 1 else ''} not require gradients"
            found.append(Finding("frozen", layer, text, grave=False))
    for one in parameters:
        if one.trainable and not one.reached:
            text = f"{one.name.rpartition('.')[2]} has no gradient: in eval mode, the loss does not depend on it"
            found.append(Finding("no gradient", one.layer, text, grave=False))
    return found
