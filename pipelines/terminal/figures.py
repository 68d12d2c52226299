"""Style of all figures: colours, names as literal text, titles and captions outside the axes, matrices, files."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from extract.system.atomic_files import atomic_write
from pipelines.terminal.text_output import printable

__all__ = [
    "COLOURS", "add_matrix", "add_words", "cycled", "drawable", "matrix_inches", "new_figure", "save_figure",
]  # fmt: skip

# Palette of Okabe and Ito: distinguishable with the common forms of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LONGEST = 28  # characters of a name
_WRITTEN = 16  # rows of a matrix up to which numbers are written into its cells
_NAMED = 40  # names beside it
_CHARACTER = 0.5  # mean width in units of the size of the font


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure atomically, in the format of the file's extension, and return the path."""
    FigureCanvasAgg(figure)
    with atomic_write(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # emoji are drawn as boxes
        with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):  # text stays text, which can be searched
            figure.savefig(file, format=path.suffix.removeprefix(".").lower(), dpi=150)
    return path


def drawable(name: str, longest: int = _LONGEST) -> str:
    """Return a name that matplotlib draws literally, of at most `longest` characters: its middle is left out."""
    name = printable(name)
    if len(name) > longest:  # layers of a network differ at the end
        name = f"{name[: longest // 2 - 1]}…{name[-(longest - longest // 2) :]}"
    # matplotlib reads text between $ as a formula, and leaves out of legends what starts with an underscore.
    name = name.replace("$", r"\$")
    return "\u200b" + name if name.startswith("_") else name


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure with one plot; `width` and `height` are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def add_words(figure: Figure, title: str, caption: str = "") -> None:
    """Write a title above and a caption below the plots, in lines as long as the figure is wide."""
    figure.suptitle(_lines(figure, title, 11), x=0.01, ha="left", fontsize=11)
    if caption:
        figure.supxlabel(_lines(figure, caption, 8), x=0.01, ha="left", fontsize=8, color="0.35")


def _lines(figure: Figure, text: str, size: int) -> str:
    width = int(72 * 0.97 * figure.get_figwidth() / (_CHARACTER * size))
    return "\n".join(textwrap.fill(line, width) for line in text.split("\n"))


def matrix_inches(names: Sequence[str]) -> float:
    """Return the side of a plot whose names and numbers are readable."""
    return min(11.0, 1.8 + 0.4 * len(names) + 0.05 * max(map(len, names)))


def add_matrix(
    figure: Figure, axes: Any, matrix: NDArray[Any], names: Sequence[str], *, title: str = "", form: str = "z.2f",
    colours: str = "magma", largest: float = 1.0, row_names: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Draw a square matrix (N, N) with its numbers, if they are readable, and the names of its rows and columns.

    Args:
        figure: the figure.
        axes: the plot.
        matrix: (N, N).
        names: names of the columns, as `drawable` returns them; of more than 40, some are written, at equal steps.
        title: title of the plot.
        form: format of the numbers; NaN is left out.
        colours: name of a colour map.
        largest: value of the last colour; the first is that of 0, or of the least value below.
        row_names: names of the rows; None: those of the columns.
    """
    least = min(0.0, float(np.nanmin(matrix, initial=0.0)))
    image = axes.imshow(matrix, cmap=colours, vmin=least, vmax=largest)
    axes.spines[["top", "right"]].set_visible(True)
    step = -(-len(names) // _NAMED)
    places = range(0, len(names), step)
    axes.set_xticks(places, names[::step], rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(places, (row_names or names)[::step], fontsize=8)
    if len(names) <= _WRITTEN:
        for (row, column), value in np.ndenumerate(matrix):
            if not math.isnan(value):
                red, green, blue, _ = image.to_rgba(value)
                dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                axes.text(column, row, format(value, form), ha="center", va="center", fontsize=7.5,
                          color="white" if dark else "black")  # fmt: skip
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.8)


def cycled(count: int) -> list[str]:
    """Return `count` colours, repeating `COLOURS` as needed."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
