"""Shuffled batches of the tokens of a data set, against other ways to read them; a Markdown table.

    pip install datasets webdataset
    python -m benchmarks.token_stream [WAY ...] [--images 102041] [--rounds 3] [--folder FOLDER]

The data are random float16 tokens, 196 of 192 values an image: with the default number of images, 20 million tokens of
7.7 GB. The ways run in turn, round after round. Each takes the whole data, or as many batches as it gives in `--limit`
seconds. Rates are over that of reading the file in order, in the same round and state of the file cache: all files are
dropped from it before each way, and for "warm", those of the way are then read.

Besides the rate, each way is judged by the images in a batch of 4,096 tokens, and by how well the pass is mixed: the
Pearson chi-squared of a table of 16 parts of the data and 16 parts of the pass, over its degrees of freedom; 1 is
what independent uniform order gives.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import created, fill, parser, ratio
from extract import FeatureReader
from extract.store.format.layout import StoredFeature

PER_IMAGE, WIDTH, BATCH = 196, 192, 4096
PARTS = 16
MEMORY = 512 << 20
BLOCK = 2 * WIDTH * PER_IMAGE * 100  # bytes of 100 images
Batches = Iterator[tuple[np.ndarray, np.ndarray]]  # values, and the image of each token


def make(folder: Path, images: int) -> None:
    """Write the data as a raw file, and as a data set."""
    block = np.random.default_rng(0).normal(size=(256, PER_IMAGE, WIDTH)).astype(np.float16)
    with (folder / "raw.bin").open("wb") as file:
        for first in range(0, images, 256):
            file.write(block[: images - first].data)
    feature = StoredFeature("tokens", (PER_IMAGE, WIDTH), "float16", {"axes": "TC", "grid": "14,14"})
    fill(created(folder / "out", [feature], images, 1 << 14), lambda some: {"tokens": block[: len(some)]}, 256)


def in_order(folder: Path, images: int) -> Batches:
    """Read the raw file in blocks; the values are not made into batches."""
    image_bytes = PER_IMAGE * WIDTH * 2
    buffer, rows = bytearray(BLOCK), np.zeros(BLOCK // (2 * WIDTH), np.int64)
    with (folder / "raw.bin").open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            rows[:] = file.tell() // image_bytes
            yield np.frombuffer(buffer, np.float16)[: count // 2].reshape(-1, WIDTH), rows[: count // (2 * WIDTH)]


def by_layertap(folder: Path, images: int) -> Batches:
    """Read shuffled batches of tokens from the data set."""
    with FeatureReader(folder / "out") as reader:
        for values, rows, _ in reader.tokens("tokens").batches(BATCH, shuffle=True, memory_bytes=MEMORY):
            yield values, rows


def by_memmap(folder: Path, images: int) -> Batches:
    """Read random tokens of a memory map."""
    tokens = np.memmap(folder / "raw.bin", np.float16, "r").reshape(-1, WIDTH)
    order = np.random.default_rng(0).permutation(len(tokens))
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        yield tokens[chosen], chosen // PER_IMAGE


def by_buffer(folder: Path, images: int) -> Batches:
    """Read in order into a buffer; when it is full, shuffle it and give half of it, as SAELens does."""
    import torch

    tokens = np.memmap(folder / "raw.bin", np.float16, "r").reshape(-1, WIDTH)
    half = MEMORY // (2 * WIDTH) // 2
    random = torch.Generator().manual_seed(0)
    buffer, rows = torch.empty(0, WIDTH, dtype=torch.float16), torch.empty(0, dtype=torch.int64)
    for first in range(0, len(tokens), half):
        new = torch.from_numpy(tokens[first : first + half].copy())
        buffer = torch.cat([buffer, new])
        rows = torch.cat([rows, torch.arange(first, first + len(new)) // PER_IMAGE])
        order = torch.randperm(len(buffer), generator=random)
        buffer, rows = buffer[order], rows[order]
        given = len(buffer) if first + half >= len(tokens) else len(buffer) - half
        for start in range(0, given, BATCH):
            yield buffer[start : min(start + BATCH, given)].numpy(), rows[start : min(start + BATCH, given)].numpy()
        buffer, rows = buffer[given:], rows[given:]


def by_datasets(folder: Path, images: int) -> Batches:
    """Read tokens by `datasets`, as rows of Arrow, shuffled by its own indices."""
    import datasets

    datasets.disable_progress_bars()

    stored = folder / "arrow"
    if not stored.exists():
        tokens = np.memmap(folder / "raw.bin", np.float16, "r").reshape(-1, WIDTH)
        count = min(len(tokens), 2_000_000)  # its rate does not depend on more
        token = datasets.Sequence(datasets.Value("float16"), WIDTH)
        features = datasets.Features({"x": token, "i": datasets.Value("int64")})

        def generate() -> Iterator[dict[str, Any]]:
            for first in range(0, count, 10_000):
                for number in range(first, min(first + 10_000, count)):
                    yield {"x": tokens[number], "i": number // PER_IMAGE}

        datasets.Dataset.from_generator(generate, features=features).save_to_disk(stored)
    data = datasets.load_from_disk(stored).shuffle(seed=0).with_format("numpy")
    for batch in data.iter(BATCH):
        yield batch["x"], batch["i"]


def by_webdataset(folder: Path, images: int) -> Batches:
    """Read images of tokens from tar files, and mix tokens in a buffer of its own."""
    import webdataset

    stored = folder / "tar"
    if not stored.exists():
        stored.mkdir()
        tokens = np.memmap(folder / "raw.bin", np.float16, "r").reshape(-1, PER_IMAGE, WIDTH)
        per_tar = 1000
        for shard in range(min(20, -(-images // per_tar))):
            with webdataset.TarWriter(str(stored / f"{shard:04d}.tar")) as tar:
                for image in range(shard * per_tar, min(images, (shard + 1) * per_tar)):
                    tar.write({"__key__": f"{image:08d}", "npy": tokens[image]})

    def split(samples: Iterator[dict[str, Any]]) -> Iterator[tuple[np.ndarray, int]]:
        for sample in samples:
            image = int(sample["__key__"].rsplit("/", 1)[-1])
            for token in sample["npy"]:
                yield token, image

    def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([token for token, _ in samples]), np.array([image for _, image in samples])

    count = len(list(stored.iterdir()))
    data = webdataset.WebDataset(str(stored / f"{{0000..{count - 1:04d}}}.tar"), shardshuffle=count, seed=0)
    size = MEMORY // (2 * WIDTH) // 4  # a token and its objects take about four times its bytes
    yield from data.decode().compose(split).shuffle(size).batched(BATCH, collation_fn=collate)


WAYS: dict[str, tuple[Callable[[Path, int], Batches], str]] = {  # way -> its batches, and what it reads
    "file, in order": (in_order, "raw.bin"),
    "layertap": (by_layertap, "out"),
    "np.memmap, random": (by_memmap, "raw.bin"),
    "buffer, half refilled": (by_buffer, "raw.bin"),
    "datasets": (by_datasets, "arrow"),
    "webdataset": (by_webdataset, "tar"),
}


def prepare_cache(folder: Path, read: str, state: str) -> None:
    """Drop all files from the kernel's cache, and read those of a way again if the state is "warm"."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for path in filter(Path.is_file, [folder / read, *(folder / read).rglob("*")] if state == "warm" else []):
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK):
                pass


def measure(way: Callable[[Path, int], Batches], folder: Path, images: int, limit_s: float) -> dict[str, float]:
    """Take batches for a time; return the rate in bytes/s, images in a batch and the mixing."""
    table, counts, n, total = np.zeros((PARTS, PARTS)), [], 0, 0.0
    passed: list[np.ndarray] = []
    start = time.perf_counter()
    for values, rows in way(folder, images):
        total += float(values[0, 0])  # a batch is used
        n += len(values)
        passed.append(rows[:: len(rows) // 256 or 1].copy())
        if len(counts) < 64:
            counts.append(len(np.unique(rows)))
        if time.perf_counter() - start > limit_s:
            break
    seconds = time.perf_counter() - start
    rows = np.concatenate(passed)
    whole = rows.max() + 1
    np.add.at(table, (rows * PARTS // whole, np.arange(len(rows)) * PARTS // len(rows)), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    chi = float(((table - expected) ** 2 / np.maximum(expected, 1e-9)).sum()) / (PARTS - 1) ** 2
    return {"rate": n * WIDTH * 2 / seconds, "tokens": n, "images": statistics.median(counts), "mixing": chi}


def main() -> None:
    """Measure and print the table."""
    given = parser(__doc__)
    given.add_argument("ways", nargs="*", metavar="WAY", help=f"default: {', '.join(WAYS)}")
    given.add_argument("--images", type=int, default=102_041)
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--limit", type=float, default=30, help="seconds for each way")
    given.add_argument("--folder", type=Path, help="where the data are kept; default: a temporary folder")
    options = given.parse_args()
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as name:
        folder = Path(name)
        if not (folder / "out").exists():
            folder.mkdir(exist_ok=True)
            make(folder, options.images)
        ways = {way: WAYS[way] for way in options.ways or WAYS}
        for way, _ in ways.values():
            next(way(folder, options.images))  # writes what it reads
        print("| | file cache | million tokens/s | of the file in order | images in a batch | mixing |")
        print("|---|---|---|---|---|---|")
        for state in ("warm", "cold"):
            results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way, (batches, read) in ways.items():
                    prepare_cache(folder, read, state)
                    results[way].append(measure(batches, folder, options.images, options.limit))
                    print(state, way, results[way][-1], file=sys.stderr, flush=True)
            for way, rounds in results.items():
                rate = statistics.median(each["rate"] for each in rounds)
                of_file = ratio([each["rate"] for each in rounds], [each["rate"] for each in results["file, in order"]])
                print(
                    f"| {way} | {state} | {rate / WIDTH / 2 / 1e6:.2f} | {of_file:.2f} | "
                    f"{rounds[0]['images']:,.0f} | {rounds[0]['mixing']:,.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
