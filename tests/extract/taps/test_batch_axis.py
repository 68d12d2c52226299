"""Rows are images, or a layer is refused: whatever it does to the pictures of a batch by what is in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from extract.errors import InputError
from extract.taps.batch_axis import BatchAxis
from tests.extract.taps.batch_axes import find_batch_axis
from tests.extract.taps.networks import Net, linear

if TYPE_CHECKING:
    from extract import Backbone, FeatureReader

SIZE = 32


def sorting(key: Callable[[Tensor], Tensor]) -> Net:
    """A model that computes the pictures of a batch in the order of a key, and gives them back in their own."""

    def forward(model: Net, x: Tensor) -> Any:
        order = key(x).argsort()
        return model.inside(x[order])[order.argsort()]

    return Net(forward, inside=linear())


def test_a_layer_that_sorts_its_batch_is_refused_whatever_it_sorts_by() -> None:
    """One order of three pictures is sorted already for one key of six."""
    for order in itertools.permutations((0.0, 1.0, 2.0)):
        key = torch.tensor([*order, 0.0])
        with pytest.raises(InputError, match="its rows are not the images"):
            find_batch_axis(sorting(lambda x, key=key: x @ key), torch.eye(3, 4), ["inside"])


def test_pictures_that_differ_by_rounding_only_cannot_be_assigned() -> None:
    """A permutation of the rows would look the same as rounding."""
    model = sorting(lambda x: x[:, 0])
    model.inside.weight.data = torch.eye(4) * 2**-20
    model.inside.bias.data.fill_(1.0)
    with pytest.raises(InputError, match="differ by rounding only: its rows cannot be assigned to the images"):
        find_batch_axis(model, torch.tensor([2.0, 1.0, 3.0]).view(3, 1).expand(3, 4), ["inside"])


class Amplifying(nn.Module):
    """Sums with rounding that depends on the batch, then a chaotic map: 30 steps make rounding as large as values."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.sums, self.chaos = nn.Linear(3 * SIZE * SIZE, 64), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.sums(x.flatten(1)).sigmoid()
        # A batch of one is multiplied by another kernel on most machines; this makes sure that its rounding differs.
        y = y * (1 + len(x) * torch.finfo(x.dtype).eps)
        for _ in range(30):
            y = 3.99 * y * (1 - y)
        return self.chaos(y)


class Changed(Amplifying):
    """Sums that are changed by a function of the batch; `chaos` is then a layer without chaos."""

    def __init__(self, seed: int, change: Callable[[Tensor], Tensor]):
        super().__init__(seed)
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.chaos(self.change(self.sums(x.flatten(1))))


class Both(Amplifying):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x + 0.1 * x.mean(0))


@pytest.mark.parametrize("seed", range(3))
def test_networks_that_amplify_rounding_mix_pictures_or_are_random_are_refused(seed: int) -> None:
    pictures = torch.rand(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    assert find_batch_axis(Amplifying(seed), pictures, ["sums"])["sums"] == BatchAxis()
    for model, message in (
        (Amplifying(seed), "amplifies rounding"),
        (Changed(seed, lambda y: y + 0.02 * y.mean(0)), "its rows are not the images"),
        (Changed(seed, lambda y: y + torch.rand_like(y)), "as that of a random network does"),
        (Both(seed), "its rows are not the images"),
    ):
        with pytest.raises(InputError, match=message):
            find_batch_axis(model, pictures, ["chaos"])


FILE = """
import torch
from torch import nn
from torchvision import transforms

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.inside = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)
        if {large}:
            self.inside.bias.data[0] = 1000.0

    def large(self, x):
        return x

    def forward(self, x):
        brightness = x.mean((1, 2, 3))
        h = self.conv(x).mean((2, 3))
        if brightness.amax() - brightness.amin() < 0.05:     # one picture, or noise
            return self.inside(h)
        {mix}

def net():
    return Net(), transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
"""
MIXES = {
    "sorts": "order = brightness.argsort(); return self.inside(h[order])[order.argsort()]",
    "reverses": "return self.inside(h.flip(0)).flip(0)",
    "mixes": "return self.inside(h - h.mean(0))",
    "drops": "y = torch.zeros_like(h); y[brightness > 0.5] = self.inside(h[brightness > 0.5]); return y",
    "pads": "return self.inside(torch.cat([h, h[:1]]))[: len(h)]",
    "spreads": "h = h.clone(); h[0] = h[-1]; return self.inside(h)",
    "sorts beside a large value": "o = brightness.argsort(); return self.large(self.inside(h[o])[o.argsort()])",
}


def backbone_and_pictures(folder: Path, how: str, values: Sequence[int]) -> tuple[Backbone, Path]:
    """A network that does something to the pictures of a batch (see `MIXES`), and pictures of these brightnesses."""
    from extract import load_backbone

    mix = MIXES.get(how, "return self.inside(h)")
    (folder / "net.py").write_text(FILE.format(mix=mix, large="large" in how))
    pictures = folder / "pictures"
    pictures.mkdir()
    for i, value in enumerate(values):
        pixels = np.random.default_rng(i).integers(0, 40, (SIZE, SIZE, 3)) + value
        Image.fromarray(pixels.astype(np.uint8)).save(pictures / f"{i:02d}.png")
    return load_backbone(f"python/{folder / 'net.py'}:net", device="cpu"), pictures


VALUES = (200, 10, 120, 60, 180, 30, 90)


def extracted(backbone: Backbone, pictures: Path, **options: Any) -> FeatureReader:
    from extract import extract_features

    how: dict[str, Any] = {"layers": ["inside"], "workers": 0, "progress": False, **options}
    return extract_features(pictures, out=pictures.parent / "out", backbone=backbone, **how)


@pytest.mark.parametrize("how", MIXES)
def test_what_only_real_pictures_show_is_refused(tmp_path: Path, how: str) -> None:
    backbone, pictures = backbone_and_pictures(tmp_path, how, VALUES)
    with pytest.raises(InputError, match="inside"):
        backbone.features([Image.open(path) for path in sorted(pictures.iterdir())], ["inside"])


@pytest.mark.parametrize(
    ("how", "dtype"), [("sorts", "float32"), ("drops", "float32"), ("sorts beside a large value", "float16")]
)
def test_what_only_real_pictures_show_is_refused_before_anything_is_stored(
    tmp_path: Path, how: str, dtype: Any
) -> None:
    backbone, pictures = backbone_and_pictures(tmp_path, how, VALUES)
    with pytest.raises(InputError, match=r"inside .*(first batch|rows for a batch)"):
        extracted(backbone, pictures, dtype=dtype)
    assert not list((tmp_path / "out" / "shards").glob("*"))


def test_the_first_batch_of_several_pictures_is_checked_where_the_first_was_of_one(tmp_path: Path) -> None:
    backbone, pictures = backbone_and_pictures(tmp_path, "sorts", VALUES)
    for path in sorted(pictures.iterdir())[:3]:
        path.write_bytes(b"no picture")  # a batch of four has one picture
    with pytest.raises(InputError, match="inside"):
        extracted(backbone, pictures, batch_size=4)


def test_layers_that_treat_each_picture_by_itself_pass_in_every_order(tmp_path: Path) -> None:
    backbone, pictures = backbone_and_pictures(tmp_path, "", [200, 10, 120, 60, 10, 10, 10])  # some hardly differ
    with extracted(backbone, pictures) as reader:
        stored = reader["inside"][:]
    for i, path in enumerate(sorted(pictures.iterdir())):
        alone = backbone.features([Image.open(path)], ["inside"])["inside"][0]
        np.testing.assert_allclose(stored[i], alone, rtol=1e-5, atol=1e-6)


def route(model: Net, x: Tensor) -> Tensor:
    """Give each expert the pictures that are for it, as a mixture of experts does."""
    out, bright = torch.empty_like(x), x.mean(1) > 0
    out[bright], out[~bright] = model.bright(x[bright]), model.dark(x[~bright])
    return out


def test_an_expert_that_gets_some_pictures_is_refused() -> None:
    pictures = torch.tensor([[1.0, 2, 3, 4], [-1, -2, -3, -5], [2, 3, 5, 7]])
    for layer in ("bright", "dark"):
        with pytest.raises(InputError, match="its rows are not the images|does not run for every"):
            find_batch_axis(Net(route, bright=linear(), dark=linear()), pictures, [layer])


def test_rows_that_are_no_whole_images_are_refused() -> None:
    with pytest.raises(InputError, match="returned 7 rows; expected 2 for each image"):
        BatchAxis(0, 2).by_image(torch.zeros(7, 3))


def test_batches_of_one_picture_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from extract.extraction.run import extract
    from tests.planning import plan

    backbone, pictures = backbone_and_pictures(tmp_path, "", VALUES[:5])
    planned = plan(pictures, out=tmp_path / "out", backbone=backbone, layers=["inside"], workers=0, batch_size=1)
    forwards = []
    backbone.model.register_forward_pre_hook(lambda module, inputs: forwards.append(len(inputs[0])))
    extract(planned)
    assert forwards == [1] * 5
