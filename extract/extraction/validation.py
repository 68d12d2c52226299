"""Whatever is not plain (PyTorch as it is, in float32, of exactly decoded images) is compared with that first.

Compiled code in float32 must agree within rounding, or the run goes on without it. Lower precision and fast decoding
must give features that point the same way, or the run ends before anything is stored. And some pictures of the first
batch are computed alone: their rows must be those of the batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.backbones.preprocessing import Preprocessing
from extract.compute.agreement import Agreement, agreement, refusal
from extract.compute.backends import default_engine, ready
from extract.compute.forward import Forward, Values, check_rows
from extract.errors import DisagreementError, InputError, LayertapError, first_line
from extract.extraction.plan import Plan
from extract.images import ImageList, load_batches
from extract.row_status import Status

__all__ = ["Computation", "decoded_both_ways", "verified"]

# Images from which compiling pays: it takes OpenVINO about 3 s and inductor 10 to 60 s, and saves a tenth of the work
# or more. Numbers of images, not seconds, so that the same job is computed in the same way every time.
_PAYS_FROM = {"openvino": 3_000, "inductor": 50_000}
_DECODED = 16  # images that are decoded both ways


@dataclass
class Computation:
    """How the features of a run were computed.

    Attributes:
        engine: "eager", "inductor" or "openvino".
        why: it is not another, which was asked for or would have been taken otherwise.
        failed: whether that other one failed, or was off.
        agreement: feature -> how it agrees with eager float32, in the first batch; empty where it is that.
        decoding: feature -> how that of fast decoded images agrees with eager float32 of exactly decoded ones, for the
            first images; empty where they are exactly decoded.
        prepared_in_s: seconds that comparing and compiling took, beside computing the first batch itself.
    """

    engine: str = "eager"
    why: str = ""
    failed: bool = False
    agreement: dict[str, Agreement] = field(default_factory=dict)
    decoding: dict[str, Agreement] = field(default_factory=dict)
    prepared_in_s: float = 0.0


@contextlib.contextmanager
def verified(
    plan: Plan, on_chosen: Callable[[Computation], None], on_smaller: Callable[[int], None], begun: bool = False
) -> Iterator[Forward]:
    """A forward that does what the plan says, and whose first call compares.

    Args:
        plan: its `engine` may be "auto": compiled if that pays, and agrees.
        on_chosen: called when it is known how features are computed.
        on_smaller: as of `ready`.
        begun: whether there are rows already, which were compared when the first of them was computed: then those of
            this batch in lower precision are told, but not refused.

    Raises:
        InputError: from the call: rows of a feature are not the images of the batch.
        DisagreementError: from the call: lower precision or fast decoding points elsewhere, or what a compiler made
            that was asked for is off.
        LayertapError: from the call: the compiler that was asked for failed.
    """
    with contextlib.ExitStack() as open_now:
        yield _FirstThenAll(plan, on_chosen, on_smaller, begun, open_now)


class _FirstThenAll(Forward):
    """The forward of a run: compares in its first call, and computes in all of them."""

    def __init__(
        self,
        plan: Plan,
        on_chosen: Callable[[Computation], None],
        on_smaller: Callable[[int], None],
        begun: bool,
        open_now: contextlib.ExitStack,
    ):
        self._plan, self._on_chosen, self._on_smaller, self._open_now = plan, on_chosen, on_smaller, open_now
        self._begun = begun
        self._dtype = plan.dataset.features[0].dtype
        self._forward: Forward | None = None
        self._rows_are_checked = False

    @property
    def ahead(self) -> bool:  # type: ignore[override]
        return self._forward is not None and self._forward.ahead

    @property
    def copying_s(self) -> float:  # type: ignore[override]
        return 0.0 if self._forward is None else self._forward.copying_s

    def begin(self, images: Tensor) -> Callable[[], Values]:
        if self._forward is None:
            try:
                values: Callable[[], Values] = partial(dict, self._first(images))
            except BaseException:  # what was refused is compared again, should anybody go on
                self._forward = None
                self._open_now.close()
                raise
        else:
            if not self._rows_are_checked and len(images) > 1:  # the first batch was of one picture
                with ready(self._plan.backbone, self._plan.choice, "float32") as plain:
                    self._check_rows(plain, images, plain(images))
            values = self._forward.begin(images)
        return lambda: {name: _rounded(one, self._dtype) for name, one in values().items()}

    def _first(self, images: Tensor) -> Values:
        """Features of the first batch; decides how all others are computed."""
        plan, start = self._plan, time.perf_counter()
        engine, why = _engine(plan)
        plain_way = (engine, plan.precision) == ("eager", "float32")
        preprocessing = plan.backbone.preprocessing
        pair = decoded_both_ways(plan.images, preprocessing, plan.max_pixels) if preprocessing.fast else None
        expected, exactly_decoded, own_s = {}, {}, 0.0
        if pair or not plain_way:
            with ready(plan.backbone, plan.choice, "float32") as plain:  # closed before a compiler sees the model
                exactly_decoded = plain(pair[1]) if pair else {}
                expected = {} if plain_way else plain(images)
                if expected:
                    self._check_rows(plain, images, expected)
        computation, features = Computation(engine, why), None
        if not plain_way:
            try:
                opened, before = self._open(engine), time.perf_counter()
                features = opened(images)
                own_s = time.perf_counter() - before - opened.compiling_s
                computation.agreement = agreement(features, expected)
                if no := self._why_not(computation):
                    raise DisagreementError(no)
            except LayertapError as error:
                if plan.engine != "auto":
                    others = [] if engine == "eager" else ["--compile off"]
                    others += [] if plan.precision == "float32" else ["--precision float32", "a lower --min-cosine"]
                    if isinstance(error, DisagreementError):
                        raise DisagreementError(error.reason, " or ".join(others)) from error
                    raise LayertapError(f"{error}. Take {' or '.join(others)}") from error
                self._open_now.close()
                self._forward = None
                computation, features, own_s = Computation("eager", first_line(error), True), None, 0.0
        forward = self._forward or self._open("eager")
        if plain_way:
            before = time.perf_counter()
            features = forward(images)
            own_s = time.perf_counter() - before
            self._check_rows(forward, images, features)
        if pair:
            computation.decoding = agreement(forward(pair[0]), exactly_decoded)
            if no := refusal(computation.decoding, plan.min_cosine):
                too = "" if plan.precision == "float32" else "--precision float32 or "
                instead = f"--decode exact or {too}a lower --min-cosine"
                raise DisagreementError(f"of fast decoded images, {no}", instead)
        computation.prepared_in_s = time.perf_counter() - start - own_s
        self._on_chosen(computation)
        return forward(images) if features is None else features

    def _check_rows(self, forward: Forward, images: Tensor, features: Values) -> None:
        check_rows(forward, images, features)
        self._rows_are_checked = len(images) > 1

    def _open(self, engine: str) -> Forward:
        plan = self._plan
        # What is compared is in float32, whatever is stored.
        plain = (engine, plan.precision, plan.backbone.preprocessing.fast) == ("eager", "float32", False)
        dtype = self._dtype if plain else "float32"
        at_most = min(plan.batch_size, plan.dataset.shard_rows)
        opened = ready(plan.backbone, plan.choice, dtype, plan.precision, engine, at_most, self._on_smaller)
        self._forward = self._open_now.enter_context(opened)
        return self._forward

    def _why_not(self, computation: Computation) -> str:
        """Why the features may not be taken for the plain ones; empty: they may."""
        if self._plan.precision == "float32":
            why = refusal(computation.agreement, None)
            return why and f"compiled by {computation.engine}, {why}"
        why = "" if self._begun else refusal(computation.agreement, self._plan.min_cosine)
        return why and f"in {self._plan.precision} ({computation.engine}), {why}"


def _engine(plan: Plan) -> tuple[str, str]:
    """The engine, and why; by the size of the whole data set, so that resuming a run changes nothing."""
    if plan.engine != "auto":
        return plan.engine, ""
    best = default_engine(plan.backbone.device, plan.precision)
    if plan.dataset.n_rows < _PAYS_FROM[best]:
        return "eager", f"compiling pays from {_PAYS_FROM[best]:,} images"
    return best, ""


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """In another dtype; what it cannot hold is infinite, and found as such later."""
    return values if values.dtype == dtype else torch.from_numpy(values).to(getattr(torch, dtype)).numpy()


def decoded_both_ways(
    images: ImageList, preprocessing: Preprocessing, max_pixels: int, count: int = _DECODED
) -> tuple[Tensor, Tensor]:
    """Of the first images that can be decoded: (B, ...) decoded fast, and (B, ...) the same exactly.

    Args:
        images: as listed.
        preprocessing: that decodes fast.
        max_pixels: as of `extract_features`.
        count: of images at most.

    Raises:
        InputError: there are none.
    """
    for first in range(0, len(images), count):
        rows = list(range(first, min(first + count, len(images))))
        found = []
        for one in (preprocessing, replace(preprocessing, fast=False)):
            batches = load_batches(
                images, [rows], one.prepare, workers=0, max_pixels=max_pixels, at_least_px=one.at_least_px
            )
            with contextlib.closing(batches):
                found.append(next(batches))
        good = np.flatnonzero((found[0].status == Status.OK) & (found[1].status == Status.OK)).tolist()
        if good:
            fast, exact = (batch.only(good).images for batch in found)
            return fast, exact
    raise InputError(f"none of the {len(images):,} images can be decoded both fast and exactly; take --decode exact")
