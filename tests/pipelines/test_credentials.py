"""URLs: signatures, tokens and passwords in them are used to fetch, and nowhere else; foreign ones are not opened."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from extract import FeatureReader, extract_features
from extract.credentials import parameters_without_credentials, text_without_credentials, without_credentials
from extract.errors import InputError, LayertapError, first_line
from extract.images import csv_lists, list_images, listed_again
from extract.store.merge import merge
from extract.store.places.bucket import Bucket
from pipelines.terminal.config import name_of
from tests.extract.images.test_sources import as_zip
from tests.pipelines.test_cli import SMALL, layertap, succeeds
from tests.pipelines.test_report import n_thumbnails
from tests.pipelines.web_server import WebServer, names, serving

# A signature of today and one of tomorrow. The first characters show a secret that was cut or is encoded in part.
DAYS = ["SECRETone0a1b2c3d4e5f6a7b8c9", "SECRETtwo9f8e7d6c5b4a39281706"]
MARK = "SECRET"

# What may follow the path of an image -> what of it is stored.
SIGNED = {
    "?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA{s}/20260101/eu/s3/aws4_request&X-Amz-Expires=60"
    "&X-Amz-SignedHeaders=host&X-Amz-Signature={s}": "",
    "?AWSAccessKeyId={s}&Expires=1790000000&Signature=a%2Fb%2B{s}%3D": "",
    "?X-Goog-Algorithm=GOOG4&X-Goog-Credential={s}&X-Goog-Signature={s}&generation=7": "?generation=7",
    "?sv=2024-11-04&sr=b&sp=r&se=2026-01-01T00%3A00%3A00Z&sig={s}": "",
    "?token={s}": "",
    "?id=1&token={s}": "?id=1",
    "?ID=2&Access_Token={s}": "?ID=2",
    "?X%2DAmz%2DSignature={s}&view=front": "?view=front",
    "?w=64;auth-token={s}": "?w=64",
    "?Policy={s}&Key-Pair-Id=K{s}": "",
    "?expires=1790000000&api_key={s}&v=2": "?v=2",
    "?v=1&token={s}#access_token={s}": "?v=1",
}

# URL -> what is stored of it.
SHAPES = {
    "https://me:{s}@host/a.jpg": "https://host/a.jpg",
    "https://me:p@{s}@host/a.jpg": "https://host/a.jpg",
    "https://me:p/{s}@host/a.jpg": "https://host/a.jpg",
    "https://me:p@x/{s}@host/a.jpg": "https://host/a.jpg",
    "https://me:p#{s}@host/a.jpg": "https://host/a.jpg",
    "https://me:p?{s}@host:8080/a.jpg": "https://host:8080/a.jpg",
    "https://me:%40{s}%2F@host/a.jpg": "https://host/a.jpg",
    "https://{s}@host/a.jpg": "https://host/a.jpg",
    "https://:{s}@host/a.jpg": "https://host/a.jpg",
    "https://me:{s}@[2001:db8::1]:443/a.jpg?x=1": "https://[2001:db8::1]:443/a.jpg?x=1",
    "https://[2001:db8::1]:443/a@b.jpg?SIG={s}": "https://[2001:db8::1]:443/a@b.jpg",
    "https://host:8080/a@b.jpg?to=c@d.e": "https://host:8080/a@b.jpg?to=c@d.e",
    "s3://{s}:{s}@bucket/a.jpg": "s3://bucket/a.jpg",
    "s3://bucket/what?.jpg": "s3://bucket/what?.jpg",
    "s3://bucket/a#b@c.jpg": "s3://bucket/a#b@c.jpg",
    "s3://arn:aws:s3:eu:1:accesspoint/x/a@b.jpg": "s3://arn:aws:s3:eu:1:accesspoint/x/a@b.jpg",
    "gs://bucket/a.jpg?X-Goog-Signature={s}": "gs://bucket/a.jpg",
    "abfss://photos@account.dfs.core.windows.net/a.jpg?sig={s}": "abfss://photos@account.dfs.core.windows.net/a.jpg",
    "https://host/a.jpg?id=1&amp;token={s}": "https://host/a.jpg?id=1",
    "https://proxy/?url=https%3A%2F%2Fme%3A{s}%40host%2Fa.jpg%3Fsig%3D{s}&w=9": (
        "https://proxy/?url=https%3A%2F%2Fhost%2Fa.jpg&w=9"
    ),
    "https://host/img?id=550e8400e29b41d4a716446655440000": "https://host/img?id=550e8400e29b41d4a716446655440000",
    "https://host/img?file=x/a1b2c3d4e5f6a7b8c9.jpg": "https://host/img?file=x/a1b2c3d4e5f6a7b8c9.jpg",
    "https://host/img?id=1&name=%C3%A4&id=2": "https://host/img?id=1&name=%C3%A4&id=2",
    "https://host/a.jpg?": "https://host/a.jpg?",
    **{f"https://host/a.jpg{query}": f"https://host/a.jpg{kept}" for query, kept in SIGNED.items()},
    **{
        f"https://host/a.jpg?id=1&{name}={{s}}": "https://host/a.jpg?id=1"
        for name in (
            "private_token", "job_token", "api_token", "apitoken", "hf_token", "personal_access_token", "upload-token",
            "x-api-key", "app_key", "access_key_secret", "oauth_signature", "oauth_consumer_key", "bearer",
            "bearer_token", "sas", "session", "sessionid", "PHPSESSID", "JSESSIONID", "ticket", "alf_ticket",
        )
    },
    "https://me.azurewebsites.net/api/image?id=1&code={s}": "https://me.azurewebsites.net/api/image?id=1",
}  # fmt: skip


def test_a_reference_relative_to_a_url_loses_its_parameters() -> None:
    assert parameters_without_credentials(f"a@b.jpg?id=1&token={MARK}#sig={MARK}") == "a@b.jpg?id=1"
    assert without_credentials("a.jpg?token=1") == "a.jpg?token=1"  # a file of the local disk may have this name


@pytest.mark.parametrize("shape", SHAPES)
def test_a_url_is_the_same_on_both_days_and_has_no_secret(shape: str) -> None:
    for day in DAYS:
        url = shape.format(s=day)
        assert without_credentials(url) == SHAPES[shape]
        assert without_credentials(SHAPES[shape]) == SHAPES[shape]
        message, clean = (f"403, url='{text}': ({text})." for text in (url, SHAPES[shape]))
        assert text_without_credentials(message) == clean
        assert str(LayertapError(message)) == str(InputError(message)) == first_line(OSError(message)) == clean


@pytest.mark.parametrize(
    "url",
    [
        f"https://host/a.jpg?ex=6a&is=6b&hm={DAYS[0]}",
        f"https://host/a.jpg?md5={DAYS[0]}&expires=1790000000",
        f"https://host/{DAYS[0]}/a.jpg?st=oslo&se=1&policy=public&exp=2",
        "https://host/a.jpg?monkey=1&tokens=2&keyboard=3#page=4",
        "https://host/a.jpg?codec=av1-main-profile-10&tokenizer=a&passage=2&design=3&x-oss-process=image/resize,w_100",
        f"https://host/a.jpg?code={DAYS[0]}&sid=2&pat=3",  # codes of products, subjects and patients
        "photos/key=1@2?token=3.jpg",
    ],
)
def test_a_parameter_with_another_name_stays_as_it_is(url: str) -> None:
    assert without_credentials(url) == url
    assert text_without_credentials(url) == url


@pytest.fixture
def server(folder: Path) -> Iterator[type[WebServer]]:
    with serving(folder.parent, DAYS[0]) as running:
        yield running


def write_list(folder: Path, host: str, day: str, extra: str = "") -> Path:
    """A list with one shape of URL for each picture; on another day, the file has other bytes."""
    lines = [
        f'"http://{host}/signed/{name}{query.format(s=day)}",{i}'
        for i, (name, query) in enumerate(zip(names(folder), SIGNED, strict=True))
    ]
    path = folder.parent / "list.csv"
    path.write_text("path,id\n" + "\n".join(lines) + "\n" + extra)
    return path


def check_no_secret(place: Path, *outputs: str) -> None:
    """Read every byte below a folder, every value in HDF5 files, and every text; and the names of all files."""
    for path in place.rglob("*"):
        assert MARK not in path.name
        if path.is_file():
            assert MARK.encode() not in path.read_bytes(), path
        if ".h5" in path.suffixes:
            with h5py.File(path) as file:
                items: list[h5py.Dataset | h5py.Group] = [file]
                file.visititems(lambda name, item: items.append(item))  # noqa: B023
                assert not [item for item in items if MARK in repr(dict(item.attrs))]
                values = [item[()].tobytes() for item in items if isinstance(item, h5py.Dataset)]
                assert MARK.encode() not in b" ".join(values)
    for output in outputs:
        assert MARK not in output


def run(*arguments: object, code: int = 0, stdout: bool = False) -> str:
    result = layertap(*arguments)
    assert result.exit_code == code, result.output
    assert MARK not in result.output
    return result.stdout if stdout else result.output


def test_a_list_of_signed_urls_leaves_no_signature_and_resumes_with_those_of_another_day(
    folder: Path, tmp_path: Path, server: type[WebServer]
) -> None:
    out, host = tmp_path / "data" / "out", server.host
    where = write_list(folder, host, DAYS[0])
    run("embed", where, "-o", out, *SMALL, "--compress", "gzip")
    check_no_secret(out)
    with FeatureReader(out) as reader:
        assert not reader.failures
        kept = [f"http://{host}/signed/{n}{k}" for n, k in zip(names(folder), SIGNED.values(), strict=True)]
        assert sorted(reader.paths) == sorted(kept)
        assert reader.ids
        assert {kept[int(number)]: number for number in reader.ids} == dict(zip(reader.paths, reader.ids, strict=True))
    stored = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    server.secret, server.requests = DAYS[1], []
    write_list(folder, host, DAYS[1])
    again = json.loads(run("embed", where, "-o", out, *SMALL, "--json", stdout=True))
    assert (again["found_done"], again["computed"], server.requests) == (12, 0, [])
    assert stored == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_processes_that_share_a_signed_list_leave_no_signature(
    folder: Path, tmp_path: Path, server: type[WebServer], capfd: pytest.CaptureFixture[str]
) -> None:
    write_list(folder, server.host, DAYS[0], f"http://127.0.0.1:9/c.png?token={MARK},12\n")
    url = f"http://{server.host}/signed/list.csv?X-Amz-Signature={DAYS[0]}"
    out = tmp_path / "data" / "out"
    shared = ["--engine", "processes", "--cpus-per-worker", 1, "--shard-rows", 7]
    run("embed", url, "-o", out, *SMALL, *shared)
    check_no_secret(tmp_path / "data", *capfd.readouterr())
    with FeatureReader(out) as reader:
        assert len(reader) == 13
        assert len(reader.failures) == 1
        assert json.loads((out / "dataset.json").read_text())["images"]["root"] == url.partition("?")[0]


@pytest.mark.usefixtures("no_pauses")
def test_rows_that_failed_are_retried_with_the_signatures_of_another_day(
    folder: Path, tmp_path: Path, server: type[WebServer]
) -> None:
    out, host = tmp_path / "data" / "out", server.host
    passwords = f'"http://me:{MARK}p@ss/w@rd@{host}/a.png",12\n"http://me:{MARK}/x@{host}/b.png",13\n'
    dead = f'"http://127.0.0.1:9/c.png?token={MARK}",14\n"nothing://{MARK}@x/d.png?sig={MARK}",15\n'
    where = write_list(folder, host, DAYS[1], passwords + dead)
    printed = run("embed", where, "-o", out, *SMALL, code=1)  # 403 for all
    check_no_secret(out)
    assert "the server answered 403 Forbidden" in printed
    assert "a password in a URL is not accepted" in printed
    write_list(folder, host, DAYS[0], passwords + dead)
    run("embed", where, "-o", out, *SMALL, "--retry-failed")
    check_no_secret(out)
    with FeatureReader(out) as reader:
        failed = {path: reason for _, path, _, reason in reader.failures}
        assert len(failed) == 4
        assert len(reader) == 16
        assert all(reason for reason in failed.values())
        assert not any(MARK in text for text in (*failed, *failed.values()))


def test_images_of_signed_urls_are_found_again(folder: Path, tmp_path: Path, server: type[WebServer]) -> None:
    out, host = tmp_path / "data" / "out", server.host
    where = write_list(folder, host, DAYS[0])
    run("embed", where, "-o", out, *SMALL)
    server.secret = DAYS[1]
    write_list(folder, host, DAYS[1])
    for command in (["show", out], ["show", out, "--json"], ["status", out]):
        run(*command)
    assert "12 rows computed again" in run("verify", out, "--sample", 12, "--images", where)
    shutil.copy(where, moved := where.with_name("moved.csv"))
    run("verify", out, "--sample", 3, "--images", moved)
    run("report", out, "--images", where, "-o", tmp_path / "data" / "report.html", "--map", "pca")
    assert n_thumbnails(tmp_path / "data" / "report.html") >= 12
    asked = f"http://{host}/signed/{names(folder)[5]}?id=1&token={DAYS[1]}"
    searched = json.loads(run("search", out, asked, "--json", "--images", where, "-o", tmp_path / "data" / "found.png"))
    assert searched["query"]["path"] == asked.partition("&")[0]
    assert not searched["no_pictures"]
    run("export", out, "--to", "npy", "-o", tmp_path / "data" / "npy")
    check_no_secret(tmp_path / "data")


def test_rows_that_differ_in_other_parameters_stay_apart(folder: Path, tmp_path: Path, server: type[WebServer]) -> None:
    url = f"http://{server.host}/signed/{names(folder)[0]}"
    lines = [f"{url}?id={i}&token={DAYS[0]}" for i in (2, 1, 3)]
    (tmp_path / "list.csv").write_text("path\n" + "\n".join(lines))
    images = list_images(tmp_path / "list.csv")
    assert images.paths == [f"{url}?id={i}" for i in (1, 2, 3)]
    assert images.source.read(1)[0] == (folder.parent / names(folder)[0]).read_bytes()
    (tmp_path / "list.csv").write_text("path\n" + "\n".join([*lines, lines[1].replace(DAYS[0], DAYS[1])]))
    with pytest.raises(InputError, match=r"\?id=1 is already in .* credentials in URLs are not compared") as raised:
        list_images(tmp_path / "list.csv")
    assert MARK not in str(raised.value)


@pytest.mark.parametrize(
    "place",
    [
        "http://{h}/signed/list.csv?X-Amz-Credential=A/{s}/b&X-Amz-Signature={s}",
        "http://{s}@{h}/signed/relative.csv?version=2&sig={s}",
        "http://{h}/signed/pictures-{{0..1}}.zip?token={s}",
    ],
)
def test_a_root_with_credentials(folder: Path, tmp_path: Path, server: type[WebServer], place: str) -> None:
    web = folder.parent
    rows = "\n".join(f"http://{server.host}/open/{name}" for name in names(folder))
    (web / "list.csv").write_text("path\n" + rows)
    (web / "relative.csv").write_text("path\n" + "\n".join(names(folder)))
    for number in range(2):
        with zipfile.ZipFile(web / f"pictures-{number}.zip", "w") as archive:
            for name in names(folder)[number::2]:
                archive.write(web / name, "same/name.png" if name == names(folder)[number] else name)
    out = tmp_path / "data" / "out"
    roots: list[str] = []
    for day in DAYS:
        server.secret = day
        url = place.format(h=server.host, s=day)
        assert MARK not in name_of(url)
        result = json.loads(run("embed", url, "-o", out, *SMALL, "--json", stdout=True))
        assert result["computed"] == (0 if roots else 12)
        check_no_secret(out)
        roots.append(json.loads((out / "dataset.json").read_text())["images"]["root"])
    assert roots[0] == roots[1]
    assert roots[0].startswith(f"http://{server.host}/")
    assert run("verify", out, "--sample", 2, "--images", url)
    run("show", out)
    # With a signature of yesterday, nothing can be read; the message does not repeat it.
    result = layertap("verify", out, "--sample", 2, "--images", place.format(h=server.host, s=DAYS[0]))
    assert result.exit_code in (1, 2)
    assert MARK not in result.output


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that failed are repeated at once."""
    monkeypatch.setattr("extract.images.sources._WAIT_S", 0)
    monkeypatch.setattr("extract.store.places.objects._WAIT_S", 0)
    monkeypatch.setattr("extract.store.places.objects._GIVE_UP_S", 0)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "{s}" in shape and "host" in shape])
def test_a_place_that_cannot_be_read_is_named_without_its_credentials(shape: str, tmp_path: Path) -> None:
    url = shape.format(s=DAYS[0]).replace("host:8080", "host").replace("host", "127.0.0.1:9")
    for suffix in (".jpg", ".csv", ".tar", ".npy"):
        with pytest.raises(LayertapError) as raised:
            list_images(url.replace(".jpg", suffix, 1))
        assert MARK not in str(raised.value)


HIDDEN = f"http://me:{MARK}@127.0.0.1:9/x/list.csv?token={MARK}"


@pytest.mark.usefixtures("no_pauses")
def test_messages_of_commands_have_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("embed", HIDDEN, *SMALL),
        ("embed", HIDDEN, *SMALL, "--batch-size", 0),
        ("plan", HIDDEN),
        ("show", HIDDEN),
        ("status", HIDDEN),
        ("verify", HIDDEN),
        ("report", HIDDEN),
        ("sync", HIDDEN),
        ("search", f"s3://{MARK}@bucket/x", 0),
        ("inspect", HIDDEN),
        ("embed", "photos", "-o", HIDDEN, *SMALL),
        ("embed", "photos", "-o", f"s3://{MARK}@bucket/x?sig={MARK}", *SMALL),
        ("embed", HIDDEN, *SMALL, "--engine", "processes"),
    ):
        result = layertap(*arguments)
        assert result.exit_code in (1, 2)
        assert MARK not in result.output, arguments
    check_no_secret(tmp_path)
    with pytest.raises(InputError, match="s3://bucket/x: the given URL has credentials"):
        Bucket(f"s3://{MARK}@bucket/x")
    with pytest.raises(InputError, match="from Python") as raised:
        extract_features("photos", out=f"s3://{MARK}@bucket/x?sig={MARK}")
    assert MARK not in str(raised.value)


def test_the_command_to_resume_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.terminal.text_output import command_line

    url = f"https://h/list.csv?id=1&token={MARK}"
    monkeypatch.setattr(sys, "argv", ["/bin/layertap", "embed", url, f"--scratch={url}", f"https://me:{MARK}'/@h/x y"])
    assert command_line() == (
        "layertap embed 'https://h/list.csv?id=1' '--scratch=https://h/list.csv?id=1' 'https://h/x y'"
        "  # add the signature, token or user name of the URL again"
    )
    monkeypatch.setattr(sys, "argv", ["/bin/layertap", "embed", "my photos", "--limit", "3"])
    assert command_line() == "layertap embed 'my photos' --limit 3"
    monkeypatch.setattr(sys, "argv", ["/lib/layertap/__main__.py", "embed", "photos"])
    assert command_line() == "layertap embed photos"


def test_a_plan_stores_no_credentials(folder: Path, tmp_path: Path, server: type[WebServer]) -> None:
    host = server.host
    signed = write_list(folder, host, DAYS[0])
    data = tmp_path / "data"
    for where in (
        signed,
        f"http://{host}/open/list.csv?sig={DAYS[0]}",
        f"http://{DAYS[0]}@{host}/signed/pictures",
        f"http://{host}/signed/pictures?token={DAYS[0]}",
    ):
        assert "which a plan would store" in run("plan", where, "-o", data / "refused", code=2)
        check_no_secret(data)
    rows = [f"http://{host}/open/{name}" for name in names(folder)]
    signed.write_text("path\n" + "\n".join(rows))
    for day in DAYS:
        server.secret = day
        run("plan", f"http://{host}/signed/list.csv?sig={day}", "-o", data / "plan")
        run("embed", data / "plan", "-o", data / "out", *SMALL)
    assert list_images(data / "plan").paths_xxh3 == list_images(signed).paths_xxh3
    check_no_secret(data)


def test_data_sets_of_an_earlier_version_are_read_and_printed_without_credentials(
    folder: Path, tmp_path: Path, server: type[WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = write_list(folder, server.host, DAYS[0])
    url = f"http://{server.host}/signed/list.csv?sig={DAYS[0]}"
    out = tmp_path / "out"
    with monkeypatch.context() as earlier:
        earlier.setattr(csv_lists, "stored_path", lambda path: path)
        earlier.setattr(csv_lists, "without_credentials", lambda text: text)
        run("embed", where, "-o", out, *SMALL)
    content = json.loads((out / "dataset.json").read_text())
    content["images"]["root"] = url  # which no shard has
    (out / "dataset.json").write_text(json.dumps(content))
    with FeatureReader(out) as reader:
        assert any(MARK in path for path in reader.paths)
    run("show", out)
    run("status", out)
    assert MARK not in merge([out], tmp_path / "merged").images["root"]


def test_a_data_set_with_a_parameter_that_is_now_a_credential_is_read_but_not_resumed(
    folder: Path, tmp_path: Path, server: type[WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions stored `sas=...`; the images of its list now have other paths."""
    lines = [f"http://{server.host}/open/{name}?sas={number}" for number, name in enumerate(names(folder))]
    (where := folder.parent / "list.csv").write_text("\n".join(["path", *lines]) + "\n")
    command = ("embed", where, "-o", tmp_path / "out", *SMALL)
    with monkeypatch.context() as earlier:
        earlier.setattr("extract.credentials._CREDENTIALS", {"token"})
        run(*command)
    with FeatureReader(tmp_path / "out") as reader:
        assert reader.paths == sorted(lines)
    assert "names of the images (images.paths_xxh3)" in run(*command, code=2)


def test_labels_for_urls_are_found_with_other_signatures(folder: Path, tmp_path: Path, server: type[WebServer]) -> None:
    where, out = write_list(folder, server.host, DAYS[0]), tmp_path / "out"
    run("embed", where, "-o", out, *SMALL)
    rows = where.read_text().replace(DAYS[0], DAYS[1]).splitlines()[1:]
    labels = [f"{row.rpartition(',')[0]},{['a', 'b'][i % 2]}" for i, row in enumerate(rows)]
    (folder.parent / "labels.csv").write_text("path,label\n" + "\n".join([*labels, f"http://h/x?sig={MARK},a"]))
    server.secret = DAYS[1]
    url = f"http://{server.host}/signed/labels.csv?token={DAYS[1]}"
    run("probe", out, "--labels", url, "--out", tmp_path / "data", "--protocol", "centroid")
    check_no_secret(tmp_path / "data")
    other = labels[0].replace(DAYS[1], DAYS[0]).rpartition(",")[0] + ",b"
    (folder.parent / "labels.csv").write_text("path,label\n" + "\n".join([*labels, other]))
    assert "belong to the same image" in run("probe", out, "--labels", url, "--out", tmp_path / "twice", code=2)


# URLs that only a data set names: they are opened after the user has named them with `--images`


def place(kind: str, folder: Path, host: str) -> str:
    """Return a location of the pictures whose bytes the server has."""
    web = folder.parent
    rows = [f"{host}/{name}" if kind == "local list" else name for name in names(folder)]
    (web / "list.csv").write_text("path\n" + "\n".join(rows))
    if kind == "plan":
        succeeds("plan", f"{host}/list.csv", "-o", web / "plan")
    return {"list": f"{host}/list.csv", "local list": str(web / "list.csv"), "plan": str(web / "plan")}[kind]


def embedded(where: str, out: Path) -> Path:
    succeeds("embed", where, "-o", out, *SMALL)
    return out


@pytest.mark.parametrize(
    "kind", ["list", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("local list", "plan"))]
)
def test_no_request_is_sent_before_the_user_has_named_the_location(
    folder: Path, tmp_path: Path, server: type[WebServer], kind: str
) -> None:
    host = f"http://{server.host}"
    where = place(kind, folder, host)
    out, page, figure = embedded(where, tmp_path / "out"), tmp_path / "report.html", tmp_path / "found.png"
    shutil.copytree(folder, tmp_path / "copy" / folder.name)
    commands = {
        "report": ["report", out, "-o", page, "--map", "pca"],  # without t-SNE, which takes a second
        "search": ["search", out, 3, "-k", 3, "-o", figure],
        "verify": ["verify", out, "--sample", 3],
    }
    for name, command in commands.items():
        server.requests.clear()
        refused = layertap(*command)
        assert server.requests == [], name
        assert refused.exit_code == (2 if name == "verify" else 0), refused.output
        line = next(line for line in refused.output.splitlines() if "would be fetched" in line)
        assert f"from {host}, a location that only the data set names" in line
        assert "add --images" in line
        allowed = succeeds(*command, "--images", where, *(["--json"] if name == "search" else []))
        assert len(server.requests) >= 3, name
        assert "would be fetched" not in allowed.output
        if name == "report":
            assert n_thumbnails(page) >= 12
        if name == "search":
            assert json.loads(allowed.stdout)["no_pictures"] == ""
    if kind == "list":  # a copy that the user names is read instead of the URL
        server.requests.clear()
        page.unlink()
        succeeds(*commands["report"], "--images", tmp_path / "copy")
        assert n_thumbnails(page) >= 12
        assert server.requests == []


def test_images_on_the_local_disk_need_no_option(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "list.csv").write_text("path\n" + "\n".join(names(folder)))
    for number, where in enumerate((as_zip(folder, tmp_path), str(folder.parent / "list.csv"))):
        out, page = embedded(where, tmp_path / f"out-{number}"), tmp_path / f"report-{number}.html"
        succeeds("report", out, "-o", page, "--map", "pca")
        assert n_thumbnails(page) >= 12
        succeeds("verify", out, "--sample", 3)


@pytest.mark.parametrize(
    "root", ["{{{host}/pictures,x}}.zip", "{{a,http:}}//{rest}/pictures.zip", "file://{host}/pictures"]
)
def test_a_location_that_hides_its_url_sends_no_request(
    folder: Path, tmp_path: Path, server: type[WebServer], root: str
) -> None:
    host = f"http://{server.host}"
    shutil.make_archive(str(folder.parent / "pictures"), "zip", folder)
    hidden = root.format(host=host, rest=host.partition("//")[2])
    with pytest.raises(InputError):
        listed_again(hidden, ["ant/00.png"])
    if hidden.startswith("{"):  # nor does it work when the user gives it
        with pytest.raises(InputError, match="write the protocol before the braces"):
            list_images(hidden)
    assert server.requests == []


def test_the_message_names_three_servers_and_the_number_of_the_others() -> None:
    urls = [f"https://me@h{number}.example:8080/a{number}.jpg?token=1" for number in (1, 1, 2, 3, 4, 5)]
    expected = r"from https://h1\.example:8080, https://h2\.example:8080, https://h3\.example:8080 and 2 others, a"
    with pytest.raises(InputError, match=expected):
        listed_again("/nowhere/list.csv", urls)
