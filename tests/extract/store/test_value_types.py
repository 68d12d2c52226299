"""Types of stored features: how values are kept, and data sets of each type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet

from extract import DisagreementError, InputError, extract_features, load_backbone
from extract.extraction.reproduce import recheck
from extract.row_status import Status
from extract.store.export import export
from extract.store.format.layout import StoredFeature
from extract.store.format.value_types import (
    ROUNDING,
    VALUE_TYPES,
    decoded,
    encoded,
    finite_rows,
    kept_as,
    value_type_of,
)  # fmt: skip
from extract.store.merge import merge
from extract.store.reader import FeatureReader
from extract.store.verify import verify
from extract.taps.layer_names import named_layers
from tests.conftest import TINY_INPUT
from tests.extract.store.rows import filled, flip
from tests.pipelines.test_cli import layertap
from tests.planning import BY_COMMAND, NET

SMALL = {**NET, "preprocessing": TINY_INPUT}
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
        assert finite_rows(encoded(rows, kind), kind).tolist() == [True, True, True, False, False, True, True]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, _twelve: Path) -> Path:
    """Twelve pictures, and a file that is none."""
    folder = shutil.copytree(_twelve, tmp_path_factory.mktemp("types") / "pictures")
    (folder / "bee" / "damaged.png").write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="module")
def exact_out(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    out = tmp_path_factory.mktemp("exact") / "out"
    extract_features(pictures, out=out, layers=LAYERS, **SMALL).close()
    return out


@pytest.fixture
def exact(exact_out: Path) -> Iterator[FeatureReader]:
    with FeatureReader(exact_out) as reader:
        yield reader


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_data_set_of_each_type_is_read_as_float32(
    pictures: Path, exact_out: Path, exact: FeatureReader, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    layers = [text for layer in LAYERS for text in ("-l", layer)]
    small = ["--size", 64, "--crop", 64]
    shown = layertap("embed", pictures, *BY_COMMAND, *small, *layers, "--dtype", kind, "--shard-rows", 5, "-o", out)
    assert "layer4: as stored, compared with the values, minimum cosine 0.99" in shown.stderr
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
            for rows in (np.array([7, 2, 2, 12, 0]), 7, slice(3, 11), reader.labels == 1):
                assert array[rows].dtype == np.float32
                assert np.array_equal(array[rows], whole[rows], equal_nan=True)
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
    assert recheck(out, 12, images=pictures).faults == []
    whole_bytes = sum(path.stat().st_size for path in exact_out.glob("shards/*.h5"))
    assert sum(path.stat().st_size for path in (out / "shards").glob("*.h5")) < whole_bytes * 3  # small features


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rows_that_are_not_finite_are_stored_as_such(
    pictures: Path, exact: FeatureReader, tmp_path: Path, kind: str
) -> None:
    backbone = load_backbone("timm/test_resnet", weights="random", device="cpu", preprocessing=TINY_INPUT)
    means = exact["layer4"][:].mean(1)

    def poisoned(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        fifth = (output.mean((1, 2, 3)) / means[4] - 1).abs() < 1e-4
        assert fifth.sum() <= 1
        return torch.where(fifth[:, None, None, None], torch.nan, output)

    with backbone.model.get_submodule("layer4").register_forward_hook(poisoned):
        reader = extract_features(
            pictures, out=tmp_path / "out", backbone=backbone, layers="layer4", dtype=kind, compile="off", workers=0,
            progress=False,
        )  # fmt: skip
    assert np.flatnonzero(reader.status == Status.NOT_FINITE).tolist() == [4]
    assert np.isnan(reader["layer4"][4]).any()
    assert np.isfinite(reader["layer4"][[5, 6, 7]]).all()
    assert verify(tmp_path / "out").faults == []


def test_a_type_that_changes_features_too_much_or_another_type_is_refused(pictures: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"layers": "layer4", **SMALL}
    with pytest.raises(DisagreementError, match=r"stored as int8, layer4 has a cosine of .* to its values; .*--min"):
        extract_features(pictures, out=out, dtype="int8", min_cosine=1.0, **options)
    extract_features(pictures, out=out, dtype="int8", **options)
    with pytest.raises(InputError, match="stored_as: stored int8, now float32"):
        extract_features(pictures, out=out, **options)
    [shard] = (out / "shards").glob("*.h5")
    with h5py.File(shard) as file:
        start = file["features/layer4"].id.get_chunk_info(0).byte_offset
    flip(shard, start + 1, 0x40)
    assert 0 in [fault.row for fault in verify(out).faults]


# Copies

KEPT = [
    StoredFeature("int8", (6,), "int8"), StoredFeature("bfloat16", (2, 3), "bfloat16"),
    StoredFeature("codes", (4,), "int64"), StoredFeature("small", (2, 2), "int32"),
]  # fmt: skip


def kept_values(rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    real = np.sin(np.multiply.outer(rows, np.arange(1, 7))).astype(np.float32)
    codes = np.multiply.outer(rows, np.arange(4)) + 2**53 + 1  # which no float of 64 bits holds
    small = np.multiply.outer(rows, np.arange(4, dtype=np.int64)).astype(np.int32) - 2**30
    return {"int8": real, "bfloat16": real.reshape(-1, 2, 3), "codes": codes, "small": small.reshape(-1, 2, 2)}


@pytest.fixture(scope="module")
def merged_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets with features of each type in one, of 11 and 12 rows in the order of their paths, compressed."""
    folder = tmp_path_factory.mktemp("merged")
    for name, count in (("a", 11), ("b", 12)):
        filled(folder / name, KEPT, count, kept_values, 5, root=f"/p/{name}")
    merge([folder / "a", folder / "b"], folder / "out", compress="gzip")
    return folder / "out"


@pytest.fixture
def merged(merged_out: Path) -> Iterator[FeatureReader]:
    with FeatureReader(merged_out) as reader:
        yield reader


def test_rows_are_copied_as_they_are_kept(merged_out: Path, merged: FeatureReader) -> None:
    assert verify(merged_out).faults == []
    rows = np.array([int(path[2:]) for path in merged.paths])
    for name, values in kept_values(rows).items():
        kept = encoded(values, name) if name in VALUE_TYPES else values
        assert merged[name].kept(np.arange(23)).tobytes() == kept.tobytes()
        np.testing.assert_array_equal(merged[name][:], decoded(kept, name) if name in VALUE_TYPES else values)
    for features, chosen in merged.batches("codes", 2, shuffle="rows", seed=1):
        assert features.dtype == np.int64
        np.testing.assert_array_equal(features, merged["codes"][:][chosen])


def test_whole_numbers_are_exported_exactly(merged: FeatureReader, tmp_path: Path) -> None:
    whole, small = merged["codes"][:], merged["small"][:]
    assert (whole > 2**53).all()
    for kind in ("npy", "h5", "mat", "parquet", "hf"):
        export(merged, tmp_path / kind, kind)
    for name in merged.layers:
        np.testing.assert_array_equal(np.load(tmp_path / "npy" / f"{name}.npy"), merged[name][:])
    with FeatureReader(tmp_path / "h5") as exported:
        np.testing.assert_array_equal(exported["codes"][:], whole)
        np.testing.assert_array_equal(exported["small"][:], small)
    with h5py.File(tmp_path / "mat") as file:
        assert [file[name].attrs["MATLAB_class"] for name in ("codes", "small")] == [b"int64", b"int32"]
        np.testing.assert_array_equal(file["codes"][:].T, whole)
        np.testing.assert_array_equal(file["small"][:].T, small)
    for paths in ([tmp_path / "parquet"], (tmp_path / "hf" / "data").glob("*.parquet")):
        table = pyarrow.concat_tables([parquet.read_table(path) for path in paths]).sort_by("row")
        np.testing.assert_array_equal(np.array(table["codes"].to_pylist()), whole)
        np.testing.assert_array_equal(np.array(table["small"].to_pylist()).reshape(small.shape), small)


# Whole numbers

CODES = """
import torch
from torch import nn

class Codes(nn.Module):
    def forward(self, x):
        return (x[:, 0, ::8, ::8].flatten(1) * 1e4).long() + 2**53 + 1  # which no float of 64 bits holds

class Small(nn.Module):
    def forward(self, x):
        return (x[:, 1, ::8, ::8] * 200).to(torch.uint8)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes, self.small, self.conv = Codes(), Small(), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).mean((2, 3)) + 0 * self.codes(x).sum() + 0 * self.small(x).sum()

def make():
    from torchvision import transforms
    torch.manual_seed(0)
    return Net().eval(), transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
"""


@pytest.fixture
def codes(tmp_path: Path) -> str:
    (tmp_path / "codes.py").write_text(CODES)
    return f"python/{tmp_path}/codes.py:make"


def expected_codes(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The codes of a picture of 32 x 32, by NumPy: red and green as float32 from 0 to 1."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))[::8, ::8].astype(np.float32) / np.float32(255)
    codes = (pixels[..., 0].ravel() * np.float32(1e4)).astype(np.int64) + 2**53 + 1
    return codes, (pixels[..., 1] * np.float32(200)).astype(np.int32)


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_whole_numbers_are_stored_exactly_beside_features_of_any_type(codes: str, tmp_path: Path, kind: str) -> None:
    generator, pictures, out = np.random.default_rng(0), tmp_path / "p", tmp_path / "out"
    pictures.mkdir()
    for name in "0145":
        Image.fromarray(generator.integers(0, 255, (32, 32, 3), np.uint8)).save(pictures / f"{name}.png")
    shutil.copy(pictures / "1.png", pictures / "2.png")  # computed once, copied
    (pictures / "3.png").write_bytes(b"no picture")
    layers = ["codes", "small:flatten", "small", "conv"]
    options: dict[str, Any] = {"dtype": kind, "workers": 0, "device": "cpu", "progress": False}
    reader = extract_features(
        pictures, out=out, backbone=codes, layers=layers, shard_rows=4, batch_size=3, **options
    )  # fmt: skip
    assert {name: (reader[name].dtype.name, reader[name].stored_dtype) for name in reader.layers} == {
        "codes": ("int64", "int64"), "small:flatten": ("int32", "int32"), "small:none": ("int32", "int32"),
        "conv": ("float16" if kind == "float16" else "float32", kind),
    }  # fmt: skip
    assert reader["small:none"].attributes["source_dtype"] == "uint8"
    for row, path in enumerate(reader.paths):
        if path == "3.png":
            assert (reader["codes"][row] == -(2**63)).all()
            assert (reader["small:none"][row] == -(2**31)).all()
            assert np.isnan(reader["conv"][row]).all()
        else:
            first, second = expected_codes(pictures / path)
            np.testing.assert_array_equal(reader["codes"][row], first)
            np.testing.assert_array_equal(reader["small:none"][row], second)
            np.testing.assert_array_equal(reader["small:flatten"][row], second.ravel())
    assert verify(out).faults == []
    assert recheck(out, 6, backbone=codes).faults == []
    with h5py.File(out / "shards" / "000000.h5") as file:
        np.testing.assert_array_equal(file["features/codes"][:], reader["codes"][:4])


def test_the_smallest_whole_number_means_no_value(codes: str, folder: Path, tmp_path: Path) -> None:
    backbone = load_backbone(codes, device="cpu")

    def least(layer: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        odd = output.sum((1, 2), keepdim=True) % 2 == 1
        return torch.where(odd, -(2**31), output.int())

    with named_layers(backbone.model)["small"].register_forward_hook(least):
        reader = extract_features(folder, out=tmp_path / "out", backbone=backbone, layers=["small", "conv"], workers=0,
                                  progress=False)  # fmt: skip
    failed = [row for row, path in enumerate(reader.paths) if (reader["small"][row] == -(2**31)).any()]
    assert 0 < len(failed) < len(reader)
    assert np.flatnonzero(reader.status == Status.NOT_FINITE).tolist() == failed
    assert reader.failures[0][3] == "small has the smallest int32, which means no value"
    assert verify(tmp_path / "out").faults == []


def test_whole_numbers_are_computed_by_nothing_but_exact_code(codes: str, folder: Path, tmp_path: Path) -> None:
    for setting in ({"compile": "on"}, {"precision": "bfloat16"}):
        with pytest.raises(InputError, match="codes is whole numbers, which are computed exactly"):
            extract_features(folder, out=tmp_path / "out", backbone=codes, layers=["conv", "codes"], workers=0,
                             device="cpu", progress=False, **setting)  # fmt: skip
