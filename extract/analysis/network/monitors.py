"""Monitors for training loops: statistics of activations or gradients at regular steps, and alarms.

    with GradientMonitor(model, every=100, to="gradients.csv") as monitor:
        for images, labels in loader:                 # the unchanged training loop
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            ...

A step is one forward of the model in training mode. Between monitored steps, the layers have no hooks. In monitored
steps, the results and the random numbers drawn are the same as without a monitor.
"""

from __future__ import annotations

import contextlib
import csv
import math
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from extract.analysis.network.activation_statistics import Statistics, norm_of, summarise
from extract.analysis.network.inspection import does_something, positions_of
from extract.errors import InputError, LayertapError
from extract.system.csv_cells import safe_cell
from extract.taps.layer_names import match_layers, named_layers, named_parameters, unwrap
from extract.taps.record import Record
from extract.taps.scope import ModelBoundHook
from extract.taps.taps import Taps, capture_of, taps_of

__all__ = ["ActivationMonitor", "Alarm", "GradientMonitor"]

_DEAD_LOOKS = 3  # consecutive monitored steps in which a channel must be constant to be called dead
_VALUES_FOR_DEAD = 20  # of a channel, in each monitored step
_SPREADS = 5  # monitored steps in which the death of a layer is that of an earlier one, which spreads
_DEAD_PART = 0.5  # share of dead channels in a layer that raises an alarm
_EXPLODED = 100.0  # times the median of the layer's earlier sizes
_LOOKS_BEFORE = 3  # earlier sizes needed for the median

# Norm of a weight's change in a step divided by the norm of the weight. It should be about 1e-3: "A Recipe for Training
# Neural Networks" (Karpathy 2019), cs231n ("Babysitting the learning process"). Adam with 3e-3 changes weights of 0.02
# by 0.15 in its first steps. Changes below 1e-7 are mostly lost in the rounding of float32 (6e-8).
_FAST = 0.3
_SLOW = 1e-7
_USUAL_UPDATE = 1e-3
_FAST_LOOKS = 3  # consecutive monitored steps
_WILD = 3.0  # in one step: the weights of before are lost, and the network may be dead after it
_UNMOVED_LOOKS = 3  # consecutive monitored steps in which a weight with a gradient did not change
_SLOW_LOOKS = 5  # monitored steps since the start; at its end, a schedule may lower the learning rate to zero

Rows = list[dict[str, Any]]
Target = Any  # a path of a CSV file, a SummaryWriter, a function of (step, rows), or None


@dataclass(frozen=True)
class Alarm:
    """A problem that is a reason to stop or change the training.

    Attributes:
        step: step in which the problem was detected.
        kind: "not finite", "dead", "exploding", "learning rate" or "not updated".
        layer: first layer with the problem in the order of computation; for gradients, the layer nearest to the loss;
            "optimizer" for a learning rate.
        text: description of the problem.
    """

    step: int
    kind: str
    layer: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.layer}: {self.text}"


class _Monitor:
    """Base of both monitors: record every `every` steps, write the rows and raise alarms.

    Attributes:
        step: number of forwards in training mode started so far.
        rows: rows of the last monitored step: one row for each layer or parameter.
        alarms: all alarms raised so far.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Sequence[str] | None = None,
        *,
        every: int = 100,
        to: Target = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ):
        if every < 1:
            raise InputError(f"every is {every}; it must be at least 1")
        self._model = model
        self._names = _default_layers(model) if layers is None else match_layers(named_layers(model), layers)
        self._all_layers = layers is None
        self._every = every
        self._write_rows = _row_writer(to)
        self._on_alarm = on_alarm or (lambda alarm: warnings.warn(str(alarm), RuntimeWarning, stacklevel=2))
        self._monitored = contextlib.ExitStack()  # the taps, from the start of a monitored step to the next forward
        self._input_shape: tuple[int, ...] = ()
        self._handle: RemovableHandle | None = None
        self._earlier_sizes: dict[str, list[float]] = defaultdict(list)
        # By layer, for each channel: the smallest value, and in how many consecutive monitored steps it was constant.
        self._constant: dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
        self._unmoved: Counter[tuple[str, str]] = Counter()  # parameter -> consecutive looks without a change
        self._updates: list[float] = []  # median update of the weights in each monitored step
        self._active: set[tuple[str, str]] = set()  # (kind, layer) of alarms that persist
        self._looks = 0  # monitored steps
        self._last_death = -_SPREADS  # the look in which a layer was called dead for the last time
        self.step = 0
        self.rows: Rows = []
        self.alarms: list[Alarm] = []

    def __enter__(self) -> Self:
        if self._handle is not None:
            raise LayertapError("this monitor is already in use")
        if self._model._compiled_call_impl is not None:
            raise InputError("model.compile() compiles hooks too", hint="monitor torch.compile(model) instead")
        self._handle = self._model.register_forward_pre_hook(ModelBoundHook(self._on_forward, {}))
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._monitored.__exit__(*(failure or (None, None, None)))

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model: end the last monitored step, and start the next if it is due."""
        # Hooks are registered now and removed at the next forward: a step that is not monitored costs nothing, and
        # compiled code stays compiled.
        self._monitored.close()  # the backward pass of the last monitored step is over: its taps pass on the record
        if not module.training or not torch.is_grad_enabled():
            return
        if self.step % self._every == 0:
            tensors = [value for value in args if isinstance(value, Tensor)]
            self._input_shape = tuple(tensors[0].shape) if tensors else ()
            # No tensor of the training is replaced by a copy.
            taps = taps_of(self._model, replaces=False, on_record=partial(self._on_record, self.step))
            self._request(taps)
            self._monitored.enter_context(taps)
            if module is unwrap(module):  # hooks added now are not called for this module in this forward
                capture_of(taps).begin(sys._getframe(2))
        self.step += 1

    def _summary(self, value: Tensor) -> dict[str, Tensor]:
        if not value.is_floating_point() or not value.ndim:
            return {}
        return summarise(value, positions_of(value.shape, self._input_shape))

    def _on_record(self, step: int, record: Record) -> None:
        self.rows = [{"step": step, **row} for row in self._rows_of(record)]
        alarms = [Alarm(step, *problem) for problem in self._alarms_of(self.rows)]
        died = {alarm.layer for alarm in alarms if alarm.kind == "dead" and ("dead", alarm.layer) not in self._active}
        self._looks += 1
        spreads = self._looks - self._last_death <= _SPREADS
        self._last_death = self._looks if died else self._last_death
        first_of_kind: dict[str, Alarm] = {}
        for alarm in alarms:  # in later layers, a kind follows from the first layer; but a death long after does not
            if alarm.kind != "dead" or spreads or alarm.layer in died:
                first_of_kind.setdefault(alarm.kind, alarm)
        new = [alarm for alarm in first_of_kind.values() if (alarm.kind, alarm.layer) not in self._active]
        self._active = {(alarm.kind, alarm.layer) for alarm in alarms}
        self._write_rows(step, self.rows)
        self.alarms += new
        for alarm in new:
            self._on_alarm(alarm)

    def _exploded(self, name: str, size: float) -> bool:
        """Return whether a size is far larger than the earlier ones; if not, remember it."""
        earlier = self._earlier_sizes[name]
        if len(earlier) >= _LOOKS_BEFORE and size > _EXPLODED * median(earlier) > 0:
            return True
        if math.isfinite(size):
            earlier.append(size)
            del earlier[:-_REMEMBERED]
        return False

    def _request(self, taps: Taps) -> None:
        raise NotImplementedError

    def _rows_of(self, record: Record) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def _alarms_of(self, rows: Rows) -> Iterable[tuple[str, str, str]]:
        """Yield (kind, layer, text) of all problems; for each kind, the first layer comes first."""
        for row in rows:
            if row["not_finite"]:
                gradient = f"gradient of {row['of']}: " if "of" in row else ""
                yield "not finite", row["layer"], f"{gradient}{row['not_finite']:,} values are not finite"
        for row in rows:
            what, size = (f"the gradient of {row['of']}", "norm") if "of" in row else ("its output", "rms")
            if self._exploded(f"{row['layer']} {row.get('of')}", row[size]):
                yield "exploding", row["layer"], f"{what} is 100 times as large as before ({size} {row[size]:.3g})"


_REMEMBERED = 20  # sizes of each layer or gradient


class ActivationMonitor(_Monitor):
    """Monitor activations during training, with alarms for NaN, dead channels and explosions.

    Args:
        model: model in training. Compiled code runs uncompiled in monitored steps.
        layers: names or globs; None: every layer that has no layers inside, or parameters of its own.
        every: interval of monitored steps; the first step is monitored.
        to: destination of the rows: a `.csv` file, a TensorBoard `SummaryWriter`, or a function of (step, rows).
        on_alarm: called with each `Alarm`; by default, an alarm is a `RuntimeWarning`.

    A row has step, layer, mean, std, rms, min, max, zeros (share of the values), dead (number of channels that were
    constant in three consecutive monitored steps), channels, not_finite (number of values).
    """

    def _request(self, taps: Taps) -> None:
        taps.keep(self._names, reduce=self._summary)

    def _rows_of(self, record: Record) -> Iterable[dict[str, Any]]:
        for name, tensors in record.items():
            if tensors:
                statistics = Statistics()
                statistics.add(tensors)
                looks = self._looks_at_dead(name, statistics)
                yield {
                    "layer": name, "mean": statistics.mean, "std": statistics.std, "rms": statistics.rms,
                    "min": statistics.min, "max": statistics.max, "zeros": statistics.zeros,
                    "dead": int((looks >= _DEAD_LOOKS).sum()), "channels": statistics.channels,
                    "not_finite": statistics.nan + statistics.infinite,
                }  # fmt: skip

    def _looks_at_dead(self, name: str, statistics: Statistics) -> NDArray[np.int64]:
        """Return, for each channel, the number of consecutive monitored steps with the same constant value."""
        channels = np.arange(statistics.channels)
        dead = np.isin(channels, statistics.dead) & (statistics.count >= _VALUES_FOR_DEAD)
        values, looks = self._constant.get(name, (statistics.low, np.zeros_like(channels)))
        if len(looks) != len(channels):
            values, looks = statistics.low, np.zeros_like(channels)
        with np.errstate(invalid="ignore"):
            near = np.abs(statistics.low - values) <= 1e-6 * np.abs(values) + 1e-6 * statistics.std
        looks = np.where(dead, np.where(near, looks, 0) + 1, 0)
        self._constant[name] = statistics.low, looks
        return looks

    def _alarms_of(self, rows: Rows) -> Iterable[tuple[str, str, str]]:
        yield from super()._alarms_of(rows)
        for row in rows:
            if row["dead"] >= _DEAD_PART * row["channels"]:
                yield "dead", row["layer"], f"{row['dead']:,} of {row['channels']:,} channels are constant"


class GradientMonitor(_Monitor):
    """Monitor the gradients of layer outputs and parameters during training, with alarms for NaN and explosions.

    The arguments are those of `ActivationMonitor`. The gradient of an output is that of the tensor, summed over all its
    uses. It may be missing if the model writes to the tensor in place.

    A row has step, layer, of ("output", or a parameter's name), norm (L2, of the whole batch), std and zeros (share of
    the values) for an output, ratio (to the norm of the parameter) and update (norm of the change until the next
    forward, to that of the parameter) for a parameter, not_finite (number of values). With a GradScaler, the gradients
    are scaled. The backward pass must end before the next forward starts.

    An alarm for a learning rate means that the median update of the weights that change is above 3 in a monitored step,
    above 0.3 in three consecutive ones, or below 1e-7 in all of the first five. "not updated" means that a weight with
    a gradient did not change in three consecutive ones, while others did. Steps without any change do not count.
    """

    def _request(self, taps: Taps) -> None:
        taps.keep(self._names, "grad", reduce=self._summary)
        owners = {*self._names, ""} if self._all_layers else set(self._names)  # "": parameters of the model itself
        parameters = {n: p for n, p in named_parameters(self._model).items() if n.rpartition(".")[0] in owners}
        if parameters:
            taps.keep(list(parameters), "grad", reduce=norm_of)
        # Computed now, since the optimiser may change the parameters before the gradients are read.
        self._sizes = {name: float(parameter.detach().norm()) for name, parameter in parameters.items()}
        # The parameters of the monitored step; at its end, the optimizer has changed them. A copy needs no access to
        # it.
        self._before = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def _rows_of(self, record: Record) -> Iterable[dict[str, Any]]:
        parameters, before, self._before = named_parameters(self._model), self._before, {}
        for name, site in record.sites.items():
            tensors = record[site]
            row = dict.fromkeys(("layer", "of", "norm", "std", "zeros", "ratio", "update", "not_finite"), math.nan)
            if site.layer in self._sizes:
                layer, _, of = site.layer.rpartition(".")
                norm, size = float(tensors["norm"]), self._sizes[site.layer]
                change = float((parameters[site.layer].detach() - before[site.layer]).norm())
                shares = {"ratio": norm / size, "update": change / size} if size else {}
                yield row | {"layer": layer, "of": of, "norm": norm, "not_finite": int(tensors["not_finite"])} | shares
            elif tensors:
                numbers = Statistics()
                numbers.add(tensors)
                yield row | {
                    "layer": name.removesuffix("@grad"), "of": "output", "norm": numbers.rms * math.sqrt(numbers.total),
                    "std": numbers.std, "zeros": numbers.zeros, "not_finite": numbers.nan + numbers.infinite,
                }  # fmt: skip

    def _alarms_of(self, rows: Rows) -> Iterable[tuple[str, str, str]]:
        # Rows are in the order in which the gradients were computed, starting at the loss.
        yield from super()._alarms_of(rows)
        weights = [row["update"] for row in rows if row["of"].startswith("weight") and math.isfinite(row["update"])]
        moved = [update for update in weights if update > 0]  # not those that the optimizer does not have
        if not moved:
            return  # the optimizer has not run, as while gradients are accumulated
        self._updates.append(median(moved))
        # Of weights alone: the gradient of a bias in front of a batch normalisation is a rounding error.
        for row in rows:
            stays = row["of"].startswith("weight") and row["norm"] > 0 and row["update"] == 0
            name = (row["layer"], row["of"])
            self._unmoved[name] = self._unmoved[name] + 1 if stays and self._updates[-1] > _SLOW else 0
        if stuck := [name for name, looks in self._unmoved.items() if looks >= _UNMOVED_LOOKS]:
            layer, of = stuck[-1]  # the gradients come in the order from the loss to the first layer
            others = f" (other such weights: {len(stuck) - 1:,})" if stuck[1:] else ""
            text = f"no step changes {of}, which has a gradient{others}; does the optimizer have it?"
            yield "not updated", layer, text
        usual = f"the rule of thumb is {_USUAL_UPDATE:g}; is the learning rate too"
        repeated = len(self._updates) >= _FAST_LOOKS and min(self._updates[-_FAST_LOOKS:]) > _FAST
        persists = ("learning rate", "optimizer") in self._active and self._updates[-1] > _FAST
        if repeated or persists or self._updates[-1] > _WILD:
            text = f"the median change of a weight in a step is {self._updates[-1]:.2g} times its size; {usual} high?"
            yield "learning rate", "optimizer", text
        if len(self._updates) >= _SLOW_LOOKS and max(self._updates) < _SLOW:
            text = f"the median change of a weight in a step is below {_SLOW:g} times its size; {usual} low?"
            yield "learning rate", "optimizer", text


def _default_layers(model: nn.Module) -> list[str]:
    """Return the layers that have no layers inside, or parameters of their own, and change their input.

    Raises:
        InputError: the model has no such layer.
    """
    names = [name for name, module in named_layers(model).items()
             if does_something(module) and (module._parameters or not list(module.children()))]  # fmt: skip
    if not names:
        raise InputError("the model is a single layer", hint="wrap the model: nn.Sequential(model)")
    return names


def _row_writer(to: Target) -> Callable[[int, Rows], None]:
    """Return the function of (step, rows) that writes the rows of a step.

    Raises:
        InputError: `to` is of another kind, or its folder does not exist.
    """
    if to is None:
        return lambda step, rows: None
    if hasattr(to, "add_scalar"):
        return lambda step, rows: _to_tensorboard(to, step, rows)
    if callable(to):
        return to  # type: ignore[no-any-return]
    path = Path(to)
    if path.suffix != ".csv":
        raise InputError(f"to={str(to)!r}: expected a .csv file, a SummaryWriter, or a function of (step, rows)")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: no such folder")
    return lambda step, rows: _append_csv(path, rows)


def _to_tensorboard(writer: Any, step: int, rows: Rows) -> None:
    for row in rows:
        name = "/".join(str(row[key]) for key in ("layer", "of") if key in row)
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step" and not math.isnan(value):
                writer.add_scalar(f"{name}/{key}", value, step)


def _append_csv(path: Path, rows: Rows) -> None:
    """Append rows to a CSV file; text as in `extract.system.csv_cells`.

    Raises:
        InputError: the file exists with other columns.
    """
    if not rows:
        return
    columns = list(rows[0])
    with path.open("a+", encoding="utf-8", newline="") as file:  # it writes at the end, wherever it has read
        file.seek(0)
        head = file.readline()
        if head and head.rstrip("\r\n") != ",".join(columns):
            raise InputError(f"{path} already exists, with other columns", hint="name another file")
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not head:
            writer.writeheader()
        writer.writerows({name: safe_cell(value) for name, value in row.items()} for row in rows)
