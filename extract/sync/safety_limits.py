"""What a pass is careful about."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Guards"]


@dataclass(frozen=True)
class Guards:
    """When a file is left for a later pass, and when a folder is not believed.

    Attributes:
        settle_s: a file that was changed less than so many seconds ago may still be being written; it waits.
        max_vanish: if a larger part of the files is gone, nothing is done.
        retry_after_s: an image that failed is tried again after so many seconds, though it has not changed.
        keep_gone_s: features that no file needs are kept so long, for files that come back.
    """

    settle_s: float = 5.0
    max_vanish: float = 0.2
    retry_after_s: float = 7 * 86400.0
    keep_gone_s: float = 30 * 86400.0
