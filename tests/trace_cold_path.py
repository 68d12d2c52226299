"""Which files of the library a run passes before its first image, and how many functions it calls there.

    python -m tests.trace_cold_path [-v]

A run over a folder of four images, decoded in the process itself, is traced from the call of `extract_features` or of
the job of `layertap embed` on. Counted are the functions of `extract`, `pipelines` and `layertap` that are called, and
the files that they are in, in all threads. Imports are not counted: all modules were imported by a run before. The
first image is read when its source is asked for its bytes; the files of the whole run are counted up to its end. `-v`
prints each file with its functions.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import extract
from extract import extract_features, load_backbone
from pipelines.embed.config import EmbedConfig
from pipelines.embed.job import embed
from tests.trace_path import write_images

ROOT = str(Path(extract.__file__).parents[1]) + "/"
PACKAGES = ("extract", "pipelines", "layertap")
FIRST_IMAGE = ("extract/images/sources.py", "Files.read")
RESNET18: dict[str, Any] = {"backbone": "torchvision/resnet18", "weights": "random"}


@dataclass
class ColdPath:
    """Calls of functions of the library.

    Attributes:
        calls: (file, function) -> calls before the first image.
        files: files with a function that is called in the whole run.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    files: set[str] = field(default_factory=set)
    has_read: bool = False

    @property
    def files_before(self) -> set[str]:
        """Files with a function that is called before the first image."""
        return {file for file, _ in self.calls}

    def run(self, job: Callable[[], object]) -> ColdPath:
        """Trace a job."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            job()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        assert self.has_read
        return self

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name == "<module>":
            return
        file = code.co_filename.removeprefix(ROOT)
        if file.partition("/")[0] not in PACKAGES:
            return
        self.has_read = self.has_read or (file, code.co_qualname) == FIRST_IMAGE
        self.files.add(file)
        if not self.has_read:
            self.calls[file, code.co_qualname] += 1


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
        return {name: ColdPath().run(job) for name, job in jobs.items()}


def main() -> None:
    """Print them."""
    for name, path in cold_paths().items():
        print(
            f"{name}: before the first image {path.calls.total():,} calls of {len(path.calls)} functions in "
            f"{len(path.files_before)} files; in the whole run {len(path.files)} files"
        )
        if "-v" in sys.argv:
            for file in sorted(path.files):
                called = {function: calls for (other, function), calls in path.calls.items() if other == file}
                names = ", ".join(called) if called else "only after the first image"
                print(f"    {file} ({sum(called.values()):,} calls): {names}")


if __name__ == "__main__":
    main()
