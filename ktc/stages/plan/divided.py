"""From how many tokens on the experts of a call are divided among a GPU's memory, the bus and the CPU.

In: the prefill of experts whose decoding steps are split, and a machine's rates. Out: the same with `divided`, 0 where
it does not pay below the calls that are sent whole, and with `crowded`. Choices are taken as even.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ktc.foundation.formats import FORMATS, Blocks, Codes
from ktc.foundation.rates import CODES_READ, Rates
from ktc.model.experts.kept.kept_division import FEWEST, Division, even_over_bus
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.targets.target import Prefill
from ktc.stages.plan.streamed_bytes import expert_bytes

# Python that no engine works beside: two waits, sorting, the last products and sums; in operators of a small module.
OVERHEAD: Final = 130


def reads_of(spec: FusedMoeSpec) -> float:
    """Return the part of the CPU's bandwidth that few rows times the stored weights reach."""
    return CODES_READ if isinstance(FORMATS[spec.format_gate_up], Codes | Blocks) else 1.0


def with_division(prefill: Prefill, spec: FusedMoeSpec, rates: Rates) -> Prefill:
    """Return the prefill, whose share of the bus is known, with the division of calls of fewer than its tokens."""
    gpu, cpu, nbytes = rates.gpus[int(prefill.devices[0].partition(":")[2] or 0)], rates.cpu, expert_bytes(spec)
    by_threads = cpu.products.get(spec.format_gate_up) or cpu.products["bf16"]
    products, alone = by_threads[max(by_threads)].median, cpu.bandwidth[max(cpu.bandwidth)].median * reads_of(spec)
    row = 2 * (2 + spec.gated) * (spec.hidden or 1) * (spec.intermediate or 1) / products  # seconds
    beside, bus = gpu.cpu_beside_bus.median * reads_of(spec), gpu.bus_beside_cpu.median
    division = Division(FEWEST, round(max(1.0, nbytes / beside / row), 1))
    count, top_k, tokens = spec.num_experts or 1, spec.top_k or 1, FEWEST
    while tokens < prefill.tokens:
        chosen = count * (1 - (1 - top_k / count) ** tokens)
        misses, rows = chosen * (1 - (prefill.kept or 0) / count), tokens * top_k / chosen
        sent = even_over_bus(misses, rows, prefill.share, division)
        on_cpu = (misses - sent) * nbytes / beside * division.cost(rows)
        if max(sent * nbytes / bus, on_cpu) + OVERHEAD * gpu.operator.median < chosen * max(nbytes / alone, rows * row):
            return replace(prefill, divided=tokens, crowded=division.crowded)
        tokens *= 2
    return prefill
