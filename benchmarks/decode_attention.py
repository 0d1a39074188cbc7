"""Decode attention on the CPU: ktc's kernel beside PyTorch, one layer, one new token.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/decode_attention.py [--isa avx2] [--rounds 7] [--positions 4096]
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/decode_attention.py --sparse --positions 131072 [--k 2048]
    OMP_WAIT_POLICY=passive python benchmarks/decode_attention.py --threads 16 [--latent-heads 128]

Rows: grouped-query attention with 32 query and 8 key heads of 128 (scaled_dot_product_attention), and latent attention
of DeepSeek-V2-Lite (16 heads, V3 has 128; latents of 512, rotary keys of 64; expanded keys as stock code, and absorbed
by PyTorch). "int8" reads the same cache as codes of 8 bits and their scales, "in pages" from pages in a random order.
"unequal" is a padded batch of 8 sequences, of which 7 have a sixteenth of the positions.

Milliseconds of processor time (of several threads: of wall time), medians of rounds in which the candidates take turns;
the cache's bytes over them, and its share of the read bandwidth that the same number of threads has in the same rounds.
Keys and values come from memory in every call. "cold" is a call whose code, Python's and the kernel's, comes from
memory too; before the others a call over 16 positions has run, as other layers have in a decode step.

With `--sparse`, ktc's dense kernel beside `sparse_attention`, each step with the codes of the new key: the bytes that
it reads, and how many times as fast as dense it is (the median of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from ktc.foundation import host
from ktc.model.attention.decode import DecodeAttention, KVCacheView
from ktc.model.attention.index_kernel import IndexKernel
from ktc.model.attention.int8_decode import Int8DecodeAttention, quantised
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.key_index import KeyIndex
from ktc.model.attention.latent import attend, latent_scores
from ktc.model.attention.paged_tensor import PAGE, PagedTensor, PageTable
from ktc.model.attention.sparsity import FORMATS, Sparsity, Traffic
from ktc.model.attention.up_projection import UpProjection
from ktc.model.experts.layouts.packed import zeros_on_huge_pages
from ktc.model.kernels.attention_spec import ISAS, AttentionSpec
from ktc.model.kernels.linear_spec import ISAS as CODE_ISAS
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
COLD: Final = 1 << 28  # bytes read between calls, so that the cache comes from memory
Candidates = dict[str, tuple[Callable[[], object], int]]


def random(*shape: int) -> Tensor:
    """Return bf16 numbers on huge pages, as a growing cache has them."""
    numbers = torch.randn(shape).bfloat16()
    return zeros_on_huge_pages(shape, numbers).copy_(numbers)


def coded(heads: KVCacheView, decode: DecodeAttention) -> KVCacheView:
    """Return the cache as int8 codes, on huge pages as a growing cache has them."""
    kernel = decode.kernel

    def of(numbers: Tensor) -> Tensor:
        made = quantised(kernel, numbers)
        codes = zeros_on_huge_pages(tuple(made.codes.shape), made.codes).copy_(made.codes)
        return Int8Tensor(codes, made.scales, made.dtype)

    keys = of(heads.keys)
    more = None if heads.rope_keys is None else of(heads.rope_keys)
    return KVCacheView(keys, keys if heads.values is heads.keys else of(heads.values), more)


def in_pages(heads: KVCacheView) -> KVCacheView:
    """Return a cache of one sequence in pages, whose order is random."""
    positions = heads.keys.shape[2]
    count = -(-positions // PAGE)
    order = torch.randperm(count)
    table = PageTable(order[None].int(), torch.tensor([positions]))

    def of(numbers: Tensor) -> Tensor:
        memory = zeros_on_huge_pages((count, numbers.shape[1], PAGE, numbers.shape[3]), numbers)
        for at, page in enumerate(order.tolist()):
            part = numbers[0, :, at * PAGE : (at + 1) * PAGE]
            memory[page, :, : part.shape[1]] = part
        return PagedTensor(memory, table, positions)

    keys = of(heads.keys)
    more = None if heads.rope_keys is None else of(heads.rope_keys)
    return KVCacheView(keys, keys if heads.values is heads.keys else of(heads.values), more)


def size(heads: KVCacheView) -> int:
    """Return the bytes of a cache."""
    values = 0 if heads.values is heads.keys else heads.values.nbytes
    return heads.keys.nbytes + values + (0 if heads.rope_keys is None else heads.rope_keys.nbytes)


def grouped(positions: int, decode: DecodeAttention, by_codes: DecodeAttention) -> Candidates:
    """Candidates by name, with the bytes of the cache that each reads."""
    query = torch.randn(1, HEADS, 1, WIDTH).bfloat16()
    keys, values = (random(1, KEY_HEADS, positions, WIDTH) for _ in range(2))
    nbytes = keys.nbytes + values.nbytes
    codes, pages = coded(KVCacheView(keys, values), by_codes), in_pages(KVCacheView(keys, values))
    rows, shorter = 8, max(positions // 16, 1)
    queries, batch = (
        query.expand(rows, -1, -1, -1),
        KVCacheView(*(random(rows, KEY_HEADS, positions, WIDTH) for _ in "kv")),
    )
    lengths = torch.tensor([positions, *[shorter] * (rows - 1)])
    mask = (torch.arange(positions) >= positions - lengths[:, None])[:, None, None]
    of_rows = nbytes * int(lengths.sum()) // positions
    return {
        "GQA, ktc": (lambda: decode(query, KVCacheView(keys, values), scale=0.1), nbytes),
        "GQA, ktc, in pages": (lambda: decode(query, pages, scale=0.1), nbytes),
        "GQA, ktc, unequal": (lambda: decode(queries, batch, scale=0.1, mask=mask), of_rows),
        "GQA, ktc, int8": (lambda: by_codes(query, codes, scale=0.1), size(codes)),
        "GQA, torch": (
            lambda: functional.scaled_dot_product_attention(query, keys, values, scale=0.1, enable_gqa=True), nbytes,
        ),
    }  # fmt: skip


def latent(positions: int, count: int, decode: DecodeAttention, by_codes: DecodeAttention) -> Candidates:
    """Candidates by name, from queries to outputs of `count` heads."""
    query = torch.randn(1, count, 1, NOPE + ROPE).bfloat16()
    latents, ropes = (random(1, 1, positions, width) for width in (LATENT, ROPE))
    up = UpProjection(torch.randn(count, NOPE + VALUE, LATENT).bfloat16(), NOPE)
    weight, nbytes = up.weight.reshape(-1, LATENT), latents.nbytes + ropes.nbytes

    codes, pages = coded(KVCacheView(latents, latents, ropes), by_codes), in_pages(KVCacheView(latents, latents, ropes))

    def by_kernel(decode: DecodeAttention, heads: KVCacheView) -> Tensor:
        absorbed = torch.cat([up.into_latent(query[..., :NOPE]), query[..., NOPE:]], dim=-1)
        return up.out_of_latent(decode(absorbed, heads, scale=0.1).transpose(1, 2))

    def expanded() -> Tensor:
        both = functional.linear(latents, weight).view(1, positions, count, -1).transpose(1, 2)
        keys = torch.cat([both[..., :NOPE], ropes.expand(-1, count, -1, -1)], dim=-1)
        return functional.scaled_dot_product_attention(query, keys, both[..., NOPE:], scale=0.1)

    def absorbed() -> object:
        return attend(latent_scores(query, latents[:, 0], ropes[:, 0], up, scale=0.1), latents[:, 0], up)

    return {
        "MLA, ktc": (lambda: by_kernel(decode, KVCacheView(latents, latents, ropes)), nbytes),
        "MLA, ktc, in pages": (lambda: by_kernel(decode, pages), nbytes),
        "MLA, ktc, int8": (lambda: by_kernel(by_codes, codes), size(codes)),
        "MLA, torch, absorbed": (absorbed, nbytes),
        "MLA, torch, expanded": (expanded, nbytes),
    }


def sparse(positions: int, k: int, count: int, decode: DecodeAttention, index: IndexKernel) -> dict[str, Candidates]:
    """Dense and sparse candidates of both kinds of attention, with the bytes that each reads."""
    query = torch.randn(1, HEADS, 1, WIDTH).bfloat16()
    heads = KVCacheView(*(random(1, KEY_HEADS, positions, WIDTH) for _ in range(2)))
    q_latent = torch.randn(1, count, 1, NOPE + ROPE).bfloat16()
    latents, ropes = (random(1, 1, positions, width) for width in (LATENT, ROPE))
    up = UpProjection(torch.randn(count, NOPE + VALUE, LATENT).bfloat16(), NOPE)

    def absorbed(attend: Callable[[Tensor], Tensor]) -> Tensor:
        query = torch.cat([up.into_latent(q_latent[..., :NOPE]), q_latent[..., NOPE:]], dim=-1)
        return up.out_of_latent(attend(query).transpose(1, 2))

    def step(query: Tensor, heads: KVCacheView, held: KeyIndex, sparsity: Sparsity) -> Tensor:
        held.crop(positions - 1)
        index.extend(held, heads, positions)
        return decode.of_chosen(query, heads, index.select(held, query, None, sparsity, 0.1), scale=0.1)

    found: dict[str, Candidates] = {}
    for kind, of, shape in (
        ("GQA", heads, (HEADS, KEY_HEADS, 4 * WIDTH, WIDTH)),
        ("MLA", KVCacheView(latents, latents, ropes), (count, 1, 2 * (LATENT + ROPE), LATENT + ROPE)),
    ):
        dense = Traffic(0, 0, positions * shape[1] * shape[2])
        if kind == "GQA":
            rows: Candidates = {"GQA, dense": (lambda: decode(query, heads, scale=0.1), dense.dense)}
        else:
            rows = {"MLA, dense": (lambda of=of: absorbed(lambda q: decode(q, of, scale=0.1)), dense.dense)}
        for name in FORMATS:
            held = KeyIndex.of(of, torch.ones(1, positions, dtype=torch.bool), name)
            index.extend(held, of, positions)
            for shared in (False, True) if kind == "GQA" else (True,):
                sparsity = Sparsity(k, 64, 256, name, shared)
                traffic = sparsity.traffic(positions, *shape)
                run = functools.partial(step, heads=of, held=held, sparsity=sparsity)
                run = functools.partial(run, query) if kind == "GQA" else functools.partial(absorbed, run)
                label = f"{kind}, {name}, {'shared' if shared else 'per head'}"
                rows[label] = (run, traffic.index + traffic.gathered)
        found[kind] = rows
    return found


def compare(
    rounds: int,
    small: dict[str, Candidates],
    kinds: dict[str, Candidates],
    cold: Tensor,
    clock: Callable[[], float],
) -> None:
    """Print how many times as fast as dense attention the sparse candidates are, in calls after those of `small`."""
    for kind, rows in kinds.items():
        times: dict[str, list[float]] = {name: [] for name in rows}
        with torch.no_grad():
            for _ in range(rounds + 1):
                for name, (run, _) in rows.items():
                    cold.sum()
                    small[kind][name][0]()
                    times[name].append(seconds(run, clock))
        dense = next(iter(times.values()))[1:]
        for name, (_, nbytes) in rows.items():
            ratio = statistics.median(a / b for a, b in zip(dense, times[name][1:], strict=True))
            print(f"{name:24}{statistics.median(times[name][1:]) * 1e3:9.2f} ms {nbytes / 1e6:7.1f} MB  {ratio:5.1f}x")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    isas = host.detect().isas
    best = next(isa for isa in ISAS["bf16"] if isa in isas)
    parser.add_argument("--isa", choices=ISAS["bf16"], default=best)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--latent-heads", type=int, default=16, help="16 as V2-Lite, 128 as V3")
    parser.add_argument("--sparse", action="store_true", help="compare sparse with dense attention of ktc")
    parser.add_argument("--k", type=int, default=2048, help="positions that sparse attention chooses by their scores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    cold = torch.ones(COLD // 8, dtype=torch.int64)
    if options.sparse:
        spec = AttentionSpec("sparse_attention", "bf16", options.isa)
        kernel = build(render([spec], {spec: "bench"}), host.detect()).kernel(spec.entry)
        both = DecodeAttention(kernel, options.threads), IndexKernel(kernel, options.threads)
        print(f"{options.positions} positions, {options.isa}, k = {options.k}, 64 first and 256 last positions")
        small, kinds = (sparse(length, options.k, options.latent_heads, *both) for length in (16, options.positions))
        compare(options.rounds, small, kinds, cold, clock)
        return
    of_codes = options.isa if options.isa in CODE_ISAS else next(isa for isa in CODE_ISAS if isa in isas)
    specs = AttentionSpec("attention", "bf16", options.isa), AttentionSpec("int8_attention", "bf16", of_codes)
    library = build(render(list(specs), dict.fromkeys(specs, "bench")), host.detect())
    decode = DecodeAttention(library.kernel(specs[0].entry), options.threads)
    by_codes = Int8DecodeAttention(library.kernel(specs[1].entry), options.threads)
    small, candidates = (
        grouped(length, decode, by_codes) | latent(length, options.latent_heads, decode, by_codes)
        for length in (16, options.positions)
    )
    print(f"{options.positions} positions, {options.isa}, {options.threads} threads")
    share_of_read(options.rounds, small, candidates, cold, clock)


def share_of_read(
    rounds: int, small: Candidates, candidates: Candidates, cold: Tensor, clock: Callable[[], float]
) -> None:
    """Print how fast the candidates read their caches, in calls after those of `small`, and with cold code."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    reads: list[float] = []
    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, (run, _) in candidates.items():
                reads.append(seconds(cold.sum, clock))
                code_too = seconds(run, clock)
                reads.append(seconds(cold.sum, clock))
                small[name][0]()
                times[name].append((seconds(run, clock), code_too))
    read = COLD / statistics.median(reads)
    print(f"read {read / 1e9:.1f} GB/s")
    for name, (_, nbytes) in candidates.items():
        found, code_too = (statistics.median(each) for each in zip(*times[name][1:], strict=True))
        share = nbytes / found / read
        print(f"{name:24}{found * 1e3:9.2f} ms {nbytes / found / 1e9:7.1f} GB/s {share:6.2f} of read", end="")
        print(f"{code_too * 1e3:9.2f} ms cold")


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the time of a call."""
    began = clock()
    run()
    return clock() - began


if __name__ == "__main__":
    main()
