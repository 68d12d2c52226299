"""A folder to which several machines publish finished shards at once, without a lock: on a network file system, too.

A shard is built elsewhere, on a disk of the machine that builds it. It is copied into the folder under another name
(unless it is on that file system already), forced to the disk, and given its final name by a hard link, which fails
where the name exists: of two that publish the same shard, one wins. Only the winner writes the receipt.

What is relied on: that `link` fails where a name exists, and that what was forced to the disk is there. NFS gives both
(RFC 1813, sections 3.3.15 and 3.3.21); that its server answers a `link` that was sent twice with "exists" is allowed
for. Locks are not relied on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError
from extract.store.format.dataset import DataSet
from extract.store.format.receipt import read_receipt, receipt_of
from extract.system.atomic_files import check_own_folders, discard, own_folder, sync_folder, write_json

__all__ = ["SharedFolder"]


class SharedFolder:
    """The folder of a data set that several machines make together.

    Args:
        out: the folder; all of them see it under some name.
    """

    def __init__(self, out: Path):
        self.out = out

    def open_or_create(self, dataset: DataSet) -> DataSet | None:
        """Make the folder hold this data set; returns what it holds already.

        Raises:
            InputError: it holds another data set, or other files; or a folder in it is a link to elsewhere.
            LayertapError: it cannot be written to.
        """
        here = replace(dataset, out=self.out)
        description = self.out / "dataset.json"
        try:
            if self.out.exists():
                check_own_folders(self.out)
            while True:
                begun = description.exists()
                existing = here.check()
                if existing is not None:
                    break
                if begun:
                    raise InputError(
                        f"{self.out} was begun for other images or features, and has no rows. Another worker may be "
                        "about to write some, so it is left as it is: delete it, or choose another output folder"
                    )
                own_folder(self.out / "shards")
                mine = description.with_name(f"{description.name}.{_own_name()}.new")
                try:
                    here.write(mine)
                    _link(mine, description)
                    break
                except (FileExistsError, FileNotFoundError):
                    pass  # another worker was the first
                finally:
                    discard(mine)
            for left in self.out.glob(f"{description.name}.*.new"):  # by a worker that was killed
                discard(left)
        except OSError as error:
            raise LayertapError(f"cannot write to {self.out}: {error.strerror}") from error
        self.clean()
        return existing

    def receipts(self, known: Container[str]) -> Iterator[tuple[str, int, dict[str, Any] | None]]:
        """Name, shard and receipt of each shard that is there, but for known names; None: the receipt is not there."""
        dataset = self.dataset
        for shard, where in enumerate(dataset.whereabouts()):
            if where.published is None:
                continue
            path = dataset.path(shard, where.published)
            if path.name not in known:
                yield path.name, shard, read_receipt(path)

    def clean(self) -> None:
        """Remove copies of shards that are published: of workers that were killed, or were not the first."""
        published = set(self.published().tolist())
        for copy in (self.out / "shards").glob("*.copy"):
            if copy.name[:6].isdigit() and int(copy.name[:6]) in published:
                discard(copy)

    @property
    def dataset(self) -> DataSet:
        """What the folder holds.

        Raises:
            InputError: no data set.
        """
        return DataSet.open(self.out)

    def published(self) -> NDArray[np.int64]:
        """(n,) numbers of the shards that are there, ascending."""
        return np.array(sorted({shard for shard, _, part, _ in self.dataset.files() if not part}), np.int64)

    def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
        """Give a finished shard to the folder.

        Args:
            path: the shard, somewhere else; it is not moved.
            receipt: of it.

        Returns:
            whether it is there now because of this call; False: another worker was the first, and nothing was done.

        Raises:
            LayertapError: the folder cannot be written to; the shard is safe where it is.
        """
        final = self.out / "shards" / path.name
        copy = final.with_name(f"{final.name}.{_own_name()}.copy")
        try:
            if not final.exists():
                try:
                    if not _is_linked(path, final):
                        _copy(path, copy, receipt)
                        _link(copy, final)
                except (FileExistsError, FileNotFoundError):
                    if not final.exists():
                        raise
                else:
                    write_json(final.with_suffix(".json"), receipt)
                    sync_folder(final.parent)
                    return True
            self._see_receipt(final, receipt)
        except OSError as error:
            raise LayertapError(
                f"cannot publish {final}: {error.strerror or error}; it is safe in {path}, run again to go on"
            ) from error
        finally:
            discard(copy)
        return False

    def _see_receipt(self, final: Path, mine: dict[str, Any]) -> None:
        """Write the receipt of a shard whose publisher was killed before it could, but never over one."""
        receipt = final.with_suffix(".json")
        if receipt.exists():
            return
        with self.dataset.open_shard(int(mine["shard"]), final) as shard:
            reasons = {int(row): reason for row, reason in mine["reasons"].items()}
            content = receipt_of(final, shard, reasons)
        new = receipt.with_name(f"{receipt.name}.{_own_name()}.copy")
        try:
            write_json(new, content)
            with contextlib.suppress(FileExistsError):
                _link(new, receipt)
        finally:
            discard(new)


def _is_linked(path: Path, final: Path) -> bool:
    """Whether a shard that lies on the same file system could be given its final name as it is."""
    try:
        _link(path, final)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _copy(path: Path, copy: Path, receipt: dict[str, Any]) -> None:
    """Copy a shard to the disk of the folder.

    Raises:
        LayertapError: it is not what its receipt says any more.
    """
    digest = hashlib.sha256()
    with path.open("rb") as source, copy.open("xb") as target:
        while block := source.read(1 << 20):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
        size = os.fstat(target.fileno()).st_size
    if (size, digest.hexdigest()) != (receipt["size"], receipt["sha256"]):
        raise LayertapError(f"{path} is damaged: it is not what it was when it was finished; delete it, and run again")


def _link(path: Path, name: Path) -> None:
    """Give a file a second name, which must be free.

    Raises:
        FileExistsError: it is not.
        LayertapError: the file system has no hard links.
    """
    try:
        os.link(path, name)
    except FileExistsError:
        # A network file system may be asked twice, if its first answer is lost.
        if not name.samefile(path):
            raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise LayertapError(
            f"the file system of {name.parent} has no hard links, by which one of several workers wins; let one "
            "machine write there, or choose an output folder on another"
        ) from error
    sync_folder(name.parent)


def _own_name() -> str:
    """A name that no other process has, here or elsewhere, now or later."""
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', socket.gethostname())}-{os.getpid()}-{secrets.token_hex(4)}"
