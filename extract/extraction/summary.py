"""Result of a run: rows, statuses, and the time of each stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from extract.extraction.validation import Computation
from extract.row_status import Status

__all__ = ["Summary"]


@dataclass
class Summary:
    """Result of a run.

    Attributes:
        n_rows: rows of the data set.
        found: rows that were done before the run.
        computed: rows of this run, including failed rows.
        duplicates: rows of this run that were copied, because an earlier row has an image with the same bytes.
        status: status -> number of rows of this run.
        seconds: time from the first image to the last receipt.
        stages: seconds spent waiting for images, in the forward (with pooling), and writing; on a GPU also "copy": to
            the GPU and back, as far as the run waited for it.
        write_wait_s: the part of "write" in which the next batch waited until the previous one was stored, without the
            time to complete and publish files.
        computation: how the features were computed; None if none were.
        images_at_once: images per forward at the end, if memory was insufficient for a batch; otherwise None.
        stopped: whether the run was asked to stop before the end.
    """

    n_rows: int
    found: int = 0
    computed: int = 0
    duplicates: int = 0
    status: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: {"images": 0.0, "forward": 0.0, "write": 0.0})
    write_wait_s: float = 0.0
    computation: Computation | None = None
    images_at_once: int | None = None
    stopped: bool = False

    @property
    def images_per_s(self) -> float:
        """Rows per second of this run."""
        return self.computed / self.seconds if self.seconds else 0.0

    def made_since(self, before: Summary, seconds: float, provenance: dict[str, Any]) -> dict[str, Any]:
        """Return where, when and how fast rows were computed, for the receipt of a shard.

        Args:
            before: copy of this summary from the start of the shard.
            seconds: seconds since then.
            provenance: provenance of the run.
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
        """Add stored rows: status code -> number."""
        self.computed += stored.total()
        for code, rows in stored.items():
            self.status[Status(code).text] += rows
