"""Whatever is not plain (PyTorch as it is, in float32) computes the first batch both ways, and is compared.

Compiled code in float32 must agree within rounding, or the run goes on without it. Lower precision must give features
that point the same way, or the run ends before anything is stored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from extract.engines import default_engine
from extract.errors import LayertapError, first_line
from extract.forward import Forward, ready
from extract.planning import Plan
from extract.similarity import cosines, deviation

__all__ = ["FULL_PRECISION", "Agreement", "Computation", "agreement", "verified"]

FULL_PRECISION = 1e-5  # of the largest value: how far compiled code in float32 may be off
# Seconds of eager work from which compiling pays: it takes OpenVINO about 3 s and inductor 10 to 60 s, and saves a
# tenth of the work or more.
_PAYS_FROM_S = {"openvino": 20.0, "inductor": 300.0}


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
        why: it was chosen; empty where it was asked for.
        agreement: feature -> how it agrees with eager float32 in the first batch; empty where it is that.
    """

    engine: str = "eager"
    why: str = ""
    agreement: dict[str, Agreement] = field(default_factory=dict)


def agreement(found: dict[str, NDArray[Any]], plain: dict[str, NDArray[Any]]) -> dict[str, Agreement]:
    """How features of a batch agree with the plain ones; rows that are not finite there have no say."""
    agreements = {}
    for name, values in plain.items():
        finite = np.isfinite(values.reshape(len(values), -1)).all(1)
        cosine = float(cosines(found[name][finite], values[finite]).min(initial=1.0))
        agreements[name] = Agreement(cosine, deviation(found[name][finite], values[finite]))
    return agreements


@contextlib.contextmanager
def verified(plan: Plan, rows: int, on_chosen: Callable[[Computation], None]) -> Iterator[Forward]:
    """A forward that does what the plan says, and whose first call decides what is left open there, and compares.

    Args:
        plan: its `engine` may be "auto": compiled if that pays, and agrees.
        rows: to be computed.
        on_chosen: called when it is known how features are computed.

    Raises:
        LayertapError: from the call: lower precision points elsewhere, or the compiler that was asked for failed, or
            what it made is off.
    """
    dtype = plan.dataset.features[0].dtype
    batch_size = min(plan.batch_size, rows)
    chosen: Forward | None = None

    with contextlib.ExitStack() as open_now:

        def first(images: Tensor) -> dict[str, NDArray[Any]]:
            nonlocal chosen
            with contextlib.ExitStack() as at_first:
                plain = at_first.enter_context(ready(plan.backbone, plan.choice, dtype))
                start = time.perf_counter()
                expected = plain(images)
                left_s = (time.perf_counter() - start) * rows / len(images)
                engine, why = _chosen(plan, left_s)
                if (engine, plan.precision) == ("eager", "float32"):
                    chosen = plain
                    open_now.push(at_first.pop_all())
                    on_chosen(Computation(engine, why))
                    return expected
            try:  # not under the hooks of the plain one, which a compiler would see
                forward = open_now.enter_context(
                    ready(plan.backbone, plan.choice, dtype, plan.precision, engine, batch_size)
                )
                found = forward(images)
                computation = Computation(engine, why, agreement(found, expected))
                _check(plan, computation)
            except Exception as error:
                if plan.engine != "auto":
                    if engine == "eager" or isinstance(error, LayertapError):
                        raise
                    raise LayertapError(
                        f"{plan.backbone.spec} cannot be compiled by {engine}: {first_line(error)}. Take --compile off"
                    ) from error
                open_now.close()
                chosen = open_now.enter_context(ready(plan.backbone, plan.choice, dtype))
                on_chosen(Computation("eager", f"{engine} failed: {first_line(error)}"))
                return expected
            chosen = forward
            on_chosen(computation)
            return found

        yield lambda images: chosen(images) if chosen is not None else first(images)


def _chosen(plan: Plan, left_s: float) -> tuple[str, str]:
    """The engine, and why."""
    if plan.engine != "auto":
        return plan.engine, ""
    best = default_engine(plan.backbone.device, plan.precision)
    if left_s < _PAYS_FROM_S[best]:
        return "eager", f"about {left_s:.0f} s of work; compiling pays from {_PAYS_FROM_S[best]:.0f} s"
    return best, f"about {left_s:.0f} s of work"


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
