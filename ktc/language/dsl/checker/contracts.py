"""Contracts between two rewrites of one match, from the contracts of their targets.

Input: two actions that apply to the same match. Output: the contradictions, each a `Fault` that the caller locates. The
caller decides whether the two actions meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ktc.diagnostics import listing
from ktc.language.dsl.ruleset import RuleAction
from ktc.language.dsl.schema import ENUMS, MATCHABLE, REQUANTISING
from ktc.model.targets import FakeQuant

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """A contradiction between a rewrite and an earlier one; `reason` is reported at the earlier one."""

    code: str
    message: str
    reason: str
    label: str = ""
    hint: str = ""


def claims(action: RuleAction, root: str, output: str) -> tuple[Path, ...]:
    """Return the captures that an action claims: those it names, otherwise those its target absorbs, otherwise `()`.

    `root` is what the rule matches and `output` its first output, which is the match itself.
    """
    if root in MATCHABLE:
        return ((),) * max(1, len(action.on))
    paths = action.on or tuple((name,) for name in action.target.consumes) or ((),)
    return tuple(() if path == (output,) else path for path in paths)


def contradictions(one: RuleAction, other: RuleAction, root: str, output: str) -> Iterator[Fault]:
    """Yield the contradictions of `other` with `one` at the same match."""
    if one.target.keeps or other.target.keeps:
        return
    absorbed = _absorbed(one, other, root)
    pinned = _pinned(one, other)
    yield from (fault for fault in (absorbed, pinned) if fault)
    if absorbed is None and _meet(one, other, root, output):
        yield from (fault for fault in (_untrainable(one, other), _other_grid(one, other)) if fault)


def _meet(one: RuleAction, other: RuleAction, root: str, output: str) -> bool:
    hosted = other.target.name in one.target.fuses and not other.on
    return hosted or bool(set(claims(one, root, output)).intersection(claims(other, root, output)))


def _absorbed(one: RuleAction, other: RuleAction, root: str) -> Fault | None:
    """Return a fault if `other` adapts or quantises a capture that `one` absorbs."""
    target = one.target
    if other.facet not in ("adapter", "quant") or other.target.name in target.fuses or one.on or root in MATCHABLE:
        return None
    lost = next((path[0] for path in other.on if len(path) == 1 and path[0] in target.consumes), None)
    if lost is None:
        return None
    return Fault(
        "E042",
        f"`{other.target.name}` on `{lost}`, but `{target.name}` absorbs it",
        f"`{target.name}` absorbs {listing(target.consumes)}",
        label=f"`{lost}` is no longer a node",
        hint="remove it from this rewrite, or remove the other rewrite",
    )


def _pinned(one: RuleAction, other: RuleAction) -> Fault | None:
    if (place := other.target.placement) is None:
        return None
    for path in other.on:
        device = one.target.required_devices.get(path[0]) if len(path) == 1 else None
        if device is not None and place.device not in (None, device):
            message = f"`{one.target.name}` runs `{path[0]}` on {device}, this places it on {place.device}"
            return Fault("E041", message, f"pinned to {device} here")
    return None


def _untrainable(one: RuleAction, other: RuleAction) -> Fault | None:
    """Return a fault if an adapter's node has packed weights."""
    if other.facet != "adapter":
        return None
    if one.target.packs_weights:
        message = f"`{other.target.name}` trains a node whose weights `{one.target.name}` packs for inference"
        hint = f"`{FakeQuant.name}` trains on the grid of the later packing"
        return Fault("E044", message, "packed here", hint=hint)
    return None


def _other_grid(one: RuleAction, other: RuleAction) -> Fault | None:
    """Return a fault if the kernel's own weight format would quantise fake-quantised weights to another grid."""
    if not one.target.takes_experts or other.target.rounding is None:
        return None
    format, wanted = str(one.target.settings.get("format")), other.target.rounding.format
    if format not in REQUANTISING or wanted in (None, REQUANTISING[format]):
        return None
    hosting = [name for name in ENUMS["format"] if REQUANTISING.get(name, wanted) == wanted]
    message = f"format `{format}` quantises the experts again, `{other.target.name}({wanted})` would be on another grid"
    return Fault("E044", message, f"kept as `{format}` here", hint=f"formats that can host it: {listing(hosting)}")
