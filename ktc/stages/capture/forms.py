"""The form of an experts module, read from its own gate code: layout flags, activation, and its constants.

The gate code is run for the numbers in it (a limit, an alpha, an offset). Every activation with these numbers is
evaluated; the one with equal values is the form. The activation is recognised by value and not by its source code, so
an unsupported one is reliably reported. A module whose class does more than call the experts interface has no form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from types import CodeType
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.utils import parametrize
from transformers.integrations.moe import use_experts_implementation

from ktc.model.experts.private_api import TorchDispatchMode, pytree
from ktc.model.experts.references.reference import activated
from ktc.model.hf.private_api import gate_code
from ktc.model.kernels.form import Activation, ExpertsForm, Function
from ktc.model.linears.plain import has_hooks
from ktc.stages.capture.circumstances import Inside, dependence
from ktc.stages.capture.private_api import FakeTensorMode, source_of
from ktc.stages.capture.side_effects import side_effect
from ktc.stages.capture.states import Given
from ktc.stages.capture.trace import LAYOUT, MODES, traced, training_mode, without_sizes

UNSUPPORTED = "unsupported: "  # begins the form of experts that no kernel computes; the reason follows
_SAMPLES = 64
_SPREAD = 12.0  # range in which the functions differ


def form_of(module: nn.Module) -> str:
    """Return the text of the module's form, or `unsupported: ` and the reason."""
    gated = bool(getattr(module, "has_gate", True))
    name = type(module).__name__
    if reason := _more_than_experts(module, "gate_up_proj" if gated else "up_proj"):
        return f"{UNSUPPORTED}{reason}"
    code = _gate(module)
    if code is None:
        return f"{UNSUPPORTED}`{name}` does not name its activation"
    try:
        if reason := _effect(module, code):
            return f"{UNSUPPORTED}the activation of `{name}` does more than compute: {reason}"
        form = form_of_code(code, gated, trained=lambda: training_mode(module, True))
    except Exception as error:  # noqa: BLE001 - foreign code on a sample raises anything; the reason quotes it
        return f"{UNSUPPORTED}the activation of `{name}` does not run alone ({type(error).__name__})"
    if form is None or _differs_by_call(code, module):
        return f"{UNSUPPORTED}`{name}` has an activation that no kernel computes"
    biased, transposed = bool(getattr(module, "has_bias", False)), bool(getattr(module, "is_transposed", False))
    return str(replace(form, biased=biased, transposed=transposed))


def _gate(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    code = gate_code(module) if getattr(module, "has_gate", True) else getattr(module, "act_fn", None)
    return cast("Callable[[Tensor], Tensor]", code) if callable(code) else None


def gate_dependence(module: nn.Module) -> str:
    """Return in which circumstances the gate code of a module with a form computes something else, "" if in none."""
    code = _gate(module)
    assert code is not None, "a module with a form has gate code"
    sample = _rows_for(module)

    def run(given: Given, inside: Inside) -> object:
        with inside():
            return code(given(sample))

    return dependence(module, run)


def _rows_for(module: nn.Module) -> Tensor:
    """Return empty rows (2, columns) in the dtype and on the device of the module."""
    return next(module.parameters()).new_empty(2, 2 * _SAMPLES)


def _more_than_experts(module: nn.Module, first: str) -> str:
    """Return why replacing the module would lose something, "" if its call is the experts interface and no more."""
    name = type(module).__name__
    if not is_interface(module):
        return f"`{name}` computes something around its experts"
    if type(module).__call__ is not nn.Module.__call__ or has_hooks(module):
        return f"hooks on `{name}` are called with its experts"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm after each expert"
    biases = (f"{first}_bias", "down_proj_bias") if getattr(module, "has_bias", False) else ()
    parameters = dict(module.named_parameters(recurse=False))
    if missing := [tensor for tensor in (first, "down_proj", *biases) if tensor not in parameters]:
        return f"`{name}` holds no `{missing[0]}`"
    matrices = {first, "down_proj", *biases}
    if more := [tensor for tensor in module.state_dict() if tensor not in matrices]:
        return f"`{name}` holds `{more[0]}` beside its matrices"
    return f"the weights of `{name}` are computed" if parametrize.is_parametrized(module) else ""


def _effect(module: nn.Module, code: Callable[[Tensor], Tensor]) -> str:
    """Return what gate code leaves behind in either mode, "" if only its result."""
    sample = _rows_for(module)
    for training in (module.training, True):
        with training_mode(module, training):
            if reason := side_effect(module, lambda: code(sample)):
                return reason
    return ""


def _differs_by_call(code: Callable[[Tensor], Tensor], module: nn.Module) -> bool:
    """Return whether the computation depends on the dtype, on a mode of torch or on the number of rows.

    The module's own dtype is compared with fp32, without casts.
    """
    dtypes = (next(module.parameters()).dtype, torch.float32)
    samples = [torch.zeros(2, 2 * _SAMPLES, dtype=dtype) for dtype in dtypes]
    try:
        one, other = (without_sizes(traced(module, lambda x=sample: code(x))) for sample in samples)
        if one != other or reads_rows(code, samples[1]):
            return True
        for mode in MODES:
            with mode():
                if without_sizes(traced(module, lambda: code(samples[1]))) != one:
                    return True
    except Exception:  # noqa: BLE001 - foreign code that runs in one dtype alone differs by it
        return True
    return False


def reads_rows(code: Callable[[Tensor], Tensor], sample: Tensor) -> bool:
    """Return whether code branches on the number of its rows."""
    shapes, many = ShapeEnv(), sample.repeat(8, 1)
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode, torch.no_grad():
        rows = cast("Any", StatelessSymbolicContext)(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        code(mode.from_tensor(many, symbolic_context=rows, source=source_of("rows")))
    return bool(shapes.guards)


def is_interface(module: nn.Module) -> bool:
    """Return whether `forward` of a module is only the experts interface of transformers."""
    code = getattr(type(module).forward, "__code__", None)
    return code is interface_code() and "forward" not in vars(module)


@cache
def interface_code() -> CodeType:
    """Return the code of the `forward` with which transformers calls the chosen implementation of experts."""

    class Experts(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    return use_experts_implementation(Experts).forward.__code__


def form_of_code(
    code: Callable[[Tensor], Tensor], gated: bool, width: int = 2 * _SAMPLES,
    trained: Callable[[], Any] | None = None,
) -> ExpertsForm | None:  # fmt: skip
    """Return the form whose activation equals `code` on `width` columns; None if there is no such form.

    Code that `trained` puts in training mode must compute the same there.
    """
    with torch.no_grad(), _Numbers() as numbers:
        code(_samples(_SPREAD, width)[: _SAMPLES // 2])
    if numbers.reads_values:
        return None  # a branch on values, of which a sample takes one side
    constants = frozenset(numbers.constants)
    sample = _samples(max([_SPREAD, *(1.5 * abs(number) for number in constants)]), width)  # exceeds every limit
    with torch.no_grad():
        expected = code(sample).double()
        if trained is not None:
            with trained():
                again = code(sample).double()
            if not torch.equal(again.nan_to_num(), expected.nan_to_num()):
                return None
    of_sample, of_result = (_Bytes(tuple(t.shape), t.numpy().tobytes()) for t in (sample, expected))
    return _search(constants, gated, of_sample, of_result)


class _Bytes(NamedTuple):
    """An fp64 tensor as a key of a cache."""

    shape: tuple[int, ...]
    content: bytes

    def tensor(self) -> Tensor:
        return torch.frombuffer(bytearray(self.content), dtype=torch.float64).reshape(self.shape)


@lru_cache(maxsize=64)  # a deep model has one module of experts per layer
def _search(constants: frozenset[float], gated: bool, of_sample: _Bytes, of_result: _Bytes) -> ExpertsForm | None:
    sample, expected = of_sample.tensor(), of_result.tensor()
    for form in _candidates(constants, gated):
        actual = activated(form, sample)
        # Some gates compute in fp32 for every input dtype.
        if actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True):
            return form
    return None


def _samples(spread: float, width: int) -> Tensor:
    """Return rows within the range where functions differ, rows within `spread`, and rows with a NaN or an infinity."""
    generator = torch.Generator().manual_seed(0)
    sample = 2 * torch.rand(_SAMPLES, width, generator=generator, dtype=torch.float64) - 1
    sample[: _SAMPLES // 2] *= _SPREAD
    sample[_SAMPLES // 2 :] *= spread
    for row in range(_SAMPLES - 4, _SAMPLES):
        sample[row, (7 * row) % width] = torch.nan
        sample[row - 4, (7 * row) % width] = torch.inf
        sample[row - 8, (7 * row) % width] = -torch.inf
    return sample


def _candidates(constants: frozenset[float], gated: bool) -> Iterator[ExpertsForm]:
    """Yield the plain activations first, then all activations with the numbers of the code."""
    for function, interleaved in product(get_args(Function), (False, True) if gated else (False,)):
        yield ExpertsForm(Activation(function), gated, interleaved=interleaved)
    if not gated:
        return
    positive = sorted(number for number in constants if number > 0)
    limits, alphas, offsets = (None, *positive), (1.0, *positive), (0.0, *sorted(constants))
    for limit, alpha, offset, interleaved in product(limits, alphas, offsets, (False, True)):
        yield ExpertsForm(Activation("silu", alpha, limit, offset), interleaved=interleaved)
    for function, limit, interleaved in product(get_args(Function), positive, (False, True)):
        yield ExpertsForm(Activation(function, limit=limit), interleaved=interleaved)
    for gate_cap, up_cap, interleaved in product((None, *positive), (None, *positive), (False, True)):
        yield ExpertsForm(Activation("silu", gate_cap=gate_cap, up_cap=up_cap), interleaved=interleaved)


class _Numbers(TorchDispatchMode):
    """Collects the finite numbers that operators inside are given, apart from places and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: set[float] = set()
        self.reads_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads_values |= "_local_scalar_dense" in str(func)
        if not any(layout in str(func) for layout in LAYOUT):
            leaves = pytree.tree_leaves((args, dict(kwargs or {})))
            self.constants |= {float(leaf) for leaf in leaves if type(leaf) in (int, float) and math.isfinite(leaf)}
        return func(*args, **(kwargs or {}))
