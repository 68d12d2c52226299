"""Fixtures of the tests of `Taps`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_trace_of_taps() -> Iterator[None]:
    """Check that a test leaves the switches of PyTorch as they were."""
    before = torch.backends.mha.get_fastpath_enabled()
    yield
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert not torch.overrides._get_current_function_mode_stack()
