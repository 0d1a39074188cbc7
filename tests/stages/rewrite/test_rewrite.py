"""Rewriting promises: new nodes say who made them, graphs stay runnable, and the realised model computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bound_graph import bind, load_experts
from families import captured, config_of, forward_seen, planned, rules
from torch import fx

from ktc.language import dsl
from ktc.model import twin
from ktc.model.checkpoint import WeightSource
from ktc.model.experts.module import FusedMoe
from ktc.model.graph import ops
from ktc.model.graph.typed import named_modules, nodes_of, tensor_of
from ktc.model.loading.realise import realise
from ktc.stages.capture import BlockSite, ExpertList, ModelSource, capture
from ktc.stages.capture.export import main_output
from ktc.stages.plan import BlockRewrite
from ktc.stages.rewrite import RewrittenBlock, recipe, rewrite, rewrite_block, stack_rows


def rewritten(family: str, dtype: torch.dtype = torch.bfloat16) -> tuple[RewrittenBlock, ...]:
    model = captured(family, dtype)
    return rewrite(model, planned(model, dsl.load("moe-lora", {}))[1])


def named(graph: fx.GraphModule, op: str) -> list[fx.Node]:
    return [n for n in nodes_of(graph) if ops.operator(n) == op]


def test_every_new_node_says_which_rule_made_it() -> None:
    for block in rewritten("deepseek_v2"):
        made = [n for n in nodes_of(block.graph) if n.op == "call_module" and not str(n.target).startswith("folded.")]
        assert made
        assert {n.meta["rule"] for n in made} <= {"known", "latent_attention"}
        assert all(n.meta["span"].startswith("moe-lora.ktr:") or "moe-lora.ktr:" in n.meta["span"] for n in made)


def test_experts_become_one_node_and_the_router_stays() -> None:
    (block,) = [b for b in rewritten("deepseek_v2") if b.rewrite.block == "mlp_1"]
    (node,) = named(block.graph, "cpu_moe")
    assert node.target == "experts"
    assert node.meta["device"] == "cpu"
    assert not named(block.graph, "experts")
    assert len(named(block.graph, "topk")) == 2


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
    for node in nodes_of(moved):
        if node.op in ("call_function", "call_module") and ops.operator(node) != "transfer":
            tensors = [s for s in node.all_input_nodes if tensor_of(s) is not None]
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
    realise(real, recipe(blocks, plan.host), None)
    for name, module in named_modules(real):
        if isinstance(module, FusedMoe):
            load_experts(module, stock.get_submodule(name))
    seen = forward_seen(stock, [site.fqn for block in blocks for site in block.rewrite.sites], (2, 23))
    for block in blocks:
        site = block.rewrite.sites[0].fqn
        bind(block.graph, stock.get_submodule(site))
        call = seen[site]
        with torch.no_grad():
            realised = main_output(real.get_submodule(site)(*call.args, **call.kwargs))
        assert torch.allclose(call.replay(block.graph), realised, rtol=1e-5, atol=1e-6), site


def test_the_recipe_names_every_rewritten_module_of_every_layer() -> None:
    model = captured("deepseek_v2")
    _, plan = planned(model, dsl.load("moe-lora", {}))
    rows = recipe(rewrite(model, plan), plan.host)
    assert [r.fqn for r in rows if r.module == "fused_moe"] == [f"model.layers.{i}.mlp.experts" for i in (1, 2)]
    assert sum(r.module == "kt_linear" for r in rows) == 12
    experts = next(r for r in rows if r.module == "fused_moe")
    assert experts.kernel == plan.kernels[0].entry
    assert experts.args["top_k"] == 4
    assert experts.device == "cpu"


def test_a_layer_that_its_block_calls_twice_is_placed_once() -> None:
    pytest.importorskip("transformers.models.zaya")  # of later releases
    config = twin.shrink(twin.default_config("zaya"))
    config.dtype = torch.bfloat16
    model = capture(ModelSource("zaya", None, config, None))
    _, plan = planned(model, dsl.load("moe-lora", {}))
    blocks = rewrite(model, plan)
    places = [(step.fqn, step.module) for step in recipe(blocks, plan.host)]
    actions = [action for block in blocks for action in block.rewrite.actions]
    assert len(places) == len(set(places))
    assert len({action.fqn for action in actions}) < len(actions), "the block has such a layer"


def test_a_linear_says_by_which_entry_of_the_library_it_is_computed(tmp_path: Path) -> None:
    model = captured("qwen3_moe")
    _, plan = planned(model, rules('rule decode { match linear at "**.self_attn.*" => kt_linear(gemv) }', tmp_path))
    linears = [node for block in rewrite(model, plan) for node in named(block.graph, "kt_linear")]
    assert linears
    assert {node.meta["kernel"] for node in linears} == {kernel.entry for kernel in plan.kernels}


@pytest.mark.parametrize(("form", "stack"), [("silu", "gate_up_proj"), ("relu2 ungated", "up_proj")])
def test_the_up_matrices_of_a_list_are_stacked_with_the_gate_only_where_there_is_one(form: str, stack: str) -> None:
    experts = ExpertList("experts", 2, 64, 48, form, {"up": "w3.weight", "down": "w2.weight"})
    sites = (BlockSite("model.layers.0.mlp", 0, "mlp_0"),)
    block = RewrittenBlock(BlockRewrite("x", "mlp_0", sites, (), "cpu", {}), fx.GraphModule({}, fx.Graph()), experts)
    names = [f"model.layers.0.mlp.experts.1.{name}.weight" for name in ("w3", "w2", "w9")]
    rows = [WeightSource(name, None, None, name, "model.safetensors", "BF16", (48, 64)) for name in names]
    assert [(row.target, row.expert, row.part) for row in stack_rows(rows, [block])] == [
        (f"model.layers.0.mlp.experts.{stack}", 1, "up"),
        ("model.layers.0.mlp.experts.down_proj", 1, "down"),
        (names[2], None, None),
    ]
