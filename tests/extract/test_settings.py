"""Settings of the process: what a program has set is put back, and does not hold while features are computed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from extract.settings import full_float32

{before}
b = torch.backends
places = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
found = [place.fp32_precision for place in places]
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
with full_float32():
    assert all(place.fp32_precision in ("ieee", "none") for place in places)
    assert torch.get_float32_matmul_precision() == "highest"
    assert (x @ x - (x.double() @ x.double()).float()).abs().max() < 1e-4
    if {older}:  # it reads the older settings, and fails beside the newer ones, with layertap or without
        torch.export.export(torch.nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),))
now = [place.fp32_precision for place in places]
assert [one.replace("ieee", "none") for one in now] == [one.replace("ieee", "none") for one in found], (found, now)
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        "torch.set_float32_matmul_precision('medium')",
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'; torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cudnn.allow_tf32 = False",
    ],
)
def test_float32_has_all_of_its_bits_whatever_a_program_has_set(before: str) -> None:
    program = PROGRAM.format(before=before, older="fp32_precision" not in before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
