"""`FusedMoe` as a module: one autograd node that behaves under everything PyTorch does with modules."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kernel_layers import EXACT_FORMS, ISAS, Load, error, experts_of, random_layer, run, spec_of
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ktc.diagnostics import InputRefused
from ktc.foundation import host
from ktc.model.experts.module import FusedMoe
from ktc.model.kernels.kernel_library import KernelLibrary

SPEC = spec_of(ISAS[0])


@pytest.mark.parametrize("form", EXACT_FORMS)
def test_gradcheck_in_float64(load: Load, form: str) -> None:
    layer = random_layer(9, 7, 4, 2, 6, form=form)
    module = load(layer, spec_of("scalar", "fp64", form))
    x, weights = layer.x.clone().requires_grad_(), layer.weights.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: module(a, layer.index, b), (x, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_result_has_the_models_dtype(load: Load, dtype: torch.dtype) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    out, d_x, d_weights = run(load(layer, SPEC), layer, dtype)
    assert (out.dtype, d_x.dtype) == (dtype, dtype)
    for ours, theirs in zip((out, d_x, d_weights), layer.expected(), strict=True):
        assert error(ours, theirs) <= 5e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_routing_weights_of_any_float_dtype(load: Load, dtype: torch.dtype) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    weights = layer.weights.to(dtype).requires_grad_()
    load(layer, SPEC)(layer.x.bfloat16(), layer.index, weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == dtype


@pytest.mark.parametrize("isa", ISAS)
def test_recomputed_activations_give_the_same_bits(load: Load, isa: str) -> None:
    layer = random_layer(70, 37, 5, 2, 29)
    keep = run(load(layer, spec_of(isa)), layer)  # type: ignore[arg-type]
    recompute = run(load(layer, spec_of(isa), activations="recompute"), layer)  # type: ignore[arg-type]
    assert all(map(torch.equal, keep, recompute))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_gradient_checkpointing(load: Load, use_reentrant: bool) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC)
    x, weights = layer.x.bfloat16().requires_grad_(), layer.weights.float().requires_grad_()
    out = checkpoint(module, x, layer.index, weights, use_reentrant=use_reentrant)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out, (x, weights), layer.grad.bfloat16()) if not use_reentrant else ()
    if use_reentrant:
        out.backward(layer.grad.bfloat16())
        assert x.grad is not None
        assert weights.grad is not None
        found = (x.grad, weights.grad)
    assert all(map(torch.equal, found, run(module, layer)[1:]))


def test_used_twice_in_one_graph(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC, dtype=torch.float32)
    x = layer.x.float().requires_grad_()
    module(x, layer.index, layer.weights).sum().backward()
    assert x.grad is not None
    once, x.grad = x.grad, None
    (module(x, layer.index, layer.weights) + module(x, layer.index, layer.weights)).sum().backward()
    assert torch.equal(x.grad, 2 * once)


def test_nothing_is_saved_where_no_gradient_is_wanted(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC)
    x = layer.x.bfloat16().requires_grad_()
    with torch.no_grad():
        assert module(x, layer.index, layer.weights).grad_fn is None
    assert module(x.detach(), layer.index, layer.weights).grad_fn is None


class Operators(TorchDispatchMode):
    """The names of what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_backward_makes_no_gradient_of_what_forward_saved(load: Load) -> None:
    """Autograd would fill as many megabytes with zeros at every call."""
    layer = random_layer(64, 48, 4, 2, 9)
    module, x, weights = load(layer, SPEC), layer.x.bfloat16().requires_grad_(), layer.weights.float().requires_grad_()
    out = module(x, layer.index, weights)
    with Operators() as ran:
        out.backward(torch.ones_like(out))
    assert not [name for name in ran.names if "zero" in name or "fill" in name]


def test_one_gradient_alone(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC)
    weights = layer.weights.float().requires_grad_()
    (alone,) = torch.autograd.grad(module(layer.x.bfloat16(), layer.index, weights), weights, layer.grad.bfloat16())
    assert torch.equal(alone, run(module, layer)[2])


def test_a_second_derivative_is_refused(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    x = layer.x.bfloat16().requires_grad_()
    out = load(layer, SPEC)(x, layer.index, layer.weights).square().sum()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        first.sum().backward()


def test_strided_inputs(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC)
    x, index, weights = layer.x.bfloat16(), layer.index, layer.weights.float()
    expected = module(x, index, weights)
    strided = (x.T.contiguous().T, index.T.contiguous().T, weights.T.contiguous().T)
    assert torch.equal(module(*strided), expected)


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
@pytest.mark.parametrize("spec", [SPEC, None], ids=["kernel", "reference"])
def test_an_expert_that_does_not_exist_is_refused(load: Load, spec: object, bad: int) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    layer.index[5, 1] = bad
    module = load(layer, spec, dtype=torch.float64)
    with pytest.raises(IndexError, match=f"names expert {bad}; this layer has experts 0 to 3"):
        module(layer.x, layer.index, layer.weights)


def test_tensors_of_another_shape_are_refused(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC)
    with pytest.raises(ValueError, match="expected hidden states"):
        module(layer.x[:, :32], layer.index, layer.weights)
    with pytest.raises(ValueError, match="must be int64"):
        module(layer.x, layer.index.int(), layer.weights)
    with pytest.raises(ValueError, match=r"expected shape \(48, 64\), found \(64, 48\)"):
        module.load_expert(0, "gate", layer.stock["down_proj"][0])


def test_a_layer_that_is_not_loaded_does_not_run() -> None:
    module = experts_of(2, 8, 8, 1)
    module.load_expert(0, "up", torch.zeros(8, 8))
    assert module.missing() == ((0, "gate"), (0, "down"), (1, "gate"), (1, "up"), (1, "down"))
    with pytest.raises(RuntimeError, match=r"5 expert weights were never loaded, the first is \(0, 'gate'\)"):
        module(torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1))


def test_weights_have_names_but_are_no_parameters(load: Load) -> None:
    module = load(random_layer(64, 48, 4, 2, 1), SPEC)
    parent = torch.nn.ModuleDict({"experts": module})
    assert {name: tuple(weight.shape) for name, weight in module.named_parameters()} == {
        "gate_up_proj": (4, 96, 64),
        "down_proj": (4, 64, 48),
    }
    assert module.gate_up_proj.untyped_storage().nbytes() == 2
    assert (list(parent.parameters()), parent.state_dict()) == ([], {})
    before = module.expert(1, "gate")
    assert module.gate_up_proj.isnan().all()
    with pytest.warns(
        UserWarning, match=r"L429: the experts' kernel computes in torch\.bfloat16 as before; only the rest becomes"
    ):
        parent.double()
    assert torch.equal(module.expert(1, "gate"), before)


def test_to_a_device_or_its_own_dtype_warns_of_nothing(load: Load) -> None:
    module = load(random_layer(64, 48, 4, 2, 1), SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.to("cpu").to(torch.bfloat16).cpu().requires_grad_(requires_grad=False)
        load(random_layer(64, 48, 4, 2, 1), None).float()


def test_a_copy_shares_the_frozen_weights_and_a_pickle_is_refused(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC)
    assert all(map(torch.equal, run(copy.deepcopy(module), layer), run(module, layer)))
    with pytest.raises(InputRefused, match="L435: a compiled model cannot be pickled"):
        pickle.dumps(module)


@pytest.mark.parametrize("spec", [SPEC, None], ids=["kernel", "reference"])
def test_a_copy_of_a_model_takes_no_second_storage(load: Load, spec: object) -> None:
    parent = torch.nn.ModuleDict({"experts": load(random_layer(64, 48, 4, 2, 1), spec)})
    copied = copy.deepcopy(parent)
    ours, theirs = parent["experts"], copied["experts"]
    assert isinstance(ours, FusedMoe)
    assert isinstance(theirs, FusedMoe)
    assert ours is not theirs
    for one, other in ((ours.gate_up_proj, theirs.gate_up_proj), (ours.down_proj, theirs.down_proj)):
        assert (other.shape, other.stride(), other.data_ptr()) == (one.shape, one.stride(), one.data_ptr())
        assert other.untyped_storage().nbytes() == (2 if spec else one.numel() * one.element_size())
        assert not other.requires_grad


class Block(torch.nn.Module):
    """A linear layer and experts, added to what comes in."""

    def __init__(self, experts: FusedMoe) -> None:
        super().__init__()
        self.linear, self.experts = torch.nn.Linear(64, 64), experts

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x + self.experts(self.linear(x), index, weights)


class Blocks(torch.nn.Module):
    """Three blocks on one routing."""

    def __init__(self, experts: FusedMoe) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(copy.deepcopy(experts)) for _ in range(3))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, index, weights)
        return x


def test_under_torch_compile_the_reference_stays_a_call_and_nothing_is_compiled_twice(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    model = Blocks(load(layer, None, dtype=torch.float32))
    inputs = (layer.x.float().requires_grad_(), layer.index, layer.weights.float())
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    frames: list[int] = []
    for _ in range(3):
        assert torch.equal(compiled(*inputs), model(*inputs))
        frames.append(counter.frame_count)
    assert frames[0] == frames[2] > 0
    found, expected = (torch.autograd.grad(each(*inputs).sum(), inputs[0])[0] for each in (compiled, model))
    assert torch.equal(found, expected)


def test_the_output_outlives_the_module(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module = load(layer, SPEC)
    expected = run(module, layer)[1]
    x = layer.x.bfloat16().requires_grad_()
    out = module(x, layer.index, layer.weights.float())
    del module
    gc.collect()
    assert torch.equal(torch.autograd.grad(out, x, layer.grad.bfloat16())[0], expected)


def test_two_python_threads_share_one_engine(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 33)
    module = load(layer, SPEC, threads=2)
    alone = run(module, layer)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda _: run(module, layer), range(8)))
    assert all(all(map(torch.equal, found, alone)) for found in together)


def test_a_forked_child_computes_with_threads_of_its_own(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 4)
    layer = random_layer(64, 96, 4, 2, 9)
    module = load(layer, SPEC, threads=3)
    inputs = (layer.x.bfloat16(), layer.index, layer.weights.float())
    expected = module(*inputs)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(module(*inputs), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(module(*inputs), expected)


def test_threads_of_a_forked_child_may_make_their_first_call_together(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module = load(layer, SPEC, threads=2)
    inputs = (layer.x.bfloat16(), layer.index, layer.weights.float())
    expected = module(*inputs)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            together, found = threading.Barrier(4), [False] * 4

            def call(number: int, together: threading.Barrier = together, found: list[bool] = found) -> None:
                together.wait()
                found[number] = torch.equal(module(*inputs), expected)

            callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            os._exit(0 if all(found) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_threads_that_cannot_be_started_are_an_error_and_leave_none_behind(kernels: KernelLibrary) -> None:
    kernel = kernels.kernel(SPEC.entry)
    kernel.engine(1)
    child = os.fork()
    if child == 0:  # of all the threads asked for, the address space has room for the stacks of a few
        with open("/proc/self/statm", encoding="ascii") as sizes:
            taken = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), resource.RLIM_INFINITY))
        message = ""
        try:
            kernel.engine(500)
        except RuntimeError as error:
            message = str(error)
        os._exit(0 if "of 500 kernel threads could be started" in message and num_threads() == 1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
