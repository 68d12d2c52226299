"""Write features as plain files for other tools: `layertap export OUT --to FORMAT`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from extract.errors import InputError
from extract.store.export import FORMATS, export
from extract.store.reader import FeatureReader
from pipelines.terminal.progress import Progress

__all__ = ["run_export"]


def run_export(out: Path | str, to: str, output: Path | None, layers: Sequence[str]) -> str:
    """Run the job and return a summary.

    Args:
        out: folder or URL of the data set.
        to: a name in `FORMATS`.
        output: file, or folder if the format writes one; None: beside the folder of the data set.
        layers: layers to export; empty: all.

    Raises:
        InputError: `out` is not a data set, a layer does not exist, or the output cannot be written.
    """
    if output is not None:
        path = output
    elif isinstance(out, Path):
        path = FORMATS[to].default_path(out.resolve(), to)
    else:
        raise InputError(f"{out} is in a bucket", hint="name an output file on this machine with -o")
    with FeatureReader(out) as reader, Progress(len(reader), "rows") as progress:
        export(reader, path, to, layers or None, on_rows=lambda rows: progress.advance(rows, False))
        names = ", ".join(layers or reader.layers)
    size = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    return f"{path}: {len(reader):,} rows of {names}, {size / 1e6:,.1f} MB"
