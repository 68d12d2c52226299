"""Findings in the statistics of layers: report the layer at fault, without the consequences in other layers.

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

from extract.analysis.network.reports import AttentionReport, Evidence, Finding, ParameterReport, TensorReport

__all__ = ["CAUSES", "findings_of"]

# Inputs normalised by mean and standard deviation have negative values, and a root mean square of about 1.
_NORMALISED_RMS = (0.3, 3.0)
_PIXELS = (100.0, 255.5)  # range of the largest value of 8-bit pixels that are not scaled
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
_IMAGES_FOR_MISFIT = 20  # the values of few images vary less
_LAYERS_BACK = 8  # where the input of a layer is looked for
_SAME_SIZE = 2e-3  # relative; sizes of inputs are summed in float32
# Attention of trained networks: single heads attend to one token, such as the class token, but never all of them.
_ONE_HOT_QUERIES = 0.9
# At the smallest usual initialisation (standard deviation 0.02, 48 channels), weights deviate by 2 % from uniform ones.
_UNIFORM = 1e-3
# Below 100 units in the last place of float32 (6e-8), differences between inputs are rounding errors.
_LOST = 1e-5


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
    misfit = first_misfit(tensors)
    if misfit is None or misfit.variance_is_zero or misfit.position != misfit.first_position or normalised:
        return []
    if any(tensor.norm_ratio > _GROWTH_BEFORE for tensor in tensors[: misfit.position]):
        return []  # a layer before the batch normalisation is at fault
    text = (
        f"{now}{looks_like}; the values at {tensors[misfit.position].name} vary {misfit.ratio_in_words} as in training"
    )
    return [Finding("input scale", "input", text, layers=affected)]


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
            after = evidence.tensors[position + 1 :]
            behind = tuple(other.name for other in after if other.activations.nan + other.activations.infinite)
            affected = _affected(len(behind), len(after))
            text = f"{' and '.join(kinds)} values, {where}{affected}"
            findings.append(Finding("not finite", tensor.name, text, layers=behind))
            if not tensor.by_image:
                break  # it is unknown in which images values behind it are new
    return findings


@dataclass(frozen=True)
class Misfit:
    """A batch normalisation whose inputs are not like those of training.

    Attributes:
        position: its position among the tensors.
        first_position: position of the first batch normalisation that can be judged.
        ratio: standard deviation of its inputs divided by that of training, as median over channels.
        variance_is_zero: whether the running variance of most channels is zero.
    """

    position: int
    first_position: int
    ratio: float
    variance_is_zero: bool

    @property
    def ratio_in_words(self) -> str:
        return f"{self.ratio:,.3g} times as much"


def first_misfit(tensors: Sequence[TensorReport]) -> Misfit | None:
    """Return the first batch normalisation whose inputs do not have the running variance, so unlike in training."""
    first: int | None = None
    for position, tensor in enumerate(tensors):
        running = tensor.running
        if running is None or running.initial or tensor.activations.images < _IMAGES_FOR_MISFIT:
            continue
        given = _input_of(tensors, position, len(running.std))
        if given is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = given.activations.channel_std / running.std
        alive = np.isfinite(ratios) & (ratios > 0)
        if 2 * alive.sum() < len(alive):
            continue
        first = position if first is None else first
        ratio = float(np.median(ratios[alive]))
        limit = _FIRST_MISFIT if position == first else _LATER_MISFIT
        zero = running.zero > 0.5
        if zero or not 1 / limit <= ratio <= limit:
            return Misfit(position, first, ratio, zero)
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
    tensor = tensors[misfit.position]
    before = {other.name for other in tensors[: misfit.position]}
    earlier = [finding for finding in explosions if finding.layer in before]
    if earlier:
        return earlier
    behind = tuple(other.name for other in tensors[misfit.position + 1 :])
    if misfit.variance_is_zero:
        text = f"its running variance is zero, so its output is {misfit.ratio:,.0f} times too large"
    else:
        text = (
            f"the values that it normalises vary {misfit.ratio_in_words} as its running variance says: the running "
            "variance, or the layers before it, have changed since training"
        )
    return [Finding("running statistics", tensor.name, text + _affected(len(behind), len(behind)), layers=behind)]


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
        typical = float(np.median(others)) if others else math.nan
        inside = any(finding.layer.startswith(f"{tensor.layer}.") for finding in findings)
        grown = gains[position] > _GROWTH * max(1.0, typical if others else 1.0) and size > _ABOVE_OTHERS * usual
        if inside:
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
        text = f"{text}{_affected(len(behind), len(tensors) - position - 1)}"
        names = tuple(other.name for other in behind)
        known.update(names)
        findings.append(Finding("exploding", tensor.name, text, layers=names))
    return findings


def one_hot_attention(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find attention in which each query attends to a single token: its softmax is saturated and passes no gradient."""
    sick = [report for report in evidence.attentions if report.one_hot >= _ONE_HOT_QUERIES and report.keys > 1]
    return _attention("saturated attention", sick, evidence, explained,
                      "{0.one_hot:.0%} of the queries attend to a single one of {0.keys:,} tokens")  # fmt: skip


def uniform_attention(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find attention that is a plain mean of all tokens."""
    sick = [report for report in evidence.attentions if report.deviation < _UNIFORM and report.keys > 1]
    return _attention("uniform attention", sick, evidence, explained,
                      "all queries attend to all {0.keys:,} tokens equally")  # fmt: skip


def _attention(
    kind: str, sick: Sequence[AttentionReport], evidence: Evidence, explained: set[str], text: str
) -> list[Finding]:
    if not sick or sick[0].layer in explained or "input" in explained:
        return []
    also = f"; the same in {len(sick) - 1:,} other layers" if len(sick) > 1 else ""
    others = tuple(report.layer for report in sick[1:])
    # Layers inside are affected: the projection of a uniform attention has constant queries and keys.
    outer = tuple(f"{report.layer}." for report in sick)
    inside = tuple(tensor.name for tensor in evidence.tensors if tensor.layer.startswith(outer))
    return [Finding(kind, sick[0].layer, text.format(sick[0]) + also, layers=(*others, *inside))]


def saturated_units(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find layers with a bounded function, such as a sigmoid, whose values stay near the bounds."""
    sick: list[tuple[TensorReport, int]] = []
    for tensor in evidence.tensors[:-1]:  # the last layer is a prediction, which may be saturated by design
        # A single unit may be a switch.
        if not tensor.bounded or tensor.activations.channels < 2 or tensor.name in explained:
            continue
        units = int((tensor.activations.saturated >= _SATURATED_VALUES).sum())
        if units >= _SATURATED_UNITS * tensor.activations.channels:
            sick.append((tensor, units))
    if not sick:
        return []
    first, units = sick[0]
    text = f"{units:,} of {first.activations.channels:,} units are saturated: their values stay near the bounds"
    also = f"; the same in {len(sick) - 1:,} layers after it" if len(sick) > 1 else ""
    return [Finding("saturated", first.name, text + also, layers=tuple(tensor.name for tensor, _ in sick[1:]))]


def zero_weights(evidence: Evidence, explained: set[str]) -> list[Finding]:
    """Find layers whose weight is zero. Many networks start with some; it is grave if it cuts the network."""
    findings: list[Finding] = []
    for position, tensor in enumerate(evidence.tensors):
        if not tensor.zero_weight or tensor.name in explained:
            continue
        text, behind = "its weight is zero: no signal passes", evidence.tensors[position + 1 :]
        if behind and all(_is_lost(other) for other in behind):
            text += _affected(len(behind), len(behind))
            return [*findings, Finding("zero weight", tensor.name, text, layers=tuple(each.name for each in behind))]
        findings.append(Finding("zero weight", tensor.name, f"{text}; usual before training", grave=False))
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
    sick = [dead for dead in _dead(evidence.tensors) if dead.tensor.name not in explained]
    if len(sick) <= _LISTED_SEPARATELY:
        return [Finding("dead", dead.tensor.name, dead.text, grave=dead.grave) for dead in sick]
    first, names = sick[0], {dead.tensor.name for dead in sick[1:]}
    dead_in_all = sum(len(dead.channels) for dead in sick)
    in_all = sum(dead.tensor.activations.channels for dead in sick)
    text = f"{first.text}; with {len(names):,} layers after it, {dead_in_all:,} of {in_all:,} channels are constant"
    lost = [tensor.name for tensor in _lost_at_the_end(evidence.tensors)]
    if lost:  # dead channels are the first sign of a signal that fades
        text = f"{text}, and from {lost[0]} on, nothing depends on the input"
    grave = bool(lost) or dead_in_all >= _GRAVE_PART * in_all
    names.update(lost)
    others = tuple(tensor.name for tensor in evidence.tensors if tensor.name in names)
    return [Finding("dead", first.tensor.name, text, grave, others)]


def _dead(tensors: Sequence[TensorReport]) -> Iterable[_Dead]:
    # With initial running statistics, a batch normalisation does not normalise: units that seldom get a positive value
    # will in training.
    untrained = any(tensor.running is not None and tensor.running.initial for tensor in tensors)
    before: dict[int, set[int]] = {}  # number of channels -> channels nearly constant in the last tensor of that width
    before_whole = False  # whether the previous tensor was entirely dead, which explains this one
    for tensor in tensors:
        numbers = tensor.activations
        if not tensor.by_image or numbers.channels < 2:
            continue
        zero = (numbers.low == 0) & (numbers.high == 0)
        # A constant channel at an end of the layer's range may be one that few images activate, as after a ReLU.
        at_the_end = (numbers.low == numbers.high) & ((numbers.low == numbers.min) | (numbers.low == numbers.max))
        images_needed = math.inf if untrained else _IMAGES_AT_THE_END
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
    if len(behind) < 2 or explained & {tensor.name for tensor in behind}:
        return []
    text = f"from here on, the values vary with the input by less than 1/{1 / _LOST:,.0f} of their size"
    text = f"{text}{_affected(len(behind) - 1, len(behind) - 1)}"
    return [Finding("vanishing", behind[0].name, text, layers=tuple(tensor.name for tensor in behind[1:]))]


def _lost_at_the_end(tensors: Sequence[TensorReport]) -> list[TensorReport]:
    """Return the last tensors, from the one on behind which nothing depends on the input."""
    judged = [tensor for tensor in tensors if tensor.by_image and tensor.activations.total]
    alive = [position for position, tensor in enumerate(judged) if not _is_lost(tensor)]
    return judged[alive[-1] + 1 :] if alive else []


def _is_lost(tensor: TensorReport) -> bool:
    """Return whether a tensor is the same for all of several images, up to rounding."""
    return tensor.activations.images >= _VALUES_FOR_CONSTANT and tensor.variation < _LOST


def _affected(count: int, behind: int) -> str:
    """Return a sentence about the layers behind, to be added to a text; empty if none of them is affected."""
    if not count:
        return ""
    if count == behind:
        return f". All {behind:,} layers after it are affected" if behind > 1 else ". The layer after it is affected"
    return f". {count:,} of the {behind:,} layers after it are affected"


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
)
