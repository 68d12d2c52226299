"""The manifest `manifest.sqlite`: what is known about each file of a folder. Only the process with the lock opens it.

For each path, the manifest records which bytes the file had when it was last examined, and where their features are. A
lost or damaged manifest is rebuilt from the passes, without computing any image again.

    features   a stored row: hash and size of the image's bytes, pass and row, status, time of the last attempt, and the
               time since which no file needs the row
    files      a path: size and times when it was examined, whether a later change must alter these, and its feature
    waiting    a file that may still be being written, and the time since which its size and times are unchanged
    planned    the rows of a started pass, in order
    meta       format: format of the file; version: number of the recorded state; configuration: the requested settings
               of the features; versions: library versions of the last computation; passes: last pass number in use;
               planned_pass: number of the started pass
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from extract.errors import LayertapError
from extract.row_status import Status
from extract.sync.scan import ScannedFile
from extract.system.atomic_files import check_regular, make_own
from extract.system.json_files import parse_json
from extract.system.leftovers import temporary_folder

__all__ = ["Candidate", "FeatureRow", "Manifest", "PlannedFile", "StoredRow"]

_FORMAT = 1
_SCHEMA = """
    CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE features(
        id INTEGER PRIMARY KEY, hash BLOB NOT NULL, size INTEGER NOT NULL, pass INTEGER NOT NULL, row INTEGER NOT NULL,
        status INTEGER NOT NULL, tried_ns INTEGER NOT NULL, unused_since_ns INTEGER, UNIQUE(pass, row));
    CREATE INDEX features_by_hash ON features(hash);
    CREATE INDEX features_by_size ON features(size);
    CREATE TABLE files(
        path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
        settled INTEGER NOT NULL, feature INTEGER NOT NULL) WITHOUT ROWID;
    CREATE INDEX files_by_feature ON files(feature);
    CREATE TABLE waiting(
        path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, since_ns INTEGER) WITHOUT ROWID;
    CREATE TABLE planned(position INTEGER PRIMARY KEY, path BLOB, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER,
        settled INTEGER);
"""
_SEEN = """
    CREATE TEMP TABLE seen(path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER) WITHOUT ROWID;
"""


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


class Manifest:
    """The manifest of a data set; a context manager.

    Args:
        out: folder of the data set.
        copy: open a copy in memory, which is discarded on exit.
        rebuild_because: what is wrong with the existing file; if not empty, the file is set aside and an empty
            manifest is created.

    Raises:
        InputError: the file, or a file of SQLite beside it, is not a regular file.
        LayertapError: the file cannot be opened or replaced.
    """

    def __init__(self, out: Path, *, copy: bool = False, rebuild_because: str = ""):
        self._out = out
        self._path: Path | None = None if copy else out / "manifest.sqlite"
        self.rebuilt_because = ""
        _make_safe(out / "manifest.sqlite", only_read=copy)
        try:
            if rebuild_because:
                self.recreate(rebuild_because)
            else:
                self._open()
            if copy and (out / "manifest.sqlite").exists():
                self._copy_from(out / "manifest.sqlite")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise LayertapError(f"cannot open {out / 'manifest.sqlite'}: {error}") from error
            self.recreate(str(error))

    def _open(self) -> None:
        is_new = self._path is None or not self._path.exists()
        self._sql = sqlite3.connect(self._path or ":memory:", isolation_level=None)
        try:
            self._sql.execute("PRAGMA trusted_schema = OFF")  # an untrusted file may contain triggers
            self._sql.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._sql.execute("PRAGMA journal_mode = WAL")
            self._sql.execute("PRAGMA synchronous = FULL")
            self._sql.execute("PRAGMA cache_size = -65536")
            if is_new or not self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                with self.transaction():
                    for statement in _SCHEMA.split(";")[:-1]:
                        self._sql.execute(statement)
                    self._set("format", _FORMAT)
            elif self._get("format", 0) != _FORMAT:
                raise sqlite3.DatabaseError(f"it has format {self._get('format', 0)}, expected {_FORMAT}")
            self._sql.executescript(_SEEN)
        except BaseException:
            self._sql.close()
            raise

    def _copy_from(self, path: Path) -> None:
        # Even reading may write to the file, because SQLite checkpoints a WAL into it. Therefore copy the files first.
        with temporary_folder(Path(tempfile.gettempdir()) / "layertap-manifest") as folder:
            for suffix in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(path.with_name(path.name + suffix), folder / (path.name + suffix))
            with contextlib.closing(sqlite3.connect(folder / path.name)) as source:
                source.backup(self._sql)
        if self._get("format", 0) != _FORMAT:
            raise sqlite3.DatabaseError(f"it has format {self._get('format', 0)}, expected {_FORMAT}")

    def recreate(self, reason: str) -> None:
        """Set the file aside and create an empty manifest; `rebuild` fills it."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._sql.close()
        self.rebuilt_because = reason
        if self._path is None:
            self._open()
            return
        try:
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._path.replace(self._path.with_name(self._path.name + ".damaged"))
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise LayertapError(f"{self._path} is damaged ({reason}) and cannot be replaced: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sql.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager: commit the changes of the block, or roll back all of them on an error."""
        try:
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._sql.execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:  # after some errors, SQLite has rolled back by itself
                    self._sql.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise LayertapError(f"cannot write to {self._path}: {error}") from error

    # Numbers and settings

    def _get(self, name: str, default: Any) -> Any:
        row = self._sql.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if row is None else row[0]

    def _number(self, name: str) -> int:
        value = self._get(name, 0)
        if not isinstance(value, int):
            raise sqlite3.DatabaseError(f"its {name} is {str(value)[:40]!r}, expected a number")
        return value

    def _object(self, name: str) -> dict[str, Any]:
        try:
            return parse_json(str(self._get(name, "{}")).encode(), name)
        except ValueError as error:
            raise sqlite3.DatabaseError(str(error)) from error

    def _set(self, name: str, value: Any) -> None:
        self._sql.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    @property
    def version(self) -> int:
        """Version number of the recorded state, which may still have to be published."""
        return self._number("version")

    @version.setter
    def version(self, number: int) -> None:
        self._set("version", number)

    @property
    def configuration(self) -> dict[str, Any]:
        """Settings of the features that the last pass requested; empty if there was no pass."""
        return self._object("configuration")

    @configuration.setter
    def configuration(self, values: dict[str, Any]) -> None:
        self._set("configuration", json.dumps(values))

    @property
    def versions(self) -> dict[str, Any]:
        """Library versions of the last computation; empty if there was none."""
        return self._object("versions")

    @versions.setter
    def versions(self, values: dict[str, Any]) -> None:
        self._set("versions", json.dumps(values))

    def next_pass(self) -> int:
        """Return and reserve a number that no pass has used."""
        folders = (self._out / "passes").glob("[0-9]" * 6)
        number = max(self._number("passes"), *self.passes(), *(int(folder.name) for folder in folders), 0) + 1
        with self.transaction():
            self._set("passes", number)
        return number

    def clear(self) -> None:
        """Delete all rows and files."""
        for table in ("features", "files", "waiting", "planned"):
            self._sql.execute(f"DELETE FROM {table}")

    # Scanned files

    def record_scan(self, files: Iterable[ScannedFile]) -> int:
        """Record the files of a scan; return their number."""
        with self.transaction():
            self._sql.execute("DELETE FROM seen")
            self._sql.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", files)
        return int(self._sql.execute("SELECT count(*) FROM seen").fetchone()[0])

    def keep_below(self, folder: bytes) -> int:
        """Mark the files at or below a path that cannot be read as scanned and unchanged; return their number."""
        with self.transaction():
            cursor = self._sql.execute(
                "INSERT OR IGNORE INTO seen SELECT path, size, mtime_ns, ctime_ns FROM files "
                "WHERE path = ? OR (path >= ? AND path < ?)",
                (folder, folder + b"/", folder + b"0"),  # "0" is the byte after "/"
            )
        return cursor.rowcount

    def matches_scan(self, file: ScannedFile) -> bool:
        """Return whether the last scan saw the file with this size and these times."""
        scanned = self._sql.execute("SELECT size, mtime_ns, ctime_ns FROM seen WHERE path = ?", file[:1]).fetchone()
        return bool(scanned == file[1:])

    def files_to_examine(self, retry_before_ns: int, unread_before_ns: int) -> Iterator[Candidate]:
        """Yield files that are new, may have changed, or have failed and are due for a retry, sorted by path.

        Args:
            retry_before_ns: failed rows are due if their last attempt was before this time; rows with an I/O error are
                always due.
            unread_before_ns: the same for files that could not be read at all.
        """
        rows = self._sql.execute(
            "SELECT s.path, s.size, s.mtime_ns, s.ctime_ns, x.id, x.hash, x.status, x.tried_ns, "
            "f.size = s.size AND f.mtime_ns = s.mtime_ns AND f.ctime_ns = s.ctime_ns "
            "FROM seen s LEFT JOIN files f ON f.path = s.path LEFT JOIN features x ON x.id = f.feature "
            "WHERE x.id IS NULL OR NOT f.settled OR f.size != s.size OR f.mtime_ns != s.mtime_ns "
            "OR f.ctime_ns != s.ctime_ns OR x.status = ? "
            "OR (x.status != ? AND x.tried_ns < iif(x.size < 0 AND s.size >= 0, ?, ?)) "
            "ORDER BY s.path",
            (int(Status.IO_ERROR), int(Status.OK), unread_before_ns, retry_before_ns),
        )
        for *file, row_id, content, status, tried_ns, unchanged in rows:
            recorded = None if row_id is None else FeatureRow(row_id, content, status, tried_ns)
            yield Candidate(ScannedFile(*file), recorded, bool(unchanged))

    def gone(self) -> list[tuple[bytes, bytes]]:
        """Return recorded paths that the scan did not see, with the hashes of their images."""
        return self._sql.execute(
            "SELECT f.path, x.hash FROM files f JOIN features x ON x.id = f.feature "
            "LEFT JOIN seen s ON s.path = f.path WHERE s.path IS NULL"
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
        cursor = self._sql.execute(
            "SELECT count(*) FROM files f JOIN features x ON x.id = f.feature WHERE x.status != ?", (int(Status.OK),)
        )
        return int(cursor.fetchone()[0])

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

    def add_pass(self, number: int, rows: Iterable[StoredRow], now_ns: int) -> list[int]:
        """Add the rows of a pass; return their ids, in order."""
        ids = []
        for content, size, _, row, status in rows:
            cursor = self._sql.execute(
                "INSERT INTO features(hash, size, pass, row, status, tried_ns, unused_since_ns) VALUES (?,?,?,?,?,?,?)",
                (content, size, number, row, status, now_ns, now_ns),
            )
            ids.append(int(cursor.lastrowid or 0))
        return ids

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

    # Files

    def set_files(self, files: Iterable[tuple[ScannedFile, bool, int]]) -> None:
        """Record files: the file as scanned, whether a later change must alter its times, and its feature."""
        self._sql.executemany(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)",
            ((*file, int(settled), feature) for file, settled, feature in files),
        )

    def remove_files(self, paths: Iterable[bytes]) -> None:
        """Delete the records of paths."""
        self._sql.executemany("DELETE FROM files WHERE path = ?", ((path,) for path in paths))

    def record_unused(self, now_ns: int) -> None:
        """Record since when no file has needed a row; delete unneeded rows that failed."""
        used = "id IN (SELECT feature FROM files)"
        self._sql.execute(f"DELETE FROM features WHERE status != ? AND NOT {used}", (int(Status.OK),))
        self._sql.execute(
            f"UPDATE features SET unused_since_ns = ? WHERE unused_since_ns IS NULL AND NOT {used}", (now_ns,)
        )
        self._sql.execute(f"UPDATE features SET unused_since_ns = NULL WHERE unused_since_ns IS NOT NULL AND {used}")

    def rows(self) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over the rows of the data set as (path, pass, row), sorted by pass, row and path."""
        return iter(
            self._sql.execute(
                "SELECT f.path, x.pass, x.row FROM files f JOIN features x ON x.id = f.feature "
                "ORDER BY x.pass, x.row, f.path"
            )
        )

    def sizes_of_passes(self, unused_before_ns: int) -> dict[int, tuple[int, int]]:
        """Return pass -> (rows to keep, all recorded rows).

        Args:
            unused_before_ns: rows that no file has needed since before this time are not kept.
        """
        rows = self._sql.execute(
            "SELECT pass, sum(unused_since_ns IS NULL OR unused_since_ns >= ?), count(*) FROM features GROUP BY pass",
            (unused_before_ns,),
        )
        return {number: (kept, recorded) for number, kept, recorded in rows}

    def kept_rows(self, number: int, unused_before_ns: int) -> list[tuple[int, int, bytes | None]]:
        """Return the rows of a pass to keep, as (id, row, a path with this row or None), sorted by row."""
        return self._sql.execute(
            "SELECT x.id, x.row, (SELECT min(path) FROM files f WHERE f.feature = x.id) FROM features x "
            "WHERE x.pass = ? AND (x.unused_since_ns IS NULL OR x.unused_since_ns >= ?) ORDER BY x.row",
            (number, unused_before_ns),
        ).fetchall()

    def move_rows(self, ids: Sequence[int], number: int) -> None:
        """Record that rows are now in another pass, in this order."""
        self._sql.executemany(
            "UPDATE features SET pass = ?, row = ? WHERE id = ?",
            ((number, row, row_id) for row, row_id in enumerate(ids)),
        )

    # Waiting files, and the started pass

    def waiting(self) -> dict[bytes, tuple[ScannedFile, int]]:
        """Return path -> (file, time since which its size and times are unchanged), for files left by the last pass."""
        rows = self._sql.execute("SELECT path, size, mtime_ns, ctime_ns, since_ns FROM waiting")
        return {path: (ScannedFile(path, *properties), since_ns) for path, *properties, since_ns in rows}

    def set_waiting(self, files: Iterable[tuple[ScannedFile, int]]) -> None:
        """Replace the waiting files."""
        self._sql.execute("DELETE FROM waiting")
        self._sql.executemany(
            "INSERT INTO waiting VALUES (?, ?, ?, ?, ?)", ((*file, since_ns) for file, since_ns in files)
        )

    def planned(self) -> tuple[int, list[PlannedFile]]:
        """Return the started pass and its rows in order; (0, []) if there is none."""
        cursor = self._sql.execute("SELECT path, size, mtime_ns, ctime_ns, settled FROM planned ORDER BY position")
        rows = [PlannedFile(ScannedFile(*file), bool(settled)) for *file, settled in cursor]
        return (self._number("planned_pass"), rows) if rows else (0, [])

    def set_planned(self, number: int, rows: Sequence[PlannedFile]) -> None:
        """Record a started pass and its rows; an empty `rows` means that no pass is in progress."""
        self._sql.execute("DELETE FROM planned")
        self._sql.executemany(
            "INSERT INTO planned VALUES (?, ?, ?, ?, ?, ?)",
            ((i, *row.file, int(row.settled)) for i, row in enumerate(rows)),
        )
        self._set("planned_pass", number)


def _make_safe(path: Path, only_read: bool) -> None:
    """Ensure that opening the file changes no file elsewhere.

    Raises:
        InputError: the file, or a file of SQLite beside it, is a link or not a regular file.
    """
    for suffix in ("", "-wal", "-shm"):
        (check_regular if only_read else make_own)(path.with_name(path.name + suffix))
    journal = path.with_name(path.name + "-journal")
    # In WAL mode, a manifest never leaves a rollback journal. A planted journal may name any file as its super-journal,
    # and SQLite deletes that file (https://www.sqlite.org/fileformat.html#the_rollback_journal).
    if not only_read and journal.exists():
        journal.replace(journal.with_name(journal.name + ".damaged"))
