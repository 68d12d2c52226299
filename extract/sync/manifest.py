"""What is known of each file of a folder: `manifest.sqlite`, which only the process that holds the lock opens.

It says which bytes each path had when it was last looked at, and where the features of these bytes are. It is a help,
not the truth: lost or damaged, it is made anew from the passes, and no image is computed again for that.

    features   a stored row: hash and size of the image's bytes, pass and row, status, when it was last tried, and since
               when no file needs it
    files      a path: size and times when it was looked at, whether these tell a later change, and its feature
    waiting    a file that is still being written, and since when it looks like that
    planned    the rows of a pass that has begun, in order
    meta       version: of what this says; configuration: what the features were asked for with; passes: numbers given
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
from extract.sync.scan import Seen
from extract.system.atomic_files import check_regular, make_own

__all__ = ["Candidate", "Feature", "Manifest", "Planned", "Stored"]

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


class Feature(NamedTuple):
    """A stored row that was found by the hash of its image, or by its path."""

    id: int
    hash: bytes
    status: int
    tried_ns: int


class Candidate(NamedTuple):
    """A file that is to be looked at.

    Attributes:
        seen: the file.
        before: what its path had; None, if it is new.
        same: whether its size and times are as they were.
    """

    seen: Seen
    before: Feature | None
    same: bool


class Stored(NamedTuple):
    """A row of a pass, and the image that was read for it.

    Attributes:
        hash: xxh3-128 of its bytes; zero, where it could not be read.
        size: in bytes; -1, where it could not be read.
        mtime_ns: as it was then.
        row: of the pass.
        status: of the row.
    """

    hash: bytes
    size: int
    mtime_ns: int
    row: int
    status: int


class Planned(NamedTuple):
    """A file whose features are to be computed, and whether its times tell a later change."""

    seen: Seen
    settled: bool


class Manifest:
    """The manifest of one data set; a context manager.

    Args:
        out: folder of the data set.
        copy: only one in memory, which is lost in the end.
        made_anew: what is wrong with the file that is there: it is put aside, and an empty one begun.

    Raises:
        LayertapError: the file cannot be written to.
    """

    def __init__(self, out: Path, *, copy: bool = False, made_anew: str = ""):
        self._out = out
        self._path: Path | None = None if copy else out / "manifest.sqlite"
        self.made_anew = ""
        _make_safe(out / "manifest.sqlite", only_read=copy)
        try:
            if made_anew:
                self.start_anew(made_anew)
            else:
                self._open()
            if copy and (out / "manifest.sqlite").exists():
                self._copy_from(out / "manifest.sqlite")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise LayertapError(f"cannot open {out / 'manifest.sqlite'}: {error}") from error
            self.start_anew(str(error))

    def _open(self) -> None:
        made = self._path is None or not self._path.exists()
        self._sql = sqlite3.connect(self._path or ":memory:", isolation_level=None)
        try:
            self._sql.execute("PRAGMA trusted_schema = OFF")  # whoever made the file may have put triggers into it
            self._sql.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._sql.execute("PRAGMA journal_mode = WAL")
            self._sql.execute("PRAGMA synchronous = FULL")
            self._sql.execute("PRAGMA cache_size = -65536")
            if made or not self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                with self.transaction():
                    for statement in _SCHEMA.split(";")[:-1]:
                        self._sql.execute(statement)
                    self._set("format", _FORMAT)
            elif self._get("format", 0) != _FORMAT:
                raise sqlite3.DatabaseError(f"it is of format {self._get('format', 0)}, not {_FORMAT}")
            self._sql.executescript(_SEEN)
        except BaseException:
            self._sql.close()
            raise

    def _copy_from(self, path: Path) -> None:
        # Even reading may write: SQLite folds a log into the file. So the copy of a copy is taken.
        with tempfile.TemporaryDirectory(prefix="layertap-") as folder:
            for behind in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(path.with_name(path.name + behind), Path(folder) / (path.name + behind))
            with contextlib.closing(sqlite3.connect(Path(folder) / path.name)) as source:
                source.backup(self._sql)
        if self._get("format", 0) != _FORMAT:
            raise sqlite3.DatabaseError(f"it is of format {self._get('format', 0)}, not {_FORMAT}")

    def start_anew(self, why: str) -> None:
        """Put the file aside, and begin with an empty one; `rebuild` fills it."""
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._sql.close()
        self.made_anew = why
        if self._path is None:
            self._open()
            return
        try:
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._path.replace(self._path.with_name(self._path.name + ".damaged"))
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise LayertapError(f"{self._path} is damaged ({why}), and cannot be made anew: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sql.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block, or nothing of it."""
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
        found = self._sql.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return default if found is None else found[0]

    def _set(self, name: str, value: Any) -> None:
        self._sql.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    @property
    def version(self) -> int:
        """Of what this says; the version that is published is the same, or one that is still to be published."""
        return int(self._get("version", 0))

    @version.setter
    def version(self, number: int) -> None:
        self._set("version", number)

    @property
    def configuration(self) -> dict[str, Any]:
        """What the features were asked for with, the last time; empty: never."""
        found: dict[str, Any] = json.loads(self._get("configuration", "{}"))
        return found

    @configuration.setter
    def configuration(self, values: dict[str, Any]) -> None:
        self._set("configuration", json.dumps(values))

    @property
    def versions(self) -> dict[str, Any]:
        """The libraries that computed the last time; empty: it was never."""
        found: dict[str, Any] = json.loads(self._get("versions", "{}"))
        return found

    @versions.setter
    def versions(self, values: dict[str, Any]) -> None:
        self._set("versions", json.dumps(values))

    def next_pass(self) -> int:
        """A number that no pass has had."""
        folders = (self._out / "passes").glob("[0-9]" * 6)
        number = max(int(self._get("passes", 0)), *self.passes(), *(int(folder.name) for folder in folders), 0) + 1
        with self.transaction():
            self._set("passes", number)
        return number

    def clear(self) -> None:
        """Forget all rows and files."""
        for table in ("features", "files", "waiting", "planned"):
            self._sql.execute(f"DELETE FROM {table}")

    # What was seen

    def see(self, files: Iterable[Seen]) -> int:
        """Take over what a scan has found; returns how many files there are."""
        with self.transaction():
            self._sql.execute("DELETE FROM seen")
            self._sql.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", files)
        return int(self._sql.execute("SELECT count(*) FROM seen").fetchone()[0])

    def keep_below(self, folder: bytes) -> int:
        """Take the files below a folder that cannot be read for unchanged; returns how many they are."""
        with self.transaction():
            found = self._sql.execute(
                "INSERT OR IGNORE INTO seen SELECT path, size, mtime_ns, ctime_ns FROM files "
                "WHERE path = ? OR (path >= ? AND path < ?)",
                (folder, folder + b"/", folder + b"0"),  # "0" is what follows "/"
            )
        return found.rowcount

    def is_as_seen(self, one: Seen) -> bool:
        """Whether the last scan saw a file just so."""
        found = self._sql.execute("SELECT size, mtime_ns, ctime_ns FROM seen WHERE path = ?", one[:1]).fetchone()
        return bool(found == one[1:])

    def to_look_at(self, retry_before_ns: int, unread_before_ns: int) -> Iterator[Candidate]:
        """Files that are new, or may have changed, or whose failure is to be tried again, sorted by path.

        Args:
            retry_before_ns: rows that failed, and were tried before that time, are tried again; those with an I/O
                error are given in any case.
            unread_before_ns: the same, of files that could not even be read.
        """
        found = self._sql.execute(
            "SELECT s.path, s.size, s.mtime_ns, s.ctime_ns, x.id, x.hash, x.status, x.tried_ns, "
            "f.size = s.size AND f.mtime_ns = s.mtime_ns AND f.ctime_ns = s.ctime_ns "
            "FROM seen s LEFT JOIN files f ON f.path = s.path LEFT JOIN features x ON x.id = f.feature "
            "WHERE x.id IS NULL OR NOT f.settled OR f.size != s.size OR f.mtime_ns != s.mtime_ns "
            "OR f.ctime_ns != s.ctime_ns OR x.status = ? "
            "OR (x.status != ? AND x.tried_ns < iif(x.size < 0 AND s.size >= 0, ?, ?)) "
            "ORDER BY s.path",
            (int(Status.IO_ERROR), int(Status.OK), unread_before_ns, retry_before_ns),
        )
        for *seen, number, content, status, tried_ns, same in found:
            before = None if number is None else Feature(number, content, status, tried_ns)
            yield Candidate(Seen(*seen), before, bool(same))

    def gone(self) -> list[tuple[bytes, bytes]]:
        """Paths that were there and are not, with the hashes of what they had."""
        return self._sql.execute(
            "SELECT f.path, x.hash FROM files f JOIN features x ON x.id = f.feature "
            "LEFT JOIN seen s ON s.path = f.path WHERE s.path IS NULL"
        ).fetchall()

    def feature_of(self, path: bytes) -> Feature | None:
        """What a path has; None, if it is new."""
        found = self._sql.execute(
            "SELECT x.id, x.hash, x.status, x.tried_ns FROM files f JOIN features x ON x.id = f.feature "
            "WHERE f.path = ?",
            (path,),
        ).fetchone()
        return None if found is None else Feature(*found)

    def n_failed(self) -> int:
        """Rows of the data set without good features."""
        found = self._sql.execute(
            "SELECT count(*) FROM files f JOIN features x ON x.id = f.feature WHERE x.status != ?", (int(Status.OK),)
        )
        return int(found.fetchone()[0])

    def n_files(self) -> int:
        """Rows of the data set."""
        return int(self._sql.execute("SELECT count(*) FROM files").fetchone()[0])

    # Features

    def knows_size(self, size: int) -> bool:
        """Whether any stored row is of an image of so many bytes: only then it can be the same image."""
        return self._sql.execute("SELECT 1 FROM features WHERE size = ? LIMIT 1", (size,)).fetchone() is not None

    def with_hash(self, content: bytes) -> Feature | None:
        """A stored row of these bytes; one that is ok, if there is one."""
        found = self._sql.execute(
            "SELECT id, hash, status, tried_ns FROM features WHERE hash = ? "
            "ORDER BY status != ?, tried_ns DESC LIMIT 1",
            (content, int(Status.OK)),
        ).fetchone()
        return None if found is None else Feature(*found)

    def add_pass(self, number: int, rows: Iterable[Stored], now_ns: int) -> list[int]:
        """Take over the rows of a pass; returns their ids, in order."""
        ids = []
        for content, size, _, row, status in rows:
            found = self._sql.execute(
                "INSERT INTO features(hash, size, pass, row, status, tried_ns, unused_since_ns) VALUES (?,?,?,?,?,?,?)",
                (content, size, number, row, status, now_ns, now_ns),
            )
            ids.append(int(found.lastrowid or 0))
        return ids

    def tried_again(self, feature: int, now_ns: int) -> None:
        """Note that a row failed once more."""
        self._sql.execute("UPDATE features SET tried_ns = ? WHERE id = ?", (now_ns, feature))

    def passes(self) -> list[int]:
        """Those that have rows here."""
        return [number for (number,) in self._sql.execute("SELECT DISTINCT pass FROM features ORDER BY pass")]

    def forget_pass(self, number: int) -> None:
        """Drop the rows of a pass, and the files that had them."""
        self._sql.execute("DELETE FROM files WHERE feature IN (SELECT id FROM features WHERE pass = ?)", (number,))
        self._sql.execute("DELETE FROM features WHERE pass = ?", (number,))

    # Files

    def set_files(self, files: Iterable[tuple[Seen, bool, int]]) -> None:
        """Note what paths have: the file as seen, whether its times tell a later change, its feature."""
        self._sql.executemany(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)",
            ((*seen, int(settled), feature) for seen, settled, feature in files),
        )

    def remove_files(self, paths: Iterable[bytes]) -> None:
        """Note that paths are gone."""
        self._sql.executemany("DELETE FROM files WHERE path = ?", ((path,) for path in paths))

    def note_unused(self, now_ns: int) -> None:
        """Note since when no file needs a row; of rows that failed, nothing is kept."""
        used = "id IN (SELECT feature FROM files)"
        self._sql.execute(f"DELETE FROM features WHERE status != ? AND NOT {used}", (int(Status.OK),))
        self._sql.execute(
            f"UPDATE features SET unused_since_ns = ? WHERE unused_since_ns IS NULL AND NOT {used}", (now_ns,)
        )
        self._sql.execute(f"UPDATE features SET unused_since_ns = NULL WHERE unused_since_ns IS NOT NULL AND {used}")

    def rows(self) -> Iterator[tuple[bytes, int, int]]:
        """The rows of the data set, as (path, pass, row), sorted by pass, row and path."""
        return iter(
            self._sql.execute(
                "SELECT f.path, x.pass, x.row FROM files f JOIN features x ON x.id = f.feature "
                "ORDER BY x.pass, x.row, f.path"
            )
        )

    def sizes_of_passes(self, unused_before_ns: int) -> dict[int, tuple[int, int]]:
        """Pass -> (rows to be kept, all rows that are known of it).

        Args:
            unused_before_ns: rows that no file has needed since before that time are not kept.
        """
        found = self._sql.execute(
            "SELECT pass, sum(unused_since_ns IS NULL OR unused_since_ns >= ?), count(*) FROM features GROUP BY pass",
            (unused_before_ns,),
        )
        return {number: (kept, known) for number, kept, known in found}

    def kept_rows(self, number: int, unused_before_ns: int) -> list[tuple[int, int, bytes | None]]:
        """Rows of a pass that are to be kept: (id, row, a path that has it now), sorted by row."""
        return self._sql.execute(
            "SELECT x.id, x.row, (SELECT min(path) FROM files f WHERE f.feature = x.id) FROM features x "
            "WHERE x.pass = ? AND (x.unused_since_ns IS NULL OR x.unused_since_ns >= ?) ORDER BY x.row",
            (number, unused_before_ns),
        ).fetchall()

    def move_rows(self, ids: Sequence[int], number: int) -> None:
        """Note that rows lie in another pass now, in this order."""
        self._sql.executemany(
            "UPDATE features SET pass = ?, row = ? WHERE id = ?", ((number, row, one) for row, one in enumerate(ids))
        )

    # What waits, and what is under way

    def waiting(self) -> dict[bytes, tuple[Seen, int]]:
        """Files that were being written when they were last seen, and since when they look like that."""
        found = self._sql.execute("SELECT path, size, mtime_ns, ctime_ns, since_ns FROM waiting")
        return {path: (Seen(path, *seen), since_ns) for path, *seen, since_ns in found}

    def set_waiting(self, files: Iterable[tuple[Seen, int]]) -> None:
        """Those that wait now."""
        self._sql.execute("DELETE FROM waiting")
        self._sql.executemany("INSERT INTO waiting VALUES (?, ?, ?, ?, ?)", ((*seen, ns) for seen, ns in files))

    def planned(self) -> tuple[int, list[Planned]]:
        """The pass that has begun, and its rows in order; (0, []) if none has."""
        found = self._sql.execute("SELECT path, size, mtime_ns, ctime_ns, settled FROM planned ORDER BY position")
        rows = [Planned(Seen(*seen), bool(settled)) for *seen, settled in found]
        return (int(self._get("planned_pass", 0)), rows) if rows else (0, [])

    def set_planned(self, number: int, rows: Sequence[Planned]) -> None:
        """Note which pass begins, with which rows; none: nothing is under way."""
        self._sql.execute("DELETE FROM planned")
        self._sql.executemany(
            "INSERT INTO planned VALUES (?, ?, ?, ?, ?, ?)",
            ((i, *row.seen, int(row.settled)) for i, row in enumerate(rows)),
        )
        self._set("planned_pass", number)


def _make_safe(path: Path, only_read: bool) -> None:
    """See that opening the file changes no file elsewhere.

    Raises:
        InputError: it, or a file of SQLite beside it, is a link.
    """
    for behind in ("", "-wal", "-shm"):
        (check_regular if only_read else make_own)(path.with_name(path.name + behind))
    journal = path.with_name(path.name + "-journal")
    # Ours is never left with a rollback journal, since it is in WAL mode. One that somebody has put there may name any
    # file as its super-journal, and SQLite deletes that file (https://www.sqlite.org/fileformat.html#the_rollback_journal).
    if not only_read and journal.exists():
        journal.replace(journal.with_name(journal.name + ".damaged"))
