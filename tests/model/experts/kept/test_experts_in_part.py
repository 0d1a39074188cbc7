"""An expert of a decoding step that two engines compute: the first intermediate units on one, the others on another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import ISAS, Load, error, quick_or_slow, random_layer, spec_of
from stored_experts import in_blocks, stored_experts
from torch import Tensor

from ktc.model.experts.layouts.panel_codes import Cuts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.products.packed_layout import PackedLayout
from ktc.model.experts.references.kept_split import COMPUTED_ELSEWHERE, FIRST_UNIT_BIT
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec

pytestmark = pytest.mark.usefixtures("one_thread")
BOUND = 0.006
ROWS = (1, 2, 3, 5, 8, 13)
FORMATS = [spec_of(ISAS[0]), in_blocks("q4_0", "q8_0"), spec_of(ISAS[0], codes=("int4", 32)),
           spec_of(ISAS[0], "bf16", "silu biased", codes=("int4", 32)), spec_of(ISAS[0], codes=("fp8", 128)),
           in_blocks("q4_1", "mxfp4"), in_blocks("q4_k", "q6_k"), in_blocks("q5_k", "nvfp4"),
           in_blocks("uint4_g32", "uint4_g128"), in_blocks("q8_0", "fp16")]  # fmt: skip


def layout_of(module: FusedMoe) -> PackedLayout:
    packed = module.weights.packed
    assert packed is not None
    sizes = packed.sizes
    return PackedLayout(module.form, sizes.hidden, sizes.intermediate, *packed.panels, packed.weight_dtype)


def rest_of(module: FusedMoe, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what the kernel adds for choices that are left to it."""
    packed, out = module.weights.packed, torch.full_like(x, torch.nan)
    assert packed is not None
    call = packed.partial_call(x, index, weights, out)
    call.make()
    call.rethrow()
    return out


def wanted_of(module: FusedMoe, x: Tensor, index: Tensor, weights: Tensor, expert: int, first: int) -> Tensor:
    """Return the same by the decoded weights, without units before `first` of an expert and without its bias."""
    packed, layout = module.weights.packed, layout_of(module)
    assert packed is not None
    matrices = layout.read(packed.packed.view(module.num_experts, -1))
    down = matrices.down.double()  # pyright: ignore[reportAttributeAccessIssue]
    down[expert, :, :first] = 0
    stock = [matrices.gate_up.double(), down]  # pyright: ignore[reportAttributeAccessIssue]
    if module.form.biased:
        assert matrices.gate_up_bias is not None and matrices.down_bias is not None
        bias = matrices.down_bias.double()
        bias[expert] = 0
        stock += [matrices.gate_up_bias.double(), bias]
    weights = weights.double().masked_fill(index == COMPUTED_ELSEWHERE, 0)
    form = replace(module.form, transposed=False)
    return fused_moe_reference(x.double(), index.clamp(min=0), weights, stock, form)


def check_rest(module: FusedMoe, x: Tensor, first: int) -> None:
    """Compare calls of all numbers of rows in which expert 1 is computed from a unit on."""
    x = x.bfloat16()
    index = torch.tensor([[1, 0], [1, 2], [COMPUTED_ELSEWHERE, 1], [3, 1]])
    for rows in ROWS:
        chosen = index.repeat(4, 1)[:rows]
        weights = torch.rand(rows, 2, generator=torch.Generator().manual_seed(rows)) + 0.1
        given = x.repeat(-(-rows // len(x)), 1)[:rows].contiguous()
        wanted = wanted_of(module, given, chosen, weights, 1, first)
        marked = torch.where(chosen == 1, chosen + (first << FIRST_UNIT_BIT), chosen)
        assert error(rest_of(module, given, marked, weights), wanted) <= BOUND, f"{rows} rows from {first} on"


@pytest.mark.parametrize(
    "spec", [quick_or_slow(spec, number in (0, 1, 3)) for number, spec in enumerate(FORMATS)],
    ids=lambda spec: "-".join((*spec.formats, *(["biased"] if spec.biased else []))),
)  # fmt: skip
def test_the_kernel_computes_the_other_units_of_an_expert(spec: FusedMoeSpec) -> None:
    module, layer = stored_experts(spec, 4, tokens=4, intermediate=520)
    cuts = layout_of(module).cuts
    if cuts.parts == 1:  # no GPU multiplies these codes
        cuts = Cuts(layer.intermediate, 32)
    assert cuts.parts > 2
    for part in (1, cuts.parts // 2, cuts.parts - 1):
        check_rest(module, layer.x, part * cuts.step)


@pytest.mark.parametrize("isa", [quick_or_slow(isa, isa in ISAS[:1]) for isa in ISAS])
@pytest.mark.parametrize("form", ["silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved",
                                  "relu2 ungated"])  # fmt: skip
def test_every_form_and_instruction_set_computes_a_part(load: Load, isa: str, form: str) -> None:
    layer = random_layer(70, 101, 5, 2, 4, form=form)
    module = load(layer, spec_of(isa, form=form))  # pyright: ignore[reportArgumentType]
    for first in (32, 96):
        check_rest(module, layer.x, first)


def test_the_rest_of_an_expert_does_not_depend_on_the_threads(load: Load) -> None:
    layer = random_layer(70, 101, 5, 2, 4)
    results = list[Tensor]()
    for threads in (1, 2, 3):
        module = load(layer, spec_of(ISAS[0]), threads=threads)
        index = torch.tensor([[1 + (64 << FIRST_UNIT_BIT), 0], [2, 1 + (64 << FIRST_UNIT_BIT)]])
        results.append(rest_of(module, layer.x[:2].bfloat16(), index, torch.ones(2, 2)))
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("spec", [in_blocks("q4_0", "q8_0"), spec_of(ISAS[0])], ids=lambda spec: spec.formats[0])
def test_rows_that_are_not_finite_stay_so_in_a_part(spec: FusedMoeSpec) -> None:
    module, layer = stored_experts(spec, 4, tokens=4, intermediate=520)
    first = 64 << FIRST_UNIT_BIT
    x = layer.x[:2].bfloat16()
    x[0, 3] = torch.inf
    index, weights = torch.tensor([[1 + first, 0], [1 + first, 2]]), torch.ones(2, 2)
    wrong, right = rest_of(module, x, index, weights)
    assert not wrong.isfinite().any()
    assert error(right, wanted_of(module, x[1:], torch.tensor([[1, 2]]), weights[1:], 1, 64)[0]) <= BOUND


def test_units_that_the_kernel_does_not_begin_with_are_refused(load: Load) -> None:
    layer = random_layer(70, 101, 5, 2, 1)
    module = load(layer, spec_of(ISAS[0]))
    x, weights = layer.x.bfloat16(), torch.ones(1, 2)
    for first in (16, 128, -32):
        with pytest.raises((ValueError, IndexError)):
            rest_of(module, x, torch.tensor([[1 + (first << FIRST_UNIT_BIT), 0]]), weights)
    with pytest.raises(ValueError, match="one expert"):
        rest_of(module, x, torch.tensor([[1 + (32 << FIRST_UNIT_BIT), 2 + (32 << FIRST_UNIT_BIT)]]), weights)
    with pytest.raises(ValueError, match="does not say"):
        rest_of(module, x.repeat(2, 1), torch.tensor([[1 + (32 << FIRST_UNIT_BIT), 2], [1, 2]]), weights.repeat(2, 1))
    with pytest.raises(IndexError, match="expert"), torch.no_grad():
        module(x, torch.tensor([[1 + (32 << FIRST_UNIT_BIT), 0]]), weights)
    int8, layer = stored_experts(spec_of(ISAS[0], codes=("int8", 0)), 4)
    with pytest.raises(ValueError, match="from intermediate unit 32"):
        rest_of(int8, layer.x.bfloat16(), torch.tensor([[1 + (32 << FIRST_UNIT_BIT), 0]]), weights)
