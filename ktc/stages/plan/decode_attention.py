"""Choosing a decode attention kernel: a claim with `kernel = flash_decode`, the model's dtype, its device, the host.

Its cache holds numbers of the model's dtype, or int8 codes (`kv = int8`). Where the model's own code would decode all
codes in every step, keys and values keep their dtype, with a warning (M087). Refused (M077): a layer on another device
than the CPU, or a dtype that the kernel does not compute in; (M087): `kv = int8` without the kernel that reads codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.foundation.host import Host
from ktc.model.graph import ops
from ktc.model.graph.latent import is_latent, latent_operands
from ktc.model.graph.typed import nodes_by_name
from ktc.model.kernels.attention_spec import AttentionSpec, Int8AttentionSpec, attention_isa
from ktc.model.kernels.linear_spec import ISAS
from ktc.model.targets import FusedAttention, MlaAbsorbed
from ktc.model.targets.settings import FLASH_DECODE, INT8
from ktc.model.targets.target import NodeAction, Target
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.linears import DTYPES
from ktc.stages.plan.types import BlockRewrite, Claim

_LISTED = 3  # modules of one warning
_SCALE = 4  # bytes, of each position and head


def choose_attention(claim: Claim, dtype: torch.dtype, device: str, host: Host) -> AttentionSpec | Int8AttentionSpec:
    """Return the kernel of a claim. Raise InputRefused (M077)."""
    why = ""
    if device != "cpu":
        why = f"the layer is on {device}, and `{FLASH_DECODE}` runs on the CPU"
    elif dtype not in DTYPES:
        why = f"the model is {str(dtype).removeprefix('torch.')}, which `{FLASH_DECODE}` does not compute in"
    if why:
        message = f"`{FLASH_DECODE}` of `{claim.target.name}` on `{claim.path}`: {why}"
        raise InputRefused(Diagnostic("M077", message, claim.span, hint="write `sdpa` instead, or narrow the rule"))
    if holds_codes(claim.target):
        return Int8AttentionSpec("int8_attention", DTYPES[dtype], next(isa for isa in ISAS if isa in host.isas))
    return AttentionSpec("attention", DTYPES[dtype], attention_isa(DTYPES[dtype], host))


def holds_codes(target: Target) -> bool:
    """Return whether a target requests a cache of int8 codes."""
    return isinstance(target, (FusedAttention, MlaAbsorbed)) and target.kv == INT8


def with_int8_caches(
    captured: CapturedModel, claims: Sequence[Claim]
) -> tuple[tuple[Claim, ...], tuple[Diagnostic, ...]]:
    """Return the claims that are carried out, and the warnings about others. Raises InputRefused (M087)."""
    kept: list[Claim] = []
    left: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        target = claim.target
        if not claim.node or not isinstance(target, (FusedAttention, MlaAbsorbed)) or target.kv != INT8:
            kept.append(claim)
            continue
        if target.kernel != FLASH_DECODE:
            message = f"`{target.name}(kernel = {target.kernel}, kv = {INT8})`: no other kernel reads codes"
            raise InputRefused(Diagnostic("M087", message, claim.span, hint=f"write `kernel = {FLASH_DECODE}`"))
        reason = _reason(_node(captured, claim.block, claim.node))
        if reason:
            left.setdefault((claim.block, reason), []).append(claim)
            claim = replace(claim, target=replace(target, kv="auto"))
        kept.append(claim)
    return tuple(kept), tuple(_left(reason, held) for (_, reason), held in left.items())


def _reason(core: fx.Node) -> str:
    """Return why a layer keeps its keys and values as they are, "" if they become codes."""
    options = ops.attributes(core)
    used = [words for name, words in (("softcap", "soft cap"), ("bias", "position bias")) if options[name]]
    if used:
        return f"its scores have a {used[0]}, so the model's own code computes them"
    return f"its window keeps {options['window']:,} positions" if int(options["window"]) >= 0 else ""


def _left(reason: str, claims: Sequence[Claim]) -> Diagnostic:
    where = listing((claim.site for claim in claims), _LISTED)
    message = f"{where} keep keys and values in the model's dtype, without `kv = {INT8}`: {reason}"
    return Diagnostic("M087", message, claims[0].span, hint="see `ktc explain M087`", severity="warning")


def _node(captured: CapturedModel, block: str, name: str) -> fx.Node:
    graph = captured.block(block).graph
    assert graph is not None, "a claim on a node has a graph"
    return nodes_by_name(graph)[name]


def coded_caches(captured: CapturedModel, rewrites: Sequence[BlockRewrite]) -> CapturedModel:
    """Return the model with the bytes of codes and scales in those of its caches."""
    cache, coded = captured.cache, dict[int, int]()
    for rewrite in rewrites:
        for action in rewrite.actions:
            if holds_codes(action.target):
                size = _bytes(captured, rewrite.block, action)[0]
                coded |= dict.fromkeys((site.layer for site in rewrite.sites), size)
    if cache is None or not coded:
        return captured
    layers = (replace(each, per_token=coded.get(at, each.per_token)) for at, each in enumerate(cache))
    return replace(captured, cache=tuple(layers))


def told_codes(captured: CapturedModel, block: str, action: NodeAction) -> str:
    """Return in words what the cache of a layer holds; nothing for the model's dtype."""
    if not holds_codes(action.target):
        return ""
    codes, numbers = _bytes(captured, block, action)
    return f"; keys and values as int8 codes, {codes:,} bytes per position instead of {numbers:,}"


def _bytes(captured: CapturedModel, block: str, action: NodeAction) -> tuple[int, int]:
    """Return the bytes of one position, as codes and in the model's dtype."""
    core = _node(captured, block, action.node)
    if is_latent(core):
        found = latent_operands(core)
        heads, widths = 1, (found.rank, found.rope)
    else:
        key, value = (ops.shape_of(core.args[at]) for at in (1, 2))
        heads, widths = int(key[1]), (int(key[-1]), int(value[-1]))
    return heads * (sum(widths) + 2 * _SCALE), heads * sum(widths) * captured.model.dtype.itemsize
