"""Whether looking at a network, or an edit that changes nothing, changes its outputs, gradients or buffers by a bit.

    python -m benchmarks.census.unchanged [GLOB]    # a line for each of 40 networks, and the sums

Layers that a request is refused for are left out, counted, and the others are tried again.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.census.gradients import NoGradientError, agree, backward
from benchmarks.census.networks import Network, named, prepare
from benchmarks.census.values import digest, names_of, tensors_of
from extract import LayertapError, Taps

REQUESTS: dict[str, Callable[[Taps, list[str]], Taps]] = {
    "keep output and input": lambda taps, names: taps.keep(names).keep(names, "input"),
    "keep grad": lambda taps, names: taps.keep(names, "grad"),
    "keep grad_input": lambda taps, names: taps.keep(names, "grad_input"),
    "edit output": lambda taps, names: taps.edit(names, lambda h: h * 1),
    "edit input": lambda taps, names: taps.edit(names, lambda h: h, "input"),
}
# The smallest of many kinds.
NETWORKS = (
    "timm/coat_tiny", "timm/convnext_atto", "timm/crossvit_tiny_240", "timm/cs3darknet_focus_s", "timm/dla46x_c",
    "timm/edgenext_xx_small", "timm/efficientvit_b0", "timm/ese_vovnet19b_slim_dw", "timm/fastvit_t8",
    "timm/gcvit_xxtiny", "timm/ghostnet_050", "timm/levit_128s", "timm/mambaout_femto", "timm/mobilenetv3_small_100",
    "timm/mobilevit_xxs", "timm/pvt_v2_b0", "timm/regnety_002", "timm/repghostnet_050", "timm/resnet18",
    "timm/starnet_s050", "timm/swin_tiny_patch4_window7_224", "timm/tf_efficientnet_lite0",
    "timm/vit_tiny_patch16_224", "timm/xcit_nano_12_p16_224",
    "torchvision/convnext_tiny", "torchvision/densenet121", "torchvision/efficientnet_b0", "torchvision/googlenet",
    "torchvision/inception_v3", "torchvision/lraspp_mobilenet_v3_large", "torchvision/mnasnet0_5",
    "torchvision/mobilenet_v2", "torchvision/regnet_y_400mf", "torchvision/resnet50", "torchvision/swin_t",
    "torchvision/vgg16_bn", "transformers/MobileViTModel", "transformers/PvtV2Backbone",
    "transformers/SegformerModel", "transformers/SwiftFormerModel",
)  # fmt: skip
# A copy of an input or output sums the gradients of its readers in another order.
SUMMED_DIFFERENTLY = 1e-5  # relative to the largest gradient of the tensor
MOST_REFUSALS = 100  # of one request; each costs a forward


@dataclass
class Tally:
    """What became of the requests of one network, or of several.

    Attributes:
        layers: number of layers, times the number of requests.
        outcomes: (request, mode, outcome) -> number of runs, or of layers that were refused.
        reasons: of refusals, without names.
        wrong: what differs.
    """

    layers: int = 0
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """The number of layers and requests that were refused."""
        return sum(number for (_, _, outcome), number in self.outcomes.items() if outcome == "refused")

    def add(self, other: Tally) -> None:
        """Add the numbers of another network."""
        self.layers += other.layers
        self.outcomes += other.outcomes
        self.reasons += other.reasons
        self.wrong += other.wrong

    def line(self) -> str:
        """Return the numbers in one line."""
        sums: Counter[str] = Counter()
        for (_, _, outcome), number in self.outcomes.items():
            sums[outcome] += number
        share = f"{self.refused} of {self.layers} refused ({self.refused / max(1, self.layers):.2%})"
        return f"{share}, runs: {dict(sums)}"


def judge(network: Network) -> Tally:
    """Try all requests in a network with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge_model(*prepare(network))


def judge_model(model: nn.Module, pictures: Tensor) -> Tally:
    """Try all requests in a model that is in eval mode."""
    layers, tally = _layers_that_run(model, pictures), Tally()
    for mode, run in (("no_grad", _forward), ("grad", _backward)):
        try:
            plain = run(model, pictures, model)
        except NoGradientError:
            continue
        for name in REQUESTS:
            _try(name, mode, model, layers, partial(run, model, pictures), plain, tally)
    return tally


def _layers_that_run(model: nn.Module, pictures: Tensor) -> dict[str, nn.Module]:
    """Return name -> module, of those that are called: an edit of others is refused."""
    called: set[nn.Module] = set()
    modules = names_of(model)
    handles = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in modules]
    _forward(model, pictures, model)
    for handle in handles:
        handle.remove()
    return {name: module for module, names in modules.items() if module in called for name in names}


def _forward(model: nn.Module, pictures: Tensor, call: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    given = pictures.clone()
    with torch.no_grad():
        values = {f"output {path}": tensor for path, tensor in tensors_of(call(given))}
    return values | _buffers(model) | {"the pictures": given}


def _backward(model: nn.Module, pictures: Tensor, call: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    result = backward(model, pictures, call)
    values = {f"output {path}": tensor for path, tensor in result.output.items()}
    gradients = {f"gradient of {name or 'the pictures'}": tensor for name, tensor in result.gradients.items()}
    return values | _buffers(model) | gradients


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def _try(
    name: str,
    mode: str,
    model: nn.Module,
    layers: dict[str, nn.Module],
    run: Callable[[Callable[[Tensor], Any]], dict[str, Tensor]],
    plain: dict[str, Tensor],
    tally: Tally,
) -> None:
    wanted = dict(layers)
    tally.layers += len(wanted)
    for _ in range(MOST_REFUSALS):
        try:
            with REQUESTS[name](Taps(model), list(wanted)) as taps:
                values = run(taps)
        except LayertapError as error:
            layer = _layer_in(str(error), list(wanted))
            if layer is None:
                tally.wrong.append(f"{name}, {mode}: refused without the name of a layer: {error}")
                return
            tally.outcomes[name, mode, "refused"] += 1
            tally.reasons[re.sub(r"[\w.]*[.\d][\w.]*", "N", str(error).replace(layer, "N"))] += 1
            wanted = {other: module for other, module in wanted.items() if module is not layers[layer]}
            continue
        except Exception as error:
            tally.outcomes[name, mode, "different"] += 1
            tally.wrong.append(f"{name}, {mode}: {type(error).__name__}: {error}")
            return
        break
    else:
        tally.wrong.append(f"{name}, {mode}: refused for more than {MOST_REFUSALS} layers")
        return
    outcome, differing = _compared(values, plain)
    tally.outcomes[name, mode, outcome] += 1
    if outcome == "different":
        tally.wrong.append(f"{name}, {mode}: {len(differing)} values differ, such as {', '.join(differing[:3])}")


def _compared(values: dict[str, Tensor], plain: dict[str, Tensor]) -> tuple[str, list[str]]:
    """Return "equal", "rounded" (gradients that were summed in another order) or "different", and what differs."""
    differing = sorted(values.keys() ^ plain.keys())
    rounded: list[str] = []
    gradients = [tensor for name, tensor in plain.items() if name.startswith("gradient")]
    floor = 1e-6 * max((float(tensor.abs().nan_to_num(0, 0, 0).max()) for tensor in gradients), default=0.0)
    for name in values.keys() & plain.keys():
        if digest(values[name]) != digest(plain[name]):
            near = name.startswith("gradient") and agree(values[name], plain[name], SUMMED_DIFFERENTLY, floor)
            (rounded if near else differing).append(name)
    return ("different" if differing else "rounded" if rounded else "equal"), differing or rounded


def _layer_in(message: str, names: list[str]) -> str | None:
    """Return the layer that a message names, the longest of several."""
    known = [name for name in names if name and re.search(rf"(?<![\w.]){re.escape(name)}(?!\.?\w)", message)]
    if not known and "" in names and re.search(r"layer ''|the model itself|^@", message):
        return ""
    return max(known, key=len, default=None)


def main() -> None:
    """Run the command."""
    torch.set_num_threads(1)
    pattern, total = (sys.argv[1:] or ["*"])[0], Tally()
    for key in NETWORKS:
        if fnmatchcase(key, pattern):
            tally = judge(named(key))
            print(f"{key}: {tally.line()}", *tally.wrong, sep="\n    ", flush=True)
            total.add(tally)
    print(f"all: {total.line()}")
    for (name, mode, outcome), number in sorted(total.outcomes.items()):
        print(f"    {name}, {mode}, {outcome}: {number}")
    for reason, number in total.reasons.most_common(10):
        print(f"    refused {number} times: {reason}")


if __name__ == "__main__":
    main()
