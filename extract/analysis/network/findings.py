"""Findings in the reports of an inspection: the layers at fault, without the consequences.

A fault in one layer shows in many: channels fed by a dead channel are often dead too, all values after a NaN are NaN,
and no gradient reaches the layers before a saturated layer. `CAUSES` lists the causes, each a function of the recorded
numbers and of the layers that earlier causes explain. The order matters: inputs come first, then what stops or
distorts the signal, then what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from extract.analysis.network import loss_findings as losses
from extract.analysis.network import weight_findings as weights
from extract.analysis.network.reports import Evidence, Finding, ParameterReport, TensorReport

__all__ = ["CAUSES", "findings_of", "first_misfit"]

# Inputs normalised by mean and standard deviation have negative values, and a root mean square of about 1.
_NORMALISED_RMS = (0.3, 3.0)
_PIXELS = (100.0, 255.5)  # range of the largest value of 8-bit pixels that are not scaled
_CENTRED_PIXELS = 20.0  # less than the root mean square of 8-bit pixels after their mean was subtracted
_ONE = (0.75, 1.33)  # standard deviation of normalised inputs
_GROWTH_BEFORE = 100.0  # of outputs by inputs; that of layers with usual weights is about 1
# Branches may have small gradients by design (LayerScale of ConvNeXt: 1e-10 of the others), so that gradients vanish
# only if those of all earlier tensors are small. Gradients of the first layers are 0.0002 to 8 times those of the last
# (efficientnet_lite0, ConvNeXt, MobileNetV3, ViT, Swin, ResNets).
_VANISHED = 1e-5
_EXPLODED = 1e3
# Images needed to call a channel dead if its constant value is an end of the layer's range: few images may activate it.
_IMAGES_AT_THE_END = 100
_VALUES_FOR_CONSTANT = 20  # values needed to call any other constant channel dead
# Normalisation amplifies rounding errors: a constant channel varies slightly up to the next activation function.
_NEARLY_CONSTANT = 1e-3
_GRAVE_PART = 0.5  # of the channels of a layer
_LISTED_SEPARATELY = 3  # layers with dead channels; more are one finding
_SATURATED_VALUES = 0.95
_SATURATED_UNITS = 0.5
# In trained networks (efficientnet_lite0, ConvNeXt, MobileNetV3), norms grow by a factor of 5 in a layer, 30 in a
# normalisation, and 400 in a gate whose input is nearly zero; the gate's result does not exceed other activations.
_GROWTH = 100.0
_ABOVE_OTHERS = 100.0
# Standard deviation of the inputs of a batch normalisation, in those of training: 0.7 to 1.3 on images like those of
# training (0.90 to 1.12 in the bundled backbone). At the first one, pixels of 0 to 1 without normalisation give 0.31,
# and pixels of 0 to 255 give 78 to 125. Later ones also depend on what is seen.
_FIRST_MISFIT = 3.0
_LATER_MISFIT = 10.0
# A standard deviation that is wrong by nearly the same factor in all channels comes from a scale, not from other
# images: on images like those of training, the standard deviation of the logarithm is 0.03 to 0.09, on others 0.1 to 1.
_SPREAD = 0.08
_FACTOR = 1.6
_CHANNELS_FOR_UNIFORM = 8  # few channels may agree by chance, and a single one always does
_FITS = 1.25  # of all batch normalisations before it
_SHIFT = 2.0  # distance of their mean to the running mean, in running standard deviations
_IMAGES_FOR_MISFIT = 20  # the values of few images vary less
_LAYERS_BACK = 8  # where the input of a layer is looked for
_SAME_SIZE = 2e-3  # relative; sizes of inputs are summed in float32
# Attention of trained networks: single heads attend to one token, such as the class token, but never all of them.
_ONE_HOT_QUERIES = 0.9
# At the smallest usual initialisation (standard deviation 0.02, 48 channels), weights deviate by 2 % from uniform ones.
_UNIFORM = 1e-3
# Below 100 units in the last place of float32 (6e-8), differences between inputs are rounding errors.
_LOST = 1e-5


def _names(tensors: Iterable[TensorReport]) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in tensors)


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
    return [Finding("equal inputs", "input", text, layers=_names(evidence.tensors))]


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
    looks_like = ": they look like pixels that were not normalised" if values.min >= 0 else ""
    if all(tensor.running is None for tensor in tensors):
        pixels = values.min >= 0 and _PIXELS[0] < values.max <= _PIXELS[1]
        centred = values.rms > _CENTRED_PIXELS and -_PIXELS[1] <= values.min and values.max <= _PIXELS[1]
        too_large = values.min < 0 and values.rms > _NORMALISED_RMS[1] and not centred
        is_found = tensors[0].type.startswith("Conv") and (pixels or too_large)
        usual = "networks are usually trained on inputs of mean 0 and standard deviation 1"
    else:
        misfit = first_misfit(tensors)
        # `distortions` names the mean of one that varies as in training.
        if misfit is None or misfit.variance_is_zero or not misfit.is_first or not misfit.varies_otherwise:
            return []
        normalised = values.min < 0 and _NORMALISED_RMS[0] < values.rms < _NORMALISED_RMS[1]
        scaled = misfit.uniform and _ONE[0] < values.std / misfit.ratio < _ONE[1] and not _ONE[0] < values.std < _ONE[1]
        grown_before = any(tensor.norm_ratio > _GROWTH_BEFORE for tensor in tensors[: misfit.position])
        is_found = (scaled or not normalised) and not grown_before
        usual = f"the values at {tensors[misfit.position].name} vary {misfit.ratio:,.3g} times as much as in training"
    return [Finding("input scale", "input", f"{now}{looks_like}; {usual}", layers=_names(tensors))] if is_found else []


def wrong_modes(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find layers in training mode in a model in eval mode, and outputs that differ in two forwards in eval mode."""
    if evidence.in_training:
        first, *others = evidence.in_training
        text = "in training mode while the model is in eval mode: it computes other values than in eval mode"
        return [Finding("training mode", first, text, layers=tuple(others))]
    text = "two forwards in eval mode differ here, as after F.dropout without training=self.training"
    return [Finding("random", evidence.random, text)] if evidence.random else []


def initial_statistics(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find batch normalisations whose running statistics are those before training, while others have others."""
    initial = [tensor.name for tensor in evidence.tensors if tensor.running and tensor.running.initial]
    others = any(tensor.running and not tensor.running.initial for tensor in evidence.tensors)
    if not initial or not others or initial[0] in explained or evidence.in_training:
        return []
    text = "its running statistics are those before training (mean 0, variance 1); other layers have others"
    return [Finding("running statistics", initial[0], text, layers=tuple(initial[1:]))]


def not_finite(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find where values that are not finite start; images in which they started earlier do not count."""
    findings: list[Finding] = []
    broken = set(evidence.inputs.broken)
    for position, tensor in enumerate(evidence.tensors):
        numbers = tensor.activations
        new = [image for image in numbers.not_finite_images if image not in broken]
        broken.update(new)
        if new:
            counts = {"NaN": numbers.nan, "infinite": numbers.infinite}
            kinds = [f"{count:,} {kind}" for kind, count in counts.items() if count]
            where = f"first in {evidence.name_of(new[0])}" if tensor.by_image else f"first in batch {new[0]}"
            behind = _names(filter(_is_broken, evidence.tensors[position + 1 :]))
            findings.append(Finding("not finite", tensor.name, f"{' and '.join(kinds)} values, {where}", layers=behind))
            if not tensor.by_image:
                break  # it is unknown in which images values behind it are new
    return findings


def _is_broken(tensor: TensorReport) -> bool:
    return tensor.activations.nan + tensor.activations.infinite > 0


@dataclass(frozen=True)
class Misfit:
    """A batch normalisation whose inputs are not like those of training.

    Attributes:
        position: its position among the tensors.
        is_first: whether it is the first batch normalisation that can be judged.
        ratio: standard deviation of its inputs divided by that of training, as median over channels.
        shift: distance of their mean to that of training, in standard deviations of training, as median over channels.
        variance_is_zero: whether the running variance of most channels is zero.
        uniform: whether the ratio is nearly the same in all channels, and those before have fitted.
    """

    position: int
    is_first: bool
    ratio: float
    shift: float
    variance_is_zero: bool
    uniform: bool

    @property
    def varies_otherwise(self) -> bool:
        """Whether the standard deviation is not that of training."""
        limit = _FACTOR if self.uniform else _FIRST_MISFIT if self.is_first else _LATER_MISFIT
        return self.variance_is_zero or not 1 / limit <= self.ratio <= limit


def first_misfit(tensors: Sequence[TensorReport]) -> Misfit | None:
    """Return the first batch normalisation whose inputs do not have the running statistics, so unlike in training."""
    before: list[float] = []  # ratios of those before
    for position, tensor in enumerate(tensors):
        running = tensor.running
        if running is None or running.initial or tensor.activations.images < _IMAGES_FOR_MISFIT:
            continue
        given = _input_of(tensors, position, len(running.std))
        if given is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = given.activations.channel_std / running.std
            shifts = np.abs(given.activations.channel_mean - running.mean) / running.std
        alive = np.isfinite(ratios) & (ratios > 0)
        if 2 * alive.sum() < len(alive):
            continue
        ratio, shift = float(np.median(ratios[alive])), float(np.median(shifts[alive]))
        can_be_uniform = all(1 / _FITS < other < _FITS for other in before) and alive.sum() >= _CHANNELS_FOR_UNIFORM
        uniform = bool(can_be_uniform and np.std(np.log(ratios[alive])) < _SPREAD)
        misfit = Misfit(position, not before, ratio, shift, running.zero > 0.5, uniform)
        if misfit.varies_otherwise or shift > _SHIFT:
            return misfit
        before.append(ratio)
    return None


def _input_of(tensors: Sequence[TensorReport], position: int, channels: int) -> TensorReport | None:
    """Return the tensor just before that is the input of this one, recognised by its size; None if there is none."""
    size = tensors[position].input_rms
    for tensor in reversed(tensors[max(0, position - _LAYERS_BACK) : position]):
        same_size = math.isclose(tensor.activations.rms, size, rel_tol=_SAME_SIZE)
        if tensor.by_image and tensor.activations.channels == channels and same_size:
            return tensor
    return None


def distortions(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find the layers whose output is far larger than their input, or whose running statistics do not fit.

    Either one causes the other behind it, so the first in the order of computation is reported, with all that follows.
    """
    tensors = evidence.tensors
    explosions = [] if "input" in explained else _exploding(tensors, explained)
    misfit = first_misfit(tensors)
    if misfit is None or tensors[misfit.position].name in explained:
        return explosions
    before, tensor, behind = tensors[: misfit.position], tensors[misfit.position], tensors[misfit.position + 1 :]
    if misfit.ratio < 1 and any(other.zero_weight for other in before):
        return explosions  # a signal is missing there
    if earlier := [finding for finding in explosions if finding.layer in _names(before)]:
        return earlier
    if not misfit.varies_otherwise:
        text = (
            f"the mean of the values that it normalises is {misfit.shift:,.2g} standard deviations from its running "
            "mean: the running mean, or the layers before it, have changed since training"
        )
    elif misfit.variance_is_zero:
        text = f"its running variance is zero, so its output is {misfit.ratio:,.0f} times too large"
    else:
        text = (
            f"the values that it normalises vary {misfit.ratio:,.3g} times as much as its running variance says: the "
            "running variance, or the layers before it, have changed since training"
        )
    return [Finding("running statistics", tensor.name, text, layers=_names(behind))]


def _exploding(tensors: Sequence[TensorReport], explained: set[str]) -> list[Finding]:
    findings: list[Finding] = []
    known = set(explained)
    gains = [tensor.norm_ratio for tensor in tensors]
    sizes_before = [tensors[0].input_rms] if tensors else []
    for position, tensor in enumerate(tensors):
        if tensor.name in known:
            continue
        size = tensor.activations.rms
        others = [gain for other, gain in zip(tensors, gains, strict=True)
                  if other.type == tensor.type and other.layer != tensor.layer and 0 < gain < math.inf]  # fmt: skip
        # Compared with the input and the layers before, not with all layers: most of those behind are large too, so
        # that explosions in the first 60 % of a chain were not noticed.
        usual = float(np.median([value for value in sizes_before if value > 0] or [math.nan]))
        typical = float(np.median(others or [1.0]))
        grown = gains[position] > _GROWTH * max(1.0, typical) and size > _ABOVE_OTHERS * usual
        if any(finding.layer.startswith(f"{tensor.layer}.") for finding in findings):
            continue
        if not grown or tensor.bounded:
            sizes_before.append(size)
            continue
        behind = [other for other in tensors[position + 1 :] if other.input_rms > _ABOVE_OTHERS * usual]
        if behind and all(other.bounded for other in behind):
            continue  # a bounded function stops the growth; `saturated_units` judges it
        text = f"its outputs are {gains[position]:,.0f} times larger than its inputs"
        if others:
            text = f"{text}; the median of the other {tensor.type} layers is {typical:.2g}"
        findings.append(Finding("exploding", tensor.name, text, layers=_names(behind)))
        known.update(findings[-1].layers)
    return findings


def unusable_attention(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find attention to a single token, whose softmax passes no gradient, and attention that is a mean of all tokens.

    Of each kind, the first layer is a finding, with all others.
    """
    findings: list[Finding] = []
    reports = [report for report in evidence.attentions if report.keys > 1 and "input" not in explained]
    for kind, sick, text in (
        ("saturated attention", [report for report in reports if report.one_hot >= _ONE_HOT_QUERIES],
         "{0.one_hot:.0%} of the queries attend to a single one of {0.keys:,} tokens"),
        ("uniform attention", [report for report in reports if report.deviation < _UNIFORM],
         "all queries attend to all {0.keys:,} tokens equally"),
    ):  # fmt: skip
        if sick and sick[0].layer not in explained:
            # Layers inside are affected: the projection of a uniform attention has constant queries and keys.
            inside = tuple(f"{report.layer}." for report in sick)
            affected = [tensor.name for tensor in evidence.tensors if tensor.layer.startswith(inside)]
            others = (*(report.layer for report in sick[1:]), *affected)
            findings.append(Finding(kind, sick[0].layer, text.format(sick[0]), layers=others))
    return findings


def saturated_units(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find layers with a bounded function, such as a sigmoid, whose values stay near the bounds."""
    units = {  # tensor -> whether each unit is saturated
        tensor.name: tensor.activations.saturated >= _SATURATED_VALUES
        for tensor in evidence.tensors[:-1]  # the last layer is a prediction, which may be saturated by design
        # A single unit may be a switch.
        if tensor.bounded and tensor.activations.channels > 1 and tensor.name not in explained
    }
    sick = [name for name, saturated in units.items() if saturated.mean() >= _SATURATED_UNITS]
    if not sick:
        return []
    first = units[sick[0]]
    text = f"{first.sum():,} of {len(first):,} units are saturated: their values stay near the bounds"
    return [Finding("saturated", sick[0], text, layers=tuple(sick[1:]))]


def zero_weights(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find layers whose weight is zero. Many networks start with some; it is grave if others lose the signal by it."""
    findings: list[Finding] = []
    dead = {dead.tensor.name for dead in _dead(evidence) if dead.grave}
    for position, tensor in enumerate(evidence.tensors):
        if not tensor.zero_weight or tensor.name in explained:
            continue
        text, behind = "its weight is zero: no signal passes", evidence.tensors[position + 1 :]
        if behind and all(_is_lost(other) for other in behind):
            return [*findings, Finding("zero weight", tensor.name, text, layers=_names(behind))]
        grave = not dead.isdisjoint(_names(behind))
        text = text if grave else f"{text}; usual before training"
        findings.append(Finding("zero weight", tensor.name, text, grave))
    return findings


@dataclass(frozen=True)
class _Dead:
    """Dead channels of one tensor that no tensor before explains."""

    tensor: TensorReport
    channels: list[int]
    value: str  # "zero" or "constant"

    @property
    def grave(self) -> bool:
        return len(self.channels) >= _GRAVE_PART * self.tensor.activations.channels

    @property
    def text(self) -> str:
        numbers = self.tensor.activations
        names = ", ".join(map(str, self.channels[:5])) + (", ..." if len(self.channels) > 5 else "")
        count = f"{len(self.channels):,} of {numbers.channels:,} channels"
        return f"{count} are {self.value} on all {numbers.images:,} images ({names})"


def dead_channels(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find channels with a single value, which the layers before do not explain."""
    if "input" in explained and evidence.inputs.equal:
        return []
    sick = [dead for dead in _dead(evidence) if dead.tensor.name not in explained]
    if len(sick) <= _LISTED_SEPARATELY:
        return [Finding("dead", dead.tensor.name, dead.text, grave=dead.grave) for dead in sick]
    first, names = sick[0], {dead.tensor.name for dead in sick[1:]}
    dead_in_all = sum(len(dead.channels) for dead in sick)
    in_all = sum(dead.tensor.activations.channels for dead in sick)
    text = f"{first.text}; with {len(names):,} layers after it, {dead_in_all:,} of {in_all:,} channels are constant"
    lost = _names(_lost_at_the_end(evidence.tensors))
    if lost:  # dead channels are the first sign of a signal that fades
        text = f"{text}, and from {lost[0]} on, nothing depends on the input"
    grave = bool(lost) or dead_in_all >= _GRAVE_PART * in_all
    others = tuple(name for name in _names(evidence.tensors) if name in names or name in lost)
    return [Finding("dead", first.tensor.name, text, grave, others)]


def _dead(evidence: Evidence) -> Iterable[_Dead]:
    # With initial running statistics, a batch normalisation does not normalise: units that seldom get a positive value
    # will in training.
    images_needed = math.inf if evidence.untrained else _IMAGES_AT_THE_END
    before: dict[int, set[int]] = {}  # number of channels -> channels nearly constant in the last tensor of that width
    before_whole = False  # whether the previous tensor was entirely dead, which explains this one
    for tensor in evidence.tensors:
        numbers = tensor.activations
        if not tensor.by_image or numbers.channels < 2:
            continue
        zero = (numbers.low == 0) & (numbers.high == 0)
        # A constant channel at an end of the layer's range may be one that few images activate, as after a ReLU.
        at_the_end = (numbers.low == numbers.high) & ((numbers.low == numbers.min) | (numbers.low == numbers.max))
        enough = (numbers.count >= _VALUES_FOR_CONSTANT) & (~at_the_end | (numbers.images >= images_needed))
        dead = {channel for channel in numbers.dead.tolist() if enough[channel]}
        new = dead - before.get(numbers.channels, set())
        whole = len(dead) == numbers.channels
        # Values at the bounds of a function are reported as saturated. Where all channels hardly vary, some are
        # constant by rounding only.
        rounding = tensor.variation < _LOST and not whole
        if new and not (whole and before_whole) and not tensor.bounded and not rounding:
            yield _Dead(tensor, sorted(new), "zero" if zero[sorted(new)].all() else "constant")
        before[numbers.channels] = set(numbers.constant(_NEARLY_CONSTANT).tolist())
        before_whole = whole


def vanishing_signal(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find the layer from which on nothing depends on the input any more, up to rounding."""
    behind = _lost_at_the_end(evidence.tensors)
    # An earlier cause may explain it, such as a dead layer or a weight of zero.
    if len(behind) < 2 or not explained.isdisjoint(_names(behind)):
        return []
    text = f"from here on, the values vary with the input by less than 1/{1 / _LOST:,.0f} of their size"
    return [Finding("vanishing", behind[0].name, text, layers=_names(behind[1:]))]


def _lost_at_the_end(tensors: Sequence[TensorReport]) -> list[TensorReport]:
    """Return the last tensors, from the one on behind which nothing depends on the input."""
    judged = [tensor for tensor in tensors if tensor.by_image and tensor.activations.total]
    alive = [position for position, tensor in enumerate(judged) if not _is_lost(tensor)]
    return judged[alive[-1] + 1 :] if alive else []


def _is_lost(tensor: TensorReport) -> bool:
    """Return whether a tensor is the same for all of several images, up to rounding."""
    return tensor.activations.images >= _VALUES_FOR_CONSTANT and tensor.variation < _LOST


def _with_gradients(evidence: Evidence) -> tuple[list[TensorReport], NDArray[np.float64]]:
    """Return tensors with gradients, and their norms; none if activations are not finite, or all inputs are equal."""
    judged = not evidence.inputs.equal and not any(map(_is_broken, evidence.tensors))
    reached = [tensor for tensor in evidence.tensors if judged and tensor.gradients is not None]
    return reached, np.array([tensor.gradient_norm for tensor in reached])


def vanishing_gradients(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find where gradients vanish, or are not finite, on the way from the loss to the first layers.

    A branch may have small gradients by design while the rest of the network has larger gradients. A place counts only
    if the largest gradient of all tensors before it is small.
    """
    reached, norms = _with_gradients(evidence)
    broken = [tensor for tensor in reached if tensor.gradients and tensor.gradients.nan + tensor.gradients.infinite]
    if broken:
        return [Finding("not finite", broken[-1].name, "the gradient of its output has values that are not finite")]
    # With initial running statistics, a batch normalisation does not normalise, as it will in training.
    if not reached or evidence.untrained:
        return []
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
    return [Finding("vanishing gradients", tensor.name, text, layers=_names(reversed(before)))]


def exploding_gradients(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find where gradients grow on the way from the loss to the first layers."""
    reached, norms = _with_gradients(evidence)
    if not np.isfinite(norms).all() or not norms.any():
        return []
    end = float(norms[-1]) or float(norms[np.flatnonzero(norms)[-1]])
    large = np.flatnonzero(norms > _EXPLODED * end)
    if not len(large) or large[-1] + 1 >= len(reached) or reached[large[-1] + 1].name in explained:
        return []
    tensor, before = reached[large[-1] + 1], reached[large[-1]]
    text = (
        f"gradients explode: their norm is {tensor.gradient_norm:.1e} at its output, {before.gradient_norm:.1e} "
        f"before it, and {norms.max():.1e} at most"
    )
    names = _names(reached[position] for position in reversed(large))
    return [Finding("exploding gradients", tensor.name, text, layers=names)]


def frozen_layers(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find parameters that do not require gradients while others do."""
    frozen = [parameter for parameter in evidence.parameters if not parameter.trainable]
    if not frozen or len(frozen) == len(evidence.parameters):
        return []
    return _by_layer("frozen", frozen, "without requires_grad while others have it")


def layers_without_gradient(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find parameters that the loss does not depend on."""
    unused = [parameter for parameter in evidence.parameters if parameter.trainable and not parameter.reached]
    if not unused:
        return []
    never_ran = unused[0].layer in evidence.never_ran
    why = "the layer never runs" if never_ran else "in eval mode, the loss does not depend on it"
    return _by_layer("no gradient", unused, f"without gradient: {why}")


def _by_layer(kind: str, parameters: Sequence[ParameterReport], text: str) -> list[Finding]:
    """Return a finding that names the parameters of the first layer, and the other layers."""
    first, *others = dict.fromkeys(parameter.layer for parameter in parameters)
    names = [parameter.name.rpartition(".")[2] for parameter in parameters if parameter.layer == first]
    return [Finding(kind, first, f"{' and '.join(names)} {text}", grave=False, layers=tuple(others))]


# Each returns its findings, given the names of the layers that earlier findings explain. Without causes, 31 ReLUs with
# the default initialisation gave 37 findings. `python -m tests.extract.analysis.network.planted_faults` plants 115
# faults and inspects 17 healthy networks: all faults are named first at their layer, and no finding is false.
CAUSES: tuple[Callable[[Evidence, set[str]], list[Finding]], ...] = (
    broken_inputs,
    equal_inputs,
    input_scale,
    not_finite,
    initial_statistics,
    distortions,  # explosions, and running statistics that do not fit
    unusable_attention,
    saturated_units,
    zero_weights,
    weights.equal_filters,
    dead_channels,
    losses.probabilities,
    losses.unused_targets,
    vanishing_gradients,
    exploding_gradients,
    losses.tiny_gradients,
    vanishing_signal,
    losses.wrong_labels,
    wrong_modes,  # explains nothing else: the inspection runs in eval mode
    weights.zero_parameters,
    weights.few_values,
    weights.faint_normalisations,
    frozen_layers,
    layers_without_gradient,
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
