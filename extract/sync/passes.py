"""A pass: scan a folder, compute features of new images, and publish a version of the data set that matches the folder.

A data set that follows a folder is a table over ordinary data sets. Each pass computes new images into one of its own,
with the code of `embed`; it never changes afterwards. (Rows marked as dead in shards would change finished files.) If a
pass is interrupted, the published version does not change, and the next pass resumes without computing finished rows
again.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from extract.errors import InputError, LayertapError
from extract.images.image_list import Images
from extract.images.sources import Files
from extract.row_status import Status
from extract.store.format.dataset import DataSet, remove_strays
from extract.store.format.differences import changes, differences
from extract.store.format.version import pass_folder
from extract.sync.compaction import compact_passes, rewrite
from extract.sync.difference import Guards, Resolved, StoppedError, difference, time_before
from extract.sync.drift import Drift, drift_of
from extract.sync.manifest import Manifest, PlannedFile, StoredRow
from extract.sync.manifest_file import is_damage
from extract.sync.publishing import publish, remove_unneeded
from extract.sync.rebuilding import rebuild, stored_rows
from extract.sync.scan import NO_FILE, Scan, ScannedFile
from extract.system.atomic_files import kept, locked

if TYPE_CHECKING:
    from extract.extraction.plan import Plan

__all__ = ["Pass", "Report", "VanishedError"]

_RECHECKED = 16  # stored rows that are computed again when library versions have changed
_MAX_DEAD = 0.5  # share of dead rows above which a pass is rewritten without them
# What passes and schedulers write. A killed pass may also leave names that end in .new.
_OURS = {".lock", "manifest.sqlite", "manifest.sqlite.xxh3", "manifest.sqlite-wal", "manifest.sqlite-shm",
         "manifest.sqlite.damaged", "passes", "versions", "runs.jsonl", "schedule.json", "probe",
         "report.html"}  # fmt: skip


class VanishedError(LayertapError):
    """So many files are gone that the folder itself is probably unavailable."""


@dataclass
class Report:
    """Result of a pass, in numbers of files.

    Attributes:
        added, changed, renamed, deleted: compared with the previous version. A copy of a stored image counts as added,
            but is not computed.
        unchanged: files with unchanged content, including files whose times have changed.
        failed: rows of the new version without valid features.
        waiting: files left for the next pass because they may still be being written.
        computed: images that went through the backbone, or would have in a dry run.
        rows: rows of the data set.
        version: number of the published version; 0 if there is none.
        seconds: duration of the pass.
        unreadable: path below the folder that could not be read -> reason; the rows of its files do not change.
        stopped: whether the pass was stopped on request.
        dry_run: whether the report describes what a pass would do.
        notes: messages for the user.
        drift: differences between the features of new images and the other features.
    """

    added: int = 0
    changed: int = 0
    renamed: int = 0
    deleted: int = 0
    unchanged: int = 0
    failed: int = 0
    waiting: int = 0
    computed: int = 0
    rows: int = 0
    version: int = 0
    seconds: float = 0.0
    unreadable: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    dry_run: bool = False
    notes: list[str] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)


@dataclass
class Pass:
    """A pass that updates the data set `out` to match the folder `root`.

    Attributes:
        root: the folder.
        out: folder of the data set; created if it does not exist.
        plan_for: returns the plan for computing features of images into a folder; called only if there are images to
            compute or `configuration` has changed.
        configuration: the requested settings that the features depend on.
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
        computed_pass: number of the pass that holds the images computed now; 0: none.
    """

    root: str
    out: Path
    plan_for: Callable[[Images, Path], Plan]
    configuration: dict[str, Any]
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
    computed_pass: int = field(init=False)

    def run(self, damage: str = "") -> Report:
        """Run the pass; `damage`: what was found wrong with the manifest, which is then rebuilt.

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
        self.report, self.published, self.computed_pass = Report(dry_run=self.dry_run), None, 0
        self._check_out()
        try:
            # A dry run takes a shared lock. It needs a file that is open for reading only, so nothing in `out` changes,
            # and it keeps passes out while the manifest is copied. They cannot name a dry run that they meet.
            with (kept if self.dry_run else locked)(self.out):
                self._check_out()
                if not self.dry_run:
                    remove_strays(self.out)
                with Manifest(self.out, copy=self.dry_run, rebuild_because=damage) as manifest:
                    self._run(manifest)
        except StoppedError:
            self.report.stopped = True
        except sqlite3.DatabaseError as error:
            if damage or not is_damage(error):
                raise LayertapError(f"{self.out / 'manifest.sqlite'}: {error}") from error
            self.run(damage=str(error))
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
            entry.name not in _OURS and not entry.name.endswith(".new") for entry in self.out.iterdir()
        ):
            raise InputError(
                f"{self.out} is not empty and not a data set of `layertap sync`", hint="choose another output folder"
            )

    def _run(self, manifest: Manifest) -> None:
        self._repair_manifest(manifest)
        scanned_ns = self.now_ns()
        scan = Scan(self.root)
        n_seen = manifest.record_scan(scan.files())
        ended_ns = self.now_ns()
        self.report.unreadable = scan.unreadable
        for path in scan.unreadable:
            manifest.keep_below(os.fsencode(path))
        for path in scan.dangling:
            if manifest.keep_below(os.fsencode(path)):
                scan.unreadable[path] = "the target of the link no longer exists"
        if not n_seen and not manifest.n_files():
            raise InputError(f"{self.root}: no images", hint="images end in .jpg, .png, .tif, .webp and others")
        if not n_seen and not self.force:
            raise VanishedError(
                f"{self.root}: none of the {manifest.n_files():,} images was found; is the disk mounted? Nothing was "
                "changed",
                hint="`layertap sync CONFIG --force` confirms the deletion",
            )
        if not self.dry_run:
            self._check_configuration(manifest)
            self._finish_interrupted(manifest)
        self._compute_new_files(manifest, scanned_ns, ended_ns)
        self.report.failed = manifest.n_failed()
        if self.dry_run:
            return
        self.published = publish(self.out, self.root, manifest, self.published)
        remove_unneeded(self.out, manifest, self.published)
        if self.published is None:
            return
        if self.computed_pass and self.report.rows:
            self.report.drift = drift_of(self.out, manifest, self.computed_pass)
        unused_before_ns = time_before(self.now_ns(), self.guards.keep_gone_s)
        try:
            _, self.published = compact_passes(self.out, manifest, self.published, _MAX_DEAD, unused_before_ns)
        except LayertapError as error:  # the pass itself is complete; the next pass tries to compact again
            self.report.notes.append(f"passes cannot be compacted: {error}")
        self.report.version = self._published_number()

    def _published_number(self) -> int:
        return self.published.version.number if self.published and self.published.version else 0

    # Preparation

    def _repair_manifest(self, manifest: Manifest) -> None:
        """Rebuild a lost or outdated manifest; forget missing passes and rewrite incomplete passes."""
        number = self._published_number()
        if manifest.version < number and not manifest.rebuilt_because:
            if manifest.version or manifest.n_files():
                manifest.recreate(f"it was older than the published version {number}")
            else:
                manifest.rebuilt_because = "it was missing"
        if manifest.rebuilt_because:
            self.report.notes.append(f"manifest.sqlite was rebuilt: {manifest.rebuilt_because}")
            if self.published:
                rebuild(manifest, self.out, self.published, self.now_ns())
                if not self.dry_run:
                    remove_unneeded(self.out, manifest, self.published)
        for pass_number in manifest.passes():
            try:
                complete = None not in DataSet.open(pass_folder(self.out, pass_number)).published()
            except InputError:  # the pass is missing, or its dataset.json is damaged
                with manifest.transaction():
                    manifest.forget_pass(pass_number)
                    manifest.version += 1
                continue
            if not complete and not self.dry_run:  # a repair removed rows from it, or a file is missing
                rewrite(self.out, manifest, [pass_number], unused_before_ns=0)

    def _check_configuration(self, manifest: Manifest) -> None:
        """Check that the requested features match the stored features, if the configuration has changed.

        Raises:
            InputError: they differ.
        """
        if manifest.settings("configuration") == self.configuration:
            return
        if self.published is not None or manifest.passes():
            sample = Images(self.root, ["x"], np.full(1, -1), [], [""], Files(self.root, ["x"]))
            self._check_fits(manifest, self.plan_for(sample, self.out / "passes" / "none").dataset)
        manifest.set_settings("configuration", self.configuration)

    def _check_fits(self, manifest: Manifest, dataset: DataSet) -> None:
        stored = self.published
        if stored is None and (passes := manifest.passes()):  # of a first pass that was killed before it published
            stored = DataSet.open(pass_folder(self.out, passes[0]))
        if stored and (changed := differences(stored.depends_on, dataset.depends_on)):
            raise InputError(
                f"{self.out} holds other features; rows with these differences cannot be mixed:\n  "
                + "\n  ".join(changed),
                hint="choose another output folder, or delete this one",
            )

    def _check_versions(self, manifest: Manifest, plan: Plan) -> None:
        """If library versions have changed, compute some stored rows again and compare them.

        Raises:
            LayertapError: the features differ.
        """
        computed_with, installed = manifest.settings("versions"), plan.provenance["versions"]
        if computed_with == installed:
            return
        if computed_with and self.published and manifest.n_failed() < manifest.n_files():
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
        manifest.set_settings("versions", installed)

    def _finish_interrupted(self, manifest: Manifest) -> None:
        """Complete an interrupted pass, with the list of files with which it started.

        Files of this list that have changed since are computed as they are now: their rows already have a place.
        """
        number, planned = manifest.planned()
        if not planned:
            return
        folder = pass_folder(self.out, number)
        plan = self._plan(manifest, folder, planned)
        try:
            plan.dataset.check()
        except InputError:  # it has other settings or is damaged; none of its rows is published
            shutil.rmtree(folder, ignore_errors=True)
            with manifest.transaction():
                manifest.set_planned(0, [])
            return
        # Rows of files that have changed or gone since then are recorded by their hashes only.
        resolved = self._compute_pass(manifest, number, planned, plan, accept=manifest.matches_scan)
        self._apply(manifest, resolved, [], changed=True)

    # Computation

    def _compute_new_files(self, manifest: Manifest, scanned_ns: int, ended_ns: int) -> None:
        """Compute files without stored features, and record the row of each file.

        Raises:
            VanishedError: too many files are gone.
            StoppedError: the pass was stopped on request.
        """
        folder_changes = difference(self.root, manifest, self.guards, scanned_ns, ended_ns, self.stop)
        report = self.report
        n_files = manifest.n_files()
        if folder_changes.vanished > self.guards.max_vanish * n_files and not self.force:
            raise VanishedError(
                f"{self.root}: {folder_changes.vanished:,} of {n_files:,} images are gone, more than "
                f"{self.guards.max_vanish:.0%} (max_vanish); is the disk mounted? Nothing was changed",
                hint="`layertap sync CONFIG --force` confirms the deletion",
            )
        # Completing an interrupted pass may have counted files already.
        report.added += folder_changes.added
        report.changed += folder_changes.changed
        report.renamed += folder_changes.renamed
        report.deleted = len(folder_changes.gone) - folder_changes.renamed
        resolved, moved = folder_changes.resolved, folder_changes.moved
        if self.dry_run:
            report.computed = len(folder_changes.todo)
            new = sum(planned.file.path not in folder_changes.stored for planned in folder_changes.todo)
            report.added += new
            report.changed += len(folder_changes.todo) - new - folder_changes.retried
            report.rows = n_files - len(folder_changes.gone) + report.added + report.renamed
            report.version = manifest.version
        else:
            if todo := folder_changes.todo:
                number = manifest.next_pass()
                with manifest.transaction():
                    manifest.set_planned(number, todo)
                plan = self._plan(manifest, pass_folder(self.out, number), todo)
                computed = self._compute_pass(manifest, number, todo, plan)
                accepted = {entry.file.path for entry in computed}
                moved = moved + [entry.file for entry in todo if entry.file.path not in accepted]
                resolved = resolved + computed
            changed = bool(folder_changes.gone) or any(
                (old := folder_changes.stored.get(entry.file.path)) is None or old.id != entry.feature
                for entry in resolved
            )
            self._apply(manifest, resolved, folder_changes.gone, changed=changed)
            report.rows = manifest.n_files()
        report.waiting = folder_changes.waiting + len(moved)
        report.unchanged = report.rows - report.added - report.changed - report.renamed

    def _plan(self, manifest: Manifest, folder: Path, planned: Sequence[PlannedFile]) -> Plan:
        """Return the plan for computing files into a folder.

        Raises:
            InputError: the requested features differ from the stored features.
        """
        paths = [os.fsdecode(planned_file.file.path) for planned_file in planned]
        no_labels = np.full(len(paths), -1, np.int64)
        images = Images(self.root, paths, no_labels, [], [""] * len(paths), Files(self.root, paths))
        plan = self.plan_for(images, folder)
        self._check_fits(manifest, plan.dataset)
        return plan

    def _compute_pass(
        self, manifest: Manifest, number: int, planned: Sequence[PlannedFile], plan: Plan,
        accept: Callable[[ScannedFile], bool] = lambda file: True,
    ) -> list[Resolved]:  # fmt: skip
        """Compute a pass and add its rows to the manifest.

        Returns:
            The files with their rows, without files that have changed since the scan or that `accept` rejects.

        Raises:
            StoppedError: the pass was stopped on request.
        """
        from extract.extraction.run import extract

        self._check_versions(manifest, plan)
        self.on_plan(plan, len(planned))
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
        rows = list(stored_rows(pass_folder(self.out, number)))
        self.computed_pass = number
        self.report.computed += summary.computed - summary.duplicates
        now_ns, resolved = self.now_ns(), []
        with manifest.transaction():
            ids = manifest.add_pass(number, rows, now_ns)
            for planned_file, row, feature in zip(planned, rows, ids, strict=True):
                if not _is_row_of(row, planned_file.file) or not accept(planned_file.file):
                    continue
                old = manifest.feature_of(planned_file.file.path)
                self.report.added += old is None
                self.report.changed += old is not None and old.hash != row.hash
                if old and row.status != Status.OK and old.status == row.status and old.hash == row.hash:
                    manifest.record_retry(old.id, now_ns)
                    feature = old.id
                resolved.append(Resolved(planned_file.file, planned_file.settled, feature, row.hash))
            manifest.set_planned(0, [])
        return resolved

    def _apply(self, manifest: Manifest, resolved: Sequence[Resolved], gone: Sequence[bytes], *, changed: bool) -> None:
        if not resolved and not gone:
            return
        with manifest.transaction():
            manifest.set_files((entry.file, entry.settled, entry.feature) for entry in resolved)
            manifest.remove_files(gone)
            manifest.record_unused(self.now_ns())
            if changed:
                manifest.version += 1


def _is_row_of(row: StoredRow, file: ScannedFile) -> bool:
    """Return whether a row was computed from the file as it was scanned."""
    if row.size >= 0:
        return (row.size, row.mtime_ns) == (file.size, file.mtime_ns)
    return row.status != Status.MISSING or file.size == NO_FILE  # else the file was deleted during the computation
