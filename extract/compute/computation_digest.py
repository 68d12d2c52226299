"""A digest of the computation from a batch to its features: the key of a compiled program that is kept on disk.

One eager forward of a few images is recorded as the operators that PyTorch dispatches: names, arguments, which result
goes into which operator, and the content of all tensors that are not results, such as weights. `torch.export` records
the same operators. So an equal digest means an equal graph, whatever code the model runs. Recording takes about a tenth
of the time in which the graph is exported and converted.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from extract.backbones import LoadedBackbone
from extract.compute.exported_graph import traced_forward
from extract.compute.feature_choice import Choice

__all__ = ["computation_digest"]


def computation_digest(
    backbone: LoadedBackbone, choice: Choice, dtype: str, precision: str, images: Tensor
) -> bytes | None:
    """Return the digest of a forward; None if it cannot be computed. Arguments as in `graph_of`."""
    recorder = _Recorder()
    try:
        with torch.no_grad():
            forward = traced_forward(backbone, choice, dtype, precision, images)
            recorder.add_input(images)
            with recorder:
                features = forward(images)
        recorder.add("features", features)
    except Exception:  # the code of the model may fail in any way; the compiler then gives the error
        return None
    return recorder.digest()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators and their arguments in a hash."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hash = hashlib.sha256()
        self._numbers: Any = WeakIdKeyDictionary()  # an activation may be freed after its last use
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and run an operator."""
        kwargs = kwargs or {}
        self.add(str(func), args, kwargs)
        result = func(*args, **kwargs)
        self._number(result)
        return result

    def add_input(self, images: Tensor) -> None:
        """Record a tensor without its content."""
        self._number(images)
        self._hash.update(_form(images).encode())

    def add(self, *values: Any) -> None:
        """Record values."""
        self._hash.update(self._text(values).encode())

    def digest(self) -> bytes:
        """Return the digest of all that was recorded."""
        return self._hash.digest()

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            if value not in self._numbers:
                self._number(value)
                return f"{_form(value)}={_content(value)}"
            return f"%{self._numbers[value]}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self._text, value)) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{name}:{self._text(each)}" for name, each in value.items()) + "}"
        return repr(value)

    def _number(self, result: Any) -> None:
        """Give a number to each tensor of a result that has none. An operator may return one of its arguments."""
        if isinstance(result, Tensor):
            if result not in self._numbers:
                self._numbers[result] = self._count
                self._count += 1
        elif isinstance(result, list | tuple):
            for each in result:
                self._number(each)


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"


def _content(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
