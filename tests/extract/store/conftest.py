from __future__ import annotations

from pathlib import Path

import pytest

from tests.extract.store.rows import complete_data_set


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    """A finished data set of three shards."""
    return complete_data_set(tmp_path / "out").out
