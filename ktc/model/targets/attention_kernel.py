"""Attention of few new tokens over a cache: its kernel, and the int8 codes that its cache may hold.

In: a node, the dtype, its device, the host. Out: the spec. The cache holds numbers of the model's dtype, or int8
codes (`kv = int8`). `kernel = auto` leaves a layer to `sdpa` where `flash_decode` does not run. Refused (M077) for
`flash_decode`: a layer on another device than the CPU, or a dtype that the kernel does not compute in.
"""

from __future__ import annotations

from torch import fx

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.attention.interface import unknown_function
from ktc.model.graph import ops
from ktc.model.graph.latent import is_latent, latent_operands
from ktc.model.kernels.attention_spec import AttentionSpec, attention_isa
from ktc.model.kernels.linear_spec import ISAS
from ktc.model.targets.linear_kernel import DTYPES
from ktc.model.targets.node_plan import CapturedNode, NodePlan
from ktc.model.targets.settings import AUTO, FLASH_DECODE
from ktc.model.targets.target import Unsuited

_SCALE = 4  # bytes, of each position and head


def unknown_core(seen: CapturedNode) -> Unsuited | None:
    """Return why the core keeps its own code (M092): the model computes it by a function that ktc does not know."""
    reason = unknown_function(seen.stock)
    remedies = "keep the model's own attention", "the model's own attention stays"
    return Unsuited("M092", reason, *remedies) if reason else None


def choose_attention(plan: NodePlan, seen: CapturedNode) -> AttentionSpec | None:
    """Return the kernel of a node, None if `sdpa` computes it. Raise InputRefused (M077)."""
    wanted, why = plan.target.settings["kernel"], ""
    unsuited = plan.device != "cpu" or seen.dtype not in DTYPES
    if wanted not in (FLASH_DECODE, AUTO) or (wanted == AUTO and unsuited and not plan.target.int8_cache):
        return None
    if plan.device != "cpu":
        why = f"the layer is on {plan.device}, and `{FLASH_DECODE}` runs on the CPU"
    elif seen.dtype not in DTYPES:
        why = f"the model is {str(seen.dtype).removeprefix('torch.')}, which `{FLASH_DECODE}` does not compute in"
    if why:
        message = f"`{FLASH_DECODE}` of `{plan.target.name}` on `{plan.claim.path}`: {why}"
        span = plan.claim.span
        raise InputRefused(Diagnostic("M077", message, span, hint="write `sdpa` instead, or narrow the rule"))
    dtype, host = DTYPES[seen.dtype], seen.host
    if plan.target.int8_cache:
        return AttentionSpec("int8_attention", dtype, next(isa for isa in ISAS if isa in host.isas))
    return AttentionSpec("attention", dtype, attention_isa(dtype, host))


def no_codes(core: fx.Node) -> str:
    """Return why a layer keeps its keys and values in the model's dtype, "" if they become codes."""
    options = ops.attributes(core)
    used = [words for name, words in (("softcap", "soft cap"), ("bias", "position bias")) if options[name]]
    if used:
        return f"its scores have a {used[0]}, so the model's own code computes them"
    return f"its window keeps {options['window']:,} positions" if int(options["window"]) >= 0 else ""


def code_bytes(seen: CapturedNode) -> int:
    """Return the bytes of one position as codes with their scales."""
    heads, width = _cached_row(seen.core)
    return heads * (width + 2 * _SCALE)


def explained_codes(seen: CapturedNode) -> str:
    """Return in words what the cache of a layer holds."""
    heads, width = _cached_row(seen.core)
    numbers = heads * width * seen.dtype.itemsize
    return f"; keys and values as int8 codes, {code_bytes(seen):,} bytes per position instead of {numbers:,}"


def _cached_row(core: fx.Node) -> tuple[int, int]:
    """Return the heads of keys, and the numbers of a key and a value together."""
    if is_latent(core):
        operands = latent_operands(core)
        return 1, operands.rank + operands.rope
    key, value = (ops.shape_of(core.args[at]) for at in (1, 2))
    return int(key[1]), int(key[-1]) + int(value[-1])
