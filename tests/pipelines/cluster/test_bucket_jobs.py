"""`layertap embed` to a bucket: shards are built here and published there."""

from __future__ import annotations

import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from extract import FeatureReader
from extract.store.places import objects as remote
from pipelines.embed.cluster.driver import as_json, embed_shared
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.config import load_config
from pipelines.terminal.progress import Progress
from tests.extract.store.bucket_server import Proxy, first
from tests.extract.store.conftest import proxy, server, url  # noqa: F401
from tests.pipelines.test_cli import layertap

SMALL = ["-b", "timm/test_resnet", "--weights", "random", "--workers", "0", "--compile", "off", "--device", "cpu"]


@pytest.mark.slow
def test_embed_to_a_bucket_resumes_and_can_be_read(
    folder: Path,
    tmp_path: Path,
    proxy: Proxy,  # noqa: F811
    url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    words = ["embed", folder, *SMALL, "--shard-rows", "5", "-o", url]
    first_part = layertap(*words, "--shards-of", "1/3")
    assert first_part.exit_code == 0, first_part.output
    told = json.loads(layertap("status", url, "--json").stdout)
    assert (told["shards_done"], told["shards"], told["rows_done"]) == (1, 3, 5)
    proxy.rule = first("503", "PUT", "000002.h5")
    done = layertap(*words)
    assert done.exit_code == 0, done.output
    assert f"{url}: 3 of 3 shards are published, 2 of them by this run" in done.output
    assert "nothing to do" in layertap(*words).output
    names = set(remote.names(url))
    shards = {f"shards/00000{shard}.{kind}" for shard in range(3) for kind in ("h5", "json")}
    assert names == {"dataset.json", *shards}
    assert list((tmp_path / "scratch").glob("layertap-*")) == []
    here = layertap("embed", folder, *SMALL, "--shard-rows", "5", "-o", tmp_path / "here")
    assert here.exit_code == 0
    with FeatureReader(url) as reader, FeatureReader(tmp_path / "here") as expected:
        assert reader.paths == expected.paths
        assert np.allclose(reader["embedding"][:], expected["embedding"][:], rtol=1e-5, atol=1e-6)
        features = reader["embedding"][:]
    results = []
    for out, name in ((tmp_path / "here", "here"), (url, "there")):
        near = layertap("search", out, "3", "-k", "4", "--json", "-o", tmp_path / f"{name}.png")
        assert near.exit_code == 0, near.output
        probed = layertap("probe", out, "-p", "centroid", "--json", "-o", tmp_path / f"probe-{name}")
        assert probed.exit_code == 0, probed.output
        found = [json.loads(near.stdout)["results"], json.loads(probed.stdout)["probes"][0]["metrics"]]
        results.append(found)
    assert [hit["row"] for hit in results[0][0]] == [hit["row"] for hit in results[1][0]]
    assert results[0][1] == results[1][1]
    assert (tmp_path / "there.png").stat().st_size > 10_000
    exported = layertap("export", url, "--to", "npy", "-o", tmp_path / "npy")
    assert exported.exit_code == 0, exported.output
    assert np.array_equal(np.load(tmp_path / "npy" / "embedding.npy"), features)
    for words_without_a_file in (["export", url, "--to", "npy"], ["probe", url, "-p", "knn"]):
        told_where = layertap(*words_without_a_file)
        assert told_where.exit_code == 2
        assert "is in a bucket" in told_where.output
    other = layertap(*words, "--dtype", "float16")
    assert other.exit_code == 2
    assert "stored_as: stored float32, now float16" in other.output
    shown = layertap("show", url)  # the progress alone: a description reads folders
    assert shown.exit_code == 0
    assert shown.stdout == layertap("show", url, "--status").stdout


def test_a_bucket_that_does_not_answer_is_reported_above_the_progress_bar() -> None:
    bar = mock.Mock()
    with Progress(10) as progress:
        progress._bar = bar
        logging.getLogger("layertap.store").warning("%s does not answer; retrying", "s3://bucket/x")
    bar.write.assert_called_once_with("s3://bucket/x does not answer; retrying", file=sys.stderr)
    assert logging.getLogger("layertap.store").handlers == []


@pytest.mark.slow
def test_the_shards_that_two_writers_of_a_bucket_count_add_up(folder: Path, url: str) -> None:  # noqa: F811
    given = {"images": folder, "out": url, "shard_rows": 3, "batch_size": 2, "compile": "off", "workers": 0}
    config = load_config(EmbedConfig, None, {**given, "device": "cpu"})
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: as_json(embed_shared(config)), range(2)))
    assert sum(writer["made"] for writer in found) == found[0]["shards"]
