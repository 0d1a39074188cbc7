"""The cost of a call of a kernel beside the kernel: one token, tiny sizes, one thread.

    taskset -c 0 python benchmarks/kernel_calls.py [--against OTHER_CHECKOUT] [--turns 5] [--calls 20000]

Microseconds per call: the median of the turns, each the median of 200 batches of calls. With `--against`, two checkouts
take turns, and the last column is this checkout's time over the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from ktc.foundation import host
from ktc.model.attention.decode import DecodeAttention, KVCacheView
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.trained.lora import ExpertsLora, Lora
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.kernels.form import ExpertsSizes, parse_form
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.linear_spec import LinearSpec
from ktc.model.linears.gemv import Gemv
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render

_BATCHES: Final = 200
_ROOT: Final = Path(__file__).parent.parent


def candidates() -> dict[str, Callable[[], object]]:
    """Return the calls, by name."""
    attention = AttentionSpec("attention", "fp32", "scalar")
    linear = LinearSpec("linear", "fp32", "scalar")
    moe = FusedMoeSpec(
        "fused_moe", None, None, None, None, "fp32", "fp32", "fp32", "scalar", parse_form("silu").activation
    )
    library = build(render((attention, linear, moe), {}), host.detect())
    decode, gemv = DecodeAttention(library.kernel(attention.entry), 1), Gemv(library.kernel(linear.entry), 1)
    experts = PackedExperts(library.kernel(moe.entry), 1, ExpertsSizes(2, 32, 32, 1))
    kv = KVCacheView(torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8))
    query, mask = torch.randn(1, 1, 1, 8), torch.ones(1, 1, 1, 4, dtype=torch.bool)
    x, weight = torch.randn(1, 32), torch.randn(32, 32)
    index, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    lora = ExpertsLora(*(Lora(torch.zeros(2, 1, 32), torch.zeros(2, outputs, 1), 1.0) for outputs in (64, 32)))
    return {
        "attention": lambda: decode(query, kv, scale=0.5),
        "attention, masked": lambda: decode(query, kv, scale=0.5, mask=mask),
        "linear": lambda: gemv(x, weight, None),
        "experts": lambda: experts.forward(x, index, weights, save=False),
        "experts, LoRA": lambda: experts.forward(x, index, weights, save=False, lora=lora),
    }


def measured(calls: int) -> dict[str, float]:
    """Return microseconds per call."""
    calls_by_name, found = candidates(), dict[str, float]()
    with torch.no_grad():
        for name, call in calls_by_name.items():
            batches: list[float] = []
            for _ in range(_BATCHES):
                began = time.perf_counter()
                for _ in range(calls // _BATCHES):
                    call()
                batches.append(time.perf_counter() - began)
            found[name] = statistics.median(batches) / (calls // _BATCHES) * 1e6
    return found


def turn_of(checkout: Path, calls: int) -> dict[str, float]:
    """Measure in a process of a checkout."""
    command = [sys.executable, checkout / "benchmarks/kernel_calls.py", "--once", "--calls", str(calls)]
    of_checkout = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=of_checkout, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--once", action="store_true", help="print one turn as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.once:
        json.dump(measured(given.calls), sys.stdout)
        return
    checkouts = [_ROOT] if given.against is None else [given.against, _ROOT]
    turns = [[turn_of(each, given.calls) for each in checkouts] for _ in range(given.turns)]
    for name in turns[0][0]:
        times = [statistics.median(turn[place][name] for turn in turns) for place in range(len(checkouts))]
        ratio = f"  {times[-1] / times[0]:5.2f}" if len(times) > 1 else ""
        print(f"{name:18}" + "".join(f"{each:8.2f}" for each in times) + ratio)


if __name__ == "__main__":
    main()
