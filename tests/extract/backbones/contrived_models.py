"""Models and transforms of a user that have a fault, each in another place; and what a refusal of each must say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
Factory = Callable[[], Any]
NO_VECTOR = "not one vector for each picture"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)
        self.forwards = 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        return self.conv(x).mean((2, 3))


def _fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("no such luck")


def _none(*arguments: Any, **named: Any) -> None:
    return None


def _net(**methods: Any) -> Factory:
    """A factory of a network with methods of its own."""
    return lambda: (type("Own", (Net,), methods)(), transform)


def _output(change: Callable[[Tensor], Any]) -> Factory:
    return _net(forward=lambda self, x: change(Net.forward(self, x)))


def _pixels(change: Callable[[Tensor], Any]) -> Factory:
    return lambda: (Net(), lambda picture: change(transform(picture)))


def _model(make: Callable[[], Any]) -> Factory:
    return lambda: (make(), transform)


def _with_buffer(value: Tensor) -> Net:
    net = Net()
    net.register_buffer("extra", value)
    return net


def _on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def _partly_on_meta() -> Net:
    model = Net()
    model.unused = nn.Linear(2, 2, device="meta")
    return model


def _lazy(run_once: bool = False) -> nn.Module:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if run_once:
        model(torch.zeros(1, 3, 32, 32))
    return model


def _exported() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).eval()
    return torch.export.export(model, (torch.zeros(2, 3, 32, 32),))


def _from(number: int, act: Callable[[], Any]) -> Factory:
    """A network that does something else from a forward on; loading takes one, and the trial five."""

    def forward(self: Any, x: Tensor) -> Any:
        y = Net.forward(self, x)
        return act() if self.forwards >= number else y

    return _net(forward=forward)


def calls_itself() -> Any:
    return calls_itself()


def needs_an_argument(width: int) -> Any:
    return Net(), transform


class OwnError(Exception):
    pass


def _raise_own() -> Any:
    raise OwnError("enough")


def _raise_exit() -> Any:
    raise SystemExit


class _ExitsAtRealPictures:
    def __call__(self, picture: Image.Image) -> Tensor:
        if np.array(picture).std((0, 1)).max() < 20:  # not the noise of the trial
            sys.exit(3)
        pixels: Tensor = transform(picture)
        return pixels


def _flat() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())


LINE = r" \(.*contrived_models.py, line "
META = "is torch.strided on meta"
NOT_DENSE = "a tensor that is not dense or has no values"
PAIR = r"expected \(model, transform\)"

# Name -> factory, and what the refusal says.
FAULTS: dict[str, tuple[Any, str]] = {
    # Layers and weights
    "lazy": (_model(_lazy), "has no shape yet: lazy layers get theirs from the first batch; run one batch through"),
    "on_meta": (_model(_on_meta), f"conv.bias of the model {META}; expected a dense tensor with values"),
    "partly_on_meta": (_model(_partly_on_meta), f"unused.bias of the model {META}"),
    "sparse_weights": (_model(lambda: _with_buffer(torch.eye(3).to_sparse())), "extra of the model is torch.sparse_co"),
    "extra_state": (_net(get_extra_state=lambda self: {"a": 1}, set_extra_state=_none), "_extra_state of .* is dict"),
    "state_dict_fails": (_net(state_dict=_fail), "cannot be loaded: RuntimeError: no such luck" + LINE),
    "no_state_dict": (_net(state_dict=_none), "cannot be loaded: AttributeError"),
    "keys_of_two_types": (
        _net(state_dict=lambda self: {1: torch.zeros(2), "a": torch.zeros(2)}), "cannot be loaded: TypeError",
    ),
    "half": (_model(lambda: Net().half()), "the model failed on a zero input"),
    # Methods of the module
    "eval_returns_none": (
        _net(eval=_none), r"eval\(\) of the model of .*:eval_returns_none\(\) left the model in training mode",
    ),
    "eval_fails": (_net(eval=_fail), "cannot be loaded: RuntimeError: no such luck" + LINE),
    "train_returns_none": (_net(train=_none), "cannot be loaded: AttributeError|left the model in training mode"),
    "names_fail": (_net(named_modules=_fail), "cannot be loaded: RuntimeError: no such luck"),
    "no_forward": (_model(nn.Module), 'missing the required "forward" function'),
    "exported": (_model(lambda: _exported().module()), "cannot be loaded: NotImplementedError: "),
    "scripted": (
        _model(lambda: torch.jit.script(_flat())),
        "returned a scripted or traced model, whose code ignores hooks; return the Python module",
    ),
    "exported_program": (_model(_exported), rf"returned \(ExportedProgram, Compose\); {PAIR}"),
    # Outputs
    "output_none": (_output(_none), f"its output is NoneType, {NO_VECTOR}"),
    "output_empty": (_output(lambda y: y[:, :0]), rf"its output is \(2, 0\), {NO_VECTOR}"),
    "output_one_number": (_output(lambda y: y.mean()), rf"its output is \(\), {NO_VECTOR}"),
    "output_sparse": (_output(lambda y: y.to_sparse()), "its output is not a dense tensor with values"),
    "output_meta": (_output(lambda y: y.to("meta")), "its output is not a dense tensor with values"),
    "output_fails": (_output(_fail), "the model failed on a zero input .*: RuntimeError: no such luck"),
    "output_integers": (_output(lambda y: y.long()), "its output is torch.int64, not floating point"),
    "fails_at_the_second_forward": (_from(2, _fail), "RuntimeError: no such luck" + LINE),
    "fails_in_the_first_batch": (_from(7, _fail), "RuntimeError: no such luck" + LINE),
    "reads_a_file_in_the_first_batch": (
        _from(7, lambda: Path("no-such-file").read_text()), "FileNotFoundError: .*no-such-file'" + LINE,
    ),
    "needs_batches": (
        _net(forward=lambda self, x: _fail() if len(x) == 1 else Net.forward(self, x)),
        "RuntimeError: no such luck" + LINE,
    ),
    # What a factory takes and returns
    "a_class": (lambda: (Net, transform), rf"returned \(the class Net, Compose\); {PAIR}"),
    "a_class_of_a_transform": (lambda: (Net(), transforms.ToTensor), "failed on an RGB picture: TypeError"),
    "factory_fails": (_fail, r"contrived_models.py:factory_fails\(\) failed: RuntimeError: no such luck"),
    "needs_an_argument": (needs_an_argument, "missing 1 required positional argument: 'width'"),
    "returns_no_pair": (_flat, rf"returned Sequential; {PAIR}"),
    "returns_nothing": (_none, f"returned NoneType; {PAIR}"),
    "returns_in_the_other_order": (lambda: (transform, Net()), r"returned \(Compose, Net\); expected"),
    "returns_no_transform": (lambda: (Net(), None), r"returned \(Net, NoneType\); expected"),
    "calls_itself": (calls_itself, "RecursionError"),
    "not_callable": (3, "factory 'not_callable' not found"),
    # Transforms
    "pixels_none": (_pixels(_none), "maps an RGB picture to NoneType"),
    "pixels_of_a_picture": (
        lambda: (Net(), lambda picture: picture.resize((32, 32))), "maps an RGB picture to Image",
    ),
    "pixels_uint8": (_pixels(lambda x: (x * 255).byte()), "maps an RGB picture to torch.uint8"),
    "pixels_of_a_batch": (_pixels(lambda x: x[None]), r"maps an RGB picture to torch.float32 \(1, 3, 32, 32\)"),
    "pixels_grey": (_pixels(lambda x: x[:1]), r"maps an RGB picture to torch.float32 \(1, 32, 32\)"),
    "pixels_empty": (_pixels(lambda x: x[:, :0]), "the model failed on a zero input"),
    "pixels_meta": (_pixels(lambda x: x.to("meta")), f"maps an RGB picture to {NOT_DENSE}"),
    "pixels_sparse": (_pixels(lambda x: x.to_sparse()), f"maps an RGB picture to {NOT_DENSE}"),
    "transform_fails": (_pixels(_fail), "failed on an RGB picture: RuntimeError: no such luck"),
    "transform_takes_nothing": (lambda: (Net(), lambda: None), "failed on an RGB picture: TypeError"),
}  # fmt: skip

# What ends the program, and how it is told.
EXITS: dict[str, tuple[Factory, str]] = {
    "exits": (lambda: sys.exit(0), r"sys.exit\(0\)"),
    "exits_by_exit": (_raise_exit, r"sys.exit\(\)"),
    "exits_in_forward": (_output(lambda y: sys.exit(0)), r"sys.exit\(0\)"),
    "exits_in_the_first_batch": (_from(7, lambda: sys.exit("done")), r"sys.exit\('done'\)"),
    "exits_in_the_transform": (lambda: (Net(), lambda picture: sys.exit(0)), r"sys.exit\(0\)"),
    "exits_in_the_transform_of_a_picture": (lambda: (Net(), _ExitsAtRealPictures()), r"sys.exit\(3\)"),
}

# What only looks like a fault.
WORKING: dict[str, Factory] = {
    "lazy_but_run_once": _model(lambda: _lazy(run_once=True)),
    "eval_returns_none_but_works": _net(eval=lambda self: _none(nn.Module.eval(self))),
    "to_returns_none": _net(to=_none),
    "conjugated_weights": _model(lambda: _with_buffer(torch.eye(3).to(torch.complex64).conj())),
    "pixels_with_a_graph": _pixels(lambda x: x * nn.Parameter(torch.full((3, 1, 1), 2.0))),
}

raises_its_own_in_the_first_batch = _from(7, _raise_own)
globals().update({name: made[0] for name, made in (FAULTS | EXITS).items()} | WORKING)
