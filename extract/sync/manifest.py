"""The manifest `manifest.sqlite`: what is known about each file of a folder. Only the process with the lock opens it.

For each path, the manifest records which bytes the file had when it was last examined, and where their features are.
Features belong to bytes, not to paths: rename, copy, swap and restore are one case. A lost or damaged manifest is
rebuilt from the passes, without computing any image again; nothing is recorded in it alone.

    features   a stored row: hash and size of the image's bytes, pass and row, status, time of the last attempt, and the
               time since which no file needs the row
    files      a path: size, times and hash when it was examined, whether a later change must alter these, and its
               feature
    planned    the rows of a started pass, in order
    meta       format: format of the file; version: number of the recorded state; configuration: the requested settings
               of the features; versions: library versions of the last computation; passes: last pass number in use;
               planned_pass: number of the started pass

Indexes that were added later (`_ADDED` in `manifest_file.py`) are created when they are missing. Earlier versions of
layertap have a table `changes` and note in `meta` up to which version it is complete; a version that was made here is
later than that, so they do not use it. They rebuild a manifest that was created here: it has no table `waiting`.

SQLite compares a million records in a second, and memory stays flat.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from extract.row_status import Status
from extract.sync.manifest_file import FAILED, ManifestFile
from extract.sync.scan import ScannedFile

__all__ = ["Candidate", "FeatureRow", "Manifest", "PlannedFile", "StoredRow", "batches"]

_ROWS_AT_ONCE = 10_000
_PASSES = 1_000_000  # folders of passes have names of six digits
T = TypeVar("T")


class FeatureRow(NamedTuple):
    """A stored row, looked up by the hash of its image or by a path."""

    id: int
    hash: bytes
    status: int
    tried_ns: int


class Candidate(NamedTuple):
    """A file to examine.

    Attributes:
        file: the file.
        recorded: the row recorded for its path; None if the path is new.
        unchanged: whether size and times are unchanged.
    """

    file: ScannedFile
    recorded: FeatureRow | None
    unchanged: bool


class StoredRow(NamedTuple):
    """A row of a pass, and the image file that was read for it.

    Attributes:
        hash: xxh3-128 of the bytes of the file; zero if it could not be read.
        size: size of the file in bytes; -1 if it could not be read.
        mtime_ns: modification time of the file when it was read.
        row: row in the pass.
        status: status of the row.
    """

    hash: bytes
    size: int
    mtime_ns: int
    row: int
    status: int


class PlannedFile(NamedTuple):
    """A file to compute, and whether a later change must alter its times."""

    file: ScannedFile
    settled: bool


class Manifest(ManifestFile):
    """The manifest of a data set; see `ManifestFile` for its arguments and errors."""

    def next_pass(self) -> int:
        """Return and reserve a number that no pass has used."""
        folders = (self._out / "passes").glob("[0-9]" * 6)
        number = max(self._number("passes"), *self.passes(), *(int(folder.name) for folder in folders), 0) + 1
        if number >= _PASSES:
            raise sqlite3.DatabaseError(f"its last pass is {number - 1}")
        with self.transaction():
            self._set("passes", number)
        return number

    # Scanned files

    def record_scan(self, files: Iterable[ScannedFile]) -> int:
        """Compare the files of a scan with the records, and return their number.

        Both are in the order of path bytes, so one step each decides about a file. For a million unchanged files this
        takes 2.2 s of CPU time and writes nothing; a temporary table and joins took 7.1 s, and wrote 83 MB.

        Args:
            files: the files, in byte order of their paths; a path may be repeated.
        """
        n_files = 0
        with self.transaction():
            self._sql.execute("DELETE FROM found")
            self._sql.execute("DELETE FROM gone")
            # A file that is not settled has no ctime here, so it is never equal to the scanned file.
            records = self._sql.execute(
                "SELECT path, size, mtime_ns, iif(settled, ctime_ns, NULL) FROM files ORDER BY path"
            )
            record, last = records.fetchone(), b""
            for file in files:
                path = file[0]
                if path <= last:
                    if path == last:  # some file systems list a file twice while its folder changes
                        continue
                    raise ValueError(f"the scan is not in order: {path!r} after {last!r}")
                last = path
                n_files += 1
                while record is not None and record[0] < path:
                    self._sql.execute("INSERT INTO gone(path) VALUES (?)", record[:1])
                    record = records.fetchone()
                if record != file:
                    self._sql.execute("INSERT INTO found VALUES (?, ?, ?, ?)", file)
                if record is not None and record[0] == path:
                    record = records.fetchone()
            while record is not None:
                self._sql.execute("INSERT INTO gone(path) VALUES (?)", record[:1])
                record = records.fetchone()
        return n_files

    def keep_below(self, folder: bytes) -> int:
        """Keep the records at or below a path that cannot be read; return the number of those not kept before."""
        with self.transaction():
            cursor = self._sql.execute(
                "UPDATE gone SET kept = 1 WHERE NOT kept AND (path = ? OR (path >= ? AND path < ?))",
                (folder, folder + b"/", folder + b"0"),  # "0" is the byte after "/"
            )
        return cursor.rowcount

    def matches_scan(self, file: ScannedFile) -> bool:
        """Return whether the last scan saw the file with this size and these times."""
        for table in ("found", "files"):  # a file that was not found is as it is recorded
            properties = f"SELECT size, mtime_ns, ctime_ns FROM {table} WHERE path = ?"
            if (scanned := self._sql.execute(properties, file[:1]).fetchone()) is not None:
                gone = self._sql.execute("SELECT 1 FROM gone WHERE path = ?", file[:1]).fetchone()
                return bool(scanned == file[1:]) and gone is None
        return False

    def files_to_examine(self, retry_before_ns: int, unread_before_ns: int) -> Iterator[Candidate]:
        """Yield files that are new, may have changed, or have failed and are due for a retry, sorted by path.

        Args:
            retry_before_ns: failed rows are due if their last attempt was before this time; rows with an I/O error are
                always due.
            unread_before_ns: the same for files that could not be read at all.
        """
        is_due = f"x.{FAILED} AND (x.status = ? OR x.tried_ns < iif(x.size < 0 AND f.size >= 0, ?, ?))"
        due = (int(Status.IO_ERROR), unread_before_ns, retry_before_ns)
        self._sql.execute(
            "INSERT OR IGNORE INTO found SELECT f.path, f.size, f.mtime_ns, f.ctime_ns "
            f"FROM features x CROSS JOIN files f ON f.feature = x.id WHERE {is_due} "
            "AND f.path NOT IN (SELECT path FROM gone)",
            due,
        )
        rows = self._sql.execute(
            "SELECT s.path, s.size, s.mtime_ns, s.ctime_ns, x.id, x.hash, x.status, x.tried_ns, "
            "f.size = s.size AND f.mtime_ns = s.mtime_ns AND f.ctime_ns = s.ctime_ns "
            "FROM found s LEFT JOIN files f ON f.path = s.path LEFT JOIN features x ON x.id = f.feature "
            "WHERE x.id IS NULL OR NOT f.settled OR f.size != s.size OR f.mtime_ns != s.mtime_ns "
            f"OR f.ctime_ns != s.ctime_ns OR ({is_due.replace('f.size', 's.size')}) ORDER BY s.path",
            due,
        )
        for *file, row_id, content, status, tried_ns, unchanged in rows:
            recorded = None if row_id is None else FeatureRow(row_id, content, status, tried_ns)
            yield Candidate(ScannedFile(*file), recorded, bool(unchanged))

    def gone(self) -> list[tuple[bytes, bytes]]:
        """Return recorded paths that the scan did not see, with the hashes of their images."""
        return self._sql.execute(
            "SELECT f.path, x.hash FROM gone g CROSS JOIN files f ON f.path = g.path "
            "CROSS JOIN features x ON x.id = f.feature WHERE NOT g.kept"
        ).fetchall()

    def feature_of(self, path: bytes) -> FeatureRow | None:
        """Return the row recorded for a path; None if the path is new."""
        row = self._sql.execute(
            "SELECT x.id, x.hash, x.status, x.tried_ns FROM files f JOIN features x ON x.id = f.feature "
            "WHERE f.path = ?",
            (path,),
        ).fetchone()
        return None if row is None else FeatureRow(*row)

    def n_failed(self) -> int:
        """Return the number of rows of the data set without valid features."""
        failed = f"SELECT count(*) FROM features x CROSS JOIN files f ON f.feature = x.id WHERE x.{FAILED}"
        return int(self._sql.execute(failed).fetchone()[0])

    def n_files(self) -> int:
        """Return the number of rows of the data set."""
        return int(self._sql.execute("SELECT count(*) FROM files").fetchone()[0])

    # Features

    def has_size(self, size: int) -> bool:
        """Return whether any stored image has this size in bytes; if not, no stored image can be identical."""
        return self._sql.execute("SELECT 1 FROM features WHERE size = ? LIMIT 1", (size,)).fetchone() is not None

    def find_by_hash(self, content: bytes) -> FeatureRow | None:
        """Return a stored row with this hash, preferably with status OK; None if there is none."""
        row = self._sql.execute(
            "SELECT id, hash, status, tried_ns FROM features WHERE hash = ? "
            "ORDER BY status != ?, tried_ns DESC LIMIT 1",
            (content, int(Status.OK)),
        ).fetchone()
        return None if row is None else FeatureRow(*row)

    def find_row(self, number: int, row: int) -> tuple[int, bytes] | None:
        """Return the id of a row of a pass, and the hash of its image; None if it is not recorded."""
        query = "SELECT id, hash FROM features WHERE pass = ? AND row = ?"
        recorded: tuple[int, bytes] | None = self._sql.execute(query, (number, row)).fetchone()
        return recorded

    def add_pass(self, number: int, rows: Iterable[StoredRow], now_ns: int) -> range:
        """Add the rows of a pass; return their ids, in order."""
        first = self._sql.execute("SELECT ifnull(max(id), 0) + 1 FROM features").fetchone()[0]
        ids = itertools.count(first)
        cursor = self._sql.executemany(
            "INSERT INTO features(id, hash, size, pass, row, status, tried_ns, unused_since_ns) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            ((next(ids), content, size, number, row, status, now_ns, now_ns) for content, size, _, row, status in rows),
        )
        return range(first, first + max(0, cursor.rowcount))

    def record_retry(self, feature: int, now_ns: int) -> None:
        """Record that another attempt at a row has failed."""
        self._sql.execute("UPDATE features SET tried_ns = ? WHERE id = ?", (now_ns, feature))

    def passes(self) -> list[int]:
        """Return the passes that have rows in the manifest, ascending."""
        return [number for (number,) in self._sql.execute("SELECT DISTINCT pass FROM features ORDER BY pass")]

    def forget_pass(self, number: int) -> None:
        """Delete the rows of a pass, and the files with these rows."""
        self._sql.execute("DELETE FROM files WHERE feature IN (SELECT id FROM features WHERE pass = ?)", (number,))
        self._sql.execute("DELETE FROM features WHERE pass = ?", (number,))

    def replace_passes(self, passes: Sequence[int], ids: Iterable[int], number: int) -> None:
        """Record that some rows of passes are now in another pass, in this order; forget the other rows."""
        self._sql.executemany(
            "UPDATE features SET pass = ?, row = ? WHERE id = ?",
            ((number, row, row_id) for row, row_id in enumerate(ids)),
        )
        for old_pass in passes:
            self.forget_pass(old_pass)

    # Files

    def set_files(self, files: Iterable[tuple[ScannedFile, bool, int]]) -> None:
        """Record files: the file as scanned, whether a later change must alter its times, and its feature."""
        self._sql.executemany(
            "INSERT OR REPLACE INTO files SELECT ?, ?, ?, ?, ?, id, hash FROM features WHERE id = ?",
            ((*file, int(settled), feature) for file, settled, feature in files),
        )

    def remove_files(self, paths: Iterable[bytes]) -> None:
        """Delete the records of paths."""
        self._sql.executemany("DELETE FROM files WHERE path = ?", ((path,) for path in paths))

    def record_unused(self, now_ns: int) -> None:
        """Record since when no file has needed a row; delete unneeded rows that failed."""
        used = "EXISTS (SELECT 1 FROM files WHERE feature = features.id)"  # with IN, SQLite may read all files
        self._sql.execute(f"DELETE FROM features WHERE {FAILED} AND NOT {used}")
        self._sql.execute(
            f"UPDATE features SET unused_since_ns = ? WHERE unused_since_ns IS NULL AND NOT {used}", (now_ns,)
        )
        self._sql.execute(f"UPDATE features SET unused_since_ns = NULL WHERE unused_since_ns IS NOT NULL AND {used}")

    # Rows of a version

    def paths(self) -> Iterator[bytes]:
        """Iterate over the paths of the data set, in their byte order."""
        return (path for (path,) in self._sql.execute("SELECT path FROM files ORDER BY path"))

    def longest_path(self) -> int:
        """Return the length of the longest path in bytes."""
        return int(self._sql.execute("SELECT ifnull(max(length(path)), 0) FROM files").fetchone()[0])

    def rows(self) -> Iterator[tuple[bytes, int, int, bytes]]:
        """Iterate over the rows of the data set, sorted by pass, row and path.

        Each is (path, pass, row, hash of the image as the file with this path was examined).
        """
        return iter(self._sql.execute(  # in the order of two indexes, so that nothing is sorted
            "SELECT f.path, x.pass, x.row, f.hash FROM features x CROSS JOIN files f ON f.feature = x.id "
            "ORDER BY x.pass, x.row, f.path"
        ))  # fmt: skip

    def sizes_of_passes(self, unused_before_ns: int) -> dict[int, tuple[int, int]]:
        """Return pass -> (rows to keep, all recorded rows).

        Args:
            unused_before_ns: rows that no file has needed since before this time are not kept.
        """
        kept = "unused_since_ns IS NULL OR unused_since_ns >= ?"
        rows = self._sql.execute(
            f"SELECT pass, sum({kept}), count(*) FROM features GROUP BY pass ORDER BY pass", (unused_before_ns,)
        )
        return {number: (n_kept, count) for number, n_kept, count in rows}

    def passes_in_use(self) -> list[int]:
        """Return the passes that have rows of files, ascending; `record_unused` must have followed each change."""
        return [number for number, (used, _) in self.sizes_of_passes(1 << 62).items() if used]

    def sample_rows(self, number: int, count: int, *, of_others: bool = False) -> list[tuple[int, int]]:
        """Return rows of a pass, or of all others, with valid features that files need, as (pass, row).

        They are those whose images have the smallest hashes, which does not depend on what the images show. There are
        fewer than `count` if there are no more.
        """
        return self._sql.execute(
            f"SELECT pass, row FROM features WHERE pass {'!=' if of_others else '='} ? AND unused_since_ns IS NULL "
            f"AND NOT {FAILED} ORDER BY hash LIMIT ?",
            (number, count),
        ).fetchall()

    def kept_rows(self, number: int, unused_before_ns: int) -> list[tuple[int, int, bytes | None]]:
        """Return the rows of a pass to keep, as (id, row, a path with this row or None), sorted by row."""
        return self._sql.execute(
            "SELECT x.id, x.row, (SELECT min(path) FROM files f WHERE f.feature = x.id) FROM features x "
            "WHERE x.pass = ? AND (x.unused_since_ns IS NULL OR x.unused_since_ns >= ?) ORDER BY x.row",
            (number, unused_before_ns),
        ).fetchall()

    # The started pass

    def planned(self) -> tuple[int, list[PlannedFile]]:
        """Return the started pass and its rows in order; (0, []) if there is none.

        Raises:
            sqlite3.DatabaseError: the pass is finished.
        """
        cursor = self._sql.execute("SELECT path, size, mtime_ns, ctime_ns, settled FROM planned ORDER BY position")
        rows = [PlannedFile(ScannedFile(*file), bool(settled)) for *file, settled in cursor]
        if not rows:
            return 0, []
        number = self._number("planned_pass")
        if number in self.passes() or not 0 < number < _PASSES:  # a pass that cannot be resumed is deleted
            raise sqlite3.DatabaseError(f"its started pass is {number}, which is finished")
        return number, rows

    def set_planned(self, number: int, rows: Sequence[PlannedFile]) -> None:
        """Record a started pass and its rows; an empty `rows` means that no pass is in progress."""
        self._sql.execute("DELETE FROM planned")
        self._sql.executemany(
            "INSERT INTO planned VALUES (?, ?, ?, ?, ?, ?)",
            ((i, *row.file, int(row.settled)) for i, row in enumerate(rows)),
        )
        self._set("planned_pass", number)


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of some thousands."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, _ROWS_AT_ONCE)):
        yield batch
