"""The cost of many boxes of one picture: a run over boxes, against decoding the pictures and the forwards of the crops.

    python -m benchmarks.boxes PHOTOS [--photos 100] [--boxes 20] [--rounds 3]

All in one process, in CPU seconds, of the bundled backbone with exact preprocessing. Three parts by hand: each photo is
decoded once, and its boxes are cropped with Pillow; each crop is resized; the crops go through the backbone under
`Taps`. The run does the same, and stores the rows.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.common import SUFFIXES, in_turn, parser, say
from extract import Taps, extract_features, load_backbone

BATCH = 64


def main() -> None:
    """Measure and print the ratio."""
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--photos", type=int, default=100)
    arguments.add_argument("--boxes", type=int, default=20)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone("bundled/efficientnet_lite0", device="cpu")
    photos = sorted(path for path in given.folder.rglob("*") if path.suffix.lower() in SUFFIXES)[: given.photos]
    rng = np.random.default_rng(0)
    boxes: dict[Path, list[tuple[int, ...]]] = {}
    for path in photos:
        width, height = Image.open(path).size
        side = min(width, height) // 3
        corners = rng.integers(0, (width - side, height - side), (given.boxes, 2)).tolist()
        boxes[path] = [(x, y, side, side) for x, y in corners]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table, out = folder / "boxes.csv", folder / "out"
        lines = [
            f'"{path.relative_to(given.folder)}",{",".join(map(str, box))}' for path in photos for box in boxes[path]
        ]
        table.write_text("\n".join(["path,x,y,w,h", *lines]))

        def by_hand() -> None:
            crops: list[Tensor] = []
            with torch.no_grad(), Taps(backbone.model).keep(backbone.classifier or "", "input") as taps:
                for path in photos:
                    picture = Image.open(path).convert("RGB")
                    for x, y, w, h in boxes[path]:
                        crops.append(backbone.preprocessing.cpu_transform(picture.crop((x, y, x + w, y + h))))
                    while len(crops) >= BATCH or (path is photos[-1] and crops):
                        taps(backbone.preprocessing.to_input(torch.stack(crops[:BATCH])))
                        crops = crops[BATCH:]

        def run() -> None:
            extract_features(
                given.folder, out=out, backbone=backbone, boxes=table, workers=0, batch_size=BATCH, compile="off",
                box_shape="exact", progress=False,
            ).close()  # fmt: skip

        def empty(_: str) -> None:
            shutil.rmtree(out, ignore_errors=True)

        ways = {"by hand": by_hand, "run": run}
        taken = in_turn(ways, given.rounds, before=empty, clock=time.process_time)
    say(f"{len(photos)} photos, {given.boxes} boxes each", taken["run"], taken["by hand"], "decoding and forwards")


if __name__ == "__main__":
    main()
