"""Tiles: their pixels are those of a crop by hand, of every kind of file, and each pixel is in one."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from PIL import ExifTags, Image, ImageOps

from extract import FeatureReader, InputError, LayertapError, extract_features
from extract.extraction.settings import ExtractionSettings
from extract.images import Batch, Decoding, Images, list_images, load_batches, part_source, pyramids
from extract.images.decoding import DecodeOptions, decode
from extract.images.part_names import Window
from extract.images.parts.tiles import saturated, share_of, tiles
from extract.images.pyramids import open_pyramid
from extract.images.sources import OnDisk
from tests.conftest import make_picture
from tests.extract.images.making import TINY, batch_of, turned

SIZE = (1024, 768)


def asking(**settings: Any) -> ExtractionSettings:
    return ExtractionSettings(**({"tiles": 128} | settings))


def pixels_of(images: Images, row: int, orientation: str = "exif") -> np.ndarray:
    return np.array(images.source.picture(row, images.source.read(row)[0], DecodeOptions(orientation=orientation)))


@pytest.fixture(scope="module")
def levels() -> list[np.ndarray]:
    """A picture, and two levels that are not what reducing it would give."""
    whole = np.array(make_picture(1, *SIZE))
    return [whole, 255 - whole[::2, ::2], whole[::4, ::4, ::-1].copy()]


def pyramid_of(levels: list[np.ndarray], in_one_chain: bool) -> bytes:
    """A TIFF whose levels are in one chain of directories, as OpenSlide reads them, or below the first."""
    tifffile = pytest.importorskip("tifffile")
    file, first = io.BytesIO(), {} if in_one_chain else {"subifds": len(levels) - 1}
    with tifffile.TiffWriter(file) as writer:
        for number, pixels in enumerate(levels):
            further: dict[str, Any] = {"subfiletype": 1} if number else first
            writer.write(pixels, tile=(64, 64), compression="deflate", photometric="rgb", metadata=None, **further)
    return file.getvalue()


@pytest.fixture(scope="module")
def pyramid(levels: list[np.ndarray]) -> bytes:
    return pyramid_of(levels, in_one_chain=True)


def test_features_of_tiles_are_those_of_pictures_cut_by_hand(tmp_path: Path) -> None:
    photos, cut = tmp_path / "photos" / "ant", tmp_path / "cut"
    photos.mkdir(parents=True)
    cut.mkdir()
    make_picture(1, 150, 100).save(photos / "a.png")
    (photos / "b.jpg").write_bytes(turned(make_picture(2, 150, 100), 6))
    make_picture(3, 40, 100).save(photos / "c.png")
    found = extract_features(photos.parent, out=tmp_path / "out", tiles=64, overlap=0.25, keep=(), **TINY)
    assert "ant/a.png#xywh=86,36,64,64" in found.paths
    assert "ant/b.jpg#xywh=36,86,64,64" in found.paths
    assert [path for path in found.paths if "c.png" in path] == [
        "ant/c.png#xywh=0,0,40,64",
        "ant/c.png#xywh=0,36,40,64",
    ]
    assert found.classes == ["ant"]
    assert set(found.labels) == {0}
    sides = zip(*(found.columns[name] for name in "xywh"), strict=True)
    for number, (path, (x, y, w, h)) in enumerate(zip(found.paths, sides, strict=True)):
        assert path.endswith(f"#xywh={x},{y},{w},{h}")
        with Image.open(photos.parent / path.partition("#")[0]) as whole:
            ImageOps.exif_transpose(whole).crop((x, y, x + w, y + h)).save(cut / f"{number:02}.png")
    by_hand = extract_features(cut, out=tmp_path / "by-hand", **TINY)
    difference = np.abs(found["embedding"][:] - by_hand["embedding"][:]).max()
    assert difference <= 1e-5 * np.abs(by_hand["embedding"][:]).max()


@pytest.mark.parametrize(("size", "level"), [((100, 70), 0), ((64, 64), 0), ((65, 63), 0), ((1000, 517), 1)])
@pytest.mark.parametrize("overlap", [0, 0.25, 0.9])
def test_every_pixel_is_in_a_tile_and_no_tile_has_padding(size: tuple[int, int], level: int, overlap: float) -> None:
    sizes = [size, (size[0] // 3, size[1] // 3)]
    covered, found, step = (
        np.zeros(size[::-1], np.int64),
        list(tiles(sizes, 64, overlap, level)),
        round(64 * (1 - overlap)),
    )
    for window in found:
        left, upper, right, lower = window.inside(size)
        assert not window.reaches_over(size)
        assert (
            right - left <= 64 * 3.02
            if level
            else (right - left, lower - upper) == (min(64, size[0]), min(64, size[1]))
        )
        covered[upper:lower, left:right] += 1
    assert covered.min() == 1
    assert len(set(found)) == len(found) == math.prod(math.ceil(max(0, side - 64) / step) + 1 for side in sizes[level])


TIFF: dict[str, Any] = {
    "tiles": {"tile": (64, 96), "compression": "deflate"},
    "predictor": {"tile": (64, 64), "compression": "lzw", "predictor": True},
    "jpeg": {"tile": (64, 64), "compression": "jpeg"},
    "ycbcr": {"tile": (64, 64), "compression": "jpeg", "compressionargs": {"outcolorspace": "ycbcr"}},
    "strips": {"rowsperstrip": 7, "compression": "deflate"},
    "big": {"tile": (64, 64), "bigtiff": True},
    "planes": {"tile": (64, 64), "planarconfig": "separate"},
    "grey": {"tile": (64, 64), "photometric": "minisblack"},
    "inverted": {"tile": (64, 64), "photometric": "miniswhite"},
    "deep": {"tile": (64, 64), "photometric": "minisblack", "dtype": "uint16"},
    "alpha": {"tile": (64, 64), "extrasamples": ["unassalpha"]},
    "premultiplied": {"tile": (64, 64), "extrasamples": ["assocalpha"]},
}


@pytest.mark.parametrize("kind", TIFF)
def test_regions_of_a_tiff_have_the_pixels_of_the_picture_that_pillow_decodes(kind: str, tmp_path: Path) -> None:
    tifffile, options = pytest.importorskip("tifffile"), {"photometric": "rgb"} | TIFF[kind]
    pixels = np.array(make_picture(2, 301, 203))
    pixels = pixels[:, :, 0] if options["photometric"] != "rgb" else pixels
    if "extrasamples" in options:
        alpha = pixels[:, ::-1, :1]
        pixels = np.dstack([np.minimum(pixels, alpha) if kind == "premultiplied" else pixels, alpha])
    pixels = pixels.astype(np.uint16) * 257 if options.pop("dtype", "") else pixels
    pixels = np.moveaxis(pixels, 2, 0).copy() if kind == "planes" else pixels
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, metadata=None, **options)
    (tmp_path / "a.tif").write_bytes(file.getvalue())
    whole = np.array(decode(file.getvalue()))
    for data in (file.getvalue(), OnDisk(str(tmp_path / "a.tif"))):
        found = open_pyramid(data)
        assert found.sizes == [(301, 203)]
        for x, y, w, h in ((0, 0, 301, 203), (200, 150, 101, 53), (60, 5, 70, 130), (128, 64, 1, 1)):
            region = found.region(Window(x, y, w, h), DecodeOptions())
            assert np.array_equal(region, whole[y : y + h, x : x + w]), (x, y, w, h)


def test_a_large_tiff_is_never_read_whole(
    tmp_path: Path, pyramid: bytes, levels: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tif").write_bytes(pyramid)
    in_memory = list_images(tmp_path, parts=asking(overlap=0.5))
    monkeypatch.setattr(pyramids.defaults, "MAX_PIXELS", SIZE[0] * SIZE[1] - 1)
    images, read, pread = list_images(tmp_path, parts=asking(overlap=0.5)), [], os.pread
    assert images.paths == in_memory.paths
    monkeypatch.setattr(os, "pread", lambda file, count, start: read.append(start) or pread(file, count, start))
    row = images.paths.index("a.tif#xywh=192,64,128,128")
    data, _ = images.source.read(row)
    assert (bytes(data), len(data)) == (b"", len(pyramid))
    assert np.array_equal(pixels_of(images, row), levels[0][64:192, 192:320])
    assert len(set(read)) == len(read) == 4
    assert images.source.content_hash(row, data) == in_memory.source.content_hash(row, in_memory.source.read(row)[0])
    (tmp_path / "a.tif").write_bytes(pyramid[::-1])
    with pytest.raises(ValueError, match="changed since it was opened"):
        images.source.picture(row, data)


@pytest.mark.parametrize("suffix", ["tif", "svs"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_tiles_of_a_level_have_its_own_pixels(
    suffix: str, level: int, tmp_path: Path, levels: list[np.ndarray]
) -> None:
    if suffix == "svs":
        pytest.importorskip("openslide")
    (tmp_path / f"a.{suffix}").write_bytes(pyramid_of(levels, in_one_chain=suffix == "svs"))
    images, scale = list_images(tmp_path / f"a.{suffix}", parts=asking(tiles=100, level=level)), 1 << level
    side, last = 100 * scale, (SIZE[0] - 100 * scale, SIZE[1] - 100 * scale)
    name = f"a.{suffix}#xywh={last[0]},{last[1]},{side},{side}" + (f"&level={level}" if level else "")
    assert name in images.paths
    assert ("level" in images.columns) == bool(level)
    for row in range(len(images)):
        x, y = (int(images.columns[name][row]) // scale for name in "xy")
        assert np.array_equal(pixels_of(images, row), levels[level][y : y + 100, x : x + 100]), images.paths[row]


def test_workers_that_share_a_slide_decode_the_same_tiles(tmp_path: Path, pyramid: bytes) -> None:
    pytest.importorskip("openslide")
    for name in ("a.svs", "b.tif"):
        (tmp_path / name).write_bytes(pyramid)
    images = list_images(tmp_path, parts=asking(level=1))

    def batches(workers: int) -> list[Batch]:
        def small(picture: Image.Image) -> torch.Tensor:
            return torch.from_numpy(np.array(picture))

        rows = [list(range(start, min(start + 5, len(images)))) for start in range(0, len(images), 5)]
        return list(load_batches(images, rows, Decoding(small, workers=workers)))

    alone = batches(0)  # this process has the slide open, and processes are forked from it
    for batch, expected in zip(batches(2), alone, strict=True):
        assert torch.equal(batch.images, expected.images)
        assert np.array_equal(batch.source_hash, expected.source_hash)


def test_transparent_pixels_of_a_slide_are_over_white(
    tmp_path: Path, pyramid: bytes, levels: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    openslide = pytest.importorskip("openslide")
    (tmp_path / "a.svs").write_bytes(pyramid)
    read = openslide.OpenSlide.read_region

    def half_transparent(self: Any, *region: Any) -> Image.Image:
        picture = read(self, *region)
        picture.paste((0, 0, 0, 0), (0, 0, 64, 128))
        return picture

    monkeypatch.setattr(openslide.OpenSlide, "read_region", half_transparent)
    found = pixels_of(list_images(tmp_path, parts=asking()), 0)
    assert (found[:, :64] == 255).all()
    assert np.array_equal(found[:, 64:], levels[0][:128, 64:128])


def test_regions_of_a_turned_tiff_are_read_as_stored_or_not_at_all() -> None:
    tifffile, file, pixels = pytest.importorskip("tifffile"), io.BytesIO(), np.array(make_picture(2, 301, 203))
    tag = (274, "H", 1, 6, True)  # EXIF orientation
    tifffile.imwrite(file, pixels, tile=(64, 64), photometric="rgb", metadata=None, extratags=[tag])
    turned = open_pyramid(file.getvalue())
    assert np.array_equal(turned.region(Window(9, 8, 50, 40), DecodeOptions(orientation="ignore")), pixels[8:48, 9:59])
    with pytest.raises(ValueError, match=r"its regions are turned \(orientation 6\); add --orientation ignore"):
        turned.region(Window(9, 8, 50, 40), DecodeOptions())


def test_the_hash_of_a_slide_in_several_files_is_of_its_pixels_too(
    tmp_path: Path, pyramid: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openslide")
    (tmp_path / "a.svs").write_bytes(pyramid)
    hashes = []
    for suffixes in ((".mrxs",), (".svs",)):  # as if the pixels of this one were elsewhere
        monkeypatch.setattr(part_source, "_OF_SEVERAL_FILES", suffixes)
        source = list_images(tmp_path, parts=asking()).source
        hashes.append(source.content_hash(0, source.read(0)[0]))
    of_file, identity = xxhash.xxh3_128_digest(pyramid), open_pyramid(OnDisk(str(tmp_path / "a.svs"))).identity
    assert identity
    of_both = xxhash.xxh3_128_digest(of_file + identity.encode())
    assert hashes == [xxhash.xxh3_128_digest(digest + b"xywh=0,0,128,128") for digest in (of_file, of_both)]


def test_tiles_without_content_are_left_out(tmp_path: Path) -> None:
    stained = np.full((300, 400, 3), 230, np.uint8)
    stained[100:200, 200:300] = (200, 30, 120)
    Image.fromarray(stained).save(tmp_path / "slide.png")
    Image.new("RGB", (90, 90), "white").save(tmp_path / "white.png")
    images = list_images(tmp_path, parts=asking(tiles=50, content=0.9))
    assert [path.partition("=")[2] for path in images.paths] == [
        f"{x},{y},50,50" for x in (200, 250) for y in (100, 150)
    ]  # fmt: skip
    assert images.notes == ("images without a tile of a content of 0.9 or more: 1",)
    share = share_of(saturated(Image.fromarray(stained[::4, ::4])), (400, 300))
    assert share(Window(150, 100, 100, 100)) == 0.5
    with pytest.raises(InputError, match="no tile of its images has a content of 0.9 or more"):
        list_images(tmp_path / "white.png", parts=asking(content=0.9))


@pytest.mark.parametrize("mode", ["L", "1", "P", "I;16", "RGBA"])
def test_masks_tell_the_content_of_tiles(tmp_path: Path, mode: str) -> None:
    for folder in ("photos/a", "masks/a"):
        (tmp_path / folder).mkdir(parents=True)
    make_picture(1, 400, 300).save(tmp_path / "photos" / "a" / "1.jpg")
    mask = np.zeros((600, 800), np.uint16 if mode == "I;16" else np.uint8)
    mask[200:400, 400:550] = 1  # x from 200 to 275, y from 100 to 200
    image = Image.fromarray(mask * 255).convert("1") if mode == "1" else Image.fromarray(mask)
    if mode == "RGBA":
        image = Image.merge("RGBA", [image, image, image, Image.new("L", image.size, 255)])
    elif mode == "P":
        image.putpalette([0, 0, 0, 0, 0, 0])
    image.save(tmp_path / "masks" / "a" / "1.png", **({"transparency": 0} if mode == "P" else {}))
    for content, columns in ((0.4, (200, 250)), (0.6, (200,))):
        images = list_images(tmp_path / "photos", parts=asking(tiles=50, content=content, masks=tmp_path / "masks"))
        assert images.paths == [f"a/1.jpg#xywh={x},{y},50,50" for x in columns for y in (100, 150)]


def test_masks_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    photos, masks = tmp_path / "photos", tmp_path / "masks"
    for folder in (photos, masks):
        folder.mkdir()
    make_picture(1, 400, 300).save(photos / "1.jpg")

    def refused(words: str, **settings: Any) -> None:
        with pytest.raises(InputError, match=words):
            list_images(photos, parts=asking(**({"content": 0.5, "masks": masks} | settings)))

    refused("1.jpg has no mask; expected .*/masks/1.png")
    refused("masks: .*/nowhere is not a folder", masks=tmp_path / "nowhere")
    refused("masks: an empty text is not a folder", masks="")
    (masks / "1.png").write_bytes(b"no picture")
    refused("masks/1.png cannot be read: not a PNG or TIFF")
    make_picture(1, 400, 300).save(masks / "1.png", format="JPEG")
    refused("masks/1.png cannot be read: JPEG and such formats do not keep 0 as it is")
    make_picture(1, 400, 300).save(masks / "1.png")
    refused("masks/1.png cannot be read: more than 1,000 pixels; --max-pixels", max_pixels=1000)
    Image.new("L", (400, 300)).save(masks / "1.tif", tiffinfo={262: 0})
    refused("masks/1.png and .*/masks/1.tif are masks of 1.jpg")
    (masks / "1.png").unlink()
    refused("masks/1.tif cannot be read: its 0 is white")
    (masks / "1.tif").unlink()
    Image.new("L", (300, 400)).save(masks / "1.png")
    refused("masks/1.png has 300 x 400 pixels, and 1.jpg 400 x 300; expected the same ratio")
    refused("masks tell the content of tiles, and all tiles are kept; add --content 0.5", content=0)
    refused("masks is that of tiles, and there are none", tiles=None, content=0)
    make_picture(1, 400, 300).save(photos / "1.png")
    refused("masks: the mask of 1 belongs to several pictures")
    (photos / "1.jpg").unlink()
    refused("photos/1.png is the picture, not its mask", masks=photos)
    (masks / "list.csv").write_text("path\n../photos/1.png\n")
    with pytest.raises(InputError, match="masks belong to pictures of one folder"):
        list_images(masks / "list.csv", parts=asking(content=0.5, masks=masks))


def test_masks_are_turned_as_pictures_are(tmp_path: Path) -> None:
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
    turned, mask = Image.Exif(), np.zeros((300, 400), np.uint8)
    turned[ExifTags.Base.Orientation] = 3
    mask[:50, :50] = 1
    make_picture(1, 400, 300).save(tmp_path / "photos" / "1.jpg", exif=turned)
    Image.fromarray(mask).save(tmp_path / "masks" / "1.png", exif=turned)
    for orientation, corner in (("exif", "350,250"), ("ignore", "0,0")):
        asked = asking(tiles=50, content=0.5, masks=tmp_path / "masks", orientation=orientation)
        assert list_images(tmp_path / "photos", parts=asked).paths == [f"1.jpg#xywh={corner},50,50"]


@pytest.mark.parametrize("side", [7, 109, 218])
def test_shares_are_those_of_pixels_up_to_the_edge(side: int) -> None:
    share = share_of(np.ones((10, side), np.bool_), (100, 100))  # in floats, 100 * (side / 100) is above the side
    assert [share(window) for window in tiles([(100, 100)], 40, 0, 0)] == [1.0] * 9


def test_the_overview_of_a_pyramid_is_that_of_the_whole(pyramid: bytes, levels: list[np.ndarray]) -> None:
    for side, level in ((1024, 0), (250, 2), (100, 2)):
        overview = open_pyramid(pyramid).overview(side)
        factor = -(-levels[level].shape[1] // side)
        assert np.array_equal(overview, Image.fromarray(levels[level]).reduce(factor))


def test_what_cannot_be_tiled_has_a_row_that_fails_with_its_reason(tmp_path: Path, pyramid: bytes) -> None:
    pytest.importorskip("openslide")
    make_picture(1, 200, 100).save(tmp_path / "a.png")
    (tmp_path / "b.jpg").write_bytes(b"")
    (tmp_path / "c.svs").write_bytes(b"no slide")
    (tmp_path / "d.tif").write_bytes(pyramid)
    images = list_images(tmp_path, parts=asking(level=2))
    batch = batch_of(images, list(range(len(images))))
    assert {images.paths[row]: reason for row, reason in batch.reasons.items()} == {
        "a.png#xywh=0,0,0,0&level=2": "it has no levels: not a TIFF or slide",
        "b.jpg#xywh=0,0,0,0&level=2": "it has no levels: not a TIFF or slide",
        "c.svs#xywh=0,0,0,0&level=2": "not a slide in a format that OpenSlide reads",
    }
    assert len(batch.images) == 4
    [missing] = batch_of(list_images(tmp_path / "d.tif", parts=asking(level=9)), [0]).reasons.values()
    assert missing == "it has no level 9; its last level is 2"


def test_of_a_cut_tiff_the_tiles_that_are_there_are_read(
    tmp_path: Path, levels: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "a.tif", levels[0], tile=(128, 128), photometric="rgb", metadata=None)
    os.truncate(tmp_path / "a.tif", (tmp_path / "a.tif").stat().st_size // 2)
    monkeypatch.setattr(pyramids.defaults, "MAX_PIXELS", 128 * 128)
    images = list_images(tmp_path, parts=asking())
    batch = batch_of(images, list(range(len(images))))
    assert len(images) == len(batch.reasons) + len(batch.images) == 48
    assert len(batch.images) in (23, 24)
    assert all(reason.startswith("truncated: its segment") for reason in batch.reasons.values())


def test_wrong_settings_and_missing_libraries_are_told_in_a_line(
    tmp_path: Path, pyramid: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.svs").write_bytes(pyramid)
    for wrong, words in (
        ({"overlap": 1}, "overlap is 1; it must be at least 0 and at most 0.9"),
        ({"tiles": 0}, "tiles is 0; it must be at least 1"),
        ({"level": -1}, "level is -1; it must be at least 0"),
    ):
        with pytest.raises(InputError, match=words):
            asking(**wrong)
    with pytest.raises(InputError, match="level is that of tiles, and there are none; add --tiles 512"):
        list_images(tmp_path / "a.svs", parts=ExtractionSettings(level=1))
    with pytest.raises(InputError, match="slides are read in tiles: `layertap embed --tiles 512`"):
        list_images(tmp_path / "a.svs")
    monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(LayertapError, match="a slide needs openslide; to install it: .*openslide-bin"):
        list_images(tmp_path / "a.svs", parts=asking())


_LARGE = """
import sys
from extract import extract_features
def embed(images, out):
    extract_features(images, out=out, backbone="timm/test_resnet", weights="random", device="cpu", workers=0,
                     preprocessing={"size": 64, "crop": 64}, tiles=512, progress=False, compile="off")
    return {name: int(value.split()[0]) >> 10 for name, value in (line.split(":") for line in open("/proc/self/status"))
            if name in ("VmHWM", "RssAnon")}
small, large, out = sys.argv[1:]
before = embed(small, out + "-small")
after = embed(large, out)
print(after["VmHWM"] - before["VmHWM"], after["RssAnon"])
"""


@pytest.mark.slow
def test_a_tiff_of_1600_megapixels_takes_less_than_a_gigabyte_and_resumes_after_a_kill(tmp_path: Path) -> None:
    tifffile, side = pytest.importorskip("tifffile"), 40_000
    block = np.zeros((512, 512, 3), np.uint8)

    def segments() -> Any:
        for number in range((-(-side // 512)) ** 2):
            block[0, 0] = number % 256, number // 256, 7  # which tell a segment from all others
            yield block

    folder = tmp_path / "pictures"
    folder.mkdir()
    tifffile.imwrite(
        folder / "a.tif", segments(), shape=(side, side, 3), dtype=np.uint8, tile=(512, 512), compression="deflate",
        compressionargs={"level": 1}, photometric="rgb", metadata=None, bigtiff=True,
    )  # fmt: skip
    os.truncate(folder / "a.tif", 2 << 30)  # as if it were compressed less; without blocks on the disk
    (tmp_path / "small").mkdir()
    make_picture(2, 1024, 1024).save(tmp_path / "small" / "a.tif")
    command = [sys.executable, "-c", _LARGE, str(tmp_path / "small"), str(folder), str(tmp_path / "out")]
    started = subprocess.Popen(command)
    while not list((tmp_path / "out").glob("shards/*.part")):
        assert started.poll() is None
        time.sleep(0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(4)
    started.send_signal(signal.SIGKILL)
    started.wait()
    above_mb, own_mb = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    # Of the whole process, half is pages of libraries, of which the kernel maps 350 to 660 MB as it likes.
    assert above_mb < 200, f"the peak is {above_mb} MB above that of a small picture"  # the picture has 4,800
    assert own_mb < 600, f"the process has {own_mb} MB of its own"
    reader = FeatureReader(tmp_path / "out")
    assert not reader.failures
    last = side - 512
    starts = [*range(0, last, 512), last]
    assert set(zip(reader.columns["x"], reader.columns["y"], strict=True)) == {(x, y) for x in starts for y in starts}
    assert len(reader) == len(starts) ** 2
