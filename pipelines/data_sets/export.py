"""Write features as plain files for other tools: `layertap export OUT --to FORMAT`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from extract.errors import InputError
from extract.store.export import FORMATS, export
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from pipelines.data_sets.thumbnails import thumbnails
from pipelines.terminal.progress import Progress

__all__ = ["run_export"]


def run_export(
    out: Path | str, to: str, output: Path | None, layers: Sequence[str], thumbnails_px: int | None = None,
    images: str | None = None,
) -> str:  # fmt: skip
    """Run the job and return a summary.

    Args:
        out: folder or URL of the data set.
        to: a name in `FORMATS`.
        output: file, or folder if the format writes one; None: beside the folder of the data set.
        layers: layers to export; empty: all.
        thumbnails_px: longest side of thumbnails; None: no thumbnails.
        images: location of the images, for thumbnails; None: the recorded one.

    Raises:
        InputError: `out` is not a data set, a layer does not exist, or the output cannot be written.
    """
    if output is not None:
        path = output
    elif isinstance(out, Path):
        path = FORMATS[to].default_path(out.resolve(), to)
    else:
        raise InputError(f"{out} is in a bucket", hint="name an output file on this machine with -o")
    if images is not None and thumbnails_px is None:
        raise InputError("--images is for thumbnails", hint="add --thumbnails PX")
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(FeatureReader(out))
        pictures = None
        if thumbnails_px is not None:
            root = data_set_at(out).images["root"]
            pictures = stack.enter_context(thumbnails(reader, root, thumbnails_px, images))
        progress = stack.enter_context(Progress(len(reader), "rows"))
        export(reader, path, to, layers or None, lambda rows: progress.advance(rows, False), pictures)
        names = ", ".join(layers or reader.layers)
    size = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    return f"{path}: {len(reader):,} rows of {names}, {size / 1e6:,.1f} MB"
