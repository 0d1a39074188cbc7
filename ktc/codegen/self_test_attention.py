"""The test of every built attention kernel against attention in fp64, before its first use.

In: one kernel and its spec. Refused (H225): a kernel whose output differs by more than the rounding of its dtype, or by
one bit between one thread and three.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ktc.attention.decode import DecodeAttention, Heads
from ktc.codegen.self_test_linear import TOLERANCE, norm
from ktc.diagnostics import Diagnostic, KtcError
from ktc.experts.kernel_library import Kernel
from ktc.linears.gemv import DTYPES
from ktc.plan.attention_spec import AttentionSpec

# Sequences, query heads, key heads, tokens, positions, widths of keys, of rotary keys and of values.
_SHAPES: Final = ((2, 6, 2, 3, 70, 40, 0, 24), (1, 5, 1, 1, 300, 64, 20, 64))


def self_test_attention(kernel: Kernel, spec: AttentionSpec) -> None:
    """Raise `KtcError` (H225) if the kernel does not compute causal attention."""
    draw = torch.Generator().manual_seed(22)
    for batch, heads, key_heads, tokens, positions, width, rope, value_width in _SHAPES:
        query = torch.randn(batch, heads, tokens, width + rope, generator=draw).to(DTYPES[spec.dtype])
        keys = torch.randn(batch, key_heads, positions, width, generator=draw).to(DTYPES[spec.dtype])
        more = torch.randn(batch, key_heads, positions, rope, generator=draw).to(DTYPES[spec.dtype])
        values = torch.randn(batch, key_heads, positions, value_width, generator=draw).to(DTYPES[spec.dtype])
        heads = Heads(keys, values, more if rope else None)
        found = [DecodeAttention(kernel, threads)(query, heads, scale=0.2) for threads in (1, 3)]
        expected = _attention(query, torch.cat([keys, more], -1), values, 0.2)
        error = norm(found[0].double() - expected) / norm(expected)
        if not error <= TOLERANCE[spec.dtype]:
            raise _wrong(spec, f"differs from the reference by {error:.1e}, allowed are {TOLERANCE[spec.dtype]:.0e}")
        if not torch.equal(*found):
            raise _wrong(spec, "has other bits with three threads")


def _attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """(B, H, T, k), (B, K, L, k), (B, K, L, v) -> (B, T, H, v) in fp64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * scale
    new, positions = scores.shape[-2:]
    seen = torch.ones(new, positions, dtype=torch.bool).tril(positions - new)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(1, 2)


def _wrong(spec: AttentionSpec, what: str) -> KtcError:
    message = f"the built kernel `{spec.entry}` is wrong: its output {what}"
    return KtcError(Diagnostic("H225", message, hint="try another compiler with `CXX`"))
