"""The processor: products of experts in ktc's kernels, fp32 products of PyTorch, reads of memory, and fixed costs.

In: a machine, and the kernels that were built for it. Out: figures in SI units, by threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from ktc.foundation.formats import CODES, FORMATS, WeightFormat
from ktc.foundation.host import Host
from ktc.foundation.isa import Isa
from ktc.foundation.rates import Figure
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.random_experts import RandomExperts
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.form import ExpertsSizes, parse_form
from ktc.model.kernels.fused_moe_spec import KERNELS, FusedMoeSpec
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.tools.measure.figures import repeated, threads_of_torch
from ktc.tools.measure.limits import Limits

# A format of each kind: others have a close relative among them, such as q5_k in q4_k.
_FORMATS: Final[tuple[WeightFormat, ...]] = (
    "bf16", "int8", "int4", "fp8", "mxfp4", "q8_0", "q4_0", "q4_k", "q6_k", "uint4_g128",
)  # fmt: skip
_SIZES: Final = ExpertsSizes(num_experts=8, hidden=2048, intermediate=1536, top_k=2)  # about those of V2-Lite
SMALL: Final = ExpertsSizes(num_experts=2, hidden=64, intermediate=64, top_k=1)  # a call is nearly all of its time
_ROWS: Final = (128, 512)  # of an expert: as in a prompt or a training step, more on a faster machine
_LONG: Final = 12e-3  # seconds of a call beside which the start and the end of its threads' work count little
_SLOW_ROWS: Final = 2  # for an instruction set that would take seconds
_BUDGET: Final = 0.25  # seconds of one figure
_CALLS: Final = 500
_SIDE: Final = 1536  # of a square fp32 product


def formats(isa: Isa) -> tuple[WeightFormat, ...]:
    """Return the weight formats that are measured on an instruction set."""
    return tuple(name for name in _FORMATS if name in KERNELS[isa])


def kernels(isa: Isa) -> tuple[FusedMoeSpec, ...]:
    """Return the kernels to build: of each format, then of a small call."""
    return (*(_spec(_SIZES, isa, name) for name in formats(isa)), _spec(SMALL, isa, "bf16"))


def thread_counts(host: Host) -> tuple[int, ...]:
    """Return one, all but one, and all: the last core may belong to a GPU's driver."""
    return tuple(sorted({1, max(1, host.workers - 1), host.workers}))


def _spec(sizes: ExpertsSizes, isa: Isa, name: WeightFormat) -> FusedMoeSpec:
    dims = (sizes.hidden, sizes.intermediate, sizes.num_experts, sizes.top_k)
    group = CODES[name].group_sizes[0] if name in CODES else 0
    return FusedMoeSpec("fused_moe", *dims, FORMATS[name].dtype, name, name, isa, group_size=group)


class Experts:
    """The experts of one kernel with random weights."""

    def __init__(self, library: KernelLibrary, spec: FusedMoeSpec, sizes: ExpertsSizes = _SIZES) -> None:
        self._sizes, self._slow = sizes, spec.isa == "scalar"
        self._packed = PackedExperts(library.kernel(spec.entry), 1, sizes, "none")
        module = FusedMoe(ExpertsWeights(parse_form("silu"), sizes, torch.bfloat16, self._packed))
        RandomExperts(0).fill(module, 0, lambda size: None)

    def products(self, threads: int, budget: float = _BUDGET) -> Figure:
        """Return FLOP/s of forward, with the same many rows for all experts."""
        num_experts, hidden, intermediate, top_k = self._sizes
        few, many = (rows * num_experts // top_k for rows in ((_SLOW_ROWS,) * 2 if self._slow else _ROWS))
        tokens, call = few, self._call(threads, few)
        call()
        if _seconds(call) < _LONG:
            tokens, call = many, self._call(threads, many)
        flops = 6 * tokens * top_k * hidden * intermediate
        return repeated(lambda: flops / _seconds(call), budget)

    def call(self) -> Figure:
        """Return the seconds of a call with one token."""
        call = self._call(1, 1)
        return repeated(lambda: _seconds(call, _CALLS), _BUDGET)

    def _call(self, threads: int, tokens: int) -> Callable[[], object]:
        num_experts, hidden, _, top_k = self._sizes
        packed = self._packed.with_threads(threads)
        generator = torch.Generator().manual_seed(0)
        x_TH = torch.randn(tokens, hidden, generator=generator).bfloat16()
        index_TK = (torch.arange(tokens * top_k) % num_experts).view(tokens, top_k)
        weights_TK = torch.full((tokens, top_k), 1 / top_k)
        return partial(packed.forward, *packed.inputs(x_TH, index_TK, weights_TK), save=False)


def fp32_products(threads: int) -> Figure:
    """Return FLOP/s of PyTorch's product of two large fp32 matrices."""
    x, y = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    out = torch.empty(_SIDE, _SIDE)
    with threads_of_torch(threads):
        return repeated(lambda: 2 * _SIDE**3 / _seconds(lambda: torch.mm(x, y, out=out)), _BUDGET)


def operator() -> Figure:
    """Return the seconds of one PyTorch operator on few numbers."""
    x = torch.ones(16)
    return repeated(lambda: _seconds(lambda: x + x, 4 * _CALLS), _BUDGET)


def _seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of one of these calls in a row."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def by_threads(counts: Sequence[int], measure: Callable[[int], Figure]) -> dict[int, Figure]:
    """Return the figure of each number of threads."""
    return {threads: measure(threads) for threads in counts}


def reads(limits: Limits) -> Figure:
    """Return the bytes/s that threads read."""
    return repeated(limits.read, _BUDGET)
