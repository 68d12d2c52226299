"""`layertap doctor --bench`, and `layertap embed --fast`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from extract import FeatureReader
from extract.compute import backends
from extract.extraction import tuning
from extract.extraction.tuning import ComputeOption, Measured
from pipelines.embed import bench as bench_module
from tests.pipelines.test_cli import SMALL, fails, succeeds

NET = ["-b", "timm/test_resnet", "--weights", "random"]


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is too short to try all options."""
    monkeypatch.setattr(tuning, "_PAYS_FROM", 0)


@pytest.mark.slow
def test_it_measures_decoding_the_forward_and_the_pipeline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(succeeds("bench", folder, *NET, "--json").stdout)
    assert set(found["decode"]) == {"exact", "fast"}
    assert found["forward"][0]["way"] == {"precision": "float32", "engine": "eager"}
    assert found["forward"][0]["images_per_s"] > 0
    assert [each["images"] for each in found["pipelines"]] == [12] * len(found["pipelines"])
    assert all(each["images_per_s"] > 0 for each in found["pipelines"])
    assert found["pipelines"][0]["way"] == {"precision": "float32", "engine": "eager"}
    monkeypatch.setattr(bench_module, "_SYNTHETIC", 8)
    result = succeeds("bench", *NET)
    assert "noise, 500x375, as JPEG" in result.stdout
    assert result.stderr.startswith("note: `layertap bench` is now `layertap doctor --bench`\n")
    flags = result.stdout.splitlines()[-1].split("  ")[-1].split()
    succeeds("embed", folder, *NET, *flags, "-o", tmp_path / "out", "--min-cosine", "0.9")


@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.slow
@pytest.mark.usefixtures("openvino_in_bfloat16")
def test_fast_measures_and_says_what_it_takes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, exported = backends.graph_of, []
    monkeypatch.setattr(backends, "graph_of", lambda *args: exported.append(1) or real(*args))
    result = succeeds("embed", folder, *NET, "--fast", "-o", tmp_path / "out", "--json")
    assert "float32, eager" in result.stderr
    assert "bfloat16, openvino" in result.stderr
    told = json.loads(result.stdout)
    assert told["status"] == {"ok": 12}
    assert len(exported) == 1  # for both precisions, and for the run
    assert backends._CONVERTED is None
    result = succeeds("embed", folder, *NET, "--fast", "-o", tmp_path / "out")
    assert "is complete" in result.stdout
    assert "float32, eager" not in result.stderr


def test_a_short_job_is_not_measured_and_is_the_same_as_without_fast(out: Path, folder: Path, tmp_path: Path) -> None:
    result = succeeds("embed", folder, *SMALL, "--fast", "-o", tmp_path / "fast")
    assert "this job is too short to measure the options" in result.stderr
    with FeatureReader(tmp_path / "fast") as found, FeatureReader(out) as expected:
        assert found.fingerprint == expected.fingerprint
        assert np.array_equal(found["embedding"][:], expected["embedding"][:])


@pytest.mark.usefixtures("measured_at_once")
def test_where_nothing_fast_may_be_taken_it_says_why(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    for flags, named in (
        (["--precision", "bfloat16", "--compile", "off", "--min-cosine", "1"], "bfloat16, eager: embedding has a cos"),
        (["--compile", "openvino", "--precision", "float16"], "OpenVINO does not compute in float16"),
    ):
        assert named in fails("embed", folder, *SMALL, "--fast", *flags, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.slow
def test_where_the_first_batch_refuses_the_fastest_the_next_one_is_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer images are compared to find the fastest than in the run, which has the last word."""
    plain, lower = Measured(ComputeOption("float32", "eager"), 10.0), Measured(ComputeOption("bfloat16", "eager"), 20.0)
    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: (plain, [plain, lower]))
    flags = [folder, *NET, "--min-cosine", "1"]
    result = succeeds("embed", *flags, "--fast", "-o", tmp_path / "out", "--json")
    assert "rejected: in bfloat16 (eager), embedding has a cosine of 0.99" in result.stderr
    assert "use --" not in result.stderr
    told = json.loads(result.stdout)
    assert (told["precision"], told["status"]) == ("float32", {"ok": 12})
    succeeds("embed", *flags, "-o", tmp_path / "plain")
    with FeatureReader(tmp_path / "out") as found, FeatureReader(tmp_path / "plain") as expected:
        assert found.fingerprint == expected.fingerprint
        assert np.array_equal(found["embedding"][:], expected["embedding"][:])

    monkeypatch.setattr(tuning, "forward_rates", lambda *_, **__: (plain, [lower]))
    error = fails("embed", *flags, "--fast", "-o", tmp_path / "none", code=1)
    assert "at least 1.0 is required; use --precision float32 or" in error
