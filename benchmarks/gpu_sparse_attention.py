"""Dense and sparse attention of one new token on a GPU, beside the memory's bandwidth, in CUDA graphs.

python benchmarks/gpu_sparse_attention.py --positions 4096,32768,131072

Sizes are those of DeepSeek-V2-Lite (absorbed latents) and Qwen3-30B-A3B (grouped heads). Caches alternate, so that none
is in the L2 cache of the GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.sparse_kernels import StepKeys, attend_sparsely
from ktc.model.attention.sparsity import IndexFormat, Sparsity
from ktc.model.attention.split_kernels import attend
from ktc.model.attention.step_index import IndexedLayer

_SIZES: dict[str, tuple[int, int, int, int]] = {  # query heads, key heads, width, rotary width beside latents
    "V2-Lite": (16, 1, 512, 64),
    "Qwen3-30B": (32, 4, 128, 0),
}
_FORMATS: tuple[IndexFormat, ...] = ("int4", "sign")
_ALTERNATING_BYTES = 512 << 20


def bandwidth() -> float:
    """Return the bytes that the GPU reads in a second, by sums of 4 GiB."""
    numbers = torch.ones(1 << 30, device="cuda")
    return numbers.nbytes / median_of_graph([lambda: numbers.sum()])


def median_of_graph(calls: list[Callable[[], object]], rounds: int = 30) -> float:
    """Return the seconds of a call, in a CUDA graph of all calls."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = list[float]()
    for _ in range(rounds):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3 / len(calls))
    return statistics.median(times)


def cache(name: str, rows: int, positions: int) -> tuple[Tensor, Tensor, KVCacheView]:
    """Return random keys and values in bf16 of some sequences, and the view of them."""
    _, key_heads, width, rope = _SIZES[name]
    keys = torch.randn(rows, key_heads, positions, width, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(rows, key_heads, positions, rope or width, device="cuda", dtype=torch.bfloat16)
    return keys, values, KVCacheView(keys, keys, values) if rope else KVCacheView(keys, values)


def measure(name: str, shape: tuple[int, int], speed: float, k: int, local: int, profile: bool) -> None:
    """Print a line for dense attention of some rows and positions, and one for each format of codes."""
    rows, positions = shape
    heads, _, width, rope = _SIZES[name]
    query = torch.randn(rows, heads, 1, width + rope, device="cuda", dtype=torch.bfloat16)
    first = cache(name, rows, positions)
    nbytes = first[0].nbytes + first[1].nbytes
    caches = [first, *(cache(name, rows, positions) for _ in range(max(1, min(31, _ALTERNATING_BYTES // nbytes))))]
    mask = torch.ones(1, 1, 1, positions, dtype=torch.bool, device="cuda")
    dense = median_of_graph([lambda kv=kv: attend(query, kv, scale=0.05, mask=mask) for _, _, kv in caches])
    print(
        f"{name} {rows} x {positions:7,} dense: {dense * 1e6:7.1f} us, {nbytes / dense / speed:.2f} of the bandwidth",
        flush=True,
    )
    if positions <= k + local + 64:
        return
    position = torch.tensor([positions - 1], device="cuda")
    for index in _FORMATS:
        sparsity = Sparsity(k, 64, local, index, shared=True)
        layer, steps = IndexedLayer(index, rope > 0, sparsity.budget), list[StepKeys]()
        for keys, values, kv in caches:
            codes = layer.index(keys, values)
            for row in range(rows):
                layer.encode(codes, keys, values, row, slice(0, positions - 1))
            steps.append(StepKeys(kv, codes, position, mask))
        calls = [partial(attend_sparsely, query, step, scale=0.05, sparsity=sparsity) for step in steps]
        took = median_of_graph(calls)
        taken = int(attend_sparsely(query, steps[0], scale=0.05, sparsity=sparsity)[1].taken(k).sum(-1).max())
        print(
            f"    sparse, {index}: {took * 1e6:7.1f} us, {dense / took:.2f} times as fast; {taken:,} read", flush=True
        )
        if profile:
            shown(calls[-1])


def shown(call: Callable[[], object]) -> None:
    """Print the time of each kernel of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    for event in found.key_averages():
        print(f"        {event.key[:40]:40} {event.device_time_total / 5:7.1f} us", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", default="4096,32768,131072")
    parser.add_argument("--rows", default="1", help="sequences of a step")
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--local", type=int, default=1024)
    parser.add_argument("--profile", action="store_true", help="print the times of kernels")
    asked = parser.parse_args()
    reads = bandwidth()
    print(f"{torch.cuda.get_device_name()}: {reads / 1e9:,.0f} GB/s")
    for model in _SIZES:
        for count in map(int, asked.positions.split(",")):
            for together in map(int, asked.rows.split(",")):
                measure(model, (together, count), reads, asked.k, asked.local, asked.profile)
