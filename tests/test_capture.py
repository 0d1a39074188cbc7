"""Capture promises: graphs from a config alone, named as the checkpoint names, shared by equal layers, runnable."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from ktc import twin
from ktc.capture import CapturedModel, ModelSource, capture
from ktc.capture.export import flatten_call
from ktc.graph import ops

COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 512}
MLA = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
MOE = {"intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 4}
GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}


def config_of(family: str, **overrides: object) -> PretrainedConfig:
    fields: dict[str, object] = {
        "deepseek_v2": {**COMMON, **MLA, **MOE, **GROUPS, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
        "deepseek_v3": {**COMMON, **MLA, **MOE, **GROUPS, "q_lora_rank": 24, "n_shared_experts": 1},
        "qwen3_moe": {
            **COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
            "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
        },
    }[family]  # fmt: skip
    return AutoConfig.for_model(family, **{**fields, **overrides})


def captured(family: str, **overrides: object) -> CapturedModel:
    return capture(ModelSource(family, None, config_of(family, **overrides), None))


def operators(model: CapturedModel, key: str) -> list[str]:
    graph = model.block(key).graph
    assert graph is not None
    return [ops.operator(n) for n in graph.graph.nodes]


@pytest.mark.parametrize(("family", "ropes", "norms"), [("deepseek_v2", 2, 1), ("deepseek_v3", 2, 2), ("qwen3_moe", 2, 2)])
def test_attention_has_one_core_and_every_rope_and_norm_is_one_node(family: str, ropes: int, norms: int) -> None:
    found = operators(captured(family), "self_attn_0")
    assert (found.count("sdpa"), found.count("rope"), found.count("rms_norm")) == (1, ropes, norms)
    assert not {"rsqrt", "neg", "view_as_complex", "slice_scatter"} & set(found)


def test_a_moe_block_holds_one_experts_node_with_its_sizes() -> None:
    model = captured("deepseek_v2")
    graph = model.block("mlp_1").graph
    assert graph is not None
    (experts,) = [n for n in graph.graph.nodes if ops.operator(n) == "experts"]
    assert ops.attributes(experts) == {"num_experts": 16, "hidden": 64, "inter": 48, "act": "silu"}
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
        assert {f"{site.fqn}.{n.target}" for n in graph.graph.nodes if n.op == "get_attr"} <= stock


def test_batch_and_sequence_stay_symbolic() -> None:
    graph = captured("qwen3_moe").block("self_attn_0").graph
    assert graph is not None
    (hidden,) = [n for n in graph.graph.nodes if n.name == "hidden_states"]
    assert hidden.meta["shape"] == ("b", "s", 64)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 9)])
def test_a_captured_graph_computes_what_its_block_computes(family: str, shape: tuple[int, int]) -> None:
    config = config_of(family)
    config.dtype = torch.float32
    model = capture(ModelSource(family, None, config, None))
    real = twin.build(config, 0, torch.float32, "cpu")
    real.set_attn_implementation("sdpa")
    real.set_experts_implementation("eager")
    seen: dict[str, tuple[tuple[object, ...], dict[str, object], torch.Tensor]] = {}

    def remember(fqn: str):
        return lambda _, args, kwargs, out: seen.__setitem__(fqn, (args, kwargs, out[0] if isinstance(out, tuple) else out))

    for site in model.sites:
        real.get_submodule(site.fqn).register_forward_hook(remember(site.fqn), with_kwargs=True)
    with torch.no_grad():
        real(input_ids=torch.arange(shape[0] * shape[1]).reshape(shape) % 100, use_cache=False)
    for site in model.sites:
        graph = model.block(site.block).graph
        assert graph is not None
        args, kwargs, expected = seen[site.fqn]
        tensors = {**dict(real.get_submodule(site.fqn).named_parameters()), **dict(real.get_submodule(site.fqn).named_buffers())}
        for name in [n for n, _ in [*graph.named_parameters(), *graph.named_buffers()]]:
            owner, _, leaf = name.rpartition(".")
            setattr(graph.get_submodule(owner), leaf, tensors[name])
        names, inputs, _ = flatten_call(args, kwargs)
        given = dict(zip(names, inputs, strict=True))
        with torch.no_grad():
            actual = graph(*(given[n.name] for n in graph.graph.nodes if n.op == "placeholder"))
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6), site.fqn


def test_experts_of_an_unsupported_form_leave_the_block_opaque_with_a_reason() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2
    )  # fmt: skip
    model = capture(ModelSource("gpt_oss", None, config, None))
    opaque = {b.class_name: b.opaque for b in model.blocks if b.graph is None}
    assert "has_bias" in opaque["GptOssMLP"]
    assert "sinks" in opaque["GptOssAttention"]
