"""Edits of inputs and outputs of layers, and the watching of their gradients: steps of a `Capture`.

The model continues with an edited value, or with a copy whose gradient is watched, in place of the tensor that it has
computed. `stand_ins` keeps the two equal where the model writes into one of them. Functions are watched only from
where such a write could happen.

The gradient with respect to a copy is the sum over its own readers: a + (b + c) where the model has (a + b) + c. This
is what is asked for, the gradient through this layer only. So gradients of parameters may differ by rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from extract.errors import InputError, LayertapError
from extract.taps.capture import UNKNOWN, Call, Capture, CopyOut, Point, copy_out
from extract.taps.copies import copied, edited_by, overlaps_itself
from extract.taps.functions import Listener, Write, follow_write, operation_name, unwatch, unwatched, watch, write_into
from extract.taps.nested import Path, is_several, map_tensors, tensors_in, unread
from extract.taps.record import Requested, Site, has_prefix
from extract.taps.scope import frames_of, in_backward, is_simple
from extract.taps.stand_ins import StandIn, StandInError, StandIns, originals, stands_in
from extract.taps.torch_internals import (
    StorageWeakRef,
    engine_code,
    hooks_of,
    is_saved,
    is_shared,
    memory_of,
)

__all__ = ["ParameterGradients", "Requests", "Surgery"]


@dataclasses.dataclass(slots=True, eq=False)
class _Changes:
    """What edits and gradients remember of one call of a layer.

    Attributes:
        watched: inputs whose gradients are watched, and their copies: stand-ins hold both weakly.
        stand_ins: how tensors stand in for its inputs.
        replaced: (site, input, what stands in for it, whether that follows it) of a layer that only reads its inputs.
        separated: copies of outputs, passed on in their place because their gradients are watched.
        received: if the output is edited, the tensors that the layer received, each with its version, which is None
            in inference mode.
    """

    watched: list[Tensor] = dataclasses.field(default_factory=list)
    stand_ins: list[StandIn] = dataclasses.field(default_factory=list)
    replaced: list[tuple[Site, Tensor, Tensor, bool]] = dataclasses.field(default_factory=list)
    separated: list[Tensor] = dataclasses.field(default_factory=list)
    received: list[tuple[Tensor, int | None]] = dataclasses.field(default_factory=list)


class Requests:
    """Requests for one kind of value of a layer, or of a function, whose name is then given.

    A layer that stands in two places has two names.
    """

    def __init__(self, requests: Iterable[Requested], function: str = ""):
        self._all = [(function or request.layer, request) for request in requests]
        self._of: dict[tuple[int, Path], list[tuple[Site, Requested]]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def of(self, call: int, path: Path) -> list[tuple[Site, Requested]]:
        """Return the requests for one tensor, with its site.

        Args:
            call: number of the call; `UNKNOWN` if it is not known which call is repeated.
            path: path of the tensor in the value.

        Raises:
            LayertapError: the number is unknown, and an edit is for one call.
        """
        if (call, path) not in self._of:
            covering = [(layer, request) for layer, request in self._all if has_prefix(path, request.path)]
            for layer, request in covering:
                if call == UNKNOWN and request.call is not None and request.edit is not None:
                    raise LayertapError(
                        f"layer {layer!r} runs more than once under checkpointing: edit all calls or none"
                    )
            self._of[call, path] = [
                (Site(layer, call, path, request.what), request)
                for layer, request in covering
                if request.call in (None, call)
            ]
        return self._of[call, path]

    def is_for(self, call: int | None) -> bool:
        """Whether some request is for this call."""
        return any(request.call in (None, call) for _, request in self._all)


# Returns what the model continues with: receives the call, the site, the tensor that was edited, and the result.
_PassOn = Callable[[Call, Site, Tensor, Tensor], Tensor]


class Surgery:
    """Edits and gradients of layers in one block.

    Args:
        capture: the block.
        edited: receives the id of each request whose edit was applied.
        copy_out: reduces and copies a kept gradient.
        replaces: whether the model may receive a copy of an output in its place, where a gradient hook on the output is
            not safe.
    """

    def __init__(self, capture: Capture, edited: set[int], copy_out: CopyOut, replaces: bool):
        self._capture, self._edited_requests, self._copy_out, self._replaces = capture, edited, copy_out, replaces
        self.listener = Listener(before_call=self._before_call, on_write=self._on_write)
        self._stand_ins = StandIns()
        # Memory of a tensor that lacks an edit which the model may expect there; no other has its number meanwhile.
        self._left: dict[int, tuple[Site, StorageWeakRef]] = {}
        # Tensors whose gradients are watched in this forward, by their ids.
        self._watched: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        capture.on_end.append(self._end)
        capture.on_let_go.append(self._let_go)

    def _let_go(self) -> None:
        self._stand_ins.let_go()
        self._left.clear()
        self._watched.clear()
        unwatch(self.listener)

    def add(self, module: nn.Module, requests: Sequence[Requested]) -> None:
        """Add the steps for requests of one layer."""
        point = self._capture.point(module)
        input_edits, output_edits, grad, grad_input = (
            Requests([r for r in requests if r.what == what and (r.edit is not None or "grad" in what)])
            for what in ("input", "output", "grad", "grad_input")
        )
        # Edits come before all other hooks: transformers captures hidden states by hooks of its own, and with edits
        # after them 4 of the 8 layers of a DPT were unedited. Values are kept, and gradients watched, after all others.

        # A layer that only reads its inputs does not write into them. It may return them.
        only_reads = is_simple(module) and not getattr(module, "inplace", False)
        pass_on = partial(self._pass_on_input, point if only_reads else None)
        if input_edits:
            point.on_enter.append(partial(self._edit, input_edits, pass_on))
        if output_edits and not only_reads:
            point.on_enter.append(partial(self._receive, output_edits))
        if grad_input:
            # After other hooks, which may replace the inputs.
            steps = point.on_receive if hooks_of(module)[0] else point.on_enter
            steps.append(partial(self._watch_inputs, grad_input, pass_on))
        if point.on_enter or point.on_receive:
            point.on_return.append(self._settle)
        if output_edits:
            point.on_return.append(partial(self._edit_output, point, output_edits))
        if grad and self._replaces and (hooks_of(module)[1] or point.on_return):
            # Before other hooks: what they keep of the output may be a part of the loss.
            point.on_return.append(partial(self._separate, grad))
        if grad:
            point.on_leave.append(partial(self.watch_output, grad))

    # Steps at the arguments.

    def _receive(self, edits: Requests, call: Call, value: Any) -> Any:
        """Remember what a layer receives whose output is edited, to see whether it writes into it."""
        if edits.is_for(call.number):
            tensors = (tensor for _, tensor in tensors_in(value))
            _changes(call).received = [(t, None if t.is_inference() else t._version) for t in tensors]
        return value

    def _pass_on_input(
        self, reader: Point | None, call: Call, site: Site, given: Tensor, tensor: Tensor, follows: bool = False
    ) -> Tensor:
        """Pass a tensor on to a layer in place of one of its inputs.

        If the layer only reads its inputs, and nobody else has hooks on it, there can be no writes before its end.
        """
        changes = _changes(call)
        if reader is not None and sum(map(len, hooks_of(reader.module))) == reader.hooks:
            changes.replaced.append((site, given, tensor, follows))
        elif (added := self._stand_in(site, given, tensor, follows=follows)) is not None:
            changes.stand_ins.append(added)
        return tensor

    def _watch_inputs(self, gradients: Requests, pass_on: Callable[..., Tensor], call: Call, value: Any) -> Any:
        times = Counter(id(tensor) for _, tensor in tensors_in(value))
        return map_tensors(value, partial(self._watched_input, gradients, pass_on, call, times))

    def _watched_input(
        self, gradients: Requests, pass_on: Callable[..., Tensor], call: Call, times: Counter[int], path: Path,
        tensor: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return a copy whose gradient is watched: that through this layer, since no other reads the copy."""
        if not (requests := _gradient_requests(gradients, call, path, tensor)):
            return tensor
        # A view is not enough: if the layer writes into it in place, autograd builds its node again, without the hook.
        try:
            copy = copied(tensor)
        except RuntimeError as error:  # one of several views of a tensor that was written to, which cannot be read
            raise StandInError(requests[0][0]) from error
        _changes(call).watched += tensor, copy
        # A tensor that is passed twice has a copy, and a gradient, for each argument. A write into it is refused, since
        # autograd may have saved the other copy.
        pass_on(call, requests[0][0], tensor, copy, follows=times[id(tensor)] == 1)
        self._on_gradient(copy, requests)
        return copy

    # Steps at the output.

    def _settle(self, call: Call, output: Any) -> Any:
        """Follow writes into what a layer received in place of its inputs, from where the model can make some."""
        changes: _Changes | None = call.changes
        if changes is None:
            return output
        for added in changes.stand_ins:
            added.catch_up()
        if changes.replaced:
            # What autograd has saved need not follow: a write into it is an error, or makes the gradients wrong.
            readable = {memory_of(tensor) for _, tensor in tensors_in(output)}
            for _, given, tensor, _ in reversed(changes.replaced):
                if memory_of(tensor) in readable:
                    readable.add(memory_of(given))
            for site, given, tensor, follows in changes.replaced:
                if memory_of(tensor) in readable:
                    self._stand_in(site, given, tensor, follows=follows)
        return output

    def _edit_output(self, point: Point, edits: Requests, call: Call, output: Any) -> Any:
        if _is_new(output) and not stands_in(output):
            return self._edit(edits, self._pass_on_new, call, output)
        received = call.changes.received if call.changes is not None else []
        written = [tensor for tensor, version in received if version is None or tensor._version != version]
        # Inference mode counts no writes: a layer that calls others may have written nothing into what it returns.
        is_certain = is_simple(point.module) or not torch.is_inference_mode_enabled()
        return self._edit(edits, partial(self._pass_on_output, written, is_certain), call, output)

    def _pass_on_new(self, call: Call, site: Site, given: Tensor, edited: Tensor) -> Tensor:
        return edited

    def _pass_on_output(
        self, written: Sequence[Tensor], is_certain: bool, call: Call, site: Site, given: Tensor, edited: Tensor
    ) -> Tensor:
        """Return what the model continues with: the edited tensor, or the given one with its values.

        A caller may expect the output of a layer that works in place in the tensor that the layer was given. If that
        cannot be changed, because autograd may have saved it, what reads it later is refused.
        """
        if not any(original is tensor for original in originals(given) for tensor in written):
            self._stand_in(site, given, edited)
            return edited
        is_kept = any(is_saved(t) or is_shared(t) or overlaps_itself(t) for t in originals(given))
        if is_certain and not (torch.is_grad_enabled() and is_kept):
            self._stand_ins.note_write(site)
            write_into(given, edited)
            follow_write(given)
            return given
        if self._stand_in(site, given, edited) is not None:
            for original in originals(given):
                storage = StorageWeakRef(original.untyped_storage())  # type: ignore[no-untyped-call]
                self._left[memory_of(original)] = site, storage
        return edited

    def _separate(self, gradients: Requests, call: Call, output: Any) -> Any:
        """Replace outputs by copies where their gradients cannot be watched otherwise."""
        return map_tensors(output, partial(self._separated, gradients, call, is_several(output)))

    def _separated(
        self, gradients: Requests, call: Call, is_one_of_several: bool, path: Path, tensor: Tensor
    ) -> Tensor:
        """Return the output of a layer if a hook on it is safe, else a copy that is passed on in its place."""
        if not (requests := _gradient_requests(gradients, call, path, tensor)):
            return tensor
        if call.changes is not None and any(tensor is copy for copy in call.changes.separated):
            return tensor
        # A hook on a leaf would outlive this forward. A hook on a view is lost when the view is written to in place.
        # A tensor that a layer returns unchanged, from its input or from a layer inside it, has other readers. So may
        # one of several outputs: an LSTM cell computes its output from its cell state.
        is_watched = self._watched.get(id(tensor)) is tensor
        is_safe = not (tensor.is_leaf or tensor._is_view() or is_one_of_several or is_watched)
        if is_safe and not any(tensor is given for _, given in tensors_in(call.arguments)):
            return tensor
        copy = copied(tensor)
        self._stand_in(requests[0][0], tensor, copy)
        _changes(call).separated.append(copy)
        return copy

    def watch_output(self, gradients: Requests, call: Call, output: Any) -> Any:
        """Watch the gradients of the output of a layer or function, and return what the model continues with."""
        return map_tensors(output, partial(self._watched_output, gradients, call, is_several(output)))

    def _watched_output(
        self, gradients: Requests, call: Call, is_one_of_several: bool, path: Path, tensor: Tensor
    ) -> Tensor:
        if not (requests := _gradient_requests(gradients, call, path, tensor)):
            return tensor
        if self._replaces:
            tensor = self._separated(gradients, call, is_one_of_several, path, tensor)
        elif tensor.is_leaf:  # a hook on it would outlive this forward
            return tensor
        self._on_gradient(tensor, requests)
        return tensor

    # Results of functions.

    def edit_result(self, edits: Requests, call: Call, written: Sequence[Tensor], result: Any) -> Any:
        """Edit the result of a function, and return what the model continues with; `written` is what it wrote into."""
        return self._edit(edits, partial(self._pass_on_output, written, True), call, result)

    # What the steps share.

    def _edit(self, edits: Requests, pass_on: _PassOn, call: Call, value: Any) -> Any:
        """Edit the tensors in a value, and return what the model continues with."""
        if isinstance(value, Tensor):
            return self._edited(edits, pass_on, call, {}, (), value)
        for path, part in unread(value):
            for site, _ in edits.of(call.number, path):
                raise InputError(
                    f"{site} is a {type(part).__name__} that holds tensors, which edits do not reach",
                    hint="name the tensors to edit, each by its site",
                )
        return map_tensors(value, partial(self._edited, edits, pass_on, call, {}))

    def _edited(
        self,
        edits: Requests,
        pass_on: _PassOn,
        call: Call,
        edited: dict[Any, tuple[Tensor, Tensor]],
        path: Path,
        tensor: Tensor,
    ) -> Tensor:
        """Edit a tensor; one that stands in several places (`return h, h`) is edited once, and is in all of them."""
        requests = edits.of(call.number, path)
        if not requests or not tensor.is_floating_point():
            return tensor
        key = (id(tensor), *[id(request) for _, request in requests])
        if key not in edited:
            result, may_change = tensor, pass_on == self._pass_on_new
            for site, request in requests:
                result = self._capture.scope.call_users(edited_by, result, request.edit, site, may_change)
                may_change = True
                self._edited_requests.add(id(request))
            # The id of `tensor` is a key as long as it lives.
            edited[key] = tensor, pass_on(call, requests[0][0], tensor, result)
        return edited[key][1]

    def _stand_in(self, site: Site, given: Tensor, tensor: Tensor, *, follows: bool = False) -> StandIn | None:
        """Follow the writes into a tensor that the model continues with in place of another; see `StandIns.add`."""
        if in_backward():
            self._stand_ins.check_again(site)
            return None
        watch(self.listener)
        return self._stand_ins.add(site, given, tensor, follows=follows)

    def _on_gradient(self, tensor: Tensor, requests: list[tuple[Site, Requested]]) -> None:
        """Register a hook that edits and keeps the gradient of a tensor while the block is open."""
        assert self._capture.forward is not None
        self._watched[id(tensor)] = tensor
        edits = [(site, request.edit, id(request)) for site, request in requests if request.edit is not None]
        keeps = [(site, request.reduce) for site, request in requests if request.edit is None]
        # The graph must not keep the record alive, whose live tensors keep the graph alive.
        record, opened = weakref.ref(self._capture.forward.record), weakref.ref(self._capture)
        copy_out, edited_requests = self._copy_out, self._edited_requests

        def edit_and_keep(gradient: Tensor) -> Tensor | None:
            capture = opened()
            if capture is None or not capture.scope.is_open:
                return None
            for site, edit, request in edits:
                gradient = capture.scope.call_users(edited_by, gradient, edit, site)
                edited_requests.add(request)
            if keeps and (kept := record()) is not None:
                for site, reduce in keeps:
                    kept.by_site[site] = capture.scope.call_users(copy_out, gradient, reduce, site)
            return gradient if edits else None

        tensor.register_hook(edit_and_keep)  # type: ignore[no-untyped-call]

    def _on_write(self, write: Write) -> Iterable[Callable[[], object]]:
        """Return what is to be done after a function writes into a tensor; see `Listener.on_write`."""
        return () if self._capture.computing() is None else self._stand_ins.before_write(write)

    def _before_call(self, function: Any, args: Any, kwargs: Any) -> None:
        """Refuse a function that reads a tensor which lacks an edit."""
        if self._left and operation_name(function) is not None and self._capture.computing() is not None:
            self._check_not_left((args, kwargs))

    def _end(self, output: Any) -> None:
        with unwatched():
            self._check_not_left(output)
            self._stand_ins.end()

    def _check_not_left(self, value: Any) -> None:
        for _, tensor in tensors_in(value) if self._left else ():
            if memory_of(tensor) in self._left:
                raise StandInError(self._left[memory_of(tensor)][0])


def _changes(call: Call) -> _Changes:
    if call.changes is None:
        call.changes = _Changes()
    changes: _Changes = call.changes
    return changes


def _gradient_requests(gradients: Requests, call: Call, path: Path, tensor: Tensor) -> list[tuple[Site, Requested]]:
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return []
    requests = gradients.of(call.number, path)
    if call.number == UNKNOWN:
        return [(site, request) for site, request in requests if request.edit is not None]
    return requests


def _is_new(output: Any) -> bool:
    """Whether a step, which calls this first of all, has the only reference to the output of its layer."""
    if type(output) is not Tensor or sys.getrefcount(output) > _references_of_new_output():
        return False
    return not (output._is_view() or is_saved(output) or is_shared(output))


@functools.cache
def _references_of_new_output() -> int:
    """Return how many references Python itself has to an output where `_is_new` counts them."""
    counted: list[int] = []

    def count(output: Any) -> None:
        counted.append(sys.getrefcount(output))

    def step(edits: None, call: Call, output: Any) -> Any:
        count(output)
        return output

    probe = nn.ReLU()
    capture = Capture(probe, lambda calls, text: None, (), None, None, copy_out, True, unwatched)
    capture.point(probe).on_return.append(partial(step, None))
    capture.register()
    with unwatched():
        for _ in range(3):  # a debugger may hold one of them
            probe(torch.zeros(1))
    capture.close()
    return min(counted)


class ParameterGradients:
    """Gradients of parameters in one block.

    Args:
        capture: the block.
        parameters: all parameters of the model by their names.
        requests: requests for gradients of parameters, edits first.
        edited: receives the id of each request whose edit was applied.
    """

    def __init__(
        self,
        capture: Capture,
        parameters: Mapping[str, nn.Parameter],
        requests: list[Requested],
        edited: set[int],
    ):
        self._capture, self._parameters, self._edited = capture, parameters, edited
        self._waiting = requests  # for parameters that are not hooked yet

    def register(self, root: nn.Module) -> None:
        """Hook the parameters; those that are frozen, or of a lazy layer, after the first forward that changes this."""
        self._hook()
        if self._waiting:
            self._capture.hook(root.register_forward_hook, self._hook)

    def _hook(self, *_: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            parameter = self._parameters[request.layer]
            if parameter.requires_grad and not is_lazy(parameter):
                self._capture.hook(parameter.register_hook, partial(self._on_gradient, request))
            else:
                self._waiting.append(request)

    def _on_gradient(self, request: Requested, gradient: Tensor) -> Tensor | None:
        capture, site = self._capture, Site(request.layer, what="grad")
        if not capture.scope.is_in_our_thread() or not capture.scope.is_of_this_task():
            return None
        # A pass inside another one: PyTorch does not say so; the stacks do. On a GPU, the passes have two threads.
        passes = [
            frame
            for top in dict.fromkeys((sys._getframe(), sys._current_frames().get(capture.scope.thread)))
            for frame in frames_of(top)
            if frame.f_code is engine_code
        ]
        if len(passes) > 1:
            caller = passes[0].f_back
            if caller is not None and caller.f_code is torch.autograd.grad.__code__:
                return None  # what it computes is no part of the outer pass
            raise LayertapError(
                f"{site} comes in parts, one for each reentrant checkpoint", hint="checkpoint with use_reentrant=False"
            )
        if request.edit is not None:
            self._edited.add(id(request))
            edited: Tensor = capture.scope.call_users(edited_by, gradient, request.edit, site)
            return edited
        if capture.forward is not None:
            with unwatched():
                capture.keep_tensor(capture.forward.record, site, request, gradient)
        return None
