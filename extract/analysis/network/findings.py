"""What statistics of layers say in words: which layer is at fault, and nothing that only follows from it.

A fault in one layer shows in many: what a dead channel feeds is often dead too, after a NaN all is NaN, below a
saturated layer no gradient arrives. Layers are looked at in the order of computing, and what an earlier finding
explains is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from extract.analysis.network.reports import ParameterReport, TensorReport

__all__ = ["Finding", "findings_of"]

# A channel that gives the least value of all may be one that few images excite; so many must have been seen.
_IMAGES_AT_THE_END = 100
_VALUES_FOR_CONSTANT = 20  # of any other constant, a few say enough
# A normalisation makes rounding errors large: a channel that was constant is not quite, until the next activation.
_NEARLY_CONSTANT = 1e-3
_GRAVE_PART = 0.5  # of the channels of a layer
_SATURATED_VALUES, _SATURATED_UNITS = 0.95, 0.5
# Norms grow by 5 in a layer of trained networks, by 30 in normalisations, and by 400 in gates whose input is nearly
# zero (efficientnet_lite0, ConvNeXt, MobileNetV3), but then they do not stand out from the others.
_GROWTH, _ABOVE_OTHERS = 100.0, 100.0
# Gradients of the first layers are 0.0002 to 8 times those of the last ones (the same networks, ViT, Swin, ResNets).
_VANISHED, _EXPLODED = 1e-5, 1e3


@dataclass(frozen=True)
class Finding:
    """One thing to look at.

    Attributes:
        kind: "not finite", "dead", "saturated", "exploding", "vanishing gradients", "exploding gradients", "zero
            weight", "frozen" or "no gradient".
        layer: where it begins.
        text: what is the matter there.
        grave: whether the network hardly works so; else it is good to know.
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
    """What is wrong, the grave things first, each in the order of computing.

    Args:
        tensors: in the order in which they were computed.
        parameters: with their gradients, where there was a loss.
        broken_inputs: positions of images that were given with values that are not finite.
        name_of: what the image at a position is called.
    """
    found = [*_not_finite(tensors, broken_inputs, name_of), *_exploding(tensors)]
    found += _saturated(tensors, exploded=bool(found))
    found += [
        Finding("zero weight", one.name, "its weight is zero: nothing passes, as before some trainings", grave=False)
        for one in tensors
        if one.zero_weight
    ]
    known = {finding.layer for finding in found}
    found += [finding for finding in _dead(tensors) if finding.layer not in known]
    known |= {finding.layer for finding in found}
    if found:  # what is fed with the result of an explosion is saturated, and gradients end there
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
        found.append(Finding("not finite", "input", f"{len(explained):,} inputs are not finite, the first {first}"))
    for one in tensors:
        new = [image for image in one.activations.not_finite_images if image not in explained]
        if new:
            numbers = one.activations
            kinds = ([f"{numbers.nan:,} NaN"] if numbers.nan else []) + (
                [f"{numbers.infinite:,} infinite"] if numbers.infinite else []
            )
            where = f"the first in {name_of(new[0])}" if one.by_image else f"the first in batch {new[0]}"
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
            text = f"what it gives is {one.norm_ratio:,.0f} times as large as what it is given"
            found.append(Finding("exploding", one.name, f"{text} (root mean square {one.activations.rms:.3g})"))
    return found


def _usual(tensors: Sequence[TensorReport]) -> float:
    """Root mean square of an ordinary activation of this network."""
    sizes = [one.activations.rms for one in tensors if one.activations.total]
    return float(np.median(sizes)) if sizes else math.nan


def _saturated(tensors: Sequence[TensorReport], *, exploded: bool) -> list[Finding]:
    found, usual = [], _usual(tensors)
    for one in tensors:
        # One unit may be a switch, and the last layer an answer: both may well be sure of themselves.
        if one.activations.channels < 2 or one is tensors[-1]:
            continue
        if not one.bounded or (exploded and one.input_rms > _ABOVE_OTHERS * usual):
            continue
        part = float((one.activations.saturated >= _SATURATED_VALUES).mean())
        if part >= _SATURATED_UNITS:
            n = round(part * one.activations.channels)
            text = f"{n:,} of {one.activations.channels:,} units saturated: their values hardly leave the bounds"
            found.append(Finding("saturated", one.name, text))
    return found


def _dead(tensors: Sequence[TensorReport]) -> list[Finding]:
    found: list[Finding] = []
    before: dict[int, set[int]] = {}  # number of channels -> those that were nearly constant in the last such tensor
    before_whole = False  # whether the tensor before was wholly dead: it is no wonder then
    for one in tensors:
        numbers = one.activations
        if not one.by_image or numbers.channels < 2:
            continue
        zero = (numbers.low == 0) & (numbers.high == 0)
        # A channel at the end of the range of all may be one that few images move, as behind a ReLU.
        at_the_end = ((numbers.low == numbers.min) & (numbers.high == numbers.min)) | (
            (numbers.low == numbers.max) & (numbers.high == numbers.max)
        )
        enough = (numbers.count >= _VALUES_FOR_CONSTANT) & (~at_the_end | (numbers.images >= _IMAGES_AT_THE_END))
        dead = {channel for channel in numbers.dead.tolist() if enough[channel]}
        new = dead - before.get(numbers.channels, set())
        whole = len(dead) == numbers.channels
        # A value at its bounds is called saturated.
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
    """Where gradients, on their way from the loss to the first layers, are lost or grow.

    A branch may have small gradients by design, and the rest of the network none the less. So a place counts only where
    the largest gradient of all tensors before it is small.
    """
    came = [one for one in tensors if one.gradients is not None]
    broken = [one for one in came if one.gradients is not None and one.gradients.nan + one.gradients.infinite]
    if broken:
        if any(one.activations.nan + one.activations.infinite for one in tensors):
            return []
        last = broken[-1]
        return [Finding("not finite", last.name, "the gradient it gets has values that are not finite")]
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
            f"{largest_before[small[-1]]:.1e} in the {small[-1] + 1:,} tensors before"
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
    """Layers that do not learn while others do."""
    found = []
    frozen = [one for one in parameters if not one.trainable]
    if len(frozen) < len(parameters):
        for layer in dict.fromkeys(one.layer for one in frozen):
            names = [one.name.rpartition(".")[2] for one in frozen if one.layer == layer]
            text = f"frozen: {' and '.join(names)} take{'s' if len(names) == 1 else ''} no gradients"
            found.append(Finding("frozen", layer, text, grave=False))
    for one in parameters:
        if one.trainable and not one.reached:
            text = f"{one.name.rpartition('.')[2]} gets no gradient: in eval mode, the loss does not depend on it"
            found.append(Finding("no gradient", one.layer, text, grave=False))
    return found
