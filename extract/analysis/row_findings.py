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

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.logistic import LogisticRegression
from extract.analysis.probe.memory import free_bytes
from extract.analysis.probe.nearest_rows import layer_to_search
from extract.analysis.probe.probing import probe_device
from extract.analysis.probe.strength_choice import N_FOLDS, stratified_folds
from extract.analysis.similar_images import (
    K,
    SimilarImages,
    copies,
    image_numbers,
    near_duplicate_cosine,
    outlier_cosine,
    similar_images,
)
from extract.errors import unknown_name
from extract.row_status import Status
from extract.store.reader import FeatureReader

__all__ = ["KINDS", "Finding", "confident_classes", "findings", "left_out_probabilities"]

KINDS = ("failed", "copy across splits", "copy", "near-duplicate", "suspect label", "outlier")
_BY_FEATURES = KINDS[3:]
# Penalties, from the strongest, which takes the fewest steps. On 6,000 embeddings of CIFAR-10, the protocol `clip` took
# 146 s of CPU, most of it for penalties below 1, which are far from the best; this takes 22 s.
_LAMBDAS = 10 ** np.arange(6, -6.5, -0.5)
_WORSE = 1e-3  # nats per row: once the log loss has grown by this, weaker penalties are not tried
_ROUNDING = 1e-6  # as in cleanlab: a class whose images all have the same probability reaches its threshold


@dataclass(frozen=True)
class Finding:
    """A finding about an image.

    Attributes:
        kind: one of `KINDS`.
        row: row of the image.
        path: path of the image.
        other_path: the image that it is a copy or near-duplicate of; empty for other kinds.
        score: how certain or severe it is; None for failed images.
        meaning: what the score means; for a failed image, the reason.
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
    picture_size: Callable[[int], tuple[int, int] | None] = lambda row: None,
    neighbours: SimilarImages | None = None,
) -> list[Finding]:
    """Return the findings about the images of a data set, by kind, the most certain first.

        pandas.DataFrame(findings(reader))

    Copies have the same bytes; those in several splits are a kind of their own, since they spoil a probe. Of each set
    of copies or near-duplicates, the largest picture is the one to keep if sizes are known, else the first row.
    Near-duplicates are unusually near, and outliers unusually far from their tenth neighbour, in this data set. Suspect
    labels are found by confident learning, with probabilities of probes that have not seen the image. Classes with less
    than five images are not judged.

    Args:
        reader: the data set.
        layer: layer by which images are compared; None: `embedding`, or the only layer.
        kinds: what to look for; copies and failed images need no features.
        seed: seed of the folds of the probe.
        picture_size: row -> (width, height) of its picture, or None if it is not known.
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
    good, hashes = np.flatnonzero(reader.status == Status.OK), reader.column("source_hash")
    n_groups = 0
    for number, group in enumerate(copies(hashes, good)):
        n_groups, kind = number + 1, "copy across splits" if len({reader.splits[row] for row in group}) > 1 else "copy"
        others = [group[1], *[group[0]] * (len(group) - 1)]
        for row, other in zip(group, others, strict=True):
            paths = reader.paths[row], reader.paths[other]
            table.append(Finding(kind, row, *paths, 1.0, "the bytes are the same", number, row == group[0]))
    if len(good) and not set(kinds).isdisjoint(_BY_FEATURES):
        array = reader[layer_to_search(reader.layers, layer, "the data set")]
        if "near-duplicate" in kinds or "outlier" in kinds:
            similar = neighbours or similar_images(array, hashes, good, seed)
            table += _near_duplicates(reader, similar, picture_size, n_groups) + _outliers(reader, similar)
        labelled = good[reader.labels[good] >= 0]
        if "suspect label" in kinds and len(labelled):
            table += _suspect_labels(reader, FeatureRows.of(array, labelled), labelled, seed)
    class_of = [*reader.classes, ""]
    table = [replace(found, label=class_of[reader.labels[found.row]]) for found in table if found.kind in kinds]
    return sorted(table, key=lambda found: KINDS.index(found.kind))


def _near_duplicates(
    reader: FeatureReader, similar: SimilarImages, picture_size: Callable[[int], tuple[int, int] | None], first: int
) -> list[Finding]:
    """Return near-duplicates; the number of the first group is `first`, that with the nearest pair."""
    threshold = near_duplicate_cosine(similar.nearest)
    if threshold is None:
        return []
    pairs, cosines = similar.pairs()
    pairs, cosines = pairs[cosines >= threshold], cosines[cosines >= threshold]
    rows, ends = np.unique(pairs, return_inverse=True)
    ends, members = ends.reshape(-1, 2), dict[int, list[int]]()
    for place, group in enumerate(_components(ends, len(rows)).tolist()):
        members.setdefault(group, []).append(place)
    best: dict[int, tuple[int, float]] = {}  # place -> its nearest place, and their cosine
    for (left, right), cosine in zip(ends.tolist(), cosines.tolist(), strict=True):
        best.setdefault(left, (right, cosine))
        best.setdefault(right, (left, cosine))
    meaning = f"cosine to the other image; near-duplicates have at least {threshold:.4f}"
    table = []
    from_nearest = sorted(members.values(), key=lambda places: -max(best[place][1] for place in places))
    for number, group in enumerate(from_nearest, first):
        sizes = [picture_size(int(rows[place])) for place in group]
        pixels = [0 if size is None or None in sizes else size[0] * size[1] for size in sizes]
        keep = group[pixels.index(max(pixels))]
        for place in sorted(group, key=lambda place: place != keep):
            row, (other, cosine) = int(rows[place]), best[place]
            paths = reader.paths[row], reader.paths[int(rows[other])]
            table.append(Finding("near-duplicate", row, *paths, cosine, meaning, number, place == keep))
    return table


def _components(pairs: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the smallest place (N,) that each place is joined with, by pairs (P, 2) in any number of steps."""
    lowest = np.arange(count)
    while True:
        joined = lowest.copy()
        for ends in (pairs, pairs[:, ::-1]):
            np.minimum.at(joined, ends[:, 0], lowest[ends[:, 1]])
        joined = joined[joined]
        if np.array_equal(joined, lowest):
            return lowest
        lowest = joined


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
    images = image_numbers(reader.column("source_hash"), rows)
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
    rows: FeatureRows, labels: NDArray[np.int64], images: NDArray[np.int64], seed: int = 0, device: str = "auto"
) -> NDArray[np.float64]:
    """Return the probabilities (N, K) of each row by logistic regression on four fifths of the images, without its own.

    The penalty is the one with the smallest log loss of these probabilities.

    Args:
        rows: (N, D).
        labels: (N,) classes, 0 to K - 1; at least one row.
        images: (N,) number of the image of each row, 0 to I - 1; its rows, which are copies, are left out together.
        seed: seed of the folds.
        device: device to compute on.

    Returns:
        NaN for rows of classes with less than five images: too few to say what the class looks like.
    """
    n_classes = int(labels.max()) + 1
    _, first = np.unique(images, return_index=True)
    n_images = np.bincount(labels[first], minlength=n_classes)
    folds = stratified_folds(labels[first], seed)[images, 0]
    probabilities = np.full((len(labels), n_classes), np.nan)
    judged = (folds >= 0) & (n_images[labels] >= N_FOLDS)  # copies with a rare label are left out, but not judged
    if len(np.unique(labels[judged])) < 2:
        return probabilities
    memory_bytes = free_bytes() // 2
    if rows.nbytes <= memory_bytes // 3:
        rows = rows.held()
    problem = LogisticRegression(rows, labels, n_classes, device=probe_device(device), memory_bytes=memory_bytes)
    least = math.inf
    for penalty in _LAMBDAS:
        (scores,) = problem.left_out_scores([1 / penalty], folds[:, None])
        logits = torch.from_numpy(scores[0, judged].astype(np.float64))
        if logits.shape[1] == 1:  # two classes
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        loss = float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels[judged])))
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
