"""The bootstrap over images and subjects of `compare_rdms` over rsatoolbox's `eval_dual_bootstrap`, in turn.

    python -m benchmarks.rsa_speed [--images 90] [--draws 20] [--rounds 3]

Five models and four subjects are made of one truth and noise. Both ways run in this process on the same arrays.
rsatoolbox resamples the noise ceilings too, which `compare_rdms` does not, and its whitened comparison fails for
samples of 100 or more images. Prints the seconds for a thousand samples, the least of the rounds, and their ratio.
Needs `pip install rsatoolbox`.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings

import numpy as np

from benchmarks.common import parser
from extract.analysis.rsa import COMPARISONS, compare_rdms

METHODS = dict(zip(COMPARISONS, ("spearman", "tau-a", "cosine", "cosine_cov"), strict=True))


def main():
    options = parser(__doc__)
    options.add_argument("--images", type=int, default=90)
    options.add_argument("--draws", type=int, default=20)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    from rsatoolbox.inference import eval_dual_bootstrap
    from rsatoolbox.model import ModelFixed
    from rsatoolbox.rdm import RDMs

    generator = np.random.default_rng(0)
    truth = generator.random(given.images * (given.images - 1) // 2)
    data, models = (truth + generator.normal(0, 0.5, (count, len(truth))) for count in (4, 5))
    fixed = [ModelFixed(str(i), RDMs(model[None])) for i, model in enumerate(models)]
    for by, method in METHODS.items():
        ways = {
            "ours": lambda by=by: compare_rdms(models, data, by=by, draws=given.draws),
            "rsatoolbox": lambda method=method: eval_dual_bootstrap(fixed, RDMs(data), method=method, N=given.draws),
        }
        seconds = {name: [] for name in ways}
        for _ in range(given.rounds):
            for name, way in ways.items():
                with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    start = time.perf_counter()
                    way()
                    seconds[name].append((time.perf_counter() - start) * 1000 / given.draws)
        ours, theirs = min(seconds["ours"]), min(seconds["rsatoolbox"])
        print(f"{given.images} images, {by}: {ours:.1f} s, rsatoolbox {theirs:.1f} s, ratio {theirs / ours:.1f}")


if __name__ == "__main__":
    main()
