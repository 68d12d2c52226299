"""Safety limits of a pass."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Guards"]


@dataclass(frozen=True)
class Guards:
    """Limits on when a file is processed, and on how many files may be gone.

    Attributes:
        settle_s: a file that changed less than this many seconds ago may still be being written; it is left for a later
            pass.
        max_vanish: if a larger share of the files is gone, the pass raises `VanishedError` and keeps their rows.
        retry_after_s: a failed image is retried after this many seconds, even if its file has not changed.
        keep_gone_s: features that no file needs are kept for this many seconds, in case the file comes back.
    """

    settle_s: float = 5.0
    max_vanish: float = 0.2
    retry_after_s: float = 7 * 86400.0
    keep_gone_s: float = 30 * 86400.0
