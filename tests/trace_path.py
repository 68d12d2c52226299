"""Which files of the library one image passes from decoding to its row, and how often a reader must change the file.

    python -m tests.trace_path

Two runs over different numbers of images are traced, in one process and in batches of one image: what `extract_shard`
calls, but to open and to publish the file, and what the thread does that writes. What the longer run has more belongs
to the images that it has more. A change of file is a call, or a return, from a function of one file to one of another.
It counts once, however often it happens, as for somebody who reads along.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import extract
from extract import extract_features, load_backbone

LIBRARY = str(Path(extract.__file__).parent) + "/"
FEWER, MORE = 8, 12


class Trace:
    """Calls of files of the library, and changes from one file to another, in all threads."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changes: Counter[tuple[str, str]] = Counter()
        self._here = threading.local()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace the block, and threads that start in it."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not (file := _file_of(frame)) or not _is_on_the_path(frame):
            return
        if event == "call":
            self.calls[file] += 1
            self._move_to(file)
            return
        caller = frame.f_back
        while caller is not None and not _file_of(caller):
            caller = caller.f_back
        if caller is not None:
            self._move_to(_file_of(caller))

    def _move_to(self, file: str) -> None:
        before = getattr(self._here, "file", file)
        if before != file:
            self.changes[before, file] += 1
        self._here.file = file


def _file_of(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return name.removeprefix(LIBRARY) if name.startswith(LIBRARY) else ""


def _is_on_the_path(frame: FrameType | None) -> bool:
    """Whether it runs inside `extract_shard`, but not to open or publish the file, or in the thread that writes."""
    if threading.current_thread().name.startswith("writer"):
        return True
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("open_part", "publish"):
            return False
        if name == "extract_shard":
            return True
        frame = frame.f_back
    return False


def write_images(folder: Path, count: int) -> None:
    """Write so many pictures of noise."""
    folder.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")


def traced(images: int, folder: Path) -> Trace:
    """The trace of a run over so many images."""
    write_images(folder / "images", images)
    backbone = load_backbone("torchvision/resnet18", weights="random", device="cpu")
    trace = Trace()
    with trace.running():
        extract_features(
            folder / "images", out=folder / "out", backbone=backbone, layers=["layer4", "embedding"], batch_size=1,
            workers=0, compile="off", progress=False,
        ).close()  # fmt: skip
    return trace


def path_of_one_image() -> tuple[set[str], set[tuple[str, str]]]:
    """Files that every image passes, and changes from one to another."""
    traces = []
    for images in (FEWER, MORE):
        with tempfile.TemporaryDirectory() as folder:
            traces.append(traced(images, Path(folder)))
    calls, changes = traces[1].calls - traces[0].calls, traces[1].changes - traces[0].changes
    images = MORE - FEWER
    return (
        {file for file, count in calls.items() if count >= images},
        {change for change, count in changes.items() if count >= images},
    )


def main() -> None:
    """Print them."""
    files, changes = path_of_one_image()
    for before, after in sorted(changes):
        print(f"{before} -> {after}")
    print(f"{len(files)} files, {len(changes)} changes of file for one image")


if __name__ == "__main__":
    main()
