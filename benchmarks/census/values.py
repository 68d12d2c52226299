"""What a model computes, read without layertap: bare hooks that take a digest of each tensor when it passes.

The digests are taken inside the hook, before later layers run, so no in-place operation can change them. They are
compared with the digests of what `Taps` record: equal digests mean equal shapes, dtypes and bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

Path = tuple[Any, ...]


class Place(NamedTuple):
    """One tensor of a forward: the call of a layer, and the path of the tensor in what the call takes or returns."""

    layer: str
    call: int
    path: Path

    def __str__(self) -> str:
        return f"{self.layer}#{self.call}" + (":" + ".".join(map(str, self.path)) if self.path else "")


class Values(NamedTuple):
    """Digests of all outputs and inputs, and the tensors that naive hooks would keep, in the order of `outputs`."""

    outputs: dict[Place, str]
    inputs: dict[Place, str]
    naive: dict[Place, Tensor]


def tensors_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from tensors_of(value[key], (*path, key))
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from tensors_of(part, (*path, index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None), (*path, field.name))


def digest(tensor: Tensor) -> str:
    """Return a hash of shape, dtype and bits."""
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    bits = plain.flatten().view(torch.uint8).numpy() if plain.numel() else b""
    return f"{xxhash.xxh3_128_hexdigest(bits)} {tuple(plain.shape)} {plain.dtype}"


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return module -> its names; the model itself has the empty name."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def values_by_bare_hooks(
    model: nn.Module, run: Callable[[], Any], *, naive: bool = False, autograd: bool = False
) -> Values:
    """Run a model and return the digests of what each call of each layer takes and returns.

    Args:
        model: the model.
        run: calls it.
        naive: whether to keep what `output.detach().cpu()` gives, too.
        autograd: whether autograd is on; some models choose other code then.
    """
    values = Values({}, {}, {})
    counts: dict[nn.Module, int] = {}
    running: dict[nn.Module, list[int]] = {}
    handles = []
    for module, names in names_of(model).items():

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str] = names) -> None:
            call = counts.get(module, 0)
            counts[module] = call + 1
            running.setdefault(module, []).append(call)
            for path, tensor in tensors_of({**dict(enumerate(args)), **kwargs}):
                text = digest(tensor)
                values.inputs.update({Place(name, call, path): text for name in names})

        def leave(module: nn.Module, args: Any, output: Any, names: list[str] = names) -> None:
            call = running[module].pop()
            for path, tensor in tensors_of(output):
                text = digest(tensor)
                values.outputs.update({Place(name, call, path): text for name in names})
                if naive:
                    kept = tensor.detach().cpu()
                    values.naive.update({Place(name, call, path): kept for name in names})

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.set_grad_enabled(autograd):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return values


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return what `Taps` must leave as it is: the state dict, modes and hooks of a model."""
    return {
        "values": {name: digest(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)},
        "modes": [module.training for module in model.modules()],
        "gradients wanted": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [_count_hooks(module) for module in model.modules()],
        "hooks of parameters": [len(parameter._backward_hooks or ()) for parameter in model.parameters()],
        "function modes": torch._C._len_torch_function_stack(),
    }


def _count_hooks(module: nn.Module) -> tuple[int, ...]:
    return tuple(
        len(getattr(module, name))
        for name in (
            "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
            "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
        )
    )  # fmt: skip
