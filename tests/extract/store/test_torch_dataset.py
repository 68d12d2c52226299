"""Batches to train from: whole, wherever the rows lie, resumed, shared by processes, and with targets of one's own.

`test_reader.py` has the samples that a `DataLoader` joins.
"""

from __future__ import annotations

import warnings
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from extract import FeatureReader, InputError, LayertapError, UnknownNameError
from extract.store import torch_dataset
from tests.extract.store.rows import FAILED, ROWS, VALUES

GOOD = np.delete(np.arange(ROWS), FAILED)
TARGETS = np.arange(2 * ROWS).reshape(ROWS, 2)
PLACES = ("disk", "memory")


def rows_of(batches: Any) -> list[list[int]]:
    """Rows of the reader in each batch, after a look at its features; its targets are `TARGETS`."""
    found = []
    for x, y in batches:
        rows = y[:, 0].numpy() // 2
        assert np.array_equal(y, TARGETS[rows])
        for layer, values in x.items():
            assert np.array_equal(values, VALUES[layer][rows])
        assert list(x) == ["map:none", "vector"]
        found.append(rows.tolist())
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_has_the_rows_of_its_positions_wherever_they_lie(
    reader: FeatureReader, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dataset, "_READ_BYTES", 100)  # four vectors, two maps
    dataset = reader.dataset(["map:none", "vector"], targets=TARGETS, residency=place)
    labelled = reader.dataset("vector", residency=place, split="train")
    assert (dataset.residency, dataset.device.type) == (place, "cpu")
    if place == "memory":
        reader.close()
    positions = [20, 0, -1, 0]
    for chosen in (positions, np.array(positions), torch.tensor(positions)):
        assert rows_of([dataset[chosen]]) == [GOOD[positions].tolist()]
    x, y = dataset[5]
    assert rows_of([({name: value[None] for name, value in x.items()}, y[None])]) == [[GOOD[5]]]
    x, y = labelled[[3, 2]]
    assert np.array_equal(x, VALUES["vector"][GOOD[[3, 2]]])
    assert y.tolist() == [GOOD[3] % 3, GOOD[2] % 3]
    loader = DataLoader(labelled, 8, shuffle=True)  # sample by sample
    assert sorted(torch.cat([y for _, y in loader]).tolist()) == sorted(GOOD % 3)


def test_a_transform_takes_each_sample_of_a_batch(plain: FeatureReader) -> None:
    dataset = plain.dataset("vector", transform=lambda x: x - x.mean(), residency="memory")
    x, y = dataset[[4, 2]]
    expected = VALUES["vector"][GOOD[[4, 2]]]
    np.testing.assert_allclose(x, expected - expected.mean(1, keepdims=True), atol=1e-6)
    assert y.tolist() == (GOOD[[4, 2]] % 3).tolist()


@pytest.mark.parametrize(("place", "workers"), [("disk", 0), ("disk", 2), ("memory", 0)])
def test_an_epoch_resumes_with_exactly_the_batches_that_remain(plain: FeatureReader, place: Any, workers: int) -> None:
    dataset = plain.dataset(["map:none", "vector"], targets=TARGETS, residency=place)
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    whole = rows_of(dataset.batches(4, shuffle=True, seed=5, **options))
    assert sorted(chain(*whole)) == GOOD.tolist()
    assert [len(rows) for rows in whole] == [4] * 5 + [2]
    other = plain.dataset(["map:none", "vector"], targets=TARGETS)
    assert rows_of(other.batches(4, shuffle=True, seed=5)) == whole  # the place does not matter
    assert rows_of(other.batches(4, shuffle=True, seed=6)) != whole
    before = torch.get_rng_state()
    for start in (3, 6) if workers else range(7):
        resumed = dataset.batches(4, shuffle=True, seed=5, start=start, **options)
        assert len(resumed) == len(whole) - start
        assert rows_of(resumed) == whole[start:]
    assert torch.equal(torch.get_rng_state(), before)  # dropout of a resumed run is that of the other
    assert [*chain(*rows_of(dataset.batches(4)))] == GOOD.tolist()
    with pytest.raises(ValueError, match="start is 7; it must be at most 6, the number of batches"):
        dataset.batches(4, start=7)
    with pytest.raises(ValueError, match="rank is 2; it must be 0 to 1, as world_size is 2"):
        dataset.batches(4, rank=2, world_size=2)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_share_the_rows_with_as_many_batches_each(plain: FeatureReader, world_size: int) -> None:
    dataset = plain.dataset(["map:none", "vector"], targets=TARGETS, residency="memory")
    shares = [
        rows_of(dataset.batches(3, shuffle=True, seed=1, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({tuple(map(len, share)) for share in shares}) == 1
    counts = Counter(row for share in shares for rows in share for row in rows)
    assert sorted(counts) == GOOD.tolist()
    repeated = -len(GOOD) % world_size  # as few as make the shares equal, each of them once more
    assert Counter(counts.values()) == Counter({1: len(GOOD) - repeated, 2: repeated} if repeated else {1: len(GOOD)})
    sampler = DistributedSampler(dataset, world_size, 1, seed=4)  # PyTorch's own
    (theirs, *_) = DataLoader(dataset, batch_size=None, sampler=BatchSampler(sampler, 3, False))
    assert rows_of([theirs]) == [GOOD[list(sampler)[:3]].tolist()]


@pytest.mark.parametrize("place", PLACES)
def test_a_function_gives_the_targets_of_rows_when_they_are_read(plain: FeatureReader, place: Any) -> None:
    asked: list[int] = []

    def mask_of(row: int) -> np.ndarray:
        asked.append(row)
        return np.broadcast_to(row, (2, 1 + (row == 22)))  # cannot be written, as a picture of PIL

    dataset = plain.dataset("vector", targets=mask_of, residency=place)
    assert asked == []
    with warnings.catch_warnings(action="error"):
        x, y = dataset[[7, 3]]
    assert asked == GOOD[[7, 3]].tolist()
    assert np.array_equal(x, VALUES["vector"][asked])
    assert y.tolist() == [[[row], [row]] for row in asked]
    with pytest.raises(
        InputError, match=r"target of row 22 has the shape \(2, 2\); expected \(2, 1\), as in its batch"
    ):
        dataset[[3, -1]]
    for target in (None, "cat", np.zeros((2, 3))[:, ::-1]):
        dataset = plain.dataset("vector", targets=lambda row, target=target: target, residency=place)
        with pytest.raises(InputError, match=f"the target of row {GOOD[3]} cannot be converted to a tensor: "):
            dataset[3]


def test_a_pass_takes_any_seed_and_refuses_options_that_choose_samples(plain: FeatureReader) -> None:
    dataset = plain.dataset(["map:none", "vector"], targets=TARGETS)
    assert sorted(chain(*rows_of(dataset.batches(5, shuffle=True, seed=1 << 127, drop_last=False)))) == GOOD.tolist()
    for name, value in {"sampler": [0], "batch_sampler": [[0]], "drop_last": True}.items():
        with pytest.raises(InputError, match=f"batches.. chooses the samples itself, and takes no {name}; DataLoader"):
            dataset.batches(5, **{name: value})


def test_targets_that_are_not_one_per_row_of_the_reader_are_refused(plain: FeatureReader) -> None:
    with pytest.raises(InputError, match=r"targets have the shape \(22, 2\); expected \(23, ...\), one for each row"):
        plain.dataset("vector", targets=TARGETS[GOOD])
    for targets in (["cat"] * ROWS, [[1], [2, 3]]):
        with pytest.raises(InputError, match="targets cannot be converted to a tensor: .*; give an array of numbers"):
            plain.dataset("vector", targets=targets)
    with pytest.raises(InputError, match="targets have masked values"):
        plain.dataset("vector", targets=np.ma.masked_less(TARGETS, 3))
    tensors = plain.dataset("vector", targets=torch.linspace(0, 1, ROWS, requires_grad=True))
    assert tensors[[0, 5]][1].tolist() == torch.linspace(0, 1, ROWS)[GOOD[[0, 5]]].tolist()


def test_auto_takes_memory_for_half_of_what_is_free_and_a_choice_that_does_not_fit_is_refused(
    plain: FeatureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = len(GOOD) * (6 * 4 + 2 * 3 * 4 * 2 + 2 * 8)  # both layers, and TARGETS
    found = {}
    for free in (2 * needed, 2 * needed - 1):
        monkeypatch.setattr(torch_dataset, "free_bytes", lambda free=free: free)
        found[free] = plain.dataset(["map:none", "vector"], targets=TARGETS, residency="auto").residency
    assert list(found.values()) == ["memory", "disk"]
    monkeypatch.setattr(torch_dataset, "free_bytes", lambda: 100_000)
    wide = np.zeros((ROWS, 1000))
    message = "22 rows of vector and targets take 0.2 MB, more than 90% of the 0.1 MB free on cpu"
    with pytest.raises(LayertapError, match=message):
        plain.dataset("vector", targets=wide, residency="memory")
    assert plain.dataset("vector", residency="memory").residency == "memory"
    with pytest.raises(UnknownNameError, match="residency 'ram' not found; available: 'auto', 'gpu', 'memory', 'disk'"):
        plain.dataset("vector", residency="ram")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="residency='memory' takes no device, got 'cuda'"):
        plain.dataset("vector", residency="memory", device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(plain: FeatureReader) -> None:
    for residency, device in (("gpu", None), ("auto", "cuda:0")):
        with pytest.raises(LayertapError, match=f"residency='{residency}': device .* use residency=\"memory\""):
            plain.dataset("vector", residency=residency, device=device)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="residency='gpu' got the device 'cpu'"):
        plain.dataset("vector", residency="gpu", device="cpu")


def test_everything_of_a_batch_lies_on_the_device(plain: FeatureReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyTorch's device without values: a computation with tensors of two devices is refused there, too."""
    monkeypatch.setattr(torch_dataset, "device_named", lambda name: torch.device("meta"))
    for residency in ("gpu", "auto"):
        dataset = plain.dataset(["map:none", "vector"], targets=TARGETS, residency=residency, device="cuda")  # type: ignore[arg-type]
        assert (dataset.residency, dataset.device.type) == ("gpu", "meta")
        ((x, y), *_) = dataset.batches(5, shuffle=True)
        assert {value.device.type for value in (*x.values(), y)} == {"meta"}
        assert (x["map:none"].shape, x["map:none"].dtype, y.shape) == ((5, 2, 3, 4), torch.float16, (5, 2))
    with pytest.raises(InputError, match="num_workers is 2; rows on meta are read without workers"):
        dataset.batches(5, num_workers=2)
    monkeypatch.setattr(torch_dataset, "_free_bytes", lambda device: 0 if device.type == "meta" else 1 << 40)
    assert plain.dataset("vector", residency="auto", device="cuda").residency == "memory"
    with pytest.raises(LayertapError, match="22 rows of vector take 0.0 MB, more than 90% of the 0.0 MB free on meta"):
        plain.dataset("vector", residency="gpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_on_a_gpu_are_those_on_the_disk(plain: FeatureReader) -> None:
    dataset = plain.dataset(["map:none", "vector"], targets=TARGETS, residency="gpu")
    batches = [({name: value.cpu() for name, value in x.items()}, y.cpu()) for x, y in dataset.batches(4, shuffle=True)]
    assert sorted(chain(*rows_of(batches))) == GOOD.tolist()
