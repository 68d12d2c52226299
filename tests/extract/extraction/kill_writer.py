"""Kill loops of `FeatureWriter`, and run them again: `python -m tests.extract.extraction.kill_writer [COUNT] [SEED]`.

One or two processes run the same loop over 40 rows in five shards. One of them is ended by SIGKILL, before or after a
random one of the calls that change files, or after a random while. The shards that were published are then looked at,
the loop is run to its end, and every column is compared with what was written, by plain h5py. Every third time, shards
are compressed; every second time, there are two processes. A loop that ended before its kill does not count.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from extract import FeatureReader, FeatureWriter
from extract.store.verify import verify
from tests.extract.store.kill import die_at, forked, must, struck

COUNT, BATCH = 40, 3
IDS = [f"row {row}" for row in range(COUNT)][::-1]
VALUES = {
    "a": np.random.default_rng(0).normal(size=(COUNT, 5)).astype("float32"),
    "b": np.random.default_rng(1).integers(0, 9, (COUNT, 2)).astype("int64"),
}
MOST_CALLS = 240


def loop(out: Path, compress: str | None, pipe: int | None = None) -> None:
    """One loop; each acknowledged number of rows is written to `pipe`."""
    layers = {name: (values.shape[1:], values.dtype) for name, values in VALUES.items()}
    with FeatureWriter(
        out, ids=IDS, layers=layers, identity={"test": 1}, shard_rows=8, compress=compress, sync_s=0
    ) as writer:
        for rows in writer.todo(range(0, COUNT, BATCH), lambda start: IDS[start : start + BATCH]):
            here = slice(rows, rows + BATCH)
            writer.write(IDS[here], {name: values[here] for name, values in VALUES.items()})
            if pipe is not None:
                os.write(pipe, b".")


def must_be_right(out: Path) -> None:
    """All rows are there, once, as they were written."""
    columns: dict[str, list[Any]] = {}
    for path in sorted((out / "shards").glob("*.h5")):
        with h5py.File(path) as file:
            for name in ("path", "status", "features/a", "features/b"):
                columns.setdefault(name, []).append(file[name][:])
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    must([text.decode() for text in whole["path"]] == IDS, "ids are wrong")
    must((whole["status"] == 1).all(), "a status is wrong")
    for name, values in VALUES.items():
        must(np.array_equal(whole[f"features/{name}"], values), f"{name} is wrong")
    must(verify(out).faults == [], f"verify finds {verify(out).faults}")
    left = sorted(path.name for path in out.iterdir())
    must(left == ["dataset.json", "shards"], f"strays: {left}")
    receipts = sorted(path.name for path in (out / "shards").iterdir())
    must(receipts == sorted(f"{i:06d}.{end}" for i in range(5) for end in ("h5", "json")), f"strays: {receipts}")


def trial(base: Path, dice: random.Random, number: int, lasts_s: float) -> str | None:
    """One kill, and a loop to the end; returns where it struck; None: the loop had ended before."""
    out, compress = base / f"trial{number}", "gzip" if number % 3 == 2 else None
    after_s = dice.uniform(0, lasts_s) if dice.random() < 0.3 else None
    call = dice.randrange(MOST_CALLS)
    receiving, sending = os.pipe()

    def dies() -> None:
        if after_s is None:
            die_at(call)
        loop(out, compress, sending)

    other = None
    if number % 2:
        other = os.fork()
        if not other:
            try:
                loop(out, compress)
                os._exit(0)
            except BaseException as error:
                # The other process died, and its shard is missing; all else is an error.
                os._exit(0 if "ids have no row" in str(error) else print(f"{type(error).__name__}: {error}") or 1)
    code = forked(dies, after_s)
    if other is not None:
        must(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0, "the other process failed")
    os.close(sending)
    written = len(os.read(receiving, 1 << 16))
    os.close(receiving)
    where = struck_in(out)
    if code == -9 and other is None and (out / "dataset.json").exists():
        # All batches but the last ones are stored, in shards that are published or still to be.
        before = stored(out)
        must(before >= (written - 1) * BATCH - 1, f"{written} batches were taken, {before} rows are stored")
    if (out / "dataset.json").exists():
        with FeatureReader(out, partial=True) as reader:
            for name, values in VALUES.items():
                must(np.array_equal(reader[name][:], values[reader.rows]), f"a published row of {name} is wrong")
    must(forked(lambda: loop(out, compress)) == 0, "it could not be resumed")
    must_be_right(out)
    shutil.rmtree(out)
    return where if code == -9 else None


def stored(out: Path) -> int:
    """Rows with a status, in all files of shards."""
    status: dict[str, int] = {}
    for path in [*out.rglob("*.h5"), *out.rglob("*.h5.part")]:
        with h5py.File(path) as file:
            name = path.name.partition(".")[0]
            status[name] = max(status.get(name, 0), int((file["status"][:] == 1).sum()))
    return sum(status.values())


def struck_in(out: Path) -> str:
    """What the kill left, in a word."""
    folders = [path for path in (out / ".building").glob("*") if any((path / "shards").glob("*"))]
    words = {struck_folder(path) for path in folders}
    return ", ".join(sorted(words)) or struck(out)


def struck_folder(folder: Path) -> str:
    names = [path.name for path in (folder / "shards").iterdir()]
    if any(name.endswith(".new") for name in names):
        return "creating or packing"
    if any(name.endswith(".h5") for name in names):
        return "publishing"
    return "writing" if any(name.endswith(".part") for name in names) else "receipt only"


def main(count: int, seed: int) -> None:
    """Run the trials, and tell where they struck."""
    dice, base = random.Random(seed), Path(tempfile.mkdtemp(prefix="kill-"))
    try:
        start = time.perf_counter()
        must(forked(lambda: loop(base / "whole", None)) == 0, "a loop that is left alone fails")
        lasts_s = time.perf_counter() - start
        must_be_right(base / "whole")
        places: Counter[str] = Counter()
        for number in range(10 * count):
            where = trial(base, dice, number, lasts_s)
            places.update([where] if where else [])
            if places.total() == count:
                break
        must(places.total() == count, "too few loops could be killed")
        print(json.dumps({"kills": count, "all the same": True, "left": dict(places)}))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["100", "0"][len(sys.argv) - 1 :])))
