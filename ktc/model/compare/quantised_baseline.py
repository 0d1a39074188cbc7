"""The baseline of a quantised kernel: the stock block, on the weights that the format's own reference makes.

A kernel of bf16 weights is measured against the stock block in fp32. A kernel of int4, fp8, int8 or GGUF blocks is not:
the rule chose the rounding of its format, which would hide every other error. Its baseline is the stock block in fp32,
whose weights went through the format's reference quantiser and decoder (`quantised_reference`, `block_reference`),
matrix by matrix in place; int8 also quantises activations, so its products are the reference's. Stock's own error is
that of the same block in the model's own dtype. Permutations, scales, gate and up, and expert numbers are still those
of the stock model, so a wrong one is detected. Weights that the checkpoint stores in the format are taken as decoded,
since a kernel keeps their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ktc.foundation.formats import CODES, FORMATS
from ktc.foundation.module_paths import is_inside
from ktc.model.checkpoint import WeightSource
from ktc.model.compare.experts import Experts, experts_of, own_step
from ktc.model.experts.layouts.own_layout import TensorLayout
from ktc.model.experts.references.block_reference import dequantise_blocks, quantise_blocks
from ktc.model.experts.references.quantised_reference import dequantise, int8_product, quantise
from ktc.model.kernels.form import parse_form
from ktc.model.manifest.manifest import Manifest, Rewrite, config_of

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class ExpertsFormat:
    """The format of one layer's experts in a kernel. Tensors without a format keep the stock values.

    `matrices` maps each stock tensor, in the experts module or in each expert of a list, to its format and group size.
    `num_experts` are those with matrices.
    """

    matrices: Mapping[TensorLayout, tuple[str, int]]
    num_experts: int
    integer_products: bool
    computes: torch.dtype | None

    @property
    def quantises(self) -> bool:
        """Whether the baseline differs from the stock block."""
        return bool(self.matrices) or self.integer_products

    @property
    def words(self) -> str:
        """The names of the formats, for messages."""
        return ", ".join(dict.fromkeys(name for name, _ in self.matrices.values()))


def formats_in(group: str, manifest: Manifest, rows: Sequence[WeightSource]) -> dict[Experts, ExpertsFormat]:
    """Return the routed experts in a layer that the recipe puts in place, with their formats."""
    return {
        experts_of(step, manifest, step.fqn[len(group) + 1 :]): format_of(step, manifest, rows)
        for step in manifest.rewrites
        if step.module == "fused_moe" and is_inside(step.fqn, group)
    }


def format_of(step: Rewrite, manifest: Manifest, rows: Sequence[WeightSource]) -> ExpertsFormat:
    """Return the format of the experts that `step` puts in place; `rows` are all of `weights.json`."""
    kernel = next((kernel for kernel in manifest.kernels if kernel.entry == step.kernel), None)
    num_experts = int(step.args["num_experts"])
    if kernel is None:
        return ExpertsFormat({}, num_experts, False, None)
    down, gate_up = str(kernel.spec["format_down"]), str(kernel.spec["format_gate_up"])
    group = int(kernel.spec.get("group_size") or 0)
    tensors = _tensors_of(step, manifest)
    formats = {tensor: down if part == "down" else gate_up for tensor, part in tensors.items()}
    filled = [row for row in rows if row.target.startswith(f"{step.fqn}.")]
    return ExpertsFormat(
        {
            tensor: (name, _group(name, group))
            for tensor, name in formats.items()
            if FORMATS[name].coded and not _kept(filled, tensors[tensor], name)  # pyright: ignore[reportArgumentType]
        },
        num_experts,
        FORMATS[down].integer_products,  # pyright: ignore[reportArgumentType]
        _DTYPES[str(kernel.spec["dtype"])],
    )


def _tensors_of(step: Rewrite, manifest: Manifest) -> dict[TensorLayout, str]:
    """Return the stock tensors of weights, with the part that each is: `down`, or gate and up."""
    blocks = (s for s in manifest.rewrites if s.module == "graph_block")
    block = next((s for s in blocks if f"{s.fqn}.{s.args['experts']}" == step.fqn), None)
    reading = own_step(step, manifest)
    if reading is not None:
        parts = dict(config_of(reading).parts)
    elif block is not None:
        parts = {part: TensorLayout(name) for part, name in config_of(block).parts.items()}
    else:
        form = parse_form(str(step.args["form"]))
        gate_up = "gate_up_proj" if form.gated else "up_proj"
        parts = {
            "gate_up": TensorLayout(gate_up, turned=form.transposed),
            "down": TensorLayout("down_proj", turned=form.transposed),
        }
    return {tensor: "down" if part == "down" else "gate_up" for part, tensor in parts.items() if "bias" not in part}


def _group(name: str, group: int) -> int:
    row = CODES.get(name)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if row is None:
        return 0
    return group if group in row.group_sizes else row.group_sizes[0]


def _kept(rows: Sequence[WeightSource], part: str, name: str) -> bool:
    """Return whether the checkpoint stores the part in the kernel's format already."""
    of_part = [row for row in rows if (row.part is not None and row.part.startswith("down")) == (part == "down")]
    weights = [row for row in of_part if row.part is not None and not row.part.endswith("bias")]
    return bool(weights) and all(row.kept_as is not None and row.kept_as[0] == name for row in weights)


def through_format(experts: nn.Module, form: ExpertsFormat) -> None:
    """Replace the weights of stock experts by their values in the format, in place and in their dtype."""
    with torch.no_grad():
        for tensor, (name, group) in form.matrices.items():
            for matrix in _matrices(experts, tensor, form.num_experts):
                matrix.copy_(_decoded(matrix.float().contiguous(), name, group))
    if form.integer_products:
        _multiply_integers(experts)


def _matrices(experts: nn.Module, tensor: TensorLayout, num_experts: int) -> Iterator[Tensor]:
    """Yield each expert's matrix (outputs, inputs), as a view."""
    owner, _, leaf = tensor.name.rpartition(".")
    if isinstance(experts, nn.ModuleList):
        yield from (cast("Tensor", getattr(expert.get_submodule(owner), leaf)).data for expert in experts)
        return
    whole = cast("Tensor", getattr(experts.get_submodule(owner), leaf)).data
    whole = whole.view(num_experts, -1, *whole.shape[1:]) if tensor.flat else whole[:num_experts]
    for matrix in whole:
        yield matrix.t() if tensor.turned else matrix


def _decoded(matrix: Tensor, name: str, group: int) -> Tensor:
    if name in CODES:
        return dequantise(*quantise(matrix, name, group), group).float()
    return dequantise_blocks(quantise_blocks(matrix, name), name)


class _IntegerProducts(TorchFunctionMode):
    """Products with matrices of weights as int8 kernels compute them, activations quantised too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[0].dim() == 2:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            out = int8_product(args[0], args[1])
            return out if bias is None else out + bias
        if func in _PRODUCTS and args[0].dim() == args[1].dim() == 2:
            return int8_product(args[0], args[1].t())
        if func in (torch.bmm, Tensor.bmm) or (func in _PRODUCTS and args[0].dim() == args[1].dim() == 3):
            return torch.stack([int8_product(rows, matrix.t()) for rows, matrix in zip(args[0], args[1], strict=True)])
        return func(*args, **kwargs)


def _multiply_integers(experts: nn.Module) -> None:
    """Run the experts' own code with integer products from now on."""
    modules = list(experts) if isinstance(experts, nn.ModuleList) else [experts]
    for module in modules:
        original: Callable[..., Any] = module.forward

        def forward(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            with _IntegerProducts():
                return _original(*args, **kwargs)

        vars(module)["forward"] = forward
