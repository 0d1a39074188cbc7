"""Whether decoding steps become CUDA graphs or native programs (`plan { cuda_graph = decode }`), and why not.

A step is one graph where everything but routed experts is on one GPU and stays there. It is one native program where
the whole model is on the CPU. In both, attention reads all positions. Steps that are CUDA graphs need no program. Under
`auto = intensity` a program that answers has either where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, cast

from torch import Tensor

from ktc.diagnostics import Diagnostic
from ktc.model.hf.stock_model import finds_positions
from ktc.model.kernels.linear_spec import ISAS
from ktc.model.kernels.step_spec import StepSpec
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.settings import span_of
from ktc.stages.plan.types import Reason

_GRAPH, _NATIVE = "cuda_graph", "native_step"
_CODES: Final = {_GRAPH: "M082", _NATIVE: "M084"}


def decide_steps(draft: PlanDraft) -> PlanDraft:
    """Decide the kind of steps. Warn (M082, M084) where the program requests steps that its model cannot have."""
    settings = draft.rules.plan
    obstacles = {
        key: obstacle(draft)
        for key, obstacle in ((_GRAPH, _no_graph), (_NATIVE, _no_program))
        if _requested(draft, key)
    }
    if obstacles.get(_GRAPH) == "":
        text = "decoding steps of `generate` are CUDA graphs, experts on the CPU are called in them"
        return replace(draft, cuda_graph=True).with_reasons(Reason("model", text))
    if obstacles.get(_NATIVE) == "":  # a program that names both is for either place
        text = "decoding steps of `generate` are native programs, recorded from the model's own steps"
        spec = StepSpec("step", "fp32", next(isa for isa in ISAS if isa in draft.host.isas))
        return replace(draft, steps=spec).with_reasons(Reason("model", text))
    named = ((key, why) for key, why in obstacles.items() if key in settings)
    return draft.with_warnings(*(_without_effect(draft, key, why) for key, why in named))


def gpu_of_graphs(draft: PlanDraft) -> str:
    """Return the GPU of decoding steps that will be CUDA graphs, "" where they will be none."""
    if not _requested(draft, _GRAPH) or _no_graph(draft):
        return ""
    return next(device for _, device in _parameters(draft) if device != "cpu")


def _requested(draft: PlanDraft, key: str) -> bool:
    settings = draft.rules.plan
    chosen = "decode" if settings.get("auto") == "intensity" and draft.mode != "train" else "never"
    return settings.get(key, chosen) == "decode"


def _without_effect(draft: PlanDraft, key: str, why: str) -> Diagnostic:
    message, code = f"`plan {{ {key} = decode }}` has no effect: {why}", _CODES[key]
    hint = f"see `ktc explain {code}`"
    return Diagnostic(code, message, span_of(draft.rules, key), hint=hint, severity="warning")


def _no_graph(draft: PlanDraft) -> str:
    """Return why steps cannot be CUDA graphs, "" if they can be."""
    on_host = tuple(f"{claim.path}." for claim in draft.claims if claim.target.required_device == "cpu")
    used = {name: device for name, device in _parameters(draft) if not name.startswith(on_host)}
    gpus = {device for device in used.values() if device != "cpu"}
    on_cpu = next((name for name, device in used.items() if device == "cpu"), "")
    if not gpus:
        return "the model is on the CPU"
    if len(gpus) > 1:
        return f"the model is on {len(gpus)} GPUs"
    if on_cpu:
        return f"`{on_cpu}` is on the CPU"
    if draft.streams:
        return f"the weights of `{draft.streams[0].fqn}` are sent to the GPU in each step"
    return _varying(draft)


def _no_program(draft: PlanDraft) -> str:
    """Return why steps cannot be native programs, "" if they can be."""
    if draft.mode == "train":
        return "the program trains"
    elsewhere = next(((name, device) for name, device in _parameters(draft) if device != "cpu"), None)
    if elsewhere is not None:
        return f"`{elsewhere[0]}` is on {elsewhere[1]}"
    codes = (f"the cache of `{c.path}` holds int8 codes" for c in draft.claims if c.node and c.target.int8_cache)
    return _varying(draft) or next(codes, "")


def _varying(draft: PlanDraft) -> str:
    if finds_positions(draft.captured.model):
        return "the model reads images, and its own code finds the positions of the tokens behind them in each step"
    paths = (claim.path for claim in draft.claims if claim.target.varies_by_step)
    return next((f"`{path}` is sparse, and chooses other positions in each step" for path in paths), "")


def _parameters(draft: PlanDraft) -> Iterator[tuple[str, str]]:
    """Yield the name and the device of each parameter."""
    devices = draft.devices
    for name, _ in cast("Iterator[tuple[str, Tensor]]", draft.captured.model.named_parameters()):
        yield name, device_of(name, devices)
