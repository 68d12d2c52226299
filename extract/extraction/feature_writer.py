"""Store the rows of a program's own loop as a run stores those of images: `FeatureWriter`.

The rows are those of a data set like any other: the ids are its paths, and no image belongs to them. Shards are built
and published as by `extract.extraction.shard_maker`: each in a folder that one process locks, so several processes
share the shards among them, and what a killed process leaves is resumed by the next one.

A shard has its full size from the start, and rows have their places in it. Rows that arrive out of order are therefore
not held in memory: up to `_OPEN_SHARDS` shards are filled at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from extract import defaults
from extract.errors import InputError, LayertapError, LockedError, UnknownNameError, first_line, unknown_name
from extract.extraction.pipeline import names_of
from extract.extraction.plan import where_made
from extract.extraction.run import PUBLISHERS, publishers, work_at
from extract.images.image_list import SPLITS, Column, Images, chosen_columns, labels_from_values, text_column
from extract.images.sources import ImageSource
from extract.row_status import Status
from extract.store.format.dataset import BUILDING, DataSet, ShardFiles, shard_rows_for
from extract.store.format.layout import StoredFeature, encoded_texts
from extract.store.format.shard import COMPRESSIONS
from extract.store.format.untrusted import need_libraries
from extract.store.format.value_types import STORED_TYPES
from extract.store.format.writer import ShardWriter, open_part, stored_rows
from extract.store.places.building import Building
from extract.store.places.shared_folder import SharedFolder
from extract.system.urls import is_url

__all__ = ["FeatureWriter"]

Batch = TypeVar("Batch")

_OPEN_SHARDS = 4  # that are filled at once
_ROOT = "memory:rows"  # of rows that are no images
_NAMED = 5  # ids in an error
_LABEL_TYPES = str | int | np.integer | None
_FAILURES = (Status.DECODE_ERROR, Status.MISSING, Status.IO_ERROR)


class _NoImages(ImageSource):
    def read(self, row: int) -> tuple[bytes, int]:
        raise FileNotFoundError(f"row {row} is no image")


@dataclass
class _OpenShard:
    """A shard that is filled.

    Attributes:
        number: its number.
        dataset: the data set in the folder in which the shard is built.
        writer: writes its rows.
        opened: closes both.
        left: rows that it lacks.
    """

    number: int
    dataset: DataSet
    writer: ShardWriter
    opened: contextlib.ExitStack
    left: int


class FeatureWriter:
    """Stores rows that a program computes itself, as `extract_features` stores those of images; a context manager.

        with FeatureWriter("outputs/texts", ids=ids, layers={"vector": (384, "float32")},
                           identity={"model": "all-MiniLM-L6-v2"}) as writer:
            for batch in writer.todo(loader):
                writer.write(batch.ids, {"vector": model(batch.texts)})

    The rows have the order of `ids`. A repeated call stores the missing rows only. Several processes of a machine may
    run the same loop at once: each takes shards that no other one has. `FeatureReader` and the commands read the rows.

    Args:
        out: folder of the data set; created if missing.
        ids: name of each row; they become its `paths`. They need not be files.
        layers: name -> (shape of a row, dtype): float32, float16, bfloat16, int8, int32 or int64.
        identity: what made the rows, in JSON: model, revision, settings. Together with the layers, it is the
            fingerprint: rows of another identity are refused, and need another folder.
        labels: class of each row, as text or number; None, "" and -1: unknown.
        splits: train, val, test or "" for each row.
        columns: name -> text or number of each row, to be kept with it.
        shard_rows: rows of a shard; None: those of an existing data set, or at most 1 GB.
        compress: "gzip", "lzf" or "blosc2", for finished shards; None: none.
        sync_s: seconds between syncs to the disk.
        on_shard: called with the path of each shard that this writer has published, by the thread that writes.

    Raises:
        InputError: an argument cannot be used; or `out` holds other features, rows or files.
        LayertapError: the folder cannot be written to.
    """

    def __init__(
        self, out: str | os.PathLike[str], *, ids: Iterable[str], layers: Mapping[str, tuple[Any, Any]],
        identity: Mapping[str, Any], labels: Iterable[str | int | None] | None = None,
        splits: Iterable[str] | None = None, columns: Mapping[str, Any] | None = None, shard_rows: int | None = None,
        compress: str | None = None, sync_s: float = defaults.SYNC_S,
        on_shard: Callable[[Path], object] = lambda path: None,
    ):  # fmt: skip
        out = os.fspath(out)
        if is_url(out):
            raise InputError(f"{out}: from Python, features are written to a folder", hint="copy the finished folder")
        if shard_rows is not None and (not isinstance(shard_rows, int | np.integer) or shard_rows < 1):
            raise InputError(f"shard_rows is {shard_rows!r}; expected a whole number, at least 1")
        if compress is not None and compress not in COMPRESSIONS:
            raise unknown_name("compression", compress, COMPRESSIONS)
        need_libraries(compress)
        self._images = _images(list(ids), labels, splits, columns or {})
        self._row = {id: row for row, id in enumerate(self._images.paths)}
        features = [_feature(name, layer) for name, layer in layers.items()]
        if not features:
            raise InputError("layers is empty", hint='name what a row holds, such as {"vector": (384, "float32")}')
        if same := self._images.columns.keys() & layers.keys():
            raise InputError(f"layer {min(same)!r}: a column has this name", hint="rename one of them")
        existing = DataSet.open(Path(out)) if (Path(out) / "dataset.json").exists() else None
        rows = int(shard_rows or (existing.shard_rows if existing else shard_rows_for(features)))
        self._dataset = DataSet(
            Path(out),
            {
                "features": {each.name: f"{each.name} {each.dtype} {list(each.shape)}" for each in features},
                "identity": _json_of(identity),
            },
            features,
            {
                "root": _ROOT, "count": len(self._images),
                "paths_xxh3": self._images.paths_xxh3, "labels_xxh3": self._images.labels_xxh3,
            },
            min(rows, len(self._images)),
        )  # fmt: skip
        self._provenance = {
            "configuration": {"images": _ROOT},
            "depends_on": self._dataset.depends_on,
            **where_made(["torch", "numpy", "h5py"]),
        }
        self._compress, self._sync_s, self._on_shard = compress, sync_s, on_shard
        self._blank = {each.name: each.blank for each in features}
        self._stored = np.zeros(len(self._images), bool)  # by this writer, or before
        self._given = np.zeros(len(self._images), bool)  # to this writer
        self._open: dict[int, _OpenShard] = {}
        self._elsewhere: set[int] = set()  # shards that other processes fill
        self._publishing: deque[Future[Path | None]] = deque()
        self._opened: contextlib.ExitStack | None = None
        self._lock = threading.RLock()  # several threads may write

    def __enter__(self) -> Self:
        out = self._dataset.out
        if self._opened is not None:
            raise LayertapError(f"{out} is open already", hint="use another FeatureWriter")
        self._stored[:] = self._given[:] = False
        for earlier in (self._open, self._elsewhere, self._publishing):
            earlier.clear()
        self._process = os.getpid()
        self._place = SharedFolder(out)
        self._place.open_or_create(self._dataset)
        with contextlib.ExitStack() as opened:
            self._building = opened.enter_context(Building(self._dataset, self._place, out / BUILDING))
            self._publisher = opened.enter_context(publishers())
            self._opened = opened.pop_all()
        for shard in self._place.published().tolist():
            self._stored[self._rows(shard)] = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ending:
            if self._opened is not None:
                ending.push(self._opened)
            self._opened = None
            for shard in self._open.values():
                ending.push(shard.opened)
            if error is None:
                self._end()
            else:
                try:
                    self._wait(0)
                except Exception as later:
                    error.add_note(f"a shard that was finished before this could not be published: {later}")
                ending.pop_all().__exit__(kind, error, trace)
        with contextlib.suppress(OSError):
            (self._dataset.out / BUILDING).rmdir()  # unless shards are left in it

    @property
    def unfinished(self) -> list[str]:
        """Ids of the rows whose shards are not published, in their order; a few of them may be stored already."""
        published = {shard for shard, _, part, _ in self._dataset.files() if not part}
        shards = (shard for shard in range(self._dataset.n_shards) if shard not in published)
        return [id for shard in shards for id in self._images.paths[self._rows(shard)]]

    def todo(self, loader: Iterable[Batch], ids_of: Callable[[Batch], Sequence[str]] | None = None) -> Iterator[Batch]:
        """Pass those batches on that have a row that is missing, and that no other process has taken.

        Args:
            loader: batches, in any order within four shards at a time.
            ids_of: a batch -> ids of its rows; None: `batch.ids`, or `batch["ids"]`.

        Raises:
            InputError: an id is unknown, or rows of too many shards come at once.
        """
        self._elsewhere.clear()
        for batch in loader:
            rows = self._rows_of(_ids_of(batch) if ids_of is None else ids_of(batch))
            rows = rows[~self._stored[rows]]
            shards = rows // self._dataset.shard_rows
            with self._lock:
                ours = {shard for shard in _distinct(shards) if self._take(shard)}
            missing = shards[~self._stored[rows]]  # some may have been found stored just now
            if not ours.isdisjoint(missing.tolist()):
                yield batch

    def write(self, ids: Sequence[str], features: Mapping[str, Any]) -> None:
        """Store rows. Those that were stored before this writer was opened, or are another process's, are left out.

        A row with NaN or infinite values, or with the smallest whole number, is kept with the status "not finite".

        Args:
            ids: (R,) ids of the rows, in any order.
            features: name -> (R, *shape) for every layer: arrays, tensors, or the `record` of `Taps`. Others are
                ignored. Floats are rounded to the type of the layer. The arrays may be changed afterwards.

        Raises:
            InputError: an id is unknown, or was written before; or values are missing or have another shape or type.
            LayertapError: rows could not be written to the disk.
        """
        ids = list(ids)
        rows = self._rows_of(ids)
        if len(rows):
            values = {each.name: _values(each, features, ids) for each in self._dataset.features}
            with self._lock:
                self._store(rows, values, Status.OK, "")

    def fail(self, ids: Sequence[str], reason: object, status: Status = Status.DECODE_ERROR) -> None:
        """Store rows that have no values: NaN, a status, and why.

        Args:
            ids: (R,) ids of the rows.
            reason: for `FeatureReader.failures`: text, or an exception.
            status: `Status.DECODE_ERROR`, `MISSING` or `IO_ERROR`.

        Raises:
            InputError: an id is unknown, or was written before; or another status.
            LayertapError: see `write`.
        """
        if status not in _FAILURES:
            raise InputError(f"status {status!r}: expected {', '.join(each.name for each in _FAILURES)}")
        with self._lock:
            self._store(self._rows_of(ids), {}, status, str(reason).encode(errors="backslashreplace").decode())

    def _store(self, rows: NDArray[np.int64], values: Mapping[str, NDArray[Any]], status: Status, reason: str) -> None:
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        again = self._given[rows]
        again[1:] |= np.diff(rows) == 0
        if again.any():
            raise InputError(f"id {self._images.paths[int(rows[again][0])]!r} was written before")
        shards = rows // self._dataset.shard_rows
        for number in _distinct(shards):
            if not self._take(number):
                continue
            chosen = (shards == number) & ~self._stored[rows]
            here, shard = rows[chosen], self._open[number]
            mine = {name: each[order[chosen]] for name, each in values.items()}  # copies
            failed = dict.fromkeys(here.tolist(), reason) if reason else {}
            stored = stored_rows(here, mine, self._blank, np.full(len(here), status, np.uint8), failed)
            shard.writer.write(here, stored.features, stored.status, self._sources(here), stored.reasons)
            self._stored[here] = True
            shard.left -= len(here)
            if not shard.left:
                self._finish(shard)
        self._given[rows] = True
        self._wait(PUBLISHERS)

    def _sources(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return what is stored of the image files of rows: there are none, and the hash is that of the id."""
        none = np.full(len(rows), -1, np.int64)
        ids = encoded_texts([self._images.paths[row] for row in rows.tolist()])
        hashes = b"".join(map(xxhash.xxh3_128_digest, ids))
        of_ids = np.frombuffer(hashes, np.uint8).reshape(-1, 16)
        return {"source_size": none, "source_mtime_ns": none, "source_hash": of_ids}

    def _rows(self, shard: int) -> slice:
        rows = self._dataset.shard_range(shard)
        return slice(rows.start, rows.stop)

    def _rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        ids = list(ids)
        try:
            return np.fromiter(map(self._row.__getitem__, ids), np.int64, len(ids))
        except (KeyError, TypeError):  # a list cannot be looked up
            unknown = next(id for id in ids if not isinstance(id, str) or id not in self._row)
            raise InputError(f"id {unknown!r} is not one of the {len(self._row):,} ids of this writer") from None

    def _take(self, number: int) -> bool:
        """Open a shard, unless it is finished or another process fills it; return whether this writer fills it."""
        if self._opened is None:
            raise LayertapError(f"{self._dataset.out} is not open", hint="use `with FeatureWriter(...) as writer:`")
        if self._process != os.getpid():
            raise LayertapError(
                f"{self._dataset.out} was opened by another process", hint="open a FeatureWriter in each process"
            )
        its_rows = self._rows(number)
        if number in self._open or number in self._elsewhere or self._stored[its_rows].all():
            return number in self._open
        if len(self._open) == _OPEN_SHARDS:
            raise InputError(
                f"id {self._images.paths[its_rows.start]!r} begins shard {number}, and shards "
                f"{', '.join(map(str, sorted(self._open)))} are unfinished; at most {_OPEN_SHARDS} are filled at once",
                hint="give the ids in the order in which the rows come, or a larger shard_rows",
            )
        try:
            with contextlib.ExitStack() as opened:
                dataset = opened.enter_context(self._building.open(number, alone=True))
                if number in self._place.published():  # since this writer was opened
                    self._stored[its_rows] = True
                    return False
                if dataset.path(number).exists():  # an earlier process was killed before it published the shard
                    self._publishing.append(self._publisher.submit(self._publish, number, dataset, opened.pop_all()))
                    self._stored[its_rows] = True
                    return False
                part = dataset.path(number, part=True)
                for left in self._dataset.shards.glob(f"{number:06d}*.h5.part"):  # by `verify --repair`
                    left.replace(part)
                work = work_at(dataset, number, ShardFiles(part=0 if part.exists() else None))
                assert work is not None
                names = functools.partial(names_of, self._images)
                writer = opened.enter_context(open_part(dataset, work, names, self._provenance, self._sync_s))
                self._stored[its_rows] = True
                self._stored[np.asarray(work.rows)] = False
                self._open[number] = _OpenShard(number, dataset, writer, opened.pop_all(), len(work.rows))
        except LockedError:
            self._elsewhere.add(number)
            return False
        if not len(work.rows):
            self._finish(self._open[number])
        return number in self._open

    # Finished shards

    def _finish(self, shard: _OpenShard) -> None:
        """Publish a shard, in a thread, while the next ones are filled."""
        shard.writer.flush()  # here: after a kill, at most the last batch of an open shard is missing
        del self._open[shard.number]
        publish = functools.partial(self._publish, shard.number, shard.dataset, shard.opened, shard.writer)
        self._publishing.append(self._publisher.submit(publish))

    def _publish(
        self, number: int, dataset: DataSet, opened: contextlib.ExitStack, writer: ShardWriter | None = None
    ) -> Path | None:
        """Publish a shard; return its path, or None if another process was first."""
        with opened:
            if writer is not None:
                writer.publish(self._compress)
            return self._dataset.path(number) if self._building.publish(dataset, number) else None

    def _wait(self, at_most: int) -> None:
        """Wait until at most so many shards are being published; report those that are."""
        while len(self._publishing) > at_most or (self._publishing and self._publishing[0].done()):
            if path := self._publishing.popleft().result():
                self._on_shard(path)

    def _end(self) -> None:
        """Publish all finished shards.

        Raises:
            LayertapError: rows of this writer's shards, or of those of a process that died, are missing.
        """
        self._wait(0)
        self._place.clean()  # what killed processes left of shards that are published now
        published = set(self._place.published().tolist())
        for shard in self._elsewhere - published:  # those that are locked still are another process's
            if self._is_free(shard):
                self._elsewhere.remove(shard)
        finished = published | self._elsewhere
        for shard in finished:
            self._stored[self._rows(shard)] = True
        missing = np.flatnonzero(~self._stored)
        if len(missing):
            named = ", ".join(repr(self._images.paths[row]) for row in missing[:_NAMED].tolist())
            raise LayertapError(
                f"{self._dataset.out}: {len(missing):,} of {len(self._stored):,} ids have no row: {named}"
                + (", ..." if len(missing) > _NAMED else ""),
                hint="their shards are unfinished; run the same loop again to write them, stored rows are kept",
            )
        if left := set(range(self._dataset.n_shards)) - finished:  # after an error that the program has caught
            raise LayertapError(
                f"{self._dataset.out}: shard {min(left)} could not be published",
                hint="run the same loop again, stored rows are kept",
            )

    def _is_free(self, shard: int) -> bool:
        """Whether no process fills a shard any more, which none has published."""
        try:
            with self._building.open(shard, alone=True):
                return shard not in self._place.published()
        except LockedError:
            return False


def _distinct(shards: NDArray[np.int64]) -> list[int]:
    """Return the shards of some rows, ascending; for a batch, faster than `np.unique`."""
    return sorted(set(shards.tolist()))


def _images(
    ids: list[str], labels: Iterable[str | int | None] | None, splits: Iterable[str] | None, columns: Mapping[str, Any]
) -> Images:
    """Return rows that are no images as a list of images; raises the errors of `FeatureWriter`."""
    for position, id in enumerate(ids):
        if not isinstance(id, str) or not id or "\0" in id:
            raise InputError(f"ids[{position}] is {id!r}; expected text that is not empty, without null characters")
    _check_texts("ids", ids)
    if not ids:
        raise InputError("ids is empty; expected the id of each row")
    if len(set(ids)) < len(ids):
        raise InputError(f"id {Counter(ids).most_common(1)[0][0]!r} occurs more than once in ids")
    given = {"labels": labels, "splits": splits, **{f"column {name!r}": values for name, values in columns.items()}}
    lists: dict[str, Any] = {name: [""] * len(ids) if each is None else _listed(each) for name, each in given.items()}
    for name, values in lists.items():
        if len(values) != len(ids):
            raise InputError(f"{name} has {len(values):,} values for {len(ids):,} ids")
    if wrong := {str(split) for split in lists["splits"]} - {"", *SPLITS}:
        raise InputError(f"splits has {min(wrong)!r}; expected train, val, test or an empty text")
    for position, label in enumerate(lists["labels"]):
        if not isinstance(label, _LABEL_TYPES):
            raise InputError(f"labels[{position}] is {label!r}; expected text, a whole number or None")
    _check_texts("labels", [label for label in lists["labels"] if isinstance(label, str)])
    numbers, classes = labels_from_values(lists["labels"])
    chosen_columns("columns", columns, {name.lower(): name for name in columns})
    kept = {name: _column(name, lists[f"column {name!r}"]) for name in columns}
    named = [SPLITS.get(split, "") for split in lists["splits"]]
    return Images(_ROOT, ids, numbers, classes, named, _NoImages(), columns=kept)


def _listed(values: Iterable[Any]) -> list[Any]:
    """Return one value for each id; those of a tensor as numbers."""
    return list(values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else values)


def _check_texts(what: str, texts: Iterable[str]) -> None:
    """Check that texts can be stored; raises `InputError`."""
    text = "".join(texts)
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InputError(f"{what} has {text[error.start]!r}, which cannot be encoded") from error
    if "\0" in text:
        raise InputError(f"{what} has a null character")


def _column(name: str, values: list[Any]) -> Column:
    """Return a column to keep: int64, float64 or text."""
    if all(isinstance(value, str) for value in values):
        _check_texts(f"column {name!r}", values)
        return text_column("columns", name, values, "row {}".format)
    expected = "expected one text or number for each id"
    try:
        array = np.asarray(values)
    except (ValueError, RuntimeError) as error:  # lists of several lengths; tensors
        raise InputError(f"column {name!r} has values of several lengths, or tensors; {expected}") from error
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise InputError(f"column {name!r} has values of {array.dtype}; {expected}")
    if large := [each for each in values if isinstance(each, int | np.integer) and each > np.iinfo(np.int64).max]:
        raise InputError(f"column {name!r} has {large[0]}, which int64 cannot hold", hint="keep it as text")
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def _feature(name: str, layer: tuple[Any, Any]) -> StoredFeature:
    """Return a layer as it is stored."""
    if not isinstance(layer, tuple | list) or len(layer) != 2:
        raise InputError(f"layer {name!r} is {layer!r}; expected (shape of a row, dtype)")
    shape, dtype = layer
    if not isinstance(name, str) or name in ("", ".") or {"/", "\0"} & set(name):
        raise InputError(f"layer {name!r}: a name is text without / and null characters", hint="rename the layer")
    _check_texts("the name of a layer", name)
    kind = str(dtype).removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else np.dtype(dtype).name
    if kind not in STORED_TYPES:
        raise unknown_name("dtype", kind, STORED_TYPES, f"layer {name!r}")
    sides = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(side, int | np.integer) and side > 0 for side in sides):
        raise InputError(f"layer {name!r} has shape {shape!r}; expected the positive sides of one row, such as (384,)")
    return StoredFeature(name, tuple(map(int, sides)), kind, {"layer": name})


def _json_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity as it is read back from JSON."""
    try:
        text = json.dumps(dict(identity), allow_nan=False, ensure_ascii=False)
        content: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"identity cannot be written as JSON: {first_line(error)}", hint="use texts, numbers, lists and dicts"
        ) from error
    _check_texts("identity", text)
    if not content:
        raise InputError(
            "identity is empty", hint='say what makes the rows, such as {"model": "NAME", "revision": "1"}'
        )
    return content


def _ids_of(batch: Any) -> Sequence[str]:
    if isinstance(batch, Mapping) and "ids" in batch:
        return list(batch["ids"])
    if hasattr(batch, "ids"):
        return list(batch.ids)
    raise InputError(
        f"a batch of type {type(batch).__name__} has no `ids`", hint="say where they are: todo(loader, ids_of=...)"
    )


def _values(feature: StoredFeature, features: Mapping[str, Any], ids: Sequence[str]) -> NDArray[Any]:
    """Return the values of a layer, (R, *shape) of its type, after checking them."""
    where = f"layer {feature.name!r} of id {ids[0]!r}" + (f" and {len(ids) - 1:,} more" if len(ids) > 1 else "")
    try:
        given = features[feature.name]
    except UnknownNameError:
        raise
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(f"{where}: no values; expected a mapping with an array of each layer") from error
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.float() if given.dtype == torch.bfloat16 else given
    if np.ma.is_masked(given):
        raise InputError(f"{where}: some values are masked", hint="fill them, for example with NaN")
    try:
        values = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{where}: the values are no array: {first_line(error)}") from error
    wanted, dtype = (len(ids), *feature.shape), np.dtype(feature.value_dtype)
    fits = values.dtype.kind == "f" if dtype.kind == "f" else np.can_cast(values.dtype, dtype)
    if values.shape != wanted or not fits:
        raise InputError(f"{where}: got {values.shape} {values.dtype}, expected {wanted} {dtype}")
    with np.errstate(over="ignore"):  # infinite, which gives the row its status
        return values.astype(dtype, copy=False)
