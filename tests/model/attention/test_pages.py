"""Decode attention over sequences of unequal lengths: in pages or padded, each is computed as it is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention_reference import INT8_QUICK, error, reference
from kernel_layers import ISAS, built, quick_or_slow
from paged_caches import padding_mask, paged_heads
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention, KVCacheView, table_of
from ktc.model.attention.int8_decode import decoder
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import PAGE, PagedTensor, PageTable, memory_of
from ktc.model.kernels.attention_spec import ISAS as ATTENTION_ISAS
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.linears.gemv import DTYPES

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS: Sequence[AttentionSpec] = [
    *(AttentionSpec("attention", dtype, isa) for dtype, isas in ATTENTION_ISAS.items() for isa in isas if isa in ISAS),
    *INT8_QUICK,
]
QUICK = (SPECS[0], *(spec for spec in SPECS if spec.isa == "avx2" and spec.dtype == "bf16"), *INT8_QUICK)
LENGTHS = [1, 700, 128, 129, 5]
# Query heads, key heads, widths of keys, of rotary keys and of values; values of None are the keys.
SHAPES = [(4, 2, 64, 0, 64), (20, 1, 64, 32, None), (6, 2, 33, 0, 17)]


@pytest.fixture(scope="module", params=[quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in SPECS])
def decode(request: pytest.FixtureRequest) -> DecodeAttention:
    spec = request.param
    coded = spec.op == "int8_attention"
    return decoder(built(INT8_QUICK if coded else (spec,)).kernel(spec.entry), 1, "int8" if coded else "", split=False)


def drawn(decode: DecodeAttention, shape: tuple[int, int, int, int, int | None]) -> tuple[Tensor, KVCacheView]:
    heads, key_heads, width, rope, value_width = shape
    draw = torch.Generator().manual_seed(1)
    dtype = DTYPES[decode.kernel.dtype]

    def cache(size: int) -> Tensor:
        numbers = torch.randn(len(LENGTHS), key_heads, max(LENGTHS), size, generator=draw).to(dtype)
        return Int8Tensor.of(numbers) if "int8" in decode.kernel.entry.lower() else numbers

    query = torch.randn(len(LENGTHS), heads, 1, width + rope, generator=draw).to(dtype)
    keys = cache(width)
    values = keys if value_width is None else cache(value_width)
    return query, KVCacheView(keys, values, cache(rope) if rope else None)


def only(heads: KVCacheView, row: int, length: int) -> KVCacheView:
    keys = heads.keys[row : row + 1, :, -length:]
    values = keys if heads.values is heads.keys else heads.values[row : row + 1, :, -length:]
    return KVCacheView(keys, values, None if heads.rope_keys is None else heads.rope_keys[row : row + 1, :, -length:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_in_pages_or_padded_has_the_bits_that_it_has_alone(
    decode: DecodeAttention, shape: tuple[int, int, int, int, int | None]
) -> None:
    query, heads = drawn(decode, shape)
    mask = padding_mask(LENGTHS, max(LENGTHS))
    sinks = torch.linspace(-2, 2, shape[0])
    in_pages = paged_heads(heads, LENGTHS)
    with torch.no_grad():
        assert decode.serves(query, in_pages, mask)
    for given in (None, mask):
        found = decode(query, in_pages, scale=0.2, mask=given, sinks=sinks)
        assert torch.equal(decode(query, heads, scale=0.2, mask=mask, sinks=sinks), found)
    for row, length in enumerate(LENGTHS):
        alone = only(heads, row, length)
        assert torch.equal(decode(query[row : row + 1], alone, scale=0.2, sinks=sinks), found[row : row + 1])


def test_windows_within_sequences_are_masks(decode: DecodeAttention) -> None:
    query, heads = drawn(decode, SHAPES[0])
    columns = torch.arange(max(LENGTHS))
    mask = padding_mask(LENGTHS, max(LENGTHS)) & (columns >= max(LENGTHS) - 40) & (columns % 7 != 3)
    found = decode(query, paged_heads(heads, LENGTHS), scale=0.2, mask=mask)
    assert error(found, decode(query, heads, scale=0.2, mask=mask)) <= 1e-2  # other stretches, and other roundings
    numbers = KVCacheView(*(
        each.codes.double() * each.scales if isinstance(each, Int8Tensor) else each.double()
        for each in (heads.keys, heads.values)
    ))  # fmt: skip
    assert error(found, reference(query, numbers, 0.2, mask)) <= 1e-2


@pytest.mark.parametrize("fault", ["-1", "100", "more than the values have", "0 tokens", "701 tokens", "more pages"])
def test_pages_and_lengths_that_do_not_exist_are_refused(decode: DecodeAttention, fault: str) -> None:
    query, heads = drawn(decode, SHAPES[0])
    in_pages = paged_heads(heads, LENGTHS)
    table = table_of(in_pages.keys)
    assert table is not None
    if fault == "more pages":  # than a table of fewer columns has
        table = PageTable(table.pages[:, :4].contiguous(), table.lengths)
        in_pages = in_pages._replace(**{
            name: of_pages(getattr(in_pages, name), lambda part: PagedTensor(part.memory, table, max(LENGTHS)))
            for name in ("keys", "values")
        })  # fmt: skip
    elif fault == "more than the values have":
        table.pages[1, 2] = count = memory_of(of_codes(in_pages.keys)).shape[0] - 1
        fewer = of_pages(in_pages.values, lambda part: PagedTensor(part.memory[:count], table, max(LENGTHS)))
        in_pages = in_pages._replace(values=fewer)
    elif fault.endswith("tokens"):
        table.lengths[3] = int(fault.split()[0])
    else:
        table.pages[1, 2] = int(fault)
    with pytest.raises(IndexError, match="length" if "tokens" in fault or fault == "more pages" else "page"):
        decode(query, in_pages, scale=0.2)


def of_codes(tensor: Tensor) -> Tensor:
    return tensor.codes if isinstance(tensor, Int8Tensor) else tensor


def of_pages(tensor: Tensor, change: Callable[[Any], Tensor]) -> Tensor:
    if isinstance(tensor, Int8Tensor):
        return Int8Tensor(change(tensor.codes), change(tensor.scales), tensor.dtype)
    return change(tensor)


def test_a_sequence_has_its_bits_beside_one_of_any_length() -> None:
    """A long one is cut into longer stretches: 64 at most."""
    spec = AttentionSpec("attention", "fp32", "scalar")
    decode = DecodeAttention(built((spec,)).kernel(spec.entry), 1)
    lengths, draw = [9000, 700], torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, 1, size, 8, generator=draw) for size in (1, 9000, 9000))
    heads = KVCacheView(keys, values)
    found = decode(query, heads, scale=0.3, mask=padding_mask(lengths, 9000))
    assert torch.equal(decode(query, paged_heads(heads, lengths), scale=0.3), found)
    for row, length in enumerate(lengths):
        assert torch.equal(decode(query[row : row + 1], only(heads, row, length), scale=0.3), found[row : row + 1])


def test_other_operations_read_sequences_aligned_at_their_last_position() -> None:
    lengths = [PAGE, 3, 2 * PAGE + 1]
    held = torch.randn(3, 2, max(lengths), 8)
    padded = held * padding_mask(lengths, max(lengths)).transpose(2, 3)
    tensor = paged_heads(KVCacheView(held, held), lengths).keys
    assert tensor.shape == held.shape
    assert torch.equal(tensor + 0, padded)
    assert torch.equal(tensor[1:, :, -4:], padded[1:, :, -4:])
    with pytest.raises(NotImplementedError, match="pages"):
        tensor.add_(1)
