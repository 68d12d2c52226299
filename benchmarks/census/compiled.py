"""Whether compiled Taps record what eager ones do, in 40 networks with random weights.

    python -m benchmarks.census.compiled [GLOB] [--backend aot_eager] [--layers '**']

A line for each network: whether all values are within 1e-5 of the largest of their tensor, how many were compared, the
largest deviation; or why it was refused. `aot_eager` runs the graph that backends compile, without a C++ compiler.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from benchmarks.census.networks import named, prepare
from benchmarks.census.unchanged import NETWORKS
from benchmarks.census.values import tensors_of
from benchmarks.common import parser
from extract import LayertapError, Taps
from extract.compute.agreement import FULL_PRECISION, deviations

AMPLIFIED = 1e-4  # what networks with random weights make of rounding


@dataclass
class Judgement:
    """What became of one network.

    Attributes:
        outcome: "equal", "rounded" (up to `AMPLIFIED`), "different" or "refused".
        values: number of values that were compared.
        worst: their largest deviation, relative to the largest value of each.
        text: why it was refused, or what differs.
    """

    outcome: str
    values: int = 0
    worst: float = 0.0
    text: str = ""


def judge(model: nn.Module, pictures: Tensor, backend: str, layers: str = "**") -> Judgement:
    """Compare compiled with eager Taps, on two batches."""
    with torch.no_grad():
        try:
            with Taps(model, layers).compile(backend=backend) as taps:
                found = [(taps(given.clone()), taps.record) for given in (pictures, pictures.flip(0))]
        except LayertapError as error:
            return Judgement("refused", text=error.message)
        with Taps(model, layers) as taps:
            expected = [(taps(given.clone()), taps.record) for given in (pictures, pictures.flip(0))]
    values, apart = 0, {}
    for (output, record), (plain, eager) in zip(found, expected, strict=True):
        if list(record) != list(eager) or record.missing != eager.missing:
            return Judgement("different", text=f"names: {sorted(set(record) ^ set(eager))[:5]}")
        pairs = {name: (record[name], eager[name]) for name in eager} | _outputs(output, plain)
        values += len(pairs)
        apart |= {name: max(apart.get(name, 0.0), _deviation(*pair)) for name, pair in pairs.items()}
    worst = max(apart, key=lambda name: apart[name])
    differs = [name for name in apart if not apart[name] <= FULL_PRECISION]
    outcome = "equal" if not differs else "rounded" if apart[worst] <= AMPLIFIED else "different"
    return Judgement(outcome, values, apart[worst], ", ".join(differs[:5]))


def _outputs(output: object, plain: object) -> dict[str, tuple[Tensor, Tensor]]:
    paths = dict(tensors_of(plain))
    found = dict(tensors_of(output))
    assert list(found) == list(paths), f"{list(found)} in place of {list(paths)}"
    return {f"the output {path}": (found[path], paths[path]) for path in paths}


def _deviation(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    return float(deviations(value.numpy()[None], expected.numpy()[None])[0])


def main() -> None:
    """Run the command."""
    options = parser(__doc__)
    options.add_argument("glob", nargs="?", default="*")
    options.add_argument("--backend", default="aot_eager")
    options.add_argument("--layers", default="**")
    args = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes: Counter[str] = Counter()
    values = 0
    for key in NETWORKS:
        if fnmatchcase(key, args.glob):
            started = time.perf_counter()
            torch.compiler.reset()
            judged = judge(*prepare(named(key)), args.backend, args.layers)
            outcomes[judged.outcome] += 1
            values += judged.values
            seconds = time.perf_counter() - started
            print(f"{key}: {judged.outcome}, {judged.values} values, {judged.worst:.1e}, {seconds:.0f} s", judged.text)
    print(f"all: {dict(outcomes)}, {values:,} values")


if __name__ == "__main__":
    main()
