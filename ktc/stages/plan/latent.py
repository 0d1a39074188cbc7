"""Latent attention on the compressed cache: whether `mla_absorbed` fits what it claims, and what the plan says of it.

In: the claims, the matches and the captured model. Out: the claims that are carried out, and a warning (M081) for each
attention that does not work on latents or whose class caches expanded keys, where its rule may match nothing. The
up-projection vanishes into the core. Refused (M081): such an attention under a rule that expects matches.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.model.attention.latent_sizes import LatentSizes
from ktc.model.graph import ops
from ktc.model.graph.latent import latent_operands
from ktc.model.graph.typed import nodes_by_name
from ktc.model.hf.latent_cache import caches_latents
from ktc.model.targets import MlaAbsorbed
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.types import Claim

_SHOWN = (1_024, 16_384)  # positions for which the break-even is reported
_LISTED = 3  # modules of one warning


def on_latents(
    captured: CapturedModel, claims: Sequence[Claim], matches: Matches
) -> tuple[tuple[Claim, ...], tuple[Diagnostic, ...]]:
    """Return the claims without those on up-projections that their attention absorbs, and the warnings.

    Raises InputRefused (M081).
    """
    kept: list[Claim] = []
    problems: dict[tuple[str, str], Diagnostic] = {}
    left: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        if not isinstance(claim.target, MlaAbsorbed) or not claim.node:
            kept.append(claim)
            continue
        node = _node(captured, claim)
        if ops.operator(node) != "sdpa":
            continue
        reason = _reason(captured, claim, node)
        if not reason:
            kept.append(claim)
        elif claim.rule in matches.optional:
            left.setdefault((claim.block, reason), []).append(claim)
        else:
            message = f"`{claim.target.name}` on `{claim.site}`: {reason}"
            problems.setdefault((claim.block, reason), Diagnostic("M081", message, claim.span, hint=_HINT))
    if problems:
        raise InputRefused(*problems.values())
    return tuple(kept), tuple(_left_alone(reason, claims) for (_, reason), claims in left.items())


def _left_alone(reason: str, claims: Sequence[Claim]) -> Diagnostic:
    where = listing((claim.site for claim in claims), _LISTED)
    message = f"{where} keep the model's own code, without `{claims[0].target.name}`: {reason}"
    return Diagnostic("M081", message, claims[0].span, hint="see `ktc explain M081`", severity="warning")


_HINT = "narrow the rule, or write `expect >= 0`, and the model's own code stays; see `ktc explain M081`"


def _reason(captured: CapturedModel, claim: Claim, core: fx.Node) -> str:
    stock = type(captured.model.get_submodule(claim.site))
    if not caches_latents(stock):
        return f"`{stock.__name__}` caches keys and values, and no latents"
    return latent_operands(core).reason


def _node(captured: CapturedModel, claim: Claim) -> fx.Node:
    graph = captured.block(claim.block).graph
    assert graph is not None, "a claim on a node has a graph"
    return nodes_by_name(graph)[claim.node]


def told(captured: CapturedModel, block: str, action: NodeAction) -> str:
    """Return in words when an attention is absorbed."""
    target, graph = action.target, captured.block(block).graph
    assert isinstance(target, MlaAbsorbed) and graph is not None, "the reason of another rewrite"
    by = f"; a few new tokens without gradients by the {action.kernel.isa} kernel" if action.kernel else ""
    how = "scores are two products" if target.move_elision else "latents and rotary keys are concatenated"
    if target.absorb in ("never", "always"):
        return f"attention on the compressed cache, {target.absorb} absorbed ({how}){by}"
    found = latent_operands(nodes_by_name(graph)[action.node])
    sizes = LatentSizes(found.heads, found.nope, found.rope, found.value, found.rank)
    limits = " and ".join(f"{sizes.break_even(each):.0f} at {each:,}" for each in _SHOWN)
    side = "fewer" if target.absorb == "decode" else "more"
    return (
        f"attention on the compressed cache, absorbed ({how}) for {side} new tokens than the break-even ({limits} "
        f"positions), expanded for others{by}"
    )
