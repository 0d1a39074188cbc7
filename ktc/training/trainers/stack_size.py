"""The number of a step's tokens that fit one pass, from sizes and free memory, before any computation.

In: the layers, the recorded call of a micro-batch, the tokens of a chunk and of a micro-batch. Out: bytes per token by
device, and the tokens that fit. The formula is in docs/design.md, "Training".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from ktc.foundation import host
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.streamed import stream_sizes
from ktc.model.experts.streamed.expert_stream import chunk_bytes_on
from ktc.model.hf.private_api import attention_of
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.layer_pass import Offloaded, stays_on
from ktc.training.trainers.split_layer import SplitLayer, fused_in

_USED = 0.8  # of the free memory: estimates err, and other programs need memory too
_SCORES = 8  # copies of the scores in backward: of the softmax and its fp32, their gradients, and masked ones
_LAYER = 34  # bytes that a typical layer keeps per token and unit of width while one chunk of it is computed again
_COMING = 4  # states of each kind that are on a GPU for a moment, on their way to host memory or back
MANY = sys.maxsize  # tokens: a pass is large enough for any backend
# Tokens of a chunk of attention. The least are enough work for a GPU per launch; with the most, launches cost little
# beside it, and the chunk of a wide model takes 2 GB. Few values, so that a resumed run finds the same one.
CHUNKS = (2048, 4096, 8192)


def bytes_per_token(
    layers: Sequence[SplitLayer], call: ModelCall, offloaded: Offloaded = Offloaded.NOTHING
) -> dict[str, int]:
    """Count the bytes that each device holds of a token from forward to backward."""
    width = call.hidden.shape[-1] * call.hidden.element_size()
    per_token: dict[str, int] = {"cpu": 0}
    one_layer: dict[str, int] = {}  # bytes of one layer at a time
    for split, device in zip(layers, call.devices, strict=True):
        states = 1 if split.attention is None else 2
        of_attention = split.attention is not None and offloaded >= Offloaded.ATTENTION
        on_host = of_attention + (offloaded >= Offloaded.INPUT) if device.type == "cuda" else 0
        per_token[str(device)] = per_token.get(str(device), 0) + width * (states - on_host)
        if split.experts is not None:
            fused = fused_in(split.experts)
            backend = fused.backend(MANY)
            per_token["cpu"] += 2 * width + backend.saved_bytes(*_ranks(split.experts))
            if backend.device.type != "cpu":
                sizes = call.hidden.shape[-1], fused.top_k, call.hidden.element_size()
                sharing = None if fused.offload is None else fused.offload.sharing
                layer = stream_sizes.result_bytes(*sizes, 1 if sharing is None else sharing.size)
                one_layer[str(backend.device)] = max(layer, one_layer.get(str(backend.device), 0))
        if device.type == "cuda":  # where passes of many tokens keep attention's output in any case
            per_token["cpu"] += width * max(on_host, split.attention is not None)
    for device, layer in one_layer.items():
        per_token[device] = per_token.get(device, 0) + layer
    if offloaded:
        for device in {str(device) for device in call.devices if device.type == "cuda"}:
            per_token[device] += _COMING * width * offloaded
    per_token[str(call.devices[-1])] += 3 * width  # the last layer's output, its gradient, and the one on its way down
    return per_token


def kept_bytes_per_token(layers: Sequence[SplitLayer], call: ModelCall) -> dict[str, int]:
    """Count the bytes of a token's inputs and outputs of experts that can stay on each GPU from forward to backward.

    They are those of resident experts on the GPU of their layer: others have a GPU whose memory is scarce.
    """
    width = call.hidden.shape[-1] * call.hidden.element_size()
    kept: dict[str, int] = {}
    for split, device in zip(layers, call.devices, strict=True):
        if split.experts is not None and stays_on(split.experts, device):
            kept[str(device)] = kept.get(str(device), 0) + 2 * width
    return kept


def kept_factor_bytes(layers: Sequence[SplitLayer], call: ModelCall) -> dict[str, int]:
    """Count the bytes of factors on resident experts, in the dtype of the rows, that stay with inputs and outputs."""
    kept: dict[str, int] = {}
    for split, device in zip(layers, call.devices, strict=True):
        if split.experts is not None and stays_on(split.experts, device):
            fused = fused_in(split.experts)
            widest = fused.hidden + fused.intermediate * (1 + fused.form.gated)
            values = fused.num_experts * sum(_ranks(split.experts)) * widest
            kept[str(device)] = kept.get(str(device), 0) + values * call.hidden.element_size()
    return kept


def kept_layers(layers: Sequence[SplitLayer], call: ModelCall, tokens: int, room: Mapping[str, int]) -> int:
    """Return how many of the last layers can keep all that their backward needs of `tokens` tokens, within `room`."""
    left, of_parts = dict(room), call.hidden.shape[-1] * _LAYER
    for number, (split, device) in enumerate(zip(reversed(layers), reversed(call.devices), strict=True)):
        of_layer = of_parts
        if split.experts is not None:
            fused = fused_in(split.experts)
            gate_up = fused.intermediate * (1 + fused.form.gated)
            of_layer += fused.top_k * gate_up * call.hidden.element_size()
        left[str(device)] = left.get(str(device), 0) - tokens * of_layer
        stays = split.experts is None or stays_on(split.experts, device)
        if device.type == "cpu" or not stays or left[str(device)] < 0:
            return number
    return len(layers)


def prepare_experts(layers: Sequence[SplitLayer]) -> None:
    """Let every layer's experts take the memory that they need in every call."""
    for split in layers:
        if split.experts is not None:
            fused_in(split.experts).backend(MANY).prepare()


def _ranks(experts: nn.Module) -> tuple[int, int]:
    """Return the ranks of gate_up and of down: the highest among the adapters around the experts."""
    ranks = {"down_proj": 0}
    while not isinstance(experts, FusedMoe):
        wrapper = cast("Any", experts)
        ranks[wrapper.parameter_name] = max(wrapper.r.values(), default=0)
        experts = wrapper.base_layer
    down = ranks.pop("down_proj")
    return max(ranks.values(), default=0), down


def expert_bytes(layers: Sequence[SplitLayer]) -> dict[str, int]:
    """Count the bytes that products of routed experts take on each GPU beside their weights and results."""
    backends = (fused_in(split.experts).backend(MANY) for split in layers if split.experts is not None)
    devices = {backend.device for backend in backends if backend.device.type != "cpu"}
    return {str(device): stream_sizes.working_bytes(chunk_bytes_on(device)) for device in devices}


def bytes_per_pair(model: nn.Module) -> int:
    """Count the bytes per token and position of attention whose scores are in memory as a whole; 0 for a fused one."""
    config = cast("Any", model).config.get_text_config()
    heads, item = int(getattr(config, "num_attention_heads", 0) or 0), next(model.parameters()).element_size()
    return heads * _SCORES * item if attention_of(config) == "eager" else 0


def working_bytes(
    call: ModelCall, chunk_tokens: int, loss: int, of_experts: Mapping[str, int] = MappingProxyType({}), pair: int = 0
) -> dict[str, int]:
    """Count the bytes of a chunk's largest part on each device, with the `loss` of a micro-batch on the last one.

    `of_experts` are those of the products of routed experts, which do not run at the same time, and `pair` those of
    attention per token and position.
    """
    length, width = call.hidden.shape[-2:]
    part = chunk_tokens * (width * _LAYER + length * pair)
    needed = {str(device): part for device in call.devices}
    needed[str(call.devices[-1])] += loss
    return {**of_experts, **{device: max(size, of_experts.get(device, 0)) for device, size in needed.items()}}


def coming_bytes(model: nn.Module, optimizer: Optimizer | None) -> dict[str, int]:
    """Count the bytes on each device of gradients and optimizer state that the first step makes, as AdamW does.

    With an optimizer it goes through its parameters alone: a model has many more that are frozen.
    """
    coming: dict[str, int] = {}
    groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
    for parameter in chain(*groups) if groups else model.parameters():
        if parameter.requires_grad:
            state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
            missing = (parameter.grad is None) + 2 * (not state)
            coming[str(parameter.device)] = coming.get(str(parameter.device), 0) + missing * parameter.nbytes
    return coming


def free_bytes(device: str) -> int:
    """Return the free bytes of a GPU with torch's cache, or of the host within the limits of its control group."""
    if device == "cpu":
        return min(psutil.virtual_memory().available, host.total_memory() - psutil.Process().memory_info().rss)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def fitting_tokens(per_token: Mapping[str, int], working: Mapping[str, int], free: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens of one pass that each device has room for."""
    return {
        device: max(0, int(_USED * free[device]) - working.get(device, 0)) // size
        for device, size in per_token.items()
        if size
    }


def room(
    per_token: Mapping[str, int], working: Mapping[str, int], free: Mapping[str, int], tokens: int
) -> dict[str, int]:
    """Return the bytes that a pass of `tokens` tokens leaves of each device's free memory, below 0 if it is larger."""
    return {
        device: int(_USED * size) - working.get(device, 0) - per_token.get(device, 0) * tokens
        for device, size in free.items()
    }


def fitting_chunk(
    call: ModelCall, per_token: Mapping[str, int], free: Mapping[str, int], loss: int, tokens: int,
    of_experts: Mapping[str, int] = MappingProxyType({}), pair: int = 0,
) -> int:  # fmt: skip
    """Return the tokens of a chunk of attention, one of `CHUNKS`: the most that fit beside a pass of `tokens` tokens.

    On the CPU it is the smallest. Its operations are not launched, and a small chunk stays in the caches.
    """
    if any(device.type == "cpu" for device in call.devices):
        return CHUNKS[0]
    for chunk in reversed(CHUNKS[1:]):
        working = working_bytes(call, min(chunk, tokens), loss, of_experts, pair)
        if all(fits >= tokens for fits in fitting_tokens(per_token, working, free).values()):
            return chunk
    return CHUNKS[0]
