"""URLs that only a data set names are opened after the user has named them with `--images`, and not before."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from extract.errors import InputError
from extract.images import list_images, listed_again
from tests.extract.images.test_sources import as_zip
from tests.pipelines.test_cli import SMALL, layertap
from tests.pipelines.test_report import n_thumbnails


class Counting(http.server.SimpleHTTPRequestHandler):
    """Sends the files of a folder, and counts all requests."""

    requests: list[str]
    folder: Path

    def __init__(self, *args: object):
        super().__init__(*args, directory=self.folder)  # type: ignore[arg-type]

    def send_head(self):  # type: ignore[no-untyped-def]
        self.requests.append(self.path)
        return super().send_head()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    class Here(Counting):
        pass

    Here.folder, Here.requests = folder.parent, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", Here.requests
        running.shutdown()


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder.parent).as_posix() for path in folder.rglob("*.*"))


def place(kind: str, folder: Path, host: str) -> str:
    """Return a location of the pictures whose bytes the server has."""
    web = folder.parent
    rows = [f"{host}/{name}" if kind == "local list" else name for name in names(folder)]
    (web / "list.csv").write_text("path\n" + "\n".join(rows))
    if kind == "plan":
        assert layertap("plan", f"{host}/list.csv", "-o", web / "plan").exit_code == 0
    return {
        "list": f"{host}/list.csv",
        "local list": str(web / "list.csv"),
        "plan": str(web / "plan"),
    }[kind]


def embedded(where: str, out: Path) -> Path:
    result = layertap("embed", where, "-o", out, *SMALL)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize(
    "kind", ["list", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("local list", "plan"))]
)
def test_no_request_is_sent_before_the_user_has_named_the_location(
    folder: Path, tmp_path: Path, server: tuple[str, list[str]], kind: str
) -> None:
    host, requests = server
    where = place(kind, folder, host)
    out, page, figure = embedded(where, tmp_path / "out"), tmp_path / "report.html", tmp_path / "found.png"
    commands = {
        "report": ["report", out, "-o", page, "--map", "pca"],  # without t-SNE, which takes a second
        "search": ["search", out, 3, "-o", figure],
        "search in JSON": ["search", out, 3, "-o", figure, "--json"],
        "verify": ["verify", out, "--sample", 3],
    }
    for name, command in commands.items():
        requests.clear()
        refused = layertap(*command)
        assert requests == [], name
        assert refused.exit_code == (2 if name == "verify" else 0), refused.output
        line = next(line for line in refused.output.splitlines() if "would be fetched" in line)
        assert f"from {host}, a location that only the data set names" in line
        assert "add --images" in line
        allowed = layertap(*command, "--images", where)
        assert allowed.exit_code == 0, allowed.output
        assert len(requests) >= 3, name
        assert "would be fetched" not in allowed.output
        if name == "report":
            assert n_thumbnails(page) >= 12
        if name == "search in JSON":
            assert json.loads(allowed.stdout)["no_pictures"] == ""


def test_images_on_the_local_disk_need_no_option(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "list.csv").write_text("path\n" + "\n".join(names(folder)))
    for number, where in enumerate((str(folder), as_zip(folder, tmp_path), str(folder.parent / "list.csv"))):
        out, page = embedded(where, tmp_path / f"out-{number}"), tmp_path / f"report-{number}.html"
        assert layertap("report", out, "-o", page, "--map", "pca").exit_code == 0
        assert n_thumbnails(page) >= 12
        assert layertap("verify", out, "--sample", 3).exit_code == 0


def test_a_moved_folder_that_the_user_names_is_read_instead_of_the_url(
    folder: Path, tmp_path: Path, server: tuple[str, list[str]]
) -> None:
    host, requests = server
    out, page = embedded(place("list", folder, host), tmp_path / "out"), tmp_path / "report.html"
    shutil.copytree(folder, tmp_path / "copy" / folder.name)
    requests.clear()
    assert layertap("report", out, "-o", page, "--images", tmp_path / "copy", "--map", "pca").exit_code == 0
    assert n_thumbnails(page) >= 12
    assert requests == []


@pytest.mark.parametrize(
    "root", ["{{{host}/pictures,x}}.zip", "{{a,http:}}//{rest}/pictures.zip", "file://{host}/pictures"]
)
def test_a_location_that_hides_its_url_sends_no_request(
    folder: Path, tmp_path: Path, server: tuple[str, list[str]], root: str
) -> None:
    host, requests = server
    shutil.make_archive(str(folder.parent / "pictures"), "zip", folder)
    hidden = root.format(host=host, rest=host.partition("//")[2])
    with pytest.raises(InputError):
        listed_again(hidden, ["ant/00.png"])
    if hidden.startswith("{"):  # nor does it work when the user gives it
        with pytest.raises(InputError, match="write the protocol before the braces"):
            list_images(hidden)
    assert requests == []


def test_the_message_names_three_servers_and_the_number_of_the_others() -> None:
    urls = [f"https://me@h{number}.example:8080/a{number}.jpg?token=1" for number in (1, 1, 2, 3, 4, 5)]
    expected = r"from https://h1\.example:8080, https://h2\.example:8080, https://h3\.example:8080 and 2 others, a"
    with pytest.raises(InputError, match=expected):
        listed_again("/nowhere/list.csv", urls)
