"""Apply the bundled programs to a captured twin: what each one rewrites, and the whole twin with that realised.

Input: a capture of twin size that is its own twin. Output: the stages' values, and a `TwinProof` per program.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from census.twins import compare_twins
from census.types import TwinProof
from ktc.diagnostics import KtcError
from ktc.foundation.host import Host
from ktc.language import dsl
from ktc.language.dsl import RuleSet
from ktc.model.hf.private_api import read_as_experts
from ktc.stages.capture import CapturedModel
from ktc.stages.link.adapter import adapter_json
from ktc.stages.match import Matches, match
from ktc.stages.plan import Plan, make_plan
from ktc.stages.proof import ProofTwin, carried_over, realised
from ktc.stages.rewrite import RewrittenBlock, rewrite

PROGRAMS = ("moe-lora", "moe-experts-lora")
SETTINGS = {"format": "bf16"}
# The census tests whether ktc knows the family, not this machine: a plain CPU with every instruction set.
HOST = Host(
    isas=("avx512_bf16", "avx512", "avx2", "scalar"), features=frozenset(), cores=2, threads=2, numa=1,
    memory=1 << 40, gpus=(), python_abi="", compiler=None,
)  # fmt: skip


@cache
def rules(program: str) -> RuleSet:
    """Return a bundled program."""
    return dsl.load(program, SETTINGS)


def rewritten(captured: CapturedModel, program: str) -> tuple[Matches, Plan, tuple[RewrittenBlock, ...]]:
    """Return what `program` finds in a twin, its plan and the rewritten blocks. Raises as those stages do."""
    matches = match(captured, rules(program), HOST)
    plan = make_plan(captured, (), matches, rules(program), HOST)
    return matches, plan, rewrite(captured, plan)


def twin_proofs(
    captured: CapturedModel, twin: ProofTwin, left: Mapping[str, tuple[str, str]]
) -> tuple[TwinProof, ...]:  # fmt: skip
    """Return the whole twin in every program. The blocks `left` keep their own code, as in a compilation."""
    return tuple(_twin_proof(captured.leaving(left), twin, program) for program in PROGRAMS)


def _twin_proof(captured: CapturedModel, twin: ProofTwin, program: str) -> TwinProof:
    try:
        _, plan, blocks = rewritten(captured, program)
        if not blocks:
            return TwinProof(program, failure="it rewrites nothing")
        adapter = plan.lora and adapter_json(plan.lora, read_as_experts(str(captured.model.config.model_type)))
    except KtcError as error:
        return TwinProof(program, failure=f"{error.diagnostics[0].code}: {error.diagnostics[0].message}")
    carried = [carried_over(captured, block, twin) for block in blocks]
    model, refused = realised(twin, carried, HOST)
    failures = [*(small.failure for small in carried if small.failure), *refused.values()]
    if failures:
        return TwinProof(program, failure=failures[0])
    return compare_twins(program, twin.model, model, adapter)
