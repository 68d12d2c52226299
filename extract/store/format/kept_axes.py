"""Files of principal axes in a data set: `axes/HASH.safetensors`, named by the first 16 digits of their sha256.

A feature that is projected on axes has the whole hash as its attribute `principal_axes`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from extract.errors import InputError, LayertapError, system_errors_as
from extract.store.format.dataset import DataSet
from extract.store.format.layout import AXES_FOLDER
from extract.store.format.version import pass_folder
from extract.system.atomic_files import atomic_write, open_regular, own_folder

__all__ = ["AXES_HASH", "axes_file", "copy_axes", "keep_axes", "recorded_axes"]

AXES_HASH = "principal_axes"


def recorded_axes(dataset: DataSet) -> list[str]:
    """Return the hashes of the axes that features of a data set are projected on.

    Raises:
        InputError: the data set records something else as a hash.
    """
    hashes = {feature.attributes[AXES_HASH] for feature in dataset.features if AXES_HASH in feature.attributes}
    if wrong := [sha256 for sha256 in sorted(hashes) if not re.fullmatch("[0-9a-f]{64}", sha256)]:
        raise InputError(f"{dataset.out}: {AXES_HASH} is {wrong[0][:80]!r}; expected a sha256")
    return sorted(hashes)


def axes_file(dataset: DataSet, sha256: str) -> Path:
    """Return the file with the axes of a data set, after checking its hash.

    Args:
        dataset: the data set; of `layertap sync`, the axes are in its passes.
        sha256: one of `recorded_axes`.

    Raises:
        InputError: the file is missing or was changed.
        LayertapError: the file cannot be read.
    """
    passes = dataset.version.passes if dataset.version else []
    folders = [dataset.out, *(pass_folder(dataset.out, number) for number in passes)]
    paths = [folder / AXES_FOLDER / f"{sha256[:16]}.safetensors" for folder in folders]
    path = next((path for path in paths if path.is_file()), paths[0])
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise InputError(f"{path} is missing: it has the principal axes of {dataset.out}", hint="restore it") from None
    except OSError as error:
        raise LayertapError(f"cannot read {path}: {error.strerror}") from error
    if actual != sha256:
        raise InputError(f"{path} was changed: its sha256 is {actual[:16]}..., expected {sha256[:16]}...")
    return path


def copy_axes(dataset: DataSet, out: Path) -> None:
    """Copy the axes of a data set to another one in the folder `out`; raises the errors of the other functions."""
    keep_axes(out, {sha256: axes_file(dataset, sha256) for sha256 in recorded_axes(dataset)})


def keep_axes(out: Path, files: Mapping[str, Path]) -> None:
    """Copy files of axes, by their sha256, into the folder of a data set, unless it has them.

    Raises:
        InputError: the folder `axes` is a link.
        LayertapError: the disk is full, or a file cannot be read or written.
    """
    for sha256, file in files.items():
        path = out / AXES_FOLDER / f"{sha256[:16]}.safetensors"
        if path.exists():
            continue
        with system_errors_as(f"cannot write {path}"):
            own_folder(path.parent)
            with os.fdopen(open_regular(file), "rb") as source, atomic_write(path) as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
