"""The test of every built attention kernel against attention in fp64, before its first use.

In: one kernel and its spec. Refused (H225): a kernel whose output differs by more than the rounding of its dtype, or by
one bit between one thread and three; a sparse one also with other codes or choices than the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention, KVCacheView
from ktc.model.attention.index_kernel import IndexKernel
from ktc.model.attention.int8_decode import Int8DecodeAttention, quantised
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.key_codes import estimates
from ktc.model.attention.key_index import KeyIndex
from ktc.model.attention.selection import attend_chosen, choose, visible_positions
from ktc.model.attention.sparsity import FORMATS, Sparsity
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.linears.gemv import DTYPES
from ktc.stages.codegen.self_test_linear import TOLERANCE
from ktc.stages.codegen.wrong_kernel import relative_error, wrong_output

_INT8_TOLERANCE: Final = 2e-4  # of queries and weights as words
# Sequences, query heads, key heads, tokens, positions, widths of keys, of rotary keys and of values.
_SHAPES: Final = (
    (2, 6, 2, 3, 70, 40, 0, 24),
    (1, 5, 1, 1, 300, 64, 20, 64),
    (1, 17, 1, 1, 150, 64, 32, 64),  # whole tiles of many rows
)


def self_test_attention(kernel: Kernel, spec: AttentionSpec) -> None:
    """Raise `KtcError` (H225) if the kernel does not compute causal attention."""
    for query, heads, scale in _drawn(spec):
        _compare(spec, [DecodeAttention(kernel, threads)(query, heads, scale=scale) for threads in (1, 3)],
                 _attention(query, heads, scale))  # fmt: skip


def self_test_int8_attention(kernel: Kernel, spec: AttentionSpec) -> None:
    """Raise `KtcError` (H225) if the kernel has other codes than the reference, or computes no attention over them."""
    for query, heads, scale in _drawn(spec):
        coded = [quantised(kernel, tensor) for tensor in heads if tensor is not None]
        for ours, expected in zip(
            coded, (Int8Tensor.of(tensor) for tensor in heads if tensor is not None), strict=True
        ):
            if not torch.equal(ours.codes, expected.codes) or not torch.equal(ours.scales, expected.scales):
                raise wrong_output(spec, "has other codes of keys and values")
        cache, decoded = KVCacheView(*coded), KVCacheView(*(tensor.codes.double() * tensor.scales for tensor in coded))
        _compare(spec, [Int8DecodeAttention(kernel, threads)(query, cache, scale=scale) for threads in (1, 3)],
                 _attention(query, decoded, scale))  # fmt: skip


def _drawn(spec: AttentionSpec) -> Iterator[tuple[Tensor, KVCacheView, float]]:
    """Yield queries, caches and scales of the shapes."""
    draw = torch.Generator().manual_seed(22)
    for batch, heads, key_heads, tokens, positions, width, rope, value_width in _SHAPES:
        query = torch.randn(batch, heads, tokens, width + rope, generator=draw).to(DTYPES[spec.dtype])
        keys = torch.randn(batch, key_heads, positions, width, generator=draw).to(DTYPES[spec.dtype])
        more = torch.randn(batch, key_heads, positions, rope, generator=draw).to(DTYPES[spec.dtype])
        values = torch.randn(batch, key_heads, positions, value_width, generator=draw).to(DTYPES[spec.dtype])
        yield query, KVCacheView(keys, values, more if rope else None), 0.2


def _compare(spec: AttentionSpec, outputs: list[Tensor], expected: Tensor) -> None:
    """Raise `KtcError` (H225) unless the outputs of one thread and of three are the expected one."""
    error, most = relative_error(outputs[0], expected), TOLERANCE[spec.dtype]
    if spec.op == "int8_attention":
        most = max(most, _INT8_TOLERANCE)
    if not error <= most:
        raise wrong_output(spec, f"differs from the reference by {error:.1e}, allowed are {most:.0e}")
    if not torch.equal(*outputs):
        raise wrong_output(spec, "has other bits with three threads")


def self_test_sparse_attention(kernel: Kernel, spec: AttentionSpec) -> None:
    """Raise `KtcError` (H225) if the kernel is not attention over all positions, or over chosen ones."""
    self_test_attention(kernel, spec)
    draw = torch.Generator().manual_seed(23)
    dtype = DTYPES[spec.dtype]
    query = torch.randn(2, 6, 2, 40, generator=draw).to(dtype)
    heads = KVCacheView(*(torch.randn(2, 2, 300, 40, generator=draw).to(dtype) for _ in range(2)))
    every = torch.ones(2, 300, dtype=torch.bool)
    for index in FORMATS:
        wanted, ours = (KeyIndex.of(heads, every, index) for _ in range(2))
        wanted.extend(heads, 300)
        native = IndexKernel(kernel, 3)
        native.extend(ours, heads, 300)
        if not torch.equal(ours.codes.blocks[:, :, :18], wanted.codes.blocks[:, :, :18]):
            raise wrong_output(spec, f"has other codes of keys in {index}")
        sparsity = Sparsity(70, 4, 9, index, shared=False)
        chosen = choose(
            estimates(query, wanted.codes, index, 300, 0.2),
            2,
            visible_positions(None, 2, 2, 300, query.device),
            sparsity,
        )
        selected = native.select(ours, query, None, sparsity, 0.2)
        if not torch.equal(selected.positions, chosen.positions):
            raise wrong_output(spec, f"chooses other positions by {index}")
        output = DecodeAttention(kernel, 3).of_chosen(query, heads, selected, scale=0.2)
        wide = KVCacheView(heads.keys.double(), heads.values.double())
        expected = attend_chosen(query.double(), wide, chosen, scale=0.2)
        error = relative_error(output, expected)
        if not error <= TOLERANCE[spec.dtype]:
            raise wrong_output(spec, f"over chosen positions differs from the reference by {error:.1e}")


def _attention(query: Tensor, heads: KVCacheView, scale: float) -> Tensor:
    """(B, H, T, k + r) and a cache -> (B, T, H, v) in fp64."""
    keys = heads.keys if heads.rope_keys is None else torch.cat([heads.keys, heads.rope_keys], -1)
    values = heads.values
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, 1) for tensor in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * scale
    new, positions = scores.shape[-2:]
    seen = torch.ones(new, positions, dtype=torch.bool).tril(positions - new)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(1, 2)
