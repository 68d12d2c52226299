"""The table of `planted_faults`: each fault is named first, at its layer; healthy networks have no finding."""

from __future__ import annotations

import pytest

from tests.extract.analysis.network.planted_faults import CIFAR, FAULTS, HEALTHY, PHOTOS, score

# `test_findings` has others in its own networks.
QUICK = {"31 default ReLUs", "21 default sigmoids", "zero weights in conv5"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_planted_fault_is_named_first_at_its_layer(name: str) -> None:
    fault = FAULTS[name]
    if fault.needs_cifar and not CIFAR.is_dir():
        pytest.skip(f"no pictures in {CIFAR}")
    found = fault.look()
    assert score(fault, found) == "exact", f"expected {fault.expected}, found {found}"


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_network_has_no_finding(name: str) -> None:
    folder = PHOTOS if name.startswith("bundled") else CIFAR
    if not folder.is_dir():
        pytest.skip(f"no pictures in {folder}")
    assert HEALTHY[name]() == []


def test_the_quick_faults_are_in_the_table() -> None:
    assert set(FAULTS) >= QUICK
    assert len(FAULTS) >= 40
    assert len(HEALTHY) >= 12
