"""A folder to which several machines publish finished shards at once, without a lock, also on a network file system.

Each machine builds a shard on its own disk. The shard is copied into the folder under a temporary name (unless it is on
that file system already), synced to the disk, and given its final name by a hard link. The link fails if the name
exists, so one of several machines that publish the same shard wins. Each machine writes its receipt under a temporary
name first; the winner renames its own. If the winner is killed between the two, the next worker finds the receipt under
its temporary name and renames it. With the receipt first, as a single process does it, a late writer would overwrite
the receipt of the winner.

The file system must guarantee that `link` fails if the name exists, and that synced data is on the disk. NFS guarantees
both (RFC 1813, sections 3.3.15 and 3.3.21). Its server may answer a repeated `link` request with "exists"; `_link`
handles this. Locks are not needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.errors import InputError, LayertapError, system_errors_as
from extract.store.format.dataset import DataSet
from extract.store.format.kept_axes import keep_axes
from extract.store.format.receipt import read_receipt, reasons_in, receipt_bytes, receipt_of, size_and_hash
from extract.store.format.schemas import RECEIPT
from extract.system.atomic_files import check_own_folders, discard, flush_to_disk, own_folder, sync_folder, write_json
from extract.system.json_files import read_json

__all__ = ["SharedFolder"]


class SharedFolder:
    """Folder of a data set that several machines write together.

    Args:
        out: the folder; its path may differ between the machines.
    """

    def __init__(self, out: Path):
        self.out = out

    def open_or_create(self, dataset: DataSet) -> DataSet | None:
        """Create the data set in the folder; return the existing data set, or None if this call created it.

        Raises:
            InputError: the folder holds another data set, or other files; or a folder in it is a link to elsewhere.
            LayertapError: the folder cannot be written to.
        """
        shared = replace(dataset, out=self.out)
        description = self.out / "dataset.json"
        with system_errors_as(f"cannot write to {self.out}"):
            if self.out.exists():
                check_own_folders(self.out)
            while True:
                was_there = description.exists()
                existing = shared.check()
                if existing is not None:
                    break
                if was_there:
                    raise InputError(
                        f"{self.out} was created for other images or features and has no rows. It is not replaced, "
                        "because another worker may be about to write rows",
                        hint="delete it, or choose another output folder",
                    )
                own_folder(self.out / "shards")
                temporary = description.with_name(f"{description.name}.{secrets.token_hex(8)}.new")
                try:
                    shared.write(temporary)
                    _link(temporary, description)
                    break
                except (FileExistsError, FileNotFoundError):
                    pass  # another worker was first
                finally:
                    discard(temporary)
            for leftover in self.out.glob(f"{description.name}.*.new"):  # left by a killed worker
                discard(leftover)
        self.clean()
        return existing

    def keep_axes(self, files: Mapping[str, Path]) -> None:
        """Copy files of principal axes into the data set, unless it has them; raises the errors of `keep_axes`."""
        keep_axes(self.out, files)

    def receipts(self, known: Container[str]) -> Iterator[tuple[str, int, dict[str, Any] | None]]:
        """Yield (name, shard, receipt) of each published shard whose name is not in `known`.

        The receipt is None if it is missing or damaged.
        """
        dataset = self.dataset
        for shard, files in enumerate(dataset.shard_files()):
            if files.published is None:
                continue
            path = dataset.path(shard, files.published)
            if path.name not in known:
                yield path.name, shard, read_receipt(path, len(dataset.shard_range(shard)))

    def clean(self) -> None:
        """Remove copies of published shards and receipts, left by workers that were killed or were not first.

        A published shard without a receipt, whose publisher was killed, gets one from such a copy.

        Raises:
            LayertapError: the receipt cannot be written.
        """
        dataset, published = self.dataset, set(self.published().tolist())
        for copy in dataset.shards.glob("*.copy*"):
            if not copy.name[:6].isdigit() or int(copy.name[:6]) not in published:
                continue
            stem, separator, _ = copy.name.partition(".json.")
            final = copy.with_name(f"{stem}.h5")
            try:
                if separator and final.exists() and not copy.is_symlink():  # a receipt is a file of the data set itself
                    n_rows = len(dataset.shard_range(int(copy.name[:6])))
                    self._ensure_receipt(final, read_json(copy, RECEIPT, receipt_bytes(n_rows)))
            except (FileNotFoundError, InputError):
                pass  # another worker was first; or the copy is incomplete
            except OSError as error:
                raise LayertapError(f"cannot write the receipt of {final}: {error.strerror or error}") from error
            discard(copy)

    @property
    def dataset(self) -> DataSet:
        """The description of the data set in the folder.

        Raises:
            InputError: there is no data set.
        """
        return DataSet.open(self.out)

    def published(self) -> NDArray[np.int64]:
        """Return (n,) int64, the numbers of the published shards, ascending."""
        return np.array(sorted({shard for shard, _, part, _ in self.dataset.files() if not part}), np.int64)

    def publish(self, path: Path, receipt: dict[str, Any]) -> bool:
        """Publish a finished shard in the folder.

        Args:
            path: the shard in another folder; it is not moved.
            receipt: content of its receipt.

        Returns:
            Whether this call published the shard; False if another worker was first. In that case this call writes
            the receipt if it is missing.

        Raises:
            LayertapError: the folder cannot be written to (the shard stays in `path`), or `path` is damaged.
        """
        final = self.dataset.shards / path.name
        own_name = secrets.token_hex(8)
        copy = final.with_name(f"{final.name}.{own_name}.copy")
        receipt_copy = final.with_name(f"{final.stem}.json.{own_name}.copy")
        try:
            if not final.exists():
                try:
                    write_json(receipt_copy, receipt, tidy=False)
                    try:
                        _link(path, final)
                    except OSError as error:
                        if error.errno != errno.EXDEV:  # otherwise the shard is on another file system
                            raise
                        _copy(path, copy, receipt)
                        _link(copy, final)
                except (FileExistsError, FileNotFoundError):
                    if not final.exists():
                        raise
                else:
                    with contextlib.suppress(FileNotFoundError):  # another worker's `clean` was first
                        receipt_copy.rename(final.with_suffix(".json"))
                    sync_folder(final.parent)
                    return True
            self._ensure_receipt(final, receipt)
        except OSError as error:
            raise LayertapError(
                f"cannot publish {final}: {error.strerror or error}; the shard is safe in {path}",
                hint="run again to resume",
            ) from error
        finally:
            discard(copy)
            discard(receipt_copy)
        return False

    def _ensure_receipt(self, final: Path, receipt: dict[str, Any]) -> None:
        """Write the receipt of a shard whose publisher was killed before; an existing receipt is not overwritten.

        Args:
            final: the published shard.
            receipt: of any worker, since rows fail for the same reasons on each. How the shard was made is taken from
                it only if its file is the published one.
        """
        receipt_path = final.with_suffix(".json")
        if receipt_path.exists():
            return
        with self.dataset.open_shard(int(receipt["shard"]), final) as shard:
            content = receipt_of(final, shard, reasons_in(receipt))
        if "made" in receipt and content["sha256"] == receipt["sha256"]:
            content["made"] = receipt["made"]
        temporary = receipt_path.with_name(f"{receipt_path.name}.{secrets.token_hex(8)}.copy")
        try:
            write_json(temporary, content, tidy=False)
            _link(temporary, receipt_path)
        except (FileExistsError, FileNotFoundError):
            if not receipt_path.exists():
                raise
        finally:
            discard(temporary)


def _copy(path: Path, copy: Path, receipt: dict[str, Any]) -> None:
    """Copy a shard into the folder and sync it to the disk.

    Raises:
        LayertapError: the shard does not match its receipt any more.
    """
    with path.open("rb") as source, copy.open("xb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        flush_to_disk(target.fileno())
    if not size_and_hash(copy).items() <= receipt.items():
        raise LayertapError(f"{path} is damaged: it does not match its receipt", hint="delete it and run again")


def _link(path: Path, name: Path) -> None:
    """Give a file a second name and sync the folder.

    Raises:
        FileExistsError: the name exists.
        LayertapError: the file system has no hard links.
    """
    try:
        os.link(path, name)
    except FileExistsError:
        # A network file system repeats the request if the first answer is lost; the name is then that of this file.
        if not name.samefile(path):
            raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise LayertapError(
            f"the file system of {name.parent} has no hard links, which several workers need to publish shards",
            hint="let one machine write there, or choose an output folder on another file system",
        ) from error
    sync_folder(name.parent)
