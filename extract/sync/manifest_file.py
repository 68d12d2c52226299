"""The file `manifest.sqlite`: its tables, its settings, and how it is opened, copied and replaced."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from extract.errors import LayertapError
from extract.row_status import Status
from extract.store.format.version import hash_of
from extract.system.atomic_files import check_regular, make_own, sync_folder, temporary_folder, write_whole
from extract.system.json_files import parse_json

__all__ = ["FAILED", "ManifestFile", "is_damage"]

_FORMAT = 2
_LARGEST_NUMBER = 1_000_000_000
_SCHEMA = """
    CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE features(
        id INTEGER PRIMARY KEY, hash BLOB NOT NULL, size INTEGER NOT NULL, pass INTEGER NOT NULL, row INTEGER NOT NULL,
        status INTEGER NOT NULL, tried_ns INTEGER NOT NULL, unused_since_ns INTEGER, UNIQUE(pass, row));
    CREATE INDEX features_by_hash ON features(hash);
    CREATE INDEX features_by_size ON features(size);
    CREATE TABLE files(
        path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
        settled INTEGER NOT NULL, feature INTEGER NOT NULL, hash BLOB NOT NULL) WITHOUT ROWID;
    CREATE INDEX files_by_feature ON files(feature);
    CREATE TABLE planned(position INTEGER PRIMARY KEY, path BLOB, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER,
        settled INTEGER);
"""
FAILED = f"status != {int(Status.OK)}"  # as in the index: SQLite uses a partial index for the same words only
_ADDED = f"""
    CREATE INDEX IF NOT EXISTS features_failed ON features(pass) WHERE {FAILED};
"""
# What SQLite does not check by itself: it stores a value of any type in a column. `?`: or NULL.
_TYPES = {
    "features": {"integer": "id size pass row status tried_ns", "integer?": "unused_since_ns", "hash": "hash"},
    "files": {"blob": "path", "integer": "size mtime_ns ctime_ns settled feature", "hash": "hash"},
    "planned": {"integer": "position size mtime_ns ctime_ns settled", "blob": "path"},
    "meta": {"text": "name"},
}
# Errors of the machine, not of the file: https://www.sqlite.org/rescode.html
_OF_MACHINE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip
# found: files of the last scan that are new, may have changed or are due for a retry; gone: recorded paths that it did
# not see, and whether they are kept because it could not read them.
_TEMPORARY = """
    CREATE TEMP TABLE found(path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER) WITHOUT ROWID;
    CREATE TEMP TABLE gone(path BLOB PRIMARY KEY, kept INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
"""


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error means that the file is damaged, and not that the disk is full or cannot be read."""
    code = getattr(error, "sqlite_errorcode", None)  # the module `sqlite3` sets none if a text is not UTF-8
    return code is None or code & 0xFF not in _OF_MACHINE


class ManifestFile:
    """The manifest of a data set, without the methods for its rows; a context manager.

    SQLite has no checksums of its pages: one flipped bit published the features of another image under a path.
    Therefore the hash of the file is written beside it when it is closed, and compared when it is opened (0.15 s for
    a million files). If a process was killed while the file was open, there is no hash: the log of SQLite has
    checksums of its own, and structure, indexes and types are checked (9 s for a million files). Each column that
    decides about a row is in an index, so that SQLite finds a change in one of the two. `publish` compares the hashes
    of images as well. Of 5,000 random bits in manifests of 60 and 20,000 files, none gave a wrong row or an
    unreadable version.

    Args:
        out: folder of the data set.
        copy: open a copy in the folder for temporary files, which is deleted on exit.
        rebuild_because: what is wrong with the existing file; if not empty, the file is set aside and an empty
            manifest is created.

    Raises:
        InputError: the file, or a file of SQLite beside it, is not a regular file.
        LayertapError: the file cannot be opened or replaced.
    """

    def __init__(self, out: Path, *, copy: bool = False, rebuild_because: str = ""):
        self._out, self._path = out, out / "manifest.sqlite"
        self._sum = out / "manifest.sqlite.xxh3"
        self._is_copy = copy
        self.rebuilt_because = ""
        self.was_closed = False
        self._at_exit = contextlib.ExitStack()
        _make_safe(self._path, only_read=copy)
        with contextlib.ExitStack() as on_error:
            on_error.push(self._at_exit)
            try:
                if copy:
                    self._path = self._at_exit.enter_context(_copy_of(self._path))
                if rebuild_because:
                    self.recreate(rebuild_because)
                else:
                    self.was_closed = self._is_as_it_was_closed()
                    self._open_again_if_damaged()
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise LayertapError(f"cannot open {out / 'manifest.sqlite'}: {error}") from error
                self.recreate(str(error))
            except OSError as error:
                raise LayertapError(f"cannot open {out / 'manifest.sqlite'}: {error.strerror}") from error
            on_error.pop_all()

    def _is_as_it_was_closed(self) -> bool:
        """Return whether the file is the one that the last process closed; False if that process was killed.

        Raises:
            sqlite3.DatabaseError: it was closed, and has changed since.
        """
        try:
            with self._sum.open("rb") as file:
                expected = file.read(64).decode("ascii", "replace").strip()
            log = self._path.with_name(self._path.name + "-wal")
            if not self._path.exists() or (log.exists() and log.stat().st_size):
                return False
        except FileNotFoundError:
            return False
        if hash_of(self._path) != expected:
            raise sqlite3.DatabaseError("its bytes have changed since the last pass closed it")
        return True

    def _open_again_if_damaged(self) -> None:
        """Open the file; if it seems to be damaged, once more: SQLite takes some failed reads for damage."""
        try:
            self._open()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self._open()

    def _open(self) -> None:
        is_new = not self._path.exists()
        if not self._is_copy and self._sum.exists():
            self._sum.unlink()
            sync_folder(self._out)
        self._sql = sqlite3.connect(self._path, isolation_level=None)
        try:
            self._sql.execute("PRAGMA trusted_schema = OFF")  # an untrusted file may contain triggers
            self._sql.execute("PRAGMA cell_size_check = ON")
            self._sql.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._sql.execute("PRAGMA journal_mode = WAL")
            self._sql.execute("PRAGMA synchronous = FULL")
            self._sql.execute("PRAGMA cache_size = -65536")
            if is_new or not self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                with self.transaction():
                    for statement in _SCHEMA.split(";")[:-1]:
                        self._sql.execute(statement)
                    self._set("format", _FORMAT)
            elif (number := self._get("format", 0)) != _FORMAT:
                raise sqlite3.DatabaseError(f"it has format {number}, expected {_FORMAT}")
            elif not self.was_closed:  # each column that says which row a file has is in an index
                (fault,) = self._sql.execute("PRAGMA integrity_check(1)").fetchone()
                if fault != "ok":
                    raise sqlite3.DatabaseError(fault)
            with self.transaction():
                for statement in (*_ADDED.split(";")[:-1], *_TEMPORARY.split(";")[:-1]):
                    self._sql.execute(statement)
            if not is_new and not self.was_closed:
                self._check_types()
        except UnicodeDecodeError as error:  # a damaged name in the schema
            self._sql.close()
            raise sqlite3.DatabaseError(str(error)) from error
        except BaseException:
            self._sql.close()
            raise

    def _check_types(self) -> None:
        """Check the types of all values.

        Raises:
            sqlite3.DatabaseError: a value has another type than its column.
        """
        for table, names_of_type in _TYPES.items():
            wrong = []
            for kind, names in names_of_type.items():
                for name in names.split():
                    if kind == "hash":
                        wrong.append(f"typeof({name}) != 'blob' OR length({name}) != 16")
                    else:
                        allowed = "'integer', 'null'" if kind == "integer?" else f"'{kind}'"
                        wrong.append(f"typeof({name}) NOT IN ({allowed})")
            if self._sql.execute(f"SELECT 1 FROM {table} WHERE {' OR '.join(wrong)} LIMIT 1").fetchone():
                raise sqlite3.DatabaseError(f"its table {table} has a value of another type")

    def recreate(self, reason: str) -> None:
        """Set the file aside and create an empty manifest; `rebuild` fills it."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._sql.close()
        self.rebuilt_because, self.was_closed = reason, False
        try:
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._path.replace(self._path.with_name(self._path.name + ".damaged"))
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise LayertapError(f"{self._path} is damaged ({reason}) and cannot be replaced: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: TracebackType | None) -> None:
        # The frames of an error that is kept hold cursors, and with open cursors SQLite keeps the file locked.
        traceback.clear_frames(trace)
        self._sql.close()
        log = self._path.with_name(self._path.name + "-wal")
        # SQLite removes the log when it has written all of it to the file.
        if not self._is_copy and not isinstance(error, sqlite3.Error) and not log.exists():
            with contextlib.suppress(OSError):  # the next pass checks the content instead
                write_whole(self._sum, f"{hash_of(self._path)}\n".encode())
        self._at_exit.close()

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
            if is_damage(error):
                raise sqlite3.DatabaseError(str(error)) from error
            raise LayertapError(f"cannot write to {self._path}: {error}") from error

    # Numbers and settings

    def _get(self, name: str, default: Any) -> Any:
        row = self._sql.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if row is None else row[0]

    def _number(self, name: str) -> int:
        value = self._get(name, 0)
        if not isinstance(value, int) or not 0 <= value < _LARGEST_NUMBER:
            raise sqlite3.DatabaseError(f"its {name} is {str(value)[:40]!r}, expected a number below 1,000,000,000")
        return value

    def settings(self, name: str) -> dict[str, Any]:
        """Return the settings of the last pass by their name in `meta`; empty if there are none."""
        try:
            return parse_json(str(self._get(name, "{}")).encode(), name)
        except ValueError as error:
            raise sqlite3.DatabaseError(str(error)) from error

    def set_settings(self, name: str, values: dict[str, Any]) -> None:
        """Replace settings."""
        with self.transaction():
            self._set(name, json.dumps(values))

    def _set(self, name: str, value: Any) -> None:
        self._sql.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    @property
    def version(self) -> int:
        """Version number of the recorded state, which may still have to be published."""
        return self._number("version")

    @version.setter
    def version(self, number: int) -> None:
        self._set("version", number)


@contextlib.contextmanager
def _copy_of(path: Path) -> Iterator[Path]:
    """Context manager: copy a manifest with its log, and yield the copy; SQLite may write to a file that it reads."""
    with temporary_folder(Path(tempfile.gettempdir()) / "layertap-manifest") as folder:
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path.with_name(path.name + suffix), folder / (path.name + suffix))
        yield folder / path.name


def _make_safe(path: Path, only_read: bool) -> None:
    """Ensure that opening the file changes no file elsewhere.

    Raises:
        InputError: the file, or a file of SQLite beside it, is a link or not a regular file.
    """
    for suffix in ("", "-wal", "-shm", ".xxh3"):
        (check_regular if only_read else make_own)(path.with_name(path.name + suffix))
    journal = path.with_name(path.name + "-journal")
    # In WAL mode, a manifest never leaves a rollback journal. A planted journal may name any file as its super-journal,
    # and SQLite deletes that file (https://www.sqlite.org/fileformat.html#the_rollback_journal).
    if not only_read and journal.exists():
        journal.replace(journal.with_name(journal.name + ".damaged"))
