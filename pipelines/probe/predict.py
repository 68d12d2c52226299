"""Predict classes, masks or depths with a saved probe: `layertap predict PROBE IMAGES|OUT -o FILE.csv|FOLDER`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.probe.model import LinearProbe
from extract.backbones.loading import permitted
from extract.compute.backbone import load_backbone
from extract.compute.pooling import split_poolings
from extract.errors import InputError
from extract.extraction.plan import asked_of, existing_at, how_decoded, how_made, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.differences import changes
from extract.store.reader import FeatureReader
from extract.system.atomic_files import link_target, temporary_folder
from pipelines.probe.predict_pixels import check_pixel_folder, predict_pixels, predicted_pixels
from pipelines.probe.report import answer
from pipelines.terminal.progress import Progress
from pipelines.terminal.tables import table_file
from pipelines.terminal.text_output import counted, printable

__all__ = ["run_predict"]

_HEAD = b"path,status,predicted"
_ROWS = 4096  # predicted at once


def run_predict(
    path: Path, images: str, output: Path, *, backbone: str | None = None, weights: str | None = None,
    device: str = "auto", pictures: str | None = None,
) -> str:  # fmt: skip
    """Predict, write a CSV table, and return a summary.

    A probe of masks or depths writes a folder, see `predict_pixels`.

    The table has one line per image: path, status, prediction, and the probability of each class if the probe gives
    probabilities. A multilabel prediction lists the labels that are more probable than not, separated by |.

    Args:
        path: file of the probe.
        images: see `embed`; or the folder of a data set.
        output: CSV file or folder to write.
        backbone: spec of the backbone; required if the backbone is code, since an untrusted probe could name any code.
        weights: name or file of the backbone's weights, if the file was moved.
        device: device to compute on.
        pictures: location of the images of a data set, for a probe of masks or depths; None: the recorded location.

    Raises:
        InputError: `path` is not a probe, there are no images, the features were not computed as those that the probe
            was fitted on, or `output` cannot be written.
    """
    probe = LinearProbe.load(path)
    try:
        described = dict(probe.about["depends_on"])
        fitted_on = [(str(name), str(described["features"][name])) for name in probe.about["layers"]]
        poolings = [str(pooling) for pooling in probe.about["poolings"]]
        asked = asked_of(dict(probe.about["provenance"]["configuration"]), weights)
        named = str(probe.about["provenance"]["backbone"])
        computation = how_made(described) | how_decoded(described) | {"dtype": str(described["stored_as"])}
        max_pixels = int(probe.about["provenance"]["configuration"]["max_pixels"])
        layers = [name if split_poolings(name)[1] else f"{name}:{pooling}"
                  for (name, _), pooling in zip(fitted_on, poolings, strict=True)]  # fmt: skip
        if not layers or not isinstance(probe.about["layers"], list) or max_pixels < 1:
            raise ValueError(f"layers {probe.about['layers']!r}, max_pixels {max_pixels}")
        pixels = predicted_pixels(probe)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} does not describe the features that it was fitted on: {reason}") from error
    write: Callable[[LinearProbe, Path, Sequence[str], Path], str] = _predict
    if pixels is not None:
        check_pixel_folder(output, pixels)
        write = partial(predict_pixels, predicted=pixels, images=pictures)
    elif output.is_file() and not _holds_predictions(output):
        raise InputError(f"{output} already exists and holds no predictions", hint="name another file")
    elif output.is_dir():
        raise InputError(f"{output} cannot be written: it is a folder")
    if not output.parent.is_dir():
        raise InputError(f"{output} cannot be written: no such folder")
    if (Path(images) / "dataset.json").is_file():
        dataset = DataSet.open(Path(images))
        return write(probe, Path(images), _same_features(path, described, fitted_on, dataset, images), output)
    if computation["compile"] == "openvino" and device == "auto":
        device = "cpu"
    loaded = load_backbone(permitted(named, backbone, path, asked["weights"]), device=device, **asked)
    with temporary_folder(output) as folder:
        out = folder / "features"
        settings = ExtractionSettings(layers=layers, max_pixels=max_pixels, distortion=None, fit_on=None, **computation)
        plan = resolve(settings, list_images(images), loaded, existing_at(out))
        names = _same_features(path, described, fitted_on, plan.dataset, images)
        with Progress(len(plan.images)) as progress:
            extract(plan, on_rows=progress.advance, on_note=lambda note: progress.say(f"note: {printable(note)}"))
        return write(probe, out, names, output)


def _holds_predictions(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD


def _same_features(
    path: Path, described: dict[str, Any], fitted_on: list[tuple[str, str]], dataset: DataSet, images: str
) -> list[str]:
    """Return the names of the probe's features in a data set.

    Features are the same by tensor, pooling, shape, weights and preprocessing. Names have a pooling suffix only where a
    data set stores two poolings.
    """
    names, features = [], dataset.depends_on.get("features", {})
    for name, description in fitted_on:
        same = [other for other, other_description in features.items() if other_description == description]
        if not same:
            others = ", ".join(f"{other} ({of_other})" for other, of_other in list(features.items())[:5])
            raise InputError(f"{path} was fitted on {name} ({description}); {images} has no such feature, but {others}")
        names.append(same[0])
    if changed := changes(described | {"features": None}, dataset.depends_on | {"features": None}):
        listed = "; ".join(f"{key}: the probe has {fitted}, {images} has {other}" for key, fitted, other in changed)
        raise InputError(f"{path} was fitted on features with other settings than the features of {images}: {listed}")
    return names


def _predict(probe: LinearProbe, out: Path, layers: Sequence[str], output: Path) -> str:
    shown = probe.has_probabilities and probe.task != "regression"
    classes = [str(name) for name in probe.classes_.tolist()]
    counts: Counter[str] = Counter()
    with FeatureReader(out, check=True) as reader, table_file(link_target(output)) as write:
        write(["path", "status", "predicted", *(f"p({name})" for name in classes if shown)])
        for line in _lines(probe, reader, layers, classes, shown):
            counts[line[2] if line[1] == Status.OK.text else "\0"] += 1
            write(line)
    failed = counts.pop("\0", 0)
    most_frequent = ", ".join(f"{printable(name)} {count:,}" for name, count in counts.most_common(5))
    without = f", {failed:,} without features" if failed else ""
    summary = f"{counted(sum(counts.values()), 'image')} predicted{without}"
    more = f"\n{most_frequent}" if probe.task == "classification" and most_frequent else ""
    return f"{summary}; written: {output}{more}"


def _lines(
    probe: LinearProbe, reader: FeatureReader, layers: Sequence[str], classes: list[str], shown: bool
) -> Iterator[list[str]]:
    blank = ["", *("" for _ in classes if shown)]
    for start in range(0, len(reader), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(reader)))
        good_rows = rows[reader.status[rows] == Status.OK]
        cells: dict[int, list[str]] = {}
        if len(good_rows):
            scores = probe.scores(FeatureRows.of([reader[name] for name in layers], good_rows))
            probabilities = probe.probabilities(scores) if shown else None
            values = {"classification": scores.argmax(1), "multilabel": scores > 0}.get(probe.task, scores)
            for i, row in enumerate(good_rows.tolist()):
                of_classes = [] if probabilities is None else [f"{p:.6g}" for p in probabilities[i].tolist()]
                cells[row] = [answer(values[i], classes, probe.task), *of_classes]
        for row in rows.tolist():
            yield [reader.paths[row], Status(reader.status[row]).text, *cells.get(row, blank)]
