"""The private names of torch that `ktc/model/experts/private_api.py` holds are there, and as ktc takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from ktc.model.decode_steps.filled_scalars import FilledScalars
from ktc.model.experts.private_api import (
    HOOKS,
    ConversionHook,
    LoadHooks,
    at_end_of_backward,
    floats_as_constants,
    schema_of,
    unsaved_buffers,
    version_of,
    without_function_modes,
    wrapper_tensor,
)


def test_a_module_has_its_children_parameters_and_hooks_in_its_dictionary() -> None:
    """`stale_change_guard.py` reads them there, and `before_load` receives the keys of one module."""
    received = list[tuple[list[str], str]]()

    class Asked(LoadHooks, nn.Linear):
        def before_load(self, state_dict: Mapping[str, Any], prefix: str) -> None:
            received.append((sorted(state_dict), prefix))

    module = nn.Sequential(Asked(1, 1))
    module.load_state_dict({"0.weight": torch.zeros(1, 1), "0.more": torch.zeros(1)}, strict=False)
    assert received == [(["0.more", "0.weight"], "0.")]
    for hooks in (*HOOKS, "_modules"):
        assert hooks in vars(module)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    assert vars(module)["_modules"] == {"0": module[0]}
    assert [name for name in HOOKS if vars(module)[name]] == ["_forward_pre_hooks", "_backward_hooks"]
    assert set(vars(module[0])["_parameters"]) == {"weight", "bias"}


def test_a_tensor_may_hold_others_that_pytorch_takes_for_one() -> None:
    class Wrapper(torch.Tensor):
        """As `ktc/model/attention/int8_tensor.py` makes it."""

        @classmethod
        def __torch_dispatch__(cls, *args: object) -> None:
            """Compute nothing."""

    made = wrapper_tensor(Wrapper, (2, 3), torch.bfloat16, torch.device("cpu"))
    assert type(made) is Wrapper
    assert (made.shape, made.dtype) == ((2, 3), torch.bfloat16)


def test_a_module_knows_the_buffers_that_no_checkpoint_has() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert unsaved_buffers(module) == {"made"}


def test_every_change_of_dtype_or_device_goes_through_apply() -> None:
    seen: list[torch.dtype] = []

    class Seeing(ConversionHook, nn.Linear):
        def converts(self, fn: Callable[[Tensor], Tensor]) -> bool:
            seen.append(fn(torch.empty(1)).dtype)
            return False

    module = Seeing(2, 2)
    nn.Sequential(module).to(torch.bfloat16)
    assert (seen, module.weight.dtype) == ([torch.bfloat16], torch.float32)


def test_an_operator_tells_the_names_of_its_arguments() -> None:
    assert [argument.name for argument in schema_of(torch.ops.aten.softmax.int).arguments] == ["self", "dim", "dtype"]


def test_a_write_into_a_tensor_or_a_view_of_it_changes_its_version() -> None:
    """`ktc/model/attention/key_index.py` tells by it that a cache was changed by others."""
    whole = torch.zeros(4, 3)
    view = whole[:2]
    before = version_of(view)
    whole[3] = 1
    assert version_of(view) > before
    before = version_of(whole)
    view.add_(1)
    assert version_of(whole) > before


def test_compiled_code_has_a_modules_floats_as_constants_inside_the_context() -> None:
    norm = nn.LayerNorm(4)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda module, x: x * module.eps, dynamic=True, backend=counter)
    with floats_as_constants():
        assert torch.equal(compiled(norm, torch.ones(3)), torch.full((3,), norm.eps))
    (graph,) = counter.graphs
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    assert [value.dtype for value in inputs if isinstance(value, Tensor)] == [torch.float32]  # a float would be fp64


def test_a_compiled_function_is_not_compiled_again_within_a_context_of_torch_functions() -> None:
    """`FilledScalars` is entered around the capture of a step, which a compiler would end."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: x + 1, backend=counter)
    compiled(torch.ones(2))
    with FilledScalars():
        with without_function_modes():
            compiled(torch.ones(2))
        assert counter.frame_count == 1
        compiled(torch.ones(2))
    assert counter.frame_count == 2, "without it there is nothing to test"


def test_a_function_is_called_once_a_backward_pass_has_ended() -> None:
    called = list[str]()

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            at_end_of_backward(lambda: called.append("end"))
            called.append("node")
            return grads[0]

    x = torch.ones(2, requires_grad=True)
    first = Noting.apply(x)
    assert isinstance(first, Tensor)
    second = Noting.apply(first * 2)
    assert isinstance(second, Tensor)
    second.sum().backward()
    assert called == ["node", "node", "end", "end"]
