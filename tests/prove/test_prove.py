"""Proof promises: a right rewrite holds in forward and all gradients; every wrong one is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from families import captured, config_of, planned
from torch import fx

from ktc import dsl, twin
from ktc.diagnostics import ProofFailed
from ktc.experts.form import Activation, ExpertsForm
from ktc.experts.module import FusedMoe
from ktc.graph import ops
from ktc.graph.typed import input_of, nodes_of
from ktc.prove import Proof, compare, prove
from ktc.prove.compare import TOLERANCE, Call, InDouble, relative_error
from ktc.prove.run import bind, record_calls, signature
from ktc.rewrite import apply, rewrite


@pytest.mark.parametrize(
    ("family", "overrides"), [("deepseek_v2", {}), ("deepseek_v2", {"q_lora_rank": 24}), ("qwen3_moe", {})]
)
def test_the_shipped_rewrites_hold(family: str, overrides: dict[str, object]) -> None:
    model = captured(family, torch.bfloat16, **overrides)
    _, plan = planned(model, dsl.load("moe-lora", {}))
    proofs = prove(model, rewrite(model, plan))
    assert len(proofs) == len(plan.rewrites) == 2
    for proof in proofs:
        assert proof.holds
        assert proof.forward < 1e-6
        assert proof.worst_gradient < 1e-6
    experts = next(p for p in proofs if p.block.endswith(("Moe", "MoeBlock")))
    assert {"hidden_states", "routing_weights of experts", "gate.weight"} <= experts.gradients.keys()


@cache
def _witness() -> tuple[torch.nn.Module, tuple[Call, ...]]:
    """A DeepSeek-V3 MoE block: it renormalises, scales by 2.5, limits groups, and has a shared expert."""
    model = twin.build(twin.shrink(config_of("deepseek_v3", torch.float32)), 11, torch.float32, "cpu")
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")
    site = "model.layers.1.mlp"
    return model.get_submodule(site), tuple(record_calls(model, {site})[site])


def _rewritten() -> fx.GraphModule:
    config = twin.shrink(config_of("deepseek_v3", torch.float32))
    widths = {name: getattr(config, name) for name in ("hidden_size", "moe_intermediate_size", "kv_lora_rank")}
    model = captured("deepseek_v3", torch.float32, **widths)
    _, plan = planned(model, dsl.load("moe-lora", {"format": "bf16"}))
    (block,) = [b for b in rewrite(model, plan) if b.rewrite.block == "mlp_1"]
    bind(block.graph, _witness()[0])
    return block.graph


def _bypass(graph: fx.GraphModule, op: str, pick: Callable[[fx.Node], bool] = lambda n: True) -> None:
    """Replaces the last node of operator `op` by its first operand."""
    node = next(n for n in reversed(nodes_of(graph)) if ops.operator(n) == op and pick(n))
    node.replace_all_uses_with(input_of(node, 0))


def missing_scaling(graph: fx.GraphModule) -> None:
    _bypass(graph, "mul", lambda n: isinstance(n.args[1], float))


def wrong_scale(graph: fx.GraphModule) -> None:
    node = next(n for n in nodes_of(graph) if ops.operator(n) == "mul" and isinstance(n.args[1], float))
    scale = node.args[1]
    assert isinstance(scale, float)
    node.args = (node.args[0], scale * 1.01)


def missing_renormalisation(graph: fx.GraphModule) -> None:
    _bypass(graph, "div")


def dropped_shared_expert(graph: fx.GraphModule) -> None:
    _bypass(graph, "add", lambda n: all(isinstance(a, fx.Node) for a in n.args))


def swapped_gate_and_up(graph: fx.GraphModule) -> None:
    experts = graph.get_submodule("experts")
    assert isinstance(experts, FusedMoe)
    for expert in range(experts.num_experts):
        gate, up = experts.expert(expert, "gate"), experts.expert(expert, "up")
        experts.load_expert(expert, "gate", up)
        experts.load_expert(expert, "up", gate)


def wrong_activation(graph: fx.GraphModule) -> None:
    experts = graph.get_submodule("experts")
    assert isinstance(experts, FusedMoe)
    experts.weights.form = ExpertsForm(Activation("gelu"))


def dropped_correction_bias(graph: fx.GraphModule) -> None:
    sums = [n for n in nodes_of(graph) if ops.operator(n) == "add"]
    node = next(n for n in sums if any(a.op == "get_attr" or "bias" in a.name for a in n.all_input_nodes))
    node.replace_all_uses_with(input_of(node, 0))


def dropped_group_limit(graph: fx.GraphModule) -> None:
    _bypass(graph, "masked_fill")


def weights_from_other_tokens(graph: fx.GraphModule) -> None:
    (node,) = [n for n in nodes_of(graph) if ops.operator(n) == "cpu_moe"]
    with graph.graph.inserting_before(node):
        rolled = graph.graph.call_function(torch.roll, (node.args[2], 1, 0))
    node.args = (*node.args[:2], rolled)


MUTANTS = (
    missing_scaling, wrong_scale, missing_renormalisation, dropped_shared_expert, swapped_gate_and_up, wrong_activation,
    dropped_correction_bias, dropped_group_limit, weights_from_other_tokens,
)  # fmt: skip


def _error(mutate: Callable[[fx.GraphModule], None] | None) -> float:
    graph = _rewritten()
    if mutate is not None:
        mutate(graph)
        graph.recompile()
    original, calls = _witness()
    forward, gradients = compare(original, graph, calls, seed=5)
    return max(forward, *gradients.values())


def test_the_unchanged_rewrite_holds() -> None:
    assert _error(None) < 1e-6


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_wrong_rewrite_is_caught(mutant: Callable[[fx.GraphModule], None]) -> None:
    assert _error(mutant) > 50 * TOLERANCE


def test_a_wrong_pass_stops_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_shared(graph: fx.GraphModule, rewrite_of_block: object) -> None:
        if any(ops.operator(n) == "cpu_moe" for n in nodes_of(graph)):
            dropped_shared_expert(graph)

    monkeypatch.setattr(apply, "PASSES", (*apply.PASSES, ("wrong", drop_shared)))
    model = captured("deepseek_v2")
    _, plan = planned(model, dsl.load("moe-lora", {}))
    with pytest.raises(ProofFailed) as failed:
        prove(model, rewrite(model, plan))
    (problem,) = failed.value.diagnostics
    assert problem.code == "P300"
    assert "DeepseekV2Moe" in problem.message
    assert problem.span is not None
    assert failed.value.exit_code == 1


@pytest.mark.parametrize("wrong", [2 * TOLERANCE, float("inf"), float("nan")])
def test_a_right_output_with_one_wrong_gradient_does_not_hold(wrong: float) -> None:
    right = Proof("moe", "mlp", ("lora",), 0.0, {"hidden_states": TOLERANCE, "gate.weight": 0.0}, ((1, 4),), 0)
    assert right.holds
    proof = replace(right, gradients={"hidden_states": 0.0, "gate.weight": wrong})
    assert not proof.holds
    assert proof.to_json()["holds"] is False


def test_errors_of_nothing_and_of_not_a_number_do_not_pass() -> None:
    one, zero, nan = torch.ones(3), torch.zeros(3), torch.full((3,), float("nan"))
    assert relative_error(None, zero) == 0.0
    assert relative_error(None, one) == relative_error(one, zero) == relative_error(nan, one) == float("inf")


def test_a_witness_that_does_not_run_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: object, fqns: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr("ktc.prove.run.record_calls", broken)
    model = captured("qwen3_moe")
    _, plan = planned(model, dsl.load("moe-lora", {}))
    with pytest.raises(ProofFailed, match=r"P302.*AttributeError: no such thing"):
        prove(model, rewrite(model, plan))


def test_rounding_of_the_original_is_told_from_an_error_in_double_precision() -> None:
    # `1 - s` for s near 1, as attention with sinks has it: fp32 alone is off by 1e-4 here, whatever the rewrite.
    class Cancelling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1 - (x.abs() + 8).to(torch.float32).sigmoid()

    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    truth = (-(x.double().abs() + 8)).sigmoid()
    assert relative_error(Cancelling()(x), truth) > 1e-5
    with InDouble():
        assert relative_error(Cancelling()(x.double()), truth) < 1e-12


def test_windowed_and_full_attention_do_not_stand_for_each_other() -> None:
    model = captured("gpt_oss")
    graphs = [b.graph for b in model.blocks if b.class_name == "GptOssAttention" and b.graph is not None]
    assert len(graphs) == 2
    assert signature(graphs[0]) != signature(graphs[1])
