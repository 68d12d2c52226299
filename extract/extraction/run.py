"""From images to features on disk: a run joins images, backbone, taps, pooling and store.

    images -> DataLoader -> backbone, under Taps -> pooling (on the device) -> CPU -> ShardWriter -> HDF5

`extract_features` does all of it in one call. `resolve` and `extract` are its two halves, for callers that inspect the
plan, show progress, or stop the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import time
import warnings
from collections.abc import Callable, Container, Mapping
from typing import Any

from extract import defaults
from extract.compute.backbone import Backbone, load_backbone
from extract.errors import InputError
from extract.extraction.pipeline import Summary, checked_batches, extract_shard
from extract.extraction.plan import Plan, existing_at, resolve
from extract.extraction.settings import BackboneSettings, ExtractionSettings, taking, values_of
from extract.extraction.todo import batches_of, check_disk_space, check_same_images, work_of
from extract.extraction.validation import Computation, ValidatedForward
from extract.images import Images, list_images, load_batches
from extract.images.datasets import MapDataset, is_in_memory, list_dataset
from extract.images.loading import Load
from extract.store.format.dataset import BUILDING
from extract.store.format.kept_axes import keep_axes
from extract.store.reader import FeatureReader
from extract.system.foreign_code import exits_refused
from extract.system.urls import is_url

__all__ = ["NO_MAX_DISTORTION", "Arguments", "extract", "extract_features"]

NO_MAX_DISTORTION = "max_distortion has no effect: extract.compute.distortion.measured_distortion measures projections"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(BackboneSettings, ExtractionSettings):
    """Arguments of `extract_features`: those below, and all settings.

    Attributes:
        images: A folder, list, archive, array or URL; see `extract.images.list_images`. Or a map-style dataset or
            sequence of pictures, or of pictures and labels; a `datasets.Dataset`; or a list of paths: see
            `extract.images.datasets.list_dataset`.
        out: Folder of the data set; created if missing.
        backbone: A spec, or the result of `load_backbone`; then `weights`, `device`, `seed`, `allow_missing_head` and
            `preprocessing` have no effect.
        preprocessing: Any of size, crop, interpolation, mean and std in place of the library's; see `load_backbone`.
        retry_failed: Retry images that failed in an earlier run. Images with an I/O error are retried in any case.
        progress: Show a progress bar.
    """

    images: str | os.PathLike[str] | MapDataset = dataclasses.field(kw_only=False)
    out: str | os.PathLike[str]
    backbone: str | Backbone = defaults.BACKBONE
    preprocessing: Mapping[str, Any] | None = None
    retry_failed: bool = False
    progress: bool = True


@taking(Arguments)
def extract_features(arguments: Arguments) -> FeatureReader:
    """Extract features of images into a data set, and open it.

    A repeated call with the same arguments computes only the missing rows. The row of an image that cannot be decoded
    has a status and NaN (`reader.failures`).

    Raises:
        UnknownNameError: a backbone, layer or pooling does not exist.
        InputError: there are no images, a layer, a pooling or the weights do not fit, or `out` holds other features.
        LockedError: another process writes to `out`.
        LayertapError: the disk is full, a download failed, or a device is missing.
    """
    out, backbone = os.fspath(arguments.out), arguments.backbone
    if is_url(out):
        raise InputError(
            f"{out}: from Python, features are written to a folder",
            hint=f"`layertap embed -o {out}` builds shards and publishes them there",
        )
    if arguments.max_distortion is not None:
        warnings.warn(NO_MAX_DISTORTION, DeprecationWarning, stacklevel=3)
    if isinstance(backbone, str):
        backbone = load_backbone(
            backbone, preprocessing=arguments.preprocessing, **values_of(BackboneSettings, arguments)
        )
    images = _listed(arguments)
    plan = resolve(arguments, images, backbone, existing_at(out))
    from tqdm.auto import tqdm

    with tqdm(total=len(images), unit=" images", disable=not arguments.progress) as bar:
        extract(
            plan,
            retry_failed=arguments.retry_failed,
            on_rows=functools.partial(_advance, bar) if arguments.progress else None,
            on_note=functools.partial(warnings.warn, stacklevel=2),
        )
    return FeatureReader(out)


def _listed(arguments: Arguments) -> Images:
    """List the images; pass the notes of a dataset on as warnings."""
    where, limit, keep = arguments.images, arguments.limit, arguments.keep_list
    if isinstance(where, str | os.PathLike):
        return list_images(where, limit, keep)
    images = list_dataset(where, keep)
    for note in images.notes:
        warnings.warn(note, stacklevel=4)
    return images if limit is None else images.head(limit)


def _advance(bar: Any, rows: int, stored_earlier: bool) -> None:
    if stored_earlier:  # not part of the rate
        bar.initial += rows
    bar.update(rows)


def extract(
    plan: Plan,
    *,
    retry_failed: bool = False,
    has_stored_rows: bool = False,
    shards: Container[int] | None = None,
    load: Load = load_batches,
    on_rows: Callable[[int, bool], None] | None = None,
    on_computation: Callable[[Computation], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Summary:
    """Compute every missing row of a data set.

    Args:
        plan: plan of the run.
        retry_failed: also compute rows of finished shards that have no good features; such a shard is written again,
            and replaces the old one when it is finished.
        has_stored_rows: whether rows of the same features are stored elsewhere. Then features in lower precision are
            compared but not refused, as if an earlier run had stored rows here.
        shards: numbers of the shards to compute; None for all.
        load: gives the decoded batches; see `load_batches`.
        on_rows: called with a number of rows, and whether an earlier run stored them (True) or this one (False).
        on_computation: called after the first batch with how features are computed.
        on_note: called at most once, with a note on an image that is stored but looks wrong.
        stop: called after each batch; True stops the run cleanly.

    Raises:
        InputError: the folder holds other features.
        LockedError: another process writes to the folder.
        LayertapError: the disk is full or cannot be written to.
    """
    dataset = plan.dataset
    summary = Summary(n_rows=dataset.n_rows)
    plan.existing.check(dataset)  # before the folder is locked, which writes to it
    check_disk_space(dataset)
    with dataset.locked():
        if axes_files := plan.choice.axes_files:
            keep_axes(dataset.out, axes_files)  # first: `dataset.json` names them
        existing = dataset.open_or_create()
        root = dataset.images["root"]
        if existing is not None and (existing.images["root"] != root or is_in_memory(root)):
            check_same_images(plan, existing)
        work = work_of(dataset, plan.images.source, retry_failed)
        summary.found = dataset.n_rows - sum(len(shard.rows) for shard in work)
        work = [shard for shard in work if shards is None or shard.shard in shards]
        if summary.found and on_rows is not None:
            on_rows(summary.found, True)
        if work:
            run = {name: value for name, value in plan.provenance.items() if name != "depends_on"}
            dataset.add_run({"event": "started", "found_done": summary.found, **run})
        start = time.perf_counter()
        # The worker processes start here, before any shard is open: they would inherit its descriptor and its lock.
        decoding = plan.decoding if work else dataclasses.replace(plan.decoding, workers=0)
        rows = itertools.chain.from_iterable(batches_of(shard.rows, plan) for shard in work)
        loaded = load(plan.images, rows, decoding)

        def log_computation(computation: Computation) -> None:
            how = dataclasses.asdict(computation)
            dataset.add_run({"event": "computing", "started": plan.provenance["started"], "computation": how})
            summary.computation = computation
            if on_computation is not None:
                on_computation(computation)

        has_stored_rows = has_stored_rows or summary.found > 0
        with (
            exits_refused(),
            contextlib.closing(loaded),
            ValidatedForward(plan, has_stored_rows, log_computation) as forward,
        ):
            batches = checked_batches(loaded, plan.images, on_note)
            for shard in work:
                count = sum(1 for _ in batches_of(shard.rows, plan))
                extract_shard(plan, shard, itertools.islice(batches, count), forward, summary, on_rows, stop)
                if summary.stopped:
                    break
        summary.seconds = time.perf_counter() - start
        if not summary.stopped:
            shutil.rmtree(dataset.out / BUILDING, ignore_errors=True)  # left by processes that were stopped
        if summary.computed:
            ended = {"rows": summary.computed, "seconds": summary.seconds, "stages": summary.stages}
            dataset.add_run({"event": "ended", "started": plan.provenance["started"], **ended})
    return summary
