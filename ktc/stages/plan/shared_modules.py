"""Modules at several places of a model: they keep their own code, because a rewrite puts a module at one place.

In: the claims, the matches and the captured model. Out: the claims that are carried out, and a warning (M093) for the
others, where their rule may match nothing. A block that is called in several layers is such a module, and so is a
layer in it with a second name. Refused (M093): such a module under a rule that expects matches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.types import Carried, Claim

_LISTED = 3  # modules of one warning
_HINT = "narrow the rule, or write `expect >= 0`, and the model's own code stays; see `ktc explain M093`"


def on_own_modules(captured: CapturedModel, claims: Sequence[Claim], matches: Matches) -> Carried:
    """Return the claims without those on modules at several places. Raises InputRefused (M093)."""
    places, kept = _places(captured), list[Claim]()
    left: dict[tuple[str, tuple[str, ...]], list[Claim]] = {}
    for claim in claims:
        shared = () if claim.facet == "place" else _shared(captured.model, places, claim)
        if shared:
            left.setdefault((claim.rule, shared), []).append(claim)
        else:
            kept.append(claim)
    refused = [_refused(names, held[0]) for (rule, names), held in left.items() if rule not in matches.optional]
    if refused:
        raise InputRefused(*refused)
    told = dict[tuple[str, ...], Diagnostic]()
    for (_, names), held in left.items():
        told.setdefault(names, _left_alone(names, held[0]))
    sites = {claim.site: _why(names) for (_, names), held in left.items() for claim in held}
    return Carried(tuple(kept), tuple(told.values()), sites)


def _places(captured: CapturedModel) -> dict[int, tuple[str, ...]]:
    """Return the names of each module that has several: the sites of a block, the attributes that hold a module."""
    found = defaultdict[int, list[str]](list)
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", captured.model.named_modules(remove_duplicate=False)))
    seen = set[tuple[int, str]]()
    for name, module in modules.items():
        parent, _, attribute = name.rpartition(".")
        place = id(modules[parent]), attribute  # one for all names of a parent that has several itself
        if name and place not in seen:
            seen.add(place)
            found[id(module)].append(name)
    for site in captured.sites:
        names = found[id(captured.model.get_submodule(site.fqn))]
        names += [site.fqn] * (site.fqn not in names)
    return {number: tuple(names) for number, names in found.items() if len(names) > 1}


def _shared(model: nn.Module, places: dict[int, tuple[str, ...]], claim: Claim) -> tuple[str, ...]:
    """Return all names of the claim's block or module; none for those with one name."""
    for fqn in (claim.site, claim.path):
        try:
            module = model.get_submodule(fqn)
        except AttributeError:  # a parameter, which the module that holds it stands for
            continue
        if names := places.get(id(module), ()):
            return names
    return ()


def _refused(names: tuple[str, ...], claim: Claim) -> Diagnostic:
    message = f"`{claim.target.name}` on `{claim.path}`: {_why(names)}"
    return Diagnostic("M093", message, claim.span, hint=_HINT)


def _left_alone(names: tuple[str, ...], claim: Claim) -> Diagnostic:
    message = f"{claim.site or claim.path} keeps its own code: {_why(names)}"
    return Diagnostic("M093", message, claim.span, hint="see `ktc explain M093`", severity="warning")


def _why(names: tuple[str, ...]) -> str:
    return f"{listing(names, _LISTED)} are one module"
