"""Tensors that the model continues with in place of others: edited values, and copies whose gradients are watched.

The model may still read the tensor that was replaced, under another name or through a view, and write into either of
the two. Without hooks they are one tensor, so what is written into one of them is copied to the other. Where that
cannot be done, the request is refused: what the model returns would be wrong.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from extract.errors import LayertapError
from extract.taps.functions import memory_of, write_into
from extract.taps.record import Site

__all__ = ["StandInError", "StandIns", "originals"]


class StandIns:
    """The stand-ins of one forward."""

    def __init__(self) -> None:
        self._all: list[_StandIn] = []
        self._written: set[tuple[str, str]] = set()  # (layer, what) of those that the model has written into

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, site: Site, given: Tensor, tensor: Tensor, *, follows: bool = False) -> None:
        """Add a tensor that stands in for another one.

        Args:
            site: what is requested, for errors.
            given: the tensor that is replaced.
            tensor: what the model continues with.
            follows: whether `tensor` may receive what the model writes into `given`. It may not if it was edited, or if
                the gradient of an output is watched: how the edit, or the gradient, goes on from there is unknown.
        """
        with contextlib.suppress(NotImplementedError):  # no memory of its own, as in torch.func: nothing is written to
            stand_in = _StandIn(site, given, tensor, follows)
            self._all = [other for other in self._all if not other.is_over]
            self._all.append(stand_in)

    def before_write(self, tensor: Tensor, written: set[int]) -> Iterator[Callable[[], object]]:
        """Yield what is to be done after the model writes into a tensor; see `Listener.on_write`.

        Raises:
            StandInError: the write cannot be repeated in the other tensor.
        """
        for stand_in in self._all:
            if stand_in.memory in written and stand_in.given_memory not in written:
                written.add(stand_in.given_memory)
                follow = stand_in.copy_to_given
            elif stand_in.given_memory in written and stand_in.memory not in written and stand_in.is_read:
                if not stand_in.follows:
                    raise StandInError(stand_in.site)
                written.add(stand_in.memory)
                follow = stand_in.copy_from_given
            else:
                continue
            self._written.add((stand_in.site.layer, stand_in.site.what))
            yield partial(follow, tensor)

    def check_again(self, site: Site) -> None:
        """Check a stand-in that a backward pass computes again, where writes are not followed.

        Raises:
            StandInError: the model wrote into it in the forward.
        """
        if (site.layer, site.what) in self._written:
            raise StandInError(site)

    def end(self) -> None:
        """Let go of all stand-ins at the end of the forward.

        Raises:
            StandInError: something was written into one of them, unnoticed by `before_write`.
        """
        stand_ins, self._all = self._all, []
        for stand_in in stand_ins:
            if stand_in.was_written_unnoticed:
                raise StandInError(stand_in.site)

    def clear(self) -> None:
        """Let go of all stand-ins of a forward that was interrupted."""
        self._all.clear()


class _StandIn:
    """A tensor that stands in for another one; both are held weakly."""

    def __init__(self, site: Site, given: Tensor, tensor: Tensor, follows: bool):
        self.site, self.follows = site, follows
        self.given_memory, self.memory = memory_of(given), memory_of(tensor)
        # As long as these exist, no other memory has the same number.
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in (given, tensor)]  # type: ignore[no-untyped-call]
        self._tensor, self._given = weakref.ref(tensor), weakref.ref(given)
        # What is written into the tensor that stands in for a view has to reach the base, whose other views are other
        # tensors. The model may hold none of this view.
        self._view = given if given._is_view() else None
        known = _STAND_INS.get(id(given))
        self._is_of_a_chain = known is not None and known.original_of(given) is not None
        _STAND_INS[id(tensor)] = self
        self._versions = self._versions_now()

    @property
    def is_over(self) -> bool:
        """Whether nothing can read the replaced tensor any more, nor one that this stands in for in turn."""
        # Autograd may have saved the values of a tensor, which keeps its memory but not the tensor.
        return self._given() is None and not self._is_of_a_chain

    @property
    def is_read(self) -> bool:
        """Whether the stand-in can still be read."""
        return self._tensor() is not None

    def original_of(self, tensor: Tensor) -> Tensor | None:
        """Return what this tensor stands in for, if it is the one of this object."""
        return self._given() if self._tensor() is tensor else None

    @property
    def was_written_unnoticed(self) -> bool:
        """Whether both can be read, and one of them was written to without the other."""
        return None not in (now := self._versions_now()) and now != self._versions

    def _versions_now(self) -> list[int | None]:
        """Return the versions of both tensors, which each write changes; None if it is gone, or in inference mode."""
        return [
            None if tensor is None or tensor.is_inference() else tensor._version
            for tensor in (self._given(), self._tensor())
        ]

    def copy_to_given(self, written: Tensor) -> None:
        """Give the replaced tensor the values of the stand-in, after a tensor of its memory was written to."""
        self._copy(self._given(), (self._tensor(), written, written._base))

    def copy_from_given(self, written: Tensor) -> None:
        """Give the stand-in the values of the replaced tensor, after a tensor of its memory was written to."""
        self._copy(self._tensor(), (self._given(), written, written._base))

    def _copy(self, target: Tensor | None, sources: tuple[Tensor | None, ...]) -> None:
        if target is None:
            return
        for source in sources:
            if source is not None and source.shape == target.shape:
                write_into(target, source)
                self._versions = self._versions_now()
                return
        raise StandInError(self.site)


# By the id of the tensor that stands in for another; one may stand in for another in turn, also for other `Taps`.
_STAND_INS: weakref.WeakValueDictionary[int, _StandIn] = weakref.WeakValueDictionary()


def originals(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what it stands in for, as far as that can still be read."""
    original: Tensor | None = tensor
    while original is not None:
        yield original
        stand_in = _STAND_INS.get(id(original))
        original = stand_in.original_of(original) if stand_in is not None else None


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
