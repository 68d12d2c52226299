"""From images to features on disk: a run joins images, backbone, taps, pooling and store.

    images -> DataLoader -> backbone, under Taps -> pooling (on the device) -> CPU -> ShardWriter -> HDF5

`extract_features` does all of it in one call. `plan` and `extract` are its two halves, for callers that inspect the
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
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from extract import defaults
from extract.compute.backbone import Backbone, load_backbone
from extract.errors import InputError
from extract.extraction.pipeline import extract_shard, reporting_a_note
from extract.extraction.plan import Plan, plan
from extract.extraction.settings import ExtractionSettings
from extract.extraction.summary import Summary
from extract.extraction.todo import batches_of, check_disk_space, check_same_images, work_of
from extract.extraction.validation import Computation, validated_forward
from extract.images import ImageList, load_batches
from extract.images.datasets import MapDataset, is_in_memory, list_dataset
from extract.images.loading import Load, stop_on_machine_errors
from extract.store.format.dataset import BUILDING
from extract.store.format.kept_axes import keep_axes
from extract.store.reader import FeatureReader
from extract.system.foreign_code import exits_refused
from extract.system.urls import is_url

__all__ = ["ExtractionSettings", "Plan", "Summary", "extract", "extract_features", "plan"]

NO_MAX_DISTORTION = "max_distortion has no effect: extract.compute.distortion.measured_distortion measures projections"


def extract_features(
    images: str | os.PathLike[str] | MapDataset,
    *,
    out: str | os.PathLike[str],
    backbone: str | Backbone = defaults.BACKBONE,
    layers: str | Sequence[str] = defaults.LAYERS,
    weights: str | None = None,
    batch_size: int = defaults.BATCH_SIZE,
    workers: int = defaults.WORKERS,
    decode: str = defaults.DECODE,
    device: str = defaults.DEVICE,
    dtype: str = defaults.DTYPE,
    precision: str = defaults.PRECISION,
    compile: str = defaults.COMPILE,
    min_cosine: float = defaults.MIN_COSINE,
    limit: int | None = None,
    keep: str | Sequence[str] = (),
    max_pixels: int = defaults.MAX_PIXELS,
    orientation: str = defaults.ORIENTATION,
    icc: str = defaults.ICC,
    seed: int = defaults.SEED,
    allow_missing_head: bool = False,
    preprocessing: Mapping[str, Any] | None = None,
    shard_rows: int | None = None,
    compress: str | None = None,
    distortion: float = defaults.DISTORTION,
    max_distortion: float | None = None,
    axes: str | os.PathLike[str] | None = None,
    fit_on: int = defaults.FIT_ON,
    retry_failed: bool = False,
    progress: bool = True,
) -> FeatureReader:
    """Extract features of images into a data set, and open it.

    A repeated call with the same arguments computes only the missing rows. The row of an image that cannot be decoded
    has a status and NaN (`reader.failures`).

    Args:
        images: a folder, list, archive, array or URL; see `extract.images.list_images`. Or a map-style dataset or
            sequence of pictures, or of pictures and labels; a `datasets.Dataset`; or a list of paths: see
            `extract.images.datasets.list_dataset`.
        out: folder of the data set; created if missing.
        backbone: a spec, or the result of `load_backbone`; then `weights`, `device`, `seed`, `allow_missing_head` and
            `preprocessing` have no effect.
        layers: `LAYER[:POOLING]...` each, globs allowed; see `choose_features`.
        weights: a name, a file, or "random"; see `load_backbone`.
        batch_size: images per forward.
        workers: processes that decode; 0 decodes in this process, as does a worker of `multiprocessing.Pool` or joblib,
            which may start no processes.
        decode: "exact": the pixels of the library's own preprocessing; "fast": nearly the same pixels, compared on the
            first images, and refused if a cosine is below `min_cosine`.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: how features are stored: "float32", "float16", "bfloat16", or "int8" with a scale for each row. The error
            of the last two is measured on the first batch, and refused if a cosine is below `min_cosine`.
        precision: precision of the computation, "float32", "bfloat16" or "float16". Lower precision is compared with
            float32 on the first batch, and refused if a cosine is below `min_cosine`.
        compile: "off": eager PyTorch; "on": compiled by OpenVINO on a CPU if it is installed, otherwise by inductor;
            or the name of either. "auto": compiled if there are enough images to pay for it and the first batch agrees;
            in lower precision, the engine of the existing rows, otherwise eager.
        min_cosine: lowest accepted cosine between a feature and the same one in float32 of the exactly decoded image.
        limit: maximum number of images, the first in order.
        keep: names of further columns of a list or `datasets.Dataset`, such as captions, which are stored with the
            features; see `FeatureReader.columns`.
        max_pixels: an image with more pixels counts as a decompression bomb, and its row fails.
        orientation: "exif": apply the EXIF orientation of images; "ignore": take the pixels as they are stored.
        icc: "ignore": colour profiles (ICC) are not applied; "srgb": pixels are converted from the embedded profile to
            sRGB with the perceptual intent, and the row of an image with a damaged profile fails.
        seed: seed of random weights.
        allow_missing_head: whether the weights may lack the classifier; see `load_backbone`.
        preprocessing: any of size, crop, interpolation, mean and std in place of the library's; see `load_backbone`.
        shard_rows: images per shard; None limits a shard to 1 GB.
        compress: "gzip", "lzf" or "blosc2" compresses each finished shard; None leaves features uncompressed, which is
            faster to read.
        distortion: of the pooling `srp` without a number of values: the number is chosen so that squared distances
            between the images are likely to change by at most this part; above 0, below 1.
        max_distortion: deprecated, without effect; see `extract.compute.distortion.measured_distortion`.
        axes: of the poolings `pcaK` and `pcawK`: the data set, or file of its folder `axes`, whose principal axes are
            used; None: those that `out` has, or axes that are fitted to `images`.
        fit_on: number of images to fit axes on, spread evenly over all.
        retry_failed: retry images that failed in an earlier run. Images with an I/O error are retried in any case.
        progress: show a progress bar.

    Raises:
        UnknownNameError: a backbone, layer or pooling does not exist.
        InputError: there are no images, a layer, a pooling or the weights do not fit, or `out` holds other features.
        LockedError: another process writes to `out`.
        LayertapError: the disk is full, a download failed, or a device is missing.
    """
    if is_url(os.fspath(out)):
        raise InputError(
            f"{os.fspath(out)}: from Python, features are written to a folder",
            hint=f"`layertap embed -o {os.fspath(out)}` builds shards and publishes them there",
        )
    if max_distortion is not None:
        warnings.warn(NO_MAX_DISTORTION, DeprecationWarning, stacklevel=2)
    settings = ExtractionSettings(
        layers=layers,
        batch_size=batch_size,
        workers=workers,
        decode=decode,
        dtype=dtype,
        precision=precision,
        compile=compile,
        min_cosine=min_cosine,
        limit=limit,
        keep=[keep] if isinstance(keep, str) else keep,
        max_pixels=max_pixels,
        orientation=orientation,
        icc=icc,
        shard_rows=shard_rows,
        compress=compress,
        distortion=distortion,
        axes=axes,
        fit_on=fit_on,
    )
    if isinstance(backbone, str):
        backbone = load_backbone(
            backbone,
            weights=weights,
            device=device,
            seed=seed,
            allow_missing_head=allow_missing_head,
            preprocessing=preprocessing,
        )
    listed = images if isinstance(images, str | os.PathLike) else _listed(images, limit, settings.keep)
    planned = plan(listed, out=out, backbone=backbone, settings=settings)
    from tqdm.auto import tqdm

    with tqdm(total=len(planned.images), unit=" images", disable=not progress) as bar:
        extract(
            planned,
            retry_failed=retry_failed,
            on_rows=functools.partial(_advance, bar) if progress else None,
            on_note=functools.partial(warnings.warn, stacklevel=2),
        )
    return FeatureReader(out)


def _listed(dataset: MapDataset, limit: int | None, keep: Sequence[str]) -> ImageList:
    """List a dataset, and pass its notes on as warnings."""
    images = list_dataset(dataset, keep)
    for note in images.notes:
        warnings.warn(note, stacklevel=3)
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
    dataset.check()
    check_disk_space(dataset)
    with dataset.locked():
        keep_axes(dataset.out, plan.choice.axes_files)  # first: `dataset.json` names them
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
        # The worker processes start here, before any shard is open.
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
            validated_forward(plan, has_stored_rows, log_computation) as forward,
        ):
            batches = stop_on_machine_errors(loaded, plan.images.source)
            batches = reporting_a_note(batches, plan.images, on_note)
            for shard in work:
                count = sum(1 for _ in batches_of(shard.rows, plan))
                extract_shard(plan, shard, itertools.islice(batches, count), forward, summary, on_rows, stop)
                if summary.stopped:
                    break
        summary.seconds = time.perf_counter() - start
        if not summary.stopped:
            shutil.rmtree(dataset.out / BUILDING, ignore_errors=True)  # left by processes that were stopped
        if summary.computed:
            ended = {
                "rows": summary.computed,
                "seconds": summary.seconds,
                "stages": summary.stages,
            }
            dataset.add_run({"event": "ended", "started": plan.provenance["started"], **ended})
    return summary
