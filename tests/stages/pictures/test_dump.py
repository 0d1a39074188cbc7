"""Dumps: what they read from a graph, and that their JSON comes back as it went or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from ktc.diagnostics import InputRefused
from ktc.stages.pictures.dump import SCHEMA, ModelDump, ModuleDump, dump_block, from_json, read_dump, to_json
from ktc.stages.pictures.text import render_block


class Router(nn.Module):
    """A block small enough to read: a router, a folded region and a module that a rule put in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.Identity()


def router_graph() -> fx.GraphModule:
    """The graph of `Router` with the meta data that capture and rewrite leave."""
    aten = torch.ops.aten
    root, inner = Router(), fx.Graph()
    inner.output(inner.call_function(aten.silu.default, (inner.placeholder("x"),)))
    root.add_module("folded", nn.Module())
    root.get_submodule("folded").add_module("act_0", fx.GraphModule(nn.Module(), inner))
    graph = fx.Graph()
    hidden = graph.placeholder("hidden")
    weight = graph.get_attr("gate.weight")
    scores = graph.call_function(aten.linear.default, (hidden, weight))
    size = graph.call_function(aten.sym_size.int, (hidden, 0))
    best = graph.call_function(aten.topk.default, (scores, 2), {"sorted": False})
    index = graph.call_function(torch.ops.prims.convert_element_type.default, (best, torch.int64))
    folded = graph.call_module("folded.act_0", (scores,))
    flat = graph.call_function(aten.view.default, (folded, [size, 4]))
    routed = graph.call_module("experts", (flat, index))
    graph.output(graph.call_function(aten.mul.Tensor, (routed, routed)))
    for node, shape in ((hidden, ("t", 8)), (weight, (4, 8)), (scores, ("t", 4)), (folded, ("t", 4)), (flat, ("t", 4))):
        node.meta.update(shape=shape, dtype="f32")
    folded.meta["op"] = "silu"
    routed.meta.update(op="experts", rule="experts", span="moe.ktr:4:3", device="cpu", fqn="experts")
    return fx.GraphModule(root, graph)


def router_dump() -> ModelDump:
    block = dump_block(router_graph(), "mlp_0", "Router", ("m.layers.0.mlp", "m.layers.1.mlp"), (0, 1), ("a note",))
    return ModelDump(SCHEMA, "rewritten", "tiny", "f32", (ModuleDump("m", "M", 32, 128),), (block,), (), ("near",))


def test_a_block_reads_like_code(golden: Callable[[str, str], None]) -> None:
    golden("graph/router.txt", render_block(router_dump().blocks[0]))


def test_a_node_keeps_its_meta_data_and_its_settings() -> None:
    nodes = {node.name: node for node in router_dump().blocks[0].nodes}
    assert nodes["hidden"].shape == ("t", 8)
    assert nodes["gate_weight"].fqn == "gate.weight"
    assert nodes["topk_default"].attributes == (("k", "2"), ("sorted", "False"))
    assert nodes["mul_tensor"].inputs == ("experts", "experts")
    assert (nodes["experts"].rule, nodes["experts"].device) == ("experts", "cpu")
    assert nodes["folded_act_0"].attributes == (("folds", "silu"),)


def test_a_dtype_comes_from_the_fake_tensor_where_the_meta_data_has_none() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    graph.output(node)
    block = dump_block(fx.GraphModule(nn.Module(), graph), "b", "B", (), ())
    assert (block.nodes[0].dtype, block.nodes[0].shape) == ("bf16", (2, 3))


def test_json_comes_back_as_it_went(tmp_path: Path) -> None:
    dump = router_dump()
    assert from_json(to_json(dump)) == dump
    (tmp_path / "rewritten.json").write_text(to_json(dump))
    assert read_dump(tmp_path / "rewritten.json") == dump


def broken(**changes: object) -> str:
    return json.dumps({**json.loads(to_json(router_dump())), **changes})


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("{", "I158", "is not JSON"),
        ("[" * 100_000, "I158", "is not JSON"),
        ("[]", "I158", "expected an object at `.`, found list"),
        ("{}", "I158", "`blocks` is missing"),
        (broken(schema=99), "I159", "has schema 99, this ktc reads schema 1"),
        (broken(schema="1"), "I158", "expected int at `.schema`, found `1`"),
        (broken(stage="cooked"), "I158", "at `.stage`, found `cooked`"),
        (broken(near_misses="x"), "I158", "expected a list at `.near_misses`"),
        (broken(near_misses=[1]), "I158", "expected str at `.near_misses[0]`, found int"),
        (broken(extra=1), "I158", "`.extra` is not known"),
        (broken(modules=[{}]), "I158", "`bytes` is missing at `.modules[0]`"),
        (broken(matches=[{"rule": "", "pattern": "", "site": "", "captures": [["a"]]}]), "I158", "expected 2 items"),
    ],
)
def test_json_of_another_form_is_refused_with_its_place(text: str, code: str, says: str) -> None:
    with pytest.raises(InputRefused) as refusal:
        from_json(text, "graph/x.json")
    diagnostic = refusal.value.diagnostics[0]
    assert diagnostic.code == code
    assert "graph/x.json" in diagnostic.message
    assert says in diagnostic.message


def test_two_nodes_of_one_name_are_refused() -> None:
    dump = router_dump()
    block = dump.blocks[0]
    twice = replace(dump, blocks=(replace(block, nodes=(*block.nodes, block.nodes[0])),))
    with pytest.raises(InputRefused, match="has `hidden` twice"):
        from_json(to_json(twice))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.json", "binary.json"):
        with pytest.raises(InputRefused, match="cannot read"):
            read_dump(tmp_path / name)
