"""What taps know: what is wished where, and where a model is that is running."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import cast, get_args

from torch import Tensor

from extract.errors import InputError, LayertapError, unknown_name
from extract.taps.edits import Edit
from extract.taps.layer_names import match_layers
from extract.taps.nested import Path
from extract.taps.record import Record, Reduce, Site, What, split_text

__all__ = ["Block", "Call", "ModelCall", "Point", "StandInError", "Wish", "wishes_for"]


@dataclasses.dataclass(frozen=True)
class Wish:
    """One thing to do at one layer: edit it, or keep it where `edit` is None. No call means every one.

    The path is that of a tensor, or of what it is in. With an `operation`, it is about functions of such a name (a
    pattern) called in the layer's own forward.
    """

    layer: str
    operation: str
    what: What
    call: int | None = None
    path: tuple[str, ...] = ()
    reduce: Reduce | None = None
    edit: Edit | None = None

    def overlaps(self, other: Wish) -> bool:
        """Whether there may be a value that both are about."""
        same = (self.layer, self.operation, self.what) == (other.layer, other.operation, other.what)
        depth = min(len(self.path), len(other.path))
        calls = (self.call, other.call)
        return same and self.path[:depth] == other.path[:depth] and (None in calls or calls[0] == calls[1])

    def takes(self, path: Path) -> bool:
        """Whether it is about the tensor at this path, or about what that is in."""
        return tuple(map(str, path[: len(self.path)])) == self.path


def wishes_for(
    layers: str | Site | Sequence[str],
    what: What,
    call: int | None,
    layer_names: list[str],
    parameter_names: list[str],
) -> list[Wish]:
    """What `Taps.keep` and `Taps.edit` are asked for, of each layer: neither reduced nor edited yet.

    Args:
        layers: as of `Taps.keep`.
        what: likewise, where the text of a layer does not say it.
        call: likewise.
        layer_names: of the model.
        parameter_names: of the model.

    Raises:
        UnknownNameError: a pattern matches no layer, or there is no such kind of value.
        InputError: the value cannot be had of a function without a module.
    """
    if what not in get_args(What):
        raise unknown_name("what", what, get_args(What))
    if isinstance(layers, Site):
        asked: list[tuple[str, int | None, tuple[str, ...], str | None]]
        asked = [(layers.layer, layers.call, tuple(map(str, layers.path)), layers.what)]
    else:
        asked = [split_text(text, layer_names) for text in ([layers] if isinstance(layers, str) else layers)]
    wishes = []
    for pattern, own_call, path, own_what in asked:
        if own_what is not None and own_what not in get_args(What):
            raise unknown_name("what", own_what, get_args(What))
        kind = what if own_what is None else cast(What, own_what)
        layer, slash, operation = pattern.partition("/")
        if kind in ("input", "grad_input", "attention") and slash:
            raise InputError(f"{pattern!r}: of a function without a module, outputs and gradients can be had")
        if slash and not layer:
            inside = [""]
        else:
            names = [*layer_names, *parameter_names] if kind == "grad" else layer_names
            inside = match_layers(names, layer)
        own_call = call if own_call is None else own_call
        wishes += [Wish(name, operation, kind, own_call, path) for name in inside]
    return wishes


@dataclasses.dataclass
class Point:
    """A place where values pass: a module, or a function called in one; with what is wished there, by layer name."""

    wishes: list[tuple[str, Wish]]
    only_keeps: bool = dataclasses.field(init=False)  # no value is edited here, and no gradient watched
    # The calls that have begun and not ended, the innermost last: a module may call itself.
    calls: list[Call] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.only_keeps = all(wish.edit is None and "grad" not in wish.what for _, wish in self.wishes)


@dataclasses.dataclass
class Call:
    """One call of a module.

    `number` is None if it is not ours. `inputs` are tensors it was given, `stand_ins` what it was given in place of
    some of them, with the version each had: see `gradients`.
    """

    number: int | None
    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    stand_ins: list[tuple[Tensor, Tensor, int]] = dataclasses.field(default_factory=list)


class ModelCall:
    """One call of the model: its record, and where it is."""

    def __init__(self, record: Record):
        self.record = record
        self.running = True
        self.handed_on = False  # to on_record
        self.calls: Counter[int] = Counter()  # id of a module -> how often it was called
        self.operations: Counter[str] = Counter()
        self.attentions: Counter[str] = Counter()
        self.kept: Counter[tuple[str, What]] = Counter()  # times something was kept of each layer
        self.left = 0  # layers of which not all that is to come was kept
        self.stack: list[list[str]] = [[""]]  # names of the modules that are running, the innermost last
        # Outputs that go on as clones, what they are clones of, and their version: see `gradients`.
        self.stand_ins: list[tuple[Site, weakref.ref[Tensor] | None, Tensor, int]] = []
        self._seen: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def see(self, tensor: Tensor) -> None:
        """Remember that a gradient is watched at this tensor."""
        self._seen[id(tensor)] = tensor

    def has_seen(self, tensor: Tensor) -> bool:
        """Whether it was, in this forward."""
        return self._seen.get(id(tensor)) is tensor

    def check_stand_ins(self) -> None:
        """Whether the model wrote into a clone that stood in for a tensor it may still read: then it went astray.

        Raises:
            LayertapError: it did.
        """
        for site, given, stand_in, version in self.stand_ins:
            if stand_in._version != version and (given is None or given() is not None):
                raise StandInError(site)
        self.stand_ins.clear()


class StandInError(LayertapError):
    """The model wrote into a copy that stood in for an output, so that its gradient could be watched.

    Attributes:
        site: of the gradient.
    """

    def __init__(self, site: Site):
        super().__init__(
            f"{site} cannot be had: the model writes in place into what layer {site.layer!r} handed on, which has "
            "other names; ask for the layer before it"
        )
        self.site = site


class Block:
    """One `with` block: what must be undone, and whether it is still open, for tensors that outlive it."""

    def __init__(self) -> None:
        self.open = True
        self.thread = threading.get_ident()
        self.undo = contextlib.ExitStack()
