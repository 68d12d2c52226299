"""Factories of models and transforms that have a fault, each in another place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
Pair = tuple[Any, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)
        self.forwards = 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        return self.conv(x).mean((2, 3))


def _net_with(**methods: Any) -> Net:
    made: Net = type("Own", (Net,), methods)()
    return made


def _net_with_output(change: Callable[[Tensor], Any]) -> Net:
    return _net_with(forward=lambda self, x: change(Net.forward(self, x)))


def _net_with_buffer(value: Tensor) -> Net:
    net = Net()
    net.register_buffer("extra", value)
    return net


def _fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("no such luck")


def _none(*arguments: Any, **named: Any) -> None:
    return None


# Layers and weights


def lazy() -> Pair:
    return nn.Sequential(nn.LazyConv2d(8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), transform


def lazy_but_run_once() -> Pair:
    model = lazy()[0]
    model(torch.zeros(1, 3, 32, 32))
    return model, transform


def lazy_statistics() -> Pair:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.LazyBatchNorm2d(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), transform


def on_meta() -> Pair:
    with torch.device("meta"):
        return Net(), transform


def partly_on_meta() -> Pair:
    model = Net()
    model.unused = nn.Linear(2, 2, device="meta")
    return model, transform


def sparse_weights() -> Pair:
    return _net_with_buffer(torch.eye(3).to_sparse()), transform


def conjugated_weights() -> Pair:
    return _net_with_buffer(torch.eye(3).to(torch.complex64).conj()), transform


def extra_state() -> Pair:
    return _net_with(get_extra_state=lambda self: {"a": 1}, set_extra_state=_none), transform


def state_dict_fails() -> Pair:
    return _net_with(state_dict=_fail), transform


def no_state_dict() -> Pair:
    return _net_with(state_dict=_none), transform


def keys_of_two_types() -> Pair:
    return _net_with(state_dict=lambda self: {1: torch.zeros(2), "a": torch.zeros(2)}), transform


def half() -> Pair:
    return Net().half(), transform


# Methods of the module


def eval_returns_none() -> Pair:
    return _net_with(eval=_none), transform


def eval_returns_none_but_works() -> Pair:
    return _net_with(eval=lambda self: _none(nn.Module.eval(self))), transform


def eval_fails() -> Pair:
    return _net_with(eval=_fail), transform


def train_returns_none() -> Pair:
    return _net_with(train=_none), transform


def train_without_mode() -> Pair:
    return _net_with(train=lambda self: self), transform


def to_returns_none() -> Pair:
    return _net_with(to=_none), transform


def names_fail() -> Pair:
    return _net_with(named_modules=_fail), transform


def no_names() -> Pair:
    return _net_with(named_modules=_none), transform


def no_forward() -> Pair:
    return nn.Module(), transform


def scripted() -> Pair:
    return torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())), transform


def traced() -> Pair:
    return torch.jit.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()), torch.zeros(1, 3, 32, 32)), transform


def exported() -> Pair:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).eval()
    return torch.export.export(model, (torch.zeros(2, 3, 32, 32),)).module(), transform


def exported_program() -> Pair:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).eval()
    return torch.export.export(model, (torch.zeros(2, 3, 32, 32),)), transform


# Outputs


def output_none() -> Pair:
    return _net_with_output(_none), transform


def output_text() -> Pair:
    return _net_with_output(lambda y: "text"), transform


def output_empty_list() -> Pair:
    return _net_with_output(lambda y: []), transform


def output_numpy() -> Pair:
    return _net_with_output(lambda y: y.numpy()), transform


def output_generator() -> Pair:
    return _net_with_output(lambda y: (value for value in y)), transform


def output_sparse() -> Pair:
    return _net_with_output(lambda y: y.to_sparse()), transform


def output_nested() -> Pair:
    return _net_with_output(lambda y: torch.nested.nested_tensor(list(y))), transform


def output_meta() -> Pair:
    return _net_with_output(lambda y: y.to("meta")), transform


def output_integers() -> Pair:
    return _net_with_output(lambda y: y.long()), transform


def output_complex() -> Pair:
    return _net_with_output(lambda y: y.to(torch.complex64)), transform


def output_empty() -> Pair:
    return _net_with_output(lambda y: y[:, :0]), transform


def output_one_number() -> Pair:
    return _net_with_output(lambda y: y.mean()), transform


def output_fails() -> Pair:
    return _net_with_output(_fail), transform


class _FailsFrom(Net):
    def __init__(self, number: int, fail: Callable[[], Any] = _fail):
        super().__init__()
        self.number, self.fail = number, fail

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return self.fail() if self.forwards >= self.number else y


def fails_at_the_second_forward() -> Pair:
    return _FailsFrom(2), transform


def fails_in_the_first_batch() -> Pair:
    return _FailsFrom(7), transform


def reads_a_file_in_the_first_batch() -> Pair:
    return _FailsFrom(7, lambda: open("no-such-file")), transform  # noqa: PTH123


def needs_batches() -> Pair:
    return _net_with(forward=lambda self, x: _fail() if len(x) == 1 else Net.forward(self, x)), transform


# What a factory takes and returns


def a_class() -> Pair:
    return Net, transform


def a_class_of_a_transform() -> Pair:
    return Net(), transforms.ToTensor


def needs_an_argument(width: int) -> Pair:
    return Net(), transform


def returns_nothing() -> None:
    return None


def returns_three() -> Any:
    return Net(), transform, 3


def returns_a_list() -> Any:
    return [Net(), transform]


def returns_in_the_other_order() -> Pair:
    return transform, Net()


def returns_no_transform() -> Pair:
    return Net(), None


async def a_coroutine() -> Pair:
    return Net(), transform


def calls_itself() -> Pair:
    return calls_itself()


not_callable = 3


# Transforms


def _with_pixels(change: Callable[[Tensor], Any]) -> Pair:
    return Net(), lambda picture: change(transform(picture))


def pixels_numpy() -> Pair:
    return _with_pixels(lambda x: x.numpy())


def pixels_none() -> Pair:
    return _with_pixels(_none)


def pixels_of_a_picture() -> Pair:
    return Net(), lambda picture: picture.resize((32, 32))


def pixels_float64() -> Pair:
    return _with_pixels(lambda x: x.double())


def pixels_uint8() -> Pair:
    return _with_pixels(lambda x: (x * 255).byte())


def pixels_of_a_batch() -> Pair:
    return _with_pixels(lambda x: x[None])


def pixels_grey() -> Pair:
    return _with_pixels(lambda x: x[:1])


def pixels_empty() -> Pair:
    return _with_pixels(lambda x: x[:, :0])


def pixels_meta() -> Pair:
    return _with_pixels(lambda x: x.to("meta"))


def pixels_sparse() -> Pair:
    return _with_pixels(lambda x: x.to_sparse())


def pixels_in_a_dict() -> Pair:
    return _with_pixels(lambda x: {"image": x})


def pixels_with_a_graph() -> Pair:
    scale = nn.Parameter(torch.full((3, 1, 1), 2.0))
    return _with_pixels(lambda x: x * scale)


def transform_fails() -> Pair:
    return _with_pixels(_fail)


def transform_takes_nothing() -> Pair:
    return Net(), lambda: None


# What ends the program


def exits() -> Pair:
    sys.exit(0)


def exits_by_exit() -> Pair:
    raise SystemExit


def exits_in_forward() -> Pair:
    return _net_with_output(lambda y: sys.exit(0)), transform


class _ExitsFrom(Net):
    def forward(self, x: Tensor) -> Any:
        if self.forwards >= 6:  # one forward while loading and five in the trial
            sys.exit("done")
        return super().forward(x)


def exits_in_the_first_batch() -> Pair:
    return _ExitsFrom(), transform


class _ExitsAtRealPictures:
    def __call__(self, picture: Image.Image) -> Tensor:
        if np.array(picture).std((0, 1)).max() < 20:  # not the noise of the trial
            sys.exit(3)
        pixels: Tensor = transform(picture)
        return pixels


def exits_in_the_transform() -> Pair:
    return Net(), lambda picture: sys.exit(0)


def exits_in_the_transform_of_a_picture() -> Pair:
    return Net(), _ExitsAtRealPictures()


# Exceptions that are not derived from Exception


class OwnError(Exception):
    pass


class _RaisesFrom(Net):
    def forward(self, x: Tensor) -> Any:
        if self.forwards >= 6:
            raise OwnError("enough")
        return super().forward(x)


def raises_its_own_in_the_first_batch() -> Pair:
    return _RaisesFrom(), transform
