"""Compute features with the recorded settings of a data set: of images, of texts, and of its rows to check them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.backbones import load_text_tower
from extract.backbones.loading import permitted
from extract.compute.agreement import deviations
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.backends import open_forward
from extract.compute.forward import Values
from extract.errors import InputError
from extract.extraction.pipeline import pictures_of, rows_of
from extract.extraction.plan import Existing, Plan, asked_of, how_decoded, how_made, resolve
from extract.extraction.settings import ExtractionSettings
from extract.images import Batch, Images, listed_again, load_batches
from extract.images.part_source import source_of
from extract.images.sources import Files
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.differences import differences
from extract.store.format.value_types import ROUNDING, read_as
from extract.store.format.writer import StoredRows
from extract.store.reader import FeatureReader
from extract.store.verify import Fault, Remedy

__all__ = [
    "TOLERANCE", "ComparedRow", "Recheck", "compared", "computed_rows", "features_of_file", "features_of_text",
    "images_of", "in_batches", "recheck", "recorded_backbone", "recorded_plan", "some_rows",
]  # fmt: skip

# Relative to the largest value of a row. Other batches, thread counts and machines change float32 features by 1e-6 to
# 1e-4 of it, and rounding to float16 by at most 5e-4. Another image or other preprocessing changes them by more than
# 1e-2. Lower precision changes them by a few roundings, of 2^-11 in TF32 and float16 and 2^-8 in bfloat16.
TOLERANCE = {"float32": 1e-3, "tf32": 5e-3, "float16": 5e-3, "bfloat16": 3e-2, "bfloat16-weights": 3e-2}


def recorded_plan(
    dataset: DataSet, provenance: dict[str, Any], images: Images, backbone: Backbone | str | None = None,
    weights: str | None = None, device: str = defaults.DEVICE, workers: int = 0, layer: str | None = None,
) -> Plan:  # fmt: skip
    """Plan a run for these images with the recorded settings of a data set.

    Args:
        dataset: data set whose settings are used.
        provenance: provenance from its reader.
        images: images to compute.
        backbone: a loaded backbone or a spec; None loads the recorded backbone, unless that runs code.
        weights: a name or file; None: the recorded weights.
        device: device to compute on; "auto" is the CPU if the recorded engine is OpenVINO.
        workers: processes that decode.
        layer: the only layer to compute; None: the recorded layers.

    Raises:
        InputError: the data set does not record its settings, its backbone cannot be loaded, or `backbone` is None and
            the recorded backbone runs code.
        LayertapError: see `load_backbone`.
    """
    backbone, recorded = recorded_backbone(dataset, provenance, backbone, weights, device)
    recorded["compile"] = recorded["compile"].replace("auto", "off")
    recorded["layers"] = [layer] if layer else recorded["layers"]
    settings = ExtractionSettings(workers=workers, distortion=None, fit_on=None, **recorded)
    return resolve(settings, images, backbone, Existing(str(dataset.out), dataset, has_rows=True))


def recorded_backbone(
    dataset: DataSet, provenance: dict[str, Any], backbone: Backbone | str | None, weights: str | None, device: str
) -> tuple[Backbone, dict[str, Any]]:
    """Load the backbone of a data set, as `recorded_plan` does, and return it with the recorded settings."""
    spec, asked, recorded = _recorded(dataset, provenance, weights)
    if recorded["compile"] == "openvino" and device == "auto":
        device = "cpu"
    if not isinstance(backbone, Backbone):
        backbone = load_backbone(permitted(spec, backbone, dataset.out, asked["weights"]), device=device, **asked)
    return backbone, recorded


def _recorded(
    dataset: DataSet, provenance: dict[str, Any], weights: str | None
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the recorded backbone spec, `load_backbone` arguments and settings of a data set."""
    configuration = provenance.get("configuration", {})
    try:
        settings = {
            "layers": list(configuration["layers"]),
            "max_pixels": configuration.get("max_pixels", defaults.MAX_PIXELS),
            "dtype": dataset.depends_on.get("stored_as", dataset.features[0].dtype),
            **how_made(dataset.depends_on),
            **how_decoded(dataset.depends_on),
        }
        return str(provenance["backbone"]), asked_of(configuration, weights), settings
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{dataset.out} does not record how it was computed: it has no {error}") from error


def computed_rows(plan: Plan, batches: Sequence[list[int]]) -> Generator[tuple[Batch, StoredRows], None, None]:
    """Compute rows of a plan without validation; yield (batch, rows) for each list of row numbers in `batches`."""
    settings, blank = plan.settings, {each.name: each.blank for each in plan.dataset.features}
    dtype = read_as(settings.dtype)
    loaded = load_batches(plan.images, batches, plan.decoding)
    opened = open_forward(plan.backbone, plan.choice, dtype, settings.precision, plan.engine, plan.batch_size)
    with contextlib.closing(loaded), opened as forward:
        for batch in loaded:
            values = forward(pictures_of(batch)) if len(batch.images) else {}
            yield batch, rows_of(batch, plan, values, blank)


def in_batches(positions: NDArray[np.int64], size: int = defaults.BATCH_SIZE) -> list[list[int]]:
    """Return positions in batches for `computed_rows`."""
    return [part.tolist() for part in np.split(positions, np.arange(size, len(positions), size))]


def features_of_text(
    dataset: DataSet, provenance: dict[str, Any], text: str, backbone: str | None = None, weights: str | None = None,
    device: str = defaults.DEVICE,
) -> NDArray[np.float32]:  # fmt: skip
    """Return the (D,) feature of a text, to be compared with the embeddings of a data set by cosine.

    Args:
        dataset: data set of a backbone with a text tower.
        provenance: provenance from its reader.
        text: the text.
        backbone: spec of the backbone; see `recorded_plan`.
        weights: see `recorded_plan`.
        device: device to compute on.

    Raises:
        InputError: the backbone has no text tower, the weights have changed, the data set has no embeddings, or the
            text is empty or too long.
        LayertapError: see `load_text_tower`.
    """
    shape = next((feature.shape for feature in dataset.features if feature.name == "embedding"), None)
    if shape is None:
        raise InputError(
            f"texts are compared with embeddings, but {dataset.out} has none", hint="extract them with -l embedding"
        )
    spec, asked, _ = _recorded(dataset, provenance, weights)
    tower = load_text_tower(
        permitted(spec, backbone, dataset.out, asked["weights"]),
        weights=asked["weights"],
        seed=asked["seed"],
        device=device,
    )
    now = {**dataset.depends_on, "architecture": tower.architecture, "weights_sha256": tower.weights_sha256}
    if changed := differences(dataset.depends_on, now):
        raise InputError(f"texts would not be comparable with the images of {dataset.out}: {'; '.join(changed)}")
    feature: NDArray[np.float32] = tower.features(text)[0]
    if shape != feature.shape:
        sizes = " x ".join(map(str, shape))
        raise InputError(
            f"{spec} returns {len(feature)} values for a text, but the embeddings of {dataset.out} have {sizes}"
        )
    return feature


def features_of_file(
    dataset: DataSet, provenance: dict[str, Any], path: Path, backbone: str | None = None, weights: str | None = None,
    device: str = defaults.DEVICE,
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Return the features of one image file: feature name -> (*shape).

    Args:
        dataset: data set to compare the features with.
        provenance: provenance from its reader.
        path: path of the image file, or the name of a part of it.
        backbone: spec of the backbone; see `recorded_plan`.
        weights: see `recorded_plan`.
        device: device to compute on.

    Raises:
        InputError: the file is not an image or cannot be decoded, or its features would have another fingerprint than
            the data set.
        LayertapError: see `recorded_plan`.
    """
    none = np.full(1, -1, np.int64)
    source = source_of([path.name], partial(Files, str(path.parent)))
    image = Images(str(path.parent), [path.name], none, [], [""], source)
    plan = recorded_plan(dataset, provenance, image, backbone, weights, device)
    if changed := differences(dataset.depends_on, plan.dataset.depends_on):
        raise InputError(
            f"features of {path} would not be comparable with those of {dataset.out}: {'; '.join(changed)}"
        )
    [(_, (values, status, reasons))] = computed_rows(plan, [[0]])
    if status[0] != Status.OK:
        raise InputError(f"{path}: {Status(status[0]).text}: {reasons.get(0, '')}")
    return {name: rows[0] for name, rows in values.items()}


@dataclass(frozen=True)
class ComparedRow:
    """A row computed again beside the stored one.

    Attributes:
        row: its number among the stored rows.
        path: of its image.
        features: feature -> (*shape), as computed again.
        deviation: largest of a feature, relative to the largest value of the stored row; NaN: one is not finite.
        is_read: whether its image could be read.
        reason: why it could not, or that computed values are not finite; else empty.
        source_hash: (16,) uint8, of the bytes of its image.
        mtime_ns: modification time of its image, or `UNKNOWN`.
    """

    row: int
    path: str
    features: Values
    deviation: float
    is_read: bool
    reason: str
    source_hash: NDArray[np.uint8]
    mtime_ns: int


def compared(plan: Plan, stored: Mapping[str, Any], rows: NDArray[np.int64]) -> Generator[ComparedRow, None, None]:
    """Compute rows again and compare them with the stored ones, without a tolerance.

    Args:
        plan: its image i is that of row `rows[i]`.
        stored: feature of the plan -> (N, *shape), all stored rows.
        rows: (R,), ascending.
    """
    with contextlib.closing(computed_rows(plan, in_batches(np.arange(len(rows))))) as computed:
        for batch, (features, _, reasons) in computed:
            here = rows[batch.rows]
            apart = np.max([deviations(features[name], values[here]) for name, values in stored.items()], axis=0)
            for i, position in enumerate(batch.rows.tolist()):
                values, is_read = {name: features[name][i] for name in stored}, bool(batch.status[i] == Status.OK)
                yield ComparedRow(
                    int(here[i]), plan.images.paths[position], values, float(apart[i]), is_read,
                    reasons.get(position, ""), batch.source_hash[i], int(batch.source_mtime_ns[i]),
                )  # fmt: skip


def some_rows(name: object, good: NDArray[np.int64], sample: int, seed: int) -> NDArray[np.int64]:
    """Return rows with features chosen at random, ascending; all if there are fewer.

    Raises:
        InputError: there are none.
    """
    if not len(good):
        raise InputError(f"{name} has no row with features")
    chosen: NDArray[np.int64] = np.sort(np.random.default_rng(seed).permutation(good)[:sample])
    return chosen


@dataclass
class Recheck:
    """Comparison of features computed again with the stored ones.

    Attributes:
        n_rows: number of rows compared.
        largest: largest deviation of a feature, relative to the largest value of its row.
        faults: rows that differ by more than `TOLERANCE` and the rounding of the stored type, are not finite now, or
            whose image cannot be read. If the fingerprint differs, no row is compared, and each fault is a difference
            of the fingerprint.
        apart: faults whose image has not changed since it was stored, and differences of the fingerprint.
    """

    n_rows: int = 0
    largest: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    apart: list[Fault] = field(default_factory=list)


def recheck(
    out: Path, sample: int, *, seed: int = defaults.SEED, images: str | os.PathLike[str] | None = None,
    backbone: Backbone | str | None = None, weights: str | None = None, device: str = defaults.DEVICE,
    workers: int = defaults.WORKERS,
) -> Recheck:  # fmt: skip
    """Compute random rows again with the recorded settings of the data set, and compare them with the stored rows.

    Args:
        out: folder of the data set.
        sample: number of rows; all rows with features if there are fewer.
        seed: seed of the random choice.
        images: location of the images; None: the recorded one, unless images would be fetched from a URL.
        backbone: a loaded backbone or a spec; None loads the recorded backbone, unless that runs code.
        weights: a name or file; None: the recorded weights.
        device: device to compute on.
        workers: processes that decode, if there is more than one batch.

    Raises:
        InputError: the data set, its features or its images are missing, or its backbone cannot be loaded.
        LayertapError: see `FeatureReader` and `load_backbone`.
    """
    dataset, checked = DataSet.open(out), Recheck()
    with FeatureReader(out, partial=True) as reader:
        chosen = some_rows(out, np.flatnonzero(reader.status == Status.OK), sample, seed)
        listed = images_of(dataset, [reader.paths[row] for row in chosen], images)
        workers = workers if len(chosen) > defaults.BATCH_SIZE else 0
        plan = recorded_plan(dataset, reader.provenance, listed, backbone, weights, device, workers)
        if changed := differences(dataset.depends_on, plan.dataset.depends_on):
            others = [Fault(f"computed with another {line}", Remedy.NONE) for line in changed]
            return Recheck(faults=others, apart=others)
        tolerance = TOLERANCE[plan.settings.precision] + max(ROUNDING[feature.dtype] for feature in dataset.features)
        stored, hashes = {name: reader[name] for name in reader.layers}, reader.column("source_hash")
        with contextlib.closing(compared(plan, stored, chosen)) as rows:
            for each in rows:
                is_same = each.is_read and bool((each.source_hash == hashes[each.row]).all())
                checked.n_rows += each.is_read
                if not each.reason:
                    checked.largest = float(np.fmax(checked.largest, each.deviation))
                if what := _difference(each, tolerance, is_same):
                    file, shard, row = reader.place_of(each.row)
                    remedy = Remedy.ROW if each.is_read else Remedy.NONE
                    checked.faults.append(Fault(what, remedy, shard, file.relative_to(out).as_posix(), row, each.path))
                    if is_same:
                        checked.apart.append(checked.faults[-1])
    return checked


def _difference(each: ComparedRow, tolerance: float, is_same: bool) -> str:
    """Return how a row differs from the stored one; "" if it agrees."""
    if not each.is_read:
        return f"its image cannot be read any more: {each.reason}"
    if each.reason:
        return f"features computed again are not finite: {each.reason}"
    why = "its image is the same" if is_same else "its image has changed since"
    return "" if each.deviation <= tolerance else f"features computed again differ by {each.deviation:.1e}; {why}"


def images_of(dataset: DataSet, paths: Sequence[str], images: str | os.PathLike[str] | None) -> Images:
    """Return the images of some rows of a data set, by their paths, where the user or the data set says.

    Raises:
        InputError: see `listed_again`.
    """
    try:
        return listed_again(dataset.images["root"], paths, None if images is None else os.fspath(images))
    except InputError as error:
        raise InputError(f"{dataset.out}: {error}") from error
