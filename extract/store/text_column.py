"""Text of each row of a reader, read from the files when it is used: as lists, that of 10 million rows took 2 GB."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["TextColumn"]

_AT_ONCE = 1 << 16  # texts held in memory while they are iterated over


class TextColumn(Sequence[str]):
    """A sequence of str, such as the paths of all rows; a slice of it is a list, and so are rows by number or mask.

    It is equal to every sequence of the same texts. Compared with one text it gives a mask, (N,) bool, as an array
    does: `reader.splits == "train"`.

    Args:
        n_rows: number of texts.
        read: returns the texts of rows from start to stop.
    """

    def __init__(self, n_rows: int, read: Callable[[int, int], list[str]]):
        self._n_rows, self._read = n_rows, read

    def __len__(self) -> int:
        return self._n_rows

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> list[str]: ...
    def __getitem__(self, index: int | slice | Sequence[int] | NDArray[Any]) -> str | list[str]:
        if isinstance(index, slice):
            rows = range(self._n_rows)[index]
            if rows.step == 1:
                return self._read(rows.start, max(rows.start, rows.stop))
            return [self[row] for row in rows]
        if np.ndim(index):
            given = np.asarray(index, None if len(index) else np.int64)  # type: ignore[arg-type]
            return [self[row] for row in np.arange(self._n_rows)[given].tolist()]
        row = range(self._n_rows)[index]  # type: ignore[index]
        return self._read(row, row + 1)[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, self._n_rows, _AT_ONCE):
            yield from self._read(start, min(start + _AT_ONCE, self._n_rows))

    def __eq__(self, other: object) -> Any:
        if isinstance(other, str):
            return np.fromiter((text == other for text in self), bool, len(self))
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __ne__(self, other: object) -> Any:
        equal = self == other
        return ~equal if isinstance(equal, np.ndarray) else not equal

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(list(self), dtype=dtype or (np.str_ if len(self) else "<U1"))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"[{shown}{', ...' if len(self) > 3 else ''}]"
