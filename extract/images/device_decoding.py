"""Decode JPEG files and resize their pictures on a GPU: `--decode gpu`.

Workers read the files, and decode what the GPU does not take: other formats, CMYK, broken files (`plain_jpeg`). The
others are decoded on the GPU by this process, batch by batch; what fails there is decoded exactly, one by one.

torchvision's decoder is by nvJPEG. Its hardware engine writes at once, and does not wait for kernels that are queued on
the stream (pytorch/vision#9606, meta-pytorch/torchcodec#1634): memory that was freed while a kernel was still to read
it was overwritten in 134 of 200 trials on an H100. PyTorch hands freed memory out again only in the stream that it
belongs to. So all decoding and resizing has a stream of its own, which is empty before each call of nvJPEG.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from PIL import Image
from torch import Tensor

from extract.errors import MachineError
from extract.images.decoding import Jpeg

__all__ = ["JpegDecoder", "upright"]

_PIXELS_AT_ONCE = 50_000_000  # decoded: 150 MB, and four times as much while it is resized


class JpegDecoder:
    """Decodes JPEG files on a device and transforms the pictures. On a CPU it does the same by libjpeg, for tests.

    Args:
        device: the device.
        transform: pictures (N, 3, H, W) uint8 of one size -> images (N, *shape), in the same stream.

    Raises:
        MachineError: torchvision cannot decode on this device.
    """

    def __init__(self, device: torch.device, transform: Callable[[Tensor], Tensor]):
        self.device, self._transform = device, transform
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        file = io.BytesIO()
        Image.new("RGB", (16, 16)).save(file, "JPEG")
        with self.in_stream():
            can_decode = self._decoded([Jpeg(file.getvalue(), (16, 16), 1)]) != [None]
        if not can_decode:
            raise MachineError(
                f"this torchvision cannot decode JPEG files on {device}: it was built without nvJPEG",
                hint="use --decode fast",
            )

    def __call__(self, files: Sequence[Jpeg]) -> list[Tensor | None]:
        """Return the transformed picture of each file, upright; None for files that cannot be decoded.

        Called inside `in_stream`.
        """
        images: list[Tensor | None] = [None] * len(files)
        for group in _groups(files):
            by_size: dict[torch.Size, list[tuple[int, Tensor]]] = {}
            for position, picture in zip(group, self._decoded([files[i] for i in group]), strict=True):
                if picture is not None:
                    turned = upright(picture, files[position].orientation)
                    by_size.setdefault(turned.shape, []).append((position, turned))
            for alike in by_size.values():
                transformed = self._transform(torch.stack([picture for _, picture in alike]))
                for (position, _), image in zip(alike, transformed, strict=True):
                    images[position] = image
        return images

    @contextlib.contextmanager
    def in_stream(self) -> Iterator[None]:
        """Context manager: operations are queued on the stream of the decoder."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            yield

    def hand_over(self, images: Tensor) -> None:
        """Make the caller's stream wait for images, and keep their memory until that stream has read them."""
        if self._stream is not None and images.device.type == "cuda":
            caller = torch.cuda.current_stream(self.device)
            caller.wait_stream(self._stream)
            images.record_stream(caller)

    def drain(self) -> None:
        """Wait until nothing reads memory that the decoder may be given."""
        if self._stream is not None:
            self._stream.synchronize()

    def _decoded(self, files: Sequence[Jpeg]) -> list[Tensor | None]:
        """Return (3, H, W) uint8 of each file, as stored; None for files that cannot be decoded."""
        self.drain()
        try:
            pictures = _decode_jpegs([file.data for file in files], self.device)
        except RuntimeError:  # of one file, or of insufficient memory: there are no partial results
            if len(files) == 1:
                return [None]
            half = len(files) // 2
            return self._decoded(files[:half]) + self._decoded(files[half:])
        return [
            picture if picture.shape == (3, *file.size) else None for picture, file in zip(pictures, files, strict=True)
        ]


def _decode_jpegs(contents: list[bytes], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    tensors = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 0.29 on, torchcodec is to replace it
        decoded: list[Tensor] = decode_jpeg(tensors, mode=ImageReadMode.RGB, device=device)
    return decoded


def _groups(files: Sequence[Jpeg]) -> Iterator[list[int]]:
    """Split the positions of files into groups of a limited number of pixels, each with at least one file."""
    group: list[int] = []
    pixels = 0
    for position, file in enumerate(files):
        more = file.size[0] * file.size[1]
        if group and pixels + more > _PIXELS_AT_ONCE:
            yield group
            group, pixels = [], 0
        group.append(position)
        pixels += more
    if group:
        yield group


def upright(picture: Tensor, orientation: int) -> Tensor:
    """Apply an EXIF orientation, 1 to 8, to a picture (..., H, W), as `PIL.ImageOps.exif_transpose` does."""
    turned = picture.transpose(-1, -2) if orientation >= 5 else picture
    if orientation in (2, 3, 6, 7):
        turned = turned.flip(-1)
    if orientation in (3, 4, 7, 8):
        turned = turned.flip(-2)
    return turned
