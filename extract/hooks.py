"""Taps: keep what layers compute while a model runs, without changing the model and without stale or aliased values.

    with Taps(model, ["layer?", "fc"]) as taps:
        for images in batches:
            taps(images)                    # or model(images)
            taps.record["layer4"]           # (B, C, H, W) on the CPU, a copy

What a bare `register_forward_hook` gets wrong and this does not:

* On a CPU model `output.detach().cpu()` is the layer's own memory, and the next in-place ReLU or `+=` rewrites it. Here
  every tensor is copied inside the hook.
* A module that runs twice in a forward (ResNet's shared `relu`) gives `relu#0` and `relu#1`, not only the last.
* Each call of the model starts an empty record. A layer that did not run raises; it never answers with old values.
* Hooks leave with the `with` block, whatever happened inside it, and only those registered here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from extract.errors import InputError, LayertapError, UnknownNameError, unknown_name
from extract.layers import match_layers, named_layers, unwrap

__all__ = ["Record", "Site", "Taps", "What"]

What = Literal["output", "input"]
Reduce = Callable[[Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Site:
    """One tensor of a forward pass: which layer, which call of it, which part of the value, and which value.

    Text form: `layer1.0.relu#1` is the second call, `lstm:1.0` the first part of the second part of a tuple,
    `fc:0@input` the first positional argument. `#0`, the path and `@output` may be left out where one tensor remains.
    """

    layer: str
    call: int = 0
    path: tuple[str | int, ...] = ()
    what: What = "output"

    def __str__(self) -> str:
        return self.text()

    def text(self, with_call: bool = False) -> str:
        """The text form; the call number is written when it is not 0 or when asked for."""
        call = f"#{self.call}" if self.call or with_call else ""
        path = ":" + ".".join(map(str, self.path)) if self.path else ""
        return f"{self.layer}{call}{path}" + ("" if self.what == "output" else f"@{self.what}")


class Record(Mapping[str, Any]):
    """What one forward pass of the model gave: text form of a site -> tensor on the CPU.

    `record[key]` takes a `Site` or any text that names exactly one tensor. Iteration goes in the order of computation.
    """

    def __init__(self, tapped: Sequence[str]):
        self._tapped = tapped
        self._values: dict[Site, Any] = {}
        self._sites: dict[str, Site] | None = None  # made when first needed: a loop that looks up by Site never does

    @property
    def sites(self) -> dict[str, Site]:
        """Name -> site, in the order of computation; the call is in the name where a layer ran more than once."""
        if self._sites is None:
            repeated = {(site.layer, site.what) for site in self._values if site.call}
            self._sites = {site.text((site.layer, site.what) in repeated): site for site in self._values}
        return self._sites

    def find(self, text: str) -> list[Site]:
        """The sites that a text can mean: its call, path or kind may be left out."""
        if text in self.sites:
            return [self.sites[text]]
        return [site for site in self._values if _names_part_of(text, site)]

    def _put(self, site: Site, value: Any) -> None:
        self._values[site] = value
        self._sites = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values or key in self.sites

    def __getitem__(self, key: str | Site) -> Any:
        if isinstance(key, Site) and key in self._values:
            return self._values[key]
        text = str(key)
        found = self.find(text)
        if len(found) == 1:
            return self._values[found[0]]
        if found:
            names = ", ".join(repr(name) for name, site in self.sites.items() if site in found)
            raise UnknownNameError(f"{text!r} names more than one tensor: {names}")
        if text.split("#")[0] in self._tapped:
            raise LayertapError(f"layer {text!r} did not run in this forward")
        raise unknown_name("kept tensor", text, self, "this record")

    def __repr__(self) -> str:
        rows = (f"  {name}: {tuple(v.shape) if isinstance(v, Tensor) else v!r}" for name, v in self.items())
        return "Record(\n" + "\n".join(rows) + "\n)"


def _names_part_of(text: str, site: Site) -> bool:
    """Whether the text is the site with its call number, path or kind left out."""
    for call in ("", f"#{site.call}"):
        for depth in range(len(site.path) + 1):
            path = ":" + ".".join(map(str, site.path[:depth])) if depth else ""
            if text in (f"{site.layer}{call}{path}", f"{site.layer}{call}{path}@{site.what}"):
                return True
    return False


@dataclasses.dataclass(frozen=True)
class _Keep:
    """One layer asked for; None means every call, every path."""

    layer: str
    what: What
    reduce: Reduce | None
    call: int | None = None
    path: tuple[str | int, ...] | None = None

    def overlaps(self, other: _Keep) -> bool:
        return (self.layer, self.what) == (other.layer, other.what) and all(
            None in pair or pair[0] == pair[1] for pair in ((self.call, other.call), (self.path, other.path))
        )


class _Stop(BaseException):
    """Ends a forward once all that was asked for has been computed; a model's `except Exception` lets it by."""


class Taps:
    """Keep what chosen layers compute, for as long as the `with` block lasts.

    Args:
        model: any module; wrappers (`nn.DataParallel`, `torch.compile`) are looked through for names.
        layers: names or globs whose outputs are kept; more is asked for with `keep`.
        reduce: applied to each kept tensor on its device before the copy to the CPU; see `keep`.
        stop: end each forward as soon as everything asked for has been computed. The first forward runs whole, to learn
            how often each layer is called; later ones stop when each has been called as often. Needs `taps(...)`
            instead of `model(...)`, which then returns None. For a model whose layers run a different number of times
            on different batches, leave it off.

    The record is of the model's own call. Layers run past it (`model.features(x)`) are not kept.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Sequence[str] = (),
        *,
        reduce: Reduce | None = None,
        stop: bool = False,
    ):
        self._model = model
        self._layers = named_layers(model)
        self._keeps: list[_Keep] = []
        self._stop = stop
        self._handles: list[RemovableHandle] = []
        self._record: Record | None = None
        self._running = False  # a root forward has begun and not ended
        self._stoppable = False  # it was begun by __call__, which catches _Stop
        self._calls: dict[tuple[str, What], int] = {}  # times each layer was seen in this forward
        self._learned: int | None = None  # hooks that fire in a whole forward
        self._fired = 0
        if layers:
            self.keep(layers, reduce=reduce)

    def keep(
        self,
        layers: str | Site | Sequence[str],
        what: What = "output",
        *,
        reduce: Reduce | None = None,
        call: int | None = None,
    ) -> Self:
        """Ask for more, before the `with` block begins.

        Args:
            layers: names or globs; or a `Site`, which says itself which tensor of which call it is.
            what: `"output"`, or `"input"`: every tensor among the arguments, positional by index, keywords by name.
            reduce: a function of one tensor, on its device, without gradients; it must not change the tensor. It
                returns a tensor or a dict of tensors: what is copied to the CPU and recorded.
            call: only this call of the layer in each forward (0 is the first); None keeps them all.

        Raises:
            UnknownNameError: a pattern matches no layer.
            InputError: the same value of a layer is already kept.
        """
        if self._handles:
            raise LayertapError("keep() comes before the `with` block")
        if isinstance(layers, Site):
            match_layers(self._layers, layers.layer)
            wanted = [_Keep(layers.layer, layers.what, reduce, layers.call, layers.path)]
        elif what not in ("output", "input"):
            raise unknown_name("what", what, ["output", "input"])
        else:
            wanted = [_Keep(layer, what, reduce, call) for layer in match_layers(self._layers, layers)]
        for keep in wanted:
            if any(keep.overlaps(other) for other in self._keeps):
                raise InputError(f"the {keep.what} of layer {keep.layer!r} is kept already")
            self._keeps.append(keep)
        return self

    @property
    def record(self) -> Record:
        """What the last forward of the model gave.

        Raises:
            LayertapError: the model has not been called inside the `with` block, or its last call did not finish.
        """
        if self._record is None:
            raise LayertapError(
                "nothing recorded yet: the model itself must be called inside the `with` block "
                "(model.forward_features(...) or a single layer does not count)"
            )
        if self._running:
            raise LayertapError("the last forward of the model did not finish; it left no record")
        return self._record

    def __enter__(self) -> Self:
        if self._handles:
            raise LayertapError("these Taps are in use already")
        root = unwrap(self._model)
        wanted: dict[tuple[str, What], list[_Keep]] = {}
        for keep in self._keeps:
            wanted.setdefault((keep.layer, keep.what), []).append(keep)
        try:
            self._handles.append(root.register_forward_pre_hook(self._begin, prepend=True))
            for (layer, what), keeps in wanted.items():
                module = self._layers[layer]
                if what == "input":
                    pre_hook = partial(self._on_input, keeps)
                    self._handles.append(module.register_forward_pre_hook(pre_hook, with_kwargs=True))
                else:
                    self._handles.append(module.register_forward_hook(partial(self._on_output, keeps)))
            self._handles.append(root.register_forward_hook(self._end))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; returns its output, or None with `stop=True`."""
        if not self._handles:
            raise LayertapError("call Taps inside its `with` block")
        if not self._stop:
            return self._model(*args, **kwargs)
        self._stoppable = True
        try:
            self._model(*args, **kwargs)
        except _Stop:
            self._running = False
        finally:
            self._stoppable = False
        return None

    # The hooks

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._record = Record([keep.layer for keep in self._keeps])
        self._calls = {}
        self._fired = 0
        self._running = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running = False
        self._learned = max(self._fired, self._learned or 0)

    def _on_input(self, keeps: list[_Keep], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._put(keeps, {**dict(enumerate(args)), **kwargs})

    def _on_output(self, keeps: list[_Keep], module: nn.Module, args: Any, output: Any) -> None:
        self._put(keeps, output)

    def _put(self, keeps: list[_Keep], value: Any) -> None:
        if not self._running or self._record is None:
            return
        layer, what = keeps[0].layer, keeps[0].what
        call = self._calls.get((layer, what), 0)
        self._calls[layer, what] = call + 1
        for keep in keeps:
            if keep.call in (None, call):
                for path, tensor in _tensors_in(value):
                    if keep.path in (None, path):
                        site = Site(layer, call, path, what)
                        self._record._put(site, _take(tensor, keep.reduce, site))
        self._fired += 1
        if self._stoppable and self._fired == self._learned:
            raise _Stop


def _tensors_in(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Tensor]]:
    """Every tensor inside nested tuples, lists, mappings and dataclasses, with the way to it."""
    if isinstance(value, Tensor):
        yield path, value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    for key, part in items:
        yield from _tensors_in(part, (*path, key))


def _take(tensor: Tensor, reduce: Reduce | None, site: Site) -> Any:
    """Reduce a tensor on its device, then copy the result to the CPU."""
    # Outside inference mode, or what is kept could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        value = tensor.detach()
        if reduce is None:
            return _copy_to_cpu(value)
        try:
            value = reduce(value)
        except Exception as error:
            error.add_note(f"while reducing {site} of shape {tuple(tensor.shape)}")
            raise
        if isinstance(value, dict):
            return {name: _copy_to_cpu(part) for name, part in value.items()}
        return _copy_to_cpu(value)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """A dense, contiguous copy on the CPU that owns its memory, whatever the tensor is a view of."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
