"""Rows are images, or a layer is refused: whatever it does to the pictures of a batch by what is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from extract import extract_features, load_backbone
from extract.compute.feature_choice import choose_features
from extract.errors import InputError
from extract.extraction.run import extract
from extract.taps.batch_axis import BatchAxis
from tests.extract.taps.batch_axes import find_batch_axis
from tests.planning import plan

SIZE = 32


class Sorting(nn.Module):
    """Computes the pictures of a batch in the order of a key, and gives them back in their own."""

    def __init__(self, key: Callable[[Tensor], Tensor]):
        super().__init__()
        self.key, self.inside = key, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = self.key(x).argsort()
        return self.inside(x[order])[order.argsort()]


@pytest.mark.parametrize("seed", range(60))
def test_a_layer_that_sorts_its_batch_is_refused_whatever_it_sorts_by(seed: int) -> None:
    """One order of three pictures is sorted already for one key of six."""
    weights = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    model = Sorting(lambda x: x @ weights)
    pictures = torch.arange(12.0).view(3, 4) ** 2 % 7
    with pytest.raises(InputError, match="its rows are not the images"):
        find_batch_axis(model, pictures, ["inside"])


def test_pictures_that_differ_by_rounding_only_cannot_be_assigned() -> None:
    """A permutation of the rows would look the same as rounding."""
    model = Sorting(lambda x: x[:, 0])
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


class Mixing(Amplifying):
    def __init__(self, seed: int, part: float):
        super().__init__(seed)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y = self.sums(x.flatten(1))
        return self.chaos(y + self.part * y.mean(0))


@pytest.mark.parametrize("seed", range(8))
def test_networks_that_amplify_rounding_or_mix_pictures_are_refused(seed: int) -> None:
    pictures = torch.rand(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    assert find_batch_axis(Amplifying(seed), pictures, ["sums"])["sums"] == BatchAxis()
    with pytest.raises(InputError, match="amplifies rounding"):
        find_batch_axis(Amplifying(seed), pictures, ["chaos"])
    for part in (1.0, 0.1, 0.02):
        with pytest.raises(InputError, match="its rows are not the images"):
            find_batch_axis(Mixing(seed, part), pictures, ["chaos"])


def test_a_network_that_mixes_pictures_and_amplifies_rounding_mixes_pictures() -> None:
    class Both(Amplifying):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * x.mean(0))

    with pytest.raises(InputError, match="its rows are not the images"):
        find_batch_axis(Both(0), torch.rand(3, 3, SIZE, SIZE), ["chaos"])


def test_a_random_network_is_refused() -> None:
    class Random(Amplifying):
        def forward(self, x: Tensor) -> Tensor:
            y = self.sums(x.flatten(1))
            return self.chaos(y + torch.rand_like(y))

    with pytest.raises(InputError, match="as that of a random network does"):
        find_batch_axis(Random(0), torch.rand(3, 3, SIZE, SIZE), ["chaos"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_efficientnetv2_with_random_weights_is_not_taken_for_one_that_mixes_pictures(seed: int) -> None:
    """How much rounding differs between batches depends on the machine and the number of threads."""
    backbone = load_backbone("timm/efficientnetv2_rw_t", weights="random", seed=seed, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    reason = "amplifies rounding"
    try:
        assert choose_features(backbone, ["embedding"]).features[0].rows == BatchAxis()
    except InputError as error:
        reason = str(error)
    finally:
        torch.set_num_threads(threads)
    assert "amplifies rounding" in reason


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
}


def of_brightness(folder: Path, values: list[int]) -> Path:
    for i, value in enumerate(values):
        pixels = np.random.default_rng(i).integers(0, 40, (SIZE, SIZE, 3)) + value
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02d}.png")
    return folder


MIXES["sorts beside a large value"] = (
    "order = brightness.argsort(); y = self.inside(h[order])[order.argsort()]; return self.large(y)"
)


@pytest.mark.parametrize("how", MIXES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_what_only_real_pictures_show_is_refused_before_anything_is_stored(
    tmp_path: Path, how: str, dtype: str
) -> None:
    (tmp_path / "net.py").write_text(FILE.format(mix=MIXES[how], large="large" in how))
    values = [200, 10, 120, 60, 180, 30, 90, 150, 210, 0, 100, 40]
    pictures = of_brightness(tmp_path / "pictures", values)
    backbone = load_backbone(f"python/{tmp_path / 'net.py'}:net", device="cpu")
    with pytest.raises(InputError, match=r"inside .*(first batch|rows for a batch)"):
        extract_features(
            pictures, out=tmp_path / "out", backbone=backbone, layers=["inside"], workers=0, dtype=dtype, progress=False
        )
    assert not list((tmp_path / "out" / "shards").glob("*"))
    with pytest.raises(InputError, match="inside"):
        backbone.features([Image.open(path) for path in sorted(pictures.iterdir())], ["inside"])


def test_the_first_batch_of_several_pictures_is_checked_where_the_first_was_of_one(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE.format(mix=MIXES["sorts"], large=False))
    pictures = of_brightness(tmp_path / "pictures", [200, 10, 120, 60, 180, 30, 90])
    for path in sorted(pictures.iterdir())[:3]:
        path.write_bytes(b"no picture")  # a batch of four has one picture
    backbone = load_backbone(f"python/{tmp_path / 'net.py'}:net", device="cpu")
    arguments = {"out": tmp_path / "out", "backbone": backbone, "layers": ["inside"], "workers": 0, "progress": False}
    with pytest.raises(InputError, match="inside"):
        extract_features(pictures, batch_size=4, **arguments)


def test_layers_that_treat_each_picture_by_itself_pass_in_every_order(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE.format(mix="return self.inside(h)", large=False))
    pictures = of_brightness(tmp_path / "pictures", [200, 10, 120, 60, 10, 10, 10])  # some hardly differ
    backbone = load_backbone(f"python/{tmp_path / 'net.py'}:net", device="cpu")
    with extract_features(
        pictures, out=tmp_path / "out", backbone=backbone, layers=["inside"], workers=0, progress=False
    ) as reader:
        stored = reader["inside"][:]
    for i, path in enumerate(sorted(pictures.iterdir())):
        alone = backbone.features([Image.open(path)], ["inside"])["inside"][0]
        np.testing.assert_allclose(stored[i], alone, rtol=1e-5, atol=1e-6)


class Routing(nn.Module):
    """Gives each expert the pictures that are for it, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.dark = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, bright = torch.empty_like(x), x.mean(1) > 0
        out[bright], out[~bright] = self.bright(x[bright]), self.dark(x[~bright])
        return out


def test_an_expert_that_gets_some_pictures_is_refused() -> None:
    pictures = torch.tensor([[1.0, 2, 3, 4], [-1, -2, -3, -5], [2, 3, 5, 7]])
    for layer in ("bright", "dark"):
        with pytest.raises(InputError, match="its rows are not the images|does not run for every"):
            find_batch_axis(Routing(), pictures, [layer])


def test_rows_that_are_no_whole_images_are_refused() -> None:
    with pytest.raises(InputError, match="returned 7 rows; expected 2 for each image"):
        BatchAxis(0, 2).by_image(torch.zeros(7, 3))


def test_batches_of_one_picture_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(FILE.format(mix="return self.inside(h)", large=False))
    pictures = of_brightness(tmp_path / "pictures", [200, 10, 120, 60, 180])
    backbone = load_backbone(f"python/{tmp_path / 'net.py'}:net", device="cpu")
    planned = plan(pictures, out=tmp_path / "out", backbone=backbone, layers=["inside"], workers=0, batch_size=1)
    forwards = []
    backbone.model.register_forward_pre_hook(lambda module, inputs: forwards.append(len(inputs[0])))
    extract(planned)
    assert forwards == [1] * 5
