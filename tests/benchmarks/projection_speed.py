"""What a random projection costs, as ratios in one run: python tests/benchmarks/projection_speed.py [ROUNDS] [BATCH]

1. All 16 blocks of ResNet-50: `srp4096` of the whole activation over `mean_map`, eager and compiled by OpenVINO.
2. 802,816 values to 4,096 on one core: milliseconds an image, over the same product by `torch.sparse` (CSR).

Also printed: bytes of all matrices, and the seconds in which they are drawn. Each round times both sides one after the
other, in an order that alternates; medians over rounds are printed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from extract.compute.backbone import load_backbone
from extract.compute.backends import open_forward
from extract.compute.feature_choice import choose_features
from extract.compute.sparse_projection import SparseProjection, entries
from extract.system.torch_state import evaluating, full_float32


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call, and seconds of all cores in it."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int, images: int) -> str:
    """Return the median ratios of the time and of the CPU time, and the milliseconds of an image."""
    ours(), theirs()
    pairs = []
    for number in range(rounds):
        if number % 2:
            pairs.append((timed(ours), timed(theirs)))
        else:
            before = timed(theirs)
            pairs.append((timed(ours), before))
    texts = []
    for kind, name in enumerate(("time", "CPU time")):
        ratio = statistics.median(our[kind] / their[kind] for our, their in pairs)
        our_ms, their_ms = (statistics.median(pair[side][kind] for pair in pairs) / images * 1e3 for side in (0, 1))
        texts.append(f"{name} {ratio:.2f} ({our_ms:.1f} and {their_ms:.1f} ms an image)")
    return ", ".join(texts)


def blocks_of_resnet50(rounds: int, batch: int) -> None:
    backbone = load_backbone("torchvision/resnet50", weights="random", device="cpu")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, *backbone.preprocessing.crop_px, 3), dtype=torch.uint8, generator=generator)
    with evaluating(backbone.model), full_float32():
        projected = choose_features(backbone, ["layer?.*:srp4096"])
        means = choose_features(backbone, ["layer?.*:mean_map"])
    matrices = {feature.poolings.steps[0].function.keywords["projection"] for feature in projected.features}
    size = sum(4 * len(entries(m.inputs, m.outputs, m.seed)[0]) for m in matrices)
    drawn_s = sum(timed(partial(SparseProjection(m.inputs, m.outputs, 1)._drawn, 1))[0] for m in matrices)
    print(f"{len(projected.features)} layers, {len(matrices)} matrices: {size / 1e6:.0f} MB, drawn in {drawn_s:.1f} s")
    for engine in ("eager", "openvino"):
        with (
            open_forward(backbone, projected, "float32", "float32", engine, batch) as ours,
            open_forward(backbone, means, "float32", "float32", engine, batch) as theirs,
        ):
            print(f"{engine}: {compare(lambda: ours(images), lambda: theirs(images), rounds, batch)}", flush=True)


def one_matrix(rounds: int, batch: int) -> None:
    projection = SparseProjection(802_816, 4096, 0)
    rows, columns, positive = entries(802_816, 4096, 0)
    starts = torch.searchsorted(torch.from_numpy(rows), torch.arange(4097))
    values = torch.where(torch.from_numpy(positive), projection._scale, -projection._scale).float()
    plain = torch.sparse_csr_tensor(starts, torch.from_numpy(columns), values, (4096, 802_816), check_invariants=True)
    x = torch.randn(batch, 802_816, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print("one core, 802,816 to 4,096:", compare(lambda: projection(x), lambda: plain @ x.t(), rounds, batch))
    torch.set_num_threads(threads)


if __name__ == "__main__":
    rounds, batch = (int(value) for value in [*sys.argv[1:], *["5", "64"][len(sys.argv) - 1 :]])
    blocks_of_resnet50(rounds, batch)
    one_matrix(rounds, batch)
