"""`layertap embed` by several workers gives what one process gives."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from extract import FeatureReader, InputError, extract_features
from extract.store.verify import verify
from pipelines.cli import main
from pipelines.embed.cluster.driver import SharedRun, as_json, embed_shared
from pipelines.embed.config import EmbedConfig
from pipelines.embed.job import embed
from pipelines.terminal.config import load_config

OPTIONS = {
    "backbone": "timm/test_resnet", "weights": "random", "size": 64, "crop": 64,
    "shard_rows": 3, "batch_size": 2, "compile": "off", "workers": 0,
}  # fmt: skip
FLAGS = [text for key, value in OPTIONS.items() for text in (f"--{key.replace('_', '-')}", str(value))]
TWO_WORKERS = ["--engine", "processes", "--cpus-per-worker", "1"]


def config(images: Path, out: Path, **changes: Any) -> EmbedConfig:
    return load_config(EmbedConfig, None, {"images": images, "out": out, **OPTIONS, **changes})


def alone(images: Path, out: Path) -> FeatureReader:
    embed(config(images, out, device="cpu"))
    return FeatureReader(out)


def assert_same(reader: FeatureReader, expected: FeatureReader) -> None:
    """Within 1e-5 of the largest value: with another number of threads, sums are rounded otherwise."""
    found, wanted = reader["embedding"][:], expected["embedding"][:]
    assert found.shape == wanted.shape
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert np.nanmax(np.abs(found - wanted)) <= 1e-5 * np.nanmax(np.abs(wanted))


def files_of(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.name != ".lock")


@pytest.mark.slow
def test_several_processes_make_what_one_makes_and_a_second_run_does_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "05-broken.jpg").write_bytes(b"no picture")
    out = tmp_path / "out"
    command = [str(folder), "-o", str(out), *FLAGS, *TWO_WORKERS]
    first = CliRunner().invoke(main, ["embed", *command])
    assert first.exit_code == 0, first.output
    assert "5 of 5 shards are published, 5 of them by this run" in first.output
    assert "05-broken.jpg" in first.output
    assert verify(out).faults == []
    assert ".building" not in files_of(out)
    with FeatureReader(out) as reader, alone(folder, tmp_path / "alone") as expected:
        assert reader.paths == expected.paths
        assert np.array_equal(reader.labels, expected.labels)
        assert np.array_equal(reader.status, expected.status)
        assert_same(reader, expected)
        assert reader.fingerprint == expected.fingerprint
        assert [failure[1:] for failure in reader.failures] == [failure[1:] for failure in expected.failures]
    made = [json.loads(path.read_text())["made"] for path in (out / "shards").glob("*.json")]
    assert [one["host"] for one in made] == [platform.node()] * 5
    before = files_of(out)
    again = CliRunner().invoke(main, ["embed", *command, "--json"])
    assert again.exit_code == 0
    assert json.loads(again.stdout)["made"] == 0
    assert files_of(out) == before


@pytest.mark.slow
def test_tasks_of_an_array_and_two_writers_of_a_part_make_each_shard_once_and_other_features_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def embed_part(number: int) -> SharedRun:
        # With --shards-of, the folder is not locked.
        return embed_shared(config(folder, out, shards_of=f"{number}/2", scratch=tmp_path / str(number)))

    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(embed_part, (0, 1, 1)))
    assert [as_json(run)["made"] for run in runs[:1]] == [2]
    assert sum(as_json(run)["made"] for run in runs) == 4
    assert runs[0].done == 2
    assert verify(out).faults == []
    assert files_of(out) == [
        "dataset.json", "shards",
        *(f"shards/00000{shard}.{kind}" for shard in range(4) for kind in ("h5", "json")),
    ]  # fmt: skip
    with FeatureReader(out) as reader, alone(folder, tmp_path / "alone") as expected:
        assert_same(reader, expected)
    with pytest.raises(InputError, match="stored_as: stored float32, now float16"):
        embed_shared(config(folder, out, shards_of="0/2", scratch=tmp_path / "0", dtype="float16"))
    assert list((tmp_path / "0").iterdir()) == list((tmp_path / "1").iterdir()) == []


@pytest.mark.slow
def test_a_wrong_layer_is_said_as_by_one_process(folder: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(
        main, ["embed", str(folder), "-o", str(tmp_path / "out"), *FLAGS, "--engine", "processes", "-l", "no_such"]
    )
    assert found.exit_code == 2
    assert "error: layer 'no_such' not found" in found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_a_run_is_gone_on_with(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    slow = [sys.executable, "-m", "layertap", "embed", str(folder), "-o", str(out), *FLAGS, *TWO_WORKERS]
    with subprocess.Popen(slow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        end = time.monotonic() + 120
        while not list(out.glob("shards/*.h5")):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        text = process.communicate()[0]
    if number == signal.SIGINT and process.returncode:  # else it was done already
        assert process.returncode == 130
        assert "To resume:" in text
    embed_shared(config(folder, out, engine="processes"))
    assert ".building" not in files_of(out)
    assert verify(out).faults == []
    with FeatureReader(out) as reader, alone(folder, tmp_path / "alone") as expected:
        assert_same(reader, expected)


@pytest.mark.slow
def test_ctrl_c_before_a_worker_is_ready_ends_all_processes_without_a_traceback(folder: Path, tmp_path: Path) -> None:
    arguments = ["embed", str(folder), "-o", str(tmp_path / "out"), *FLAGS, *TWO_WORKERS]
    with subprocess.Popen(
        [sys.executable, "-m", "layertap", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        # While a worker imports modules: after Python has set its own handler, and before layertap ignores the signal.
        workers: list[str] = []
        while not any(cpu_s(worker) > 0.08 for worker in workers):
            assert process.poll() is None
            time.sleep(0.005)
            workers = workers_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "Traceback" not in text
    assert "stopped before a worker joined; nothing was computed" in text
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def cpu_s(pid: str) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def workers_of(pid: int) -> list[str]:
    """Process ids of the workers of a run."""
    children = [child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def test_what_several_processes_left_is_removed_when_one_has_ended_it(folder: Path, tmp_path: Path) -> None:
    left = tmp_path / "out" / ".building" / "layertap-0-ab-0" / "shards"
    left.mkdir(parents=True)
    (left / "000001.h5.part").write_bytes(b"")
    with alone(folder, tmp_path / "out"):
        assert ".building" not in files_of(tmp_path / "out")


def test_python_code_is_told_who_writes_to_buckets(folder: Path) -> None:
    with pytest.raises(InputError, match=r"layertap embed -o s3://bucket/photos"):
        extract_features(folder, out="s3://bucket/photos")
