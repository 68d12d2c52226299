"""The store against the plainest way to do the same: `python -m benchmarks.store_speed [FOLDER] [--rows 80000]`.

Ratios of rates, medians of five rounds in turn; 1 is as fast as the plain way. 80,000 rows of 1,280 float16 (205 MB),
written into FOLDER (a temporary one by default), read from the file cache. Then batches to train from: 4,000 rows of
three layers (607 MB).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import created, fill, in_turn, parser, say
from extract import FeatureReader, FeatureWriter
from extract.store.format.dataset import shard_rows_for
from extract.store.format.layout import StoredFeature

WIDTH, BATCH, ROUNDS = 1280, 256, 5
MAPS = {"layer3": (256, 14, 14), "layer4": (512, 7, 7), "embedding": (512,)}  # of ResNet-18; 151 kB an image
OF_MAPS, WORKERS = 64, 4  # batch, processes
RAW = "raw write and fsync"


def appending(folder: Path, values: NDArray[Any]) -> None:
    """Compare the writer with a raw file; creating a file, which takes its space, is not part of appending to it."""
    data: list[Any] = []

    def raw() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            for start in range(0, len(values), BATCH):
                file.write(values[start : start + BATCH].data)
            os.fsync(file.fileno())

    def append(sync_s: float = 30, publish: bool = False) -> None:
        fill(data[0], lambda rows: {"x": values[rows[0] : rows[-1] + 1]}, BATCH, sync_s, publish)

    def empty(name: str) -> None:
        shutil.rmtree(folder / "one", ignore_errors=True)
        data[:] = [stored(folder / "one", values, len(values))]
        os.sync()

    ways = {
        "append, batches of 256": append,
        "  forced to the disk every 50 ms": lambda: append(0.05),
        "  forced to the disk at every batch (sync_s 0)": lambda: append(0),
        "  and published (sha256 of the file)": lambda: append(publish=True),
    }
    taken = in_turn({RAW: raw, **ways}, ROUNDS, before=empty)
    for name in ways:
        say(name, taken[name], taken[RAW], RAW)


def own_loop(folder: Path, values: NDArray[Any]) -> None:
    """Compare a loop of `FeatureWriter`, from its start to its end, with the same loop that writes with h5py.

    Both publish or flush to the disk. In the second pair, computing a batch takes 10 ms, as a small model does.
    """
    values = np.tile(values, (6, 1))  # 1.2 GB: of fewer rows, what is done once for a shard counts too much
    ids = [f"row {row}" for row in range(len(values))]

    def batches(compute_s: float) -> Iterator[slice]:
        for start in range(0, len(values), BATCH):
            if compute_s:
                time.sleep(compute_s)
            yield slice(start, start + BATCH)

    def raw(compute_s: float = 0) -> None:
        with h5py.File(folder / "loop.h5", "w") as file:
            data = file.create_dataset("x", values.shape, values.dtype, chunks=(BATCH, WIDTH))
            for rows in batches(compute_s):
                data[rows] = values[rows]
            file.flush()
        with (folder / "loop.h5").open("rb+") as written:
            os.fsync(written.fileno())

    def ours(compute_s: float = 0) -> None:
        layers, out = {"x": (WIDTH, "float16")}, folder / "loop"
        with FeatureWriter(out, ids=ids, layers=layers, identity={"b": 1}, shard_rows=len(values) // 8) as writer:
            for rows in writer.todo(batches(compute_s), lambda rows: ids[rows]):
                writer.write(ids[rows], {"x": values[rows]})

    def empty(name: str) -> None:
        shutil.rmtree(folder / "loop", ignore_errors=True)
        (folder / "loop.h5").unlink(missing_ok=True)
        os.sync()

    for compute_s in (0, 0.01):
        name = f"  with {compute_s * 1e3:.0f} ms of work a batch" if compute_s else "FeatureWriter, whole loop"
        taken = in_turn({"raw": lambda: raw(compute_s), "ours": lambda: ours(compute_s)}, 3, before=empty)  # noqa: B023
        say(name, taken["ours"], taken["raw"], "h5py and fsync")


def stored(out: Path, values: NDArray[Any], shard_rows: int) -> Any:
    """A data set for the values, without any."""
    return created(out, [StoredFeature("x", (WIDTH,), "float16")], len(values), shard_rows)


def reading(folder: Path, values: NDArray[Any]) -> None:
    """Compare readers of one file and of 50 with NumPy's and with h5py."""
    count = len(values)
    one, many = folder / "whole", folder / "parts"
    for out, shard_rows in ((one, count), (many, count // 50)):
        fill(stored(out, values, shard_rows), lambda rows: {"x": values[rows]})
    np.save(folder / "plain.npy", values)
    mapped = np.load(folder / "plain.npy", mmap_mode="r")
    random = np.random.default_rng(0)
    batches = [random.integers(0, count, BATCH) for _ in range(300)]
    single = random.integers(0, count, 3000)
    with FeatureReader(one) as reader, FeatureReader(many) as of_many, h5py.File(one / "shards/000000.h5") as naive:
        x, plain = reader["x"], naive["features/x"]
        assert np.array_equal(x[:], values)
        assert np.array_equal(of_many["x"][batches[0]], values[batches[0]])

        def a_pass(of: FeatureReader, shuffle: Any) -> None:
            for _ in of.batches("x", BATCH, shuffle=shuffle, seed=0, memory_bytes=64 << 20):
                pass

        taken = in_turn({"ours": lambda: x[:], "plain": lambda: np.load(folder / "plain.npy")}, ROUNDS)
        say("sequential read of everything", taken["ours"], taken["plain"], "np.load")
        taken = in_turn(
            {
                "ours": lambda: [x[rows] for rows in batches],
                "many": lambda: [of_many["x"][rows] for rows in batches],
                "plain": lambda: [mapped[rows] for rows in batches],
            },
            ROUNDS,
        )
        say("random batches of 256", taken["ours"], taken["plain"], "np.memmap")
        say("  over 50 shards", taken["many"], taken["plain"], "np.memmap")
        taken = in_turn({"ours": lambda: [x[i] for i in single], "plain": lambda: [plain[i] for i in single]}, ROUNDS)
        say("random rows one at a time", taken["ours"], taken["plain"], "h5py dataset[i]")
        naive_epoch = [seconds * count / len(single) for seconds in taken["plain"]]
        # One kind at a time: a pass in chunks gives its pages back, and the next of another kind would map them anew.
        for kind in ("rows", "chunks", None):
            passes = {"one": lambda kind=kind: a_pass(reader, kind), "many": lambda kind=kind: a_pass(of_many, kind)}
            taken = in_turn(passes, ROUNDS)
            say(f"an epoch, shuffle={kind!r}", taken["one"], naive_epoch, "h5py dataset[i]")
            say("  over 50 shards", taken["many"], taken["one"], "one file")


class Mapped(Dataset[Any]):
    """A hand-written data set of memory maps, or of tensors, that takes whole batches."""

    def __init__(self, arrays: dict[str, Any], labels: NDArray[np.int64]):
        self.arrays, self.labels = arrays, torch.from_numpy(labels)

    def __getitem__(self, rows: NDArray[np.int64]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {name: torch.as_tensor(array[rows]) for name, array in self.arrays.items()}, self.labels[rows]


def training(folder: Path, count: int) -> None:
    """Compare shuffled epochs of three layers with those of memory maps, both by four processes, and of tensors."""
    features = [StoredFeature(name, shape, "float16") for name, shape in MAPS.items()]
    random = np.random.default_rng(0)
    values = {name: random.integers(0, 99, (count, *shape), "uint8").astype("float16") for name, shape in MAPS.items()}
    data = created(folder / "maps", features, count, shard_rows_for(features))
    fill(data, lambda rows: {name: array[rows] for name, array in values.items()})
    for name, array in values.items():
        np.save(folder / f"{name}.npy", array)
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in MAPS}
    order = np.random.default_rng(0).permutation(count)
    batches: Any = [order[first : first + OF_MAPS] for first in range(0, count, OF_MAPS)]
    with FeatureReader(folder / "maps") as reader:
        places = {place: reader.dataset(list(MAPS), residency=place) for place in ("disk", "memory")}
        by_hand = Mapped(mapped, np.arange(count) % 10)
        tensors = Mapped({name: torch.from_numpy(array) for name, array in values.items()}, np.arange(count) % 10)
        both = zip(places["disk"].batches(OF_MAPS, shuffle=True), map(by_hand.__getitem__, batches), strict=True)
        for (x, y), (theirs, labels) in both:
            assert torch.equal(y, labels)
            assert all(torch.equal(x[name], theirs[name]) for name in MAPS)

        def a_pass(loader: Iterable[Any]) -> None:
            for _ in loader:
                pass

        ways = {
            "disk": lambda: a_pass(places["disk"].batches(OF_MAPS, shuffle=True, num_workers=WORKERS)),
            "by hand": lambda: a_pass(DataLoader(by_hand, None, sampler=batches, num_workers=WORKERS)),
            "one process": lambda: a_pass(places["disk"].batches(OF_MAPS, shuffle=True)),
            "memory": lambda: a_pass(places["memory"].batches(OF_MAPS, shuffle=True)),
            "tensors": lambda: a_pass(map(tensors.__getitem__, batches)),
        }
        taken = in_turn(ways, ROUNDS)
        say("batches of 3 layers, 4 workers", taken["disk"], taken["by hand"], "np.memmap, 4 workers")
        say("  without workers", taken["one process"], taken["by hand"], "np.memmap, 4 workers")
        say("  in memory, without workers", taken["memory"], taken["by hand"], "np.memmap, 4 workers")
        say("  in memory, without workers", taken["memory"], taken["tensors"], "tensors[rows]")
        vectors = reader.dataset("embedding", residency="memory")
        ways = {
            "whole": lambda: a_pass(vectors.batches(BATCH, shuffle=True)),
            "samples": lambda: a_pass(DataLoader(vectors, BATCH, shuffle=True)),
        }
        taken = in_turn(ways, ROUNDS, calls=10)
        say("batches of 256 vectors in memory", taken["whole"], taken["samples"], "DataLoader(dataset, 256)")


def main() -> None:
    """Measure, and print the ratios."""
    options = parser(__doc__)
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("--rows", type=int, default=80_000)
    given = options.parse_args()
    values = np.random.default_rng(0).normal(size=(given.rows, WIDTH)).astype(np.float16)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        own_loop(Path(folder), values)
        appending(Path(folder), values)
        reading(Path(folder), values)
        training(Path(folder), given.rows // 20)


if __name__ == "__main__":
    main()
