"""The page of `layertap report`: one HTML file with its content as JSON; see `pipelines.terminal.page.assembly`.

Names of files and classes may come from any source: they are displayed as text, and the page's policy forbids scripts
other than its own and all downloads. These draw the map and charts. plotly took 4.6 of the 10 MB that a page may have,
and drew no pictures as points.
"""

from __future__ import annotations

import base64
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.feature_statistics import statistics_of
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.nearest_rows import layer_to_search
from extract.analysis.projection import axes_of_sample, project, tsne, umap
from extract.analysis.row_findings import (
    KINDS,
    QUICK_PRODUCTS,
    Finding,
    K,
    SimilarImages,
    map_neighbours,
    near_duplicate_cosine,
    outlier_cosine,
    similar_images,
)
from extract.analysis.row_groups import row_groups
from extract.errors import InputError
from extract.row_status import Status
from extract.store.reader import FeatureReader
from extract.system.atomic_files import link_target, write_whole
from extract.system.optional_libraries import own_version
from extract.system.urls import is_url
from pipelines.data_sets.findings import as_csv, findings_by_pictures
from pipelines.data_sets.report.probe_results import Prediction, predictions_of, probes
from pipelines.data_sets.show import describe, print_description
from pipelines.terminal.output_paths import check_file
from pipelines.terminal.page.assembly import assembled, is_page
from pipelines.terminal.page.thumbnail_sheets import ThumbnailSheets, sheets_of_rows
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.text_output import data_set_name, printable

__all__ = ["run_report"]

PAGE_BYTES = 10_000_000  # at most; thumbnails take the rest
_KIND = "report"
_MAPS = {"tsne": "t-SNE", "pca": "PCA", "umap": "UMAP"}
_POINTS = 5000  # of the map; t-SNE takes about 25 s for this number
_PRINCIPAL_ROWS = 100_000  # from which principal axes are computed
_RANDOM = 6  # images whose neighbours are shown if there are no classes
_CENTRAL = 10  # classes whose most central image is shown
_SHOWN = 48  # pictures of findings of a kind
_LISTED = 500  # findings of a kind
_SAVED = 20_000  # findings in the CSV file in the page
_PROBED_VALUES = 2e8  # rows x values x classes: a search for suspect labels of about 60 s of CPU
_WRONG = 500  # images that a probe misclassified
_WRONG_PICTURES = 60  # of these, with a thumbnail of their own
_CLASSES = 2000
_LONGEST = 300  # characters of a path
_BINS = 40
_URL_THUMBNAILS = 200  # each image is downloaded


def run_report(
    out: Path, *, output: Path | None = None, layer: str | None = None,
    maps: Sequence[str] = ("tsne", "pca"), probe_results: Sequence[Path] = (), images: str | None = None,
    thumbnails: int = 5000, seed: int = 0, say: Callable[[str], None] = lambda text: None,
) -> Path:  # fmt: skip
    """Write the page and return its path.

    Args:
        out: folder of the data set, which may be incomplete.
        output: HTML file; None: OUT/report.html.
        layer: layer by which images are compared; None: `embedding`, or the last layer.
        maps: some of pca, tsne and umap; the page opens on the first.
        probe_results: folders or files of results besides OUT/probe.
        images: location of the images; None: the recorded location, unless images would be fetched from a URL.
        thumbnails: maximum number of thumbnails; 0: no thumbnails.
        seed: seed of random choices.
        say: receives a line about each step.

    Raises:
        InputError: `out` is not a data set, the layer does not exist, or the file cannot be written.
        LayertapError: a library for a map is missing, or the data set cannot be read.
    """
    written_to = out / "report.html" if output is None else link_target(output)
    output = output or written_to
    check_file(output)
    if output.is_file() and not is_page(_KIND, output):
        raise InputError(f"{output} already exists and is not a layertap report", hint="name another file")
    say("reading the description")
    described = describe(out)
    with FeatureReader(out, partial=not described["complete"], check=True) as reader:
        content = _ReportContent(reader, described, layer, seed, say)
        content.fill(maps, probe_results, images)
        content.list_rows()
        say("making thumbnails")
        room = PAGE_BYTES - len(content.page()) - 200_000  # for the list of the thumbnails
        content.add_thumbnails(images, thumbnails, room)
    write_whole(written_to, content.page())
    return output


class _ReportContent:
    """Content of a report.

    Args:
        reader: reader of the data set.
        described: its description by `pipelines.data_sets.show.describe`.
        layer: layer by which images are compared; None: `embedding`, or the last layer.
        seed: seed of random choices.
        say: receives a line about each step.

    Attributes:
        data: what the page shows, written as JSON.
    """

    def __init__(
        self, reader: FeatureReader, described: dict[str, Any], layer: str | None, seed: int, say: Callable[[str], None]
    ):
        self._reader, self._described, self._seed, self._say = reader, described, seed, say
        self._good = np.flatnonzero(reader.status == Status.OK)
        self._failed = {row for row, *_ in reader.failures}
        self._listed_rows: dict[int, None] = {}  # rows that the page names
        self._thumbnail_rows: dict[int, None] = {}  # rows that should have thumbnails, most important first
        self._predictions: dict[int, Prediction] = {}
        self.data: dict[str, Any] = {"notes": []}
        if layer is None and "embedding" not in reader.layers and len(reader.layers) > 1:
            layer = reader.layers[-1]
            note = f"There is no layer embedding; images are compared by the last layer, {layer}."
            self.data["notes"].append(printable(note))
        self._layer = layer_to_search(reader.layers, layer, described["out"])

    def page(self) -> bytes:
        """Return the page with the content so far."""
        return assembled(_KIND, self.data, "pipelines.data_sets.report", ["map.js", "sections.js"])

    def fill(self, maps: Sequence[str], probe_results: Sequence[Path], images: str | None) -> None:
        """Fill in everything except what `list_rows` and `add_thumbnails` add."""
        described, lines = self._described, list[str]()
        print_description(described, lines.append)
        self.data |= {
            "title": printable(data_set_name(str(Path(described["out"]).resolve()))),
            "version": own_version(),
            "written": datetime.now(UTC).isoformat(" ", "seconds"),
            "layer": printable(self._layer),
            "description": lines,
            "backbone": printable(described.get("provenance", {}).get("backbone", "")),
            "counts": {
                "rows": len(self._reader),
                "good": len(self._good),
                "failed": len(self._failed),
                "classes": len(self._reader.classes),
            },
        }
        if not described["complete"]:
            self.data["notes"].append("The data set is unfinished: this page shows the rows that are done.")
        self._classes()
        neighbours = self._similar_images() if len(self._good) else None
        self._findings(neighbours, images)
        self._probes(probe_results)
        if neighbours is not None:
            self._gallery(neighbours)
            self._map(maps)
        self._layers()

    def _classes(self) -> None:
        classes = self._reader.counts.classes
        _, *good = np.bincount(self._reader.labels[self._good] + 1, minlength=len(classes) + 1).tolist()
        self.data["classes"] = [
            [printable(name)[:_LONGEST], count, with_features]
            for (name, count), with_features in list(zip(classes.items(), good, strict=True))[:_CLASSES]
        ]
        self.data["unlabelled"] = self._reader.counts.unlabelled
        if len(classes) > _CLASSES:
            self.data["notes"].append(f"Only the first {_CLASSES:,} of {len(classes):,} classes are named here.")

    def _findings(self, neighbours: SimilarImages | None, images: str | None) -> None:
        """Fill in the findings: numbers by kind, the first of each kind, and a CSV file of all."""
        kinds, labels = [*KINDS], self._reader.labels[self._good]
        width = math.prod(self._reader[self._layer].shape[1:])
        if len(self._good) * width * len(np.unique(labels)) > _PROBED_VALUES:
            kinds.remove("suspect label")
            self.data["notes"].append("Suspect labels would take minutes here; layertap findings looks for them.")
        self._say("looking for copies, outliers and suspect labels")
        root, rows = self._described["images"]["root"], range(len(self._reader))
        pictures = functools.cache(lambda: Pictures(self._reader, root, rows, images))
        table = findings_by_pictures(
            self._reader, pictures, self._say, layer=self._layer, kinds=kinds, seed=self._seed, neighbours=neighbours
        )
        listed = [found for _, of_kind in groupby(table, attrgetter("kind")) for found in [*of_kind][:_LISTED]]
        places = {path: row for row, path in ((found.row, found.path) for found in listed)}
        self.data["findings"] = {
            "counts": Counter(found.kind for found in table),
            "groups": {kind: len({found.group for found in table if found.kind == kind}) for kind in kinds},
            "in_classes": _in_several(table, lambda found: found.label),
            "in_splits": _in_several(table, lambda found: self._reader.splits[found.row]),
            "listed": [
                [found.kind, found.row, places.get(found.other_path), found.score, printable(found.meaning),
                 found.group, found.keep, printable(found.suggested)]
                for found in listed
            ],
            "csv": base64.b64encode(as_csv(table[:_SAVED])).decode(),
            "saved": min(len(table), _SAVED),
        }  # fmt: skip
        for _, of_kind in groupby(listed, attrgetter("kind")):
            self._thumbnail_rows |= dict.fromkeys(found.row for found in [*of_kind][:_SHOWN])
        self._listed_rows |= dict.fromkeys(found.row for found in listed)

    def _probes(self, probe_results: Sequence[Path]) -> None:
        """Fill in results of probes, and the images that one of them misclassified, most confident first."""
        results, notes = probes(Path(self._described["out"]), probe_results)
        self.data["notes"] += notes
        about, self._predictions, more_notes = predictions_of(
            results, self._reader.fingerprint, self.data["layer"], self._reader.paths
        )
        self.data["notes"] += more_notes
        self.data["probes"] = list(results.values())
        wrong = [row for row, prediction in self._predictions.items() if prediction.predicted != prediction.label]
        wrong.sort(key=lambda row: -(self._predictions[row].probability or 0))
        self.data["predictions"] = about | {
            "tested": len(self._predictions), "wrong": wrong[:_WRONG], "n_wrong": len(wrong),
        }  # fmt: skip
        self._listed_rows |= dict.fromkeys(wrong[:_WRONG])
        self._thumbnail_rows |= dict.fromkeys(wrong[:_WRONG_PICTURES])

    def _similar_images(self) -> SimilarImages:
        self._say(f"searching neighbours by {self._layer}")
        array = self._reader[self._layer]
        neighbours = similar_images(self._reader, array, self._seed, QUICK_PRODUCTS)
        counts, edges = _histogram(neighbours.nearest)
        self.data["alike"] = {
            "k": K,
            "among": len(neighbours.among),
            "queries": len(neighbours.queries),
            "threshold": near_duplicate_cosine(neighbours.nearest),
            "outliers_below": outlier_cosine(neighbours.farthest),
            "counts": counts.tolist(),
            "edges": _short(edges),
        }
        return neighbours

    def _gallery(self, neighbours: SimilarImages) -> None:
        """Fill in images with their neighbours, and how many neighbours have the class of their image.

        Of labelled images: the most central image of each class, which has the nearest neighbours of its class. Of
        others: random images.
        """
        labels, queries, near = self._reader.labels, neighbours.queries, neighbours.near
        of_near, groups = np.where(near.rows >= 0, labels[near.rows], -1), row_groups(self._reader)
        labelled = (labels[queries] >= 0)[:, None] & (of_near >= 0)
        labelled &= groups[near.rows] != groups[queries][:, None]  # parts of one file share their class
        sizes = np.bincount(labels[labels >= 0]).astype(np.float64)
        pairs = (sizes * (sizes - 1)).sum()  # pairs of different images of a class
        if not labelled.any() or len(sizes) < 2 or not pairs:
            random = np.sort(np.random.default_rng(self._seed).permutation(len(queries))[:_RANDOM])
            self.data["alike"]["gallery"] = self._strips(neighbours, random.tolist())
            return
        same = labelled & (of_near == labels[queries][:, None])
        nearness = np.where(same, near.cosines, 0).sum(1)
        by_class = []
        for label in np.argsort(-sizes, kind="stable").tolist():
            of_class = np.flatnonzero((labels[queries] == label) & labelled.any(1))
            if not len(of_class):
                continue
            others = of_near[of_class][labelled[of_class] & ~same[of_class]]
            most = np.bincount(others).argmax() if len(others) else -1
            total = labelled[of_class].sum()
            by_class.append({
                "label": label, "same": float(same[of_class].sum() / total), "other": int(most),
                "other_share": float((others == most).sum() / total),
                "central": int(of_class[nearness[of_class].argmax()]),
            })  # fmt: skip
        central = [item.pop("central") for item in by_class]
        self.data["alike"] |= {
            "gallery": self._strips(neighbours, central[:_CENTRAL]),
            "same_class": float(same[labelled].mean()),
            "by_chance": float(pairs / sizes.sum() / (sizes.sum() - 1)),
            "by_class": by_class[:_CLASSES],
        }

    def _strips(self, neighbours: SimilarImages, places: list[int]) -> list[dict[str, Any]]:
        strips: list[dict[str, Any]] = []
        for place in places:
            hits = zip(neighbours.near.rows[place].tolist(), neighbours.near.cosines[place].tolist(), strict=True)
            shown = [[hit, round(cosine, 4)] for hit, cosine in hits if hit >= 0]
            row = int(neighbours.queries[place])
            strips.append({"row": row, "hits": shown})
            self._thumbnail_rows |= dict.fromkeys([row, *(hit for hit, _ in shown)])
        return strips

    def _map(self, maps: Sequence[str]) -> None:
        array, random = self._reader[self._layer], np.random.default_rng(self._seed)
        drawn = random.permutation(self._good)
        points, axes_rows = np.sort(drawn[:_POINTS]), np.sort(drawn[:_PRINCIPAL_ROWS])
        rows = FeatureRows.of(array, points)
        ways = []
        for method in maps:
            self._say(f"map of {len(points):,} images by {_MAPS[method]}")
            if method == "pca":
                fitted, n_rows = axes_of_sample(FeatureRows.of(array, axes_rows), 2, self._seed)
                places = np.zeros((len(points), 2), np.float32)
                places[:, : len(fitted.axes)] = project(rows, fitted)
                shares = " and ".join(f"{100 * share:.1f} %" for share in fitted.shares.tolist())
                note = f"The first two principal axes explain {shares} of the variance of {n_rows:,} rows."
            else:
                places = (tsne if method == "tsne" else umap)(rows, self._seed)
                note = f"{_MAPS[method]} by cosine. Nearby points are similar; distances between groups mean little."
            ways.append({"name": _MAPS[method], "note": note, "x": _short(places[:, 0]), "y": _short(places[:, 1])})
        near = map_neighbours(array, points)
        self.data["map"] = {
            "ways": ways,
            "rows": points.tolist(),
            "of": len(self._good),
            "near": None if near is None else near.tolist(),
        }

    def _layers(self) -> None:
        layers = []
        for name in self._reader.layers:
            self._say(f"statistics of {name}")
            array = self._reader[name]
            statistics, lengths = statistics_of(FeatureRows.of(array, self._good))
            counts, edges = _histogram(lengths)
            percent = np.percentile(lengths, (0, 50, 100)).tolist() if len(lengths) else [math.nan] * 3
            never = (statistics.low == 0) & (statistics.high == 0)
            layers.append({
                "name": printable(name), "shape": list(array.shape[1:]), "dtype": array.stored_dtype,
                "from": printable(" ".join(array.attributes.get(key, "") for key in ("layer", "pooling"))),
                "mean": statistics.mean, "std": statistics.std, "least": statistics.min, "largest": statistics.max,
                "zeros": statistics.zeros,
                "dead": int(never.sum()), "constant": len(statistics.dead), "width": math.prod(array.shape[1:]),
                "lengths": percent, "counts": counts.tolist(), "edges": edges.tolist(),
            })  # fmt: skip
        self.data["layers"] = layers

    def list_rows(self) -> None:
        """Fill in the rows that the page names: row -> path, label, split, number, and prediction if there is one."""
        points = self.data.get("map", {}).get("rows", [])
        self._listed_rows |= self._thumbnail_rows | dict.fromkeys(points)
        self._thumbnail_rows |= dict.fromkeys(np.random.default_rng(self._seed).permutation(points).tolist())
        paths, labels = self._reader.paths, self._reader.labels
        splits, numbers = self._reader.splits, self._reader.rows
        self.data["rows"] = {
            str(row): [_shortened(printable(paths[row])), int(labels[row]), printable(splits[row]), int(numbers[row]),
                       *self._predictions.get(row, ())]
            for row in self._listed_rows
        }  # fmt: skip

    def add_thumbnails(self, images: str | None, limit: int, room: int) -> None:
        """Fill in thumbnails of as many rows as there is room for, and a note about them.

        Args:
            images: location that the user named; None: the recorded location.
            limit: maximum number of thumbnails.
            room: bytes for all thumbnails.
        """
        self.data |= {"thumbnails": vars(ThumbnailSheets()), "about_thumbnails": ""}
        root = self._described["images"]["root"]
        rows = [row for row in self._thumbnail_rows if row not in self._failed]
        rows = rows[: min(limit, _URL_THUMBNAILS) if is_url(images or root) else limit]
        if not rows:
            self.data["about_thumbnails"] = "" if limit else "No thumbnails, as requested."
            return
        source = Pictures(self._reader, root, rows, images)
        if source.why_not:
            self._say(f"no thumbnails: {printable(source.why_not)}")
            self.data["about_thumbnails"] = printable(f"No thumbnails: {source.why_not}")
            return
        sheets, missing = sheets_of_rows(source, rows, room)
        shown = len(sheets.tiles)
        about = f"{shown:,} of {len(self._good):,} images have a thumbnail on this page: the images in its lists, "
        about += "and as many randomly drawn points of the map as fit."
        if missing:
            why, count = missing.most_common(1)[0]
            about += f" {sum(missing.values()):,} have none because their picture is not available ({why}: {count:,})."
        self.data["thumbnails"] = vars(sheets)
        self.data["about_thumbnails"] = printable(about if shown < len(self._good) else "")


def _in_several(table: Sequence[Finding], value: Callable[[Finding], str]) -> dict[str, int]:
    """Return kind -> number of its groups whose images have different values."""
    values = {(found.kind, found.group, value(found)) for found in table if found.group is not None}
    counts = Counter((kind, group) for kind, group, _ in values)
    return Counter(kind for (kind, _), count in counts.items() if count > 1)


def _shortened(path: str) -> str:
    """Shorten a long path to its end, which distinguishes images."""
    return path if len(path) <= _LONGEST else "…" + path[-_LONGEST:]


def _short(values: NDArray[Any]) -> list[float]:
    """Round to five significant digits, which is more than a screen shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def _histogram(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return counts and edges of bins, empty without values; values that differ by rounding alone share a bin."""
    if not len(values):
        return np.empty(0, np.int64), np.empty(0)
    low, high = float(values.min()), float(values.max())
    magnitude = max(abs(low), abs(high), 1e-30)
    if high - low <= 1e-9 * magnitude:  # NumPy refuses bins that are narrower than the rounding
        low, high = low - magnitude / 2, high + magnitude / 2
    counts, edges = np.histogram(values.astype(np.float64), _BINS, (low, high))
    return counts, edges
