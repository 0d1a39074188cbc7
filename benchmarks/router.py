"""Time a fused router beside the stock one: DeepSeek-V3's routing (256 experts, 8 groups), in bf16.

`OMP_NUM_THREADS=1 python benchmarks/router.py [--tokens 1,16,4096] [--hidden 7168] [--threads 1]` prints the median of
the whole router, of the routing behind its linear layer, and of the routing with its gradient, in microseconds. Stock
and kernel alternate.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import unittest.mock
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from ktc.foundation import host
from ktc.model.hf.router import RouterLayout, Routing, fused_router, stock_results
from ktc.model.kernels.router_spec import ISAS, RouterForm, RouterSpec
from ktc.stages.codegen.build import build
from ktc.stages.codegen.render import render

FORM = RouterForm(
    256, 8, "sigmoid", corrected=True, groups=8, top_groups=4, group_score="two_greatest", total="plus",
    total_constant=1e-20, scale=2.5, in_order=False, logits="fp32",
)  # fmt: skip


def medians(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median of each call in microseconds; they alternate for this long each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def stock_routing(router: DeepseekV3TopkRouter, logits: Tensor) -> Tensor:
    """The weights of a router of hidden size 1 in fp32, whose linear layer returns these logits."""
    with unittest.mock.patch("torch.nn.functional.linear", return_value=logits):
        return router(logits.detach()[:, :1])[1]


def measured(stock: DeepseekV3TopkRouter, routing: Routing, tokens: int, seconds: float) -> dict[str, dict[str, float]]:
    """The medians of the whole router, of the routing, and of the routing with its gradient."""
    patched = fused_router(copy.deepcopy(stock), routing)
    behind = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=1))
    hidden = torch.randn(tokens, stock.hidden_dim).bfloat16()
    logits = stock(hidden)[0].detach()
    bias, leaf, given = stock.e_score_correction_bias, logits.clone().requires_grad_(), torch.randn(tokens, 8)
    whole = {"stock": lambda: stock(hidden), "fused": lambda: patched(hidden)}
    routed = {"stock": lambda: stock_routing(behind, logits), "fused": lambda: routing(logits, bias, hidden.dtype)}
    trained = {
        "stock": lambda: torch.autograd.grad(stock_routing(behind, leaf), leaf, given),
        "fused": lambda: torch.autograd.grad(routing(leaf, bias, hidden.dtype)[0], leaf, given),
    }
    with torch.no_grad():
        times = {"router": medians(whole, seconds), "routing": medians(routed, seconds)}
    return times | {"routing and gradient": medians(trained, seconds)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,16,4096")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    here = host.detect()
    spec = RouterSpec("router", FORM, "fp32", "bf16", next(isa for isa in ISAS if isa in here.isas))
    kernel = build(render([spec], {}), here).kernel(spec.entry)
    stock = DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=asked.hidden)).to(torch.bfloat16)
    torch.nn.init.normal_(stock.weight, 0, 0.02, generator=torch.Generator().manual_seed(1))
    layout = RouterLayout("", "weight", "", "e_score_correction_bias", passed=False, hidden="bf16")
    layout = replace(layout, results=stock_results(stock, FORM, layout))
    routing = Routing(FORM, layout, kernel, asked.threads)
    print(f"{spec.isa}, {asked.threads} threads, hidden {asked.hidden}: microseconds, stock / fused")
    for tokens in map(int, asked.tokens.split(",")):
        times = measured(stock, routing, tokens, asked.seconds)
        pairs = (f"{name} {each['stock']:,.0f} / {each['fused']:,.0f}" for name, each in times.items())
        print(f"{tokens:5} tokens: {', '.join(pairs)}")


if __name__ == "__main__":
    main()
