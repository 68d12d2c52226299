"""One forward on all cores against a forward on each group of cores, at the same time. Prints Markdown.

    python tests/benchmarks/core_groups.py IMAGES [-b torchvision/resnet50]... [--groups 1 2] [--rounds 3]

Each group is a process that is pinned to its cores (as by `taskset`) and computes batches of pictures in memory for
some seconds, at the same time as the others. The rates of all groups are added. Numbers of groups run in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

BACKBONES = ("bundled/efficientnet_lite0", "torchvision/resnet18", "torchvision/resnet50")
ENGINES = ("eager", "openvino")
BATCH = 64
SECONDS = 6.0


def group(cores: list[int], images: Path, spec: str, engine: str, ready: Any, rates: Any) -> None:
    """Compute batches on some cores, and put their rate into a queue."""
    os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    from extract import defaults
    from extract.compute.backbone import load_backbone
    from extract.compute.backends import open_forward
    from extract.compute.feature_choice import choose_features
    from extract.extraction.validation import decoded_in
    from extract.images import list_images
    from extract.system.torch_state import evaluating, full_float32

    backbone = load_backbone(spec, weights=None if spec.startswith("bundled/") else "random", device="cpu")
    with evaluating(backbone.model), full_float32():
        choice = choose_features(backbone, defaults.LAYERS)
    (pictures,) = decoded_in(list_images(images), [backbone.preprocessing], defaults.MAX_PIXELS, BATCH)
    with open_forward(backbone, choice, "float32", "float32", engine, BATCH) as forward:
        forward(pictures)
        ready.wait()
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            forward(pictures)
            done += BATCH
        rates.put(done / (time.perf_counter() - start))


def rate(groups: list[list[int]], images: Path, spec: str, engine: str) -> float:
    """Return the images per second of all groups together."""
    context = multiprocessing.get_context("spawn")
    ready, rates = context.Barrier(len(groups)), context.Queue()
    processes = [context.Process(target=group, args=(cores, images, spec, engine, ready, rates)) for cores in groups]
    for process in processes:
        process.start()
    total = sum(rates.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def main() -> None:
    """Read the options, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("-b", "--backbone", action="append", help=f"default: {', '.join(BACKBONES)}")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--groups", type=int, nargs="+", default=[1, len(cores)])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if any(len(cores) % count for count in options.groups):
        parser.error(f"the {len(cores)} cores cannot be divided into groups of equal size")
    print(f"| backbone | engine | {' | '.join(f'groups: {count}' for count in options.groups)} | ratio |")
    print(f"|---|---|{'---|' * len(options.groups)}---|")
    for spec in options.backbone or BACKBONES:
        for engine in ENGINES:
            rates = defaultdict(list)
            for _ in range(options.rounds):
                for count in options.groups:
                    size = len(cores) // count
                    parts = [cores[start : start + size] for start in range(0, len(cores), size)]
                    rates[count].append(rate(parts, options.images, spec, engine))
            first, last = options.groups[0], options.groups[-1]
            ratio = statistics.median(b / a for a, b in zip(rates[first], rates[last], strict=True))
            cells = " | ".join(f"{statistics.median(rates[count]):.1f}" for count in options.groups)
            print(f"| `{spec}` | {engine} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
