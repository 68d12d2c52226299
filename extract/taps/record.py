"""Names of the tensors of a forward pass, and the record of their values: copies on the CPU."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from extract.errors import InputError, UnknownNameError, unknown_name
from extract.taps.nested import Path

__all__ = ["Record", "Reduce", "Site", "What", "copy_out", "split_text"]

Reduce = Callable[[Tensor], Any]
What = Literal["output", "input", "grad", "grad_input", "attention"]


@dataclasses.dataclass(frozen=True)
class Site:
    """The name of one tensor of a forward pass: layer, call of the layer, path inside the value, and kind of value.

    Text form: `layer1.0.relu#1` is the second call, `lstm:1.0` the first item of the second item of a tuple,
    `fc:0@input` the first positional argument, `conv@grad` the gradient of the output. The call, the path and the kind
    may be omitted if exactly one tensor matches. A function without a module is named as `LAYER/FUNCTION`, where the
    layer calls it: `layer1.0/add`.
    """

    layer: str
    call: int = 0
    path: Path = ()
    what: What = "output"

    def __str__(self) -> str:
        return self.text()

    def text(self, with_call: bool = False) -> str:
        """Return the text form, with the call number if it is not 0 or `with_call` is set."""
        call = f"#{self.call}" if self.call or with_call else ""
        path = ":" + ".".join(map(str, self.path)) if self.path else ""
        return f"{self.layer}{call}{path}" + ("" if self.what == "output" else f"@{self.what}")

    def is_meant_by(self, text: str) -> bool:
        """Whether the text is this site's text form, possibly without call number, kind, path or end of the path."""
        for call in ("", f"#{self.call}"):
            for depth in range(len(self.path) + 1):
                path = ":" + ".".join(map(str, self.path[:depth])) if depth else ""
                if text in (f"{self.layer}{call}{path}", f"{self.layer}{call}{path}@{self.what}"):
                    return True
        return False


_TEXT = re.compile(r"(?P<layer>[^#:@]*)(?:#(?P<call>\d+))?(?::(?P<path>[^@]*))?(?:@(?P<what>\w+))?")


def split_text(text: str, names: Container[str]) -> tuple[str, int | None, tuple[str, ...], str | None]:
    """Split a site's text form into layer (or pattern), call, path and what; omitted parts are None or empty.

    Args:
        text: `LAYER[#CALL][:PATH][@WHAT]`; a text that equals a layer's name is that layer.
        names: all layer names.
    """
    match = None if text in names else _TEXT.fullmatch(text)
    if match is None:
        return text, None, (), None
    path = tuple(match["path"].split(".")) if match["path"] else ()
    return match["layer"], int(match["call"]) if match["call"] else None, path, match["what"]


class Record(Mapping[str, Any]):
    """Kept values of one forward of the model: text form of a site -> tensor on the CPU, or a dict of tensors.

    A value is a dict where `reduce` returned a dict. `record[key]` takes a `Site` or any text that names exactly
    one tensor. Iteration follows the order of computation; the backward pass adds gradients.
    """

    def __init__(self, why_absent: Callable[[str], str | None]):
        self._why_absent = why_absent
        self._values: dict[Site, Any] = {}
        self._sites: dict[str, Site] | None = None  # built on first use; lookups by Site do not need it

    @property
    def sites(self) -> dict[str, Site]:
        """Name -> site, in the order of computation; names of layers that ran more than once contain the call."""
        if self._sites is None:
            repeated = {(site.layer, site.what) for site in self._values if site.call}
            self._sites = {site.text((site.layer, site.what) in repeated): site for site in self._values}
        return self._sites

    def find(self, text: str) -> list[Site]:
        """Return the sites that a text can mean; it may omit the call, path or kind."""
        if text in self.sites:
            return [self.sites[text]]
        return [site for site in self._values if site.is_meant_by(text)]

    def _put(self, site: Site, value: Any) -> None:
        self._values[site] = value
        self._sites = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values or (isinstance(key, str) and len(self.find(key)) == 1)

    def __getitem__(self, key: str | Site) -> Any:
        if isinstance(key, Site) and key in self._values:
            return self._values[key]
        text = str(key)
        matches = self.find(text)
        if len(matches) == 1:
            return self._values[matches[0]]
        if matches:
            names = ", ".join(repr(name) for name, site in self.sites.items() if site in matches)
            raise UnknownNameError(f"{text!r} names more than one tensor: {names}")
        if reason := self._why_absent(text):
            raise UnknownNameError(reason)
        raise unknown_name("kept tensor", text, self, "this record")

    def __repr__(self) -> str:
        rows = (f"  {name}: {tuple(v.shape) if isinstance(v, Tensor) else v!r}" for name, v in self.items())
        return "Record(\n" + "\n".join(rows) + "\n)"


def copy_out(
    tensor: Tensor, reduce: Reduce | None, site: Site, to_cpu: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Reduce a tensor on its device, then copy the result to the CPU.

    Args:
        tensor: on the device of the model.
        reduce: see `Taps.keep`.
        site: the site of the tensor, for errors.
        to_cpu: copies a dense tensor to the CPU, possibly asynchronously; None makes a blocking copy.
    """

    def kept(value: Any) -> Tensor:
        dense = _dense(value, site)
        return _copied(dense, site) if to_cpu is None else to_cpu(dense)

    # Copies made in inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        value = tensor.detach()
        if reduce is None:
            return kept(value)
        try:
            value = reduce(value)
        except Exception as error:
            error.add_note(f"while reducing {site} of shape {tuple(tensor.shape)}")
            raise
        if isinstance(value, dict):
            return {name: kept(part) for name, part in value.items()}
        return kept(value)


def _dense(tensor: Any, site: Site) -> Tensor:
    """Return the tensor in dense, unquantised form.

    Raises:
        InputError: the value is not a tensor, or is a nested tensor, or is inside torch.func.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"the reduction of {site} returned {type(tensor).__name__}; expected a tensor or a dict of tensors"
        )
    if tensor.is_nested:
        raise InputError(f"{site} is a nested tensor, whose rows differ in shape; reduce it to a plain tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise InputError(
            f"{site} is inside torch.func (vmap, grad, ...), where values cannot be copied out of the model"
        )
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _copied(tensor: Tensor, site: Site) -> Tensor:
    """Return a contiguous copy on the CPU that owns its memory, and warn of infinite float16 values."""
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    kept.copy_(tensor)  # what copy_ returns could be a subclass
    if kept.dtype == torch.float16 and kept.isinf().any():
        warnings.warn(f"{site} has infinite values: the largest float16 is 65504", RuntimeWarning, stacklevel=3)
    return kept
