"""Rewriting promises: new nodes say who made them, graphs stay runnable, and the realised model computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import captured, config_of, planned, rules
from torch import fx, nn

from ktc import dsl, twin
from ktc.capture.export import flatten_call
from ktc.graph import ops
from ktc.plan import BlockRewrite
from ktc.prove.run import bind
from ktc.rewrite import RewrittenBlock, recipe, rewrite, rewrite_block
from ktc.runtime.realise import realise


def rewritten(family: str, dtype: torch.dtype = torch.bfloat16) -> tuple[RewrittenBlock, ...]:
    model = captured(family, dtype)
    return rewrite(model, planned(model, dsl.load("moe-lora", {}))[1])


def named(graph: fx.GraphModule, op: str) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if ops.operator(n) == op]


def test_every_new_node_says_which_rule_made_it() -> None:
    for block in rewritten("deepseek_v2"):
        made = [n for n in block.graph.graph.nodes if n.op == "call_module" and not str(n.target).startswith("folded.")]
        assert made and {n.meta["rule"] for n in made} <= {"known", "latent_attention"}
        assert all(n.meta["span"].startswith("moe-lora.ktr:") or "moe-lora.ktr:" in n.meta["span"] for n in made)


def test_experts_become_one_node_and_the_router_stays() -> None:
    (block,) = [b for b in rewritten("deepseek_v2") if b.rewrite.block == "mlp_1"]
    (node,) = named(block.graph, "cpu_moe")
    assert node.target == "experts" and node.meta["device"] == "cpu"
    assert not named(block.graph, "experts") and len(named(block.graph, "topk")) == 2


def test_the_captured_graph_is_not_touched() -> None:
    model = captured("qwen3_moe")
    before = {b.key: b.graph.code for b in model.blocks if b.graph is not None}
    rewrite(model, planned(model, dsl.load("moe-lora", {}))[1])
    assert {b.key: b.graph.code for b in model.blocks if b.graph is not None} == before


def test_no_rule_fires_on_its_own_output(tmp_path: Path) -> None:
    for block in rewritten("qwen3_moe"):
        assert not named(block.graph, "experts")
        left = {n.meta["fqn"] for n in named(block.graph, "linear")}
        assert not left & {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_transfers_stand_on_every_edge_between_devices() -> None:
    model = captured("deepseek_v2")
    _, plan = planned(model, dsl.load("moe-lora", {}))
    (block,) = [r for r in plan.rewrites if r.block == "mlp_1"]
    graph = model.block("mlp_1").graph
    assert graph is not None
    moved = rewrite_block(graph, BlockRewrite("x", "mlp_1", block.sites, block.actions, "cuda:0", block.node_devices))
    (experts,) = named(moved, "cpu_moe")
    assert [n.meta["device"] for n in experts.all_input_nodes] == ["cpu"] * 3
    assert [ops.operator(n) for n in experts.all_input_nodes] == ["transfer"] * 3
    assert [ops.operator(n) for n in experts.users] == ["transfer"]
    for node in moved.graph.nodes:
        if node.op in ("call_function", "call_module") and ops.operator(node) != "transfer":
            tensors = [s for s in node.all_input_nodes if isinstance(s.meta.get("val"), torch.Tensor)]
            assert {s.meta["device"] for s in tensors} <= {node.meta["device"]}, node.name


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe"])
def test_the_rewritten_graph_and_the_realised_block_compute_the_same(family: str, tmp_path: Path) -> None:
    text = """
    rule experts { match moe.block => cpu_moe(format = bf16) }
    rule linears { match linear at "**.self_attn.*" => lora_linear(rank = 4) }
    """
    model = captured(family, torch.float32)
    _, plan = planned(model, rules(text, tmp_path))
    blocks = rewrite(model, plan)
    config = config_of(family, torch.float32)
    stock, real = (twin.build(config, 3, torch.float32, "cpu") for _ in range(2))
    realise(real, recipe(blocks, plan), None)
    _load_experts(real, stock)
    seen = _calls(stock, [site.fqn for block in blocks for site in block.rewrite.sites])
    for block in blocks:
        site = block.rewrite.sites[0].fqn
        bind(block.graph, stock.get_submodule(site))
        args, kwargs = seen[site]
        names, tensors, _ = flatten_call(args, kwargs)
        given = dict(zip(names, tensors, strict=True))
        with torch.no_grad():
            from_graph = block.graph(*(given[n.name] for n in block.graph.graph.nodes if n.op == "placeholder"))
            realised = real.get_submodule(site)(*args, **kwargs)
        realised = realised[0] if isinstance(realised, tuple) else realised
        assert torch.allclose(from_graph, realised, rtol=1e-5, atol=1e-6), site


def _load_experts(real: nn.Module, stock: nn.Module) -> None:
    for name, module in real.named_modules():
        if type(module).__name__ == "FusedMoe":
            source = stock.get_submodule(name)
            for expert in range(module.num_experts):
                gate, up = source.gate_up_proj[expert].chunk(2, 0)
                for part, tensor in (("gate", gate), ("up", up), ("down", source.down_proj[expert])):
                    module.load_expert(expert, part, tensor)


def _calls(model: nn.Module, fqns: list[str]) -> dict[str, tuple[tuple[object, ...], dict[str, object]]]:
    seen: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")

    def remember(fqn: str):
        return lambda _, args, kwargs: seen.__setitem__(fqn, (args, kwargs))

    for fqn in fqns:
        model.get_submodule(fqn).register_forward_pre_hook(remember(fqn), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.arange(2 * 23).reshape(2, 23), use_cache=False)
    return seen


def test_the_recipe_names_every_rewritten_module_of_every_layer() -> None:
    model = captured("deepseek_v2")
    _, plan = planned(model, dsl.load("deepseek-v2-lite-lora", {}))
    rows = recipe(rewrite(model, plan), plan)
    assert [r.fqn for r in rows if r.module == "fused_moe"] == [f"model.layers.{i}.mlp.experts" for i in (1, 2)]
    assert sum(r.module == "lora_linear" for r in rows) == 12
    experts = next(r for r in rows if r.module == "fused_moe")
    assert experts.kernel == plan.kernels[0].entry and experts.args["top_k"] == 4 and experts.device == "cpu"
