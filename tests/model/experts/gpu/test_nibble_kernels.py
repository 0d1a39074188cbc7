"""Codes of four bits become the operands of tensor cores; on a GPU, products are those of the plain kernels.

The instructions that decode a word are run here by Python, since no GPU is needed for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from ktc.foundation.formats import FORMATS, Blocks, WeightFormat
from ktc.model.experts.gpu import kept_kernels, nibble_kernels
from ktc.model.experts.gpu.address_kernels import Places
from ktc.model.experts.layouts.coded_matrices import CodedMatrices
from ktc.model.experts.layouts.panels import panels_of
from ktc.model.experts.products.coded_check import random_matrices
from ktc.model.experts.references.reference import activated
from ktc.model.kernels.form import ExpertsForm, parse_form

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
FORMS = ("silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved", "silu", "relu2 ungated")
WORDS = cast(
    "list[int]", torch.randint(-(1 << 31), 1 << 31, (500,), generator=torch.Generator().manual_seed(0)).tolist()
)
ALL_BITS = (1 << 32) - 1


def half_of(bits: int) -> float:
    return float(torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double())


def bits_of(value: float) -> int:
    return int(torch.tensor([value]).bfloat16().view(torch.int16).int()) & 0xFFFF


def operands(code: str, word: int) -> list[int]:
    """Run the instructions of a word, and return the four registers that are multiplied."""
    values = {"$4": word & ALL_BITS}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for name, operation, given in re.findall(r"^(\w+)\.([\w.]+) (.+);$", code, re.MULTILINE):
        to, *names = (part.strip() for part in given.split(","))
        if name == "mov":
            values[to] = value(names[0])
        elif name == "shl":
            values[to] = value(names[0]) << int(names[1]) & ALL_BITS
        elif name == "shr":
            values[to] = value(names[0]) >> int(names[1])
        elif name == "and":
            values[to] = value(names[0]) & value(names[1])
        elif name == "lop3":
            a, b, c, table = map(value, names)
            values[to] = 0
            for row in (row for row in range(8) if table >> row & 1):
                values[to] |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c) & ALL_BITS
        elif (name, operation) == ("fma", "rn.bf16x2"):
            parts = [[half_of(value(of) >> by & 0xFFFF) for of in names] for by in (0, 16)]
            lower, upper = (bits_of(one * other + more) for one, other, more in parts)
            values[to] = lower | upper << 16
        else:
            assert name == "mma", f"`{name}` is not run here"
    return [values[f"a{pair}"] for pair in range(4)]


@pytest.mark.parametrize(("code", "stored", "scale"), [("_E2M1", "mxfp4", 2.0**127), ("_SIGNED4", "q4_0", 1.0)])
def test_a_word_becomes_pairs_of_columns_of_two_outputs(code: str, stored: WeightFormat, scale: float) -> None:
    text, row = getattr(nibble_kernels, code).value, FORMATS[stored]
    assert isinstance(row, Blocks)
    for word in WORDS:
        registers = operands(text, word)
        computed = [half_of(register >> by & 0xFFFF) * scale for register in registers for by in (0, 16)]
        codes = [word >> 4 * place & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)]
        assert computed == [row.numbers[of] for of in codes]


def test_only_codes_in_whole_spans_on_a_gpu_of_nvidia_are_served() -> None:
    matrices, _ = random_matrices(panels_of("mxfp4"), DEVICE)
    rows = torch.zeros(1, matrices.columns, dtype=torch.bfloat16, device=DEVICE)
    assert nibble_kernels.serves(rows, matrices) == (DEVICE.type == "cuda")
    assert not nibble_kernels.serves(rows, replace(matrices, columns=96))
    assert not nibble_kernels.serves(rows[:, 1:], matrices)
    assert not nibble_kernels.serves(rows, random_matrices(panels_of("q4_1"), DEVICE)[0])


def served_by_none(rows: Tensor, matrices: CodedMatrices) -> bool:
    return False


def plain(x: Tensor, places: Places, matrices: CodedMatrices, per_row: int, patch: pytest.MonkeyPatch) -> Tensor:
    with patch.context() as within:
        within.setattr(nibble_kernels, "serves", served_by_none)
        return kept_kernels.products(x, places, matrices, per_row=per_row)[0]


def error(computed: Tensor, wanted: Tensor) -> float:
    difference = computed.float() - wanted.float()
    return float(difference.square().sum() / wanted.float().square().sum()) ** 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stored", [("mxfp4", 0), ("q4_0", 0), ("int4", 32), ("int4", 64), ("int4", 128)])
@pytest.mark.parametrize("form", [parse_form(text) for text in FORMS], ids=str)
def test_tensor_cores_compute_what_the_plain_kernels_do(
    stored: tuple[WeightFormat, int], form: ExpertsForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices, _ = random_matrices(panels_of(*stored), DEVICE)
    parts = 2 if form.gated else 1
    rows = matrices.num_panels * 32 // parts - 3
    matrices = replace(matrices, rows=rows, parts=parts, interleaved=form.interleaved)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, matrices.columns, generator=generator).bfloat16().to(DEVICE)
    table = torch.tensor([of.data_ptr() for of in matrices.packed], device=DEVICE)
    chosen = torch.tensor([1, 0, 1, 1], device=DEVICE)
    by_number, by_address = Places(chosen, table), Places(table[chosen])
    wanted = plain(x, by_number, matrices, 2, monkeypatch)
    computed = kept_kernels.products(x, by_number, matrices, per_row=2)
    assert error(computed.sum(0), wanted) <= 1e-5
    assert torch.equal(computed, kept_kernels.products(x, by_address, matrices, per_row=2))
    h = kept_kernels.activations(x, by_number, matrices, form, per_row=2)
    assert error(h, activated(form, wanted)) <= 0.005


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", [parse_form(text) for text in FORMS], ids=str)
def test_tensor_cores_compute_the_parts_of_experts_that_the_plain_kernels_do(
    form: ExpertsForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices, decoded = random_matrices(panels_of("mxfp4"), DEVICE)
    x = torch.randn(3, matrices.columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    begin = torch.tensor([of.data_ptr() for of in matrices.packed], device=DEVICE)[torch.tensor([1, 0, 1])]
    places = Places(begin + torch.tensor([1, 0, 1], device=DEVICE), step=64)
    columns = kept_kernels.products(x, places, matrices).sum(0)
    assert error(columns, plain(x, places, matrices, 1, monkeypatch)) <= 1e-5
    assert error(columns[2], decoded[1, :, :64].float() @ x[2, :64].float()) <= 1e-5
    parts = 2 if form.gated else 1
    halves = replace(matrices, rows=64 // parts, parts=parts, interleaved=form.interleaved)
    places = places._replace(step=32 // parts)
    rows = kept_kernels.activations(x, places, halves, form, per_row=1)
    whole = kept_kernels.activations(x, Places(begin), halves, form, per_row=1)
    assert torch.equal(rows[1], whole[1]) and torch.equal(rows[:, : 32 // parts], whole[:, : 32 // parts])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_programs_that_share_the_columns_leave_their_sums_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = panels_of("mxfp4")
    matrices, _ = random_matrices(panels, DEVICE)
    spans = 2 * nibble_kernels.NUM_WARPS * 4
    packed = matrices.packed[:, : panels.nbytes(64)].repeat(1, spans * 2)
    matrices = replace(matrices, packed=packed, columns=spans * 64)
    x = torch.randn(1, matrices.columns, device=DEVICE).bfloat16()
    places = Places(torch.tensor([packed[1].data_ptr()], device=DEVICE))
    computed = kept_kernels.products(x, places, matrices)
    assert len(computed) == 2
    assert error(computed.sum(0), plain(x, places, matrices, 1, monkeypatch)) <= 1e-5


def test_choices_by_number_are_those_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nibble_kernels, "serves", served_by_none)
    matrices, _ = random_matrices(panels_of("mxfp4"), DEVICE)
    x = torch.randn(2, matrices.columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    table = torch.tensor([of.data_ptr() for of in matrices.packed], device=DEVICE)
    chosen, weights = torch.tensor([1, 0, 0, 1], device=DEVICE), torch.rand(2, 2, device=DEVICE)
    results = list[Sequence[Tensor]]()
    for places in (Places(chosen, table), Places(table[chosen])):
        rows = kept_kernels.products(x, places, matrices, per_row=2)
        results.append((rows, kept_kernels.sum_of_choices(rows, places, weights)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    in_parts = torch.stack((results[0][0][0] - 1, torch.ones_like(results[0][0][0])))
    summed = kept_kernels.sum_of_choices(in_parts, Places(chosen, table), weights, torch.bfloat16)
    assert summed.dtype == torch.bfloat16 and error(summed, results[0][1]) <= 0.01
