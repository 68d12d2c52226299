"""watch is never blind: where the kernel does not report changes, folders are scanned, and the user is told why."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from extract import FeatureReader
from pipelines.sync import watch as watching
from pipelines.sync.config import SyncConfig
from tests.conftest import make_picture
from tests.pipelines.conftest import until
from tests.pipelines.test_sync import SMALL, write

watchfiles = pytest.importorskip("watchfiles")


def _rows(out: Path) -> int:
    if not (out / "dataset.json").exists():
        return 0
    with FeatureReader(out) as reader:
        return len(reader)


class Refusing:
    """The library, with a kernel that refuses to watch."""

    def __init__(self, error: Exception):
        self.error = error

    def watch(self, *roots: str, force_polling: bool, **settings: Any) -> Iterator[Any]:
        if not force_polling:
            raise self.error
        yield from watchfiles.watch(*roots, force_polling=True, **settings)


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> SyncConfig:
    return SyncConfig(images=str(folder), out=tmp_path / "out", **SMALL)


@pytest.fixture
def changes(config: SyncConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts to look for changes, with a library."""
    monkeypatch.setattr(watching, "_SCAN_MS", 20)
    return lambda library: watching._Followed(library, config, 20)


def wait_for_change(seen: Any) -> None:
    """Look until something has changed, and take note of it, as a pass does."""
    end = time.monotonic() + 20
    while not seen.has_changed:
        assert time.monotonic() < end
        seen.look()
    seen.has_changed = False


def settled(seen: Any) -> None:
    """Wait until what was there at the beginning has been reported."""
    wait_for_change(seen)
    for _ in range(3):
        seen.look()
    seen.has_changed = False


LIMIT = OSError(
    'OS file watch limit reached. about ["/photos/27"] (Error { kind: MaxFilesWatch, paths: ["/photos/27"] })'
)
DENIED = PermissionError('Permission denied (os error 13) about ["/photos/secret"]')


@pytest.mark.parametrize(("error", "why"), [(LIMIT, "max_user_watches"), (DENIED, "/photos/secret"),
                                            (RuntimeError("error in underlying watcher"), "underlying")])  # fmt: skip
def test_what_the_kernel_refuses_to_watch_is_said(
    changes: Any, capsys: pytest.CaptureFixture[str], error: Exception, why: str
) -> None:
    changes(Refusing(error)).look()
    told = capsys.readouterr().err
    assert "cannot be watched" in told
    assert why in told
    assert "Error {" not in told


def test_what_the_kernel_refuses_to_watch_is_scanned(changes: Any, folder: Path) -> None:
    seen = changes(Refusing(LIMIT))
    settled(seen)
    make_picture(90).save(folder / "bee" / "new.png")
    wait_for_change(seen)
    (folder / "bee" / "new.png").rename(folder / "ant" / "new.png")
    wait_for_change(seen)
    for _ in range(5):
        seen.look()
    assert not seen.has_changed  # nothing has changed since
    shutil.move(folder, folder.with_name("away"))
    wait_for_change(seen)


def test_a_folder_that_takes_the_place_of_another_is_followed(changes: Any, folder: Path) -> None:
    """As when a disk is unmounted and mounted again: the kernel reports nothing of it."""
    seen = changes(watchfiles)
    settled(seen)  # what changed before all folders were watched is looked for
    folder.rename(folder.with_name("away"))
    shutil.copytree(folder.with_name("away"), folder)
    wait_for_change(seen)
    settled(seen)
    make_picture(90).save(folder / "bee" / "new.png")
    wait_for_change(seen)


def can_limit_watches() -> bool:
    limit = ["unshare", "-Ur", "bash", "-c", "echo 10 > /proc/sys/user/max_inotify_watches"]
    return shutil.which("unshare") is not None and subprocess.run(limit, capture_output=True).returncode == 0


@contextlib.contextmanager
def running(command: list[Any]) -> Iterator[subprocess.Popen[str]]:
    """`layertap watch`, or a shell that runs it; both are killed at the end."""
    checkout = Path(__file__).parents[2]
    how: dict[str, Any] = {"cwd": checkout, "env": os.environ | {"PYTHONPATH": str(checkout)}, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes, **how) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_beyond_the_limit_of_watches_changes_are_seen_within_seconds(folder: Path, tmp_path: Path) -> None:
    if not can_limit_watches():
        pytest.skip("this system has no namespaces for users")
    for number in range(40):
        (folder / f"class-{number:02d}").mkdir()
        make_picture(200 + number).save(folder / f"class-{number:02d}" / "0.png")
    config = write(tmp_path / "sync.yaml", images=str(folder), out=str(tmp_path / "out"), **SMALL)
    script = f"echo 10 > /proc/sys/user/max_inotify_watches; exec {sys.executable} -m layertap watch {config}"
    with running(["unshare", "-Ur", "bash", "-c", script]) as process:
        until(lambda: _rows(tmp_path / "out") == 52)
        for number, rows in ((37, 53), (3, 54)):
            make_picture(300 + number).save(folder / f"class-{number:02d}" / "1.png")
            until(lambda expected=rows: _rows(tmp_path / "out") == expected)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert "OS file watch limit reached" in errors
    assert "scanned every few seconds" in errors


@pytest.mark.slow
def test_a_tree_of_300_folders_and_a_burst_of_600_files_are_followed(tmp_path: Path) -> None:
    root, out = tmp_path / "images", tmp_path / "out"
    picture = root / "0000" / "0.png"
    for number in range(300):
        (root / f"{number:04d}").mkdir(parents=True)
    make_picture(1).save(picture)
    config = write(tmp_path / "sync.yaml", images=str(root), out=str(out), **{**SMALL, "batch_size": 64})
    with running([sys.executable, "-m", "layertap", "watch", str(config)]) as process:
        until(lambda: _rows(out) == 1)
        make_picture(2).save(root / "0299" / "0.png")
        until(lambda: _rows(out) == 2)
        (root / "0100" / "new" / "nested").mkdir(parents=True)
        make_picture(3).save(root / "0100" / "new" / "nested" / "0.png")
        until(lambda: _rows(out) == 3)
        (root / "0299" / "0.png").rename(root / "0298" / "renamed.png")
        for number in range(600):
            shutil.copyfile(picture, root / f"{number % 300:04d}" / f"{number}-copy.png")
        until(lambda: _rows(out) == 603, 240)
        shutil.rmtree(root / "0100")
        until(lambda: _rows(out) == 600)  # without the nested one and two copies
        with FeatureReader(out) as reader:
            assert "0298/renamed.png" in reader.paths
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert output.count("version") >= 5
    assert "cannot be watched" not in errors


def can_mount() -> bool:
    mount = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_disk_that_is_unmounted_and_mounted_again_is_followed(folder: Path, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("this system has no namespaces for users")
    root, out = tmp_path / "disk", tmp_path / "out"
    root.mkdir()
    config = write(tmp_path / "sync.yaml", images=str(root / "images"), out=str(out), **SMALL)
    # Only the shell sees the disk, so it waits for a file between the steps.
    steps = f"""
        wait_for() {{ while [ ! -e {tmp_path}/$1 ]; do sleep 0.1; done; }}
        mount -t tmpfs none {root}; cp -r {folder} {root}/images
        {sys.executable} -m layertap watch {config} & watcher=$!
        wait_for unmount; umount -l {root}
        wait_for mount; mount -t tmpfs none {root}; cp -r {folder} {root}/images; cp {folder}/new.png {root}/images/
        wait_for stop; kill -INT $watcher; wait $watcher
    """
    with running(["unshare", "-Urm", "bash", "-c", steps]) as process:
        until(lambda: _rows(out) == 12)
        (tmp_path / "unmount").touch()
        until(lambda: '"event": "failed"' in (out / "runs.jsonl").read_text(), 60)  # a pass finds no folder
        assert _rows(out) == 12
        make_picture(77).save(folder / "new.png")
        (tmp_path / "mount").touch()
        until(lambda: _rows(out) == 13)
        (tmp_path / "stop").touch()
        _, errors = process.communicate(timeout=30)
    assert "disk/images" in errors  # the user was told that it was missing


def test_garbage_of_a_pass_is_collected_before_the_next(changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    garbage = []

    def one_pass(configs: list[Any], *, reporter: Any) -> tuple[list[Any], int]:
        result = SimpleNamespace(report=None, exit_code=0)
        garbage.append(weakref.ref(Cycle()))
        return [result], 0

    monkeypatch.setattr(watching, "sync_all", one_pass)
    gc.disable()
    try:
        changes(watchfiles).run_pass(lambda result: None, [])
    finally:
        gc.enable()
    assert garbage[0]() is None
