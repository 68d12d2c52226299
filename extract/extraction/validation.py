"""Compare the first batch with the reference: eager PyTorch in float32 on exactly decoded images.

Compiled code in float32 must agree within rounding; otherwise the run continues without it, or ends if compiling was
requested. Lower precision and fast decoding must give features with a high cosine to the reference, or the run ends
before anything is stored. Some images of the first batch are also computed alone: their rows must be the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from extract.compute.agreement import Agreement, agreement, refusal
from extract.compute.backends import default_engine, open_forward
from extract.compute.forward import B, Forward, Values
from extract.compute.row_check import check_rows
from extract.errors import DisagreementError, LayertapError, first_line
from extract.extraction.first_images import decoded_in
from extract.extraction.plan import Plan
from extract.store.format.value_types import decoded, encoded, read_as
from extract.system.json_files import Text, read_json_lines

__all__ = ["Computation", "ValidatedForward", "validated_forward"]

# Number of images from which compiling pays. A start with OpenVINO takes 3 to 4 s longer, with the comparison; with
# inductor, 10 to 60 s. OpenVINO saves 0 to 3 ms of each image on two Zen cores, and more on others. The limit is in
# images, not in seconds, so that noise does not decide.
_PAYS_FROM = {"openvino": 2_000, "inductor": 50_000}


@dataclass
class Computation:
    """How the features of a run were computed.

    Attributes:
        engine: "eager", "inductor" or "openvino".
        why: why "auto" has not chosen a compiler; otherwise empty.
        failed: whether the compiler that "auto" tried has failed or disagreed.
        agreement: feature -> agreement with eager float32 in the first batch; empty if the run itself is eager float32.
        decoding: feature -> agreement of fast decoded images with eager float32 of exactly decoded ones, for the first
            images; empty if images are decoded exactly.
        storage: feature -> agreement of the first batch as stored with its values; empty for float32 and float16.
        prepared_in_s: seconds spent comparing and compiling, excluding the computation of the first batch itself.
    """

    engine: str = "eager"
    why: str = ""
    failed: bool = False
    agreement: dict[str, Agreement] = field(default_factory=dict)
    decoding: dict[str, Agreement] = field(default_factory=dict)
    storage: dict[str, Agreement] = field(default_factory=dict)
    prepared_in_s: float = 0.0


@contextlib.contextmanager
def validated_forward(
    plan: Plan,
    has_stored_rows: bool = False,
    on_computation: Callable[[Computation], None] = lambda computation: None,
) -> Iterator[ValidatedForward]:
    """Context manager: yield the forward of a plan. Its first batch is compared with the reference.

    Args:
        plan: plan of the run. An `engine` of "auto" means compiled if that pays and agrees.
        has_stored_rows: whether the data set already has rows, which were compared when the first was computed. Then
            lower precision is compared but not refused.
        on_computation: called after the first batch with how features are computed.
    """
    with contextlib.ExitStack() as open_now:
        yield ValidatedForward(plan, has_stored_rows, on_computation, open_now)


class ValidatedForward:
    """The forward of a run, chosen with the first batch, whose features are compared with the reference.

    Attributes:
        chosen: computes all later batches; None before the first batch.
    """

    def __init__(
        self,
        plan: Plan,
        has_stored_rows: bool,
        on_computation: Callable[[Computation], None],
        open_now: contextlib.ExitStack,
    ):
        self._plan, self._has_stored_rows, self._open_now = plan, has_stored_rows, open_now
        self._on_computation = on_computation
        self._rows_are_checked = False
        self.chosen: Forward | None = None

    @property
    def copying_s(self) -> float:
        """See `Forward`."""
        return 0.0 if self.chosen is None else self.chosen.copying_s

    @property
    def images_at_once(self) -> int | None:
        """See `Forward`."""
        return None if self.chosen is None else self.chosen.images_at_once

    def first_batches(self, batches: Iterator[B]) -> Iterator[tuple[B, Values]]:
        """Compute and compare batches until rows are known to be images; yield nothing in later shards.

        Raises:
            InputError: rows of a feature are not the images of the first batch.
            DisagreementError: lower precision, fast decoding or the requested compiler disagrees with the reference.
            LayertapError: the requested compiler has failed.
        """
        while self.chosen is None or not self._rows_are_checked:
            batch = next(batches, None)
            if batch is None:
                return
            yield batch, self._validated(batch.images) if len(batch.images) else {}

    def _validated(self, images: Tensor) -> Values:
        """Return the features of the first batch, or of a later one while the rows are not checked.

        A batch with a single image does not show which rows belong to which image.
        """
        if self.chosen is None:
            try:
                return self._first(images)
            except BaseException:  # so that a retry compares again
                self.chosen = None
                self._open_now.close()
                raise
        if len(images) > 1:
            with open_forward(self._plan.backbone, self._plan.choice, "float32") as plain:
                self._check_rows(plain, images, plain(images))
        return self.chosen(images)

    def _first(self, images: Tensor) -> Values:
        """Return the features of the first batch; decide how all others are computed."""
        plan, precision, start = self._plan, self._plan.settings.precision, time.perf_counter()
        engine, why = _engine(plan, self._has_stored_rows)
        plain_way = (engine, precision) == ("eager", "float32")
        preprocessing = plan.backbone.preprocessing
        both_ways = preprocessing, replace(preprocessing, fast=False)
        pair = decoded_in(plan.images, both_ways, plan.settings.max_pixels) if preprocessing.fast else None
        expected, exactly_decoded, own_s = {}, {}, 0.0
        if pair or not plain_way:
            with open_forward(
                plan.backbone, plan.choice, "float32"
            ) as plain:  # closed before a compiler sees the model
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
                    others += [] if precision == "float32" else ["--precision float32", "a lower --min-cosine"]
                    if isinstance(error, DisagreementError):
                        raise DisagreementError(error.reason, " or ".join(others)) from error
                    raise LayertapError(f"{error}", hint=f"use {' or '.join(others)}") from error
                self._open_now.close()
                self.chosen = None
                computation, features, own_s = Computation("eager", first_line(error), True), None, 0.0
        forward = self.chosen or self._open("eager")
        if plain_way:
            before = time.perf_counter()
            features = forward(images)
            own_s = time.perf_counter() - before
            self._check_rows(forward, images, features)
        if pair:
            computation.decoding = agreement(forward(pair[0]), exactly_decoded)
            if no := refusal(computation.decoding, plan.settings.min_cosine):
                too = "" if precision == "float32" else "--precision float32 or "
                instead = f"--decode exact or {too}a lower --min-cosine"
                raise DisagreementError(f"of fast decoded images, {no}", instead)
        if features is None:
            before = time.perf_counter()
            features = forward(images)
            own_s = time.perf_counter() - before
        computation.storage = self._storage(features)
        computation.prepared_in_s = time.perf_counter() - start - own_s
        self._on_computation(computation)
        return features

    def _storage(self, features: Values) -> dict[str, Agreement]:
        """Compare the features as they are stored with their values.

        Raises:
            DisagreementError: a cosine is too small.
        """
        kept = {feature.name: feature.dtype for feature in self._plan.dataset.features}
        rounded = {name: values for name, values in features.items() if kept[name] != read_as(kept[name])}
        stored = {name: decoded(encoded(values, kept[name]), kept[name]) for name, values in rounded.items()}
        measured, least = agreement(stored, rounded), self._plan.settings.min_cosine
        for name, compared in measured.items():
            if not compared.min_cosine >= least and not self._has_stored_rows:
                why = f"{name} has a cosine of {compared.min_cosine:.6f} to its values; at least {least} is required"
                raise DisagreementError(f"stored as {kept[name]}, {why}", "--dtype float16 or a lower --min-cosine")
        return measured

    def _check_rows(self, forward: Forward, images: Tensor, features: Values) -> None:
        check_rows(forward, images, features)
        self._rows_are_checked = len(images) > 1 or self._plan.settings.batch_size == 1

    def _open(self, engine: str) -> Forward:
        plan = self._plan
        # Features are compared in float32, whatever dtype is stored.
        plain = (engine, plan.settings.precision, plan.backbone.preprocessing.fast) == ("eager", "float32", False)
        dtype = read_as(plan.settings.dtype) if plain else "float32"
        opened = open_forward(plan.backbone, plan.choice, dtype, plan.settings.precision, engine, _largest_batch(plan))
        self.chosen = self._open_now.enter_context(opened)
        return self.chosen

    def _why_not(self, computation: Computation) -> str:
        """Return why features disagree with the reference; an empty string if they agree."""
        if self._plan.settings.precision == "float32":
            why = refusal(computation.agreement, None)
            return why and f"compiled by {computation.engine}, {why}"
        why = "" if self._has_stored_rows else refusal(computation.agreement, self._plan.settings.min_cosine)
        return why and f"in {self._plan.settings.precision} ({computation.engine}), {why}"


def _largest_batch(plan: Plan) -> int:
    return min(plan.settings.batch_size, plan.dataset.shard_rows)


def _engine(plan: Plan, has_stored_rows: bool) -> tuple[str, str]:
    """Return the engine, and why it is not a compiler.

    "auto" decides by the size of the whole data set. A resumed run takes the engine of the stored rows, so it gives the
    same bytes as an uninterrupted run.
    """
    if plan.engine != "auto":
        return plan.engine, ""
    best = default_engine(plan.backbone.device, plan.settings.precision)
    if has_stored_rows and (stored := _engine_of_stored_rows(plan)):
        return stored, "as the stored rows" if stored == "eager" else ""
    if plan.dataset.n_rows >= _PAYS_FROM[best]:
        return best, ""
    return "eager", f"compiling pays from {_PAYS_FROM[best]:,} images"


def _engine_of_stored_rows(plan: Plan) -> str | None:
    """Return the engine of the last run that computed rows; None if no log names it."""
    engine = None
    shape = {"event": Text("computing"), "computation": {"engine": Text("eager|openvino|inductor")}}
    for event in read_json_lines(plan.dataset.out / "runs.jsonl", shape):
        engine = event["computation"]["engine"]
    return engine
