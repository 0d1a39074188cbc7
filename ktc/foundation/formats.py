"""The formats that weights are stored in, one row each.

The rule language, plan, checkpoint, codegen, the PyTorch references, self-test and bench read these rows. A row with a
`panel` is multiplied by kernels as it is stored; one without is a type of GGUF files that is only dequantised.
Importing this needs no torch: the functions of a row call methods of the tensors that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ktc.foundation.isa import Dtype

if TYPE_CHECKING:  # for annotations alone, so that the rule language needs no torch
    from torch import Tensor

WeightFormat = str
"""The name of a row."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A C++ type of `runtime/include/ktc/weight_format`, and its header. `{}` stands for the size of groups."""

    header: str
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The fields that every format has.

    `stored` is the name in checkpoints, if not `name`; `gguf` is its number among GGUF's types. `methods` are the names
    that `quantization_config` has for it. With `integer_products`, forward quantises rows of activations too.
    """

    name: WeightFormat
    panel: Panel | None = None
    stored: str = ""
    gguf: int | None = None
    methods: tuple[str, ...] = ()
    integer_products: bool = False

    @property
    def dtype(self) -> Dtype:
        """The dtype that kernels compute in."""
        return "bf16"

    @property
    def whole(self) -> int:
        """Rows must be a multiple of this many weights."""
        return 1

    @property
    def coded(self) -> bool:
        """Whether a weight is a code with a scale, rather than a value."""
        return True

    @property
    def quantises(self) -> bool:
        """Whether weights stored in another format can be converted to it."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(Format):
    """Plain values. Programs cannot name an `oracle`: only tests compute in it."""

    bits: int
    computes: Dtype
    oracle: bool = False

    @property
    def dtype(self) -> Dtype:
        return self.computes

    @property
    def coded(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes(Format):
    """Codes with one scale for a group of an output's weights; a weight is their product.

    `group_sizes` are those that kernels multiply, 0 for a whole row; a program that quantises gets the first. With
    `even`, rows must be whole groups. Rows are padded to a multiple of `unit`. Codes go from -`largest` to `largest`; a
    scale is at least `least_scale`.
    """

    bits: int
    scale_bytes: int
    group_sizes: tuple[int, ...]
    largest: float
    least_scale: float
    even: bool = False
    unit: int = 32
    bf16_scales: bool = False  # scales are rounded to bf16 before codes are chosen
    float8: bool = False  # codes are E4M3 numbers; otherwise signed integers

    @property
    def whole(self) -> int:
        return self.group_sizes[0] if self.even else 1


@dataclass(frozen=True, slots=True)
class CodeBits:
    """`bits` of each code, from byte `at` of a block on.

    `run` bytes have the bits of the first codes in their lowest bits, and those of the next codes in the bits above.
    Then follow the next `run` bytes.
    """

    at: int
    bits: int
    run: int


@dataclass(frozen=True, slots=True)
class Halves:
    """An fp16 scale at byte `scale` of a block, and an fp16 minimum at `minimum` that is taken off, or `added`.

    `sixes` is where twelve bytes hold 6-bit factors of either for each 32 weights, as K-quants pack them; `factors`
    where the scale has a signed byte for each 16.
    """

    scale: int
    minimum: int | None = None
    added: bool = False
    sixes: int | None = None
    factors: int | None = None


@dataclass(frozen=True, slots=True)
class Exponent:
    """A byte e at `at` of a block, for a scale of 2^(e - 128)."""

    at: int


@dataclass(frozen=True, slots=True)
class ScaleAndZero:
    """Four bytes at `at` of a block: an fp32 scale without its lowest byte, which is a zero point.

    A weight is scale x (code - zero point).
    """

    at: int


@dataclass(frozen=True, slots=True)
class Float8Scales:
    """An E4M3 scale for each 16 weights from byte `at` of a block on, each times the fp32 number at byte `matrix`.

    That number is half the scale of the whole matrix: blocks are made when it is read or quantised.
    """

    at: int
    matrix: int


BlockScales = Halves | Exponent | ScaleAndZero | Float8Scales

# Blocks of weights (blocks, weights) to the scale, the minimum and the codes that a block stores. None: no minimum.
# The scales of `Float8Scales` are (blocks, 3): first the one of the matrix, whose blocks these are.
Quantise = Callable[["Tensor"], "tuple[Tensor, Tensor | None, Tensor]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Format):
    """Blocks as GGUF files have them: `block_bytes` for `weights` of a row, their scales among them.

    A weight is scale x numbers[code], less a minimum. Kernels keep the bits of `span` blocks together. A block of one
    weight is that weight in fp16. Blocks without a number of GGUF's are in no file: `ktc.model.checkpoint` makes them
    of what checkpoints have. The first `shared` bytes of a block are the same in a whole row, and kept once for a span.
    """

    weights: int
    block_bytes: int
    span: int = 1
    shared: int = 0
    codes: tuple[CodeBits, ...] = ()
    numbers: tuple[int, ...] = ()
    scales: BlockScales | None = None
    quantise: Quantise | None = None

    @property
    def whole(self) -> int:
        return self.weights

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return sum(part.bits for part in self.codes) or 16

    @property
    def head(self) -> int:
        """The bytes of an output's scales in a span of a panel."""
        of_block = self.block_bytes - self.shared - self.weights * self.bits // 8
        return self.shared + self.span * of_block

    @property
    def coded(self) -> bool:
        return self.weights > 1

    @property
    def quantises(self) -> bool:
        return self.quantise is not None or not self.coded


def _uint4(group: int) -> Blocks:
    """Return asymmetric INT4 with a scale and a zero point for `group` weights."""
    return Blocks(
        name=f"uint4_g{group}", panel=Panel("uint4", f"UInt4Panel<{group}>"), weights=group, block_bytes=4 + group // 2,
        scales=ScaleAndZero(0), codes=(CodeBits(4, 4, 16),), numbers=tuple(range(16)),
    )  # fmt: skip


def _read_only(number: int, name: str, weights: int, block_bytes: int) -> Blocks:
    """Return a type of GGUF files that no kernel multiplies."""
    return Blocks(name=name, gguf=number, weights=weights, block_bytes=block_bytes)


# Quantisers of the package `gguf` ------------------------------------------------------------------------------------
POWERS: Final = tuple(2.0 ** (exponent - 128) for exponent in range(256))
_TINY: Final = 2.0**-126  # the inverse of a smaller scale may overflow; as fp16 it is zero anyway
_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, to be integers
_MIDDLES: Final = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # between two numbers of `_E2M1`


def _scaled(weights: Tensor, scale: Tensor) -> Tensor:
    return weights * (1 / scale).masked_fill(scale.abs() < _TINY, 0)


def _to_q8_0(weights: Tensor) -> tuple[Tensor, None, Tensor]:
    scale = weights.abs().amax(1, keepdim=True) / 127
    scaled = _scaled(weights, scale)
    whole = scaled.abs().floor()
    codes = scaled.sign() * (whole + (2 * (scaled.abs() - whole)).floor())  # halves away from zero
    return scale, None, codes.remainder(256)


def _to_q4_0(weights: Tensor) -> tuple[Tensor, None, Tensor]:
    scale = weights.gather(1, weights.abs().argmax(1, keepdim=True)) / -8
    return scale, None, (_scaled(weights, scale) + 8.5).trunc().clamp(0, 15)


def _to_q4_1(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    least, largest = weights.aminmax(dim=1, keepdim=True)
    scale = (largest - least) / 15
    return scale, least, (_scaled(weights - least, scale) + 0.5).trunc().clamp(0, 15)


def _to_mxfp4(weights: Tensor) -> tuple[Tensor, None, Tensor]:
    largest = weights.abs().amax(1, keepdim=True)
    exponent = (largest.log2().floor() + 125).masked_fill(largest == 0, 0).clamp(0, 254)
    scaled = weights.abs() / weights.new_tensor(POWERS)[exponent.long()]  # exact: by a power of two
    codes = (scaled > _MIDDLES[0]).byte()  # a tie is rounded towards zero
    for middle in _MIDDLES[1:]:
        codes += scaled > middle
    return exponent, None, codes | ((weights < 0) & (codes > 0)).byte() << 3


def _e4m3(values: Tensor) -> Tensor:
    """Round values from 0 to 448 to numbers of E4M3, ties to even."""
    step = values.new_tensor(POWERS)[values.frexp()[1].clamp(min=-5).long() + 124]  # of three places; from 2^-9 on
    return (values / step).round() * step


def _to_nvfp4(weights: Tensor) -> tuple[Tensor, None, Tensor]:
    groups = weights.reshape(len(weights), -1, 16)
    matrix = (weights.abs().amax() / (6 * 448)).clamp(min=2.0**-100)
    eights = _e4m3((groups.abs().amax(-1) / (6 * matrix)).clamp(max=448))
    candidates = (eights * (matrix / 2))[..., None] * weights.new_tensor(_E2M1)
    codes = (candidates[:, :, None] - groups[..., None]).abs().argmin(-1)
    scales = weights.new_empty(len(weights), 1 + eights.shape[1])
    scales[:, 0], scales[:, 1:] = matrix / 2, eights
    return scales, None, codes.flatten(1)


# The rows ------------------------------------------------------------------------------------------------------------
_ROWS: Final[tuple[Format, ...]] = (
    Dense(name="bf16", bits=16, computes="bf16", gguf=30, panel=Panel("dense", "Bf16Panel")),
    Blocks(name="fp16", stored="f16", gguf=1, weights=1, block_bytes=2, panel=Panel("fp16", "FP16Panel")),
    Dense(name="fp32", bits=32, computes="fp32", stored="f32", gguf=0, panel=Panel("dense", "Fp32Panel")),
    Dense(
        name="fp64", bits=64, computes="fp64", stored="f64", gguf=28, panel=Panel("dense", "Fp64Panel"), oracle=True
    ),
    Codes(
        name="int8", bits=8, panel=Panel("int8", "Int8Panel"),
        scale_bytes=8,  # a scale, and an offset
        group_sizes=(0,), unit=64, largest=127, least_scale=1e-12, integer_products=True,
    ),
    Codes(
        name="int4", bits=4, panel=Panel("quantised", "Int4Panel<{}>"), methods=("compressed-tensors",),
        scale_bytes=2, group_sizes=(32, 64, 128), even=True, largest=7, least_scale=1e-5, bf16_scales=True,
    ),
    Codes(  # a checkpoint's scale for 128 rows is repeated for each of them
        name="fp8", bits=8, panel=Panel("quantised", "Fp8Panel<{}>"), methods=("fp8", "fbgemm_fp8"),
        scale_bytes=4, group_sizes=(128,), largest=448, least_scale=1e-12, float8=True,
    ),
    Blocks(
        name="q8_0", gguf=8, panel=Panel("q8_0", "Q8_0Panel"), weights=32, block_bytes=34,
        scales=Halves(0), codes=(CodeBits(2, 8, 32),), numbers=(*range(128), *range(-128, 0)), quantise=_to_q8_0,
    ),
    Blocks(
        name="q4_0", gguf=2, panel=Panel("q4_0", "Q4_0Panel"), weights=32, block_bytes=18,
        scales=Halves(0), codes=(CodeBits(2, 4, 16),), numbers=tuple(range(-8, 8)), quantise=_to_q4_0,
    ),
    Blocks(
        name="q4_1", gguf=3, panel=Panel("q4_1", "Q4_1Panel"), weights=32, block_bytes=20,
        scales=Halves(0, 2, added=True), codes=(CodeBits(4, 4, 16),), numbers=tuple(range(16)), quantise=_to_q4_1,
    ),
    Blocks(
        name="q4_k", gguf=12, panel=Panel("q4_k", "Q4_KPanel"), weights=256, block_bytes=144,
        scales=Halves(0, 2, sixes=4), codes=(CodeBits(16, 4, 32),), numbers=tuple(range(16)),
    ),
    Blocks(
        name="q5_k", gguf=13, panel=Panel("q5_k", "Q5_KPanel"), weights=256, block_bytes=176,
        scales=Halves(0, 2, sixes=4), codes=(CodeBits(48, 4, 32), CodeBits(16, 1, 32)), numbers=tuple(range(32)),
    ),
    Blocks(
        name="q6_k", gguf=14, panel=Panel("q6_k", "Q6_KPanel"), weights=256, block_bytes=210,
        scales=Halves(208, factors=192), codes=(CodeBits(0, 4, 64), CodeBits(128, 2, 32)),
        numbers=tuple(range(-32, 32)),
    ),
    Blocks(
        name="mxfp4", gguf=39, methods=("mxfp4",), panel=Panel("mxfp4", "MXFP4Panel"),
        weights=32, block_bytes=17, span=2,
        scales=Exponent(0), codes=(CodeBits(1, 4, 16),), numbers=_E2M1, quantise=_to_mxfp4,
    ),
    Blocks(
        name="nvfp4", methods=("modelopt",), panel=Panel("nvfp4", "NVFP4Panel"),
        weights=32, block_bytes=22, span=4, shared=4,
        scales=Float8Scales(4, 0), codes=(CodeBits(6, 4, 16),), numbers=_E2M1, quantise=_to_nvfp4,
    ),
    _uint4(32),
    _uint4(64),
    _uint4(128),
    _read_only(6, "q5_0", 32, 22),
    _read_only(7, "q5_1", 32, 24),
    _read_only(9, "q8_1", 32, 40),
    _read_only(10, "q2_k", 256, 84),
    _read_only(11, "q3_k", 256, 110),
    _read_only(15, "q8_k", 256, 292),
    _read_only(16, "iq2_xxs", 256, 66),
    _read_only(17, "iq2_xs", 256, 74),
    _read_only(18, "iq3_xxs", 256, 98),
    _read_only(19, "iq1_s", 256, 50),
    _read_only(20, "iq4_nl", 32, 18),
    _read_only(21, "iq3_s", 256, 110),
    _read_only(22, "iq2_s", 256, 82),
    _read_only(23, "iq4_xs", 256, 136),
    _read_only(29, "iq1_m", 256, 56),
    _read_only(34, "tq1_0", 256, 54),
    _read_only(35, "tq2_0", 256, 66),
    _read_only(40, "ggml_nvfp4", 64, 36),
    _read_only(41, "q1_0", 128, 18),
)  # fmt: skip

FORMATS: Final[Mapping[WeightFormat, Format]] = {row.name: row for row in _ROWS if row.panel}
"""Those that kernels multiply."""
CODES: Final[Mapping[WeightFormat, Codes]] = {row.name: row for row in FORMATS.values() if isinstance(row, Codes)}
BLOCKS: Final[Mapping[WeightFormat, Blocks]] = {row.name: row for row in FORMATS.values() if isinstance(row, Blocks)}
GGUF_TYPES: Final[Mapping[int, Format]] = {row.gguf: row for row in _ROWS if row.gguf is not None}
STORED: Final[Mapping[str, Format]] = {row.stored or row.name: row for row in _ROWS}
"""By what checkpoints call them."""
METHODS: Final[Mapping[str, WeightFormat]] = {method: row.name for row in _ROWS for method in row.methods}
"""By the method of `quantization_config`, the format."""
