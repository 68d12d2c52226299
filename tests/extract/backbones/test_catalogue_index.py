"""The index of backbones says what the libraries say, without importing them, and a damaged one is not an error."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
from torchvision import models

from extract.backbones import catalogue, catalogue_index
from extract.backbones.catalogue import descriptions, list_sources, match_specs
from extract.backbones.sources import SOURCES, BackboneSource
from tests.pipelines.test_cli import layertap

LISTS: list[tuple[str, str, Callable[[], list[str]]]] = [
    ("torchvision", "*", lambda: list(models.list_models(module=models))),
    ("timm", "*", timm.list_models),
    ("timm", "*.*", timm.list_pretrained),
    ("bundled", "*", lambda: ["efficientnet_lite0"]),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layertap" / "catalogue"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The specs and patterns for which a library was asked, in order."""
    calls: list[str] = []

    def noting(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: str) -> object:
            calls.append(arguments[0])
            return function(*arguments)

        return call

    for name, source in list(SOURCES.items()):
        changed = {"names": noting(source.names), "describe": source.describe and noting(source.describe)}
        monkeypatch.setitem(SOURCES, name, BackboneSource(**{**vars(source), **changed}))
    return calls


@pytest.mark.parametrize(("source", "pattern", "of_library"), LISTS)
def test_the_list_is_that_of_the_library_before_and_after_it_is_kept(
    source: str, pattern: str, of_library: Callable[[], list[str]], asked: list[str]
) -> None:
    assert catalogue_index.kept_names(source, pattern) is None
    for _ in range(2):
        assert catalogue_index.backbone_names(source, pattern) == of_library()
    assert asked == [pattern]
    assert catalogue_index.kept_names(source, pattern) == of_library()


def test_kept_descriptions_equal_those_of_the_library(asked: list[str]) -> None:
    specs = [*match_specs("timm/test_vit*"), "torchvision/mobilenet_v2", "bundled/efficientnet_lite0"]
    asked.clear()
    of_library = [catalogue.describe(spec) for spec in specs]
    assert list(descriptions(specs)) == of_library
    asked.clear()
    assert list(descriptions(specs)) == of_library
    assert asked == []


def test_descriptions_made_before_an_end_are_kept(asked: list[str]) -> None:
    specs = match_specs("timm/test_vit*")
    asked.clear()
    made = descriptions(specs)
    next(made)
    made.close()
    assert asked == specs[:1]
    list(descriptions(specs))
    assert asked == specs


def signed(body: bytes) -> bytes:
    """A file with the right digest, as another program of this user could write it."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-9],
        lambda content: b"",
        lambda content: b"\xff" + content,
        lambda content: signed(b"[1,2"),
        lambda content: signed(b"[]"),
        lambda content: signed(b"[" * 100_000),
        lambda content: signed(b'{"names": {"names": [1, 2]}, "entries": []}'),
        lambda content: signed(b'{"names": {}, "entries": [{"spec": "x", "foo": 1}]}'),
    ],
)
def test_a_damaged_index_is_made_again(damage: Callable[[bytes], bytes], cache: Path) -> None:
    names = catalogue_index.backbone_names("torchvision", "*")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert catalogue_index.kept_names("torchvision") is None
    assert catalogue_index.backbone_names("torchvision", "*") == names
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_not_an_error(cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_bytes(b"a file in place of the folder")
    assert catalogue_index.backbone_names("torchvision", "*") == list(models.list_models(module=models))
    assert [entry.spec for entry in descriptions(["timm/test_vit"])] == ["timm/test_vit"]
    assert cache.parent.is_file()


def test_a_package_that_changes_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "madeup"
    (package / "models").mkdir(parents=True)
    files = {"__init__.py": "", "version.py": "V = '1.0'", "models/net.py": "a = 1"}
    for name, text in files.items():
        (package / name).write_text(text)
        os.utime(package / name, ns=(1, 1))  # as in builds whose files have one time
    monkeypatch.syspath_prepend(tmp_path / "site")
    known = ["a"]
    source = BackboneSource(
        lambda request: None, runs_code=False, names=lambda pattern: list(known), defined_in=("madeup",)
    )  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(SOURCES, "madeup", source)

    def listed() -> list[str]:
        return catalogue_index.backbone_names("madeup", "*")

    assert listed() == ["a"]
    known.append("b")
    assert listed() == ["a"]  # nothing in the package has changed, so it is not asked
    (package / "version.py").write_text("V = '1.1'")
    os.utime(package / "version.py", ns=(1, 1))
    assert listed() == ["a", "b"]
    known.append("c")
    os.utime(package / "models/net.py", ns=(2, 2))
    assert listed() == ["a", "b", "c"]
    known.append("d")
    (package / "models/other.py").touch()
    assert listed() == ["a", "b", "c", "d"]
    for file in package.rglob("*.py"):
        file.unlink()
    known.append("e")
    assert listed() == ["a", "b", "c", "d", "e"]  # without source files, a change cannot be seen: nothing is kept
    known.clear()
    assert listed() == []


def test_a_missing_library_is_named_though_its_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_sources()
    monkeypatch.setitem(sys.modules, "open_clip", None)
    after = list_sources()
    assert after["open_clip"].names == []
    assert "pip install 'open_clip_torch" in after["open_clip"].note
    assert {**after, "open_clip": None} == {**before, "open_clip": None}


def test_kept_lists_and_descriptions_are_printed_without_torch() -> None:
    lines = [["backbones"], ["backbones", "timm/test_vi[tz]"], ["backbones", "torchvision/resnet1?"]]
    printed = "".join(layertap(*line).stdout for line in lines)
    assert "torchvision/resnet18 " in printed
    code = (
        "import sys\nfrom pipelines.cli import main\n"
        f"for words in {lines}: main(words, standalone_mode=False)\n"
        "print({'torch', 'timm', 'torchvision', 'open_clip', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == printed
    assert process.stderr.splitlines()[-1] == "set()"
