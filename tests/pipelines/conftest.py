"""What tests of commands share."""

from __future__ import annotations

import pytest


@pytest.fixture
def figures() -> None:
    """For tests in which the figures of probes are drawn."""


@pytest.fixture(autouse=True)
def _figures_of_probes_are_made_but_not_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the probes do."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("pipelines.probe.probe_figures.save_figure", lambda figure, path: path)
