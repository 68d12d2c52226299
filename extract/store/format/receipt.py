"""The receipt beside a finished shard: its size and hash when it was finished, and why rows failed.

A receipt is not trusted. Its size is bounded by the number of rows of its shard, and is checked before the receipt is
parsed; its content has the shape `RECEIPT`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from extract.errors import LayertapError
from extract.row_status import Status
from extract.store.format.schemas import RECEIPT
from extract.store.format.shard import Shard
from extract.system.json_files import read_json

__all__ = [
    "checked_receipt",
    "counts_of",
    "read_receipt",
    "reasons_in",
    "reasons_of",
    "receipt_bytes",
    "receipt_of",
    "size_and_hash",
]

# The largest receipt: everything but the reasons, and for each row its number and its reason.
_OTHER_BYTES = 1 << 16
_ROW_BYTES = 1 << 10
_REASON_BYTES = 960  # of a reason in JSON, with its quotes


def counts_of(shard: Shard) -> dict[str, Any]:
    """Return the numbers of rows of a shard by status, label and split, as in its receipt."""
    by_status, by_label = Counter(shard.column("status").tolist()), Counter(shard.column("label").tolist())
    by_split = Counter(shard.column("split").tolist())
    del by_split[b""]
    return {
        "status": {Status(code).text: count for code, count in sorted(by_status.items())},
        "labels": {str(label): count for label, count in sorted(by_label.items())},
        "splits": {os.fsdecode(split): count for split, count in sorted(by_split.items())},
    }


def receipt_bytes(n_rows: int) -> int:
    """Return the largest size of the receipt of a shard with `n_rows` rows, in bytes."""
    return _OTHER_BYTES + n_rows * _ROW_BYTES


def receipt_of(
    file: Path, shard: Shard, reasons: Mapping[int, str], made: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the receipt of a finished shard.

    Args:
        file: the file of the shard, which may not have its final name yet.
        shard: the same rows, open for reading.
        reasons: row of the data set -> why it failed.
        made: where and how fast the last run wrote the shard; None if unknown.
    """
    status, first_row = shard.column("status"), shard.identity.first_row
    failed = {first_row + int(row) for row in np.flatnonzero(status != Status.OK)}
    receipt = {
        **vars(shard.identity),
        **counts_of(shard),
        "reasons": {str(row): _short(reasons[row]) for row in sorted(failed & reasons.keys())},
        **size_and_hash(file),
        **({"made": dict(made)} if made else {}),
    }
    with Shard(file) as ready:
        if ready.compression:
            plain = sum(feature.row_bytes for feature in ready.features) * len(ready)
            packed = {name: ready.stored_bytes[name] for name in ready.compression}
            receipt["compression"] = {
                "filter": next(iter(ready.compression.values())),
                "ratio": round(plain / max(1, sum(packed.values())), 3),
                "bytes": packed,
            }
    return receipt


def _short(reason: str) -> str:
    """Return a reason, cut if it takes more than its share of a receipt."""
    while len(reason) * 12 > _REASON_BYTES and len(json.dumps(reason)) > _REASON_BYTES:  # 12: \\ud83d\\ude00
        reason = reason[: len(reason) * 3 // 4] + "..."
    return reason


def checked_receipt(final: Path, n_rows: int) -> dict[str, Any]:
    """Return the receipt of a shard, which has the shape `RECEIPT`.

    Args:
        final: the file of the shard.
        n_rows: rows of the shard.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no receipt.
        InputError: the receipt is damaged, or larger than one of `n_rows` rows can be.
        LayertapError: the receipt cannot be read.
    """
    return read_json(final.with_suffix(".json"), RECEIPT, receipt_bytes(n_rows))


def read_receipt(final: Path, n_rows: int) -> dict[str, Any] | None:
    """Like `checked_receipt`, but return None if the receipt is missing or damaged."""
    try:
        return checked_receipt(final, n_rows)
    except (OSError, LayertapError):
        return None


def reasons_of(final: Path, n_rows: int) -> dict[int, str]:
    """Return row of the data set -> why it failed; empty if the receipt is missing or damaged.

    See `checked_receipt` for the arguments.
    """
    receipt = read_receipt(final, n_rows)
    return {} if receipt is None else reasons_in(receipt)


def reasons_in(receipt: Mapping[str, Any]) -> dict[int, str]:
    """Like `reasons_of`, for the content of a receipt."""
    return {int(row): reason for row, reason in receipt["reasons"].items()}


def size_and_hash(path: Path) -> dict[str, Any]:
    """Return size and sha256 of a file as a receipt stores them."""
    with path.open("rb") as raw:
        return {"size": os.fstat(raw.fileno()).st_size, "sha256": hashlib.file_digest(raw, "sha256").hexdigest()}
