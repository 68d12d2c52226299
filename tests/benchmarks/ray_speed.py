"""What Ray costs: shards of no work; and two workers of a core each against one.

    python -m tests.benchmarks.ray_speed IMAGES [--images 2400] [--rounds 3]

Each worker has a node of its own, pinned to one core. IMAGES is repeated, by links, in twenty shards of so many images.
One process with both cores runs in turn with them, for comparison; nothing is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from pipelines.embed.cluster import ray_tasks
from pipelines.embed.cluster.driver import ShardLoop
from pipelines.embed.cluster.ray_tasks import ray_tasks_of
from pipelines.embed.config import EmbedConfig
from tests.pipelines.cluster.made_up import MadeUp

SHARDS = 20


@contextlib.contextmanager
def pinned_cluster(cores: list[int]) -> Iterator[str]:
    """A Ray cluster with a node for each core, pinned to it; its address."""
    from ray.cluster_utils import Cluster

    all_cores = os.sched_getaffinity(0)
    size = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            cluster.add_node(num_cpus=1, **size)
            os.sched_setaffinity(0, all_cores)
        yield cluster.address
    finally:
        os.sched_setaffinity(0, all_cores)
        cluster.shutdown()


def overhead_ms(address: str, shards: int, out: Path) -> float:
    """Of a shard that takes no time."""
    config = EmbedConfig(images="x", engine="ray", address=address, device="cpu", cpus_per_worker=1)
    with mock.patch.object(ray_tasks, "start_of_task", return_value=MadeUp(out)), ray_tasks_of(config) as engine:
        loop = ShardLoop(engine)
        assert loop.join()
        begin = time.perf_counter()
        loop.build(range(shards))
        assert loop.done == shards
        return 1000 * (time.perf_counter() - begin) / shards


def rate(images: Path, out: Path, backbone: str, *words: str) -> float:
    """Images a second of `layertap embed`, from its first to its last."""
    count = len(list(images.rglob("*.*")))
    command = [
        sys.executable, "-m", "layertap", "embed", str(images), "-o", str(out), "-b", backbone, "--json",
        "--compile", "off", "--shard-rows", str(-(-count // SHARDS)), "--device", "cpu", *words,
    ]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: float = json.loads(done.stdout)["images_per_s"]
    return found


def repeated(images: Path, count: int, to: Path) -> Path:
    """A folder of links to these images, again and again."""
    originals = sorted(path for path in images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    to.mkdir()
    for number, path in enumerate(itertools.islice(itertools.cycle(originals), count)):
        (to / f"{number:06d}{path.suffix}").symlink_to(path.resolve())
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--images", type=int, default=2400, dest="count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-b", "--backbone", default="bundled/efficientnet_lite0")
    given = parser.parse_args()
    one, *others = sorted(os.sched_getaffinity(0))
    found: dict[str, list[float]] = {"one process, both cores": [], "one worker, one core": [], "two, a core each": []}
    with tempfile.TemporaryDirectory() as work:
        images, number = repeated(given.images, given.count, Path(work) / "images"), itertools.count()
        for workers in (1, 2):
            with pinned_cluster([one, *others][:workers]) as address:
                out = Path(work) / str(next(number))
                out.mkdir()
                print(f"{workers} workers: {overhead_ms(address, 1000, out):.2f} ms a shard of no work", flush=True)
        for _ in range(given.rounds):
            for rates, cores in zip(found.values(), ([], [one], [one, others[0]]), strict=True):
                with contextlib.ExitStack() as at_the_end:
                    words = []
                    if cores:
                        address = at_the_end.enter_context(pinned_cluster(cores))
                        words = ["--engine", "ray", "--address", address, "--cpus-per-worker", "1"]
                    out = Path(work) / str(next(number))
                    rates.append(rate(images, out, given.backbone, *words))
            print({name: [round(one, 1) for one in of] for name, of in found.items()}, flush=True)
    medians = {name: statistics.median(of) for name, of in found.items()}
    for name, of in medians.items():
        print(f"{name}: {of:.1f} images/s, {of / medians['one worker, one core']:.2f} of one worker")


if __name__ == "__main__":
    main()
