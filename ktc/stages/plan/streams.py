"""Modules whose linear layers are computed on a GPU from weights in host memory: `place(stream = D)`.

In: the claims and the captured model. Out: for each such layer its device and the memory that weights pass through.
Routed experts of `cpu_moe` are streamed by their own backend (`prefill.py`); layers that a kernel computes on the CPU
stay there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.host import Host
from ktc.language.dsl.ruleset import RuleSet
from ktc.model.linears.plain import is_plain_linear
from ktc.model.targets import CpuMoe, KtLinear, Place
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.placement import require_gpu, resolve_device
from ktc.stages.plan.prefill import asks_for_experts, stream_buffer
from ktc.stages.plan.types import Claim, StreamedLinear


def plan_streams(
    captured: CapturedModel, claims: Sequence[Claim], rules: RuleSet, host: Host
) -> tuple[StreamedLinear, ...]:
    """Return the streamed linear layers in the model's order. Raises HostLacks (M069) and InputRefused (M079)."""
    found: dict[str, StreamedLinear] = {}
    problems: list[Diagnostic] = []
    on_cpu = {c.path for c in claims if isinstance(c.target, KtLinear) and c.target.kernel != "torch"}
    experts = tuple(f"{c.path}." for c in claims if isinstance(c.target, CpuMoe))
    for claim in claims:
        if not isinstance(claim.target, Place) or claim.target.stream is None or asks_for_experts(claim, claims):
            continue
        device = resolve_device(claim.target.stream, host)
        require_gpu(device, "stream", claim, host)
        if device == "cpu":
            continue
        layers = _linears(captured.model.get_submodule(claim.path), claim.path)
        layers = [path for path in layers if path not in on_cpu and not path.startswith(experts)]
        if not layers:
            message = f"`place(stream = {device})` on `{claim.path}`: it has no linear layer to stream"
            problems.append(Diagnostic("M079", message, claim.span, hint="see `ktc explain M079`"))
        for path in (path for path in layers if _is_shared(captured, path)):
            message = f"`place(stream = {device})` on `{path}`: another module shares its weight"
            problems.append(Diagnostic("M079", message, claim.span, hint="see `ktc explain M079`"))
        for path in layers:
            weight = captured.model.get_submodule(path).get_parameter("weight")
            nbytes = weight.numel() * weight.element_size()
            found[path] = StreamedLinear(path, device, stream_buffer(rules), nbytes, claim.rule, claim.span)
    if problems:
        raise InputRefused(*problems)
    return tuple(found.values())


def _linears(module: nn.Module, path: str) -> list[str]:
    below = cast("Iterator[tuple[str, nn.Module]]", module.named_modules())
    return [f"{path}.{name}".strip(".") for name, each in below if is_plain_linear(each)]


def _is_shared(captured: CapturedModel, path: str) -> bool:
    """Return whether another module has the layer's weight too, as an embedding tied to the head."""
    weight = captured.model.get_submodule(path).get_parameter("weight")
    named = cast("Any", captured.model).named_parameters(remove_duplicate=False)
    return sum(parameter is weight for _, parameter in named) > 1
