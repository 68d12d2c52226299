"""Limits on the bytes of a file and on the pixels that preprocessing makes. No test takes the memory it is about."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from extract import defaults
from extract.backbones.preprocessing import Preprocessing, from_hf, from_transform
from extract.images import Images, list_images
from extract.images.decoding import decode
from extract.images.sources import TooLargeError, read_remote
from extract.row_status import Status
from tests.conftest import make_picture
from tests.extract.images.making import Quiet, as_tensor, batch_of, encoded, served


def sparse(path: Path, size: int, start: bytes = b"") -> Path:
    """A file of this size that takes no room on the disk."""
    path.write_bytes(start)
    os.truncate(path, size)
    return path


def reason(images: Images, row: int = 0) -> str:
    """Why a row has no image; read in this process."""
    batch = batch_of(images, [row])
    assert batch.status.tolist() == [Status.DECODE_ERROR]
    return batch.reasons[row]


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def test_a_file_of_too_many_bytes_is_not_read_from_a_folder_a_list_or_an_archive(tmp_path: Path) -> None:
    picture = encoded(make_picture(1))
    size = (1 << 30) + 1
    before = peak_mb()
    (tmp_path / "a").mkdir()
    sparse(tmp_path / "a" / "x.jpg", size, picture)
    (tmp_path / "a.csv").write_text("path\na/x.jpg\n")
    header = tarfile.TarInfo("x.jpg")
    header.size = size
    sparse(tmp_path / "a.tar", 512 + -(-size // 512) * 512 + 1024, header.tobuf() + picture)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("x.jpg", picture)
    packed = (tmp_path / "a.zip").read_bytes()
    at = packed.index(b"PK\1\2") + 24  # the size after unpacking in the directory (APPNOTE.TXT 4.3.12)
    (tmp_path / "a.zip").write_bytes(packed[:at] + size.to_bytes(4, "little") + packed[at + 4 :])
    for name in ("a", "a.csv", "a.tar", "a.zip"):
        expected = "1,073,741,825 bytes; the limit for an image file is 1,073,741,824"
        assert reason(list_images(tmp_path / name)) == expected, name
    assert peak_mb() - before < 300


def test_the_limit_of_bytes_holds_for_files_behind_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(make_picture(1))
    (tmp_path / "x.jpg").write_bytes(data)
    fsspec.filesystem("memory").pipe({"/limit/x.jpg": data, "/limit/y.jpg": b""})
    with served(functools.partial(Quiet, directory=str(tmp_path))) as server:
        (tmp_path / "one.csv").write_text(f"path\n{server}/x.jpg\n")
        for where in ("memory://limit", tmp_path / "one.csv"):
            images = list_images(where)
            monkeypatch.setattr(defaults, "MAX_FILE_BYTES", len(data))
            assert torch.equal(batch_of(images, [0]).images[0], as_tensor(decode(data)))
            monkeypatch.setattr(defaults, "MAX_FILE_BYTES", len(data) - 1)
            assert reason(images) == f"{len(data):,} bytes; the limit for an image file is {len(data) - 1:,}"
    assert reason(list_images("memory://limit"), 1) == "empty file"


def test_a_file_behind_http_of_unknown_size_is_received_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    class Endless(Quiet):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(10_000):
                    sent.append(self.wfile.write(bytes(1 << 16)))

    monkeypatch.setattr(defaults, "MAX_FILE_BYTES", 1_000_000)
    with served(Endless) as server, pytest.raises(TooLargeError, match="the limit for an image file is 1,000,000"):
        read_remote(f"{server}/x.jpg", is_image=True)
    assert sum(sent) < 100_000_000


# Pictures that preprocessing makes


def clip(picture: Image.Image) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    return torch.as_tensor(transformers.CLIPImageProcessor()(picture, return_tensors="pt")["pixel_values"][0])


OWN = Preprocessing(64, (64, 64), "bilinear", (0.0,) * 3, (1.0,) * 3)
TRANSFORMS: dict[str, Callable[[], Preprocessing]] = {
    "own": lambda: OWN,
    "own, fast": OWN.faster,
    "CLIP of transformers": lambda: from_hf(pytest.importorskip("transformers").CLIPImageProcessor()),
    "a function that calls it": lambda: from_transform(clip, "clip"),
    "torchvision, on pictures": lambda: from_transform(
        transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor()]), "x"
    ),
    "torchvision, on tensors": lambda: from_transform(
        v2.Compose([v2.PILToTensor(), v2.Resize(64), v2.CenterCrop(64), v2.ToDtype(torch.float32, scale=True)]), "x"
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("size", [(65535, 1), (1, 50000)])
def test_no_transform_makes_a_huge_picture_of_a_thin_one(name: str, size: tuple[int, int]) -> None:
    preprocessing = TRANSFORMS[name]()
    before = peak_mb()
    message = rf"^{size[0]}x{size[1]} pixels: too thin; .*; the limit is 178,956,970$"
    with pytest.raises(ValueError, match=message):
        preprocessing.cpu_transform(Image.new("RGB", size))
    assert peak_mb() - before < 300
    small = make_picture(1, 60, 50)  # and what is allowed has the pixels that it had
    expected = preprocessing.library_transform(small) if preprocessing.library_transform else None
    assert expected is None or torch.equal(preprocessing.cpu_transform(small), expected)
