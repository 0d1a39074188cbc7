"""What two rewrites of one match promise and forbid each other: the contracts of their targets.

In come two actions that meet at some match; out goes the contradiction, if there is one, as a `Fault` that the caller
locates. Whether the actions do meet is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ktc.diagnostics import listing
from ktc.dsl.ruleset import RuleAction
from ktc.dsl.schema import ENUMS, INFERENCE_ONLY, MATCHABLE, REQUANTISING, TARGETS

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """A contradiction between a rewrite and an earlier one; `reason` is said at the earlier one's place."""

    code: str
    message: str
    reason: str
    label: str = ""
    hint: str = ""


def claims(action: RuleAction, root: str, output: str) -> tuple[Path, ...]:
    """The captures that an action claims: those it names, else those its target absorbs, else the match, `()`.

    `root` is what the rule matches and `output` its first output, which is the match itself.
    """
    if root in MATCHABLE:
        return ((),) * max(1, len(action.on))
    paths = action.on or tuple((name,) for name in TARGETS[action.target].absorbs) or ((),)
    return tuple(() if path == (output,) else path for path in paths)


def contradictions(one: RuleAction, other: RuleAction, root: str, output: str) -> Iterator[Fault]:
    """What `other` does that `one`, at the same match, forbids."""
    if "keep" in (one.target, other.target):
        return
    absorbed = _absorbed(one, other, root)
    pinned = _pinned(one, other)
    yield from (fault for fault in (absorbed, pinned) if fault)
    if absorbed is None and _meet(one, other, root, output):
        yield from (fault for fault in (_untrainable(one, other), _other_grid(one, other)) if fault)


def inference_only(action: RuleAction) -> str:
    """The kernel without a backward pass that an action chooses, "" if it chooses none."""
    chosen = (str(action.settings.get(name)) for name in ("kernel", "prefill"))
    return next((kernel for kernel in chosen if kernel in INFERENCE_ONLY), "")


def _meet(one: RuleAction, other: RuleAction, root: str, output: str) -> bool:
    hosted = other.target in TARGETS[one.target].hosts and not other.on
    return hosted or bool(set(claims(one, root, output)).intersection(claims(other, root, output)))


def _absorbed(one: RuleAction, other: RuleAction, root: str) -> Fault | None:
    """An adapter or a quantisation needs a node of its own, which an absorbed capture no longer is."""
    target = TARGETS[one.target]
    if other.facet not in ("adapter", "quant") or other.target in target.hosts or one.on or root in MATCHABLE:
        return None
    lost = next((path[0] for path in other.on if len(path) == 1 and path[0] in target.absorbs), None)
    if lost is None:
        return None
    return Fault(
        "E042",
        f"`{other.target}` on `{lost}`, but `{one.target}` absorbs it",
        f"`{one.target}` absorbs {listing(target.absorbs)}",
        label=f"`{lost}` is no longer a node",
        hint="leave it out of this rewrite, or do without the other",
    )


def _pinned(one: RuleAction, other: RuleAction) -> Fault | None:
    if other.target != "place":
        return None
    for path in other.on:
        device = TARGETS[one.target].pins.get(path[0]) if len(path) == 1 else None
        if device is not None and other.settings.get("device") not in (None, device):
            message = f"`{one.target}` runs `{path[0]}` on {device}, this places it on {other.settings['device']}"
            return Fault("E041", message, f"pinned to {device} here")
    return None


def _untrainable(one: RuleAction, other: RuleAction) -> Fault | None:
    """An adapter is trained through what its node computes, so that must have a backward pass and stay as it is."""
    if other.facet != "adapter":
        return None
    if kernel := inference_only(one):
        message = f"`{other.target}` needs a kernel that can be trained through, `{kernel}` is for inference only"
        return Fault("E044", message, "kernel chosen here", hint="use `torch` here, or leave the adapter out")
    if one.target == "quantize":
        message = f"`{other.target}` trains a node whose weights `quantize` packs for inference"
        return Fault("E044", message, "packed here", hint="`fake_quant` trains on the grid of the later packing")
    return None


def _other_grid(one: RuleAction, other: RuleAction) -> Fault | None:
    """A kernel that stores the experts in a format of its own would round what has been rounded to another grid."""
    if one.target != "cpu_moe" or other.target not in ("fake_quant", "quantize"):
        return None
    own, wanted = str(one.settings["format"]), str(other.settings["format"])
    if own not in REQUANTISING or wanted in ("None", REQUANTISING[own]):
        return None
    hosting = [name for name in ENUMS["format"] if REQUANTISING.get(name, wanted) == wanted]
    message = f"format `{own}` quantises the experts again, `{other.target}({wanted})` would be on another grid"
    return Fault("E044", message, f"kept as `{own}` here", hint=f"formats that can host it: {listing(hosting)}")
