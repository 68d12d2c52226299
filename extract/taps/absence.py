"""Why a value that was asked for is not in a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from extract.taps.record import Requested, split_text

__all__ = ["FROZEN", "NOT_CALLED", "reason_absent"]

FROZEN = (
    "with all before it frozen, let the inputs require gradients, or edit the layer first: "
    "edit(layer, lambda h: h.requires_grad_())"
)
NOT_CALLED = (
    "the model itself was not called inside the `with` block, in its thread and asyncio task (model.forward(...), "
    "other methods and single layers do not count, compiled or not)"
)


def reason_absent(
    text: str,
    requests: Sequence[Requested],
    layers: Mapping[str, nn.Module],
    calls: Mapping[int | str, int],
    unseen: Mapping[int, str],
) -> str | None:
    """Return why a requested value is missing from a record; None if it was not requested.

    Args:
        text: text form of a site.
        requests: what is kept of its layer, or edited.
        layers: layers of the model when the `Taps` were made.
        calls: id of a module -> number of its calls in the forward.
        unseen: see `Scope.unseen`.
    """
    layer, call, path, what = split_text(text, layers)
    name, slash, operation = layer.partition("/")
    asked = [
        request
        for request in requests
        if bool(request.operation) == bool(slash)
        and what in (None, request.what)
        and (call is None or request.call in (None, call))
    ]
    if not asked:
        return None
    layer = f"layer {name!r}" if name else "the model"
    if name in layers and (where := unseen.get(id(layers[name]))) and not calls.get(id(layers[name])):
        return f"{layer} ran {where}, where nothing is recorded"
    count = calls.get(f"{name}/{operation}" if slash else id(layers.get(name)), 0)
    if slash and not count:
        return f"no function {operation!r} was called in the forward of {layer}"
    layer = f"function {operation!r} of {layer}" if slash else layer
    if name not in layers:
        return (
            f"no gradient reached parameter {name!r}: call backward() inside the `with` block, on a loss that depends "
            "on it (FSDP hands the gradients of its parameters to no hook: read `.grad`)"
        )
    if all(request.what in ("grad", "grad_input") for request in asked):
        return (
            f"no gradient reached {layer}: call backward() inside the block, on a loss that depends on it, outside "
            f"no_grad ({FROZEN}; reentrant checkpoints may give none)"
        )
    if all(request.what == "attention" for request in asked):
        return f"{layer} computed no attention that layertap recognises"
    if not count and isinstance(layers.get(name.rpartition(".")[0]), nn.MultiheadAttention):
        return f"{layer} never runs: nn.MultiheadAttention uses its weights without calling it"
    if not count:
        return f"{layer} did not run in this forward"
    call = asked[0].call if call is None else call
    if call is not None and call >= count:
        times = f"{count} time{'s' * (count > 1)}"
        return f"{layer} ran {times} in this forward; there is no call {call}, since the first is 0"
    verb, path = "returned" if asked[0].what == "output" else "received", path or asked[0].path
    where = f" at path {'.'.join(path)}" if path else ""
    if asked[0].edit is None:
        kind, where = "tensor", where and f"{where} (to pool, pass a function as `reduce`)"
    else:
        kind = "floating-point tensor"
    return f"{layer} ran, but {verb} no {kind}{where}"
