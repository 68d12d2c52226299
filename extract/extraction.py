"""From images to features on disk: the loop that joins images, backbone, taps, pooling and store.

    images -> DataLoader -> backbone, under Taps -> pooling (on the device) -> CPU -> ShardWriter -> HDF5

`extract_features` is all of it in one call. `plan` and `extract` are its two halves, for those who want to look at what
was resolved, show progress, or stop in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from extract import defaults
from extract.backbones import Backbone, load_backbone
from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.features import Choice, Feature, choose_features
from extract.hooks import Taps
from extract.images import Batch, ImageFolder, list_images, load_batches
from extract.pooling import pool
from extract.record import Record
from extract.status import Status
from extract.store.dataset import DataSet, shard_rows_for
from extract.store.layout import StoredFeature, create_shard, row_bytes
from extract.store.reader import FeatureReader, open_shard
from extract.store.writer import ShardWriter

__all__ = ["Plan", "Summary", "extract", "extract_features", "extract_shard", "plan"]

DTYPES = ("float32", "float16")
_SAMPLED = 16  # stored rows whose images are read again when their folder has another name than before
RowNumbers = range | NDArray[np.int64]  # ascending


def extract_features(
    images: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    backbone: str | Backbone = defaults.BACKBONE,
    layers: str | Sequence[str] = defaults.LAYERS,
    weights: str | None = None,
    batch_size: int = defaults.BATCH_SIZE,
    workers: int = defaults.WORKERS,
    device: str = defaults.DEVICE,
    dtype: str = defaults.DTYPE,
    limit: int | None = None,
    seed: int = defaults.SEED,
    shard_rows: int | None = None,
    progress: bool = True,
) -> FeatureReader:
    """Extract features of all images below a folder into a data set, and open it.

    Called again with the same arguments, it computes only what is not done. Images that cannot be decoded are rows with
    a status and NaN (`reader.failures`).

    Args:
        images: folder; classes and splits come from the names of its folders.
        out: folder of the data set; made if need be.
        backbone: a spec, or what `load_backbone` returned; then `weights`, `device` and `seed` have no effect.
        layers: `LAYER[:POOLING]` each, globs allowed; see `choose_features`.
        weights: a name, a file, or "random"; see `load_backbone`.
        batch_size: images a forward.
        workers: processes that decode; 0 decodes in this one.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: "float32" or "float16", as stored.
        limit: only so many images, the first in order.
        seed: of random weights.
        shard_rows: images in a file; None makes files of at most 1 GB.
        progress: show a bar.

    Raises:
        UnknownNameError: no such backbone, layer or pooling.
        InputError: no images; a layer, a pooling or the weights do not fit; `out` holds other features.
        LockedError: another process writes to `out`.
        LayertapError: the disk is full, a download failed, a device is missing.
    """
    if isinstance(backbone, str):
        backbone = load_backbone(backbone, weights=weights, device=device, seed=seed)
    planned = plan(
        images,
        out=out,
        backbone=backbone,
        layers=layers,
        batch_size=batch_size,
        workers=workers,
        dtype=dtype,
        limit=limit,
        shard_rows=shard_rows,
    )
    from tqdm.auto import tqdm

    with tqdm(total=len(planned.images), unit=" images", disable=not progress) as bar:
        extract(planned, on_rows=lambda rows, found: _advance(bar, rows, found))
    return FeatureReader(out)


def _advance(bar: Any, rows: int, found: bool) -> None:
    if found:
        bar.initial += rows
    bar.update(rows)


@dataclass(frozen=True)
class Plan:
    """Everything a run has resolved before it computes."""

    images: ImageFolder
    backbone: Backbone
    choice: Choice
    dataset: DataSet
    batch_size: int
    workers: int
    provenance: dict[str, Any]


@dataclass
class Summary:
    """What a run did.

    Attributes:
        n_rows: rows of the data set.
        found: rows that were done before.
        computed: rows of this run, failed ones included.
        status: status -> number of rows of this run.
        seconds: from the first image to the last receipt.
        stages: seconds spent waiting for images, in the forward (with pooling and the copy to the CPU), and writing.
        stopped: whether the run was asked to stop before the end.
    """

    n_rows: int
    found: int = 0
    computed: int = 0
    status: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: {"images": 0.0, "forward": 0.0, "write": 0.0})
    stopped: bool = False

    @property
    def images_per_s(self) -> float:
        """Rate of this run."""
        return self.computed / self.seconds if self.seconds else 0.0

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[stage] += time.perf_counter() - start


def plan(
    images: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    backbone: Backbone,
    layers: str | Sequence[str] = defaults.LAYERS,
    batch_size: int = defaults.BATCH_SIZE,
    workers: int = defaults.WORKERS,
    dtype: str = defaults.DTYPE,
    limit: int | None = None,
    shard_rows: int | None = None,
) -> Plan:
    """List the images and find out what the layers give; arguments and errors as of `extract_features`.

    Nothing is written.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("limit", limit, 1),
                               ("shard_rows", shard_rows, 1)):  # fmt: skip
        if value is not None and value < least:
            raise InputError(f"{name} is {value}; it must be at least {least}")
    folder = list_images(images, limit)
    with _evaluating(backbone.model), _full_float32():
        choice = choose_features(backbone, [layers] if isinstance(layers, str) else layers)
    stored = [
        StoredFeature(
            feature.name,
            feature.shape,
            dtype,
            {
                "layer": str(feature.site),
                "pooling": feature.pooling,
                "axes": feature.layout.axes if feature.pooling in ("none", "flatten") else "C",
                "source_dtype": feature.source_dtype,
            },
        )
        for feature in choice.features
    ]
    depends_on = {
        "architecture": backbone.architecture,
        "weights_sha256": backbone.weights.sha256,
        "features": {f.name: f"{f.site} {f.pooling} {list(f.shape)}" for f in choice.features},
        "preprocessing": backbone.preprocessing.describe(),
        "decoder": "pillow: EXIF orientation applied, transparency over white",
        "precision": "float32",
        "stored_as": dtype,
    }
    listed = xxhash.xxh3_128_hexdigest(b"\0".join(os.fsencode(path) for path in folder.paths))
    dataset = DataSet(
        out=Path(out),
        depends_on=json.loads(json.dumps(depends_on)),  # as it will be read back
        features=stored,
        images={"root": str(folder.root.resolve()), "count": len(folder), "paths_xxh3": listed},
        shard_rows=min(shard_rows or _existing_shard_rows(Path(out)) or shard_rows_for(stored), len(folder)),
    )
    configuration = {
        "images": str(folder.root),
        "layers": [layers] if isinstance(layers, str) else list(layers),
        "batch_size": batch_size,
        "workers": workers,
        "dtype": dtype,
        "limit": limit,
        "shard_rows": shard_rows,
    }
    provenance = _provenance(backbone, depends_on, configuration)
    return Plan(folder, backbone, choice, dataset, batch_size, workers, provenance)


def _existing_shard_rows(out: Path) -> int | None:
    """How the data set that is there already is cut, for a run that does not say."""
    return DataSet.open(out).shard_rows if (out / "dataset.json").exists() else None


def _provenance(backbone: Backbone, depends_on: dict[str, Any], configuration: dict[str, Any]) -> dict[str, Any]:
    packages = ("layertap", "torch", "torchvision", "timm", "pillow", "numpy", "h5py")
    on_gpu = backbone.device.type == "cuda"
    return {
        "backbone": backbone.spec,
        "weights": backbone.weights.source,
        "depends_on": depends_on,
        "configuration": configuration,
        "device": torch.cuda.get_device_name(backbone.device) if on_gpu else str(backbone.device),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": {"platform": platform.platform(), "host": platform.node()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every submodule gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def extract(
    plan: Plan,
    *,
    on_rows: Callable[[int, bool], None] = lambda rows, found: None,
    stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Compute every row of the data set that is not done.

    Args:
        plan: what to compute.
        on_rows: called with a number of rows, and whether they were found done (True) or computed now (False).
        stop: asked after each batch; True ends the run there, in order.

    Raises:
        InputError: the folder holds other features.
        LockedError: another process writes to it.
        LayertapError: the disk is full or refuses.
    """
    dataset = plan.dataset
    summary = Summary(n_rows=dataset.n_rows)
    dataset.check()
    _check_disk_space(dataset)
    with dataset.locked():
        existing = dataset.open_or_create()
        if existing is not None and existing.images["root"] != dataset.images["root"]:
            _check_same_images(plan, existing)
        todo = {shard: rows for shard in range(dataset.n_shards) if len(rows := _rows_to_do(plan, shard))}
        summary.found = dataset.n_rows - sum(map(len, todo.values()))
        if summary.found:
            on_rows(summary.found, True)
        unpublished = [shard for shard in range(dataset.n_shards) if not dataset.shard_path(shard).exists()]
        if todo:
            run = {name: value for name, value in plan.provenance.items() if name != "depends_on"}
            dataset.add_run({"event": "started", "found_done": summary.found, **run})
        start = time.perf_counter()
        # The worker processes start here, before any shard is open.
        batches = load_batches(
            plan.images,
            itertools.chain.from_iterable(_batches_of(rows, plan) for rows in todo.values()),
            plan.backbone.preprocessing.prepare,
            workers=plan.workers if todo else 0,
            pin_memory=plan.backbone.device.type == "cuda",
        )
        with (
            torch.inference_mode(),
            _evaluating(plan.backbone.model),
            _full_float32(),
            _keeping_freed_memory(),
            _taps(plan) as taps,
        ):
            for shard in unpublished:
                count = sum(1 for _ in _batches_of(todo.get(shard, range(0)), plan))
                extract_shard(plan, shard, itertools.islice(batches, count), taps, summary, on_rows, stop)
                if summary.stopped:
                    break
        summary.seconds = time.perf_counter() - start
        if summary.computed:
            ended = {"rows": summary.computed, "seconds": summary.seconds, "stages": summary.stages}
            dataset.add_run({"event": "ended", "started": plan.provenance["started"], **ended})
    return summary


def extract_shard(
    plan: Plan,
    shard: int,
    batches: Iterator[Batch],
    taps: Taps,
    summary: Summary,
    on_rows: Callable[[int, bool], None] = lambda rows, found: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fill one shard with these batches of its rows and publish it."""
    device, preprocessing = plan.backbone.device, plan.backbone.preprocessing
    if not plan.dataset.part_path(shard).exists():
        _create_part(plan, shard)
    with ShardWriter(plan.dataset, shard) as writer:
        while True:
            with summary.timed("images"):
                batch = _next(batches)
            if batch is None:
                break
            if (batch.status == Status.MISSING).any():
                _check_still_there(plan.images.root)
            with summary.timed("forward"):
                if len(batch.images):
                    taps(preprocessing.to_input(batch.images.to(device, non_blocking=True)))
                features = _rows_of(batch, taps.record if len(batch.images) else None, plan)
                status, reasons = _checked(batch, features)
            with summary.timed("write"):
                source = {name: getattr(batch, name) for name in ("source_size", "source_mtime_ns", "source_hash")}
                writer.write(batch.rows, features, status, source, reasons)
            summary.computed += len(batch.rows)
            summary.status.update(Status(code).text for code in status.tolist())
            on_rows(len(batch.rows), False)
            if stop():
                summary.stopped = True
                return
        with summary.timed("write"):
            writer.publish()


# glibc's mallopt parameters (malloc.h), and the largest values that its dynamic rule reaches by itself (mallopt(3)).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TRIM_THRESHOLD_BYTES, _MMAP_THRESHOLD_BYTES = 64 << 20, 32 << 20


@contextlib.contextmanager
def _keeping_freed_memory() -> Iterator[None]:
    """Let glibc reuse the memory of one batch's activations for the next, and give it back at the end.

    By default each large activation is mapped from the kernel and unmapped again, which zeroes its pages every time:
    more than half of the time of a forward on a CPU (efficientnet_lite0, batches of 64: 49 images/s, 220 with this).
    Setting a threshold once ends glibc's own adjustment of it, so the process is left with the largest values that
    adjustment would have reached. Where the C library is another one, nothing is done.
    """
    try:
        libc = ctypes.CDLL("libc.so.6") if sys.platform == "linux" else None
    except OSError:
        libc = None
    if libc is None:
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
        libc.malloc_trim(0)


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """No TF32 on NVIDIA GPUs, which PyTorch allows in convolutions by default: it keeps 10 bits of 23."""
    places: tuple[Any, ...] = (getattr(torch.backends.cudnn, "conv"), torch.backends.cuda.matmul)  # noqa: B009
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _next(batches: Iterator[Batch]) -> Batch | None:
    try:
        return next(batches, None)
    except RuntimeError as error:
        if "DataLoader" not in str(error):
            raise
        raise LayertapError(
            f"a process that decodes images died or hangs: {first_line(error)}. What was stored is safe; run again to "
            "go on. Lower workers or batch_size if memory is short, or give /dev/shm more room"
        ) from error


def _check_still_there(root: Path) -> None:
    """Whether the image folder is there: files that are missing with it are no failed rows."""
    try:
        there = any(True for _ in os.scandir(root))  # where a disk was unmounted, an empty folder stays
    except OSError:
        there = False
    if not there:
        raise LayertapError(
            f"{root} has vanished, or is empty now (an unmounted disk?). What was stored is safe; "
            "run again when it is back"
        )


def _taps(plan: Plan) -> Taps:
    """Taps that pool each tensor on the device and copy nothing else."""
    taps = Taps(plan.backbone.model, stop=True)
    dtype = getattr(torch, plan.dataset.features[0].dtype)
    for site in dict.fromkeys(feature.site for feature in plan.choice.features):
        taps.keep(site, reduce=_reduction([f for f in plan.choice.features if f.site == site], dtype))
    return taps


def _reduction(features: Sequence[Feature], dtype: torch.dtype) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda activation: {
        f.name: pool(f.rows.by_image(activation), f.pooling, f.layout).to(dtype) for f in features
    }


def _rows_of(batch: Batch, record: Record | None, plan: Plan) -> dict[str, NDArray[Any]]:
    """Feature name -> (R, *shape), NaN where there was no image."""
    good = batch.status == Status.OK
    found: dict[str, NDArray[Any]] = {}
    for feature, stored in zip(plan.choice.features, plan.dataset.features, strict=True):
        values = None if record is None else record[feature.site][feature.name].numpy()
        if values is None or not good.all():
            rows = np.full((len(good), *stored.shape), np.nan, stored.dtype)
            if values is not None:
                rows[good] = values
            values = rows
        found[feature.name] = values
    return found


def _checked(batch: Batch, features: dict[str, NDArray[Any]]) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """The status of each row after the forward, and the reasons of those that are not ok."""
    status, reasons = batch.status.copy(), dict(batch.reasons)
    for name, values in features.items():
        finite = np.isfinite(values).reshape(len(values), -1).all(1)
        for row in np.flatnonzero(~finite & (status == Status.OK)).tolist():
            status[row] = Status.NOT_FINITE
            beyond = "; float16 ends at 65504, try float32" if values.dtype == np.float16 else ""
            reasons[int(batch.rows[row])] = f"{name} has NaN or infinite values{beyond}"
    return status, reasons


def _rows_to_do(plan: Plan, shard: int) -> RowNumbers:
    """The rows of a shard that have no good features yet."""
    dataset = plan.dataset
    if dataset.shard_path(shard).exists():
        return range(0)
    rows = dataset.shard_range(shard)
    if not dataset.part_path(shard).exists():
        return rows
    with ShardWriter(dataset, shard) as writer:
        writer.check()
        return rows.start + np.flatnonzero(writer.status != Status.OK)


def _batches_of(rows: RowNumbers, plan: Plan) -> Iterator[list[int]]:
    """The rows of one shard in batches that begin where they begin when all rows are to do.

    So a run that was interrupted and resumed computes each row in the same company as one that was not.
    """
    start = int(rows[0]) // plan.dataset.shard_rows * plan.dataset.shard_rows if len(rows) else 0
    for _, batch in itertools.groupby(rows, lambda row: (int(row) - start) // plan.batch_size):
        yield [int(row) for row in batch]


def _check_same_images(plan: Plan, existing: DataSet) -> None:
    """Whether a few images that have rows already are the same under the new folder, byte for byte.

    Raises:
        InputError: they are not; other pictures may lie under the same names.
    """
    for shard in range(existing.n_shards):
        for path in (existing.shard_path(shard), existing.part_path(shard)):
            if not path.exists():
                continue
            with open_shard(path) as file:
                stored = np.flatnonzero(file["status"][:] == Status.OK)
                for row in stored[:: max(1, len(stored) // _SAMPLED)].tolist():
                    image = os.path.join(os.fsencode(plan.images.root), file["path"][row])  # noqa: PTH118
                    try:
                        with open(image, "rb") as picture:  # noqa: PTH123
                            same = xxhash.xxh3_128_digest(picture.read()) == file["source_hash"][row].tobytes()
                    except OSError:
                        same = False
                    if not same:
                        raise InputError(
                            f"{existing.out} holds features of the images in {existing.images['root']}; those in "
                            f"{plan.images.root} are others: {os.fsdecode(file['path'][row])} differs. "
                            "Choose another output folder"
                        )
            if len(stored):
                return


def _check_disk_space(dataset: DataSet) -> None:
    new = [
        shard
        for shard in range(dataset.n_shards)
        if not dataset.shard_path(shard).exists() and not dataset.part_path(shard).exists()
    ]
    needed = sum(len(dataset.shard_range(shard)) for shard in new) * row_bytes(dataset.features)
    place = next(folder for folder in (dataset.out.absolute(), *dataset.out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise LayertapError(
            f"{dataset.out}: {needed / 1e6:,.1f} MB of features to come, {free / 1e6:,.1f} MB free on the disk; "
            "pool the layers, store float16, or choose another output folder"
        )


def _create_part(plan: Plan, shard: int) -> None:
    dataset, images = plan.dataset, plan.images
    rows = dataset.shard_range(shard)
    here = slice(rows.start, rows.stop)
    create_shard(
        dataset.part_path(shard),
        dataset.features,
        shard=shard,
        first_row=rows.start,
        fingerprint=dataset.fingerprint,
        images=dataset.images["paths_xxh3"],
        paths=images.paths[here],
        labels=images.labels[here],
        splits=images.splits[here],
        classes=images.classes,
        provenance=plan.provenance,
    )
