"""`layertap.compare`: the command as a function."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from extract import defaults
from extract.errors import InputError
from extract.system.optional_libraries import library
from pipelines.compare.comparison import Comparison
from pipelines.compare.config import CompareConfig
from pipelines.terminal.config import checked

__all__ = ["compare"]


def compare(
    images: str | os.PathLike[str],
    backbones: str | Sequence[str] = (),
    *,
    table: str | os.PathLike[str] | None = None,
    layers: str | Sequence[str] = defaults.LAYERS,
    protocol: str = "clip",
    labels: str | os.PathLike[str] | None = None,
    tasks: Mapping[str, str | os.PathLike[str]] | None = None,
    out: str | os.PathLike[str] | None = None,
    budget: str | float | None = None,
    limit: int | None = None,
    test_fraction: float | None = None,
    decode: str = defaults.DECODE,
    dtype: str = defaults.DTYPE,
    precision: str = defaults.PRECISION,
    compile: str = defaults.COMPILE,
    batch_size: int = defaults.BATCH_SIZE,
    workers: int = defaults.WORKERS,
    device: str = defaults.DEVICE,
    seed: int = defaults.SEED,
    progress: bool = True,
) -> Comparison:
    """Compare backbones, and their layers, on the same images: accuracy with labels, speed, size, and alikeness.

    This is `layertap compare`: each backbone gets a data set in `out`, with tables, figures and a page beside them. A
    repeated call resumes, and adds backbones.

    Args:
        images: a folder, list, archive, array or URL; see `extract.images.list_images`.
        backbones: specs, or globs of specs.
        table: CSV file with the columns `backbone`, and optionally `weights` and `name`.
        layers: see `extract_features`; the layers of each backbone.
        protocol: "clip", "simclr", "dinov2-logreg", "knn" or "centroid": how layers are probed.
        labels: FILE or FILE:COLUMN, a table with a column `path` or `id`; None: the classes of the images, if any.
        tasks: name -> labels of each of several tasks, in place of `labels`.
        out: folder of the comparison; None: `outputs/NAME-compared`.
        budget: seconds, or text such as "30m", for computing the features; a sample of the images is drawn that fits.
        limit: maximum number of images, the first in order.
        test_fraction: fraction of each class to draw for testing; None: the splits of the images, or 0.2.
        decode: see `extract_features`, also for the next six.
        dtype: how features are stored.
        precision: precision of the computation.
        compile: whether and how forwards are compiled.
        batch_size: images per forward.
        workers: processes that decode.
        device: device of the computation.
        seed: seed of random weights and random choices.
        progress: whether to print steps and progress on stderr.

    Returns:
        the comparison. `best` is the best backbone, `table` has a line for each: `pandas.DataFrame(comparison.table)`.

    Raises:
        InputError: an argument is wrong, there are no images, no backbone can be used, or `out` holds other files.
        KeyboardInterrupt: Ctrl-C, when the batch in progress is stored.
        LayertapError: see `extract_features`.
    """
    if wrong := [name for name in tasks or {} if "=" in name]:
        raise InputError(f"tasks: the name {wrong[0]!r} has the character =")
    given = {
        "images": os.fspath(images),
        "backbones": backbones if isinstance(backbones, str) else list(backbones),
        "table": table,
        "layers": layers if isinstance(layers, str) else list(layers),
        "protocol": protocol,
        "labels": None if labels is None else os.fspath(labels),
        "tasks": [f"{name}={os.fspath(file)}" for name, file in (tasks or {}).items()],
        "out": out,
        "budget": budget,
        "limit": limit,
        "test_fraction": test_fraction,
        "decode": decode,
        "dtype": dtype,
        "precision": precision,
        "compile": compile,
        "batch_size": batch_size,
        "workers": workers,
        "device": device,
        "seed": seed,
    }
    library("matplotlib", "figures", "layertap.compare")
    from pipelines.compare.job import compare as run_compare

    comparison, _ = run_compare(checked(CompareConfig, given), _to_stderr if progress else None)
    if comparison.signal:
        raise KeyboardInterrupt
    return comparison


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
