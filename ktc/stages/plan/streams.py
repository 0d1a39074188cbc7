"""Modules whose linear layers are computed on a GPU from weights in host memory: `place(stream = D)`.

In: the claims and the captured model. Out: for each such layer its device and the memory that weights pass through.
Routed experts of `cpu_moe` are streamed by their own backend (`prefill.py`); layers that a kernel computes on the CPU
stay there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.linears.plain import is_plain_linear
from ktc.model.targets.node_plan import Claim
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import require_gpu, resolve_device
from ktc.stages.plan.prefill import stream_buffer
from ktc.stages.plan.types import StreamedLinear


def stream_linears(draft: PlanDraft) -> PlanDraft:
    """Decide the streamed linear layers in the model's order. Raises HostLacks (M069) and InputRefused (M079)."""
    captured, host = draft.captured, draft.host
    streams, problems = dict[str, StreamedLinear](), list[Diagnostic]()
    on_cpu = {plan.claim.path for plan in draft.nodes if plan.target.fixed_weights and plan.spec is not None}
    experts = {claim.path for claim in draft.claims if claim.target.required_device == "cpu"}
    below_experts = tuple(f"{path}." for path in experts)
    for claim in draft.claims:
        place = claim.target.placement
        if place is None or place.stream is None or claim.path in experts:
            continue
        device = resolve_device(place.stream, host)
        require_gpu(device, "stream", claim, host)
        if device == "cpu":
            continue
        layers = _linears(captured.model.get_submodule(claim.path), claim.path)
        layers = [path for path in layers if path not in on_cpu and not path.startswith(below_experts)]
        if not layers:
            problems.append(_refused(claim, device, claim.path, "it has no linear layer to stream"))
        shared = (path for path in layers if _is_shared(captured, path))
        problems += [_refused(claim, device, path, "another module shares its weight") for path in shared]
        for path in layers:
            weight = captured.model.get_submodule(path).get_parameter("weight")
            nbytes, buffer = weight.numel() * weight.element_size(), stream_buffer(draft.rules)
            streams[path] = StreamedLinear(path, device, buffer, nbytes, claim.rule, claim.span)
    if problems:
        raise InputRefused(*problems)
    return replace(draft, streams=tuple(streams.values()))


def _refused(claim: Claim, device: str, path: str, why: str) -> Diagnostic:
    message = f"`place(stream = {device})` on `{path}`: {why}"
    return Diagnostic("M079", message, claim.span, hint="see `ktc explain M079`")


def _linears(module: nn.Module, path: str) -> list[str]:
    below = cast("Iterator[tuple[str, nn.Module]]", module.named_modules())
    return [f"{path}.{name}".strip(".") for name, layer in below if is_plain_linear(layer)]


def _is_shared(captured: CapturedModel, path: str) -> bool:
    """Return whether another module has the layer's weight too, as an embedding tied to the head."""
    weight = captured.model.get_submodule(path).get_parameter("weight")
    named = cast("Any", captured.model).named_parameters(remove_duplicate=False)
    return sum(parameter is weight for _, parameter in named) > 1
