"""The two cut points of capture: routed experts and the attention core become one marker node each.

transformers lets both implementations be replaced by name; while a model is captured they are replaced by operators
that export cannot look into. Registered without a mask function, so that no data-dependent mask code runs on meta.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from ktc.graph import ops
from ktc.graph.typed import input_of, nodes_in

_NAME = "ktc_capture"  # of the operator library, and of our implementations in transformers' registers
# Where a config keeps the names of its implementations; the public setters check names against what transformers ships.
_CHOICES = ("_experts_implementation_internal", "_attn_implementation_internal")
UNSUPPORTED = "unsupported: "  # begins the activation of experts whose form no kernel computes yet; the reason follows


class UnsupportedAttention(Exception):
    """The attention of a block has a form that the `sdpa` operator does not express; the block stays as it is."""


@cache
def _library() -> torch.library.Library:
    library = torch.library.Library(_NAME, "DEF")
    library.define("experts(Tensor x, Tensor indices, Tensor weights, Tensor gate_up, Tensor down, str act) -> Tensor")
    library.define("sdpa(Tensor q, Tensor k, Tensor v, float scale, bool causal, int window) -> Tensor")
    library.impl("experts", _experts_on_meta, "Meta")
    library.impl("sdpa", _sdpa_on_meta, "Meta")
    return library


def _experts_on_meta(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: str) -> Tensor:
    return torch.empty_like(x)


def _sdpa_on_meta(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]))


def semantic_function(target: object) -> Any | None:
    """The differentiable function that a marker stands for, None for every other target."""
    if target is torch.ops.ktc_capture.experts.default:
        return ops.experts
    return ops.sdpa if target is torch.ops.ktc_capture.sdpa.default else None


class _CaptureExperts:
    """The experts marker. An activation is read at a module's first call, since export cannot run inside export."""

    def __init__(self) -> None:
        self._activations: dict[nn.Module, str] = {}

    def __call__(
        self, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
    ) -> Tensor:
        if module not in self._activations:
            self._activations[module] = activation_of(module)
        gate_up = module.gate_up_proj if getattr(module, "has_gate", True) else module.up_proj
        operands = hidden_states, top_k_index, top_k_weights, gate_up, module.down_proj
        return torch.ops.ktc_capture.experts(*operands, self._activations[module])


def _capture_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if s_aux is not None:
        raise UnsupportedAttention("attention sinks are not supported in this version")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    window = -1 if sliding_window is None else int(sliding_window)
    return torch.ops.ktc_capture.sdpa(query, key, value, float(scale), causal, window), None


def activation_of(module: nn.Module) -> str:
    """The gated activation of an experts module, read from a trace of its own gate code, not from its name.

    `silu` or `gelu` for `f(gate) * up` with gate the first half; else `unsupported: ` and the reason.
    """
    layout = {"has_gate": True, "has_bias": False, "is_transposed": False}
    odd = [flag for flag, plain in layout.items() if getattr(module, flag, plain) != plain]
    if odd:
        return f"{UNSUPPORTED}experts with `{odd[0]} = {getattr(module, odd[0])}`"
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        return f"{UNSUPPORTED}`{type(module).__name__}` does not tell its activation"

    class Gate(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return apply_gate(hidden)

    gate_up = module.gate_up_proj
    assert isinstance(gate_up, Tensor), f"`gate_up_proj` of `{type(module).__name__}` is no tensor"
    sample = torch.empty(2, gate_up.shape[-2], device="meta")
    program = torch.export.export(Gate(), (sample,), strict=False)
    result = nodes_in(program.graph.output_node().args[0])[0]
    recognised = next((name for name in ("silu", "gelu") if _is_gated(result, name)), None)
    return recognised or f"{UNSUPPORTED}an activation that is neither `silu(gate) * up` nor `gelu(gate) * up`"


def _is_gated(result: fx.Node, name: str) -> bool:
    """Whether `result` is `name(first half) * second half` of one split."""
    if ops.name_of(result) != "mul":
        return False
    for activated, up in (result.args, result.args[::-1]):
        if not isinstance(activated, fx.Node) or ops.name_of(activated) != name or activated.kwargs.get("approximate"):
            continue
        gate = activated.args[0]
        halves = [n for n in (gate, up) if isinstance(n, fx.Node) and ops.name_of(n) == "getitem"]
        if len(halves) == 2 and halves[0].args[0] is halves[1].args[0] and [n.args[1] for n in halves] == [0, 1]:
            return ops.name_of(input_of(halves[0], 0)) == "split"
    return False


@contextmanager
def marked(model: PreTrainedModel) -> Generator[None]:
    """While inside, the experts and the attention of `model` run as markers."""
    from transformers.integrations.moe import ExpertsInterface
    from transformers.modeling_utils import AttentionInterface

    _library()
    ExpertsInterface.register(_NAME, _CaptureExperts())
    AttentionInterface.register(_NAME, _capture_attention)
    configs = list({id(c): c for c in (model.config, model.config.get_text_config())}.values())
    before = [(config, choice, getattr(config, choice)) for config in configs for choice in _CHOICES]
    try:
        for config, choice, _ in before:
            setattr(config, choice, _NAME)
        yield
    finally:
        for config, choice, chosen in before:
            setattr(config, choice, chosen)
