"""The command line as a user meets it: what it prints, what it leaves, and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

from extract import FeatureReader
from extract.store.format.dataset import DataSet
from pipelines.cli import main
from pipelines.embed.config import EmbedConfig
from pipelines.probe.config import ProbeConfig
from pipelines.sync.config import load_sync_file
from pipelines.terminal.config import load_config
from tests.conftest import make_picture
from tests.pipelines.conftest import until

SMALL = [
    "-b", "timm/test_resnet", "--weights", "random", "--workers", "0", "--device", "cpu",
    "--size", "64", "--crop", "64",
]  # fmt: skip


def layertap(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback, which a user never sees for a mistake of his own
    return result


def succeeds(*arguments: object) -> Result:
    result = layertap(*arguments)
    assert result.exit_code == 0, result.output
    return result


def fails(*arguments: object, code: int = 2) -> str:
    result = layertap(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    message, _, hint = result.stderr[result.stderr.index("error: ") :].partition("\n\nhint: ")
    joint = "\n" if "\n" in message else ". " if hint[:1].isupper() else "; "
    return message + joint + hint if hint else message  # in one text, as `str(error)` is


# embed


def test_embed_writes_a_data_set_and_tells_what_it_did(folder: Path, tmp_path: Path) -> None:
    arguments = ["embed", folder, "-o", tmp_path / "out", *SMALL, "-l", "layer4", "-l", "layer?:max_map", "--limit", 12]
    result = succeeds(*arguments)
    assert "12 in" in result.stderr
    assert "3 classes" in result.stderr
    assert "chosen by auto" in result.stderr
    assert "images have" not in result.stderr  # not fewer classes than there are
    assert "WARNING: random (seed 0) weights: these features mean nothing" in result.stderr
    assert "out: 12 rows" in result.stdout
    assert "images/s; time went to images" in result.stdout
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.layers == [
            "layer4:mean_map", "layer1", "layer2", "layer3", "layer4:max_map",
        ]  # fmt: skip
    assert "is complete: all 12 rows were done before; nothing to do" in succeeds(*arguments).stdout


def test_the_defaults_are_the_bundled_embedding_under_outputs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    succeeds("embed", folder, "--limit", 1)
    with FeatureReader("outputs/pictures") as reader:
        assert reader.layers == ["embedding"]
        assert reader["embedding"].shape == (1, 1280)
        assert reader.provenance["backbone"] == "bundled/efficientnet_lite0"


def test_a_config_file_has_the_same_words_and_flags_win(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"images: {folder}\nout: {tmp_path / 'out'}\nbackbone: timm/test_resnet\nweights: random\n"
        "layers: [layer1, 'layer2:max_map']\nbatch_size: 5\nworkers: 0\ndtype: float16\nlimit: 7\n"
    )
    result = layertap("embed", "--config", config, "--limit", 4, "--json")
    assert json.loads(result.stdout)["rows"] == 4
    assert re.search(r"note: the first 4 images have 1 of the 3 classes", result.stderr)
    with FeatureReader(tmp_path / "out") as reader:
        assert len(set(reader.labels.tolist())) == 1
        assert reader.layers == ["layer1", "layer2"]
        assert reader["layer2"].attributes["pooling"] == "max_map"
        assert reader["layer1"].dtype == np.float16
        assert reader.provenance["configuration"]["batch_size"] == 5


def test_failed_images_are_named_at_the_end_and_strict_makes_it_an_exit_code(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "00.png").write_bytes(b"")
    (folder / "ant" / "02.jpg").write_text("a text file")
    (folder / "bee" / "new\nline.jpg").symlink_to(tmp_path / "nothing")
    arguments = ["embed", folder, *SMALL, "-l", "layer4", "--shard-rows", 5, "-o"]
    result = layertap(*arguments, tmp_path / "out", "--strict")
    assert result.exit_code == 3
    assert "3 rows without features (2 decode error, 1 missing):" in result.stdout
    assert "  ant/00.png: decode error: empty file\n" in result.stdout
    assert "  bee/new\\nline.jpg: missing: no such file\n" in result.stdout
    assert layertap(*arguments, tmp_path / "out", "--strict").exit_code == 3  # and the second time

    summary = json.loads(succeeds(*arguments, tmp_path / "other", "--json").stdout)
    status = {"ok": 11, "decode error": 2, "missing": 1}
    assert (summary["rows"], summary["computed"], summary["status"]) == (14, 14, status)
    first = {"row": 0, "path": "ant/00.png", "status": "decode error", "reason": "empty file"}
    assert (summary["failures"][0], len(summary["failures"])) == (first, 3)
    assert summary["features"]["layer4"]["shape"][0] == 14
    assert set(summary["stages"]) == {"images", "forward", "write"}

    text = layertap("show", tmp_path / "out").stdout
    for expected in ("14 rows in 3 shards", "complete", "layer4  (14, ", "3 classes: ant 5, bee 5, cat 4", "11 ok",
                     "3 rows without features (2 decode error, 1 missing)",
                     "ant/00.png: decode error: empty file", "timm/test_resnet, weights random (seed 0)",
                     "weights sha256 ", "preprocessing resize_px", "torch "):  # fmt: skip
        assert expected in text
    content = json.loads(layertap("show", tmp_path / "out", "--json").stdout)
    assert (content["rows"], content["status"]) == (14, status)
    assert content["features"]["layer4"]["pooling"] == "mean_map"
    assert content["classes"] == {"ant": 5, "bee": 5, "cat": 4}
    assert content["fingerprint"] == DataSet.open(tmp_path / "out").fingerprint


def test_the_configurations_that_come_with_it_are_valid() -> None:
    folder = Path(__file__).parents[2] / "configs"
    assert load_config(EmbedConfig, folder / "quickstart.yaml", {}).backbone == "bundled/efficientnet_lite0"
    assert load_config(ProbeConfig, folder / "probe.yaml", {}).layers == ["blocks.*", "embedding"]
    nightly = load_sync_file(folder / "nightly.yaml")
    assert nightly.schedule is not None
    assert (nightly.data_sets[0].backbone, nightly.schedule.cron) == ("bundled/efficientnet_lite0", "30 2 * * *")


def test_what_can_be_named_is_what_there_is() -> None:
    from extract.analysis.dense import DEPTH, SEGMENTATION
    from extract.analysis.probe import PROTOCOLS
    from extract.analysis.row_findings import KINDS
    from extract.store.export import FORMATS
    from extract.system.dissimilarities import METRICS
    from pipelines.data_sets import command

    assert command._METRICS == METRICS
    protocols = list(get_args(ProbeConfig.model_fields["protocol"].annotation))
    given = ["linear", *PROTOCOLS, *SEGMENTATION, *DEPTH, "rsa", "encoding"]  # linear is another name of clip
    assert protocols == given
    assert command._KINDS == KINDS
    assert tuple(FORMATS) == command._FORMATS


def test_every_key_of_a_configuration_is_a_flag() -> None:
    modes = {"plan", "slurm", "gpus", "cpus", "time", "partition"}
    for name, fields in (("embed", {*EmbedConfig.model_fields, *modes}), ("probe", {*ProbeConfig.model_fields})):
        assert {parameter.name for parameter in main.commands[name].params} == fields | {"config", "as_json"}


def test_another_run_on_the_same_output_exits_with_4(out: Path, folder: Path) -> None:
    with DataSet.open(out).locked():
        text = fails("embed", folder, "-o", out, *SMALL, code=4)
    assert "is locked by another thread of this process" in text


# Interruptions

COUNT = 600  # images, of which some hundred are computed within a second


def start_slow_run(tmp_path: Path) -> subprocess.Popen[str]:
    root = tmp_path / "many"
    root.mkdir()
    make_picture(0).save(root / "0000.png")
    png = (root / "0000.png").read_bytes()
    for i in range(1, COUNT):
        (root / f"{i:04d}.png").write_bytes(png + str(i).encode())  # other bytes, or they would be computed once
    command = [sys.executable, "-m", "layertap", "embed", str(root), "-o", str(tmp_path / "out")]
    command += [*SMALL, "--batch-size", "8", "--workers", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    try:
        until(lambda: stored(tmp_path / "out" / "shards" / "000000.h5.part") > 0)
    except AssertionError:
        run.kill()
        raise
    return run


def stored(part: Path) -> int:
    try:
        with h5py.File(part, locking=False) as file:
            return int((file["status"][:] != 0).sum())
    except OSError:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_run_keeps_its_rows_and_goes_on(tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = start_slow_run(tmp_path)
    os.killpg(run.pid, number)  # the whole group, as Ctrl-C in a terminal does
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == code
    assert "Traceback" not in stderr
    part = tmp_path / "out" / "shards" / "000000.h5.part"
    done = stored(part)
    assert 0 < done < COUNT
    if number != signal.SIGKILL:
        assert f"stopped: {done:,} of {COUNT} rows are stored" in stdout
        status = layertap("status", tmp_path / "out").stdout
        assert f"{done / COUNT:.1%} of the rows are stored" in status
        assert f"{done:,} in 1 unfinished shard" in status
        assert done % 8 == 0
    options = ["-o", tmp_path / "out", *SMALL, "--batch-size", 8]
    assert f"resuming: {done:,} of {COUNT} rows done" in layertap("embed", tmp_path / "many", *options).stderr
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.status.tolist() == [1] * COUNT
        rows = reader["embedding"][:]
        assert np.allclose(rows, rows[0], rtol=1e-4, atol=1e-6)  # one picture under many names
