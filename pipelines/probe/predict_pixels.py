"""Write predicted masks of images as PNG files, or predicted depths as TIFF files, with a table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from extract.analysis.dense.token_images import scores_of_images
from extract.analysis.dense.upsampling import DepthBins, predicted_mask
from extract.analysis.probe.model import LinearProbe
from extract.errors import InputError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from extract.system.atomic_files import atomic_write, own_folder
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.tables import table_file
from pipelines.terminal.text_output import printable

__all__ = ["Predicted", "check_pixel_folder", "predict_pixels", "predicted_pixels"]

_HEAD = ["path", "status"]


@dataclass(frozen=True)
class Predicted:
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


def predicted_pixels(probe: LinearProbe) -> Predicted | None:
    """Return what a probe predicts for pixels; None for a probe of whole images.

    Raises:
        ValueError: the file of the probe does not give a label for each class, or does not describe its bins of depth.
    """
    if "depth" in probe.about:
        bins = DepthBins.of_json(probe.about["depth"], len(probe.classes_))
        return Predicted("depth maps", "depth", "depths.csv", ".tif", bins.predicted)
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

    return Predicted("masks", "mask", "masks.csv", ".png", mask)


def check_pixel_folder(folder: Path, predicted: Predicted) -> None:
    """Check that predictions can be written into a folder: a new or empty one, or one with earlier predictions.

    Raises:
        InputError: they cannot.
    """
    if folder.is_dir() and any(folder.iterdir()) and not _holds(folder, predicted):
        raise InputError(f"{folder} already exists and holds no predicted {predicted.what}", hint="name another folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"{folder} is a file; a probe of {predicted.what} writes a folder", hint="name a folder with -o"
        )


def _holds(folder: Path, predicted: Predicted) -> bool:
    try:
        with (folder / predicted.table).open("rb") as file:
            return file.readline().decode(errors="replace").strip() == ",".join([*_HEAD, predicted.column])
    except OSError:
        return False


def predict_pixels(
    probe: LinearProbe, out: Path, layers: Sequence[str], folder: Path, predicted: Predicted, images: str | None = None
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
        if not _holds(folder, predicted):  # so that a run that is interrupted can be repeated
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
    probe: LinearProbe, reader: FeatureReader, layers: Sequence[str], pictures: Pictures, predicted: Predicted
) -> Iterator[NDArray[Any] | None]:
    """Yield the predicted pixels (H, W) of each image with features; None without a picture."""
    tokens = [reader.tokens(layer) for layer in layers]
    rows = tokens[0].rows
    scored = scores_of_images(tokens, lambda some: (probe.scores(some), None), np.arange(len(rows)))
    for row, (_, scores) in zip(rows.tolist(), scored, strict=True):
        size = pictures.size(row)
        yield None if size is None else predicted.pixels(tokens[0], scores, size)


def _names(paths: Sequence[str], predicted: Predicted) -> list[str]:
    """Return the file of each image below the folder: its path with another suffix; two images never share one."""
    parts = [[part for part in PurePosixPath(path).parts if part.strip("/") not in ("", "..")] for path in paths]
    inside = ["/".join(part) or "image" for part in parts]
    short = [str(PurePosixPath(name).with_suffix(predicted.suffix)) for name in inside]
    times = Counter(short)
    names = [
        name if times[name] == 1 else f"{path}{predicted.suffix}" for name, path in zip(short, inside, strict=True)
    ]
    if twice := next((name for name, count in Counter(names).items() if count > 1), ""):
        raise InputError(
            f"two images have the {predicted.column} {printable(twice)}; remove one of them from the images"
        )
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if both := folders & set(names):
        raise InputError(
            f"the {predicted.column} {printable(min(both))} is also a folder of {predicted.what}; rename one of the "
            "images"
        )
    return names


def _write(folder: Path, name: str, pixels: NDArray[Any], predicted: Predicted) -> None:
    try:
        for parent in list(PurePosixPath(name).parents)[-2::-1]:  # below the folder; a link would lead out of it
            own_folder(folder / parent)
        with atomic_write(folder / name, tidy=False) as file:
            Image.fromarray(pixels).save(file, "PNG" if predicted.suffix == ".png" else "TIFF")
    except OSError as error:
        raise InputError(f"{printable(str(folder / name))} cannot be written: {error.strerror or error}") from error
