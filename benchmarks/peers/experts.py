"""Peers that run in this process on the same weights: Hugging Face's experts, torch.compile of them, and oneDNN.

oneDNN represents the best possible product of this number of operations here: one expert's matrices for all tokens, no
routing. LoRA on Hugging Face's experts is PEFT's `target_parameters`. Candidates that would copy
gigabytes are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ktc.tools.bench.candidate import Experts, Layer, LocalCandidate, ReasonAgainst
from ktc.tools.bench.inputs import Weights
from ktc.tools.bench.layer_requests import DENSE, HF, Moe, Pass, Shape

COMPILE: Final = "compile"
# Below this many tokens a dense product of the same operations reads other bytes and compares nothing.
_MIN_DENSE_TOKENS: Final = 128
# `batched_mm` gathers the weights of every slot.
_MAX_COPIED: Final = 2 * 2**30
_MAX_COMPILED_TOKENS: Final = 4


def candidates(request: Moe, weights: Weights) -> Iterator[LocalCandidate]:
    """Return the requested ones."""
    shape = request.shape
    expert_bytes = 2.0 * shape.expert_weights
    make: dict[str, tuple[Callable[[int], Layer], ReasonAgainst]] = {
        COMPILE: (partial(_compiled, shape, weights), partial(_against_compiled, shape)),
        DENSE: (partial(_dense, shape, weights), _against_dense),
    }
    for impl in HF:
        against = partial(_against_batched, shape) if impl == "hf_batched_mm" else _never
        make[impl] = partial(_hugging_face, shape, weights, impl), against
    for impl in (name for name in request.impls if name in make):
        layer, against = make[impl]
        yield LocalCandidate(impl, layer, expert_bytes, reason_against=against)


def _never(tokens: int, passes: Pass, rank: int) -> str:
    return ""


def _against_batched(shape: Shape, tokens: int, passes: Pass, rank: int) -> str:
    copied = 2 * shape.expert_weights * tokens * shape.top_k
    return f"copies the weights of every slot: {copied / 2**30:.1f} GiB here" if copied > _MAX_COPIED else ""


def _against_compiled(shape: Shape, tokens: int, passes: Pass, rank: int) -> str:
    if passes == "train" or rank:
        return "compiled for forward without LoRA only"
    if tokens > _MAX_COMPILED_TOKENS:
        return f"compiled for {_MAX_COMPILED_TOKENS} tokens at most: it is `batched_mm`, whose copies are fused away"
    return _against_batched(shape, tokens, passes, rank)


def _against_dense(tokens: int, passes: Pass, rank: int) -> str:
    if rank:
        return "has no LoRA"
    return f"reads one expert alone: compares nothing below {_MIN_DENSE_TOKENS} tokens" * (tokens < _MIN_DENSE_TOKENS)


def _experts(shape: Shape, weights: Weights, implementation: str) -> nn.Module:
    """Return a stock experts module on the shared weights. Those of all families compute the same."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        hidden_act="silu",
    )
    cast("Any", config)._experts_implementation = implementation
    with torch.device("meta"):
        module = cast("Any", modeling_qwen3_moe).Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = (nn.Parameter(each, requires_grad=False) for each in weights.stacked)
    return module


def _hugging_face(shape: Shape, weights: Weights, impl: str, rank: int) -> Layer:
    module = _experts(shape, weights, impl.removeprefix("hf_"))
    return _with_lora(module, rank) if rank else Layer(cast("Experts", module))


def _with_lora(module: nn.Module, rank: int) -> Layer:
    """As PEFT adapts stacked weights: B A is added to all of them before every call."""
    from peft import LoraConfig, inject_adapter_in_model

    names = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    model = nn.ModuleDict({"experts": module})
    config = LoraConfig(r=rank, lora_alpha=16, target_modules=[], target_parameters=names, init_lora_weights=False)
    inject_adapter_in_model(config, model)  # in place
    trained = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
    return Layer(cast("Experts", model["experts"]), trained)


def _compiled(shape: Shape, weights: Weights, rank: int) -> Layer:
    return Layer(cast("Experts", torch.compile(_experts(shape, weights, "batched_mm"))))


def _dense(shape: Shape, weights: Weights, rank: int) -> Layer:
    gate_up, down = (each.contiguous() for each in weights.expert(0))

    def experts(x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        gate, up = F.linear(x_TH.repeat(shape.top_k, 1), gate_up).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, down)
        return out[: x_TH.shape[0]] * weights_TK[:, :1].to(x_TH.dtype)

    return Layer(experts)
