"""Checks of the folder that a run writes: space, lock, content, and what its file system can do."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from extract.errors import LayertapError
from extract.system.file_systems import file_system_kind
from extract.system.folder_lock import holder
from extract.system.leftovers import temporary_folder
from extract.system.operating_system import flush_to_disk
from extract.system.urls import is_url
from pipelines.doctor.check import Section

__all__ = ["check_output"]

_LEAST_FREE = 100_000_000  # bytes
_ROW_BYTES = 2048 * 4  # the embedding of a wide backbone, in float32
_OTHER_PLACE = "choose another output folder with -o"


def check_output(section: Section, out: str, n_images: int = 0) -> None:
    """Check an output folder; it is not created, and nothing that is written stays.

    Args:
        section: receives the results.
        out: the folder; it need not exist.
        n_images: number of images whose embeddings must fit on the disk.

    Raises:
        LayertapError: the folder cannot hold a data set, or its lock cannot be read.
    """
    section.facts["out"] = out
    if is_url(out):
        from extract.system.urls import file_system

        file_system(out)  # its library must be installed
        section.ok(f"{out} is a bucket; only the library for it is checked")
        return
    folder = Path(out)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    _check_space(section, place, max(_LEAST_FREE, n_images * _ROW_BYTES))
    is_usable = _check_content(section, folder)
    if folder.is_dir():
        held_by = holder(folder)
        section.facts["locked_by"] = held_by or None
        if held_by:
            section.wrong(f"{out} is locked by {held_by}", f"wait until that process ends, or {_OTHER_PLACE}")
    if is_usable:
        _check_writing(section, folder, place)


def _check_space(section: Section, place: Path, needed: int) -> None:
    free = shutil.disk_usage(place).free
    kind = file_system_kind(place)
    section.facts.update(free_bytes=free, file_system=kind or None)
    text = f"{free / 1e9:,.1f} GB free on the disk of {place}" + (f" ({kind})" if kind else "")
    if free < needed:
        section.wrong(f"only {text}; at least {needed / 1e9:,.1f} GB are needed", f"free disk space, or {_OTHER_PLACE}")
    else:
        section.ok(text)


def _check_content(section: Section, folder: Path) -> bool:
    """Return whether the folder holds a data set, or one can be created there."""
    from extract.store.format.dataset import DataSet, check_usable

    section.facts["data_set"] = None
    try:
        check_usable(folder)
        if not (folder / "dataset.json").exists():
            return True
        dataset = DataSet.open(folder)
    except LayertapError as error:
        section.wrong(error.message, error.hint)
        return False
    section.facts["data_set"] = {"rows": dataset.n_rows, "images": dataset.images["root"]}
    section.ok(f"{folder} holds a data set of {dataset.n_rows:,} rows; a run with the same settings resumes it")
    return True


def _check_writing(section: Section, folder: Path, place: Path) -> None:
    """Try in a temporary folder, which is removed again, what a run needs."""
    operations: dict[str, Callable[[Path], None]] = {
        "write": _write, "rename": _rename, "link": _link, "lock": _lock,
    }  # fmt: skip
    works = section.facts["works"] = dict.fromkeys(operations, False)
    if not os.access(place, os.W_OK | os.X_OK):
        section.wrong(f"{folder} cannot be written: no permission to write to {place}", _OTHER_PLACE)
        return
    try:
        with temporary_folder(place / "doctor") as trial:
            for name, operation in operations.items():
                try:
                    operation(trial)
                    works[name] = True
                except OSError as error:
                    _report(section, name, place, error)
    except OSError as error:
        section.wrong(f"{folder} cannot be written: {place}: {error.strerror}", _OTHER_PLACE)
        return
    if all(works.values()):
        section.ok(f"{folder} can be written; renaming, hard links and locks work")


def _report(section: Section, name: str, place: Path, error: OSError) -> None:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = f"free disk space, or {_OTHER_PLACE}" if full else _OTHER_PLACE
    if name == "link":  # needed only where several workers publish shards
        section.note(f"no hard links in {place}: {error.strerror}", "run one process; --engine needs hard links")
    else:
        section.wrong(f"{name} does not work in {place}: {error.strerror}", remedy)


def _write(trial: Path) -> None:
    with (trial / "a").open("wb") as file:
        file.write(b"\0" * 65536)
        file.flush()
        flush_to_disk(file.fileno())


def _rename(trial: Path) -> None:
    (trial / "r").touch()
    (trial / "r").rename(trial / "renamed")


def _link(trial: Path) -> None:
    (trial / "l").touch()
    (trial / "linked").hardlink_to(trial / "l")


def _lock(trial: Path) -> None:
    with (trial / "k").open("wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
