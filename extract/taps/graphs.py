"""Graphs of a model that return what `Taps` keep: captured by `torch.export`, compiled by `torch.compile`.

A function that calls the model under `Taps` runs once, on tensors without values, and its operations are recorded. So
the hooks of an eager forward decide which tensors the graph returns. What the code of the model decides in Python is
decided once for each graph. `Graphs` captures another one where it could be decided otherwise.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from extract.errors import InputError, LayertapError, first_line
from extract.taps.capture import Capture, ModelCall, copy_out
from extract.taps.copies import dense_copy
from extract.taps.live import versions_of
from extract.taps.nested import map_tensors, parts_of, tensors_in
from extract.taps.record import Reduce, Site
from extract.taps.scope import ModelBoundHook

__all__ = ["Graphs", "copy_in_graph", "export"]

_CONSTANTS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training", *_HOOKS}
# Hooks that belong to the computation, such as those of weight norm, run while it is captured. Others may collect what
# they see, and would see it once.
_OF_LIBRARIES = ("torch.", "transformers.")
_NO_CONFIGURATION = (Tensor, nn.Module, ModuleType, type, dict)
_EMPTY = itertools.repeat(torch.empty(0))


def export(model: nn.Module, function: Callable[..., Any], tensors: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """Export a function of tensors that calls the model under `Taps` with `copy_in_graph`.

    Args:
        model: the model, whose parameters and buffers the program has.
        function: returns a tuple of tensors.
        tensors: its arguments. The program accepts only tensors of these shapes.

    Raises:
        Exception: of any type, if the code of the model cannot be exported.
    """
    root = nn.Module()
    root.model, root.forward = model, function
    attributes = [(vars(module), set(vars(module))) for module in model.modules()]
    try:
        return torch.export.export(root, tuple(tensors), strict=False)
    finally:
        for of_module, before in attributes:
            for key in of_module.keys() - before:  # tensors without values
                del of_module[key]


def copy_in_graph(tensor: Tensor, reduce: Reduce | None, site: Site) -> Any:
    """Reduce a tensor, and copy the result on its device; see `copy_out`."""
    value = tensor if reduce is None else reduce(tensor.detach())
    if isinstance(value, dict):
        return {name: dense_copy(part, site, _cloned) for name, part in value.items()}
    return dense_copy(value, site, _cloned)


def _cloned(tensor: Tensor) -> Tensor:
    # Two values may be one tensor, and OpenVINO refuses a graph with one tensor as two outputs: `movedim` makes another
    # of the same values. Copies, because the model may write into the tensor later; inductor leaves out needless ones.
    return tensor.detach().movedim(0, 0).clone(memory_format=torch.contiguous_format)


class _Graph(NamedTuple):
    """One compiled graph.

    Attributes:
        key: see `_key_of`.
        state: see `_state_of`.
        function: the compiled graph; takes and returns tensors.
        result: (output, site -> kept value), with empty tensors.
        traced: the call of the model that was captured.
    """

    key: Any
    state: list[Any]
    function: Callable[..., Sequence[Tensor]]
    result: Any
    traced: ModelCall


class Graphs:
    """The graphs of a model under the same `Taps`, which fill records as hooks do.

    Args:
        root: the model, without wrappers.
        call: calls the model under new `Taps` with `copy_in_graph`; returns its output and the call.
        options: of `torch.compile`.

    Attributes:
        all: the graphs.
    """

    def __init__(self, root: nn.Module, call: Callable[[Any, Any], tuple[Any, ModelCall]], **options: Any):
        self._root, self._call, self._options, self._name = root, call, options, type(root).__name__
        # Outputs of inductor are new in each call, but for constants that it has folded.
        self._returns_new = options["backend"] == "inductor" and not (options["options"] or {}).get("freezing")
        self.all: list[_Graph] = []

    def __call__(self, capture: Capture, args: Any, kwargs: Any) -> Any:
        """Run the graph for these arguments, start a record of `capture` with what it keeps, and return the output.

        Raises:
            InputError: an argument, the output or a hook cannot be in a graph.
            LayertapError: the model cannot be captured or compiled.
        """
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        try:
            # Tensors of inference mode could not be used in training later.
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                try:
                    graph = self._graph_for(args, kwargs, tensors)
                except BaseException:
                    capture.begin(sys._getframe())  # the record of an earlier call would be taken for that of this one
                    raise
                if is_inference and graph.traced.record.live:
                    raise InputError("a value cannot be kept live in inference mode", hint="use torch.no_grad()")
                capture.begin(sys._getframe())
                with torch.compiler.set_stance("default"):  # open `Taps` turn compiled code off
                    results = graph.function(*tensors)
        except (LayertapError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a compiler may fail in any way
            why = first_line(getattr(error, "inner_exception", error)).rstrip(".")
            raise LayertapError(f"{self._name} cannot run as one graph: {why}", hint="leave out compile()") from error
        output, kept = _filled(graph.result, results)
        forward: Any = capture.forward
        for site, value in kept.items():
            if site in graph.traced.record.live:
                forward.record.live[site] = versions_of(value, site, is_reduced=True)
            else:
                value = map_tensors(value, partial(self._on_cpu, site))
            forward.record.by_site[site] = value
        forward.calls.update(graph.traced.calls)
        forward.caller, forward.running = None, False
        return output

    def _graph_for(self, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> _Graph:
        key = _key_of(args, kwargs, tensors)
        for graph in self.all:
            if graph.key == key and _is_same(graph.state):
                return graph
        _check_hooks(self._root)
        given, results = _filled((args, kwargs), _EMPTY), []

        def traced(*tensors: Tensor) -> tuple[Tensor, ...]:
            buffers = [(m._buffers, name, tensor) for m in self._root.modules() for name, tensor in m._buffers.items()]
            output, call = self._call(*_filled(given, tensors))
            if any(_is_replaced(tensor, of_module.get(name)) for of_module, name, tensor in buffers):
                raise InputError(f"{self._name} replaces a buffer; a graph cannot", hint="write into it with copy_()")
            _described(output, f"the output of {self._name}")
            # By the names of the record, which refuses a live value that was changed since.
            result = output, {site: call.record[site] for site in call.record.by_site}
            results.append((_filled(result, _EMPTY), call))
            return tuple(tensor for _, tensor in tensors_in(result))

        program = export(self._root, traced, tensors).module()
        function = torch.compile(program, fullgraph=True, dynamic=False, **self._options)
        self.all.append(_Graph(key, _state_of(self._root), function, *results[-1]))
        if len(self.all) == 8:  # where `torch.compile` would give up
            reasons = "one for each shape of its arguments, and each change of its attributes; pad batches to one shape"
            warnings.warn(f"8 graphs of {self._name} are compiled: {reasons}", RuntimeWarning, stacklevel=4)
        return self.all[-1]

    def _on_cpu(self, site: Site, path: Any, tensor: Tensor) -> Any:
        # Of infinite values in float16, a copy warns. CUDA graphs overwrite their outputs in the next call.
        is_copy = self._returns_new and tensor.is_cpu and tensor.dtype is not torch.float16
        return tensor if is_copy else copy_out(tensor, None, site)


def _state_of(root: nn.Module) -> list[Any]:
    """Return what a graph depends on beside its arguments: layers, parameters, attributes and hooks of the model.

    Each is in a tuple: a dict, a key, the value, and what is compared of it; of the key None, all keys of the dict.
    """
    dicts = {id(d): d for m in root.modules() for d in (vars(m), m._parameters, m._buffers, m._modules)}
    for value in [value for d in dicts.values() for value in d.values()]:
        if not isinstance(value, _NO_CONFIGURATION) and isinstance(held := getattr(value, "__dict__", None), dict):
            dicts.setdefault(id(held), held)
    values = [(d, k, v, _compared(v)) for d in dicts.values() for k, v in d.items() if k not in _OF_MODULES]
    return [*((d, None, None, list(d)) for d in dicts.values()), *values]


def _is_same(state: list[Any]) -> bool:
    """Whether the model has the same objects, and equal numbers and texts, as before."""
    # What is the same object is compared only if it may have changed.
    return all(
        list(d) == compared
        if key is None
        else (type(compared) is tuple and d.get(key) is value) or _compared(d.get(key)) == compared
        for d, key, value, compared in state
    )


def _compared(value: Any) -> Any:
    """Return what is compared of a value of a module, as a list if it may change while the object is the same."""
    if isinstance(value, Tensor):
        return [id(value), value.dtype, value.device, value.requires_grad]
    if isinstance(value, OrderedDict):  # of hooks
        return [hook for hook in value.values() if not (isinstance(hook, ModelBoundHook) and hook.of_graph)]
    if isinstance(value, tuple) and _CONSTANTS.issuperset(map(type, value)):
        return type(value), *((type(part), part) for part in value)
    if isinstance(value, list | tuple | set | dict):
        return [type(value), [_compared(part) for part in (value.items() if isinstance(value, dict) else value)]]
    return (type(value), value) if type(value) in _CONSTANTS else (id(value),)


def _is_replaced(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether another tensor has the place of a buffer; a larger one is a cache, which the graph has."""
    return before is not after and before is not None and after is not None and before.shape == after.shape


def _check_hooks(root: nn.Module) -> None:
    """Check that no layer has a hook that a graph would leave out.

    Raises:
        InputError: one has.
    """
    for name, module in root.named_modules():
        if not all(str(h.__module__).startswith(_OF_LIBRARIES) for key in _HOOKS for h in _compared(vars(module)[key])):
            where = f"layer {name!r}" if name else "the model"
            hint = "remove it, close other Taps, or leave out compile()"
            raise InputError(f"{where} has a hook that no graph calls", hint=hint)


def _key_of(args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what a graph depends on beside the model: the arguments but for their values, and modes of PyTorch."""
    devices = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
    # attn(x, x, x) has another graph than attn(q, k, v)
    same = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    return _described((args, kwargs), "an argument"), same, autocast, torch.is_grad_enabled()


def _described(value: Any, what: str) -> Any:
    """Return what can be compared of a value that holds tensors.

    Raises:
        InputError: it holds an object that may hold tensors, or change.
    """
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.requires_grad, value.dtype, value.device
    if parts := parts_of(value):
        return type(value), [(key, _described(part, what)) for key, part in parts]
    if isinstance(value, tuple | list | Mapping):  # without tensors: empty, or of many numbers
        return type(value), tuple((type(part), part) for part in value)
    if type(value) not in _CONSTANTS:
        raise InputError(f"{what} is, or holds, a {type(value).__name__}: no graph can", hint="use tensors and numbers")
    return type(value), value


def _filled(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the value with these tensors, in the order of `tensors_in`."""
    following = iter(tensors)
    return map_tensors(value, lambda path, tensor: next(following))
