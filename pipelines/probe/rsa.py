"""Stored layers against dissimilarities and odd-one-out choices of brains or behaviour: `layertap probe OUT -p rsa`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from extract.analysis.rsa import CHANCE, Floats, RdmComparison, compare_rdms, images_of_pairs, odd_one_out
from extract.errors import InputError
from extract.row_status import Status
from extract.store.reader import FeatureReader
from extract.system.atomic_files import write_json
from extract.system.dissimilarities import dissimilarities
from extract.system.json_files import without_nan
from pipelines.probe.config import ProbeConfig
from pipelines.probe.job import arrays_of, data_sets, opened_readers
from pipelines.probe.layer_similarity import in_order
from pipelines.probe.rdm_files import read_rdms, read_stimuli, read_triplets
from pipelines.probe.report import clear, result_settings, results_folder
from pipelines.terminal.figures import COLOURS, add_words, drawable, save_figure
from pipelines.terminal.image_tables import images_of_names
from pipelines.terminal.tables import print_aligned, table_file
from pipelines.terminal.text_output import counted, printable

__all__ = ["RsaRun", "compare_with_rdms"]

_MOST_IMAGES = 4_000  # whose pairs take 64 MB in each RDM
_DRAWN = 11  # layers whose RDMs are drawn
_KENDALL_DRAWS = 200  # each takes as long as many of the others
_OF_RDMS = "Bars have their 95 % interval; the noise ceiling is grey."
_OF_TRIPLETS = "Accuracies of odd-one-out choices have their standard error; chance is grey."
_Rows = dict[str, NDArray[np.int64]]  # data set -> its row of each stimulus; -1 without features


@dataclass
class RsaRun:
    """Similarities of M layers to given RDMs, and their accuracies in odd-one-out choices.

    Attributes:
        config: configuration of the run.
        readers: data set -> its reader.
        features: (data set, layer) -> its features.
        table: name of a column -> its value of each layer.
        notes: how images were matched, what was left out, and what the columns mean, in words.
        rdms: (M, pairs) of the layers.
        given: (S, pairs) of the subjects.
        compared: the comparison of both; None without --rdm.
    """

    config: ProbeConfig
    readers: dict[str, FeatureReader]
    features: dict[tuple[str, str], list[Any]]
    table: dict[str, Sequence[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rdms: Floats = field(default_factory=lambda: np.empty((0, 0)))
    given: Floats = field(default_factory=lambda: np.empty((0, 0)))
    compared: RdmComparison | None = None

    @property
    def by(self) -> str:
        """Name of the comparison."""
        return self.config.compare or "spearman"

    def print_text(self, echo: Callable[[str], None]) -> None:
        """Print the notes, and a line for each layer."""
        for note in self.notes:
            echo(printable(note))
        lines = [[each if isinstance(each, str) else f"{each:.3f}" for each in line] for line in self.lines]
        print_aligned([[*self.table], *lines], "<" * len(self.table), lambda line: echo(f"  {line}"))
        if len(lines) > 1:
            echo("the best layer is chosen on the images that it is measured with: its value is descriptive")

    @property
    def lines(self) -> list[tuple[Any, ...]]:
        """Values of each layer."""
        return list(zip(*self.table.values(), strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON; numbers that are not finite become None."""
        layers = [dict(zip(self.table, line, strict=True)) for line in self.lines]
        content: dict[str, Any] = {"configuration": result_settings(self.config), "notes": self.notes, "layers": layers}
        if self.compared is not None:
            content |= {"noise_ceiling": self.compared.ceiling, "subjects": self.compared.values.tolist()}
        return without_nan(content | {"probes": []})  # type: ignore[no-any-return]  # a report shows `probes`

    def write(self, folder: Path) -> list[Path]:
        """Write results.json, results.csv with a line for each layer, and the figures; return their paths."""
        clear(folder)
        write_json(folder / "results.json", self.as_json())
        with table_file(folder / "results.csv") as write:
            for line in ([*self.table], *self.lines):
                write(list(line))
        figures = {"layers": self._bars(), **({} if self.compared is None else {"rdms": self._matrices()})}
        drawn = [save_figure(figure, folder / f"{name}.{self.config.format}") for name, figure in figures.items()]
        return [folder / "results.json", folder / "results.csv", *drawn]

    def _bars(self) -> Figure:
        names, found = [" ".join(layer[len(self.readers) == 1 :]) for layer in self.features], self.compared
        of_rdms = () if found is None else ((self.by, found.high - found.mean, found.ceiling),)
        of_triplets = (("odd_one_out", self.table.get("standard_error"), (CHANCE, CHANCE)),)
        panels = [panel for panel in (*of_rdms, *of_triplets) if panel[0] in self.table]
        size = (min(16.0, max(5.0, 1.6 + 0.55 * len(names))), 3.8 * len(panels))
        figure = Figure(figsize=size, layout="constrained")
        for axes, (column, errors, band) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
            axes.axhspan(*band, color="0.6", alpha=0.5)
            axes.bar(range(len(names)), self.table[column], yerr=errors, color=COLOURS[0], capsize=3, width=0.7)
            axes.set_xticks(range(len(names)), map(drawable, names), fontsize=8, rotation=40, ha="right")
            axes.set_ylabel(column.replace("_", " "))
        captions = [_OF_TRIPLETS if column == "odd_one_out" else _OF_RDMS for column, *_ in panels]
        add_words(figure, "Layers against brains or behaviour", "\n".join(captions))
        return figure

    def _matrices(self) -> Figure:
        names = [f"mean of {counted(len(self.given), 'subject')}", *map(" ".join, self.features)][: _DRAWN + 1]
        columns, images = min(4, len(names)), images_of_pairs(self.given.shape[1])
        lines = -(-len(names) // columns)
        figure = Figure(figsize=(3.0 * columns, 2.7 * lines + 0.8), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flat
        for axes, name, rdm in zip(panels, names, [self.given.mean(0), *self.rdms], strict=False):
            matrix = np.zeros((images, images))
            matrix[np.triu_indices(images, 1)] = rdm
            figure.colorbar(axes.imshow(matrix + matrix.T), ax=axes, shrink=0.8)
            axes.set_title(drawable(name), fontsize=9)
        for axes in figure.axes[: lines * columns]:
            axes.set_axis_off()
        left_out = len(self.features) - _DRAWN
        caption = f"The first {_DRAWN} of {len(self.features)} layers are drawn." if left_out > 0 else ""
        add_words(figure, "Dissimilarities of pairs of images", caption)
        return figure


def compare_with_rdms(config: ProbeConfig, say: Callable[[str], None]) -> tuple[RsaRun, list[Path]]:
    """Compare the layers of data sets with given RDMs and odd-one-out choices; write tables and figures.

    Args:
        config: configuration of the run.
        say: receives a line about each step.

    Returns:
        the results, and the written files.

    Raises:
        InputError: a file cannot be used, its images are not those of the data sets, fewer than 3 are left, an RDM is
            constant, or an image has no dissimilarity in a layer.
        UnknownNameError: a layer does not exist.
    """
    rdms, names = (None, None) if config.rdm is None else read_rdms(config.rdm)
    stimuli = read_stimuli(config.stimuli) if config.stimuli else names
    with contextlib.ExitStack() as stack:
        readers = opened_readers(config, data_sets(config.out), stack, say)
        features = {(name, "+".join(parts)): arrays for name, reader in readers.items()
                    for parts, arrays in arrays_of(config, reader, name).items()}  # fmt: skip
        run, folder = RsaRun(config, readers, features), stack.enter_context(results_folder(config))
        run.table = dict(zip(("data_set", "layer"), zip(*features, strict=True), strict=True))
        if rdms is not None:
            say(f"comparing {counted(len(features), 'layer')} by {run.by}")
            _compare(run, rdms, stimuli, str(config.rdm))
        if config.triplets is not None:
            say(f"choosing by {counted(len(features), 'layer')}")
            _choose(run, *read_triplets(config.triplets), stimuli, config.triplets)
        return run, run.write(folder)


def _compare(run: RsaRun, rdms: Floats, names: Sequence[str] | None, where: str) -> None:
    count = images_of_pairs(rdms.shape[1])
    rows = _rows_of(run, names, count, where)
    kept = _checked(np.flatnonzero(_in_all(rows)), where)
    place, pairs = np.zeros((count, count), np.int64), np.triu_indices(len(kept), 1)
    place[np.triu_indices(count, 1)] = np.arange(rdms.shape[1])
    run.given = rdms[:, (place + place.T)[np.ix_(kept, kept)][pairs]]
    run.rdms = np.stack([_rdm(run, layer, rows[layer[0]][kept], "correlation")[pairs] for layer in run.features])
    draws, names = _KENDALL_DRAWS if run.by == "kendall" else 1_000, list(map(" ".join, run.features))
    found = compare_rdms(run.rdms, run.given, by=run.by, draws=draws, seed=run.config.seed, names=names)
    run.compared = found
    run.table |= {run.by: found.mean.tolist(), "low": found.low.tolist(), "high": found.high.tolist()}
    run.table |= {"behind_best_low": found.behind[:, 0].tolist(), "behind_best_high": found.behind[:, 1].tolist()}
    over = "images and subjects" if len(rdms) > 1 else "images"
    run.notes += [
        f"{counted(len(rdms), 'subject')}, {len(kept):,} images, {found.n_pairs:,} of {len(pairs[0]):,} pairs known",
        f"low, high: 95 % interval over {over}, {draws:,} samples; behind_best: that of the difference to the best",
        "noise ceiling: {:.3f} to {:.3f}".format(*found.ceiling) if len(rdms) > 1 else "one subject: no noise ceiling",
    ]


def _choose(
    run: RsaRun, triplets: NDArray[np.int64], names: list[str] | None, stimuli: list[str] | None, where: str
) -> None:
    chosen = stimuli if names is None else names
    count = len(next(iter(run.readers.values()))) if chosen is None else len(chosen)
    if triplets.min() < 0 or triplets.max() >= count:
        raise InputError(f"{where}: images {triplets.min()} to {triplets.max()}; expected 0 to {count - 1}")
    rows = _rows_of(run, chosen, count, where)
    there = _in_all(rows)[triplets]
    if names is not None and not there[0].any():  # a header
        triplets, there = triplets[1:], there[1:]
    used = triplets[there.all(1)]
    images, places = np.unique(used, return_inverse=True)
    _checked(images, where)
    note = f"{where}: {len(used):,} of {len(triplets):,} triplets have all images"
    run.notes.append(f"{note}; odd_one_out: accuracy by cosine, chance {CHANCE:.3f}")
    scores = [
        odd_one_out(_rdm(run, layer, rows[layer[0]][images], "cosine"), places.reshape(-1, 3)) for layer in run.features
    ]
    run.table |= dict(zip(("odd_one_out", "standard_error"), zip(*scores, strict=True), strict=True))


def _rows_of(run: RsaRun, names: Sequence[str] | None, count: int, where: str) -> _Rows:
    """Return the rows of `count` stimuli. Without names, these are the rows of the first data set, in their order."""
    first = next(iter(run.readers))
    if names is None:
        names = run.readers[first].paths[:]
        run.notes.append(f"{where} names no images: they are taken for the rows of {first}, in their order")
    if len(names) != count:
        hint = "name them in their order: --stimuli FILE.csv"
        raise InputError(f"{where} has {count:,} images, and {run.config.stimuli or first} {len(names):,}", hint=hint)
    rows = {}
    for name, reader in run.readers.items():
        root = str(reader.provenance.get("configuration", {}).get("images", ""))
        found, by = images_of_names(where, names, reader.paths, reader.ids, root)
        rows[name] = np.where(reader.status[found] == Status.OK, found, -1)
        there, good = int((found >= 0).sum()), int((rows[name] >= 0).sum())
        failed = f", of which {there - good:,} failed" if good < there else ""
        matched = f"{where}: {there:,} of {count:,} images matched {by}"
        run.notes.append(f"{matched} with the {len(reader):,} of {name}{failed}")
    return rows


def _in_all(rows: _Rows) -> NDArray[np.bool_]:
    return np.asarray(np.all([found >= 0 for found in rows.values()], 0))


def _checked(images: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    if not 3 <= len(images) <= _MOST_IMAGES:
        raise InputError(f"{where}: {len(images):,} of its images have features; expected 3 to {_MOST_IMAGES:,}")
    return images


def _rdm(run: RsaRun, layer: tuple[str, str], rows: NDArray[np.int64], metric: str) -> Floats:
    features = in_order(run.features[layer], rows)
    matrix = dissimilarities(features.between(0, len(features)), metric)
    if (missing := np.isnan(np.diag(matrix))).any():
        path = printable(run.readers[layer[0]].paths[int(rows[missing.argmax()])])
        hint = "leave the image out (--without FILE), or name other layers with -l"
        what = f"{layer[1]} of {layer[0]}: {path} has no {metric} with others"
        raise InputError(f"{what}: its values are all equal, 0 or not finite", hint=hint)
    return matrix
