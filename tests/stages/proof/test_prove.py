"""Proof promises: a right rewrite holds at every site, in forward and all gradients; a wrong one is refuted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from families import CPU, captured, planned
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc import compiler
from ktc.diagnostics import ProofFailed
from ktc.language import dsl
from ktc.model.compare.comparison import Comparison
from ktc.model.compare.double import InDouble
from ktc.model.compare.errors import relative_error
from ktc.model.experts.module import FusedMoe
from ktc.model.manifest.manifest import Rewrite
from ktc.stages.analysis import Analysis
from ktc.stages.capture import CapturedModel
from ktc.stages.capture.weights import WeightMap
from ktc.stages.choose import Chosen
from ktc.stages.proof import Proof, prove, run, twins
from ktc.stages.proof.compare import Constants
from ktc.stages.proof.twins import signature
from ktc.stages.proof.types import TOLERANCE, Constant
from ktc.stages.rewrite import rewrite

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _every_twin_is_kept() -> Iterator[None]:
    """The product keeps two; here tests of several families take turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twins, "_cached_twin", cache(twins._cached_twin.__wrapped__))
        yield


def proofs_of(model: CapturedModel) -> tuple[Proof, ...]:
    _, plan = planned(model, dsl.load("moe-lora", {}))
    return prove(model, rewrite(model, plan), CPU)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("deepseek_v2", {}, marks=pytest.mark.slow),
        ("deepseek_v2", {"q_lora_rank": 24}),
        ("qwen3_moe", {}),
    ],
)
def test_the_shipped_rewrites_hold_at_every_site(family: str, overrides: dict[str, object]) -> None:
    model = captured(family, torch.bfloat16, **overrides)
    proofs = proofs_of(model)
    assert len(proofs) == 2
    for proof in proofs:
        assert proof.holds
        assert proof.forward < 1e-6
        assert proof.worst_gradient < 1e-6
        assert proof.sites == tuple(site.fqn for site in model.sites_of(proof.block))
    experts = next(p for p in proofs if p.class_name.endswith(("Moe", "MoeBlock")))
    assert {"hidden_states", "routing_weights of experts", "gate.weight"} <= experts.gradients.keys()
    assert {"left padding, training", "decoding with a cache", "all tokens to one expert"} <= set(experts.cases)


def test_a_limit_of_the_experts_is_met_on_both_sides() -> None:
    experts = next(p for p in proofs_of(captured("gpt_oss")) if p.constants)
    assert experts.holds
    assert {(c.operator, c.value) for c in experts.constants} >= {("clamp.max", 7.0), ("clamp.min", -7.0)}
    assert all(constant.met for constant in experts.constants)


# What is put into the twin is wrong --------------------------------------------------------------------------------
Break = Callable[[PreTrainedModel], None]


def swapped_gate_and_up(experts: FusedMoe) -> None:
    for expert in range(experts.num_experts):
        gate, up = experts.expert(expert, "gate"), experts.expert(expert, "up")
        experts.load_expert(expert, "gate", up)
        experts.load_expert(expert, "up", gate)


def two_experts_exchanged(experts: FusedMoe) -> None:
    first, second = experts.expert(0, "down"), experts.expert(1, "down")
    experts.load_expert(0, "down", second)
    experts.load_expert(1, "down", first)


def another_result(change: Callable[[FusedMoe, Tensor], Tensor]) -> Callable[[FusedMoe], None]:
    def broken(experts: FusedMoe) -> None:
        stock = experts.forward
        experts.forward = lambda *args, **kwargs: change(experts, stock(*args, **kwargs))  # type: ignore[method-assign]

    return broken


WRONG = {
    "gate and up swapped": swapped_gate_and_up,
    "two experts exchanged": two_experts_exchanged,
    "doubled in training": another_result(lambda m, y: 2 * y if m.training else y),
    "tokens beyond 128 dropped": another_result(lambda m, y: torch.cat([y[:128], 0 * y[128:]])),
    "large values limited": another_result(lambda m, y: y.clamp(max=50.0)),
    "not a number removed": another_result(lambda m, y: y.nan_to_num()),
    "no gradient": another_result(lambda m, y: y.detach()),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_experts_in_the_last_layer_alone_are_refuted(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = twins.realise

    def realise(model: nn.Module, steps: Sequence[Rewrite], *rest: object) -> None:
        stock(model, steps, *rest)  # type: ignore[arg-type]
        found = [m for m in model.modules() if isinstance(m, FusedMoe)]
        if found:
            WRONG[what](found[-1])

    monkeypatch.setattr(twins, "realise", realise)
    refuted = [proof for proof in proofs_of(captured("qwen3_moe")) if not proof.holds]
    assert [proof.class_name for proof in refuted] == ["Qwen3MoeSparseMoeBlock"]
    assert refuted[0].sites[-1] in refuted[0].difference


@pytest.mark.parametrize(
    ("what", "where"),
    [("training", "left padding, training"), ("long", "two sequences"), ("rounding", "left padding")],
)
def test_experts_whose_other_implementation_differs_are_refuted(
    what: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare, with `rounding`, after fp64 has decided an earlier case: the model in fp64 then has eager experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    stock, compare = ALL_EXPERTS_FUNCTIONS["grouped_mm"], run.compare_blocks

    def other(module: nn.Module, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        wrong = {"training": module.training, "long": len(x) == 128, "rounding": True}[what]
        return stock(module, x, *args, **kwargs) * (2 if wrong else 1)

    def rounded(block: nn.Module, *args: Any) -> Comparison:
        single = next(block.parameters()).dtype == torch.float32
        found = compare(block, *args)
        if what != "rounding" or not single or args[1].poisoned:
            return found
        return replace(found, errors={**found.errors, "output": 1e-4})

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", other)
    monkeypatch.setattr(run, "compare_blocks", rounded)
    (proof,) = (proof for proof in proofs_of(captured("qwen3_moe")) if not proof.holds)
    assert proof.class_name == "Qwen3MoeSparseMoeBlock"
    assert f"{where}, experts by grouped_mm" in proof.difference


def test_grouped_products_are_decided_in_double_precision() -> None:
    x, weight = torch.randn(9, 8), torch.randn(3, 8, 8)
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    one, other = x.double().requires_grad_(), weight.double().requires_grad_()
    with InDouble():
        found = nn.functional.grouped_mm(one, other, offs=ends)
        gradients = torch.autograd.grad(found.square().sum(), (one, other))
    copies = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = torch.cat([copies[0][:2] @ copies[1][0], copies[0][2:] @ copies[1][2]])
    assert torch.allclose(found, wanted, rtol=1e-12)
    for of_ours, of_loop in zip(gradients, torch.autograd.grad(wanted.square().sum(), copies), strict=True):
        assert torch.allclose(of_ours, of_loop, rtol=1e-12)


def test_a_difference_stands_where_stock_code_does_not_run_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = run.compare_blocks

    def in_single_alone(*args: Any) -> Comparison:
        if next(args[0].parameters()).dtype == torch.float64:
            return Comparison(refused="RuntimeError: expected Float but found Double")
        found = stock(*args)
        return replace(found, errors={**found.errors, "output": 0.5})

    monkeypatch.setattr(run, "compare_blocks", in_single_alone)
    assert not any(proof.holds for proof in proofs_of(captured("qwen3_moe")))


def test_a_block_whose_rewrite_is_refuted_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = _broken(monkeypatch, "deepseek_v2", "experts")
    left, proofs = compiler.proven(analysis)
    assert [proof.holds for proof in proofs] == [proof.class_name == "DeepseekV2Attention" for proof in proofs]
    assert [block.rewrite.block for block in left.blocks] == [proof.block for proof in proofs if proof.holds]
    (warning,) = [d for d in left.plan.warnings if d.code == "P300"]
    assert "DeepseekV2Moe" in warning.message
    assert "computes something else than stock" in warning.message
    assert [kernel.op for kernel in left.plan.kernels] == ["linear"], "of attention alone"


def test_a_program_whose_every_rewrite_is_refuted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProofFailed) as failed:
        compiler.proven(_broken(monkeypatch, "deepseek_v2", ""))
    assert {"P300", "M060"} & {problem.code for problem in failed.value.diagnostics}
    assert failed.value.exit_code == 1


def _broken(monkeypatch: pytest.MonkeyPatch, family: str, which: str) -> Analysis:
    """The analysis of a family, and a loader that puts modules with `which` in their name in wrongly."""
    stock = twins.realise

    def realise(model: nn.Module, steps: Sequence[Rewrite], *rest: object) -> None:
        stock(model, steps, *rest)  # type: ignore[arg-type]
        for step in steps:
            if which in step.fqn:
                another_result(lambda m, y: 1.01 * y)(model.get_submodule(step.fqn))  # type: ignore[arg-type]

    monkeypatch.setattr(twins, "realise", realise)
    model, rules = captured(family), dsl.load("moe-lora", {})
    matches, plan = planned(model, rules)
    return Analysis(rules, model, WeightMap((), ()), matches, Chosen(plan, ()), rewrite(model, plan), CPU)


@pytest.mark.parametrize(("longer_than", "where"), [(0, "a loss"), (1000, "1,100 tokens")])
def test_code_around_the_blocks_takes_part_in_the_proof(
    longer_than: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = twins.realise

    def doubled(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        return 2 * logits if logits.shape[1] > longer_than else logits

    def realise(model: nn.Module, steps: Sequence[Rewrite], *rest: object) -> None:
        stock(model, steps, *rest)  # type: ignore[arg-type]
        if any(step.fqn.endswith("experts") for step in steps):  # as code that reads the class of these modules
            cast("PreTrainedModel", model).lm_head.register_forward_hook(doubled)

    monkeypatch.setattr(twins, "realise", realise)
    proofs = proofs_of(captured("deepseek_v2"))
    assert [proof.holds for proof in proofs] == [proof.class_name == "DeepseekV2Attention" for proof in proofs]
    assert all(f"the whole model, {where}" in proof.difference for proof in proofs if not proof.holds)


def test_a_rewrite_that_raises_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def experts_raise(experts: FusedMoe) -> None:
        experts.forward = lambda *_: experts.act_fn  # type: ignore[method-assign]

    stock = twins.realise

    def realise(model: nn.Module, steps: Sequence[Rewrite], *rest: object) -> None:
        stock(model, steps, *rest)  # type: ignore[arg-type]
        for module in [m for m in model.modules() if isinstance(m, FusedMoe)]:
            experts_raise(module)

    monkeypatch.setattr(twins, "realise", realise)
    told = [proof.difference for proof in proofs_of(captured("qwen3_moe")) if not proof.holds]
    assert len(told) == 1
    assert "no attribute 'act_fn'" in told[0]


# The verdict ----------------------------------------------------------------------------------------------------------
RIGHT = Proof("moe", "mlp_0", "Moe", ("lora",), ("mlp",), 0.0, {"hidden_states": TOLERANCE}, ("one token",), (), 0)


@pytest.mark.parametrize("wrong", [2 * TOLERANCE, math.inf, math.nan])
def test_a_right_output_with_one_wrong_gradient_does_not_hold(wrong: float) -> None:
    assert RIGHT.holds
    proof = replace(RIGHT, gradients={"hidden_states": 0.0, "gate.weight": wrong})
    assert not proof.holds
    assert proof.to_json()["holds"] is False
    assert not replace(RIGHT, compared=False).holds


def test_errors_of_nothing_and_of_not_a_number_do_not_pass() -> None:
    one, zero, nan = torch.ones(3), torch.zeros(3), torch.full((3,), math.nan)
    assert relative_error(None, zero) == relative_error(nan, nan) == 0.0
    assert relative_error(None, one) == relative_error(one, zero) == relative_error(nan, one) == math.inf
    assert relative_error(one, nan) == relative_error(one, torch.full((3,), math.inf)) == math.inf


def test_a_constant_is_met_with_values_on_both_sides() -> None:
    assert Constant("clamp.max", 7.0, 3, 1).met
    assert not Constant("clamp.max", 7.0, 3, 0).met


@pytest.mark.parametrize(
    ("value", "below", "replaced", "unproven"),
    [
        (7.0, 9, True, True), (5000.0, 9, True, True), (7.0, 9, False, False), (0.0, 9, True, True),
        (0.0, 0, True, False), (1e-12, 0, True, False), (-math.inf, 0, True, False), (3.4e38, 9, True, False),
    ],
)  # fmt: skip
def test_a_constant_of_replaced_code_that_no_input_is_beyond_is_unproven(
    value: float, below: int, replaced: bool, unproven: bool
) -> None:
    assert Constant("clamp.max", value, below, 0, replaced).unproven is unproven
    assert not Constant("clamp.max", value, 3, 1, replaced).unproven


def test_a_rewrite_with_an_unproven_constant_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SCALES", (8.0,))
    monkeypatch.setattr(run, "ALWAYS", ())
    monkeypatch.setattr(Constant, "met", property(lambda constant: constant.value < 7.0))
    experts = next(p for p in proofs_of(captured("gpt_oss")) if p.constants)
    assert (experts.holds, experts.compared) == (False, False)
    assert experts.difference == "its code compares with 7 (`clamp.max`), and no input is on both sides of it"


def test_constants_are_told_apart_by_the_code_that_compares() -> None:
    class Clamped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(max=3.0)

    inner, x = Clamped(), torch.tensor([1.0, 5.0])
    with Constants() as constants, constants.replacing([inner]):
        inner(x)
        x.clamp(max=3.0)
        assert bool((torch.arange(3) < 5000).all())
        assert bool((torch.arange(3) < 2).any())
    assert constants.counted == (
        Constant("clamp.max", 3.0, 1, 1, True), Constant("clamp.max", 3.0, 1, 1), Constant("lt.other", 5000.0, 3, 0),
    )  # fmt: skip


def test_a_twin_that_does_not_run_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr("ktc.stages.proof.run.record", broken)
    with pytest.raises(ProofFailed, match=r"P302.*AttributeError: no such thing"):
        proofs_of(captured("qwen3_moe"))


def test_rounding_of_the_original_is_told_from_an_error_in_double_precision() -> None:
    # `1 - s` for s near 1, as attention with sinks has it: fp32 alone is off by 1e-4 here, whatever the rewrite.
    class Cancelling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
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
