"""Types of stored features: how values are kept, and data sets of each type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from extract import DisagreementError, InputError, extract_features, load_backbone
from extract.extraction.recheck import recheck
from extract.row_status import Status
from extract.store.export import export
from extract.store.format.value_types import (
    ROUNDING,
    VALUE_TYPES,
    decoded,
    encoded,
    finite_and_nan,
    kept_as,
    value_type_of,
)  # fmt: skip
from extract.store.merge import merge
from extract.store.reader import FeatureReader
from extract.store.verify import verify
from tests.pipelines.test_cli import layertap
from tests.planning import BY_COMMAND, NET

LAYERS = ["layer1:grid2", "layer4", "embedding"]


@pytest.fixture
def values() -> NDArray[np.float32]:
    rows = np.random.default_rng(0).standard_normal((20, 3, 4, 5)).astype(np.float32)
    scaled: NDArray[np.float32] = (rows * 10.0 ** np.linspace(-2, 3, 20)[:, None, None, None]).astype(np.float32)
    return scaled


@pytest.mark.parametrize("kind", VALUE_TYPES)
def test_values_are_kept_to_the_rounding_of_their_type(kind: str, values: NDArray[np.float32]) -> None:
    given = values.astype(kind) if kind == "float16" else values
    kept = encoded(given, kind)
    dtype, shape = kept_as(kind, (3, 4, 5))
    assert (kept.dtype, kept.shape) == (dtype, (20, *shape))
    assert value_type_of(dtype, shape) == (kind, (3, 4, 5))
    again = decoded(kept, kind)
    assert np.array_equal(again[7], decoded(kept[7:8], kind)[0])
    apart = np.abs(again.astype(np.float64) - given).max((1, 2, 3)) / np.abs(given).max((1, 2, 3))
    assert apart.max() <= ROUNDING[kind] * (1 + 1e-6)
    if kind == "bfloat16":
        special = np.array([[np.nan, np.inf, -np.inf, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, -0.0]], np.float32)
        expected = torch.from_numpy(special).bfloat16().float().numpy()
        assert np.array_equal(decoded(encoded(special, kind), kind), expected, equal_nan=True)
    assert encoded(kept, kind) is kept


def test_int8_rows_that_are_zero_tiny_or_not_finite() -> None:
    most = np.finfo(np.float32).max
    rows = np.array([[0, 0], [1e-45, 0], [1e-38, -1e-38], [np.inf, 1], [np.nan, 1], [3e38, -1e38], [most, -most]], "f4")
    kept = encoded(rows, "int8")
    again = decoded(kept, "int8")
    assert np.isnan(again[3:5]).all()
    good = [0, 1, 2, 5, 6]
    np.testing.assert_allclose(again[good], rows[good], rtol=0.01, atol=1e-44)
    assert kept["values"][5].tolist() == [127, -42]
    for kind in ("int8", "bfloat16", "float32"):
        finite, nan = finite_and_nan(encoded(rows, kind), kind)
        assert finite.tolist() == [True, True, True, False, False, True, True]
        assert nan.tolist() == ([False] * 3 + [kind == "int8"] * 2 + [False] * 2)
        assert finite_and_nan(encoded(rows[[4, 4]] * np.float32(np.nan), kind), kind)[1].all()


@pytest.mark.parametrize("other", [np.dtype("<i4"), np.dtype([("a", "<f4"), ("values", "i1", (3,))]), np.dtype("<f8")])
def test_other_types_are_none_of_these(other: np.dtype[Any]) -> None:
    assert value_type_of(other, ()) is None


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_data_set_of_each_type_is_read_as_float32(folder: Path, tmp_path: Path, kind: str) -> None:
    (folder / "bee" / "damaged.png").write_bytes(b"no picture")
    exact = extract_features(folder, out=tmp_path / "exact", layers=LAYERS, **NET)
    out = tmp_path / "out"
    layers = [text for layer in LAYERS for text in ("-l", layer)]
    shown = layertap("embed", folder, *BY_COMMAND, *layers, "--dtype", kind, "--shard-rows", 5, "-o", out)
    assert "layer4: as stored, minimum cosine to the values 0.99" in shown.stderr
    [computing] = [event for line in (out / "runs.jsonl").read_text().splitlines()
                   if (event := json.loads(line))["event"] == "computing"]  # fmt: skip
    assert 0 < computing["computation"]["storage"]["layer4"]["max_deviation"] <= ROUNDING[kind] * 1.01
    with FeatureReader(out, check=True) as reader:
        good = np.flatnonzero(reader.status == Status.OK)
        for layer in reader.layers:
            array, expected = reader[layer], exact[layer][:]
            assert (array.dtype, array.shape) == (np.float32, expected.shape)
            largest = np.abs(expected[good]).reshape(len(good), -1).max(1)
            apart = np.abs(array[:][good] - expected[good]).reshape(len(good), -1).max(1) / largest
            assert (apart <= ROUNDING[kind] * 1.001 + 1e-6).all()
            whole = array[:]
            order = np.array([7, 2, 2, 12, 0])
            for rows in (array[order], array[7], array[3:11], array[reader.labels == 1]):
                assert rows.dtype == np.float32
            assert np.array_equal(array[order], whole[order], equal_nan=True)
            assert np.array_equal(array[7], whole[7], equal_nan=True)
            assert np.array_equal(array[3:11], whole[3:11], equal_nan=True)
        for shuffle in (None, "rows", "chunks"):
            for features, rows in reader.batches("layer4", 20, shuffle=shuffle, seed=1):
                assert features.dtype == np.float32
                np.testing.assert_array_equal(features, reader["layer4"][:][rows])
        with h5py.File(out / "shards" / "000000.h5") as file:
            data = file["features/layer4"]
            if kind == "int8":
                plain = data["values"] * data["scale"][:, None]
            else:
                plain = (data[:].astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(plain, reader["layer4"][:5])
    assert verify(out).faults == []
    assert recheck(out, 12, images=folder).faults == []
    whole_bytes = sum(path.stat().st_size for path in (tmp_path / "exact" / "shards").glob("*.h5"))
    assert sum(path.stat().st_size for path in (out / "shards").glob("*.h5")) < whole_bytes * 3  # small features


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rows_that_are_not_finite_are_stored_as_such(folder: Path, tmp_path: Path, kind: str) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu")
    means = extract_features(folder, out=tmp_path / "exact", layers="layer4", **NET)["layer4"][:].mean(1)

    def poisoned(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        fifth = (output.mean((1, 2, 3)) / means[4] - 1).abs() < 1e-4
        assert fifth.sum() <= 1
        return torch.where(fifth[:, None, None, None], torch.nan, output)

    options = {name: value for name, value in NET.items() if name not in ("backbone", "weights", "device")}
    with backbone.model.get_submodule("layer4").register_forward_hook(poisoned):
        reader = extract_features(
            folder, out=tmp_path / "out", backbone=backbone, layers="layer4", dtype=kind, compile="off", **options
        )
    assert np.flatnonzero(reader.status == Status.NOT_FINITE).tolist() == [4]
    assert np.isnan(reader["layer4"][4]).any()
    assert np.isfinite(reader["layer4"][5:]).all()
    assert verify(tmp_path / "out").faults == []


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rows_are_copied_as_they_are_kept(folder: Path, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"layers": "layer4", "dtype": kind, **NET}
    whole = extract_features(folder, out=tmp_path / "whole", **options)
    for name in ("ant", "bee"):
        extract_features(folder / name, out=tmp_path / name, **options)
    merge([tmp_path / "ant", tmp_path / "bee"], tmp_path / "merged", compress="gzip")
    assert verify(tmp_path / "merged").faults == []
    with FeatureReader(tmp_path / "merged") as merged:
        rows = [whole.paths.index(path) for path in merged.paths]
        np.testing.assert_array_equal(merged["layer4"][:], whole["layer4"][rows])
        raw = merged["layer4"].kept(np.arange(len(merged)))
        assert raw.tobytes() == whole["layer4"].kept(np.array(rows)).tobytes()
        export(merged, tmp_path / "npy", "npy")
        np.testing.assert_array_equal(np.load(tmp_path / "npy" / "layer4.npy"), merged["layer4"][:])


def test_a_type_that_changes_features_too_much_or_another_type_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DisagreementError, match=r"stored as int8, layer4 has a cosine of .* to its values; .*--min"):
        extract_features(folder, out=tmp_path / "out", layers="layer4", dtype="int8", min_cosine=1.0, **NET)
    extract_features(folder, out=tmp_path / "out", layers="layer4", dtype="int8", **NET)
    with pytest.raises(InputError, match="stored_as: stored int8, now float32"):
        extract_features(folder, out=tmp_path / "out", layers="layer4", **NET)
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "out", damaged)
    [shard] = (damaged / "shards").glob("*.h5")
    with h5py.File(shard) as file:
        start = file["features/layer4"].id.get_chunk_info(0).byte_offset
    with shard.open("r+b") as raw:
        raw.seek(start + 1)
        raw.write(b"\x7f")
    assert 0 in [fault.row for fault in verify(damaged).faults]
