"""Ten photos of 100 megapixels among small ones: memory, rate, and how long the model waits for them.

    python tests/benchmarks/huge_pictures.py IMAGES [BACKBONE]

Runs `embed` on small photos alone, and on the same ones with ten huge ones in a row, in turn, and with whole
batches for each worker for comparison (then one worker gets all of the huge ones).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from extract.images import list_images

ROUNDS = 3
SMALL = 400
HUGE = 10
SIDE_PX = 10_000

RUN = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[4])
from extract.images import loading
loading._PIECES = int(sys.argv[3])
from extract import load_backbone
from extract.extraction.plan import existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
backbone = load_backbone(sys.argv[5], device="cpu")
planned = resolve(ExtractionSettings(workers=2), list_images(sys.argv[1]), backbone, existing_at(sys.argv[2]))
waits, before = [], time.perf_counter()
def on_rows(rows, found):
    global before
    waits.append(time.perf_counter() - before)
    before = time.perf_counter()
summary = extract(planned, on_rows=on_rows)
kb = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"rate": summary.images_per_s, "seconds": summary.seconds, "images_s": summary.stages["images"],
                  "longest_s": max(waits), "mb": [one // 1024 for one in kb], "status": dict(summary.status)}))
"""


def measured(images: Path, out: Path, pieces: int, backbone: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(images), str(out), str(pieces), str(Path(__file__).parents[2]), backbone],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    source = Path(sys.argv[1])
    backbone = sys.argv[2] if len(sys.argv) > 2 else "bundled/efficientnet_lite0"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        paths = list_images(source).paths
        for number in range(SMALL):
            data = (source / paths[number % len(paths)]).read_bytes() + str(number).encode()  # other bytes each
            for folder in ("small", "mixed"):
                (work / folder).mkdir(exist_ok=True)
                (work / folder / f"{number:04d}.jpg").write_bytes(data)
        for number in range(HUGE):
            photo = Image.open(source / paths[number * 7 % len(paths)]).convert("RGB")
            photo.resize((SIDE_PX, SIDE_PX)).save(work / "mixed" / f"0200-huge-{number}.jpg", quality=85)
        for one in range(ROUNDS):
            for what, folder, pieces in (("small", "small", 16), ("mixed", "mixed", 16), ("mixed, whole", "mixed", 1)):
                found = measured(work / folder, work / f"out-{what}-{one}", pieces, backbone)
                print(
                    f"{what:16} {found['rate']:6.1f} images/s, {found['seconds']:5.1f} s, waiting for images "
                    f"{found['images_s']:5.1f} s, longest batch {found['longest_s']:4.1f} s, "
                    f"peak main {found['mb'][0]:,} MB, worker {found['mb'][1]:,} MB, {found['status']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
