"""Base of the file objects that HDF5 reads and writes."""

from __future__ import annotations

import io

__all__ = ["Seekable"]


class Seekable(io.RawIOBase):
    """File object with a position. Subclasses implement `readinto`.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int):
        self._size, self._position = size, 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = starts[whence] + offset
        return self._position
