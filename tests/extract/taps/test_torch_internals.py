"""What breaks if a name of PyTorch changes that is not part of its public interface."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from extract.taps import torch_internals as internals

X = torch.arange(4.0)

# Name -> a test that needs it.
NOTICED_BY = {
    "COMPILED_CODE_OFF": "test_compiled_code_that_calls_the_model_is_seen_through",
    "StorageWeakRef": "test_a_reference_to_memory_expires_with_it",
    "Switch": "test_a_stance_that_is_set_inside_the_block_stays",
    "computes_tangents": "test_kept_values_carry_no_tangents",
    "engine_code": "test_gradients_of_parameters_under_reentrant_checkpoints_are_refused",
    "function_modes": "test_taps_that_are_closed_out_of_order_leave_the_modes_of_others",
    "graph_task": "test_checkpointed_layers_are_kept_once_and_edited_both_times",
    "has_dispatch_modes": "test_an_export_inside_the_block_is_no_call_of_the_model",
    "has_function_modes": "test_a_device_that_the_model_chooses_meanwhile_is_left_where_it_was_chosen",
    "hooks_of": "test_calls_are_numbered_in_the_order_in_which_they_start_also_where_a_hook_calls_the_layer",
    "inference_mode": "test_kept_tensors_can_be_trained_on_and_own_their_memory",
    "is_in_functorch": "test_values_inside_torch_func_are_refused",
    "is_saved": "test_an_edit_of_what_works_in_place_takes_effect_where_the_result_is_not_used_or_is_refused",
    "is_shared": "test_an_edit_cannot_reach_the_tensors_of_others",
    "memory_of": "test_a_write_that_autograd_does_not_see_is_repeated_unseen",
    "not_traced": "test_without_functions_that_are_not_traced_no_layer_could_say_that_the_compiler_traced_it",
    "pop_function_mode": "test_taps_that_are_closed_out_of_order_leave_the_modes_of_others",
    "push_function_mode": "test_functions_are_kept_by_readable_names",
}


def test_a_reference_to_memory_expires_with_it() -> None:
    x = X.clone()
    reference = internals.StorageWeakRef(x.untyped_storage())
    assert not reference.expired()
    del x
    assert reference.expired()


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
    assert sorted(NOTICED_BY) == sorted(internals.__all__)
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [test for test in NOTICED_BY.values() if f"def {test}(" not in tests] == []
    private = re.compile(r"(?<![`'\"\w])torch(?:\.\w+)*\._(?!_)\w+")
    found = [
        f"{path.name}: {name}"
        for path in Path(internals.__file__).parent.glob("*.py")
        if path.name != Path(internals.__file__).name
        for name in private.findall(path.read_text())
    ]
    assert found == []
