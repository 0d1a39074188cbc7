"""Families nobody wrote for promise: what they share with known ones is found and proven, what is near it is not.

Two bars stand before a rewrite. The pattern says what a routing is, and may know it or not; an unknown router keeps its
own code, so rewriting the experts behind it is right. The proof says whether the experts are what they declare.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from families import CPU
from invented.registered.models import MODELS
from invented.registered.near_twins import (
    PROVEN_WRONG,
    ROUTINGS,
    UNKNOWN_ACTIVATION,
    Route,
    right,
    routed_by,
    with_experts,
)
from invented.registered.skeleton import Bank, InventedConfig
from shared_captures import SharedCaptures

from ktc.diagnostics import InputRefused
from ktc.language import dsl
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture import CapturedModel, ModelSource, capture
from ktc.stages.match import Match, SubMatch, match
from ktc.stages.plan import make_plan
from ktc.stages.proof import Proof, prove
from ktc.stages.rewrite import rewrite

pytestmark = pytest.mark.usefixtures("one_thread")
# What each says of its routing, its shared expert, its experts and its attention.
KNOWN = {
    "orchid": ("topk_router", "gated_mlp", "silu", "gqa"),
    "basalt": ("late_router", None, "gelu biased transposed", "fused_qkv"),
    "heron": ("corrected_router", "gated_mlp", "silu", "gqa"),
    "lichen": ("topk_router", "fused_mlp", "relu", "fused_qkv"),
    "quartz": ("late_corrected_router", None, "gelu", "gqa"),
}
ATTENTION = """
import "std/moe.ktr"
import "std/attention.ktr" as attn
rule block     { match moe.block                   => keep(kernel) }
rule gqa       { match attn.gqa       expect >= 0  => keep(kernel) }
rule fused_qkv { match attn.fused_qkv expect >= 0  => keep(kernel) }
"""


CAPTURES = SharedCaptures(capture)  # these models are small already: most are the twin on which they are proven


@pytest.fixture(scope="module", autouse=True)
def _twins_share_captures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ktc.stages.proof.twins.capture", CAPTURES)
        yield


def _captured(config: InventedConfig) -> CapturedModel:
    config.dtype = torch.float32
    return CAPTURES(ModelSource(config.model_type, None, config, None))


@cache
def _invented(name: str) -> CapturedModel:
    return _captured(MODELS[name]())


def _proven(model: CapturedModel) -> tuple[tuple[Match, ...], tuple[Proof, ...]]:
    """What the program for any model finds in `model`, and the proofs of what it puts there."""
    program = dsl.load("moe-lora", {"format": "bf16"})
    matches = match(model, program, CPU)
    plan = make_plan(model, (), matches, program, CPU)
    return matches.matches, prove(model, rewrite(model, plan), CPU)


def _program(folder: Path, text: str) -> dsl.RuleSet:
    path = folder / "program.ktr"
    path.write_text(text, encoding="utf-8")
    return dsl.load(path, {})


def _form(model: CapturedModel, block: Match) -> object:
    graph = model.block(block.block).graph
    assert graph is not None
    return next(ops.attributes(n)["form"] for n in nodes_of(graph) if ops.operator(n) == "experts")


def _rules_of(matches: tuple[Match, ...]) -> set[str]:
    return {m.rule for m in matches if m.block}


@pytest.mark.parametrize("name", MODELS)
def test_an_invented_model_is_rewritten_and_proven(name: str) -> None:
    matches, proofs = _proven(_invented(name))
    assert {"known"} <= _rules_of(matches)
    assert {m.path.split(".")[0] for m in matches if m.block} == {"cells"}
    assert len(proofs) == 2
    for proof in proofs:
        assert proof.forward < 1e-6
        assert proof.worst_gradient < 2e-6


@pytest.mark.parametrize("name", MODELS)
def test_what_is_known_of_an_invented_model_is_what_it_is(name: str, tmp_path: Path) -> None:
    routing, shared, form, attention = KNOWN[name]
    model = _invented(name)
    found = match(model, _program(tmp_path, ATTENTION), CPU)
    (block, *others) = found.of("block")
    assert len(others) == 1
    assert block.coverage == 1.0
    router = block.capture(("router",))
    assert isinstance(router, SubMatch)
    assert router.pattern == f"moe.{routing}"
    mlp = block.capture(("shared",))
    assert (mlp.pattern if isinstance(mlp, SubMatch) else None) == (shared and f"moe.{shared}")
    assert _form(model, block) == form
    assert {rule for rule in ("gqa", "fused_qkv") if found.of(rule)} == {attention}


@pytest.mark.parametrize("route", ROUTINGS, ids=lambda route: route.__name__)
def test_a_routing_that_is_nearly_known_is_not_known(route: Route, tmp_path: Path) -> None:
    model = _captured(routed_by(route)())
    with pytest.raises(InputRefused, match="rule `block` matched 0"):
        match(model, _program(tmp_path, ATTENTION), CPU)


def test_what_the_near_twins_are_near_to_is_known(tmp_path: Path) -> None:
    found = match(_captured(routed_by(right)()), _program(tmp_path, ATTENTION), CPU)
    assert [m.coverage for m in found.of("block")] == [1.0, 1.0]


@pytest.mark.parametrize("route", [ROUTINGS[0], ROUTINGS[3], ROUTINGS[4]], ids=lambda route: route.__name__)
def test_experts_behind_an_unknown_routing_are_rewritten_and_the_router_keeps_its_code(route: Route) -> None:
    matches, proofs = _proven(_captured(routed_by(route)()))
    assert "known" not in _rules_of(matches)
    assert "opaque" in _rules_of(matches)
    assert all(proof.holds for proof in proofs)


@pytest.mark.parametrize("bank", PROVEN_WRONG, ids=lambda bank: bank.__name__)
def test_experts_that_are_not_what_they_declare_are_refuted(bank: type[Bank]) -> None:
    _, proofs = _proven(_captured(with_experts(bank)()))
    assert [proof.holds for proof in proofs if proof.class_name == "Mixture"] == [False]


@pytest.mark.parametrize("bank", UNKNOWN_ACTIVATION, ids=lambda bank: bank.__name__)
def test_experts_with_an_activation_of_their_own_stay_as_they_are(bank: type[Bank]) -> None:
    model = _captured(with_experts(bank)())
    (block,) = [b for b in model.blocks if b.class_name == "Mixture"]
    assert block.graph is None
    assert "activation" in block.opaque
    assert _rules_of(match(model, dsl.load("moe-lora", {}), CPU).matches) == set()
