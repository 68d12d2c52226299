"""What `layertap show --status` tells of a data set that is being made."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from extract import extract_features
from pipelines.data_sets.status import print_progress, progress_of


def test_the_receipts_tell_how_far_it_is(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "05-broken.jpg").write_bytes(b"no picture")
    out = tmp_path / "out"
    extract_features(
        folder, out=out, backbone="timm/test_resnet", weights="random", shard_rows=3, compile="off", workers=0,
        device="cpu", progress=False,
    ).close()  # fmt: skip
    made = [json.loads((out / "shards" / f"{shard:06d}.json").read_text())["made"] for shard in range(5)]
    away = [(path, path.read_bytes()) for shard in (1, 4) for path in (out / "shards").glob(f"{shard:06d}.*")]
    for path, _ in away:
        path.unlink()
    (out / "shards" / "000002.json").rename(tmp_path / "000002.json")

    half, told = progress_of(str(out)), list[str]()
    print_progress(half, told.append)
    assert told[0].startswith(f"{out}: 69.2% of the rows are stored")
    assert "receipts missing or damaged: shards/000002.json; if they stay so" in told[-2]
    assert told[-1] == "to resume, run `layertap embed` with the same arguments again"
    for path, content in away:
        path.write_bytes(content)
    (tmp_path / "000002.json").rename(out / "shards" / "000002.json")
    whole = progress_of(str(out))
    assert (half["shards_done"], half["rows_done"], half["rows"]) == (3, 9, 13)
    assert half["receipts_missing"] == ["shards/000002.json"]
    assert half["status"] == {"ok": 5, "decode error": 1}  # of shards 0 and 3
    assert half["images_per_s"] > 0
    assert half["seconds_left"] >= 0
    assert (whole["shards_done"], whole["rows_done"], whole["receipts_missing"]) == (5, 13, [])
    assert whole["status"] == {"ok": 12, "decode error": 1}
    assert (whole["images_per_s"], whole["seconds_left"]) == (None, None)
    assert whole["stages"]["forward"] == pytest.approx(sum(one["stages"]["forward"] for one in made), abs=0.1)
    rate = 13 / sum(one["seconds"] for one in made)
    assert whole["workers"] == [
        {"host": platform.node(), "device": "cpu", "shards": 5, "rows": 13, "images_per_s": pytest.approx(rate, 0.01)}
    ]
    told = []
    print_progress(whole, told.append)
    assert told[0].startswith(f"{out}: complete, images in {folder}")
    (line,) = (line for line in told if "per worker" in line)
    beginning = f"  {platform.node()}  cpu: 5 shards, 13 rows, "
    assert line.startswith(beginning)
    assert float(line.removeprefix(beginning).split()[0]) == pytest.approx(rate, 0.01, abs=0.06)  # times are rounded
