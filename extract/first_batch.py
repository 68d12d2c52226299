"""Whatever is not plain (PyTorch as it is, in float32) computes the first batch both ways, and is compared.

Compiled code in float32 must agree within rounding, or the run goes on without it. Lower precision must give features
that point the same way, or the run ends before anything is stored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from extract.engines import default_engine
from extract.errors import LayertapError, first_line
from extract.forward import Forward, ready
from extract.images import load_batches
from extract.planning import Plan
from extract.similarity import cosines, deviation

__all__ = ["FULL_PRECISION", "Agreement", "Computation", "agreement", "verified"]

FULL_PRECISION = 1e-5  # of the largest value: how far compiled code in float32 may be off
# Images from which compiling pays: it takes OpenVINO about 3 s and inductor 10 to 60 s, and saves a tenth of the work
# or more. Numbers of images, not seconds, so that the same job is computed in the same way every time.
_PAYS_FROM = {"openvino": 1_000, "inductor": 50_000}


_DECODED = 16  # images that are decoded both ways


@dataclass(frozen=True)
class Agreement:
    """How a feature of a batch, computed in another way, agrees with the plain one.

    Attributes:
        min_cosine: the least cosine of an image's two features.
        max_deviation: the largest difference, as a part of the largest value.
    """

    min_cosine: float
    max_deviation: float


@dataclass
class Computation:
    """How the features of a run were computed.

    Attributes:
        engine: "eager", "inductor" or "openvino".
        why: it is not another, which was asked for or would have been taken otherwise.
        agreement: feature -> how it agrees with eager float32 in the first batch; empty where it is that.
        prepared_in_s: seconds that comparing and compiling took, beside the first batch itself.
        decoding: feature -> how that of fast decoded images agrees with that of exactly decoded ones, of the first
            images; empty where they are exactly decoded.
    """

    engine: str = "eager"
    why: str = ""
    agreement: dict[str, Agreement] = field(default_factory=dict)
    decoding: dict[str, Agreement] = field(default_factory=dict)
    prepared_in_s: float = 0.0


def agreement(found: dict[str, NDArray[Any]], plain: dict[str, NDArray[Any]]) -> dict[str, Agreement]:
    """How features of a batch agree with the plain ones; rows that are not finite there have no say."""
    agreements = {}
    for name, values in plain.items():
        finite = np.isfinite(values.reshape(len(values), -1)).all(1)
        cosine = float(cosines(found[name][finite], values[finite]).min(initial=1.0))
        agreements[name] = Agreement(cosine, deviation(found[name][finite], values[finite]))
    return agreements


@contextlib.contextmanager
def verified(
    plan: Plan, on_chosen: Callable[[Computation], None], on_smaller: Callable[[int], None]
) -> Iterator[Forward]:
    """A forward that does what the plan says, and whose first call compares.

    Args:
        plan: its `engine` may be "auto": compiled if that pays, and agrees.
        on_chosen: called when it is known how features are computed.
        on_smaller: as of `ready`.

    Raises:
        LayertapError: from the call: lower precision points elsewhere, or the compiler that was asked for failed, or
            what it made is off.
    """
    dtype = plan.dataset.features[0].dtype
    engine, why = _chosen(plan)
    chosen: Forward | None = None

    with contextlib.ExitStack() as open_now:

        def first(images: Tensor) -> dict[str, NDArray[Any]]:
            nonlocal chosen
            start = time.perf_counter()
            decoding = _of_decoding(plan)
            with contextlib.ExitStack() as at_first:
                plain = at_first.enter_context(ready(plan.backbone, plan.choice, dtype, on_smaller=on_smaller))
                before = time.perf_counter()
                expected = plain(images)
                plain_s = time.perf_counter() - before
                if (engine, plan.precision) == ("eager", "float32"):
                    chosen = plain
                    open_now.push(at_first.pop_all())
                    on_chosen(
                        Computation(engine, why, decoding=decoding, prepared_in_s=time.perf_counter() - start - plain_s)
                    )
                    return expected
            try:  # not under the hooks of the plain one, which a compiler would see
                forward = open_now.enter_context(
                    ready(
                        plan.backbone,
                        plan.choice,
                        dtype,
                        plan.precision,
                        engine,
                        min(plan.batch_size, plan.dataset.shard_rows),
                    )
                )
                found = forward(images)
                computation = Computation(engine, why, agreement(found, expected), decoding)
                _check(plan, computation)
            except Exception as error:
                if plan.engine != "auto":
                    if engine == "eager" or isinstance(error, LayertapError):
                        raise
                    raise LayertapError(
                        f"{plan.backbone.spec} cannot be compiled by {engine}: {first_line(error)}. Take --compile off"
                    ) from error
                open_now.close()
                chosen = open_now.enter_context(ready(plan.backbone, plan.choice, dtype, on_smaller=on_smaller))
                on_chosen(
                    Computation(
                        "eager",
                        f"{engine} failed: {first_line(error)}",
                        decoding=decoding,
                        prepared_in_s=time.perf_counter() - start - plain_s,
                    )
                )
                return expected
            chosen = forward
            computation.prepared_in_s = time.perf_counter() - start - plain_s
            on_chosen(computation)
            return found

        yield lambda images: chosen(images) if chosen is not None else first(images)


def _of_decoding(plan: Plan) -> dict[str, Agreement]:
    """How features of the first images agree, decoded fast and exactly; both computed eagerly, in float32.

    Raises:
        LayertapError: they point elsewhere.
    """
    if not plan.backbone.preprocessing.fast:
        return {}
    both = []
    for preprocessing in (plan.backbone.preprocessing, replace(plan.backbone.preprocessing, fast=False)):
        rows = [list(range(min(_DECODED, len(plan.images))))]
        batches = load_batches(
            plan.images,
            rows,
            preprocessing.prepare,
            workers=0,
            max_pixels=plan.max_pixels,
            at_least_px=preprocessing.at_least_px,
        )
        with contextlib.closing(batches):
            both.append(next(batches))
    good = [batch.images for batch in both if len(batch.images)]
    if len(good) < 2 or len(good[0]) < len(good[1]):
        return {}
    with ready(plan.backbone, plan.choice, "float32") as forward:
        found = agreement(*(forward(images) for images in good))
    for name, one in found.items():
        if not one.min_cosine >= plan.min_cosine:
            raise LayertapError(
                f"{name} of fast decoded images has a cosine of {one.min_cosine:.6f} to that of exactly decoded ones; "
                f"at least {plan.min_cosine} is wanted. Take --decode exact, or a lower --min-cosine"
            )
    return found


def _chosen(plan: Plan) -> tuple[str, str]:
    """The engine, and why; by the size of the whole data set, so that resuming a run changes nothing."""
    if plan.engine != "auto":
        return plan.engine, ""
    best = default_engine(plan.backbone.device, plan.precision)
    if plan.dataset.n_rows < _PAYS_FROM[best]:
        return "eager", f"compiling pays from {_PAYS_FROM[best]:,} images"
    return best, ""


def _check(plan: Plan, computation: Computation) -> None:
    """Whether features agree well enough with the plain ones.

    Raises:
        LayertapError: they do not.
    """
    for name, found in computation.agreement.items():
        if plan.precision == "float32" and not found.max_deviation <= FULL_PRECISION:
            raise LayertapError(
                f"{name} compiled by {computation.engine} is off by {found.max_deviation:.1e} of the largest value in "
                f"the first batch; at most {FULL_PRECISION:.0e} is rounding. Take --compile off"
            )
        if plan.precision != "float32" and not found.min_cosine >= plan.min_cosine:
            raise LayertapError(
                f"{name} in {plan.precision} ({computation.engine}) has a cosine of {found.min_cosine:.6f} to float32 "
                f"for an image of the first batch; at least {plan.min_cosine} is wanted. Take --precision float32, or "
                "a lower --min-cosine"
            )
