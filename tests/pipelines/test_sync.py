"""sync, status, compact and watch, on the command line."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from extract import FeatureReader
from extract.system.atomic_files import locked
from pipelines.sync.config import load_sync_file
from pipelines.sync.job import add_run
from pipelines.sync.schedule import _LOCKED
from pipelines.sync.watch import reports_changes
from tests.conftest import TINY_INPUT, make_picture
from tests.pipelines.test_cli import fails, layertap, succeeds
from tests.planning import BY_COMMAND

SMALL = {"backbone": "timm/test_resnet", "weights": "random", "workers": 0, "device": "cpu", "settle": 0, **TINY_INPUT}


def write(path: Path, **values: Any) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    return write(tmp_path / "sync.yaml", images=str(folder), out=str(tmp_path / "out"), max_vanish=1, **SMALL)


def test_the_keys_of_parts_are_those_of_embed_and_stay_as_they_are(folder: Path, tmp_path: Path) -> None:
    keys = {"images": str(folder), "out": str(tmp_path / "out"), "tiles": 40, "overlap": 0.5, **SMALL}
    config = write(tmp_path / "sync.yaml", **keys)
    done = json.loads(succeeds("sync", config, "--json").stdout)[0]
    with FeatureReader(tmp_path / "out") as reader:
        assert (done["added"], done["rows"], done["computed"]) == (12, len(reader), len(reader))
        of_files = reader.per_file("embedding")
        assert (len(of_files.files), of_files.n_rows.sum()) == (12, len(reader))
        whole = {name: value for name, value in keys.items() if name != "settle"}
        succeeds("embed", "--config", write(tmp_path / "embed.yaml", **whole | {"out": str(tmp_path / "whole")}))
        with FeatureReader(tmp_path / "whole") as expected:
            rows = [reader.paths[:].index(path) for path in expected.paths]
            assert len(rows) == len(reader)
            np.testing.assert_allclose(reader["embedding"][:][rows], expected["embedding"][:], rtol=1e-5, atol=1e-6)
            assert all(np.array_equal(reader.columns[name][rows], expected.columns[name]) for name in "xywh")
    assert "columns h, w, x, y" in succeeds("show", tmp_path / "out").stdout
    other = write(tmp_path / "other.yaml", **keys | {"tiles": 32})
    assert "holds other parts of files" in fails("sync", other)
    assert "tiles: stored 40, now 32" in fails("sync", other, "--dry-run")
    useless = write(tmp_path / "useless.yaml", **keys | {"tiles": None})
    assert "overlap is that of tiles, and there are none" in fails("sync", useless)


def test_sync_tells_what_it_did_and_everything_else_reads_it(config: Path, folder: Path, tmp_path: Path) -> None:
    result = succeeds("sync", config)
    told = "version 1, 12 rows: 12 added, 0 changed, 0 renamed, 0 deleted, 0 failed"
    assert f"{tmp_path / 'out'}: {told}" in result.stdout
    assert "12 images computed" in result.stdout
    (folder / "ant/00.png").rename(folder / "bee/moved.png")
    (folder / "ant/03.jpg").unlink()
    make_picture(90).save(folder / "ant/new.png")
    (folder / "bee/bad.png").write_bytes(b"no picture")
    dry = json.loads(layertap("sync", config, "--dry-run", "--json").stdout)[0]
    done = json.loads(layertap("sync", config, "--json").stdout)[0]
    names = ("added", "changed", "renamed", "deleted", "computed", "rows")
    assert [dry[name] for name in names] == [done[name] for name in names] == [2, 0, 1, 1, 2, 13]
    assert (done["failed"], done["exit_code"], done["version"]) == (1, 0, 2)
    out = tmp_path / "out"
    assert "version 2" in layertap("show", out).stdout
    assert "13 rows" in layertap("show", out).stdout
    succeeds("verify", out, "--sample", 5)
    succeeds("export", out, "--to", "npy", "-o", tmp_path / "npy")
    succeeds("merge", out, "-o", tmp_path / "merged")
    arguments = [*BY_COMMAND, "--size", 64, "--crop", 64]
    succeeds("embed", folder, "-o", tmp_path / "fresh", *arguments)
    assert "same fingerprint" in layertap("diff", out, tmp_path / "fresh").stdout
    with FeatureReader(tmp_path / "merged") as merged, FeatureReader(tmp_path / "fresh") as fresh:
        assert merged.paths == fresh.paths
        np.testing.assert_allclose(merged["embedding"][:], fresh["embedding"][:], rtol=1e-5, atol=1e-6)
    assert "is kept in sync with" in fails("embed", folder, "-o", out, *arguments)


def test_status_tells_of_runs_rows_failures_and_disk(config: Path, folder: Path, tmp_path: Path) -> None:
    layertap("sync", config)
    assert "stored row" not in layertap("status", tmp_path / "out").stdout  # nothing was deleted
    for name in ("ant/00.png", "ant/03.jpg", "ant/06.png"):
        (folder / name).unlink()
    (folder / "bee/bad.png").write_bytes(b"no picture")
    layertap("sync", config)
    out = tmp_path / "out"
    text = layertap("status", out).stdout
    assert "version 2, synchronised with" in text
    assert "10: 9 ok, 1 decode error" in text
    assert "3 stored rows (23%" in text
    assert f"layertap sync {out} --compact" in text
    assert "12 added; 12 computed" in text
    assert "1 added, 3 deleted, 1 failed; 1 computed" in text
    assert "bee/bad.png: decode error: not an image" in text
    content = json.loads(layertap("status", out, "--json").stdout)
    assert (content["dead_rows"], content["stored_rows"]) == (3, 13)
    assert [run["event"] for run in content["runs"]] == ["synced", "synced"]
    told = layertap("compact", out, "--max-dead", 0.5).stdout
    assert told == f"{out}: nothing to compact; no pass has more than 50% of unused rows (--max-dead)\n"
    assert "3 rows removed" in layertap("compact", out).stdout
    assert json.loads(layertap("status", out, "--json").stdout)["dead_rows"] == 0
    shutil.rmtree(folder)
    assert fails("sync", config, code=1).startswith(f"error: cannot read folder {folder}")
    add_run(out, {"event": "stopped", "started": "2026-11-21T02:30:00+00:00", "seconds": 2.04})
    text = layertap("status", out).stdout
    assert "FAILED after" in text
    assert "stopped after 2.0 s; the next pass continues" in text


def test_sync_status_and_compact_tell_what_kind_of_place_they_are_given(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in fails("status", tmp_path / "nothing")
    layertap("embed", folder, "-o", tmp_path / "out", *BY_COMMAND, "--size", 64, "--crop", 64)
    assert "complete" in layertap("status", tmp_path / "out").stdout
    assert "it is a folder; expected a YAML file" in fails("sync", tmp_path / "out")
    assert "was not written by `layertap sync`" in fails("compact", tmp_path / "out")
    for option in ((), ("--compact",), ("--watch",)):
        assert "s3://b/x: `sync` works on this machine, not on a URL" in fails("sync", "s3://b/x", *option)


def test_one_folder_that_fails_does_not_keep_the_others_from_their_pass(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(folder, tmp_path / name)
    sets = [{"images": str(tmp_path / name), "out": str(tmp_path / f"out-{name}")} for name in ("one", "gone", "two")]
    config = write(tmp_path / "sync.yaml", data_sets=sets, **SMALL)
    result = layertap("sync", config, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [one["exit_code"] for one in found] == [0, 1, 0]
    assert "No such file" in found[1]["error"]
    assert not (tmp_path / "out-gone" / "dataset.json").exists()
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "one").mkdir()
    result = layertap("sync", config, "--json")
    assert "is the disk mounted?" in result.stderr
    assert f"`layertap sync {config} --force` confirms" in result.stderr
    assert [one["exit_code"] for one in json.loads(result.stdout)] == [1, 1, 0]
    assert "one data set" in fails("sync", config, "--force")
    succeeds("sync", config, "--force", "--only", tmp_path / "out-one")
    with FeatureReader(tmp_path / "out-one") as one, FeatureReader(tmp_path / "out-two") as two:
        assert (len(one), len(two)) == (0, 12)
    assert "out-twoo" in fails("sync", config, "--only", tmp_path / "out-twoo")


def test_rows_that_fail_make_an_exit_code_where_it_is_strict(config: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "bee/bad.png").write_bytes(b"no picture")
    succeeds("sync", config)
    assert layertap("sync", write(config, **yaml.safe_load(config.read_text()), strict=True)).exit_code == 3


def test_a_second_sync_at_once_exits_with_4_and_makes_no_pass(config: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        assert "is locked by" in fails("sync", config, code=4)
    assert _LOCKED == 4  # for the scheduler, such a pass is no failure
    succeeds("sync", config)
    assert [json.loads(line)["event"] for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()] == ["synced"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"imagse": "x"}, "key 'imagse' not found"),
        ({"images": "s3://bucket/x"}, "a folder on this machine, not a URL"),
        ({"images": "x", "out": "s3://bucket/x"}, "sync writes to a folder on this machine, not to a URL"),
        ({"images": "x", "out": "x/out"}, "lies inside x"),
        ({"images": "x", "max_vanish": "20%"}, "max_vanish: expected a valid number; got '20%'; write a share as"),
        ({"images": "x", "settle": "5 parsecs"}, "expected seconds, or a time such as 90s"),
        ({"images": "x", "max_vanish": 2}, "max_vanish"),
        ({"images": "x", "keep_gone": float("inf")}, "expected at most 36500d"),
        ({"images": "x", "schedule": {"cron": "0 0 2 * * *"}}, "expected minute, hour, day"),
        ({"out": "x"}, "the key `images` is missing"),
        ({"data_sets": "x"}, "expected a list"),
        ({"images": "x", "data_sets": [{"out": "o"}, {"images": "y", "out": "o/."}]}, "have the same out"),
        ({"data_sets": [{"images": "x"}, {"images": "y", "batch": 3}]}, "data set 2"),
        ({"images": "x", "schedule": {"cron": "* * * * *", "every": "5m"}}, "exactly one of cron and every"),
        ({"images": "x", "schedule": {"every": "5m", "timezone": "Europe/Atlantis"}}, "no such time zone"),
        ({"images": "x", "schedule": {"evry": "5m"}}, "key 'evry' not found"),
        ({"images": "x", "limit": 3}, "key 'limit' not found"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    assert message in fails("sync", write(tmp_path / "sync.yaml", **values))


def test_times_have_units(tmp_path: Path) -> None:
    given: dict[str, Any] = {"settle": "1.5m", "retry_after": "36h", "keep_gone": "2d", "schedule": {"every": 90}}
    found = load_sync_file(write(tmp_path / "s.yaml", images="x", **given))
    first = found.data_sets[0]
    assert found.schedule is not None
    assert (first.settle, first.retry_after, first.keep_gone, found.schedule.every) == (90, 129600, 172800, 90)


def test_a_pass_without_changes_imports_no_torch(config: Path) -> None:
    layertap("sync", config)
    code = "import sys; from pipelines.cli import main\ntry: main()\nexcept SystemExit: print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, "sync", str(config)], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "False"


def test_what_a_killed_pass_has_left_is_removed_by_the_next(config: Path, tmp_path: Path) -> None:
    layertap("sync", config)
    out = tmp_path / "out"
    left = out / "dataset.json.0123456789ab-01234567.new", out / "dataset.json.77.new"
    for path in left:
        path.write_text("{")
    (out / "thesis.new").write_text("mine")
    layertap("sync", config, "--dry-run")
    assert all(path.exists() for path in left)
    layertap("sync", config)
    assert not any(path.exists() for path in left)
    left[0].write_text("{")
    layertap("compact", out)
    assert not left[0].exists()
    assert (out / "thesis.new").read_text() == "mine"


@pytest.mark.slow
def test_a_pass_that_is_stopped_finishes_its_batch_and_the_next_goes_on(folder: Path, tmp_path: Path) -> None:
    for i in range(300):  # seconds of computing
        make_picture(1000 + i).save(folder / f"ant/more{i}.png")
    config = write(tmp_path / "sync.yaml", images=str(folder), out=str(tmp_path / "out"), **SMALL | {"batch_size": 4})
    command = [sys.executable, "-m", "layertap", "sync", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("computed"):
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "stopped; what was computed is stored" in output
    result = json.loads(layertap("sync", config, "--json").stdout)[0]
    assert result["rows"] == 312
    assert 0 < result["computed"] < 312
    succeeds("verify", tmp_path / "out")


def test_folders_on_servers_are_polled(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /mnt/nas rw shared:1 - nfs4 nas:/ rw\n"
        "3 1 0:6 / /mnt/with\\040space rw - fuse.sshfs x rw\n"
        "4 2 8:2 / /mnt/nas/local rw - xfs /dev/sdb rw\n"
    )
    folders = ("/home/photos", "/mnt/nas/photos", "/mnt/with space/photos", "/mnt/nas/local/photos", "/mnt/nasty")
    assert [reports_changes(Path(folder), mounts) for folder in folders] == [True, False, False, True, True]
