"""How similar stored layers are to each other, without labels: `layertap probe OUT --similarity`."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from extract.analysis.dataset_diff import distinct_images
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.similarity import MOST_COLUMNS, feature_similarity, is_too_wide
from extract.errors import InputError
from extract.store.reader import FeatureReader
from pipelines.probe.config import ProbeConfig
from pipelines.probe.job import arrays_of, data_sets, folder_of_results, opened_readers
from pipelines.terminal.figures import add_matrix, add_words, drawable, matrix_inches, save_figure
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.tables import holds_columns, print_aligned, table_file

__all__ = ["LayerSimilarity", "compare_layers", "in_order"]

_MOST_IMAGES = 2_000  # drawn with the seed
_MOST_PAIRS = 10  # that are printed
_TABLE = "similarity.csv"
_HEAD = ("data_set", "layer", "other_data_set", "other_layer", "linear_cka", "rsa")


@dataclass(frozen=True)
class LayerSimilarity:
    """How similar M layers are.

    Attributes:
        layers: (data set, layer) of each.
        n_images: number of images that they are compared on.
        cka: (M, M) linear CKA, unbiased.
        rsa: (M, M) representational similarity analysis.
    """

    layers: list[tuple[str, str]]
    n_images: int
    cka: NDArray[np.float64]
    rsa: NDArray[np.float64]

    @property
    def names(self) -> list[str]:
        """Names of the layers, with their data set if there are several."""
        several = len({data_set for data_set, _ in self.layers}) > 1
        return [f"{data_set}:{layer}" if several else layer for data_set, layer in self.layers]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places of each pair of layers, the most similar first."""
        every = zip(*np.triu_indices(len(self.layers), 1), strict=True)
        return sorted(((int(i), int(j)) for i, j in every), key=lambda pair: -np.nan_to_num(self.cka[pair], nan=-2))

    def print_text(self, echo: Callable[[str], None]) -> None:
        """Print the most and the least similar pairs."""
        echo(
            f"similarity on {self.n_images:,} images; 1: the same up to rotation and scale (linear CKA), "
            "the same order of dissimilarities (RSA); 0: unrelated"
        )
        pairs, half = self.pairs, _MOST_PAIRS // 2
        shown = pairs if len(pairs) <= _MOST_PAIRS else [*pairs[:half], *pairs[-half:]]
        rows = [[self.names[i], self.names[j], f"{self.cka[i, j]:.2f}", f"{self.rsa[i, j]:.2f}"] for i, j in shown]
        print_aligned([["layer", "and layer", "CKA", "RSA"], *rows], "<<>>", lambda line: echo(f"  {line}"))
        if len(shown) < len(pairs):
            echo(f"  the most and the least similar of {len(pairs):,} pairs; similarity.csv has all")

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        layers = [{"data_set": data_set, "layer": layer} for data_set, layer in self.layers]
        return {
            "images": self.n_images, "features": layers, "linear_cka": self.cka.tolist(), "rsa": self.rsa.tolist()
        }  # fmt: skip

    def write(self, folder: Path, form: str) -> list[Path]:
        """Write similarity.csv, with a line for each pair, and the figure; return their paths."""
        with table_file(folder / _TABLE) as write:
            write([*_HEAD])
            for i, j in zip(*np.triu_indices(len(self.layers), 1), strict=True):
                values = (repr(float(matrix[i, j])) for matrix in (self.cka, self.rsa))
                write([*self.layers[i], *self.layers[j], *values])
        return [folder / _TABLE, save_figure(self._figure(), folder / f"similarity.{form}")]

    def _figure(self) -> Figure:
        names = [drawable(name) for name in self.names]
        side = max(3.8, matrix_inches(names))
        figure = Figure(figsize=(2 * side + 0.8, side), layout="constrained")
        for axes, matrix, title in zip(figure.subplots(1, 2), (self.cka, self.rsa), ("linear CKA", "RSA"), strict=True):
            add_matrix(figure, axes, matrix, names, title=title)
        caption = (
            f"On {self.n_images:,} images. 1: the same up to rotation and scale (CKA), the same order of "
            "dissimilarities (RSA, Spearman). 0: unrelated."
        )
        add_words(figure, "Similarity of layers", caption)
        return figure


def compare_layers(config: ProbeConfig, say: Callable[[str], None]) -> tuple[LayerSimilarity, list[Path]]:
    """Compare the layers of data sets on images that all of them have; write a table and a figure.

    Args:
        config: configuration of the run.
        say: receives how many rows are left out.

    Returns:
        the result, and the written files.

    Raises:
        InputError: a path is not a data set, there is one layer only, a layer is too wide, there are fewer than four
            common images, or the results cannot be written.
        UnknownNameError: a layer does not exist.
    """
    with contextlib.ExitStack() as stack:
        readers = opened_readers(config, data_sets(config.out), stack, say)
        columns = {
            (name, "+".join(parts)): arrays
            for name, reader in readers.items()
            for parts, arrays in arrays_of(config, reader, name).items()
        }
        if len(columns) < 2:
            raise InputError(
                "--similarity compares layers, and there is one", hint="name more with -l, or two data sets"
            )
        rows = _common_rows(readers, config.seed)
        for (name, layer), arrays in columns.items():
            if is_too_wide(len(rows[name]), width := FeatureRows.of(arrays, rows[name][:1]).width):
                raise InputError(
                    f"{layer} of {name} has {width:,} values for an image; of so many images, --similarity takes at "
                    f"most {MOST_COLUMNS:,}",
                    hint="name narrower layers with -l, or compute it again with a pooling such as srp4096",
                )
        folder = _folder_for(config, list(columns))
        features = [in_order(arrays, rows[name]) for (name, _), arrays in columns.items()]
        count = len(features[0])
        found = feature_similarity(features, k=min(10, count - 1), seed=config.seed)
    result = LayerSimilarity(list(columns), count, found.cka, found.rsa)
    check_folder(folder)
    return result, result.write(folder, config.format)


def _folder_for(config: ProbeConfig, layers: list[tuple[str, str]]) -> Path:
    """Return the folder of the results, after a check that it has no other files of their names.

    Without `config.results`, it is OUT/probe/similarity, or similarity-2 and so on: the first without results of other
    layers. With images left out, it is OUT/probe/similarity-without: the table does not tell which they are.
    """
    name = "similarity" if config.without is None else "similarity-without"
    folder = config.results or folder_of_results(config, name)
    number = 2
    while config.results is None and _layers_in(folder / _TABLE) not in ([], layers):
        folder, number = folder.with_name(f"{name}-{number}"), number + 1
    names = (_TABLE, f"similarity.{config.format}")
    other = next((folder / name for name in names if (folder / name).exists()), None)
    if other is not None and not holds_columns(folder / _TABLE, _HEAD):
        raise InputError(f"{other} exists and is not of --similarity", hint="name another folder with -o")
    return folder


def _layers_in(table: Path) -> list[tuple[str, str]]:
    """Return the (data set, layer) of the results in a table, in order; none if it is not a table of results."""
    if not holds_columns(table, _HEAD):
        return []
    with table.open(encoding="utf-8", newline="") as lines:
        rows = [(line[0:2], line[2:4]) for line in csv.reader(lines) if len(line) >= 4][1:]
    return list(dict.fromkeys((data_set, layer) for pair in zip(*rows, strict=True) for data_set, layer in pair))


def _common_rows(readers: dict[str, FeatureReader], seed: int) -> dict[str, NDArray[np.int64]]:
    """Draw images that have features in all data sets: data set -> rows of these images, in the same order."""
    rows_of = {}
    for name, reader in readers.items():
        hashes, rows = distinct_images(reader)
        rows_of[name] = dict(zip(hashes.tolist(), rows.tolist(), strict=True))
    common = sorted(set.intersection(*(set(rows) for rows in rows_of.values())))
    if len(common) < 4:
        raise InputError(
            f"the data sets have {len(common)} images in common, by their bytes; --similarity needs at least 4"
        )
    drawn = np.random.default_rng(seed).permutation(len(common))[:_MOST_IMAGES]
    return {name: np.array([rows[common[i]] for i in drawn], np.int64) for name, rows in rows_of.items()}


def in_order(arrays: list[Any], rows: NDArray[np.int64]) -> FeatureRows:
    """Load rows into memory in the given order, which need not be ascending."""
    order = np.argsort(rows)
    array = FeatureRows.of(arrays, rows[order]).between(0, len(rows))
    return FeatureRows.of(array[np.argsort(order)])
