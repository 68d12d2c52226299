"""Finished shards of one data set in a bucket: published once, read through the cache.

A data set in a bucket has the same layout as in a folder, so a plain copy (`aws s3 sync`) is a data set, too:

    URL/dataset.json           description, as in a folder
    URL/shards/000000.h5       a shard, as sealed on a local disk
    URL/shards/000000.json     its receipt: the commit
    URL/shards/000002-r1.h5    a shard that was rewritten, with its own receipt; readers use the last revision
    URL/axes/HASH.safetensors  principal axes, as in a folder

A bucket has no locks and no rename, but supports conditional creation: an object is created only if none has its name.
Objects are therefore never overwritten or deleted, and one of several writers wins. The object is uploaded first, its
receipt last: readers ignore an object without a receipt. Whoever finds one cannot know whether its writer is dead, but
the object cannot change any more: he checks its rows and writes the receipt. A receipt whose object is missing, or has
another size, is an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.credentials import without_credentials
from extract.errors import InputError, LayertapError
from extract.row_status import Status
from extract.store.format.dataset import UNFINISHED_HINT, DataSet, stem_of
from extract.store.format.layout import AXES_FOLDER
from extract.store.format.receipt import reasons_in, receipt_bytes, receipt_of
from extract.store.format.schemas import RECEIPT
from extract.store.format.writer import wrong_rows
from extract.store.places import objects
from extract.store.places.shard_cache import RemoteFile
from extract.system.atomic_files import discard
from extract.system.json_files import parse_json

__all__ = ["Bucket"]

_AT_ONCE = 8  # receipts read concurrently


class Bucket:
    """Location of the finished shards of one data set in a bucket.

    Args:
        url: URL of the data set, such as `s3://BUCKET/NAME`; `extract.store.places.objects` describes credentials and
            servers.

    Raises:
        InputError: not the URL of a location in a bucket, or it contains credentials.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        if (public := without_credentials(self.url)) != self.url:
            raise InputError(
                f"{public}: the given URL has credentials, which files of the data set would repeat",
                hint="give it without them, and set them in the environment or in the configuration file of the "
                "protocol's library",
            )
        if not re.fullmatch(r"[a-z0-9]+://[^/]+(/[^/]+)*", self.url):
            raise InputError(f"{url} is not a location in a bucket; expected s3://BUCKET/NAME")
        self._is_safe = False

    @cached_property
    def dataset(self) -> DataSet:
        """The description in `dataset.json`; its `out` is the URL, since there is no folder.

        Raises:
            InputError: there is no data set, or it is a data set of `layertap sync`.
            LayertapError: the store does not answer.
        """
        name = f"{self.url}/dataset.json"
        dataset = DataSet.from_content(parse_json(self._description(), name), Path(self.url), name)
        if dataset.version:
            raise InputError(
                f"{self.url} is a data set of `layertap sync`, which can only be read from a folder",
                hint="copy it to a local disk",
            )
        return dataset

    def _description(self) -> bytes:
        try:
            return objects.read(f"{self.url}/dataset.json")
        except FileNotFoundError as error:
            raise InputError(f"{self.url} is not a layertap data set: it has no dataset.json") from error

    def existing(self) -> DataSet | None:
        """Return `dataset`, or None if there is none."""
        return None if objects.info(f"{self.url}/dataset.json") is None else self.dataset

    def open_or_create(self, dataset: DataSet) -> DataSet | None:
        """Create the data set in the bucket; return the existing data set, or None if this call created it.

        A different data set is never replaced, not even one without shards: another writer may be about to add a
        shard, and there is no lock to detect this.

        Args:
            dataset: the data set on the local disk; the returned data set has the same folder.

        Raises:
            InputError: see `DataSet.check`; or `dataset` is a data set of `layertap sync`.
            LayertapError: the store does not answer, or does not support conditional creation.
        """
        dataset.check_size()
        if dataset.version:
            raise InputError(f"{dataset.out} is a data set of `layertap sync`, which cannot be stored in a bucket")
        name = f"{self.url}/dataset.json"
        if objects.info(name) is None:
            if objects.names(self.url):
                raise InputError(
                    f"{self.url} is not empty and not a layertap data set", hint="choose another output folder"
                )
            if objects.put(name, (json.dumps(dataset.content(), indent=1) + "\n").encode()):
                self._check_safe()
                return None
        existing = replace(self.dataset, out=dataset.out)
        dataset.check_compatible(existing, self.url, replaceable=False)
        self._check_safe()
        return existing

    def keep_axes(self, files: Mapping[str, Path]) -> None:
        """Upload files of principal axes, unless the bucket has them.

        Raises:
            LayertapError: the store does not answer.
        """
        for sha256, file in files.items():
            objects.put_file(f"{self.url}/{AXES_FOLDER}/{sha256[:16]}.safetensors", file, sha256)

    def _check_safe(self) -> None:
        """Check that the store refuses to overwrite an object, by writing `dataset.json` again with the same content.

        Raises:
            InputError: there is no `dataset.json`.
            LayertapError: the server or the library silently ignores the condition, or the store does not answer.
        """
        if not self._is_safe and objects.put(f"{self.url}/dataset.json", self._description()):
            raise LayertapError(
                f"{self.url}: this server, or the library for it, ignores If-None-Match: * and overwrites existing "
                "objects; several writers would damage each other's shards",
                hint="use another server, or update the library",
            )
        self._is_safe = True

    def clean(self) -> None:
        """Do nothing: an object appears whole, under its own name."""

    def published(self) -> NDArray[np.int64]:
        """Return (n,) int64, the numbers of the finished shards, ascending; lists the bucket once.

        Raises:
            LayertapError: the object of a receipt is missing, or the store does not answer.
        """
        return np.array(sorted(self._published()), np.int64)

    def receipts(self, known: Container[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield (name, shard, receipt) of each finished shard whose name is not in `known`.

        Raises:
            InputError: a receipt is damaged.
            LayertapError: a shard does not match its receipt; or see `published`.
        """
        published = {stem: sizes for stem, *sizes in self._published().values() if stem not in known}

        def read(stem: str) -> tuple[str, int, dict[str, Any]]:
            size, receipt_size = published[stem]
            shard, url = int(stem[:6]), f"{self.url}/shards/{stem}"
            most_bytes = receipt_bytes(len(self.dataset.shard_range(shard)))
            content = objects.read(f"{url}.json", receipt_size, most_bytes)
            receipt = parse_json(content, f"{url}.json", RECEIPT)
            if size != receipt["size"]:
                raise LayertapError(
                    f"{url}.h5 has {size:,} bytes, its receipt says {receipt['size']:,}; it was changed after it was "
                    "published",
                    hint="restore the original object, or remove both and run the command that created the data set "
                    "again",
                )
            return stem, shard, receipt

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from pool.map(read, published)

    def _published(self) -> dict[int, tuple[str, int, int]]:
        """Return shard -> (file stem of its last revision, size of the object, size of the receipt)."""
        sizes = objects.names(f"{self.url}/shards")
        last: dict[int, int] = {}
        for name in sizes:
            if match := re.fullmatch(r"(\d{6})(?:-r([1-9]\d{0,5}))?\.json", name, re.ASCII):
                shard, revision = int(match[1]), int(match[2] or 0)
                last[shard] = max(revision, last.get(shard, 0))
        published = {}
        for shard, revision in last.items():
            stem = stem_of(shard, revision)
            if f"{stem}.h5" not in sizes:
                raise LayertapError(
                    f"{self.url}/shards/{stem}.h5 is missing, but its receipt exists",
                    hint="restore the object, or remove the receipt and run the command that created the data set "
                    "again",
                )
            published[shard] = stem, sizes[f"{stem}.h5"], sizes[f"{stem}.json"]
        return published

    def publish(self, path: Path, receipt: Mapping[str, Any]) -> bool:
        """Upload a sealed shard, then its receipt.

        If the process dies inside this call, the shard is not published, and any writer can publish it again. A
        different object that another writer left without a receipt is checked row by row, and published if complete.

        Args:
            path: the shard, under its final name.
            receipt: its receipt, by `receipt_of`.

        Returns:
            Whether this call published the shard; False if another writer was first, whose objects stay unchanged.

        Raises:
            InputError: the file and its receipt do not match.
            LayertapError: the store does not answer; or the object with this name is not a complete shard.
        """
        self._check_safe()
        url = f"{self.url}/shards/{path.name}"
        receipt_url = f"{url.removesuffix('.h5')}.json"
        size, sha256 = receipt["size"], receipt["sha256"]
        if path.stat().st_size != size:
            raise InputError(
                f"{path} has {path.stat().st_size:,} bytes, its receipt says {size:,}", hint="seal the shard again"
            )
        if objects.info(receipt_url) is not None:
            return False
        ours = objects.put_file(url, path, sha256)
        uploaded = objects.info(url)
        if uploaded is None or (ours and uploaded.size != size):
            raise LayertapError(
                f"{url} was removed or changed after the upload",
                hint="remove it if it is there, and run again when no other program uses the bucket",
            )
        if not ours and (uploaded.size != size or uploaded.sha256 != sha256):
            if objects.info(receipt_url) is not None:
                return False
            receipt = self._receipt_for(url, uploaded.size, path, reasons_in(receipt))
        return objects.put(receipt_url, (json.dumps(receipt, indent=1) + "\n").encode())

    def _receipt_for(self, url: str, size: int, path: Path, reasons: Mapping[int, str]) -> dict[str, Any]:
        """Return a receipt for an object that another writer left without a receipt, after checking all its rows.

        Raises:
            LayertapError: the object is not the complete shard, or cannot be copied to the local disk.
        """
        copy = path.with_name(f"{path.name}.{os.getpid()}.new")
        shard = int(path.name[:6])
        try:
            copy.touch()
            objects.download(url, [(0, size)], copy)
            with self.dataset.open_shard(shard, copy) as opened:
                status = opened.column("status")
                damaged = wrong_rows(opened, np.arange(len(opened)))
                stored = np.isin(status, list(Status)) & (status != Status.PENDING)
                if len(damaged) or not stored.all():
                    raise InputError(f"{len(damaged) or (~stored).sum():,} of its rows are damaged or pending")
                return receipt_of(copy, opened, reasons)
        except InputError as error:
            raise LayertapError(
                f"{url} has no receipt and is not a complete shard {shard} of this data set: "
                f"{str(error).replace(str(copy), 'it')}",
                hint="inspect the object, remove it, and run again",
            ) from error
        except FileNotFoundError as error:
            raise LayertapError(f"{url} was removed while it was checked", hint="run again") from error
        except OSError as error:
            raise LayertapError(f"cannot write {copy}, a copy of {url}: {error.strerror}") from error
        finally:
            discard(copy)

    def finished(self, *, partial: bool) -> dict[int, RemoteFile]:
        """Return the finished shards by their number, ascending.

        Args:
            partial: whether shards may be missing.

        Raises:
            InputError: a receipt is damaged.
            LayertapError: a shard is missing or does not match its receipt, or the store does not answer.
        """
        dataset = self.dataset
        files = {
            shard: RemoteFile(f"{self.url}/shards/{stem}.h5", receipt)
            for stem, shard, receipt in self.receipts(())
            if shard < dataset.n_shards
        }
        missing = [shard for shard in range(dataset.n_shards) if shard not in files]
        if missing and not partial:
            raise LayertapError(
                f"{self.url}/shards/{missing[0]:06d}.h5 is missing (shard {missing[0]} of {dataset.n_shards})",
                hint=UNFINISHED_HINT,
            )
        return dict(sorted(files.items()))
