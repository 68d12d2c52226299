"""Write, resume and read data sets in a bucket whose server fails: `python tests/extract/store/throttling.py [COUNT]
[--seed SEED] [--scale SCALE]`.

Each run embeds 8 pictures into 4 shards in a new bucket of a server that gives pages of 3 names. Half of the runs
are killed at a random moment. The command is repeated until the data set is complete, and then everything is read with
an empty cache. A command that fails must name the URL and the reason, without a traceback. In the end the features
must be equal to the bit to those of a run on the local disk, and the bucket must have the expected objects.

Pauses and time-outs are multiplied by SCALE (0.05 by default), and so are the outages. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

IMAGES, SHARD_ROWS, PAGE = 8, 2, 3
SETTINGS = {
    "-b": "timm/test_resnet", "--weights": "random", "--workers": 0, "--compile": "off", "--device": "cpu",
    "--size": 64, "--crop": 64, "--shard-rows": SHARD_ROWS, "--batch-size": 1, "-l": "layer4:none",
}  # fmt: skip
MIXED = {"503": 0.1, "lost": 0.1, "cut": 0.1}
FOR_GOOD = 10**6
# Name -> (rates of faults, kind of outage, seconds of the outage before SCALE). The slow test tries the first five.
MODES: dict[str, tuple[dict[str, float], str, float]] = {
    "30 % of 503": ({"503": 0.3}, "", 0),
    "silent for 30 s": (MIXED, "hang", 30),
    "30 % cut bodies": ({"cut": 0.3}, "", 0),
    "30 % lost answers of PUT": ({"lost": 0.3}, "", 0),
    "refuses for 30 s": (MIXED, "refuse", 30),
    "10 % each of 503, lost answers, cut bodies": (MIXED, "", 0),
    "10 % of 503": ({"503": 0.1}, "", 0),
    "1 % of 503": ({"503": 0.01}, "", 0),
    "refuses for good": (MIXED, "refuse", FOR_GOOD),
    "silent for good": (MIXED, "hang", FOR_GOOD),
}
# A run with an outage for good takes a minute even with a small SCALE.
ORDER = [*list(MODES)[:8], *list(MODES)[:8], "refuses for good", *list(MODES)[:8], *list(MODES)[:8], "silent for good"]
REASON = r"HTTP 503|no answer|ConnectionClosedError|EndpointConnectionError|ClientPayloadError|received .* bytes"
SECONDS = ("_GIVE_UP_S", "_WAIT_S", "_LONGEST_WAIT_S", "_REPORT_S", "_CONNECT_S", "_ANSWER_S", "_STORED_S")


# The server, in a process of its own


def serve() -> None:
    """Serve a bucket; each line of the standard input is a request to change what fails."""
    from tests.extract.store.bucket_server import direct, served

    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(PAGE)
    with served() as proxy:
        print(proxy.port, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if bucket := request.get("bucket"):
                direct(proxy).create_bucket(Bucket=bucket)
            if bucket := request.get("names"):
                pages = direct(proxy).get_paginator("list_objects_v2").paginate(Bucket=bucket)
                print(json.dumps([entry["Key"] for page in pages for entry in page.get("Contents", [])]), flush=True)
                continue
            if proxy.is_refusing:
                proxy.accept()
            proxy.forget()
            if "rates" in request:
                proxy.slow_s = request["slow_s"]
                proxy.rule = _rule(proxy, **request)
            print(json.dumps(None), flush=True)


def _rule(
    proxy: Any, rates: dict[str, float], seed: int, outage: str, outage_s: float, after: int, **_: Any
) -> Callable[[str, str, int], str | None]:
    """Return what fails: requests at random, and all requests during an outage that starts after some of them."""
    chance, count, is_silent = random.Random(seed), 0, threading.Event()

    def start_outage() -> None:
        if outage == "refuse":
            proxy.refuse()
            end = proxy.accept
        else:
            is_silent.set()
            end = is_silent.clear
        if outage_s < FOR_GOOD:
            timer = threading.Timer(outage_s, end)
            timer.daemon = True
            timer.start()

    def rule(method: str, path: str, number: int) -> str | None:
        nonlocal count
        count += 1
        if outage and count == after:
            threading.Thread(target=start_outage, daemon=True).start()
        if is_silent.is_set():
            return "hang"
        if chance.random() < rates.get("503", 0):
            return chance.choice(["503", "SlowDown"])
        if method == "PUT" and chance.random() < rates.get("lost", 0):
            return "lost"
        if method == "GET" and chance.random() < rates.get("cut", 0):
            return "cut"
        return None

    return rule


class Server:
    """The server as the runs see it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


# The runs


def forked(work: Callable[[], None], log: Path, kill_after_s: float | None = None) -> int:
    """Run something in a process group of its own, perhaps killed after a while; return its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            work()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def embed(images: Path, out: str, *more: str) -> None:
    """Run `layertap embed` in this process; its worker is forked, which saves the imports, and has one thread."""
    import multiprocessing

    import layertap
    from extract import defaults

    words = [str(word) for pair in SETTINGS.items() for word in pair]
    fork = multiprocessing.get_context("fork")
    with mock.patch("multiprocessing.get_context", return_value=fork), mock.patch.object(defaults, "CORES", 1):
        sys.argv = ["layertap", "embed", str(images), "-o", out, *words, *more]
        layertap.main()


def read(out: str, result: Path) -> None:
    """Read everything, the features in random order, and keep it."""
    import numpy as np

    from extract import FeatureReader

    with FeatureReader(out) as reader:
        order = np.random.default_rng(0).permutation(len(reader))
        features = np.empty((len(reader), *reader[reader.layers[0]].shape[1:]), np.float32)
        for rows in np.split(order, 4):
            features[rows] = reader[reader.layers[0]][rows]
        np.savez(result, features=features, paths=np.array(reader.paths[:]), status=np.array(reader.status))


def must(true: bool, words: str) -> None:
    """End the script if something is not as it must be."""
    if not true:
        raise SystemExit(f"FAILED: {words}")


def check_words(log: Path, out: str, mode: str) -> None:
    """Check that a command that failed named the URL and the reason, without a traceback."""
    text = log.read_text()
    named = [line for line in text.splitlines() if out in line and re.search(REASON, line)]
    must("Traceback" not in text and bool(named), f"{mode}: {text}")


def run(seed: int, server: Server, images: Path, base: Path, expected: Any, scale: float, lasts_s: float) -> str:
    """One run; returns its mode."""
    import numpy as np

    chance = random.Random(seed)
    mode = ORDER[seed % len(ORDER)]
    rates, outage, outage_s = MODES[mode]
    folder = base / f"run{seed}"
    (folder / "tmp").mkdir(parents=True)
    bucket = f"bucket-{os.getpid()}-{seed}"
    out, log = f"s3://{bucket}/set", folder / "log"
    os.environ |= {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
    tempfile.tempdir = None

    def repeated(work: Callable[[], None], kill_after_s: float | None, most_requests: int) -> None:
        """Repeat a command until it succeeds; where an outage is for good, it is over when the command has failed."""
        has_failed = False
        for attempt in range(6):
            is_over = outage_s >= FOR_GOOD and has_failed
            server.ask(
                rates=rates, seed=chance.randrange(10**9), outage="" if is_over else outage,
                after=chance.randrange(1, most_requests), slow_s=15 * scale,
                outage_s=outage_s * scale if outage_s < FOR_GOOD else outage_s,
            )  # fmt: skip
            code = forked(work, log, kill_after_s if not attempt else None)
            if code == 0:
                return
            if code != -signal.SIGKILL:
                has_failed = True
                check_words(log, out, mode)
        raise SystemExit(f"FAILED: {mode}, seed {seed}: a command did not end: {log.read_text()}")

    server.ask(bucket=bucket)
    kill_after_s = chance.uniform(0.2, lasts_s) if chance.random() < 0.5 else None
    repeated(lambda: embed(images, out, "--scratch", str(folder / "tmp")), kill_after_s, 40)
    repeated(lambda: read(out, folder / "read.npz"), None, 20)
    server.ask()
    with np.load(folder / "read.npz") as result:
        for name in ("features", "paths", "status"):
            must(np.array_equal(result[name], expected[name]), f"{mode}, seed {seed}: {name} differ")
    stored = [name for name in server.ask(names=bucket) if not name.startswith("set/runs/")]
    shards = [f"set/shards/{shard:06d}.{kind}" for shard in range(IMAGES // SHARD_ROWS) for kind in ("h5", "json")]
    must(stored == ["set/dataset.json", *shards], f"{mode}, seed {seed}: objects {stored}")
    must(not list((folder / "tmp").glob("layertap-*")), f"{mode}, seed {seed}: scratch files are left")
    shutil.rmtree(folder)
    return mode


def main(count: int, seed: int, scale: float) -> None:
    """Do the runs, and print their modes."""
    server = Server()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_ACCESS_KEY_ID": "AKIATESTONLY",
        "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    import numpy as np
    import torch

    from extract import load_backbone
    from extract.store.places import objects
    from tests.conftest import make_picture

    torch.set_num_threads(1)
    load_backbone(SETTINGS["-b"], weights="random", device="cpu")
    for module in ("s3fs", "extract.extraction.shard_maker", "pipelines.embed.cluster.driver", "pipelines.embed.job"):
        importlib.import_module(module)  # once for all forked processes
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(server.close)
        base = Path(at_the_end.enter_context(tempfile.TemporaryDirectory()))
        images = base / "images"
        for i in range(IMAGES):
            path = images / "ab"[i % 2] / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            make_picture(i).save(path)
        log = base / "log"
        must(forked(lambda: embed(images, str(base / "here"), "--engine", "processes"), log) == 0, "no local run")
        must(forked(lambda: read(str(base / "here"), base / "here.npz"), log) == 0, "no local features")
        with np.load(base / "here.npz") as result:
            expected = dict(result)
        for name in SECONDS:
            setattr(objects, name, getattr(objects, name) * scale)
        server.ask(bucket="bucket-timed")
        start = time.monotonic()
        must(forked(lambda: embed(images, "s3://bucket-timed/set"), log) == 0, f"no run to be timed: {log.read_text()}")
        lasts_s = time.monotonic() - start
        modes = Counter[str]()
        for number in range(seed, seed + count):
            modes.update([run(number, server, images, base, expected, scale, lasts_s)])
            print(number, modes, flush=True)
        print(json.dumps(modes))


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("count", type=int, nargs="?", default=20)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--scale", type=float, default=0.05)
        given = parser.parse_args()
        main(given.count, given.seed, given.scale)
