"""The decode kernel over int8 codes: attention over the decoded cache, for any sizes, masks, sinks and strides."""

from __future__ import annotations

import pytest
import torch
from attention_reference import INT8_QUICK, INT8_SPECS, SHAPES, error, reference
from kernel_layers import built, quick_or_slow
from torch import Tensor

from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.int8_decode import Int8DecodeAttention, quantised
from ktc.model.attention.int8_tensor import Int8Tensor, quantise
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.linears.gemv import DTYPES

pytestmark = pytest.mark.usefixtures("one_thread")
ERROR = {"bf16": 3e-3, "fp16": 5e-4, "fp32": 2e-4}


@pytest.fixture(scope="module", params=[quick_or_slow(spec, spec in INT8_QUICK, id=spec.entry) for spec in INT8_SPECS])
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    return request.param


def decoder(spec: AttentionSpec, threads: int = 1) -> Int8DecodeAttention:
    return Int8DecodeAttention(built(INT8_QUICK if spec in INT8_QUICK else (spec,)).kernel(spec.entry), threads)


def drawn(spec: AttentionSpec, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, KVCacheView, KVCacheView]:
    """A query, the cache as codes, and what the codes stand for in fp64."""
    batch, heads, key_heads, tokens, positions, width, rope, value_width = shape
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, tokens, width + rope, generator=draw).to(DTYPES[spec.dtype])
    sizes = (width, value_width, rope) if rope else (width, value_width)
    coded = KVCacheView(*(
        Int8Tensor.of(torch.randn(batch, key_heads, positions, size, generator=draw).to(DTYPES[spec.dtype]))
        for size in sizes
    ))  # fmt: skip
    return query, coded, decoded(coded)


def decoded(heads: KVCacheView) -> KVCacheView:
    return KVCacheView(*(each.codes.double() * each.scales for each in heads if isinstance(each, Int8Tensor)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_is_that_of_fp64_and_of_any_number_of_threads(spec: AttentionSpec, shape: tuple[int, ...]) -> None:
    query, heads, numbers = drawn(spec, shape)
    found = decoder(spec)(query, heads, scale=0.3)
    assert error(found, reference(query, numbers, 0.3)) <= ERROR[spec.dtype]
    assert torch.equal(decoder(spec, threads=3)(query, heads, scale=0.3), found)


def test_values_may_be_the_codes_of_the_keys(spec: AttentionSpec) -> None:
    query, heads, numbers = drawn(spec, (2, 10, 1, 2, 140, 72, 24, 72))
    heads, numbers = heads._replace(values=heads.keys), numbers._replace(values=numbers.keys)
    found = decoder(spec)(query, heads, scale=0.3)
    assert error(found, reference(query, numbers, 0.3)) <= ERROR[spec.dtype]


def test_masks_sinks_and_strides(spec: AttentionSpec) -> None:
    query, heads, _ = drawn(spec, (3, 4, 2, 2, 170, 32, 0, 40))
    heads = KVCacheView(*(each[:, :, 11:161] for each in heads if each is not None))
    numbers = decoded(heads)
    mask = torch.rand(3, 1, 2, 150, generator=torch.Generator().manual_seed(4)) < 0.3
    mask[1, :, 1] = False
    mask[2, :, :, :140] = False  # left padding, whole stretches of it
    found = decoder(spec)(query, heads, scale=0.3, mask=mask)
    assert error(found, reference(query, numbers, 0.3, mask)) <= ERROR[spec.dtype]
    assert not found[1, 1].any()
    sinks = torch.tensor([0.0, 3.0, -3.0, 9.0])
    found = decoder(spec)(query, heads, scale=0.3, sinks=sinks)
    assert error(found, reference(query, numbers, 0.3, sinks=sinks)) <= ERROR[spec.dtype]


def test_rows_and_scales_that_do_not_adjoin(spec: AttentionSpec) -> None:
    """Codes are columns of wider rows, and scales every third of theirs, as no cache of today has them."""
    query, heads, numbers = drawn(spec, (2, 4, 2, 1, 150, 40, 24, 40))
    apart = []
    for each in heads:
        assert isinstance(each, Int8Tensor)
        codes = torch.full((*each.codes.shape[:-1], 100), 99, dtype=torch.int8)[..., 9 : 9 + each.codes.shape[-1]]
        scales = torch.full((*each.scales.shape[:-1], 3), torch.nan)[..., 1:2]
        apart.append(Int8Tensor(codes.copy_(each.codes), scales.copy_(each.scales), each.dtype))
    found = decoder(spec)(query, KVCacheView(*apart), scale=0.3)
    assert error(found, reference(query, numbers, 0.3)) <= ERROR[spec.dtype]
    assert torch.equal(found, decoder(spec)(query, heads, scale=0.3))


def test_weights_of_any_range_count(spec: AttentionSpec) -> None:
    """One weight is large beside a long tail, and values have scales of a wide range."""
    query, heads, _ = drawn(spec, (1, 2, 1, 1, 4000, 32, 0, 32))
    keys, values = heads.keys, heads.values
    assert isinstance(keys, Int8Tensor)
    assert isinstance(values, Int8Tensor)
    keys.scales[:, :, 100] *= 6
    values.scales.mul_(torch.logspace(-4, 2, 4000)[:, None])
    found = decoder(spec)(query, heads, scale=0.1)
    assert error(found, reference(query, decoded(heads), 0.1)) <= ERROR[spec.dtype]


def test_scores_of_any_size_have_a_finite_result(spec: AttentionSpec) -> None:
    query, heads, numbers = drawn(spec, (1, 2, 1, 1, 200, 32, 0, 32))
    for scale in (300.0, 1e10, -1e10):
        found = decoder(spec)(query, heads, scale=scale)
        assert error(found, reference(query, numbers, scale)) <= 3 * ERROR[spec.dtype]


def test_a_nan_in_the_cache_is_seen(spec: AttentionSpec) -> None:
    query, heads, _ = drawn(spec, (1, 2, 2, 1, 100, 32, 0, 32))
    for side in range(2):
        numbers = torch.zeros(1, 2, 100, 32)
        numbers[0, side, 50, 3] = torch.nan
        held = heads._replace(**{("keys", "values")[side]: Int8Tensor.of(numbers.to(query.dtype))})
        found = decoder(spec)(query, held, scale=0.3)
        assert bool(found[0, 0, side].isnan().all())
        assert bool(found[0, 0, 1 - side].isfinite().all())


def test_codes_are_those_of_the_reference(spec: AttentionSpec) -> None:
    draw = torch.Generator().manual_seed(6)
    numbers = torch.randn(2, 3, 7, 37, generator=draw) * torch.logspace(-30, 30, 7)[:, None]
    numbers[0, 0, 0], numbers[0, 0, 1], numbers[1, 2, 3, 5] = 0, torch.inf, torch.nan
    numbers = numbers.to(DTYPES[spec.dtype]).transpose(1, 2)
    found = quantised(decoder(spec).kernel, numbers)
    codes, scales = quantise(numbers)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scales.nan_to_num(-1), scales.nan_to_num(-1))


def test_only_codes_are_taken(spec: AttentionSpec) -> None:
    query, heads, _ = drawn(spec, (1, 2, 2, 1, 8, 16, 0, 16))
    decode = decoder(spec)
    assert not decode.serves(query, heads, None), "gradients"
    with torch.no_grad():
        assert decode.serves(query, heads, None)
        assert not decode.serves(query, heads._replace(keys=heads.keys.clone().to(query.dtype) + 0), None), "numbers"
        assert not decode.serves(query, heads, torch.zeros(1, 1, 1, 8)), "a mask that is added"
        assert not decode.serves(query.expand(1, 2, 64, 16), heads, None), "many tokens"
