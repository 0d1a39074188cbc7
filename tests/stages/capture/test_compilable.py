"""A model without routed experts is refused, with the block that comes near to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from ktc.diagnostics import InputRefused
from ktc.model.graph.ops import experts
from ktc.stages.capture import BlockGraph, CapturedModel, ModelSource
from ktc.stages.capture.compilable import require_compilable
from ktc.stages.capture.export import main_output
from ktc.stages.capture.types import BlockSite


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.empty(8, 4, 4)) for _ in range(2))


def refusal(block: nn.Module) -> str:
    graph = torch.fx.symbolic_trace(nn.Identity())
    assert all(node.target is not experts for node in graph.graph.nodes)
    model = nn.ModuleDict({"mlp": block})
    source = ModelSource("model", None, LlamaConfig(), None)
    blocks, sites = (BlockGraph("mlp_0", type(block).__name__, graph),), (BlockSite("mlp", 0, "mlp_0"),)
    with pytest.raises(InputRefused) as refused:
        require_compilable(CapturedModel(source, model, (), blocks, sites))  # type: ignore[arg-type]
    (found,) = refused.value.diagnostics
    assert found.code == "I105"
    return found.message


def test_a_model_without_routed_experts_is_refused_with_what_comes_near() -> None:
    assert refusal(nn.Sequential(nn.Linear(4, 4))) == "this `llama` model has no routed experts"
    assert "`Mixture` in `mlp` holds 8 matrices in each of `w1`, `w2`" in refusal(Mixture())
    several = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    assert "`ModuleDict` at `mlp` holds 3 equal modules in `experts`" in refusal(several)


def test_hidden_states_are_found_behind_the_logits_of_a_router() -> None:
    hidden, logits = torch.empty(3, 7, 16), torch.empty(21, 4)
    assert main_output((logits, hidden), hidden) is hidden
    assert main_output((hidden, logits), hidden) is hidden
    assert main_output((logits, logits), hidden) is logits
    assert main_output(hidden) is hidden
