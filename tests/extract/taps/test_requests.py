"""Blocks of several threads and asyncio tasks on one model, models over processes, and functions of users."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from extract import InputError, LayertapError, Record, Taps, UnknownNameError
from tests.extract.taps.networks import Net, hooks_in, linear

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_asyncio_tasks_on_one_model_see_their_own_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    async def task(x: Tensor) -> tuple[bool, bool]:
        with Taps(model, "0").keep("0.weight", "grad") as taps:
            await asyncio.sleep(0)
            loss = taps(x).sum()
            await asyncio.sleep(0)  # the other tasks call the model here
            same = torch.equal(taps.record["0"], model[0](x).detach())
            loss.backward()
            await asyncio.sleep(0)
            gradient = torch.autograd.grad(model[:](x).sum(), model[0].weight)[0]
            return same, torch.equal(taps.record["0.weight@grad"], gradient)

    async def all_tasks() -> list[tuple[bool, bool]]:
        return await asyncio.gather(*(task(torch.randn(3, 4)) for _ in range(3)))

    assert asyncio.run(all_tasks()) == [(True, True)] * 3
    assert hooks_in(model) == 0


def in_two_tasks(taps: Taps, tapped: Callable[[Taps], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
    """What a task with a block returns before and after another task runs, and what that returns."""

    async def with_block(opened: asyncio.Event, done: asyncio.Event) -> Any:
        with taps:
            tapped(taps)
            opened.set()
            await done.wait()
            return tapped(taps)

    async def without(opened: asyncio.Event, done: asyncio.Event) -> Any:
        await opened.wait()
        output = other()
        done.set()
        return output

    async def both() -> Any:
        opened, done = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(with_block(opened, done), without(opened, done))

    first, second = asyncio.run(both())
    return first, second


def test_an_edit_of_one_task_does_not_change_what_another_computes() -> None:
    model = nn.Sequential(linear())
    expected = model(X)
    edited, other = in_two_tasks(Taps(model).edit("0", lambda h: h * 0), lambda taps: taps(X), lambda: model(X))
    assert not edited.any()
    assert torch.equal(other, expected)


def test_a_backward_pass_of_one_task_is_not_edited_again_for_another() -> None:
    def forward(model: Net, x: Tensor) -> Any:
        return checkpoint(lambda h: model.linear(h).tanh(), x, use_reentrant=False)

    model = Net(forward, linear=linear())
    (expected,) = torch.autograd.grad(model(X).sum(), model.linear.weight)

    def gradient() -> Tensor:
        return torch.autograd.grad(model(X).sum(), model.linear.weight)[0]

    _, other = in_two_tasks(Taps(model).edit("linear", lambda h: h * 3), lambda taps: taps(X), gradient)
    assert torch.equal(other, expected)


def test_a_task_created_inside_a_block_or_before_it_is_not_recorded_by_it() -> None:
    model = nn.Sequential(linear())

    async def call(event: asyncio.Event) -> None:
        await event.wait()
        model(X)

    async def outer() -> None:
        event = asyncio.Event()
        before = asyncio.create_task(call(event))
        with Taps(model, ["0"]) as taps:
            event.set()
            for task in (before, asyncio.create_task(call(event))):
                await task
                with pytest.raises(LayertapError, match="thread and asyncio task"):
                    assert taps.record
            taps(X)
        assert torch.equal(taps.record["0"], model(X))

    asyncio.run(outer())


def test_a_block_that_no_task_opened_is_of_all_tasks() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), X

    async def work() -> None:
        model(x)

    with asyncio.Runner() as runner:
        runner.run(work())  # the runner has its context from before the block
        with Taps(model, "0") as taps:
            runner.run(work())
            assert torch.equal(taps.record["0"], model(x))
    taps = Taps(model, "0")
    contextvars.copy_context().run(taps.__enter__)
    model(x)
    assert torch.equal(taps.record["0"], model(x))
    taps.__exit__(None, None, None)
    assert hooks_in(model) == 0


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_tensors_spread_over_processes_are_kept_reduced(tmp_path: Path) -> None:
    tensors = pytest.importorskip("torch.distributed.tensor")

    def spread(layer: nn.Module, x: Tensor) -> Any:
        return tensors.distribute_tensor(x, mesh, [tensors.Shard(0)])

    with one_process(tmp_path):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model, x = nn.Sequential(Net(spread)), torch.randn(3, 4)
        with torch.no_grad(), Taps(model, "0") as taps, pytest.raises(InputError, match=r"to_local\(\).*full_tensor"):
            taps(x)
        for whole in (lambda t: t.full_tensor(), lambda t: t.to_local()):
            with torch.no_grad(), Taps(model, "0", reduce=whole) as taps:
                taps(x)
            assert type(taps.record["0"]) is Tensor
            assert torch.equal(taps.record["0"], x)


def test_parameters_that_fsdp_shards_have_no_gradient_for_hooks_and_that_is_said(tmp_path: Path) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    with one_process(tmp_path):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fsdp.fully_shard(model, mesh=mesh)
        with Taps(model, "0").keep("0", "grad").keep("0.weight", "grad") as taps:
            taps(torch.randn(3, 4)).sum().backward()
        assert taps.record["0"].shape == taps.record["0@grad"].shape == (3, 4)
        with pytest.raises(UnknownNameError, match=r"FSDP .* read `.grad`"):
            taps.record["0.weight@grad"]


def start_a_thread(model: Net, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return model.a(x) + pool.submit(model.b, x).result()


def test_layers_that_a_thread_of_the_model_calls_are_told() -> None:
    model, x = Net(start_a_thread, a=linear(), b=linear(), unused=linear()), X
    for taps in (
        Taps(model).edit("*", lambda h: h / 2),
        Taps(model).edit(nn.Linear, lambda h: h / 2, "input"),
        Taps(model).edit("*/linear", lambda h: h / 2),
    ):
        missed = pytest.raises(LayertapError, match=r"the edit of b(/linear)? never took effect: it ran in another")
        with torch.no_grad(), missed, taps:
            taps(x)
    for what in ("output", "input", "grad"):
        with Taps(model).keep(["a", "b", "unused"], what) as taps:
            taps(x).sum().backward()
        assert [name for name, reason in taps.record.missing.items() if "in another thread" in reason] == [
            "b" if what == "output" else f"b@{what}"
        ]


def generate(model: Net, x: Tensor) -> Iterator[Tensor]:
    yield model.a(x)
    yield model.b(x)


async def wait(model: Net, x: Tensor) -> list[Tensor]:
    return list(generate(model, x))


@pytest.mark.parametrize(("forward", "run"), [(generate, list), (wait, asyncio.run)])
def test_of_a_model_whose_code_runs_after_its_call_nothing_is_recorded_or_edited(forward: Any, run: Any) -> None:
    model = Net(forward, a=linear(), b=linear())
    with Taps(model, ["a", "b/linear"]) as taps:
        assert torch.equal(run(taps(torch.ones(2, 4)))[0], model.a(torch.ones(2, 4)))
    for name in ("a", "b/linear"):
        with pytest.raises(UnknownNameError, match="did not run in this forward|was called in the forward"):
            taps.record[name]
    with pytest.raises(LayertapError, match="the edit of a, b never took effect: layer 'a' did not run"):  # noqa: SIM117
        with Taps(model).edit("*", lambda h: h * 0) as taps:
            run(taps(torch.ones(2, 4)))


def test_parameters_that_are_unfrozen_in_the_block_are_kept_and_edited() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    model[0].requires_grad_(False)
    with Taps(model).edit("*.weight", lambda g: g / 2, "grad").keep("*.weight", "grad") as taps:
        taps(x).sum().backward()
        assert list(taps.record) == ["2.weight@grad"]
        model[0].requires_grad_(True)
        model.zero_grad()
        taps(x).sum().backward()
    halves = {f"{i}.weight@grad": model[i].weight.grad.clone() for i in (0, 2)}
    model.zero_grad()
    model(x).sum().backward()
    for i in (0, 2):
        assert torch.equal(taps.record[f"{i}.weight@grad"], halves[f"{i}.weight@grad"])
        assert torch.equal(halves[f"{i}.weight@grad"], model[i].weight.grad / 2)
        assert not model[i].weight._backward_hooks


def test_gradients_of_lazy_parameters_are_kept_and_edited_from_their_first_forward() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU()), torch.randn(2, 3)
    with Taps(model).edit("0.weight", lambda g: g / 2, "grad").keep("**", "grad") as taps:
        taps(x).sum().backward()
    assert {"0.weight@grad", "0.bias@grad", "0@grad", "1@grad"} == set(taps.record)
    edited = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(edited, model[0].weight.grad / 2)
    assert torch.equal(taps.record["0.weight@grad"], edited)
    assert torch.equal(taps.record["0.bias@grad"], model[0].bias.grad)


@pytest.mark.parametrize("of", ["weight", "layer"])
def test_taps_of_what_was_replaced_are_refused(of: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    asked = "*.weight" if of == "weight" else "*"
    edited = Taps(model).edit(asked, lambda g: g / 2, "grad")
    kept = Taps(model).keep(asked, "grad").keep("0.bias", "grad")
    if of == "weight":
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    else:
        model[0] = nn.Linear(4, 4)
    name = "0.weight" if of == "weight" else "0"
    for taps in (edited, kept):
        with pytest.raises(LayertapError, match=f"layer '{name}' was replaced .* make new Taps"), taps:
            taps(torch.randn(3, 4))
    assert not any(hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks))


@pytest.mark.parametrize("asked", ["*", nn.Linear, "2", "*.weight"])
def test_an_edit_of_a_layer_that_is_replaced_inside_the_block_is_refused(asked: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    what = "grad" if asked == "*.weight" else "output"
    refused = pytest.raises(LayertapError, match="layer '2(.weight)?' was replaced .* make new Taps")
    for calls_before in (0, 1):
        with refused, Taps(model).edit(asked, lambda h: h * 2, what) as taps:
            for _ in range(calls_before):
                taps(x).sum().backward()
            model[2] = nn.Linear(4, 2)
            taps(x).sum().backward()
    with Taps(model).edit(asked, lambda h: h * 2, what) as taps:
        taps(x).sum().backward()


# The user's own functions in a block: what they call is no call of the model


def residual() -> Net:
    def forward(model: Net, x: Tensor) -> Any:
        for block in model.blocks:
            x = x + torch.tanh(block(x))
        return model.head(x)

    return Net(forward, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), head=nn.Linear(4, 2))


@pytest.mark.parametrize("stop", [False, True])
def test_layers_that_a_reduction_calls_are_no_calls_of_the_model(stop: bool) -> None:
    model, x, found = residual(), torch.randn(3, 4), []
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        expected = model(x)
        handle.remove()
        with (
            Taps(model, ["head"], stop=stop)
            .keep("blocks.0", reduce=lambda h: model.head(h))
            .keep("blocks.1", reduce=lambda h: model.blocks[1](h))  # its own layer
            .keep("blocks.2", reduce=lambda h: model(h))
        ) as taps:
            for _ in range(2):
                taps(x)
        assert list(taps.record) == ["blocks.0", "blocks.1", "blocks.2", "head"]
        assert torch.equal(taps.record["head"], expected)
        assert torch.equal(taps.record["blocks.1"], model.blocks[1](found[0]))


def test_edits_miss_the_layers_that_the_users_own_functions_call() -> None:
    model, x, records = residual(), torch.randn(3, 4), []

    def with_layers(h: Tensor) -> Tensor:
        model(torch.ones(1, 4)), model.head(h)
        return h * 1

    def on_record(record: Record) -> None:
        assert model(x).any()
        assert model.head(x).any()
        records.append(record)

    taps = Taps(model, on_record=on_record).edit("head", lambda h: h * 0, call=0).keep("head")
    with taps.edit("blocks.*", with_layers).edit("blocks.1", with_layers, "grad").edit("/tanh", with_layers):
        for _ in range(2):
            output = taps(x)
            assert not output.any()
            assert list(taps.record) == ["head"]
            output.sum().backward()
    assert len(records) == 2


def test_layers_that_an_edit_of_a_gradient_calls_are_not_edited() -> None:
    model, x, seen = residual(), torch.randn(3, 4), []

    def look(gradient: Tensor) -> Tensor:
        seen.append(model.head(gradient))
        return gradient

    with Taps(model).edit("head", lambda h: h * 3).edit("blocks.2", look, "grad").keep("blocks.2", "grad") as taps:
        taps(x).sum().backward()
    assert torch.equal(seen[0], model.head(taps.record["blocks.2@grad"]))


def test_taps_inside_an_edit_record_what_the_edit_calls() -> None:
    model, other, x = residual(), residual(), torch.randn(3, 4)
    inner = Taps(other, "blocks.0")

    def edit(h: Tensor) -> Tensor:
        inner(x)
        return h + inner.record["blocks.0"]

    with torch.no_grad(), inner, Taps(model).edit("blocks.2", edit).keep("blocks.2") as taps:
        taps(x)
        plain = x
        for block in model.blocks[:2]:
            plain = plain + torch.tanh(block(plain))
        assert torch.equal(taps.record["blocks.2"], model.blocks[2](plain) + other.blocks[0](x))


def test_a_call_in_another_thread_is_not_stopped_and_returns_the_output() -> None:
    model, x, outputs = residual(), torch.randn(3, 4), []
    with torch.no_grad(), Taps(model, "blocks.0", stop=True) as taps:
        thread = threading.Thread(target=lambda: outputs.append(taps(x)))
        thread.start()
        thread.join()
        assert taps(x) is None
    assert torch.equal(outputs[0], model(x))
