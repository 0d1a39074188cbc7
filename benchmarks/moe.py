"""The fused mixture of experts beside its peers, in one process and in interleaved rounds.

    python benchmarks/moe.py --shape v2lite --tokens 1,512 [--json]

CPU time of one thread by default, medians, each as a share of what this machine can do at most: multiply-adds on
registers alone, and reading memory in order, both measured in the same run. Peers: Hugging Face's experts (eager and
grouped_mm) on the same weights, and oneDNN on dense matrices of the same number of operations. `train` is forward and
backward with frozen weights: gradients of hidden states and routing weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from ktc import host
from ktc.codegen import build, render, toolchain
from ktc.host import Isa
from ktc.plan.kernel_spec import KernelSpec
from ktc.runtime.fused_moe import FusedMoe
from ktc.runtime.packed_experts import huge_pages

SHAPES: Final = {"v2lite": (2048, 1408, 64, 6), "qwen3": (2048, 768, 128, 8)}
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
# Below this many tokens a dense product of the same operations reads other bytes and compares nothing.
MIN_DENSE_TOKENS: Final = 128
# Several routings, taken in turn: a single token's six experts must not stay in the last-level cache.
NUM_ROUTINGS: Final = 8
# So few tokens are run through several times in a row, as the layers of a model would.
MAX_DECODE_TOKENS: Final = 4
DECODE_CALLS: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    @property
    def name(self) -> str:
        return f"H{self.hidden} I{self.intermediate} E{self.num_experts} k{self.top_k}"

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * 2


@dataclass(frozen=True, slots=True)
class Batch:
    x: Tensor
    index: Tensor
    weights: Tensor
    grad: Tensor

    @property
    def num_active(self) -> int:
        return int(self.index.unique().numel())


@dataclass(frozen=True, slots=True)
class Row:
    impl: str
    passes: str
    shape: str
    tokens: int
    ms: float
    gflops: float
    share_of_peak: float
    gbps: float
    share_of_bandwidth: float

    def as_json(self) -> dict[str, object]:
        return {"pass" if key == "passes" else key: value for key, value in asdict(self).items()}


class Machine:
    """The two limits, measured whenever asked."""

    def __init__(self, isa: Isa, folder: Path) -> None:
        tools = toolchain.find(host.detect())
        source = Path(__file__).with_name("machine_peak.cpp")
        built, library = folder / "machine_peak.o", folder / "machine_peak.so"
        contract = () if isa in ("avx512_bf16", "amx") else ("-ffp-contract=fast",)
        toolchain.run((*tools.compile_command(source, built, isa), *contract))
        toolchain.run(tools.link_command((built,), library))
        self._native = ctypes.CDLL(str(library))
        self._native.multiply_in_registers.restype = ctypes.c_int64
        self._memory = huge_pages(1 << 29).fill_(1)

    def gflops(self) -> float:
        begin = time.process_time()
        flops = self._native.multiply_in_registers(ctypes.c_int64(2_000_000))
        return flops / (time.process_time() - begin) / 1e9

    def gbps(self) -> float:
        begin = time.process_time()
        self._native.read_in_order(ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_size_t(self._memory.numel()))
        return self._memory.numel() / (time.process_time() - begin) / 1e9


class Dense(nn.Module):
    """One expert's matrices on all slots: the operations of the layer without its routing."""

    def __init__(self, gate_up: Tensor, down: Tensor, top_k: int) -> None:
        super().__init__()
        self.gate_up, self.down, self.top_k = gate_up, down, top_k

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        gate, up = F.linear(x.repeat(self.top_k, 1), self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)[: x.shape[0]] * weights[:, :1].to(x.dtype)


def candidates(shape: Shape, isa: Isa, threads: int) -> dict[str, Experts]:
    """Each implementation on the same random weights."""
    config = DeepseekV2Config(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        n_routed_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        num_attention_heads=1,
    )
    peers: dict[str, DeepseekV2Experts] = {}
    with torch.device("meta"):
        for name in ("eager", "grouped_mm"):
            config_of_peer = DeepseekV2Config(**config.to_dict())
            config_of_peer._experts_implementation = name
            peers[f"hf_{name}"] = DeepseekV2Experts(config_of_peer)
    gate_up = torch.empty(shape.num_experts, 2 * shape.intermediate, shape.hidden, dtype=torch.bfloat16)
    down = torch.empty(shape.num_experts, shape.hidden, shape.intermediate, dtype=torch.bfloat16)
    for weights in (gate_up, down):
        weights.uniform_(-0.04, 0.04)
    for peer in peers.values():
        peer.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        peer.down_proj = nn.Parameter(down, requires_grad=False)
    ours = ours_on(shape, isa, threads, gate_up, down)
    return {"ktc_bf16": ours, **peers, "onednn_dense": Dense(gate_up[0], down[0], shape.top_k)}


def ours_on(shape: Shape, isa: Isa, threads: int, gate_up: Tensor, down: Tensor) -> FusedMoe:
    sizes = (shape.hidden, shape.intermediate, shape.num_experts, shape.top_k)
    spec = KernelSpec("fused_moe", *sizes, "bf16", "bf16", "bf16", isa)
    library = build.build(render.render((spec,), {spec: "benchmarks/moe.py"}), host.detect())
    module = FusedMoe(
        shape.num_experts,
        shape.hidden,
        shape.intermediate,
        shape.top_k,
        kernel=library.kernel(spec.entry),
        threads=threads,
    )
    for expert in range(shape.num_experts):
        gate, up = gate_up[expert].chunk(2)
        module.load_expert(expert, "gate", gate)
        module.load_expert(expert, "up", up)
        module.load_expert(expert, "down", down[expert])
    return module


def batches(shape: Shape, tokens: int) -> list[Batch]:
    def one() -> Batch:
        scores = torch.rand(tokens, shape.num_experts)
        weights, index = scores.topk(shape.top_k, dim=-1)
        x, grad = (torch.randn(tokens, shape.hidden).bfloat16() for _ in range(2))
        return Batch(x, index, weights / weights.sum(-1, keepdim=True), grad)

    return [one() for _ in range(NUM_ROUTINGS)]


def forward(experts: Experts, batch: Batch) -> None:
    with torch.no_grad():
        experts(batch.x, batch.index, batch.weights)


def train(experts: Experts, batch: Batch) -> None:
    x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
    torch.autograd.grad(experts(x, batch.index, weights), (x, weights), batch.grad)


PASSES: Final[dict[str, Callable[[Experts, Batch], None]]] = {"forward": forward, "train": train}


@dataclass(slots=True)
class Samples:
    seconds: list[float]
    num_active: list[float]


def measure(
    shape: Shape, tokens: int, rounds: int, experts: dict[str, Experts], machine: Machine, clock: Callable[[], float]
) -> Iterator[Row]:
    """Rows of one number of tokens; every round runs each candidate once, and the limits between them."""
    inputs = batches(shape, tokens)
    names = [name for name in experts if name != "onednn_dense" or tokens >= MIN_DENSE_TOKENS]
    samples = {(name, each): Samples([], []) for name in names for each in PASSES}
    peaks, bandwidths = [machine.gflops()], [machine.gbps()]
    num_calls = DECODE_CALLS if tokens <= MAX_DECODE_TOKENS else 1
    for round_number in range(rounds + 1):
        in_turn = [inputs[(round_number * num_calls + call) % len(inputs)] for call in range(num_calls)]
        for (name, each), sample in samples.items():
            begin = clock()
            for batch in in_turn:
                PASSES[each](experts[name], batch)
            if round_number > 0:  # the first one allocates
                sample.seconds.append((clock() - begin) / num_calls)
                sample.num_active.append(statistics.mean(batch.num_active for batch in in_turn))
        peaks.append(machine.gflops())
        bandwidths.append(machine.gbps())
    peak, bandwidth = statistics.median(peaks), statistics.median(bandwidths)
    for (name, each), sample in samples.items():
        yield row(name, each, shape, tokens, sample, peak, bandwidth)


def row(name: str, each: str, shape: Shape, tokens: int, sample: Samples, peak: float, bandwidth: float) -> Row:
    """`gbps` counts the weights of the experts in use, once per pass over them (train: forward and backward)."""
    sweeps = 1 if each == "forward" else 2
    seconds = statistics.median(sample.seconds)
    gflops = sweeps * 6 * tokens * shape.top_k * shape.hidden * shape.intermediate / seconds / 1e9
    weight_bytes = 1 if name == "onednn_dense" else statistics.mean(sample.num_active)
    gbps = sweeps * weight_bytes * shape.expert_bytes / seconds / 1e9
    return Row(name, each, shape.name, tokens, seconds * 1e3, gflops, gflops / peak, gbps, gbps / bandwidth)


def show(host_name: str, peak: float, bandwidth: float, rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{rows[0].shape} on {host_name}: peak {peak:.0f} GF/s, read {bandwidth:.1f} GB/s")
    for column in ("pass", "tokens", "implementation", "ms", "GF/s", "of peak", "GB/s", "of read", "ktc is faster by"):
        table.add_column(column, justify="left" if column in ("pass", "implementation") else "right")
    for each in rows:
        ours = next(r for r in rows if (r.impl, r.passes, r.tokens) == ("ktc_bf16", each.passes, each.tokens))
        table.add_row(
            each.passes,
            str(each.tokens),
            each.impl,
            f"{each.ms:.2f}",
            f"{each.gflops:.0f}",
            f"{each.share_of_peak:.2f}",
            f"{each.gbps:.1f}",
            f"{each.share_of_bandwidth:.2f}",
            f"{each.ms / ours.ms:.2f}x",
        )
    Console().print(table)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="v2lite", help="v2lite, qwen3, or H,I,E,k")
    parser.add_argument("--tokens", default="512", help="one or more numbers of tokens: 1,32,512")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per number of tokens (default: by their cost)")
    parser.add_argument("--isa", default=host.detect().isas[0], help="instruction set of our kernel")
    parser.add_argument("--threads", type=int, default=1, help="with more than one, wall time is measured")
    parser.add_argument("--only", default="", help="measure these implementations only: ktc_bf16,hf_grouped_mm")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    shape = Shape(*SHAPES.get(options.shape) or map(int, options.shape.split(",")))
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(options.isa, Path(folder))
        experts = candidates(shape, options.isa, options.threads)
        chosen = {
            name: each for name, each in experts.items() if name in (options.only or ",".join(experts)).split(",")
        }
        rows: list[Row] = []
        for tokens in map(int, options.tokens.split(",")):
            rounds = options.rounds or (15 if tokens <= 4 else 7 if tokens <= 64 else 5)
            rows.extend(measure(shape, tokens, rounds, chosen, machine, clock))
        peak = statistics.median(machine.gflops() for _ in range(5))
        bandwidth = statistics.median(machine.gbps() for _ in range(5))
    description = {"isa": options.isa, "threads": options.threads, "torch": torch.__version__}
    if options.json:
        figures = {"host": description, "peak_gflops": peak, "read_gbps": bandwidth}
        print(json.dumps({**figures, "rows": [each.as_json() for each in rows]}, indent=1))
    else:
        show(options.isa, peak, bandwidth, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
