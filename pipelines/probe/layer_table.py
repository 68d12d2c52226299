"""A table with a line for each layer, and what is printed and written with it: of brains and behaviour."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from extract.errors import InputError
from extract.row_status import Status
from extract.store.reader import FeatureReader
from extract.system.atomic_files import atomic_write, write_json
from extract.system.json_files import without_nan
from pipelines.probe.config import ProbeConfig
from pipelines.probe.job import arrays_of, data_sets, opened_readers
from pipelines.probe.report import clear, result_settings, results_folder
from pipelines.terminal.figures import add_words, drawable, save_figure
from pipelines.terminal.image_tables import images_of_names
from pipelines.terminal.tables import print_aligned, table_file
from pipelines.terminal.text_output import printable

__all__ = ["LayerTable", "Panel", "in_all", "layer_figure", "opened_layers"]


# Label of the y axis, a function that draws into axes, a band, such as a noise ceiling, or NaN, and a caption.
Panel = tuple[str, Callable[[Any], Any], tuple[float, float], str]


@dataclass
class LayerTable:
    """Results for each layer of data sets.

    Attributes:
        config: configuration of the run.
        readers: data set -> its reader.
        features: (data set, layer) -> its features.
        table: name of a column -> its value of each layer.
        notes: how images were matched, what was left out, and what the columns mean, in words.
        remarks: what is printed below the table.
        content: further content of results.json.
        figures: name -> figure.
        tables: name -> the lines of a further table.
        arrays: name -> array.
    """

    config: ProbeConfig
    readers: dict[str, FeatureReader]
    features: dict[tuple[str, str], list[Any]]
    table: dict[str, Sequence[Any]]
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    tables: dict[str, list[list[Any]]] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Name of each layer, with that of its data set if there are several."""
        return [" ".join(layer[len(self.readers) == 1 :]) for layer in self.features]

    @property
    def lines(self) -> list[tuple[Any, ...]]:
        """Values of each layer."""
        return list(zip(*self.table.values(), strict=True))

    def print_text(self, echo: Callable[[str], None]) -> None:
        """Print the notes, a line for each layer, and the remarks."""
        for note in self.notes:
            echo(printable(note))
        lines = [[f"{each:.3f}" if isinstance(each, float) else printable(str(each)) for each in line]
                 for line in self.lines]  # fmt: skip
        print_aligned([[*self.table], *lines], "<" * len(self.table), lambda line: echo(f"  {line}"))
        for remark in self.remarks:
            echo(printable(remark))

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON; numbers that are not finite become None."""
        layers = [dict(zip(self.table, line, strict=True)) for line in self.lines]
        content = {"configuration": result_settings(self.config), "notes": self.notes, "layers": layers}
        return without_nan(content | {"probes": []} | self.content)  # type: ignore[no-any-return]  # for a report

    def write(self, folder: Path) -> list[Path]:
        """Write results.json, results.csv with a line for each layer, and all else; return the paths."""
        clear(folder)
        write_json(folder / "results.json", self.as_json())
        tables = {"results": [[*self.table], *map(list, self.lines)], **self.tables}
        for name, lines in tables.items():
            with table_file(folder / f"{name}.csv") as write:
                for line in lines:
                    write(line)
        for name, array in self.arrays.items():
            with atomic_write(folder / f"{name}.npy") as file:
                np.save(file, array)
        drawn = [save_figure(figure, folder / f"{name}.{self.config.format}") for name, figure in self.figures.items()]
        files = [*(f"{name}.csv" for name in tables), *(f"{name}.npy" for name in self.arrays)]
        return [folder / "results.json", *(folder / name for name in files), *drawn]

    def named(self, names: Sequence[str] | None, count: int, where: str) -> Sequence[str]:
        """Return the names of `count` stimuli; without names, they are the rows of the first data set; add a note.

        Raises:
            InputError: there are more or fewer names.
        """
        first = next(iter(self.readers))
        if names is None:
            names = self.readers[first].paths[:]
            self.notes.append(f"{where} names no images: they are taken for the rows of {first}, in their order")
        if len(names) != count:
            found = f"{where} has {count:,} images, and {self.config.stimuli or first} {len(names):,}"
            raise InputError(found, hint="name them in their order: --stimuli FILE.csv")
        return names

    def rows_of(self, names: Sequence[str], where: str, may_be_ids: bool = True) -> dict[str, NDArray[np.int64]]:
        """Return data set -> its row (N,) of each of N stimuli, -1 without features; add notes."""
        rows = {}
        for name, reader in self.readers.items():
            root = str(reader.provenance.get("configuration", {}).get("images", ""))
            found, by = images_of_names(where, names, reader.paths, reader.ids if may_be_ids else None, root)
            rows[name] = np.where(reader.status[found] == Status.OK, found, -1)
            there, good = int((found >= 0).sum()), int((rows[name] >= 0).sum())
            failed = f", of which {there - good:,} failed" if good < there else ""
            matched = f"{where}: {there:,} of {len(names):,} images matched {by}"
            self.notes.append(f"{matched} with the {len(reader):,} of {name}{failed}")
        return rows


@contextlib.contextmanager
def opened_layers(config: ProbeConfig, say: Callable[[str], None]) -> Iterator[tuple[LayerTable, Path]]:
    """Context manager: open the data sets and the folder of the results."""
    with contextlib.ExitStack() as stack:
        readers = opened_readers(config, data_sets(config.out), stack, say)
        features = {(name, "+".join(parts)): arrays for name, reader in readers.items()
                    for parts, arrays in arrays_of(config, reader, name).items()}  # fmt: skip
        columns: Any = zip(("data_set", "layer"), zip(*features, strict=True), strict=True)
        run = LayerTable(config, readers, features, dict(columns))
        yield run, stack.enter_context(results_folder(config))


def in_all(rows: dict[str, NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Return whether each stimulus has features in all data sets; see `LayerTable.rows_of`."""
    return np.asarray(np.all([found >= 0 for found in rows.values()], 0))


def layer_figure(names: Sequence[str], title: str, panels: Sequence[Panel]) -> Figure:
    """Draw panels, one above the other, with a place on the x axis for each name."""
    size = (min(16.0, max(5.0, 1.6 + 0.55 * len(names))), 3.8 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    for axes, (label, draw, band, _) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        axes.axhspan(*band, color="0.6", alpha=0.5)
        draw(axes)
        axes.set_xticks(range(len(names)), map(drawable, names), fontsize=8, rotation=40, ha="right")
        axes.set_ylabel(label)
    add_words(figure, title, "\n".join(caption for *_, caption in panels))
    return figure
