"""The same rows in layertap and in other stores, each written and read by the code that its documentation suggests.

A `Store` writes (N, D) float16 rows and reads them in the passes of `CASES`. A pass yields (values, rows): an array of
(B, D) with memory of its own, and the numbers of its rows. `stores_compared.py` checks and times the passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import created, fill

Batch = tuple[np.ndarray, np.ndarray]

RANDOM, ROWS, MIXED, IN_ORDER = "random", "rows", "mixed", "in order"
CASES = {
    RANDOM: "random batches",
    ROWS: "an epoch, each order of the rows equally likely",
    MIXED: "an epoch, mixed by chunks or in a buffer",
    IN_ORDER: "an epoch in order",
}
CHUNK, BUFFER, TAR_ROWS = 256, 10_000, 10_000  # rows: of chunks of zarr, of shuffle buffers, of a tar


class MissingLibraryError(Exception):
    """A library of a store is not installed."""


def library(module: str, package: str = "") -> Any:
    """Import a module.

    Raises:
        MissingLibraryError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise MissingLibraryError(f"{name} is not installed; run: pip install {name}") from error


class Store:
    """A store of rows in a folder. Subclasses implement `write`, `open`, `take` and `between`, or whole passes.

    Attributes:
        title: its name in tables.
        packages: distributions whose versions are reported.
        cases: the passes that it has.
        reopened: whether it is opened again for each pass.
    """

    title = ""
    packages: tuple[str, ...] = ("numpy",)
    cases: tuple[str, ...] = (RANDOM, ROWS, IN_ORDER)
    reopened = False

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def write(self, values: np.ndarray) -> None:
        """Write the rows into the folder, which exists."""
        raise NotImplementedError

    def open(self) -> None:
        """Open what was written."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it."""

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return rows in any order."""
        raise NotImplementedError

    def between(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of neighbouring rows."""
        raise NotImplementedError

    def random(self, batches: list[np.ndarray]) -> Iterator[Batch]:
        """Yield the given rows."""
        for rows in batches:
            yield self.take(rows), rows

    def rows(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Yield each row once, in a random order of all rows."""
        order = np.random.default_rng(seed).permutation(self.count)
        for start in range(0, self.count, batch_size):
            rows = order[start : start + batch_size]
            yield self.take(rows), rows

    def mixed(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Yield each row once, mixed with rows that are stored or read near it."""
        raise NotImplementedError

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """Yield each row once, in the stored order."""
        for start in range(0, self.count, batch_size):
            stop = min(start + batch_size, self.count)
            yield self.between(start, stop), np.arange(start, stop)


class Layertap(Store):
    """`FeatureReader`, with shards of the default size."""

    title, packages, cases = "layertap", ("layertap", "h5py"), (RANDOM, ROWS, MIXED, IN_ORDER)
    check = False

    def write(self, values: np.ndarray) -> None:
        from extract.store.format.dataset import shard_rows_for
        from extract.store.format.layout import StoredFeature

        feature = StoredFeature("x", values.shape[1:], values.dtype.name)
        data = created(self.folder / "out", [feature], len(values), shard_rows_for([feature]))
        fill(data, lambda rows: {"x": values[rows]})

    def open(self) -> None:
        from extract import FeatureReader

        self.reader = FeatureReader(self.folder / "out", check=self.check)
        self.array = self.reader["x"]

    def close(self) -> None:
        self.reader.close()

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self.array[rows]

    def rows(self, batch_size: int, seed: int) -> Iterator[Batch]:
        return self.reader.batches("x", batch_size, shuffle="rows", seed=seed)

    def mixed(self, batch_size: int, seed: int) -> Iterator[Batch]:
        return self.reader.batches("x", batch_size, shuffle="chunks", seed=seed)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self.reader.batches("x", batch_size)


class LayertapChecked(Layertap):
    """`FeatureReader(check=True)`; a row is verified once, so each pass opens the reader again."""

    title, check, reopened = "layertap, check=True", True, True


class MappedNpy(Store):
    """`np.load(mmap_mode="r")`."""

    title = "np.load(mmap)"

    def write(self, values: np.ndarray) -> None:
        np.save(self.folder / "x.npy", values)

    def open(self) -> None:
        self.array = np.load(self.folder / "x.npy", mmap_mode="r")

    def close(self) -> None:
        del self.array

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self.array[rows]

    def between(self, start: int, stop: int) -> np.ndarray:
        return np.array(self.array[start:stop])


class MappedRaw(MappedNpy):
    """`np.memmap`; the same reads as `MappedNpy`, so the difference of both is noise."""

    title = "np.memmap"

    def write(self, values: np.ndarray) -> None:
        (self.folder / "x.raw").write_bytes(values.data)
        self.dtype, self.shape = values.dtype, values.shape

    def open(self) -> None:
        self.array = np.memmap(self.folder / "x.raw", self.dtype, "r", shape=self.shape)


class Arrow(Store):
    """An Arrow IPC file in a memory map, `Array.take`."""

    title, packages = "Arrow IPC, take", ("pyarrow",)

    def write(self, values: np.ndarray) -> None:
        pa = library("pyarrow")
        table = arrow_table(values)
        with pa.ipc.new_file(str(self.folder / "x.arrow"), table.schema) as writer:
            writer.write_table(table)

    def open(self) -> None:
        pa = library("pyarrow")
        (self.array,) = pa.ipc.open_file(pa.memory_map(str(self.folder / "x.arrow"))).read_all()["x"].chunks

    def close(self) -> None:
        del self.array

    def take(self, rows: np.ndarray) -> np.ndarray:
        return from_arrow(self.array.take(library("pyarrow").array(rows)))

    def between(self, start: int, stop: int) -> np.ndarray:
        return np.array(from_arrow(self.array[start:stop]))


class ArrowView(MappedNpy):
    """An Arrow IPC file in a memory map, as a NumPy array without a copy."""

    title, packages, write = "Arrow IPC, as a NumPy array", ("pyarrow",), Arrow.write

    def open(self) -> None:
        Arrow.open(self)
        self.array = from_arrow(self.array)


class Lance(Store):
    """`LanceDataset.take` and `to_batches`."""

    title, packages = "Lance", ("pylance", "pyarrow")

    def write(self, values: np.ndarray) -> None:
        library("lance", "pylance").write_dataset(arrow_table(values), self.folder / "x.lance")

    def open(self) -> None:
        self.data = library("lance", "pylance").dataset(self.folder / "x.lance")

    def close(self) -> None:
        del self.data

    def take(self, rows: np.ndarray) -> np.ndarray:
        return from_arrow(self.data.take(rows.tolist(), columns=["x"])["x"].combine_chunks())

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        start = 0
        for batch in self.data.to_batches(columns=["x"], batch_size=batch_size, strict_batch_size=True):
            yield np.array(from_arrow(batch["x"])), np.arange(start, start + len(batch))
            start += len(batch)


class Datasets(Store):
    """Hugging Face `Dataset`, on disk, in its Arrow format; its numpy format is slower."""

    title, packages, cases = "HF datasets", ("datasets", "pyarrow"), (RANDOM, ROWS, MIXED, IN_ORDER)

    def write(self, values: np.ndarray) -> None:
        datasets = library("datasets")
        datasets.disable_progress_bars()
        table = arrow_table(values).append_column("row", library("pyarrow").array(np.arange(len(values))))
        datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(self.folder / "x"))

    def open(self) -> None:
        self.data = library("datasets").load_from_disk(str(self.folder / "x")).with_format("arrow")

    def close(self) -> None:
        del self.data

    def take(self, rows: np.ndarray) -> np.ndarray:
        return from_arrow(self.data[rows]["x"].combine_chunks())

    def between(self, start: int, stop: int) -> np.ndarray:
        return np.array(from_arrow(self.data[start:stop]["x"].combine_chunks()))

    def mixed(self, batch_size: int, seed: int) -> Iterator[Batch]:
        stream = self.data.to_iterable_dataset(num_shards=16).shuffle(seed=seed, buffer_size=BUFFER)
        for batch in stream.iter(batch_size):
            yield from_arrow(batch["x"].combine_chunks()), batch["row"].to_numpy()


class Zarr(Store):
    """A zarr array without compression, in chunks of 256 rows."""

    title, packages = "zarr", ("zarr",)

    def write(self, values: np.ndarray) -> None:
        chunks = (min(CHUNK, len(values)), values.shape[1])
        library("zarr").create_array(self.folder / "x.zarr", data=values, chunks=chunks, compressors=None)

    def open(self) -> None:
        self.array = library("zarr").open_array(self.folder / "x.zarr", mode="r")

    def close(self) -> None:
        del self.array

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self.array.oindex[rows]

    def between(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]


class H5py(Store):
    """A contiguous dataset of HDF5; rows are read in ascending order, as h5py demands."""

    title, packages = "h5py", ("h5py",)

    def write(self, values: np.ndarray) -> None:
        with library("h5py").File(self.folder / "x.h5", "w") as file:
            file.create_dataset("x", data=values)

    def open(self) -> None:
        self.file = library("h5py").File(self.folder / "x.h5")
        self.data = self.file["x"]

    def close(self) -> None:
        self.file.close()

    def take(self, rows: np.ndarray) -> np.ndarray:
        order = np.argsort(rows)
        values = np.empty((len(rows), *self.data.shape[1:]), self.data.dtype)
        values[order] = self.data[rows[order]]
        return values

    def between(self, start: int, stop: int) -> np.ndarray:
        return self.data[start:stop]


class WebDataset(Store):
    """Tars of `.npy` files; the order is mixed by tars and in a shuffle buffer."""

    title, packages, cases = "WebDataset", ("webdataset",), (MIXED, IN_ORDER)

    def write(self, values: np.ndarray) -> None:
        webdataset = library("webdataset")
        for start in range(0, len(values), TAR_ROWS):
            with webdataset.TarWriter(str(self.folder / f"{start:08d}.tar")) as tar:
                for row, value in enumerate(values[start : start + TAR_ROWS], start):
                    tar.write({"__key__": f"{row:08d}", "npy": value})

    def open(self) -> None:
        self.tars = sorted(str(tar) for tar in self.folder.glob("*.tar"))

    def mixed(self, batch_size: int, seed: int) -> Iterator[Batch]:
        webdataset = library("webdataset")
        samples = webdataset.WebDataset(self.tars, shardshuffle=len(self.tars), seed=seed)
        return self._batches(samples.shuffle(BUFFER, initial=BUFFER, seed=seed), batch_size)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self._batches(library("webdataset").WebDataset(self.tars, shardshuffle=False), batch_size)

    def _batches(self, samples: Any, batch_size: int) -> Iterator[Batch]:
        for keys, values in samples.decode().to_tuple("__key__", "npy").batched(batch_size):
            yield np.asarray(values), np.array([int(key) for key in keys])


STORES: dict[str, type[Store]] = {
    "mmap": MappedNpy, "memmap": MappedRaw, "layertap": Layertap, "layertap-check": LayertapChecked,
    "arrow": Arrow, "arrow-view": ArrowView, "lance": Lance, "datasets": Datasets, "zarr": Zarr, "h5py": H5py,
    "webdataset": WebDataset,
}  # fmt: skip


def arrow_table(values: np.ndarray) -> Any:
    """Return rows as a table with the column x, a fixed-size list of the row's values."""
    pa = library("pyarrow")
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])})


def from_arrow(rows: Any) -> np.ndarray:
    """Return (N, D), an array of fixed-size lists as a NumPy array without a copy."""
    return rows.flatten().to_numpy(zero_copy_only=True).reshape(len(rows), -1)
