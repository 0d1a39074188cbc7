"""Operations of PyTorch as operations of a native program.

In: one recorded operation, whose tensors are those of the program. Out: the same computation, appended to the program,
or False for one that has no native form. Types and roundings are PyTorch's: fp16 and bf16 are computed in fp32 and
rounded once by every operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ktc.model.experts.private_api import tree_iter
from ktc.model.kernels.kernel_library import Arguments, Engine, NativeProgram, NativeStep

TYPES: Final = {
    torch.bool: 0, torch.int32: 1, torch.int64: 2, torch.float16: 3, torch.bfloat16: 4, torch.float32: 5,
    torch.float64: 6, torch.complex64: 7,
}  # fmt: skip
_FP32, _FP64, _INT64, _COMPLEX = TYPES[torch.float32], TYPES[torch.float64], TYPES[torch.int64], TYPES[torch.complex64]
_MOST_ROWS: Final = 8  # of the smaller factor of a native product
_NOTHING: Final[Arguments] = {"data": 0, "type": _FP32, "sizes": [1, 1, 1], "strides": [0, 0, 0]}


@dataclass(slots=True)
class Builder:
    """A program that is being built. It reads `constants` as well as the tensors of the step."""

    kernel: NativeStep
    program: NativeProgram
    engine: Engine
    constants: list[Tensor] = field(default_factory=list[Tensor])
    kept: list[object] = field(default_factory=list[object])

    def add(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Tensor]) -> bool:
        """Append an operation that writes `outs`. Return whether there is a native one."""
        lower = _LOWERED.get(name)
        tensors = (value for value in tree_iter((args, outs)) if isinstance(value, Tensor))
        if lower is None or any(tensor.dtype not in TYPES for tensor in tensors):
            return False
        try:
            return lower(self, outs, *args, **kwargs)
        except (
            TypeError,
            IndexError,
            ZeroDivisionError,
        ):  # arguments that no form has, tensors without dims
            return False

    def pointwise(self, function: str, out: Tensor, *inputs: Any) -> bool:
        """Append out = function(inputs), where inputs are tensors that broadcast to `out`, or numbers."""
        computed = _computed(out, inputs)
        if computed is None or (len(inputs) > 1 and _rounds_first(function, inputs)):
            return False
        tensors = [self._tensor(value, computed).expand(out.shape) for value in inputs]
        if any(tensor.is_conj() or tensor.is_neg() for tensor in (out, *tensors)):
            return False
        views = _merged(out, *tensors)
        self.program.pointwise(self.kernel, function, views[0], views[1:], computed)
        return True

    def reduce(self, reduction: str, out: Tensor, input: Tensor, dim: int, *, keepdim: bool) -> bool:
        """Append a reduction of one dimension."""
        if not input.dim():
            return False
        last = input.movedim(dim, -1)
        target = out.movedim(dim, -1).squeeze(-1) if keepdim else out
        computed = _kind(out.dtype)
        if computed == _COMPLEX:
            return False
        self.program.reduce(self.kernel, reduction, view(target), view(last), computed)
        return True

    def product(self, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> bool:
        """Append out = a b + bias of matrices, or of batches of them."""
        if not out.dtype.is_floating_point or not a.dtype == b.dtype == out.dtype:
            return False
        if min(out.shape[-2:]) > _MOST_ROWS and out.dtype != torch.float64:
            return False  # PyTorch's is faster
        made = [matrix if matrix.dim() == 3 else matrix.unsqueeze(0) for matrix in (out, a, b)]
        added = _NOTHING if bias is None else view(bias.expand(made[0].shape))
        whole, left, right = map(view, made)
        self.program.matrix_product(self.kernel, self.engine, whole, left, right, added)
        return True

    def constant(self, value: Any, dtype: torch.dtype) -> Tensor:
        """Return a number as a tensor that the program reads; a tensor as it is."""
        if isinstance(value, Tensor):
            return value
        self.constants.append(torch.tensor(value, dtype=dtype))
        return self.constants[-1]

    def _tensor(self, value: Any, computed: int) -> Tensor:
        real = torch.float64 if isinstance(value, float) else torch.int64
        return self.constant(value, torch.complex64 if computed == _COMPLEX else real)


def view(tensor: Tensor, sizes: Sequence[int] | None = None, strides: Sequence[int] | None = None) -> Arguments:
    """Return a tensor as a program reads it, with its own sizes and strides in elements, or with others."""
    return {
        "data": tensor.data_ptr(), "type": TYPES[tensor.dtype],
        "sizes": list(tensor.shape if sizes is None else sizes),
        "strides": list(tensor.stride() if strides is None else strides),
    }  # fmt: skip


def _merged(out: Tensor, *inputs: Tensor) -> list[Arguments]:
    """Return views of the same sizes with as few dimensions as all strides permit, the densest last."""
    tensors = (out, *inputs)
    order = sorted((d for d in range(out.dim()) if out.shape[d] != 1), key=lambda d: -out.stride(d))
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for dim in order:
        steps = [tensor.stride(dim) for tensor in tensors]
        joins = bool(sizes) and all(
            merged[-1] == step * out.shape[dim] for merged, step in zip(strides, steps, strict=True)
        )
        if joins:
            sizes[-1] *= out.shape[dim]
        else:
            sizes.append(out.shape[dim])
        for merged, step in zip(strides, steps, strict=True):
            if joins:
                merged[-1] = step
            else:
                merged.append(step)
    return [view(tensor, sizes or [1], merged or [0]) for tensor, merged in zip(tensors, strides, strict=True)]


def _kind(dtype: torch.dtype) -> int:
    """Return the type that values of a dtype are computed in."""
    if dtype.is_complex:
        return _COMPLEX
    if dtype.is_floating_point:
        return _FP64 if dtype == torch.float64 else _FP32
    return _INT64


def _computed(out: Tensor, inputs: Sequence[Any]) -> int | None:
    """Return the type that a function is computed in, None for a mixture of real and complex numbers."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    kinds = {_kind(tensor.dtype) for tensor in tensors}
    if out.dtype != torch.bool:
        kinds.add(_kind(out.dtype))
    if any(isinstance(value, float) for value in inputs):
        kinds.add(_FP32)  # a number is computed in the precision of the others
    if _COMPLEX in kinds:
        return _COMPLEX if not kinds & {_FP64, _INT64} and all(tensor.dtype.is_complex for tensor in tensors) else None
    return max(kinds, default=_INT64)  # int64, fp32 and fp64 ascend


def _rounds_first(function: str, inputs: Sequence[Any]) -> bool:
    """Return whether PyTorch rounds a tensor, or a number, to another dtype before it computes.

    It multiplies 16-bit values with numbers in fp32, and rounds numbers for other functions.
    """
    if function == "where":
        return False
    common = functools.reduce(torch.promote_types, [torch.result_type(inputs[0], value) for value in inputs[1:]])
    short = common in (torch.bfloat16, torch.float16)
    if short and function != "multiply":
        numbers = (value for value in inputs if isinstance(value, float | int))
        if any(float(torch.tensor(number, dtype=common)) != number for number in numbers):
            return True
    dtypes = {value.dtype for value in inputs if isinstance(value, Tensor)}
    return any(
        torch.promote_types(dtype, common) != common or (short and dtype in (torch.int32, torch.int64))
        for dtype in dtypes
    )


# The operators, by name without the overload ------------------------------------------------------------------------
Outs = Sequence[Tensor]
Lower = Callable[..., bool]


def _function(name: str, to: Builder, outs: Outs, *inputs: Any, **more: Any) -> bool:
    return not more and to.pointwise(name, outs[0], *inputs)


def _sum_of(name: str, to: Builder, outs: Outs, a: Any, b: Any, *, alpha: float = 1) -> bool:
    return alpha == 1 and to.pointwise(name, outs[0], a, b)


def _copy(to: Builder, outs: Outs, source: Any, *_: Any, **__: Any) -> bool:
    return to.pointwise("copy", outs[0], source)


def _copy_into(to: Builder, outs: Outs, target: Tensor, source: Any, *_: Any, **__: Any) -> bool:
    return to.pointwise("copy", outs[0], source)


def _filled(value: float, to: Builder, outs: Outs, *_: Any, **__: Any) -> bool:
    return to.pointwise("copy", outs[0], value)


def _comparison(name: str, to: Builder, outs: Outs, a: Tensor, b: Any) -> bool:
    common = torch.result_type(a, b)
    b = to.constant(b, common)  # PyTorch rounds a number to the dtype of the tensor
    return a.dtype == b.dtype == common and to.pointwise(name, outs[0], a, b)


def _power(to: Builder, outs: Outs, base: Any, exponent: Any) -> bool:
    if not outs[0].is_floating_point():
        return False
    special = {2: "square", 0.5: "square_root", -0.5: "reciprocal_root", -1: "reciprocal"}
    if not isinstance(exponent, Tensor) and exponent in special:
        return to.pointwise(special[exponent], outs[0], base)
    return to.pointwise("power", outs[0], base, exponent)


def _divide(to: Builder, outs: Outs, a: Any, b: Any, *, rounding_mode: str | None = None) -> bool:
    return rounding_mode is None and to.pointwise("divide", outs[0], a, b)


def _clamp(to: Builder, outs: Outs, value: Tensor, min: Any = None, max: Any = None) -> bool:
    bounds = [(name, bound) for name, bound in (("maximum", min), ("minimum", max)) if bound is not None]
    for name, bound in bounds:
        if not to.pointwise(name, outs[0], value, bound):
            return False
        value = outs[0]
    return True


def _masked_fill(to: Builder, outs: Outs, values: Tensor, mask: Tensor, value: Any) -> bool:
    return to.pointwise("where", outs[0], mask, value, values)


def _gelu(to: Builder, outs: Outs, x: Tensor, *, approximate: str = "none") -> bool:
    return to.pointwise("gelu" if approximate == "none" else "gelu_tanh", outs[0], x)


def _softplus(to: Builder, outs: Outs, x: Tensor, beta: float = 1, threshold: float = 20) -> bool:
    return (beta, threshold) == (1, 20) and to.pointwise("softplus", outs[0], x)


def _not(to: Builder, outs: Outs, x: Tensor) -> bool:
    return x.dtype == torch.bool and to.pointwise("not", outs[0], x)


def _logical(name: str, to: Builder, outs: Outs, a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.bool and to.pointwise(name, outs[0], a, b)


def _reduced(
    name: str, to: Builder, outs: Outs, x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any
) -> bool:  # fmt: skip
    return dim is not None and len(dim) == 1 and to.reduce(name, outs[0], x, dim[0], keepdim=keepdim)


def _softmax(to: Builder, outs: Outs, x: Tensor, dim: int, half_to_float: bool) -> bool:
    if not x.dim():
        return False
    computed = _kind(outs[0].dtype)
    to.program.softmax(to.kernel, view(outs[0].movedim(dim, -1)), view(x.movedim(dim, -1)), computed)
    return True


def _top_k(
    to: Builder, outs: Outs, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> bool:  # fmt: skip
    if not x.dim():
        return False
    values, indices = (out.movedim(dim, -1) for out in outs)
    to.program.top_k(view(values), view(indices), view(x.movedim(dim, -1)), largest, sorted)
    return True


def _gather(to: Builder, outs: Outs, x: Tensor, dim: int, index: Tensor, **_: Any) -> bool:
    if index.dtype != torch.int64:
        return False
    to.program.gather(view(outs[0]), view(x), view(index), dim % x.dim())
    return True


def _scatter(to: Builder, outs: Outs, target: Tensor, dim: int, index: Tensor, source: Any) -> bool:
    if outs[0].data_ptr() != target.data_ptr() and not to.pointwise("copy", outs[0], target):
        return False
    if not isinstance(source, Tensor):
        source = to.constant(source, target.dtype).expand(index.shape)
    if source.dtype != target.dtype or source.shape != index.shape or index.dtype != torch.int64:
        return False
    to.program.scatter(view(outs[0]), view(index), view(source), dim % target.dim())
    return True


def _index_copy(to: Builder, outs: Outs, target: Tensor, dim: int, index: Tensor, source: Tensor) -> bool:
    if outs[0].data_ptr() != target.data_ptr() or source.dtype != target.dtype or index.dtype != torch.int64:
        return False
    to.program.indexed_rows(view(target), view(index), view(source), dim % target.dim(), True)
    return True


def _index_select(to: Builder, outs: Outs, x: Tensor, dim: int, index: Tensor) -> bool:
    if index.dtype != torch.int64:
        return False
    to.program.indexed_rows(view(x), view(index), view(outs[0]), dim % x.dim(), False)
    return True


def _index(to: Builder, outs: Outs, x: Tensor, indices: Sequence[Tensor | None]) -> bool:
    """Select a column for each pair of a row and a place of the last dimension, as masks read the padding."""
    selected = [index for index in indices if index is not None and index.dtype == torch.int64]
    out = outs[0]
    if not len(selected) == len(indices) == x.dim() == 2 or not out.is_contiguous():
        return False
    (rows, columns), sizes = selected, (out.shape[0], out.shape[-1])
    if out.numel() != sizes[0] * sizes[1] or rows.shape != (sizes[0], *[1] * (out.dim() - 1)):
        return False
    if columns.numel() != sizes[1] or columns.shape[-1] != sizes[1]:
        return False
    matrix = out.view(sizes)
    to.constants.append(x.new_empty(sizes[0], x.shape[1]))
    of_rows = to.constants[-1]
    to.program.indexed_rows(view(x), view(rows[(slice(None), *[0] * (out.dim() - 1))]), view(of_rows), 0, False)
    to.program.gather(view(matrix), view(of_rows), view(columns.reshape(-1).expand(sizes)), 1)
    return True


def _embedding(to: Builder, outs: Outs, weight: Tensor, indices: Tensor, *_: Any) -> bool:
    if not indices.is_contiguous() or not outs[0].is_contiguous() or indices.dtype != torch.int64:
        return False
    rows = outs[0].view(-1, weight.shape[1])
    to.program.indexed_rows(view(weight), view(indices.view(-1)), view(rows), 0, False)
    return True


def _concatenated(to: Builder, outs: Outs, tensors: Sequence[Tensor], dim: int = 0) -> bool:
    at, out = 0, outs[0]
    for tensor in tensors:
        if tensor.dim() != out.dim():
            return False
        if not to.pointwise("copy", out.narrow(dim, at, tensor.shape[dim]), tensor):
            return False
        at += tensor.shape[dim]
    return True


def _stacked(to: Builder, outs: Outs, tensors: Sequence[Tensor], dim: int = 0) -> bool:
    return all(to.pointwise("copy", outs[0].select(dim, at), tensor) for at, tensor in enumerate(tensors))


def _product(to: Builder, outs: Outs, a: Tensor, b: Tensor) -> bool:
    return to.product(outs[0], a, b)


def _product_and_sum(
    to: Builder, outs: Outs, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> bool:  # fmt: skip
    return (beta, alpha) == (1, 1) and bias.dtype == a.dtype and to.product(outs[0], a, b, bias)


_PLAIN: Final = {
    "mul": "multiply", "minimum": "minimum", "maximum": "maximum", "neg": "negative", "abs": "absolute",
    "reciprocal": "reciprocal", "sqrt": "square_root", "rsqrt": "reciprocal_root", "exp": "exp", "log": "log",
    "sin": "sine", "cos": "cosine", "tanh": "tanh", "sigmoid": "sigmoid", "silu": "silu", "relu": "relu",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "exclusive_or",
    "where": "where",
}  # fmt: skip
_COMPARISONS: Final = {
    "eq": "equal", "ne": "unequal", "lt": "less", "le": "less_or_equal", "gt": "greater", "ge": "greater_or_equal",
}  # fmt: skip
_SPECIAL: Final[dict[str, Lower]] = {
    "add": partial(_sum_of, "add"), "sub": partial(_sum_of, "subtract"), "div": _divide, "pow": _power,
    "clamp": _clamp, "masked_fill": _masked_fill, "gelu": _gelu, "softplus": _softplus, "bitwise_not": _not,
    "logical_not": _not, "logical_and": partial(_logical, "and"), "logical_or": partial(_logical, "or"),
    "_to_copy": _copy, "clone": _copy, "copy_": _copy_into, "fill_": _copy_into,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), partial(_filled, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), partial(_filled, 1)),
    "mean": partial(_reduced, "mean"), "sum": partial(_reduced, "sum"), "amax": partial(_reduced, "maximum"),
    "_softmax": _softmax,
    "topk": _top_k, "gather": _gather, "scatter": _scatter, "index_copy_": _index_copy, "index_select": _index_select,
    "index": _index, "embedding": _embedding, "cat": _concatenated, "stack": _stacked,
    "mm": _product, "bmm": _product, "addmm": _product_and_sum,
}  # fmt: skip
_IN_PLACE: Final = ("add", "sub", "mul", "div", "clamp", "masked_fill", "scatter", "pow", "neg", "exp", "sigmoid")
_LOWERED: Final[dict[str, Lower]] = {
    **{name: partial(_function, native) for name, native in _PLAIN.items()},
    **{name: partial(_comparison, native) for name, native in _COMPARISONS.items()},
    **_SPECIAL,
}
_LOWERED.update({f"{name}_": _LOWERED[name] for name in _IN_PLACE})
NATIVE: Final = frozenset(_LOWERED)
"""The names of PyTorch's operators that have native forms."""
