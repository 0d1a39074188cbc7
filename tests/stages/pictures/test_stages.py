"""The dumps of the stages: a plan that treats the layers of one block differently is shown as it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx, nn

from ktc.cli.graph import STAGES, Request, render
from ktc.diagnostics import InputRefused, Span
from ktc.model.targets import Keep
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import BlockGraph, BlockSite, CapturedModel
from ktc.stages.link.stages import dump_stage
from ktc.stages.pictures.dump import Stage, from_json, to_json
from ktc.stages.plan import BlockRewrite
from ktc.stages.rewrite import RewrittenBlock


def captured() -> CapturedModel:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.silu.default, (x,)))
    config: Any = SimpleNamespace(model_type="tiny", hidden_size=4, get_text_config=lambda: config)
    sites = tuple(BlockSite(f"m.layers.{i}.mlp", i, "mlp_0") for i in range(3))
    block = BlockGraph("mlp_0", "Mlp", fx.GraphModule(nn.Module(), graph))
    source, model = cast("Any", SimpleNamespace(config=config)), cast("Any", SimpleNamespace(dtype=torch.float32))
    return CapturedModel(source, model, (), (block,), sites)


def rewrites(model: CapturedModel) -> tuple[BlockRewrite, ...]:
    """Layer 0 on one device, layer 1 on another, layer 2 as it was."""
    action = NodeAction("silu_default", "act", Keep("kernel"), "acts", Span("r.ktr", 3, 1, 3, 9))
    return (
        BlockRewrite("mlp_0", "mlp_0", model.sites[:1], (action,), "cuda:0"),
        BlockRewrite("mlp_0_2", "mlp_0", model.sites[1:2], (action,), "cuda:1", {"silu_default": "cpu"}),
    )


def test_each_rewrite_of_a_block_is_a_block_of_its_own_and_the_rest_too() -> None:
    model = captured()
    graph = model.blocks[0].graph
    assert graph is not None
    blocks = tuple(RewrittenBlock(rewrite, graph) for rewrite in rewrites(model))
    dump = dump_stage("rewritten", model, None, None, blocks)
    assert [(b.key, b.layers) for b in dump.blocks] == [("mlp_0", (0,)), ("mlp_0_2", (1,)), ("mlp_0_unchanged", (2,))]
    assert from_json(to_json(dump)) == dump


def test_the_plan_stands_on_the_nodes_it_is_about() -> None:
    model = captured()
    plan = cast("Any", SimpleNamespace(placements=(), rewrites=rewrites(model)))
    first, second, rest = dump_stage("planned", model, None, plan).blocks
    nodes = {node.name: node for node in second.nodes}
    assert (nodes["silu_default"].rule, nodes["silu_default"].device) == ("acts", "cpu")
    assert (nodes["x"].rule, nodes["x"].device) == ("", "cuda:1")
    assert nodes["silu_default"].span == "r.ktr:3:1"
    assert "silu_default -> keep at `act` on cuda:0" in first.notes[0]
    assert all(not node.rule and not node.device for node in rest.nodes)


def test_the_page_of_a_compiled_model_has_all_stages_and_a_graph_file_one(tmp_path: Path) -> None:
    model = captured()
    (tmp_path / "graph").mkdir()
    (tmp_path / "ktc.json").write_text("{}")
    plan = cast("Any", SimpleNamespace(placements=(), rewrites=rewrites(model)))
    for stage in STAGES:
        (tmp_path / "graph" / f"{stage}.json").write_text(to_json(dump_stage(stage, model, None, plan)))

    def page(shown: Path, stage: Stage = "rewritten", layer: int | None = None) -> str:
        return render(Request(str(shown), "moe-lora", stage, layer, "html", None))

    assert page(tmp_path).count('class="stage"') == 4
    assert page(tmp_path, "matched").count('class="stage"') == 2
    assert page(tmp_path / "graph" / "planned.json").count('class="stage"') == 1
    assert page(tmp_path, layer=2).count('<article class="block') == 4
    with pytest.raises(InputRefused, match="no layer 7"):
        page(tmp_path, layer=7)
