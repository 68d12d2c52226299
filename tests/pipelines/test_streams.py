"""Data on stdout, everything else on stderr: each command in a small case that succeeds."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from click.testing import CliRunner

from extract import FeatureReader, Status
from extract.store.format.dataset import DataSet
from extract.store.format.layout import RowNames, StoredFeature, create_shard
from extract.store.format.writer import ShardWriter
from pipelines import cli
from pipelines.terminal.text_output import printable
from tests.pipelines.test_cli import SMALL, layertap, succeeds

FAST = "--workers 0 --device cpu"

# Command -> what its stdout has without --json, and its exit code. P is a folder of images, D its data set, S one of
# `layertap sync`, T an empty folder. Commands that end only on a signal, or measure for minutes, are in LONG.
COMMANDS = {
    f"embed P -o T/new {' '.join(SMALL)}": "12 rows",
    "embed P --plan -o T/plan": "12",
    "embed --config C --slurm 2": "#SBATCH",
    "show D": "12 rows",
    "show D --status": "12",
    "show S --status": "12",
    "report D -o T/report.html --map pca": "report.html",
    "search D 1 -k 2": "cosine",
    "search D 1 -k 2 -o T/found.png": "cosine",
    "show D D": "12",
    "verify D": "12",
    "check D --sample 2": "2 rows agree",
    "export D --to npy -o T/npy": "npy",
    "merge D -o T/merged": "12 rows",
    "sync Y": "12 rows",
    "sync Y --schedule --print cron": "layertap sync",
    "sync S --compact": "nothing to compact",
    "probe D -o T/probe -p centroid": "centroid",
    f"compare P -b bundled/efficientnet_lite0 -p centroid -o T/compared {FAST}": "top-1",
    "list timm/test_resnet layer1": "layer1",
    f"inspect timm/test_resnet P --weights random --sample 4 -l layer1 {FAST}": "layer1",
    f"inspect timm/test_resnet P --weights random --sample 4 -l layer1 --pictures T/inside {FAST}": "layer1",
    f"draw maps timm/test_resnet P --weights random --sample 2 -o T/drawn {FAST}": "T/drawn",
    f"inspect timm/test_resnet P --edit zero --weights random --sample 4 -l layer1 {FAST}": "layer1",
    "list": "torchvision",
    "list bundled/*": "efficientnet_lite0",
    "findings D": "nothing found",
    "doctor P -o T/none": "no problems",
    "completion bash": "_layertap_completion",
    "predict T/probe.safetensors D -o T/predictions.csv": "predictions.csv",
}
LONG = {"demo"}
NO_NOISE = ("error", "note:", "WARNING", "written:", "measuring", "images/s,", "computing")


@pytest.fixture(scope="module")
def place(_twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streams")
    (root / "P").symlink_to(_twelve)
    succeeds("embed", root / "P", "-o", root / "D", *SMALL)
    (root / "C").write_text("images: P\nout: T/slurm\n")
    settings = "images: P\nout: S\nbackbone: timm/test_resnet\nweights: random\nworkers: 0\ndevice: cpu\nsettle: 0\n"
    (root / "Y").write_text(settings + "schedule:\n  cron: 30 2 * * *\n")
    (root / "T").mkdir()
    with contextlib.chdir(root):
        succeeds("sync", "Y")
        succeeds("probe", "D", "-o", "T/p", "-p", "centroid", "--save", "T/probe.safetensors")
    return root


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def takes_json(command: str) -> bool:
    if {"--slurm", "--print", "--compact"} & set(command.split()):  # refused with --json
        return False
    return any(parameter.name == "as_json" for parameter in cli.main.commands[command.split()[0]].params)


@pytest.mark.parametrize("command", [pytest.param(c, marks=pytest.mark.slow) if takes_json(c) else c for c in COMMANDS])
def test_the_result_is_on_stdout_and_notes_are_on_stderr(command: str, here: None) -> None:
    result = succeeds(*command.split())
    assert COMMANDS[command] in result.stdout
    assert not [line for line in result.stdout.splitlines() if line.startswith(NO_NOISE)]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.slow) if c.startswith("compare") else c for c in COMMANDS if takes_json(c)],
)
def test_with_json_stdout_is_json_and_nothing_else(command: str, here: None, tmp_path: Path) -> None:
    result = succeeds(*command.replace("T/", f"{tmp_path}/").split(), "--json")
    parsed: Any = json.loads(result.stdout)
    assert parsed or command == "findings D"  # nothing is odd about its images


# What a terminal obeys: a title, a colour, a bell, DEL, C1, a line break; and text that runs from right to left.
HOSTILE = "\x1b]0;PWN\x07\x1b[5;47mX\r\x7f\x9b31m\u202e\x00"
OWN_COLOURS = re.compile(r"\x1b\[(3[1236]|1|0)m")


def hostile(content: Any) -> Any:
    """A copy in which every text, also of names, ends in what a terminal obeys."""
    if isinstance(content, dict):
        return content | {f"{key}{HOSTILE}": hostile(value) for key, value in content.items()} | {
            key: hostile(value) for key, value in content.items()
        }  # fmt: skip
    if isinstance(content, list):
        return [hostile(value) for value in content]
    return content + HOSTILE if isinstance(content, str) else content


def forge(source: Path, out: Path) -> None:
    """Write a data set with valid hashes that has the rows of another one and a stranger's texts."""
    given, text = DataSet.open(source), HOSTILE.replace("\0", "")  # the format has no null characters in these
    with FeatureReader(source) as reader:
        provenance, values = reader.provenance, reader[reader.layers[0]][:]
        paths = sorted(f"{path}{text}\n" for path in reader.paths)
    features = [StoredFeature(f"embedding{text}", values.shape[1:], "float32", {"layer": text, "pooling": text})]
    hashed = xxhash.xxh3_128_hexdigest(b"\0".join(path.encode() for path in paths))
    images = {"root": f"/pictures{text}", "count": len(paths), "paths_xxh3": hashed}
    data = DataSet(out, hostile(given.depends_on), features, images, len(paths))
    data.open_or_create()
    count = len(paths)
    classes, splits = [f"ant{text}", f"bee{text}"], ["train", "train", "test"] * (count // 3)
    names = RowNames(paths, np.arange(count) % 2, splits, classes, None, {f"age{text}": [text] * count})
    create_shard(data.path(0, part=True), features, data.identity(0), names, hostile(provenance))
    with ShardWriter(data, 0) as writer:
        source_of = {"source_size": np.full(count, 1), "source_mtime_ns": np.full(count, 1),
                     "source_hash": np.zeros((count, 16), "u1")}  # fmt: skip
        status = np.full(count, Status.OK, "u1")
        status[-1], values[-1] = Status.DECODE_ERROR, np.nan
        writer.write(np.arange(count), {features[0].name: values}, status, source_of, {count - 1: f"{text}\n{text}"})
        writer.flush()
        writer.publish(None)


# Commands that print the strange texts themselves, also in JSON.
PRINTED = ("show F", "show F --status", "show D F", "search F 0")


@pytest.fixture(scope="module")
def forged(place: Path) -> Path:
    forge(place / "D", place / "F")
    return place


@pytest.mark.parametrize(
    "command",
    [
        "show F", "show F --status", "verify F", "verify F --sample 2", "show F D", "show D F", "search F 0",
        "search F 99", "search F P/ant/00.png", "merge F -o T/forged", "merge F D -o T/mixed",
        "report F -o T/forged.html --map pca",
        "export F --to npy -o T/forged-npy", "export F --to h5 -o T/forged.h5", "export F --to parquet -o T/forged.pq",
        "export F --to hf -o T/forged-hf", "export F --to mat -o T/forged.mat", "probe F -o T/forged-probe -p centroid",
        "probe F -o T/forged-knn -p knn",
        "predict T/probe.safetensors F -o T/forged.csv", "embed P -o F --workers 0", "doctor P -o F",
    ],
)  # fmt: skip
def test_no_command_prints_what_a_terminal_obeys(command: str, forged: Path, here: None) -> None:
    for options in ([], ["--json"]) if takes_json(command) and command in PRINTED else ([],):
        # With colours, as on a terminal: otherwise click removes some of the sequences.
        result = CliRunner().invoke(cli.main, [*command.split(), *options], color=True)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        text = OWN_COLOURS.sub("", result.output)
        assert [line for line in text.split("\n") if not line.isprintable()] == []
        assert ("PWN" in text) or command not in PRINTED


@pytest.mark.slow
def test_show_prints_nothing_that_a_real_terminal_obeys(forged: Path) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "layertap", "show", forged / "F"], stdout=slave, stderr=slave):
        os.close(slave)
        text = b""
        with contextlib.suppress(OSError):  # how the end is told
            while part := os.read(master, 1 << 16):
                text += part
    os.close(master)
    assert b"PWN" in text
    assert [line for line in text.decode().split("\r\n") if not line.isprintable()] == []


def test_the_help_shows_four_commands_to_start_with_and_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = layertap("--help").stdout.splitlines()
    start = lines.index("Start with:")
    assert lines[start - 1] == ""
    assert [lines[start + number].split()[:2] for number in (1, 2, 3, 4)] == [
        ["layertap", "demo"], ["layertap", "doctor"], ["layertap", "embed"], ["layertap", "show"],
    ]  # fmt: skip
    assert {command.split()[0] for command in COMMANDS} | LONG == set(cli.main.commands)
    listed = [name for line in lines[start + 5 :] for name in re.findall(r"^  ([a-z]+)  ", line)]
    assert sorted(listed) == sorted(name for names in cli.SECTIONS.values() for name in names)
    assert sorted(listed) == sorted(name for name, command in cli.main.commands.items() if not command.hidden)
    assert sorted([*listed, "demo", "completion"]) == sorted(cli.main.commands)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[start:] if line.endswith("...")]


def test_a_command_without_arguments_prints_help_and_no_error() -> None:
    result = layertap()
    assert result.exit_code == 2
    assert "Start with:" in result.stderr
    assert "error" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_behind_stdout_is_not_taken_for_that_of_a_data_set(forged: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "layertap", "show", str(forged / "D")]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered)
    assert run.returncode == 1
    assert run.stderr == "error: standard output: No space left on device\n\nhint: write it to another file or disk\n"


def test_names_are_readable_where_python_is_told_to_use_ascii(tmp_path: Path) -> None:
    name = tmp_path / "кот"
    forced = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run([sys.executable, "-m", "layertap", "show", str(name)], env=forced, capture_output=True)
    assert run.stderr.decode().startswith(f"error: {name} does not exist")
    bad = os.fsdecode(b"\xd0\xba\xff\xc2\x9b31m")  # a letter, an undecodable byte, and a control sequence of a terminal
    assert printable(bad) == "к\\udcff\\x9b31m"
