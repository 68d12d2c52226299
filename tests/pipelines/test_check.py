"""`layertap check` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from extract import FeatureReader
from tests.pipelines.test_cli import SMALL, fails, layertap, succeeds


def test_check_says_what_fits_and_its_exit_code_whether_the_rows_agree(folder: Path, tmp_path: Path) -> None:
    succeeds("embed", folder, "-o", tmp_path / "out", *SMALL[:6], "--device", "cpu")
    assert "12 rows agree" in succeeds("check", tmp_path / "out", "--device", "cpu").stdout
    with FeatureReader(tmp_path / "out") as reader:
        np.save(tmp_path / "reversed.npy", reader["embedding"][::-1])
        paths = [str(folder / path) for path in reader.paths]
    (tmp_path / "list.txt").write_text("\n".join(paths))
    given = ["check", tmp_path / "reversed.npy", "--paths", tmp_path / "list.txt", *SMALL[:4], "--device", "cpu"]
    result = layertap(*given)
    assert result.exit_code == 1
    assert "cause: order: the rows are in reverse order" in result.stdout
    content = json.loads(layertap(*given, "--json").stdout)
    assert content["agrees"] is False
    assert content["causes"] == [{"kind": "order", "what": "the rows are in reverse order"}]
    assert content["remaining"] < 1e-4 < content["deviation"]
    assert "reversed.npy does not name its images" in fails("check", tmp_path / "reversed.npy", *SMALL[:4])
    assert "no.npy: no such file" in fails("check", tmp_path / "no.npy")
