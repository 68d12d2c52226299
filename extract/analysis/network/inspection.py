"""Inspection of a network on real inputs: statistics of each layer's activations and gradients.

    inspection = inspect_model(model, batches)                       # batches of (B, 3, H, W)
    inspection = inspect_model(model, batches, loss=F.cross_entropy) # of (images, targets): gradients too
    for finding in inspection.findings: print(finding)               # "layer3.relu: 41 of 1,024 channels are zero ..."

The hooks compute the statistics (see `activation_statistics`), so memory does not grow with the number of images.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from extract.analysis.network.activation_statistics import Statistics, norm_of, summarise
from extract.analysis.network.findings import findings_of
from extract.analysis.network.plain_modules import pairs_of
from extract.analysis.network.reports import (
    AttentionReport,
    Evidence,
    Finding,
    ParameterReport,
    PredictionReport,
    RunningStatistics,
    TensorReport,
    WeightReport,
    layer_table,
)
from extract.compute.backbone import Backbone
from extract.compute.pooling import recognise
from extract.errors import InputError, LayertapError
from extract.system.html_tables import Table, html_summary
from extract.system.torch_state import evaluating, full_float32, keeping_freed_memory, with_gradients
from extract.taps.batch_axis import BatchAxis, Trial
from extract.taps.layer_names import match_layers, named_layers, named_parameters
from extract.taps.record import Record, Site
from extract.taps.taps import Taps, taps_of

__all__ = ["Inspection", "Loss", "does_something", "inspect_model", "positions_of"]

Loss = Callable[[Any, Any], Tensor]  # (model output, targets or None) -> scalar

_TRIAL_INPUTS = 3
_RANDOM = 1e-3  # of the largest value; differences of two forwards up to it may be rounding
_OTHER_CLASSES = 8  # compared with the labels
_SUM_OF_ONE = 1e-4  # relative error of sums of probabilities, and of the loss
_IDLE = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.ModuleList, nn.ModuleDict,
)  # fmt: skip
_DROPS_BRANCHES = {"DropPath", "StochasticDepth"}  # from timm and torchvision
_IDLE_NAMES = {*_DROPS_BRANCHES, "NonDynamicallyQuantizableLinear"}  # the last is not called by nn.MultiheadAttention


@dataclass
class Inspection:
    """Result of an inspection.

    Attributes:
        images: number of images.
        tensors: reports of the tensors, in the order of computation.
        parameters: reports of the requested layers' parameters; empty without a loss.
        never_ran: requested layers that did not run or returned no floating-point tensor.
        findings: problems of the network.
        loss: mean over batches; NaN without a loss.
    """

    images: int
    tensors: list[TensorReport]
    parameters: list[ParameterReport]
    never_ran: list[str]
    findings: list[Finding] = field(default_factory=list)
    loss: float = math.nan

    def __repr__(self) -> str:
        n_grave = sum(finding.grave for finding in self.findings)
        found = f"findings: {n_grave} serious, {len(self.findings) - n_grave} minor" if self.findings else "no findings"
        loss = "" if math.isnan(self.loss) else f", mean loss {self.loss:.4g}"
        return f"Inspection({self.images:,} images, {len(self.tensors):,} tensors{loss}, {found})"

    def _repr_html_(self) -> str:
        findings = [["serious" if finding.grave else "minor", str(finding)] for finding in self.findings]
        head, *rows = layer_table(self.tensors)
        return html_summary(
            repr(self),
            [Table(["", "finding"], findings), Table(head, rows, numbers=len(head) - 3, folded="Layers")],
            [f"never ran, or returned no tensor: {', '.join(self.never_ran)}"] if self.never_ran else [],
        )


@dataclass(frozen=True)
class _TensorPlan:
    """How to summarise one tensor: where its images are (None: unknown), and which axes are positions."""

    rows: BatchAxis | None
    shape: tuple[int, ...]  # of one image, or of the whole batch if `rows` is None
    positions: tuple[int, ...]
    bounds: tuple[float, float] | None

    def summary(self, value: Tensor) -> dict[str, Tensor]:
        images = value[None] if self.rows is None else self.rows.by_image(value)
        return summarise(images, self.positions, self.bounds)


def inspect_model(
    model: Backbone | nn.Module,
    batches: Iterable[Any],
    layers: str | Sequence[str] | None = None,
    *,
    loss: Loss | None = None,
    on_batch: Callable[[int], None] = lambda images: None,
    name_of: Callable[[int], str] = lambda position: f"image {position}",
) -> Inspection:
    """Run a network on inputs in eval mode, and compute statistics of its layers.

    Args:
        model: any module, or a backbone, on its device.
        batches: tensors (B, ...), or pairs of a tensor and targets, on the model's device.
        layers: names or globs; None: every layer that changes its input in eval mode.
        loss: function of the model's output and the targets (or None) for computing gradients; None: no gradients.
        on_batch: called after each batch with its number of images.
        name_of: function that returns the name of the image at a position among all images, for findings.

    Raises:
        UnknownNameError: a pattern matches no layer.
        InputError: there are no batches, a batch has another type, no layer returns a floating-point tensor, or the
            loss is not one number that depends on the model's output.
    """
    model = model.model if isinstance(model, Backbone) else model
    in_training = [] if model.training else _in_training(model)
    with evaluating(model), full_float32(), keeping_freed_memory(), contextlib.ExitStack() as settings:
        in_training = in_training or _in_training(model)  # layers that stay in training mode after `eval`
        settings.enter_context(_buffers_kept([named_layers(model)[name] for name in in_training]))
        pairs = pairs_of(batches)
        first = next(pairs)
        names = _distinct_layers(model) if layers is None else match_layers(named_layers(model), layers)
        recorder = _Recorder(model, names, first[0], loss)
        found = recorder.evidence
        found.name_of, found.in_training, found.attentions = name_of, in_training, _attentions(model, first[0])
        losses = recorder.run(itertools.chain([first], pairs), on_batch)
    mean = float(np.mean(losses)) if losses else math.nan
    return Inspection(found.inputs.count, found.tensors, found.parameters, found.never_ran, findings_of(found), mean)


def _distinct_layers(model: nn.Module) -> list[str]:
    """Return the first name of every layer that does something in eval mode."""
    first: dict[int, str] = {}
    for name, module in named_layers(model).items():
        if does_something(module):
            first.setdefault(id(module), name)
    return list(first.values())


@contextlib.contextmanager
def _buffers_kept(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: restore the buffers of layers, which change them in training mode."""
    kept = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _in_training(model: nn.Module) -> list[str]:
    """Return the layers that compute otherwise in training mode, and are in it."""
    return [name for name, layer in named_layers(model).items() if layer.training and _computes_otherwise(layer)]


def _computes_otherwise(layer: nn.Module) -> bool:
    """Return whether a layer computes otherwise in training mode."""
    dropped = layer.p if isinstance(layer, _DropoutNd) else 0.0
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        dropped = layer.dropout
    return isinstance(layer, _BatchNorm) or type(layer).__name__ in _DROPS_BRANCHES or dropped > 0


def does_something(module: nn.Module) -> bool:
    """Return whether a layer is called and changes its input in eval mode."""
    return not isinstance(module, _IDLE) and type(module).__name__ not in _IDLE_NAMES


class _Recorder:
    """Taps on the requested layers, and the statistics so far."""

    def __init__(self, model: nn.Module, names: Sequence[str], inputs: Tensor, loss: Loss | None):
        self._model, self._loss = model, loss
        self._parameters = _parameters(model, names) if loss else {}
        self._plans, random = _tensor_plans(model, names, inputs)
        if not self._plans:
            hint = "" if names else "; the model is a single layer: wrap the model, nn.Sequential(model)"
            raise InputError(f"the model has no layer that returns a floating-point tensor{hint}")
        named = named_layers(model)
        ran = {site.layer for site in self._plans}
        leaves = _leaves(ran)
        self.reports = {
            site: TensorReport(
                str(site), site.layer, type(named[site.layer]).__name__, site.layer in leaves,
                plan.rows is not None, plan.shape, bounded=plan.bounds is not None,
                zero_weight=_has_zero_weight(named[site.layer]), running=RunningStatistics.of(named[site.layer]),
            )
            for site, plan in self._plans.items()
        }  # fmt: skip
        # (layer, call) -> sum of squares of the input's finite values, and their number
        self._squares: dict[tuple[str, int], NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))
        self.evidence = Evidence([*self.reports.values()], random=random)
        self.evidence.never_ran = [name for name in names if name not in ran]
        parameters = _parameters(model, [*names, ""]).items()
        self.evidence.weights = [found for name, value in parameters if (found := WeightReport.of(name, value))]
        self._loss_takes_logits: bool | None = None  # judged by the first batch with labels

    def run(self, batches: Iterable[tuple[Tensor, Any]], on_batch: Callable[[int], None]) -> list[float]:
        """Run the batches, and return their losses."""
        squares: dict[str, list[float]] = {name: [] for name in self._parameters}
        losses, seen = list[float](), self.evidence.inputs
        with self._taps() as taps:
            for inputs, targets in batches:
                if self._loss is None:
                    with torch.no_grad():
                        taps(inputs.clone())
                else:
                    value, gradients = self._backward(taps, inputs, targets, self._loss)
                    losses.append(value)
                    for name, gradient in gradients.items():
                        squares[name].append(float(gradient.double().square().sum()))
                self._add(taps.record, seen.count)
                seen.add(inputs)
                on_batch(len(inputs))
        for site, report in self.reports.items():
            total, count = self._squares[site.layer, site.call].tolist()
            report.input_rms = math.sqrt(total / count) if count else math.nan
        for name, parameter in self._parameters.items():
            finite = [square for square in squares[name] if math.isfinite(square)]
            self.evidence.parameters.append(ParameterReport(
                name, name.rpartition(".")[0], float(parameter.detach().double().norm()), parameter.requires_grad,
                reached=bool(squares[name]), gradient_norm=math.sqrt(float(np.mean(finite))) if finite else math.nan,
            ))  # fmt: skip
        return losses

    def _taps(self) -> Taps:
        # Without copies in place of outputs, a network that writes into them in place is inspected, too. A view that it
        # writes into has no gradient then.
        taps = taps_of(self._model, replaces=False, stop=self._loss is None)
        for site, plan in self._plans.items():
            taps.keep(site, reduce=plan.summary)
            if self._loss is not None:
                taps.keep(replace(site, what="grad"), reduce=plan.summary)
        return taps.keep(list(dict.fromkeys(site.layer for site in self._plans)), "input", reduce=_sum_of_squares)

    def _backward(self, taps: Taps, inputs: Tensor, targets: Any, loss: Loss) -> tuple[float, dict[str, Tensor]]:
        """Compute the loss of a batch, and the gradients of the parameters that it depends on."""
        trainable = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        with with_gradients():
            # The input requires gradients, so that activations have gradients even if all parameters are frozen.
            inputs = inputs.clone().requires_grad_(inputs.is_floating_point())
            output = taps(inputs.clone())
            value = loss(output, targets)
            if not isinstance(value, Tensor) or value.numel() != 1:
                kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"the loss returned {kind}; expected one number that depends on the model's output")
            if not value.requires_grad:
                raise InputError(
                    "the loss has no gradient",
                    hint="it must depend on the model's output, which the model's forward must compute without "
                    "torch.no_grad(), torch.inference_mode() and detach()",
                )
            wanted = [*trainable.values(), *([inputs] if inputs.requires_grad else [])]
            computed = torch.autograd.grad(value.reshape(()), wanted, allow_unused=True)
        gradients = {name: g for name, g in zip(trainable, computed[: len(trainable)], strict=True) if g is not None}
        self._compare(output, targets, value, loss)
        return float(value.detach()), gradients

    def _compare(self, output: Any, targets: Any, value: Tensor, loss: Loss) -> None:
        """Compare the model's output with the targets of a batch."""
        evidence = self.evidence
        evidence.loss_takes_probabilities = _is_loss_of_probabilities(output, targets, value)
        if evidence.loss_ignores_targets is not False:  # judged by the batches up to one for which it does not
            ignores = _ignores_targets(loss, output, targets)
            evidence.loss_ignores_targets = evidence.loss_ignores_targets if ignores is None else ignores
        predictions = PredictionReport.of(output, targets)
        if predictions is None or not predictions.images:
            return
        if self._loss_takes_logits is None:
            self._loss_takes_logits = _takes_logits(loss, output, targets)
        if self._loss_takes_logits and evidence.predictions is None:
            evidence.predictions = predictions
        elif evidence.predictions is not None and len(evidence.predictions.labels) == len(predictions.labels):
            evidence.predictions += predictions

    def _add(self, record: Record, first_image: int) -> None:
        for site in record.sites.values():
            if site.what == "input":
                self._squares[site.layer, site.call] += record[site].numpy()
                continue
            report = self.reports[replace(site, what="output")]
            numbers = report.activations
            if site.what == "grad":
                numbers = report.gradients = report.gradients or Statistics()
            # If it is unknown which rows belong to which image, batches are counted.
            numbers.add(record[site], first_image if report.by_image else None)


def _ignores_targets(loss: Loss, output: Any, targets: Any) -> bool | None:
    """Return whether a loss of outputs of this shape is the same if all images have the target of the first one.

    None if it cannot be judged: all have this target, or the loss takes only what this model returns.
    """
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)) or not targets.ndim:
        return None
    others = targets[:1].expand_as(targets)
    # Made-up outputs: those of a network that is not trained may be equal for all images. A loss of fewer bits than
    # float32 is often the same by rounding.
    made_up = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)).to(output.device)
    with contextlib.suppress(Exception), torch.no_grad():
        return None if targets.equal(others) else bool((loss(made_up, targets) == loss(made_up, others)).all())
    return None


def _takes_logits(loss: Loss, output: Tensor, targets: Tensor) -> bool:
    """Return whether a loss is least for outputs (B, C) that are largest at the labels (B,), not at other classes.

    That of embeddings is not: it is the same for any order of their values.
    """
    classes = output.shape[1]
    right = F.one_hot(targets.long().clamp(0, classes - 1), classes).to(output.device, torch.float32)
    with contextlib.suppress(Exception), torch.no_grad():  # a loss may take only what this model returns
        others = (loss(right.roll(shift, 1), targets) for shift in range(1, min(classes, _OTHER_CLASSES)))
        least = loss(right, targets)
        return all(bool((least < other).all()) for other in others)
    return False


def _is_loss_of_probabilities(output: Any, targets: Any, value: Tensor) -> bool:
    """Return whether the outputs are probabilities, and a loss is the cross-entropy of them as if they were logits."""
    if not isinstance(output, Tensor) or output.ndim != 2 or not isinstance(targets, Tensor):
        return False
    output = output.detach()
    if len(output[0]) < 2 or bool((output < 0).any()) or bool(((output.sum(1) - 1).abs() > _SUM_OF_ONE).any()):
        return False
    known = torch.where(targets >= 0, targets, output.argmax(1)) if targets.ndim == 1 else targets
    try:
        return math.isclose(float(F.cross_entropy(output, known)), float(value.detach()), rel_tol=_SUM_OF_ONE)
    except (RuntimeError, IndexError, ValueError):  # targets of another loss
        return False


def _attentions(model: nn.Module, inputs: Tensor) -> list[AttentionReport]:
    """Return reports of the layers called attention, on a few inputs: recomputing the weights of all takes long."""
    types = {name: type(module).__name__.lower() for name, module in named_layers(model).items()}
    names = [name for name, kind in types.items() if "attention" in kind or "attn" in kind]
    if not names:
        return []
    with torch.no_grad(), Taps(model).keep(names, "attention") as taps:
        taps(inputs[:_TRIAL_INPUTS].clone())
        record = taps.record
    sites = list(record.sites.values())
    innermost = _leaves({site.layer for site in sites})  # a layer that contains another has its attention, too
    return [AttentionReport.of(site.layer, record[site]) for site in sites if site.layer in innermost]


def _sum_of_squares(value: Tensor) -> Tensor:
    """Return (2,) float64: sum of squares of the finite values, and their number."""
    value = value.float() if value.dtype == torch.uint8 else value  # pixels
    if not value.is_floating_point() or not value.numel():
        return torch.zeros(2, dtype=torch.float64)
    found = norm_of(value)
    return torch.stack([found["norm"].double().cpu() ** 2, value.numel() - found["not_finite"]])


def _tensor_plans(model: nn.Module, names: Sequence[str], inputs: Tensor) -> tuple[dict[Site, _TensorPlan], str]:
    """Return each floating-point output of these layers, in order, and how to summarise it, from trial forwards.

    Also the first output that differs in two forwards of the same inputs; empty if none does.
    """
    trial_inputs = inputs[:_TRIAL_INPUTS].detach().clone()  # a model may write to its input
    trial: Trial | None = None
    if len(trial_inputs) > 1:
        with contextlib.suppress(LayertapError):
            trial = Trial(model, trial_inputs, [(name, "output") for name in names])
    with torch.no_grad(), Taps(model, list(names)) as taps:
        taps(trial_inputs.clone())
        record = taps.record if trial is None else trial.record
        if trial is None:
            taps(trial_inputs)
        again = taps.record
    named, plans = named_layers(model), {}
    for site in record.sites.values():
        value = record[site]
        if not value.is_floating_point():
            continue
        rows = None
        if trial is not None:
            with contextlib.suppress(InputError):
                rows = trial.rows(site)
        shape = tuple((value[None] if rows is None else rows.by_image(value)).shape)
        extra = 1 if rows is None or rows.per_image > 1 else 0
        positions = positions_of(shape, inputs.shape, extra)
        plans[site] = _TensorPlan(rows, shape[1:], positions, _bounds_of(named[site.layer]))
    return plans, next((str(site) for site in plans if _differ(record, again, site)), "")


def _differ(record: Record, again: Record, site: Site) -> bool:
    if site not in again.sites.values() or record[site].shape != again[site].shape:
        return True
    one, other = record[site].double().cpu(), again[site].double().cpu()
    finite = one.isfinite() & other.isfinite()
    largest = float(one[finite].abs().max()) if finite.any() else 0.0
    return bool(((one - other).abs()[finite] > _RANDOM * largest).any())


def positions_of(shape: Sequence[int], inputs: Sequence[int], extra: int = 0) -> tuple[int, ...]:
    """Return the axes of an activation (B, ...) that are neither images nor channels.

    The axes of a map are recognised by the size of the input image. Otherwise PyTorch's convention is assumed: channels
    are the first of three axes (C, H, W), and the last of any other number of axes, such as (T, C).

    Args:
        shape: shape of the activation, with images on axis 0.
        inputs: shape of the model's input batch.
        extra: number of axes after the first that only subdivide an image.
    """
    own = tuple(shape[1 + extra :])
    if not own:
        return tuple(range(1, len(shape)))
    layout = recognise(own, (inputs[-2], inputs[-1])) if len(inputs) == 4 else None
    if layout is not None and layout.kind == "map":
        channel = layout.axes.index("C")
    else:
        channel = 0 if len(own) == 3 else len(own) - 1
    return tuple(axis for axis in range(1, len(shape)) if axis != 1 + extra + channel)


_BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.0, 1.0), nn.Hardsigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0), nn.Softsign: (-1.0, 1.0),
}  # fmt: skip


def _bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Return the bounds of a layer's values if the gradient nearly vanishes there, else None.

    The zero of a ReLU is not such a bound: half of its values are zero by design.
    """
    if type(module) is nn.Hardtanh:
        return float(module.min_val), float(module.max_val)
    return _BOUNDS.get(type(module))


def _has_zero_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and bool(weight.numel()) and not bool(weight.detach().any())


def _leaves(names: set[str]) -> set[str]:
    """Return those of the layers that contain none of the others."""
    parts = (name.split(".") for name in names)
    return names - {".".join(part[:depth]) for part in parts for depth in range(1, len(part))}


def _parameters(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that these layers own directly, each once."""
    wanted = set(names)
    owned = {name: value for name, value in named_parameters(model).items() if name.rpartition(".")[0] in wanted}
    first = {id(value): name for name, value in reversed(owned.items())}
    return {name: value for name, value in owned.items() if first[id(value)] == name}
