"""Experts of a step between small operations of PyTorch: on threads of their own, and on those of PyTorch's OpenMP.

    python benchmarks/kernel_threads.py THREADS

Each row is a process with PyTorch on THREADS threads, idle ones spinning (`default`) or asleep (`passive`). A step is
two layers of DeepSeek-V2-Lite's experts in bf16, one token, with elementwise operations around each that take all
threads. Wall milliseconds, the median and the slowest tenth: the step, its experts alone, its other operations alone,
and the layers with backward.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ktc.foundation import host
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels import openmp
from ktc.model.kernels.form import ExpertsSizes, parse_form
from ktc.model.kernels.fused_moe_spec import KERNELS, FusedMoeSpec
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, LAYERS = 64, 2048, 1408, 6, 2
WIDTH: Final = 40_000  # elements per thread: above the size from which PyTorch uses all of them


def layers(threads: int) -> list[FusedMoe]:
    """Return layers of random weights, the same for every expert."""
    isa, form = next(isa for isa in host.detect().isas if isa in KERNELS), parse_form("silu")
    sizes = (None, None, None, None)
    spec = FusedMoeSpec("fused_moe", *sizes, "bf16", "bf16", "bf16", isa, form.activation, gated=True, biased=False)
    library, made = build(render((spec,), {spec: "benchmark"}), host.detect()), list[FusedMoe]()
    values = torch.randn(INTERMEDIATE, HIDDEN).mul(0.02).bfloat16()
    for _ in range(LAYERS):
        kernel = library.kernel(spec.entry)
        sizes_of_layer = ExpertsSizes(EXPERTS, HIDDEN, INTERMEDIATE, TOP_K)
        packed = PackedExperts(kernel, threads, sizes_of_layer)
        made.append(FusedMoe(ExpertsWeights(form, sizes_of_layer, torch.bfloat16, packed)))
        for expert in range(EXPERTS):
            for part, matrix in (("gate", values), ("up", values), ("down", values.T.contiguous())):
                made[-1].load_expert(expert, part, matrix)
    return made


def spread(call: Callable[[], object], rounds: int = 150) -> str:
    """Return the median and the slowest tenth of the times of `call`."""
    times: list[float] = []
    for _ in range(rounds + 15):
        begun = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begun))
    times = sorted(times[15:])
    return f"{times[rounds // 2]:8.3f} {times[rounds * 9 // 10]:8.3f}"


def measure(threads: int) -> str:
    """Return a row's times."""
    model, index, weights = layers(threads), torch.randperm(EXPERTS)[:TOP_K][None], torch.rand(1, TOP_K)
    x, large = torch.randn(1, HIDDEN).bfloat16(), torch.randn(threads, WIDTH)
    leaf = x.clone().requires_grad_()

    def step(compute: Callable[[FusedMoe, Tensor], Tensor], out: Tensor) -> Tensor:
        for layer in model:
            large.mul(1.5)
            out = out + compute(layer, out)
            large.mul(1.5)
        return out

    with torch.no_grad():
        whole = spread(lambda: step(lambda layer, out: layer(out, index, weights), x))
        experts = spread(lambda: [layer(x, index, weights) for layer in model])
        others = spread(lambda: step(lambda layer, out: out, x))
    backward = spread(lambda: step(lambda layer, out: layer(out, index, weights), leaf).float().sum().backward(), 60)
    return f"{whole} |{experts} |{others} |{backward}"


def main() -> None:
    threads = sys.argv[1]
    if len(sys.argv) > 2:
        if sys.argv[2] == "own":
            openmp.functions = lambda: (0, 0, 0, 0)
        print(measure(int(threads)))
        return
    print(f"{'idle':8} {'threads':8} {'step':>17} | {'experts':>15} | {'others':>15} | {'with backward':>15}")
    for policy in ("default", "passive"):
        for kind in ("own", "openmp"):
            environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
            if policy == "default":
                del environment["OMP_WAIT_POLICY"]
            words = [sys.executable, __file__, threads, kind]
            row = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            print(f"{policy:8} {kind:8} {row.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
