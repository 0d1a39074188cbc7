"""The sparse kernel has the codes and the choices of the reference, bit for bit, and attention over the chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import ISAS, built, quick_or_slow
from torch import Tensor

from ktc.model.attention.decode import Chosen, DecodeAttention, KVCacheView
from ktc.model.attention.index_kernel import IndexKernel
from ktc.model.attention.key_codes import estimates, signs
from ktc.model.attention.key_index import KeyIndex
from ktc.model.attention.selection import attend_chosen, choose, visible_positions
from ktc.model.attention.sparsity import FORMATS, IndexFormat, Sparsity
from ktc.model.kernels.attention_spec import ISAS as ATTENTION_ISAS
from ktc.model.kernels.attention_spec import AttentionSpec
from ktc.model.linears.gemv import DTYPES

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = [
    AttentionSpec("sparse_attention", dtype, isa)
    for dtype, isas in ATTENTION_ISAS.items()
    for isa in isas
    if isa in ISAS
]
QUICK = (SPECS[0], SPECS[-1], *(spec for spec in SPECS if spec.isa == "avx2" and spec.dtype == "bf16"))
ERROR = {"bf16": 4e-3, "fp16": 6e-4, "fp32": 2e-6}
# Sequences, query heads, key heads, tokens, positions, widths of keys, of rotary keys and of values.
SHAPES = [
    (1, 8, 2, 1, 700, 32, 0, 32), (2, 6, 2, 3, 333, 33, 0, 17), (1, 16, 1, 1, 2500, 64, 16, 64),
    (2, 3, 3, 1, 90, 24, 0, 24), (1, 20, 1, 2, 501, 24, 8, 24),
]  # fmt: skip


@pytest.fixture(scope="module", params=[quick_or_slow(spec, spec in QUICK, id=spec.entry) for spec in SPECS])
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    return request.param


def kernels(spec: AttentionSpec, threads: int = 1) -> tuple[DecodeAttention, IndexKernel]:
    kernel = built((spec,)).kernel(spec.entry)
    return DecodeAttention(kernel, threads), IndexKernel(kernel, threads)


def drawn(spec: AttentionSpec, shape: tuple[int, ...]) -> tuple[Tensor, KVCacheView]:
    batch, heads, key_heads, tokens, positions, width, rope, value_width = shape
    draw = torch.Generator().manual_seed(0)
    sizes = (heads, tokens, width + rope), (key_heads, positions, width), (key_heads, positions, value_width)
    query, keys, values = (torch.randn(batch, *size, generator=draw).to(DTYPES[spec.dtype]) for size in sizes)
    more = torch.randn(batch, key_heads, positions, rope, generator=draw).to(DTYPES[spec.dtype]) if rope else None
    return query, KVCacheView(keys, keys if rope else values, more)


def indexed(
    heads: KVCacheView, index: IndexFormat, kernel: IndexKernel | None, steps: tuple[int, ...] = ()
) -> KeyIndex:
    batch, _, positions, _ = heads.keys.shape
    found = KeyIndex.of(heads, torch.ones(batch, positions, dtype=torch.bool), index)
    for length in (*steps, positions):
        (found.extend(heads, length) if kernel is None else kernel.extend(found, heads, length))
    return found


@pytest.mark.parametrize("index", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_those_of_the_reference(spec: AttentionSpec, shape: tuple[int, ...], index: IndexFormat) -> None:
    _, heads = drawn(spec, shape)
    wanted = indexed(heads, index, None)
    found = indexed(heads, index, kernels(spec, threads=3)[1], steps=(20, 21, 37))
    length = shape[4]
    assert torch.equal(found.mean, wanted.mean)
    assert torch.equal(found.codes.scales[:, :, :length], wanted.codes.scales[:, :, :length])
    whole = length // 16
    assert torch.equal(found.codes.blocks[:, :, :whole], wanted.codes.blocks[:, :, :whole])


@pytest.mark.parametrize("index", FORMATS)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choices_are_those_of_the_reference(
    spec: AttentionSpec, shape: tuple[int, ...], masked: bool, index: IndexFormat
) -> None:
    query, heads = drawn(spec, shape)
    batch, _, key_heads, tokens, positions, *_ = shape
    mask = None
    if masked:
        mask = torch.ones(batch, 1, tokens, positions, dtype=torch.bool).tril(positions - tokens)
        mask[-1, :, :, :13] = False
        mask &= torch.rand(mask.shape, generator=torch.Generator().manual_seed(5)) < 0.9
    kernel = kernels(spec)[1]
    found_in = indexed(heads, index, kernel)
    visible = visible_positions(mask, batch, tokens, positions, query.device)
    for k, sink, local, shared in ((12, 4, 9, False), (3, 0, 0, False), (12, 4, 9, True), (1, 0, 2, True)):
        sparsity = Sparsity(k, sink, local, index, shared)
        found = kernel.select(found_in, query, mask, sparsity, 0.2)
        scores = estimates(query, found_in.codes, index, positions, 0.2)
        assert_equal(found, choose(scores, key_heads, visible, sparsity))
        assert_equal(kernels(spec, threads=3)[1].select(found_in, query, mask, sparsity, 0.2), found)


def assert_equal(found: Chosen, wanted: Chosen) -> None:
    assert torch.equal(found.counts, wanted.counts)
    most = wanted.positions.shape[-1]
    within = torch.arange(most) < wanted.counts[..., None]
    assert torch.equal(found.positions[..., :most][within], wanted.positions[within])


@pytest.mark.parametrize("index", FORMATS)
def test_the_greatest_products_do_not_overflow(spec: AttentionSpec, index: IndexFormat) -> None:
    """One number in each power of two of the width rotates to equal magnitudes, so that all codes of such a query and
    of such keys are the greatest. Sums of 16 bits hold the products of 68 groups of 32 signs: these keys have 70."""
    width, positions = 2240, 40
    equal = torch.zeros(width)
    for begin, size in ((0, 2048), (2048, 128), (2176, 64)):
        equal[begin] = signs(width)[begin] * (size / 2048) ** 0.5
    query = equal * torch.tensor([1.0, -1.0, 1.0]).view(1, 3, 1, 1)
    keys = equal * (torch.linspace(1, 2, positions) * (-1) ** torch.arange(positions)).view(1, 1, positions, 1)
    heads = KVCacheView(keys.to(DTYPES[spec.dtype]), torch.zeros(1, 1, positions, 16, dtype=DTYPES[spec.dtype]))
    query = query.to(DTYPES[spec.dtype])
    kernel = kernels(spec)[1]
    found_in = indexed(heads, index, kernel)
    visible = visible_positions(None, 1, 1, positions, query.device)
    for k in (3, 20):
        sparsity = Sparsity(k, 0, 0, index, shared=False)
        scores = estimates(query, found_in.codes, index, positions, 0.2)
        assert_equal(kernel.select(found_in, query, None, sparsity, 0.2), choose(scores, 1, visible, sparsity))


def test_equal_scores_go_to_the_first_positions_and_hidden_ones_are_not_chosen(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (1, 2, 1, 1, 3000, 32, 0, 32))
    heads = KVCacheView(heads.keys[:, :, :1].expand(-1, -1, 3000, -1).contiguous(), heads.values)
    kernel = kernels(spec)[1]
    sparsity = Sparsity(50, 4, 8, "int4", shared=False)
    mask = torch.ones(1, 1, 1, 3000, dtype=torch.bool)
    mask[..., 10:2000] = False
    found = kernel.select(indexed(heads, "int4", kernel), query, mask, sparsity, 0.2)
    assert found.positions[0, 0, 0].tolist() == [*range(10), *range(2000, 2044), *range(2992, 3000)]
    mask[..., :2995] = False
    found = kernel.select(indexed(heads, "int4", kernel), query, mask, sparsity, 0.2)
    assert found.counts.unique().tolist() == [5]


def test_scores_of_a_wide_range_are_chosen_exactly(spec: AttentionSpec) -> None:
    """Scores of both signs over 40 powers of two: the k-th greatest one is found bit by bit."""
    query, heads = drawn(spec, (1, 4, 2, 1, 6000, 32, 0, 32))
    powers = torch.linspace(-14, 12 if spec.dtype == "fp16" else 26, 6000)
    powers = powers[torch.randperm(6000, generator=torch.Generator().manual_seed(6))]
    heads = KVCacheView((heads.keys.float() * powers.exp2()[:, None]).to(heads.keys.dtype), heads.values)
    kernel = kernels(spec)[1]
    index = indexed(heads, "int4", kernel)
    visible = visible_positions(None, 1, 1, 6000, query.device)
    for k in (7, 90, 1500, 4500):
        sparsity = Sparsity(k, 4, 9, "int4", shared=False)
        found = kernel.select(index, query, None, sparsity, 0.2)
        assert_equal(found, choose(estimates(query, index.codes, "int4", 6000, 0.2), 2, visible, sparsity))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_attention_over_the_chosen_is_the_reference(spec: AttentionSpec, shape: tuple[int, ...], shared: bool) -> None:
    query, heads = drawn(spec, shape)
    decode, kernel = kernels(spec)
    chosen = kernel.select(indexed(heads, "int4", kernel), query, None, Sparsity(70, 4, 9, "int4", shared), 0.2)
    sinks = torch.linspace(-1, 1, shape[1])
    wide = KVCacheView(*(each if each is None else each.double() for each in heads))
    for sink in (None, sinks):
        wanted = attend_chosen(query.double(), wide, chosen, scale=0.2, sinks=sink)
        found = decode.of_chosen(query, heads, chosen, scale=0.2, sinks=sink)
        assert float((found.double() - wanted).norm() / wanted.norm()) <= ERROR[spec.dtype]
        assert torch.equal(kernels(spec, threads=3)[0].of_chosen(query, heads, chosen, scale=0.2, sinks=sink), found)
    nothing = replace(chosen, counts=torch.zeros_like(chosen.counts))
    assert not decode.of_chosen(query, heads, nothing, scale=0.2).any(), "a token that sees nothing is zero"


def test_dense_attention_has_the_bits_of_the_dense_kernel(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, SHAPES[0])
    dense = AttentionSpec("attention", spec.dtype, spec.isa)
    wanted = DecodeAttention(built((dense,)).kernel(dense.entry), 1)(query, heads, scale=0.2)
    assert torch.equal(kernels(spec)[0](query, heads, scale=0.2), wanted)


def test_an_invalid_key_is_chosen(spec: AttentionSpec) -> None:
    query, heads = drawn(spec, (1, 2, 1, 1, 3000, 32, 0, 32))
    heads.keys[0, 0, 1500, 3] = torch.nan
    kernel = kernels(spec)[1]
    visible = torch.ones(1, 3000, dtype=torch.bool)
    visible[0, 1500] = False
    for shared in (False, True):
        index = KeyIndex.of(heads, visible, "int4")
        kernel.extend(index, heads, 3000)
        found = kernel.select(index, query, None, Sparsity(5, 4, 8, "int4", shared), 0.2)
        assert bool((found.positions == 1500).any(-1).all())
