"""URLs that only a data set names are opened after the user has named them with `--images`, and not before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from extract.errors import InputError
from extract.images import list_images, listed_again
from tests.extract.images.test_sources import as_zip
from tests.pipelines.test_cli import SMALL, layertap
from tests.pipelines.test_report import n_thumbnails
from tests.pipelines.web_server import WebServer, names, serving


@pytest.fixture
def server(folder: Path) -> Iterator[type[WebServer]]:
    with serving(folder.parent) as running:
        yield running


def place(kind: str, folder: Path, host: str) -> str:
    """Return a location of the pictures whose bytes the server has."""
    web = folder.parent
    rows = [f"{host}/{name}" if kind == "local list" else name for name in names(folder)]
    (web / "list.csv").write_text("path\n" + "\n".join(rows))
    if kind == "plan":
        assert layertap("plan", f"{host}/list.csv", "-o", web / "plan").exit_code == 0
    return {"list": f"{host}/list.csv", "local list": str(web / "list.csv"), "plan": str(web / "plan")}[kind]


def embedded(where: str, out: Path) -> Path:
    result = layertap("embed", where, "-o", out, *SMALL)
    assert result.exit_code == 0, result.output
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
        allowed = layertap(*command, "--images", where, *(["--json"] if name == "search" else []))
        assert allowed.exit_code == 0, allowed.output
        assert len(server.requests) >= 3, name
        assert "would be fetched" not in allowed.output
        if name == "report":
            assert n_thumbnails(page) >= 12
        if name == "search":
            assert json.loads(allowed.stdout)["no_pictures"] == ""
    if kind == "list":  # a copy that the user names is read instead of the URL
        server.requests.clear()
        page.unlink()
        assert layertap(*commands["report"], "--images", tmp_path / "copy").exit_code == 0
        assert n_thumbnails(page) >= 12
        assert server.requests == []


def test_images_on_the_local_disk_need_no_option(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "list.csv").write_text("path\n" + "\n".join(names(folder)))
    for number, where in enumerate((as_zip(folder, tmp_path), str(folder.parent / "list.csv"))):
        out, page = embedded(where, tmp_path / f"out-{number}"), tmp_path / f"report-{number}.html"
        assert layertap("report", out, "-o", page, "--map", "pca").exit_code == 0
        assert n_thumbnails(page) >= 12
        assert layertap("verify", out, "--sample", 3).exit_code == 0


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
