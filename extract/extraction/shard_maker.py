"""Build shards of a data set in several processes, independently and in any order.

A process that builds shards knows nothing of the others. It builds each shard in a folder of its own, as `extract`
does, and publishes it at the place of the data set; see `extract.store.places.building`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from extract.extraction.pipeline import Summary, batches_of, checked_batches, extract_shard
from extract.extraction.plan import Plan
from extract.extraction.run import work_at
from extract.extraction.validation import Computation, ValidatedForward
from extract.images import load_batches
from extract.store.format.dataset import ShardFiles
from extract.store.places.building import Building
from extract.store.places.destination import Destination
from extract.system.foreign_code import exits_refused

__all__ = ["ShardMaker"]


class ShardMaker(contextlib.ExitStack):
    """Context manager that builds and publishes shards.

    A killed process leaves its unfinished shards. The next process of this machine that builds them resumes them.

    Args:
        plan: plan of the run.
        place: where finished shards are published.
        scratch: folder for shards in progress; None: the folder for temporary files.
        on_computation, on_note: see `extract`.

    Attributes:
        about: the device that computes.
    """

    def __init__(
        self,
        plan: Plan,
        place: Destination,
        scratch: Path | None = None,
        on_computation: Callable[[Computation], None] = lambda computation: None,
        on_note: Callable[[str], None] = lambda note: None,
    ):
        super().__init__()
        self._plan, self._on_note = plan, on_note
        self.about: str = plan.provenance["device"]
        place.open_or_create(plan.dataset)
        place.keep_axes(plan.choice.axes_files)
        self._published = set(place.published().tolist())
        self._building = self.enter_context(Building(plan.dataset, place, scratch))
        self._forward = self.enter_context(ValidatedForward(plan, bool(self._published), on_computation))

    def build(
        self, shard: int, on_rows: Callable[[int, bool], None] = lambda rows, resumed: None
    ) -> dict[str, Any] | None:
        """Build and publish a shard; return its receipt, or None if another process has published it first.

        Args:
            shard: its number.
            on_rows: called with a number of rows, and whether an earlier run stored them.

        Raises:
            LayertapError: see `extract`; or the place cannot take a shard. The maker builds no more then.
        """
        if shard in self._published:  # by a process that died before it could report this
            return None
        plan = self._plan
        with self._building.open(shard) as dataset:
            final, n_rows = dataset.path(shard), len(dataset.shard_range(shard))
            if final.exists():  # an earlier process was killed before it published the shard
                on_rows(n_rows, True)
            else:
                is_begun = dataset.path(shard, part=True).exists()
                work = work_at(dataset, shard, ShardFiles(part=0 if is_begun else None))
                assert work is not None
                on_rows(n_rows - len(work.rows), True)
                loaded = load_batches(plan.images, batches_of(work.rows, plan), plan.decoding)
                with contextlib.closing(loaded), exits_refused():
                    publish = extract_shard(
                        replace(plan, dataset=dataset), work, checked_batches(loaded, plan.images, self._note),
                        self._forward, Summary(n_rows=n_rows), on_rows,
                    )  # fmt: skip
                    assert publish is not None
                    publish()
            return self._building.publish(dataset, shard)

    def _note(self, note: str) -> None:
        """Pass on the first note of this process: thousands of images may have the same."""
        self._on_note(note)
        self._on_note = lambda note: None
