"""A pass: scan a folder, compute features of new images, and publish a version of the data set that matches the folder.

A data set that follows a folder is a table over ordinary data sets. Each pass computes new images into one of its own,
with the code of `embed`; it never changes afterwards. (Rows marked as dead in shards would change finished files.) If a
pass is interrupted, the published version does not change, and the next pass resumes without computing finished rows
again.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.images.image_list import Images, are_frames, suffixes_of
from extract.images.named_images import NamedImages, named_images
from extract.images.part_names import file_of, fragment_of
from extract.images.sources import Files
from extract.row_status import Status
from extract.store.format.dataset import DataSet, remove_strays
from extract.store.format.differences import changes, differences
from extract.store.format.version import pass_folder
from extract.sync.compaction import compact_passes, rewrite
from extract.sync.difference import (
    Candidate,
    Difference,
    Guards,
    Report,
    Resolved,
    ScannedFolder,
    StoppedError,
    compare,
    difference,
    is_settled,
    time_before,
)
from extract.sync.records import Records, load, publish, row_numbers, stored_rows
from extract.sync.scan import NO_FILE, Scan, ScannedFile, has_changed
from extract.system.atomic_files import kept, locked, own_folder

if TYPE_CHECKING:
    from extract.extraction.plan import Plan
    from extract.extraction.settings import ExtractionSettings

__all__ = ["Pass", "VanishedError"]

_RECHECKED = 16  # stored rows that are computed again when library versions have changed
_MAX_DEAD = 0.5  # share of dead rows above which a pass is rewritten without them
# What passes and schedulers write; earlier versions of layertap wrote a manifest. A killed pass may also leave names
# that end in .new.
_OURS = {".lock", "passes", "versions", "runs.jsonl", "schedule.json", "probe", "report.html"}


class VanishedError(LayertapError):
    """So many files are gone that the folder itself is probably unavailable."""


@dataclass
class Pass:
    """A pass that updates the data set `out` to match the folder `root`.

    Attributes:
        root: the folder.
        out: folder of the data set; created if it does not exist.
        plan_for: returns the plan for computing features of images into a folder; called only if there are images to
            compute or `configuration` has changed.
        configuration: the requested settings that the features depend on.
        parts: settings that ask for rows that are parts of files, but no boxes; None: rows are whole files.
        without: images of the folder to leave out; see `named_images`.
        guards: safety limits.
        force: proceed even if most files are gone or the data set belongs to another folder.
        dry_run: report what a pass would do, without changing the data set.
        on_plan: called before images are computed, with the plan and the number of images.
        on_rows: see `extract.extraction.run.extract`.
        on_computation: see `extract.extraction.run.extract`.
        stop: see `extract.extraction.run.extract`.
        now_ns: returns the current time.
        report: what the pass has done.
        published: the data set as it is published.
    """

    root: str
    out: Path
    plan_for: Callable[[Images, Path], Plan]
    configuration: dict[str, Any]
    parts: ExtractionSettings | None = None
    without: Any = None
    guards: Guards = field(default_factory=Guards)
    force: bool = False
    dry_run: bool = False
    on_plan: Callable[[Plan, int], None] = lambda plan, count: None
    on_rows: Callable[[int, bool], None] = lambda rows, stored: None
    on_computation: Callable[[Any], None] = lambda computation: None
    stop: Callable[[], bool] = lambda: False
    now_ns: Callable[[], int] = time.time_ns
    report: Report = field(init=False)
    published: DataSet | None = field(init=False)

    def run(self) -> Report:
        """Run the pass.

        Raises:
            VanishedError: all files, or a larger share of them than `Guards.max_vanish`, are gone; their rows were
                kept.
            InputError: the folder has no images, or `out` holds other features, another folder's data set or other
                files.
            LockedError: another process writes to `out`.
            LayertapError: the folder cannot be read, the disk is full, an image source or the backbone fails, or
                changed libraries compute other features.
        """
        start = time.perf_counter()
        self.report, self.published = Report(dry_run=self.dry_run), None
        self._named = NamedImages("", {}) if self.without is None else named_images(self.without)
        if self.parts and (named := next((name for name in self._named.names if fragment_of(name)), None)):
            raise InputError(
                f"without: {self._named.where} names a part, {named}; of parts, sync leaves out whole files",
                hint=f"name {file_of(named)}",
            )
        self._check_out()
        try:
            # A dry run takes a shared lock. It needs a file that is open for reading only, so nothing in `out` changes,
            # and it keeps passes out while it reads. They cannot name a dry run that they meet.
            with (kept if self.dry_run else locked)(self.out):
                self._check_out()
                if not self.dry_run:
                    remove_strays(self.out)
                    own_folder(self.out / "passes")
                self._run(load(self.out, self.published, self.now_ns()))
        except StoppedError:
            self.report.stopped = True
        self.report.seconds = time.perf_counter() - start
        return self.report

    def _check_out(self) -> None:
        """Check that the output folder is empty or holds a data set that passes over this folder have written.

        Raises:
            InputError: the output folder holds something else.
        """
        if (self.out / "dataset.json").exists():
            self.published = DataSet.open(self.out)
            if self.published.version is None:
                raise InputError(
                    f"{self.out} holds a data set of `layertap embed`", hint="choose another output folder"
                )
            if (synced_root := self.published.images["root"]) != self.root and not self.force:
                exists = Path(self.root).is_dir()
                raise InputError(
                    f"{self.out} is kept in sync with {synced_root}, not with {self.root}"
                    + ("" if exists else ", which does not exist"),
                    hint="if the folder was moved: layertap sync CONFIG --force; otherwise choose another output folder"
                    if exists
                    else "correct `images`",
                )
        elif self.out.is_dir() and any(
            entry.name not in _OURS and not entry.name.endswith(".new") and not entry.name.startswith("manifest.sqlite")
            for entry in self.out.iterdir()
        ):
            raise InputError(
                f"{self.out} is not empty and not a data set of `layertap sync`", hint="choose another output folder"
            )

    def _run(self, records: Records) -> None:
        if records.made_again:
            self.report.notes.append(f"the records of files were made again from the passes: {records.made_again}")
        self._repair_passes(records)
        self._check_parts(records)
        scan = Scan(self.root, suffixes_of(self.parts))
        files = scan.files()
        if self.without is not None:
            files = self._named.others(files, lambda file: os.fsdecode(file.path))
        scanned = compare(files, records, self.guards, self.now_ns)
        self.report.unreadable = scan.unreadable
        for path in scan.unreadable:
            scanned.gone[records.below(os.fsencode(path))] = False
        for path in scan.dangling:
            below = records.below(os.fsencode(path)) & scanned.gone
            scanned.gone[below] = False
            if below.any():
                scan.unreadable[path] = "the target of the link no longer exists"
        if self.without is not None:
            # Later, files that are named may have been deleted.
            if self._named.found or self.published is None:
                self._named.check()
            self.report.notes.append(self._named.note)
        n_files, what = int(scanned.is_first.sum()), "videos" if are_frames(self.parts) else "images"
        if not scanned.n_files and not n_files:
            hint = "images end in .jpg, .png, .tif, .webp and others"
            raise InputError(f"{self.root}: no {what}", hint=hint if what == "images" else "")
        if not scanned.n_files and not self.force:
            raise VanishedError(
                f"{self.root}: none of the {n_files:,} {what} was found; is the disk mounted? Nothing was changed",
                hint="`layertap sync CONFIG --force` confirms the deletion",
            )
        if not self.dry_run:
            self._check_configuration(records)
        self._compute_new_files(records, scanned)
        self.report.failed = records.n_failed
        if self.dry_run:
            return
        self.published = publish(self.out, self.root, records, self.published)
        if self.published is None:
            return
        unused_before_ns = time_before(self.now_ns(), self.guards.keep_gone_s)
        try:
            _, self.published = compact_passes(self.out, records, self.published, _MAX_DEAD, unused_before_ns)
        except LayertapError as error:  # the pass itself is complete; the next pass tries to compact again
            self.report.notes.append(f"passes cannot be compacted: {error}")
        self.report.version = self._published_number()

    def _published_number(self) -> int:
        return self.published.version.number if self.published and self.published.version else 0

    # Preparation

    def _repair_passes(self, records: Records) -> None:
        """Forget missing passes, and rewrite incomplete ones: a pass was interrupted, or `verify` removed rows."""
        for number in records.passes:
            try:
                complete = None not in DataSet.open(pass_folder(self.out, number)).published()
            except InputError:  # the pass is missing, or its dataset.json is damaged
                records.forget_passes([number])
                continue
            if not complete and not self.dry_run:
                rewrite(self.out, records, [number], unused_before_ns=0)
                version = self.published.version if self.published else None
                if version is None or number not in version.passes:  # no reader needs it
                    shutil.rmtree(pass_folder(self.out, number), ignore_errors=True)

    def _check_parts(self, records: Records) -> None:
        """Check that the stored rows are the requested parts of files.

        Raises:
            InputError: they are others.
        """
        asked = self.parts.asked() if self.parts else {}
        stored = self._stored(records)
        self._refuse("parts of files", differences(stored.images.get("parts", {}), asked) if stored else [])
        records.parts = asked

    def _check_configuration(self, records: Records) -> None:
        """Check that the requested features match the stored features, if the configuration has changed.

        Raises:
            InputError: they differ.
        """
        if records.configuration == self.configuration:
            return
        if self.published is not None or len(records.array):
            sample = self._images([b"x#xywh=0,0,1,1" if self.parts else b"x"])
            self._check_fits(records, self.plan_for(sample, self.out / "passes" / "none").dataset)
        records.set_settings(configuration=self.configuration, without_parts={})

    def _check_fits(self, records: Records, dataset: DataSet) -> None:
        stored = self._stored(records)
        self._refuse("features", differences(stored.depends_on, dataset.depends_on) if stored else [])

    def _stored(self, records: Records) -> DataSet | None:
        """Return the published data set, or that of a first pass that was not published."""
        if self.published is None and records.passes:
            return DataSet.open(pass_folder(self.out, records.passes[0]))
        return self.published

    def _refuse(self, what: str, changed: list[str]) -> None:
        if changed:
            raise InputError(
                f"{self.out} holds other {what}; rows with these differences cannot be mixed:\n  "
                + "\n  ".join(changed),
                hint="choose another output folder, or delete this one",
            )

    def _check_versions(self, records: Records, plan: Plan) -> None:
        """If library versions have changed, compute some stored rows again and compare them.

        Raises:
            LayertapError: the features differ.
        """
        computed_with, installed = records.versions, plan.provenance["versions"]
        if computed_with == installed:
            return
        if computed_with and self.published and records.n_failed < records.n_rows:
            from extract.extraction.reproduce import recheck

            rechecked = recheck(self.out, _RECHECKED, images=self.root, backbone=plan.backbone, workers=0)
            changed = ", ".join(f"{name} {old} -> {new}" for name, old, new in changes(computed_with, installed))
            if rechecked.apart:
                raise LayertapError(
                    f"{self.out}: the installed libraries ({changed}) do not reproduce the stored features: "
                    f"{rechecked.apart[0].path}: {rechecked.apart[0].what}",
                    hint="install the earlier versions, or start a new data set",
                )
            if not rechecked.n_rows:  # all sampled images have changed; the next pass checks again
                return
            self.report.notes.append(
                f"libraries have changed: {changed}; {rechecked.n_rows} stored rows, computed again, differ by at most "
                f"{rechecked.largest:.1e} of their largest value"
            )
        records.set_settings(versions=installed)

    # Computation

    def _compute_new_files(self, records: Records, scanned: ScannedFolder) -> None:
        """Compute rows without stored features, and record the rows of each file.

        Raises:
            VanishedError: too many files are gone.
            StoppedError: the pass was stopped on request.
        """
        report, gone = self.report, scanned.gone
        candidates, without_parts = _divided(scanned.candidates, records.without_parts)
        scanned = replace(scanned, candidates=candidates)
        found = difference(self.root, records, scanned, self.guards, report, self.stop, self._rows_of)
        n_files, n_gone = int(scanned.is_first.sum()), int((gone & scanned.is_first).sum())
        gone_files = records.files[gone & scanned.is_first].tolist() if self._named.found else []
        vanished = found.vanished - sum(os.fsdecode(path) in self._named.found for path in gone_files)
        if vanished > self.guards.max_vanish * n_files and not self.force:
            raise VanishedError(
                f"{self.root}: {vanished:,} of {n_files:,} images are gone, more than "
                f"{self.guards.max_vanish:.0%} (max_vanish); is the disk mounted? Nothing was changed",
                hint="`layertap sync CONFIG --force` confirms the deletion",
            )
        array, resolved, late = records.array, found.resolved, set[bytes]()
        if self.dry_run:
            report.computed = len(found.todo)
        elif found.todo:
            array, computed = self._compute_pass(records, found)
            late = {row.file.path for row in set(found.todo) - {each.row for each in computed}}
            resolved = resolved + computed
        if self.parts:  # one state of a file has all of its rows, or none
            late |= {each.file.path for each in found.examined if has_changed(self.root, each.file)}
        examined = [each for each in found.examined if each.file.path not in late]
        resolved = [each for each in resolved if each.row.file.path not in late]
        report.waiting += len(late)
        replaced = gone.copy()
        replaced[[record for each in examined for record in each.records]] = True
        n_emptied = self._count(found, examined, resolved, array)
        report.deleted = n_gone - report.renamed + n_emptied
        report.unchanged = n_files - n_gone - n_emptied - report.changed
        if self.dry_run:
            report.rows = records.n_rows - int(replaced.sum()) + len(resolved) + len(found.todo)
            report.version = self._published_number()
            return
        if self.parts:
            empty = {each.file for each in examined} - {each.row.file for each in resolved}
            without_parts |= {_key(file): _times(file) for file in empty if is_settled(file, scanned.scanned_ns)}
            records.set_settings(without_parts=without_parts)
        if replaced.any() or resolved:
            records.replace(_applied(array, resolved, replaced, scanned.scanned_ns, self.now_ns()))
        report.rows = records.n_rows

    def _count(
        self, found: Difference, examined: list[Candidate], resolved: list[Resolved], array: NDArray[Any]
    ) -> int:
        """Count in the report what has happened to the examined files; return how many have no parts any more."""
        report, hashes = self.report, defaultdict[bytes, set[bytes]](set)
        for (_, file), record in resolved:
            hashes[file.path].add(array["hash"][record].item())
        for _, file in found.todo if self.dry_run else ():
            hashes[file.path].add(b"")  # not known
        n_emptied = 0
        for file, old, is_unchanged in examined:
            if (new := hashes.get(file.path)) is None:
                n_emptied += bool(old)
            elif not old:
                report.renamed += file.path in found.renamed
                report.added += file.path not in found.renamed
            elif b"" in new:  # a row that failed may be tried again
                report.changed += not is_unchanged or bool((array["status"][old] == Status.OK).all())
            else:
                report.changed += new != set(array["hash"][old].tolist())
        return n_emptied

    def _rows_of(self, files: list[ScannedFile]) -> Images:
        """List files, or their parts, sorted by name."""
        images = self._images([file.path for file in files])
        if self.parts:
            from extract.images.parts.listing import parts_of

            images = parts_of(images, self.parts, may_be_none=True)
            self.report.notes += images.notes
        return images

    def _images(self, names: Sequence[bytes]) -> Images:
        paths = [os.fsdecode(name) for name in sorted(names)]
        no_labels = np.full(len(paths), -1, np.int64)
        return Images(self.root, paths, no_labels, [], [""] * len(paths), Files(self.root, paths))

    def _compute_pass(self, records: Records, found: Difference) -> tuple[NDArray[Any], list[Resolved]]:
        """Compute rows as a new pass.

        Args:
            records: the records.
            found: the rows to compute, and the examined files.

        Returns:
            the records and those of the computed rows, and the rows without those of files that have changed since the
            scan.

        Raises:
            InputError: the requested features differ from the stored features.
            StoppedError: the pass was stopped on request.
        """
        from extract.extraction.run import extract

        number, names = records.next_pass(self.out), {os.fsdecode(row.name) for row in found.todo}
        images = found.listed.select([i for i, name in enumerate(found.listed.paths) if name in names])
        plan = self.plan_for(images, pass_folder(self.out, number))
        if records.parts:
            of_parts = replace(plan.dataset, images=plan.dataset.images | {"parts": records.parts})
            plan = replace(plan, dataset=of_parts)
        self._check_fits(records, plan.dataset)
        self._check_versions(records, plan)
        self.on_plan(plan, len(names))
        summary = extract(
            plan,
            has_stored_rows=self.published is not None,
            on_rows=self.on_rows,
            on_computation=self.on_computation,
            on_note=self.report.notes.append,
            stop=self.stop,
        )
        if summary.stopped:
            raise StoppedError
        self.report.computed = summary.computed - summary.duplicates
        now_ns = self.now_ns()
        rows = stored_rows(pass_folder(self.out, number), now_ns)
        array = np.concatenate([records.array, rows])
        stored = {array["path"][i]: i for each in found.examined for i in each.records}
        resolved = []
        for index, todo, row in zip(itertools.count(len(records.array)), found.todo, rows, strict=False):
            if not _is_row_of(row, todo.file):
                continue
            old = stored.get(todo.name)
            same = old is not None and bool(array["hash"][old] == row["hash"])
            if same and row["status"] != Status.OK and array["status"][old] == row["status"]:
                array["tried_ns"][old] = now_ns  # another attempt has failed; its row is as good as the new one
                index = stored[todo.name]
            resolved.append(Resolved(todo, index))
        return array, resolved


def _divided(
    candidates: Sequence[Candidate], without_parts: dict[str, list[int]]
) -> tuple[list[Candidate], dict[str, list[int]]]:
    """Return the candidates, but for files that are known to have no parts; and size and times of these."""
    left, still = list[Candidate](), dict[str, list[int]]()
    for each in candidates:
        times = without_parts.get(_key(each.file)) if without_parts and not each.records else None
        if times is not None and times == _times(each.file):
            still[_key(each.file)] = times
        else:
            left.append(each)
    return left, still


def _key(file: ScannedFile) -> str:
    return os.fsdecode(file.path)


def _times(file: ScannedFile) -> list[int]:
    return [file.size, file.mtime_ns, file.ctime_ns]


def _applied(
    array: NDArray[Any], resolved: Sequence[Resolved], replaced: NDArray[np.bool_], scanned_ns: int, now_ns: int
) -> NDArray[Any]:
    """Return the records after a pass.

    Args:
        array: the records, and those of computed rows.
        resolved: rows of files, with the records that have their features now.
        replaced: (N,) whether each of the first N records is that of such a file, or of one that no longer exists.
        scanned_ns: when the scan began.
        now_ns: since when rows that no file needs any more are not needed.
    """
    paths = np.array([entry.row.name for entry in resolved], "S")
    path_type = np.promote_types(array["path"].dtype, paths.dtype)
    records = np.array([entry.record for entry in resolved], np.int64)
    new = array[records].astype([("path", path_type), *array.dtype.descr[1:]])
    new["path"] = paths
    for name in ("size", "mtime_ns", "ctime_ns"):
        new[name] = [getattr(entry.row.file, name) for entry in resolved]
    new["settled"] = [is_settled(entry.row.file, scanned_ns) for entry in resolved]
    stays = array["path"] != b""
    stays[: len(replaced)] &= ~replaced
    files = np.concatenate([array[stays], new])
    others = array[~stays & (array["status"] == Status.OK)]
    others["tried_ns"][others["path"] != b""] = now_ns
    others["path"] = b""
    others = others[~np.isin(row_numbers(others), row_numbers(files))]
    return np.concatenate([files, others[np.unique(row_numbers(others), return_index=True)[1]]])


def _is_row_of(row: np.void, file: ScannedFile) -> bool:
    """Return whether a row was computed from the file as it was scanned."""
    if row["size"] >= 0:
        return bool(row["size"] == file.size and row["mtime_ns"] == file.mtime_ns)
    return bool(row["status"] != Status.MISSING) or file.size == NO_FILE  # else it was deleted during the computation
