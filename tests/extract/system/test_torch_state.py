"""Settings of the process: what a program has set is put back, and does not hold while features are computed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # each starts a process that imports torch

SET_BEFORE = [
    "",
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.fp32_precision = 'tf32'; torch.set_float32_matmul_precision('high')",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.allow_tf32 = False",
]

# Each in a process of its own, of which torch is imported once.
PROGRAM = """
import json, os, sys, traceback
import torch
import torch.export
from extract.system.torch_state import full_float32, tensor_float32

def check(before):
    exec(before)
    b = torch.backends
    settings = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
    initial = [setting.fp32_precision for setting in settings]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with full_float32():
        assert all(setting.fp32_precision in ("ieee", "none") for setting in settings)
        assert torch.get_float32_matmul_precision() == "highest"
        assert (x @ x - (x.double() @ x.double()).float()).abs().max() < 1e-4
        if "fp32_precision" not in before:
            # It reads the older settings, and fails beside the newer ones, with layertap or without.
            torch.export.export(torch.nn.Conv2d(3, 4, 3), (torch.randn(1, 3, 8, 8),))
    with tensor_float32():
        assert [setting.fp32_precision for setting in settings[:3]] == ["tf32"] * 3
        with full_float32():
            assert all(setting.fp32_precision in ("ieee", "none") for setting in settings)
        assert [setting.fp32_precision for setting in settings[:3]] == ["tf32"] * 3
    restored = [setting.fp32_precision for setting in settings]
    plain = [[value.replace("ieee", "none") for value in values] for values in (initial, restored)]
    assert plain[0] == plain[1], (initial, restored)

codes = {}
for before in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        try:
            check(before)
            os._exit(0)
        except BaseException:
            print(before, traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)
    codes[before] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


def test_float32_has_all_of_its_bits_or_those_of_tf32_whatever_a_program_has_set() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(SET_BEFORE)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == dict.fromkeys(SET_BEFORE, 0), run.stderr
