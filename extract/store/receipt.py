"""The receipt beside a finished shard: what it was when it was finished, and why rows of it failed."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from extract.errors import LayertapError
from extract.status import Status
from extract.store.files import read_json, write_json
from extract.store.shard import Shard

__all__ = ["read_receipt", "reasons_of", "size_and_hash", "write_receipt"]


def write_receipt(final: Path, file: Path, shard: Shard, reasons: Mapping[int, str]) -> None:
    """Write the receipt of the shard `final`, whose content lies in `file` and is open as `shard`.

    Args:
        final: name of the shard.
        file: its content; has another name as long as it is not published.
        shard: the same rows.
        reasons: row of the data set -> why it failed.
    """
    status, first_row = shard.column("status"), shard.identity.first_row
    failed = {first_row + int(row) for row in np.flatnonzero(status != Status.OK)}
    receipt = {
        **vars(shard.identity),
        "status": {Status(code).text: count for code, count in sorted(Counter(status.tolist()).items())},
        "reasons": {str(row): reasons[row] for row in sorted(failed & reasons.keys())},
        **size_and_hash(file),
    }
    with Shard(file) as ready:
        if ready.compression:
            plain = sum(feature.row_bytes for feature in ready.features) * len(ready)
            packed = {name: ready.stored_bytes[name] for name in ready.compression}
            receipt["compression"] = {
                "filter": next(iter(ready.compression.values())),
                "ratio": round(plain / max(1, sum(packed.values())), 3),
            }
    write_json(final.with_suffix(".json"), receipt)


def read_receipt(final: Path) -> dict[str, Any] | None:
    """The receipt of a shard; None if there is none, or it is damaged."""
    try:
        return read_json(final.with_suffix(".json"))
    except (OSError, LayertapError):
        return None


def reasons_of(final: Path) -> dict[int, str]:
    """Row of the data set -> why it failed; empty if the receipt that says so is lost or damaged."""
    reasons = (read_receipt(final) or {}).get("reasons")
    try:
        return {int(row): str(reason) for row, reason in reasons.items()} if isinstance(reasons, dict) else {}
    except ValueError:
        return {}


def size_and_hash(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as a receipt has them."""
    with path.open("rb") as raw:
        return {"size": os.fstat(raw.fileno()).st_size, "sha256": hashlib.file_digest(raw, "sha256").hexdigest()}
