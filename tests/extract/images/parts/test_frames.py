"""Frames of videos as rows, compared with FFmpeg's `select` filter and with decoding everything in sequence."""

from __future__ import annotations

import random
import sys
import wave
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract import extract_features
from extract.errors import LayertapError
from extract.extraction.settings import ExtractionSettings
from extract.images import Decoding, Images, list_images, load_batches
from extract.images.decoding import DecodeOptions
from extract.row_status import Status
from tests.extract.images.making import TINY, as_tensor

av: Any = pytest.importorskip("av")

N = 40
VARIABLE = np.cumsum(np.random.default_rng(0).integers(1, 9, N)) - 1  # time stamps in units of 1/30 s
# Format and codec, and time stamps.
KINDS: dict[str, tuple[str, Any]] = {
    "b-frames.mp4": ("libx264", range(N)),
    "variable.mkv": ("libx264", VARIABLE.tolist()),
    "starts-late.ts": ("libx264", range(N)),
    "b-frames.avi": ("mpeg4", range(N)),
}


def write(
    path: Path, codec: str = "libx264", stamps: Iterable[int] = range(N), block_px: int = 8, **options: str
) -> Path:
    """A video of 64 x 48 pixels, a key frame in 12, with B-frames that others refer to."""
    rng = np.random.default_rng(1)
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=30, options={"bf": "3", "g": "12", "sc_threshold": "0", "crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        small = rng.integers(0, 256, (N, 48 // block_px, 64 // block_px, 3), np.uint8)
        for pixels, stamp in zip(small.repeat(block_px, 1).repeat(block_px, 2), stamps, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts, frame.time_base = stamp, Fraction(1, 30)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def selected(path: Path, expression: str = "1") -> dict[int, np.ndarray]:
    """Microseconds -> pixels of the frames that FFmpeg's `select` takes when all are decoded."""
    found = {}
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        graph = av.filter.Graph()
        nodes = graph.add_buffer(template=stream), graph.add("select", expression), graph.add("buffersink")
        graph.link_nodes(*nodes).configure()
        for frame in [*container.decode(stream), None]:
            graph.push(frame)
            while True:
                try:
                    chosen = graph.pull()
                except (av.error.BlockingIOError, av.error.EOFError):
                    break
                found[round(chosen.pts * stream.time_base * 1_000_000)] = chosen.to_ndarray(format="rgb24")
    return found


def listed(where: Path, **asked: Any) -> Images:
    return list_images(where, parts=ExtractionSettings(**asked))


def time_of(name: str) -> int:
    hours, minutes, seconds = name.rpartition("#t=")[2].split(":")
    return int(hours) * 3_600_000_000 + int(minutes) * 60_000_000 + int(seconds.replace(".", ""))


def pixels_of(images: Images, row: int, **how: Any) -> np.ndarray:
    return np.array(images.source.picture(row, images.source.read(row)[0], DecodeOptions(**how)))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return {name: write(folder / name, codec, stamps) for name, (codec, stamps) in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
def test_the_frames_are_those_that_ffmpeg_selects(videos: dict[str, Path], name: str) -> None:
    # At 4.1 frames a second, no interval begins at a frame, where FFmpeg's rounding decides.
    numbers = "floor((t-start_t)*4.1),floor((prev_selected_t-start_t)*4.1)"
    for asked, expression in (
        ({"fps": 4.1}, f"isnan(prev_selected_t)+gt({numbers})"),
        ({"every": 7}, "not(mod(n,7))"),
        ({"keyframes": True}, "key"),
        ({"every": 1}, "1"),
    ):
        images, expected = listed(videos[name], **asked), selected(videos[name], expression)
        assert [time_of(path) for path in images.paths] == sorted(expected)
        np.testing.assert_allclose(images.columns["time"], np.array(sorted(expected)) / 1e6, rtol=0, atol=1e-9)
        rows = list(range(len(images)))
        for order in (rows, random.Random(0).sample(rows, len(rows)), rows[::11]):  # in sequence, and by seeking
            for row in order:
                np.testing.assert_array_equal(pixels_of(images, row), expected[time_of(images.paths[row])])


def decoded(images: Images, workers: int = 0) -> tuple[list[int], list[np.ndarray], dict[int, str]]:
    """Status of each row, pictures of 8 x 8 pixels of those that are good, and reasons."""
    batches = [list(range(start, min(start + 8, len(images)))) for start in range(0, len(images), 8)]
    found = list(load_batches(images, batches, Decoding(as_tensor, workers=workers, batch_size=8)))
    reasons = {row: reason for batch in found for row, reason in batch.reasons.items()}
    return [s for b in found for s in b.status.tolist()], [i.numpy() for b in found for i in b.images], reasons


def test_workers_open_a_video_themselves(tmp_path: Path) -> None:
    file = write(tmp_path / "a.mp4", block_px=1)
    expected = decoded(listed(file, every=1))
    images = listed(file, every=1)
    pixels_of(images, 0)  # the video is open when processes are forked: they would share its position in the file
    found = decoded(images, workers=2)
    assert found[0] == expected[0] == [Status.OK] * N
    np.testing.assert_array_equal(found[1], expected[1])


def test_frames_that_a_cut_file_lacks_are_failed_rows(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.mp4", movflags="faststart")
    content, expected = whole.read_bytes(), selected(whole)
    names = listed(whole, every=1).paths
    whole.write_bytes(content[: len(content) * 2 // 3])
    images = listed(whole, every=1)
    status, _, reasons = decoded(images)
    assert list(images.paths) == list(names)
    assert 12 < status.count(Status.OK) < 30
    assert status.count(Status.OK) + status.count(Status.DECODE_ERROR) == N
    assert set(reasons.values()) == {"the frame at this time cannot be decoded: the video is cut or damaged"}
    for row in np.flatnonzero(np.array(status) == Status.OK).tolist():
        np.testing.assert_array_equal(pixels_of(images, row), expected[time_of(images.paths[row])])


def test_what_follows_damage_fails_up_to_the_next_key_frame(tmp_path: Path) -> None:
    file = write(tmp_path / "a.mp4")
    expected = selected(file)
    with av.open(str(file)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    order = [round(packet.pts * packet.time_base * 1_000_000) for packet in packets]
    content = bytearray(file.read_bytes())
    content[packets[15].pos : packets[15].pos + packets[15].size] = bytes(packets[15].size)
    file.write_bytes(content)
    images = listed(file, every=1)
    for rows in (range(N), [30, 20, 39, 5, 14]):  # in sequence, and by seeking
        for row in rows:
            time = time_of(images.paths[row])
            if 15 <= order.index(time) < 24:
                with pytest.raises(ValueError, match="cut or damaged"):
                    pixels_of(images, row)
            else:
                np.testing.assert_array_equal(pixels_of(images, row), expected[time])


def test_frames_are_turned_as_the_display_matrix_says(tmp_path: Path) -> None:
    file = write(tmp_path / "a.mp4")
    content, stored = file.read_bytes(), next(iter(selected(file).values()))
    place = content.index(b"tkhd") + 4 + 40  # ISO/IEC 14496-12, 8.3.2, version 0
    for (a, b, c, d), upright in (
        ((0, 1, -1, 0), np.rot90(stored, -1)),
        ((0, -1, 1, 0), np.rot90(stored)),
        ((-1, 0, 0, 1), stored[:, ::-1]),
        ((0, 1, 1, 0), stored.transpose(1, 0, 2)),
    ):
        matrix = np.array([a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30], ">i4").tobytes()
        file.write_bytes(content[:place] + matrix + content[place + 36 :])
        images = listed(file, keyframes=True)
        np.testing.assert_array_equal(pixels_of(images, 0), upright)
        np.testing.assert_array_equal(pixels_of(images, 0, orientation="ignore"), stored)


def test_a_video_that_cannot_be_read_is_a_row_that_fails(videos: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
    (folder / "cat/a.mp4").write_bytes(videos["b-frames.mp4"].read_bytes())
    (folder / "cat/empty.mp4").touch()
    (folder / "dog/notes.txt").touch()
    with wave.open(str(folder / "dog/sound.mp4"), "wb") as sound:
        sound.setparams((1, 2, 8000, 100, "NONE", ""))
        sound.writeframes(bytes(200))
    [note] = listed(folder, fps=2).notes
    assert "2, the first is cat/empty.mp4: not a video, or damaged: Invalid data" in note
    reader = extract_features(folder, out=tmp_path / "out", fps=2, **TINY)
    assert [path.rpartition("/")[2] for path in reader.paths] == [
        "a.mp4#t=00:00:00.000000", "a.mp4#t=00:00:00.500000", "a.mp4#t=00:00:01.000000", "empty.mp4", "sound.mp4",
    ]  # fmt: skip
    assert reader.labels.tolist() == [0, 0, 0, 0, 1]
    np.testing.assert_array_equal(reader.columns["time"], [0, 0.5, 1, np.nan, np.nan])
    assert [(path, reason[:12]) for _, path, _, reason in reader.failures] == [
        ("cat/empty.mp4", "not a video,"), ("dog/sound.mp4", "it has no vi"),
    ]  # fmt: skip


def test_a_file_that_changes_while_it_is_read_has_no_further_frames(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4")
    images = listed(tmp_path, every=1)
    source = images.source
    data, _ = source.read(0)
    source.picture(0, data)
    path.write_bytes(write(tmp_path / "b.mkv", "mpeg4").read_bytes())
    with pytest.raises(ValueError, match="the file changed while it was read; run again with --retry-failed"):
        source.picture(0, source.read(0)[0])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"fps": 0}, "fps is 0; it must be above 0"),
        ({"every": 0}, "every is 0; it must be at least 1"),
        ({"fps": 1, "keyframes": True}, "fps and keyframes exclude each other"),
    ],
)
def test_wrong_settings_are_refused(videos: dict[str, Path], asked: Any, expected: str) -> None:
    with pytest.raises(LayertapError, match=expected):
        listed(videos["b-frames.mp4"], **asked)


def test_frames_are_taken_of_local_files_only(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path\nhttps://example.invalid/a.mp4\n")
    for where in (tmp_path / "list.csv", tmp_path / "videos.tar"):
        with pytest.raises(LayertapError, match="frames are taken of"):
            listed(where, fps=1)


def test_without_pyav_the_error_says_how_to_install_it(
    videos: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = listed(videos["b-frames.mp4"], fps=1)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(LayertapError, match="reading videos needs av") as refused:
        listed(videos["b-frames.mp4"], fps=1)
    assert "av>=18" in refused.value.hint
    with pytest.raises(LayertapError, match="reading videos needs av"):  # not a row that fails
        decoded(images)
