"""The receipt beside a finished shard: its size and hash when it was finished, and why rows failed."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from extract.errors import LayertapError
from extract.row_status import Status
from extract.store.format.shard import Shard
from extract.system.atomic_files import read_json, write_json

__all__ = ["read_receipt", "reasons_in", "reasons_of", "receipt_of", "size_and_hash", "write_receipt"]


def write_receipt(
    final: Path, file: Path, shard: Shard, reasons: Mapping[int, str], made: Mapping[str, Any] | None = None
) -> None:
    """Write the receipt of the shard `final`; see `receipt_of` for the other arguments."""
    write_json(final.with_suffix(".json"), receipt_of(file, shard, reasons, made), tidy=False)


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
        "status": {Status(code).text: count for code, count in sorted(Counter(status.tolist()).items())},
        "reasons": {str(row): reasons[row] for row in sorted(failed & reasons.keys())},
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
            }
    return receipt


def read_receipt(final: Path) -> dict[str, Any] | None:
    """Return the receipt of a shard; None if it is missing or damaged."""
    try:
        return read_json(final.with_suffix(".json"))
    except (OSError, LayertapError):
        return None


def reasons_of(final: Path) -> dict[int, str]:
    """Return row of the data set -> why it failed; empty if the receipt is missing or damaged."""
    return reasons_in(read_receipt(final) or {})


def reasons_in(receipt: Mapping[str, Any]) -> dict[int, str]:
    """Like `reasons_of`, for the content of a receipt."""
    reasons = receipt.get("reasons")
    try:
        return {int(row): str(reason) for row, reason in reasons.items()} if isinstance(reasons, dict) else {}
    except ValueError:
        return {}


def size_and_hash(path: Path) -> dict[str, Any]:
    """Return size and sha256 of a file as a receipt stores them."""
    with path.open("rb") as raw:
        return {"size": os.fstat(raw.fileno()).st_size, "sha256": hashlib.file_digest(raw, "sha256").hexdigest()}
