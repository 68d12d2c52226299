"""What a file holds, as a flat mapping from names of parts to text that can be compared.

Large values are kept in a `Blobs` folder under their hash, so that two recordings can be compared by value.
Times, rates, process ids and paths of this machine are replaced by words in capitals.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

__all__ = ["Blobs", "Normaliser", "describe"]

SHORT = 200  # characters; longer texts and larger arrays become blobs
PROGRAM_CHARACTERS = 500_000  # a script that is longer is a library

# Values of JSON keys that are different in each run.
VARYING_KEYS = re.compile(
    r"(.*_)?(seconds|seconds_left|images_per_s|ended|started|prepared_in_s|pid|host|hostname|created|written|now|next|sha256_of_file"
    r"|bytes_per_s|start_s|time|uptime|load)$"
)
# Sizes and hashes of whole files, which contain times.
FILE_KEYS = {"size", "sha256", "ratio"}
STAGES = {"images", "forward", "write"}

# Texts that are different in each run. The order matters.
VARYING_TEXTS: list[tuple[str, str]] = [
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?([+-]\d\d:\d\d|Z)?", "TIME"),
    (r"\b\d{4}-\d\d-\d\d\b", "DATE"),
    (r"\b\d\d:\d\d(:\d\d)?\b", "CLOCK"),
    (r"[\d,.]+ (images|rows|features)/s", r"RATE \1/s"),
    (r"[\d,.]+ (images|rows|names|files) a second", r"RATE \1 a second"),
    (r"time went to .*", "time went to STAGES"),
    (r"bound by \w+: .*", "bound by STAGE"),
    (r"\b\d[\d,]*(\.\d+)? (s|ms|seconds|minutes)\b", r"SECONDS"),
    (r"\b(pid|process) \d+", r"\1 PID"),
    (r"layertap-[a-z]+-\w{8}\b", "layertap-TEMPORARY"),
    (r"\btmp\w{8}\b", "TEMPORARY"),
    (r'("(?:seconds|images|forward|write|copy)":\s*)\d+\.\d+(e-\d+)?', r"\1SECONDS"),
]


class Normaliser:
    """Replaces what differs between two runs of the same program.

    Args:
        paths: path -> the word that stands for it.
    """

    def __init__(self, paths: dict[str, str]):
        self._paths = sorted(paths.items(), key=lambda item: -len(item[0]))
        self._patterns = [(re.compile(pattern), word) for pattern, word in VARYING_TEXTS]

    def paths(self, text: str) -> str:
        """The text with words for paths."""
        for path, word in self._paths:
            text = text.replace(path, word)
        return text

    def text(self, text: str) -> str:
        """The text with words for paths, times and rates."""
        text = self.paths(text)
        for pattern, word in self._patterns:
            text = pattern.sub(word, text)
        return text

    def json(self, value: Any, key: str = "") -> Any:
        """The value with words for what varies; keys keep their order."""
        if key and VARYING_KEYS.fullmatch(key) and not isinstance(value, dict | list):
            return key.upper()
        if isinstance(value, dict):
            if value and set(value) <= STAGES:
                return dict.fromkeys(sorted(value), "SECONDS")
            return {self.paths(name): self.json(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.json(each) for each in value]
        return self.text(value) if isinstance(value, str) else value


class Blobs:
    """Arrays and texts in a folder, under their hash."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put_array(self, array: np.ndarray[Any, Any]) -> str:
        """Keep an array; returns its reference."""
        buffer = io.BytesIO()
        np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
        return self._put(buffer.getvalue(), "npy")

    def put_text(self, text: str) -> str:
        """Keep a text; returns its reference."""
        return self._put(text.encode("utf-8", "surrogateescape"), "txt")

    def _put(self, data: bytes, suffix: str) -> str:
        name = f"{hashlib.sha256(data).hexdigest()[:24]}.{suffix}"
        path = self._folder / name
        if not path.exists():
            path.write_bytes(data)
        return f"blob {name}"

    def get(self, reference: str) -> np.ndarray[Any, Any] | str | None:
        """What was kept; None if the text refers to nothing."""
        found = re.search(r"blob (\w+\.(npy|txt))$", reference)
        if not found or not (self._folder / found[1]).exists():
            return None
        path = self._folder / found[1]
        return np.load(path) if found[2] == "npy" else path.read_text(encoding="utf-8", errors="surrogateescape")


def describe(path: Path, blobs: Blobs, normal: Normaliser, receipts_are_true: bool = True) -> dict[str, str]:
    """Part -> text, of one file.

    Args:
        path: the file.
        blobs: where large values are kept.
        normal: replaces what varies.
        receipts_are_true: also tell whether size and sha256 of a receipt are those of the file beside it.
    """
    kind = next((one for suffixes, one in _KINDS if path.name.endswith(suffixes)), _plain)
    try:
        parts = kind(path, blobs, normal)
    except Exception as error:
        parts = {"unreadable": normal.text(f"{type(error).__name__}: {error}"), **_plain(path, blobs, normal)}
    shard = path.with_suffix(".h5")
    if receipts_are_true and path.suffix == ".json" and shard.exists() and "shards" in path.parts:
        data, receipt = shard.read_bytes(), json.loads(path.read_bytes())
        true = (receipt["size"], receipt["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        parts["is of the file beside it"] = str(true)
    return parts


def _value(value: Any, blobs: Blobs, normal: Normaliser) -> str:
    """The text of a value; long ones are kept as blobs."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSUT":
        value = "\n".join(
            each.decode("utf-8", "surrogateescape") if isinstance(each, bytes) else str(each) for each in value.ravel()
        )
    if isinstance(value, np.ndarray) and value.dtype.kind == "V":
        value = str(value.tolist())
    if isinstance(value, np.ndarray) and value.size > 16:
        return f"{value.dtype} {value.shape} {blobs.put_array(value)}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {np.asarray(value).tolist()}"
    text = _text(value, normal) if isinstance(value, str) else repr(value)
    return text if len(text) <= SHORT else blobs.put_text(text)


def _text(text: str, normal: Normaliser) -> str:
    """A text with what varies replaced; one that is JSON is laid out over lines."""
    if text[:1] in "{[":
        try:
            return json.dumps(normal.json(json.loads(text)), indent=1, ensure_ascii=False)
        except ValueError:
            pass
    return normal.text(text)


def _h5(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    parts: dict[str, str] = {}
    with h5py.File(path, "r") as file:
        if file.userblock_size:
            head = path.read_bytes()[: file.userblock_size].rstrip(b"\0").decode("utf-8", "replace")
            parts["user block"] = re.sub(r"\d+|[0-9a-f]{32}", "N", re.sub(r'"[0-9a-f]{32}"', '"HASH"', head))

        def visit(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset):
                layout = f"{node.dtype} {node.shape} chunks={node.chunks} maxshape={node.maxshape}"
                packed = (
                    f" {node.compression} {node.compression_opts} shuffle={node.shuffle}" if node.compression else ""
                )
                parts[f"/{name}"] = layout + packed
                parts[f"/{name} values"] = _value(node[()], blobs, normal)
            else:
                parts[f"/{name}"] = "group"
            for key in sorted(node.attrs):
                parts[f"/{name} @{key}"] = _value(node.attrs[key], blobs, normal)

        visit("", file)
        file.visititems(visit)
    return parts


def _json(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    content = normal.json(json.loads(path.read_text(encoding="utf-8")))
    if isinstance(content, dict):
        for key in FILE_KEYS & content.keys() if "shards" in path.parts else ():
            content[key] = key.upper()
        return {str(key): _value(json.dumps(value, indent=1), blobs, normal) for key, value in content.items()}
    return {"content": _value(json.dumps(content, indent=1), blobs, normal)}


def _json_lines(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {
        f"line {i}": _value(json.dumps(normal.json(json.loads(line))), blobs, normal) for i, line in enumerate(lines)
    }


def _csv(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    rows = list(csv.reader(path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()))
    return {"header": str(rows[:1]), "rows": _value("\n".join(",".join(row) for row in rows[1:]), blobs, normal)}


def _npy(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    return {"values": _value(np.load(path), blobs, normal)}


def _parquet(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    from pyarrow import parquet

    table = parquet.read_table(path)
    parts = {"schema": _value(str(table.schema), blobs, normal)}
    for name in table.column_names:
        parts[f"column {name}"] = _value(json.dumps(table[name].to_pylist(), default=str), blobs, normal)
    return parts


def _safetensors(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        parts = {f"metadata {name}": _value(value, blobs, normal) for name, value in (file.metadata() or {}).items()}
        return parts | {name: _value(file.get_tensor(name), blobs, normal) for name in sorted(file.keys())}


def _picture(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    from PIL import Image

    with Image.open(path) as picture:
        return {"pixels": _value(np.asarray(picture), blobs, normal), "mode": picture.mode, "size": str(picture.size)}


def _html(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    def shortened(found: re.Match[str]) -> str:
        script = found[0]
        is_program = len(script) > PROGRAM_CHARACTERS
        return f"SCRIPT {hashlib.sha256(script.encode()).hexdigest()}" if is_program else script

    text = re.sub(r"<script.*?</script>", shortened, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {"text": _value(normal.text(re.sub(r"(>|,|\\n)", r"\1\n", text)), blobs, normal)}


def _sqlite(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:  # to open a database writes files beside it
        for one in path.parent.glob(f"{path.name}*"):
            shutil.copy(one, folder)
        with contextlib.closing(sqlite3.connect(Path(folder) / path.name)) as database:
            parts = {}
            for name, definition in sorted(database.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL")):
                parts[f"{name} definition"] = _value(definition, blobs, normal)
                if definition.startswith("CREATE TABLE"):
                    rows = database.execute(f"SELECT * FROM {name}").fetchall()
                    text = "\n".join(sorted(str([_masked(each) for each in row]) for row in rows))
                    parts[f"{name} rows"] = _value(normal.text(text), blobs, normal)
            return parts


def _masked(value: Any) -> Any:
    """The value, with a word for times in nanoseconds."""
    return "NS" if isinstance(value, int) and value > 10**15 else value


def _lock(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    return {"is empty": str(not path.stat().st_size)}


def _svg(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    return {"text": _value(normal.text(re.sub(r"\b[a-z]\w*[0-9a-f]{10}\b", "ID", text)), blobs, normal)}


def _plain(path: Path, blobs: Blobs, normal: Normaliser) -> dict[str, str]:
    data = path.read_bytes()
    try:
        return {"text": _value(normal.text(data.decode()), blobs, normal)}
    except UnicodeDecodeError:
        return {"bytes": f"{len(data)} {hashlib.sha256(data).hexdigest()}"}


_KINDS: Iterable[tuple[tuple[str, ...], Callable[[Path, Blobs, Normaliser], dict[str, str]]]] = (
    ((".h5", ".h5.part", ".h5.damaged", ".mat"), _h5),
    ((".jsonl",), _json_lines),
    ((".json", ".json.damaged"), _json),
    ((".csv",), _csv),
    ((".npy",), _npy),
    ((".parquet",), _parquet),
    ((".safetensors",), _safetensors),
    ((".png", ".jpg"), _picture),
    ((".html",), _html),
    ((".sqlite",), _sqlite),
    ((".svg",), _svg),
    ((".lock",), _lock),
)
