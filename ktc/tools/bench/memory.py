"""Whether the experts of a request fit: an estimate made before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import psutil

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import host
from ktc.model.kernels.packed_size import packed_bytes
from ktc.tools.bench import kt, ours, peers
from ktc.tools.bench.request import Request

_BASE = 2**30  # imports, the buffer that is read, what a compiler takes


def require(request: Request) -> None:
    """Raise HostLacks (H240) with the missing bytes and the number of experts that would fit."""
    available = min(psutil.virtual_memory().available, host.detect().memory)
    wanted = needed(request)
    if wanted <= available:
        return
    fitting = next((number for number in _smaller(request) if needed(_with_experts(request, number)) <= available), 0)
    message = f"these experts need {_gib(wanted)} of memory in the requested forms, and {_gib(available)} are free"
    fewer = f"`--experts {fitting}` would fit; or ask" if fitting else "ask"
    raise HostLacks(Diagnostic("H240", message, hint=f"{fewer} for fewer implementations with `--impl`"))


def needed(request: Request) -> int:
    """Bytes that all candidates hold at once, their activations included."""
    shape = request.shape
    stacked = 2 * shape.num_experts * shape.expert_weights
    slots = max(request.tokens) * shape.top_k
    activations = 16 * slots * (shape.intermediate + shape.hidden)
    own = sum(packed_bytes(spec) for _, spec in ours.asked(request))
    return own + int(stacked * (_peers(request) + _kt(request))) + activations + _BASE


def _peers(request: Request) -> int:
    """Return the number of copies of the stacked weights in this process."""
    if not any(impl in peers.NAMES for impl in request.impls):
        return 0
    # PEFT makes B A, its sum with the weights and, in training, the gradient of that: in turn, not for each peer.
    adapted = any(request.lora_ranks) and any(impl in peers.HF for impl in request.impls)
    return 1 + 3 * adapted


def _kt(request: Request) -> float:
    """Return kt-kernel's number of copies: its input, and the form of each of its classes."""
    formats = [size for name, size in kt.FORMATS.items() if kt.name_of(name) in request.impls]
    if not formats or not kt.is_here(request):
        return 0
    # Its classes for training keep the weights and their transpose.
    classes = ("train" in request.passes and 0 in request.lora_ranks) + sum(map(bool, request.lora_ranks))
    return 1 + sum(formats) / 2 + 2 * classes * (kt.PREFIX in request.impls)


def _smaller(request: Request) -> list[int]:
    """Halves of the number of experts, largest first, that the router can still choose from."""
    numbers = [request.shape.num_experts >> halvings for halvings in range(1, request.shape.num_experts.bit_length())]
    return [number for number in numbers if number >= request.shape.top_k]


def _with_experts(request: Request, number: int) -> Request:
    return replace(request, shape=replace(request.shape, num_experts=number))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
