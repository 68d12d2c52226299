"""Files that mean harm, and files that were damaged: refused by name, quickly, in little memory; never a crash."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from extract import FeatureReader, InputError, LayertapError
from extract.store.format.dataset import DataSet
from extract.store.verify import verify
from extract.system.json_files import read_json
from tests.extract.store.rows import VALUES, change, complete_data_set, sign


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


def external_storage(file: h5py.File) -> None:
    replace(file, "label", shape=(10,), dtype="<i8", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])


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


def four_terabytes(file: h5py.File) -> None:
    replace(file, "features/vector", shape=(10, 100_000_000_000), dtype="<f4", chunks=(1, 1_000_000))


def four_terabytes_in_rows(file: h5py.File) -> None:
    replace(file, "features/vector", shape=(10, 1 << 32), dtype="<f4", chunks=(10, 1 << 26))


def four_terabytes_compressed(file: h5py.File) -> None:
    del file["features/map:none"]
    file.attrs["n_rows"] = 1 << 30
    replace(file, "features/vector", shape=(1 << 30, 1024), dtype="<f4", chunks=(256, 1024), compression="gzip",
            fletcher32=True)  # fmt: skip


def four_terabytes_of_rows(file: h5py.File) -> None:
    del file["features/map:none"]
    file.attrs["n_rows"] = 1 << 30
    replace(file, "features/vector", shape=(1 << 30, 1024), dtype="<f4", chunks=(256, 1024))


def a_feature_for_each_day(file: h5py.File) -> None:
    for i in range(11_000):
        file["features"][f"x{i}"] = file["label"]


HOSTILE: list[tuple[Callable[[h5py.File], object], str]] = [
    (external_link, "'vector' is a soft or external link"),
    (soft_link, "'status' is a soft or external link"),
    (group_link, "'features' is a soft or external link"),
    (external_storage, "'label' stores its data in external files"),
    (virtual, "'vector' is a virtual dataset"),
    (unknown_filter, "filter that layertap does not support .number 305"),
    (four_terabytes, "'vector' has shape"),
    (four_terabytes_in_rows, "'vector' has shape"),
    (four_terabytes_compressed, "has 0 chunks, too few or too many for 1,073,741,824 rows"),
    (four_terabytes_of_rows, "which are not in the file"),
    (a_feature_for_each_day, "it has 11,002 features"),
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


@pytest.mark.parametrize(("how", "message"), HOSTILE, ids=[getattr(how, "__name__", "?") for how, _ in HOSTILE])
def test_a_hostile_shard_is_refused(complete: Path, how: Callable[[h5py.File], object], message: str) -> None:
    change(complete / "shards" / "000000.h5", how)
    with pytest.raises(InputError, match=message) as raised:
        FeatureReader(complete)
    assert "000000.h5" in str(raised.value)


def test_hostile_files_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    """All of them, and some that are no HDF5, in one fresh process: 1 s each, 200 MB beyond what the imports take."""
    made = complete_data_set(tmp_path / "made")
    files = []
    for i, (how, _) in enumerate(HOSTILE):
        files.append(tmp_path / f"{i}.h5")
        files[-1].write_bytes(made.path(0).read_bytes())
        change(files[-1], how)
    sparse = tmp_path / "sparse.h5"
    with sparse.open("wb") as file:
        header = {"size": 4 << 40, "row_data": [[512, 1024]], "fixed_xxh3": "0"}
        file.write(b"layertap shard, format 1; HDF5 begins at byte 512\n" + json.dumps(header).encode())
        file.truncate(4 << 40)
    bomb = tmp_path / "bomb.h5"
    bomb.write_bytes(b"layertap shard, format 1; HDF5 begins at byte 999999\n" + b"[" * 999_999)
    os.mkfifo(tmp_path / "pipe.h5")
    code = f"""
import time
from extract import FeatureReader, InputError
def peak_kb():  # not ru_maxrss, which begins with what the process had that started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
base = peak_kb()
for path in {[str(path) for path in (*files, sparse, bomb, tmp_path / "pipe.h5", tmp_path)]!r}:
    start = time.perf_counter()
    try:
        FeatureReader(path)
        print("opened", path)
    except InputError:
        pass
    if time.perf_counter() - start > 1:
        print("slow", path, time.perf_counter() - start)
print("memory", (peak_kb() - base) // 1024)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    opened = [line for line in run.stdout.splitlines() if not line.startswith("memory")]
    # A long fingerprint is only wrong beside the description of the data set.
    assert opened == [f"opened {files[-1]}"]
    assert int(run.stdout.split()[-1]) < 200


def test_a_shard_that_grew_or_was_cut_tells_its_sizes(complete: Path) -> None:
    shard = complete / "shards" / "000000.h5"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(InputError, match=f"it has {len(content) - 100:,} bytes, expected {len(content):,}"):
        FeatureReader(complete)
    shard.write_bytes(content + b"x")
    with pytest.raises(InputError, match=f"it has {len(content) + 1:,} bytes, expected {len(content):,}"):
        FeatureReader(complete)


def test_a_part_of_another_data_set_is_not_gone_on_with(complete: Path, tmp_path: Path) -> None:
    other = complete_data_set(tmp_path / "other", depends_on={"weights": "v"})
    data = DataSet.open(complete)
    data.path(0).unlink()
    other.path(0).rename(data.path(0, part=True))
    from extract.store.format.writer import ShardWriter

    with pytest.raises(LayertapError, match="its 'fingerprint' is .*; delete the file"):
        ShardWriter(data, 0)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 50_000, "1" * 10_000, '{"images": ' + "9" * 5000 + "}"])
def test_json_bombs_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "dataset.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"dataset.json is damaged"):
        read_json(path)
    with pytest.raises(InputError, match=r"dataset.json is damaged"):
        DataSet.open(tmp_path)


@pytest.mark.parametrize(
    "change_to",
    [{"shard_rows": 1, "images": {"root": "/", "count": 1 << 60, "paths_xxh3": ""}}, {"features": [{"name": "../x"}]},
     {"features": [{"name": "a/b", "shape": [3], "dtype": "float32", "attributes": {}}]},
     {"features": [{"name": "a", "shape": [-3], "dtype": "float32", "attributes": {}}]},
     {"features": [{"name": "a", "shape": [3], "dtype": "object", "attributes": {}}]},
     {"features": [{"name": "a", "shape": [3], "dtype": "float32", "attributes": {"x": 1}}]}],
)  # fmt: skip
def test_a_hostile_description_is_refused(complete: Path, change_to: dict[str, object]) -> None:
    path = complete / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change_to}))
    start = time.perf_counter()
    with pytest.raises(InputError, match="dataset.json is damaged"):
        FeatureReader(complete)
    assert time.perf_counter() - start < 1


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


def damage(content: bytes, dice: random.Random) -> bytes:
    """A file cut short, or with bits or bytes changed."""
    if dice.random() < 0.15:
        return content[: dice.randrange(len(content))]
    damaged = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 8, 64])):
        at = dice.randrange(len(damaged))
        damaged[at] ^= 1 << dice.randrange(8) if dice.random() < 0.6 else dice.randrange(1, 256)
    return bytes(damaged)


@pytest.mark.parametrize(
    "compress",
    [
        None,
        pytest.param("gzip", marks=pytest.mark.slow),
        pytest.param("lzf", marks=pytest.mark.slow),
        pytest.param("blosc2", marks=pytest.mark.slow),
    ],
)
def test_no_damage_crashes_or_passes_for_right(tmp_path: Path, compress: str | None) -> None:
    """LAYERTAP_FUZZ is how many damaged files are tried; each in a process of its own."""
    data = complete_data_set(tmp_path / "out", compress)
    shard = data.path(1)
    good = shard.read_bytes()
    dice = random.Random(0)
    seen = {"right": 0, "error": 0, "wrong": 0}
    for _ in range(int(os.environ.get("LAYERTAP_FUZZ", "15"))):
        bad = damage(good, dice)
        if bad == good:
            continue
        shard.write_bytes(bad)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(20)
            try:
                outcome = read_everything(data.out)
                faults = verify(data.out).faults
                os.write(writing, f"{outcome} {len(faults)}".encode())
                os._exit(0)
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}"[:4000].encode())
                os._exit(1)
        os.close(writing)
        said = os.read(reading, 4096).decode()
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (tmp_path / "last.h5").write_bytes(bad)
        assert code == 0, (code, said)
        outcome, faults = said.split()
        assert int(faults) > 0, "verify has seen nothing"
        seen[outcome] += 1
    assert seen["error"] > 0
    assert sum(seen.values()) > 10
    shard.write_bytes(good)
    assert read_everything(data.out) == "right"
    assert verify(data.out).faults == []


def test_even_a_structure_that_was_signed_anew_crashes_nothing(tmp_path: Path) -> None:
    """Damage that the check of the user block would find, but for a forger: HDF5's own checksums are left."""
    data = complete_data_set(tmp_path / "out")
    shard = data.path(1)
    good, dice, errors = shard.read_bytes(), random.Random(1), 0
    for _ in range(int(os.environ.get("LAYERTAP_FUZZ", "15"))):
        bad = bytearray(good)
        at = 512 + dice.randrange(4096)  # where HDF5 keeps its structures
        bad[at] ^= 1 << dice.randrange(8)
        shard.write_bytes(bytes(bad))
        sign(shard)
        child = os.fork()
        if not child:
            signal.alarm(20)
            try:
                os._exit(["right", "error", "wrong"].index(read_everything(data.out)))
            finally:
                os._exit(9)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1), code
        errors += code
    assert errors > 0
