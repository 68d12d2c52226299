"""Which files of the library one image passes on its way to a row, and how often the way changes the file.

    python -m tests.trace_path

Two runs over different numbers of images are traced, in one process and with batches of one image. What the longer run
has more, divided by the images that it has more, belongs to one image: setting up and publishing cancel out. A change
of file is a call of a function in another file, or the return from it.
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
    """Counts calls of files of the library, and changes from one to another, in all threads."""

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
        if event == "call" and (file := _file_of(frame)):
            self.calls[file] += 1
            self._move_to(file)
        elif event == "return" and _file_of(frame):
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


def traced(images: int, folder: Path) -> Trace:
    """The trace of a run over so many images."""
    for number in range(images):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3)).astype(np.uint8)
        path = folder / "images" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    backbone = load_backbone("torchvision/resnet18", weights="random", device="cpu")
    trace = Trace()
    with trace.running():
        extract_features(
            folder / "images", out=folder / "out", backbone=backbone, layers=["layer4", "embedding"], batch_size=1,
            workers=0, compile="off", progress=False,
        ).close()  # fmt: skip
    return trace


def path_of_one_image() -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Calls of each file, and changes between files, for one image."""
    found = []
    for images in (FEWER, MORE):
        with tempfile.TemporaryDirectory() as folder:
            found.append(traced(images, Path(folder)))
    calls, changes = found[1].calls - found[0].calls, found[1].changes - found[0].changes
    images = MORE - FEWER
    return (
        Counter({file: count for file, count in calls.items() if count >= images}),
        Counter({change: count for change, count in changes.items() if count >= images}),
    )


def main() -> None:
    """Print them."""
    calls, changes = path_of_one_image()
    images = MORE - FEWER
    for file, count in sorted(calls.items()):
        print(f"{count / images:6.1f} calls  {file}")
    for (before, after), count in sorted(changes.items()):
        print(f"{count / images:6.1f} times  {before} -> {after}")
    print(f"{len(calls)} files, {sum(changes.values()) / images:.1f} changes of file for one image")


if __name__ == "__main__":
    main()
