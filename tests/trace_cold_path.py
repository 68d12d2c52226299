"""Which files of the library a run passes before its first image.

    python -m tests.trace_cold_path

Counted are calls of functions of `extract`, `pipelines` and `layertap`, in all threads, and the files that they are in; imports
are not. Counting begins with the call of `extract_features` or `embed`, with the modules imported, and stops when the first image
is read.
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

ROOT = str(Path(extract.__file__).parents[1]) + "/"


class ColdPath:
    """Calls of functions of the library: (file, function) -> number, before the first image and of the whole run."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.before_first_image: Counter[tuple[str, str]] | None = None
        self.order = {}

    @contextmanager
    def running(self):
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(ROOT) or frame.f_code.co_name == "<module>":
            return
        file = name.removeprefix(ROOT)
        if file.partition("/")[0] not in ("extract", "pipelines", "layertap"):
            return
        function = frame.f_code.co_qualname
        if self.before_first_image is None and (file, function) == ("extract/images/sources.py", "Files.read"):
            self.before_first_image = self.calls.copy()
        self.calls[file, function] += 1


def write_images(folder: Path, n=4):
    for number in range(n):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3)).astype(np.uint8)
        path = folder / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def report(title, path):
    b = path.before_first_image
    print(
        f"== {title}: before: {sum(b.values())} calls of {len(b)} functions in {len({f for f, _ in b})} files; whole run {len(path.calls)} functions in {len({f for f, _ in path.calls})} files"
    )
    per = Counter()
    fn = Counter()
    for (f, _), c in b.items():
        per[f] += c
        fn[f] += 1
    for f, c in per.items():
        print(
            f"   {f} {fn[f]} functions {c} calls"
            + (": " + " ".join(q for (g, q) in b if g == f) if "-v" in sys.argv else "")
        )
    print("  then", sorted({f for f, _ in path.calls} - {f for f, _ in b}))


def main():
    with tempfile.TemporaryDirectory() as t:
        t = Path(t)
        write_images(t / "images")
        backbone = load_backbone("torchvision/resnet18", weights="random", device="cpu")
        import importlib, extract.extraction.run

        extract_features(t / "images", out=t / "warm", backbone=backbone, workers=0, progress=False).close()
        p = ColdPath()
        with p.running():
            extract_features(t / "images", out=t / "out", backbone=backbone, workers=0, progress=False).close()
        report("extract_features loaded", p)
        p = ColdPath()
        with p.running():
            extract_features(t / "images", out=t / "out1", workers=0, progress=False).close()
        report("extract_features bundled", p)
        p = ColdPath()
        with p.running():
            extract_features(
                t / "images", out=t / "out1", backbone=backbone, workers=0, progress=False
            ).close() if 0 else extract_features(
                t / "images",
                out=t / "out2",
                backbone="torchvision/resnet18",
                weights="random",
                workers=0,
                progress=False,
            ).close()
        report("extract_features resnet18 spec", p)
        from pipelines.embed.config import EmbedConfig
        from pipelines.embed.job import embed

        p = ColdPath()
        config = EmbedConfig(images=str(t / "images"), out=str(t / "out3"), workers=0)
        with p.running():
            embed(config)
        report("embed bundled", p)


if __name__ == "__main__":
    main()
