"""What breaks if a name of PyTorch changes that is not part of its public interface: one test for each name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from extract.taps import torch_internals as internals
from extract.taps.scope import frames_of

X = torch.arange(4.0)


class Asks(torch.autograd.Function):
    """Asks a question in the backward pass."""

    answers: list[object]

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        Asks.answers += [
            internals.graph_task(),
            any(frame.f_code is internals.engine_code for frame in frames_of(sys._getframe())),
        ]
        return gradient


def test_without_the_backward_pass_layers_that_it_computes_again_would_be_recorded_as_calls_of_the_model() -> None:
    Asks.answers = []
    assert internals.graph_task() == -1
    Asks.apply(X.clone().requires_grad_()).sum().backward()
    assert internals.graph_task() == -1
    task, is_on_the_stack = Asks.answers
    assert isinstance(task, int)
    assert task >= 0
    assert is_on_the_stack


def test_without_leaving_inference_mode_copies_could_not_be_used_in_training() -> None:
    with torch.inference_mode(), internals.inference_mode(False):
        assert not X.clone().is_inference()


def test_without_telling_tensors_of_torch_func_copies_would_fail_inside_it_without_a_reason() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(internals.is_in_functorch(x)) or x)(X)
    assert seen == [True]
    assert not internals.is_in_functorch(X)


def test_without_the_stack_of_function_modes_writes_would_not_be_seen_or_those_of_others_left_in_the_wrong_order() -> (
    None
):
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    below, above = Mode(), Mode()
    assert internals.has_function_modes() == 0
    with above:
        assert internals.pop_function_mode() is above
        internals.push_function_mode(below)
        internals.push_function_mode(above)
        assert internals.function_modes() == [below, above]
        assert internals.has_function_modes() == 2
    assert internals.pop_function_mode() is below


def test_without_dispatch_modes_an_export_would_be_recorded() -> None:
    assert internals.has_dispatch_modes() == 0
    with torch._subclasses.FakeTensorMode():
        assert internals.has_dispatch_modes() == 1


def test_without_tangents_kept_values_would_keep_them() -> None:
    assert not internals.computes_tangents()
    with forward_ad.dual_level():
        assert internals.computes_tangents()


def test_without_the_memory_of_tensors_a_write_through_a_view_would_not_reach_what_it_should() -> None:
    x = X.clone()
    assert internals.memory_of(x) == internals.memory_of(x[1:]) == internals.memory_of(x.detach())
    assert internals.memory_of(x) != internals.memory_of(X)
    reference = internals.StorageWeakRef(x.untyped_storage())
    assert not reference.expired()
    del x
    assert reference.expired()


def test_without_counts_of_references_an_edited_tensor_could_lose_the_writes_of_another_name() -> None:
    x = X.clone()
    assert not internals.is_shared(x)
    alias = x.detach()
    assert internals.is_shared(x)
    del alias
    assert not internals.is_shared(x)
    assert not internals.is_saved(x)
    y = x * X.clone().requires_grad_()
    assert internals.is_saved(x)
    del y
    assert not internals.is_saved(x)


def test_without_the_hooks_of_others_calls_that_they_make_would_have_the_wrong_numbers() -> None:
    layer = nn.Identity()
    before = layer.register_forward_pre_hook(lambda *_: None)
    after = layer.register_forward_hook(lambda *_: None)
    assert [list(hooks) for hooks in internals.hooks_of(layer)] == [[before.id], [after.id]]


def test_without_knowing_which_stance_another_replaces_that_of_the_user_would_end_with_the_block() -> None:
    switch = internals.COMPILED_CODE_OFF
    assert isinstance(switch, internals.Switch)
    with switch.active():
        theirs = torch.compiler.set_stance("eager_on_recompile")
    now = torch.compiler.set_stance("force_eager")
    assert now.prev.stance == "eager_on_recompile"
    now.__exit__(None, None, None)
    theirs.__exit__(None, None, None)
    with switch.active():
        pass
    now = torch.compiler.set_stance("force_eager")
    assert now.prev.stance == "force_eager"  # the one that `theirs` has replaced, and restored
    now.__exit__(None, None, None)
    torch.compiler.set_stance("default")


def test_without_functions_that_are_not_traced_no_layer_could_say_that_the_compiler_traced_it() -> None:
    traced: list[bool] = []

    @internals.not_traced
    def note() -> int:
        traced.append(torch.compiler.is_dynamo_compiling())
        return 1

    compiled = torch.compile(lambda x: x + note(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), X + 1)
    assert traced[0] is False  # it ran; where it is traced, this is true


def test_each_name_has_a_test_and_stands_nowhere_else() -> None:
    text = Path(__file__).read_text()
    assert [name for name in internals.__all__ if f"internals.{name}" not in text] == []
    private = re.compile(r"(?<![`'\"\w])torch(?:\.\w+)*\._(?!_)\w+")
    found = [
        f"{path.name}: {name}"
        for path in Path(internals.__file__).parent.glob("*.py")
        if path.name != Path(internals.__file__).name
        for name in private.findall(path.read_text())
    ]
    assert found == []
