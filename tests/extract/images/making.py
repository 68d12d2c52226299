"""Files of images, and servers of them, for tests; batches of them as small tensors."""

from __future__ import annotations

import contextlib
import http.server
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from extract.images import Batch, Decoding, Images, load_batches
from tests.conftest import TINY_INPUT
from tests.planning import NET

__all__ = ["TINY", "Quiet", "as_tensor", "batch_of", "encoded", "files_of", "served", "tiff_with_its_tags_first",
           "touch", "turned", "write_archive", "write_tar"]  # fmt: skip

# For `extract_features`, in tests that are not about the network.
TINY: dict[str, Any] = NET | {"preprocessing": TINY_INPUT}


def as_tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture.resize((8, 8))))


def batch_of(images: Images, rows: list[int]) -> Batch:
    """These rows, decoded in this process."""
    [batch] = load_batches(images, [rows], Decoding(as_tensor, workers=0))
    return batch


def encoded(picture: Image.Image | np.ndarray, kind: str = "JPEG", **options: Any) -> bytes:
    """The bytes of a file of this kind."""
    file = io.BytesIO()
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(np.ascontiguousarray(picture))
    image.save(file, kind, **options)
    return file.getvalue()


def turned(picture: Image.Image | np.ndarray, orientation: int, kind: str = "JPEG", **options: Any) -> bytes:
    """A file of these pixels whose EXIF data say how they are turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture, kind, exif=exif, **options)


def tiff_with_its_tags_first(picture: Image.Image, compression: str) -> bytes:
    """A compressed TIFF of one strip whose tags lie before its pixels, as tifffile and scanners write them."""
    plain = encoded(picture, "TIFF", compression=compression, strip_size=1 << 24)
    with Image.open(io.BytesIO(plain)) as image:
        tags = image.tag_v2
        [offset], [count] = tags[273], tags[279]
        kept = {tag: tags[tag] for tag in (256, 257, 258, 259, 262, 277, 278)}
        tables = tags.get(347, b"")  # of JPEG in TIFF
    values = {tag: value if isinstance(value, tuple) else (value,) for tag, value in kept.items()}
    after = 8 + 2 + 12 * (len(values) + 2 + bool(tables)) + 4
    bits, strip = after, after + 6 + len(tables)
    entries = [struct.pack("<HHII", tag, 4, 1, value[0]) for tag, value in values.items() if tag != 258]
    entries += [struct.pack("<HHII", 258, 3, 3, bits), struct.pack("<HHII", 273, 4, 1, strip)]
    entries += [struct.pack("<HHII", 279, 4, 1, count)]
    entries += [struct.pack("<HHII", 347, 7, len(tables), after + 6)] if tables else []
    entries.sort(key=lambda entry: struct.unpack("<H", entry[:2]))
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return head + struct.pack("<3H", *values[258]) + tables + plain[offset : offset + count]


def touch(root: Path, *names: str) -> Path:
    """Write files of one byte."""
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def files_of(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return dict(sorted(found.items(), key=lambda item: item[0].encode()))


def write_tar(path: Path, files: dict[str, bytes], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    """Write a tar or a zip, as the name says."""
    if path.suffix == ".tar":
        return write_tar(path, files)
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in files.items():
            zipped.writestr(name, data)
    return path


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def served(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """A web server; its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
