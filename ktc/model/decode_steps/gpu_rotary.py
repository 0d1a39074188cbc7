"""Rotary positions on a GPU as one kernel instead of up to twelve, where new tokens need no gradients.

In: a model whose decoding steps become CUDA graphs. Out: the same model. In its attention modules' own code, a global
function that rotates queries and keys (RoPE, arXiv 2104.09864), by cosines and sines or by complex numbers, is replaced
by one that calls the kernel where nothing needs gradients, and the function itself elsewhere. A function is recognised
by its results on random numbers; a dtype in which the kernel rounds otherwise has the function itself. Other code stays
as it is: another patch's, and that of models which rotate a part of each head.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final, Literal, cast, get_args

import torch
from torch import Tensor, nn

from ktc.model.graph.typed import named_modules
from ktc.model.hf.foreign_errors import first_line
from ktc.model.hf.patching import Patch, stock_class
from ktc.model.kernels.triton_support import lacking
from ktc.model.linears.plain import has_hooks

log = logging.getLogger(__name__)

_MOST_NUMBERS: Final = 1 << 31  # of a tensor, so that the kernel's 32-bit integers have all its places
_NAMES: Final = "apply_rotary"  # with which names of such functions begin
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_EQUAL: Final = 0.99  # of 16-bit values: code that rounds elsewhere has other values in a tenth of the places and more
_TOLERANCE: Final = 1e-5  # relative Frobenius error in fp32
_WIDTH: Final = 64
Rotate = Callable[..., Any]
Kind = Literal["halves", "narrow", "interleaved", "pairs"]
_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""Numbers half a row apart by angles of whole rows, or of half of one; neighbours that move apart; and complex ones."""


class FusedRotary(Patch):
    """The code of an attention module whose rotations are one kernel."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the stock module does."""
        forward = _forward(stock_class(cast("nn.Module", self)))
        assert forward is not None, "modules of other code are not patched"
        return forward(self, *args, **kwargs)


def fuse_rotary(model: nn.Module, device: str = "cuda") -> tuple[str, ...]:
    """Patch attention modules of `model` on devices of this type with the code that fuses, and return their names."""
    fused = list[str]()
    for name, module in named_modules(model):
        stock = stock_class(module)
        place = next((parameter.device for parameter in module.parameters()), None)
        if place is None or place.type != device or lacking(place):
            continue
        is_stock = type(module).forward is stock.forward and "forward" not in vars(module) and not has_hooks(module)
        if is_stock and _forward(stock) is not None and not _rotates_parts(module) and _is_served(module, place):
            FusedRotary.put_on(module)
            fused.append(name)
    return tuple(fused)


def _is_served(module: nn.Module, device: torch.device) -> bool:
    """Return whether the kernel computes what the functions of a module do, in a dtype in which it may compute.

    That is one of its parameters', or any where all of them are packed.
    """
    stock = stock_class(module)
    dtypes = {parameter.dtype for parameter in module.parameters()}.intersection(_DTYPES) or set(_DTYPES)
    functions = [(stock.forward.__globals__[name], kind) for name, kind in _rotating(stock).items()]
    served = [all(_equals(*function, device, dtype) for function in functions) for dtype in dtypes]
    return any(served)


def _rotates_parts(module: Any) -> bool:
    """Return whether a module's config has it rotate the first numbers of a head alone, by functions that can."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return False
    of_model = cast("dict[str, Any]", parameters)
    of_kinds = (cast("dict[str, Any]", value) for value in of_model.values() if isinstance(value, dict))
    of_layers = [of_model, *of_kinds]
    if all((given.get("partial_rotary_factor") or 1) == 1 for given in of_layers):
        return False
    stock = stock_class(module)
    return any(_takes_parts(stock.forward.__globals__[name], kind) for name, kind in _rotating(stock).items())


@functools.cache
def _takes_parts(function: Rotate, kind: Kind) -> bool:
    """Return whether a function takes angles of less than a head."""
    with torch.device("cpu"), torch.no_grad():
        query, key, *angles = _random(kind, torch.device("cpu"), torch.float32)
        try:
            function(torch.cat((query, query), -1), torch.cat((key, key), -1), *angles)
        except Exception:  # noqa: BLE001 - code of any kind on an input that it may not take
            return False
    return True


@functools.cache
def _forward(stock: type[nn.Module]) -> FunctionType | None:
    """Return the code of a class with a kernel in place of its rotating functions, None where it has none."""
    forward, kinds = stock.forward, _rotating(stock)
    if not kinds:
        return None
    functions = {name: _with_kernel(forward.__globals__[name], kind) for name, kind in kinds.items()}
    names = {**forward.__globals__, **functions}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@functools.cache
def _rotating(stock: type[nn.Module]) -> Mapping[str, Kind]:
    """Return the names of the global functions that rotate in the code of a class, and their kinds."""
    forward = stock.forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return {}
    called = [name for name in forward.__code__.co_names if name.startswith(_NAMES) and name in forward.__globals__]
    kinds = dict[str, Kind]()
    for name in called:
        if (kind := _kind(forward.__globals__[name])) is not None:
            kinds[name] = kind
    return kinds


@functools.cache
def _kind(function: Rotate) -> Kind | None:
    """Return the kind of a function by its results, None for other functions."""
    with torch.device("cpu"), torch.no_grad():
        for kind in _KINDS:
            given = [*_random(kind, torch.device("cpu"), torch.float32)]
            try:
                computed = function(*given)
                if all(_same(one, other) for one, other in zip(computed, _reference(kind, *given), strict=True)):
                    return kind
            except Exception:  # noqa: BLE001 - code of any kind on an input that it may not take
                continue
    return None


def _with_kernel(function: Rotate, kind: Kind) -> Rotate:
    """Return `function` with the kernel for the calls that it serves."""

    @functools.wraps(function)
    def rotated(*given: Any, **options: Any) -> Any:
        is_whole = not options and len(given) == (3 if kind == "pairs" else 4)
        if is_whole and _serves(kind, *given) and _equals(function, kind, given[0].device, given[0].dtype):
            return _kernel(kind)(*given)
        return function(*given, **options)

    return rotated


def _serves(kind: Kind, query: Tensor, key: Tensor, *angles: Tensor) -> bool:
    """Return whether the kernel computes the call."""
    tensors = query, key, *angles
    if torch.compiler.is_compiling() or any(type(tensor) is not Tensor or tensor.dim() < 3 for tensor in tensors):
        return False
    (*of_query, D), (*of_key, width), T = query.shape, key.shape, query.shape[-2]
    if len(of_query) != 3 or len(of_key) != 3 or (of_query[::2], D) != (of_key[::2], width):
        return False
    columns = D if kind in ("halves", "interleaved") else D // 2
    shapes = {(1, T, columns), (query.shape[0], T, columns)}
    dtype = torch.complex64 if kind == "pairs" else query.dtype
    fit = all(tuple(a.shape) in shapes and a.dtype == dtype for a in angles)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    plain = query.stride(-1) == key.stride(-1) == 1 and query.numel() > 0 and D % 2 == 0
    plain = plain and max(_extent(tensor) for tensor in (query, key)) < _MOST_NUMBERS
    return (
        fit and plain and not trains and query.dtype == key.dtype and query.dtype in _DTYPES
        and len({tensor.device for tensor in tensors}) == 1 and not torch.is_autocast_enabled(query.device.type)
    )  # fmt: skip


def _extent(tensor: Tensor) -> int:
    """Return the numbers from the first of a tensor to its last in memory, or of a copy if that is more."""
    places = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(places + 1, tensor.numel())


@functools.cache
def _equals(function: Rotate, kind: Kind, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel computes what a function does, on a device and in a dtype."""
    with torch.no_grad():
        given = [*_random(kind, device, dtype)]
        try:
            wanted = function(*given)
            computed = _kernel(kind)(*given)
        except Exception as error:  # noqa: BLE001 - Triton's compiler raises anything
            log.warning("rotary positions stay as they are on %s: %s", device, first_line(error))
            return False
        is_same = all(_same(one, other) for one, other in zip(computed, wanted, strict=True))
    if not is_same:
        log.info("rotary positions in %s stay as they are on %s: the kernel rounds otherwise", dtype, device)
    return is_same


def _random(kind: Kind, device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield queries, keys, and angles of two sequences of three tokens."""
    generator = torch.Generator().manual_seed(0)
    for heads in (6, 2):
        yield torch.randn(2, 3, heads, _WIDTH, generator=generator, device="cpu").to(device, dtype).transpose(1, 2)
    angles = torch.randn(2, 3, _WIDTH // 2, generator=generator, device="cpu")
    if kind == "pairs":
        yield torch.polar(torch.ones_like(angles), angles).to(device)
    else:
        angles = angles if kind == "narrow" else torch.cat((angles, angles), -1)
        yield from (angles.cos().to(device, dtype), angles.sin().to(device, dtype))


def _reference(kind: Kind, query: Tensor, key: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
    """Return what functions of a kind compute, step by step."""
    return tuple(_rotated(kind, tensor, *(angle.unsqueeze(1) for angle in angles)) for tensor in (query, key))


def _rotated(kind: Kind, x: Tensor, *angles: Tensor) -> Tensor:
    if kind == "pairs":
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles[0]).flatten(3).type_as(x)
    if kind == "narrow":
        angles = tuple(torch.cat((angle, angle), -1) for angle in angles)
    first, second = (x[..., ::2], x[..., 1::2]) if kind == "interleaved" else x.chunk(2, -1)
    return torch.cat((first, second), -1) * angles[0] + torch.cat((-second, first), -1) * angles[1]


def _same(computed: Tensor, expected: Tensor) -> bool:
    if expected.shape != computed.shape or expected.dtype != computed.dtype:
        return False
    if expected.dtype != torch.float32:
        return float((computed == expected).float().mean()) >= _EQUAL
    return float((computed - expected).square().sum()) <= _TOLERANCE**2 * float(expected.square().sum())


def _kernel(kind: Kind) -> Rotate:
    """Return what needs Triton."""
    from ktc.model.decode_steps import rotary_kernels

    if kind == "pairs":
        return rotary_kernels.rotate_pairs
    return functools.partial(rotary_kernels.rotate_halves, interleaved=kind == "interleaved")
