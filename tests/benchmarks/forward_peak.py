"""Forwards against the peak of matrix products on this machine: what is left to gain for a backbone? Markdown.

    python tests/benchmarks/forward_peak.py IMAGES [-b torchvision/resnet50]... [--rounds 3]

The peak of a precision is the highest rate of square matrix products of several sizes on all cores: as `torch.mm`, and
as convolutions of 1 x 1, for which PyTorch has another library (oneDNN in place of MKL). The operations of a forward
are those of its matrix products and convolutions, counted by PyTorch (`torch.utils.flop_counter`); a multiplication
and an addition are two operations. Peak and forwards are measured in turn, round after round, and the best of all
rounds is taken for each: a neighbour can only slow them down.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from extract import defaults
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.feature_choice import choose_features
from extract.extraction.tuning import compute_options, forward_rates
from extract.extraction.validation import decoded_in
from extract.images import list_images
from extract.system.torch_state import evaluating, full_float32

BACKBONES = ("bundled/efficientnet_lite0", "torchvision/resnet18", "torchvision/resnet50")
SIZES = (512, 1024, 2048, 4096)
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PEAK_S = 1.0  # of each size and precision in a round


def peak(dtype: torch.dtype) -> float:
    """Return the highest rate of matrix products, in operations per second."""
    rates = []
    for size in SIZES:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        pictures = a.t().reshape(1, size, size // 32, 32).contiguous(memory_format=torch.channels_last)
        for product in (
            functools.partial(torch.mm, a, b, out=torch.empty(size, size, dtype=dtype)),
            functools.partial(functional.conv2d, pictures, b.reshape(size, size, 1, 1)),
        ):
            product()
            end = time.perf_counter() + PEAK_S
            while (start := time.perf_counter()) < end:
                product()
                rates.append(2 * size**3 / (time.perf_counter() - start))
    return max(rates)


def operations(backbone: Backbone) -> int:
    """Return the operations of the matrix products and convolutions of a forward of one image."""
    picture = torch.zeros(1, *backbone.preprocessing.crop_px, 3, dtype=torch.uint8)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        backbone.model(backbone.preprocessing.to_input(picture))
    return int(counter.get_total_flops())


def main() -> None:
    """Read the options, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("-b", "--backbone", action="append", help=f"default: {', '.join(BACKBONES)}")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    images = list_images(options.images)
    peaks: dict[str, float] = defaultdict(float)
    rates: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[str, int] = {}
    for number in range(options.rounds):
        for precision, dtype in PRECISIONS.items():
            with torch.inference_mode():
                peaks[precision] = max(peaks[precision], peak(dtype))
        for spec in options.backbone or BACKBONES:
            backbone = load_backbone(spec, weights=None if spec.startswith("bundled/") else "random", device="cpu")
            with evaluating(backbone.model), full_float32():
                counts[spec] = operations(backbone)
                choice = choose_features(backbone, defaults.LAYERS)
            (pictures,) = decoded_in(images, [backbone.preprocessing], defaults.MAX_PIXELS)
            options = compute_options(backbone.device)
            for measured in forward_rates(backbone, choice, pictures, options)[1]:
                key = spec, str(measured.way)
                rates[key] = max(rates[key], measured.images_per_s)
            print(f"round {number + 1}: {spec}", file=sys.stderr, flush=True)
    tops = ", ".join(f"{precision} {rate / 1e9:.0f}" for precision, rate in peaks.items())
    print(f"Matrix products, GFLOP/s: {tops}; {defaults.CORES} cores, torch {torch.__version__}, {date.today()}.\n")
    print("| backbone | GFLOP an image | forward | images/s | GFLOP/s | of the peak |\n|---|---|---|---|---|---|")
    for (spec, way), rate in rates.items():
        speed = rate * counts[spec]
        share = speed / peaks[way.partition(",")[0]]
        print(f"| `{spec}` | {counts[spec] / 1e9:.2f} | {way} | {rate:.1f} | {speed / 1e9:.0f} | {share:.2f} |")


if __name__ == "__main__":
    main()
