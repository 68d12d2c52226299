"""Kill an extraction again and again, and resume it each time: `python tests/extract/store/kill.py [COUNT] [SEED]`.

A run over 30 pictures in four shards is ended by SIGKILL: half of the times after a random while, half of the times
before or after a random one of the calls that change files, which reaches the short moments between two of them. What
had been acknowledged is then looked at, the run is resumed to its end, and every file is compared with that of a run
that was left alone. Every third time, it is the retry of failed rows that is killed; every fourth time, shards are
compressed. A run that ended before its kill does not count.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from extract import FeatureReader
from extract.backbones import Weights
from extract.backbones.preprocessing import Preprocessing
from extract.compute.backbone import Backbone
from extract.extraction.plan import existing_at, resolve
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from extract.store.verify import verify

BROKEN = "b/13.png"
CALLS = ("pwrite", "fsync", "fdatasync", "link", "rename", "unlink", "mkdir", "rmdir", "posix_fallocate")


def pictures(folder: Path) -> None:
    """30 pictures in two classes; one is broken."""
    for i in range(30):
        path = folder / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path)
    (folder / BROKEN).write_bytes(b"no picture")


def network() -> Backbone:
    """A small network with fixed weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(32)).eval()
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    size = Preprocessing(resize_px=32, crop_px=(32, 32), interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3)
    return Backbone("test/small", "test/small", model, Weights("fixed", "0" * 64), size)


def run(images: Path, out: Path, backbone: Backbone, compress: str | None, retry: bool, pipe: Any = None) -> None:
    """One run; each acknowledged number of rows is written to `pipe`."""
    settings = ExtractionSettings(layers=["0", "4"], batch_size=4, workers=0, shard_rows=8, compress=compress, sync_s=0)
    planned = resolve(settings, list_images(images), backbone, existing_at(out))

    def on_rows(rows: int, stored: bool) -> None:
        if pipe is not None:
            os.write(pipe, b"f" if stored else b"%d\n" % rows)

    extract(planned, retry_failed=retry, on_rows=on_rows)


def content(out: Path) -> dict[str, Any]:
    """What must be the same after any number of kills: names of files, and what is in them."""
    content_of_run: dict[str, Any] = {
        "files": sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    }
    with FeatureReader(out) as reader:
        for layer in reader.layers:
            content_of_run[layer] = reader[layer][:].tobytes()
        content_of_run |= {"paths": reader.paths[:], "labels": reader.labels.tolist(), "splits": reader.splits[:]}
        content_of_run |= {"classes": reader.classes, "status": reader.status.tolist(), "failures": reader.failures}
        content_of_run["hashes"] = reader.column("row_hash").tolist()
    return content_of_run


def die_at(call: int) -> Callable[[], int]:
    """Arrange that this process is killed before or after the given one of the calls that change files.

    Returns what tells how many moments there were.
    """
    count = itertools.count()

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            number = next(count)
            if 2 * number == call:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **named)
            if 2 * number + 1 == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    return lambda: 2 * next(count)


def moments(images: Path, base: Path, backbone: Backbone, compress: str | None, retry: bool) -> int:
    """Before and after how many calls a run can be killed."""
    out = base / "counted"
    (images / BROKEN).write_bytes(b"no picture")
    if retry:
        forked(lambda: run(images, out, backbone, compress, retry=False))
        shutil.copy(images / "b" / "15.png", images / BROKEN)

    def work() -> None:
        counted = die_at(-1)
        run(images, out, backbone, compress, retry)
        (base / "count").write_text(str(counted()))

    must(forked(work) == 0, "a run to count its calls failed")
    shutil.rmtree(out)
    return int((base / "count").read_text())


def forked(work: Callable[[], None], kill_after_s: float | None = None) -> int:
    """Run something in a process of its own, perhaps killed after a while; its exit code."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def must(true: bool, words: str) -> None:
    """End the script if something is not as it must be."""
    if not true:
        raise SystemExit(f"FAILED: {words}")


def trial(images: Path, base: Path, expected: dict[str, Any], backbone: Backbone, dice: random.Random, number: int,
          lasts_s: float, calls: Callable[[bool, str | None], int]) -> str | None:  # fmt: skip
    """One kill and one resume; returns where it struck; None: the run had ended before."""
    retry, compress = number % 3 == 2, "gzip" if number % 4 == 3 else None
    out = base / f"trial{number}"
    (images / BROKEN).write_bytes(b"no picture")
    if retry:
        must(forked(lambda: run(images, out, backbone, compress, retry=False)) == 0, "the first run failed")
        shutil.copy(images / "b" / "15.png", images / BROKEN)
    reading, writing = os.pipe()
    timed = dice.random() < 0.5
    call = dice.randrange(calls(retry, compress))

    def work() -> None:
        if not timed:
            die_at(call)
        run(images, out, backbone, compress, retry, writing)

    struck_it = forked(work, dice.uniform(0, lasts_s) if timed else None) == -signal.SIGKILL
    os.close(writing)
    said = b"".join(iter(lambda: os.read(reading, 4096), b"")).decode()
    os.close(reading)
    acknowledged = sum(int(word) for word in said.replace("f", "").split())
    where = struck(out)
    if (out / "dataset.json").exists():
        with FeatureReader(out, partial=True) as reader:
            must(
                len(reader) >= (29 if retry else acknowledged), f"{acknowledged} rows acknowledged, {len(reader)} there"
            )
            for layer in reader.layers:
                every = np.frombuffer(expected[layer], reader[layer].dtype).reshape(-1, *reader[layer].shape[1:])
                good = reader.status == 1
                must(np.array_equal(reader[layer][good], every[reader.rows[good]]), "a row is wrong")
    must(forked(lambda: run(images, out, backbone, compress, retry)) == 0, "it could not be resumed")
    if retry:  # a kill before the retry began leaves nothing that asks for it
        must(forked(lambda: run(images, out, backbone, compress, retry=True)) == 0, "the retry failed")
    actual, required = content(out), dict(expected)
    if not retry:
        required |= {key: expected["first"][key] for key in expected["first"] if key != "files"}
    required.pop("first")
    required["files"] = actual["files"] if retry else expected["first"]["files"]
    for key, value in required.items():
        must(actual[key] == value, f"{key} differs after trial {number} ({where}): {actual[key]!r:.300} {value!r:.300}")
    if retry:
        must(not [name for name in actual["files"] if not name.endswith((".h5", ".json", ".jsonl", ".lock"))], "strays")
        must(len(actual["files"]) == len(expected["first"]["files"]), f"strays: {actual['files']}")
    must(verify(out).faults == [], "verify finds faults")
    shutil.rmtree(out)
    return where if struck_it else None


def struck(out: Path) -> str:
    """What the kill left: the kinds of files that shards had."""
    return " ".join(sorted({path.suffix for path in out.glob("shards/*")})) or "no shard"


def main(count: int, seed: int) -> None:
    """Run the trials, and tell where they struck."""
    torch.set_num_threads(1)
    dice, backbone = random.Random(seed), network()
    base = Path(tempfile.mkdtemp(prefix="kill-"))
    try:
        images, uninterrupted = base / "images", base / "whole"
        pictures(images)
        start = time.perf_counter()
        run(images, uninterrupted, backbone, None, retry=False)
        lasts_s = time.perf_counter() - start
        first = content(uninterrupted)
        shutil.copy(images / "b" / "15.png", images / BROKEN)
        run(images, uninterrupted, backbone, None, retry=True)
        expected = {**content(uninterrupted), "first": first}
        must(sum(status == 1 for status in first["status"]) == 29, "one row fails at first")
        must(set(expected["status"]) == {1}, "none fails in the end")
        calls = functools.cache(lambda retry, compress: moments(images, base, backbone, compress, retry))
        places: Counter[str] = Counter()
        for number in range(10 * count):
            where = trial(images, base, expected, backbone, dice, number, lasts_s, calls)
            places.update([where] if where else [])
            if places.total() == count:
                break
        must(places.total() == count, "too few runs could be killed")
        print(json.dumps({"kills": count, "all the same": True, "left": dict(places)}))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["200", "0"][len(sys.argv) - 1 :])))
