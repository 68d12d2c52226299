"""`layertap.compare`: the command as a function."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from extract import defaults
from extract.errors import InputError
from extract.extraction.settings import FeatureSettings, taking, values_of
from extract.system.optional_libraries import library
from pipelines.compare.comparison import Comparison
from pipelines.compare.config import CompareConfig
from pipelines.terminal.config import checked

__all__ = ["compare"]


@dataclass(frozen=True, kw_only=True)
class Arguments(FeatureSettings):
    """Arguments of `compare`: those below, and settings of `extract_features`.

    Attributes:
        images: A folder, list, archive, array or URL; see `extract.images.list_images`.
        backbones: Specs, or globs of specs.
        table: CSV file with the columns `backbone`, and optionally `weights` and `name`.
        protocol: "clip", "simclr", "dinov2-logreg", "knn" or "centroid": how layers are probed.
        labels: FILE or FILE:COLUMN, a table with a column `path` or `id`; None: the classes of the images, if any.
        tasks: Name -> labels of each of several tasks, in place of `labels`.
        out: Folder of the comparison; None: `outputs/NAME-compared`.
        limit: Maximum number of images, the first in order.
        test_fraction: Fraction of each class to draw for testing; None: the splits of the images, or 0.2.
        workers: Decoding processes.
        device: Device of the computation.
        seed: Seed of random weights and random choices.
        progress: Print steps and progress on stderr.
    """

    images: str | os.PathLike[str] = field(kw_only=False)
    backbones: str | Sequence[str] = field(default=(), kw_only=False)
    table: str | os.PathLike[str] | None = None
    protocol: str = "clip"
    labels: str | os.PathLike[str] | None = None
    tasks: Mapping[str, str | os.PathLike[str]] | None = None
    out: str | os.PathLike[str] | None = None
    limit: int | None = None
    test_fraction: float | None = None
    workers: int = defaults.WORKERS
    device: str = defaults.DEVICE
    seed: int = defaults.SEED
    progress: bool = True


@taking(Arguments)
def compare(arguments: Arguments) -> Comparison:
    """Compare backbones, and their layers, on the same images: accuracy with labels, speed, size, and similarity.

    This is `layertap compare`: each backbone gets a data set in `out`, with tables, figures and a page beside them. A
    repeated call resumes, and adds backbones.

    Returns:
        the comparison. `best` is the best backbone, `table` has a line for each: `pandas.DataFrame(comparison.table)`.

    Raises:
        InputError: an argument is wrong, there are no images, no backbone can be used, or `out` holds other files.
        KeyboardInterrupt: Ctrl-C, when the batch in progress is stored.
        LayertapError: see `extract_features`.
    """
    given, tasks = values_of(Arguments, arguments), arguments.tasks or {}
    if wrong := [name for name in tasks if "=" in name]:
        raise InputError(f"tasks: the name {wrong[0]!r} has the character =")
    given["images"] = os.fspath(arguments.images)
    given["labels"] = None if arguments.labels is None else os.fspath(arguments.labels)
    given["tasks"] = [f"{name}={os.fspath(file)}" for name, file in tasks.items()]
    progress = given.pop("progress")
    library("matplotlib", "figures", "layertap.compare")
    from pipelines.compare.job import compare as run_compare

    comparison, _ = run_compare(checked(CompareConfig, given), partial(print, file=sys.stderr) if progress else None)
    if comparison.signal:
        raise KeyboardInterrupt
    return comparison
