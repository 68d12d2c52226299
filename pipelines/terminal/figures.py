"""Helpers for all figures: colours, names as literal text, files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from extract.system.atomic_files import atomic_write
from pipelines.terminal.text_output import printable

__all__ = ["COLOURS", "cycled", "drawable", "new_figure", "save_figure"]

# Palette of Okabe and Ito: distinguishable with the common forms of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LONGEST = 28  # characters of a name


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure atomically, in the format of the file's extension, and return the path."""
    FigureCanvasAgg(figure)
    with atomic_write(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # emoji are drawn as boxes
        figure.savefig(file, format=path.suffix.removeprefix(".").lower(), dpi=150)
    return path


def drawable(name: str, longest: int = _LONGEST) -> str:
    """Return a name that matplotlib draws literally, cut to `longest` characters."""
    name = printable(name)
    # matplotlib reads text between $ as a formula, and leaves out of legends what starts with an underscore.
    name = (name if len(name) <= longest else name[: longest - 1] + "…").replace("$", r"\$")
    return "\u200b" + name if name.startswith("_") else name


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure with one plot; `width` and `height` are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def cycled(count: int) -> list[str]:
    """Return `count` colours, repeating `COLOURS` as needed."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
