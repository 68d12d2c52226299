from __future__ import annotations

import pytest

from extract import load_backbone
from extract.compute.backbone import Backbone
from tests.conftest import TINY_INPUT


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    """A small network with random weights, on the CPU."""
    return load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
