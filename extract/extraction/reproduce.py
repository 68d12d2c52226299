"""Compute features of images or texts with the recorded settings of a data set."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract import defaults
from extract.backbones import load_text_tower
from extract.backbones.loading import permitted
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.backends import open_forward
from extract.errors import InputError
from extract.extraction.pipeline import StoredRows, blank_rows, rows_of
from extract.extraction.plan import Existing, Plan, asked_of, how_decoded, how_made, resolve
from extract.extraction.settings import ExtractionSettings
from extract.images import Batch, Images, load_batches
from extract.images.sources import Files
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.differences import differences
from extract.store.format.value_types import read_as

__all__ = ["computed_rows", "features_of_file", "features_of_text", "recorded_plan"]


def recorded_plan(
    dataset: DataSet, provenance: dict[str, Any], images: Images, backbone: Backbone | str | None = None,
    weights: str | None = None, device: str = defaults.DEVICE, workers: int = 0,
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

    Raises:
        InputError: the data set does not record its settings, its backbone cannot be loaded, or `backbone` is None and
            the recorded backbone runs code.
        LayertapError: see `load_backbone`.
    """
    layers, spec, asked = _recorded_arguments(dataset, provenance, weights)
    max_pixels = provenance["configuration"].get("max_pixels", defaults.MAX_PIXELS)
    try:
        made, decoded = how_made(dataset.depends_on), how_decoded(dataset.depends_on)
    except KeyError as error:
        raise InputError(f"{dataset.out} does not record how it was computed: it has no {error}") from error
    if made["compile"] == "openvino" and device == "auto":
        device = "cpu"
    if not isinstance(backbone, Backbone):
        backbone = load_backbone(permitted(spec, backbone, dataset.out, asked["weights"]), device=device, **asked)
    made["compile"] = made["compile"].replace("auto", "off")
    settings = ExtractionSettings(
        layers=layers, workers=workers, max_pixels=max_pixels, distortion=None, fit_on=None, **made, **decoded,
        dtype=dataset.depends_on.get("stored_as", dataset.features[0].dtype),
    )  # fmt: skip
    return resolve(settings, images, backbone, Existing(str(dataset.out), dataset, has_rows=True))


def _recorded_arguments(
    dataset: DataSet, provenance: dict[str, Any], weights: str | None
) -> tuple[list[str], str, dict[str, Any]]:
    """Return the recorded layers, backbone spec and `load_backbone` arguments of a data set."""
    configuration = provenance.get("configuration", {})
    try:
        return list(configuration["layers"]), str(provenance["backbone"]), asked_of(configuration, weights)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{dataset.out} does not record how it was computed: its provenance has no {error}") from error


def computed_rows(plan: Plan, batches: Sequence[list[int]]) -> Generator[tuple[Batch, StoredRows], None, None]:
    """Compute rows of a plan without validation; yield (batch, rows) for each list of row numbers in `batches`."""
    settings, blank = plan.settings, blank_rows(plan.dataset.features)
    dtype = read_as(settings.dtype)
    loaded = load_batches(plan.images, batches, plan.decoding)
    opened = open_forward(plan.backbone, plan.choice, dtype, settings.precision, plan.engine, plan.batch_size)
    with contextlib.closing(loaded), opened as forward:
        for batch in loaded:
            yield batch, rows_of(batch, forward(batch.images) if len(batch.images) else {}, blank)


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
    _, spec, asked = _recorded_arguments(dataset, provenance, weights)
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
        path: path of the image file.
        backbone: spec of the backbone; see `recorded_plan`.
        weights: see `recorded_plan`.
        device: device to compute on.

    Raises:
        InputError: the file is not an image or cannot be decoded, or its features would have another fingerprint than
            the data set.
        LayertapError: see `recorded_plan`.
    """
    none = np.full(1, -1, np.int64)
    image = Images(str(path.parent), [path.name], none, [], [""], Files(str(path.parent), [path.name]))
    plan = recorded_plan(dataset, provenance, image, backbone, weights, device)
    if changed := differences(dataset.depends_on, plan.dataset.depends_on):
        raise InputError(
            f"features of {path} would not be comparable with those of {dataset.out}: {'; '.join(changed)}"
        )
    [(_, (values, status, reasons))] = computed_rows(plan, [[0]])
    if status[0] != Status.OK:
        raise InputError(f"{path}: {Status(status[0]).text}: {reasons.get(0, '')}")
    return {name: rows[0] for name, rows in values.items()}
