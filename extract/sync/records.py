"""Rows and files as the manifest records them."""

from __future__ import annotations

from typing import NamedTuple

from extract.sync.scan import ScannedFile

__all__ = ["Candidate", "FeatureRow", "PlannedFile", "StoredRow"]


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
