"""Prompts of a model whose experts are divided among GPU memory, the bus and the CPU, beside one engine for all.

    python benchmarks/kept_experts.py --compile OUT --config FOLDER [--layers 6]
    python benchmarks/divided_prompts.py OUT [--kept 0,25,50] [--tokens 32,128,512,1024,2048,4096] -o divided.json

On a GPU. A row has the milliseconds of a prompt with divided experts, with all experts that are not kept over the bus,
and with all on the CPU; medians of `--rounds` prompts, which take turns. "rest" is the model without its experts. The
last lines compare the longest prompt that is sent with the longer one of its bytes on the bus and of its products, and
the rest; bus and products are measured in the same minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from kept_experts import Traced, choices_of, keep, numbers
from torch.nn import functional as F

from ktc.model.experts.host.stream_copies import copies_to
from ktc.model.experts.kept.kept_division import FEWEST, Division
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.streamed.stream_ring import rings

NEVER: Final = 1 << 30  # tokens
ENGINES: Final = ("divided", "bus", "cpu", "rest")


def use(modules: Sequence[FusedMoe], engines: str, crowded: float) -> None:
    """Let calls of any number of tokens be computed by some engines."""
    for module in modules:
        assert module.offload is not None and module.offload.kept is not None, "its steps split experts"
        division = Division(FEWEST, crowded) if engines == "divided" else None
        kept = replace(module.offload.kept, division=division)
        module.offload = replace(module.offload, min_tokens=1 if engines == "bus" else NEVER, kept=kept)


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def without_experts(call: Callable[[], object]) -> Callable[[], object]:
    def skipped(module: FusedMoe, x: Any, index: Any, weights: Any, lora: Any = None) -> Any:
        return torch.zeros_like(x)

    def called() -> None:
        before, FusedMoe.forward = FusedMoe.forward, skipped
        try:
            call()
        finally:
            FusedMoe.forward = before

    return called


def products(module: FusedMoe, rows: int) -> float:
    """Measure the FLOP/s of grouped products with the sizes of a layer, and equally many rows for each expert."""
    experts, inputs, outputs = module.num_experts, module.hidden, 2 * module.intermediate
    x = torch.randn(experts * rows, inputs, device="cuda", dtype=torch.bfloat16)
    matrices = torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16)
    ends = (torch.arange(experts, device="cuda") + 1).mul(rows).int()
    ms = min(timed(lambda: F.grouped_mm(x, matrices.transpose(1, 2), offs=ends)) for _ in range(5))
    return 2e3 * len(x) * inputs * outputs / ms


def sent() -> int:
    return sum(ring.figures().sent for ring in rings())


def measured(model: Any, modules: Sequence[FusedMoe], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    count, top_k = modules[0].num_experts, modules[0].top_k
    traced = Traced(modules, model.device)
    for trace in args.trace:
        choices = choices_of(trace, (len(modules), count, top_k))
        for part in args.kept:
            keep(model, modules, round(len(modules) * count * part / 100))
            for tokens in args.tokens:
                ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=model.device)

                def prompt(ids: torch.Tensor = ids, choices: torch.Tensor = choices) -> torch.Tensor:
                    traced.begin(choices)
                    with torch.no_grad():
                        return model(input_ids=ids, logits_to_keep=1).logits.float()

                row: dict[str, Any] = {"trace": trace, "kept": part, "tokens": tokens}
                logits = dict[str, torch.Tensor]()
                for engines in ENGINES:
                    use(modules, engines, args.crowded)
                    call = without_experts(prompt) if engines == "rest" else prompt
                    for _ in range(2):
                        timed(call)
                    before = sent()
                    row[engines] = statistics.median(timed(call) for _ in range(args.rounds))
                    row[f"{engines}_sent"] = (sent() - before) / args.rounds
                    logits[engines] = prompt()
                row["error"] = float((logits["divided"] - logits["cpu"]).norm() / logits["cpu"].norm())
                rows.append(row)
                print(shown(row), flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    times = ", ".join(f"{engines} {row[engines]:.1f}" for engines in ENGINES)
    over = ", ".join(f"{row[f'{engines}_sent'] / 1e9:.2f}" for engines in ("divided", "bus"))
    best = min(row["bus"], row["cpu"])
    return (
        f"{row['trace']:5} kept {row['kept']:3.0f} %, {row['tokens']:5} tokens: {times} ms; GB sent {over}; "
        f"{best / row['divided']:.2f} x the faster one, error {row['error']:.0e}"
    )


def main() -> None:
    from ktc.model.loading.load import load

    parser = argparse.ArgumentParser(description="Prompts with divided experts, beside one engine for all of them.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kept", type=numbers, default=[0.0, 25.0, 50.0])
    parser.add_argument("--tokens", type=lambda text: [int(word) for word in text.split(",")],
                        default=[32, 128, 512, 1024, 2048, 4096])  # fmt: skip
    parser.add_argument("--trace", type=lambda text: text.split(","), default=["even"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--crowded", type=float, default=100.0)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    model: Any = load(args.out, random_weights=0)
    modules = [module for module in model.modules() if isinstance(module, FusedMoe)]
    planned = modules[0].offload and modules[0].offload.kept and modules[0].offload.kept.division
    args.crowded = planned.crowded if planned else args.crowded
    print(f"by the plan {planned}, share of the bus {modules[0].kept and modules[0].kept.store.bus_share}")
    rows = measured(model, modules, args)
    bus = copies_to(model.device).bus_speed(modules[0].weights.packed.packed)
    for row in [row for row in rows if row["tokens"] == max(args.tokens)]:
        flops = 6 * row["tokens"] * modules[0].top_k * modules[0].hidden * modules[0].intermediate * len(modules)
        rate = products(modules[0], row["tokens"] * modules[0].top_k // modules[0].num_experts)
        row["bound"] = max(1e3 * row["bus_sent"] / bus, 1e3 * flops / rate) + row["rest"]
        print(
            f"kept {row['kept']:.0f} %, {row['tokens']} tokens: {row['bus_sent'] / 1e9:.2f} GB at {bus / 1e9:.1f} GB/s "
            f"= {1e3 * row['bus_sent'] / bus:.1f} ms, products {1e3 * flops / rate:.1f} ms, rest {row['rest']:.1f} ms: "
            f"sent {row['bus'] / row['bound']:.3f}, divided {row['divided'] / row['bound']:.3f} of that"
        )
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
