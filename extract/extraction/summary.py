"""What a run did, and where its time went."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from extract.extraction.validation import Computation
from extract.row_status import Status

__all__ = ["Callbacks", "Summary"]

T = TypeVar("T")
_END = object()


@dataclass(frozen=True)
class Callbacks:
    """What a run calls while it works.

    Attributes:
        on_rows: called with a number of rows, and whether they were found done (True) or computed now (False).
        on_computation: called when it is known how features are computed, after the first batch.
        stop: asked after each batch; True ends the run there, in order.
    """

    on_rows: Callable[[int, bool], None] = lambda rows, found: None
    on_computation: Callable[[Computation], None] = lambda computation: None
    stop: Callable[[], bool] = lambda: False


@dataclass
class Summary:
    """What a run did.

    Attributes:
        n_rows: rows of the data set.
        found: rows that were done before.
        computed: rows of this run, failed ones included.
        duplicates: those of them that were copied, since an earlier row has an image with the same bytes.
        status: status -> number of rows of this run.
        seconds: from the first image to the last receipt.
        stages: seconds spent waiting for images, in the forward (with pooling), and writing; of a GPU, "copy", too: to
            it and from it, as far as it was waited for.
        computation: how the features were computed; None: none was.
        images_at_once: images that were computed at once in the end, if the memory did not suffice for a batch.
        stopped: whether the run was asked to stop before the end.
    """

    n_rows: int
    found: int = 0
    computed: int = 0
    duplicates: int = 0
    status: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: {"images": 0.0, "forward": 0.0, "write": 0.0})
    computation: Computation | None = None
    images_at_once: int | None = None
    stopped: bool = False

    @property
    def images_per_s(self) -> float:
        """Rate of this run."""
        return self.computed / self.seconds if self.seconds else 0.0

    def made_since(self, before: Summary, seconds: float, provenance: dict[str, Any]) -> dict[str, Any]:
        """Where, when and how fast rows were made, for the receipt of a shard.

        Args:
            before: this summary when the shard was begun.
            seconds: since then.
            provenance: of the run.
        """
        return {
            "host": provenance["machine"]["host"],
            "device": provenance["device"],
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "computed": self.computed - before.computed,
            "seconds": round(seconds, 3),
            "stages": {stage: round(spent - before.stages.get(stage, 0.0), 3) for stage, spent in self.stages.items()},
        }

    def count(self, stored: Counter[int]) -> None:
        """Add rows that were stored: status -> number."""
        self.computed += stored.total()
        for code, rows in stored.items():
            self.status[Status(code).text] += rows

    def move(self, stage: str, to: str, seconds: float) -> None:
        """Count some of the time of one stage as that of another."""
        if seconds > 0:
            self.stages[stage] -= seconds
            self.stages[to] = self.stages.get(to, 0.0) + seconds

    def timed_each(self, stage: str, values: Iterable[T]) -> Iterator[T]:
        """Pass values on; add the time to get each to a stage, without that of other stages inside."""
        iterator = iter(values)
        while True:
            with self.timed(stage):
                value = next(iterator, _END)
            if value is _END:
                return
            yield value  # type: ignore[misc]

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage, without that of other stages inside."""
        start, others = time.perf_counter(), sum(self.stages.values())
        try:
            yield
        finally:
            inside = sum(self.stages.values()) - others
            self.stages[stage] += time.perf_counter() - start - inside
