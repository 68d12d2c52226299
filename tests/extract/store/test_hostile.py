"""Files that mean harm, and files that were damaged: refused by name, quickly, in little memory; never a crash."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError
from extract.store.verify import verify
from tests.extract.store.processes import result_of
from tests.extract.store.rows import VALUES, change, complete_data_set, flip, sign


def replace(file: h5py.File, name: str, **how: object) -> None:
    """Put another data set in a member's place."""
    del file[name]
    file.create_dataset(name, **how)


def external_link(file: h5py.File) -> None:
    del file["features/vector"]
    file["features/vector"] = h5py.ExternalLink("/etc/passwd", "/x")


def soft_link(file: h5py.File) -> None:
    del file["status"]
    file["status"] = h5py.SoftLink("/source_size")


def group_link(file: h5py.File) -> None:
    file.move("features", "elsewhere")
    file["features"] = h5py.SoftLink("/elsewhere")


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((10, 6), "<f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (10, 6))
    del file["features/vector"]
    file.create_virtual_dataset("features/vector", layout)


def unknown_filter(file: h5py.File) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((10, 6))
    properties.set_filter(305, h5py.h5z.FLAG_OPTIONAL)
    del file["features/vector"]
    space = h5py.h5s.create_simple((10, 6))
    h5py.h5d.create(file["features"].id, b"vector", h5py.h5t.IEEE_F32LE, space, properties)


def a_billion_rows(file: h5py.File, **how: object) -> None:
    """Four terabytes."""
    del file["features/map:none"]
    file.attrs["n_rows"] = 1 << 30
    replace(file, "features/vector", shape=(1 << 30, 1024), dtype="<f4", chunks=(256, 1024), **how)


HOSTILE: list[tuple[Callable[[h5py.File], object], str]] = [
    (external_link, "'vector' is a soft or external link"),
    (soft_link, "'status' is a soft or external link"),
    (group_link, "'features' is a soft or external link"),
    (lambda f: replace(f, "label", shape=(10,), dtype="<i8", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]),
     "'label' stores its data in external files"),
    (virtual, "'vector' is a virtual dataset"),
    (unknown_filter, "filter that layertap does not support .number 305"),
    (lambda f: replace(f, "features/vector", shape=(10, 10**11), dtype="<f4", chunks=(1, 10**6)), "'vector' has shape"),
    (lambda f: replace(f, "features/vector", shape=(10, 1 << 32), dtype="<f4", chunks=(10, 1 << 26)),
     "'vector' has shape"),
    (lambda f: a_billion_rows(f, compression="gzip", fletcher32=True),
     "has 0 chunks, too few or too many for 1,073,741,824 rows"),
    (a_billion_rows, "which are not in the file"),
    (lambda f: [f["features"].__setitem__(f"x{i}", f["label"]) for i in range(11_000)], "it has 11,002 features"),
    (lambda f: replace(f, "features/vector", data=np.zeros((10, 6)), chunks=(5, 6)), "'vector' is float64"),
    (lambda f: replace(f, "features/vector", data=np.zeros((10, 6), ">f4"), chunks=(5, 6)), "'vector' is >f4"),
    (lambda f: replace(f, "features/vector", data=np.zeros((9, 6), "f4"), chunks=(5, 6)), "'vector' has shape"),
    (lambda f: replace(f, "features/vector", data=np.zeros(10, "i4,i4")), "'vector' is .*; expected float32, "),
    (lambda f: replace(f, "features/vector", data=np.zeros(10, [("scale", ">f4"), ("values", "i1")])), "'vector' is"),
    (lambda f: replace(f, "features/vector", data=np.zeros(10, [("scale", "<f4"), ("values", "S3")])), "vector' holds"),
    (lambda f: replace(f, "features/vector", data=np.zeros(10, "f4,f4,i1")), "'vector' holds neither"),
    (lambda f: replace(f, "features/vector", data=np.zeros(
        10, {"names": ["scale", "values"], "formats": ["<f4", ("i1", (6,))], "offsets": [0, 8]})), "'vector' is"),
    (lambda f: replace(f, "features/vector", data=np.zeros((10, 6), "f4"), chunks=(10, 3)), "'vector' has shape"),
    (lambda f: replace(f, "status", data=np.zeros(10, "u2")), "status is not at the location that the header"),
    (lambda f: replace(f, "status", data=np.zeros(9, "u1")), "status is uint8 .9,.; expected u1"),
    (lambda f: replace(f, "status", data=np.zeros(10, "u1"), chunks=(5,)), "status is stored in chunks"),
    (lambda f: replace(f, "row_hash", shape=(10,), dtype="<u8"), "needs 80 bytes, which are not in the file"),
    (lambda f: replace(f, "path", data=np.array(["x"] * 10, dtype=h5py.string_dtype())), "'path' holds neither"),
    (lambda f: replace(f, "path", data=np.zeros(10, "i4,i4")), "'path' holds neither"),
    (lambda f: replace(f, "path", data=np.zeros(10, "<i8")), "path is int64"),
    (lambda f: replace(f, "classes", data=np.zeros((2, 2), "S3")), "classes is"),
    (lambda f: replace(f, "provenance", data=np.array(b"[" * (1 << 24) + b"]")), "its provenance has"),
    (lambda f: f.create_dataset("columns/age", data=np.zeros(9)), "/columns/age has shape .9,., chunks None"),
    (lambda f: f.create_dataset("columns/age", data=np.zeros(10), chunks=(5,)), "/columns/age has shape .10,., chunks"),
    (lambda f: f.create_dataset("columns/age", data=np.zeros(10, "f4")), "/columns/age is float32; expected fixed"),
    (lambda f: f.create_dataset("columns/age", data=np.zeros(10, "i4,i4")), "'age' holds neither"),
    (lambda f: f.create_dataset("columns", data=np.zeros(10)), "'columns' is not a group"),
    (lambda f: f.create_group("columns").__setitem__("age", h5py.SoftLink("/label")), "'age' is a soft or external"),
    (lambda f: f.__setitem__("columns", h5py.SoftLink("/features")), "'columns' is a soft or external link"),
    (lambda f: f.__delitem__("label"), "it has no 'label'"),
    (lambda f: f["features"].__delitem__("vector") or f["features"].__delitem__("map:none"), "it has 0 features"),
    (lambda f: f.__delitem__("features") or f.__setitem__("features", np.zeros(3)), "'features' is not a group"),
    (lambda f: f.attrs.__delitem__("n_rows"), "its attributes are missing or have other types"),
    (lambda f: f.attrs.__setitem__("n_rows", "ten"), "its attributes are missing or have other types"),
    (lambda f: f.attrs.__setitem__("n_rows", 0), "out of range: .*'n_rows': 0"),
    (lambda f: f.attrs.__setitem__("n_rows", [10, 10]), "its attributes are missing or have other types"),
    (lambda f: f.attrs.__setitem__("format_version", 2), "do not give format 'layertap', format_version 1"),
    (lambda f: f.attrs.__setitem__("fingerprint", np.bytes_("x" * 60000)), "is not shard 0 of this data set"),
]  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, _complete: Path) -> list[Path]:
    """The first shard of a data set, changed in each of these ways."""
    folder = tmp_path_factory.mktemp("hostile")
    files = [folder / f"{i}.h5" for i in range(len(HOSTILE))]
    for path, (how, _) in zip(files, HOSTILE, strict=True):
        shutil.copyfile(_complete / "shards/000000.h5", path)
        change(path, how)
    return files


def test_a_hostile_shard_is_refused(complete: Path, hostile: list[Path]) -> None:
    for path, (_, message) in zip(hostile, HOSTILE, strict=True):
        shutil.copyfile(path, complete / "shards/000000.h5")
        with pytest.raises(InputError, match=message) as raised:
            FeatureReader(complete)
        assert "000000.h5" in str(raised.value)


def peak_kb() -> int:  # not ru_maxrss, which begins with what the process had that started this one
    (line,) = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(line)


def opened_of(paths: list[Path]) -> tuple[list[Path], list[Path], int]:
    """Which files are no error, which take longer than a second, and MB of memory that all take."""
    opened, slow, base = [], [], peak_kb()
    for path in paths:
        start = time.perf_counter()
        with contextlib.suppress(InputError):
            FeatureReader(path)
            opened.append(path)
        if time.perf_counter() - start > 1:
            slow.append(path)
    return opened, slow, (peak_kb() - base) // 1024


def test_hostile_files_cost_neither_time_nor_memory(tmp_path: Path, hostile: list[Path]) -> None:
    """All of them, and some that are no HDF5, in one process: 1 s each, 100 MB."""
    sparse = tmp_path / "sparse.h5"
    with sparse.open("wb") as file:
        header = {"size": 4 << 40, "row_data": [[512, 1024]], "fixed_xxh3": "0"}
        file.write(b"layertap shard, format 1; HDF5 begins at byte 512\n" + json.dumps(header).encode())
        file.truncate(4 << 40)
    bomb = tmp_path / "bomb.h5"
    bomb.write_bytes(b"layertap shard, format 1; HDF5 begins at byte 999999\n" + b"[" * 999_999)
    os.mkfifo(tmp_path / "pipe.h5")
    opened, slow, megabytes = result_of(opened_of, [*hostile, sparse, bomb, tmp_path / "pipe.h5", tmp_path])
    # A long fingerprint is only wrong beside the description of the data set.
    assert (opened, slow) == ([hostile[-1]], [])
    assert megabytes < 100


def test_a_shard_that_grew_or_was_cut_tells_its_sizes(complete: Path) -> None:
    shard = complete / "shards" / "000000.h5"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(InputError, match=f"it has {len(content) - 100:,} bytes, expected {len(content):,}"):
        FeatureReader(complete)
    shard.write_bytes(content + b"x")
    with pytest.raises(InputError, match=f"it has {len(content) + 1:,} bytes, expected {len(content):,}"):
        FeatureReader(complete)


# Damage by chance


def read_everything(out: Path) -> str:
    """What a user would see: "right", "error", or "wrong"."""
    try:
        with FeatureReader(out) as reader:
            right = all(np.array_equal(reader[name][:], values) for name, values in VALUES.items())
            str((reader.paths[:], reader.labels, reader.splits[:], reader.classes, reader.status, reader.failures))
            try:
                str(reader.provenance)
            except InputError:
                right = False
    except LayertapError:
        return "error"
    return "right" if right else "wrong"


FILTERS = ("gzip", "lzf", "blosc2")


def damage(content: bytes, dice: random.Random) -> bytes:
    """A file cut short, or with bits or bytes changed."""
    if dice.random() < 0.15:
        return content[: dice.randrange(len(content))]
    damaged = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 8, 64])):
        at = dice.randrange(len(damaged))
        damaged[at] ^= 1 << dice.randrange(8) if dice.random() < 0.6 else dice.randrange(1, 256)
    return bytes(damaged)


TRIES = int(os.environ.get("LAYERTAP_FUZZ", "15"))


def read_and_verify(out: Path) -> tuple[str, int]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return read_everything(out), len(verify(out).faults)


@pytest.mark.parametrize("compress", [None, *(pytest.param(how, marks=pytest.mark.slow) for how in FILTERS)])
def test_no_damage_crashes_or_passes_for_right(tmp_path: Path, compress: str | None) -> None:
    """LAYERTAP_FUZZ is how many damaged files are tried; each in a process of its own."""
    data, dice, seen = complete_data_set(tmp_path / "out", compress), random.Random(0), Counter[str]()
    shard = data.path(1)
    good = shard.read_bytes()
    for _ in range(TRIES):
        bad = damage(good, dice)
        if bad == good:
            continue
        shard.write_bytes(bad)
        (tmp_path / "last.h5").write_bytes(bad)
        outcome, faults = result_of(read_and_verify, data.out, within_s=20)
        assert faults > 0, "verify has seen nothing"
        seen[outcome] += 1
    assert seen["error"] > 0
    assert seen.total() > 10
    shard.write_bytes(good)
    assert result_of(read_and_verify, data.out) == ("right", 0)


def test_even_a_structure_that_was_signed_anew_crashes_nothing(complete: Path) -> None:
    """Damage that the check of the user block would find, but for a forger: HDF5's own checksums are left."""
    shard = complete / "shards" / "000001.h5"
    good, dice, errors = shard.read_bytes(), random.Random(1), 0
    for _ in range(TRIES):
        shard.write_bytes(good)
        flip(shard, 512 + dice.randrange(4096), 1 << dice.randrange(8))  # where HDF5 keeps its structures
        sign(shard)
        outcome = result_of(read_everything, complete, within_s=20)
        assert outcome in ("right", "error")
        errors += outcome == "error"
    assert errors > 0
