"""Compare the first batch with the reference: eager PyTorch in float32 on exactly decoded images.

Compiled code in float32 must agree within rounding; otherwise the run continues without it, or ends if compiling was
requested. Lower precision and other decoding must give features with a high cosine to the reference, or the run ends
before anything is stored. Some images of the first batch are also computed alone: their rows must be the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from extract.backbones.preprocessing import Preprocessing
from extract.compute.agreement import Agreement, agreement, refusal
from extract.compute.backends import default_engine, open_forward
from extract.compute.forward import Forward, Values, check_rows
from extract.errors import DisagreementError, InputError, LayertapError, first_line
from extract.extraction.plan import Plan
from extract.images import Batch, Decoding, Images, load_batches
from extract.row_status import Status
from extract.store.format.value_types import decoded, encoded, read_as

__all__ = ["FIRST_DECODED", "Computation", "ValidatedForward", "decoded_alone", "decoded_in"]

FIRST_DECODED = 16  # images that are decoded before a run, to compare decoders

# Number of images from which compiling pays. A start with OpenVINO takes 3 to 4 s longer, with the comparison; with
# inductor, 10 to 60 s. OpenVINO saves 0 to 3 ms of each image on two Zen cores, and up to 18 ms on others. The limit is
# in images, so that the same job gives the same bytes each time: timing the first batch, two runs chose differently.
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


class ValidatedForward(contextlib.ExitStack):
    """Context manager: the forward of a run, chosen with the first batch, which is compared with the reference.

    Args:
        plan: plan of the run. An `engine` of "auto" means compiled if that pays and agrees.
        has_stored_rows: whether the data set already has rows, which were compared when the first was computed. Then
            lower precision is compared but not refused.
        on_computation: called after the first batch with how features are computed.

    Attributes:
        chosen: computes all later batches; None before the first batch.
        is_validated: whether the rows are known to be the images, so that later batches need no comparison.
    """

    def __init__(self, plan: Plan, has_stored_rows: bool, on_computation: Callable[[Computation], None]):
        super().__init__()
        self._plan, self._has_stored_rows, self._on_computation = plan, has_stored_rows, on_computation
        self.is_validated = False
        self.chosen: Forward | None = None

    @property
    def images_at_once(self) -> int | None:
        """See `Forward`."""
        return None if self.chosen is None else self.chosen.images_at_once

    def validated(self, images: Tensor, as_rows: Callable[[Values], Values] = lambda values: values) -> Values:
        """Return the features of a batch, compared with the reference.

        A batch with a single image does not show which rows belong to which image; then the next one is checked too.

        Args:
            images: (B, ...), the first batch, or a later one while `is_validated` is False.
            as_rows: features of the images -> of the rows, which may be several boxes of an image.

        Raises:
            InputError: rows of a feature are not the images.
            DisagreementError: lower precision, fast decoding or the requested compiler disagrees with the reference,
                or has failed.
        """
        if self.chosen is not None:
            if len(images) > 1:
                self._reference(images)
            return self.chosen(images)
        try:
            return self._first(images, as_rows)
        except BaseException:
            self.close()  # what a retry opens would be added to it
            raise

    def _first(self, images: Tensor, as_rows: Callable[[Values], Values]) -> Values:
        """Return the features of the first batch, and choose the forward of the run by them."""
        plan, began = self._plan, time.perf_counter()
        engine, why_eager = _engine(plan)
        computation = Computation(engine, why_eager)
        is_reference = (engine, plan.settings.precision) == ("eager", "float32")
        expected = {} if is_reference else self._reference(images)
        try:
            forward, features, seconds = self._candidate(computation, images, expected)
        except LayertapError as error:
            if is_reference:
                raise
            if plan.engine != "auto":
                raise _with_remedies(error, engine, plan.settings.precision) from error
            self.close()
            computation = Computation("eager", first_line(error), failed=True)
            forward, features, seconds = self._candidate(computation, images, {})
        if not plan.backbone.preprocessing.is_exact:
            computation.decoding = self._compared_decoding(forward)
        computation.storage = self._compared_storage(as_rows(features))
        computation.prepared_in_s = time.perf_counter() - began - seconds
        self._on_computation(computation)
        self.chosen = forward
        return features

    def _reference(self, images: Tensor) -> Values:
        """Return the features of a batch by the reference, which is closed before a compiler sees the model.

        Raises:
            InputError: rows of a feature are not the images.
        """
        with open_forward(self._plan.backbone, self._plan.choice, "float32") as forward:
            features = forward(images)
            self._check_rows(forward, images, features)
        return features

    def _candidate(self, computation: Computation, images: Tensor, expected: Values) -> tuple[Forward, Values, float]:
        """Open a forward for the run, and compare its features of the first batch with those of the reference.

        Args:
            computation: its engine; the agreement is filled in.
            images: the first batch.
            expected: features by the reference; empty if the candidate computes as the reference does.

        Returns:
            the forward, open until the end of the run; the features; seconds of their computation without compilation.

        Raises:
            InputError: rows of a feature are not the images.
            DisagreementError: the features disagree.
            LayertapError: the compiler has failed.
        """
        plan, settings, engine = self._plan, self._plan.settings, computation.engine
        # What is compared is in float32: rounding to float16 is fifty times the allowed deviation of compiled code.
        dtype = "float32" if expected or not plan.backbone.preprocessing.is_exact else read_as(settings.dtype)
        largest_batch = min(plan.batch_size, plan.dataset.shard_rows)
        opened = open_forward(plan.backbone, plan.choice, dtype, settings.precision, engine, largest_batch)
        forward = self.enter_context(opened)
        began = time.perf_counter()
        try:
            features = forward(images)
        except RuntimeError as error:  # code of a model may insist on float32
            if settings.precision == "float32":
                raise
            raise LayertapError(f"the model cannot compute in {settings.precision}: {first_line(error)}") from error
        seconds = time.perf_counter() - began - forward.compiling_s
        if not expected:
            self._check_rows(forward, images, features)
            return forward, features, seconds
        computation.agreement = agreement(features, expected)
        if settings.precision == "float32":
            _refuse(f"compiled by {engine}", refusal(computation.agreement, None))
        elif not self._has_stored_rows:  # an uninterrupted run would not have compared this batch
            _refuse(f"in {settings.precision} ({engine})", refusal(computation.agreement, settings.min_cosine))
        return forward, features, seconds

    def _check_rows(self, forward: Forward, images: Tensor, features: Values) -> None:
        check_rows(forward, images, features)
        self.is_validated = len(images) > 1 or self._plan.batch_size == 1

    def _compared_decoding(self, forward: Forward) -> dict[str, Agreement]:
        """Compare features of the first images, decoded fast or on the GPU, with the reference of exactly decoded ones.

        Lower precision and fast decoding are compared together, because two small deviations may add up.

        Raises:
            DisagreementError: a cosine is too small.
        """
        plan, preprocessing = self._plan, self._plan.backbone.preprocessing
        both = [preprocessing, preprocessing.exact()]
        fast, exact = decoded_in(plan.images, both, plan.settings.max_pixels)
        with open_forward(plan.backbone, plan.choice, "float32") as reference:
            expected = reference(exact)
        compared = agreement(forward(fast), expected)
        more = [] if plan.settings.precision == "float32" else ["--precision float32"]
        remedies = ["--decode exact", *more, "a lower --min-cosine"]
        _refuse(f"of {plan.settings.decode} decoded images", refusal(compared, plan.settings.min_cosine), *remedies)
        return compared

    def _compared_storage(self, features: Values) -> dict[str, Agreement]:
        """Compare the features as they are stored with their values.

        Raises:
            DisagreementError: a cosine is too small.
        """
        settings, dtype = self._plan.settings, self._plan.settings.dtype
        rounded = {
            feature.name: features[feature.name]
            for feature in self._plan.computed
            if feature.dtype != feature.value_dtype
        }
        stored = {name: decoded(encoded(values, dtype), dtype) for name, values in rounded.items()}
        compared = agreement(stored, rounded)
        if not self._has_stored_rows:
            reason = refusal(compared, settings.min_cosine, "its values")
            _refuse(f"stored as {dtype}", reason, "--dtype float16", "a lower --min-cosine")
        return compared


def _refuse(what: str, reason: str | None, *remedies: str) -> None:
    """Raise `DisagreementError` if there is a reason; its remedies are added later if it has none here."""
    if reason is not None:
        raise DisagreementError(f"{what}, {reason}", " or ".join(remedies))


def _with_remedies(error: LayertapError, engine: str, precision: str) -> DisagreementError:
    """Return the error of a requested compiler or precision, with what to use instead."""
    remedies = [] if engine == "eager" else ["--compile off"]
    remedies += [] if precision == "float32" else ["--precision float32", "a lower --min-cosine"]
    reason = error.reason if isinstance(error, DisagreementError) else str(error)
    return DisagreementError(reason, " or ".join(remedies))


def _engine(plan: Plan) -> tuple[str, str]:
    """Return the engine, and why it is not a compiler.

    "auto" decides by the size of the whole data set, so a resumed run gives the same bytes as an uninterrupted run.
    """
    if plan.engine != "auto":
        return plan.engine, ""
    # Compiled programs are not kept on disk: it saved 2 s of a start, and needed a digest of all operators and weights.
    best = default_engine(plan.backbone.device, plan.settings.precision)
    if best == "inductor" and plan.choice.is_of_boxes:  # its batches have one size, and are padded
        return "eager", "batches of boxes have few pictures"
    if plan.dataset.n_rows >= _PAYS_FROM[best]:
        return best, ""
    return "eager", f"compiling pays from {_PAYS_FROM[best]:,} images"


def decoded_in(
    images: Images, ways: Sequence[Preprocessing], max_pixels: int, count: int = FIRST_DECODED
) -> list[Tensor]:
    """Return the first images that can be decoded in each way: for each way (B, ...), with B up to `count`.

    Raises:
        InputError: no image can be decoded in all ways.
    """
    for first in range(0, len(images), count):
        batches = [
            decoded_alone(images, way, max_pixels, range(first, min(first + count, len(images)))) for way in ways
        ]
        good = np.flatnonzero(np.all([batch.status == Status.OK for batch in batches], axis=0)).tolist()
        if good:
            return [batch.select(good).images for batch in batches]
    reason = next((reason for batch in batches for reason in batch.reasons.values()), "")
    hint = "use --decode exact" if len(ways) > 1 else ""
    raise InputError(f"none of the {len(images):,} images can be decoded: {reason}", hint=hint)


def decoded_alone(images: Images, way: Preprocessing, max_pixels: int, rows: range) -> Batch:
    """Decode some rows in this process, as one batch."""
    batches = load_batches(images, [list(rows)], Decoding.for_preprocessing(way, max_pixels))
    with contextlib.closing(batches):
        return next(batches)
