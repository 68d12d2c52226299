"""Predict classes, masks or depths with a saved probe: `layertap predict PROBE IMAGES|OUT -o FILE.csv|FOLDER`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from extract.analysis.dense import DepthBins, predicted_mask, scores_of_images
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
from extract.store.tokens.token_array import TokenArray
from extract.system.atomic_files import atomic_write, link_target, own_folder, temporary_folder
from pipelines.probe.report import answer
from pipelines.terminal.output_paths import check_file, check_folder
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.progress import Progress
from pipelines.terminal.tables import holds_columns, table_file
from pipelines.terminal.text_output import counted, printable

__all__ = ["run_predict"]

_HEAD = ["path", "status"]  # of the tables
_ROWS = 4096  # predicted at once


def run_predict(
    path: Path, images: str, output: Path, *, backbone: str | None = None, weights: str | None = None,
    device: str = "auto", pictures: str | None = None,
) -> str:  # fmt: skip
    """Predict, write a CSV table, and return a summary.

    A probe of masks or depths writes a folder, see `_predict_pixels`.

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
        pixels = _predicted_pixels(probe)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} does not describe the features that it was fitted on: {reason}") from error
    write: Callable[[LinearProbe, Path, Sequence[str], Path], str] = _predict
    if pixels is not None:
        _check_pixel_folder(output, pixels)
        write = partial(_predict_pixels, predicted=pixels, images=pictures)
    elif output.is_file() and not holds_columns(output, [*_HEAD, "predicted"]):
        raise InputError(f"{output} already exists and holds no predictions", hint="name another file")
    check = check_folder if pixels is not None and output.is_dir() else check_file
    check(output)
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
        write([*_HEAD, "predicted", *(f"p({name})" for name in classes if shown)])
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


@dataclass(frozen=True)
class _PixelTask:
    """What a probe predicts for pixels.

    Attributes:
        what: "masks" or "depth maps".
        column: column of the table with the files.
        table: name of the table.
        suffix: ending of the files.
        pixels: function of the tokens of a data set, the scores (K, h, w) of an image, and the (width, height) of its
            picture. It returns (H, W): labels of the training masks in uint8, or uint16 if one is 255 or above, the
            largest number of the type outside the crop; or depths in float32, in the unit of the training depths, NaN
            outside the crop.
    """

    what: str
    column: str
    table: str
    suffix: str
    pixels: Callable[[TokenArray, Tensor, tuple[int, int]], NDArray[Any]]

    def are_in(self, folder: Path) -> bool:
        """Return whether a folder has a table of such predictions."""
        return holds_columns(folder / self.table, [*_HEAD, self.column])


def _predicted_pixels(probe: LinearProbe) -> _PixelTask | None:
    """Return what a probe predicts for pixels; None for a probe of whole images.

    Raises:
        ValueError: the file of the probe does not give a label for each class, or does not describe its bins of depth.
    """
    if "depth" in probe.about:
        bins = DepthBins.of_json(probe.about["depth"], len(probe.classes_))
        return _PixelTask("depth maps", "depth", "depths.csv", ".tif", bins.predicted)
    labels = probe.about.get("labels", [])
    are_labels = isinstance(labels, list) and all(type(label) is int and 0 <= label < 0xFFFF for label in labels)
    if not are_labels or len(labels) not in (0, len(probe.classes_)):
        raise ValueError(f"labels {labels!r}; expected one for each class, below 65,535")
    if not labels:
        return None
    kind = np.uint8 if max(labels) < 0xFF else np.uint16
    label_of = np.array([*labels, np.iinfo(kind).max], kind)  # the last is for -1

    def mask(tokens: TokenArray, scores: Tensor, picture_px: tuple[int, int]) -> NDArray[Any]:
        return np.asarray(label_of[predicted_mask(tokens, scores, picture_px)])

    return _PixelTask("masks", "mask", "masks.csv", ".png", mask)


def _check_pixel_folder(folder: Path, predicted: _PixelTask) -> None:
    """Check that predictions can be written into a folder: a new or empty one, or one with earlier predictions.

    Raises:
        InputError: they cannot.
    """
    if folder.is_dir() and any(folder.iterdir()) and not predicted.are_in(folder):
        raise InputError(f"{folder} already exists and holds no predicted {predicted.what}", hint="name another folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"{folder} is a file; a probe of {predicted.what} writes a folder", hint="name a folder with -o"
        )


def _predict_pixels(
    probe: LinearProbe, out: Path, layers: Sequence[str], folder: Path, predicted: _PixelTask, images: str | None = None
) -> str:
    """Write a file in the size of each picture, and a table of them; return a summary.

    Args:
        probe: probe of tokens.
        out: data set with the features; its pictures must be available.
        layers: its features.
        folder: folder to write; the files have the paths of the images.
        predicted: what the probe predicts.
        images: location of the pictures; None: the recorded location, unless they would be fetched from a URL.

    Raises:
        InputError: the pictures are not available.
    """
    counts: Counter[str] = Counter()
    with FeatureReader(out, check=True) as reader:
        pictures = Pictures(reader, DataSet.open(out).images["root"], range(len(reader)), images)
        if pictures.why_not:
            raise InputError(
                f"{predicted.what} need the sizes of the pictures, which are not available: {pictures.why_not}"
            )
        files = _names(reader.paths, predicted)
        check_folder(folder)
        if not predicted.are_in(folder):  # so that a run that is interrupted can be repeated
            with table_file(folder / predicted.table) as write:
                write([*_HEAD, predicted.column])
        with table_file(folder / predicted.table) as write:
            write([*_HEAD, predicted.column])
            of_rows = _pixels_of_rows(probe, reader, layers, pictures, predicted)
            for row, name in enumerate(reader.paths):
                pixels = None
                if reader.status[row] != Status.OK:
                    outcome, status = "without features", Status(reader.status[row]).text
                elif (pixels := next(of_rows)) is None:
                    outcome, status = "without picture", "picture not available"
                else:
                    outcome, status = "written", Status.OK.text
                    _write(folder, files[row], pixels, predicted)
                write([name, status, "" if pixels is None else files[row]])
                counts[outcome] += 1
    left_out = "".join(f", {counts[why]:,} {why}" for why in ("without features", "without picture") if counts[why])
    return f"{counts['written']:,} {predicted.what} predicted{left_out}; written: {folder}"


def _pixels_of_rows(
    probe: LinearProbe, reader: FeatureReader, layers: Sequence[str], pictures: Pictures, predicted: _PixelTask
) -> Iterator[NDArray[Any] | None]:
    """Yield the predicted pixels (H, W) of each image with features; None without a picture."""
    tokens = [reader.tokens(layer) for layer in layers]
    rows = tokens[0].rows
    scored = scores_of_images(tokens, probe.scores, np.arange(len(rows)))
    for row, (_, scores) in zip(rows.tolist(), scored, strict=True):
        size = pictures.size(row)
        yield None if size is None else predicted.pixels(tokens[0], scores, size)


def _names(paths: Sequence[str], predicted: _PixelTask) -> list[str]:
    """Return the file of each image below the folder: its path with another suffix; two images never share one."""
    parts = [[part for part in PurePosixPath(path).parts if part.strip("/") not in ("", "..")] for path in paths]
    inside = ["/".join(part) or "image" for part in parts]
    short = [str(PurePosixPath(name).with_suffix(predicted.suffix)) for name in inside]
    times = Counter(short)
    names = [
        name if times[name] == 1 else f"{path}{predicted.suffix}" for name, path in zip(short, inside, strict=True)
    ]
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if several := [name for name, count in Counter([*names, *folders]).items() if count > 1]:
        raise InputError(
            f"two images have the {predicted.column} {printable(min(several))}, or one is also a folder",
            hint="rename one of the images",
        )
    return names


def _write(folder: Path, name: str, pixels: NDArray[Any], predicted: _PixelTask) -> None:
    try:
        for parent in list(PurePosixPath(name).parents)[-2::-1]:  # below the folder; a link would lead out of it
            own_folder(folder / parent)
        with atomic_write(folder / name, tidy=False) as file:
            Image.fromarray(pixels).save(file, "PNG" if predicted.suffix == ".png" else "TIFF")
    except OSError as error:
        raise InputError(f"{printable(str(folder / name))} cannot be written: {error.strerror or error}") from error
