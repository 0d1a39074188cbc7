"""Sparse attention: whether `sparse_attention` fits what it claims, which layers stay dense, and what the plan says.

In: the claims, the matches, the captured model and the devices. Out: the claims that are carried out; those on the
first `dense_layers` layers are of the dense rewrite of the same attention, or go where it has no kernel. Refused
(M083): attention whose scores are more than products under a causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.foundation.host import Host
from ktc.model.attention.sparsity import Traffic
from ktc.model.graph import ops
from ktc.model.graph.latent import is_latent, latent_operands
from ktc.model.graph.typed import nodes_by_name
from ktc.model.hf.indexer import has_indexer, positions_of_indexer
from ktc.model.hf.latent_cache import caches_latents
from ktc.model.kernels.attention_spec import SparseAttentionSpec, attention_isa
from ktc.model.targets import MlaAbsorbed, SparseAttention
from ktc.model.targets.target import NodeAction
from ktc.stages.capture import CapturedModel
from ktc.stages.match import Matches
from ktc.stages.plan.linears import DTYPES
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import BlockRewrite, Claim

_SHOWN = (32_768, 131_072)  # positions for which the bytes of a step are reported
_MANY = 1 << 24  # beyond any budget
_LISTED = 3  # modules of one warning
_HINT = "narrow the rule, or write `expect >= 0`, and this attention stays dense; see `ktc explain M083`"


@dataclass(frozen=True, slots=True)
class SparseClaims:
    """The claims that are carried out, the warnings about others, and the claims on layers that stay dense."""

    claims: tuple[Claim, ...]
    warnings: tuple[Diagnostic, ...] = ()
    dense: tuple[tuple[Claim, ...], ...] = ()


def on_long_caches(
    captured: CapturedModel, claims: Sequence[Claim], matches: Matches, devices: Mapping[str, str]
) -> SparseClaims:
    """Return the claims without those that sparse attention cannot carry out. Raises InputRefused (M083)."""
    layers = {site.fqn: site.layer for site in captured.sites}
    kept: list[Claim] = []
    dense: dict[str, list[Claim]] = {}
    problems: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        target = claim.target
        if not isinstance(target, SparseAttention) or not claim.node:
            kept.append(claim)
            continue
        core = _node(captured, claim.block, claim.node)
        if ops.operator(core) != "sdpa":
            continue  # the up-projection of latents vanishes into the core
        if reason := _reason(captured, claim.site, core):
            problems.setdefault((claim.block, reason), []).append(claim)
        elif layers[claim.site] >= target.dense_layers:
            kept.append(claim)
        else:
            dense.setdefault(claim.rule, []).append(claim)
            kept += _dense(captured, claim, target, core, device_of(claim.path, devices))
    if refused := [_refused(reason, held[0]) for (_, reason), held in problems.items() if not _may_lack(held, matches)]:
        raise InputRefused(*refused)
    warnings = tuple(_left_alone(reason, held) for (_, reason), held in problems.items())
    return SparseClaims(tuple(kept), warnings, tuple(map(tuple, dense.values())))


def _may_lack(claims: Sequence[Claim], matches: Matches) -> bool:
    return claims[0].rule in matches.optional


def _refused(reason: str, claim: Claim) -> Diagnostic:
    return Diagnostic("M083", f"`{claim.target.name}` on `{claim.site}`: {reason}", claim.span, hint=_HINT)


def _left_alone(reason: str, claims: Sequence[Claim]) -> Diagnostic:
    where = listing((claim.site for claim in claims), _LISTED)
    message = f"{where} stay dense, without `{claims[0].target.name}`: {reason}"
    return Diagnostic("M083", message, claims[0].span, hint="see `ktc explain M083`", severity="warning")


def _dense(
    captured: CapturedModel, claim: Claim, target: SparseAttention, core: fx.Node, device: str
) -> list[Claim]:  # fmt: skip
    """Return the claim of a layer that stays dense; none where the model's own code computes all of its calls."""
    instead = target.dense(latent=is_latent(core))
    if device == "cpu" and captured.model.dtype in DTYPES:
        return [replace(claim, target=instead)]
    return [replace(claim, target=replace(instead, kernel="sdpa"))] if isinstance(instead, MlaAbsorbed) else []


def _reason(captured: CapturedModel, site: str, core: fx.Node) -> str:
    """Return why a core cannot be sparse, "" if it can."""
    stock, options = captured.model.get_submodule(site), ops.attributes(core)
    used = [words for name, words in (("softcap", "soft cap"), ("bias", "position bias")) if options[name]]
    if used:
        return f"its scores have a {used[0]}"
    if int(options["window"]) >= 0:
        return f"it has a sliding window of {options['window']} positions"
    if not is_latent(core):
        if caches_latents(type(stock)):
            return "its keys are expanded from latents; match it by `attn.mla`"
        if has_indexer(stock):
            return "an indexer of its own chooses what it reads, and it has no latents"
        if options["mask"]:
            return "the block computes with a mask of its own"
        return "" if options["causal"] else "it is not causal"
    if not caches_latents(type(stock)):
        return f"`{type(stock).__name__}` caches keys and values, and no latents"
    if options["mask"] and not positions_of_indexer(stock):
        return "the block computes with a mask of its own"
    if not options["causal"] and not options["mask"]:
        return "it is not causal"
    return latent_operands(core).reason


def _node(captured: CapturedModel, block: str, name: str) -> fx.Node:
    graph = captured.block(block).graph
    assert graph is not None, "a claim on a node has a graph"
    return nodes_by_name(graph)[name]


def choose_sparse(dtype: torch.dtype, device: str, host: Host) -> SparseAttentionSpec | None:
    """Return the kernel of sparse attention; None where PyTorch computes it."""
    if device != "cpu" or dtype not in DTYPES:
        return None
    return SparseAttentionSpec("sparse_attention", DTYPES[dtype], attention_isa(DTYPES[dtype], host))


def with_indices(captured: CapturedModel, rewrites: Sequence[BlockRewrite]) -> CapturedModel:
    """Return the model with the bytes of indices in those of its caches."""
    cache, more = captured.cache, dict[int, int]()
    for rewrite in rewrites:
        for action in rewrite.actions:
            if isinstance(action.target, SparseAttention):
                size = _index_bytes(captured, rewrite.block, action)
                more |= dict.fromkeys((site.layer for site in rewrite.sites), size)
    if cache is None or not more:
        return captured
    layers = (replace(each, per_token=each.per_token + more.get(at, 0)) for at, each in enumerate(cache))
    return replace(captured, cache=tuple(layers))


def _index_bytes(captured: CapturedModel, block: str, action: NodeAction) -> int:
    """Return the bytes of the index for one position of a sequence."""
    core = _node(captured, block, action.node)
    if positions_of_indexer(captured.model.get_submodule(_site(captured, block))):
        return 0
    return _traffic(captured, action, core, _MANY).index // _MANY


def told_sparse(captured: CapturedModel, block: str, action: NodeAction) -> str:
    """Return in words which positions an attention reads, and the bytes of a step."""
    target, core = action.target, _node(captured, block, action.node)
    assert isinstance(target, SparseAttention), "the reason of another rewrite"
    latent, by = is_latent(core), f"the {action.kernel.isa} kernel" if action.kernel else "PyTorch"
    how = "attention on the compressed cache" if latent else "attention"
    stock = captured.model.get_submodule(_site(captured, block))
    if chosen := positions_of_indexer(stock):
        return (
            f"{how}; few new tokens without gradients read the {chosen:,} positions that the model's own trained "
            f"indexer chooses and no others, by {by}"
        )
    who = "the query heads of a key head choose together" if target.sparsity(latent=latent).shared else (
        "each query head chooses"
    )  # fmt: skip
    counted = " and ".join(
        f"{_megabytes(traffic.index + traffic.gathered)} of {_megabytes(traffic.dense)} MB at {positions:,}"
        for positions in _SHOWN
        for traffic in (_traffic(captured, action, core, positions),)
    )
    return (
        f"{how}; few new tokens without gradients read {target.k:,} positions by an index of {target.index} codes, the "
        f"first {target.sink} and the last {target.local} ({who}), by {by}: {counted} positions; dense up to "
        f"{target.k + target.sink + target.local:,} positions, and for many new tokens"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


def _site(captured: CapturedModel, block: str) -> str:
    return next(site.fqn for site in captured.sites if site.block == block)


def _traffic(captured: CapturedModel, action: NodeAction, core: fx.Node, positions: int) -> Traffic:
    """Return the bytes of a step of one sequence."""
    target, element = action.target, captured.model.dtype.itemsize
    assert isinstance(target, SparseAttention), "the bytes of another rewrite"
    heads = int(ops.shape_of(core.args[0])[1])
    if is_latent(core):
        found = latent_operands(core)
        width = found.rank + found.rope
        return target.sparsity(latent=True).traffic(positions, heads, 1, width * element, width)
    key, value = (ops.shape_of(core.args[at]) for at in (1, 2))
    row_bytes = (int(key[-1]) + int(value[-1])) * element
    return target.sparsity(latent=False).traffic(positions, heads, int(key[1]), row_bytes, int(key[-1]))
