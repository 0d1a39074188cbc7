"""The test of every built kernel against the PyTorch reference, before its first use.

In: one kernel and its spec. Refused: a kernel whose output or gradients differ from the reference by more than the
rounding of its dtype. Also refused: a difference of one bit between one thread and two, or between kept and recomputed
activations. A dynamic dimension is tried at sizes that are not a multiple of a panel, unless the format of the weights
requires one. Quantised weights must equal their reference to the last bit; the reference output is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ktc.diagnostics import KtcError
from ktc.foundation.formats import FORMATS, Blocks, Codes, Dense
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.layouts.stock_layout import ExpertPart, StockTensor, canonical_parts, stock_names, stock_shape
from ktc.model.experts.references.block_reference import dequantise_blocks, quantise_blocks, random_blocks
from ktc.model.experts.references.quantised_reference import INT8_BACKWARD, INT8_FORWARD, dequantise, quantise
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.kernels.form import ExpertsForm, ExpertsSizes
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.packed_size import PANEL
from ktc.stages.codegen.wrong_kernel import relative_error, wrong

# Relative Frobenius error. bf16 rounds at 2^-9 and the sums of rounded products stay near 3e-3.
_TOLERANCE: Final = {"bf16": 1e-2, "fp32": 1e-5, "fp64": 1e-12}
_ODD_SIZES: Final = {"hidden": 70, "intermediate": 37, "num_experts": 5, "top_k": 2}
_TOKENS: Final = (1, 29)
# A kernel with constant sizes may have 256 experts of 90 MB: only a few are packed and used, the rest is never touched.
_MAX_EXPERTS: Final = 3
_RESULTS: Final = ("output", "d hidden states", "d routing weights")


def self_test(kernel: Kernel, spec: FusedMoeSpec) -> None:
    """Raise `KtcError` (H225) if the kernel does not compute what the reference computes, forward or backward."""
    sizes = {name: getattr(spec, name) or size for name, size in _odd_sizes(spec).items()}
    num_experts, hidden = sizes["num_experts"], sizes["hidden"]
    experts = PackedExperts(kernel, 1, ExpertsSizes(num_experts, hidden, sizes["intermediate"], sizes["top_k"]))
    generator = torch.Generator().manual_seed(20)
    used = sorted({0, sizes["num_experts"] // 2, sizes["num_experts"] - 1})[:_MAX_EXPERTS]
    form = ExpertsForm(spec.activation, spec.gated, spec.biased)
    stock: dict[StockTensor, Tensor] = {
        name: _random(form, name, len(used), sizes, generator).to(experts.dtype) for name in stock_names(form)
    }
    for name, tensor in stock.items():
        for place, expert in enumerate(used):
            for part, values in canonical_parts(form, name, tensor[place]):
                if part.endswith("_bias") or isinstance(FORMATS[spec.format_of(part)], Dense):
                    experts.load(expert, part, values)
                else:
                    values.copy_(_quantised(spec, experts, expert, part, values, generator))
    results: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for tokens in _TOKENS:
        x, grad = (torch.randn(tokens, sizes["hidden"], generator=generator).to(experts.dtype) for _ in range(2))
        place = torch.randint(len(used), (tokens, sizes["top_k"]), generator=generator)
        weights = torch.rand(tokens, sizes["top_k"], generator=generator).to(experts.weight_dtype)
        index = torch.tensor(used)[place]
        out, saved = experts.forward(x, index, weights, save=True)
        outputs = (out, *experts.backward(grad, (index, weights), saved=saved, x_TH=None)[:2])
        expected = _reference(spec, x, place, weights, tuple(stock.values()), grad, form)
        results.append((outputs, expected))
        two = experts.with_threads(2)
        again, saved = two.forward(x, index, weights, save=True)
        threaded = (again, *two.backward(grad, (index, weights), saved=saved, x_TH=None)[:2])
        _require_same_bits(spec, tokens, threaded, outputs, "two threads than with one")
        bare, _ = experts.forward(x, index, weights, save=False)
        recomputed = (bare, *experts.backward(grad, (index, weights), saved=None, x_TH=x)[:2])
        _require_same_bits(spec, tokens, recomputed, outputs, "recomputed activations than with kept ones")
    _compare(spec, results)


def _odd_sizes(spec: FusedMoeSpec) -> dict[str, int]:
    sizes = dict(_ODD_SIZES)
    products = (("hidden", spec.format_gate_up), ("intermediate", spec.format_down))
    for groups, (name, weight_format) in enumerate(products, 2):
        row = FORMATS[weight_format]
        if isinstance(row, Codes) and row.even:
            sizes[name] = groups * spec.group_of(weight_format)
        elif row.whole > 1:
            sizes[name] = -(-groups * PANEL // row.whole) * row.whole
    return sizes


def _quantised(
    spec: FusedMoeSpec,
    experts: PackedExperts,
    expert: int,
    part: ExpertPart,
    values: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Load a part, or random blocks of a read-only format, and return the weights that the kernel then has.

    The reference of `int8` quantises for itself.
    """
    weight_format = spec.format_of(part)
    row = FORMATS[weight_format]
    if isinstance(row, Blocks) and row.quantises:
        experts.load(expert, part, values)
        expected = dequantise_blocks(quantise_blocks(values, weight_format), weight_format).bfloat16()
    elif isinstance(row, Blocks):
        rows, columns = values.shape
        blocks = random_blocks(rows, columns, weight_format, columns**-0.5, generator)
        experts.load_blocks(expert, part, blocks)
        expected = dequantise_blocks(blocks, weight_format).bfloat16()
    else:
        experts.load(expert, part, values)
        group = spec.group_of(weight_format)
        expected = dequantise(*quantise(values, weight_format, group), group)
    packed = experts.unpack(expert, part, tuple(values.shape))
    if not torch.equal(packed, expected):
        raise wrong(spec, "it packs other weights than its reference")
    return values if row.integer_products else packed


def _random(
    form: ExpertsForm, name: StockTensor, num_experts: int, sizes: dict[str, int], generator: torch.Generator
) -> Tensor:
    """Return values that keep every product near one, so that some reach and pass the limit of the activation."""
    shape = stock_shape(form, name, num_experts, sizes["hidden"], sizes["intermediate"])
    scale = 1.0 if name.endswith("_bias") else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator).mul_(scale)


def _reference(
    spec: FusedMoeSpec,
    x: Tensor,
    place: Tensor,
    weights: Tensor,
    stock: tuple[Tensor, ...],
    grad: Tensor,
    form: ExpertsForm,
) -> tuple[Tensor, ...]:
    """Return output and gradients, in fp64 if the kernel computes in it, otherwise in fp32."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, weights = (tensor.to(dtype).requires_grad_() for tensor in (x, weights))
    layer = (x, place, weights, [tensor.to(dtype) for tensor in stock], form)
    out = fused_moe_reference(*layer, products=INT8_BACKWARD if spec.integer_products else None)
    gradients = torch.autograd.grad(out, (x, weights), grad.to(dtype))
    if spec.integer_products:
        out = fused_moe_reference(*layer, products=INT8_FORWARD)
    return (out.detach(), *gradients)


def _compare(spec: FusedMoeSpec, results: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]) -> None:
    """Check the error over all token counts: the few gradients of one token's weights may cancel to rounding errors."""
    for place, name in enumerate(_RESULTS):
        ours, theirs = (torch.cat([result[side][place].double() for result in results]) for side in (0, 1))
        error = relative_error(ours, theirs)
        if not error <= _TOLERANCE[spec.dtype]:
            allowed = _TOLERANCE[spec.dtype]
            what = f"{name} differs from the reference by {error:.1e}, allowed are {allowed:.0e}"
            raise _wrong(spec, " and ".join(map(str, _TOKENS)), what)


def _require_same_bits(
    spec: FusedMoeSpec, tokens: int, outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], how: str
) -> None:
    for name, ours, theirs in zip(_RESULTS, outputs, expected, strict=True):
        if not torch.equal(ours, theirs):
            raise _wrong(spec, str(tokens), f"{name} has other bits with {how}")


def _wrong(spec: FusedMoeSpec, tokens: str, what: str) -> KtcError:
    hint = "try another instruction set with `--isa`, or another compiler with `CXX`"
    return wrong(spec, f"at {tokens} tokens its {what}", hint)
