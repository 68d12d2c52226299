"""Copies to a GPU and back that are waited for late: no row may be read before it is there, or be written over.

A GPU that is made up copies at random moments, some at once and some only when they are waited for, and pinned memory
holds NaN until then. What it computes is computed by the CPU, so results are compared bit by bit.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from extract import FeatureReader, extract_features
from extract.compute import backends as engines
from extract.compute.backbone import Backbone
from extract.compute.transfers import Pinned, transfers_for
from extract.extraction import validation
from extract.extraction.run import extract
from tests.extract.compute.small_network import small_network
from tests.extract.compute.test_backends import BY_INDUCTOR, BY_OPENVINO
from tests.planning import plan


class MadeUpEvent:
    """Of one copy; `synchronize` makes it, and all before it in the same stream."""

    def __init__(self, stream: deque[MadeUpEvent], copy: Callable[[], Any]):
        self._stream, self._copy = stream, copy
        stream.append(self)

    def synchronize(self) -> None:
        while self in self._stream:
            self._stream.popleft()._copy()


class MadeUpGpu:
    """Stands in for `Gpu`."""

    device = torch.device("cpu")

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.down: deque[MadeUpEvent] = deque()
        self.pinned_bytes = 0

    def _go_on(self) -> None:
        if self.down and self._random.random() < 0.5:
            self._random.choice(self.down).synchronize()

    def pinned(self, size: int) -> Tensor:
        self.pinned_bytes += size
        return torch.full((size,), 255, dtype=torch.uint8)

    def upload(self, images: Tensor) -> Tensor:
        return images.clone()

    def download(self, pinned: Tensor, tensor: Tensor) -> MadeUpEvent:
        then = tensor.clone()  # as it is at this point of the stream
        event = MadeUpEvent(self.down, lambda: pinned.copy_(then))
        self._go_on()
        return event


@pytest.mark.parametrize("seed", range(3))
def test_every_copy_arrives_whole_whatever_the_order_in_which_they_are_made(seed: int) -> None:
    generator = random.Random(seed)
    gpu = MadeUpGpu(seed)
    transfers = Pinned(gpu, 4096)  # type: ignore[arg-type]
    expected: list[tuple[Tensor, Tensor, int]] = []
    for step in range(300):
        size = generator.choice([0, 1, 15, 16, 17, 100, 256, 300, 1000, 3000])  # of four bytes: up to thrice the ring
        given = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32).reshape(-1, 1)
        if generator.random() < 0.4:
            assert torch.equal(transfers.to_device(given), given)
            continue
        kept, before = transfers.to_host(given), given.clone()
        given.fill_(step)  # the model writes in place into what it has handed on
        expected.append((kept, before, transfers.last_started()))
        if generator.random() < 0.3:
            for found, value, number in expected[: generator.randrange(len(expected)) + 1]:
                transfers.wait(number)
                assert torch.equal(found, value)
    for found, value, number in expected:
        transfers.wait(number)
        assert torch.equal(found, value)
    assert gpu.pinned_bytes == 4096
    assert not gpu.down


def test_a_single_value_is_copied_whatever_its_stride() -> None:
    transfers = Pinned(MadeUpGpu(0), 4096)  # type: ignore[arg-type]
    with torch.inference_mode():
        values = torch.arange(30.0).reshape(3, 10)
        kept = [
            transfers.to_host(values[:1, 7]),
            transfers.to_host(values.t()[:1, :1]),
            transfers.to_host(values[:, 3]),
        ]
        given = transfers.to_device(values[:1, 7])
    transfers.wait(transfers.last_started())  # outside, too
    assert [one.tolist() for one in kept] == [[7.0], [[0.0]], [3.0, 13.0, 23.0]]
    assert given.tolist() == [7.0]


def test_a_tensor_of_another_device_is_there_at_once() -> None:
    gpu = MadeUpGpu(0)
    gpu.device = torch.device("cuda", 1)
    values = torch.arange(3.0)
    kept = Pinned(gpu, 4096).to_host(values)  # type: ignore[arg-type]
    values.zero_()
    assert kept.tolist() == [0.0, 1.0, 2.0]


def test_a_cpu_has_nothing_to_wait_for() -> None:
    assert transfers_for(torch.device("cpu")) is None


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_network()


@pytest.fixture
def mixed(folder: Path) -> Path:
    """The pictures with broken ones among them, and with copies in the same batch, in the next one, and in others."""
    names = sorted(folder.rglob("*.*"))
    (folder / "ant" / "broken.jpg").write_bytes(b"no picture")
    (folder / "cat" / "broken.png").write_bytes(names[2].read_bytes()[:50])
    for i, name in enumerate(names):
        for where in ("ant", "bee", "cat")[: i % 4]:
            (folder / where / f"copy-{i:02d}{name.suffix}").write_bytes(name.read_bytes())
    return folder


@contextlib.contextmanager
def on_a_gpu(seed: int, ring: int = 65_536) -> Iterator[list[Pinned]]:
    """Every forward inside has a made-up GPU; their transfers are in the list."""
    made: list[Pinned] = []

    def transfers(device: torch.device) -> Pinned:
        made.append(Pinned(MadeUpGpu(seed), ring))  # type: ignore[arg-type]
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "transfers_for", transfers)
        yield made


@pytest.fixture(autouse=True)
def _without_pictures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and copies are counted here, and the check of the first batch has some of its own."""
    monkeypatch.setattr(validation, "check_rows", lambda forward, images, features: None)


LAYERS = ["layer1:none", "layer1.1:none", "layer*", "embedding"]  # a ReLU writes over one of them


def rows_in(out: Path) -> dict[str, bytes]:
    reader = FeatureReader(out)
    columns = {name: reader.column(name)[:] for name in ("status", "source_hash", "record_hash")}
    values = {name: np.ascontiguousarray(reader[name][:]) for name in reader.layers}
    return {name: one.tobytes() for name, one in (columns | values).items()} | {
        "paths": "\n".join(reader.paths).encode()
    }


@pytest.mark.parametrize(("batch_size", "seed"), [(5, 1), (9, 2)])
def test_rows_are_those_of_a_run_that_waits(
    mixed: Path, tmp_path: Path, backbone: Backbone, batch_size: int, seed: int
) -> None:
    how: Any = {"backbone": backbone, "layers": LAYERS, "batch_size": batch_size, "shard_rows": 12, "workers": 0}
    waits = extract(plan(mixed, out=tmp_path / "waits", **how))
    with on_a_gpu(seed) as made:
        ahead = extract(plan(mixed, out=tmp_path / "ahead", **how))
    assert [len(one._copies) for one in made] == [0]
    assert (ahead.computed, ahead.duplicates, ahead.status) == (waits.computed, waits.duplicates, waits.status)
    assert waits.duplicates > 5
    assert rows_in(tmp_path / "ahead") == rows_in(tmp_path / "waits")


@pytest.mark.slow
@pytest.mark.parametrize("engine", [BY_OPENVINO, BY_INDUCTOR])
def test_compiled_code_has_its_copies_waited_for_too(
    folder: Path, tmp_path: Path, backbone: Backbone, engine: str
) -> None:
    how: Any = {"backbone": backbone, "layers": LAYERS, "batch_size": 5, "compile": engine, "workers": 0}
    extract_features(folder, out=tmp_path / "waits", **how)
    with on_a_gpu(1):
        extract_features(folder, out=tmp_path / "ahead", **how)
    assert rows_in(tmp_path / "ahead") == rows_in(tmp_path / "waits")


def test_the_next_batch_is_begun_before_the_last_one_is_waited_for(
    folder: Path, tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (order.append(name), function(*args))[1]

    monkeypatch.setattr(Pinned, "to_device", told("begin", Pinned.to_device))
    monkeypatch.setattr(Pinned, "wait", told("wait", Pinned.wait))
    planned = plan(folder, out=tmp_path / "out", backbone=backbone, batch_size=3, workers=0)
    with on_a_gpu(0, 1 << 20):
        extract(planned)
    # The first one is waited for at once: it may be compared with others.
    assert order == ["begin", "wait", "begin", "begin", "wait", "begin", "wait", "wait"]


def test_where_the_memory_is_short_no_row_is_lost(folder: Path, tmp_path: Path, backbone: Backbone) -> None:
    def short_of_memory(module: Any, args: Any) -> None:
        if len(args[0]) > 2 and len(sizes := made[0]._copies) > 3:
            raise torch.OutOfMemoryError(f"CUDA out of memory, beside {len(sizes)} copies")

    how: Any = {"backbone": backbone, "layers": LAYERS, "workers": 0}
    extract_features(folder, out=tmp_path / "waits", batch_size=2, **how)
    with on_a_gpu(0, 1 << 20) as made:
        planned = plan(folder, out=tmp_path / "ahead", batch_size=5, **how)
        with backbone.model.get_submodule("layer2").register_forward_pre_hook(short_of_memory):
            summary = extract(planned)
    assert summary.images_at_once == 2
    assert dict(summary.status) == {"ok": 12}
    one, other = (FeatureReader(tmp_path / name) for name in ("waits", "ahead"))
    for name in one.layers:
        assert np.abs(one[name][:] - other[name][:]).max() <= 1e-5 * np.abs(one[name][:]).max()


@pytest.mark.parametrize(("end", "after"), [(KeyboardInterrupt, 2), (RuntimeError, 3), ("stop", 3)])
def test_what_was_computed_when_a_run_ends_early_is_stored_and_right(
    mixed: Path, tmp_path: Path, backbone: Backbone, end: Any, after: int
) -> None:
    how: Any = {"backbone": backbone, "layers": LAYERS, "batch_size": 4, "workers": 0}
    extract_features(mixed, out=tmp_path / "waits", **how)
    calls, batches = itertools.count(1), itertools.count(1)

    def ends(module: Any, args: Any) -> None:
        if next(calls) > after and end != "stop":
            raise end("now")

    planned = plan(mixed, out=tmp_path / "ahead", **how)
    with (
        backbone.model.get_submodule("layer2").register_forward_pre_hook(ends),
        on_a_gpu(after),
        contextlib.nullcontext() if end == "stop" else pytest.raises(end),
    ):
        extract(planned, stop=lambda: end == "stop" and next(batches) == after)
    expected = FeatureReader(tmp_path / "waits")
    found = FeatureReader(tmp_path / "ahead", partial=True)
    rows = [expected.paths.index(path) for path in found.paths]
    assert 4 * (after - 1) <= len(rows) < 32  # the batch that was begun last is computed again
    assert end != "stop" or len(rows) == 4 * after  # those of the last batch, too, which was begun and not waited for
    for name in found.layers:
        assert found[name][:].tobytes() == expected[name][:][rows].tobytes()
    extract(plan(mixed, out=tmp_path / "ahead", **how))
    assert rows_in(tmp_path / "ahead") == rows_in(tmp_path / "waits")
