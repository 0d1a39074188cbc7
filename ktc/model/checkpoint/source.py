"""`WeightSource`: how one tensor of a checkpoint becomes part of the model; `weights.json` is a list of them.

Capture creates the rows, link writes them, the loader applies them without knowledge of any model family's names. A row
is data only: it names changes of layout, which `ktc.model.checkpoint.values` performs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from ktc.foundation.decode import Undecodable, decode, read_json
from ktc.foundation.formats import CODES
from ktc.model.checkpoint.gguf_types import BLOCK_TYPES, BlockType, weights_of_block
from ktc.model.checkpoint.header import ITEM_SIZE

Part = Literal["gate", "up", "down", "gate_up", "gate_bias", "up_bias", "gate_up_bias", "down_bias"]
Transform = Literal["copy", "per_expert"]
Operation = Literal["transpose", "deinterleave", "deinterleave_runs", "unsqueeze", "unflatten", "chunk"]
Method = Literal["fp8", "int4", "mxfp4", "nvfp4"]
_MOST_ITEMS, _MOST_EXPERTS = 1 << 62, 1 << 32  # beyond what an offset in a file can reach, and any model
_ARGUMENTS: dict[Operation, int] = {
    "transpose": 2, "deinterleave": 1, "deinterleave_runs": 2, "unsqueeze": 1, "unflatten": 2,
    "chunk": 3,
}  # fmt: skip
_INT4_GROUPS = CODES["int4"].group_sizes
COUNTED: frozenset[Operation] = frozenset({"deinterleave_runs", "unflatten", "chunk"})  # then numbers
_WEIGHTS_PER_ITEM: dict[Method, int] = {"fp8": 1, "int4": 8, "mxfp4": 2, "nvfp4": 2}  # of the stored codes


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a tensor's layout; `dims` count from the first dimension of the whole tensor.

    `transpose` swaps two dimensions. `deinterleave` moves the even elements of a dimension before the odd ones.
    `deinterleave_runs` does so in each of several runs, for example one per head; their number is its second argument.
    `unsqueeze` inserts a dimension of size 1 before the given one. `unflatten` cuts a dimension into as many equal
    ranges as its second argument; as the first step of `per_expert` on dimension 0, each range is one expert. `chunk`
    takes one of several equal ranges of a dimension: the number of the range, and how many there are.
    """

    operation: Operation
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(map(str, self.dims))})"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint that belongs to another one."""

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quantised:
    """The encoding of weights of `shape`: one scale per `block` of rows and columns of the last two dimensions.

    `fp8`: `code * scale` in fp32. `int4`: eight codes per int32, lowest bits first, offset by 8, and `(code - zero) *
    scale` in the scale's dtype; zero points are packed in the same way along the rows. `mxfp4`: two E2M1 codes per
    byte, the low one first; scales are exponents of two with a bias of 127. `nvfp4`: the same codes with E4M3 scales,
    which are multiplied with the fp32 number `matrix_scale`, or divided by it (`divides`).
    """

    method: Method
    shape: tuple[int, ...]
    block: tuple[int, int]
    scale: Stored
    zero_point: Stored | None = None
    matrix_scale: Stored | None = None
    divides: bool = False

    def __str__(self) -> str:
        rows, columns = self.block
        zeros = "" if self.zero_point is None else " and zero points"
        if columns >= self.shape[-1] and (rows == 1 or rows >= self.shape[-2]):
            return f"{self.method} with a scale per {'row' if rows == 1 else 'matrix'}{zeros}"
        return f"{self.method} in groups of {columns}{zeros}" if rows == 1 else f"{self.method} {rows}x{columns}"


@dataclass(frozen=True, slots=True)
class Span:
    """The range of the target's dimension `dim` that a tensor fills, if several tensors fill one parameter."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One tensor of the checkpoint and its destination.

    `copy` takes the whole tensor: to the parameter or buffer `target` (or a span of it), or, with `expert` and `part`,
    to that expert's matrix of the 3-D `target`. `per_expert` splits a stacked tensor `(E, ...)`, one expert at a time;
    its part names the contents of the stock tensor, whose layout the target's module defines. `dtype` and `shape` are
    those in the checkpoint; `steps` are applied after dequantisation. A `span` covers every `stride`-th element of its
    dimension; `viewed` is the shape it refers to if that is not the target's own. With a span, `per_expert` takes a
    stack of gate or up alone, which are one tensor in the model. A `dtype` in `BLOCK_TYPES` is one of GGUF's: blocks of
    codes that include their scales.
    """

    target: str
    expert: int | None
    part: Part | None
    source_key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    transform: Transform = "copy"
    steps: tuple[Step, ...] = ()
    span: Span | None = None
    quantised: Quantised | None = None
    stride: int = 1
    viewed: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are the whole target, unchanged."""
        plain = replace(self, expert=None, part=None, transform="copy", steps=(), span=None, quantised=None, viewed=())
        return self == plain and self.block is None

    @property
    def block(self) -> BlockType | None:
        """The block of a GGUF type whose bytes are not plain numbers."""
        return BLOCK_TYPES.get(self.dtype) if self.quantised is None else None

    @property
    def parts(self) -> tuple[Stored, ...]:
        """The stored tensors that this row reads."""
        codes = Stored(self.source_key, self.dtype, self.shape)
        if self.quantised is None:
            return (codes,)
        others = (self.quantised.scale, self.quantised.zero_point, self.quantised.matrix_scale)
        return (codes, *(stored for stored in others if stored is not None))

    @property
    def plain_codes(self) -> tuple[Method, int] | None:
        """The method and group size of codes that can be kept as stored: a scale per range of a row, no zero point.

        A range of several groups that kernels multiply, such as a whole row, becomes groups with one scale.
        """
        quantised = self.quantised
        if quantised is None or quantised.zero_point is not None or self.steps or self.span is not None:
            return None
        if quantised.method == "fp8":
            return ("fp8", quantised.block[1]) if self.dtype == "fp8" else None
        whole = quantised.block[0] == 1 and quantised.shape[-1] % quantised.block[1] == 0
        if quantised.method != "int4" or not whole or quantised.scale.dtype != "bf16":
            return None
        return "int4", max(
            (size for size in _INT4_GROUPS if quantised.block[1] % size == 0), default=quantised.block[1]
        )

    @property
    def plain_blocks(self) -> str | None:
        """The type of blocks that can be kept as stored: GGUF's own, or MXFP4, INT4 and NVFP4 in another order.

        A block is a range of a row of a matrix (out, in). Such matrices may be transposed, but not the blocks
        themselves.
        """
        if self.expert is not None:
            return self._own_blocks
        turned = (Step("transpose", (1, 2)),)
        if self.transform != "per_expert" or len(self.shape) < 3 or self.steps not in ((), turned):
            return None
        if self.block is not None:
            return self.dtype
        quantised = self.quantised
        return "mxfp4" if quantised is not None and quantised.method == "mxfp4" and quantised.block == (1, 32) else None

    @property
    def plain_rows(self) -> str | None:
        """The type of blocks of a whole matrix (out, in) that can be kept as stored, GGUF's, INT4 or NVFP4, or None."""
        whole = self.transform == "copy" and self.expert is None and self.part is None and self.span is None
        plain = whole and not self.steps and not self.viewed and len(self.shape) == 2
        return (self.dtype if self.block is not None else self._own_blocks) if plain else None

    @property
    def int4_group(self) -> int:
        """The weights in a block of INT4 that has zero points or fp16 scales: its groups, or an even part; 0 for none.

        Codes that are kept as such, with bf16 scales, stand for their products in bf16. In blocks the products would
        not be rounded, and serving would differ from training.
        """
        quantised = self.quantised
        if quantised is None or quantised.method != "int4" or self.plain_codes or self.steps or self.span is not None:
            return 0
        rows, size = quantised.block
        fits = rows == 1 and quantised.shape[-1] % size == 0 and quantised.scale.dtype in ("bf16", "f16")
        return max((group for group in _INT4_GROUPS if fits and size % group == 0), default=0)

    @property
    def _own_blocks(self) -> str | None:
        """The format of blocks that are made of a matrix's codes and scales, None for none."""
        quantised = self.quantised
        if quantised is not None and quantised.method == "nvfp4" and not self.steps and self.span is None:
            return "nvfp4" if quantised.shape[-1] % weights_of_block("nvfp4") == 0 else None
        return f"uint4_g{self.int4_group}" if self.int4_group else None

    @property
    def kept_as(self) -> tuple[str, int] | None:
        """The weight format of kernels that can multiply the stored data, and the weights per group or block."""
        blocks = self.plain_blocks
        return self.plain_codes or ((blocks, weights_of_block(blocks)) if blocks else None)

    @property
    def num_stacked(self) -> int:
        """The number of experts in the tensor of a `per_expert` row."""
        return self.steps[0].dims[1] if self.is_flat else self.shape[0]

    @property
    def is_flat(self) -> bool:
        """Whether the experts of a `per_expert` row are concatenated along its first dimension."""
        return bool(self.steps) and self.steps[0].operation == "unflatten" and self.steps[0].dims[0] == 0

    @property
    def format(self) -> str:
        """The stored format as text: `bf16`, `fp8 128x128`, `int4 in groups of 32`."""
        return self.dtype if self.quantised is None else str(self.quantised)

    @property
    def loaded_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor after dequantisation and all steps."""
        shape = self.shape if self.quantised is None else self.quantised.shape
        return shape_after(self.steps, shape)


def shape_after(steps: Sequence[Step], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor of `shape` after `steps`. Raises `ValueError` for an inapplicable step."""
    for step in steps:
        shape = _shape_after_step(step, shape)
    return shape


def _shape_after_step(step: Step, shape: tuple[int, ...]) -> tuple[int, ...]:
    named = step.dims[:1] if step.operation in COUNTED else step.dims
    fits = len(step.dims) == _ARGUMENTS[step.operation] and all(0 <= dim < len(shape) for dim in named)
    runs = {"deinterleave": 1, "deinterleave_runs": step.dims[-1] if step.dims else 0}.get(step.operation)
    if not fits or (runs is not None and (runs < 1 or shape[step.dims[0]] % (2 * runs))):
        raise ValueError(f"`{step}` does not fit {list(shape)}")
    if step.operation == "chunk":
        dim, number, count = step.dims
        if not 0 <= number < count or shape[dim] % count:
            raise ValueError(f"`{step}` does not fit {list(shape)}")
        return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    if step.operation == "unflatten":
        dim, count = step.dims
        if count < 1 or shape[dim] % count:
            raise ValueError(f"`{step}` does not fit {list(shape)}")
        return (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
    if step.operation == "unsqueeze":
        return (*shape[: step.dims[0]], 1, *shape[step.dims[0] :])
    if runs is not None:
        return shape
    swapped = dict(zip(step.dims, reversed(step.dims), strict=True))
    return tuple(shape[swapped.get(dim, dim)] for dim in range(len(shape)))


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of a weight's scales; the last block of a row or column may be incomplete."""
    *stack, rows, columns = shape
    return (*stack, -(-rows // block[0]), -(-columns // block[1]))


def write_sources(sources: Sequence[WeightSource]) -> str:
    """Return the text of `weights.json`: a JSON array with one row per line, without fields that have defaults."""
    return "[\n" + ",\n".join(json.dumps(_without_defaults(source)) for source in sources) + "\n]\n"


def _without_defaults(source: WeightSource) -> dict[str, Any]:
    """Return the fields that have another value than their default, as JSON has them."""
    row = asdict(source)
    if source.quantised is not None:
        row["quantised"] = _changed(row["quantised"], source.quantised, _DEFAULT_OF_CODES)
    return _changed(row, source, _DEFAULT)


def _changed(row: Mapping[str, Any], value: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: field for name, field in row.items() if getattr(value, name) != defaults.get(name, MISSING)}


_DEFAULT: dict[str, Any] = {field.name: field.default for field in fields(WeightSource) if field.default is not MISSING}

_DEFAULT_OF_CODES: dict[str, Any] = {
    field.name: field.default for field in fields(Quantised) if field.default is not MISSING
}


def read_sources(text: str | bytes) -> tuple[WeightSource, ...]:
    """Return the rows of a `weights.json`. Raises `ValueError` for an invalid row."""
    rows: object = read_json(text)
    if not isinstance(rows, list):
        raise ValueError("expected a JSON array")
    return tuple(_read_source(row) for row in cast("list[object]", rows))


def _read_source(row: object) -> WeightSource:
    defaults: dict[str, Any] = {name: list[Any]() if value == () else value for name, value in _DEFAULT.items()}
    whole = {**defaults, **cast("dict[str, Any]", row)} if isinstance(row, dict) else row
    if isinstance(whole, dict) and isinstance(whole["quantised"], dict):
        whole["quantised"] = {**_DEFAULT_OF_CODES, **cast("dict[str, Any]", whole["quantised"])}
    try:
        source = decode(whole, WeightSource)
        _check(source)
    except (Undecodable, ValueError) as error:
        target = cast("dict[str, Any]", row).get("target") if isinstance(row, dict) else None
        raise ValueError(f"the row of `{target}`: {error}") from error
    return source


def _check(source: WeightSource) -> None:
    """Check that a row from a file is one that capture could have written. Raises `ValueError`."""
    if "/" in source.file or source.file.startswith("."):
        raise ValueError("an unknown file")
    for stored in source.parts:
        known = stored.dtype in ITEM_SIZE or (stored.dtype in BLOCK_TYPES and source.quantised is None)
        if not known or not _is_shape(stored.shape):
            raise ValueError("an unknown dtype, or invalid sizes")
    _check_blocks(source)
    if source.expert is not None and not 0 <= source.expert < _MOST_EXPERTS:
        raise ValueError("an invalid expert number")
    stacked = source.transform == "per_expert" and source.expert is None and source.part is not None
    whole = source.transform == "copy" and (source.expert is None) == (source.part is None)
    halves = source.span is not None and source.span.dim >= 1 and source.quantised is None
    enough = len(source.shape) >= (1 if source.is_flat else 2)
    if not (stacked and enough and (source.span is None or halves)) and not whole:
        raise ValueError("an inconsistent combination of transform, expert and part")
    if source.is_flat and (not stacked or source.quantised is not None or source.block is not None):
        raise ValueError("a step that cuts codes or a single tensor into experts")
    if stacked and any(0 in step.dims for step in source.steps[source.is_flat :]):
        raise ValueError("a step that mixes experts")
    if source.span is not None and min(source.span.dim, source.span.start, source.span.length) < 0:
        raise ValueError("a negative span")
    if source.span is not None and source.expert is not None:
        raise ValueError("a span of one expert")
    if source.span is None and (source.stride != 1 or source.viewed):
        raise ValueError("a stride or a view without a span")
    if source.stride < 1 or not _is_shape(source.viewed):
        raise ValueError("an invalid stride or view")
    if source.quantised is not None:
        _check_quantised(source, source.quantised)
    _ = source.loaded_shape  # raises if a step does not fit


def _check_blocks(source: WeightSource) -> None:
    if source.block is not None and (not source.shape or source.shape[-1] % source.block.weights):
        raise ValueError(f"rows of {list(source.shape)[-1:]} that are not blocks of {source.dtype}")


def _is_shape(sizes: Sequence[int]) -> bool:
    return min((0, *sizes)) >= 0 and math.prod(max(1, size) for size in sizes) < _MOST_ITEMS


def _check_quantised(source: WeightSource, quantised: Quantised) -> None:
    sizes = (*quantised.shape, *quantised.block)
    if len(quantised.shape) < 2 or not _is_shape(quantised.shape) or min(sizes) < 1:
        raise ValueError("a quantised weight without rows, columns or blocks")
    per_item = _WEIGHTS_PER_ITEM[quantised.method]
    columns = -(-quantised.shape[-1] // per_item)
    if math.prod(source.shape) != math.prod(quantised.shape[:-1]) * columns:
        raise ValueError(f"codes of {list(source.shape)} are not weights of {list(quantised.shape)}")
    scales = scale_shape(quantised.shape, quantised.block)
    if math.prod(quantised.scale.shape) != math.prod(scales):
        raise ValueError(f"scales of {list(quantised.scale.shape)} where {list(scales)} are needed")
    if (quantised.matrix_scale is None) == (quantised.method == "nvfp4"):
        raise ValueError("nvfp4 without the scale of a matrix, or other codes with one")
    if quantised.matrix_scale is not None and math.prod(quantised.matrix_scale.shape) != 1:
        raise ValueError(f"a scale of a matrix of {list(quantised.matrix_scale.shape)}")
    if quantised.zero_point is not None:
        *_, rows, groups = scales
        if quantised.method != "int4" or quantised.zero_point.shape != (-(-rows // 8), groups):
            raise ValueError(f"zero points of {list(quantised.zero_point.shape)}")
