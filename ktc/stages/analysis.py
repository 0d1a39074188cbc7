"""The analysis of a model under rules before the build: the values of the stages from `dsl` to `rewrite`.

In: those values. Out: `Analysis`, with which a compilation continues, and `Report`, which `ktc.inspect` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktc.diagnostics import Diagnostic, to_json
from ktc.foundation.host import Host
from ktc.language.dsl import RuleSet
from ktc.stages.capture import CapturedModel
from ktc.stages.capture.weights import WeightMap
from ktc.stages.choose import Chosen
from ktc.stages.match import Match, Matches, NearMiss
from ktc.stages.plan import Plan
from ktc.stages.plan.report import plan_json
from ktc.stages.rewrite import RewrittenBlock

if TYPE_CHECKING:
    from ktc.stages.proof import Proof  # `ktc check` proves nothing and need not import the proof


@dataclass(frozen=True, slots=True)
class Analysis:
    """The decisions about a model. `weights` has no rows where the model has no checkpoint."""

    ruleset: RuleSet
    captured: CapturedModel
    weights: WeightMap
    matches: Matches
    chosen: Chosen
    blocks: tuple[RewrittenBlock, ...]
    host: Host

    @property
    def plan(self) -> Plan:
        """The plan that is carried out."""
        return self.chosen.plan

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The plan's findings: warnings, budgets exceeded."""
        return (*self.plan.warnings, *self.plan.over_budget)


@dataclass(frozen=True, slots=True)
class Report:
    """The changes that ktc would make to a model. `to_json` returns plain values."""

    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]
    proofs: tuple[Proof, ...]
    plan: Plan
    diagnostics: tuple[Diagnostic, ...]
    captured: CapturedModel
    blocks: tuple[RewrittenBlock, ...]

    @classmethod
    def of(cls, analysis: Analysis, proofs: tuple[Proof, ...]) -> Report:
        """Return the report of an analysis whose rewrites were proven."""
        matches = analysis.matches
        return cls(
            matches.matches, matches.near_misses, proofs,
            analysis.plan, analysis.diagnostics, analysis.captured, analysis.blocks,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the report without graphs."""
        decisions = decisions_json(self.matches, self.near_misses, self.plan, self.proofs)
        return {**decisions, "diagnostics": [to_json(d) for d in self.diagnostics]}


def decisions_json(
    matches: Sequence[Match], near_misses: Sequence[NearMiss], plan: Plan, proofs: Sequence[Proof]
) -> dict[str, Any]:
    """Return the matches, the plan and the proofs as plain values."""
    return {
        "matches": [{"rule": m.rule, "pattern": m.root, "path": m.path, "coverage": m.coverage} for m in matches],
        "near_misses": [str(miss) for miss in near_misses],
        "plan": plan_json(plan),
        "proofs": [proof.to_json() for proof in proofs],
    }
