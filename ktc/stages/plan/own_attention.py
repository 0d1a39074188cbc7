"""Attention functions that ktc does not know: rewrites of the core are left out where the model calls one.

In: the claims, the matches and the captured model. Out: the claims that are carried out, and a warning (M092) for each
attention whose core keeps the model's own function, where its rule may match nothing. Refused (M092): such an
attention under a rule that expects matches.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.model.attention.interface import unknown_function
from ktc.model.targets import FusedAttention, MlaAbsorbed, SparseAttention
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.types import Carried, Claim

_CORES = (FusedAttention, MlaAbsorbed, SparseAttention)
_LISTED = 3  # modules of one warning
_HINT = "narrow the rule, or write `expect >= 0`, and the model's own attention stays; see `ktc explain M092`"


def on_known_functions(captured: CapturedModel, claims: Sequence[Claim], matches: Matches) -> Carried:
    """Return the claims without those on cores that a function of the model computes. Raises InputRefused (M092)."""
    kept: list[Claim] = []
    left: dict[tuple[str, str, str], list[Claim]] = {}
    for claim in claims:
        on_core = isinstance(claim.target, _CORES) and claim.node
        reason = unknown_function(captured.model.get_submodule(claim.site)) if on_core else ""
        if reason:
            left.setdefault((claim.rule, claim.target.name, reason), []).append(claim)
        else:
            kept.append(claim)
    refused = [_refused(key[-1], held[0]) for key, held in left.items() if key[0] not in matches.optional]
    if refused:
        raise InputRefused(*refused)
    warnings = tuple(_left_alone(key[-1], held) for key, held in left.items())
    return Carried(tuple(kept), warnings, {claim.site: key[-1] for key, held in left.items() for claim in held})


def _refused(reason: str, claim: Claim) -> Diagnostic:
    return Diagnostic("M092", f"`{claim.target.name}` on `{claim.site}`: {reason}", claim.span, hint=_HINT)


def _left_alone(reason: str, claims: Sequence[Claim]) -> Diagnostic:
    where = listing(dict.fromkeys(claim.site for claim in claims), _LISTED)
    message = f"{where} keep the model's own attention, without `{claims[0].target.name}`: {reason}"
    return Diagnostic("M092", message, claims[0].span, hint="see `ktc explain M092`", severity="warning")
