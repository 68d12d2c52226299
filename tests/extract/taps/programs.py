"""Whether a request of `Taps` changes what a random model computes: outputs, gradients, buffers, inputs, bit for bit.

A look, and an edit that changes nothing, must change nothing, or be refused by an error that names a layer.

    python -m tests.extract.taps.programs 100 --request grad_input    # a table, and the smallest programs that fail
    python -m tests.extract.taps.programs --case 17                   # one program, and what becomes of each request
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.census.values import tensors_of
from extract import LayertapError, Taps
from tests.extract.taps.program_writer import Program, program, shrink

Mode = Literal["no_grad", "grad"]
# "without effect": nothing changed, and the end of the block says that an edit found no value or gradient.
Outcome = Literal["equal", "without effect", "refused", "different"]
Values = dict[str, Tensor | str]
OpenTaps = Callable[[nn.Module], AbstractContextManager[Any]]


class InvalidError(Exception):
    """The program fails without layertap, or computes too large numbers."""


def same(h: Tensor) -> Tensor:
    return h


def times_one(h: Tensor) -> Tensor:
    return h * 1


EDITS = {"same": same, "times_one": times_one}
_KINDS: tuple[Any, ...] = ("output", "input", "grad", "grad_input")
ALL: tuple[str, ...] = ("**", "")
FUNCTIONS = ("**/*", "/*")


@dataclass(frozen=True)
class Request:
    """What is asked of `Taps`.

    Attributes:
        verb: `keep`, or what the edit is called.
        what: see `Taps.keep`; or "everything": outputs, inputs and the gradients of both.
        of: layers or functions; None for one layer at random.
        number: number of taps that are open, one inside the other.
    """

    verb: Literal["keep", "same", "times_one"]
    what: Any
    of: tuple[str, ...] | None = ALL
    number: int = 1

    def __str__(self) -> str:
        of = {ALL: "", FUNCTIONS: "_of_functions", None: "_of_one"}[self.of]
        return f"{self.verb}_{self.what}{of}" + ("_twice" if self.number == 2 else "")

    @property
    def needs_gradients(self) -> bool:
        """Whether it is refused, rightly, where nothing has a gradient."""
        return self.verb != "keep" and "grad" in self.what

    @property
    def passes_on(self) -> bool:
        """Whether the model continues with other tensors than its layers receive and return."""
        return self.verb != "keep" or self.what not in ("output", "input")

    @contextlib.contextmanager
    def opened(self, model: nn.Module, names: list[str]) -> Iterator[None]:
        """Context manager: open taps of a model; `names` are the layers that are asked for."""
        with contextlib.ExitStack() as opened:
            for _ in range(self.number):
                taps = Taps(model)
                for what in _KINDS if self.what == "everything" else (self.what,):
                    if self.verb == "keep":
                        taps.keep(names, what)
                    else:
                        taps.edit(names, EDITS[self.verb], what)
                opened.enter_context(taps)
            yield


REQUESTS = {
    str(request): request
    for request in (
        *(Request("keep", what) for what in _KINDS),
        *(Request("same", what) for what in _KINDS),
        *(Request("times_one", what) for what in _KINDS),
        *(Request(verb, what, None) for verb in ("keep", "times_one") for what in _KINDS),
        *(Request(verb, "everything") for verb in ("keep", "same")),
        *(Request("keep", what, number=2) for what in ("grad", "grad_input")),
        *(Request(verb, what, FUNCTIONS) for verb in ("keep", "same", "times_one") for what in ("output", "grad")),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What became of one request.

    Attributes:
        outcome: see `Outcome`.
        detail: the reason of a refusal, or what differs.
        tests_identity: whether it differs where a program asks which tensor it has, and another had to be passed on.
    """

    outcome: Outcome
    detail: str = ""
    tests_identity: bool = False


def names_in(message: str, layers: list[str]) -> bool:
    """Whether a message names one of these layers, or the model itself."""
    texts = "|".join(re.escape(name) for name in layers if name) or "(?!)"
    return bool(re.search(rf"(?<![\w.])(?:{texts})(?![\w])|layer ''|layer '/|the model itself|^[@/]", message))


def reason_of(message: str) -> str:
    """Return the first sentence of a message, without the names and numbers in it."""
    message = re.sub(r"'[^']*'", "'...'", re.split(r"\n|\. |: \[| is at version", message)[0])
    return re.sub(r"\b(?:l\d+[\w.]*|\d+)((?:[#:/@][\w.]+)*)", "N", message)


def differences(values: Mapping[str, Tensor | str], expected: Mapping[str, Tensor | str]) -> list[str]:
    """Return what differs in a bit; of gradients, in more than the sign of a zero.

    A write that reaches two tensors adds the gradient of what it has overwritten, which is zero: 0 + -0 is 0.
    """
    found = [f"{name} is {'there' if name in values else 'missing'}" for name in values.keys() ^ expected.keys()]
    for name in (name for name in expected if name in values):
        a, b = values[name], expected[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                found.append(f"{name}: {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}")
            elif not (torch.equal(a, b) if name.startswith("gradient of") else torch.equal(_bits(a), _bits(b))):
                found.append(f"{name} has other values")
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or a != b:
            found.append(f"{name}: {a}, expected {b}")
    return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def observe(program: Program, mode: Mode, open_taps: OpenTaps | None) -> Values:
    """Call the model of a program twice and return all that can be seen of it.

    Args:
        program: the program.
        mode: "grad" has a backward pass after both calls.
        open_taps: makes the taps that are open meanwhile.

    Raises:
        LayertapError: a request is refused while the model runs. What the end of the block raises is `"refusal"`.
    """
    model = program.model(training=mode == "grad" and program.training)
    torch.default_generator.manual_seed(0)  # torch.manual_seed asks every kind of device
    seen: Values = {}
    leaves = [_integers(seed).requires_grad_() for seed in (1, 2)]
    taps = open_taps(model) if open_taps is not None else contextlib.nullcontext()
    has_run = False
    try:
        with torch.set_grad_enabled(mode == "grad"), taps:
            _run(program, model, leaves, seen)
            has_run = True
    except LayertapError as error:
        if not has_run:
            raise
        seen["refusal"] = str(error)
    seen["state of random numbers"] = torch.get_rng_state()
    parameters = [*model.named_parameters(), *((f"leaf {index}", leaf) for index, leaf in enumerate(leaves))]
    for name, parameter in parameters:
        seen[f"gradient of {name}"] = "None" if parameter.grad is None else parameter.grad
        seen[name] = parameter.detach().clone()
    return seen


def _run(program: Program, model: nn.Module, leaves: list[Tensor], seen: Values) -> None:
    """Call a model with each leaf, and compute gradients if they are on."""
    outputs: list[tuple[str, Tensor]] = []
    inputs: list[tuple[str, Tensor]] = []
    for call, leaf in enumerate(leaves):
        given = program.make_inputs(leaf, _integers(3))
        inputs += [(f"input {index} of call {call}", tensor) for index, tensor in enumerate(given)]
        found = [(f"output {path} of call {call}", tensor) for path, tensor in tensors_of(model(*given))]
        seen.update({name: tensor.detach().clone() for name, tensor in found})
        outputs += found
    after = [(f"{name} after all", tensor) for name, tensor in (*inputs, *outputs, *model.named_buffers())]
    seen.update({name: tensor.detach().clone() for name, tensor in after})
    differentiable = [(name, tensor) for name, tensor in outputs if tensor.requires_grad]
    seen["outputs with gradients"] = str([name for name, _ in differentiable])
    if torch.is_grad_enabled():
        if not differentiable:
            raise InvalidError("nothing has a gradient")
        terms = [(tensor * (index % 3 + 1)).sum() for index, (_, tensor) in enumerate(differentiable)]
        sum(terms[1:], terms[0]).backward()  # type: ignore[no-untyped-call]


def _integers(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (4, 4), generator=generator).double()


class NoOverlaps(TorchFunctionMode):
    """Refuses functions that write into memory that they also read elsewhere: what they compute is not defined."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.endswith("_") and args and isinstance(args[0], Tensor):
            place = _place(args[0])
            others = [_place(read) for read in args[1:] if isinstance(read, Tensor)]
            if any(other[0] == place[0] and other != place for other in others):
                raise InvalidError("a function reads a part of what it writes")
        return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.shape, tensor.stride()


class NoHiddenWrites(torch.autograd.graph.saved_tensors_hooks):
    """Refuses gradients of values that were written to after autograd saved them, hidden by `.data`: they are wrong."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: (tensor, tensor.detach().clone()), self._unpack)

    @staticmethod
    def _unpack(saved: tuple[Tensor, Tensor]) -> Tensor:
        if not torch.equal(saved[0], saved[1]):
            raise InvalidError("a write through .data changes what autograd has saved")
        return saved[0]


_MOST = 2.0**50  # integers up to here are exact, and so are sums of a few


@functools.lru_cache(4_000)
def plainly(program: Program, mode: Mode) -> Values:
    """Return what is seen of a program without layertap.

    Raises:
        InvalidError: it fails, or its numbers are too large for sums to be exact.
    """
    try:
        with NoOverlaps():
            values = observe(program, mode, None)
        if mode == "grad":
            with NoHiddenWrites():
                observe(program, mode, None)
    except InvalidError:
        raise
    except Exception as error:
        raise InvalidError(f"{type(error).__name__}: {error}") from error
    if any(
        tensor.numel() and not tensor.abs().max() < _MOST for tensor in values.values() if isinstance(tensor, Tensor)
    ):
        raise InvalidError("numbers are too large")
    return values


def called_layers(program: Program, mode: Mode) -> list[str]:
    """Return the names of the layers that the model of a program calls."""
    names: list[str] = []

    def open_hooks(model: nn.Module) -> Any:
        for name, module in model.named_modules(remove_duplicate=False):
            module.register_forward_hook(lambda *_, name=name: names.append(name))
        return contextlib.nullcontext()

    observe(program, mode, open_hooks)
    return sorted(set(names))


def check(program: Program, request: Request, mode: Mode, expected: Values, only: str | None = None) -> Result:
    """Run a program with a request, and compare.

    Args:
        program: the program.
        request: the request.
        mode: with or without gradients.
        expected: what `plainly` returned.
        only: the layer of a request of one layer.
    """
    names = list(request.of) if request.of is not None else [only or ""]
    layers = [name for name, _ in program.model(False).named_modules(remove_duplicate=False)]
    try:
        values = observe(program, mode, partial(request.opened, names=names))
    except LayertapError as error:
        if names_in(str(error), layers):
            return Result("refused", reason_of(str(error)))
        return Result("different", f"refused without the name of a layer: {error}")
    except Exception as error:
        return Result("different", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    refusal = str(values.pop("refusal", ""))
    if request.passes_on:
        # An output that is the model's own buffer would change with it in the next call: the one passed on does not.
        expected = {name: value for name, value in expected.items() if not re.match("output .* after all", name)}
        values = {name: value for name, value in values.items() if name in expected or "after all" not in name}
    found = differences(values, expected)
    if not found and "never took effect" in refusal:
        return Result("without effect", reason_of(refusal))
    if not found:
        return Result("refused", reason_of(refusal)) if refusal else Result("equal")
    return Result("different", "; ".join(found[:3]), _is_unnoticeable(program, request, only))


def _is_unnoticeable(program: Program, request: Request, only: str | None) -> bool:
    """Whether a program tests which tensor it has, where `Taps` have to pass another."""
    if not program.tests_identity or not request.passes_on:
        return False
    # An edit of an output gives the layer the tensors that it would have received.
    layer = program.model(False).get_submodule(only) if only else None
    return not (request.what == "output" and type(layer).__name__ in ("IsLast", "WritesNumpy"))


def one_layer(program: Program, request: Request, mode: Mode) -> str | None:
    """Return the layer of a request of one layer: one of those that run, chosen by the number of the program."""
    if request.of is not None:
        return None
    return random.Random(f"{program.number} {request}").choice(called_layers(program, mode))


def still_fails(request: Request, mode: Mode, only: str | None, result: Result) -> Callable[[Program], bool]:
    """Return whether a smaller program still fails in the same request."""

    def fails(program: Program) -> bool:
        if "__init__" not in program.text:  # it has no layer
            return False
        try:
            now = check(program, request, mode, plainly(program, mode), only)
        except Exception:  # it does not run, or lacks the layer
            return False
        return now.outcome == result.outcome and now.tests_identity == result.tests_identity

    return fails


def modes_of(request: Request) -> Iterator[Mode]:
    """Yield the modes in which a request is tried."""
    if not request.needs_gradients:
        yield "no_grad"
    yield "grad"


@dataclass
class Tally:
    """What became of one request in many programs.

    Attributes:
        request: the request.
        outcomes: number of runs by outcome; those that differ in what cannot be noticed are apart.
        reasons: of refusals.
        invalid: reasons why programs were left out, by mode.
        failed: programs that differ, with the mode, the layer of a request of one layer, and the result.
    """

    request: Request
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[Program, Mode, str | None, Result]] = field(default_factory=list)

    @property
    def refused(self) -> float:
        """The share of runs that were refused."""
        return self.outcomes["refused"] / max(1, self.outcomes.total())

    def smallest(self, most: int) -> Iterator[tuple[int, Program, Mode, str | None]]:
        """Yield what the first failing programs shrink to, the commonest first, with the number of each."""
        found: Counter[str] = Counter()
        programs: dict[str, tuple[Program, Mode, str | None]] = {}
        for one, mode, only, result in self.failed[:most]:
            small = shrink(one, still_fails(self.request, mode, only, result))
            found[small.listing] += 1
            programs.setdefault(small.listing, (small, mode, only))
        for listing, number in found.most_common():
            yield number, *programs[listing]

    def text(self, most: int = 20, shown: int = 3) -> str:
        """Return the numbers and the commonest of the smallest programs that fail."""
        lines = [f"{self.request}: {dict(self.outcomes)}"]
        lines += [f"    refused {number} times: {reason}" for reason, number in self.reasons.most_common(5)]
        for number, small, mode, only in list(self.smallest(most))[:shown]:
            result = check(small, self.request, mode, plainly(small, mode), only)
            of = "" if only is None else f" of layer {only!r}"
            lines += [
                "",
                f"{self.request}{of}, {mode}, case {small.number} ({number} of the first {most} that failed):",
                result.detail,
                small.listing,
            ]
        return "\n".join(lines)


def try_all(request: Request, numbers: Iterable[int]) -> Tally:
    """Try a request in the programs of these numbers."""
    tally = Tally(request)
    for number in numbers:
        for mode in modes_of(request):
            one = program(number)
            try:
                expected = plainly(one, mode)
            except InvalidError as error:
                tally.invalid[f"{mode}: {reason_of(str(error))}"] += 1
                continue
            only = one_layer(one, request, mode)
            result = check(one, request, mode, expected, only)
            tally.outcomes[result.outcome + (" in what tests identity" if result.tests_identity else "")] += 1
            if result.outcome == "refused":
                tally.reasons[result.detail] += 1
            elif result.outcome == "different" and not result.tests_identity:
                tally.failed.append((one, mode, only, result))
    return tally


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.extract.taps.programs", description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=100, help="number of programs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--case", type=int, help="print this program, and try it")
    parser.add_argument("--request", default="", help="regular expression of requests, such as 'keep.*input$'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    numbers = range(options.first, options.first + options.number)
    if options.case is not None:
        numbers = range(options.case, options.case + 1)
        print(program(options.case).listing)
    tallies = [try_all(request, numbers) for name, request in REQUESTS.items() if re.search(options.request, name)]
    columns = ("equal", "without effect", "refused", "different", "different in what tests identity")
    print(f"\n{'request':28}" + "".join(f"{column:>16}" for column in (*columns[:4], "by identity")))
    for tally in tallies:
        print(f"{tally.request!s:28}" + "".join(f"{tally.outcomes[column]:16}" for column in columns))
    invalid = max((tally.invalid for tally in tallies), key=Counter.total, default=Counter())
    print(f"\nleft out, since they fail without layertap ({invalid.total()}):")
    print("\n".join(f"    {count:4} {reason}" for reason, count in invalid.most_common()))
    for tally in tallies:
        if tally.failed or tally.reasons:
            print("\n" + tally.text())


if __name__ == "__main__":
    main()
