"""The positions that sparse attention chooses: how much weight they hold, needles, and attention over all of them."""

from __future__ import annotations

import pytest
import torch
from long_contexts import Context, long_context
from torch import Tensor

from ktc.model.attention.decode import Heads
from ktc.model.attention.key_codes import Codes, encode, estimates, mean_of, rotated, unpacked
from ktc.model.attention.selection import attend_chosen, choose, visible_positions
from ktc.model.attention.sparsity import FORMATS, IndexFormat, Sparsity, block_bytes, token_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, WIDTH, QUERIES, K = 8192, 128, 48, 512  # 6 % of the positions, as 2,048 of 32,768


def chosen_mass(context: Context, sparsity: Sparsity, *, exact: bool = False) -> tuple[float, float]:
    """The mean weight on the chosen positions, and the share of needles among them."""
    keys, queries = context.keys[None, None], context.queries[None, None]
    length, count = len(context.keys), len(context.queries)
    codes = encode(keys, mean_of(keys), sparsity.index)
    scores = queries @ keys.transpose(2, 3) * context.scale
    if not exact:
        scores = estimates(queries, codes, sparsity.index, length, context.scale)
    visible = torch.ones(1, count, length, dtype=torch.bool)
    at = choose(scores, 1, visible, sparsity).positions[0, :, 0].long()
    hits = 1.0 if context.needles is None else float((at == context.needles[:, None]).any(-1).float().mean())
    return float(context.weights.gather(-1, at).sum(-1).mean()), hits


@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
@pytest.mark.parametrize(("index", "lost"), [("int4", 0.01), ("sign", 0.2)])
def test_the_chosen_positions_hold_almost_the_weight_of_the_best(rope: bool, index: IndexFormat, lost: float) -> None:
    context = long_context("mass", rope, positions=LENGTH, width=WIDTH, queries=QUERIES)
    sparsity = Sparsity(K, 64, 256, index, shared=False)
    best, _ = chosen_mass(context, sparsity, exact=True)
    found, _ = chosen_mass(context, sparsity)
    assert best - lost <= found <= best
    assert best > 0.8


@pytest.mark.parametrize("rope", [False, True], ids=["", "rope"])
@pytest.mark.parametrize("index", FORMATS)
def test_needles_are_found(rope: bool, index: IndexFormat) -> None:
    context = long_context("needle", rope, positions=LENGTH, width=WIDTH, queries=QUERIES)
    assert float(context.weights[torch.arange(QUERIES), context.needles].min()) > 0.9, "dense attention finds them"
    _, hits = chosen_mass(context, Sparsity(K, 64, 256, index, shared=False))
    assert hits == 1.0


def test_keys_of_latents_and_rotary_parts_have_one_scale() -> None:
    """Latent attention: a normed latent, and a rotary key of another size beside it."""
    context = long_context("mass", False, positions=4096, width=WIDTH, queries=16)
    beside = long_context("mass", True, positions=4096, width=64, queries=16, seed=1)
    keys = torch.cat([context.keys, 3 * beside.keys], -1)
    both = Context(keys, torch.cat([context.queries, beside.queries / 3], -1), context.scale)
    best, _ = chosen_mass(both, Sparsity(256, 64, 256, "int4", shared=False), exact=True)
    found, _ = chosen_mass(both, Sparsity(256, 64, 256, "int4", shared=False))
    assert best - 0.02 <= found


def test_a_rotation_keeps_products_and_spreads_outlying_channels() -> None:
    draw = torch.Generator().manual_seed(1)
    for width in (1, 33, 96, 128, 576):
        x, y = torch.randn(2, 5, width, generator=draw)
        assert torch.allclose(rotated(x) @ rotated(y).T, x @ y.T, atol=1e-4)
    spike = torch.zeros(128)
    spike[5] = 1
    assert float(rotated(spike).abs().max()) == pytest.approx(128**-0.5)


@pytest.mark.parametrize("index", FORMATS)
@pytest.mark.parametrize("width", [24, 33, 128])
def test_codes_are_packed_and_unpacked(index: IndexFormat, width: int) -> None:
    keys = torch.randn(2, 3, 45, width, generator=torch.Generator().manual_seed(2))
    codes = encode(keys, torch.zeros(2, 3, width), index)
    assert codes.blocks.shape == (2, 3, 3, block_bytes(index, width))
    numbers = rotated(keys)
    found = unpacked(codes, index, width)[:, :, :45].float() * codes.scales[:, :, :45, None].float()
    largest = numbers.abs().amax(-1, keepdim=True)
    assert bool(((found - numbers).abs() <= largest * (0.5 / 7 + 1e-3)).all()) or index == "sign"
    assert bool((found.sign() == torch.where(numbers < 0, -1.0, 1.0)).all()) or index == "int4"
    assert (token_bytes("int4", 128), token_bytes("sign", 128)) == (66, 18)
    assert (token_bytes("int4", 576), token_bytes("sign", 576)) == (290, 74)


def test_zero_and_invalid_keys_have_codes() -> None:
    keys = torch.zeros(1, 1, 3, 32)
    keys[0, 0, 1, 4] = torch.nan
    for index in FORMATS:
        codes = encode(keys, torch.zeros(1, 1, 32), index)
        assert codes.scales[0, 0, :3].isnan().tolist() == [False, True, False]
        scores = estimates(torch.ones(1, 1, 1, 32), codes, index, 3, 1.0)
        visible = torch.ones(1, 1, 3, dtype=torch.bool)
        found = choose(scores, 1, visible, Sparsity(1, 0, 0, index, shared=False))
        assert found.positions.flatten().tolist() == [1], "a NaN in the cache is seen"


def reference(query: Tensor, heads: Heads, visible: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // heads.keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in heads[:2])
    scores = (query @ keys.transpose(2, 3) * scale).masked_fill(~visible[:, None], -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_with_all_positions_it_is_dense_attention(shared: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    query = torch.randn(2, 6, 3, 16, generator=draw, dtype=torch.float64)
    heads = Heads(*(torch.randn(2, 2, 50, 16, generator=draw, dtype=torch.float64) for _ in range(2)))
    mask = torch.ones(2, 1, 3, 50, dtype=torch.bool).tril(47)
    mask[1, :, :, :7] = False
    visible = visible_positions(mask, 2, 3, 50, query.device)
    codes = encode(heads.keys, mean_of(heads.keys), "int4")
    sparsity = Sparsity(50, 4, 8, "int4", shared)
    chosen = choose(estimates(query, codes, "int4", 50, 0.3), 2, visible, sparsity)
    found = attend_chosen(query, heads, chosen, scale=0.3)
    assert torch.allclose(found, reference(query, heads, visible, 0.3), atol=1e-12)
    assert torch.equal(visible_positions(None, 2, 3, 50, query.device), torch.ones(2, 3, 50).bool().tril(47))


def test_first_and_last_visible_positions_are_always_read_and_ties_go_to_the_first() -> None:
    visible = torch.ones(1, 2, 40, dtype=torch.bool).tril(38)
    visible[:, :, :5] = False  # padding
    found = choose(torch.zeros(1, 2, 2, 40), 1, visible, Sparsity(3, 2, 4, "int4", shared=False))
    assert found.positions[0, 0, 0].tolist() == [5, 6, 7, 8, 9, 35, 36, 37, 38]
    assert found.positions[0, 1, 1].tolist() == [5, 6, 7, 8, 9, 36, 37, 38, 39]
    assert found.counts.unique().tolist() == [9]


def test_bytes_of_a_step_are_counted() -> None:
    """The table of the design: 32 query and 8 key heads of 128, and latents of 512 + 64, with 131,072 positions."""
    each = Sparsity(2048, 0, 0, "int4", shared=True)
    found = each.traffic(131_072, 1, 1, 512, 128)
    assert (found.index, found.gathered, found.dense) == (131_072 * 66, 2048 * 512, 131_072 * 512)
    assert found.ratio == pytest.approx(6.9, abs=0.05)
    assert each.traffic(2048, 1, 1, 512, 128).ratio == 1.0
    keys = torch.zeros(1, 1, 64, 128)
    codes = encode(keys, mean_of(keys), "int4")
    assert isinstance(codes, Codes)
    assert codes.blocks.nbytes + codes.scales.nbytes == 64 * token_bytes("int4", 128)
