"""RMS norms on a GPU as one kernel instead of eight, and as two with gradients or without Triton.

In: a model whose decoding steps become CUDA graphs. Out: the same model, in which each module that computes only

    weight * (x / sqrt(mean(x^2) + eps))

(RMSNorm, arXiv 1910.07467) calls a kernel of ktc (Triton), or PyTorch's. Both round as the stock code does: after the
fraction and after the product, or after the product alone (gpt-oss). The order of the sums may differ.
A module is recognised by its graph, and the first of its kind is compared with its stock code. Others stay as they are.
Where Triton fails on a device, or its kernel computes otherwise, a warning says so, and PyTorch's kernels remain.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from ktc.model.graph.typed import named_modules, nodes_of
from ktc.model.hf.foreign_errors import first_line
from ktc.model.hf.patching import Patch
from ktc.model.kernels.triton_support import lacking
from ktc.model.linears.plain import has_hooks
from ktc.model.steps.recording import operator_name

log = logging.getLogger(__name__)

_ROWS: Final = 16  # of the input on which a graph is recorded and both codes are compared
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_EQUAL: Final = 0.99  # of 16-bit values: code that rounds elsewhere has other values in a tenth of the places and more
_TOLERANCE: Final = 1e-5  # relative Frobenius error in fp32
_STEPS: Final = ("pow", "mean", "add", "rsqrt", "mul")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties of a norm that decide its code."""

    stock: type[nn.Module]
    size: int
    dtype: torch.dtype
    device: torch.device
    attributes: tuple[tuple[str, object], ...]


class _Code(NamedTuple):
    """How norms of a kind are computed."""

    epsilon_name: str  # of the attribute
    rounds_once: bool  # after the product alone
    by_kernel: bool  # of Triton, where there are no gradients


class FusedNorm(Patch):
    """The code of a fused norm."""

    weight: Tensor
    code: _Code

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension: (..., H) -> (..., H). Stock code computes other dtypes, and under autocast."""
        if hidden_states.dtype != self.weight.dtype or torch.is_autocast_enabled(hidden_states.device.type):
            return cast("Tensor", cast("Any", super()).forward(hidden_states))
        epsilon = getattr(self, self.code.epsilon_name)
        if self.code.by_kernel and _takes(hidden_states, self.weight):
            return _kernels().normed(hidden_states, self.weight.detach(), epsilon, once=self.code.rounds_once)
        return _normed(hidden_states, self.weight, epsilon, once=self.code.rounds_once)


def fuse_norms(model: nn.Module, device: str = "cuda") -> tuple[str, ...]:
    """Patch the RMS norms of `model` on devices of this type with the code that fuses them, and return their names."""
    codes, fused = dict[_Kind, _Code | None](), list[str]()
    for name, norm in _candidates(model, device):
        weight = cast("Tensor", norm.weight)
        kind = _Kind(type(norm), weight.shape[0], weight.dtype, weight.device, _attributes(norm))
        if kind not in codes:
            codes[kind] = _code(norm)
        if (code := codes[kind]) is not None:
            cast("Any", FusedNorm.put_on(norm)).code = code
            fused.append(name)
    return tuple(fused)


def _attributes(norm: nn.Module) -> tuple[tuple[str, object], ...]:
    """Return the attributes of a module by value, and those that are not plain values by identity."""
    attributes = {name: value for name, value in vars(norm).items() if not name.startswith("_")}
    plain = str | int | float | bool | None
    return tuple((name, value if isinstance(value, plain) else id(value)) for name, value in attributes.items())


def _candidates(model: nn.Module, device: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that consist of one vector."""
    for name, module in named_modules(model):
        tensors = {**vars(module)["_parameters"], **vars(module)["_buffers"]}
        weight = tensors.get("weight")
        if weight is None or len(tensors) > 1 or has_hooks(module) or any(True for _ in module.children()):
            continue
        if weight.dim() == 1 and weight.device.type == device and weight.dtype in _DTYPES:
            yield name, module


def _code(norm: nn.Module) -> _Code | None:
    """Return how a norm is computed, None for a module of another computation."""
    weight = cast("Tensor", norm.weight)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, weight.shape[0], generator=generator).to(weight.device, weight.dtype)
    with torch.inference_mode(mode=False), torch.no_grad():
        try:
            epsilon = _epsilon(make_fx(norm)(x))
            random = torch.randn(x.shape[-1], generator=generator).to(x)  # the module's may be of ones
            expected = functional_call(norm, {"weight": random}, (x,))
        except Exception:  # noqa: BLE001 - code of any kind on an input that it may not take
            return None
        name = next((key for key, value in vars(norm).items() if type(value) is float and value == epsilon), None)
        if epsilon is None or name is None:
            return None
        for once in (False, True):
            if _same(_normed(x, random, epsilon, once=once), expected):
                return _Code(name, once, _kernel_computes(expected, x, random, epsilon, once=once))
        return None


def _kernel_computes(expected: Tensor, x: Tensor, weight: Tensor, epsilon: float, *, once: bool) -> bool:
    """Return whether Triton's kernel computes what is expected. A warning says why it does not on a GPU."""
    if not _has_triton(x.device):
        return False
    try:
        if x.shape[-1] > _kernels().WIDEST:
            return False
        computed = _kernels().normed(x, weight, epsilon, once=once)
    except Exception as error:  # noqa: BLE001 - Triton's compiler raises anything
        fault = first_line(error)
    else:
        if _same(computed, expected):
            return True
        fault = "the kernel computes other values"
    log.warning("norms of %d values are two kernels on %s instead of one: %s", x.shape[-1], x.device, fault)
    return False


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether Triton's kernel serves a call: it has no backward, and compilers do not see into it."""
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not trains and not torch.compiler.is_compiling() and type(x) is Tensor and _has_triton(x.device)


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and not lacking(device)


def _kernels() -> Any:
    """Return what needs Triton."""
    from ktc.model.decode_steps import norm_kernels

    return norm_kernels


def _normed(x: Tensor, weight: Tensor, epsilon: float, *, once: bool) -> Tensor:
    """Normalise the last dimension by PyTorch's kernels: one for the fraction, one for the product; or one for both."""
    if once:
        return functional.rms_norm(x, x.shape[-1:], weight, epsilon)
    return weight * functional.rms_norm(x, x.shape[-1:], eps=epsilon)


def _same(computed: Tensor, expected: Tensor) -> bool:
    if expected.dtype != torch.float32:
        return float((computed == expected).float().mean()) >= _EQUAL
    return float((computed - expected).square().sum()) <= _TOLERANCE**2 * float(expected.square().sum())


def _epsilon(graph: fx.GraphModule) -> float | None:
    """Return epsilon where the graph of a module is that of an RMS norm with a weight, None for every other graph."""
    nodes: list[Any] = list(nodes_of(graph))
    x = nodes[0]
    weight, *more = [node for node in nodes if node.op == "get_attr"] or [None]
    called = [node for node in nodes if node.op == "call_function"]
    casts = [node for node in called if operator_name(node.target) == "_to_copy"]
    chain = [node for node in called if node not in casts]
    if more or [operator_name(node.target) for node in chain] != [*_STEPS, "mul"]:
        return None

    def source(node: Any) -> Any:
        """Look through the casts, which the comparison of values covers."""
        while node in casts:
            node = node.args[0]
        return node

    square, mean, biased, root, scaled, weighted = chain
    is_norm = (
        (source(square.args[0]), square.args[1]) == (x, 2)
        and (mean.args[0], list(mean.args[1]), mean.args[2]) == (square, [-1], True)
        and biased.args[0] is mean and isinstance(biased.args[1], float)
        and root.args[0] is biased
        and {source(factor) for factor in scaled.args} == {x, root}
        and {source(factor) for factor in weighted.args} == {weight, scaled}
        and source(nodes[-1].args[0]) is weighted
    )  # fmt: skip
    return biased.args[1] if is_norm else None
