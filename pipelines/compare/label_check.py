"""Check labels before features are computed, which may take hours."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from extract.credentials import text_without_credentials
from extract.errors import InputError
from extract.images import Images
from extract.row_status import Status
from extract.store.reader import FeatureReader
from pipelines.compare.config import CompareConfig
from pipelines.probe.labelling import label_rows

__all__ = ["check_labels"]


def check_labels(config: CompareConfig, images: Images) -> None:
    """Check that the labels of all tasks fit the images, and that there are images to train and to test on.

    Raises:
        InputError: see `label_rows`; or there is only one class.
    """
    rows = cast(FeatureReader, _Unread(images, config.images))
    for labels in config.labels_of_tasks.values():
        labelling = label_rows(rows, labels, test_fraction=config.test_fraction, seed=config.seed)
        if len(labelling.classes) < 2:
            where = "the images have" if labels is None else f"{text_without_credentials(labels)} has"
            raise InputError(f"{where} only 1 class; a probe needs at least two")


class _Unread:
    """What `label_rows` reads of a data set, as if its images had features, and all of them different bytes."""

    def __init__(self, images: Images, given: str):
        listed = images.slice(0, len(images))
        self.paths, self.ids, self.labels, self.splits = listed.paths, listed.ids, listed.labels, listed.splits
        self.classes = images.classes
        self.status: NDArray[np.uint8] = np.full(len(images), Status.OK, np.uint8)
        self.provenance: dict[str, Any] = {"configuration": {"images": given}}

    def __len__(self) -> int:
        return len(self.paths)

    def column(self, name: str) -> NDArray[np.uint8]:
        """Return a different hash for each row."""
        numbers = np.arange(2 * len(self), dtype=np.uint64)
        return numbers.view(np.uint8).reshape(-1, 16)
