"""Decode attention on the CPU: ktc's kernel beside PyTorch, one layer, one new token.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/decode_attention.py [--isa avx2] [--rounds 7] [--positions 4096]
    OMP_WAIT_POLICY=passive python benchmarks/decode_attention.py --threads 16

Rows: grouped-query attention with 32 query and 8 key heads of 128 (scaled_dot_product_attention), and latent attention
of DeepSeek-V2-Lite (16 heads, latents of 512, rotary keys of 64; expanded keys as stock code, and absorbed by
PyTorch). Milliseconds of processor time (of several threads: of wall time), medians of rounds in which the candidates
take turns; the cache's bytes over them, and its share of the read bandwidth that the same rounds measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from ktc import host
from ktc.attention.decode import DecodeAttention, Heads
from ktc.attention.latent import attend
from ktc.attention.up_projection import UpProjection
from ktc.codegen.build import build
from ktc.codegen.render import render
from ktc.plan.attention_spec import AttentionSpec
from ktc.plan.linear_spec import ISAS

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
LATENT_HEADS, LATENT, ROPE, NOPE, VALUE = 16, 512, 64, 128, 128
COLD: Final = 1 << 28  # bytes read between calls, so that the cache comes from memory
Candidates = dict[str, tuple[Callable[[], object], int]]


def grouped(positions: int, decode: DecodeAttention) -> Candidates:
    """Candidates by name, with the bytes of the cache that each reads."""
    query = torch.randn(1, HEADS, 1, WIDTH).bfloat16()
    keys, values = (torch.randn(1, KEY_HEADS, positions, WIDTH).bfloat16() for _ in range(2))
    nbytes = keys.nbytes + values.nbytes
    return {
        "GQA, ktc": (lambda: decode(query, Heads(keys, values), scale=0.1), nbytes),
        "GQA, torch": (
            lambda: functional.scaled_dot_product_attention(query, keys, values, scale=0.1, enable_gqa=True), nbytes,
        ),
    }  # fmt: skip


def latent(positions: int, decode: DecodeAttention) -> Candidates:
    """Candidates by name, from queries to outputs of all heads."""
    query = torch.randn(1, LATENT_HEADS, 1, NOPE + ROPE).bfloat16()
    latents, ropes = (torch.randn(1, 1, positions, width).bfloat16() for width in (LATENT, ROPE))
    up = UpProjection(torch.randn(LATENT_HEADS, NOPE + VALUE, LATENT).bfloat16(), NOPE)
    weight, nbytes = up.weight.reshape(-1, LATENT), latents.nbytes + ropes.nbytes

    def by_kernel() -> Tensor:
        absorbed = torch.cat([up.into_latent(query[..., :NOPE]), query[..., NOPE:]], dim=-1)
        return up.out_of_latent(decode(absorbed, Heads(latents, latents, ropes), scale=0.1).transpose(1, 2))

    def expanded() -> Tensor:
        both = functional.linear(latents, weight).view(1, positions, LATENT_HEADS, -1).transpose(1, 2)
        keys = torch.cat([both[..., :NOPE], ropes.expand(-1, LATENT_HEADS, -1, -1)], dim=-1)
        return functional.scaled_dot_product_attention(query, keys, both[..., NOPE:], scale=0.1)

    return {
        "MLA, ktc": (by_kernel, nbytes),
        "MLA, torch, absorbed": (lambda: attend(query, latents[:, 0], ropes[:, 0], up, scale=0.1), nbytes),
        "MLA, torch, expanded": (expanded, nbytes),
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    best = next(isa for isa in ISAS if isa in host.detect().isas)
    parser.add_argument("--isa", choices=ISAS, default=best)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    spec = AttentionSpec("attention", "bf16", options.isa)
    decode = DecodeAttention(build(render([spec], {spec: "bench"}), host.detect()).kernel(spec.entry), options.threads)
    candidates = grouped(options.positions, decode) | latent(options.positions, decode)
    cold = torch.ones(COLD // 8, dtype=torch.int64)
    times: dict[str, list[float]] = {name: [] for name in (*candidates, "read")}
    with torch.no_grad():
        for _ in range(options.rounds + 1):
            for name, (run, _) in candidates.items():
                times["read"].append(seconds(cold.sum, clock))
                times[name].append(seconds(run, clock))
    read = COLD / statistics.median(times["read"])
    print(f"{options.positions} positions, {options.isa}, read {read / 1e9:.1f} GB/s")
    for name, (_, nbytes) in candidates.items():
        found = statistics.median(times[name][1:])
        print(f"{name:24}{found * 1e3:9.2f} ms {nbytes / found / 1e9:7.1f} GB/s  {nbytes / found / read:5.2f} of read")


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the time of a call."""
    began = clock()
    run()
    return clock() - began


if __name__ == "__main__":
    main()
