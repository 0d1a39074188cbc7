"""Time products with experts in codes on a GPU beside `grouped_mm` on decoded matrices, for one layer's gate and up.

`python benchmarks/coded_products.py [--tokens 1,16,256,2048]` prints milliseconds: as codes, decoded and then
multiplied, multiplied alone, and what the codes of the experts in use take at the GPU's bandwidth. Each token chooses
experts at random. Times are medians of CUDA graphs of ten launches. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ktc.model.experts.gpu import coded_kernels
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.panels import panels_of

LAUNCHES = 10
# Name, format, group, experts, rows of gate, columns, experts per token.
LAYERS = (
    ("Qwen3-30B-A3B, int4", "int4", 32, 128, 768, 2048, 8),
    ("gpt-oss-20b, mxfp4", "mxfp4", 0, 32, 2880, 2880, 4),
)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call in a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    times: list[float] = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


def random_matrices(stored: str, group: int, experts: int, rows: int, columns: int) -> CodedMatrices:
    """Return gate and up of random bytes, whose scales may be any numbers: products take the same time."""
    panels = panels_of(stored, group)
    count = rows // 16
    packed = torch.randint(0, 100, (experts, count * panels.nbytes(columns)), dtype=torch.uint8, device="cuda")
    return CodedMatrices(packed, panels, 0, count, rows, columns, parts=2)


def bandwidth() -> float:
    """Return the bytes that the GPU reads in a millisecond."""
    memory = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return memory.nbytes / milliseconds(lambda: memory.view(torch.int64).sum())


def row_of(matrices: CodedMatrices, decoded: Tensor, tokens: int, top_k: int, rate: float) -> list[float]:
    """Return the times of one number of tokens: see the module."""
    experts = len(matrices.packed)
    chosen = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.flatten().sort().values
    ends = torch.searchsorted(chosen, torch.arange(experts, device="cuda"), right=True).int()
    x = torch.randn(tokens * top_k, matrices.columns, device="cuda").bfloat16()

    def through_copy() -> Tensor:
        return F.grouped_mm(x, coded_kernels.decoded(matrices, ends).transpose(1, 2), offs=ends)

    used = matrices.packed.nbytes * len(chosen.unique()) / experts
    return [
        milliseconds(lambda: coded_kernels.times_rows(x, matrices, ends)),
        milliseconds(through_copy),
        milliseconds(lambda: F.grouped_mm(x, decoded.transpose(1, 2), offs=ends)),
        used / rate,
    ]


def main() -> None:
    """Print the table of both layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,2048")
    counts = [int(count) for count in parser.parse_args().tokens.split(",")]
    torch.manual_seed(0)
    rate = bandwidth()
    print(f"{torch.cuda.get_device_name()}, {rate / 1e6:,.0f} GB/s; as codes, through a copy, grouped_mm, codes alone")
    for name, stored, group, experts, rows, columns, top_k in LAYERS:
        matrices = random_matrices(stored, group, experts, rows, columns)
        decoded = coded_kernels.decoded(matrices)
        print(f"{name}: all decoded in {milliseconds(lambda m=matrices: coded_kernels.decoded(m)):.3f} ms")
        for tokens in counts:
            times = row_of(matrices, decoded, tokens, top_k, rate)
            print(f"{tokens:6,} tokens  " + "  ".join(f"{one:.3f}" for one in times))


if __name__ == "__main__":
    main()
