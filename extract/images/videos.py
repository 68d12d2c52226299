"""Frames of video files: the times at which they are shown, and their pictures.

    times_of(path) -> Times -> Times.chosen(fps=1) -> microseconds
    Video(file).picture(microseconds) -> Image

PyAV (FFmpeg) reads the files. The time of a frame is its time stamp in the file, in microseconds; of many files
(MPEG-TS, FLV) the first is not 0. A picture has the pixels of `ffmpeg -i FILE -pix_fmt rgb24`: FFmpeg's default
conversion, with the colour matrix and range of the stream, or BT.601 where it states none. Pixels that are not square
stay so, and interlaced lines too.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.images.decoding import AS_DEFAULT, DecodeOptions
from extract.images.sources import OnDisk
from extract.system.optional_libraries import library

__all__ = ["Times", "Video", "times_of"]

# Workers use the cores: with 2 threads, a decoder took 1.3 times the CPU time.
_THREADS = 1  # of a decoder
_WORTH_A_SEEK = 8  # frames that need not be decoded; a seek takes as long as a few
# The decoder skips pictures that no other refers to. In H.264 these are marked exactly (nal_ref_idc); in HEVC,
# pictures of other temporal layers may refer to them.
_MARKS_UNUSED = "h264"
_REORDERED = ("h264", "hevc")  # in AVI, FFmpeg guesses when their frames are shown, and is wrong

# (a, b, c, d) of a display matrix (ISO/IEC 14496-12, 6.2.2): x' = a x + c y, y' = b x + d y; as Pillow names it.
_TURNS = {
    (1, 0, 0, 1): None,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270, (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90, (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM, (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}  # fmt: skip


class Times(NamedTuple):
    """The frames of a video in the order in which they are shown.

    Attributes:
        microseconds: time of each, ascending.
        stamps: the same in units of the stream.
        unit: this unit in seconds.
        keys: positions of those that the file marks as key frames, which are decoded without others.
    """

    microseconds: list[int]
    stamps: list[int]
    unit: Fraction
    keys: list[int]

    def chosen(self, fps: float | None = None, every: int | None = None, keyframes: bool = False) -> list[int]:
        """Return the times of some frames, in microseconds; one of the arguments is given.

        Args:
            fps: the first frame of each interval of 1/fps seconds, counted from the first frame. FFmpeg's
                `select='isnan(prev_selected_t)+gt(floor(t*F),floor(prev_selected_t*F))'` takes the same, but for its
                rounding: this arithmetic is exact.
            every: each frame of this number, from the first.
            keyframes: the key frames.
        """
        if keyframes:
            return [self.microseconds[i] for i in self.keys]
        if every:
            return self.microseconds[::every]
        rate = Fraction(str(fps)) * self.unit
        intervals = [(stamp - self.stamps[0]) * rate.numerator // rate.denominator for stamp in self.stamps]
        return [
            time
            for time, number, before in zip(self.microseconds, intervals, [-1, *intervals], strict=False)
            if number > before
        ]


def times_of(path: str) -> Times:
    """Return the times of the frames of a video; its packets are read, not decoded.

    A file that was cut and still has its index, as an MP4 for the web, has the frames that the index names.

    Raises:
        ValueError: it is not a video, or its frames have no times.
        OSError: it cannot be read.
        LayertapError: PyAV is not installed.
    """
    with _errors():
        container, stream = _opened(path)
        with closing(container):
            unit, entries = stream.time_base, stream.index_entries
            is_key = _packets(container, stream)
            if len(entries) > len(is_key):
                whole = _Continued(path, max(entry.pos + entry.size for entry in entries))
                with closing(whole), closing(_av().open(whole)) as again:
                    is_key = _packets(again, again.streams[stream.index])
    stamps = {_microseconds(stamp, unit): stamp for stamp in sorted(is_key, reverse=True)}
    microseconds = sorted(stamps)
    if not microseconds:
        raise ValueError("no frame of it has a time stamp")
    if microseconds[0] < 0:
        raise ValueError(f"its first frame is at {microseconds[0] / 1e6} s; expected times from 0 s")
    ordered = [stamps[time] for time in microseconds]
    return Times(microseconds, ordered, unit, [i for i, stamp in enumerate(ordered) if is_key[stamp]])


def _av() -> Any:
    return library("av", "video", "reading videos")


@contextmanager
def _errors() -> Iterator[None]:
    """Context manager: an error of FFmpeg in it becomes a ValueError, but for those of the system.

    EIO is FFmpeg's own: of a header that is cut. A disk that fails is met where the file is hashed.
    """
    av = _av()
    try:
        yield
    except av.error.FFmpegError as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != errno.EIO):
            raise
        raise ValueError(f"not a video, or damaged: {error.strerror}") from error


def _opened(path: str) -> tuple[Any, Any]:
    """Open a file; return the container, and its video stream, which FFmpeg takes for the best.

    Raises:
        ValueError: there is no video stream that can be decoded to frames with times.
    """
    av = _av()
    # A playlist may name other files and servers; "file:": a name with a colon is no URL.
    container = av.open(f"file:{path}", options={"protocol_whitelist": "file"})
    stream = container.streams.best("video")
    if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
        raise ValueError("it has no video stream")
    context = stream.codec_context
    if context is None:
        raise ValueError("FFmpeg has no decoder for its video stream")
    if container.format.name == "avi" and context.name in _REORDERED and context.has_b_frames:
        raise ValueError(
            f"AVI has no times of frames for {context.name} with B-frames; convert it (ffmpeg -i FILE.avi FILE.mp4)"
        )
    context.thread_count = _THREADS
    # Otherwise FFmpeg fills in what is damaged, from frames beside it.
    context.options = {"err_detect": "explode"}
    return container, stream


def _packets(container: Any, stream: Any) -> dict[int, bool]:
    """Return the time stamps of the frames that are shown, and whether they are key frames."""
    return {
        packet.pts: packet.is_keyframe
        for packet in container.demux(stream)
        if packet.pts is not None and not packet.is_discard
    }


def _microseconds(stamp: int, unit: Fraction) -> int:
    return (2_000_000 * stamp * unit.numerator + unit.denominator) // (2 * unit.denominator)


class _Continued:
    """A file that was cut, with zeros up to the size that its index tells: to read times, no frames are needed."""

    def __init__(self, path: str, size: int):
        self._file, self._size, self._position = open(path, "rb"), size, 0  # noqa: PTH123, SIM115

    def read(self, count: int) -> bytes:
        count = max(0, min(count, self._size - self._position))
        self._file.seek(self._position)
        self._position += count
        return self._file.read(count).ljust(count, b"\0")

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = start[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._file.close()


class Video:
    """A video that is open. Consecutive frames are decoded in sequence, by the process that opened it.

    Args:
        file: the file.

    Attributes:
        file: the file.
        process: id of the process.

    Raises:
        ValueError, OSError, LayertapError: see `times_of`.
    """

    def __init__(self, file: OnDisk):
        self.file, self.process = file, os.getpid()
        self._times = times_of(file.path)
        self._lock = threading.Lock()
        self._opened: Any = None
        self._frames: Iterator[Any] = iter(())
        self._nowhere = len(self._times.stamps)
        self._frame: Any = None  # the last one
        self._at = self._nowhere  # its position; -1 before the first one
        self._began = 0  # position of the frame with which decoding began
        self._wanted = 0  # time stamp
        self._graph: tuple[Any, Any] = None, None

    def picture(self, microseconds: int, options: DecodeOptions = AS_DEFAULT) -> Image.Image:
        """Return the RGB picture of the frame that is shown at a time, of no other.

        Args:
            microseconds: its time.
            options: of which `orientation` "exif" means: turned as the display matrix of the file says.

        Raises:
            ValueError: there is no frame at this time, or it is damaged, as far as its format has checks.
            OSError: the file cannot be read.
        """
        with self._lock, _errors():
            position = bisect_left(self._times.microseconds, microseconds)
            if self._times.microseconds[position : position + 1] != [microseconds]:
                raise ValueError("the video has no frame at this time")
            frame = self._frame_at(position)
            if frame is None:
                raise ValueError("the frame at this time cannot be decoded: the video is cut or damaged")
            if frame.width * frame.height > options.max_pixels:
                raise ValueError(f"{frame.width}x{frame.height} pixels; --max-pixels sets the limit")
            picture = Image.fromarray(self._rgb(frame))
        turn = _turn(frame) if options.orientation == "exif" else None
        return picture if turn is None else picture.transpose(turn)

    def _frame_at(self, position: int) -> Any:
        """Return a frame; None if it cannot be decoded."""
        key = self._key_before(position + 1)
        if position < self._at or key - self._at > _WORTH_A_SEEK:
            self._go_to(key)
        frame = self._next(position)
        if frame is None and self._began:
            # Some key frames need frames before them to be complete (periodic intra refresh).
            self._go_to(self._key_before(self._began))
            frame = self._next(position)
        return frame

    def _key_before(self, position: int) -> int:
        """Return the position of the last key frame before a position; 0 if there is none."""
        return next(iter(self._times.keys[: bisect_left(self._times.keys, position)][-1:]), 0)

    def _next(self, position: int) -> Any:
        """Decode up to a frame, and return it; None if it does not come."""
        self._wanted = self._times.stamps[position]
        at, self._at = self._at, self._nowhere  # after an error, and at the end
        while at < position:
            self._frame = next(self._frames, None)
            if self._frame is None:
                return None
            at = bisect_left(self._times.stamps, self._frame.pts)
        self._at = at
        return self._frame if self._frame.pts == self._wanted else None

    def _go_to(self, key: int) -> None:
        """Begin to decode with a key frame, or with the first frame."""
        if self._opened is None or not key:
            self._opened = _opened(self.file.path)
        container, stream = self._opened
        packets = self._after_seek(self._times.stamps[key]) if key else None
        if packets is None:
            self._opened = container, stream = _opened(self.file.path)
            key, packets = 0, container.demux(stream)
        self._at, self._began, self._frames = -1, key, self._decoded(stream.codec_context, packets)

    def _after_seek(self, stamp: int) -> Iterator[Any] | None:
        """Return the packets from a key frame on; None if the format cannot seek to it."""
        container, stream = self._opened
        with suppress(_av().error.FFmpegError):
            container.seek(stamp, stream=stream)
            packets = container.demux(stream)
            for packet in packets:
                if packet.pts == stamp:
                    return chain([packet], packets)
                if packet.is_keyframe and packet.pts > stamp:
                    break
        return None

    def _decoded(self, context: Any, packets: Iterator[Any]) -> Iterator[Any]:
        """Yield the frames of packets in the order in which they are shown, without those that are damaged.

        What follows a damaged packet refers to it, up to the next key frame, and to what is shown before that one.
        """
        intact, is_damaged, first = set(), False, -math.inf
        for packet in packets:
            stamp = packet.pts
            if is_damaged and packet.is_keyframe and stamp is not None:
                is_damaged, first = False, stamp
            if context.name == _MARKS_UNUSED:
                is_before = stamp is not None and stamp < self._wanted
                context.skip_frame = "NONREF" if is_before else "DEFAULT"
            try:
                frames = [] if packet.is_corrupt else packet.decode()
                is_damaged = is_damaged or packet.is_corrupt
            except _av().error.FFmpegError:
                frames, is_damaged = [], True
            if not is_damaged and stamp is not None and stamp >= first:
                intact.add(stamp)
            for frame in frames:
                if frame.pts in intact and not frame.is_corrupt:
                    intact.remove(frame.pts)
                    yield frame

    def _rgb(self, frame: Any) -> NDArray[np.uint8]:
        """Return the pixels of a frame (H, W, 3), converted as FFmpeg does where its output must be RGB."""
        kind = frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range
        if self._graph[0] != kind:
            graph = _av().filter.Graph()
            graph.threads = _THREADS
            nodes = graph.add_buffer(template=frame), graph.add("format", "pix_fmts=rgb24"), graph.add("buffersink")
            graph.link_nodes(*nodes).configure()
            self._graph = kind, graph
        self._graph[1].push(frame)
        return self._graph[1].pull().to_ndarray()  # type: ignore[no-any-return]


def _turn(frame: Any) -> Image.Transpose | None:
    """Return how a frame must be turned to be upright.

    Raises:
        ValueError: by another angle than one of 90 degrees.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return None
    numbers = np.frombuffer(bytes(matrix), np.int32)[[0, 1, 3, 4]] / (1 << 16)
    kind = tuple(numbers.round(3).tolist())
    if kind not in _TURNS:
        raise ValueError(f"it is turned by {frame.rotation} degrees; --orientation ignore takes the frames as stored")
    return _TURNS[kind]
