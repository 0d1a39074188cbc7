"""Capture promises: graphs from a config alone, named as the checkpoint names, shared by equal layers, runnable."""

from __future__ import annotations

import pytest
import torch
from bound_graph import bind
from families import captured, config_of, forward_seen

from ktc.model import twin
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_by_name, nodes_of
from ktc.stages.capture import CapturedModel


def operators(model: CapturedModel, key: str) -> list[str]:
    graph = model.block(key).graph
    assert graph is not None
    return [ops.operator(n) for n in nodes_of(graph)]


@pytest.mark.parametrize(
    ("family", "ropes", "norms"), [("deepseek_v2", 2, 1), ("deepseek_v3", 2, 2), ("qwen3_moe", 2, 2)]
)
def test_attention_has_one_core_and_every_rope_and_norm_is_one_node(family: str, ropes: int, norms: int) -> None:
    found = operators(captured(family), "self_attn_0")
    assert (found.count("sdpa"), found.count("rope"), found.count("rms_norm")) == (1, ropes, norms)
    assert not {"rsqrt", "neg", "view_as_complex", "slice_scatter"} & set(found)


def test_a_moe_block_holds_one_experts_node_with_its_sizes() -> None:
    model = captured("deepseek_v2")
    graph = model.block("mlp_1").graph
    assert graph is not None
    (experts,) = [n for n in nodes_of(graph) if ops.operator(n) == "experts"]
    assert ops.attributes(experts) == {"num_experts": 16, "hidden": 64, "inter": 48, "act": "silu", "form": "silu"}
    assert experts.meta["fqn"] == "experts"


def test_equal_layers_share_one_graph() -> None:
    model = captured("deepseek_v2", num_hidden_layers=6)
    assert [b.key for b in model.blocks] == ["self_attn_0", "mlp_0", "mlp_1"]
    assert [s.layer for s in model.sites_of("mlp_1")] == [1, 2, 3, 4, 5]
    assert len(model.sites_of("self_attn_0")) == 6


def test_layers_that_differ_in_a_setting_do_not_share_a_graph() -> None:
    model = captured("qwen3_moe", use_sliding_window=True, sliding_window=4, max_window_layers=1, mlp_only_layers=[0])
    assert {b.class_name for b in model.blocks} == {"Qwen3MoeAttention", "Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"}


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe"])
def test_parameters_have_the_names_of_the_state_dict(family: str) -> None:
    model = captured(family)
    stock = set(model.model.state_dict())
    named = {f"{m.fqn}.{t.name}".lstrip(".") for m in model.modules for t in m.tensors}
    assert named == stock
    for site in model.sites:
        graph = model.block(site.block).graph
        assert graph is not None
        assert {f"{site.fqn}.{n.target}" for n in nodes_of(graph) if n.op == "get_attr"} <= stock


def test_batch_and_sequence_stay_symbolic() -> None:
    graph = captured("qwen3_moe").block("self_attn_0").graph
    assert graph is not None
    assert nodes_by_name(graph)["hidden_states"].meta["shape"] == ("b", "s", 64)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 9)])
def test_a_captured_graph_computes_what_its_block_computes(family: str, shape: tuple[int, int]) -> None:
    model = captured(family, torch.float32)
    real = twin.build(config_of(family, torch.float32), 0, torch.float32, "cpu")
    seen = forward_seen(real, [site.fqn for site in model.sites], shape)
    for site in model.sites:
        graph = model.block(site.block).graph
        assert graph is not None
        bind(graph, real.get_submodule(site.fqn))
        call = seen[site.fqn]
        assert torch.allclose(call.replay(graph), call.output, rtol=1e-4, atol=1e-6), site.fqn


def test_experts_of_an_unsupported_form_leave_the_block_opaque_with_a_reason() -> None:
    model = captured("qwen3_moe", hidden_act="mish")
    opaque = {b.class_name: b.opaque for b in model.blocks if b.graph is None}
    assert opaque["Qwen3MoeSparseMoeBlock"].endswith("has an activation that no kernel computes")


@pytest.mark.parametrize(
    ("family", "changes", "form"),
    [
        ("gpt_oss", {}, "silu(alpha=1.702, limit=7.0, up_offset=1.0) biased transposed interleaved"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "gelu"),
        ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ("qwen3_moe", {"hidden_act": "quick_gelu"}, "silu(alpha=1.702)"),
    ],
)
def test_the_form_of_experts_is_read_from_their_own_code(family: str, changes: dict[str, str], form: str) -> None:
    graphs = [b.graph for b in captured(family, **changes).blocks if b.graph is not None]
    found = {ops.attributes(n)["form"] for g in graphs for n in nodes_of(g) if ops.operator(n) == "experts"}
    assert found == {form}
