"""Extract features of the same images with several backbones; images are decoded once for all that share a decoding.

`extract_several` does it, `costs_of` estimates how long it takes.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from extract import defaults
from extract.backbones.preprocessing import Preprocessing
from extract.compute.backbone import Backbone
from extract.compute.backends import open_forward
from extract.errors import LayertapError, LockedError, MachineError
from extract.extraction.first_images import decode_seconds, decoded_in, timed_s
from extract.extraction.plan import Plan, existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import Images
from extract.images.fetched_once import FetchedOnce
from extract.images.kept_batches import KeptBatches
from extract.images.loading import Load
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.system.foreign_code import own_faults_refused
from extract.system.leftovers import temporary_folder

__all__ = ["KEPT_BYTES", "Costs", "Member", "MemberRun", "costs_of", "extract_several"]

KEPT_BYTES = 4 << 30  # of decoded images
_TIMED = 16  # images, drawn


@dataclass(frozen=True)
class Member:
    """One of several extractions.

    Attributes:
        name: name in results.
        out: folder of its data set.
        load: loads the backbone; called several times, since one backbone is in memory at a time.
        settings: settings; those of decoding are the same for all members.
    """

    name: str
    out: Path
    load: Callable[[], Backbone]
    settings: ExtractionSettings


@dataclass
class MemberRun:
    """Outcome of a member.

    Attributes:
        error: why it has no complete data set; None: it has one, or the run was stopped.
        about: facts about the backbone: `parameters`, `weights` (their source) and `random` (whether they are); empty
            if it cannot be loaded.
        complete: whether the data set is complete.
    """

    error: LayertapError | None = None
    about: dict[str, Any] = field(default_factory=dict)
    complete: bool = False


@dataclass(frozen=True)
class _Surveyed:
    """What is known of a member before the first image is decoded.

    Attributes:
        decoding: equal for members whose decoded images are equal.
        stored_rows: rows of the shards of its data set; None if it has none yet.
        most_rows: largest number of rows of a new shard.
        image_bytes: bytes of a decoded image.
    """

    decoding: Hashable
    stored_rows: int | None
    most_rows: int
    image_bytes: int


def extract_several(
    images: Images,
    members: Sequence[Member],
    scratch: Path,
    *,
    kept_bytes: int = KEPT_BYTES,
    on_member: Callable[[str, range], None] = lambda name, rows: None,
    on_failure: Callable[[str, LayertapError], None] = lambda name, error: None,
    on_rows: Callable[[int, bool], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, MemberRun]:
    """Compute the missing rows of a data set for each member, shard by shard.

    The members that share a decoding compute a shard one after the other, from images that the first one has decoded
    and kept on disk. Images behind URLs are fetched once for all members. A member that fails is left out from then on.

    Args:
        images: listed images.
        members: the extractions; their names and folders differ.
        scratch: existing folder for decoded and fetched images, which are deleted at the end.
        kept_bytes: limit for the decoded images of a shard, with half of the free space of the disk; it limits the rows
            of shards of new data sets, if none of the data sets exists.
        on_member: called before a member computes rows, with its name and the rows of the shard.
        on_failure: called with the name of a member that fails, and why.
        on_rows: called with a number of rows, and whether earlier runs have stored them; rows of unfinished shards are
            not among these.
        on_note: see `extract`.
        stop: see `extract`.

    Returns:
        name -> its outcome.

    Raises:
        LockedError: another process writes to a folder.
        MachineError: this machine cannot read images any more.
    """

    def on_new_rows(count: int, resumed: bool) -> None:
        if on_rows is not None and not resumed:
            on_rows(count, False)

    runs = {member.name: MemberRun() for member in members}
    surveyed: dict[str, _Surveyed] = {}
    for member in members:
        if stop():
            return runs
        run = runs[member.name]
        with _failure_kept(run, partial(on_failure, member.name)):
            surveyed[member.name] = _survey(images, member, run)
        gc.collect()  # the modules of a backbone refer to each other in circles
    kept_bytes = min(kept_bytes, shutil.disk_usage(scratch).free // 2)
    new_rows = _rows_of_new_shards(len(images), list(surveyed.values()), kept_bytes, members[0].settings.batch_size)
    by_rows: dict[int, dict[Hashable, list[Member]]] = {}  # rows of a shard -> decoding -> members
    for member in members:
        if (known := surveyed.get(member.name)) is not None:
            groups = by_rows.setdefault(known.stored_rows or new_rows, {})
            groups.setdefault(known.decoding, []).append(member)

    def compute(member: Member, shard: int, here: range, rows: int, load: Load) -> bool:
        """Compute a shard of a member, if it is missing; return whether the run was stopped."""
        if runs[member.name].error is not None:
            return False
        if _is_finished(member.out, shard):
            if on_rows is not None:
                on_rows(len(here), True)
            return False
        on_member(member.name, here)
        stopped = False
        with _failure_kept(runs[member.name], partial(on_failure, member.name)):
            stopped = extract(
                _plan_of(images, member, rows), shards=[shard], load=load, on_rows=on_new_rows, on_note=on_note,
                stop=stop,
            ).stopped  # fmt: skip
        gc.collect()
        return stopped

    for rows, groups in by_rows.items():
        for shard in range(-(-len(images) // rows)):
            here = range(shard * rows, min((shard + 1) * rows, len(images)))
            with _folder_in(scratch) as folder:
                source = FetchedOnce(images.source, folder) if len(groups) > 1 else None
                for group in groups.values():
                    with KeptBatches(folder, source, stop) as kept:
                        if any(compute(member, shard, here, rows, kept.load) for member in group):
                            return runs
    for member in members:
        run = runs[member.name]
        run.complete = run.error is None and all(file is not None for file in DataSet.open(member.out).published())
    return runs


@contextmanager
def _folder_in(scratch: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder; those of killed runs are removed."""
    with ExitStack() as at_the_end:
        try:
            folder = at_the_end.enter_context(temporary_folder(scratch / "decoded"))
        except OSError as error:
            raise LayertapError(f"cannot write to {scratch}: {error.strerror}") from error
        yield folder


@contextmanager
def _failure_kept(run: MemberRun, on_failure: Callable[[LayertapError], None] = lambda error: None) -> Iterator[None]:
    """Context manager: keep an error of a backbone, or of a user's own code in it, as that of its run."""
    try:
        with own_faults_refused(()):
            yield
    except (LockedError, MachineError):
        raise
    except MemoryError:
        failure = LayertapError("out of memory", hint="lower --batch-size, or leave this backbone out")
    except LayertapError as error:
        failure = error
    else:
        return
    run.error = failure
    on_failure(failure)


def _plan_of(images: Images, member: Member, shard_rows: int | None = None) -> Plan:
    """Load the backbone of a member and return its plan."""
    settings = replace(member.settings, shard_rows=shard_rows or member.settings.shard_rows)
    return resolve(settings, images, member.load(), existing_at(member.out))


def _survey(images: Images, member: Member, run: MemberRun) -> _Surveyed:
    plan = _plan_of(images, member)
    plan.existing.check(plan.dataset)  # a complete data set of other features is not taken for this one
    backbone, stored = plan.backbone, plan.existing.dataset
    run.about = {
        "parameters": sum(parameter.numel() for parameter in backbone.model.parameters()),
        "weights": backbone.weights.source,
        "random": backbone.weights.random,
    }
    bytes_of_pixel = 3 if _is_plain(backbone.preprocessing) else 12
    return _Surveyed(
        _decoding_of(member.name, backbone.preprocessing),
        stored.shard_rows if stored else None,
        shard_rows_for(plan.dataset.features),
        int(np.prod(backbone.preprocessing.crop_px)) * bytes_of_pixel,
    )


def _is_plain(preprocessing: Preprocessing) -> bool:
    """Return whether images are decoded to uint8, and normalised later."""
    return preprocessing.library_transform is None


def _decoding_of(name: str, preprocessing: Preprocessing) -> Hashable:
    """Return what decoded images depend on; a library's own transform is not shared with other members."""
    if not _is_plain(preprocessing):
        return name
    return replace(preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def _rows_of_new_shards(n_images: int, surveyed: Sequence[_Surveyed], kept_bytes: int, batch_size: int) -> int:
    """Return the rows of new data sets' shards: those of an existing one, or as many whole batches as are kept."""
    for known in surveyed:
        if known.stored_rows is not None:
            return known.stored_rows
    rows = min((known.most_rows for known in surveyed), default=n_images)
    rows = min(rows, kept_bytes // max((known.image_bytes for known in surveyed), default=1))
    return max(1, min(n_images, max(1, rows // batch_size) * batch_size))


def _is_finished(out: Path, shard: int) -> bool:
    """Return whether a shard is published and not to be written again."""
    dataset = existing_at(out).dataset
    if dataset is None:
        return False
    where = dataset.shard_files()[shard]
    return where.published is not None and where.part is None


class Costs(NamedTuple):
    """Seconds of several extractions.

    Attributes:
        fixed_s: seconds for loading the backbones.
        image_s: seconds for each image.
    """

    fixed_s: float
    image_s: float


def costs_of(images: Images, members: Sequence[Member], seed: int, stop: Callable[[], bool] = lambda: False) -> Costs:
    """Estimate how long `extract_several` takes. Forwards are timed without a compiler, which is used only if it pays.

    Args:
        images: listed images, of which a few are decoded.
        members: the extractions; members that fail are left out.
        seed: seed of the draw of images.
        stop: called before each member; True ends the measurement.

    Raises:
        LayertapError: no backbone can be measured.
    """
    rows = np.random.default_rng(seed).choice(len(images), min(_TIMED, len(images)), replace=False)
    drawn = images.select(sorted(rows.tolist()))
    fixed_s, forward_s, decoded_s = 0.0, 0.0, dict[Hashable, float]()
    runs = {member.name: MemberRun() for member in members}
    for member in members:
        if stop():
            break
        with _failure_kept(runs[member.name]):
            start = time.perf_counter()
            plan = _plan_of(drawn, member)
            load_s = time.perf_counter() - start
            preprocessing, settings = plan.backbone.preprocessing, plan.settings
            (pictures,) = decoded_in(drawn, [preprocessing], settings.max_pixels, settings.batch_size)
            with open_forward(plan.backbone, plan.choice, "float32", settings.precision) as forward:
                first_s = timed_s(partial(forward, pictures))
                each_s = timed_s(partial(forward, pictures)) / len(pictures)
            decoding = _decoding_of(member.name, preprocessing)
            if decoding not in decoded_s:
                at_once = max(1, min(settings.workers, defaults.CORES))
                decoded_s[decoding] = decode_seconds(drawn, preprocessing, settings.max_pixels) / at_once
            fixed_s += 2 * load_s + first_s  # it is loaded to look at it, and to compute
            forward_s += each_s
        gc.collect()  # the modules of a backbone refer to each other in circles
    failed = [run.error for run in runs.values() if run.error is not None]
    if failed and not decoded_s:
        raise failed[0]
    return Costs(fixed_s, forward_s + sum(decoded_s.values()))
