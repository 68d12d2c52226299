"""Extract features of the same images with several backbones; images are decoded once for all that share a decoding.

One backbone is in memory at a time: those that fit together would be few. Each is loaded once to see how it decodes and
how wide its features are, and once for each shard. All data sets have shards of the same rows, so an interrupted run
resumes as an extraction does.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from extract import defaults
from extract.compute.backbone import Backbone
from extract.errors import LayertapError, LockedError, MachineError
from extract.extraction.plan import Plan, existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import Images
from extract.images.loading import KeptBatches, Load
from extract.store.format.dataset import DataSet, shard_rows_for
from extract.system.foreign_code import own_faults_refused

__all__ = ["KEPT_BYTES", "Member", "MemberRun", "extract_several"]

KEPT_BYTES = 4 << 30  # of decoded images


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
    """What is known of a member before the first image is decoded."""

    decoding: Hashable  # equal for members whose decoded images are equal
    stored_rows: int | None  # of a shard of its data set; None: there is none yet
    most_rows: int  # of a shard of a new one
    image_bytes: int  # of a decoded image


def extract_several(
    images: Images,
    members: Sequence[Member],
    scratch: Path,
    *,
    kept_bytes: int = KEPT_BYTES,
    on_member: Callable[[str, range], None] = lambda name, rows: None,
    on_failure: Callable[[str, LayertapError], None] = lambda name, error: None,
    on_rows: Callable[[int, bool], None] = lambda rows, resumed: None,
    on_note: Callable[[str], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, MemberRun]:
    """Compute the missing rows of a data set for each member, shard by shard.

    The members that share a decoding compute a shard one after the other, from images that the first one has decoded
    and kept on disk. A member that fails is left out from then on.

    Args:
        images: listed images.
        members: the extractions; their names and folders differ.
        scratch: existing folder for decoded images, which are deleted at the end.
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
        if not resumed:
            on_rows(count, False)

    runs = {member.name: MemberRun() for member in members}
    surveyed: dict[str, _Surveyed] = {}
    for member in members:
        if stop():
            return runs
        with _failure_kept(member, runs, on_failure):
            surveyed[member.name] = _survey(images, member, runs[member.name])
        gc.collect()  # the modules of a backbone refer to each other in circles
    stored_rows = next((known.stored_rows for known in surveyed.values() if known.stored_rows), None)
    most_bytes = min(kept_bytes, shutil.disk_usage(scratch).free // 2)
    new_rows = stored_rows or _rows_of_new_shards(images, members[0], list(surveyed.values()), most_bytes)
    groups: dict[tuple[int, Hashable], list[Member]] = {}  # rows of a shard, decoding -> members
    for member in members:
        if known := surveyed.get(member.name):
            groups.setdefault((known.stored_rows or new_rows, known.decoding), []).append(member)

    def compute(member: Member, shard: int, here: range, rows: int, load: Load) -> bool:
        """Compute a shard of a member, if it is missing; return whether the run was stopped."""
        if runs[member.name].error is not None:
            return False
        if _is_finished(member.out, shard):
            on_rows(len(here), True)
            return False
        on_member(member.name, here)
        stopped = False
        with _failure_kept(member, runs, on_failure):
            stopped = extract(
                _plan_of(images, member, rows), shards=[shard], load=load, on_rows=on_new_rows, on_note=on_note,
                stop=stop,
            ).stopped  # fmt: skip
        gc.collect()
        return stopped

    for (rows, _), group in groups.items():
        for shard in range(-(-len(images) // rows)):
            here = range(shard * rows, min((shard + 1) * rows, len(images)))
            # Without a name, it ends with the process.
            with tempfile.TemporaryFile(dir=scratch, buffering=0) as file:
                decoded = KeptBatches(file, stop)
                if any(compute(member, shard, here, rows, decoded.load) for member in group):
                    return runs
    for member in members:
        run = runs[member.name]
        run.complete = run.error is None and all(file is not None for file in DataSet.open(member.out).published())
    return runs


@contextmanager
def _failure_kept(
    member: Member, runs: dict[str, MemberRun], on_failure: Callable[[str, LayertapError], None]
) -> Iterator[None]:
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
    runs[member.name].error = failure
    on_failure(member.name, failure)


def _plan_of(images: Images, member: Member, shard_rows: int | None = None) -> Plan:
    """Load the backbone of a member and return its plan."""
    settings = replace(member.settings, shard_rows=shard_rows or member.settings.shard_rows)
    return resolve(settings, images, member.load(), existing_at(member.out))


def _survey(images: Images, member: Member, run: MemberRun) -> _Surveyed:
    planned = _plan_of(images, member)
    planned.existing.check(planned.dataset)  # a complete data set of other features is not taken for this one
    backbone = planned.backbone
    run.about = {
        "parameters": sum(parameter.numel() for parameter in backbone.model.parameters()),
        "weights": backbone.weights.source,
        "random": backbone.weights.random,
    }
    decoding: Hashable = replace(backbone.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    bytes_of_pixel = 3  # images are decoded to uint8, and normalised later
    if backbone.preprocessing.library_transform is not None:  # which is not shared with other members
        decoding, bytes_of_pixel = member.name, 12
    image_bytes = int(np.prod(backbone.preprocessing.crop_px)) * bytes_of_pixel
    stored = planned.existing.dataset
    stored_rows = stored.shard_rows if stored is not None else None
    return _Surveyed(decoding, stored_rows, shard_rows_for(planned.dataset.features), image_bytes)


def _rows_of_new_shards(images: Images, member: Member, surveyed: Sequence[_Surveyed], most_bytes: int) -> int:
    """Return how many rows new shards have: as many whole batches as are kept of the largest decoded images."""
    rows = min((known.most_rows for known in surveyed), default=len(images))
    rows = min(rows, most_bytes // max((known.image_bytes for known in surveyed), default=1))
    batch_size = member.settings.batch_size or defaults.BATCH_SIZE
    return max(1, min(len(images), max(1, rows // batch_size) * batch_size))


def _is_finished(out: Path, shard: int) -> bool:
    """Return whether a shard is published and not to be written again."""
    if not (out / "dataset.json").is_file():
        return False
    where = DataSet.open(out).shard_files()[shard]
    return where.published is not None and where.part is None
