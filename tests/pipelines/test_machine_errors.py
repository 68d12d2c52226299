"""Errors of the machine are not failures of images: they stop a run, or are tried again by the next one."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from extract import FeatureReader, Status
from extract.images import decoding, loading
from extract.images.sources import Files, UnreachableError
from extract.sync import difference
from tests.conftest import make_picture
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds
from tests.pipelines.test_sync import SMALL as SYNC
from tests.pipelines.test_sync import write

Read = Callable[[Files, int], tuple[bytes, int]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Name of an image -> the error that reading it gives; also in worker processes, which are forked."""
    errors: dict[str, Exception] = {}
    read: Read = Files.read

    def read_or_fail(self: Files, row: int) -> tuple[bytes, int]:
        name = self._names[row]
        if error := errors.get(name) or errors.get("*"):
            raise error
        return read(self, row)

    monkeypatch.setattr(Files, "read", read_or_fail)
    return errors


def statuses(out: Path) -> list[str]:
    with FeatureReader(out, partial=True) as reader:
        return [Status(code).text for code in reader.status.tolist()]


def shards(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "shards").glob("*.h5"))


# Decoders


@pytest.fixture
def broken_heif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts a package `pillow_heif` in place whose import does something."""

    def put(line: str) -> None:
        place = tmp_path / "packages" / "pillow_heif"
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text(line)
        monkeypatch.syspath_prepend(place.parent)
        for name in [name for name in sys.modules if name.partition(".")[0] == "pillow_heif"]:
            monkeypatch.delitem(sys.modules, name)
        forget()

    def forget() -> None:
        decoding._has_heif.cache_clear()
        decoding._formats.cache_clear()

    yield put
    monkeypatch.undo()
    sys.modules.pop("pillow_heif", None)
    forget()


@pytest.mark.parametrize("line", [
    "raise OSError('libheif.so.1: cannot open shared object file')", "import no_such_module", "raise MemoryError",
    "import ctypes; ctypes.CDLL('libheif-that-is-not-there.so')", "def register_heif_opener(): raise RuntimeError('x')",
])  # fmt: skip
def test_a_broken_decoder_stops_the_run_before_the_first_image(
    folder: Path, tmp_path: Path, broken_heif: Callable[[str], None], line: str
) -> None:
    broken_heif(line)
    message = fails("embed", folder, "-o", tmp_path / "out", *SMALL, code=1)
    assert "pillow_heif, which decodes HEIC, is installed but cannot be loaded" in message
    assert shards(tmp_path / "out") == []


def test_a_decoder_that_is_repaired_is_used_by_the_processes_that_decode(
    folder: Path, tmp_path: Path, broken_heif: Callable[[str], None]
) -> None:
    arguments = ["embed", folder, "-o", tmp_path / "out", *SMALL, "--workers", 2]
    broken_heif("raise MemoryError")
    assert "is installed but cannot be loaded" in fails(*arguments, code=1)
    broken_heif("def register_heif_opener(): pass")
    succeeds(*arguments)
    assert statuses(tmp_path / "out") == ["ok"] * 12


def test_a_pillow_that_decodes_no_jpeg_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("decoder jpeg not available")

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", refuse)
    message = fails("embed", folder, "-o", tmp_path / "out", *SMALL, code=1)
    assert "Pillow cannot decode JPEG on this machine: decoder jpeg not available" in message
    assert shards(tmp_path / "out") == []


# What a process runs out of


@pytest.mark.parametrize(("number", "workers"), [(errno.EMFILE, 0), (errno.ENOMEM, 2), (errno.ENFILE, 0)])
def test_what_the_machine_has_run_out_of_stops_the_run_and_fails_no_row(
    folder: Path, tmp_path: Path, failing: dict[str, Exception], number: int, workers: int
) -> None:
    arguments = ["embed", folder, "-o", tmp_path / "out", *SMALL, "--batch-size", 4, "--workers", workers]
    failing["bee/07.jpg"] = OSError(number, os.strerror(number))
    message = fails(*arguments, code=1)
    assert f"can no longer read images: {os.strerror(number)} (at row 6)" in message
    assert ("ulimit -n" in message) == (number != errno.ENOMEM)
    assert set(statuses(tmp_path / "out")) <= {"ok", "pending"}
    failing.clear()
    succeeds(*arguments)
    assert statuses(tmp_path / "out") == ["ok"] * 12


def test_a_library_that_cannot_be_imported_stops_the_run(
    folder: Path, tmp_path: Path, failing: dict[str, Exception]
) -> None:
    failing["bee/07.jpg"] = ImportError("cannot import name 'x'")
    assert "repair the installation" in fails("embed", folder, "-o", tmp_path / "out", *SMALL, code=1)
    assert statuses(tmp_path / "out") in ([], ["pending"] * 12)


def test_too_little_memory_for_a_small_picture_stops_the_run_and_for_a_huge_one_is_a_failed_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_NOT_MANY_PIXELS", 10_000)
    huge = Image.new("L", (101, 100))
    huge.save(folder / "cat" / "huge.png")
    to_picture = decoding.to_picture

    def short_of_memory(image: Image.Image, *how: str) -> Image.Image:
        if image.size in short:
            raise MemoryError
        return to_picture(image, *how)

    monkeypatch.setattr(decoding, "to_picture", short_of_memory)
    short = {huge.size}
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL)
    assert statuses(tmp_path / "out") == ["ok"] * 12 + ["decode error"]
    short = {(75, 49)}  # of bee/07.jpg
    assert "can no longer read images: MemoryError" in fails("embed", folder, "-o", tmp_path / "new", *SMALL, code=1)


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOMEM, "out of memory")])
def test_what_runs_out_when_decoders_are_started_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refused() -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fork", refused)
    assert remedy in fails("embed", folder, "-o", tmp_path / "out", *SMALL, "--workers", 2, code=1)


def test_too_little_memory_is_one_line_and_leaves_what_was_stored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from extract.store.format import writer

    def no_memory(*_: object) -> None:
        raise MemoryError("Unable to allocate 3.00 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(writer, "hash_rows", no_memory)
        message = fails("embed", folder, "-o", tmp_path / "out", *SMALL, code=1)
    assert "out of memory (Unable to allocate 3.00 GiB); stored rows are safe" in message
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL)


# A disk that fails


def test_an_image_with_an_io_error_is_tried_again_by_the_next_run(
    twelve_embedded: Path, folder: Path, tmp_path: Path, failing: dict[str, Exception]
) -> None:
    out = tmp_path / "out"
    arguments = ["embed", folder, "-o", out, *SMALL, "--shard-rows", 5]
    whole = (folder / "bee" / "04.png").rename(tmp_path / "04.png")
    (folder / "bee" / "04.png").write_bytes(b"no picture")
    failing["bee/07.jpg"] = OSError(errno.EIO, os.strerror(errno.EIO))
    first = succeeds(*arguments)
    assert "bee/07.jpg: io error: Input/output error" in first.stdout
    assert "the next run retries images with an io error" in first.stdout
    assert "add --retry-failed" in first.stdout  # for the other one
    assert statuses(out)[5:7] == ["decode error", "io error"]
    succeeds("verify", out)
    before = shards(out)
    again = layertap(*arguments)  # it still cannot be read: nothing is written anew
    assert "all 12 rows were done before, 2 of them without features; nothing to do" in again.stdout
    assert shards(out) == before == ["000000.h5", "000001.h5", "000002.h5"]
    failing.clear()
    assert json.loads(succeeds(*arguments, "--json").stdout)["computed"] == 1
    assert shards(out) == ["000000.h5", "000001-r1.h5", "000002.h5"]
    assert statuses(out).count("ok") == 11
    succeeds("verify", out)
    whole.rename(folder / "bee" / "04.png")
    succeeds(*arguments, "--retry-failed")
    with FeatureReader(out) as one, FeatureReader(twelve_embedded) as fresh:
        np.testing.assert_array_equal(one["embedding"][:], fresh["embedding"][:])


@pytest.mark.parametrize("error", [lambda i: OSError(errno.EIO, os.strerror(errno.EIO)),
                                   lambda i: UnreachableError(f"HTTP 503 of image {i}")])  # fmt: skip
def test_many_images_in_a_row_that_fail_for_the_same_foreign_reason_stop_the_run(
    folder: Path, tmp_path: Path, failing: dict[str, Exception], error: Callable[[int], Exception]
) -> None:
    make_picture(100, 20, 20).save(folder / "cat" / "z00.png")
    png = (folder / "cat" / "z00.png").read_bytes()
    for i in range(60):
        (folder / "cat" / f"z{i:02d}.png").write_bytes(png + str(i).encode())  # other bytes, or it is computed once
        if i != 20:
            failing[f"cat/z{i:02d}.png"] = error(i)
    arguments = ["embed", folder, "-o", tmp_path / "out", *SMALL, "--batch-size", 4]
    message = fails(*arguments, code=1)
    assert "35 images in a row cannot be read" in message  # in batches of 4; not the 20 before the one that can be
    assert "Stored rows are safe" in message
    assert len(statuses(tmp_path / "out")) == 64  # what was stored before the last batches


def test_many_damaged_images_in_a_row_are_rows(folder: Path, tmp_path: Path) -> None:
    for i in range(40):
        (folder / "ant" / f"0{i:02d}.png").write_bytes(b"no picture")
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL, "--batch-size", 4)
    assert statuses(tmp_path / "out").count("decode error") == 40


def test_sync_tries_images_with_an_io_error_again_after_a_minute_and_follows_their_folder_meanwhile(
    folder: Path, tmp_path: Path, failing: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed alone, two of them would look like a broken disk, and end each pass before it stores anything."""
    monkeypatch.setattr(difference, "_STEP_NS", 0)  # or young files would be read again
    hash_of, out = difference._hash_of, tmp_path / "out"
    sync = ["sync", write(tmp_path / "sync.yaml", images=str(folder), out=str(out), **SYNC)]
    for path in sorted((folder / "bee").iterdir())[:2]:
        failing[f"bee/{path.name}"] = OSError(errno.EIO, os.strerror(errno.EIO))
    succeeds(*sync)
    assert statuses(out).count("io error") == 2
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipelines.sync.job.PassReporter.plan", lambda *_: pytest.fail("a backbone was loaded"))
        succeeds(*sync)
    monkeypatch.setattr(
        difference,
        "_hash_of",
        lambda root, file, *how: None if os.fsdecode(file.path) in failing else hash_of(root, file, *how),
    )
    monkeypatch.setattr(difference, "_UNREAD_S", 0)  # the minute is over
    (folder / "ant" / "00.png").unlink()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipelines.sync.job.PassReporter.plan", lambda *_: pytest.fail("a backbone was loaded"))
        succeeds(*sync)
    assert (len(statuses(out)), statuses(out).count("io error")) == (11, 2)
    failing.clear()
    succeeds(*sync)
    assert statuses(out) == ["ok"] * 11


def test_sync_does_not_compute_an_image_file_that_is_too_large_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = max(folder.rglob("*.*"), key=lambda path: path.stat().st_size)
    monkeypatch.setattr("extract.defaults.MAX_FILE_BYTES", large.stat().st_size - 1)
    monkeypatch.setattr(difference, "_UNREAD_S", 0)
    config = write(tmp_path / "sync.yaml", images=str(folder), out=str(tmp_path / "out"), **SYNC)
    succeeds("sync", config)
    assert statuses(tmp_path / "out").count("decode error") == 1
    monkeypatch.setattr("pipelines.sync.job.PassReporter.plan", lambda *_: pytest.fail("a backbone was loaded"))
    succeeds("sync", config)
