"""Which files of the library one image passes, and which a run passes before its first image.

    python -m tests.trace_path

The path of one image, from decoding to its row: two runs over different numbers of images are traced, in one process
and in batches of one image: what `extract_shard` calls, but to open and to publish the file, and what the thread does
that writes. What the longer run has more belongs to the images that it has more. A change of file is a call, or a
return, from a function of one file to one of another. It counts once, however often it happens, as for somebody who
reads along.

The cold path: a run over a folder of four images, decoded in the process itself, is traced from the call of
`extract_features` or of the job of `layertap embed` on. Counted are the functions of `extract`, `pipelines` and
`layertap` that are called, and the files that they are in, in all threads. Imports are not counted: all modules were
imported by a run before. The first image is read when its source is asked for its bytes; the files of the whole run are
counted up to its end.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import extract
from extract import extract_features, load_backbone
from pipelines.embed.config import EmbedConfig
from pipelines.embed.job import embed

ROOT = str(Path(extract.__file__).parents[1]) + "/"
PACKAGES = ("extract", "pipelines", "layertap")
FEWER, MORE = 8, 12
FIRST_IMAGE = ("extract/images/sources.py", "Files.read")
RESNET18: dict[str, Any] = {"backbone": "torchvision/resnet18", "weights": "random"}


@contextmanager
def traced(on_event: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Context manager: calls and returns in all threads that run or start in it."""
    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def file_of(frame: FrameType) -> str:
    """The file of a function of the library in its checkout; else empty."""
    file = frame.f_code.co_filename.removeprefix(ROOT)
    return file if file.partition("/")[0] in PACKAGES else ""


class WarmPath:
    """Calls of files of `extract`, and changes from one file to another, in all threads."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changes: Counter[tuple[str, str]] = Counter()
        self._here = threading.local()

    def on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        file = file_of(frame)
        if event not in ("call", "return") or not file.startswith("extract/") or not _is_on_the_path(frame):
            return
        if event == "call":
            self.calls[file] += 1
            self._move_to(file)
            return
        caller = frame.f_back
        while caller is not None and not file_of(caller).startswith("extract/"):
            caller = caller.f_back
        if caller is not None:
            self._move_to(file_of(caller))

    def _move_to(self, file: str) -> None:
        before = getattr(self._here, "file", file)
        if before != file:
            self.changes[before, file] += 1
        self._here.file = file


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


def path_of_one_image() -> tuple[set[str], set[tuple[str, str]]]:
    """Files that every image passes, and changes from one to another."""
    paths = []
    for images in (FEWER, MORE):
        with tempfile.TemporaryDirectory() as name:
            folder, path = Path(name), WarmPath()
            write_images(folder / "images", images)
            backbone = load_backbone("torchvision/resnet18", weights="random", device="cpu")
            with traced(path.on_event):
                extract_features(
                    folder / "images", out=folder / "out", backbone=backbone, layers=["layer4", "embedding"],
                    batch_size=1, workers=0, compile="off", progress=False,
                ).close()  # fmt: skip
            paths.append(path)
    calls, changes = paths[1].calls - paths[0].calls, paths[1].changes - paths[0].changes
    images = MORE - FEWER
    return (
        {file for file, count in calls.items() if count >= images},
        {change for change, count in changes.items() if count >= images},
    )


class ColdPath:
    """Calls of functions of the library in a job: (file, function) -> calls before the first image; all files."""

    def __init__(self, job: Callable[[], object]) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.files: set[str] = set()
        self._has_read = False
        with traced(self._on_event):
            job()
        assert self._has_read

    @property
    def files_before(self) -> set[str]:
        """Files with a function that is called before the first image."""
        return {file for file, _ in self.calls}

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        file = file_of(frame)
        if event != "call" or not file or frame.f_code.co_name == "<module>":
            return
        function = frame.f_code.co_qualname
        self._has_read = self._has_read or (file, function) == FIRST_IMAGE
        self.files.add(file)
        if not self._has_read:
            self.calls[file, function] += 1


def cold_paths() -> dict[str, ColdPath]:
    """The paths of three runs: of a loaded backbone, of one that is loaded by the call, and of the command."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, count = Path(temporary), iter(range(100))
        write_images(folder / "images", 4)

        def from_python(**settings: Any) -> None:
            out = folder / f"out{next(count)}"
            extract_features(folder / "images", out=out, device="cpu", workers=0, progress=False, **settings).close()

        def by_command() -> None:
            out = folder / f"out{next(count)}"
            embed(EmbedConfig(images=str(folder / "images"), out=str(out), device="cpu", workers=0))

        backbone = load_backbone("torchvision/resnet18", weights="random", device="cpu")
        jobs: dict[str, Callable[[], None]] = {
            "extract_features, with a loaded backbone": lambda: from_python(backbone=backbone),
            "extract_features, which loads the backbone": lambda: from_python(**RESNET18),
            "embed, with the bundled backbone": by_command,
        }
        for job in jobs.values():
            job()  # imports what a run needs
        return {name: ColdPath(job) for name, job in jobs.items()}


def main() -> None:
    """Print them."""
    files, changes = path_of_one_image()
    for before, after in sorted(changes):
        print(f"{before} -> {after}")
    print(f"{len(files)} files, {len(changes)} changes of file for one image")
    for name, path in cold_paths().items():
        print(
            f"{name}: before the first image {path.calls.total():,} calls of {len(path.calls)} functions in "
            f"{len(path.files_before)} files; in the whole run {len(path.files)} files"
        )


if __name__ == "__main__":
    main()
