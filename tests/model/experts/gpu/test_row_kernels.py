"""What is beside grouped products, by Triton's kernels and by PyTorch: the same values, forward and backward.

Without a GPU, Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_layers import ISAS, error, spec_of
from lora_layers import DRAWN, adapt, trained, with_gradients
from stored_experts import stored_experts
from torch import Tensor

from ktc.diagnostics import HostLacks
from ktc.model.experts.backends.streamed_backend import compute
from ktc.model.experts.gpu import slots as slots_module
from ktc.model.experts.gpu.row_factors import GivenGradients, Inner, RunFactors
from ktc.model.experts.gpu.slots import Edges, Slots, sum_rows
from ktc.model.experts.host.saved_on_host import saved_in_place
from ktc.model.experts.products import chunk_products, grouped_products, row_check, row_steps
from ktc.model.experts.streamed.expert_stream import ExpertStream
from ktc.model.hf.gpu_router import has_kernel
from ktc.model.kernels.form import parse_form

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not has_kernel(torch.device("cpu")), reason="Triton is not installed"),
]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
TOKENS, EXPERTS, CHOICES, HIDDEN, INNER = 21, 5, 2, 40, 24
RANKS = 8, 24
# Tensor cores have no fp32. In bf16 PyTorch rounds LoRA's product before its sum, which may pass a kink.
DTYPE, BOUND = (torch.bfloat16, 1e-1) if torch.cuda.is_available() else (torch.float32, 1e-5)
FORMS = [
    "silu", "gelu", "gelu_tanh biased", "relu ungated", "relu2 ungated biased",
    "silu(alpha=1.702, limit=1.0, up_offset=1.0) biased interleaved", "silu(gate_cap=2.0, up_cap=1.5)",
]  # fmt: skip


def kernels() -> ModuleType:
    from ktc.model.experts.gpu import row_kernels

    return row_kernels


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def slots() -> Slots:
    """No token goes to expert 3."""
    index = torch.randint(0, EXPERTS - 1, (TOKENS, CHOICES), generator=torch.Generator().manual_seed(1))
    return Slots.of((index + (index > 2)).to(DEVICE), EXPERTS)


def factors(inputs: int, outputs: int, rank: int, *, drops: bool) -> RunFactors:
    a, b = drawn(EXPERTS, rank, inputs, seed=rank), drawn(EXPERTS, outputs, rank, seed=rank + 1) / rank
    size = TOKENS * CHOICES, -(-inputs // 8)
    bits = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.uint8)
    return RunFactors(a / inputs**0.5, b, bits if drops else None)


def compare(computed: Any, expected: Any) -> None:
    for one, other in zip(computed, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert error(one.float(), other.float()) <= BOUND


@pytest.mark.parametrize("drops", [False, True], ids=["whole", "dropout"])
def test_rows_and_their_narrow_values_are_those_of_pytorch(drops: bool) -> None:
    rows, x = slots().of_experts(range(EXPERTS)), drawn(TOKENS, HIDDEN)
    for rank in RANKS:
        of_rows = factors(HIDDEN, 2 * INNER, rank, drops=drops)
        copied, _ = computed = kernels().gathered(x, rows, of_rows)
        compare(computed, row_steps.gathered(x, rows, of_rows))
        assert torch.equal(copied, x[rows.tokens])
        by_b = factors(INNER, HIDDEN, rank, drops=drops)
        compare(kernels().gathered(x, rows, by_b, by_b=True), row_steps.gathered(x, rows, by_b, by_b=True))


@pytest.mark.parametrize("adapted", ["neither", "gate_up", "down", "both", "both, dropout"])
@pytest.mark.parametrize("name", FORMS)
def test_activations_and_every_gradient_are_those_of_pytorch(name: str, adapted: str) -> None:
    form, rows = parse_form(name), slots().of_experts(range(EXPERTS))
    width, size, drops = (2 if form.gated else 1) * INNER, len(rows.tokens), "dropout" in adapted
    first = factors(HIDDEN, width, RANKS[0], drops=drops) if adapted not in ("neither", "down") else None
    down = factors(INNER, HIDDEN, RANKS[1], drops=drops) if adapted not in ("neither", "gate_up") else None
    low = None if first is None else drawn(size, RANKS[0], seed=3)
    inner = Inner(drawn(size, width, seed=4), low, drawn(EXPERTS, width, seed=5).float() if form.biased else None)
    given = GivenGradients(
        drawn(size, INNER, seed=6), None if down is None else drawn(size, RANKS[1], seed=7),
        drawn(size, seed=8).float(),
    )  # fmt: skip
    for padding in (0, 24):
        compare(
            kernels().activated(form, inner, (first, down), rows, padding=padding),
            row_steps.activated(form, inner, (first, down), rows),
        )
        computed = kernels().activated_backward(form, inner, (first, down), rows, given, padding=padding)
        compare(computed, row_steps.activated_backward(form, inner, (first, down), rows, given))


def test_sums_of_rows_are_those_of_pytorch() -> None:
    from ktc.model.experts.gpu.sum_kernels import summed

    places, rows, weights = slots().places, drawn(30, HIDDEN), drawn(TOKENS, CHOICES).float()
    for of_rows in (None, weights):
        computed = summed(rows, places, of_rows, 7, torch.float32)
        assert error(computed, sum_rows(rows, places - 7, of_rows, torch.float32)) <= 1e-6


def test_gradients_of_factors_are_put_where_they_belong() -> None:
    rows = slots().of_experts(range(EXPERTS))
    for rank in RANKS:
        wide, narrow = drawn(TOKENS * CHOICES, HIDDEN + 8)[:, :HIDDEN], drawn(TOKENS * CHOICES, 24)[:, :rank]
        computed, expected = (torch.full((HIDDEN, rank - 1, EXPERTS), 9.0, device=DEVICE) for _ in range(2))
        for steps, target in ((kernels(), computed), (row_steps, expected)):
            steps.put_outer(target.permute(2, 1, 0), narrow, wide, rows, 0.5)
        compare([computed], [expected])
        assert not computed[..., 3].any()


def test_no_rows_are_no_launch() -> None:
    rows, form = (
        Slots.of(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), EXPERTS).of_experts(range(3)),
        parse_form("silu"),
    )
    first, down = factors(HIDDEN, 2 * INNER, 8, drops=False), factors(INNER, HIDDEN, 8, drops=False)
    x, low = kernels().gathered(drawn(0, HIDDEN), rows, first)
    h, _ = kernels().activated(form, Inner(drawn(0, 2 * INNER), low, None), (first, down), rows)
    assert (x.shape, low.shape, h.shape) == ((0, HIDDEN), (0, 8), (0, INNER))


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 1), (21, 2, 5), (300, 3, 128), (129, 1, 7)])
def test_pairs_are_sorted_as_by_pytorch(tokens: int, choices: int, experts: int) -> None:
    from ktc.model.experts.gpu.slot_kernels import sorted_pairs

    drawn = torch.randint(0, experts, (tokens, choices), generator=torch.Generator().manual_seed(3))
    wanted = Slots.of(drawn % max(1, experts - 1), experts)  # none for the last expert
    made = sorted_pairs(drawn.to(DEVICE) % max(1, experts - 1), experts)
    for name in ("tokens", "pairs", "experts", "places", "ends"):
        computed, expected = getattr(made, name).cpu(), getattr(wanted, name)
        assert computed.dtype == expected.dtype
        assert torch.equal(computed, expected), name
    assert tuple(made.edges.tolist()) == wanted.bounds


def test_places_are_int64_whatever_the_choice_is() -> None:
    from ktc.model.experts.gpu.slot_kernels import sorted_pairs

    index = torch.tensor([[1, 0], [0, 1]], device=DEVICE, dtype=torch.int32)
    assert sorted_pairs(index, 2).places.dtype == Slots.of(index.cpu(), 2).places.dtype == torch.int64


def test_pairs_whose_numbers_have_more_than_32_bits_are_sorted_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "sums_by_kernel", lambda device: True)
    sorts = functools.partial(slots_module.sorts_by_kernel, DEVICE)
    assert sorts(1 << 30, 128)
    assert not sorts(1 << 31, 8)
    assert not sorts(1 << 30, 256), "each block of pairs has a number for each expert"
    assert not sorts(0, 8)


def test_a_pair_of_an_expert_that_does_not_exist_has_no_slot() -> None:
    from ktc.model.experts.gpu.slot_kernels import sorted_pairs

    index = torch.tensor([[0, 2], [5, -1], [1, 2]], device=DEVICE)
    made = sorted_pairs(index, 3)
    assert made.edges.tolist() == [0, 1, 2, 4]
    with pytest.raises(IndexError):
        Edges(made.edges, index).bounds  # noqa: B018
    assert made.pairs[:4].tolist() == [0, 4, 1, 5]


def decoded(matrices: Any) -> Tensor:
    """Return matrices that a CPU has as numbers and a GPU as codes."""
    if isinstance(matrices, Tensor):
        return matrices
    from ktc.model.experts.gpu import coded_kernels

    return coded_kernels.decoded(matrices)


@pytest.mark.parametrize(
    ("dropout", "kept"), [(0.0, False), (0.5, False), (0.5, True)], ids=["whole", "dropout", "gate and up kept"]
)
def test_factors_beside_codes_give_the_products_of_both(
    dropout: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of decoded codes and of LoRA in one sum, with every gradient, are those of the reference."""
    least = 90 if dropout else 300  # one tile is enough for a mask, and without one there are several
    module, layer = stored_experts(spec_of(ISAS[0], codes=("int4", 32)), EXPERTS, TOKENS, least)
    packed = module.weights.packed
    assert packed is not None
    stream = ExpertStream(packed, module.form, DEVICE, 1 << 20, range(EXPERTS), resident=False)
    row_check.check_trained_rows(module.form, DEVICE)  # with PyTorch's steps, which nothing reads below
    chunks = [  # decoded at once, since a later chunk takes the same memory
        [decoded(getattr(matrices, name.removesuffix("_proj"))).double().cpu() for name in layer.stock]
        for _, matrices in stream.chunks(range(EXPERTS))
    ]
    stock = {name: torch.cat(of_chunks) for name, of_chunks in zip(layer.stock, zip(*chunks, strict=True), strict=True)}
    adapted = adapt(replace(layer, stock=stock), (3, 8), dropout=dropout)
    for name in ("products.packed_layout", "products.chunk_products"):
        monkeypatch.setattr(f"ktc.model.experts.{name}.multiplies_codes", lambda device: True)
    monkeypatch.setattr(grouped_products, "MOST_ROWS", 0)
    for name in ("activated", "activated_backward"):
        monkeypatch.setattr(row_steps, name, None)
    x, weights, lora = trained(adapted, torch.bfloat16, torch.float32)
    torch.manual_seed(DRAWN)
    counted: list[int] = []
    product = chunk_products.times_rows
    monkeypatch.setattr(chunk_products, "times_rows", lambda *given: counted.append(1) or product(*given))
    with saved_in_place(products=True) if kept else nullcontext():
        out = compute((stream,), x, layer.index, weights, lora.drawn()).cpu()
    before = len(counted)
    results = with_gradients(out, layer.grad, (x, weights, *lora.factors))
    for computed, expected in zip(results, adapted.reference(), strict=True):
        assert error(computed, expected) <= 4e-2  # Triton's interpreter cuts bf16 off
    assert len(counted) - before == (0 if kept else len(chunks))


def test_the_kernels_are_checked_before_the_first_use_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FORMS[-3:]:
        row_check._check.__wrapped__(parse_form(name), DEVICE, True)
    right = kernels().activated_backward

    def wrong(*given: Any) -> Any:
        made = right(*given)
        return made._replace(d_weights=2 * made.d_weights)

    monkeypatch.setattr(kernels(), "activated_backward", wrong)
    monkeypatch.setattr(row_check, "multiplies_codes", lambda device: True)
    row_check._check.cache_clear()  # of tests before this one, on a GPU
    row_check.check_rows(parse_form("silu"), DEVICE)
    with pytest.raises(HostLacks, match="H247"):
        row_check.check_trained_rows(parse_form("silu"), DEVICE)
    row_check._check.cache_clear()


def test_the_sort_is_checked_to_the_bit_wherever_its_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.model.experts.gpu import slot_kernels

    right = slot_kernels.sorted_pairs

    def wrong(index: Tensor, experts: int) -> Any:
        made = right(index, experts)
        pairs = made.pairs.clone()
        pairs[[200, 201]] = pairs[[201, 200]]  # behind the first block
        return made._replace(pairs=pairs)

    monkeypatch.setattr(row_check, "sums_by_kernel", lambda device: True)
    row_check._check_slots.cache_clear()
    row_check.check_rows(parse_form("silu"), DEVICE)
    row_check._check_slots.cache_clear()
    monkeypatch.setattr(slot_kernels, "sorted_pairs", wrong)
    with pytest.raises(HostLacks, match="pairs of sorted pairs"):
        row_check.check_rows(parse_form("silu"), DEVICE)
