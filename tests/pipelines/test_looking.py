"""`layertap inspect`, `draw` and `ablate`, as somebody types them."""

from __future__ import annotations

import copy
import csv
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from extract import Backbone
from extract.analysis.network.inspection import inspect_model
from pipelines.cli import main
from pipelines.network import draw, figures
from pipelines.network.config import DrawConfig
from pipelines.network.image_sample import evenly, sample_of
from pipelines.terminal.backbone import backbone_of
from tests.conftest import make_picture

NET = '''
import torch
from torch import nn
from torchvision import transforms

class Odd(nn.Module):
    """NaN where a picture is nearly black."""
    def forward(self, h):
        return h / (h.abs().sum((1, 2, 3), keepdim=True) > 1e-3)

def make(odd=False):
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False))
    net.add_module("relu1", nn.ReLU(inplace=True))
    if odd:
        net.add_module("odd", Odd())
    net.add_module("conv2", nn.Conv2d(8, 6, 3, stride=2, padding=1))
    net.add_module("relu2", nn.ReLU())
    net.add_module("pool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc", nn.Linear(6, 3))
    with torch.no_grad():
        net.conv1.weight[2] = 0
    return net, transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])

def odd():
    return make(odd=True)

def loss(output, labels):
    return output.square().mean()

def told(output, labels):
    print("labels", sorted(set(labels.tolist())))
    return loss(output, labels)
'''


@pytest.fixture
def net(tmp_path: Path) -> Path:
    file = tmp_path / "net.py"
    file.write_text(NET)
    return file


@pytest.fixture
def of(net: Path, folder: Path) -> tuple[object, ...]:
    """The network and the pictures, as words of a command."""
    return (f"python/{net}:make", folder, "--workers", 0)


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result.output


def test_findings_come_first_then_the_table(of: tuple[object, ...]) -> None:
    lines = run("inspect", *of).splitlines()
    assert "12 images" in lines[0]
    (found,) = [i for i, line in enumerate(lines) if "conv1: 1 of 8 channels" in line]
    assert found < next(i for i, line in enumerate(lines) if line.startswith("layer"))


def test_json_and_csv_hold_the_same_numbers(net: Path, of: tuple[object, ...], tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    output = run("inspect", *of, "--grad", "--loss", f"{net}:loss", "--json", "--csv", table)
    content = json.loads(output[output.index("{") :])
    assert content["loss"]["of"] == "net.py:loss"
    assert all(one.keys() == {"kind", "layer", "text", "grave", "layers"} for one in content["findings"])
    assert content["findings"]
    assert [one["layer"] for one in content["layers"]] == ["conv1", "relu1", "conv2", "relu2", "pool", "flatten", "fc"]
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, line in zip(rows, content["layers"], strict=True):
        assert float(row["std"]) == line["std"]
        assert float(row["gradient_norm"]) == line["gradient_norm"]
    assert {one["name"] for one in content["parameters"]} == {
        "conv1.weight", "conv2.weight", "conv2.bias", "fc.weight", "fc.bias"
    }  # fmt: skip


def test_the_picture_that_gives_nan_is_named(net: Path, folder: Path) -> None:
    Image.new("RGB", (40, 40)).save(folder / "bee" / "black.png")
    (folder / "ant" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    output = run("inspect", f"python/{net}:odd", folder, "--workers", 0)
    assert "! odd: " in output
    assert "first in bee/black.png" in output
    assert "left out: ant/broken.jpg" in output


def test_a_loss_of_own_code_gets_the_numbers_of_classes(net: Path, of: tuple[object, ...]) -> None:
    assert "labels [0, 1, 2]" in run("inspect", *of, "--grad", "--loss", f"{net}:told")


@pytest.mark.parametrize("suffix", ["png", pytest.param("svg", marks=pytest.mark.slow)])
def test_pictures_of_an_inspection(net: Path, of: tuple[object, ...], tmp_path: Path, suffix: str) -> None:
    out = tmp_path / "inside"
    run("inspect", *of, "--grad", "--loss", f"{net}:loss", "--pictures", out, "--format", suffix)
    starts = {path.name: path.read_bytes()[:4] for path in out.iterdir()}
    start = {"png": b"\x89PNG", "svg": b"<?xm"}[suffix]
    assert starts == {f"{name}.{suffix}": start for name in ("activations", "gradient-flow", "gradients", "layers")}


@pytest.mark.parametrize("count", [11, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 60))])
def test_figures_of_an_inspection_name_each_layer_once_inside_pages_of_little_height(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential()
    for number in range(count):
        net.add_module("encoder_of_a_network_whose_layers_have_very_long_names_0_" + f"{number:03d}", nn.ReLU())
    inspection = inspect_model(nn.Sequential(nn.Conv2d(3, 3, 1), net), [(torch.randn(4, 3, 4, 4), None)],
                               loss=lambda output, _: output.square().sum())  # fmt: skip
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.setdefault(path.name, copy.deepcopy(figure)))
    figures.draw_inspection(inspection, "python/" + "x" * 80, tmp_path, "png")
    pages = -(-(count + 1) // 45)
    assert len(drawn) == 4 * pages
    for kind in ("activations", "gradients", "gradient-flow", "layers"):
        names = []
        for name, figure in drawn.items():
            if not name.startswith(kind + ("-" if pages > 1 else ".")):
                continue
            assert figure.get_size_inches()[1] <= 1.5 * figure.get_size_inches()[0]
            FigureCanvasAgg(figure).draw()
            bottom, top = sorted(figure.axes[0].get_ylim())
            ticks = zip(figure.axes[0].get_yticks(), figure.axes[0].get_yticklabels(), strict=True)
            shown = [label for place, label in ticks if bottom < place < top]
            names += [label.get_text() for label in shown]
            boxes = [label.get_window_extent() for label in shown]
            assert all(above.y0 >= below.y1 - 1 for above, below in itertools.pairwise(boxes))  # they do not overlap
            texts = [figure._suptitle, figure.axes[0].xaxis.label, figure.axes[-1].yaxis.label]
            for box in [*boxes, *(text.get_window_extent() for text in texts if text.get_text())]:
                assert box.x0 >= -1
                assert box.y0 >= -1
                assert box.x1 <= figure.bbox.width + 1
                assert box.y1 <= figure.bbox.height + 1
        assert len(names) == len(set(names)) == count + 1


def test_a_histogram_that_is_cut_says_where_and_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 100 * x

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Tanh() for _ in range(19)], Wide())
    pictures = torch.randn(8, 3, 8, 8)
    inspection = inspect_model(net, [pictures])
    figure = figures._density(inspection, of_gradients=False)
    far = figure.axes[0].get_xlim()[1]
    with torch.no_grad():
        outside = float((net(pictures).abs() > far).float().mean())
    assert outside > 0.9
    label = figure.axes[0].get_xlabel()
    assert f"cut at ±{far:.3g}" in label
    assert float(label.partition("at most ")[2].partition("%")[0]) == pytest.approx(100 * outside, abs=1)


@pytest.mark.parametrize("kind", ["maps", "top", "tokens"])
def test_each_kind_of_picture_is_drawn(of: tuple[object, ...], tmp_path: Path, kind: str) -> None:
    output = run("draw", kind, *of, "-o", tmp_path / "p", "--sample", 2)
    [path] = (tmp_path / "p").iterdir()
    assert str(path) in output
    with Image.open(path) as picture:
        assert np.asarray(picture.convert("RGB")).std() > 5
    assert path.name.startswith(kind)


def test_one_picture_alone_and_chosen_layers_and_channels(net: Path, tmp_path: Path) -> None:
    make_picture(3).save(tmp_path / "one.png")
    output = run("draw", "maps", f"python/{net}:make", tmp_path / "one.png", "-l", "relu*", "--channels", "0,5", "-o",
                 tmp_path / "p", "--workers", 0)  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["maps-relu1.png", "maps-relu2.png"]
    assert len(output.splitlines()) == 2


def test_what_cannot_be_drawn_inspected_or_ablated_is_refused(net: Path, of: tuple[object, ...]) -> None:
    for words, why in (
        (("draw", "maps", *of, "-l", "fc"), "expected a map or patches"),
        (("draw", "maps", *of, "-l", "conv1", "--channels", 8), "channels 0 to 7"),
        (("draw", "rollout", *of), "no attention"),
        (("draw", "maps", *of, "-l", "conv9"), "'conv9'"),
        (("draw", "maps", *of, "--sample", "0"), "expected a number of images, or all"),
        (("draw", "gradcam", *of, "--target", 5000), "expected a class from 0 to 2"),
        (("inspect", *of, "--grad"), "--loss FILE.py:FUNCTION"),
        (("inspect", *of, "--grad", "--loss", "mse"), "expected cross_entropy or"),
        (("inspect", *of, "--grad", "--loss", f"{net}:losss"), "'losss'"),
        (("inspect", *of, "--labels", "x.csv"), "--grad"),
        (("ablate", *of, "-l", "conv?", "--channels", "all"), "needs exactly one layer"),
        (("ablate", *of, "-l", "conv1", "--channels", "a"), "expected numbers"),
        (("ablate", *of, "-l", "conv1", "--channels", 9), "expected 0 to 7"),
    ):
        assert why in run(*words, code=2)


def test_grad_cam_of_an_own_transformer_names_the_layer_that_its_class_token_would_give(tmp_path: Path) -> None:
    make_picture(3).save(tmp_path / "one.png")
    own = tmp_path / "own.py"
    own.write_text("""
import timm
from torch import nn
from torchvision import transforms

class Own(nn.Module):
    def __init__(self, stated):
        super().__init__()
        self.vit = timm.create_model("test_vit")
        if stated:
            self.num_prefix_tokens = 1

    def forward(self, x):
        return self.vit(x)

def make(stated=False):
    return Own(stated), transforms.Compose([transforms.Resize((160, 160)), transforms.ToTensor()])

def stated():
    return make(True)
""")
    of = (tmp_path / "one.png", "--workers", 0, "-o", tmp_path / "p")
    output = run("draw", "gradcam", f"python/{own}:make", *of)
    assert "vit.patch_embed is drawn; vit.blocks.5.norm1 is better" in output
    assert "num_prefix_tokens = 1" in output
    assert "note" not in run("draw", "gradcam", f"python/{own}:stated", *of)
    assert (tmp_path / "p" / "gradcam-vit.blocks.5.norm1.png").is_file()


def test_ablation_by_layer_and_by_channel(of: tuple[object, ...], tmp_path: Path) -> None:
    picture, table = tmp_path / "a.png", tmp_path / "a.csv"
    by_layer = ("-l", "conv?", "-l", "relu2", "--edit", "scale:0.5")
    assert "relu2" in run("ablate", *of, *by_layer, "--pictures", picture, "--csv", table)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        assert [row["layer"] for row in csv.DictReader(file)] == ["conv1", "conv2", "relu2"]
    output = run("ablate", *of, "-l", "conv1", "--channels", "all", "--edit", "mean")
    line = next(line for line in output.splitlines() if "conv1 channel 2" in line)
    assert "1.0000" in line  # it is constant, so its mean is what it gives


@pytest.mark.slow
def test_photos_in_folders_of_wordnet_ids_have_right_classes(photos: Path, tmp_path: Path) -> None:
    output = run("ablate", "bundled/efficientnet_lite0", photos, "-l", "blocks.6", "--sample", 16, "--edit", "scale:1",
                 "--json")  # fmt: skip
    content = json.loads(output[output.index("{") :])
    assert content["accuracy"] >= 0.75  # 88.3 % of 1,000 photos (timm's own loop)
    assert content["effects"][0]["accuracy"] == content["accuracy"]
    labels = tmp_path / "labels.csv"
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.JPEG"))
    labels.write_text("path,label\n" + "".join(f"{name},0\n" for name in names))
    output = run("ablate", "bundled/efficientnet_lite0", photos, "-l", "blocks.6", "--sample", 8, "--labels", labels,
                 "--json")  # fmt: skip
    assert json.loads(output[output.index("{") :])["accuracy"] <= 0.25


def test_a_sample_is_spread_evenly() -> None:
    assert (evenly(100, 5), evenly(3, 3), evenly(7, 1)) == ([0, 25, 50, 74, 99], [0, 1, 2], [0])


def test_places_that_cannot_be_written_are_told_of_before_anything_is_loaded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (
        ("inspect", "--csv", tmp_path / "no" / "a.csv"), ("inspect", "--pictures", tmp_path / "file"),
        ("draw", "maps", "-o", tmp_path / "file"), ("ablate", "-l", "a", "--pictures", tmp_path / "no" / "a.png"),
        ("ablate", "-l", "a", "--csv", tmp_path / "no" / "a.csv"), ("inspect", "--csv", "/proc/a.csv"),
        ("draw", "maps", "-o", "/proc"),
    ):  # fmt: skip
        kind = words[:2] if words[0] == "draw" else words[:1]
        output = run(*kind, "no/such-backbone", folder, *words[len(kind) :], code=2)
        assert "cannot be written" in output


@pytest.mark.slow
def test_attention_rollout_and_grad_cam_of_each_layer_and_call(folder: Path, tmp_path: Path) -> None:
    few = ("--weights", "random", "--sample", 2, "--workers", 0)
    vit = ("timm/test_vit", folder, *few)
    for kind in ("attention", "rollout", "gradcam"):
        run("draw", kind, *vit, "-o", tmp_path / "p")
    assert len(list((tmp_path / "p").iterdir())) == 3
    run("draw", "attention", *vit, "-l", "blocks.0.attn", "-l", "blocks.3.attn", "-o", tmp_path / "a")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["attention-blocks.0.attn.png", "attention-blocks.3.attn.png"]
    assert "leave out -l" in run("draw", "rollout", *vit, "-l", "blocks.0.attn", code=2)
    relu = ("torchvision/resnet18", folder, *few, "-l", "layer1.0.relu")
    for kind in ("gradcam", "maps"):  # the layer runs twice
        run("draw", kind, *relu, "-o", tmp_path / kind)
        assert len(list((tmp_path / kind).iterdir())) == 2
    wrong = run("draw", "gradcam", *relu, "--target", 5000, code=2)
    assert "--target 5000: expected a class from 0 to 999" in wrong


# What stands in the figures of draw


def test_images_that_do_not_excite_a_channel_are_left_out_and_no_part_is_black() -> None:
    pixels = np.full((32, 32, 3), 200, np.uint8)
    peak = np.zeros((4, 4, 1), np.float32)
    peak[1, 2] = 5
    figure = figures.top_images({7: [0, 1]}, {0: (peak, pixels), 1: (np.zeros_like(peak), pixels)}, "layer", 2)
    excited, silent = figure.axes
    assert excited.get_title() == "channel 7: 5"
    assert not silent.images
    assert excited.images[1].get_array()[..., 3].max() <= 0.61
    (outline,) = excited.collections[0].get_paths()
    assert outline.contains_point((20, 12))  # the centre of cell (1, 2), in pixels
    assert not outline.contains_point((4, 4))


def drawn(kind: str, net: Path, folder: Path, **settings: Any) -> tuple[str, Figure, Backbone, Any]:
    """The layer and the figure of a kind, and the backbone and the images that it is of."""
    config = DrawConfig(backbone=f"python/{net}:make", images=str(folder), workers=0, device="cpu", **settings)
    backbone = backbone_of(config)
    with torch.no_grad():
        backbone.model.conv1.weight[5] *= 1e-9  # varies, by nothing that counts
    sample = sample_of(config, backbone)
    ((layer, figure),) = draw.KINDS[kind](config, backbone, sample)
    return layer, figure, backbone, sample


def test_grad_cam_gives_the_class_and_its_probability_and_its_title_says_which(net: Path, folder: Path) -> None:
    _, figure, backbone, sample = drawn("gradcam", net, folder, sample=6)
    captions = [tile.get_title() for tile in figure.axes[1::2]]
    seen = []
    for batch in sample.batches():
        with torch.no_grad():
            probabilities = backbone.model(batch.inputs).softmax(1)
        for line in probabilities:
            best = int(line.argmax())
            seen.append(f"class {best}, {100 * float(line[best]):.0f}\u00a0%")
    assert captions == seen
    title = " ".join(figure.get_suptitle().split())
    assert "relu2: Grad-CAM of the predicted class of each image; " in title
    _, figure, _, _ = drawn("gradcam", net, folder, sample=1, layers=["conv1"], target=1)
    assert "of class 1; " in " ".join(figure.get_suptitle().split())


def test_maps_of_constant_channels_are_grey_as_an_inspection_counts_them(net: Path, folder: Path) -> None:
    layer, figure, backbone, sample = drawn("maps", net, folder, sample=1)
    (report,) = inspect_model(backbone.model, [batch.inputs for batch in sample.batches()], layer).tensors
    assert report.activations.dead.tolist() == [2, 5]
    tiles = {tile.get_title(): tile for tile in figure.axes if tile.images}
    constant = [title for title in tiles if title.endswith("constant")]
    assert constant == ["channel 2: constant", "channel 5: constant"]
    for title in constant:
        assert np.ptp(tiles[title].images[0].get_array()) == 0
    assert len(tiles) == 9  # eight channels, and the image beside them


@pytest.mark.parametrize("count", [1, 9, 17, *(pytest.param(count, marks=pytest.mark.slow) for count in (8, 33, 57))])
def test_no_channel_stands_alone_in_a_row_and_no_long_title_leaves_the_figure(count: int) -> None:
    maps, pixels = np.random.default_rng(0).normal(size=(1, 2, 2, count)), np.zeros((1, 4, 4, 3), np.uint8)
    channels = dict.fromkeys(range(count), False)
    figure = figures.feature_maps(maps, channels, pixels, ["x" * 60 + ".jpg"], "s" * 60 + ", " + "l" * 60)
    rows = Counter(tile.get_subplotspec().rowspan.start for tile in figure.axes[1:] if tile.get_title()[:1] == "c")
    assert sum(rows.values()) == count
    assert count == 1 or min(rows.values()) > 1
    FigureCanvasAgg(figure).draw()
    title = figure._suptitle.get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= figure.bbox.width
    assert title.y1 <= figure.bbox.height
    assert title.y0 >= max(tile.title.get_window_extent().y1 for tile in figure.axes) - 1
