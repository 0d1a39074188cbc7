"""Cached launches of Triton kernels: equal keys are of one compiled kernel, and only those."""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false
# Triton is not typed.

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import BaseBackend  # noqa: E402
from triton.runtime.jit import JITFunction, native_specialize_impl  # noqa: E402

from ktc.model.kernels import triton_launch  # noqa: E402
from ktc.model.kernels.triton_launch import (  # noqa: E402
    CachedKernel,
    Specialised,
    arguments_of,
    constants_key,
    specialised_of,
)

BYTES = torch.zeros(256, dtype=torch.uint8)
INTEGERS = [
    0, 1, 2, 3, 15, 16, 17, 32, -1, -16, -17, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, -(2**31) - 16,
    2**63 - 1, 2**63 - 16, -(2**63), 2**63, 2**63 + 1, 2**64 - 16,
]  # fmt: skip
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels run on a GPU")


class OnGpu(Tensor):
    """A tensor on the CPU that says that it is on the first GPU."""

    is_cuda = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def get_device(self) -> int:
        return 0


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


def at(offset: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor whose address is `offset` bytes behind a multiple of 16."""
    begin = -BYTES.data_ptr() % 16 + offset
    as_bytes = BYTES[begin : begin + 64]
    return on_gpu(as_bytes.view(torch.int16).view(dtype) if dtype.itemsize <= 2 else as_bytes.view(dtype))


def copy(source, target, count, offset, scale, BLOCK: tl.constexpr, SIGN: tl.constexpr = 1) -> None:  # noqa: ANN001
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + offset + place, mask=place < count) * scale
    tl.store(target + place, value * SIGN, mask=place < count)


@pytest.mark.parametrize(
    ("of_param", "specialises", "aligns"),
    [(Specialised.NOT, False, True), (Specialised.ONE, True, False), (Specialised.ALIGNED, True, True)],
)
def test_keys_differ_where_triton_compiles_other_code(of_param: Specialised, specialises: bool, aligns: bool) -> None:
    tensors = [at(offset, torch.bfloat16) for offset in (0, 2, 8, 16)]
    values = [*INTEGERS, True, False, None, 0.0, 1.0, -1.5, *tensors, at(0, torch.int64), at(8, torch.int64)]
    keys: list[tuple[Any, Any]] = []
    for value in (*values, on_gpu(torch.empty(0))):
        given = arguments_of((at(0, torch.int16), value), (Specialised.ALIGNED, of_param))
        assert given is not None
        keys.append((given.key, native_specialize_impl(BaseBackend, value, False, specialises, aligns)))
    for (ours, theirs), (our_other, their_other) in itertools.combinations(keys, 2):
        assert (ours == our_other) == (theirs == their_other)


def test_a_launcher_gets_addresses_and_numbers() -> None:
    source = at(2, torch.bfloat16)
    given = arguments_of((source, None, 7, 2.5), (Specialised.ALIGNED,) * 4)
    assert given is not None
    assert given.values == [source.data_ptr(), None, 7, 2.5]
    assert given.device == 0


@pytest.mark.parametrize("strange", [torch.zeros(4), "text", (1, 2), 1j, torch.bfloat16])
def test_other_arguments_have_no_key(strange: Any) -> None:
    assert arguments_of((at(0, torch.int16), strange), (Specialised.ALIGNED,) * 2) is None


def test_without_a_tensor_there_is_no_key() -> None:
    assert arguments_of((1, 2), (Specialised.ALIGNED,) * 2) is None


def test_constants_are_told_apart_by_their_types() -> None:
    values = [1, 1.0, True, 0, 0.0, -0.0, False, None, "1", "", float("inf"), -float("inf"), (1,), (True,)]
    keys = [constants_key({"BLOCK": value, "num_warps": 4}) for value in values]
    assert len({*keys}) == len(values)
    assert constants_key({"A": 1, "B": 2}) != constants_key({"B": 1, "A": 2})
    assert constants_key({"KIND": object()}) is None


def test_parameters_are_read_from_the_kernel() -> None:
    kernel = JITFunction(copy, do_not_specialize=["count"], do_not_specialize_on_alignment=["offset"])
    aligned = Specialised.ALIGNED
    assert specialised_of(kernel) == (aligned, aligned, Specialised.NOT, Specialised.ONE, aligned)
    assert specialised_of(copy) is None


class Compiled:
    """A compiled kernel that records its launches."""

    def __init__(self, name: str, launches: list[Any]) -> None:
        self.function, self.packed_metadata = name, (4, 1, 0)
        self.run = lambda *given: launches.append(given)


class Uncompiled(JITFunction):
    """A kernel that compiles nothing and counts how often Triton would launch it."""

    def __init__(self, function: Any, compiled: Any) -> None:
        super().__init__(function)
        self.by_triton, self.launches, self.compiled = 0, list[Any](), compiled

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        self.by_triton += 1
        return self.compiled(f"kernel {self.by_triton}", self.launches)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CachedKernel:
    """A kernel on a machine that seems to have a GPU."""

    class Driver:
        active = Any

    monkeypatch.setattr(Driver, "active", type("Active", (), {"get_current_stream": lambda device: 1000 + device}))
    monkeypatch.setattr(triton_launch, "driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    return CachedKernel(Uncompiled(copy, Compiled))


def test_a_second_launch_is_by_the_compiled_kernel(kernel: CachedKernel) -> None:
    source, target = at(0, torch.bfloat16), at(16, torch.bfloat16)
    for count in (32, 48):
        kernel[(3,)](source, target, count, 5, 2.0, BLOCK=16, num_warps=4)
    assert kernel.kernel.by_triton == 1
    addresses = source.data_ptr(), target.data_ptr()
    expected = (3, 1, 1, 1000, "kernel 1", (4, 1, 0), None, None, None, *addresses, 48, 5, 2.0, 16, 1)
    assert kernel.kernel.launches == [expected]


def test_other_kernels_are_compiled_for_other_arguments(kernel: CachedKernel) -> None:
    source, target = at(0, torch.bfloat16), at(16, torch.bfloat16)
    calls: list[tuple[Any, ...]] = [
        (source, target, 32, 5, 2.0), (at(2, torch.bfloat16), target, 32, 5, 2.0), (source, target, 33, 5, 2.0),
        (source, target, 1, 5, 2.0), (source, target, 32, 2**40, 2.0), (at(0, torch.float32), target, 32, 5, 2.0),
    ]  # fmt: skip
    for _ in range(2):
        for call in calls:
            kernel[(1,)](*call, BLOCK=16)
    for _ in range(2):
        kernel[(1,)](*calls[0], BLOCK=32)
        kernel[(1,)](*calls[0], BLOCK=16, SIGN=-1)
    assert kernel.kernel.by_triton == len(calls) + 2
    launched = [launch[4] for launch in kernel.kernel.launches]
    assert launched == [f"kernel {number + 1}" for number in range(len(calls) + 2)]
    assert kernel.kernel.launches[-1][-2:] == (16, -1)


def test_hooks_observe_every_launch(kernel: CachedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = at(0, torch.bfloat16), at(16, torch.bfloat16), 32, 5, 2.0
    kernel[(1,)](*given, BLOCK=16)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
        kernel[(1,)](*given, BLOCK=16)
    kernel.kernel.add_pre_run_hook(print)
    kernel[(1,)](*given, BLOCK=16)
    assert kernel.kernel.by_triton == 3
    assert not kernel.kernel.launches


def test_another_triton_launches_itself_and_it_is_told(kernel: CachedKernel, caplog: pytest.LogCaptureFixture) -> None:
    kernel.kernel.compiled = lambda *args: object()
    for _ in range(3):
        kernel[(1,)](at(0, torch.bfloat16), at(16, torch.bfloat16), 32, 5, 2.0, BLOCK=16)
    assert kernel.kernel.by_triton == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@on_a_gpu
def test_a_gpu_computes_what_triton_launches() -> None:
    kernel = CachedKernel(JITFunction(copy))
    numbers = torch.arange(1024, dtype=torch.float32, device="cuda:0")
    for offset, first, count in itertools.product((0, 1, 16, 7), (0, 4, 5), (1, 3, 64, 48)):
        results: list[Tensor] = []
        for launched in (kernel, kernel, kernel.kernel):
            into = torch.zeros(128, device="cuda:0")
            launched[(2,)](numbers[first:], into[first:], count, offset, 0.5, BLOCK=64)
            results.append(into)
        assert all(torch.equal(result, results[-1]) for result in results)


@on_a_gpu
def test_cuda_graphs_and_streams_have_cached_launches() -> None:
    launch = CachedKernel(JITFunction(copy))[(1,)]
    source, into = torch.arange(64, dtype=torch.float32, device="cuda:0"), torch.zeros(64, device="cuda:0")
    launch(source, into, 64, 0, 2.0, BLOCK=64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(source, into, 64, 0, 2.0, BLOCK=64)
    into.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(into, source * 2)
