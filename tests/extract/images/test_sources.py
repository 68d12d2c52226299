"""The same pictures as a folder, a list, archives, arrays and behind URLs."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import fsspec
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from extract import FeatureReader, extract_features
from extract.errors import InputError, LayertapError
from extract.extraction.run import extract
from extract.images import Batch, Decoding, list_images, listed_again, load_batches
from extract.images.csv_lists import read_table
from extract.images.decoding import DecodeOptions
from extract.row_status import Status
from tests.conftest import make_picture
from tests.extract.compute.small_network import Job, small_network
from tests.extract.images.making import TINY, as_tensor, batch_of, encoded, files_of, write_archive, write_tar


def table_of(folder: Path) -> pd.DataFrame:
    names = [name for name in reversed(files_of(folder)) if "/" in name]
    return pd.DataFrame({"label": [name.split("/")[0] for name in names], "path": names})


def as_csv(folder: Path, target: Path) -> str:
    table_of(folder).to_csv(folder / "list.csv", index=False)
    return str(folder / "list.csv")


def as_parquet(folder: Path, target: Path) -> str:
    table_of(folder).to_parquet(folder / "list.parquet")
    return str(folder / "list.parquet")


def as_tar(folder: Path, target: Path) -> str:
    return str(write_tar(target / "p.tar", {f"./{name}": data for name, data in reversed(files_of(folder).items())}))


def as_two_tars(folder: Path, target: Path) -> str:
    files = files_of(folder)
    for half in (0, 1):
        write_tar(target / f"p-0{half}.tar", {name: files[name] for name in list(files)[half::2]})
    return str(target / "p-{00..01}.tar")


def as_zip(folder: Path, target: Path) -> str:
    with zipfile.ZipFile(target / "p.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        for i, (name, data) in enumerate(files_of(folder).items()):
            zipped.writestr(name, data, zipfile.ZIP_STORED if i % 2 else zipfile.ZIP_DEFLATED)
    return str(target / "p.zip")


def as_memory(folder: Path, target: Path) -> str:
    fsspec.filesystem("memory").pipe({f"/{target.name}/{name}": data for name, data in files_of(folder).items()})
    return f"memory://{target.name}"


FORMS: list[Callable[[Path, Path], str]] = [as_csv, as_parquet, as_tar, as_two_tars, as_zip, as_memory]


@pytest.mark.parametrize("form", FORMS)
def test_the_same_pictures_in_every_form_are_the_same_rows(
    folder: Path, tmp_path: Path, form: Callable[[Path, Path], str]
) -> None:
    (tmp_path / "target").mkdir()
    expected = list_images(folder)
    found = list_images(form(folder, tmp_path / "target"))
    assert found.paths == expected.paths
    assert found.classes == expected.classes
    assert found.labels.tolist() == expected.labels.tolist()
    rows = [list(range(5)), list(range(5, 12))]
    for one, other in zip(
        load_batches(found, rows, Decoding(as_tensor, workers=1)),
        load_batches(expected, rows, Decoding(as_tensor, workers=0)),
        strict=True,
    ):
        assert torch.equal(one.images, other.images)
        assert one.rows.tolist() == other.rows.tolist()
        assert one.source_hash.tolist() == other.source_hash.tolist()
        assert one.source_size.tolist() == other.source_size.tolist()


def test_a_data_set_of_a_folder_goes_on_from_an_archive_of_it(folder: Path, tmp_path: Path) -> None:
    kept = folder / "ant" / "06.png"
    data = kept.read_bytes()
    settings = TINY | {"out": tmp_path / "out"}
    kept.write_bytes(b"")
    extract_features(folder, **settings).close()
    kept.write_bytes(data)
    where = as_zip(folder, tmp_path)
    with extract_features(where, retry_failed=True, **settings) as reader:
        assert (reader.status == Status.OK).all()
        assert reader.ids is None
    changed = files_of(folder) | {"ant/00.png": files_of(folder)["ant/03.jpg"]}
    write_tar(tmp_path / "other.tar", changed)
    with pytest.raises(InputError, match=r"ant/00\.png differs"):
        extract_features(tmp_path / "other.tar", **settings)


# Lists


def test_a_list_has_labels_splits_and_ids(folder: Path) -> None:
    lines = [
        "\ufeffid,path,label,split,note", "7,cat/11.jpg,2,train,x", "8,ant/00.png,0,VAL,", "9,bee/01.jpg,,,",
        f"10,{folder}/cat/02.png,-1,test,",
    ]  # fmt: skip
    (folder / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    found = list_images(folder / "list.csv")
    assert found.paths == [f"{folder}/cat/02.png", "ant/00.png", "bee/01.jpg", "cat/11.jpg"]
    assert found.labels.tolist() == [-1, 0, -1, 2]
    assert found.classes == ["0", "1", "2"]
    assert found.splits == ["test", "val", "", "train"]
    assert found.ids == ["10", "8", "9", "7"]
    batch = batch_of(found, [0, 1, 2, 3])
    assert batch.status.tolist() == [Status.OK] * 4


def test_labels_that_are_no_counting_numbers_are_names(folder: Path) -> None:
    (folder / "list.tsv").write_text("path\tlabel\nant/00.png\t007\ncat/02.png\t10\n")
    found = list_images(folder / "list.tsv")
    assert (found.classes, found.labels.tolist()) == (["007", "10"], [0, 1])


def test_names_of_any_bytes_come_through_lists_and_archives_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    names = [b"\xff,\n.png", "\U0001f600.png".encode(), b"x" * 251 + b".png"]
    for name in names:
        make_picture(1).save(tmp_path / os.fsdecode(name), "PNG")
    (tmp_path / "list.csv").write_bytes(b"path\r\n" + b"".join(b'"' + name + b'"\r\n' for name in names))
    write_tar(tmp_path / "a.tar", {os.fsdecode(name): encoded(make_picture(1), "PNG") for name in names})
    for where in (".", "list.csv", "a.tar"):
        found = list_images(tmp_path / where)
        assert [os.fsencode(path) for path in found.paths] == sorted(names)
        assert batch_of(found, [0, 1, 2]).status.tolist() == [Status.OK] * 3


def test_a_parquet_list_is_checked(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"path": ["a.png"], "label": [0.5]}), tmp_path / "float.parquet")
    with pytest.raises(InputError, match="column 'label' is double; expected text or whole numbers"):
        list_images(tmp_path / "float.parquet")
    parquet.write_table(pa.table({"path": ["b.png", "a.png"], "label": [3, None]}), tmp_path / "int.parquet")
    found = list_images(tmp_path / "int.parquet")
    assert (found.paths, found.labels.tolist()) == (["a.png", "b.png"], [-1, 3])


# Archives


def test_labels_of_webdataset_samples(folder: Path, tmp_path: Path) -> None:
    files = list(files_of(folder).values())
    first = {"000.jpg": files[0], "000.cls": b"4", "000.json": b"{}", "001.jpg": files[1], "001.cls": b"1\n"}
    write_tar(tmp_path / "w-000.tar", first)
    write_tar(tmp_path / "w-001.tar", {"002.jpg": files[2], "002.txt": b"no label"})
    found = list_images(tmp_path / "w-{000..001}.tar")
    assert found.paths == ["000.jpg", "001.jpg", "002.jpg"]
    assert found.labels.tolist() == [4, 1, -1]
    assert found.left_out == {".json": 1, ".txt": 1}
    assert list_images(tmp_path / "w-*.tar").paths == found.paths


@pytest.mark.parametrize("kind", [".tar", ".zip"])
def test_the_label_of_an_image_in_an_archive_is_that_of_its_name_also_with_dots(tmp_path: Path, kind: str) -> None:
    files, expected = {}, {}
    for i, name in enumerate(["22.05", "22.06", "22", "day 1/22.05", "v1.0/IMG_2.0.1", "v1.0/IMG_2"]):
        files |= {f"{name}.png": b"", f"{name}.CLS" if i % 2 else f"./{name}.cls": f"\ufeff{i}\n".encode()}
        expected[f"{name}.png"] = i
    # The name of a sample is shorter.
    files |= {"7.seg.png": b"", "7.cls": b"6", "8.02.left.png": b"", "8.02.cls": b"7"}
    expected |= {"7.seg.png": 6, "8.02.left.png": 7}
    found = list_images(write_archive(tmp_path / f"a{kind}", files))
    assert dict(zip(found.paths, found.labels.tolist(), strict=True)) == expected
    assert (found.notes, found.left_out) == ((), {})


@pytest.mark.parametrize("kind", [".tar", ".zip"])
@pytest.mark.parametrize(
    ("images", "label"),
    [
        (("1.left.png", "1.right.png"), "1.cls"),
        (("x/1.jpg", "x/1.png"), "x/1.cls"),
        (("22.05.png", "22.png"), "22.cls"),
    ],
)
def test_an_ambiguous_label_in_an_archive_is_an_error_that_names_both_files(
    tmp_path: Path, kind: str, images: tuple[str, str], label: str
) -> None:
    files = dict.fromkeys(images, b"") | {label: b"1", "other.png": b"", "other.cls": b"0"}
    archive = write_archive(tmp_path / f"a{kind}", files)
    with pytest.raises(InputError) as error:
        list_images(archive)
    assert str(error.value).startswith(f"{archive}: {label} belongs to two images, {images[0]} and {images[1]}")


def test_of_two_labels_of_one_name_in_a_tar_the_last_counts_and_hard_links_are_labels(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"1.2.png": b"", "1.2.cls": b"5", "1.3.png": b"", "1.3.cls": b"6"})
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        link = tarfile.TarInfo("1.2.cls")
        link.type, link.linkname = tarfile.LNKTYPE, "1.3.cls"
        tar.addfile(link)
    write_tar(tmp_path / "a.tar", {"1.3.cls": b"7"}, "a")
    assert list_images(tmp_path / "a.tar").labels.tolist() == [6, 7]


def test_labels_of_samples_with_equal_names_stay_in_their_archives(tmp_path: Path) -> None:
    for i in range(3):
        write_tar(tmp_path / f"{i}.tar", {"1.5.png": b"", "1.5.cls": str(i).encode(), "1.6.png": b""})
    write_tar(tmp_path / "3.tar", {"1.6.cls": b"9"})  # not the label of an image in another archive
    found = list_images(tmp_path / "{0,1,2,3}.tar")
    assert found.paths == [f"{i}.tar/1.{name}.png" for i in range(3) for name in (5, 6)]
    assert found.labels.tolist() == [0, -1, 1, -1, 2, -1]
    assert found.notes[1:] == (
        "3 of 6 images have no .cls file, and no label",
        "1 of 4 .cls files belong to no image; the first is 1.6.cls",
    )


def test_files_of_classes_that_belong_to_no_image_leave_the_labels_of_folders(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"cat/1.png": b"", "dog/1.png": b"", "paper/article.cls": b"x" * 5000})
    found = list_images(tmp_path / "a.tar")
    assert (found.classes, found.labels.tolist()) == (["cat", "dog"], [0, 1])
    assert found.notes == ("1 of 1 .cls files belong to no image; the first is paper/article.cls",)
    assert found.left_out == {".cls": 1}
    write_tar(tmp_path / "b.tar", {"cat/1.png": b"", "cat/1.cls": b"x" * 5000})
    with pytest.raises(InputError, match=r"cat/1\.cls cannot be read as a label of at most 4,096 bytes"):
        list_images(tmp_path / "b.tar")


def test_equal_names_in_two_archives_are_kept_apart(folder: Path, tmp_path: Path) -> None:
    files = list(files_of(folder).values())
    write_tar(tmp_path / "a.tar", {"x/0.jpg": files[0], "x/1.jpg": files[1]})
    write_tar(tmp_path / "b.tar", {"y/0.jpg": files[2], "x/0.jpg": files[3]})
    found = list_images(tmp_path / "{a,b}.tar")
    assert found.paths == ["a.tar/x/0.jpg", "a.tar/x/1.jpg", "b.tar/x/0.jpg", "b.tar/y/0.jpg"]
    assert [found.classes[label] for label in found.labels] == ["x", "x", "x", "y"]
    assert found.notes == ("x/0.jpg is in several archives; therefore all paths start with the name of their archive",)
    assert [found.source.read(row)[0] for row in range(4)] == [files[0], files[1], files[3], files[2]]


def test_of_a_member_that_is_there_twice_the_last_counts(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.jpg": b"old"})
    write_tar(tmp_path / "a.tar", {"0.jpg": b"new"}, "a")
    found = list_images(tmp_path / "a.tar")
    assert found.source.read(0)[0] == b"new"
    assert found.left_out == {"replaced by a later one of the same name": 1}


def test_members_cannot_lead_out_of_an_archive(folder: Path, tmp_path: Path) -> None:
    data = files_of(folder)["ant/00.png"]
    names = ["../../up.png", "/etc/root.png", "a/../b.png", "good.png", ".hidden.png", "__MACOSX/x.png", "Thumbs.db"]
    for archive in ("evil.tar", "evil.zip"):
        write_archive(tmp_path / archive, dict.fromkeys(names, data))
    with tarfile.open(tmp_path / "evil.tar", "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo(f"kind{kind!r}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    before = sorted(tmp_path.rglob("*"))
    for archive, links in (("evil.tar", 4), ("evil.zip", 0)):
        found = list_images(tmp_path / archive)
        assert found.paths == ["good.png"]
        assert found.left_out["name that leads out of the archive"] == 3
        assert found.left_out["link or no plain file"] == links
        assert batch_of(found, [0]).status.tolist() == [Status.OK]
    assert sorted(tmp_path.rglob("*")) == before


def test_damage_in_a_zip_is_a_row_with_a_reason(folder: Path, tmp_path: Path) -> None:
    path = Path(as_zip(folder, tmp_path))
    damaged = bytearray(path.read_bytes())
    infos = zipfile.ZipFile(path).infolist()
    damaged[infos[5].header_offset + 60] ^= 0xFF
    entry = damaged.index(infos[6].filename.encode(), damaged.index(b"PK\1\2")) - 4
    damaged[entry : entry + 4] = (len(damaged) - 10).to_bytes(4, "little")  # its offset: too near to the end
    damaged[damaged.index(b"PK\1\2") + 8] |= 1  # encrypted
    path.write_bytes(damaged)
    batch = batch_of(list_images(path), list(range(12)))
    assert [row for row, status in enumerate(batch.status) if status != Status.OK] == [0, 5, 6]
    assert batch.reasons[0] == "encrypted"
    assert "archive is damaged" in batch.reasons[5]
    assert "the archive is truncated" in batch.reasons[6]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_archive_that_is_replaced_during_a_run_gives_no_picture_of_another_row(tmp_path: Path, workers: int) -> None:
    pictures = [encoded(Image.new("RGB", (8, 8), (value, value, value)), "BMP") for value in range(64)]
    for name, ordered in (("a.tar", pictures), ("b.tar", pictures[::-1])):
        write_tar(tmp_path / name, {f"{row:02d}.bmp": picture for row, picture in enumerate(ordered)})
    found = list_images(tmp_path / "a.tar")
    batches = load_batches(found, [[row] for row in range(64)], Decoding(as_tensor, workers=workers))
    with contextlib.closing(batches):
        seen = [int(next(batches).images.max())]
        (tmp_path / "b.tar").replace(tmp_path / "a.tar")
        with pytest.raises(InputError, match=r"a\.tar has changed since its files were listed"):
            seen += [int(batch.images.max()) for batch in batches]
    assert seen == list(range(len(seen)))
    with pytest.raises(LayertapError, match="has changed since its files were listed"):
        found.source.check_there()


def test_a_member_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("bomb.png", bytes(5_000_000))
    data = bytearray((tmp_path / "bomb.zip").read_bytes())
    directory = data.rindex(b"PK\1\2")
    data[directory + 24 : directory + 28] = (1000).to_bytes(4, "little")  # it says it had 1,000 bytes
    (tmp_path / "bomb.zip").write_bytes(data)
    batch = batch_of(list_images(tmp_path / "bomb.zip"), [0])
    assert batch.status.tolist() == [Status.DECODE_ERROR]
    assert "checksum" in batch.reasons[0]


def test_archives_and_urls_that_cannot_be_read_are_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    write_tar(tmp_path / "only" / "a.tar", files_of(folder))
    for where, message in (
        (tmp_path / "only/{a,b}.tar", r"b\.tar: no such file"),
        (tmp_path / "none-*.tar", "no such file"),
        (tmp_path / "only", r"no images; its only file is not an image \(.tar 1\); to read archives"),
        (tmp_path / "x-{9..3}.tar", "is not a range"),
        *((tmp_path / name, "the middle of a compressed tar") for name in ("p.tar.gz", "p.tgz", "p.tar.xz")),
        ("memory://nothing/here", "no such folder or file|no files there"),
        ("nosuchprotocol://a/b", "nosuchprotocol"),
        ("memory://a/b.npy", "arrays are read from local files only"),
    ):
        with pytest.raises(LayertapError, match=message):
            list_images(where)


def test_a_source_is_pickled_without_what_it_has_open(folder: Path, tmp_path: Path) -> None:
    for where in (as_tar(folder, tmp_path), as_zip(folder, tmp_path), as_csv(folder, tmp_path), as_npy(tmp_path)):
        source = list_images(where).source
        first = source.read(0)
        assert pickle.loads(pickle.dumps(source)).read(0) == first


# Arrays


def as_npy(target: Path) -> str:
    np.save(target / "p.npy", np.stack([np.array(make_picture(i)) for i in range(12)]))
    return str(target / "p.npy")


def test_arrays_are_pictures(tmp_path: Path) -> None:
    pictures = np.stack([np.array(make_picture(i)) for i in range(12)])  # (12, 48, 64, 3)
    np.save(tmp_path / "last.npy", pictures)
    np.save(tmp_path / "first.npy", pictures.transpose(0, 3, 1, 2))
    np.save(tmp_path / "grey.npy", pictures[..., 1])
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["train/images"] = pictures
        file["train/labels"] = np.arange(12) % 3
        file["other"] = np.zeros((3, 4))
    with h5py.File(tmp_path / "names.h5", "w") as file:
        file["x"], file["label"] = np.zeros((3, 8, 8, 3), np.uint8), ["b", "a", "b"]
    for where in ("last.npy", "first.npy", "p.h5", "p.h5:train/images"):
        found = list_images(tmp_path / where)
        assert found.paths == [f"{row:02d}" for row in range(12)]
        how = Decoding(lambda p: torch.from_numpy(np.array(p)), workers=int(where in ("last.npy", "p.h5")))
        [batch] = load_batches(found, [[0, 11]], how)
        assert torch.equal(batch.images, torch.from_numpy(pictures[[0, 11]])), where
    assert found.labels.tolist() == [0, 1, 2] * 4
    assert list_images(tmp_path / "last.npy").labels.tolist() == [-1] * 12
    named = list_images(tmp_path / "names.h5")
    assert (named.classes, named.labels.tolist()) == (["a", "b"], [1, 0, 1])
    grey = batch_of(list_images(tmp_path / "grey.npy"), [3]).images[0]
    assert torch.equal(grey, as_tensor(Image.fromarray(pictures[3, :, :, 1]).convert("RGB")))


@pytest.fixture(scope="module")
def no_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays that are no pictures, and those of strangers."""
    folder, pictures = tmp_path_factory.mktemp("arrays"), np.zeros((2, 8, 8, 3), np.uint8)
    np.save(folder / "float.npy", np.zeros((3, 8, 8, 3), np.float32))
    np.save(folder / "flat.npy", np.zeros((3, 64), np.uint8))
    np.save(folder / "one.npy", np.zeros((48, 64, 3), np.uint8))
    with h5py.File(folder / "secret.h5", "w") as file:
        file["p"] = pictures
    with h5py.File(folder / "a.h5", "w") as file:
        file["a"] = file["b"] = pictures
        file["away"] = h5py.ExternalLink(str(folder / "secret.h5"), "p")
        file["nowhere"] = h5py.ExternalLink("/etc/passwd", "x")
        file["empty"] = h5py.Empty("u1")
        file.create_dataset("huge", (1, 200_000, 200_000, 3), "u1", chunks=(1, 64, 64, 3))
        file.create_dataset("many", (10**12, 8, 8, 3), "u1", chunks=(64, 8, 8, 3))
        file["in/grid"], file["in/label"] = pictures, np.zeros(3, int)
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("float.npy", r"is float32 \(3, 8, 8, 3\); expected uint8 pictures"),
        ("flat.npy", r"is uint8 \(3, 64\)"),
        ("one.npy", "one colour picture or several grey pictures"),
        ("none.h5", "no such file"),
        ("a.h5", "several data sets of pictures; give one by name:"),
        ("a.h5:d", "no data set 'd'; it has"),
        ("a.h5:nowhere", "stores its data in other files|cannot be read as an array|no data set 'nowhere'"),
        ("a.h5:away", "stores its data in other files"),
        ("a.h5:empty", r"is uint8 \(\)"),
        ("a.h5:huge", "declares shape .* but has only"),
        ("a.h5:many", "but has only 0 bytes"),
        ("a.h5:in/grid", r"label is int64 \(3,\); expected an integer or a name for each of the 2"),
    ],
)
def test_arrays_that_are_no_pictures_are_errors(no_pictures: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list_images(no_pictures / name)


# URLs


def test_a_folder_of_arrays_gives_the_pictures_of_the_same_folder_of_files(folder: Path, tmp_path: Path) -> None:
    """In colour with channels last and first, in Fortran's order, grey, with one channel and with transparency."""
    forms: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda x: x, lambda x: x.transpose(2, 0, 1), np.asfortranarray, lambda x: x[..., 1], lambda x: x[:, :, 1:2],
        lambda x: np.concatenate([x, 255 - x[..., :1]], 2),
    ]  # fmt: skip
    arrays, files = tmp_path / "arrays", tmp_path / "files"
    for i in range(12):
        pixels = forms[i % 6](np.array(make_picture(i)))
        for place in (arrays, files):
            (place / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        np.save(arrays / "ab"[i % 2] / f"{i}.npy", pixels)
        shown = pixels.transpose(1, 2, 0) if i % 6 == 1 else pixels[:, :, 0] if i % 6 == 4 else pixels
        Image.fromarray(np.ascontiguousarray(shown)).save(files / "ab"[i % 2] / f"{i}.png")
    (arrays / "notes.txt").write_text("other")
    listed, expected = list_images(arrays), list_images(files)
    assert listed.left_out == {".txt": 1}
    assert [path.replace(".npy", ".png") for path in listed.paths] == expected.paths
    assert (listed.labels.tolist(), listed.classes) == (expected.labels.tolist(), ["a", "b"])
    for workers in (0, 1):
        how = Decoding(as_tensor, workers=workers)
        pairs = [load_batches(images, [list(range(12))], how) for images in (listed, expected)]
        found, wanted = (next(iter(batches)) for batches in pairs)
        assert torch.equal(found.images, wanted.images)
        assert found.source_size.tolist() == [(arrays / path).stat().st_size for path in listed.paths]
        for batches in pairs:
            batches.close()  # type: ignore[attr-defined]
    (arrays / "c.png").write_bytes((files / "a/0.png").read_bytes())  # beside images, an array may be anything
    assert list_images(arrays).paths == ["c.png"]
    assert list_images(arrays).left_out == {".npy": 12, ".txt": 1}


def test_an_array_that_is_no_picture_is_a_row_with_its_reason_and_is_never_unpickled(tmp_path: Path) -> None:
    def header(text: bytes, version: int = 1) -> bytes:
        return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text

    def saved(array: np.ndarray) -> bytes:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return file.getvalue()

    class Boom:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/unpickled",)

    picture = saved(np.zeros((4, 5, 3), np.uint8))
    plain = "{'descr': '|u1', 'fortran_order': False, 'shape': %s, }\n"
    contents = {
        "a good": (picture, ""),
        "b cut": (picture[:-1], "truncated: its array of uint8 (4, 5, 3) has another number of bytes"),
        "c long": (picture + b"\0", "another number of bytes"),
        "d objects": (saved(np.array([[Boom()]], object)), "an array of object (1, 1); expected uint8"),
        "e stack": (
            saved(np.zeros((2, 4, 5, 3), np.uint8)),
            "an array of uint8 (2, 4, 5, 3); expected uint8 (H, W, 3)",
        ),
        "f huge": (header((plain % "(1000000000, 1000000000, 3)").encode()), "another number of bytes"),
        "g negative": (header((plain % "(-1, -1, 3)").encode()) + bytes(3), ""),
        "h deep": (header(b"-" * 9000 + b"1\n"), ""),
        "i version": (header(b"{}", 3), ""),
        "j records": (saved(np.zeros((4, 5), [("a", "u1")])), "expected uint8 (H, W, 3)"),
        "k empty": (b"", "empty file"),
        "l text": (b"no array", "not an image in a known format"),
        "m float": (saved(np.full((4, 5), 0.5)), "np.save(path, (np.load(path) * 255).round().astype('uint8'))"),
        "n large": (saved(np.zeros((50, 50), np.uint8)), "50x50 pixels; --max-pixels sets the limit"),
    }
    for name, (content, _) in contents.items():
        (tmp_path / f"{name}.npy").write_bytes(content)
    images = list_images(tmp_path)
    batch = next(iter(load_batches(images, [list(range(len(images)))], Decoding(as_tensor, DecodeOptions(2000)))))
    assert batch.status.tolist() == [Status.OK] + [Status.DECODE_ERROR] * 13
    assert not batch.suspect
    for row, (name, (_, reason)) in enumerate(contents.items()):
        assert reason in batch.reasons.get(row, ""), name
    assert not (tmp_path / "unpickled").exists()


def floats(folder: Path, pixels: np.ndarray) -> dict[str, str]:
    """Write pictures as floats in three ways; the code in what is said of each."""
    (folder / "folder").mkdir()
    np.save(folder / "folder/one.npy", pixels[0])
    np.save(folder / "p.npy", pixels)
    with h5py.File(folder / "p.h5", "w") as file:
        file["group/x"] = pixels
    said, refused = {}, []
    for name in ("folder", "p.npy", "p.h5"):
        try:
            list_images(folder / name)
        except InputError as error:  # whose traceback has the open file
            refused.append(str(error))
            said[name] = (error.hint or "").removeprefix("for each file of this type: ")
    assert all("float32" in message for message in refused)
    return said


@pytest.mark.parametrize("scale", [1, 255])
def test_arrays_of_floats_are_refused_with_the_line_that_converts_them(tmp_path: Path, scale: float) -> None:
    pixels = np.stack([np.array(make_picture(i)) for i in range(3)])
    said = floats(tmp_path, (pixels / 255 * scale).astype(np.float32))
    arrays = {"folder": "np.load(path)", "p.npy": "np.load(", "p.h5": "file['group/x'][:]"}
    assert [array in said[name] for name, array in arrays.items()] == [True] * 3
    for code in said.values():
        exec(code, {"np": np, "h5py": h5py, "path": tmp_path / "folder/one.npy"})  # as a user does
    with h5py.File(tmp_path / "p.h5", "a") as file:
        assert file["group/x_uint8"].dtype == np.uint8
    for name in ("folder", "p_uint8.npy", "p.h5"):
        images = list_images(tmp_path / name)
        for row in range(len(images)):
            picture = images.source.picture(row, images.source.read(row)[0], DecodeOptions(10**6))
            np.testing.assert_array_equal(np.array(picture), pixels[row])


@pytest.mark.parametrize("scale", [-1, np.nan, 9e4])
def test_arrays_of_floats_of_no_known_range_are_refused_without_a_line(tmp_path: Path, scale: float) -> None:
    said = floats(tmp_path, np.full((2, 8, 8, 3), scale, np.float32))
    assert len(said) == 3
    assert all("store the pictures as they were before they were normalised" in code for code in said.values())


def test_a_memory_folder_that_vanishes_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = as_memory(folder, tmp_path)
    found = list_images(where)
    found.source.check_there()
    memory = type(fsspec.filesystem("memory"))
    with monkeypatch.context() as patched, pytest.raises(LayertapError, match=r"\(the token has expired\)"):
        patched.setattr(memory, "exists", Mock(side_effect=PermissionError("the token has expired")))
        found.source.check_there()
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    with pytest.raises(LayertapError, match="has vanished"):
        found.source.check_there()


def test_images_are_found_again_by_their_names(folder: Path, tmp_path: Path) -> None:
    for where in (str(folder), as_zip(folder, tmp_path), as_memory(folder, tmp_path)):
        images = list_images(where)
        again = listed_again(images.root, [images.paths[7], images.paths[2]], images.root)
        assert [again.source.read(row)[0] for row in (0, 1)] == [images.source.read(row)[0] for row in (7, 2)]
    with pytest.raises(InputError, match="no longer lists gone.png"):
        listed_again(as_zip(folder, tmp_path), ["gone.png"])


# The same bytes twice


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_the_same_bytes_are_computed_once_and_stored_twice(
    folder: Path, tmp_path: Path, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ant/01.jpg", "ant/aa.jpg", "cat/z.jpg"):
        (folder / name).write_bytes((folder / "bee" / "01.jpg").read_bytes())
    for name in ("ant/empty.jpg", "cat/empty.jpg"):
        (folder / name).write_bytes(b"")
    job, seen = Job(folder, tmp_path, small_network()), list[int]()
    job.backbone.model.register_forward_pre_hook(lambda module, images: seen.append(len(images[0])))
    planned = job.plan(batch_size=batch_size)
    monkeypatch.setattr("extract.extraction.validation.check_rows", lambda *_: None)  # it computes some pictures alone
    seen.clear()
    assert extract(planned).duplicates == 3
    assert sum(seen) == 12
    with FeatureReader(tmp_path / "out") as reader:
        rows = [reader.paths.index(name) for name in ("ant/01.jpg", "ant/aa.jpg", "bee/01.jpg", "cat/z.jpg")]
        features = reader["embedding"][:]
        assert all(np.array_equal(features[row], features[rows[0]]) for row in rows)
        for row, path in enumerate(reader.paths):
            if "empty" not in path:
                alone = job.backbone.features([Image.open(folder / path)])["embedding"][0]
                assert np.allclose(features[row], alone, rtol=1e-4, atol=1e-5), path
        assert [reader.paths[row] for row, *_ in reader.failures] == ["ant/empty.jpg", "cat/empty.jpg"]


def test_part_of_a_batch_keeps_images_and_reasons_together() -> None:
    images = torch.arange(3 * 4 * 4 * 3, dtype=torch.uint8).reshape(3, 4, 4, 3)
    numbers = np.arange(5)
    batch = Batch(
        numbers + 10, images, np.array([1, 2, 1, 2, 1], np.uint8), {11: "a", 13: "b"}, {}, numbers, numbers,
        np.zeros((5, 16), np.uint8),
    )  # fmt: skip
    part = batch.select([1, 2, 4])
    assert part.rows.tolist() == [11, 12, 14]
    assert torch.equal(part.images, images[[1, 2]])
    assert part.reasons == {11: "a"}


# Labels of a list, stored


def test_other_labels_for_the_same_paths_are_noticed(folder: Path, tmp_path: Path) -> None:
    settings = TINY | {"out": tmp_path / "out"}
    for label in ("cold", "hot"):
        (folder / "list.csv").write_text(f"path,label\nant/00.png,{label}\n")
        if label == "cold":
            extract_features(folder / "list.csv", **settings).close()
    with pytest.raises(InputError, match="images.labels_xxh3"):
        extract_features(folder / "list.csv", **settings)


# Damage and traps


def test_an_archive_that_is_cut_short_is_an_error(folder: Path, tmp_path: Path) -> None:
    for path in (Path(as_tar(folder, tmp_path)), Path(as_zip(folder, tmp_path))):
        for length in (3000, 700, 100, 0):
            os.truncate(path, length)
            with pytest.raises(InputError, match=r"damaged, or not a (tar|zip) archive|is truncated"):
                list_images(path)


def test_a_tar_with_a_damaged_header_is_no_shorter_tar(folder: Path, tmp_path: Path) -> None:
    path = Path(as_tar(folder, tmp_path))
    good = path.read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    damaged = bytearray(good)
    damaged[members[4].offset + 150] ^= 1  # in the checksum of the header
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="is damaged after byte"):
        list_images(path)
    for length in (members[4].offset, members[4].offset + 100, members[11].offset_data + members[11].size):
        path.write_bytes(good[:length])
        with pytest.raises(InputError, match=r"is truncated|is damaged"):
            list_images(path)
    path.write_bytes(good + good)
    with pytest.raises(InputError, match="contains several archives"):
        list_images(path)


def test_times_that_no_clock_shows_are_unknown(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        info = tarfile.TarInfo("0.jpg")
        info.mtime = 10**13
        tar.addfile(info, io.BytesIO(b""))
    assert list_images(tmp_path / "a.tar").source.read(0) == (b"", -1)


def test_descriptors_are_given_back(folder: Path, tmp_path: Path) -> None:
    (folder / "list.csv").write_text("path\n" + "\n".join(f"{'ant/../' * i}ant" for i in range(1, 40)))
    where, listed = as_tar(folder, tmp_path), list_images(folder / "list.csv")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        list_images(where).source.read(0)
    for row in range(39):
        with pytest.raises(IsADirectoryError):
            listed.source.read(row)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_names_behind_urls_are_no_chains_of_file_systems(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"/{tmp_path.name}/b::file:///etc/hostname.png", b"its own bytes")
    if not fs.find(f"memory://{tmp_path.name}")[0].endswith(".png"):
        pytest.skip("this version of fsspec cuts the name in memory file systems")
    found = list_images(f"memory://{tmp_path.name}")
    assert found.source.read(0)[0] == b"its own bytes"


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    for password in ("secret", "a secret"):
        with pytest.raises(InputError, match="a password in a URL is not accepted") as raised:
            list_images(f"ftp://me:{password}@host/photos")
        assert "secret" not in str(raised.value)


def test_a_server_that_dies_ends_the_run_and_its_rows_stay_pending(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extract.images.sources._WAIT_S", 0)
    lines = [f"http://127.0.0.1:9/{i}.png" for i in range(5)]
    (tmp_path / "dead.csv").write_text("path\n" + "\n".join(lines))
    with pytest.raises(LayertapError, match="5 images in a row cannot be read: .*Cannot connect"):
        extract_features(tmp_path / "dead.csv", out=tmp_path / "out", **TINY | {"workers": 2})
    with FeatureReader(tmp_path / "out", partial=True) as reader:
        assert len(reader) == 0
    whole = [f"{folder}/{name}" for name in files_of(folder) if name.endswith("g")]
    (tmp_path / "some.csv").write_text("path\n" + "\n".join([*lines, *whole]))
    with extract_features(tmp_path / "some.csv", out=tmp_path / "out2", **TINY) as reader:
        assert len(reader.failures) == 5


def test_a_transform_that_fails_is_a_row_with_a_reason(folder: Path) -> None:
    def fails(picture: Image.Image) -> torch.Tensor:
        if picture.width == 40:
            raise RuntimeError("no such luck")
        return as_tensor(picture)

    for workers in (0, 1):
        batch = next(load_batches(list_images(folder), [list(range(12))], Decoding(fails, workers=workers)))
        assert batch.reasons == {0: "its preprocessing failed: RuntimeError('no such luck')"}


def test_what_tools_make_of_archives(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "links.tar", "w") as tar:
        for name, kind in (("a/0.png", tarfile.REGTYPE), ("b/1.png", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "a/0.png", 5 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"bytes"))
    found = list_images(tmp_path / "links.tar")
    assert found.paths == ["a/0.png", "b/1.png"]
    assert found.source.read(1)[0] == b"bytes"
    with zipfile.ZipFile(tmp_path / "windows.zip", "w") as zipped:
        zipped.writestr("cat\\0.png", b"x")
        zipped.writestr("..\\up.png", b"x")
    found = list_images(tmp_path / "windows.zip")
    assert (found.paths, found.classes) == (["cat/0.png"], ["cat"])
    write_tar(tmp_path / "root.tar", {f"photos/{name}": data for name, data in files_of(folder).items()})
    [note] = list_images(tmp_path / "root.tar").notes
    assert "all images lie in the folder 'photos', which is the only class" in note


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_of_values_without_rows_has_its_columns(tmp_path: Path, suffix: str) -> None:
    where, table = tmp_path / f"labels{suffix}", pd.DataFrame({"path": [], "label": []})
    if suffix == ".csv":
        table.to_csv(where, index=False)
    else:
        table.astype({"path": str}).to_parquet(where)
    assert read_table(str(where), "label") == ({"path": [], "label": []}, [])
