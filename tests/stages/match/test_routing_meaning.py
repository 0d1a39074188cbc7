"""A known routing promises more than a name: its captures, computed as they read, give the indices and weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import CPU
from invented.registered.models import MODELS
from torch import Tensor, fx
from torch.nn import functional

from ktc.language import dsl
from ktc.model import twin
from ktc.model.graph import ops
from ktc.model.graph.typed import input_names, nodes_by_name, nodes_of
from ktc.stages.capture import ModelSource, capture
from ktc.stages.match import Binding, NodeRef, SubMatch, match

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: functional.softmax(x, -1), "sigmoid": torch.sigmoid,
    "sqrt": lambda x: functional.softplus(x).sqrt(),
}  # fmt: skip
FAMILIES = ("deepseek_v3", "qwen3_moe", "gpt_oss")
SLOW_FAMILIES = ("mixtral", "ernie4_5_moe")
TOKENS = (2, 41)


class _Values(fx.Interpreter):
    """Runs a graph and keeps what every node gave."""

    def run_node(self, n: fx.Node) -> object:
        self.seen: dict[str, object] = getattr(self, "seen", {})
        self.seen[n.name] = super().run_node(n)
        return self.seen[n.name]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [*MODELS, *FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)]
)
def test_the_captures_of_a_router_say_what_it_computes(name: str) -> None:
    config = MODELS[name]() if name in MODELS else twin.shrink(twin.default_config(name))
    config.dtype = torch.float32
    model = capture(ModelSource(name, None, config, None))
    found = match(model, dsl.load("moe-lora", {}), CPU).of("known")[-1]
    graph, router = model.block(found.block).graph, found.capture(("router",))
    assert graph is not None
    assert isinstance(router, SubMatch)
    run, inputs = _filled(graph, config.get_text_config().hidden_size)
    interpreter = _Values(run)
    interpreter.run(*inputs)
    experts = next(n for n in nodes_of(graph) if ops.operator(n) == "experts")
    indices, weights = (interpreter.seen[str(a)] for a in experts.args[1:3])
    assert isinstance(indices, Tensor)
    assert isinstance(weights, Tensor)
    said_indices, said_weights = _as_said(router, graph, interpreter.seen, indices.shape[-1])
    order, said_order = indices.argsort(-1), said_indices.argsort(-1)
    assert torch.equal(indices.gather(-1, order), said_indices.gather(-1, said_order))
    torch.testing.assert_close(weights.gather(-1, order), said_weights.gather(-1, said_order))


def _filled(graph: fx.GraphModule, hidden: int) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph on the CPU with random tensors, and hidden states for it."""
    generator = torch.Generator().manual_seed(3)
    graph = graph.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*graph.parameters(), *graph.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    assert input_names(graph) == ["hidden_states"]
    return graph, [torch.randn(*TOKENS, hidden, generator=generator)]


def _as_said(router: SubMatch, graph: fx.GraphModule, seen: dict[str, object], top_k: int) -> tuple[Tensor, Tensor]:
    """Indices and weights by the names that a router pattern gave."""
    nodes = nodes_by_name(graph)

    def node(binding: Binding | None) -> fx.Node:
        assert isinstance(binding, NodeRef)
        return nodes[binding.node]

    def value(binding: Binding | None) -> Tensor:
        held = seen[node(binding).name]
        assert isinstance(held, Tensor)
        return held

    logits = value(router.bindings["gate"]).flatten(0, -2).double()
    score = SCORES[ops.operator(node(router.bindings["scores"]))]
    late, bias = "late" in router.pattern, router.bindings.get("bias")
    scores = logits if late else score(logits)
    choice = scores if bias is None else scores + value(bias).flatten().double()
    limit = router.bindings.get("limited")
    if isinstance(limit, SubMatch):
        choice = _limited(limit, choice, node)
    indices = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, indices)
    weights = score(weights) if late else weights
    if (renormed := router.bindings.get("normed")) is not None and ops.operator(node(renormed)) == "div":
        weights = weights / weights.sum(-1, keepdim=True)
    last = router.bindings["weights"]
    scale = next((a for a in node(last).args if isinstance(a, float)), 1.0) if last != renormed else 1.0
    return indices, (weights * scale if ops.operator(node(last)) == "mul" else weights).float()


def _limited(limit: SubMatch, choice: Tensor, node: Callable[[Binding | None], fx.Node]) -> Tensor:
    groups = ops.shape_of(node(limit.bindings["group"]))[-1]
    assert isinstance(groups, int)
    parts = choice.unflatten(-1, (groups, -1))
    pair = limit.bindings.get("pair")
    rank = parts.amax(-1) if pair is None else parts.topk(2, -1).values.sum(-1)
    kept = int(ops.argument(node(limit.bindings["top"]), "k"))
    open_ = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, rank.topk(kept, -1).indices, True)
    return parts.masked_fill(~open_[..., None], -torch.inf).flatten(-2)
