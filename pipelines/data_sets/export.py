"""Write features as plain files for other tools: `layertap export OUT --to FORMAT`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from extract import defaults
from extract.errors import InputError
from extract.row_status import Status
from extract.store.export import FORMATS, export
from extract.store.places.destination import data_set_at
from extract.store.reader import FeatureReader
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.progress import Progress
from pipelines.terminal.text_output import counted

__all__ = ["run_export"]

_FIRST = 16  # images that are looked for before thumbnails are made
_QUALITY = 85  # of JPEG


def run_export(
    out: Path | str, to: str, output: Path | None, layers: Sequence[str], thumbnails_px: int | None = None,
    images: str | None = None, metric: str | None = None, without: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> str:  # fmt: skip
    """Run the job and return a summary.

    Args:
        out: folder or URL of the data set.
        to: a name in `FORMATS`.
        output: file, or folder if the format writes one; None: beside the folder of the data set.
        layers: layers to export; empty: all.
        thumbnails_px: longest side of thumbnails; None: no thumbnails.
        images: location of the images, for thumbnails; None: the recorded one.
        metric: of the dissimilarities in `rdm`; None is "correlation".
        without: file that names images whose rows are left out; None: all rows are written.
        say: receives a line about these rows.

    Raises:
        InputError: `out` is not a data set, a layer does not exist, the rows to leave out are not there, or the output
            cannot be written.
    """
    if output is not None:
        path = output
    elif isinstance(out, Path):
        path = FORMATS[to].default_path(out.resolve(), to if metric is None else f"{to}-{metric}")
    else:
        raise InputError(f"{out} is in a bucket", hint="name an output file on this machine with -o")
    if images is not None and thumbnails_px is None:
        raise InputError("--images is for thumbnails", hint="add --thumbnails PX")
    with FeatureReader(out) as whole, ThreadPoolExecutor(defaults.CORES) as pool:
        reader = whole if without is None else whole.without(without, say)
        pictures = None
        if thumbnails_px is not None:
            pictures = _thumbnails(reader, data_set_at(out).images["root"], thumbnails_px, images, pool)
        with Progress(len(reader), "rows") as progress:
            export(reader, path, to, layers or None, lambda rows: progress.advance(rows, False), pictures, metric)
        names = ", ".join(layers or reader.layers)
        failed = int((reader.status != Status.OK).sum())
    size = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    nan = f"; {failed:,} of them failed and are NaN" if failed and to == "rdm" else ""
    return f"{path}: {counted(len(reader), 'row')} of {names}, {size / 1e6:,.1f} MB{nan}"


def _thumbnails(
    reader: FeatureReader, root: str, side_px: int, images: str | None, pool: ThreadPoolExecutor
) -> Callable[[int, int], Sequence[bytes | None]]:
    """Return a function that returns JPEG thumbnails of the rows from START to STOP.

    The thumbnail of an image that is missing or was changed is None.

    Args:
        reader: reader of the data set.
        root: location of the images as recorded in the data set.
        side_px: longest side.
        images: location that the user named; see `Pictures`.
        pool: threads that read and shrink pictures.

    Raises:
        InputError: the images are not available.
    """
    source = Pictures(reader, root, range(len(reader)), images)
    if source.why_not:
        raise InputError(f"no thumbnails: {source.why_not}")

    sample = [source.picture(row, side_px) for row in range(min(_FIRST, len(reader)))]
    if sample and not any(picture is not None for picture, _ in sample):
        raise InputError(
            f"no thumbnails: none of the first {len(sample)} images can be read: {sample[0][1]}",
            hint="name their place: --images",
        )

    def encoded(row: int) -> bytes | None:
        picture, _ = source.picture(row, side_px)
        if picture is None:
            return None
        picture.thumbnail((side_px, side_px))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=_QUALITY)
        return file.getvalue()

    return lambda start, stop: list(pool.map(encoded, range(start, stop)))
