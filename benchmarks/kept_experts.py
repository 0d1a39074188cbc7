"""Experts that a GPU keeps for decoding, under routing that is not even: hits and token/s by the part that is kept.

    python benchmarks/kept_experts.py [--layers 26 --experts 64 --top-k 6] [--plot kept.png]     # hits alone, no GPU
    python benchmarks/kept_experts.py --compile OUT --config FOLDER [--layers 6] [--budget 5GiB]
    python benchmarks/kept_experts.py OUT [OUT ...] [--kept 0,10,25,50,100] -o kept.json         # on a GPU: token/s too
    python benchmarks/kept_experts.py --read kept.json --plot kept.png

OUT is compiled for steps as CUDA graphs, with everything but the experts on the first GPU; parts are of the first OUT,
others have the places of their plan. Random weights route evenly, so choices are those of a
trace, which `FusedMoe` reads in place of its router's: the experts with the greatest sums of a seeded bias and of noise
(Gumbel's, so a choice is a draw without replacement). "even" has no bias, "zipf" one by rank (1 / rank), the same in
all steps; "counted" is that with places from its counts, as `--expert-counts` gives them; "drifting" has a new first
rank every 8 steps, and all ranks move down. Hits are simulated by the policy's own functions and, in steps, read from
the model.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from ktc.model.experts.kept.kept_experts import PERIOD
from ktc.model.experts.kept.kept_policy import DECAY, Exchange, exchanges, first_kept
from ktc.model.experts.module import FusedMoe

TRACES: Final = ("even", "zipf", "counted", "drifting")
DRIFT: Final = 8  # steps between two changes of the first rank
STEPS: Final = 1024  # of a trace
UNCOUNTED: Final = 128  # steps of a simulation, in which counts begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Steps with `places` of all experts kept, in percent `part`. What was not measured is None.

    `hits` is the share of chosen experts that were kept in steps, `simulated` that of the policy alone.
    """

    out: str = ""
    trace: str
    part: float
    places: int
    simulated: float
    exchanges: int
    hits: float | None = None
    bus: float | None = None
    tokens_per_second: float | None = None
    ms: float | None = None
    best_ms: float | None = None
    prompt_seconds: float | None = None


def choices_of(trace: str, sizes: Sequence[int], seed: int = 0) -> Tensor:
    """Return the chosen experts of a trace: `(layers, experts, k) -> (STEPS, layers, k)` int64."""
    layers, experts, top_k = sizes
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(layers)])
    zipf = -torch.log(torch.arange(1, experts + 1).float()).expand(layers, -1)
    made = list[Tensor]()
    for step in range(STEPS):
        bias = torch.zeros(layers, experts)
        if trace != "even":
            bias.scatter_(1, order.roll(step // DRIFT * (trace == "drifting"), 1), zipf)
        noise = -torch.log(-torch.log(torch.rand(layers, experts, generator=generator)))
        made.append((bias + noise).topk(top_k).indices)
    return torch.stack(made)


def counts_of(choices: Tensor, experts: int) -> Tensor:
    """Return how often each expert was chosen, `(layers, experts)`."""
    return torch.nn.functional.one_hot(choices, experts).sum((0, 2))


def simulated(choices: Tensor, experts: int, places: int, *, counted: bool) -> tuple[float, int]:
    """Return the share of hits after the first steps and the number of exchanges, by the policy of the loaded model.

    One expert is sent at a time, which arrives by the next step.
    """
    layers = choices.shape[1]
    weights, new = torch.zeros(layers, experts), torch.zeros(layers, experts)
    if counted:
        counts = counts_of(choices, experts).float()
        weights = counts * min(1.0, PERIOD / (1 - DECAY) / float(counts.max()))
    kept = torch.zeros(layers * experts, dtype=torch.bool)
    kept[torch.tensor(first_kept(weights, places), dtype=torch.int64)] = True
    waiting, hits, moved = deque[Exchange](), 0.0, 0
    for step, chosen in enumerate(choices):
        if step >= UNCOUNTED:
            hits += float(kept.view(layers, experts).gather(1, chosen).float().mean())
        new.scatter_add_(1, chosen, torch.ones(chosen.shape))
        if (step + 1) % PERIOD == 0:
            weights, new = weights * DECAY + new, torch.zeros_like(new)
            waiting = deque(exchanges(weights, kept.view(layers, experts), PERIOD))
        if waiting:
            one = waiting.popleft()
            kept[one.entering], kept[one.leaving], moved = True, False, moved + 1
    return hits / (len(choices) - UNCOUNTED), moved


def simulations(sizes: Sequence[int], parts: Sequence[float], traces: Sequence[str]) -> Iterator[Kept]:
    """Yield a row without times for each trace and part."""
    layers, experts, _ = sizes
    for trace in traces:
        choices = choices_of(trace, sizes)
        for part in parts:
            places = round(layers * experts * part / 100)
            hits, moved = simulated(choices, experts, places, counted=trace == "counted")
            yield Kept(trace=trace, part=part, places=places, simulated=hits, exchanges=moved)


def compiled(out: Path, config: str, layers: int, budget: str) -> None:
    """Compile the first layers of a config by `moe-inference` with everything but the experts on the first GPU."""
    from ktc import compiler
    from ktc.diagnostics import render
    from ktc.foundation import resources
    from ktc.foundation.files import temporary_folder
    from ktc.tools.bench.stack import stack_of

    with temporary_folder("kept") as folder:
        text = (resources.rules() / "moe-inference.ktr").read_text()
        (folder / "budget.ktr").write_text(text.replace("plan {", f"plan {{\n  cuda:0 = {budget}") if budget else text)
        # Loading reads the config again: it stays beside the compiled model.
        stack = stack_of(config, layers, out.with_name(f"{out.name}-config"))
        settings = {"device": "cuda:0", "prefill": "cuda:0"}

        def told(stage: str, value: object) -> None:
            for one in getattr(value, "warnings", ()) if stage == "plan" else ():
                print(render([one]))
            for reason in getattr(value, "reasons", ()) if stage == "plan" else ():
                if "routed experts for decoding steps" in reason.text:
                    print(f"{out}: {reason.text}")

        compiler.compile(
            stack.model, folder / "budget.ktr", out, settings=settings, random_weights=True, observe=told
        )  # fmt: skip


# On a GPU --------------------------------------------------------------------------------------------------------
class Traced:
    """The choices of a trace, which modules take in place of their router's: a row of it for each token."""

    def __init__(self, modules: Sequence[FusedMoe], device: torch.device) -> None:
        self._numbers = {id(module): number for number, module in enumerate(modules)}
        self._rows = torch.zeros(STEPS, len(modules), modules[0].top_k, dtype=torch.int64, device=device)
        self._next = torch.zeros(len(modules), dtype=torch.int64, device=device)  # row of each module
        forward = cast("Callable[..., Tensor]", FusedMoe.forward)

        def traced(module: FusedMoe, x: Tensor, index: Tensor, weights: Tensor, lora: Any = None) -> Tensor:
            return forward(module, x, self.chosen(module, index), weights, lora)

        cast("Any", FusedMoe).forward = traced

    def begin(self, choices: Tensor) -> None:
        """Take another trace, from its first step on."""
        self._rows.copy_(choices)
        self._next.zero_()

    def chosen(self, module: FusedMoe, index: Tensor) -> Tensor:
        """Return the choices of the next steps, one for each of the tokens: `(T, k) int64`."""
        number = self._numbers.get(id(module))
        if number is None:
            return index
        following = self._next[number]
        rows = (following + torch.arange(len(index), device=index.device)) % STEPS
        self._next[number : number + 1] += len(index)
        return self._rows[:, number].index_select(0, rows)


def measured(out: Path, args: argparse.Namespace, *, swept: bool) -> Iterator[Kept]:
    """Yield a row for each trace with the plan's own places, and with `swept` for each part."""
    from ktc.foundation import host
    from ktc.foundation.files import temporary_folder
    from ktc.model.loading.load import load
    from ktc.tools.bench.progress import ProgressSink
    from ktc.tools.measure.limits import Limits, build_library

    quiet = ProgressSink(lambda *_: None, lambda *_: None, lambda *_: None)
    model: Any = load(out, random_weights=0)
    with temporary_folder("kept") as folder:
        limits = Limits(build_library(host.detect().isas[0], folder), host.usable_threads())
        modules = [module for module in cast("nn.Module", model).modules() if isinstance(module, FusedMoe)]
        traced = Traced(modules, model.device)
        sizes = len(modules), modules[0].num_experts, modules[0].top_k
        total = sizes[0] * sizes[1]
        steps = [places for module in modules if module.kept is not None for places in [module.kept.store.num_places]]
        parts = [None, *args.kept] if steps and swept else [None]
        for trace in args.trace:
            choices = choices_of(trace, sizes)
            traced.begin(choices)
            for part in parts:
                places = (steps[0] if steps else total) if part is None else round(total * part / 100)
                row = _timed(model, modules, places if steps else None, choices, (trace, args, limits, quiet))
                hits, moved = simulated(choices, sizes[1], places, counted=trace == "counted")
                about = Kept(trace=trace, part=100 * places / total, places=places, simulated=hits, exchanges=moved)
                read = row.read_by
                yield replace(
                    about, out=out.name + " as planned" * (part is None), ms=row.ms, best_ms=row.best_ms,
                    tokens_per_second=row.tokens_per_second, hits=read and read["gpu"], bus=row.bus_share,
                    prompt_seconds=row.prompt_seconds,
                )  # fmt: skip


def _timed(model: Any, modules: Sequence[FusedMoe], places: int | None, choices: Tensor, how: tuple[Any, ...]) -> Any:
    """Return the row of `ktc bench generate`, with that many places; None where steps split no experts."""
    from ktc.model.loading.kept import kept_stores
    from ktc.tools.bench import generate
    from ktc.tools.bench.requests import Generate

    trace, args, limits, sink = how
    if places is not None:
        keep(model, modules, places)
    for store in kept_stores(model):
        counted = trace == "counted"
        store.place(counts_of(choices, modules[0].num_experts) if counted else torch.zeros(store.table.shape))
    request = Generate(model="", settings={}, contexts=(args.context,), steps=args.steps)
    (row,) = generate.rows("ktc", model, request, limits, sink)
    return row


def keep(model: Any, modules: Sequence[FusedMoe], places: int) -> None:
    """Give the layers of a loaded model this many places in all."""
    from ktc.model.loading.kept import keep_experts

    model.decode_graphs.clear()
    for number, module in enumerate(modules):
        assert module.offload is not None and module.offload.kept is not None, "its steps split experts"
        of_layer = places * (number + 1) // len(modules) - places * number // len(modules)
        module.kept, module.offload = None, replace(
            module.offload, kept=replace(module.offload.kept, places=of_layer)
        )  # fmt: skip
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    keep_experts(model)


# Output ----------------------------------------------------------------------------------------------------------
def plot(rows: Sequence[Kept], path: Path) -> None:
    """Draw hits, and token/s where they were measured, over the part that is kept."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    timed = any(row.tokens_per_second for row in rows)
    figure, axes = cast("tuple[Any, Any]", pyplot.subplots(1, 1 + timed, figsize=(5 * (1 + timed), 4), squeeze=False))
    swept = [row for row in rows if not row.out.endswith("as planned")]
    for trace in dict.fromkeys(row.trace for row in swept):
        of_trace = sorted((row for row in swept if row.trace == trace), key=lambda row: row.part)
        parts = [row.part for row in of_trace]
        hits = [100 * (row.simulated if row.hits is None else row.hits) for row in of_trace]
        axes[0][0].plot(parts, hits, "o-", label=trace)
        if timed:
            axes[0][1].plot(parts, [row.tokens_per_second for row in of_trace], "o-", label=trace)
    for axis, name in zip(axes[0], ("hits, % of chosen experts", "token/s"), strict=False):
        axis.set_xlabel("% of experts kept")
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, linewidth=0.3)
        axis.legend()
    figure.savefig(path, bbox_inches="tight", dpi=150)


def shown(row: Kept) -> str:
    """Return a line of the table."""
    timed = ""
    if row.tokens_per_second is not None and row.ms is not None:
        hits = "-" if row.hits is None else f"{row.hits:.2f}"
        timed = f"  hits {hits}  {row.tokens_per_second:7.1f} token/s  {row.ms:6.2f} ms (best {row.best_ms:.2f})"
        timed += f", share of the bus {row.bus or 0:.2f}, prompt {row.prompt_seconds:.3f} s"
    about = f"{row.out:24} {row.trace:9} {row.part:5.1f} % ({row.places} places)"
    return f"{about}  simulated hits {row.simulated:.2f}, {row.exchanges} exchanges{timed}"


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Experts that a GPU keeps: hits and token/s.")
    parser.add_argument("out", nargs="*", type=Path)
    parser.add_argument("--kept", type=numbers, default=[0.0, 10.0, 25.0, 50.0])
    parser.add_argument("--trace", type=lambda text: text.split(","), default=list(TRACES))
    for name, default in (("layers", 26), ("experts", 64), ("top-k", 6), ("steps", 300), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("--output", "--plot", "--read", "--compile"):
        parser.add_argument(name, *["-o"] * (name == "--output"), type=Path)
    for name in ("--config", "--budget"):
        parser.add_argument(name, default="")
    args = parser.parse_args()
    if args.compile:
        compiled(args.compile, args.config, args.layers, args.budget)
        return
    rows = list[Kept]()
    if args.read:
        rows = [Kept(**row) for row in json.loads(args.read.read_text())]
    elif not args.out:
        rows = list(simulations((args.layers, args.experts, args.top_k), args.kept, args.trace))
    for row in rows:
        print(shown(row))
    for number, out in enumerate(args.out):
        for row in measured(out, args, swept=number == 0):
            rows.append(row)
            print(shown(row), flush=True)
            if args.output:
                args.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
