"""The two cut points of capture: routed experts and the attention core become one marker node each.

transformers selects both implementations by name. During capture they are replaced by operators that are opaque to
export. They are registered without a mask function, so that no data-dependent mask code runs on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.foundation.temporary_values import attributes, context_value
from ktc.model.graph import ops
from ktc.model.hf.private_api import ATTENTION, EXPERTS
from ktc.stages.capture.forms import UNSUPPORTED, form_of, gate_dependence, is_interface
from ktc.stages.capture.own_experts import more_than_interface
from ktc.stages.capture.own_markers import code_of, own_experts_marked

_NAME = "ktc_capture"  # of the operator library, and of our implementations in transformers' registers
# Where a config keeps the names of its implementations; the public setters accept only names of transformers.
_CHOICES = (EXPERTS, ATTENTION)
# The options of an attention core that `sdpa` expresses. Dropout is none in evaluation.
_OPTIONS = frozenset({
    "scaling", "dropout", "sliding_window", "s_aux", "is_causal", "softcap", "position_bias", "sinks",
})  # fmt: skip
_UNUSED = frozenset({"position_ids", "cache_position"})  # an attention core may be given them and does not use them
# The model has no masks of its own during capture; blocks that compute with a mask are given one.
_masks_are_given = ContextVar("masks_are_given", default=False)
_marked_configs: ContextVar[tuple[PreTrainedConfig, ...]] = ContextVar("marked_configs", default=())


class UnsupportedAttention(Exception):
    """The `sdpa` operator does not express this form of attention; the block is left unchanged."""


@cache
def _library() -> torch.library.Library:
    library = torch.library.Library(_NAME, "DEF")
    library.define(
        "experts(Tensor x, Tensor indices, Tensor weights, Tensor gate_up, Tensor down, str form, "
        "Tensor? gate_up_bias, Tensor? down_bias) -> Tensor"
    )
    library.define(
        "sdpa(Tensor q, Tensor k, Tensor v, float scale, bool causal, int window, Tensor? sinks, "
        "Tensor? mask, float? softcap, Tensor? bias) -> Tensor"
    )
    library.define("data_mask(Tensor mask, Tensor[] inputs) -> Tensor")
    library.impl("experts", _experts_on_meta, "Meta")
    library.impl("data_mask", _data_mask_on_meta, "Meta")
    library.impl("sdpa", _sdpa_on_meta, "Meta")
    return library


def _experts_on_meta(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _sdpa_on_meta(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]))


def _data_mask_on_meta(mask: Tensor, _: list[Tensor]) -> Tensor:
    return torch.empty_like(mask, dtype=torch.bool)


def semantic_function(target: object) -> Any | None:
    """Return the differentiable function of a marker, None for every other target."""
    if target is torch.ops.ktc_capture.experts.default:
        return ops.experts
    if target is torch.ops.ktc_capture.data_mask.default:
        return ops.data_mask
    return ops.sdpa if target is torch.ops.ktc_capture.sdpa.default else None


class _CaptureExperts:
    """The experts marker. Forms are read before the model runs: later a call may be recorded, or inside an export."""

    def __init__(self, model: nn.Module) -> None:
        self._loops: dict[object, str] = {}
        self._forms = {module: self._form(module) for module in model.modules() if is_interface(module)}

    def _form(self, module: nn.Module) -> str:
        """Return the form. Modules of equal code and settings share what was found of their loop."""
        form, code = form_of(module), code_of(module)
        if form.startswith(UNSUPPORTED):
            return form
        if code not in self._loops:
            self._loops[code] = gate_dependence(module) or more_than_interface(module)
        reason = self._loops[code]
        return (
            f"{UNSUPPORTED}`{type(module).__name__}` does more than compute its experts: {reason}" if reason else form
        )

    def __call__(
        self, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
    ) -> Tensor:
        if module not in self._forms:
            self._forms[module] = self._form(module)
        first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
        weights = getattr(module, first), module.down_proj
        biased = getattr(module, "has_bias", False)
        biases = (getattr(module, f"{first}_bias"), module.down_proj_bias) if biased else (None, None)
        operands = hidden_states, top_k_index, top_k_weights, *weights
        return torch.ops.ktc_capture.experts(*operands, self._forms[module], *biases)


def _capture_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return the core's result as one `sdpa` marker, and no weights. `options` are named as in transformers."""
    if attention_mask is not None and not _masks_are_given.get() and _takes_mask(module):
        raise UnsupportedAttention("attention that computes a mask of its own is not supported in this version")
    for name, given in options.items():
        # An explicit mask alone determines what is attended to: the indices are for other kernels. Unknown scores
        # remain part of the computation.
        counts = isinstance(given, Tensor) and (attention_mask is None or given.is_floating_point())
        if counts and name not in _OPTIONS | _UNUSED:
            raise UnsupportedAttention(f"attention whose core is given `{name}` is not supported in this version")
    scaling, is_causal, sliding_window, s_aux, sinks = map(
        options.get, ("scaling", "is_causal", "sliding_window", "s_aux", "sinks")
    )
    if s_aux is not None and sinks is not None:
        raise UnsupportedAttention("attention whose core is given both `s_aux` and `sinks` is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = -1 if sliding_window is None else int(sliding_window)
    window = window if attention_mask is None else -1  # the mask includes the window
    operands = query, key, value, float(scale), causal, window, s_aux if sinks is None else sinks, attention_mask
    return torch.ops.ktc_capture.sdpa(*operands, options.get("softcap"), options.get("position_bias")), None


def _takes_mask(module: nn.Module) -> bool:
    """Return whether the caller may give `module` a mask; otherwise the mask that it computes is the whole mask."""
    return any("mask" in name for name in signature(type(module).forward).parameters)


@contextmanager
def masks_given() -> Generator[None]:
    """Call blocks with an explicit mask inside the context; the mask reaches the attention core.

    Code that computes with a mask selects the implementation by name, so here the marker is registered as `sdpa`.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    stock = cast("Callable[..., Any]", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionInterface.register("sdpa", _capture_attention)
    try:
        with context_value(_masks_are_given, True), _chosen(_marked_configs.get(), {ATTENTION: "sdpa"}):
            yield
    finally:
        AttentionInterface.register("sdpa", stock)


@contextmanager
def marked(model: PreTrainedModel) -> Generator[None]:
    """Run the experts and the attention of `model` as markers inside the context."""
    from transformers.integrations.moe import ExpertsInterface
    from transformers.modeling_utils import AttentionInterface

    _library()
    ExpertsInterface.register(_NAME, _CaptureExperts(model))
    AttentionInterface.register(_NAME, _capture_attention)
    values = (value for module in model.modules() for value in vars(module).values())
    of_modules = (value for value in values if isinstance(value, PreTrainedConfig))
    configs = tuple({id(config): config for config in (model.config.get_text_config(), *of_modules)}.values())
    with (
        context_value(_marked_configs, configs),
        _chosen(configs, dict.fromkeys(_CHOICES, _NAME)),
        own_experts_marked(model, _stock_marker),
    ):
        yield


def _stock_marker(hidden: Tensor, index: Tensor, weights: Tensor, stock: nn.Module, form: str) -> Tensor:
    gate_up, down, *biases = stock.parameters()
    return torch.ops.ktc_capture.experts(hidden, index, weights, gate_up, down, form, *(biases or (None, None)))


@contextmanager
def _chosen(configs: Sequence[PreTrainedConfig], choices: Mapping[str, str]) -> Generator[None]:
    """Set the configs to other implementations inside the context."""
    with ExitStack() as stack:
        for config in configs:
            stack.enter_context(attributes(config, **choices))
        yield
