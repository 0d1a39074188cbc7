"""The test of every built kernel for decoding steps, before its first use.

In: one kernel and its spec. Refused (H225): an operation that computes other values than PyTorch, on odd sizes, strides
and all dtypes, or other values in a later run, or other bits with three threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.step_context import StepContext
from ktc.model.kernels.step_spec import StepSpec
from ktc.model.steps.program import StepProgram, record_program
from ktc.stages.codegen.wrong_kernel import norm, wrong

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Relative Frobenius error of a few operations in turn.
_ROUNDINGS: Final = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}
_ROWS, _WIDTH, _CHOSEN = 3, 333, 5


def self_test_step(kernel: Kernel, spec: StepSpec) -> None:
    """Raise `KtcError` (H225) if an operation is wrong."""
    for dtype in _DTYPES:
        inputs = _inputs(dtype, seed=29)
        try:
            programs = [_program(kernel, inputs, threads) for threads in (1, 3)]
        except ValueError as error:
            raise wrong(spec, f"{error}, in {dtype}") from error
        for tensor, other in zip(inputs, _inputs(dtype, seed=31), strict=True):
            tensor.copy_(other)
        expected = _computed(*inputs)
        outputs = [_results(program, results) for program, results in programs]
        if not all(_agree(one, other) for one, other in zip(outputs[0], expected, strict=True)):
            raise wrong(spec, f"a second run computes other values, in {dtype}")
        if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*outputs, strict=True)):
            raise wrong(spec, f"three threads compute other bits, in {dtype}")


def _inputs(dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Values (rows, width) in the dtype, a weight, a cache, and the place of a new token in it."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(_ROWS, _WIDTH, generator=generator).to(dtype) for _ in range(2))
    cache = torch.randn(_ROWS, 2, 7, 9, generator=generator).to(dtype)
    return x, y, cache, torch.tensor([seed % 7])


def _computed(x: Tensor, y: Tensor, cache: Tensor, place: Tensor) -> tuple[Tensor, ...]:
    """Compute with every operation that a program has, on values as steps have them."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = _constant(x.dtype, 1100, _WIDTH)
    normal = y * (x.to(wide) * torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    scores = torch.softmax(x[:, :64], dim=-1, dtype=wide)
    values, indices = torch.topk(scores, _CHOSEN, dim=-1)
    values = (values / values.sum(dim=-1, keepdim=True)).to(x.dtype)
    chosen = torch.zeros_like(scores).scatter_(1, indices, 1.0)
    groups = scores.view(_ROWS, 8, 8).amax(dim=-1).masked_fill(chosen[:, :8] != 0, 0.0)
    turned = torch.view_as_complex(x[:, :320].to(torch.float32).reshape(_ROWS, 160, 2).contiguous())
    angles = torch.view_as_complex(torch.stack((y[:, :160].float().cos(), y[:, 160:320].float().sin()), -1))
    written = cache.index_copy_(2, place, y[:, :18].view(_ROWS, 2, 1, 9))
    seen = torch.arange(7) <= place
    return (
        normal, values, indices, chosen, groups, scores.gather(1, indices), written * seen[:, None],
        torch.view_as_real(turned * angles), torch.cat((x[:, 160:], -x[:, :160]), dim=-1),
        functional.linear(x, weight), functional.linear(x, weight[:40], y[0, :40]), x @ weight[:_WIDTH, :11],
        torch.bmm(x.view(_ROWS, 9, 37)[:, :5], y.view(_ROWS, 37, 9)),
        functional.embedding(indices, weight), cache.index_select(2, place), *_functions(x, y),
    )  # fmt: skip


def _functions(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    positive = x.abs() + 0.5
    return (
        x + y, x - y, x * y, x / positive, torch.minimum(x, y), torch.maximum(x, y), positive.pow(1.5), positive.sqrt(),
        positive.reciprocal(), positive.log(), x.exp(), x.sin(), x.tanh(), x.sigmoid(), functional.silu(x),
        functional.gelu(x), functional.gelu(x, approximate="tanh"), x.relu(), functional.softplus(x),
        x.clamp(min=-0.5, max=0.25), torch.where(x > y, x, y), x == y, x != y, x < y, x <= y, x >= y,
        (x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0), (x[:, :9] > 0).sum(-1), x.t() + y.t(),
        x.unsqueeze(1) * y.unsqueeze(0), (x * 2 + 1).to(torch.int64), (x > 0).to(x.dtype), x.float().to(torch.bfloat16),
    )  # fmt: skip


def _constant(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.linspace(-1, 1, steps=size[0] * size[1]).sin().view(size).to(dtype)


def _program(kernel: Kernel, inputs: tuple[Tensor, ...], threads: int) -> tuple[StepProgram, tuple[Tensor, ...]]:
    def results(output: Any) -> tuple[Tensor, ...]:
        return output

    _, program, tensors = record_program(lambda: _computed(*inputs), inputs, kernel, threads, results, StepContext())
    if program.foreign:
        raise ValueError(f"`{program.foreign[0]}` has no native form")
    return program, tensors


def _results(program: StepProgram, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    program.run()
    return tuple(tensor.clone() for tensor in results)


def _agree(ours: Tensor, expected: Tensor) -> bool:
    """Return whether results are those of PyTorch, up to the few roundings between the inputs and them."""
    if not expected.is_floating_point():
        return torch.equal(ours, expected)
    wide = expected.double()
    return norm(ours.double() - wide) <= _ROUNDINGS[expected.dtype] * norm(wide)
