"""Files whose names promise another content: an error of one line, whatever they hold."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from extract.errors import InputError, LayertapError
from extract.images import list_images
from tests.conftest import make_picture
from tests.pipelines.test_cli import fails

PICTURES = np.zeros((2, 8, 8, 3), np.uint8)


class Code:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("code-has-run"),)


def _written(write: Any) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def _hdf5(buffer: io.BytesIO) -> None:
    with h5py.File(buffer, "w") as file:
        file["a"] = PICTURES


def _tar(buffer: io.BytesIO, mode: Any = "w") -> None:
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        member = tarfile.TarInfo("a.png")
        member.size = len(PNG)
        tar.addfile(member, io.BytesIO(PNG))


def _zip(buffer: io.BytesIO, name: str = "a.png") -> None:
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, PNG)


PNG = _written(lambda buffer: make_picture(0).save(buffer, "png"))
STATE = {"weight": torch.ones(2, 2)}
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(5000),
    "random": np.random.default_rng(0).bytes(5000),
    "npy": _written(lambda buffer: np.save(buffer, PICTURES)),
    "npy of one number": _written(lambda buffer: np.save(buffer, np.uint8(3))),
    "npy of objects": _written(lambda buffer: np.save(buffer, np.array([{}], object), allow_pickle=True)),
    "npy of text": _written(lambda buffer: np.save(buffer, np.array(["a", "b"]))),
    "npz": _written(lambda buffer: np.savez(buffer, a=PICTURES)),
    "hdf5": _written(_hdf5),
    "png": PNG,
    "tar": _written(_tar),
    "tar.gz": _written(lambda buffer: _tar(buffer, "w:gz")),
    "zip": _written(_zip),
    "xlsx": _written(lambda buffer: _zip(buffer, "xl/workbook.xml")),
    "gz": gzip.compress(b"path\na.png\n"),
    "csv": b"path\na.png\n",
    "json": b'{"path": "a.png"}',
    "parquet": _written(lambda buffer: pq.write_table(pa.table({"path": ["a.png"]}), buffer)),
    "pickle": pickle.dumps({"path": "a.png"}),
    "code": pickle.dumps(Code()),
    "code in a file of torch": _written(lambda buffer: torch.save(Code(), buffer)),
    "weights of torch": _written(lambda buffer: torch.save(STATE, buffer)),
    "old weights of torch": _written(lambda buffer: torch.save(STATE, buffer, _use_new_zipfile_serialization=False)),
    "whole model": _written(lambda buffer: torch.save(torch.nn.Linear(2, 2), buffer)),
    "safetensors": save(STATE),
    "web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n",
}
RIGHT = {
    ".npy": {"npy"}, ".h5": {"hdf5"}, ".h5:a": {"hdf5"}, ".csv": {"csv"}, ".tsv": {"csv"}, ".parquet": {"parquet"},
    ".tar": {"tar"}, ".zip": {"zip"}, ".safetensors": {"safetensors"},
    **{suffix: {"weights of torch", "old weights of torch"} for suffix in (".pth", ".bin", ".ckpt")},
}  # fmt: skip
MESSAGES = {
    **dict.fromkeys(
        [("npz", ".npy"), ("csv", ".npy"), ("empty", ".npy")],
        "; an .npy file has one array, as np.save writes it",
    ),
    ("xlsx", ".csv"): "line 1 is not text; expected a table as text in UTF-8 (save a spreadsheet as CSV)",
    ("npy", ".h5"): "cannot be opened as HDF5",
    ("csv", ".parquet"): "is not a Parquet file",
    ("tar.gz", ".tar"): "is damaged, or not a tar archive",
    ("code", ".pth"): "is damaged, or holds objects other than tensors, and loading them could run code",
    ("whole model", ".pth"): "holds objects other than tensors",
    ("tar", ".pth"): "holds objects other than tensors",
    ("safetensors", ".pth"): "is a safetensors file; rename it to .safetensors",
    ("code", ".safetensors"): "is not a safetensors file; if it was written by torch.save, rename it to .pth",
    ("weights of torch", ".safetensors"): "is not a safetensors file; if it was written by torch.save, rename it",
    ("web page", ".pth"): "is a web page, not weights; download it again",
    ("git lfs", ".safetensors"): "is a pointer of Git LFS, not the weights; run: git lfs pull",
    ("empty", ".bin"): "is empty",
}


def written(tmp_path: Path, content: str, suffix: str) -> str:
    path = tmp_path / f"x{suffix.partition(':')[0]}"
    path.write_bytes(CONTENTS[content])
    return f"{path}{suffix[suffix.index(':') :]}" if ":" in suffix else str(path)


def check(error: Exception, content: str, suffix: str, tmp_path: Path) -> None:
    text = str(error)
    assert len(text.splitlines()) == 1
    assert f"x{suffix.partition(':')[0]}" in text
    assert "allow_pickle" not in text
    assert "weights_only" not in text
    assert MESSAGES.get((content, suffix), "") in text


def built(where: str) -> list[Any]:
    """Use the file as weights."""
    from extract.backbones.weights import LoadRequest, build_with_weights

    request = LoadRequest("a linear layer", "", where, 0, False, {})
    model = build_with_weights(request, lambda: torch.nn.Linear(2, 2, bias=False))[0]
    assert bool((model.weight == 1).all())
    return [model]


@pytest.mark.parametrize("content", CONTENTS)
def test_images_and_weights_under_a_wrong_name_are_refused_in_one_line(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for suffix, right in RIGHT.items():
        is_weights = suffix in (".safetensors", ".pth", ".bin", ".ckpt")
        where, read = written(tmp_path, content, suffix), built if is_weights else list_images
        if content in right:
            assert len(read(where)) in (1, 2)
            continue
        with pytest.raises(InputError if is_weights else LayertapError) as raised:
            read(where)
        check(raised.value, content, suffix, tmp_path)
    assert not Path("code-has-run").exists()


@pytest.mark.parametrize("content", ["empty", "random", "npz", "json", "folder"])
def test_a_config_file_of_another_content_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if content == "folder":
        path.mkdir()
    else:
        path.write_bytes(CONTENTS[content])
    error = fails("embed", "--config", path)
    assert error.count("\n") == 1
    assert "config.yaml" in error


def test_a_name_with_a_null_character_is_one_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder or file"):
        list_images(tmp_path / "a\0b")


def test_a_name_that_is_too_long_is_an_error_of_one_line(tmp_path: Path) -> None:
    for arguments in (["embed", "x" * 300], ["plan", "x" * 300, "-o", str(tmp_path / "plan")]):
        assert "File name too long" in fails(*arguments, code=1)
