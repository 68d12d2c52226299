"""Batches of worker processes: the pictures of `load_batches` are those of each file, whoever holds them meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from extract.backbones.preprocessing import Preprocessing
from extract.images import Batch, Decoding, list_images, load_batches
from extract.images.loading import _BATCHES_AHEAD, _BATCHES_IN_USE
from extract.row_status import Status
from tests.conftest import make_picture

PREPROCESSING = Preprocessing(32, (24, 20), "bilinear", (0.5,) * 3, (0.5,) * 3)
BATCH = 6
DAMAGED = {3, 7, 8, *range(12, 18), 35}  # one in a batch, two, all of a batch, the last of a batch
COUNT = 5 * BATCH * (_BATCHES_AHEAD * 2 + _BATCHES_IN_USE) + 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(COUNT):
        path = folder / f"{number:03}.png"
        make_picture(number, 40, 36).save(path)
        if number in DAMAGED:
            path.write_bytes(path.read_bytes()[:60])
    return folder


def decoding(workers: int, batch_size: int = BATCH) -> Decoding:
    return Decoding.for_preprocessing(PREPROCESSING, 10**6, workers, batch_size)


def expected(folder: Path, rows: list[int]) -> Tensor:
    pictures = [Image.open(folder / f"{row:03}.png").convert("RGB") for row in rows if row not in DAMAGED]
    return torch.stack([PREPROCESSING.cpu_transform(picture) for picture in pictures])


def check(batch: Batch, folder: Path) -> None:
    assert (batch.status == [Status.DECODE_ERROR if row in DAMAGED else Status.OK for row in batch.rows]).all()
    good = [row for row in batch.rows.tolist() if row not in DAMAGED]
    assert len(batch.images) == len(good)
    if good:
        assert torch.equal(batch.images, expected(folder, good))


@pytest.mark.parametrize("workers", [0, 2])
def test_all_batches_can_be_held_at_once(folder: Path, workers: int) -> None:
    rows = [list(range(start, min(start + BATCH, COUNT))) for start in range(0, COUNT, BATCH)]
    with contextlib.closing(load_batches(list_images(folder), rows, decoding(workers))) as loaded:
        batches = list(loaded)
    assert [batch.rows.tolist() for batch in batches] == rows
    for batch in batches:
        check(batch, folder)


def test_memory_is_used_again_when_no_tensor_or_array_refers_to_it(folder: Path) -> None:
    rows = [list(range(start, start + BATCH)) for start in range(0, COUNT - BATCH, BATCH)]
    places: list[int] = []
    held: list[tuple[Batch, np.ndarray, Tensor]] = []
    with contextlib.closing(load_batches(list_images(folder), rows, decoding(2))) as loaded:
        for number, batch in enumerate(loaded):
            check(batch, folder)
            places.append(batch.images.data_ptr())
            if number % 5 == 0 and len(batch.images):
                part, last = batch.images.numpy()[1:], batch.images[-1]
                held.append((batch._replace(images=torch.empty(0)), part, last))
            del batch
    for batch, part, last in held:
        wanted = expected(folder, batch.rows.tolist())
        assert np.array_equal(part, wanted[1:].numpy())
        assert torch.equal(last, wanted[-1])
    assert len(set(places)) < len(places) / 2


def test_batches_larger_than_announced_are_read_too(folder: Path) -> None:
    rows = [list(range(20, 34)), [1, 2], list(range(36, 60))]
    with contextlib.closing(load_batches(list_images(folder), rows, decoding(2))) as loaded:
        for batch, wanted in zip(loaded, rows, strict=True):
            assert batch.rows.tolist() == wanted
            check(batch, folder)


def test_a_batch_size_for_which_no_machine_has_the_memory_is_no_fault_of_few_images(folder: Path) -> None:
    rows = [list(range(20, 34)), [1, 2]]
    with contextlib.closing(load_batches(list_images(folder), rows, decoding(1, 10**12))) as loaded:
        for batch in loaded:
            check(batch, folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_batches_are_the_same_without_memory_that_forked_workers_share(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    multiprocessing.set_start_method(method, force=True)
    try:
        rows = [list(range(9)), list(range(9, 12))]
        with contextlib.closing(load_batches(list_images(folder), rows, decoding(1, 9))) as loaded:
            for batch in loaded:
                check(batch, folder)
    finally:
        multiprocessing.set_start_method("fork", force=True)
