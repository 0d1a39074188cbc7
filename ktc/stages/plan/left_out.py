"""Claims that are left out, so that a module keeps its own code, where their rule may match nothing.

In: a draft. Out: the claims that are carried out, and a warning for the others. Refused, with the same code: such a
claim of a rule that expects its matches. A module at several places keeps its code (M093), because a rewrite puts a
module at one place; a target says what it cannot rewrite (M081, M083, M092).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.model.graph import ops
from ktc.model.hf.private_api import read_as_experts
from ktc.model.targets.attention_kernel import no_codes
from ktc.model.targets.node_plan import Claim
from ktc.model.targets.settings import AUTO, FLASH_DECODE, INT8
from ktc.model.targets.target import Unsuited
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.adapters import dropout_of
from ktc.stages.plan.collapse import collapse
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import Reason

_LISTED = 3  # modules of one warning
ON_GPU = "PyTorch computes it on its GPU"
_ON_CPU = "the model's own code computes it on the CPU"
_OWN_CODE = "keep the model's own code", "the model's own code stays"


def leave_shared_modules(draft: PlanDraft) -> PlanDraft:
    """Leave out claims on modules at several places, and on layers in them. Raises InputRefused (M093)."""
    places, model = _places(draft.captured), cast("nn.Module", draft.captured.model)

    def shared(claim: Claim) -> Unsuited | None:
        names = () if claim.facet == "place" else _shared(model, places, claim)
        return Unsuited("M093", f"{listing(names, _LISTED)} are one module", *_OWN_CODE) if names else None

    return _leave(draft, shared, _keeps_its_code)


def leave_unsuited(draft: PlanDraft) -> PlanDraft:
    """Leave out what a target cannot rewrite. Raises InputRefused with the target's code.

    A projection that vanishes into the core of its attention has no claim of its own afterwards.
    """

    def consumed(claim: Claim) -> bool:
        core = "core" in claim.target.consumes and claim.node
        return bool(core) and ops.operator(draft.captured_node(claim).core) != "sdpa"

    def unsuited(claim: Claim) -> Unsuited | None:
        stays = claim.target.leaves_cpus_to_pytorch and not draft.host.gpus  # it is left out without a warning
        return claim.target.unsuited(draft.captured_node(claim)) if claim.node and not stays else None

    draft = replace(draft, claims=tuple(claim for claim in draft.claims if not consumed(claim)))
    return _leave(draft, unsuited, _stay)


def leave_expert_names(draft: PlanDraft) -> PlanDraft:
    """Leave out adapters with dropout on layers whose names PEFT interprets as those of experts. Raises (M096).

    PEFT adapts such a layer by its weight alone, where it has no dropout.
    """
    names = read_as_experts(str(draft.captured.model.config.model_type))
    adapting = [claim for claim in draft.claims if claim.target.adapts]
    if not names or not adapting or not dropout_of(adapting, draft.rules):
        return draft
    reason = "PEFT interprets their names as routed experts, and adapts them by their weights, without dropout"
    why = Unsuited("M096", reason, "keep their linear layers as they are", "such layers stay as they are")

    def named(claim: Claim) -> Unsuited | None:
        return why if claim.target.adapts == "linear" and claim.path.rpartition(".")[2] in names else None

    return _leave(draft, named, _stay)


def leave_to_pytorch(draft: PlanDraft) -> PlanDraft:
    """Leave out the kernels of routed experts that are chosen to be computed by PyTorch on their layer's device."""
    choices = draft.request.choices
    if choices is None or not choices.stock:
        return draft
    left = [
        claim
        for claim in draft.claims
        if claim.path in choices.stock and claim.target.required_device == "cpu" and not claim.target.stays_on_gpu
    ]
    kept = tuple(claim for claim in draft.claims if claim not in left)
    why = "its routed experts are on a GPU, where PyTorch computes them"
    return replace(draft, claims=kept, left={**draft.left, **{claim.site: why for claim in left}})


def leave_devices_to_pytorch(draft: PlanDraft) -> PlanDraft:
    """Leave out kernels of the CPU on layers that are on a GPU, and the reverse, where the rule says `auto`."""
    kept, left = list[Claim](), dict[str, str]()
    for claim in draft.claims:
        target, on_cpu = claim.target, device_of(claim.path, draft.devices) == "cpu"
        leaves = target.leaves_cpus_to_pytorch if on_cpu else target.leaves_gpus_to_pytorch
        stays = leaves and not on_cpu and target.multiplies_stored_on_gpus(draft.captured_node(claim))
        if leaves and not stays:
            left[claim.site] = _ON_CPU if on_cpu else ON_GPU
        else:
            kept.append(claim)
    rewritten = {claim.site for claim in kept}
    reasons = {site: why for site, why in left.items() if site not in rewritten}
    return replace(draft, claims=tuple(kept), left={**draft.left, **reasons})


def _leave(
    draft: PlanDraft, unsuited: Callable[[Claim], Unsuited | None], describe: Callable[[Unsuited, list[Claim]], str]
) -> PlanDraft:
    """Leave out the claims with a reason, or refuse them; `describe` returns the text of a warning."""
    kept, left = list[Claim](), dict[tuple[str, str, Unsuited], list[Claim]]()
    for claim in draft.claims:
        why = unsuited(claim)
        if why is None:
            kept.append(claim)
        else:
            left.setdefault((claim.rule, claim.target.name, why), []).append(claim)
    optional = draft.request.matches.optional
    if refused := [_refused(why, claims[0]) for (rule, _, why), claims in left.items() if rule not in optional]:
        raise InputRefused(*refused)
    warnings = {
        text: Diagnostic(why.code, text, claims[0].span, hint=f"see `ktc explain {why.code}`", severity="warning")
        for (_, _, why), claims in left.items()
        for text in (describe(why, claims),)
    }
    sites = {claim.site: why.reason for (_, _, why), claims in left.items() for claim in claims}
    return replace(draft, claims=tuple(kept), left={**draft.left, **sites}).with_warnings(*warnings.values())


def _refused(why: Unsuited, claim: Claim) -> Diagnostic:
    where = claim.path if why.code == "M093" else claim.site
    hint = f"narrow the rule, or write `expect >= 0`, and {why.remains}; see `ktc explain {why.code}`"
    return Diagnostic(why.code, f"`{claim.target.name}` on `{where}`: {why.reason}", claim.span, hint=hint)


def _stay(why: Unsuited, claims: list[Claim]) -> str:
    where = listing(dict.fromkeys(claim.site for claim in claims), _LISTED)
    return f"{where} {why.instead}, without `{claims[0].target.name}`: {why.reason}"


def _keeps_its_code(why: Unsuited, claims: list[Claim]) -> str:
    return f"{claims[0].site or claims[0].path} keeps its own code: {why.reason}"


def _places(captured: CapturedModel) -> dict[int, tuple[str, ...]]:
    """Return the names of each module that has several: the sites of a block, the attributes that hold a module."""
    names = defaultdict[int, list[str]](list)
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", captured.model.named_modules(remove_duplicate=False)))
    seen = set[tuple[int, str]]()
    for name, module in modules.items():
        parent, _, attribute = name.rpartition(".")
        place = id(modules[parent]), attribute  # one for all names of a parent that has several itself
        if name and place not in seen:
            seen.add(place)
            names[id(module)].append(name)
    for site in captured.sites:
        of_module = names[id(captured.model.get_submodule(site.fqn))]
        of_module += [site.fqn] * (site.fqn not in of_module)
    return {number: tuple(several) for number, several in names.items() if len(several) > 1}


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


# Rewrites that are another one at some layers ------------------------------------------------------------------------
def leave_first_layers(draft: PlanDraft) -> PlanDraft:
    """Replace the claims of layers where a target is another rewrite, as in the dense layers of sparse attention."""
    layers, devices = {site.fqn: site.layer for site in draft.captured.sites}, draft.devices
    kept, dense = list[Claim](), dict[str, list[Claim]]()
    for claim in draft.claims:
        target = claim.target
        if claim.node and target.varies_by_step:
            target = target.at_layer(layers[claim.site], draft.captured_node(claim), device_of(claim.path, devices))
        if target is not claim.target:
            dense.setdefault(claim.rule, []).append(claim)
        if target is not None:
            kept.append(replace(claim, target=target))
    return replace(draft, claims=tuple(kept)).with_reasons(*map(_dense, dense.values()))


def _dense(claims: list[Claim]) -> Reason:
    first = claims[0]
    why = f"stays dense (`dense_layers = {first.target.settings['dense_layers']}`): rule `{first.rule}` ({first.span})"
    return Reason(collapse([claim.site for claim in claims]), why)


def leave_uncoded_caches(draft: PlanDraft) -> PlanDraft:
    """Leave keys and values in the model's dtype where no kernel reads codes, with a warning (M087).

    The model's own code would decode all codes there in every step. Raises InputRefused (M087) for another kernel.
    """
    kept, left = list[Claim](), dict[tuple[str, str], list[Claim]]()
    for claim in draft.claims:
        target, reason = claim.target, ""
        if claim.node and target.int8_cache:
            if (kernel := target.settings["kernel"]) not in (FLASH_DECODE, AUTO):
                message = f"`{target.name}(kernel = {kernel}, kv = {INT8})`: no other kernel reads codes"
                raise InputRefused(Diagnostic("M087", message, claim.span, hint=f"write `kernel = {FLASH_DECODE}`"))
            reason = no_codes(draft.captured_node(claim).core)
        if reason:
            left.setdefault((claim.block, reason), []).append(claim)
        kept.append(replace(claim, target=target.without_codes) if reason else claim)
    warnings = [_with_numbers(reason, claims) for (_, reason), claims in left.items()]
    return replace(draft, claims=tuple(kept)).with_warnings(*warnings)


def _with_numbers(reason: str, claims: list[Claim]) -> Diagnostic:
    where = listing((claim.site for claim in claims), _LISTED)
    message = f"{where} keep keys and values in the model's dtype, without `kv = {INT8}`: {reason}"
    return Diagnostic("M087", message, claims[0].span, hint="see `ktc explain M087`", severity="warning")
