"""Status of a row."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Status"]


class Status(IntEnum):
    """Status code of a row of a data set; the numbers are part of the file format."""

    PENDING = 0  # not computed yet
    OK = 1
    DECODE_ERROR = 2  # the file could not be opened or decoded; features are NaN
    NOT_FINITE = 3  # computed, but with NaN or infinity; kept as computed
    MISSING = 4  # the file does not exist; features are NaN
    # The file could not be read for an external reason (a failing disk, a server); features are NaN. The next run
    # retries it.
    IO_ERROR = 5

    @property
    def text(self) -> str:
        """Readable form, such as "decode error"."""
        return self.name.lower().replace("_", " ")
