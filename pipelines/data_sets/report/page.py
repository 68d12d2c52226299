"""The page of `layertap report`: its content as JSON, its thumbnails, and the HTML file.

`page.js` shows the content, and inserts all text as text, not as HTML. The page's security policy forbids loading, and
permits only the two scripts whose hashes it contains. So names of files and classes cannot run code.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.analysis.dataset_diff import compare
from extract.analysis.feature_statistics import statistics_of
from extract.analysis.nearest_rows import layer_to_search
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.projection import principal, tsne, umap
from extract.errors import InputError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.system.atomic_files import atomic_write, link_target
from extract.system.urls import is_url
from pipelines.data_sets.diff import as_json as comparison_as_json
from pipelines.data_sets.report.facts import facts, probes, runs, stages
from pipelines.data_sets.report.similar_images import (
    NEAR_DUPLICATE_COSINE,
    K,
    copies,
    neighbours_of,
    shared_neighbours,
    similar_images,
)
from pipelines.data_sets.show import describe
from pipelines.data_sets.thumbnails import Pictures
from pipelines.terminal.text_output import printable

__all__ = ["MAPS", "run_report"]

MAPS = ("pca", "tsne", "umap")
PAGE_BYTES = 10_000_000  # at most; thumbnails take the rest
_POINTS = 3000  # per map
_MANIFOLD_POINTS = 1500  # per map by t-SNE or UMAP, which take about 15 s for this number on two cores
_PRINCIPAL_ROWS = 100_000  # from which principal axes are computed
_QUERIES = 6  # images whose neighbours are shown
_SHOWN = 24  # pairs, outliers, groups of copies
_SHOWN_COPIES = 8  # copies of one image
_FAILURES = 500
_CLASSES = 2000
_LONGEST = 160  # characters of a path
_BINS = 40
_SIDE_PX = 96  # of a thumbnail
_QUALITY = 70  # of WebP
_HEADER = b"<!doctype html>\n<!-- layertap report -->\n"


def run_report(
    out: Path, other: Path | None = None, *, output: Path | None = None, layer: str | None = None,
    maps: Sequence[str] = ("pca",), probe_results: Sequence[Path] = (), images: str | None = None,
    thumbnails: int = 1500, seed: int = 0, say: Callable[[str], None] = lambda text: None,
) -> Path:  # fmt: skip
    """Write the page and return its path.

    Args:
        out: folder of the data set, which may be incomplete.
        other: folder of another data set to compare with.
        output: HTML file; None: OUT/report.html.
        layer: layer by which images are compared; None: `embedding`, or the last layer.
        maps: some of pca, tsne and umap.
        probe_results: folders or files of results besides OUT/probe.
        images: location of the images; None: the recorded location, unless images would be fetched from a URL.
        thumbnails: maximum number of thumbnails; 0: no thumbnails.
        seed: seed of random choices.
        say: receives a line about each step.

    Raises:
        InputError: `out` is not a data set, the layer does not exist, or the file cannot be written.
        LayertapError: a library for a map is missing, or the data set cannot be read.
    """
    output, written_to = (out / "report.html",) * 2 if output is None else (output, link_target(output))
    if output.is_dir() or not output.resolve().parent.is_dir():
        problem = "it is a folder" if output.is_dir() else "no such folder"
        raise InputError(f"{output} cannot be written: {problem}")
    if output.is_file() and not _is_report(output):
        raise InputError(f"{output} already exists and is not a layertap report; name another file")
    say("reading the description")
    described = describe(out)
    dataset = DataSet.open(out)
    with FeatureReader(out, partial=not described["complete"], check=True) as reader:
        content = _Content(reader, described, dataset, layer, seed, say)
        content.fill(maps)
        content.data["probes"], notes = probes(out, probe_results)
        content.data["notes"] += notes
        if other is not None:
            say(f"comparing with {other}")
            content.compare_with(out, other)
        say("making thumbnails")
        page = content.page(dataset.images["root"], images, thumbnails)
    with atomic_write(written_to) as file:
        file.write(page)
    return output


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEADER)) == _HEADER


class _Content:
    """Content of the page, and the rows that it shows.

    Attributes:
        data: content of the page, written as JSON.
        thumbnail_rows: rows that should have thumbnails, most important first.
    """

    def __init__(
        self, reader: FeatureReader, described: dict[str, Any], dataset: DataSet, layer: str | None, seed: int,
        say: Callable[[str], None],
    ):  # fmt: skip
        self._reader, self._described, self._seed, self._say = reader, described, seed, say
        self._dataset = dataset
        self._good = np.flatnonzero(reader.status == Status.OK)
        self._hashes = reader.column("source_hash")
        self._failed: list[tuple[int, str, str, str]] = reader.failures
        self.thumbnail_rows: dict[int, None] = {}
        self.data: dict[str, Any] = {"notes": []}
        self._layer = self._layer_to_show(layer)

    def _layer_to_show(self, layer: str | None) -> str:
        layers = self._reader.layers
        if layer is None and "embedding" not in layers and len(layers) > 1:
            self.data["notes"].append(
                printable(f"There is no layer `embedding`; images are compared by the last layer, {layers[-1]}.")
            )
            return layers[-1]
        return layer_to_search(layers, layer, self._described["out"])

    def fill(self, maps: Sequence[str]) -> None:
        """Fill in everything except thumbnails, probes and comparisons."""
        described = self._described
        self.data |= {
            "title": printable(Path(described["out"]).resolve().name),
            "version": version("layertap"),
            "written": datetime.now(UTC).isoformat(" ", "seconds"),
            "layer": printable(self._layer),
            "facts": facts(described),
            "counts": {
                "rows": len(self._reader),
                "good": len(self._good),
                "failed": len(self._failed),
                "classes": len(self._reader.classes),
            },
            "status": Counter(Status(code).text for code in self._reader.status.tolist()),
            "runs": runs(self._dataset.out),
            "stages": stages(self._dataset),
        }
        if not described["complete"]:
            self.data["notes"].append("The data set is unfinished: this page shows the rows that are done.")
        self._classes()
        self._failures()
        self._layers()
        self._map(maps)
        self._similar_images()

    def _classes(self) -> None:
        labels, classes = self._reader.labels, self._reader.classes
        counts = np.bincount(labels[labels >= 0], minlength=len(classes))
        good = np.bincount(labels[self._good][labels[self._good] >= 0], minlength=len(classes))
        self.data["classes"] = [
            [printable(name)[:_LONGEST], int(count), int(with_features)]
            for name, count, with_features in list(zip(classes, counts, good, strict=True))[:_CLASSES]
        ]
        self.data["unlabelled"] = int((labels < 0).sum())
        if len(classes) > _CLASSES:
            self.data["notes"].append(f"Only the first {_CLASSES:,} of {len(classes):,} classes are named here.")

    def _failures(self) -> None:
        shown = self._failed[:_FAILURES]
        self._request_thumbnails(row for row, *_ in shown[:_SHOWN])
        self.data["failures"] = [[row, status, printable(reason)] for row, _, status, reason in shown]
        self._listed_rows = {row: None for row, *_ in shown}

    def _layers(self) -> None:
        layers = []
        for name in self._reader.layers:
            self._say(f"statistics of {name}")
            array = self._reader[name]
            statistics, lengths = statistics_of(FeatureRows.of(array, self._good))
            counts, edges = np.histogram(lengths, _BINS) if len(lengths) else (np.empty(0, int), np.empty(0))
            percent = np.percentile(lengths, (0, 50, 100)).tolist() if len(lengths) else [math.nan] * 3
            never = (statistics.low == 0) & (statistics.high == 0)
            layers.append({
                "name": printable(name), "shape": list(array.shape[1:]), "dtype": str(array.dtype),
                "from": printable(" ".join(array.attributes.get(key, "") for key in ("layer", "pooling"))),
                "mean": statistics.mean, "std": statistics.std, "least": statistics.min, "largest": statistics.max,
                "zeros": statistics.zeros,
                "dead": int(never.sum()), "constant": len(statistics.dead), "width": math.prod(array.shape[1:]),
                "lengths": percent, "counts": counts.tolist(), "edges": edges.tolist(),
            })  # fmt: skip
        self.data["layers"] = layers

    def _map(self, maps: Sequence[str]) -> None:
        if not len(self._good):
            return
        array, random = self._reader[self._layer], np.random.default_rng(self._seed)
        drawn = random.permutation(self._good)
        points, axes_rows = drawn[:_POINTS], np.sort(drawn[:_PRINCIPAL_ROWS])
        plots = []
        for method in maps:
            self._say(f"map by {method}")
            shown_rows = points if method == "pca" else points[:_MANIFOLD_POINTS]
            order = np.argsort(shown_rows)
            rows = FeatureRows.of(array, shown_rows[order])
            if method == "pca":
                projection = principal(FeatureRows.of(array, axes_rows), 2, self._seed)
                places = np.zeros((len(shown_rows), 2), np.float32)
                places[:, : len(projection.axes)] = projection.project(rows)
                shares = " and ".join(f"{100 * share:.1f} %" for share in projection.shares.tolist())
                note = f"The first two principal axes explain {shares} of the variance of {projection.rows:,} rows."
                name = "PCA"
            else:
                places = (tsne if method == "tsne" else umap)(rows, self._seed)
                name = {"tsne": "t-SNE", "umap": "UMAP"}[method]
                note = f"{name} by cosine. Nearby points are similar; distances between groups mean little."
            back = np.empty_like(order)
            back[order] = np.arange(len(order))
            plots.append({"name": name, "note": note, "x": _short(places[back, 0]), "y": _short(places[back, 1])})
        self.data["map"] = {"ways": plots, "rows": points.tolist(), "of": len(self._good)}

    def _similar_images(self) -> None:
        groups = copies(self._hashes, self._good)
        labels, splits = self._reader.labels, self._reader.splits
        for group in groups[:_SHOWN]:
            self._request_thumbnails(group[:1])
        self.data["copies"] = {
            "groups": [
                {
                    "rows": group[:_SHOWN_COPIES],
                    "count": len(group),
                    "classes": len({int(labels[row]) for row in group}),
                    "splits": len({splits[row] for row in group}),
                }
                for group in groups[:_SHOWN]
            ],
            "images": len(groups),
            "rows": sum(map(len, groups)),
        }
        self._list_rows(row for group in groups[:_SHOWN] for row in group[:_SHOWN_COPIES])
        if not len(self._good):
            return
        self._say(f"searching neighbours by {self._layer}")
        array = self._reader[self._layer]
        neighbours = similar_images(array, self._hashes, self._good, self._seed)
        pairs, means = neighbours.pairs(), neighbours.means
        random = np.random.default_rng(self._seed)
        gallery_rows = np.sort(random.permutation(neighbours.queries)[:_QUERIES])
        gallery_neighbours = neighbours_of(array, gallery_rows, neighbours.among)
        queries = [
            {"row": row, "hits": [[int(hit), round(cosine, 4)] for hit, cosine in hits if hit >= 0]}
            for row, hits in zip(
                gallery_rows.tolist(),
                np.stack([gallery_neighbours.rows, gallery_neighbours.cosines], 2).tolist(),
                strict=True,
            )
        ]
        outliers = [place for place in np.argsort(means, kind="stable").tolist() if math.isfinite(means[place])]
        outliers = outliers[:_SHOWN] if len(neighbours.among) > K else []
        first = neighbours.near.cosines[:, 0] if neighbours.near.cosines.size else np.empty(0)
        counts, edges = np.histogram(first[np.isfinite(first)], _BINS)
        self.data["alike"] = {
            "k": K,
            "among": len(neighbours.among),
            "queries": len(neighbours.queries),
            "threshold": NEAR_DUPLICATE_COSINE,
            "pairs": [[row, other_row, round(cosine, 6)] for row, other_row, cosine in pairs[:_SHOWN]],
            "n_pairs": len(pairs),
            "outliers": [[int(neighbours.queries[place]), round(float(means[place]), 4)] for place in outliers],
            "gallery": queries,
            "counts": counts.tolist(),
            "edges": _short(edges),
            **self._same_class(neighbours.queries, neighbours.near.rows),
        }
        for query in queries:
            self._request_thumbnails([query["row"], *(hit for hit, _ in query["hits"])])
        self._request_thumbnails(row for pair in pairs[:_SHOWN] for row in pair[:2])
        self._request_thumbnails(row for row, _ in self.data["alike"]["outliers"])

    def _same_class(self, queries: NDArray[np.int64], near: NDArray[np.int64]) -> dict[str, float]:
        """Return the share of neighbours with the class of their query, and the share expected by chance."""
        labels = self._reader.labels
        both_labelled = (near >= 0) & (labels[queries] >= 0)[:, None]
        both_labelled &= labels[np.maximum(near, 0)] >= 0
        sizes = np.bincount(labels[labels >= 0]).astype(np.float64)
        pairs = (sizes * (sizes - 1)).sum()  # pairs of different images of a class
        if not both_labelled.any() or len(sizes) < 2 or not pairs:
            return {}
        same = labels[np.maximum(near, 0)] == labels[queries][:, None]
        return {
            "same_class": float(same[both_labelled].mean()),
            "by_chance": float(pairs / sizes.sum() / (sizes.sum() - 1)),
        }

    def compare_with(self, out: Path, other: Path) -> None:
        """Fill in the differences between two data sets."""
        comparison = comparison_as_json(compare(out, other))
        with FeatureReader(other, partial=True) as reader:
            layers = [(name, name) for name in self._reader.layers if name in reader.layers]
            pair = self._layer, "embedding" if "embedding" in reader.layers else reader.layers[-1]
            if pair not in layers:
                layers.append(pair)
            count, shares = shared_neighbours(self._reader, reader, layers, self._seed)
        self.data["other"] = {
            "name": printable(str(other)),
            "changes": [
                [printable(str(text)) for text in (setting, *values)]
                for setting, values in comparison["changes"].items()
            ],
            "images": comparison["images"],
            "features": [
                {"name": printable(name), **{key: printable(value) if isinstance(value, str) else value
                                             for key, value in similarity.items()}}
                for name, similarity in comparison["features"].items()
            ],
            "neighbours": [
                [printable(layer if layer == other_layer else f"{layer} | {other_layer}"), share, chance]
                for layer, other_layer, share, chance in shares
            ],
            "compared": count,
            "k": K,
        }  # fmt: skip

    def _request_thumbnails(self, rows: Any) -> None:
        self.thumbnail_rows |= dict.fromkeys(rows)

    def _list_rows(self, rows: Any) -> None:
        self._listed_rows |= dict.fromkeys(rows)

    # Page

    def page(self, root: str, images: str | None, thumbnails: int) -> bytes:
        """Return the HTML file; thumbnails of the images in `root`, or in `images`, take the room that is left."""
        points = self.data.get("map", {}).get("rows", [])
        self._list_rows(self.thumbnail_rows)
        self._list_rows(points)
        paths, labels, splits, numbers = (
            self._reader.paths, self._reader.labels, self._reader.splits, self._reader.rows,
        )  # fmt: skip
        self.data["rows"] = {
            str(row): [_shortened(printable(paths[row])), int(labels[row]), printable(splits[row]), int(numbers[row])]
            for row in self._listed_rows
        }
        self._request_thumbnails(points)
        size = len(_assembled(self.data))
        data_urls, about = self._thumbnails(root, images, thumbnails, PAGE_BYTES - size - 100_000)
        self.data |= {"thumbnails": data_urls, "about_thumbnails": about}
        return _assembled(self.data)

    def _thumbnails(self, root: str, images: str | None, limit: int, room: int) -> tuple[dict[str, str], str]:
        """Return row -> data URL, for as many rows as there is room for, and a note about them."""
        rows = list(self.thumbnail_rows)
        if not limit or not rows:
            return {}, "No thumbnails, as requested." if not limit else ""
        if is_url(images or root):
            limit = min(limit, 200)  # each image is downloaded
        pictures = Pictures(self._reader, root, rows[:limit], images)
        if pictures.why_not:
            self._say(f"no thumbnails: {printable(pictures.why_not)}")
            return {}, printable(f"No thumbnails: {pictures.why_not}")
        failed = {row for row, *_ in self._failed}
        data_urls: dict[str, str] = {}
        missing: Counter[str] = Counter()
        for row in rows[:limit]:
            picture, why = (pictures.partial_picture(row), "") if row in failed else pictures.picture(row, _SIDE_PX)
            if picture is None:
                if row not in failed:
                    missing[why] += 1
                continue
            text = _thumbnail(picture)
            room -= len(text) + 16
            if room < 0:
                break
            data_urls[str(row)] = text
        shown = sum(int(row) not in failed for row in data_urls)
        about = f"{shown:,} of {len(self._good):,} images have a thumbnail on this page: the images in its lists, "
        about += "and as many randomly drawn points of the map as fit."
        if missing:
            why, count = missing.most_common(1)[0]
            about += f" {sum(missing.values()):,} have none because their picture is not available ({why}: {count:,})."
        return data_urls, printable(about if shown < len(self._good) else "")


def _shortened(path: str) -> str:
    """Shorten a long path to its end, which distinguishes images."""
    return path if len(path) <= _LONGEST else "…" + path[-_LONGEST:]


def _short(values: NDArray[Any]) -> list[float]:
    """Round to five significant digits, which is more than a screen shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def _thumbnail(picture: Image.Image) -> str:
    small = picture.copy()
    small.thumbnail((_SIDE_PX, _SIDE_PX))
    data = io.BytesIO()
    small.save(data, "WEBP", quality=_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def _assembled(data: dict[str, Any]) -> bytes:
    """Return the page with this content."""
    from plotly.offline import get_plotlyjs

    folder = resources.files("pipelines.data_sets.report")
    page, style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    scripts = {"PLOTLY": get_plotlyjs(), "SCRIPT": script}
    hashes = " ".join(f"'sha256-{_sha256(text)}'" for text in scripts.values())
    parts = {**scripts, "STYLE": style, "HASHES": hashes, "DATA": _as_data(data)}
    return _HEADER + b"".join(_filled(page, parts))


def _filled(page: str, parts: dict[str, str]) -> Iterator[bytes]:
    """Yield the page with each `{{NAME}}` replaced; inserted text is not searched for further names."""
    for number, text in enumerate(page.replace("}}", "{{").split("{{")):
        yield (parts[text] if number % 2 else text).encode()


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _as_data(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside a <script> element: it cannot end the element or start a comment or an entity."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(content: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
