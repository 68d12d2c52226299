"""The benchmark of the GPU measures what it says: it decodes nothing, and the run is that of `layertap embed`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from benchmarks.gpu_speed import bare, by_pipeline, main_process_us, nothing, pictures_file


def test_decoding_and_resizing_are_no_part_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    resize, load = Image.Image.resize, ImageFile.ImageFile.load

    def no_resize(self: Image.Image, size: tuple[int, int], *args: Any, **kwargs: Any) -> Image.Image:
        assert self.size != (48, 48) or size == self.size, "a picture of the benchmark was resized"
        return resize(self, size, *args, **kwargs)

    def no_load(self: ImageFile.ImageFile) -> Any:
        assert self.size != (48, 48), "a picture of the benchmark was decoded"
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", no_load)
    monkeypatch.setattr(Image.Image, "resize", no_resize)
    options = argparse.Namespace(images=24, batch_size=8, precision="float32", compile="off", workers=0)
    backbone = nothing(48)
    pool = np.random.default_rng(0).integers(0, 256, (10, 48, 48, 3), dtype=np.uint8)
    with pictures_file(pool, options.images) as listed:
        assert len(np.unique(np.load(listed).reshape(options.images, -1), axis=0)) == options.images
        rate, stages = by_pipeline(backbone, listed, options)
    assert rate > 0
    assert stages.keys() == {"images", "forward", "write"}
    assert bare(backbone, torch.from_numpy(pool), options) > 0
    assert np.isfinite(main_process_us(32, 16, workers=1, batch_size=4))
