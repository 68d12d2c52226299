"""Findings about the images of a data set: copies, near-duplicates, outliers, suspect labels and failed images.

Suspect labels are those of confident learning (Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty
in Dataset Labels", 2021), by the probabilities of probes that have not seen the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, pad

from extract.analysis.dataset_diff import distinct_images, image_hashes
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.logistic import LogisticRegression
from extract.analysis.probe.nearest_rows import MEMORY_BYTES, Neighbours, layer_to_search, nearest
from extract.analysis.probe.probing import probe_resources
from extract.analysis.probe.protocols import N_FOLDS, stratified_folds
from extract.analysis.row_groups import components, row_groups
from extract.errors import unknown_name
from extract.row_status import Status
from extract.store.reader import FeatureArray, FeatureReader

__all__ = [
    "KINDS", "LABELS_DIFFER", "QUICK_PRODUCTS", "Finding", "K", "SimilarImages", "confident_classes", "findings",
    "left_out_probabilities", "map_neighbours", "near_duplicate_cosine", "outlier_cosine", "similar_images",
]  # fmt: skip

KINDS = ("failed", "copy across splits", "copy", "near-duplicate", "suspect label", "outlier")
LABELS_DIFFER = "; the labels differ"  # end of the meaning of a group of copies or near-duplicates
_BY_FEATURES = KINDS[3:]
# Penalties, from the strongest, which takes the fewest steps. On 6,000 embeddings of CIFAR-10, the protocol `clip` took
# 146 s of CPU, most of it for penalties below 1, which are far from the best; this takes 22 s.
_LAMBDAS = 10 ** np.arange(6, -6.5, -0.5)
_WORSE = 1e-3  # nats per row: once the log loss has grown by this, weaker penalties are not tried
_ROUNDING = 1e-6  # as in cleanlab: a class whose images all have the same probability reaches its threshold
K = 10  # neighbours per image
_FEWEST = 30  # nearest cosines from which a threshold of near-duplicates is computed
_MODIFIED_Z = 3.5  # of outliers (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993)
QUICK_PRODUCTS = 5e11  # multiplications of a search: about 15 s on two cores


@dataclass(frozen=True)
class Finding:
    """A finding about an image.

    Attributes:
        kind: one of `KINDS`.
        row: row of the image.
        path: path of the image.
        other_path: the image that it is a copy or near-duplicate of; empty for other kinds.
        score: how certain or severe it is; None for failed images.
        meaning: what the score means, and whether the images of the group have several labels; for a failed image, the
            reason.
        group: number of the set of copies or near-duplicates; None for other kinds.
        keep: whether this image of its group is the one to keep; None for other kinds.
        label: the image's class; empty if it has none.
        suggested: for a suspect label, the class that the image probably has.
    """

    kind: str
    row: int
    path: str
    other_path: str = ""
    score: float | None = None
    meaning: str = ""
    group: int | None = None
    keep: bool | None = None
    label: str = ""
    suggested: str = ""


def findings(
    reader: FeatureReader,
    layer: str | None = None,
    *,
    kinds: Collection[str] = KINDS,
    seed: int = 0,
    picture_size: Callable[[int], tuple[int, int] | None] | None = None,
    neighbours: SimilarImages | None = None,
) -> list[Finding]:
    """Return the findings about the images of a data set, by kind, the most certain first.

        pandas.DataFrame(findings(reader))

    Copies have the same bytes; those in several splits are a kind of their own, since they spoil a probe. Of each set
    of copies or near-duplicates, one is to keep: one whose label is not suspect, if suspect labels are looked for; of
    near-duplicates, the largest picture if `picture_size` tells the size of each, else the largest file; of equals, the
    first row. Near-duplicates are unusually near, and outliers unusually far from their tenth neighbour, in this data
    set. Suspect labels are found by confident learning, with probabilities of probes that have not seen the image.
    Classes with less than five images are not judged.

    Args:
        reader: the data set.
        layer: layer by which images are compared; None: `embedding`, or the only layer.
        kinds: what to look for; copies and failed images need no features.
        seed: seed of the folds of the probe.
        picture_size: row -> (width, height) of its picture, or None if it is not known. The images are not read here;
            `layertap findings` reads them.
        neighbours: result of `similar_images` for this layer; None: it is computed for all images.

    Raises:
        UnknownNameError: the layer or a kind does not exist.
        InputError: a layer must be named.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("kind", kind, KINDS)
    table = [
        Finding("failed", row, path, meaning=f"{status}: {reason}") for row, path, status, reason in reader.failures
    ]
    good = np.flatnonzero(reader.status == Status.OK)
    suspect_labels = list[Finding]()
    if len(good) and not set(kinds).isdisjoint(_BY_FEATURES):
        array = reader[layer_to_search(reader.layers, layer, "the data set")]
        labelled = good[reader.labels[good] >= 0]
        if "suspect label" in kinds and len(labelled):
            suspect_labels = _suspect_labels(reader, FeatureRows.of(array, labelled), labelled, seed)
    suspects = {found.row for found in suspect_labels}
    groups = _copies(reader)
    for number, group in enumerate(groups):
        kind = "copy across splits" if len({reader.splits[row] for row in group}) > 1 else "copy"
        keep, *others = sorted(group, key=suspects.__contains__)
        nearest_of = {keep: (others[0], 1.0)} | dict.fromkeys(others, (keep, 1.0))
        table += _of_group(reader, kind, nearest_of, keep, "the bytes are the same", number)
    if len(good) and ("near-duplicate" in kinds or "outlier" in kinds):
        similar = neighbours or similar_images(reader, array, seed)
        table += _near_duplicates(reader, similar, picture_size, len(groups), suspects) + _outliers(reader, similar)
    table += suspect_labels
    class_of = [*reader.classes, ""]
    table = [replace(found, label=class_of[reader.labels[found.row]]) for found in table if found.kind in kinds]
    return sorted(table, key=lambda found: KINDS.index(found.kind))


def _of_group(
    reader: FeatureReader, kind: str, nearest_of: dict[int, tuple[int, float]], keep: int, meaning: str, number: int
) -> list[Finding]:
    """Return the findings of a group, that to keep first; of each row, the nearest row and their cosine are given."""
    meaning += LABELS_DIFFER if len(np.unique(reader.labels[[*nearest_of]])) > 1 else ""
    return [
        Finding(kind, row, reader.paths[row], reader.paths[other], cosine, meaning, number, row == keep)
        for row, (other, cosine) in sorted(nearest_of.items(), key=lambda item: item[0] != keep)
    ]


def _near_duplicates(
    reader: FeatureReader,
    similar: SimilarImages,
    picture_size: Callable[[int], tuple[int, int] | None] | None,
    first: int,
    suspects: set[int],
) -> list[Finding]:
    """Return near-duplicates; the number of the first group is `first`, that with the nearest pair."""
    threshold = near_duplicate_cosine(similar.nearest)
    if threshold is None:
        return []
    pairs, cosines = similar.pairs()
    pairs, cosines = pairs[cosines >= threshold], cosines[cosines >= threshold]
    best: dict[int, tuple[int, float]] = {}  # row -> its nearest row, and their cosine
    for (left, right), cosine in zip(pairs.tolist(), cosines.tolist(), strict=True):
        best.setdefault(left, (right, cosine))
        best.setdefault(right, (left, cosine))
    group_of, members = components(pairs, len(reader)), dict[int, list[int]]()
    for row in sorted(best):
        members.setdefault(int(group_of[row]), []).append(row)
    meaning = f"cosine to the other image; near-duplicates have at least {threshold:.4f}"
    table, file_sizes = list[Finding](), reader.column("source_size")
    from_nearest = sorted(members.values(), key=lambda rows: -max(best[row][1] for row in rows))
    for number, group in enumerate(from_nearest, first):
        sizes = [picture_size(row) if picture_size else None for row in group]
        known = [size[0] * size[1] for size in sizes if size is not None]
        largest = known if len(known) == len(group) else file_sizes[group].tolist()
        keep = max(zip(group, largest, strict=True), key=lambda of_row: (of_row[0] not in suspects, of_row[1]))[0]
        table += _of_group(reader, "near-duplicate", {row: best[row] for row in group}, keep, meaning, number)
    return table


def _outliers(reader: FeatureReader, similar: SimilarImages) -> list[Finding]:
    limit = outlier_cosine(similar.farthest)
    if limit is None:
        return []
    far = np.flatnonzero(similar.farthest < limit)
    pairs = sorted(zip(similar.farthest[far].tolist(), similar.queries[far].tolist(), strict=True))
    meaning = f"cosine to neighbour {K}; outliers have less than {limit:.4f}"
    return [Finding("outlier", row, reader.paths[row], score=cosine, meaning=meaning) for cosine, row in pairs]


def _suspect_labels(reader: FeatureReader, features: FeatureRows, rows: NDArray[np.int64], seed: int) -> list[Finding]:
    names, labels = np.unique(reader.labels[rows], return_inverse=True)
    images = np.unique(row_groups(reader)[rows], return_inverse=True)[1]
    probabilities = left_out_probabilities(features, labels, images, seed)
    classes = confident_classes(probabilities, labels)
    doubts = 1 - probabilities[np.arange(len(rows)), labels]
    suspect = np.flatnonzero(classes != labels)
    meaning = "1 - probability of the label, by a probe that has not seen the image"
    order = suspect[np.argsort(-doubts[suspect], kind="stable")].tolist()
    return [
        Finding("suspect label", row := int(rows[i]), reader.paths[row], score=float(doubts[i]), meaning=meaning,
                suggested=reader.classes[names[classes[i]]])
        for i in order
    ]  # fmt: skip


def left_out_probabilities(
    rows: FeatureRows, labels: NDArray[np.int64], images: NDArray[np.int64], seed: int = 0
) -> NDArray[np.float64]:
    """Return the probabilities (N, K) of each row by logistic regression on four fifths of the images, without its own.

    The penalty is the one with the smallest log loss of these probabilities.

    Args:
        rows: (N, D).
        labels: (N,) classes, 0 to K - 1; at least one row.
        images: (N,) number of the image of each row, 0 to I - 1; its rows, copies or parts, are left out together.
        seed: seed of the folds.

    Returns:
        NaN for rows of classes with less than five images: too few to say what the class looks like.
    """
    n_classes = int(labels.max()) + 1
    _, first = np.unique(images, return_index=True)
    n_images = np.bincount(np.unique(np.stack([labels, images]), axis=1)[0], minlength=n_classes)
    folds = stratified_folds(labels[first], seed)[images, 0]
    probabilities = np.full((len(labels), n_classes), np.nan)
    judged = (folds >= 0) & (n_images[labels] >= N_FOLDS)  # copies with a rare label are left out, but not judged
    if len(np.unique(labels[judged])) < 2:
        return probabilities
    torch_device, memory_bytes = probe_resources("auto", None)
    if rows.nbytes <= memory_bytes // 3:
        rows = rows.held()
    problem = LogisticRegression(rows, labels, n_classes, device=torch_device, memory_bytes=memory_bytes)
    least = math.inf
    for penalty in _LAMBDAS:
        (scores,) = problem.left_out_scores([1 / penalty], folds[:, None])
        logits = torch.from_numpy(scores[0, judged].astype(np.float64))
        logits = pad(logits, (int(logits.shape[1] == 1), 0))  # two classes have one column: that of the first is 0
        loss = float(cross_entropy(logits, torch.from_numpy(labels[judged])))
        if loss < least:
            least, probabilities[judged] = loss, torch.softmax(logits, 1).numpy()
        elif loss > least + _WORSE:
            break
    return probabilities


def confident_classes(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class (N,) that each row confidently belongs to: its label, or another one if the label is suspect.

    A row confidently belongs to the most probable of the classes whose probability is at least the mean of the rows
    with that label. The label of a row without such a class, and the most probable label, are not suspect.

    Args:
        probabilities: (N, K), NaN for rows that are not judged.
        labels: (N,).
    """
    judged = np.flatnonzero(np.isfinite(probabilities).all(1))
    values, its_labels = probabilities[judged], labels[judged]
    thresholds = np.full(values.shape[1], np.inf)
    for label in np.unique(its_labels):
        thresholds[label] = values[its_labels == label, label].mean()
    confident = np.where(values >= thresholds - _ROUNDING, values, -1)
    suspect = (confident.max(1) >= 0) & (values[np.arange(len(judged)), its_labels] < values.max(1))
    classes = labels.copy()
    classes[judged[suspect]] = confident.argmax(1)[suspect]
    return classes


@dataclass(frozen=True)
class SimilarImages:
    """Neighbours of images; byte-identical images count as a single image, and would fill all lists otherwise.

    Attributes:
        among: (M,) rows that were compared; of images with the same bytes, the first row.
        queries: (Q,) rows whose neighbours were searched, ascending: all of `among`, or a random subset.
        near: (Q, K) neighbours of the queries, without the queries themselves.
    """

    among: NDArray[np.int64]
    queries: NDArray[np.int64]
    near: Neighbours

    @property
    def nearest(self) -> NDArray[np.float64]:
        """Cosine of each query to its nearest neighbour; queries without neighbours are left out."""
        first = self.near.cosines[:, :1]
        return first[np.isfinite(first)]

    @property
    def farthest(self) -> NDArray[np.float64]:
        """(Q,) cosine of each query to its K-th neighbour; NaN if it has fewer."""
        full = self.near.cosines.shape[1] == K
        return self.near.cosines[:, -1] if full else np.full(len(self.queries), np.nan)

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the pairs of queries and their neighbours, each once and the largest cosine first.

        Returns:
            (P, 2) rows, the smaller one first; and (P,) cosines.
        """
        rows = np.broadcast_to(self.queries[:, None], self.near.rows.shape)
        valid = self.near.rows >= 0
        both = np.sort(np.stack([rows[valid], self.near.rows[valid]], 1), 1)
        both, first = np.unique(both, axis=0, return_index=True)
        cosines = self.near.cosines[valid][first]
        order = np.argsort(-cosines, kind="stable")
        return both[order], cosines[order]


def near_duplicate_cosine(nearest: NDArray[np.float64]) -> float | None:
    """Return the cosine from which a nearest image is unusually near, or None if there are too few images to tell.

    How near unrelated images are depends on the backbone and on the data set: the median cosine of an image and its
    nearest is 0.97 for handwritten digits, 0.75 for CIFAR-10 and 0.4 for photos of 200 kinds. So the threshold is
    relative to the distribution of log(1 - cosine): pairs are near-duplicates if their modified z-score,
    (x - median) * 0.6745 / MAD, is below -3.5, and their distance 1 - cosine is at most half the median. A fixed cosine
    of 0.95 gave 8,838 pairs of digits, and none of CIFAR-10, which has copies of photographs at 0.86 to 0.93.

    Args:
        nearest: (N,) cosine of each image to its nearest image.
    """
    usual = _usual_distance(nearest)
    return None if usual is None else float(1 - np.exp(usual[0] - max(_MODIFIED_Z * usual[1], np.log(2))))


def outlier_cosine(farthest: NDArray[np.float64]) -> float | None:
    """Return the cosine to the K-th neighbour below which an image is like no other, or None for too few images.

    The rule is that of `near_duplicate_cosine` on the other side: the modified z-score of log(1 - cosine) is above 3.5.
    Images without any relation, such as one of each of 200 kinds, have no outliers. By the K-th neighbour
    (Ramaswamy, Rastogi and Shim 2000), up to K outliers that are like each other do not hide each other.

    Args:
        farthest: (N,) cosine of each image to its K-th neighbour; NaN if it has fewer.
    """
    usual = _usual_distance(farthest[np.isfinite(farthest)])
    return None if usual is None else float(1 - np.exp(usual[0] + _MODIFIED_Z * usual[1]))


def _usual_distance(cosines: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the median of log(1 - cosine), and its deviation: MAD / 0.6745; None for too few cosines."""
    if len(cosines) < _FEWEST:
        return None
    distances = np.log(np.maximum(1 - cosines, 1e-7))  # float32 cosines of equal directions differ from 1 by as much
    median = float(np.median(distances))
    return median, float(np.median(np.abs(distances - median))) / 0.6745


def similar_images(
    reader: FeatureReader, array: FeatureArray, seed: int, max_products: float = math.inf
) -> SimilarImages:
    """Find the neighbours of all images, or of as many as the limit permits.

    Args:
        reader: the data set.
        array: array of the feature.
        seed: seed of the choice of queries, if not all images can be queries.
        max_products: limit for the number of multiplications.
    """
    among = np.sort(distinct_images(reader)[1])
    width = max(1, int(np.prod(array.shape[1:])))
    count = int(min(len(among), max(1, max_products / max(1, len(among) * width))))
    queries = np.sort(np.random.default_rng(seed).permutation(among)[:count])
    return SimilarImages(among, queries, _neighbours_of(array, queries, among))


def map_neighbours(array: FeatureArray, points: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the places (P, K) in `points`, ascending rows, of the neighbours of each among the others; -1: fewer.

    None is returned for rows so wide that this would take longer than `similar_images`.
    """
    width = max(1, int(np.prod(array.shape[1:])))
    if len(points) ** 2 * width > QUICK_PRODUCTS:
        return None
    rows = _neighbours_of(array, points, points).rows
    return np.where(rows >= 0, np.searchsorted(points, rows), -1)


def _neighbours_of(array: FeatureArray, queries: NDArray[np.int64], among: NDArray[np.int64]) -> Neighbours:
    """Find the neighbours of rows of a feature among other rows; queries are read in blocks that fit into memory."""
    width = max(1, int(np.prod(array.shape[1:])))
    step = max(1, MEMORY_BYTES // (4 * 4 * width))
    parts = []
    for start in range(0, max(1, len(queries)), step):
        block = queries[start : start + step]
        vectors = FeatureRows.of(array, block).between(0, len(block))
        parts.append(nearest(array, vectors, K, among=among, without=block))
    return Neighbours(np.concatenate([part.rows for part in parts]), np.concatenate([part.cosines for part in parts]))


def _copies(reader: FeatureReader) -> list[list[int]]:
    """Return the rows of images with the same bytes: a list for each repeated image, longest first."""
    good = np.flatnonzero(reader.status == Status.OK)
    _, numbers = np.unique(image_hashes(reader)[good], return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    of_images = np.split(good[order], np.flatnonzero(np.diff(numbers[order])) + 1)
    groups = [rows.tolist() for rows in of_images if len(rows) > 1]
    return sorted(groups, key=lambda group: (-len(group), group))
