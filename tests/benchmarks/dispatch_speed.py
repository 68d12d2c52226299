"""What giving out shards costs: a million of them to simulated workers, and to processes that do nothing.

    python -m tests.benchmarks.dispatch_speed [SHARDS]

The first process's CPU time and peak memory; and the time between two shards of a process that needs none for them.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from pipelines.embed.cluster.dispatch import dispatch
from pipelines.embed.cluster.processes import Processes, Slot
from tests.pipelines.cluster.made_up import MadeUp
from tests.pipelines.cluster.test_dispatch import Simulated


class Forgetful(Simulated):
    """Simulated workers that do not remember what they made, so that the memory is that of the first process."""

    def _event(self, worker: int, what: str):  # type: ignore[no-untyped-def]
        event = super()._event(worker, what)
        self.published.clear()
        self.made.clear()
        return event


def peak_mb() -> float:
    """Of this process, since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(count: int) -> None:
    before, start = peak_mb(), time.process_time()
    simulated = Forgetful([f"host-{number // 8}" for number in range(64)])
    found = dispatch(range(count), simulated, clock=lambda: simulated.now)
    assert found.done == count
    spent = time.process_time() - start
    print(
        f"{count:,} shards to 64 simulated workers: {1e6 * spent / count:.0f} us of CPU a shard, "
        f"{spent:.1f} s; memory {before:.0f} -> {peak_mb():.0f} MB"
    )
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as work, Processes([Slot(MadeUp(Path(work)))] * workers) as engine:
            joined = [event for _ in range(workers) for event in engine.events(60)]
            start, cpu = time.perf_counter(), time.process_time()
            found = dispatch(range(2000), engine, joined=[one for one in joined if hasattr(one, "started_shards")])
            took, spent = time.perf_counter() - start, time.process_time() - cpu
            print(
                f"2,000 shards to {workers} processes: {1000 * took / 2000:.2f} ms a shard, of them "
                f"{1000 * spent / 2000:.2f} ms of CPU in the first process"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
