"""Attention promises: which projections make queries, keys, values and the output is found by structure.

`golden/attention_roles.json` holds what is found, and why where nothing is; `--bless` rewrites it. Whatever a pattern
says must also be so by dataflow alone: a query projection flows into the core's first operand, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CPU
from places import GOLDEN
from torch import fx

from ktc.language import dsl
from ktc.model import twin
from ktc.model.graph import ops
from ktc.model.graph.fold import tensor_inputs
from ktc.model.graph.typed import input_of, nodes_by_name, nodes_of
from ktc.stages.capture import BlockGraph, CapturedModel, ModelSource, capture
from ktc.stages.match import Match, NodeRef, match

ROLES = GOLDEN / "attention_roles.json"
# The first that fits says what an attention is; with the projections that it tells apart.
KINDS = {
    "gqa": ("q", "k", "v", "o"),
    "mla": ("q_a", "q", "kv_a", "kv_b", "o"),
    "fused_qkv": ("qkv", "o"),
    "shared_kv": ("q_a", "q", "k", "v", "o"),
    "convolved_kv": ("q", "k", "v", "o"),
    "projected": ("q", "k", "v", "o"),
}
OPERANDS = {"q": (0,), "k": (1,), "v": (2,), "qkv": (0, 1, 2), "kv_b": (1, 2), "q_a": (0,), "kv_a": (1, 2)}
QUICK = ("afmoe", "deepseek_v2", "gpt_oss", "llama", "phi3", "qwen3_moe")
DENSE = ("cohere2", "gemma2", "glm4", "llama", "mistral", "olmo2", "phi3", "qwen3", "starcoder2")


def _families() -> list[Any]:
    """Every family by name in the golden file: the quick ones, and behind `full` the others."""
    known: list[str] = list(json.loads(ROLES.read_text(encoding="utf-8"))) if ROLES.is_file() else []
    rest = [name for name in sorted({*known, *DENSE}) if name not in QUICK]
    return [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in rest)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", _families())
def test_the_projections_of_every_attention_have_their_roles(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = _attention_of(_captured(family), tmp_path)
    if request.config.getoption("--bless"):
        _bless(family, found)
    assert found == json.loads(ROLES.read_text(encoding="utf-8")).get(family)


@pytest.mark.full
def test_every_family_with_experts_has_its_line() -> None:
    assert set(twin.moe_families()) | set(DENSE) == set(json.loads(ROLES.read_text(encoding="utf-8")))


def _captured(family: str) -> CapturedModel:
    config = twin.shrink(twin.default_config(family))
    config.dtype = torch.float32
    return capture(ModelSource(family, None, config, None))


def _attention_of(model: CapturedModel, folder: Path) -> dict[str, dict[str, str]]:
    """Per distinct block with a softmax attention: its kind and the FQN of every role, or why there is none."""
    program = folder / "attention.ktr"
    rules = "\n".join(f"rule {kind} {{ match attn.{kind} expect >= 0 => keep(kernel) }}" for kind in KINDS)
    program.write_text(f'import "std/attention.ktr" as attn\n{rules}\n', encoding="utf-8")
    by_block: dict[str, Match] = {}
    for found in match(model, dsl.load(program, {}), CPU).matches:
        by_block.setdefault(found.block, found)
    return dict(_lines(model, by_block))


def _lines(model: CapturedModel, matches: dict[str, Match]) -> Iterator[tuple[str, dict[str, str]]]:
    for block in model.blocks:
        found = matches.get(block.key)
        if block.graph is None:
            if _is_softmax_attention(block):
                yield block.key, {"class": block.class_name, "opaque": _reason(block)}
        elif found is not None:
            yield block.key, {"class": block.class_name, "kind": found.rule, **_roles(block, found)}
        elif any(ops.operator(n) == "sdpa" for n in nodes_of(block.graph)):
            yield block.key, {"class": block.class_name, "kind": "unknown"}


def _is_softmax_attention(block: BlockGraph) -> bool:
    named = "attn" in block.key or "attention" in block.class_name.lower()
    return named and not block.opaque.startswith("neither experts nor softmax")


def _reason(block: BlockGraph) -> str:
    """Our own words; of foreign errors, whose words change with versions, the type alone."""
    return block.opaque if block.opaque.startswith("Unsupported") else block.opaque.partition(":")[0]


def _roles(block: BlockGraph, found: Match) -> dict[str, str]:
    assert block.graph is not None
    nodes = nodes_by_name(block.graph)
    core = found.bindings["core"]
    assert isinstance(core, NodeRef)
    roles: dict[str, str] = {}
    for role in KINDS[found.rule]:
        ref = found.bindings.get(role)
        if not isinstance(ref, NodeRef):
            continue
        linear = nodes[ref.node]
        assert ops.operator(linear) == "linear"
        for operand in OPERANDS.get(role, ()):
            assert linear in _upstream(input_of(nodes[core.node], operand)), f"`{role}` of `{found.rule}`"
        if role == "o":
            assert nodes[core.node] in _upstream(linear)
        roles[role] = str(linear.meta["fqn"])
    return roles


def _upstream(node: fx.Node) -> set[fx.Node]:
    reached, todo = set[fx.Node](), [node]
    while todo:
        current = todo.pop()
        if current not in reached:
            reached.add(current)
            todo += tensor_inputs(current)
    return reached


def _bless(family: str, found: dict[str, dict[str, str]]) -> None:
    held: dict[str, Any] = json.loads(ROLES.read_text(encoding="utf-8")) if ROLES.is_file() else {}
    held[family] = found
    ROLES.write_text(json.dumps(dict(sorted(held.items())), indent=1) + "\n", encoding="utf-8")
