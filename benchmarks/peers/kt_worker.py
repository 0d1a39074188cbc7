"""kt-kernel's experts for one layer: called in this process, or as a program that answers JSON lines in another one.

This file imports torch, kt_kernel and nothing of ktc, so that the Python of kt-kernel's own environment can run it:
`python -I kt_worker.py` reads a request per line from stdin and writes an answer per line to stdout. Requests name a
method of `Worker` and its arguments; `{"error": ...}` answers what failed. Only kt-kernel's public classes are called.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The workers spin for 50 ms after a job; what is measured next must not run beside them.
SETTLE_SECONDS = 0.065
_CLASSES = {
    ("bf16", False): "AMXBF16_MOE",
    ("int8", False): "AMXInt8_MOE",
    ("int4", False): "AMXInt4_MOE",
    ("bf16", True): "AMXBF16_SFT_MOE",
}
_WITHOUT_LORA = "_SkipLoRA"
_FACTORS = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
_LORA_ALPHA = 16.0
_ROW_STEP = 32  # room for tokens is made in whole tiles
_PEAK_ROUNDS = 2_000_000


class Layer:
    """One of kt-kernel's layers with its weights loaded. Shapes: T tokens, H hidden, I intermediate, E experts, K."""

    def __init__(self, worker: Worker, weight_format: str, training: bool, rank: int) -> None:
        self._worker, self._native, self._rank = worker, worker.native, rank
        sizes = (worker.num_experts, worker.top_k, worker.hidden, worker.intermediate)
        name = _CLASSES[weight_format, training] + _WITHOUT_LORA * (training and not rank)
        config = self._native.moe.MOESFTConfig(*sizes) if training else self._native.moe.MOEConfig(*sizes, 0)
        config.max_len = -(-worker.max_tokens // _ROW_STEP) * _ROW_STEP
        config.layer_idx = 0
        config.pool = worker.cpu.backend_
        config.physical_to_logical_map = worker.order_E.data_ptr()
        config.gate_proj, config.up_proj, config.down_proj = (part.data_ptr() for part in worker.weights)
        self._factors: dict[str, Tensor] = {}
        if training:
            config.max_cache_depth = 1
            config.lora_rank, config.lora_alpha = rank or 8, _LORA_ALPHA
            self._factors = dict(zip(_FACTORS, self._random_factors(), strict=True)) if rank else {}
            for factor, values in self._factors.items():
                setattr(config, factor, values.data_ptr())
        self._gradients = [torch.zeros_like(values) for values in self._factors.values()]
        self._config = config  # it owns what the layer points to
        self._moe = getattr(self._native.moe, name)(config)
        self._training = training
        load = self._moe.load_weights_task
        self._do(load() if training else load(worker.order_E.data_ptr()))

    def _random_factors(self) -> list[Tensor]:
        w, rank = self._worker, self._rank
        shapes = [(rank, w.hidden), (w.intermediate, rank)] * 2 + [(rank, w.intermediate), (w.hidden, rank)]
        return [torch.randn(w.num_experts, *shape).mul_(0.01).bfloat16() for shape in shapes]

    def _do(self, task: object) -> None:
        self._worker.cpu.submit(task)
        self._worker.cpu.sync()

    def forward(self, batch: Batch, save: bool = False) -> None:
        """Return the layer's output; with `save` also the tensors that backward needs."""
        count, x, out = (each.data_ptr() for each in (batch.count, batch.x_TH, batch.out_TH))
        index, weights = batch.index_TK.data_ptr(), batch.weights_TK.data_ptr()
        call = self._moe.forward_sft_task if self._training else self._moe.forward_task
        self._do(call(count, self._worker.top_k, index, weights, x, out, save))

    def train(self, batch: Batch) -> None:
        """Forward, and the gradients of hidden states, routing weights and factors."""
        self.forward(batch, save=True)
        gradients = [each.data_ptr() for each in self._gradients] or [0] * len(_FACTORS)
        own = (batch.grad_TH.data_ptr(), batch.grad_x_TH.data_ptr())
        frozen = (0, 0, 0)
        self._do(self._moe.backward_task(*own, *gradients, batch.grad_weights_TK.data_ptr(), *frozen))


class Batch:
    """One call's tensors, made from the router's choice."""

    def __init__(self, hidden: int, index: Sequence[Sequence[int]]) -> None:
        self.index_TK = torch.tensor(index, dtype=torch.int64)
        tokens, top_k = self.index_TK.shape
        self.count = torch.tensor([tokens], dtype=torch.int32)
        self.weights_TK = torch.rand(tokens, top_k)
        self.x_TH, self.grad_TH = (torch.randn(tokens, hidden).bfloat16() for _ in range(2))
        self.out_TH, self.grad_x_TH = torch.empty_like(self.x_TH), torch.empty_like(self.x_TH)
        self.grad_weights_TK = torch.empty_like(self.weights_TK)


class Worker:
    """The layers of one shape, made when they are first run."""

    def __init__(self) -> None:
        self._layers: dict[tuple[str, bool, int], Layer] = {}
        self._batches: list[Batch] = []
        self._peak: Any = None

    def open(self, sizes: Sequence[int], threads: int, max_tokens: int, limits: str, read_bytes: int) -> dict[str, Any]:
        """Set the layer's H, I, E and k, the library of this machine's limits and the memory that one of them reads.

        Return which kt-kernel this is.
        """
        hidden, intermediate, num_experts, top_k = sizes
        package: Any = importlib.import_module("kt_kernel")
        self.native = package.kt_kernel_ext
        self.hidden, self.intermediate, self.num_experts, self.top_k = hidden, intermediate, num_experts, top_k
        self.max_tokens, self.threads = max_tokens, threads
        self.cpu = self.native.CPUInfer(threads)
        self.order_E = torch.arange(num_experts)
        generator = torch.Generator().manual_seed(0)
        one = torch.empty(intermediate * hidden, dtype=torch.bfloat16).uniform_(-0.04, 0.04, generator=generator)
        self.weights = [torch.stack([one.roll(expert + part) for expert in range(num_experts)]) for part in range(3)]
        self._peak = ctypes.CDLL(limits)
        self._peak.multiply_in_registers.restype = ctypes.c_int64
        memory = mmap.mmap(-1, read_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        return {
            "version": importlib.metadata.version("kt-kernel"),
            "variant": str(package.__cpu_variant__),
            "torch": str(torch.__version__),
        }

    def take(self, routings: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
        """Set a batch for each routing, (tokens, top_k) expert numbers."""
        self._batches = [Batch(self.hidden, index) for index in routings]
        return {}

    def run(self, weight_format: str, passes: str, rank: int, numbers: Sequence[int]) -> dict[str, Any]:
        """Run these batches one after the other; return wall seconds and CPU seconds.

        One thread works and another spins until it is done: the first one's time counts. While the second does serial
        work, the first spins, on a busy machine also while the second has no core. Its time is therefore never less
        than the work, and in the quickest round hardly more.
        """
        training = passes == "train" or rank > 0
        key = (weight_format, training, rank)
        if key not in self._layers:
            self._layers[key] = Layer(self, *key)
        layer = self._layers[key]
        call = layer.train if passes == "train" else layer.forward
        time.sleep(SETTLE_SECONDS)
        cpu, wall = worker_seconds(), time.perf_counter()
        for number in numbers:
            call(self._batches[number])
        spent = {"cpu": worker_seconds() - cpu, "wall": time.perf_counter() - wall}
        time.sleep(SETTLE_SECONDS)
        return spent

    def limits(self) -> dict[str, Any]:
        """Return FLOP/s and bytes/s of this process, by the clock that applies to this number of threads."""
        part = self._memory.numel() // self.threads // 512 * 512

        def multiply(thread: int) -> int:
            return self._peak.multiply_in_registers(ctypes.c_int64(_PEAK_ROUNDS))

        def read(thread: int) -> int:
            address = ctypes.c_void_p(self._memory.data_ptr() + thread * part)
            self._peak.read_in_order(address, ctypes.c_size_t(part))
            return part

        return {"flops": self._per_second(multiply), "bytes": self._per_second(read)}

    def _per_second(self, work: Callable[[int], int]) -> float:
        clock = time.process_time if self.threads == 1 else time.perf_counter
        begin = clock()
        with ThreadPoolExecutor(self.threads) as pool:
            done = sum(pool.map(work, range(self.threads)))
        return done / (clock() - begin)


def worker_seconds() -> float:
    """CPU time of kt-kernel's workers so far. A thread's clock is numbered by the kernel's rule, from its number."""
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir() if _is_worker(task)]
    return sum(time.clock_gettime(~thread << 3 | 6) for thread in threads)


def _is_worker(task: Path) -> bool:
    try:
        return (task / "comm").read_text().startswith("numa_")
    except OSError:  # it has ended
        return False


def serve() -> None:
    """Answer requests until stdin ends. The libraries' stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    known: dict[str, Callable[..., dict[str, Any]]] = {
        "open": worker.open, "take": worker.take, "run": worker.run, "limits": worker.limits,
    }  # fmt: skip
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = known[request["do"]](**request["with"])
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
