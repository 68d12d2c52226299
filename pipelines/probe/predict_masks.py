"""Write predicted masks of images as PNG files, with a table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.analysis.dense.token_images import scores_of_images
from extract.analysis.dense.upsampling import predicted_mask
from extract.analysis.probe.model import LinearProbe
from extract.errors import InputError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from extract.system.atomic_files import atomic_write, own_folder
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.pictures import Pictures
from pipelines.terminal.tables import table_file
from pipelines.terminal.text_output import printable

__all__ = ["check_mask_folder", "labels_of", "predict_masks"]

_TABLE = "masks.csv"
_HEAD = ["path", "status", "mask"]


def labels_of(probe: LinearProbe) -> list[int]:
    """Return the label in masks of each class of a probe; empty for a probe that does not predict masks.

    Raises:
        ValueError: the file of the probe does not give a label for each class.
    """
    labels = probe.about.get("labels", [])
    are_labels = isinstance(labels, list) and all(type(label) is int and 0 <= label < 0xFFFF for label in labels)
    if not are_labels or len(labels) not in (0, len(probe.classes_)):
        raise ValueError(f"labels {labels!r}; expected one for each class, below 65,535")
    return list(labels)


def check_mask_folder(folder: Path) -> None:
    """Check that masks can be written into a folder: a new or empty one, or one with earlier predictions.

    Raises:
        InputError: they cannot.
    """
    if folder.is_dir() and any(folder.iterdir()) and not _holds_masks(folder):
        raise InputError(f"{folder} already exists and holds no predicted masks", hint="name another folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; a probe of masks writes a folder", hint="name a folder with -o")


def _holds_masks(folder: Path) -> bool:
    try:
        with (folder / _TABLE).open("rb") as file:
            return file.readline().decode(errors="replace").strip() == ",".join(_HEAD)
    except OSError:
        return False


def predict_masks(probe: LinearProbe, out: Path, layers: Sequence[str], folder: Path) -> str:
    """Write a mask in the size of each picture, and `masks.csv`; return a summary.

    A mask has the labels of the probe's training masks, and the largest number of its type where the crop left the
    picture out: 255, or 65,535 if labels need 16 bits.

    Args:
        probe: probe of tokens, with the labels of its classes in `about`.
        out: data set with the features; its pictures must be available.
        layers: its features.
        folder: folder to write; the masks have the paths of the images.

    Raises:
        InputError: the pictures are not available.
    """
    labels = labels_of(probe)
    kind = np.uint8 if max(labels) < 0xFF else np.uint16
    label_of = np.array([*labels, np.iinfo(kind).max], kind)  # the last is for -1
    counts: Counter[str] = Counter()
    with FeatureReader(out, check=True) as reader:
        pictures = _pictures(reader, DataSet.open(out))
        files = _names(reader.paths)
        check_folder(folder)
        if not _holds_masks(folder):  # so that a run that is interrupted can be repeated
            with table_file(folder / _TABLE) as write:
                write(_HEAD)
        with table_file(folder / _TABLE) as write:
            write(_HEAD)
            predicted = _predicted(probe, reader, layers, pictures)
            for row, name in enumerate(reader.paths):
                if reader.status[row] != Status.OK:
                    write([name, Status(reader.status[row]).text, ""])
                    counts["without features"] += 1
                    continue
                mask = next(predicted)
                if mask is None:
                    write([name, "picture not available", ""])
                    counts["without picture"] += 1
                    continue
                _write(folder, files[row], label_of[mask])
                write([name, Status.OK.text, files[row]])
                counts["written"] += 1
    left_out = "".join(f", {counts[why]:,} {why}" for why in ("without features", "without picture") if counts[why])
    return f"{counts['written']:,} masks predicted{left_out}; written: {folder}"


def _pictures(reader: FeatureReader, dataset: DataSet) -> Pictures:
    orientation = str(reader.provenance.get("configuration", {}).get("orientation", "exif"))
    pictures = Pictures(reader, dataset.images["root"], range(len(reader)), orientation=orientation)
    if pictures.why_not:
        raise InputError(f"masks need the sizes of the pictures, which are not available: {pictures.why_not}")
    return pictures


def _predicted(
    probe: LinearProbe, reader: FeatureReader, layers: Sequence[str], pictures: Pictures
) -> Iterator[NDArray[np.int64] | None]:
    """Yield the numbers of classes (H, W) of each image with features, -1 outside the crop; None without a picture."""
    tokens = [reader.tokens(layer) for layer in layers]
    rows = tokens[0].rows
    scored = scores_of_images(tokens, lambda some: (probe.scores(some), None), np.arange(len(rows)))
    for row, (_, scores) in zip(rows.tolist(), scored, strict=True):
        size = pictures.size(row)
        yield None if size is None else predicted_mask(tokens[0], scores, size)


def _names(paths: Sequence[str]) -> list[str]:
    """Return the file of each mask below the folder: the path of the image as .png; two images never share one."""
    parts = [[part for part in PurePosixPath(path).parts if part.strip("/") not in ("", "..")] for path in paths]
    inside = ["/".join(part) or "image" for part in parts]
    short = [str(PurePosixPath(name).with_suffix(".png")) for name in inside]
    times = Counter(short)
    names = [one if times[one] == 1 else f"{name}.png" for one, name in zip(short, inside, strict=True)]
    if twice := next((name for name, count in Counter(names).items() if count > 1), ""):
        raise InputError(f"two images have the mask {printable(twice)}; remove one of them from the images")
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if both := folders & set(names):
        raise InputError(f"the mask {printable(min(both))} is also a folder of masks; rename one of the images")
    return names


def _write(folder: Path, name: str, mask: NDArray[Any]) -> None:
    try:
        for parent in list(PurePosixPath(name).parents)[-2::-1]:  # below the folder; a link would lead out of it
            own_folder(folder / parent)
        with atomic_write(folder / name, tidy=False) as file:
            Image.fromarray(mask).save(file, "PNG")
    except OSError as error:
        raise InputError(f"{printable(str(folder / name))} cannot be written: {error.strerror or error}") from error
