"""CPU seconds of decoding tiles and views, as ratios to loops that are written by hand. No network, one process.

    tiles of a JPEG      Pillow decodes the file once, and cuts each tile
    tiles of a TIFF      `tifffile` decodes the segments that a tile covers
    tiles of a slide     `openslide.OpenSlide.read_region`, converted to RGB
    ten views            Pillow decodes and resizes once, and `TenCrop` cuts

Each way gives pixels of (H, W, 3). The pixels of both are compared first.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import tifffile
import torch
from PIL import Image
from torchvision.transforms import functional as F

from benchmarks.common import in_turn, parser, say
from extract.backbones.preprocessing import Preprocessing
from extract.extraction.settings import ExtractionSettings
from extract.images import Decoding, list_images, load_batches

SIDE, TILE = 6144, 512
VIEWS = Preprocessing(256, (224, 224), "bilinear", (0.5,) * 3, (0.5,) * 3)


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (200, 200, 3)).astype(np.uint8)).resize((SIDE, SIDE))
    picture.save(folder / "a.jpg", quality=90)
    segments: dict[str, Any] = {"tile": (256, 256), "compression": "jpeg", "photometric": "rgb", "metadata": None}
    for name in ("a.svs", "a.btf"):
        tifffile.imwrite(folder / name, np.asarray(picture), **segments)
    (folder / "photos").mkdir()
    for number in range(40):
        picture.crop((0, 0, 500, 375)).rotate(number).save(folder / "photos" / f"{number:02}.jpg")


def ours(where: Path, transform: Callable[..., torch.Tensor], **parts: Any) -> list[np.ndarray]:
    images = list_images(where, parts=ExtractionSettings(**parts))
    rows = [list(range(start, min(start + 64, len(images)))) for start in range(0, len(images), 64)]
    return [each for batch in load_batches(images, rows, Decoding(transform)) for each in batch.images.numpy()]


def pixels(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture))


def corners() -> Iterator[tuple[int, int]]:
    names = sorted(f"{x},{y}" for x in range(0, SIDE, TILE) for y in range(0, SIDE, TILE))
    return ((int(x), int(y)) for x, _, y in (name.partition(",") for name in names))


def of_jpeg(file: Path) -> list[np.ndarray]:
    picture = Image.open(file).convert("RGB")
    return [np.array(picture.crop((x, y, x + TILE, y + TILE))) for x, y in corners()]


def of_slide(file: Path) -> list[np.ndarray]:
    slide = openslide.OpenSlide(file)
    return [np.array(slide.read_region(corner, 0, (TILE, TILE)).convert("RGB")) for corner in corners()]


def of_tiff(file: Path) -> list[np.ndarray]:
    tiles = []
    with tifffile.TiffFile(file) as tiff:
        page, handle = tiff.pages[0], tiff.filehandle
        across = SIDE // 256
        for x, y in corners():
            tile = np.empty((TILE, TILE, 3), np.uint8)
            for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
                index = (y // 256 + row) * across + x // 256 + column
                handle.seek(page.dataoffsets[index])
                data = handle.read(page.databytecounts[index])
                segment = page.decode(data, index, jpegtables=page.jpegtables)[0][0]
                tile[row * 256 : row * 256 + 256, column * 256 : column * 256 + 256] = segment
            tiles.append(tile)
    return tiles


def ten_crops(folder: Path) -> list[np.ndarray]:
    crops = []
    for file in sorted(folder.iterdir()):
        crops += map(np.array, F.ten_crop(F.resize(Image.open(file).convert("RGB"), [256]), [224, 224]))
    return crops


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        by_hand = {"a.jpg": of_jpeg, "a.btf": of_tiff, "a.svs": of_slide, "photos": ten_crops}
        for place, loop in by_hand.items():
            views = place == "photos"
            parts: dict[str, Any] = {"views": "ten"} if views else {"tiles": TILE}
            transform = VIEWS.cpu_transform if views else pixels
            ways = {
                "ours": lambda place=place, transform=transform, parts=parts: ours(folder / place, transform, **parts),
                "by hand": lambda place=place, loop=loop: loop(folder / place),
            }
            for one, other in zip(*(way() for way in ways.values()), strict=True):
                assert np.array_equal(one, other), place
            taken = in_turn(ways, rounds, clock=time.process_time)
            say(f"{'ten views' if views else 'tiles'} of {place}", taken["ours"], taken["by hand"], "by hand")


if __name__ == "__main__":
    main()
