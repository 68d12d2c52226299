"""A head that is trained from stored maps, against the same head behind the frozen backbone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from extract import FeatureReader, extract_features, load_backbone

LAYERS = ["layer2", "layer4"]
EPOCHS, BATCH = 3, 5


def losses(batches: Iterable[tuple[dict[str, Tensor], Tensor]]) -> list[float]:
    """Train a 1x1 convolution of the maps of both layers; the loss of each batch."""
    torch.manual_seed(0)
    head, found, optimizer = None, [], None
    for x, y in batches:
        maps = torch.cat([F.interpolate(x[layer], y.shape[1:]) for layer in LAYERS], 1)
        if head is None or optimizer is None:
            head = nn.Conv2d(maps.shape[1], 3, 1)
            optimizer = torch.optim.Adam(head.parameters(), 0.1)
        loss = F.cross_entropy(head(maps), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_head_trained_from_stored_maps_is_the_one_behind_the_frozen_backbone(folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing={"size": 64, "crop": 64})
    names = [f"{layer}:none" for layer in LAYERS]
    extract_features(folder, out=tmp_path / "out", backbone=backbone, layers=names, workers=0, progress=False)
    kept: dict[str, Tensor] = {}
    for layer in LAYERS:
        module = backbone.model.get_submodule(layer)
        module.register_forward_hook(lambda module, args, output, layer=layer: kept.__setitem__(layer, output.clone()))
    with FeatureReader(tmp_path / "out") as reader:
        images = torch.stack([backbone.preprocessing.cpu_transform(Image.open(folder / path)) for path in reader.paths])
        grey = F.avg_pool2d(images.float().mean(-1), 8)  # (12, 8, 8)
        masks = (grey > 100).long() + (grey > 150)
        rows = reader.dataset(LAYERS, targets=torch.arange(len(reader)))
        how: list[Any] = [{"shuffle": True, "seed": epoch} for epoch in range(EPOCHS)]
        places: list[Any] = ["disk", "memory"]
        cached = [reader.dataset(LAYERS, targets=masks, residency=place) for place in places]
        from_cache = [losses(batch for each in how for batch in dataset.batches(BATCH, **each)) for dataset in cached]
        order = [chosen for each in how for _, chosen in rows.batches(BATCH, **each)]

    def online() -> Iterable[tuple[dict[str, Tensor], Tensor]]:
        for chosen in order:
            with torch.no_grad():
                backbone.model(backbone.preprocessing.to_input(images[chosen]))
            yield kept, masks[chosen]

    behind = losses(online())
    assert len(behind) == EPOCHS * 3
    torch.testing.assert_close(from_cache, [behind, behind], atol=1e-4, rtol=0)
    assert max(behind) - min(behind) > 0.1  # something was learned
