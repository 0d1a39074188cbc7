"""A GPU's products with codes, compared with PyTorch's as a model is loaded, once for each format and device.

In: the panels of a format, and a device. Out: nothing. Refused (H247): products that are not those of decoded panels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.experts.layouts.coded_matrices import CodedMatrices, addressed_codes, are_coded
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.layouts.panel_codes import Cuts, PanelCodes, Scales, cuts_of
from ktc.model.experts.layouts.panels import WIDTH, DensePanels, Panels, by_output, cut
from ktc.model.experts.products.grouped_products import multiplies_codes
from ktc.model.experts.references import kept_split
from ktc.model.experts.references.kept_split import FIRST_UNIT_BIT, WHOLE_SHARE
from ktc.model.experts.references.reference import activated
from ktc.model.kernels.form import ExpertsForm

_EXPERTS, _PANELS, _SPANS, _ENDS = 2, 2, 2, (3, 70)
_LONGEST = 256  # columns of a span; a longer one is a whole row
_FEW, _SOME = 5, 15  # rows that are multiplied one by one, and in small tiles; all are in large ones
_BOUND: Final = 0.01  # of the relative error of products of bf16 numbers
_GATED: Final = ExpertsForm(biased=True)
_DTYPES: Final = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "zero": torch.float32,
    "sixes": torch.float16, "factors": torch.float16, "float8": torch.float32,
}  # fmt: skip


_FACTORS: Final[dict[Scales, int]] = {"sixes": 2 * WIDTH, "factors": WIDTH, "float8": WIDTH}
"""The numbers of a span whose factors follow them."""


def check_products(packed: PackedExperts, device: torch.device) -> None:
    """Compare products with the codes of experts, where a device multiplies them as they are. Raises HostLacks."""
    if are_coded(*packed.panels) and multiplies_codes(device):
        for panels in packed.panels:
            check_codes(panels, device)


@functools.cache
def check_codes(panels: Panels, device: torch.device) -> None:
    """Compare products with random codes, once for each format and device. Raises HostLacks (H247)."""
    from ktc.model.experts.gpu import coded_kernels

    matrices, decoded = random_matrices(panels, device)
    ends = torch.tensor(_ENDS, dtype=torch.int32, device=device)
    rows = torch.randn(_ENDS[-1], matrices.columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    of_first, of_second = rows[: _ENDS[0]].float(), rows[_ENDS[0] :].float()
    wanted = torch.cat([of_first @ decoded[0].float().T, of_second @ decoded[1].float().T])
    results = {
        "decoded weights": (coded_kernels.decoded(matrices), decoded),
        "products of one row": (coded_kernels.few_rows(rows[:_FEW], matrices, ends.clamp(max=_FEW)), wanted[:_FEW]),
        "products of some rows": (
            coded_kernels.some_rows(rows[:_SOME], matrices, ends.clamp(max=_SOME)),
            wanted[:_SOME],
        ),
        "products of many rows": (coded_kernels.some_rows(rows, matrices, ends), wanted),
    }
    for name, (computed, right) in results.items():
        require_equal(name, panels, computed, right)


@functools.cache
def check_addressed(panels: Panels, device: torch.device) -> None:
    """Compare what reads experts by their addresses, once for each format and device. Raises HostLacks (H247)."""
    from ktc.model.experts.gpu import kept_kernels
    from ktc.model.experts.gpu.address_kernels import Places

    matrices, decoded = random_matrices(panels, device)
    one, other = (of_expert.clone() for of_expert in matrices.packed)
    addresses = torch.tensor([other.data_ptr(), 0, one.data_ptr()], device=device)
    rows = torch.randn(3, matrices.columns, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    weights = torch.tensor([[0.5, 1, 2]], device=device)
    places = Places(addresses)
    computed = kept_kernels.sum_of_choices(kept_kernels.products(rows, places, matrices), places, weights)
    wanted = 0.5 * (decoded[1].float() @ rows[0].float()) + 2 * (decoded[0].float() @ rows[2].float())
    require_equal("products at addresses", panels, computed[0], wanted)
    cuts = cuts_of(matrices.columns, _codes(panels))
    if cuts.parts > 1:
        begun = Places(addresses + torch.tensor([1, 0, 1], device=device), step=cuts.step)
        computed = kept_kernels.sum_of_choices(kept_kernels.products(rows, begun, matrices), begun, weights)
        first, columns = decoded[..., : cuts.step].float(), rows[:, : cuts.step].float()
        wanted = 0.5 * (first[1] @ columns[0]) + 2 * (first[0] @ columns[2])
        require_equal("products of a part", panels, computed[0], wanted)
    _check_activations(panels, device)
    require_equal("choices", panels, _chosen(kept_kernels.split, device), _chosen(kept_split.split, device))


def _check_activations(panels: Panels, device: torch.device) -> None:
    """Compare activations of gate and up with biases, of experts in a table. Raises HostLacks (H247)."""
    from ktc.model.experts.gpu import kept_kernels
    from ktc.model.experts.gpu.address_kernels import Places

    matrices, decoded = random_matrices(panels, device)
    generator, half = torch.Generator().manual_seed(2), WIDTH // 2
    biases = torch.randn(_EXPERTS, _PANELS * WIDTH, generator=generator).to(device)
    packed = functional.pad(matrices.packed, (0, -matrices.packed.shape[1] % 16))
    one, other = (of_expert.clone() for of_expert in torch.cat([packed, biases.view(torch.uint8)], 1))
    halves = replace(matrices, rows=matrices.rows - _PANELS * half, parts=2)
    output = torch.arange(halves.rows, device=device)
    gate = output // half * WIDTH + output % half  # in a panel gate comes first
    lanes = torch.cat([gate, gate + half])
    table = torch.tensor([other.data_ptr(), 0, one.data_ptr()], device=device)
    rows = torch.randn(2, matrices.columns, generator=generator).bfloat16().to(device)
    places, begin = Places(torch.tensor([2, 0], device=device), table), packed.shape[1]
    computed = kept_kernels.activations(rows, places, halves, _GATED, per_row=1, bias_at=begin)
    products = torch.stack([decoded[number].float() @ row.float() for number, row in enumerate(rows)])
    wanted = activated(_GATED, (products + biases[:, : products.shape[1]])[:, lanes])
    require_equal("activations", panels, computed, wanted)
    begun = Places(table[places.experts] + torch.tensor([1, 0], device=device), step=half)  # of one row a panel
    computed = kept_kernels.activations(rows, begun, halves, _GATED, per_row=1, bias_at=begin)
    require_equal("activations of a part", panels, computed[0, :half], wanted[0, :half])
    require_equal("activations of the others", panels, computed[1], wanted[1])


def _chosen(split: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return all results of a split of three choices, of which one is kept and the bus reads one and a part."""
    table = torch.tensor([0, 96, 0, 0], device=device)
    share = torch.tensor([WHOLE_SHARE // 2, WHOLE_SHARE // 8, WHOLE_SHARE // 8], dtype=torch.int32, device=device)
    counts = torch.zeros(4, dtype=torch.int32, device=device)
    traffic = torch.zeros(3, dtype=torch.int64, device=device)
    results = split(torch.tensor([[3, 1, 0]], device=device), table, share, counts, traffic, (64, 32), Cuts(90, 32))
    values = torch.cat([of_split.flatten().long() for of_split in (*results, counts, traffic)])
    return torch.cat([values & 0xFFFF, values >> FIRST_UNIT_BIT])


def require_equal(name: str, panels: Panels, computed: Tensor, right: Tensor) -> None:
    """Raise HostLacks (H247) for results that are not those of decoded panels."""
    error = float(((computed.float() - right.float()).square().sum() / right.float().square().sum()).sqrt())
    if not error <= _BOUND:
        codes = _codes(panels).numbers
        message = f"{name} of codes {codes} are wrong on {right.device}: a relative error of {error:.2g}"
        hint = "use the tested versions of torch and Triton (constraints.txt), or keep these weights on the CPU"
        raise HostLacks(Diagnostic("H247", message, hint=hint))


def _codes(panels: Panels) -> PanelCodes:
    codes = addressed_codes(panels)
    assert codes is not None, "panels that a GPU multiplies"
    return codes


def random_matrices(panels: Panels, device: torch.device) -> tuple[CodedMatrices, Tensor]:
    """Return random matrices in codes, and decoded by PyTorch: (2, 59, columns)."""
    generator = torch.Generator().manual_seed(0)
    codes = _codes(panels)
    span = min(codes.span, _LONGEST)
    columns = _SPANS * span
    nbytes = _PANELS * panels.nbytes(columns)
    if isinstance(panels, DensePanels):
        packed = torch.randn(_EXPERTS, nbytes // 2, generator=generator).bfloat16().view(torch.uint8)
    else:
        packed = torch.randint(0, 256, (_EXPERTS, nbytes), generator=generator).to(torch.uint8)
        packed = packed.masked_fill(packed & 127 == 127, 1)  # NaN in E4M3
        spans = cut(packed, 1, _PANELS * (_SPANS if span == codes.span else 1), -1)
        spans[..., : codes.head] = _random_scales(codes, spans[..., : codes.head].shape, generator)
    matrices = CodedMatrices(packed.to(device), panels, 0, _PANELS, _PANELS * WIDTH - 5, columns)
    rows = by_output(panels.steps(cut(packed, 1, _PANELS, -1), columns), columns)
    return matrices, rows.flatten(1, 2)[:, : matrices.rows].contiguous().to(device)


def _random_scales(codes: PanelCodes, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return the bytes of scales near one."""
    if codes.scales == "power":
        return torch.randint(120, 130, shape, generator=generator).to(torch.uint8)
    dtype = _DTYPES[codes.scales]
    if codes.scales in _FACTORS:  # factors may be any bytes
        floats = torch.rand(*shape[:-1], _FACTORS[codes.scales], generator=generator).add(0.5).to(dtype)
        others = shape[-1] - floats.shape[-1] * dtype.itemsize
        factors = torch.randint(0, 256, (*shape[:-1], others), generator=generator).to(torch.uint8)
        return torch.cat([floats.view(torch.uint8), factors.masked_fill(factors & 127 == 127, 1)], -1)
    scales = torch.rand(*shape[:-1], shape[-1] // dtype.itemsize, generator=generator).add(0.5).to(dtype)
    if codes.scales == "zero":
        zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.int32)
        scales = scales.view(torch.int32) & ~255 | zeros
    return scales.view(torch.uint8)
