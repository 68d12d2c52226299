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
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.backbones import LoadedBackbone
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.forward import Values
from extract.errors import InputError, LayertapError
from extract.extraction.pipeline import Summary, batches_of, checked_batches, extract_shard
from extract.extraction.plan import Plan, existing_at, resolve
from extract.extraction.settings import BackboneSettings, ExtractionSettings, taking, values_of
from extract.extraction.validation import Computation, ValidatedForward
from extract.images import Batch, Images, list_images, load_batches
from extract.images.datasets import MapDataset, is_in_memory, list_dataset
from extract.images.image_list import are_asked
from extract.images.listing import some_of
from extract.images.loading import Load
from extract.images.sources import ImageSource
from extract.row_status import Status
from extract.store.format.dataset import BUILDING, DataSet, ShardFiles
from extract.store.format.kept_axes import keep_axes
from extract.store.format.layout import row_bytes
from extract.store.format.receipt import read_receipt
from extract.store.format.writer import RowNumbers, ShardWork, ShardWriter, hash_rows
from extract.store.reader import FeatureReader
from extract.system.foreign_code import exits_refused
from extract.system.urls import is_url

__all__ = ["PUBLISHERS", "Arguments", "extract", "extract_features", "publishers", "work_at", "work_of"]

PUBLISHERS = 2  # threads: the sha256 of a file takes longer than writing it
_TRIED_S = 2.0  # to try images of a shard that had an I/O error; if a server is down, each takes seconds
_SAMPLED = 16  # stored rows whose images are read again if their folder has another name than before


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
        add_layers: Add layers to a complete data set of the same images, backbone and preprocessing.
        progress: Show a progress bar.
    """

    images: str | os.PathLike[str] | MapDataset = dataclasses.field(kw_only=False)
    out: str | os.PathLike[str]
    backbone: str | Backbone = defaults.BACKBONE
    preprocessing: Mapping[str, Any] | None = None
    retry_failed: bool = False
    add_layers: bool = False
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
    if not isinstance(backbone, LoadedBackbone):
        backbone = load_backbone(
            backbone, preprocessing=arguments.preprocessing, **values_of(BackboneSettings, arguments)
        )
    images = _listed(arguments)
    plan = resolve(arguments, images, backbone, existing_at(out, add_layers=arguments.add_layers))
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
    """List the images; pass the notes of a dataset, and that on images that were left out, on as warnings."""
    where, keep = arguments.images, arguments.keep_list
    if isinstance(where, str | os.PathLike):
        listed = list_images(where, keep=keep, parts=arguments)
    else:
        of_boxes = keep if arguments.boxes else []
        listed = list_dataset(where, [] if arguments.boxes else keep)
        if are_asked(arguments):
            from extract.images.parts.listing import parts_of

            listed = parts_of(listed, arguments, of_boxes)
    images = some_of(listed, arguments.limit, arguments.without)
    are_told = len(listed.notes) if isinstance(where, str | os.PathLike) and not are_asked(arguments) else 0
    for note in images.notes[are_told:]:
        warnings.warn(note, stacklevel=4)
    return images


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
    if retry_failed and plan.existing.layers:
        raise InputError("--retry-failed and --add-layers exclude each other", hint="retry first, then add layers")
    check_disk_space(dataset)
    with dataset.locked(), contextlib.ExitStack() as opened:
        if axes_files := plan.choice.axes_files:
            keep_axes(dataset.out, axes_files)  # first: `dataset.json` names them
        earlier = _open_place(plan, opened)
        work = work_of(dataset, plan.images.source, retry_failed) if plan.computed else []
        if earlier is not None:
            work = [dataclasses.replace(shard, compress=earlier.compress) for shard in work]
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
            publishers() as publisher,
        ):
            batches = checked_batches(loaded, plan.images, on_note)
            if earlier is not None:
                batches = earlier.checked(batches)
            beside = earlier.beside if earlier is not None else None
            publishing: deque[Future[object]] = deque()
            for shard in work:
                count = sum(1 for _ in batches_of(shard.rows, plan))
                here = itertools.islice(batches, count)
                publish = extract_shard(plan, shard, here, forward, summary, on_rows, stop, beside)
                if publish is None:
                    break
                publishing.append(publisher.submit(publish))  # while the next shards are computed
                while len(publishing) > PUBLISHERS or (publishing and publishing[0].done()):
                    _wait_until_published(publishing.popleft(), summary)
            while publishing:
                _wait_until_published(publishing.popleft(), summary)
        summary.seconds = time.perf_counter() - start
        if earlier is not None and not summary.stopped and shards is None:
            dataset.open_or_create(has_added=True)
        if not summary.stopped:
            shutil.rmtree(dataset.out / BUILDING, ignore_errors=True)  # left by processes that were stopped
        if summary.computed:
            ended = {"rows": summary.computed, "seconds": summary.seconds, "stages": summary.stages}
            dataset.add_run({"event": "ended", "started": plan.provenance["started"], **ended})
    return summary


@contextlib.contextmanager
def publishers() -> Iterator[ThreadPoolExecutor]:
    """Context manager: yield threads that publish shards.

    All start before there is a shard to publish: the pool does not wait for a thread during whose start Ctrl-C came,
    and the shard would be published after the lock is released.
    """
    with ThreadPoolExecutor(PUBLISHERS, "publisher") as publisher:
        started = threading.Event()
        try:
            for _ in range(PUBLISHERS):
                publisher.submit(started.wait)
        finally:
            started.set()
        yield publisher


def _wait_until_published(publishing: Future[object], summary: Summary) -> None:
    """Wait until a shard is published, and raise its error."""
    asked = time.perf_counter()
    publishing.result()
    summary.stages["write"] += time.perf_counter() - asked


def _open_place(plan: Plan, opened: contextlib.ExitStack) -> EarlierRows | None:
    """Create or open the folder of a data set, which is locked; return the rows to which layers are added, if any."""
    dataset, stored = plan.dataset, plan.existing.dataset
    if plan.existing.layers and plan.computed:
        assert stored is not None
        earlier = opened.enter_context(EarlierRows(dataset, stored, plan.images))
        check_disk_space(dataset)
        return earlier
    existing, root = dataset.open_or_create(), dataset.images["root"]
    if existing is not None and (existing.images["root"] != root or is_in_memory(root)):
        check_same_images(plan, existing)
    return None


class EarlierRows(contextlib.ExitStack):
    """Context manager: the rows of a data set to which layers are added, beside those that are computed.

    `extract.store.format.dataset` describes how the new shards replace the old ones.

    Args:
        dataset: the data set with the new layers, in the folder of the old one, which is locked.
        existing: the old data set.
        images: the images of both.

    Raises:
        LockedError: the data set was changed meanwhile.
        LayertapError: its rows cannot be read, or its folder cannot be written to.
    """

    def __init__(self, dataset: DataSet, existing: DataSet, images: Images):
        super().__init__()
        dataset.begin_to_add(existing)
        self._reader = self.enter_context(FeatureReader(existing.out))
        self._images = images
        self._reasons = {row: reason for row, _, _, reason in self._reader.failures}
        for shard, _, _, path in dataset.files():
            try:
                is_usable = self._are_in(dataset, shard, path)
            except InputError:  # damaged
                is_usable = False
            if not is_usable:
                dataset.withdraw(path)

    def _are_in(self, dataset: DataSet, shard: int, path: Path) -> bool:
        """Whether the rows that an interrupted run has stored in a file have the features that are stored now.

        They have others if, for example, failed rows of the old data set were computed meanwhile.
        """
        layers, hashes, images = self._reader.layers, *map(self._reader.column, ("row_hash", "source_hash"))
        first_row = dataset.shard_range(shard).start
        with dataset.open_shard(shard, path) as opened:
            for start, stop, block in opened.blocks(np.flatnonzero(opened.column("status") != Status.PENDING)):
                rows = slice(first_row + start, first_row + stop)
                if block is None or (hash_rows({name: block[name] for name in layers}) != hashes[rows]).any():
                    return False
                if (opened.column("source_hash")[start:stop] != images[rows]).any():
                    return False
        return True

    @property
    def compress(self) -> str | None:
        """Compression of the stored features."""
        return next((kind for kind, _ in self._reader.compression.values()), None)

    def checked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on whose images are those of the stored features.

        Raises:
            InputError: an image has changed, or can be decoded only now or no more.
        """
        hashes, status = self._reader.column("source_hash"), self._reader.status
        for batch in batches:
            had_image = np.isin(status[batch.rows], [Status.OK, Status.NOT_FINITE])
            same = (batch.source_hash == hashes[batch.rows]).all(1) & (had_image == (batch.status == Status.OK))
            if not same.all():
                row = int(batch.rows[np.argmin(same)])
                path, reason = self._images.slice(row, row + 1).paths[0], batch.reasons.get(row, "it has changed")
                raise InputError(
                    f"{path} is not the image of its stored row: {reason}; no layers were added",
                    hint="restore it; or, if it failed before, run the first command again with --retry-failed",
                )
            yield batch

    def beside(
        self, rows: NDArray[np.int64], status: NDArray[np.uint8], reasons: Mapping[int, str]
    ) -> tuple[Values, NDArray[np.uint8], dict[int, str]]:
        """Return the stored features of rows, as they are kept, and status and reasons of the rows with all features.

        Args:
            rows: (R,) rows of the data set.
            status: (R,) status by the computed features.
            reasons: row -> why it failed, by the computed features.

        Raises:
            InputError: a stored row does not match its hashes.
        """
        not_finite = self._reader.status[rows] == Status.NOT_FINITE
        earlier = {row: self._reasons.get(row, "") for row in rows[not_finite].tolist()}
        return self._reader.checked(rows), np.where(not_finite, Status.NOT_FINITE, status), {**reasons, **earlier}


def work_of(dataset: DataSet, source: ImageSource, retry_failed: bool) -> list[ShardWork]:
    """Return the work of unfinished shards, and of finished shards with I/O errors if one of the images can be read.

    Args:
        dataset: data set of the shards.
        source: source of its images.
        retry_failed: also return every row of finished shards whose status is not OK.
    """
    remaining = []
    for shard, where in enumerate(dataset.shard_files()):
        work = work_at(dataset, shard, where, retry_failed)
        if work is None and not retry_failed:
            work = _of_io_errors(dataset, source, shard, where)
        if work is not None:
            remaining.append(work)
    return remaining


def work_at(dataset: DataSet, shard: int, where: ShardFiles, retry_failed: bool = False) -> ShardWork | None:
    """Return the remaining work of one shard, or None. Damaged rows of an unfinished file become pending."""
    rows: RowNumbers = dataset.shard_range(shard)
    first_row, published, compress = rows[0], None, None
    if where.published is not None:
        if where.part is None and not retry_failed:
            return None
        published = dataset.path(shard, where.published)
        with dataset.open_shard(shard, published) as opened:
            compress = next(iter(opened.compression.values()), None)
            rows = first_row + np.flatnonzero(opened.column("status") != Status.OK)
    if where.part is not None:
        with ShardWriter(dataset, shard, where.part) as writer:
            writer.check()
            rows = first_row + np.flatnonzero(writer.status != Status.OK)
        return ShardWork(shard, where.part, rows, published, compress)
    revision = 0 if where.published is None else where.published + 1
    return ShardWork(shard, revision, rows, published, compress) if len(rows) else None


def _of_io_errors(dataset: DataSet, source: ImageSource, shard: int, where: ShardFiles) -> ShardWork | None:
    """Return the rows of a finished shard with an I/O error, if an image of them can be read now."""
    assert where.published is not None
    published = dataset.path(shard, where.published)
    receipt = read_receipt(published, len(dataset.shard_range(shard)))
    if receipt is None or not receipt["status"].get(Status.IO_ERROR.text):
        return None
    with dataset.open_shard(shard, published) as opened:
        compress = next(iter(opened.compression.values()), None)
        rows = dataset.shard_range(shard)[0] + np.flatnonzero(opened.column("status") == Status.IO_ERROR)
    end = time.monotonic() + _TRIED_S
    for row in np.random.default_rng().permutation(rows).tolist():  # another order in each run
        with contextlib.suppress(OSError, ValueError):
            source.read(row)
            return ShardWork(shard, where.published + 1, rows, published, compress)
        if time.monotonic() > end:
            break
    return None  # the shard is not rewritten without need


def check_same_images(plan: Plan, existing: DataSet) -> None:
    """Check that a few images with stored rows are identical, byte for byte, in the new folder.

    A folder may move. But two folders may hold different pictures under the same names, and a second run would then
    report the wrong pictures as complete.

    Raises:
        InputError: an image differs or cannot be read; the names may belong to other images.
    """
    for shard, where in enumerate(existing.shard_files()):
        file = existing.current(shard, where)
        if file is None:
            continue
        with existing.open_shard(shard, file) as stored:
            good = np.flatnonzero(stored.column("status") == Status.OK)
            chosen = good[:: max(1, len(good) // _SAMPLED)]
            hashes = stored.column("source_hash")[chosen]
            first_row = stored.identity.first_row
            for row, expected in zip((first_row + chosen).tolist(), hashes, strict=True):
                path = plan.images.slice(row, row + 1).paths[0]
                try:
                    data, _ = plan.images.source.read(row)
                    same = plan.images.source.content_hash(row, data) == expected.tobytes()
                except (OSError, ValueError):
                    same = False
                if not same:
                    raise InputError(
                        f"{existing.out} holds features of the images in {existing.images['root']}; those in "
                        f"{plan.images.root} are others: {path} differs",
                        hint="choose another output folder",
                    )
        if len(chosen):
            return


def check_disk_space(dataset: DataSet) -> None:
    """Check that the shards to create fit on the disk.

    Raises:
        LayertapError: the shards do not fit.
    """
    new = [shard for shard, where in enumerate(dataset.shard_files()) if where.published is None and where.part is None]
    needed = sum(len(dataset.shard_range(shard)) for shard in new) * row_bytes(dataset.features)
    place = next(folder for folder in (dataset.out.absolute(), *dataset.out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise LayertapError(
            f"{dataset.out}: features need {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free on the disk",
            hint="pool the layers, store float16 (--dtype float16), or choose another output folder",
        )
