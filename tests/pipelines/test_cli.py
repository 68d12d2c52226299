"""The command line as a user meets it: what it prints, what it leaves, and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

from extract import FeatureReader
from extract.store.format.dataset import DataSet
from pipelines.cli import main
from tests.conftest import make_picture

SMALL = [
    "-b", "timm/test_resnet", "--weights", "random", "--workers", "0", "--device", "cpu",
    "--size", "64", "--crop", "64",
]  # fmt: skip


def layertap(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception  # a traceback, which a user never sees for a mistake of his own
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
    result = layertap("embed", folder, "-o", tmp_path / "out", *SMALL, "-l", "layer4", "-l", "layer?:max_map")
    assert result.exit_code == 0
    assert "12 in" in result.stderr
    assert "3 classes" in result.stderr
    assert "chosen by auto" in result.stderr
    assert "WARNING: random (seed 0) weights: these features mean nothing" in result.stderr
    assert "out: 12 rows" in result.stdout
    assert "images/s; time went to images" in result.stdout
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.layers == [
            "layer4:mean_map", "layer1", "layer2", "layer3", "layer4:max_map",
        ]  # fmt: skip


def test_the_defaults_are_the_bundled_embedding_under_outputs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert layertap("embed", folder).exit_code == 0
    with FeatureReader("outputs/pictures") as reader:
        assert reader.layers == ["embedding"]
        assert reader["embedding"].shape == (12, 1280)
        assert reader.provenance["backbone"] == "bundled/efficientnet_lite0"


def test_json_is_all_that_is_on_stdout(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "00.png").write_bytes(b"")
    result = layertap("embed", folder, "-o", tmp_path / "out", *SMALL, "--json")
    summary = json.loads(result.stdout)
    assert (summary["rows"], summary["computed"], summary["status"]) == (12, 12, {"ok": 11, "decode error": 1})
    assert summary["failures"] == [{"row": 0, "path": "ant/00.png", "status": "decode error", "reason": "empty file"}]
    assert summary["features"]["embedding"]["shape"][0] == 12
    assert set(summary["stages"]) == {"images", "forward", "write"}


def test_a_config_file_has_the_same_words_and_flags_win(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"images: {folder}\nout: {tmp_path / 'out'}\nbackbone: timm/test_resnet\nweights: random\n"
        "layers: [layer1, 'layer2:max_map']\nbatch_size: 5\nworkers: 0\ndtype: float16\nlimit: 7\n"
    )
    summary = json.loads(layertap("embed", "--config", config, "--limit", 4, "--json").stdout)
    assert summary["rows"] == 4
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.layers == ["layer1", "layer2"]
        assert reader["layer2"].attributes["pooling"] == "max_map"
        assert reader["layer1"].dtype == np.float16
        assert reader.provenance["configuration"]["batch_size"] == 5


def test_the_configurations_that_come_with_it_are_valid() -> None:
    from pipelines.embed.config import EmbedConfig
    from pipelines.probe.config import ProbeConfig
    from pipelines.terminal.config import load_config

    folder = Path(__file__).parents[2] / "configs"
    assert load_config(EmbedConfig, folder / "quickstart.yaml", {}).backbone == "bundled/efficientnet_lite0"
    assert load_config(ProbeConfig, folder / "probe.yaml", {}).layers == ["blocks.*", "embedding"]


def test_the_protocols_that_can_be_named_are_those_that_there_are() -> None:
    from typing import get_args

    from extract.analysis.dense import DEPTH, SEGMENTATION
    from extract.analysis.probe import PROTOCOLS
    from pipelines.probe.config import ProbeConfig

    named = list(get_args(ProbeConfig.model_fields["protocol"].annotation))
    assert named == ["linear", *PROTOCOLS, *SEGMENTATION, *DEPTH]  # linear is another name of clip
    flags = {parameter.name for parameter in main.commands["probe"].params}
    assert flags == {*ProbeConfig.model_fields, "config", "as_json"}


def test_the_kinds_and_formats_that_can_be_named_are_those_that_there_are() -> None:
    from extract.analysis.row_findings import KINDS
    from extract.store.export import FORMATS
    from extract.system.dissimilarities import METRICS
    from pipelines.data_sets import command

    assert command._METRICS == METRICS
    assert command._KINDS == KINDS
    assert tuple(FORMATS) == command._FORMATS


def test_every_key_of_the_configuration_is_a_flag() -> None:
    from pipelines.embed.config import EmbedConfig

    flags = {parameter.name for parameter in main.commands["embed"].params}
    modes = {"plan", "slurm", "gpus", "cpus", "time", "partition"}
    assert set(EmbedConfig.model_fields) | modes | {"config", "as_json"} == flags


def test_failed_images_are_named_at_the_end_and_strict_makes_it_an_exit_code(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "00.png").write_bytes(b"")
    (folder / "ant" / "02.jpg").write_text("a text file")
    (folder / "bee" / "new\nline.jpg").symlink_to(tmp_path / "nothing")
    result = layertap("embed", folder, "-o", tmp_path / "a", *SMALL)
    assert result.exit_code == 0
    assert "3 rows without features (2 decode error, 1 missing):" in result.stdout
    assert "  ant/00.png: decode error: empty file\n" in result.stdout
    assert "  bee/new\\nline.jpg: missing: no such file\n" in result.stdout
    assert layertap("embed", folder, "-o", tmp_path / "b", *SMALL, "--strict").exit_code == 3
    assert layertap("embed", folder, "-o", tmp_path / "b", *SMALL, "--strict").exit_code == 3  # and the second time


def test_a_second_run_says_that_all_is_done(folder: Path, tmp_path: Path) -> None:
    first = layertap("embed", folder, "-o", tmp_path / "out", *SMALL)
    assert first.exit_code == 0, first.output
    result = layertap("embed", folder, "-o", tmp_path / "out", *SMALL)
    assert result.exit_code == 0
    assert "is complete: all 12 rows were done before; nothing to do" in result.stdout


# Bad input: one clear line or a short list, no traceback, nothing lost


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "-l", "layer4:cls_token"], "cls_token does not fit a map of shape"),
        ([*SMALL, "--device", "cuda:77"], "device 'cuda:77' cannot be used"),
        ([*SMALL, "--seed", "99999999999999999999"], "--seed: expected less than 9223372036854775808"),
        ([*SMALL[:2], "--weights", ""], "--weights: String should have at least 1 character"),
    ],
)
def test_wrong_values(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    code = 1 if "cuda:77" in arguments else 2
    assert message in fails("embed", folder, "-o", tmp_path / "out", *arguments, code=code)
    assert not (tmp_path / "out").exists()


def test_a_layer_that_never_runs(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "from torchvision import transforms\n"
        "def net():\n"
        "    encoder = nn.TransformerEncoderLayer(64, 2, 8, batch_first=True)\n"
        "    model = nn.Sequential(nn.Conv2d(3, 64, 8, 8), nn.Flatten(2), encoder, nn.Flatten(), nn.Linear(4096, 5))\n"
        "    return model, transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])\n"
    )
    text = fails("embed", folder, "-o", tmp_path / "out", "-b", f"python/{file}:net", "-l", "2.self_attn.out_proj")
    assert f"'2.self_attn.out_proj' of python/{file}:net never runs" in text


def test_an_output_of_another_fingerprint_is_told_and_kept(folder: Path, tmp_path: Path) -> None:
    layertap("embed", folder, "-o", tmp_path / "out", *SMALL)
    before = (tmp_path / "out" / "shards" / "000000.h5").read_bytes()
    text = fails("embed", folder, "-o", tmp_path / "out", *SMALL, "--seed", 1, "-l", "layer1")
    assert "holds other features" in text
    assert "weights_sha256: " in text
    assert "features.layer1: stored nothing, now " in text
    assert f"choose another output folder: -o {tmp_path / 'out'}-2" in text
    assert "--add-layers" not in fails("embed", folder, "-o", tmp_path / "out", *SMALL, "-l", "layer1:pca2")
    assert (tmp_path / "out" / "shards" / "000000.h5").read_bytes() == before


def test_outputs_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "file is a file; name a folder for the output" in fails("embed", folder, "-o", tmp_path / "file", *SMALL)
    for out in (tmp_path / "file" / "deeper", "/proc/layertap"):
        assert f"error: {out}: the folder cannot be created in " in fails("embed", folder, "-o", out, *SMALL)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a", "has no keys"),
        ("backbone: timm/test_resnet", "the key `images` is missing"),
        ('images: ""', "expected a path that is not empty"),
        ('images: "a\\0b"', "expected a path that is not empty"),
        ("images: x\nlimit: true", "limit: expected a valid integer"),
        ("images: x\nsize: 0", "size: expected pixels, such as 256 or 256x320; got 0"),
    ],
)
def test_wrong_config_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    assert message in fails("embed", "--config", tmp_path / "c.yaml")


def test_another_run_on_the_same_output_exits_with_4(folder: Path, tmp_path: Path) -> None:
    layertap("embed", folder, "-o", tmp_path / "out", *SMALL)
    code = (
        "import sys, time; from pathlib import Path; from extract.store.format.dataset import DataSet\n"
        f"with DataSet.open(Path({str(tmp_path / 'out')!r})).locked(): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        text = fails("embed", folder, "-o", tmp_path / "out", *SMALL, code=4)
        holder.kill()
    assert f"is locked by pid {holder.pid} on " in text


# Interruptions


def start_slow_run(tmp_path: Path) -> subprocess.Popen[str]:
    root = tmp_path / "many"
    root.mkdir()
    make_picture(0).save(root / "0000.png")
    png = (root / "0000.png").read_bytes()
    for i in range(1, 3000):
        (root / f"{i:04d}.png").write_bytes(png + str(i).encode())  # other bytes, or they would be computed once
    command = ["-c", "from pipelines.cli import main; main(prog_name='layertap')", "embed", str(root)]
    options = ["-o", str(tmp_path / "out"), *SMALL, "--batch-size", "8", "--workers", "1"]
    run = subprocess.Popen(
        [sys.executable, *command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    part = tmp_path / "out" / "shards" / "000000.h5.part"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if part.exists() and stored(part):
            return run
        time.sleep(0.02)
    run.kill()
    raise AssertionError(f"no row was stored: {run.communicate()}")


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
    assert 0 < done < 3000
    if number != signal.SIGKILL:
        assert f"stopped: {done:,} of 3,000 rows are stored" in stdout
        status = layertap("status", tmp_path / "out").stdout
        assert f"{done / 3000:.1%} of the rows are stored" in status
        assert f"{done:,} in 1 unfinished shard" in status
        assert done % 8 == 0
    options = ["-o", tmp_path / "out", *SMALL, "--batch-size", 8]
    again = layertap("embed", tmp_path / "many", *options)
    assert f"resuming: {done:,} of 3,000 rows done" in again.stderr
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.status.tolist() == [1] * 3000
        rows = reader["embedding"][:]
        assert np.allclose(rows, rows[0], rtol=1e-4, atol=1e-6)  # one picture under 3,000 names


# layers


def test_layers_are_listed() -> None:
    text = layertap("layers", "timm/test_resnet", "layer?", "fc").stdout
    assert [line.split()[0] for line in text.splitlines()] == ["layer", "layer1", "layer2", "layer3", "layer4", "fc"]
    rows = json.loads(layertap("layers", "timm/test_resnet", "layer1.*", "--ops", "--json").stdout)
    assert {"layer1.0", "layer1.0/add", "/flatten"} & {row["name"] for row in rows} >= {"layer1.0", "layer1.0/add"}
    assert "nearest: 'layer" in fails("layers", "timm/test_resnet", "layr1")
    assert "list them: layertap list timm/test_resnet" in fails("layers", "timm/test_resnet", "layr1")


# show


def test_show_tells_what_is_inside(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "05.jpg").write_bytes(b"")
    layertap("embed", folder, "-o", tmp_path / "out", *SMALL, "-l", "layer4", "--shard-rows", 5)
    text = layertap("show", tmp_path / "out").stdout
    content = json.loads(layertap("show", tmp_path / "out", "--json").stdout)
    for expected in ("12 rows in 3 shards", "complete", "layer4  (12, ", "3 classes: ant 4, bee 4, cat 4", "11 ok",
                     "1 row without features (1 decode error)",
                     "cat/05.jpg: decode error: empty file", "timm/test_resnet, weights random (seed 0)",
                     "weights sha256 ", "preprocessing resize_px", "torch "):  # fmt: skip
        assert expected in text
    assert content["rows"] == 12
    assert content["features"]["layer4"]["pooling"] == "mean_map"
    assert content["classes"] == {"ant": 4, "bee": 4, "cat": 4}
    assert content["status"] == {"ok": 11, "decode error": 1}
    assert content["fingerprint"] == DataSet.open(tmp_path / "out").fingerprint


def test_show_describes_a_data_set_that_is_not_complete(folder: Path, tmp_path: Path) -> None:
    layertap("embed", folder, "-o", tmp_path / "out", *SMALL, "--shard-rows", 5)
    (tmp_path / "out" / "shards" / "000001.h5").unlink()
    assert "unfinished: 7 rows done" in layertap("show", tmp_path / "out").stdout


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from pipelines.cli import main; main(['--help'], standalone_mode=False); print(sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "'pipelines.cli'" in run.stdout
    assert not {"'torch'", "'h5py'", "'timm'", "'numpy'"} & set(run.stdout.replace(",", " ").split())


def test_commands_that_read_a_finished_data_set_do_not_import_torch(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert layertap("embed", folder, "-o", out, *SMALL).exit_code == 0
    words = (["show", out], ["status", out], ["verify", out], ["diff", out, out], ["export", out, "--to", "npy"])
    code = f"""
import sys
from pipelines.cli import main
for words in {[[str(word) for word in command] for command in words]}:
    main(words, standalone_mode=False)
    print("loaded by", words[0], [name for name in ("torch", "timm", "matplotlib", "pandas") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [line for line in run.stdout.splitlines() if line.startswith("loaded by")]
    assert found == [f"loaded by {command} []" for command, *_ in words]


def test_a_limit_that_leaves_classes_out_says_so(folder: Path, tmp_path: Path) -> None:
    result = layertap("embed", folder, "-o", tmp_path / "out", "--limit", 4, *SMALL)
    with FeatureReader(tmp_path / "out") as reader:
        assert len(set(reader.labels.tolist())) == 1
    assert re.search(r"note: the first 4 images have 1 of the \d classes", result.stderr)
    whole = layertap("embed", folder, "-o", tmp_path / "whole", "--limit", 11, *SMALL)
    assert "images have" not in whole.stderr
