"""The main jobs on real pictures, offline: `layertap demo`.

scikit-learn's handwritten digits (1,797 scans of 8x8 pixels, ten classes; Alpaydin and Kaynak, UCI repository) are
written as an image folder, `embed` runs on it with the bundled weights, `probe` tells how well a linear classifier
tells the digits apart by these features, and `report` makes a page of it all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from extract.errors import LayertapError
from pipelines.embed.config import EmbedConfig
from pipelines.probe.config import ProbeConfig

__all__ = ["READING", "demo_config", "demo_probe", "demo_report", "write_digits"]

READING = """\
from extract import FeatureReader
reader = FeatureReader("{out}")
x, y = reader["embedding"][:], reader.labels"""


def demo_config(folder: Path) -> EmbedConfig:
    """What the demo tells `embed`."""
    return EmbedConfig(images=str(folder / "digits"), out=folder / "features")


def demo_probe(folder: Path) -> ProbeConfig:
    """What the demo tells `probe`."""
    return ProbeConfig(out=[str(folder / "features")], results=folder / "probe")


def demo_report(folder: Path) -> Path:
    """Write the report of the demo; returns where it is."""
    from pipelines.data_sets.report import run_report

    return run_report(folder / "features", maps=("pca", "tsne"), probe_results=[folder / "probe"])


def write_digits(folder: Path) -> int:
    """Write the digits as `folder/<digit>/<number>.png`; returns how many.

    Raises:
        LayertapError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LayertapError("the demo needs scikit-learn: pip install 'layertap[demo]'") from error
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(digit) / f"{number:04d}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(path)  # 17 levels of grey
    return len(digits.images)
