"""What means harm in the place of each file of a data set: at most one line that names the file, and no traceback."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extract.store.format.receipt import receipt_bytes
from extract.store.verify import verify
from tests.conftest import make_picture
from tests.extract.store.rows import SHARD_ROWS, complete_data_set
from tests.pipelines.test_cli import SMALL, layertap
from tests.pipelines.test_sync import SMALL as SMALL_SYNC

Made = Callable[[Path], object]
PRECIOUS = b"somebody's only copy\n"


def huge(path: Path) -> None:
    """100 MB that take no room on the disk."""
    path.write_bytes(b"{}")
    os.truncate(path, 100_000_000)


CONTENTS: dict[str, bytes | Made] = {
    "missing": lambda path: None,
    "empty": b"",
    "object": b"{}",
    "list": b"[]",
    "null": b"null",
    "number": b"17",
    "text": b'"text"',
    "nan": b"NaN",
    "digits": b"9" * 5000,
    "cut": b'{"format": "layertap", ',
    "deep": b'{"a":' * 50_000,
    "nested": b'{"a":' * 500 + b"1" + b"}" * 500,
    "not utf-8": b'{"a": "\xff\xfe"}',
    "huge": huge,
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


def put(path: Path, content: bytes | Made) -> None:
    """Put something in the place of a file."""
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


BAD: list[Any] = ["text", "\ud800\x1b[31m", [], {}, -1, 1.5, 10**400, 1 << 62, float("nan"), True, None]


def mutations(content: Any, bad: list[Any] = BAD) -> Iterator[tuple[str, Any]]:
    """Name and content of each copy in which one value at any depth was removed, or replaced by one of `bad`."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else []
    for key in keys:
        without = copy.copy(content)
        del without[key]
        yield f"[{key!r}] removed", without
        deeper = ((f"[{key!r}]{name}", changed) for name, changed in mutations(content[key], bad))
        replaced = ((f"[{key!r}] is {str(value)[:20]!r}", value) for value in bad)
        for name, changed in itertools.chain(replaced, deeper):
            mutant = copy.copy(content)
            mutant[key] = changed
            yield name, mutant


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of `embed` with the results of a probe, one of `sync`."""
    root = tmp_path_factory.mktemp("hostile-json")
    for i in range(12):
        path = root / "pictures" / ["ant", "bee", "cat"][i % 3] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_picture(i).save(path)
    (root / "pictures" / "bee" / "07.png").write_bytes(b"no picture")
    layertap("embed", root / "pictures", "-o", root / "embedded", *SMALL, "-l", "layer4", "--shard-rows", 5)
    values = {"images": str(root / "pictures"), "out": str(root / "synced"), **SMALL_SYNC}
    (root / "sync.yaml").write_text(yaml.safe_dump(values))
    layertap("sync", root / "sync.yaml")
    probe = {
        "data_set": "x", "layer": "layer4", "width": 3, "chosen": {"k": 5}, "rows": {"train": 4, "val": 2, "test": 5},
        "metrics": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}},
    }  # fmt: skip
    results = {"configuration": {"protocol": "knn"}, "complete": True, "probes": [probe]}
    (root / "embedded" / "probe" / "knn").mkdir(parents=True)
    (root / "embedded" / "probe" / "knn" / "results.json").write_text(json.dumps(results))
    return root


@pytest.fixture
def made(_made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies; the commands run in their folder."""
    for name in ("embedded", "synced", "sync.yaml"):
        entry = _made / name
        (shutil.copytree if entry.is_dir() else shutil.copyfile)(entry, tmp_path / name)
    (tmp_path / "pictures").symlink_to(_made / "pictures")
    text = (tmp_path / "sync.yaml").read_text().replace(str(_made / "synced"), str(tmp_path / "synced"))
    (tmp_path / "sync.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


EMBED = ["embed", "pictures", "-o", "embedded", *SMALL, "-l", "layer4", "--shard-rows", 5]
READING: list[list[object]] = [
    ["show"], ["status"], ["export", "--to", "npy", "-o", "exported"], ["search", 0], ["diff", "embedded"],
    ["report", "--map", "pca"], ["merge", "-o", "merged"],
]  # fmt: skip


def of(out: str, *left_out: str) -> list[list[object]]:
    """The commands that read a data set."""
    return [[name, out, *more] for name, *more in READING if name not in left_out]


# File -> the commands that refuse, those that report a fault, and those that do without the file.
Commands = list[list[object]]
FILES: dict[str, tuple[Commands, Commands, Commands]] = {
    "embedded/dataset.json": ([*of("embedded"), EMBED], [["verify", "embedded"]], []),
    "embedded/shards/000001.json": ([], [["verify", "embedded"]], [*of("embedded"), EMBED]),
    "embedded/runs.jsonl": ([], [], [EMBED]),
    "embedded/probe/knn/results.json": ([], [], [["report", "embedded", "--map", "pca"]]),
    "synced/dataset.json": ([*of("synced", "merge"), ["compact", "synced"], ["sync", "sync.yaml"]],
                            [["verify", "synced"]], []),
    "synced/passes/000001/dataset.json": (of("synced"), [["verify", "synced"]], []),
    "synced/passes/000001/shards/000000.json": ([], [["verify", "synced"]], [*of("synced"), ["compact", "synced"]]),
    "synced/runs.jsonl": ([], [], [["status", "synced"]]),
}  # fmt: skip
# Without these files, or with something that is not a file in their place, a command has another reason to refuse, or
# none: a data set of `sync` without dataset.json is empty.
NO_FILE = {"missing", "dangling link", "link to itself"}
SLOWER = {"search", "diff", "report", "merge"}
QUICK = {"missing", "object", "number", "not utf-8", "huge", "pipe"}


def check(command: list[object], code: int, named: str = "") -> None:
    start = time.process_time()
    result = layertap(*command)
    assert result.exit_code == code, (command, result.output)
    assert named in result.output, (command, result.output)
    assert result.stderr.count("error: ") == (code == 2), (command, result.stderr)
    assert time.process_time() - start < 5, command


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "content", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONTENTS]
)
def test_no_content_of_a_file_ends_in_a_traceback(made: Path, file: str, content: str) -> None:
    most = content not in QUICK or content == "object"
    refusing, verifying, others = (
        [command for command in commands if most or command[0] not in SLOWER] for commands in FILES[file]
    )
    put(Path(file), CONTENTS[content])
    no_file = content in NO_FILE
    for command in verifying:
        check(command, 2 if no_file and file.count("/") == 1 else 1, Path(file).name)
    for command in others:
        named = command[0] == "status" and file.startswith("embedded/shards/")
        check(command, 0, Path(file).name if named else "")
    for command in refusing:
        if no_file and (command[0] in ("sync", "status") or command == EMBED):
            assert layertap(*command).exit_code in (0, 2), command
        else:
            check(command, 2, Path(file).name)


# Files that are no JSON, and one of which the link is followed by a writer.
OTHER_FILES = [
    "synced/versions/000001.h5", "synced/passes/000001/shards/000000.h5", "synced/passes/000001/runs.jsonl",
    "synced/passes/000001/.lock", "synced/.lock", "embedded/shards/000000.h5", "embedded/shards/000001.h5.part",
    "embedded/.lock",
]  # fmt: skip


@pytest.mark.parametrize(
    "file", [OTHER_FILES[0], *(pytest.param(file, marks=pytest.mark.slow) for file in (*OTHER_FILES[1:], *FILES))]
)
def test_what_takes_the_place_of_a_file_is_refused_or_left_out_and_a_link_in_it_not_followed(
    made: Path, file: str
) -> None:
    out, precious = Path(file).parts[0], made / "precious"
    precious.write_bytes(PRECIOUS)
    if file.endswith(".part"):  # an unfinished shard
        for suffix in (".json", ".h5"):
            Path(file).with_name("000001" + suffix).unlink()
    shutil.copytree(out, "untouched")
    contents: dict[str, bytes | Made] = {"link": lambda path: path.symlink_to(precious)}
    if file in OTHER_FILES:
        contents |= {name: CONTENTS[name] for name in ("pipe", "folder", "object", "huge", "deep")}
    writer = EMBED if out == "embedded" else ["sync", "sync.yaml"]
    for name, content in contents.items():
        for command in (["show", out], ["status", out], ["verify", out], ["verify", out, "--repair"], writer):
            if command[0] in ("show", writer[0]):  # those before have not changed the copy, or it has been repaired
                shutil.rmtree(out)
                shutil.copytree("untouched", out)
                put(Path(file), content)
            start, result = time.process_time(), layertap(*command)
            assert time.process_time() - start < 5, (name, command)
            assert result.exit_code in (0, 1, 2), (name, command, result.output)
            assert result.stderr.count("error: ") <= 1, result.stderr
            assert precious.read_bytes() == PRECIOUS, (name, command)


def test_a_damaged_receipt_is_repaired_and_something_else_in_its_place_is_left(made: Path) -> None:
    receipt = made / "embedded" / "shards" / "000001.json"
    for name in ("object", "huge", "pipe", "folder", "dangling link"):
        put(receipt, CONTENTS[name])
        is_other = receipt.is_fifo() or receipt.is_dir() or receipt.is_char_device()
        told = layertap("verify", "embedded", "--repair")
        assert (told.exit_code, "shards/000001.json: " in told.stdout) == (1, True)
        assert ("remove it" in told.stdout) == is_other
        assert layertap("verify", "embedded").exit_code == is_other
        receipt.rmdir() if receipt.is_dir() else receipt.unlink()


def mutants(file: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each file in which one value is another or missing; of a log, its first line."""
    first, *others = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
    for name, content in mutations(json.loads(first)):
        yield name, "\n".join([json.dumps(content), *others]) + "\n"


# Of 12 values for each key, another one each time.
FIFTH = 5


@pytest.mark.parametrize(
    ("file", "every"),
    [("embedded/shards/000001.json", 23), ("embedded/dataset.json", 47), ("synced/runs.jsonl", 19),
     *(pytest.param(name, 1 if "LAYERTAP_FUZZ" in os.environ else FIFTH, marks=pytest.mark.slow) for name in FILES)],
)  # fmt: skip
def test_no_value_in_a_file_ends_in_a_traceback(made: Path, file: str, every: int) -> None:
    """Commands that read the file, for values that are missing or another: for a fifth of them, one that is drawn; with
    LAYERTAP_FUZZ, each command for each value; in quick tests, the quick commands for few values.
    """
    commands = [command for commands in FILES[file] for command in commands]
    draw = random.Random(0)
    if every > FIFTH:
        commands = [command for command in commands if command[0] in ("show", "status", "verify")]
    folder, untouched = Path(file).parts[0], made / "untouched"
    shutil.copytree(folder, untouched, symlinks=True)
    for i, (name, text) in enumerate(list(mutants(Path(file)))):
        if i % every:
            continue
        Path(file).write_text(text)
        for command in [draw.choice(commands)] if every == FIFTH else commands:
            result = layertap(*command)
            assert result.exit_code in (0, 1, 2), (name, command, result.output)


def test_a_receipt_of_42_mb_costs_nothing(made: Path) -> None:
    data = complete_data_set(made / "out")
    path = data.path(1).with_suffix(".json")
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"reasons": {', b'"reasons": {' + b'"11": "no reason",\n' * 2_400_000 + b'"12": ""'))
    assert path.stat().st_size > 42_000_000
    start = time.process_time()
    (fault,) = verify(data.out).faults
    assert time.process_time() - start < 0.5
    most = receipt_bytes(SHARD_ROWS)
    expected = f"is damaged: it has {path.stat().st_size:,} bytes, expected at most {most:,}; --repair writes it again"
    assert (fault.file, fault.what) == ("shards/000001.json", expected)
    assert "shards/000001.json" in layertap("status", data.out).stdout


def test_show_describes_a_data_set_that_records_no_more_than_a_hash(made: Path) -> None:
    complete_data_set(made / "out", depends_on={"weights": "w"})
    told = layertap("show", made / "out")
    assert told.exit_code == 0
    assert "unknown, weights" in told.stdout
