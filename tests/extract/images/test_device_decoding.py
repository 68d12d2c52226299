"""`--decode gpu`, with this CPU as the GPU: which files it takes, what becomes of the others, which pixels are used."""

from __future__ import annotations

import io
import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps
from torchvision.transforms.v2 import functional as tensors

from extract import FeatureReader, InputError, extract_features
from extract.backbones.preprocessing import Preprocessing
from extract.extraction.run import extract
from extract.images import device_decoding
from extract.images.decoding import DecodeOptions, Jpeg, plain_jpeg
from extract.images.device_decoding import JpegDecoder, upright
from tests.conftest import make_picture
from tests.extract.images.making import encoded, turned
from tests.planning import plan

CPU = torch.device("cpu")


def test_pictures_are_turned_as_pillow_turns_them() -> None:
    for orientation in range(1, 9):
        data = turned(make_picture(1, 40, 24), orientation, quality=95)
        file = plain_jpeg(data)
        assert file is not None
        stored = torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)
        assert file.size == stored.shape[1:]
        expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        assert np.array_equal(upright(stored, file.orientation).permute(1, 2, 0), expected), orientation
        assert plain_jpeg(data, DecodeOptions(orientation="ignore")) == Jpeg(data, file.size, 1)


def test_only_whole_jpeg_files_of_eight_bits_in_known_colours_are_taken() -> None:
    picture, profile = make_picture(1, 64, 48), ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    progressive, coloured = encoded(picture, progressive=True), encoded(picture, icc_profile=profile)
    taken = [encoded(picture, subsampling=subsampling) for subsampling in (0, 1, 2)]
    taken += [progressive, coloured, encoded(picture.convert("L")), encoded(picture, restart_marker_rows=1)]
    for data in taken:
        assert plain_jpeg(data) == Jpeg(data, (48, 64), 1)
    frame_header = taken[0].index(b"\xff\xc0")
    twelve_bits = taken[0][: frame_header + 4] + b"\x0c" + taken[0][frame_header + 5 :]
    others = [
        encoded(picture.convert("CMYK")), encoded(picture, keep_rgb=True), encoded(picture, "PNG"), taken[0][:-50], b"",
        b"\xff\xd8\xff\xd9", encoded(picture.resize((300, 14))), twelve_bits,
    ]  # fmt: skip
    assert [plain_jpeg(data) for data in others] == [None] * len(others)
    assert plain_jpeg(taken[0], DecodeOptions(64 * 48 - 1)) is None
    assert plain_jpeg(coloured, DecodeOptions(icc="srgb")) is None


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU stands in for a GPU that cannot decode files with a certain comment; the sizes of its batches."""
    decode, batches = device_decoding._decode_jpegs, list[int]()

    def decoded(contents: list[bytes], device: torch.device) -> list[torch.Tensor]:
        batches.append(len(contents))
        if any(b"not on a GPU" in content for content in contents):
            raise RuntimeError("nvjpegDecode failed: 8")
        return decode(contents, device)

    monkeypatch.setattr(Preprocessing, "on_gpu", lambda self, device: replace(self, device="cpu"))
    monkeypatch.setattr(device_decoding, "_decode_jpegs", decoded)
    return batches


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """JPEG files of several sizes and kinds, with others that a GPU does not take, cannot decode, or nobody can."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(10):
        picture = make_picture(i, 300 + 40 * (i % 3), 260)
        (folder / f"{i}.jpg").write_bytes(
            turned(picture, i, quality=95) if 1 <= i <= 8 else encoded(picture, progressive=True)
        )
    (folder / "again.jpg").write_bytes((folder / "3.jpg").read_bytes())
    (folder / "cmyk.jpg").write_bytes(encoded(make_picture(20, 300, 260).convert("CMYK")))
    (folder / "grey.jpg").write_bytes(encoded(make_picture(21, 300, 260).convert("L")))
    (folder / "large.jpg").write_bytes(encoded(make_picture(22, 700, 600)))
    (folder / "refused.jpg").write_bytes(encoded(make_picture(23, 300, 260), comment=b"not on a GPU"))
    (folder / "truncated.jpg").write_bytes(encoded(make_picture(24, 300, 260))[:2000])
    make_picture(25, 300, 260).save(folder / "z.png")
    (folder / "zero.jpg").write_bytes(b"")
    return folder


def settings(backbone: Any, **more: Any) -> dict[str, Any]:
    return {"backbone": backbone, "layers": ["layer1:none", "embedding"], "batch_size": 5, "max_pixels": 200_000,
            "min_cosine": 0.9, "workers": 0} | more  # fmt: skip


def rows_in(out: Path) -> dict[str, bytes]:
    reader = FeatureReader(out)
    values = {name: np.ascontiguousarray(reader[name][:]).tobytes() for name in reader.layers}
    return values | {name: reader.column(name)[:].tobytes() for name in ("status", "source_hash", "record_hash")}


def test_pixels_are_those_of_each_file_decoded_alone_and_all_else_is_as_ever(
    photos: Path, tmp_path: Path, backbone: Any, doubled: list[int]
) -> None:
    exact = extract_features(photos, out=tmp_path / "exact", **settings(backbone))
    found = extract_features(photos, out=tmp_path / "gpu", decode="gpu", **settings(backbone, workers=1))
    assert found.failures == exact.failures
    assert {row[1]: row[2] for row in found.failures} == dict.fromkeys(
        ("large.jpg", "truncated.jpg", "zero.jpg"), "decode error"
    )
    for name in ("source_hash", "source_size", "source_mtime_ns", "status"):
        assert np.array_equal(found.column(name)[:], exact.column(name)[:])
    assert max(doubled) > 1
    how, model = backbone.preprocessing, backbone.model.eval()
    for row, path in enumerate(found.paths):
        if found.column("status")[row] != 1:
            continue
        picture = ImageOps.exif_transpose(Image.open(photos / path)).convert("RGB")
        if path in ("cmyk.jpg", "refused.jpg", "z.png"):
            pixels = how.cpu_transform(picture)
        else:
            whole = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
            size = [how.resize_px] if isinstance(how.resize_px, int) else list(how.resize_px)
            resized = tensors.resize(whole, size, tensors.InterpolationMode(how.interpolation), antialias=True)
            pixels = tensors.center_crop(resized, list(how.crop_px)).permute(1, 2, 0)
        with torch.no_grad():
            expected = model.forward_head(model.forward_features(how.to_input(pixels[None])), pre_logits=True)[0]
        assert np.abs(found["embedding"][row] - expected.numpy()).max() <= 1e-5 * expected.abs().max(), path
    depends_on = found.provenance["depends_on"]
    assert depends_on["preprocessing"]["resized_by"] == "torchvision on a GPU"
    assert depends_on["decoder"].endswith("; JPEG files decoded by nvJPEG")
    with pytest.raises(InputError, match="stored torchvision on a GPU, now pillow"):
        extract_features(photos, out=tmp_path / "gpu", **settings(backbone))


@pytest.mark.usefixtures("doubled")
def test_a_run_that_was_killed_and_resumed_gives_the_bytes_of_one_that_was_not(
    photos: Path, tmp_path: Path, backbone: Any
) -> None:
    how = settings(backbone, decode="gpu", batch_size=4)
    extract(plan(photos, out=tmp_path / "whole", **how))
    calls = itertools.count(1)

    def die(*_: Any) -> None:
        if next(calls) == 15:
            os.kill(os.getpid(), signal.SIGKILL)

    if not (pid := os.fork()):
        try:
            backbone.model.layer2.register_forward_pre_hook(die)
            extract(plan(photos, out=tmp_path / "parts", **how))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert 4 <= len(FeatureReader(tmp_path / "parts", partial=True).paths) < 16
    extract(plan(photos, out=tmp_path / "parts", **how))
    assert rows_in(tmp_path / "parts") == rows_in(tmp_path / "whole")


@pytest.mark.usefixtures("doubled")
def test_the_first_images_are_compared_with_exact_ones_and_refused(photos: Path, tmp_path: Path, backbone: Any) -> None:
    with pytest.raises(InputError, match="decode gpu needs an NVIDIA GPU; the device is cpu; set decode to fast"):
        _on_gpu(backbone.preprocessing, CPU)
    summary = extract(plan(photos, out=tmp_path / "out", **settings(backbone, decode="gpu")))
    assert summary.computation is not None
    assert 0.99 < summary.computation.decoding["embedding"].min_cosine < 1
    with pytest.raises(Exception, match="of gpu decoded images, .* has a cosine of .*; use --decode exact"):
        extract(plan(photos, out=tmp_path / "no", **settings(backbone, decode="gpu", min_cosine=1.0)))


_on_gpu = Preprocessing.on_gpu


class MadeUpStream:
    """Work is queued on it by a transform, and done when it is waited for."""

    def __init__(self) -> None:
        self.queued = 0

    def synchronize(self) -> None:
        self.queued = 0


def test_nothing_is_queued_when_the_decoder_is_given_memory(
    photos: Path, backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvJPEG does not wait for kernels that still read the memory that it writes to."""
    stream, decode, calls = MadeUpStream(), device_decoding._decode_jpegs, list[int]()

    def transform(pictures: torch.Tensor) -> torch.Tensor:
        stream.queued += 1
        return backbone.preprocessing.transform_pixels(pictures)

    def decoded(contents: list[bytes], device: torch.device) -> list[torch.Tensor]:
        assert not stream.queued
        calls.append(len(contents))
        if len(contents) > 1:
            raise RuntimeError("insufficient memory")  # every call is repeated with fewer files
        return decode(contents, device)

    files = [plain_jpeg(path.read_bytes()) for path in sorted(photos.glob("[0-9].jpg"))]
    assert all(file is not None for file in files)
    decoder = JpegDecoder(CPU, transform)
    expected = decoder(files)  # type: ignore[arg-type]
    monkeypatch.setattr(decoder, "_stream", stream)
    monkeypatch.setattr(device_decoding, "_decode_jpegs", decoded)
    monkeypatch.setattr(device_decoding, "_PIXELS_AT_ONCE", 250_000)  # two or three pictures
    found = decoder(files)  # type: ignore[arg-type]
    assert len([size for size in calls if size > 1]) > 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True) if one is not None)
    assert None not in found
