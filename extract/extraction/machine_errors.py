"""End a run whose images fail for a reason that is not their own: a disk, a server or the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extract.errors import MachineError
from extract.images import Batch
from extract.images.sources import ImageSource
from extract.row_status import Status

__all__ = ["stop_on_machine_errors"]

_SUSPECT = 32  # consecutive images with the same failure, unlikely to be their own; fewer may be dead links


def stop_on_machine_errors(batches: Iterable[Batch], source: ImageSource) -> Iterator[Batch]:
    """Pass batches on, and end the run if images fail for a reason that is unlikely to be their own.

    A failing disk, server or memory therefore does not mark rows as failed.

    Args:
        batches: batches of a run, from the first.
        source: source of the images.

    Raises:
        MachineError: many consecutive images fail for such a reason, or all of the first batch.
        LayertapError: the source of the images has vanished or changed.
    """
    kind, count, reason, first = "", 0, "", True
    for batch in batches:
        if (batch.status == Status.MISSING).any() or not (batch.status == Status.OK).any():
            source.check_there()  # a file on an unmounted disk is not a failed row
        for row, status in zip(batch.rows.tolist(), batch.status.tolist(), strict=True):
            if status == Status.OK:
                kind, count = "", 0
            elif row in batch.suspect:
                count = count + 1 if batch.suspect[row] == kind else 1
                kind, reason = batch.suspect[row], batch.reasons[row]
        if count >= _SUSPECT or (first and 1 < count == len(batch.rows)):
            raise MachineError(
                f"{count} images in a row cannot be read: {reason}. So many consecutive failures are caused by the "
                "disk, the server or the machine, not by the images. Stored rows are safe",
                hint="run again when the cause is fixed",
            )
        yield batch
        first = False
