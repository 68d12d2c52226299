"""Reports of what an inspection records: of inputs, tensors, parameters, predictions and attention; and a finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from extract.analysis.network.activation_statistics import Statistics, summarise

__all__ = [
    "AttentionReport", "Evidence", "Finding", "InputReport", "ParameterReport", "PredictionReport",
    "RunningStatistics", "TensorReport", "WeightReport", "layer_table",
]  # fmt: skip

_LOOKED_AT = 1 << 16  # values of a parameter
_ROWS_COMPARED = 8  # with all rows; one of a group of half of the rows is among them
_FIRST_COMPARED = 8  # values of two rows, before all others
_SHOWN_LAYERS = 3  # names of further layers in the text of a finding
_ONE_HOT = 0.99  # weight of an attention on one token
_EQUAL = 1e-3  # inputs that differ by less than this part of the largest value are equal


@dataclass(frozen=True)
class Finding:
    """A problem, at the layer where it starts.

    Attributes:
        kind: "not finite", "equal inputs", "input scale", "training mode", "random", "running statistics", "exploding",
            "saturated attention", "uniform attention", "saturated", "zero weight", "equal filters", "few values",
            "faint", "dead", "vanishing", "probabilities", "targets", "labels", "vanishing gradients",
            "exploding gradients", "frozen" or "no gradient".
        layer: layer where the problem starts; "input" or "loss" if it is outside the network.
        text: description of the problem.
        grave: whether the network is unlikely to work; otherwise the finding is for information.
        layers: further layers that have the same problem or are affected by it, in the order of computation.
    """

    kind: str
    layer: str
    text: str
    grave: bool = True
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = len(self.layers) - _SHOWN_LAYERS
        names = ", ".join(self.layers[:_SHOWN_LAYERS]) + (f" and {more:,} more" if more > 0 else "")
        return f"{self.layer}: {self.text}" + (f" ({names})" if names else "")


@dataclass
class InputReport:
    """Values of the model's input.

    Attributes:
        count: number of images.
        shape: shape of one image.
        broken: positions of images with values that are not finite.
        values: statistics of all values; of whole numbers other than uint8 pixels, such as tokens, there are none.
    """

    count: int = 0
    shape: tuple[int, ...] = ()
    broken: list[int] = field(default_factory=list)
    values: Statistics = field(default_factory=Statistics)
    _first: Tensor | None = None
    _differ: bool = False

    def add(self, inputs: Tensor) -> None:
        """Add a batch (B, ...)."""
        first_image, self.shape = self.count, tuple(inputs.shape[1:])
        self.count += len(inputs)
        inputs = inputs.float() if inputs.dtype == torch.uint8 else inputs
        if not inputs.is_floating_point():
            self._differ = True
            return
        summary = summarise(inputs.reshape(len(inputs), -1), [1])
        self.values.add(summary)
        self.broken += (first_image + (summary["nan"] + summary["infinite"]).nonzero().flatten()).tolist()
        if self._first is None:
            self._first = inputs[:1].detach().clone()
        comparable = not self._differ and not self.broken and self._first.shape[1:] == self.shape
        limit = _EQUAL * max(abs(self.values.min), abs(self.values.max))
        self._differ = not comparable or float((inputs.detach() - self._first).abs().max()) > limit

    @property
    def equal(self) -> bool:
        """Whether there are several images, all equal up to rounding."""
        return self.count > 1 and not self._differ


@dataclass(frozen=True)
class RunningStatistics:
    """What the inputs of a batch normalisation were in training.

    Attributes:
        mean: (C,) running mean.
        std: (C,) square root of the running variance, with the constant that avoids division by zero.
        zero: share of the channels whose running variance is zero.
        initial: whether no batch has changed the running statistics.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    zero: float
    initial: bool

    @classmethod
    def of(cls, module: nn.Module) -> RunningStatistics | None:
        """Return the statistics of a batch normalisation; None for other layers, and without running statistics."""
        if not isinstance(module, _BatchNorm) or module.running_var is None or module.running_mean is None:
            return None
        mean, variance = (values.double().cpu().numpy() for values in (module.running_mean, module.running_var))
        initial = bool((mean == 0).all() and (variance == 1).all())
        with np.errstate(invalid="ignore"):
            return cls(mean, np.sqrt(variance + module.eps), float((variance == 0).mean()), initial)


@dataclass
class TensorReport:
    """Inspection results for one output tensor of a layer.

    Attributes:
        name: text form of the tensor's site.
        layer: name of the layer.
        type: class name of the module.
        leaf: whether the layer contains no other inspected layer.
        by_image: whether the rows were proved to be the images; otherwise each batch counts as one image.
        shape: shape of one image's activation, or of the whole batch's if not `by_image`.
        activations: statistics of the tensor.
        input_rms: root mean square of the layer's input; NaN without finite floating-point values.
        gradients: statistics of the loss gradient with respect to the tensor; None if not requested or not computed.
        bounded: whether the layer is a function with known bounds, such as a sigmoid.
        zero_weight: whether the layer's weight is zero, as in some layers before training.
        running: running statistics, if the layer is a batch normalisation.
    """

    name: str
    layer: str
    type: str
    leaf: bool
    by_image: bool
    shape: tuple[int, ...]
    activations: Statistics = field(default_factory=Statistics)
    input_rms: float = math.nan
    gradients: Statistics | None = None
    bounded: bool = False
    zero_weight: bool = False
    running: RunningStatistics | None = None

    @property
    def variation(self) -> float:
        """Standard deviation within channels divided by the root mean square: how much the tensor depends on inputs."""
        numbers = self.activations
        if not numbers.total or not numbers.rms:
            return 0.0 if numbers.total else math.nan
        return math.sqrt(float(numbers.m2.sum()) / numbers.total) / numbers.rms

    @property
    def norm_ratio(self) -> float:
        """Root mean square of the output divided by that of the input."""
        return self.activations.rms / self.input_rms if self.input_rms else math.nan

    @property
    def gradient_norm(self) -> float:
        """L2 norm of an image's gradient, as root mean square over images."""
        if self.gradients is None or not self.gradients.images:
            return math.nan
        return self.gradients.rms * math.sqrt(self.gradients.total / self.gradients.images)


@dataclass
class ParameterReport:
    """Inspection results for one parameter.

    Attributes:
        name: full name, including the layer.
        layer: name of the layer that owns the parameter.
        norm: L2 norm.
        trainable: whether the parameter requires gradients.
        reached: whether the loss depends on the parameter.
        gradient_norm: L2 norm of the gradient of a batch's loss, as root mean square over the batches with finite
            gradients.
    """

    name: str
    layer: str
    norm: float
    trainable: bool
    reached: bool = False
    gradient_norm: float = math.nan

    @property
    def gradient_to_weight(self) -> float:
        """Gradient norm divided by the parameter norm."""
        return self.gradient_norm / self.norm if self.norm else math.nan


@dataclass(frozen=True)
class WeightReport:
    """What a parameter holds.

    Attributes:
        name: full name, including the layer.
        layer: name of the layer that owns the parameter.
        size: number of values.
        values: number of different values among the first 65,536.
        filters: rows of a weight (rows, ...), each with several values; 0 for other parameters.
        equal_filters: rows in the largest group of equal ones.
        zero: whether it is zero, and has several axes.
    """

    name: str
    layer: str
    size: int
    values: int
    filters: int
    equal_filters: int
    zero: bool

    @property
    def is_of_layer(self) -> bool:
        """Whether it is a weight or bias of a layer, which the layer's own findings judge."""
        return "weight" in self.name.rpartition(".")[2] or "bias" in self.name.rpartition(".")[2]

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> WeightReport | None:
        """Look at a parameter; None without values: empty, sparse, on the meta device, not made yet, or packed."""
        # Classes of other libraries (quantised, distributed) and of lazy layers lack functions that are needed here.
        is_plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided and not parameter.is_meta
        if not is_plain or not parameter.numel():
            return None
        values = parameter.detach()
        many_axes = sum(length > 1 for length in values.shape) > 1
        filters = len(values) if many_axes and values[0].numel() > values[0, 0].numel() else 0
        compared = range(0, filters, max(1, filters // _ROWS_COMPARED))
        equal = max((_rows_equal_to(values.flatten(1), row) for row in compared), default=0)
        first = values.flatten()[:_LOOKED_AT]
        different = np.unique((first.abs() if first.is_complex() else first).float().cpu().numpy())
        zero = many_axes and not bool(values.any())
        return cls(name, name.rpartition(".")[0], values.numel(), len(different), filters, equal, zero)


def _rows_equal_to(rows: Tensor, row: int) -> int:
    alike = rows[(rows[:, :_FIRST_COMPARED] == rows[row, :_FIRST_COMPARED]).all(1)]  # usually few
    return int((alike == rows[row]).all(1).sum())


@dataclass
class PredictionReport:
    """Predictions of a classifier (B, C) beside its labels.

    Attributes:
        predicted, labels: (C,) number of images by predicted and by true class.
        right: number of images whose predicted class is the label.
        sure: sum over images of the largest probability.
    """

    predicted: NDArray[np.int64]
    labels: NDArray[np.int64]
    right: int
    sure: float

    @property
    def images(self) -> int:
        """Number of images with a label."""
        return int(self.labels.sum())

    @classmethod
    def of(cls, output: object, targets: object) -> PredictionReport | None:
        """Return the report of a batch; None without logits (B, C) and labels (B,). A negative label is unknown."""
        if not (isinstance(output, Tensor) and isinstance(targets, Tensor)) or output.ndim != 2 or output.shape[1] < 2:
            return None
        if targets.shape != output.shape[:1] or targets.is_floating_point():
            return None
        classes = output.shape[1]
        known = (targets >= 0) & (targets < classes)
        largest, chosen = output.detach()[known].float().softmax(1).cpu().max(1)
        labels = targets[known].long().cpu()
        predicted, given = (torch.bincount(values, minlength=classes).numpy() for values in (chosen, labels))
        return cls(predicted, given, int((chosen == labels).sum()), float(largest.sum()))

    def __add__(self, other: PredictionReport) -> PredictionReport:
        return PredictionReport(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class AttentionReport:
    """Attention weights of one layer, over all heads and queries of some images.

    Attributes:
        layer: layer that computes the attention.
        keys: number of tokens that a query may attend to.
        one_hot: share of the queries with nearly all weight on one token.
        deviation: largest deviation of a weight from 1 / keys, times the number of keys.
    """

    layer: str
    keys: int
    one_hot: float
    deviation: float

    @classmethod
    def of(cls, layer: str, weights: Tensor) -> AttentionReport:
        """Summarise weights (B, heads, T, S)."""
        keys, largest = weights.shape[-1], weights.amax(-1)
        one_hot, deviation = (largest > _ONE_HOT).float().mean(), (weights * keys - 1).abs().max()
        return cls(layer, keys, float(one_hot), float(deviation))


@dataclass
class Evidence:
    """All that findings are made from; an inspection fills it in.

    Attributes:
        tensors: in the order of computation.
        parameters: parameters with their gradients; empty without a loss.
        weights: what the parameters hold.
        inputs: values of the model's input.
        attentions: attention layers, in the order of computation.
        never_ran: requested layers that did not run.
        name_of: function that returns the name of the image at a position.
        in_training: layers in training mode although the model is in eval mode.
        random: first tensor that differs in two forwards of the same inputs; empty if none does.
        loss_takes_probabilities: whether the loss is the cross-entropy of outputs that are probabilities already.
        loss_ignores_targets: whether the loss is the same with the targets of other images; None: not judged.
        predictions: predictions beside labels; None without a loss, logits or labels.
    """

    tensors: list[TensorReport]
    parameters: list[ParameterReport] = field(default_factory=list)
    weights: Sequence[WeightReport] = ()
    inputs: InputReport = field(default_factory=InputReport)
    attentions: Sequence[AttentionReport] = ()
    never_ran: list[str] = field(default_factory=list)
    name_of: Callable[[int], str] = lambda position: f"image {position}"
    in_training: Sequence[str] = ()
    random: str = ""
    loss_takes_probabilities: bool = False
    loss_ignores_targets: bool | None = None
    predictions: PredictionReport | None = None

    @property
    def untrained(self) -> bool:
        """Whether a batch normalisation has the running statistics of before training: it does not normalise."""
        return any(tensor.running is not None and tensor.running.initial for tensor in self.tensors)


def layer_table(tensors: Sequence[TensorReport]) -> list[list[str]]:
    """Return the table of layers as text: the heads, then a row for each tensor. The first three columns are words."""
    with_gradients = any(report.gradients is not None for report in tensors)
    head = ["layer", "type", "shape", "mean", "std", "min", "median", "max", "zeros", "dead", "out/in"]
    rows = [head + (["grad norm"] if with_gradients else [])]
    for report in tensors:
        shape, numbers = "x".join(map(str, report.shape)), report.activations
        values = (numbers.mean, numbers.std, numbers.min, numbers.quantile(0.5), numbers.max)
        row = [report.name, report.type, shape, *(f"{value:.3g}" for value in values), f"{numbers.zeros:.0%}",
               f"{len(numbers.dead)}/{numbers.channels}" if report.by_image else "-",
               f"{report.norm_ratio:.2g}" if math.isfinite(report.norm_ratio) else "-"]  # fmt: skip
        gradient = f"{report.gradient_norm:.2e}" if math.isfinite(report.gradient_norm) else "-"
        rows.append(row + ([gradient] if with_gradients else []))
    return rows
