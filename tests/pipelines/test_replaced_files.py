"""Each file of a data set is replaced: every command ends soon, with at most one line, and writes nowhere else.

With `-s`, the outcomes are printed as the table of docs/file-format.md.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.conftest import make_picture
from tests.pipelines.test_cli import SMALL, layertap
from tests.pipelines.test_sync import SMALL as SYNC
from tests.pipelines.test_sync import write

PRECIOUS = b"somebody's only copy\n"
MOST_S = 20


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100_000_000)


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(next(p for p in path.parents if p.name == "home").with_name("precious")),
    "fifo": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "`{}`": lambda path: path.write_text("{}"),
    "100 MB": large,
    "nested": lambda path: path.write_text("[" * 100_000),
}
EMBEDDED = [
    "dataset.json", "shards/000000.h5", "shards/000000.json", "shards/000001.h5.part", "runs.jsonl", ".lock",
]  # fmt: skip
SYNCED = [
    "dataset.json", "versions/000001.h5", "passes/000001/dataset.json", "passes/000001/shards/000000.h5",
    "passes/000001/shards/000000.json", "passes/000001/runs.jsonl", "passes/000001/.lock", "runs.jsonl",
    ".lock",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures, a data set of `embed` with an unfinished shard, and a data set of `sync`."""
    home = tmp_path_factory.mktemp("replaced")
    (home / "pictures").mkdir()
    for i in range(8):
        make_picture(i).save(home / f"pictures/{i}.png")
    config = write(home / "sync.yaml", images=str(home / "pictures"), out=str(home / "synced"), max_vanish=1, **SYNC)
    assert layertap("sync", config).exit_code == 0
    assert layertap(*embed(home)).exit_code == 0
    part = home / "embedded/shards/000001.h5"
    part.rename(part.with_name("000001.h5.part"))
    part.with_suffix(".json").unlink()
    return home


def embed(home: Path) -> list[object]:
    return ["embed", home / "pictures", "-o", home / "embedded", *SMALL, "-l", "layer2", "--shard-rows", 4]


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """A command that waits for ever fails the test."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"a command took more than {MOST_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("kind", "name"), [
    pytest.param(kind, name, marks=[] if name.startswith("versions/") else pytest.mark.slow)
    for kind, names in (("embedded", EMBEDDED), ("synced", SYNCED)) for name in names
])  # fmt: skip
def test_what_takes_the_place_of_a_file_is_refused_or_left_out(
    made: Path, tmp_path: Path, kind: str, name: str
) -> None:
    home, precious = tmp_path / "home", tmp_path / "precious"
    out = home / kind
    precious.write_bytes(PRECIOUS)
    config = ["sync", home / "sync.yaml"]
    commands: dict[str, list[object]] = {
        "show": ["show", out],
        "status": ["status", out],
        "verify": ["verify", out],
        "repair": ["verify", out, "--repair"],
        "writer": [*embed(made)[:3], out, *embed(made)[4:]] if kind == "embedded" else config,
    }
    cells = []
    for replacement, put in REPLACEMENTS.items():
        outcomes = []
        for command, arguments in commands.items():
            if command in ("show", "writer"):  # those before have not changed the copy, or it has been repaired
                shutil.rmtree(home, ignore_errors=True)
                shutil.copytree(made, home)
                (out / name).unlink(missing_ok=True)
                put(out / name)
                write(home / "sync.yaml", images=str(made / "pictures"), out=str(out), max_vanish=1, **SYNC)
            signal.alarm(MOST_S)
            result = layertap(*arguments)
            signal.alarm(0)
            assert result.exit_code in (0, 1, 2), (replacement, command, result.output)
            assert result.stderr.count("error: ") <= 1, result.stderr
            assert precious.read_bytes() == PRECIOUS, (replacement, command)
            outcomes.append(str(result.exit_code))
        shutil.rmtree(home)
        cells.append(" ".join(outcomes))
    print(f"| {kind} | `{name}` | {' | '.join(cells)} |")
