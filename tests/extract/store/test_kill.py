from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("count", [pytest.param(24, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.soak)])
def test_killed_and_resumed_runs_end_as_one_that_was_left_alone(count: int) -> None:
    script = Path(__file__).with_name("kill.py")
    run = subprocess.run([sys.executable, str(script), str(count)], capture_output=True, text=True,
                         cwd=Path(__file__).parents[3])  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["kills"], result["all the same"]) == (count, True)
    assert len(result["left"]) >= 3  # it struck in several places
