"""Apply the bundled programs to a captured twin: what each one rewrites, and the whole twin with that realised.

Input: a capture of witness size and its stock model. Output: the stages' values, and a `TwinProof` per program.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from transformers import PreTrainedModel

from ktc import dsl
from ktc.capture import CapturedModel
from ktc.census.twins import compare_twins
from ktc.census.types import TwinProof
from ktc.diagnostics import KtcError
from ktc.dsl import RuleSet
from ktc.host import Host
from ktc.link.adapter import adapter_json
from ktc.match import Matches, match
from ktc.model.realise import realise
from ktc.plan import Plan, make_plan
from ktc.rewrite import RewrittenBlock, block_code, block_file, recipe, rewrite

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
    captured: CapturedModel, stock: PreTrainedModel, first: tuple[Plan, Sequence[RewrittenBlock]]
) -> tuple[TwinProof, ...]:
    """Return the whole twin in every program; `first` has the stages' values of the first one."""
    proofs = [_twin_proof(captured, stock, PROGRAMS[0], *first)]
    for program in PROGRAMS[1:]:
        try:
            _, plan, blocks = rewritten(captured, program)
        except KtcError as error:
            proofs.append(TwinProof(program, failure=_refusal(error)))
        else:
            proofs.append(_twin_proof(captured, stock, program, plan, blocks))
    return tuple(proofs)


def _twin_proof(
    captured: CapturedModel, stock: PreTrainedModel, program: str, plan: Plan, blocks: Sequence[RewrittenBlock]
) -> TwinProof:
    if not blocks:
        return TwinProof(program, failure="it rewrites nothing")
    if plan.unavailable:
        return TwinProof(program, failure=f"not built: {plan.unavailable[0].message}")
    try:
        realised = _realised(captured, stock, plan, blocks)
        adapter = plan.lora and adapter_json(
            plan.lora.targets, plan.lora.r, plan.lora.lora_alpha, plan.lora.lora_dropout, plan.lora.rank_pattern,
            plan.lora.alpha_pattern, plan.lora.parameters,
        )  # fmt: skip
    except KtcError as error:
        return TwinProof(program, failure=_refusal(error))
    return compare_twins(program, stock, realised, adapter)


def _realised(
    captured: CapturedModel, stock: PreTrainedModel, plan: Plan, blocks: Sequence[RewrittenBlock]
) -> PreTrainedModel:
    model = copy.deepcopy(stock)
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks:
            if block.experts is not None:
                file = Path(folder) / block_file(block)
                file.parent.mkdir(exist_ok=True)
                site = captured.model.get_submodule(block.rewrite.sites[0].fqn)
                file.write_text(block_code(block.graph, site, "The census.", model.dtype), encoding="utf-8")
        realise(model, recipe(tuple(blocks), plan), None, Path(folder))
    return model


def _refusal(error: KtcError) -> str:
    return f"{error.diagnostics[0].code}: {error.diagnostics[0].message}"
