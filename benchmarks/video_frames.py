"""Frames of a video against the decoder alone: `python -m benchmarks.video_frames [--minutes 10] [--rounds 3]`.

A generated clip of 320 x 180 pixels, H.264, 30 frames a second, a key frame in 250. CPU seconds in turn, in one
process: the times are listed, the file is hashed, and the frames are decoded and converted to RGB. The decoder alone
decodes all frames with one thread, and converts none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from benchmarks.common import in_turn, parser, ratio
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.system.optional_libraries import library

WIDTH, HEIGHT, RATE = 320, 180, 30
WAYS: dict[str, dict[str, Any]] = {
    "--fps 1": {"fps": 1},
    "--every 16": {"every": 16},
    "--every 1": {"every": 1},
    "--keyframes": {"keyframes": True},
}
av = library("av", "video", "this benchmark")


def write(path: Path, minutes: float) -> None:
    """A picture of blocks and noise that moves."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 200, (HEIGHT // 20, 2 * WIDTH // 20, 3), np.uint8).repeat(20, 0).repeat(20, 1)
    scene = blocks + rng.integers(0, 30, blocks.shape, np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(round(minutes * 60 * RATE)):
            start = number * 2 % WIDTH
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(scene[:, start : start + WIDTH]), "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def decoder_alone(path: Path) -> None:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for _ in container.decode(stream):
            pass


def frames(path: Path, asked: dict[str, Any]) -> None:
    images = list_images(path, parts=ExtractionSettings(**asked))
    for row in range(len(images)):
        data, _ = images.source.read(row)
        images.source.content_hash(row, data)
        images.source.picture(row, data)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write(path, asked.minutes)
        ways: dict[str, Callable[[], None]] = {name: partial(frames, path, settings) for name, settings in WAYS.items()}
        taken = in_turn({"decoder": partial(decoder_alone, path), **ways}, asked.rounds, clock=process_time)
        for name in WAYS:
            print(f"{name:12} {ratio(taken[name], taken['decoder']):.2f} times the CPU time of the decoder alone")


if __name__ == "__main__":
    main()
