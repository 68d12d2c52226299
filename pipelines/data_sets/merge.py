"""Merge data sets: `layertap merge A B -o C`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from extract.store.format.dataset import DataSet
from extract.store.merge import merge
from pipelines.terminal.progress import Progress

__all__ = ["run_merge"]


def run_merge(sources: Sequence[Path], out: Path, shard_rows: int | None, compress: str | None) -> str:
    """Run the job and return a summary."""
    with Progress(sum(DataSet.open(source).n_rows for source in sources), "rows") as progress:
        merged = merge(sources, out, shard_rows=shard_rows, compress=compress, on_rows=progress.advance)
    return f"{out}: {merged.n_rows:,} rows of {len(sources)} data sets, in {merged.n_shards} shards"
