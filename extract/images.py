"""Images: list them in a fixed order, decode them, and send them through a DataLoader as uint8.

A file is decoded whole or not at all. A file that cannot be decoded is still an item, with a status and a reason: it is
never replaced by a made-up picture and never dropped from the count.
"""

from __future__ import annotations

import functools
import io
import os
import signal
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from extract.errors import InputError
from extract.status import Status

__all__ = ["Batch", "ImageFolder", "decode", "list_images", "load_batches", "to_picture"]

IMAGE_SUFFIXES = frozenset({
    ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga",
    ".tif", ".tiff", ".webp",
})  # fmt: skip
_LITTER = frozenset({"thumbs.db", "desktop.ini"})  # what operating systems leave in folders, besides hidden files
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_GIVE_UP_S = 600  # without any batch: a worker that cannot send one, or a file system that hangs
_BACKGROUND = (255, 255, 255)  # what transparent pixels are laid over


@dataclass(frozen=True)
class ImageFolder:
    """The images below a folder, sorted by the bytes of their path.

    Attributes:
        root: the folder.
        paths: relative to it, with `/`; bytes that are not UTF-8 as in `os.fsdecode`.
        labels: (N,) int64, index into `classes`; -1 for an image that lies in no class folder.
        classes: names of the class folders, sorted.
        splits: `train`, `val`, `test` or empty, for each image.
        left_out: suffix -> number of files that are not images.
    """

    root: Path
    paths: list[str]
    labels: NDArray[np.int64]
    classes: list[str]
    splits: list[str]
    left_out: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.paths)


def list_images(root: str | os.PathLike[str], limit: int | None = None) -> ImageFolder:
    """List the images below a folder, links followed, hidden files left out.

    The first folder below the root is the class. Where every folder below the root is called train, val (valid,
    validation) or test, it is the split, and the class is the folder below that.

    Args:
        root: the folder.
        limit: at most so many images, the first in order.

    Raises:
        InputError: no such folder, or no image in it.
    """
    root = Path(root)
    if not root.is_dir():
        raise InputError(f"{root}: " + ("not a folder" if root.exists() else "no such folder"))
    paths: list[str] = []
    left_out: Counter[str] = Counter()
    for path in _files_below(str(root)):
        suffix = os.path.splitext(path)[1].lower()  # noqa: PTH122  a Path for each of a million files is slow
        if suffix in IMAGE_SUFFIXES:
            paths.append(path)
        else:
            left_out[suffix or "no suffix"] += 1
    if not paths:
        found = ", ".join(f"{suffix} {count}" for suffix, count in left_out.most_common(5))
        seen = f"none of its {left_out.total():,} files is an image ({found})" if left_out else "the folder is empty"
        raise InputError(f"{root}: no images; {seen}. Images end in {' '.join(sorted(IMAGE_SUFFIXES))}")
    paths.sort(key=os.fsencode)
    labels, classes, splits = _labels_from_folders(paths)  # of all: a limit must not change what a folder means
    return ImageFolder(root, paths[:limit], labels[:limit], classes, splits[:limit], left_out)


def _files_below(root: str) -> Iterator[str]:
    """Relative paths of all files below a folder; links are followed, but not into a folder that holds them."""
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        folder, above = waiting.pop()
        full = os.path.join(root, folder)  # noqa: PTH118
        try:
            here = os.stat(full)  # noqa: PTH116
            identity = (here.st_dev, here.st_ino)
            if identity in above:
                continue
            with os.scandir(full) as scan:
                entries = list(scan)
        except OSError as error:
            raise InputError(f"{full}: the folder cannot be read: {error.strerror}") from error
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _LITTER:
                continue
            relative = f"{folder}/{entry.name}" if folder else entry.name
            if _is_folder(entry):
                waiting.append((relative, above | {identity}))
            else:
                yield relative


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _labels_from_folders(paths: Sequence[str]) -> tuple[NDArray[np.int64], list[str], list[str]]:
    folders = [path.split("/")[:-1] for path in paths]
    top = {parts[0] for parts in folders if parts}
    # `train` beside `airplane` and `bus` is a class; only where all are names of splits are they splits.
    split_level = bool(top) and all(name.lower() in _SPLITS for name in top)
    splits = [_SPLITS[parts[0].lower()] if split_level and parts else "" for parts in folders]
    names = [parts[split_level] if len(parts) > split_level else None for parts in folders]
    classes = sorted({name for name in names if name is not None}, key=os.fsencode)
    index = {name: i for i, name in enumerate(classes)}
    labels = np.array([-1 if name is None else index[name] for name in names], np.int64)
    return labels, classes, splits


def decode(data: bytes) -> Image.Image:
    """Decode the bytes of an image file to an upright RGB picture.

    The EXIF orientation is applied. Transparent pixels are laid over white. 16-bit grey is scaled to 8 bits. Of an
    animation, the first frame counts. Colour profiles are not applied.

    Raises:
        ValueError: not an image, truncated, damaged, of a kind without a known range (float pixels), or so large that
            it must be a decompression bomb (over 179 million pixels, Pillow's limit).
    """
    if not data:
        raise ValueError("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of images below the limit that are merely large
            image: Image.Image = Image.open(io.BytesIO(data), formats=_formats())
            image.load()  # the whole picture: a truncated file fails here
            return to_picture(image)
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise ValueError("not an image in a known format") from None
    except Exception as error:  # Pillow's decoders raise nearly everything on damaged files: SyntaxError, struct.error
        raise ValueError(str(error) or type(error).__name__) from error


def to_picture(image: Image.Image) -> Image.Image:
    """An upright RGB picture, by the rules of `decode`.

    Raises:
        ValueError: of a kind without a known range (float pixels).
    """
    return _to_rgb(_upright(image))


@functools.cache
def _formats() -> list[str]:
    """Pillow's names of the formats in `IMAGE_SUFFIXES` that it was built with.

    No others: a file that calls itself .jpg must not reach, say, the EPS plugin, which runs a PostScript interpreter.
    """
    known = Image.registered_extensions()
    return sorted({known[suffix] for suffix in IMAGE_SUFFIXES if known.get(suffix) in Image.OPEN})


def _upright(image: Image.Image) -> Image.Image:
    """The picture as its EXIF orientation asks for it; metadata that cannot be read ask for nothing."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except Exception:  # Pillow raises nearly everything on damaged metadata; the pixels are whole
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")  # 16-bit grey
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels have no known range; convert the file to 8 or 16 bits")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        background = Image.new("RGBA", layer.size, (*_BACKGROUND, 255))
        return Image.alpha_composite(background, layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


class Item(NamedTuple):
    """One image as a worker sends it; `image` is None unless `status` is OK."""

    row: int
    image: Tensor | None
    status: Status
    reason: str
    size: int
    mtime_ns: int
    content_hash: bytes


class Batch(NamedTuple):
    """Some rows of a shard and the images of those that could be decoded.

    Attributes:
        rows: (R,) int64.
        images: (B, H, W, 3) uint8 (or what `prepare` returns, stacked), B <= R.
        status: (R,) uint8; B of them are OK, in the order of `images`.
        reasons: row -> why there is no image.
        source_size, source_mtime_ns: (R,) int64, bytes and nanoseconds; -1 where there is no file.
        source_hash: (R, 16) uint8, xxh3-128 of the file's bytes; zero where there is no file.
    """

    rows: NDArray[np.int64]
    images: Tensor
    status: NDArray[np.uint8]
    reasons: dict[int, str]
    source_size: NDArray[np.int64]
    source_mtime_ns: NDArray[np.int64]
    source_hash: NDArray[np.uint8]


class _ImageFiles(Dataset[Item]):
    """Row -> decoded image. The paths are one block of bytes: worker processes share it without copying."""

    def __init__(self, root: Path, paths: Sequence[str], prepare: Callable[[Image.Image], Tensor]):
        encoded = [os.fsencode(path) for path in paths]
        self._root = os.fsencode(root)
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self._prepare = prepare

    def __len__(self) -> int:
        return len(self._ends)

    def _path(self, row: int) -> bytes:
        start = self._ends[row - 1] if row else 0
        return os.path.join(self._root, self._bytes[start : self._ends[row]].tobytes())  # noqa: PTH118

    def __getitem__(self, row: int) -> Item:
        size, mtime_ns, content_hash = -1, -1, bytes(16)
        try:
            # A pipe must not be waited for.
            with open(os.open(self._path(row), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError("not a file")
                data = file.read()
            size, mtime_ns = status.st_size, status.st_mtime_ns
            content_hash = xxhash.xxh3_128_digest(data)
            image = self._prepare(decode(data))
        except FileNotFoundError:
            return Item(row, None, Status.MISSING, "no such file", size, mtime_ns, content_hash)
        except OSError as error:
            reason = error.strerror or str(error)
            return Item(row, None, Status.DECODE_ERROR, reason, size, mtime_ns, content_hash)
        except ValueError as error:
            return Item(row, None, Status.DECODE_ERROR, str(error), size, mtime_ns, content_hash)
        except MemoryError:
            return Item(row, None, Status.DECODE_ERROR, "too large for the memory", size, mtime_ns, content_hash)
        return Item(row, image, Status.OK, "", size, mtime_ns, content_hash)


def _collate(items: list[Item]) -> Batch:
    images = [item.image for item in items if item.image is not None]
    return Batch(
        rows=np.array([item.row for item in items], np.int64),
        images=torch.stack(images) if images else torch.empty(0, dtype=torch.uint8),
        status=np.array([item.status for item in items], np.uint8),
        reasons={item.row: item.reason for item in items if item.reason},
        source_size=np.array([item.size for item in items], np.int64),
        source_mtime_ns=np.array([item.mtime_ns for item in items], np.int64),
        source_hash=np.frombuffer(b"".join(item.content_hash for item in items), np.uint8).reshape(-1, 16),
    )


def load_batches(
    images: ImageFolder,
    batches: Iterable[list[int]],
    prepare: Callable[[Image.Image], Tensor],
    *,
    workers: int,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Decode the rows of each batch, in worker processes, and yield the batches in the order given.

    Args:
        images: what the rows mean.
        batches: rows of each batch; read lazily.
        prepare: RGB picture -> tensor, run in the worker.
        workers: processes; 0 decodes in this one.
        pin_memory: for copies to a GPU.
    """
    loader: Any = DataLoader(
        _ImageFiles(images.root, images.paths, prepare),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_the_main_process,
        timeout=_GIVE_UP_S if workers else 0,
    )
    return iter(loader)


def _leave_signals_to_the_main_process(worker: int) -> None:
    """Ctrl-C, and a service manager's SIGTERM, reach every process; the main one alone decides how to end.

    The first SIGTERM is let by; a second, which the DataLoader sends to a worker that hangs, ends the worker.
    """

    def let_by(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, let_by)
