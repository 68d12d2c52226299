"""Figures of `layertap draw`: what stands in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pipelines.network import draw, draw_figures
from pipelines.network.config import DrawConfig
from pipelines.network.image_sample import sample_of
from pipelines.network.imagenet_targets import Targets
from pipelines.terminal.backbone import backbone_of
from tests.pipelines.test_looking import net

__all__ = ["net"]  # a fixture


def test_similar_channels_stand_side_by_side_and_constant_ones_last() -> None:
    random = np.random.default_rng(0)
    patterns = random.normal(size=(40, 3))
    group = random.permutation(np.repeat([0, 1, 2, 3], 15))
    columns = np.concatenate([patterns, np.zeros((40, 1))], 1)[:, group]
    columns += 0.05 * random.normal(size=columns.shape) * columns.any(0)
    ordered = group[draw_figures.angular_order(columns)]
    assert (np.diff(ordered) != 0).sum() == 3  # four groups, each in one piece
    assert ordered[-1] == 3
    assert sorted(draw_figures.angular_order(np.ones((1, 5))).tolist()) == [0, 1, 2, 3, 4]  # a single image


def test_the_label_of_the_colour_bar_is_inside_the_figure() -> None:
    means = np.random.default_rng(0).normal(size=(4, 300))
    figure = draw_figures.channels_by_image(means, range(300), list("abcd"), "layer", reorder=True)
    FigureCanvasAgg(figure).draw()
    label = figure.axes[1].yaxis.label.get_window_extent()
    assert label.y0 >= 0
    assert label.y1 <= figure.bbox.height
    assert label.x1 <= figure.bbox.width


def test_images_that_do_not_excite_a_channel_are_left_out_and_no_part_is_black() -> None:
    pixels = np.full((32, 32, 3), 200, np.uint8)
    peak = np.zeros((4, 4, 1), np.float32)
    peak[1, 2] = 5
    figure = draw_figures.top_images({7: [0, 1]}, {0: (peak, pixels), 1: (np.zeros_like(peak), pixels)}, "layer", 2)
    excited, silent = figure.axes
    assert excited.get_title() == "channel 7: 5"
    assert not silent.images
    assert excited.images[1].get_array()[..., 3].max() <= 0.61
    (outline,) = excited.collections[0].get_paths()
    assert outline.contains_point((20, 12))  # the centre of cell (1, 2), in pixels
    assert not outline.contains_point((4, 4))


def test_filters_have_numbers() -> None:
    figure = draw_figures.filters(np.random.default_rng(0).normal(size=(20, 3, 3, 3)), "conv")
    assert [tile.get_title() for tile in figure.axes[:20]] == [str(number) for number in range(20)]


def test_grad_cam_gives_the_probability_and_whether_the_class_is_true(
    net: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DrawConfig(backbone=f"python/{net}:make", images=str(folder), workers=0, sample=6, device="cpu")
    backbone = backbone_of(config)
    sample = sample_of(config, backbone)
    truth = Targets(sample.images.labels, "three classes, three outputs")
    monkeypatch.setattr(draw, "targets_of", lambda backbone, images, remedy: truth)
    ((_, figure),) = draw.KINDS["gradcam"](config, backbone, sample)
    captions = [tile.get_title() for tile in figure.axes[::2]]
    seen = []
    for batch in sample.batches():
        with torch.no_grad():
            probabilities = backbone.model(batch.inputs).softmax(1)
        for row, line in zip(batch.rows.tolist(), probabilities, strict=True):
            best = int(line.argmax())
            mark = "✓" if best == sample.images.labels[row] else "✗"
            seen.append(f"{mark} {100 * float(line[best]):.0f} % class {best}")
    assert [caption.split("\n")[1] for caption in captions] == seen
    assert {caption.split("\n")[1][0] for caption in captions} == {"✓", "✗"}
    assert "✓: the true class" in figure.get_suptitle()


@pytest.mark.parametrize("channels", [None, [3, 1]])
def test_named_channels_keep_their_order(channels: list[int] | None, net: Path, folder: Path) -> None:
    config = DrawConfig(
        backbone=f"python/{net}:make", images=str(folder), workers=0, sample=6, device="cpu", layers=["conv1"],
        channels=channels,
    )  # fmt: skip
    backbone = backbone_of(config)
    ((_, figure),) = draw.KINDS["channels"](config, backbone, sample_of(config, backbone))
    ticks = [int(tick.get_text()) for tick in figure.axes[0].get_xticklabels()]
    assert ticks == channels or (channels is None and sorted(ticks) == list(range(8)))
