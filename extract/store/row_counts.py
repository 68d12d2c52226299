"""How many rows of a reader have each status, class and split, and how well its features are compressed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from extract.row_status import Status
from extract.store.format.layout import StoredFeature
from extract.store.format.receipt import count_shard
from extract.store.row_selection import RowSelection

__all__ = ["RowCounts", "count_rows"]


@dataclass(frozen=True)
class RowCounts:
    """Numbers of the rows of a reader.

    Attributes:
        status: status -> rows.
        classes: class -> rows; every class is there.
        unlabelled: rows without a class.
        splits: split -> rows; rows without a split are left out.
        compression: compressed feature -> (gzip, lzf or blosc2; compression ratio).
        failed: indices of the selections that have rows whose status is not ok.
    """

    status: dict[str, int]
    classes: dict[str, int]
    unlabelled: int
    splits: dict[str, int]
    compression: dict[str, tuple[str, float]]
    failed: list[int]


def count_rows(
    selections: Sequence[RowSelection], class_lists: Sequence[Sequence[str]], features: Sequence[StoredFeature]
) -> RowCounts:
    """Count rows.

    Args:
        selections: the rows.
        class_lists: classes of each selection.
        features: features of each row.

    Raises:
        InputError: a shard is damaged.
        LayertapError: a shard cannot be read.
    """
    status, splits, stored = Counter[int](), Counter[str](), Counter[str]()
    classes = Counter({name: 0 for names in class_lists for name in names})
    unlabelled, failed = 0, []
    filters: dict[str, set[str]] = {}
    for number, (selection, names) in enumerate(zip(selections, class_lists, strict=True)):
        shard, texts = selection.shard, selection.names
        split_names = selection.column("split").tolist() if texts is None else map(os.fsencode, texts.splits)
        counts = count_shard(selection.column("status"), selection.labels, split_names)
        status.update(counts.status)
        splits.update(counts.splits)
        for label, count in counts.labels.items():
            if label < 0:
                unlabelled += count
            else:
                classes[names[label]] += count
        if counts.status.keys() - {Status.OK}:
            failed.append(number)
        # Of a shard in a bucket, only the receipt has them until its features are downloaded.
        packed = shard.stored_bytes or (selection.receipt or {}).get("compression", {}).get("bytes", {})
        for feature in features:
            plain = feature.row_bytes * selection.file.n_rows
            stored[feature.name] += packed.get(feature.name, plain) if feature.name in shard.compression else plain
        for name, filter_name in shard.compression.items():
            filters.setdefault(name, set()).add(filter_name)
    n_rows = sum(selection.file.n_rows for selection in selections)
    return RowCounts(
        status={Status(code).text: count for code, count in sorted(status.items())},
        classes=dict(classes),
        unlabelled=unlabelled,
        splits=dict(splits),
        compression={
            feature.name: (
                " and ".join(sorted(filters[feature.name])),
                feature.row_bytes * n_rows / max(1, stored[feature.name]),
            )
            for feature in features
            if feature.name in filters
        },
        failed=failed,
    )
