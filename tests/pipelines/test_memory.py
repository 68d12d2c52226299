"""Peak memory does not grow with the number of images."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import make_picture

RUN = """
import json, resource, sys
from pipelines.cli import main
main(sys.argv[1:], prog_name="layertap", standalone_mode=False)
# Not ru_maxrss of this process, which begins with what the process had that started it.
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]), file=sys.stderr)
"""


def peaks_kb(images: Path, out: Path) -> list[int]:
    """Peak resident memory of the main process, and of the largest worker."""
    options = ["-b", "timm/test_resnet", "--weights", "random", "--device", "cpu", "--workers", "2"]
    options += ["--size", "64", "--crop", "64", "-l", "embedding", "-l", "layer?"]
    options += ["--batch-size", "16"]  # large batches make the heap's own ups and downs as large as what is looked for
    command = [sys.executable, "-c", RUN, "embed", str(images), "-o", str(out), *options]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    peaks: list[int] = json.loads(run.stderr.splitlines()[-1])
    return peaks


@pytest.mark.slow
def test_ten_thousand_images_need_the_memory_of_two_thousand(tmp_path: Path) -> None:
    for number in range(100):
        make_picture(number, 64, 48).save(tmp_path / f"{number}.png")
    folders = {}
    for count in (2_000, 10_000):
        folders[count] = tmp_path / str(count)
        for number in range(count):
            path = folders[count] / f"class {number % 10}" / f"{number:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            # Other bytes behind the picture, or it would be computed once.
            path.write_bytes((tmp_path / f"{number % 100}.png").read_bytes() + str(number).encode())
    few, many = (peaks_kb(folders[count], tmp_path / f"out{count}") for count in (2_000, 10_000))
    print(f"peak memory, kB (main, worker): {few} for 2,000 images, {many} for 10,000")
    assert many[0] <= 1.05 * few[0]
    assert many[1] <= 1.05 * few[1]
