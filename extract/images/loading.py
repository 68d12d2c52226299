"""Load images through a DataLoader: worker processes read, decode and prepare them; batches come in order."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import mmap
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, current_process, get_all_start_methods, get_start_method
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType, MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from extract import defaults
from extract.credentials import text_without_credentials
from extract.errors import InputError, LayertapError, MachineError, first_line, is_of_the_machine
from extract.images.decoding import (
    AS_DEFAULT,
    NOTE,
    DecodeOptions,
    Jpeg,
    check_decoders,
    pixels_of,
    plain_jpeg,
    too_dark,
)
from extract.images.device_decoding import JpegDecoder
from extract.images.image_list import Images
from extract.images.sources import UNKNOWN, BrokenListError, ImageSource, UnreachableError
from extract.row_status import Status

__all__ = [
    "Batch", "Batches", "DeadWorkerError", "Decoding", "KeptBatches", "Load", "load_batches", "stop_on_machine_errors",
]  # fmt: skip

_LOOK_S = 1  # between looks for dead workers; a process that closes its files exits within this time
_SUSPECT = 32  # consecutive images with the same failure, unlikely to be their own; fewer may be dead links
_GIVE_UP_S = 600  # without any image: a worker cannot send, or a file system hangs

# A batch is split into pieces, so that consecutive huge pictures are shared among the workers: the wait for ten photos
# of 100 megapixels among 400 small ones was 2.4 s, with whole batches 4.0 s. Their number is limited, as each waiting
# piece may take a file descriptor.
_PIECES = 16
_LEAST_PIECE = 4  # images; sending small images singly would cost as much as decoding them
_BATCHES_AHEAD = 2  # for each worker
_FILES_AHEAD = 4  # batches of files that a device is to decode, for all workers: files may be large
_BATCHES_IN_USE = 4  # by the main process: one is joined, one computed, one written, and one is being freed

# Without memory for a picture of fewer pixels, no picture can be decoded. Decoding takes up to 16 bytes per pixel.
_NOT_MANY_PIXELS = 50_000_000

TOO_DARK = (
    "all of its 16-bit pixels are below 4,096, and only their upper 8 bits are used, so the picture is nearly black. "
    "If these are 12-bit values, multiply them by 16"
)

# A disk or server fails or is unavailable: the file may be readable later.
_IO_ERRORS = {errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOLINK,
              errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
              errno.ENETDOWN, errno.ENETUNREACH, errno.EAGAIN, errno.EINTR}  # fmt: skip


_OF_PREPROCESSING = ("cpu_transform", "shape", "device", "transform_pixels")


@dataclass(frozen=True)
class Decoding:
    """Settings for decoding images.

    Attributes:
        cpu_transform: RGB picture, and kind and number of a view for rows that are views -> tensor, run in the process
            that decodes.
        options: how files are decoded.
        workers: number of worker processes; 0 decodes in the calling process, as does any number in a process that may
            start none (a worker of `multiprocessing.Pool`, of joblib or of a `DataLoader`).
        batch_size: rows in most batches; each worker decodes about two batches ahead.
        shape: (H, W, 3) of what `cpu_transform` returns, if that is uint8 and alike for all pictures, else None.
        device: device that decodes JPEG files and holds the images then; empty: none.
        transform_pixels: pictures (N, 3, H, W) on the device -> (N, *shape).
        place: pictures are prepared whole: size, box of a row -> the box in its image, see `Preprocessing.in_input`;
            None: boxes are cut out of pictures.
    """

    cpu_transform: Callable[..., Tensor]
    options: DecodeOptions = AS_DEFAULT
    workers: int = 0
    batch_size: int = defaults.BATCH_SIZE
    shape: tuple[int, int, int] | None = None
    device: str = ""
    transform_pixels: Callable[[Tensor], Tensor] | None = None
    place: Callable[[tuple[int, int], Any], tuple[tuple[float, ...], str]] | None = None

    @classmethod
    def for_preprocessing(
        cls, preprocessing: Any, max_pixels: int, workers: int = 0, batch_size: int = defaults.BATCH_SIZE
    ) -> Decoding:
        """Return the settings for a backbone's preprocessing (`extract.backbones.preprocessing.Preprocessing`)."""
        parts = {name: getattr(preprocessing, name) for name in _OF_PREPROCESSING}
        place = preprocessing.in_input if preprocessing.of_boxes else None
        options = DecodeOptions(
            max_pixels, preprocessing.min_decode_px, preprocessing.orientation, preprocessing.icc
        )  # fmt: skip
        return cls(options=options, workers=workers, batch_size=batch_size, place=place, **parts)


class Batch(NamedTuple):
    """Rows, and the images of the rows that could be decoded.

    Attributes:
        rows: (R,) int64.
        images: (B, H, W, 3) uint8 (or what `cpu_transform` returns, stacked), B <= R.
        status: (R,) uint8; B of them are OK, in the order of `images`.
        reasons: row -> reason why it has no image.
        suspect: row -> kind of its failure, if the image is hardly the cause but a disk, a server, the memory or a
            transform. Many consecutive failures of one kind are a machine error.
        source_size, source_mtime_ns: (R,) int64, bytes and nanoseconds; -1 if the file was not read or has no known
            modification time.
        source_hash: (R, 16) uint8, xxh3-128 of the file's bytes, see `ImageSource.content_hash`; zero if it was not
            read.
        notes: row -> what the user should know of an image that was decoded.
        jpegs: row -> the file of an image that a device is to decode; in no batch that `load_batches` yields.
        boxes: row -> the first row of its picture, and left, upper, right and lower edge of its box in pixels of the
            image; empty unless images are whole pictures.
    """

    rows: NDArray[np.int64]
    images: Tensor
    status: NDArray[np.uint8]
    reasons: dict[int, str]
    suspect: dict[int, str]
    source_size: NDArray[np.int64]
    source_mtime_ns: NDArray[np.int64]
    source_hash: NDArray[np.uint8]
    notes: Mapping[int, str] = MappingProxyType({})
    jpegs: Mapping[int, Jpeg] = MappingProxyType({})
    boxes: Mapping[int, tuple[float, ...]] = MappingProxyType({})

    @property
    def source(self) -> dict[str, NDArray[Any]]:
        """The columns about the source files, by their names in the store."""
        return {name: getattr(self, name) for name in ("source_size", "source_mtime_ns", "source_hash")}

    def select(self, positions: Sequence[int]) -> Batch:
        """Return some of the rows, by their ascending positions in the batch."""
        good = np.cumsum(self.status == Status.OK) - 1  # position -> position of its image
        chosen = [int(good[i]) for i in positions if self.status[i] == Status.OK]
        rows = set(self.rows[positions].tolist())
        arrays: dict[str, Any] = {name: getattr(self, name)[positions] for name in _ARRAYS}
        reasons = {row: reason for row, reason in self.reasons.items() if row in rows}
        return self._replace(images=self.images[chosen], reasons=reasons, **arrays)


_NO_IMAGES = torch.empty(0, dtype=torch.uint8)
# Fields of `Batch`: arrays with a value for each row, and what some rows have.
_ARRAYS = ("rows", "status", "source_size", "source_mtime_ns", "source_hash")
_OF_SOME_ROWS = ("reasons", "suspect", "notes", "jpegs", "boxes")


class _SharedBatches:
    """Memory of this process and its forked workers, which write the pictures of a batch to where they are used.

    Sent through PyTorch's queue, a piece of a batch takes a file descriptor, a connection to the worker, and a copy to
    the batch: together 80 us a picture, in the process that serves all workers.

    Args:
        count: number of batches.
        shape: (B, H, W, 3).
    """

    def __init__(self, count: int, shape: tuple[int, ...]):
        memory = mmap.mmap(-1, count * math.prod(shape))  # no file: containers have few bytes of /dev/shm
        self._batches = np.frombuffer(memory, np.uint8).reshape(count, *shape)
        self._free = list(range(count))

    def take(self) -> int | None:
        """Return the number of a batch whose memory nobody uses; None if there is none."""
        return self._free.pop() if self._free else None

    def write(self, batch: int, position: int, image: Tensor) -> None:
        """Write an image of a batch."""
        self._batches[batch, position] = image.numpy()

    def images(self, batch: int, status: NDArray[np.uint8]) -> Tensor:
        """Return the images of a batch, whose memory is used again when no tensor or array refers to it any more."""
        view = self._batches[batch, : len(status)]
        weakref.finalize(view, self._free.append, batch).atexit = False
        images, is_good = torch.from_numpy(view), status == Status.OK
        return images if is_good.all() else images[torch.from_numpy(is_good)]


class _Piece(NamedTuple):
    """Consecutive rows of a batch, decoded by one worker.

    Attributes:
        rows: the rows.
        batch: number of the batch in `_SharedBatches`; None if the images are sent.
        start: position of the first row in the batch.
    """

    rows: list[int]
    batch: int | None
    start: int


class _Sent(NamedTuple):
    """A batch that was passed to the workers.

    Attributes:
        rows: number of its rows.
        images_of: receives their status, and returns their images in shared memory; None if the images are sent.
    """

    rows: int
    images_of: Callable[[NDArray[np.uint8]], Tensor] | None


class _Decoded(Dataset[Batch | LayertapError]):
    """Row -> batch of it, or an error that ends the run: DataLoader would not keep the message of a raised error."""

    def __init__(self, source: ImageSource, decoding: Decoding, shared: _SharedBatches | None):
        self._source, self._decoding, self._shared = source, decoding, shared
        # Of the last picture, which boxes of it share: its file, row, and image.
        self._prepared: tuple[Any, int, Tensor] = None, -1, _NO_IMAGES

    def __getitems__(self, piece: _Piece) -> list[Batch | LayertapError]:
        """Decode the rows of a piece; the batches of images in shared memory have none."""
        items = []
        for position, row in enumerate(piece.rows, piece.start):
            item = self[row]
            if piece.batch is not None and isinstance(item, Batch) and len(item.images):
                assert self._shared is not None
                self._shared.write(piece.batch, position, item.images[0])
                item = item._replace(images=_NO_IMAGES)
            items.append(item)
        return items

    def __getitem__(self, row: int) -> Batch | LayertapError:
        data, how, box = b"", self._decoding, cast("tuple[float, ...] | None", None)
        result = partial(_batch_of_row, row, -1, UNKNOWN, bytes(16))
        try:
            part = self._source.part(row)
            data, mtime_ns = self._source.read(row)
            result = partial(_batch_of_row, row, len(data), mtime_ns, self._source.content_hash(row, data))
            # A device decodes whole files.
            if how.device and part is None and (jpeg := plain_jpeg(data, how.options)):
                return result(Status.OK, jpeg=jpeg)
            if how.place is None:
                picture = self._source.picture(row, data, how.options)
                note = picture.info.get(NOTE, "")
            else:
                picture, window, of_window = self._source.whole(row, data, how.options)
                box, note = how.place(picture.size, window)
                note = of_window or note
        except Exception as error:
            if isinstance(error, BrokenListError) or (
                isinstance(error, LayertapError) and not isinstance(error, InputError)
            ):  # of the list, the machine, or a library that is not installed
                return error
            if is_of_the_machine(error) or (isinstance(error, MemoryError) and pixels_of(data) < _NOT_MANY_PIXELS):
                return _machine_error(error, row)
            status, reason = _why(error)
            of_another = status is Status.IO_ERROR or isinstance(error, MemoryError)
            return result(status, reason=text_without_credentials(reason), suspect=_kind(error) if of_another else "")
        try:
            if how.place is None:
                view = part.view if part is not None else None
                image = how.cpu_transform(picture) if view is None else how.cpu_transform(picture, view)
            elif self._prepared[0] is not data:
                self._prepared = data, row, how.cpu_transform(picture)
        except LayertapError as error:  # a fault of the transform, not of this picture
            return error
        except Exception as error:  # a user's transform may raise any type
            if is_of_the_machine(error):
                return _machine_error(error, row)
            if isinstance(error, ValueError):
                return result(Status.DECODE_ERROR, reason=first_line(error))
            return result(Status.DECODE_ERROR, reason=f"its preprocessing failed: {error!r}", suspect=_kind(error))
        if box is not None:
            _, first_row, image = self._prepared
            box = (first_row, *box)
        return result(Status.OK, torch.stack([image]), note=TOO_DARK if too_dark(picture) else note, box=box)


def _batch_of_row(
    row: int, size: int, mtime_ns: int, content_hash: bytes, status: Status, images: Tensor = _NO_IMAGES, *,
    reason: str = "", suspect: str = "", note: str = "", jpeg: Jpeg | None = None, box: tuple[float, ...] | None = None,
) -> Batch:  # fmt: skip
    return Batch(
        rows=np.array([row], np.int64),
        images=images,
        status=np.array([status], np.uint8),
        reasons={row: reason} if reason else {},
        suspect={row: suspect} if suspect else {},
        source_size=np.array([size], np.int64),
        source_mtime_ns=np.array([mtime_ns], np.int64),
        source_hash=np.frombuffer(content_hash, np.uint8)[None],
        notes={row: note} if note else {},
        jpegs={row: jpeg} if jpeg else {},
        boxes={row: box} if box else {},
    )


def _why(error: Exception) -> tuple[Status, str]:
    """Return the status of a row whose image cannot be read or decoded, and the reason.

    Raises:
        Exception: the error itself, if its type is not one that files cause.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Status.MISSING, "no such file"
    if isinstance(error, UnreachableError) or (isinstance(error, OSError) and error.errno in _IO_ERRORS):
        return Status.IO_ERROR, error.strerror or first_line(error)
    if isinstance(error, OSError):
        return Status.DECODE_ERROR, error.strerror or first_line(error)
    if isinstance(error, MemoryError):
        return Status.DECODE_ERROR, "too large for the memory"
    if isinstance(error, ValueError):
        return Status.DECODE_ERROR, str(error) or type(error).__name__
    raise error


def _kind(error: Exception) -> str:
    """Return the type and errno of an error, which errors of other images share; its message may name the image."""
    number = error.errno if isinstance(error, OSError) else None
    return f"{type(error).__name__} {number or ''}"


def _machine_error(error: Exception, row: int) -> MachineError:
    what = (getattr(error, "strerror", "") or first_line(error)) + f" (at row {row:,})"
    remedy = "free or add memory, or lower --workers"
    if isinstance(error, ImportError):
        remedy = "repair the installation"
    elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit of open files (ulimit -n), or lower --workers"
    return MachineError(
        f"this machine can no longer read images: {what}. Stored rows are safe, and no row was marked as failed",
        hint=f"{remedy}, and run again",
    )


def _collate(decoded: list[Batch | LayertapError]) -> Batch | LayertapError:
    """Return a piece of a batch, or the first error. Its images are None if there are none to be sent."""
    for error in decoded:
        if isinstance(error, LayertapError):
            return error
    piece, none = _joined([batch for batch in decoded if isinstance(batch, Batch)], None), cast(Tensor, None)
    return piece if len(piece.images) else piece._replace(images=none)  # an empty tensor takes a file descriptor, too


def _joined(pieces: list[Batch], images_of: Callable[[NDArray[np.uint8]], Tensor] | None) -> Batch:
    """Join the pieces of a batch; for `images_of`, see `_Sent`."""
    arrays: dict[str, Any] = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in _ARRAYS}
    of_some: dict[str, Any] = {
        name: {row: value for piece in pieces for row, value in getattr(piece, name).items()} for name in _OF_SOME_ROWS
    }
    sent = [piece.images for piece in pieces if piece.images is not None and len(piece.images)]
    images = images_of(arrays["status"]) if images_of else torch.cat(sent) if sent else _NO_IMAGES
    return Batch(images=images, **arrays, **of_some)


def _decoded_on_device(batch: Batch, decoder: JpegDecoder, exact: _Decoded) -> Batch:
    """Return a batch whose JPEG files are decoded, with all images on the device.

    Args:
        batch: the batch; its images are those of other rows than its `jpegs`.
        decoder: decodes the files.
        exact: reads and decodes again what the device cannot decode.

    Raises:
        LayertapError: see `Batches`.
    """
    images: dict[int, Tensor] = {}  # row -> its image
    with decoder.in_stream():
        try:
            decoded = decoder(list(batch.jpegs.values()))
        except torch.OutOfMemoryError as error:
            raise LayertapError(
                f"insufficient device memory to resize pictures: {first_line(error)}", hint="use --decode fast"
            ) from error
        for row, image in zip(batch.jpegs, decoded, strict=True):
            if image is not None:
                images[row] = image
        others = [row for row in batch.rows[batch.status == Status.OK].tolist() if row not in batch.jpegs]
        images |= zip(others, batch.images.to(decoder.device), strict=True)
        for position in [i for i, row in enumerate(batch.rows.tolist()) if row in batch.jpegs and row not in images]:
            row = int(batch.rows[position])
            again = exact[row]
            if isinstance(again, LayertapError):
                raise again
            for name in _ARRAYS:
                getattr(batch, name)[position] = getattr(again, name)[0]
            for name in _OF_SOME_ROWS:
                getattr(batch, name).update(getattr(again, name))
            if len(again.images):
                images[row] = again.images[0].to(decoder.device)
        good = [images[row] for row in batch.rows.tolist() if row in images]
        together = torch.stack(good) if good else _NO_IMAGES
    decoder.hand_over(together)
    return batch._replace(images=together, jpegs={})


# A function such as `load_batches`.
Load = Callable[[Images, Iterable[list[int]], Decoding], "Batches | Generator[Batch, None, None]"]


def load_batches(images: Images, batches: Iterable[list[int]], decoding: Decoding) -> Batches:
    """Decode the rows of each batch in worker processes; batches come in the given order.

    Close the result (`contextlib.closing`) to end the workers: the process cannot exit while an exception refers to
    them.

    Args:
        images: the images that the rows index.
        batches: rows of each batch, no row in two batches; read lazily.
        decoding: settings for decoding.

    Raises:
        BrokenListError: while iterating; the image of a row cannot be determined.
        MachineError: at once or while iterating; this machine cannot decode images.
    """
    check_decoders()
    workers, batch_size = decoding.workers, decoding.batch_size
    if workers and not _may_start_processes():
        reason = "a worker of multiprocessing.Pool, of joblib or of a DataLoader may start no processes"
        warnings.warn(
            f"this process decodes the images itself, without {workers} worker processes: {reason}", stacklevel=2
        )
        workers = 0
    at_a_time = max(_LEAST_PIECE, -(-batch_size // _PIECES))
    sent: deque[_Sent] = deque()  # batches passed to the workers
    shared = None
    if workers and decoding.shape is not None and not decoding.device and _start_method() == "fork":
        with contextlib.suppress(OSError):  # more than this machine has: the images are sent
            shared = _SharedBatches(_BATCHES_AHEAD * workers + _BATCHES_IN_USE, (batch_size, *decoding.shape))

    def pieces() -> Iterator[_Piece]:
        for rows in batches:
            number = shared.take() if shared is not None and len(rows) <= batch_size else None
            sent.append(_Sent(len(rows), None if shared is None or number is None else partial(shared.images, number)))
            for start, stop in _pieces(rows, at_a_time, images.source):
                yield _Piece(rows[start:stop], number, start)

    with_workers: dict[str, Any] = {}
    if workers:
        batches_ahead = _FILES_AHEAD / workers if decoding.device else _BATCHES_AHEAD
        with_workers = {
            "prefetch_factor": max(2, math.ceil(batches_ahead * batch_size / at_a_time)),
            "worker_init_fn": partial(_start_worker, gc.isenabled()),
            "timeout": _LOOK_S,
        }
    complete: Callable[[Batch], Batch] | None = None
    if decoding.device:
        assert decoding.transform_pixels is not None
        decoder = JpegDecoder(torch.device(decoding.device), decoding.transform_pixels)
        exact = _Decoded(images.source, replace(decoding, device=""), None)
        complete = partial(_decoded_on_device, decoder=decoder, exact=exact)
    each_piece: Any = pieces()  # a piece is what `_Decoded.__getitems__` takes
    loader: Any = DataLoader(
        _Decoded(images.source, decoding, shared),
        batch_sampler=each_piece,
        num_workers=workers,
        collate_fn=_collate,
        **with_workers,
    )
    before = active_children()
    handler: Any = signal.getsignal(signal.SIGCHLD)
    with _no_collection():
        pieces_found = iter(loader)
    if workers and threading.current_thread() is threading.main_thread():  # only this thread sets and runs handlers
        # PyTorch's handler would raise an error as soon as a worker dies, in any code that this thread runs: while it
        # seals a shard, in a `finally`. `Batches` looks for dead workers while it waits.
        if getattr(handler, "__module__", "").startswith("torch.utils.data."):  # of an earlier DataLoader of the caller
            handler = partial(_without_deaths, handler)
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
    started = [process for process in active_children() if process not in before]
    return Batches(pieces_found, sent, started, complete)


def _pieces(rows: Sequence[int], at_a_time: int, source: ImageSource) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of a batch: parts of one file lie in one piece, so that one worker decodes it."""
    start = 0
    for stop in range(1, len(rows) + 1):
        is_last = stop == len(rows)
        if stop - start >= at_a_time or is_last:
            file = source.file(rows[stop - 1])
            if is_last or file is None or file != source.file(rows[stop]):
                yield start, stop
                start = stop


def _without_deaths(handler: Callable[[int, FrameType | None], None], number: int, frame: FrameType | None) -> None:
    """Run PyTorch's handler of SIGCHLD without its error. Each DataLoader also looks for dead workers every 5 s."""
    with contextlib.suppress(RuntimeError):
        handler(number, frame)


def _may_start_processes() -> bool:
    """Whether this process may start others with the default start method.

    A daemonic process may not. The start method of a worker of joblib, "loky", starts its own class of processes only.
    """
    return not current_process().daemon and _start_method() in get_all_start_methods()


def _start_method() -> str:
    """Return how processes are started, without settling it for a program that has not chosen yet."""
    return get_start_method(allow_none=True) or get_all_start_methods()[0]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Context manager: no garbage is collected inside, nor by processes forked inside until they allow it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DeadWorkerError(LayertapError):
    """A process that decodes images died."""


class Batches(Iterator[Batch]):
    """Iterator over decoded batches, returned by `load_batches`.

    Args:
        pieces: pieces of batches, in order.
        sent: batches whose pieces are still to come.
        workers: the processes that decode.
        complete: decodes the JPEG files of a batch; None if there are none.

    Raises:
        BrokenListError: from `next`; the image of a row cannot be determined.
        MachineError: from `next`; this machine cannot read images any more.
        DeadWorkerError: from `next`; a worker died.
        LayertapError: from `next`; a worker stopped sending.
    """

    def __init__(
        self,
        pieces: Iterator[Batch | LayertapError],
        sent: deque[_Sent],
        workers: Sequence[BaseProcess],
        complete: Callable[[Batch], Batch] | None = None,
    ):
        self._pieces, self._sent, self._workers, self._complete = pieces, sent, workers, complete

    def __next__(self) -> Batch:
        waiting: list[Batch] = []
        while True:
            piece = self._next_piece()
            if isinstance(piece, LayertapError):
                raise piece
            if piece is None:
                raise StopIteration
            waiting.append(piece)
            if sum(len(piece.rows) for piece in waiting) == self._sent[0].rows:
                batch = _joined(waiting, self._sent.popleft().images_of)
                return batch if self._complete is None else self._complete(batch)

    def _next_piece(self) -> Batch | LayertapError | None:
        """Return the next piece, or None at the end; raise an error if a worker has died, or none sends."""
        begin = time.monotonic()
        while True:
            try:
                return next(self._pieces, None)
            except (RuntimeError, OSError, EOFError) as error:
                # The error's traceback would keep the workers alive. If the loader is garbage collected in a cycle of
                # references, its queues close before the workers are asked to end, which then takes 10 s, not 0.1 s.
                traceback.clear_frames(error.__traceback__)
                # After this error alone, no piece is lost: the message of an error in a worker begins otherwise.
                is_late = str(error).startswith("DataLoader timed out")
                # OSError: the shared memory of an image is requested from the process that decoded it.
                ended = wait([worker.sentinel for worker in self._workers], timeout=0 if is_late else _LOOK_S)
                dead = [worker for worker in self._workers if worker.sentinel in ended]
                if is_late and not dead and time.monotonic() - begin < _GIVE_UP_S:
                    continue
                if not is_late and not dead:
                    raise
                for worker in dead:
                    worker.join(_LOOK_S)  # its exit code follows
                what = f"died (exit code {dead[0].exitcode})" if dead else f"hangs: no image for {_GIVE_UP_S} s"
                raise (DeadWorkerError if dead else LayertapError)(
                    f"a process that decodes images {what}. Stored rows are safe",
                    hint="run again to resume. Lower workers or batch_size if memory is short, or make /dev/shm larger",
                ) from error

    def close(self) -> None:
        """End the workers and the iteration."""
        self._pieces = iter(())
        self._sent.clear()


def _start_worker(collects_garbage: bool, worker: int) -> None:
    """Prepare a worker process.

    It ignores Ctrl-C and a service manager's SIGTERM, which reach every process: the main process decides how to end.
    A service manager may send several at once. A SIGTERM more than half a second after the first, as the DataLoader
    sends to a hanging worker, ends the worker.

    Args:
        collects_garbage: whether the main process does.
        worker: its number.
    """
    # What was garbage in the main process is never freed here. When freed, some objects wait for their threads (a
    # compiled OpenVINO model), which a forked process does not have: a test run hung for minutes. Freezing in the main
    # process failed on Python 3.12, which starts with frozen objects, and a collection there takes 0.3 s.
    gc.freeze()
    if collects_garbage:
        gc.enable()

    received_at: list[float] = []

    def let_by(number: int, frame: FrameType | None) -> None:
        received_at.append(time.monotonic())
        if received_at[-1] - received_at[0] > defaults.AT_ONCE_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, let_by)


def stop_on_machine_errors(batches: Iterable[Batch], source: ImageSource) -> Iterator[Batch]:
    """Pass batches on, and end the run if images fail for a reason that is unlikely to be their own.

    A failing disk, server or memory therefore does not mark rows as failed. One dead link says nothing about a server,
    so a row fails alone until many in a row fail in the same way.

    Args:
        batches: batches of a run, from the first.
        source: source of the images.

    Raises:
        MachineError: many consecutive images fail for such a reason, or all of the first batch.
        LayertapError: the source of the images has vanished or changed.
    """
    kind, count, reason, first = "", 0, "", True
    for batch in batches:
        if (batch.status == Status.MISSING).any() or not (batch.status == Status.OK).any():
            source.check_there()  # a file on an unmounted disk is not a failed row
        for row, status in zip(batch.rows.tolist(), batch.status.tolist(), strict=True):
            if status == Status.OK:
                kind, count = "", 0
            elif row in batch.suspect:
                count = count + 1 if batch.suspect[row] == kind else 1
                kind, reason = batch.suspect[row], batch.reasons[row]
        if count >= _SUSPECT or (first and 1 < count == len(batch.rows)):
            raise MachineError(
                f"{count} images in a row cannot be read: {reason}. So many consecutive failures are caused by the "
                "disk, the server or the machine, not by the images. Stored rows are safe",
                hint="run again when the cause is fixed",
            )
        yield batch
        first = False


class KeptBatches:
    """Batches that are decoded once, and kept on disk.

    The runs that load them have the same images, transform and batch size.

    A run that was interrupted may need other rows in its batches than the run that kept them; these are decoded again.
    In memory, a gigabyte of batches raised the peak of a run by nearly as much.

    Args:
        file: empty, unbuffered file. It needs no name: what is read from it is unpickled, and nobody else can open it.
        stop: called after each batch is decoded; if True, decoding ends early.
    """

    def __init__(self, file: BinaryIO, stop: Callable[[], bool] = lambda: False) -> None:
        self._file, self._stop = file, stop
        self._starts: dict[tuple[int, ...], int] = {}  # position in the file

    def load(self, images: Images, batches: Iterable[list[int]], decoding: Decoding) -> Generator[Batch, None, None]:
        """Decode those of the batches that are not kept, then yield all; see `load_batches`.

        All are decoded before the first is yielded: decoding beside the first forward would make that backbone look
        slow.

        Raises:
            MachineError: while iterating; the disk has no space for decoded images.
        """
        wanted = [tuple(rows) for rows in batches]
        missing = [list(rows) for rows in wanted if rows not in self._starts]
        # The worker processes start at once, as those of `load_batches`.
        return self._yielded(wanted, load_batches(images, missing, decoding) if missing else None)

    def _yielded(self, wanted: list[tuple[int, ...]], loaded: Iterator[Batch] | None) -> Generator[Batch, None, None]:
        with contextlib.closing(loaded) if loaded is not None else contextlib.nullcontext():  # type: ignore[type-var]
            for batch in loaded or ():
                self._write(batch)
                if self._stop():  # the batches so far are computed, and stop the run
                    break
            for rows in wanted:
                if rows in self._starts:
                    self._file.seek(self._starts[rows])
                    batch = pickle.load(self._file)
                    yield batch._replace(images=torch.from_numpy(batch.images))

    def _write(self, batch: Batch) -> None:
        without_tensor: Any = batch._replace(images=batch.images.cpu().numpy())  # type: ignore[arg-type]
        self._starts[tuple(batch.rows.tolist())] = self._file.seek(0, os.SEEK_END)
        try:
            with open(self._file.fileno(), "wb", closefd=False) as buffered:
                pickle.dump(without_tensor, buffered, pickle.HIGHEST_PROTOCOL)
        except OSError as error:
            raise MachineError(
                f"decoded images cannot be kept: {error.strerror}. Stored rows are safe",
                hint="free space on the disk of the comparison, and run again",
            ) from error
