"""Captured model, matches and rules on a host -> `Plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.checkpoint import WeightSource
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.adapters import plan_lora, warn_of_adapters
from ktc.stages.plan.claims import claim_nodes
from ktc.stages.plan.decode_steps import decide_steps
from ktc.stages.plan.draft import PlanDraft, Request
from ktc.stages.plan.explain import explain
from ktc.stages.plan.kept import keep_resident
from ktc.stages.plan.left_out import (
    leave_devices_to_pytorch,
    leave_expert_names,
    leave_first_layers,
    leave_shared_modules,
    leave_to_pytorch,
    leave_uncoded_caches,
    leave_unsuited,
)
from ktc.stages.plan.memory import compare_with_budgets, count_memory
from ktc.stages.plan.nodes import group_sites, plan_nodes, require_rewrites, warn_of_unchanged
from ktc.stages.plan.place import place
from ktc.stages.plan.prefill import send_experts
from ktc.stages.plan.settings import check_settings
from ktc.stages.plan.stored import explain_conversions
from ktc.stages.plan.streams import stream_linears
from ktc.stages.plan.trained import plan_weights
from ktc.stages.plan.types import ANY_SIZE, BatchShape, Choices, Plan

PASSES: Final[tuple[Callable[[PlanDraft], PlanDraft], ...]] = (
    claim_nodes,
    leave_shared_modules,
    leave_unsuited,
    leave_expert_names,
    leave_to_pytorch,
    plan_weights,
    place,
    leave_first_layers,
    leave_devices_to_pytorch,
    leave_uncoded_caches,
    plan_nodes,
    send_experts,
    stream_linears,
    group_sites,
    plan_lora,
    require_rewrites,
    count_memory,
    keep_resident,
    check_settings,
    compare_with_budgets,
    explain,
    explain_conversions,
    warn_of_unchanged,
    decide_steps,
    warn_of_adapters,
)


def make_plan(
    captured: CapturedModel, weights: Sequence[WeightSource], matches: Matches, rules: RuleSet, host: Host,
    must_fit: BatchShape = ANY_SIZE, choices: Choices | None = None,
) -> Plan:  # fmt: skip
    """Decide everything that later stages carry out, pass by pass.

    Rules claim nodes, and some claims are left out. Weights and devices are decided, then each node is planned: its
    target chooses the kernel. The bytes are counted, and each decision is explained.

    `weights` is empty if MODEL is only a config; `must_fit` is the size of input that must fit. `choices` decide what
    no rule does. Raise InputRefused for
    conflicts, for targets and settings that are not built, and for a program that rewrites nothing. Raise HostLacks for
    an ISA or a GPU that the host lacks. A plan that is over budget is a value that records it.
    """
    rows: dict[str, list[WeightSource]] = {}
    for source in weights:
        rows.setdefault(source.target.rpartition(".")[0], []).append(source)
    by_module = {fqn: tuple(sources) for fqn, sources in rows.items()}
    request = Request(captured, tuple(weights), by_module, matches, rules, host, must_fit, choices)
    draft = PlanDraft(request, warnings=matches.warnings)
    for decide in PASSES:
        draft = decide(draft)
    return draft.with_warnings(*host.notes).finished()
