"""Figures of `layertap draw`: what stands in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from extract import Backbone
from extract.analysis.network.inspection import inspect_model
from pipelines.network import draw, figures
from pipelines.network.config import DrawConfig
from pipelines.network.image_sample import sample_of
from pipelines.terminal.backbone import backbone_of
from tests.pipelines.test_looking import net

__all__ = ["net"]  # a fixture


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


def test_grad_cam_gives_the_class_and_its_probability(net: Path, folder: Path) -> None:
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


@pytest.mark.parametrize(("target", "says"), [(None, "of the predicted class of each image"), (1, "of class 1; ")])
def test_the_title_of_grad_cam_says_whose_class_it_is(net: Path, folder: Path, target: int | None, says: str) -> None:
    _, figure, _, _ = drawn("gradcam", net, folder, sample=1, layers=["conv1"], target=target)
    assert says in " ".join(figure.get_suptitle().split(" ")).replace("\n", " ")


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
