"""Segmentation and depth, as accuracies and times in one run: python tests/benchmarks/dense_probe.py FOLDER

FOLDER has `photos`, with pictures in any subfolders, and `objects/train` and `objects/test`, with a folder for each
class, such as CIFAR-10 as files. 1 to 3 objects are enlarged and pasted into each photo, cut out along a random
outline; the mask has the class of each pixel, and 0 for the photo. Photos and objects of the test pictures are in no
training picture.

Compared are the protocols of `segmentation_probe` and the linear evaluation of DINOv3 (`eval/segmentation`: dropout,
batch norm, 1 x 1 convolution, bilinear upsampling, cross-entropy, AdamW, warm-up and cosine), which is written out
below in plain PyTorch and shares no code with the project. All take the same stored tokens.

Depths are built too: a plane from 8 m at the top to 2 m at the bottom, with each object at a distance by its class.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional as F

from extract import FeatureReader, extract_features
from extract.analysis.dense import depth_probe, segmentation_probe

TRAIN, TEST = 400, 100
ITERATIONS = 4000
SIDE = 224


def compose(folder: Path, out: Path) -> list[Path]:
    """Write pictures and masks to `out`; return the pictures, training pictures first."""
    suffixes = {".jpg", ".jpeg", ".png"}
    photos = sorted(path for path in (folder / "photos").rglob("*") if path.suffix.lower() in suffixes)
    generator = np.random.default_rng(0)
    photos = [photos[i] for i in generator.permutation(len(photos))]
    train_photos, test_photos = photos[: len(photos) * 4 // 5], photos[len(photos) * 4 // 5 :]
    paths = []
    for split, count, backgrounds in (("train", TRAIN, train_photos), ("test", TEST, test_photos)):
        classes = sorted(path for path in (folder / "objects" / split).iterdir() if path.is_dir())
        objects = [sorted(path.iterdir()) for path in classes]
        for kind in ("pictures", "masks"):
            (out / kind / split).mkdir(parents=True)
        for number in range(count):
            picture = Image.open(backgrounds[number % len(backgrounds)]).convert("RGB")
            picture = picture.resize((320, 240), Image.Resampling.BICUBIC)
            mask = Image.new("L", picture.size)
            for _ in range(generator.integers(1, 4)):
                label = int(generator.integers(len(classes)))
                side = int(generator.integers(80, 140))
                thing = Image.open(objects[label][generator.integers(len(objects[label]))]).convert("RGB")
                thing = thing.resize((side, side), Image.Resampling.BICUBIC)
                angles = np.linspace(0, 2 * math.pi, 12, endpoint=False)
                radii = side / 2 * generator.uniform(0.6, 1, 12)
                outline = [
                    (side / 2 + r * math.cos(a), side / 2 + r * math.sin(a)) for a, r in zip(angles, radii, strict=True)
                ]
                shape = Image.new("1", (side, side))
                ImageDraw.Draw(shape).polygon(outline, fill=1)
                place = (int(generator.integers(-20, 320 - side + 20)), int(generator.integers(-20, 240 - side + 20)))
                picture.paste(thing, place, shape)
                mask.paste(label + 1, place, shape)
            path = out / "pictures" / split / f"{number:04d}.jpg"
            picture.save(path, quality=95)
            mask.save(out / "masks" / split / f"{number:04d}.png")
            paths.append(path)
    return paths


def published(
    tokens: np.ndarray, masks: np.ndarray, grid: tuple[int, int], n_classes: int, iterations: int
) -> nn.Module:
    """Train the linear head of DINOv3 on (N, T, C) tokens and (N, H, W) masks of the input."""
    torch.manual_seed(0)
    x = torch.from_numpy(tokens).transpose(1, 2).reshape(len(tokens), -1, *grid)
    y = torch.from_numpy(masks)
    head = nn.Sequential(nn.Dropout2d(0.1), nn.BatchNorm2d(x.shape[1]), nn.Conv2d(x.shape[1], n_classes, 1))
    nn.init.normal_(head[2].weight, mean=0, std=0.01)
    nn.init.constant_(head[2].bias, 0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-3)
    warm_up = round(iterations * 1500 / 40_000)
    for step in range(iterations):
        if step < warm_up:
            rate = 1e-3 * (1 - (1 - step / warm_up) * (1 - 1e-6)) * (1 - step / iterations)
        else:
            rate = 1e-3 / 2 * (1 + math.cos(math.pi * (step + 1) / iterations))
        optimizer.param_groups[0]["lr"] = rate
        chosen = torch.randint(0, len(x), (16,))
        logits = F.interpolate(head(x[chosen]), size=y.shape[1:], mode="bilinear", align_corners=False)
        loss = F.cross_entropy(logits, y[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return head.eval()


@torch.inference_mode()
def mean_iou(head: nn.Module, tokens: np.ndarray, masks: np.ndarray, grid: tuple[int, int], n_classes: int) -> float:
    """Return the mean IoU over all pixels, by the definition of sets."""
    x = torch.from_numpy(tokens).transpose(1, 2).reshape(len(tokens), -1, *grid)
    predicted = F.interpolate(head(x), size=masks.shape[1:], mode="bilinear", align_corners=False).argmax(1).numpy()
    both = [((masks == k) & (predicted == k)).sum() for k in range(n_classes)]
    either = [((masks == k) | (predicted == k)).sum() for k in range(n_classes)]
    return float(np.mean([b / e for b, e in zip(both, either, strict=True) if e]))


def depth_of(mask: np.ndarray) -> np.ndarray:
    """Return the depths of a picture in metres."""
    plane = 8 - 6 * np.arange(len(mask))[:, None] / len(mask)
    return np.where(mask > 0, 1.2 + 0.1 * mask, plane)


def main(folder: Path, backbone: str, layer: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        paths = compose(folder, out)
        masks = [
            np.asarray(Image.open(str(path).replace("pictures", "masks").replace(".jpg", ".png"))) for path in paths
        ]
        extract_features(
            out / "pictures", out=out / "features", backbone=backbone, layers=[f"{layer}:tokens"], dtype="float32"
        )
        with FeatureReader(out / "features") as reader:
            tokens = reader.tokens(reader.layers[0])
            names = [str(path.relative_to(out / "pictures")) for path in paths]
            numbers = [int(np.flatnonzero(tokens.rows == list(reader.paths).index(name))[0]) for name in names]
            by_number = dict(zip(numbers, masks, strict=True))
            train, test = sorted(numbers[:TRAIN]), sorted(numbers[TRAIN:])
            n_classes = int(max(mask.max() for mask in masks)) + 1
            print(f"{backbone} {layer}: {tokens}, {TRAIN} training and {TEST} test pictures, {n_classes} classes")
            whole = tokens[:].reshape(len(paths), -1, tokens.shape[1]).astype(np.float32)
            rows, columns = tokens.input_px
            window = tokens.window((320, 240))
            # Masks of the input by Pillow, which takes the pixel at the centre of each new one.
            crops = np.stack(
                [
                    np.asarray(Image.fromarray(by_number[i]).resize((columns, rows), 0, window))
                    for i in range(len(paths))
                ]
            ).astype(np.int64)
            start = time.perf_counter()
            head = published(whole[train], crops[train], tokens.grid, n_classes, ITERATIONS)
            published_s = time.perf_counter() - start
            value = mean_iou(head, whole[test], crops[test], tokens.grid, n_classes)
            print(f"plain PyTorch, {ITERATIONS} iterations: mIoU {100 * value:.2f} %, {published_s:.1f} s", flush=True)
            for protocol in ("segmentation", "segmentation-knn"):
                start = time.perf_counter()
                result = segmentation_probe(tokens, by_number, train, test, protocol=protocol)
                seconds = time.perf_counter() - start
                iou = result.metrics["mIoU"]
                ends = f"{100 * iou.low:.1f} to {100 * iou.high:.1f}"
                print(f"{protocol}: mIoU {100 * iou.value:.2f} % ({ends}), {seconds:.1f} s")
                print(f"  {published_s / seconds:.1f} times as fast; {'; '.join(result.notes)}", flush=True)
            depths = {number: depth_of(mask) for number, mask in by_number.items()}
            start = time.perf_counter()
            result = depth_probe(tokens, depths, train, test, max_depth=10.0)
            rmse, delta1 = result.metrics["rmse"], result.metrics["delta1"]
            print(
                f"depth: RMSE {rmse.value:.3f} m ({rmse.low:.3f} to {rmse.high:.3f}), delta1 "
                f"{100 * delta1.value:.1f} %, {time.perf_counter() - start:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:] or ["bundled/efficientnet_lite0", "blocks.4"]))
