"""What all pictures have in common: colours, names that are drawn as they are, files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from extract.system.atomic_files import whole_file
from pipelines.terminal.text_output import printable

__all__ = ["COLOURS", "cycled", "drawable", "new_figure", "save_figure"]

# Of Okabe and Ito: they can be told apart in the common forms of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LONGEST = 28  # characters of a name


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a picture whole or not at all, in the format of the file's name; returns the path."""
    FigureCanvasAgg(figure)
    with whole_file(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # emoji are drawn as boxes
        figure.savefig(file, format=path.suffix.removeprefix(".").lower(), dpi=150)
    return path


def drawable(name: str, longest: int = _LONGEST) -> str:
    """A name that matplotlib draws as it is: no formulas, and no underscore in front, which hides it in legends."""
    name = printable(name)
    name = (name if len(name) <= longest else name[: longest - 1] + "…").replace("$", r"\$")
    return "\u200b" + name if name.startswith("_") else name


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of so many inches with one plot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def cycled(count: int) -> list[str]:
    """So many colours; after the last of them, the first again."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
