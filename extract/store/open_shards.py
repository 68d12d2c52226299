"""The shards of a reader, opened on first use where there are many, within the limit of open files.

A shard holds one file handle and about 90 KB of memory while it is open.
"""

from __future__ import annotations

import contextlib
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from extract.errors import LayertapError
from extract.store.format.shard import Shard
from extract.system.atomic_files import allow_more_files, count_open_files

__all__ = ["OpenShards", "ShardFile"]

_MOST = 30_000  # Linux allows a process 65,530 memory maps (vm.max_map_count)
_OTHER_FILES = 128  # handles that are left to the rest of the process


class OpenShards:
    """The shards of a reader that are open and may be closed to stay within the limit of open files.

    Args:
        most: shards that may be open, if the system permits as many.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._limit = most
        self._open: OrderedDict[ShardFile, None] = OrderedDict()  # in the order in which they were opened
        self._most = 0  # 0: not known yet
        self._is_closed = False

    def open(self, file: ShardFile, read: Callable[[], Shard]) -> Shard:
        """Open the shard of a file and return it, and close the shard that was opened first if too many are open.

        Threads may open the same shard at the same time; each reads its own, and the last one stays.
        """
        if self._is_closed:
            raise LayertapError(f"{file.name} is closed")
        if not self._most:
            self._most = min(self._limit, _most_open_shards())
        shard = read()
        with contextlib.suppress(KeyError):  # another thread has closed the last one
            while len(self._open) >= self._most:
                first, _ = self._open.popitem(last=False)
                first.let_go()
        file.hold(shard)  # before another thread may close it
        self._open[file] = None
        return shard

    def close(self) -> None:
        """Open no more shards."""
        self._is_closed = True
        self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict(), "_most": 0}


class ShardFile:
    """A shard of a reader; another process that unpickles it opens the file again.

    Args:
        name: path or URL, for errors.
        n_rows: rows of the shard.
        opened: the shard, which stays open; None to open it on first use.
        read: opens the shard; picklable. Only for a shard that is opened on first use.
        open_shards: the shards of the reader. Only for a shard that is opened on first use.
    """

    def __init__(
        self,
        name: str,
        n_rows: int,
        opened: Shard | None = None,
        read: Callable[[], Shard] | None = None,
        open_shards: OpenShards | None = None,
    ):
        self.name, self.n_rows = name, n_rows
        self._shard, self._read, self._open_shards = opened, read, open_shards

    @property
    def shard(self) -> Shard:
        """The open shard.

        Raises:
            InputError: the shard is damaged, of another data set, or no longer exists.
            LayertapError: the reader is closed, or the file cannot be read.
        """
        shard = self._shard
        if shard is None:
            assert self._read is not None
            assert self._open_shards is not None
            shard = self._open_shards.open(self, self._read)
        return shard

    @property
    def is_open(self) -> bool:
        """Whether the shard is open now."""
        return self._shard is not None

    def hold(self, shard: Shard) -> None:
        """Keep the shard open until `let_go`."""
        self._shard = shard

    def let_go(self) -> None:
        """Close the file as soon as no array over it and no other thread uses it; it can be opened again."""
        self._shard = None

    def close(self) -> None:
        """Close the file for good."""
        if self._open_shards is not None:
            self._open_shards.close()
        if self._shard is not None:
            self._shard.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_shard": None} if self._read is not None else vars(self)


def _most_open_shards() -> int:
    """Return how many shards may be open, after the limit of open files was raised as far as permitted."""
    allow_more_files(_MOST)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(_MOST, soft - count_open_files() - _OTHER_FILES))
