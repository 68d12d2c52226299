"""`layertap bench`, and `layertap embed --fast`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from extract import FeatureReader
from extract.compute.agreement import Agreement
from extract.extraction import tuning
from extract.extraction.forward_rates import ComputeOption, ForwardRates, Measured
from pipelines.cli import main
from pipelines.embed import bench as bench_module
from pipelines.embed.bench import _Repeated

openvino = pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="no openvino")
NET = ["-b", "timm/test_resnet", "--weights", "random"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is too short to be measured."""
    monkeypatch.setattr(tuning, "_PAYS_FROM_S", {"openvino": 0.0, "inductor": 0.0})


def _run(*args: str) -> Any:
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
def test_it_measures_each_stage_and_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "_PIPELINE_S", 0.1)
    monkeypatch.setattr(tuning, "_BATCH_SIZES", {"cpu": (4, 8)})
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(bench_module, "_WRITTEN_BYTES", 8 << 20)
    monkeypatch.setattr(tuning, "_AT_LEAST_S", 0.0)
    found = json.loads(_run("bench", str(folder), *NET, "--json").stdout)
    assert set(found["decode"]) == {"exact", "fast"}
    assert set(found["batches"]) == {"4", "8"}
    assert found["forward"][0]["way"] == {"precision": "float32", "engine": "eager"}
    assert all(one["images_per_s"] > 0 for one in found["pipelines"])
    assert found["pipelines"][0]["way"] == {"precision": "float32", "engine": "eager"}
    assert found["recommended"]["batch_size"] in (4, 8, 64)
    assert len({one["workers"] for one in found["pipelines"]}) > 1
    text = _run("bench", *NET).stdout
    assert "noise, 500x375, as JPEG" in text
    assert "of the bound" in text
    flags = text.splitlines()[-1].removeprefix("recommended: ").split()
    _run("embed", str(folder), *NET, *flags, "-o", str(folder.parent / "out"), "--min-cosine", "0.9")


def test_repeated_images_are_the_same_pictures_with_other_bytes(folder: Path) -> None:
    from extract.images import list_images

    source = list_images(folder).source
    repeated = _Repeated(source, 12)
    first, again = repeated.read(3)[0], repeated.read(15)[0]
    assert first != again
    picture = source.decode(source.read(3)[0], 10**6)
    assert repeated.decode(first, 10**6) == repeated.decode(again, 10**6) == picture


@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.slow
@pytest.mark.usefixtures("openvino_in_bfloat16")
def test_fast_measures_and_says_what_it_takes(folder: Path, tmp_path: Path) -> None:
    result = _run("embed", str(folder), *NET, "--fast", "-o", str(tmp_path / "out"), "--json")
    assert "float32, eager" in result.stderr
    assert "bfloat16, openvino" in result.stderr
    told = json.loads(result.stdout)
    assert told["status"] == {"ok": 12}
    result = _run("embed", str(folder), *NET, "--fast", "-o", str(tmp_path / "out"))
    assert "is complete" in result.stdout
    assert "float32, eager" not in result.stderr


def test_a_short_job_is_not_measured_and_is_the_same_as_without_fast(folder: Path, tmp_path: Path) -> None:
    result = _run("embed", str(folder), *NET, "--fast", "-o", str(tmp_path / "fast"))
    assert "this job is too short to measure the options" in result.stderr
    _run("embed", str(folder), *NET, "-o", str(tmp_path / "plain"))
    with FeatureReader(tmp_path / "fast") as found, FeatureReader(tmp_path / "plain") as expected:
        assert found.fingerprint == expected.fingerprint
        assert np.array_equal(found["embedding"][:], expected["embedding"][:])


@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.slow
@openvino
def test_what_is_asked_for_beside_fast_stays(folder: Path, tmp_path: Path) -> None:
    flags = ["--precision", "float32", "--decode", "exact", "--compile", "off"]
    result = _run("embed", str(folder), *NET, "--fast", *flags, "-o", str(tmp_path / "out"), "--json")
    assert "bfloat16" not in result.stderr
    told = json.loads(result.stdout)
    assert told["precision"] == "float32"
    assert told["computation"]["engine"] == "eager"
    assert told["bottleneck"] in ("forward", "images", "write")


@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--precision", "bfloat16", "--compile", "off", "--min-cosine", "1"], "bfloat16, eager: embedding has a cos"),
        (["--compile", "openvino", "--precision", "float16"], "OpenVINO does not compute in float16"),
    ],
)
@openvino
def test_where_nothing_fast_may_be_taken_it_says_why(
    folder: Path, tmp_path: Path, flags: list[str], named: str
) -> None:
    result = CliRunner().invoke(main, ["embed", str(folder), *NET, "--fast", *flags, "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert named in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.slow
@pytest.mark.parametrize("decode", ["exact", "fast"])
def test_where_the_first_batch_refuses_the_fastest_the_next_one_is_taken(
    decode: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer images are compared to find the fastest than in the run, which has the last word."""
    plain, lower = Measured(ComputeOption("float32", "eager"), 10.0), Measured(ComputeOption("bfloat16", "eager"), 20.0)
    lower = dataclasses.replace(lower, decoding={"embedding": Agreement(1.0, 0.0)} if decode == "fast" else {})
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: ForwardRates([plain, lower], True))
    monkeypatch.setattr(tuning, "_job_s", lambda way, *_: 1 / way.measured.images_per_s - (way.decode == "fast") / 1000)
    flags = [str(folder), *NET, "--min-cosine", "1"]
    result = _run("embed", *flags, "--fast", "-o", str(tmp_path / "out"), "--json")
    assert "rejected: in bfloat16 (eager), embedding has a cosine of 0.99" in result.stderr
    assert "use --" not in result.stderr
    told = json.loads(result.stdout)
    assert (told["precision"], told["status"]) == ("float32", {"ok": 12})
    _run("embed", *flags, "-o", str(tmp_path / "plain"))
    with FeatureReader(tmp_path / "out") as found, FeatureReader(tmp_path / "plain") as expected:
        assert found.fingerprint == expected.fingerprint
        assert np.array_equal(found["embedding"][:], expected["embedding"][:])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other-cache"))  # the first measurements are kept
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: ForwardRates([lower], True))
    result = CliRunner().invoke(main, ["embed", *flags, "--fast", "-o", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "at least 1.0 is required\n\nhint: use --precision float32 or" in result.stderr


@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.slow
def test_fast_goes_over_broken_images(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "00.png").write_bytes(b"no picture")
    result = _run("embed", str(folder), *NET, "--fast", "--compile", "off", "-o", str(tmp_path / "out"), "--json")
    assert json.loads(result.stdout)["status"] == {"ok": 11, "decode error": 1}
