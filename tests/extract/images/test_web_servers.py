"""Lists and archives behind a web server, compared with the same files on the local disk."""

from __future__ import annotations

import csv
import functools
import os
import tarfile
import urllib.parse
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from extract import extract_features
from extract.errors import InputError, LayertapError
from extract.images import list_images
from extract.images.plan_writing import write_plan
from extract.row_status import Status
from tests.conftest import make_picture
from tests.extract.images.making import TINY, Quiet, batch_of, encoded, served

# Every character that a URL, a page or a list treats in a special way, beside an ASCII name that sorts between others.
NAMES = [
    "plain/1.jpg", "plain/10.jpg", "z z/a b.jpg", "ä/ö.jpg", "a\u0308/decomposed.jpg", "日本/猫.jpg",
    "percent%/100%.jpg", "percent%/%20.jpg", "percent%/%2F.jpg", "percent%/%2520.jpg", "percent%/%zz.jpg", "%41/A.jpg",
    "A/A.jpg", "hash#/#1.jpg", "question?/1.jpg?x.jpg", "question?/?id=1&token=2.jpg", "question?/1.jpg",
    "a&b/&amp;.jpg", "a&b/&copy=1.jpg", "quotes/it's.jpg", 'quotes/"two".jpg', "quotes/<b>.jpg", "plus/a+b.jpg",
    "comma,/a;b,c.jpg", "colon/a:b@c.jpg", "http/https:.jpg", "httpd/http.jpg", "braces/{1}[2].jpg", "star/*.jpg",
    "back\\slash/a\\b.jpg", "~/~.jpg", "equals=/a=b.jpg", "dots/..a.jpg.jpg", "dots/a...jpg",
    "new\nline/a\tb.jpg", "top.jpg", "zz-last/^|`.jpg", "upper/%C3%A4.JPG",
]  # fmt: skip
NOT_UTF8 = os.fsdecode(b"bytes\xff/\xfe\xe4.jpg")


class Answering(Quiet):
    """A folder; a path that contains a key of `answers` gets this status, without a body."""

    answers: dict[str, int]
    requests: list[str]

    def send_head(self):  # type: ignore[no-untyped-def]
        self.requests.append(self.path)
        for part, status in self.answers.items():
            if part in self.path:
                self.send_error(status)
                return None
        return super().send_head()


class Bytewise(Answering):
    """Decodes the bytes of names, as Apache and nginx do; `http.server` cannot send names in Latin-1."""

    def translate_path(self, path: str) -> str:
        return f"{self.directory}/{os.fsdecode(urllib.parse.unquote_to_bytes(path))}"


@dataclass
class Server:
    url: str
    answers: dict[str, int]
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def web(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the folder `tmp_path / "web"`."""
    (tmp_path / "web").mkdir()

    class Here(getattr(request, "param", Answering)):  # type: ignore[misc]
        answers: dict[str, int] = {}  # noqa: RUF012
        requests: list[str] = []  # noqa: RUF012

    with served(functools.partial(Here, directory=str(tmp_path / "web"))) as url:
        yield Server(url, Here.answers, Here.requests)


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [encoded(make_picture(seed, 24, 18), "PNG") for seed in range(len(NAMES) + 1)]


def write_all(folder: Path, pictures: list[bytes], names: list[str]) -> Path:
    for name, data in zip(names, pictures, strict=False):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def same_rows(behind: object, local: object) -> None:
    """All that a data set stores of images, and the bytes of each."""
    one, other = (images.slice(0, len(images)) for images in (behind, local))  # type: ignore[attr-defined]
    assert one.paths == other.paths
    assert one.classes == other.classes
    assert one.labels.tolist() == other.labels.tolist()
    assert one.splits == other.splits
    assert (one.paths_xxh3, one.labels_xxh3) == (other.paths_xxh3, other.labels_xxh3)
    for row, path in enumerate(one.paths):
        assert one.source.read(row)[0] == other.source.read(row)[0], path


def test_a_folder_of_a_web_server_is_refused_with_what_to_write(
    tmp_path: Path, web: Server, pictures: list[bytes]
) -> None:
    write_all(tmp_path / "web" / "photos", pictures, ["1.jpg"])
    for listing in (list_images, lambda url: write_plan(url, tmp_path / "plan")):
        with pytest.raises(InputError, match=r"the folders of a web server cannot be listed; write a list \(\.csv\)"):
            listing(f"{web.url}/photos")
    assert not web.requests


def test_names_with_special_characters_are_keys_of_an_object_store(tmp_path: Path, pictures: list[bytes]) -> None:
    folder = write_all(tmp_path / "photos", pictures, NAMES)
    fs = fsspec.filesystem("memory")
    for name, data in zip(NAMES, pictures, strict=False):
        fs.pipe_file(f"/{tmp_path.name}/photos/{name}", data)
    behind = list_images(f"memory://{tmp_path.name}/photos")
    same_rows(behind, list_images(folder))
    same_rows(write_plan(f"memory://{tmp_path.name}/photos", tmp_path / "plan"), list_images(folder))


@pytest.mark.parametrize("web", [Bytewise], indirect=True)
def test_names_that_are_not_utf_8_are_those_of_the_folder(tmp_path: Path, web: Server, pictures: list[bytes]) -> None:
    folder = write_all(tmp_path / "web" / "photos", pictures, [NOT_UTF8, "a ä/100%.jpg"])
    (folder.parent / "list.csv").write_bytes(b"path\n" + b"photos/" + os.fsencode(NOT_UTF8) + b"\n")
    same_rows(list_images(f"{web.url}/list.csv"), list_images(folder.parent / "list.csv"))


def test_features_of_a_list_behind_a_web_server_are_those_of_the_list(
    tmp_path: Path, web: Server, pictures: list[bytes]
) -> None:
    folder = write_all(tmp_path / "web", pictures, NAMES[2:8])
    (folder / "list.csv").write_text("\n".join(["path", *NAMES[2:8]]))
    features = []
    for number, place in enumerate((folder, web.url)):
        how = TINY | {"out": tmp_path / str(number), "workers": number}
        with extract_features(f"{place}/list.csv", **how) as reader:
            features.append(reader["embedding"][:])
    assert np.isfinite(features[0]).all()
    assert np.array_equal(features[0], features[1])


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
def test_relative_names_of_a_list_behind_a_web_server_are_file_names(
    tmp_path: Path, web: Server, pictures: list[bytes], kind: str
) -> None:
    names = [name for name in NAMES if "token=" not in name]
    folder = write_all(tmp_path / "web" / "photos", pictures, names)
    rows = [(name, f"{number % 3}", ["train", "test"][number % 2]) for number, name in enumerate(names)]
    path = folder.parent / f"list.{kind}"
    if kind == "parquet":
        columns = dict(zip(("path", "label", "split"), map(list, zip(*rows, strict=True)), strict=True))
        columns["path"] = [f"photos/{name}" for name in columns["path"]]
        parquet.write_table(pa.table(columns), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
            writer.writerow(["path", "label", "split"])
            writer.writerows([(f"photos/{name}", label, split) for name, label, split in rows])
    local, behind = list_images(path), list_images(f"{web.url}/{path.name}")
    same_rows(behind, local)
    same_rows(write_plan(f"{web.url}/{path.name}", tmp_path / "plan"), local)


def test_an_absolute_url_in_a_list_is_a_url(tmp_path: Path, web: Server, pictures: list[bytes]) -> None:
    folder = write_all(tmp_path / "web", pictures, ["a b.jpg", "c#d.jpg", "e.jpg"])
    urls = [f"{web.url}/a%20b.jpg", f"{web.url}/c%23d.jpg?id=1", f"{web.url}/e.jpg#part"]
    (folder / "urls.csv").write_text("path\n" + "\n".join(urls) + "\n")
    for place in (web.url, folder):
        listed = list_images(f"{place}/urls.csv")
        assert listed.paths == urls
        assert [listed.source.read(row)[0] for row in range(3)] == pictures[:3]


def test_a_relative_name_with_a_signature_is_refused_and_not_repeated(tmp_path: Path, web: Server) -> None:
    (tmp_path / "web" / "list.csv").write_text("path\na.jpg\nb.jpg?token=s3cr3t\n")
    with pytest.raises(InputError, match=r"list.csv: line 3: the relative path b\.jpg has a credential") as raised:
        list_images(f"{web.url}/list.csv")
    assert "s3cr3t" not in str(raised.value)
    with pytest.raises(InputError, match="relative paths are file names; write the complete URL"):
        write_plan(f"{web.url}/list.csv", tmp_path / "plan")


# Answers that are not the file


def write_archives(folder: Path, pictures: list[bytes]) -> None:
    (folder / "a.jpg").write_bytes(pictures[0])
    with tarfile.open(folder / "a.tar", "w") as tar, zipfile.ZipFile(folder / "a.zip", "w") as zipped:
        tar.add(folder / "a.jpg", "a.jpg")
        zipped.write(folder / "a.jpg", "a.jpg")
    (folder / "a.csv").write_text("path\na.jpg\n")
    parquet.write_table(pa.table({"path": ["a.jpg"]}), folder / "a.parquet")


@pytest.mark.parametrize("what", ["a.tar", "a.zip", "a.csv", "a.parquet"])
def test_the_status_of_a_refused_file_is_reported(
    tmp_path: Path, web: Server, pictures: list[bytes], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extract.images.sources._WAIT_S", 0)
    write_archives(tmp_path / "web", pictures)
    listing = [lambda: list_images(f"{web.url}/{what}")]
    if what == "a.csv":
        listing.append(lambda: write_plan(f"{web.url}/{what}", tmp_path / "plan"))
    for status in (401, 403, 410, 500, 503):
        web.answers[what] = status
        for refused in listing:
            with pytest.raises(LayertapError) as raised:
                refused()
            assert f"the server answered {status} {HTTPStatus(status).phrase}" in str(raised.value)
            assert "no such" not in str(raised.value)
            assert not isinstance(raised.value, InputError)


def test_an_archive_behind_a_server_without_ranges_is_refused_at_once(
    tmp_path: Path, web: Server, pictures: list[bytes]
) -> None:
    write_archives(tmp_path / "web", pictures)
    for name in ("a.tar", "a.zip"):
        with pytest.raises(InputError, match=r"does not send parts of files \(HTTP range requests\); copy"):
            list_images(f"{web.url}/{name}")


@pytest.mark.parametrize("what", ["b.tar", "b.zip", "b.csv", "b.parquet"])
def test_a_file_is_missing_where_the_server_says_so_and_not_where_it_does_not_answer(
    tmp_path: Path, web: Server, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extract.images.sources._WAIT_S", 0)
    with pytest.raises(InputError, match="no such (folder or )?file"):
        list_images(f"{web.url}/{what}")
    if what == "b.csv":
        with pytest.raises(InputError, match="no such (folder or )?file"):
            write_plan(f"{web.url}/{what}", tmp_path / "plan")
    with pytest.raises(LayertapError, match=r"cannot be (read|listed).*Cannot connect") as raised:
        list_images(f"http://127.0.0.1:9/{what}")
    assert not isinstance(raised.value, InputError)


def test_a_pattern_in_a_folder_that_is_not_listed_is_an_error_with_the_status(tmp_path: Path, web: Server) -> None:
    (tmp_path / "web" / "parts").mkdir()
    with pytest.raises(InputError, match=r"parts/\*\.tar: no such file"):
        list_images(f"{web.url}/parts/*.tar")
    web.answers["parts"] = 403
    with pytest.raises(LayertapError, match=r"parts/\*\.tar cannot be listed: the server answered 403 Forbidden"):
        list_images(f"{web.url}/parts/*.tar")
    with pytest.raises(LayertapError, match="cannot be listed: .*Cannot connect"):
        list_images("http://127.0.0.1:9/parts/*.tar")


def test_the_status_of_an_image_is_in_its_row(
    tmp_path: Path, web: Server, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """403 as a local file without permission; 500 and 503, which may pass, as an I/O error, which is retried."""
    monkeypatch.setattr("extract.images.sources._WAIT_S", 0)
    names = ["200.jpg", "403.jpg", "404.jpg", "410.jpg", "500.jpg", "503.jpg"]
    write_all(tmp_path / "web", pictures, names)
    (tmp_path / "web" / "list.csv").write_text("path\n" + "\n".join(names))
    web.answers.update({name: int(name[:3]) for name in names[1:]})
    batch = batch_of(list_images(f"{web.url}/list.csv"), list(range(6)))
    status = [Status(code) for code in batch.status.tolist()]
    failed, io_error = Status.DECODE_ERROR, Status.IO_ERROR
    assert status == [Status.OK, failed, Status.MISSING, failed, io_error, io_error]
    assert batch.reasons == {
        1: "the server answered 403 Forbidden",
        2: "no such file",
        3: "the server answered 410 Gone",
        4: "the server answered 500 Internal Server Error, 3 times",
        5: "the server answered 503 Service Unavailable, 3 times",
    }
