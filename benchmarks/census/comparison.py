"""Compare what `Taps` record of a model with what bare hooks and a twin see: outputs, inputs, gradients, edits, rows.

Each check adds its numbers to a `Report`. A difference is `wrong`; a value that layertap declines, with its reason, is
`refused`; what has no independent reference is `uncompared`.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.census.gradients import Backward, NoGradientError, agree, backward, twin_gradients
from benchmarks.census.rows import compare_rows
from benchmarks.census.values import Path, Place, digest, names_of, state_of, tensors_of, values_by_bare_hooks
from extract import Taps
from extract.errors import LayertapError
from extract.taps.stand_ins import StandInError

# Where a layer returns its input, Taps pass a copy on, and autograd sums the gradients of the readers in another order.
SUMMED_DIFFERENTLY = 1e-5  # relative to the largest gradient of the tensor
# A copy of a slice is contiguous, and some functions round contiguous tensors otherwise.
ROUNDED_DIFFERENTLY = 1e-4
MOST_REFUSALS = 100  # of gradients of one model; each costs a forward


@dataclass
class Report:
    """Numbers of one model.

    Attributes:
        numbers: what was compared, by kind: layers, calls, outputs, inputs, gradients, ...
        wrong: how many of them differ, by kind.
        refused: values that layertap declines, by reason.
        uncompared: values without an independent reference, by reason.
        examples: of each kind of wrong value, the first three places.
        tell: called after each check, so that numbers outlive a process that is stopped.
    """

    numbers: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    uncompared: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda check: None

    def compare(self, kind: str, differing: Iterable[Any], count: int) -> None:
        """Add `count` comparisons of a kind, of which those in `differing` are wrong."""
        places = list(differing)
        self.numbers[kind] += count
        self.wrong[kind] += len(places)
        if places:
            self.examples.setdefault(kind, []).extend(map(str, places[:3]))

    def add(self, other: Report) -> None:
        """Add the numbers of another report."""
        for counts, more in (
            (self.numbers, other.numbers), (self.wrong, other.wrong),
            (self.refused, other.refused), (self.uncompared, other.uncompared),
        ):  # fmt: skip
            counts.update(more)
        for kind, places in other.examples.items():
            self.examples.setdefault(kind, []).extend(places)


def compare(model: nn.Module, pictures: Tensor, report: Report) -> Report:
    """Run all checks of a model that is in eval mode; `pictures` are (2, 3, H, W)."""

    def run() -> Any:
        torch.manual_seed(0)
        return model(pictures.clone())

    with torch.no_grad():
        run()  # the first call of some models installs hooks of their own
    before = state_of(model)
    report.numbers["layers"] = sum(map(len, names_of(model).values())) - 1
    checks: dict[str, Callable[[], None]] = {
        "outputs and inputs": lambda: _compare_values(model, run, report),
        "edits": lambda: _compare_edits(model, run, report),
        "gradients": lambda: _compare_gradients_precisely(model, pictures, report),
        "rows": lambda: compare_rows(model, pictures, report),
    }
    for name, check in checks.items():
        report.tell(name)
        try:
            check()
        except LayertapError as error:  # layertap declines the whole model
            report.refused[f"{name}: {reason_of(error)}"] += 1
    after = state_of(model)
    report.compare("state", [name for name in before if before[name] != after[name]], len(before))
    return report


def reason_of(error: Exception, spec: str = "the model") -> str:
    """Return a message without what differs between layers and models: quoted names, sites, numbers and the spec."""
    text = str(error).split("\n")[0].replace(spec, "the model")
    if isinstance(error, StandInError):
        return "the model writes in place into the output of the layer, which has other references"
    text = re.sub(r"'[^']*'", "'...'", text)
    return re.sub(r"\d[\d,.]*", "N", text)


def _compare_values(model: nn.Module, run: Callable[[], Any], report: Report) -> None:
    truth = values_by_bare_hooks(model, run, naive=True)
    changed = {place for place, tensor in truth.naive.items() if digest(tensor) != truth.outputs[place]}
    report.numbers["wrong calls of naive hooks"] = len({place[:2] for place in changed})
    report.numbers.update({"outputs with NaN": sum(1 for tensor in truth.naive.values() if tensor.isnan().any())})
    truth.naive.clear()
    report.numbers["calls"] = len({(place.layer, place.call) for place in truth.outputs if place.layer})
    with torch.no_grad():
        plain = dict(tensors_of(run()))
    with torch.no_grad(), Taps(model).keep(["**", ""]).keep(["**", ""], "input") as taps:
        output = dict(tensors_of(run()))
    _compare_model_outputs("model outputs", output, plain, report)
    record = {site: digest(taps.record[site]) for site in taps.record.sites.values()}
    for kind, what, values in (("outputs", "output", truth.outputs), ("inputs", "input", truth.inputs)):
        kept = {Place(s.layer, s.call, s.path): text for s, text in record.items() if s.what == what}
        report.compare(kind, [place for place in values | kept if values.get(place) != kept.get(place)], len(values))


def _compare_edits(model: nn.Module, run: Callable[[], Any], report: Report) -> None:
    with torch.no_grad():
        plain = dict(tensors_of(run()))
    for what in ("output", "input"):
        with torch.no_grad(), Taps(model).edit(["**", ""], lambda h: h, what=what):
            output = dict(tensors_of(run()))
        _compare_model_outputs("model outputs under identity edits", output, plain, report)


def _compare_model_outputs(kind: str, output: dict[Path, Tensor], plain: dict[Path, Tensor], report: Report) -> None:
    """Compare what two forwards of a model return; how many tensors differ by rounding is counted."""
    known = output.keys() & plain.keys()
    rounded = {path for path in known if digest(output[path]) != digest(plain[path])}
    wrong = {path for path in rounded if not agree(output[path], plain[path], ROUNDED_DIFFERENTLY)}
    report.numbers[f"rounded {kind}"] += len(rounded - wrong)
    report.compare(kind, wrong | (output.keys() ^ plain.keys()), len(plain))


def _compare_gradients_precisely(model: nn.Module, pictures: Tensor, report: Report) -> None:
    """Compare gradients; again in double precision if some are wrong, since some networks amplify rounding.

    In double precision, what is left of a difference in rounding is far below the tolerances.
    """
    comparison = Report()
    _compare_gradients(model, pictures, comparison)
    if +comparison.wrong:
        with contextlib.suppress(RuntimeError, TypeError):  # a model may contain float32 constants
            in_double = Report()
            _compare_gradients(copy.deepcopy(model).double(), pictures.double(), in_double)
            in_double.numbers["networks whose gradients were compared in double precision"] = 1
            comparison = in_double
    report.add(comparison)


def _compare_gradients(model: nn.Module, pictures: Tensor, report: Report) -> None:
    try:
        plain = backward(model, pictures)
    except NoGradientError as error:
        report.uncompared[f"gradients: {error}"] += 1
        return
    except RuntimeError as error:
        report.uncompared[f"gradients: the model's own backward pass fails: {reason_of(error)}"] += 1
        return
    with Taps(model).edit(["**", ""], lambda h: h) as taps:
        edited = backward(model, pictures, taps)
    _compare_backward("gradients under identity edits", edited, plain, ROUNDED_DIFFERENTLY, report)
    _compare_model_outputs("model outputs under identity edits", edited.output, plain.output, report)
    result = _recorded_gradients(model, pictures, report)
    if result is None:
        return
    tapped, recorded, layers = result
    _compare_backward("gradients of parameters", tapped, plain, SUMMED_DIFFERENTLY, report)
    _compare_model_outputs("model outputs", tapped.output, plain.output, report)
    del tapped, plain
    _compare_with_twin(model, pictures, recorded, layers, report)


def _compare_backward(kind: str, result: Backward, plain: Backward, tolerance: float, report: Report) -> None:
    """Compare gradients up to rounding; how many differ by rounding is counted.

    The gradient of a key's bias in attention is zero but for rounding: hence the floor.
    """
    truth, gradients = plain.gradients, result.gradients
    floor = 1e-6 * max(float(gradient.abs().nan_to_num(0, 0, 0).max()) for gradient in truth.values())
    known = truth.keys() & gradients.keys()
    rounded = {name for name in known if digest(truth[name]) != digest(gradients[name])}
    wrong = {name for name in rounded if not agree(truth[name], gradients[name], tolerance, floor)}
    report.numbers[f"rounded {kind}"] += len(rounded - wrong)
    report.compare(kind, sorted(wrong | (truth.keys() ^ gradients.keys())), len(truth))


def _recorded_gradients(
    model: nn.Module, pictures: Tensor, report: Report
) -> tuple[Backward, dict[Place, Tensor], set[str]] | None:
    """Keep the gradients of all layers but those that are refused; None if there are too many of those."""
    names = names_of(model)
    layers = {name: module for module, texts in names.items() for name in texts}
    wanted = dict(layers)
    for _ in range(MOST_REFUSALS):
        try:
            with Taps(model).keep(list(wanted), "grad") as taps:
                result = backward(model, pictures, taps)
        except StandInError as error:
            report.refused[f"gradients: {reason_of(error)}"] += 1
            report.examples.setdefault("refused gradients", []).append(str(error.site))
            for alias in names[layers[error.site.layer]]:
                del wanted[alias]
            continue
        record = taps.record
        return result, {Place(s.layer, s.call, s.path): record[s] for s in record.sites.values()}, set(wanted)
    report.uncompared[f"gradients: refused for more than {MOST_REFUSALS} layers"] += 1
    return None


def _compare_with_twin(
    model: nn.Module, pictures: Tensor, recorded: dict[Place, Tensor], layers: set[str], report: Report
) -> None:
    twin = twin_gradients(model, pictures)

    def run() -> Any:
        torch.manual_seed(0)
        return model(pictures.clone().requires_grad_().clone())

    truth = values_by_bare_hooks(model, run, autograd=True)
    known = truth.outputs.keys() - twin.unclear
    unfaithful = [
        place for place in truth.outputs if place in known and twin.outputs.get(place) != truth.outputs[place]
    ]
    if unfaithful:
        report.uncompared["gradients: the twin computes other values"] += len(recorded)
        report.examples.setdefault("unfaithful twin", []).extend(map(str, unfaithful[:3]))
        return
    unclear = recorded.keys() & twin.unclear
    if unclear:
        report.uncompared["gradients: of a class that PyTorch does not take apart"] += len(unclear)
        recorded = {place: gradient for place, gradient in recorded.items() if place not in unclear}
    expected = {place: text for place, text in twin.gradients.items() if place.layer in layers}
    unequal = [p for p in expected | recorded if p not in recorded or digest(recorded[p]) != expected.get(p)]
    near: set[Place] = set()
    if unequal:
        kept = twin_gradients(model, pictures, keep=unequal).kept
        near = {p for p in unequal if p in kept and p in recorded and agree(kept[p], recorded[p], SUMMED_DIFFERENTLY)}
    report.numbers["rounded gradients"] += len(near)
    report.numbers["gradients of zero"] += sum(1 for gradient in recorded.values() if not gradient.any())
    report.compare("gradients", [place for place in unequal if place not in near], len(expected))
