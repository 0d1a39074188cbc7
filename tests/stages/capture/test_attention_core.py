"""The attention core promises: its reference computes what transformers' own code does, with every option of the core.

A block that computes a mask of its own is captured, also by code that depends on data.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from invented.registered.models import Orchid
from invented.registered.skeleton import HEAD_DIM, HEADS, Separate, attend, invent, turned
from torch import Tensor, fx, nn

from ktc.model import twin
from ktc.model.graph import ops
from ktc.model.graph.typed import nodes_of
from ktc.stages.capture import CapturedModel, ModelSource, capture
from ktc.stages.capture.data_masks import NotMasks, check_masks

B, S = 2, 9
SCALE = 0.3


def _random(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread
    return values.requires_grad_()


class _Core(nn.Module):
    """The attributes of a module that transformers' cores read."""

    num_key_value_groups, head_dim, training = 2, HEAD_DIM, False


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
ADDED = torch.zeros(S, S).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)[None, None]
BIAS = _random(B, HEADS, S, S, seed=4)
SINKS = _random(B, HEADS, S, 1, seed=5)


@pytest.mark.parametrize(
    ("family", "stock", "own"),
    [
        ("gemma2", {"softcap": 0.8}, {"softcap": 0.8}),
        ("inkling", {"position_bias": BIAS}, {"bias": BIAS}),
        ("inkling2", {"position_bias": BIAS, "sinks": SINKS}, {"bias": BIAS, "sinks": SINKS}),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_core_computes_what_stock_code_does(
    family: str, stock: dict[str, Any], own: dict[str, Any], masked: bool
) -> None:
    eager: Callable[..., tuple[Tensor, Tensor]] = importlib.import_module(
        f"transformers.models.{family}.modeling_{family}"
    ).eager_attention_forward
    inputs = [_random(B, heads, S, HEAD_DIM, seed=i, spread=3.0) for i, heads in enumerate((HEADS, 2, 2))]
    expected, _ = eager(_Core(), *inputs, ADDED, scaling=SCALE, **stock)
    mask = CAUSAL[None, None].expand(B, 1, S, S) if masked else None
    actual = ops.sdpa(*inputs, SCALE, not masked, -1, own.get("sinks"), mask, own.get("softcap"), own.get("bias"))
    torch.testing.assert_close(actual, expected)
    given = [*inputs, *(value for value in own.values() if isinstance(value, Tensor))]
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    for got, wanted in zip(
        torch.autograd.grad(actual, given, direction), torch.autograd.grad(expected, given, direction), strict=True
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_the_options_of_a_core_are_its_attributes() -> None:
    (core,) = _cores(_captured_family("gemma2"), "self_attn_0")
    about = ops.attributes(core)
    assert [name for name in ("sinks", "mask", "softcap", "bias") if about[name]] == ["softcap"]


# masks ---------------------------------------------------------------------------------------------------------------
class Chunked(Separate):
    """Attention within chunks of four positions, by a mask of its own: no caller gives it one."""

    def forward(self, hidden_states: Tensor, angle: Tensor, **_: Any) -> Tensor:
        heads = [
            p(hidden_states).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.ask, self.tell, self.give)
        ]
        place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        near = (place[:, None] // 4 == place[None] // 4) & (place[:, None] >= place[None])
        return self.merge(attend(self, turned(heads[0], angle), turned(heads[1], angle), heads[2], near[None, None]))


class ByChoice(Separate):
    """Attention that a caller gives a mask, and that adds one of its own."""

    def forward(self, hidden_states: Tensor, angle: Tensor, mask: Tensor | None = None) -> Tensor:
        own = torch.ones(1, 1, *[hidden_states.shape[1]] * 2, dtype=torch.bool, device=hidden_states.device).tril()
        return super().forward(hidden_states, angle, own if mask is None else own & mask)


def test_a_mask_that_no_caller_gives_is_an_operand_of_the_core() -> None:
    (core,) = _cores(_captured(invent("chunked", Orchid, Chunked)()), "look_0")
    about = ops.attributes(core)
    assert (about["mask"], about["causal"], about["window"]) == (True, False, -1)


def test_a_mask_of_which_a_caller_gives_a_part_is_refused() -> None:
    block = _captured(invent("bychoice", Orchid, ByChoice)()).block("look_0")
    assert block.graph is None and "a mask of its own" in block.opaque


@pytest.mark.slow
def test_a_mask_that_a_child_chooses_by_data_is_one_node() -> None:
    (core,) = _cores(_captured_family("qwen4_exp_text"), "self_attn_0")
    assert ops.attributes(core)["mask"]
    behind, todo = set[fx.Node](), [core.args[ops.SDPA_MASK]]
    while todo:
        node = todo.pop()
        behind.add(node)
        todo += node.all_input_nodes
    assert sum(node.target is ops.data_mask for node in behind) == 1


@pytest.mark.parametrize("otherwise", [None, "query", "output"])
def test_what_depends_on_data_must_be_a_mask_alone(otherwise: str | None) -> None:
    graph = fx.Graph()
    query, key, mask = (graph.placeholder(name) for name in ("query", "key", "mask"))
    chosen = graph.call_function(ops.data_mask, (mask, [query]))
    seen = graph.call_function(torch.logical_and, (mask, chosen))
    asked = graph.call_function(torch.mul, (query, seen)) if otherwise == "query" else query
    core = graph.call_function(ops.sdpa, (asked, key, key, 1.0, False, -1, None, seen, None, None))
    graph.output(graph.call_function(torch.mul, (core, chosen)) if otherwise == "output" else core)
    with pytest.raises(NotMasks) if otherwise else nullcontext():
        check_masks(fx.GraphModule(nn.Module(), graph))


def _captured_family(family: str) -> CapturedModel:
    return _captured(twin.shrink(twin.default_config(family)))


def _captured(config: Any) -> CapturedModel:
    config.dtype = torch.float32
    return capture(ModelSource("test", None, config, None))


def _cores(model: CapturedModel, key: str) -> list[Any]:
    graph = model.block(key).graph
    assert graph is not None, model.block(key).opaque
    return [node for node in nodes_of(graph) if ops.operator(node) == "sdpa"]
