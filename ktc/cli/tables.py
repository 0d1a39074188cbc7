"""The tables that the commands print.

In: findings, and the frozen values of the compiler's stages. Out: rich renderables. This module only shows values of
the stages; it imports no stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from ktc.cli.amounts import count, size

if TYPE_CHECKING:
    from ktc.cli import doctor
    from ktc.language.dsl import RuleSet
    from ktc.model.packing import verify
    from ktc.stages.match import Matches
    from ktc.stages.plan import LoraPlan, Plan
    from ktc.stages.proof import Proof

_KINDS = {
    "attention": "attention", "experts": "experts, packed", "mlp": "dense, shared, router",
    "embeddings": "embeddings", "lm_head": "lm_head", "towers": "towers, projectors",
    "other": "other",
}  # fmt: skip
_KEPT: Mapping[str, str] = {
    "kernel": "keeps its own code", "adapter": "gets no adapter", "quant": "keeps its weights",
    "place": "is not placed",
}  # fmt: skip
_UNITS = (("B", 10**9), ("M", 10**6), ("K", 10**3))
# Of `ktc doctor` and of `ktc verify`.
_STYLES = {
    "works": "green", "limited": "yellow", "missing": "bold red", "good": "green", "stale": "yellow",
    "altered": "bold red",
}  # fmt: skip


def rules_table(rules: RuleSet, matches: Matches, plan: Plan) -> Table:
    """Return one row per rule and kind of rewrite: the rule's matches, the target, its modules and their device."""
    table = _table("rule", "matches", "becomes", "modules", "where")
    for rule in rules.rules:
        num_matches = str(len(matches.of(rule.name)))
        rows = [*_rewrites_of(rule.name, plan), *_places_of(rule.name, plan)]
        kept = ", ".join(dict.fromkeys(_KEPT[action.facet] for action in rule.actions if action.target.name == "keep"))
        without = "fits nowhere" if num_matches == "0" else kept or "another rule has these"
        for kind, modules, where in rows or [(without, "", "")]:
            table.add_row(rule.name, num_matches, kind, modules, where)
            num_matches = ""
    return table


def devices_table(plan: Plan) -> Table:
    """Return one column per device: bytes of weights by purpose, the adapter, the budget, and whether they fit."""
    devices = plan.memory.devices
    table = _table("bytes", *(memory.device for memory in devices))
    for kind, words in _KINDS.items():
        if any(kind in memory.kinds for memory in devices):
            table.add_row(words, *(size(memory.kinds.get(kind, 0)) for memory in devices))
    table.add_row("weights", *(size(memory.weights) for memory in devices), style="bold")
    if any(memory.adapter for memory in devices):
        table.add_row("LoRA, its gradients, Adam", *(size(memory.adapter) for memory in devices))
    if any(memory.streaming for memory in devices):
        table.add_row("streamed weights", *(size(memory.streaming) for memory in devices))
    table.add_row("budget", *("unknown" if memory.budget is None else size(memory.budget) for memory in devices))
    table.add_row("", *(_room(memory.weights + memory.adapter + memory.streaming, memory.budget) for memory in devices))
    return table


def _room(needed: int, budget: int | None) -> Text:
    if budget is None:
        return Text()
    if needed <= budget:
        return Text(f"fits, {size(budget - needed)} left", style="green")
    return Text(f"SHORT BY {size(needed - budget)}", style="bold red")


def workloads_table(plan: Plan) -> Table:
    """Return the needs of each use on each device at one size of input, and the largest sizes that fit."""
    devices = [memory.device for memory in plan.memory.devices]
    first = plan.memory.workloads[0]
    table = _table(
        f"at batch {first.batch}, length {first.length}", *devices, "", "longest at batch 1", f"batch at {first.length}"
    )
    for use in plan.memory.workloads:
        needs = (size(sum(use.needs[device].values())) for device in devices)
        short = ", ".join(f"{device} short by {size(missing)}" for device, missing in use.shortfall.items())
        fits = Text(short, style="bold red") if short else Text("fits", style="green")
        bound = f"{use.bound} full" if use.bound in devices else "the model's own limit"
        table.add_row(use.name, *needs, fits, f"{use.max_length:,} ({bound})", f"{use.max_batch:,}")
    return table


def needs_table(plan: Plan) -> Table:
    """Return the parts of each workload's memory."""
    table = _table("workload", "device", "of that")
    for use in plan.memory.workloads:
        for device, parts in use.needs.items():
            sizes = (f"{part} {size(num_bytes)}" for part, num_bytes in parts.items() if num_bytes)
            table.add_row(use.name, device, ", ".join(sizes))
    return table


def parameters_line(plan: Plan) -> Text:
    """Return the model's numbers of parameters, as its authors count them."""
    memory = plan.memory
    return Text(
        f"{memory.parameters:,} parameters ({_rounded(memory.parameters)}), a token meets {_rounded(memory.active)}"
    )


def _rounded(parameters: int) -> str:
    """Return a number of parameters as names of models write it: 15.7B, 440.7K."""
    letter, unit = next((pair for pair in _UNITS if parameters >= pair[1]), _UNITS[-1])
    return f"{parameters / unit:,.1f}{letter}"


def _adapted(lora: LoraPlan) -> str:
    experts = f"{count(len(lora.parameters), 'weight')} of experts" if lora.parameters else ""
    return " and ".join(filter(None, [count(len(lora.targets), "module") if lora.targets else "", experts]))


def adapter_line(lora: LoraPlan) -> Text:
    """Return the adapter in one line."""
    adapted = f"LoRA r={lora.r} alpha={lora.lora_alpha:g} on {_adapted(lora)}" if _adapted(lora) else ""
    trained = f"{count(len(lora.modules), 'module')} trained whole" if lora.modules else ""
    what = ", ".join(filter(None, (adapted, trained)))
    return Text(f"{what}: {count(lora.trainable, 'trainable parameter')}\n")


def kernels_table(plan: Plan) -> Table:
    """Return one row per generated kernel."""
    table = _table("kernel", "H", "I", "experts", "top k", "format", "ISA", "threads")
    for spec in plan.kernels:
        table.add_row(*spec.summary, spec.isa, str(plan.threads))
    return table


def proofs_table(proofs: Iterable[Proof]) -> Table:
    """Return one row per distinct rewrite: its worst relative errors of outputs and gradients against the original."""
    table = _table("proof", "rules", "forward", "gradient", "allowed", "sites", "cases", "constants met")
    for proof in proofs:
        errors = (f"{error:.1e}" for error in (proof.forward, proof.worst_gradient, proof.tolerance))
        met = f"{sum(constant.met for constant in proof.constants)} of {len(proof.constants)}"
        counts = (str(len(proof.sites)), str(len(proof.cases)), met if proof.constants else "none")
        table.add_row(
            proof.rewrite, ", ".join(proof.rules), *errors, *counts, style=None if proof.holds else "bold red"
        )
    return table


def reasons_table(plan: Plan) -> Table:
    """Return the reason for each decision about a part of the model."""
    table = _table("what", "why")
    for reason in plan.reasons:
        table.add_row(Text(reason.path or "the model"), Text(reason.text))
    return table


def _rewrites_of(rule: str, plan: Plan) -> Iterator[tuple[str, str, str]]:
    counts = Counter[tuple[str, str]]()
    for rewrite in plan.rewrites:
        for action in rewrite.actions:
            if action.rule == rule:
                device = rewrite.node_devices.get(action.node, rewrite.device)
                counts[action.target.name, device] += len(rewrite.sites)
    uncaptured = (linear for linear in plan.uncaptured if linear.action.rule == rule)
    counts.update((linear.action.target.name, linear.device) for linear in uncaptured)
    for (target, device), modules in counts.items():
        yield target, str(modules), device


def _places_of(rule: str, plan: Plan) -> Iterator[tuple[str, str, str]]:
    devices = Counter(placement.device for placement in plan.placements if placement.rule == rule)
    for device, modules in devices.items():
        yield "place", str(modules), device


def findings_table(
    findings: Iterable[doctor.Finding | verify.Finding], words: Mapping[str, str] | None = None
) -> Table:
    """Return one row per finding, with the remedy below the fact. `words` replace the names of states."""
    table = _table("", "state", "found")
    for finding in findings:
        fact = Text(finding.found)
        if finding.remedy:
            fact.append(f"\n{finding.remedy}", style="dim")
        word = (words or {}).get(finding.state, finding.state)
        table.add_row(finding.name, Text(word, style=_STYLES[finding.state]), fact)
    return table


def plain_table(*columns: str) -> Table:
    """Return an empty table in the style of all commands."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")


def _table(*columns: str) -> Table:
    table = plain_table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    return table
