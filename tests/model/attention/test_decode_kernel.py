"""The decode kernel is attention: any sizes, masks, sinks and strides, every instruction set and dtype."""

from __future__ import annotations

import pytest
import torch
from attention_reference import SHAPES, error, reference
from kernel_layers import ISAS, built, quick_or_slow
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention, Heads
from ktc.model.kernels.attention_spec import ISAS as ATTENTION_ISAS
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.linears.gemv import DTYPES

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = [
    AttentionSpec("attention", dtype, isa) for dtype, isas in ATTENTION_ISAS.items() for isa in isas if isa in ISAS
]
QUICK = (SPECS[0], SPECS[-1], *(spec for spec in SPECS if spec.isa == "avx2" and spec.dtype == "bf16"))
WIDE = [spec for spec in SPECS if spec.dtype != "fp16"]
FP32 = [spec for spec in SPECS if spec.dtype == "fp32"]
ERROR = {"bf16": 3e-3, "fp16": 5e-4, "fp32": 2e-6}


@pytest.fixture(scope="module", params=[quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in SPECS])
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    return request.param


def decoder(spec: AttentionSpec, threads: int = 1) -> DecodeAttention:
    return DecodeAttention(built((spec,)).kernel(spec.entry), threads)


def drawn(spec: AttentionSpec, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Heads]:
    batch, heads, key_heads, tokens, positions, width, rope, value_width = shape
    draw = torch.Generator().manual_seed(seed)
    sizes = (heads, tokens, width + rope), (key_heads, positions, width), (key_heads, positions, value_width)
    query, keys, values = (torch.randn(batch, *size, generator=draw).to(DTYPES[spec.dtype]) for size in sizes)
    more = torch.randn(batch, key_heads, positions, rope, generator=draw).to(DTYPES[spec.dtype]) if rope else None
    return query, Heads(keys, values, more)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_is_that_of_fp64_and_of_any_number_of_threads(spec: AttentionSpec, shape: tuple[int, ...]) -> None:
    query, heads = drawn(spec, shape)
    found = decoder(spec)(query, heads, scale=0.3)
    assert error(found, reference(query, heads, 0.3)) <= ERROR[spec.dtype]
    assert torch.equal(decoder(spec, threads=3)(query, heads, scale=0.3), found)


@pytest.mark.parametrize("positions", [133, 200])
def test_a_row_has_the_bits_that_it_has_alone(spec: AttentionSpec, positions: int) -> None:
    query, heads = drawn(spec, (1, 8, 1, 1, positions, 72, 0, 24))
    decode = decoder(spec)
    alone = torch.cat([decode(query[:, each : each + 1], heads, scale=0.3) for each in range(8)], dim=2)
    for rows in (8, 7, 3, 2):
        assert torch.equal(decode(query[:, :rows], heads, scale=0.3), alone[:, :, :rows])


@pytest.mark.parametrize("spec", [quick_or_slow(each, each in QUICK, id=each.entry) for each in FP32])
def test_products_above_the_range_of_fp32_are_finite_when_scaled(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (1, 2, 1, 1, 50, 32, 0, 32))
    query, heads = query * 1e19, heads._replace(keys=heads.keys * 1e20)
    assert error(decoder(spec)(query, heads, scale=2e-38), reference(query, heads, 2e-38)) <= 3 * ERROR["fp32"]


def test_masked_positions_are_not_seen_and_a_token_that_sees_none_is_zero(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (3, 4, 2, 2, 150, 32, 0, 32))
    mask = torch.rand(3, 1, 2, 150, generator=torch.Generator().manual_seed(4)) < 0.3
    mask[1, :, 1] = False
    mask[2, :, :, :140] = False  # left padding, whole stretches of it
    found = decoder(spec)(query, heads, scale=0.3, mask=mask)
    assert error(found, reference(query, heads, 0.3, mask)) <= ERROR[spec.dtype]
    assert not found[1, 1].any()
    wide = torch.cat([mask, mask], -1)[:1].expand(3, -1, -1, -1)  # of a static cache, shared by the sequences
    found = decoder(spec)(query, heads, scale=0.3, mask=wide)
    assert error(found, reference(query, heads, 0.3, mask[:1])) <= ERROR[spec.dtype]


def test_sinks_take_part_in_the_sum(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (2, 6, 2, 1, 90, 48, 0, 16))
    sinks = torch.tensor([0.0, 3.0, -3.0, 1.0, 9.0, -1e4])
    found = decoder(spec)(query, heads, scale=0.3, sinks=sinks)
    assert error(found, reference(query, heads, 0.3, sinks=sinks)) <= ERROR[spec.dtype]


def test_a_cache_is_read_where_it_is(spec: AttentionSpec) -> None:
    """A static cache is longer than what it holds, and some caches have positions before heads."""
    query, heads = drawn(spec, (2, 4, 2, 1, 80, 32, 0, 32))
    keys, values = (each.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :70] for each in heads[:2])
    found = decoder(spec)(query, Heads(keys, values), scale=0.3)
    assert error(found, reference(query, Heads(keys, values), 0.3)) <= ERROR[spec.dtype]


@pytest.mark.parametrize("scale", [300.0, 1e10, -1e10])
def test_scores_of_any_size_have_a_finite_result(spec: AttentionSpec, scale: float) -> None:
    query, heads = drawn(spec, (1, 2, 1, 1, 200, 32, 0, 32))
    found = decoder(spec)(query, heads, scale=scale)
    assert error(found, reference(query, heads, scale)) <= 3 * ERROR[spec.dtype]


@pytest.mark.parametrize("spec", [quick_or_slow(each, each in QUICK, id=each.entry) for each in WIDE])
def test_weights_count_down_to_69_nats_below_the_greatest(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (1, 1, 1, 1, 300, 32, 0, 32))
    for nats, size in ((60, 1e20), (80, 1e30)):
        keys, values = (torch.zeros_like(each) for each in heads[:2])
        small = (-nats * query.float() / query.float().square().sum()).to(query.dtype)
        keys[0, 0, :200], values[0, 0, 100] = small[0, 0, 0], size
        held = Heads(keys, values)
        found, wanted = decoder(spec)(query, held, scale=1.0), reference(query, held, 1.0)
        assert bool((found == 0).all()) if nats == 80 else error(found, wanted) <= 0.01


def test_weights_of_any_size_beside_the_greatest(spec: AttentionSpec) -> None:
    """From 1 to far below 2^-99, where a weight counts as zero, in every block and between blocks."""
    query, heads = drawn(spec, (1, 4, 2, 1, 1100, 32, 0, 32))
    ramp = torch.linspace(0, 200, 1100)[torch.randperm(1100, generator=torch.Generator().manual_seed(7))]
    keys = (query[:, ::2].float() / query[:, ::2].float().square().sum(-1, keepdim=True) * ramp[:, None]).to(
        query.dtype
    )
    for own in (keys, keys.sort(dim=2).values):
        held = heads._replace(keys=own.contiguous())
        found = decoder(spec)(query, held, scale=1.0)
        assert error(found, reference(query, held, 1.0)) <= ERROR[spec.dtype] + 5e-5  # of scores of 200 in fp32


def test_a_nan_in_the_cache_is_seen(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (1, 2, 2, 1, 100, 32, 0, 32))
    heads.keys[0, 1, 50, 3] = torch.nan
    found = decoder(spec)(query, heads, scale=0.3)
    assert bool(found[0, 0, 1].isnan().all())
    assert bool(found[0, 0, 0].isfinite().all())


def test_only_calls_that_it_computes_are_taken(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (1, 2, 2, 1, 8, 16, 0, 16))
    decode = decoder(spec)
    assert not decode.serves(query, heads, None), "gradients"
    with torch.no_grad():
        assert decode.serves(query, heads, None)
        assert decode.serves(query, heads, torch.ones(1, 1, 1, 8, dtype=torch.bool))
        assert not decode.serves(query, heads, torch.zeros(1, 1, 1, 8)), "a mask that is added"
        assert not decode.serves(query.double(), heads, None)
        assert not decode.serves(query.expand(1, 2, 64, 16), heads, None), "many tokens"
        assert not decode.serves(query, Heads(heads.keys.transpose(2, 3), heads.values), None), "strides"
