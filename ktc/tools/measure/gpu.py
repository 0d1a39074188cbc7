"""One GPU: large products, its memory, and the costs of a kernel launch, of a node of a graph and of a host node.

In: a device. Out: figures in SI units. The figures that need no CUDA graph can be measured on the CPU too, as tests do.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from threading import Timer
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktc.foundation.rates import Figure
from ktc.model.experts.host.host_node import on_current_stream
from ktc.tools.measure.figures import repeated, seconds

_BUDGET: Final = 0.3  # seconds of one figure
_SIDE: Final = {"bf16": 8192, "fp32": 4096}  # of a square product
_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
_COPIED: Final = 1 << 30  # bytes
_LAUNCHES: Final = 500
_BLOCKS: Final = 32
_OPERATORS: Final = 14  # of a `_Block`
_WIDTH: Final = 64
_HOST_NODES: Final = 50
_PATIENCE: Final = 120.0  # seconds for another process to start torch on all GPUs
# Another process that takes a context and the libraries of products, says how many bytes of tensors it reserved on
# each GPU, and keeps all of it until its standard input ends.
_OTHER: Final = """
import sys, torch
for number in range(torch.cuda.device_count()):
    x = torch.ones(256, 256, device=f"cuda:{number}", dtype=torch.bfloat16)
    (x @ x).sum().item()
print(*(torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count())), flush=True)
sys.stdin.read()
"""


def products(device: torch.device, dtype: str, side: int | None = None) -> Figure:
    """Return FLOP/s of a product of two square matrices; in fp32 with PyTorch's settings, which are without TF32."""
    side = side or _SIDE[dtype]
    x = torch.randn(side, side, device=device, dtype=_DTYPES[dtype])
    out = torch.empty_like(x)
    took = partial(seconds, device, lambda: _times(4, lambda: torch.mm(x, x, out=out)))
    return repeated(lambda: 4 * 2 * side**3 / took(), _BUDGET)


def bandwidth(device: torch.device, size: int = _COPIED) -> Figure:
    """Return the bytes/s that a copy within the device's memory reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = partial(seconds, device, lambda: _times(4, lambda: target.copy_(source)))
    return repeated(lambda: 2 * 4 * size / took(), _BUDGET)


def launch(device: torch.device) -> Figure:
    """Return the seconds of one small kernel that PyTorch issues."""
    x = torch.ones(16, device=device)
    took = partial(seconds, device, lambda: _times(_LAUNCHES, lambda: x.add_(1)))
    return repeated(lambda: took() / _LAUNCHES, _BUDGET)


class _Block(nn.Module):
    """A small layer as models have them: a norm step by step, three products, an activation and a residual."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        made = partial(nn.Linear, _WIDTH, _WIDTH, bias=False, device=device, dtype=torch.bfloat16)
        self.gate, self.up, self.down = made(), made(), made()
        self.weight = nn.Parameter(torch.ones(_WIDTH, device=device, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = self.weight * wide.to(x.dtype)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def operator(device: torch.device) -> Figure:
    """Return the seconds of one operator in the forward of small modules, whose parameters require gradients."""
    model = nn.Sequential(*(_Block(device) for _ in range(_BLOCKS)))
    x = torch.ones(16, _WIDTH, device=device, dtype=torch.bfloat16)
    took = partial(seconds, device, lambda: model(x))
    return repeated(lambda: took() / (_BLOCKS * _OPERATORS), _BUDGET)


def graph_node(device: torch.device) -> Figure:
    """Return the seconds of one small kernel in a CUDA graph."""
    x = torch.ones(16, device=device)
    return _of_graph(device, lambda: x.add_(1), _LAUNCHES)


def host_node(device: torch.device) -> Figure:
    """Return the seconds of a small kernel and a host function after it in a CUDA graph.

    The function is `free(NULL)`, which does nothing. Raises `RuntimeError` where CUDA takes no host function.
    """
    x = torch.ones(16, device=device)
    function = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0

    def node() -> None:
        x.add_(1)
        on_current_stream(function, 0)

    return _of_graph(device, node, _HOST_NODES)


def _of_graph(device: torch.device, node: Callable[[], object], nodes: int) -> Figure:
    """Return the seconds of one of these nodes."""
    with torch.cuda.device(device):
        node()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # By default the stream of a capture is on the GPU of the process' first capture.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            _times(nodes, node)
        return repeated(lambda: seconds(device, graph.replay) / nodes, _BUDGET)


def contexts(count: int) -> tuple[int, ...]:
    """Return the bytes that CUDA and its libraries take on each GPU: the memory that another process takes from it.

    Raises `RuntimeError` where that process fails.
    """
    free = [torch.cuda.mem_get_info(number)[0] for number in range(count)]
    command = (sys.executable, "-c", _OTHER)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        patience = Timer(_PATIENCE, other.kill)
        patience.start()
        try:
            assert other.stdout is not None, "a pipe"
            reserved = [int(word) for word in other.stdout.readline().split()]
            left = [torch.cuda.mem_get_info(number)[0] for number in range(count)]
        finally:
            patience.cancel()
            other.kill()
    taken = [before - after - tensors for before, after, tensors in zip(free, left, reserved, strict=False)]
    if len(taken) < count or min(taken) <= 0:
        raise RuntimeError("the memory that another process takes on the GPUs is unknown")
    return tuple(taken)


def _times(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()
