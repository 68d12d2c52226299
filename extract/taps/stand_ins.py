"""Tensors that the model continues with in place of others: edited values, and copies whose gradients are watched.

The model may still read the tensor that was replaced, under another name or through a view, and write into either of
the two. Without hooks they are one tensor, so what is written into one of them is copied to the other. Where that
cannot be done, the request is refused: what the model returns would be wrong. Not noticed are writes through NumPy into
a copy, and code that asks whether it has the same tensor object as before (`x is self.last`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from extract.errors import LayertapError
from extract.taps.copies import overlaps_itself
from extract.taps.functions import Write, follow_write, version_of
from extract.taps.record import Site
from extract.taps.torch_internals import StorageWeakRef, is_shared, memory_of

__all__ = ["StandIn", "StandInError", "StandIns", "originals", "stands_in"]


class StandIns:
    """The stand-ins of the running forward, and which the model wrote into, in all forwards of the block."""

    def __init__(self) -> None:
        self._all: list[StandIn] = []
        self._enough = 16  # stand-ins, until those that are over are removed
        self._written: set[tuple[str, str]] = set()  # (layer, what) of those that the model has written into

    def add(self, site: Site, given: Tensor, tensor: Tensor, *, follows: bool = False) -> StandIn | None:
        """Add a tensor that stands in for another one; return how, or None if nothing can be written to it.

        Args:
            site: what is requested, for errors.
            given: the tensor that is replaced.
            tensor: what the model continues with.
            follows: whether `tensor` may receive what the model writes into `given`. It may not if it was edited, or if
                the gradient of an output is watched: how the edit, or the gradient, goes on from there is unknown.
        """
        try:
            added = StandIn(site, given, tensor, follows)
        except NotImplementedError:  # no memory of its own, as in torch.func: nothing is written to
            return None
        if len(self._all) > self._enough:
            self._all = [stand_in for stand_in in self._all if not stand_in.is_over]
            self._enough = 2 * len(self._all) + 16
        self._all.append(added)
        return added

    def before_write(self, write: Write) -> Iterator[Callable[[], object]]:
        """Yield what is to be done after the model writes into a tensor; see `Listener.on_write`.

        Raises:
            StandInError: the write cannot be repeated in the other tensor.
        """
        for stand_in in self._all:
            if stand_in.memory in write.reached and stand_in.given_memory not in write.reached:
                write.reached[stand_in.given_memory] = to_given = True
            elif stand_in.given_memory in write.reached and stand_in.memory not in write.reached:
                follows = stand_in.follows and write.reached[stand_in.given_memory]
                if stand_in.tensor is not None and not follows:
                    raise StandInError(stand_in.site)
                write.reached[stand_in.memory], to_given = follows, False
            else:
                continue
            if write.tensor is stand_in.tensor or write.tensor is stand_in.given:
                write.may_be_hidden = False
            if stand_in.overlaps:
                raise StandInError(stand_in.site)
            self.note_write(stand_in.site)
            yield partial(stand_in.copy, write, to_given)

    def note_write(self, site: Site) -> None:
        """Note that an edited value was written into the tensor of the model, not passed on in its place."""
        self._written.add((site.layer, site.what))

    def check_again(self, site: Site) -> None:
        """Check a stand-in that a backward pass computes again, where writes are not followed.

        Raises:
            StandInError: the model wrote into it in the forward.
        """
        if (site.layer, site.what) in self._written:
            raise StandInError(site)

    def let_go(self) -> None:
        """Let go of all stand-ins, also those of an interrupted forward."""
        self._all = []

    def end(self) -> None:
        """Let go of all stand-ins at the end of the forward.

        Raises:
            StandInError: something was written into one of them, unnoticed by `before_write`.
        """
        stand_ins, self._all = self._all, []
        for stand_in in stand_ins:
            if stand_in.was_written_unnoticed:
                raise StandInError(stand_in.site)


class StandIn:
    """A tensor that stands in for another one; both are held weakly."""

    def __init__(self, site: Site, given: Tensor, tensor: Tensor, follows: bool):
        self.site, self.follows = site, follows
        self.given_memory, self.memory = memory_of(given), memory_of(tensor)
        # As long as these exist, no other memory has the same number.
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in (given, tensor)]  # type: ignore[no-untyped-call]
        self._tensor, self._given = weakref.ref(tensor), weakref.ref(given)
        # What is written into the tensor that stands in for a view has to reach the base, whose other views are other
        # tensors. The model may hold none of this view. Autograd may have saved the values of a tensor; they are held
        # in any case.
        self._shared = given if given._is_view() or is_shared(given) else None
        self._is_of_a_chain = _stand_in(given) is not None
        _STAND_INS[id(tensor)] = self
        self._versions = self._versions_now()
        # A write into such a tensor changes each value once for each place that it stands in.
        self.overlaps = overlaps_itself(given)
        self._geometry = tensor.shape, tensor.stride(), tensor.storage_offset()

    @property
    def is_over(self) -> bool:
        """Whether nothing can read the replaced tensor any more, nor one that this stands in for in turn."""
        return self.given is None and not self._is_of_a_chain

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that stands in for another one, as long as it exists."""
        return self._tensor()

    @property
    def given(self) -> Tensor | None:
        """The tensor that is replaced, as long as it exists."""
        return self._given()

    @property
    def was_written_unnoticed(self) -> bool:
        """Whether both can be read, and one of them was written to without the other."""
        return None not in (now := self._versions_now()) and now != self._versions

    def catch_up(self) -> None:
        """Repeat what a module has written into its input unnoticed, such as by an `autograd.Function`."""
        if (tensor := self.tensor) is not None and self._versions[1] != self._versions_now()[1]:
            follow_write(tensor)

    def _versions_now(self) -> list[int | None]:
        """Return the versions of both tensors, which each write changes; None if it is gone, or in inference mode."""
        return [None if tensor is None else version_of(tensor) for tensor in (self.given, self.tensor)]

    def copy(self, write: Write, to_given: bool) -> None:
        """Give the replaced tensor the values of the stand-in, whose memory was written to; or the other way round."""
        own, replaced = (self.tensor, self.memory), (self.given, self.given_memory)
        (source, source_memory), (target, target_memory) = (own, replaced) if to_given else (replaced, own)
        if source is None:
            source = write.values[source_memory]
            if memory_of(source) == source_memory:  # otherwise it has the values of one that is gone
                source = source.as_strided(*self._geometry)
        write.values[target_memory] = source if target is None else target
        if target is not None:
            if source.shape != target.shape:  # the model has changed the shape of one of them in place
                raise StandInError(self.site)
            try:
                write.repeat(target, source)
            except RuntimeError as error:  # one of several views that a function has returned at once
                raise StandInError(self.site) from error
            self._versions = self._versions_now()


# By the id of the tensor that stands in for another; one may stand in for another in turn, also for other `Taps`.
_STAND_INS: weakref.WeakValueDictionary[int, StandIn] = weakref.WeakValueDictionary()


def _stand_in(tensor: Tensor) -> StandIn | None:
    """Return how this tensor stands in for another one, if it does."""
    found = _STAND_INS.get(id(tensor))
    return found if found is not None and found.tensor is tensor else None


def stands_in(tensor: Tensor) -> bool:
    """Whether a tensor stands in for another one."""
    return _stand_in(tensor) is not None


def originals(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what it stands in for, as far as that can still be read."""
    original: Tensor | None = tensor
    while original is not None:
        yield original
        stand_in = _stand_in(original)
        original = stand_in.given if stand_in is not None else None


class StandInError(LayertapError):
    """The model reads, and writes in place into, a tensor that another one stands in for.

    Attributes:
        site: the site that was requested.
    """

    def __init__(self, site: Site):
        side = "input" if "input" in site.what else "output"
        super().__init__(
            f"{site} is not available: the model writes in place into the {side} of layer {site.layer!r}, which has "
            "other references",
            hint="request another layer, such as the one before it",
        )
        self.site = site
