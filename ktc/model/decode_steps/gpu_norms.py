"""RMS norms on a GPU as two kernels instead of eight.

In: a model whose decoding steps become CUDA graphs. Out: the same model, in which each module that computes only

    weight * (x / sqrt(mean(x^2) + eps))

(RMSNorm, arXiv 1910.07467) is of a class that has PyTorch's kernel for the fraction. It rounds as the
stock code does: once after the fraction, once after the product. Sums may be added in another order.
A module is recognised by its graph, and the first of its kind is compared with its stock code. Others stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from ktc.model.graph.typed import named_modules, nodes_of
from ktc.model.linears.plain import has_hooks

_ROWS: Final = 16  # of the input on which a graph is recorded and both codes are compared
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_EQUAL: Final = 0.99  # of 16-bit values: code that rounds elsewhere has other values in a tenth of the places and more
_TOLERANCE: Final = 1e-5  # relative Frobenius error in fp32
_STEPS: Final = ("pow", "mean", "add", "rsqrt", "mul")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties of a norm that decide its class."""

    stock: type[nn.Module]
    size: int
    dtype: torch.dtype
    attributes: tuple[tuple[str, object], ...]


class FusedNorm:
    """Mixin before the stock class of a norm. `epsilon_name` is the attribute in which the module holds epsilon."""

    weight: Tensor
    epsilon_name: str

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension: (..., H) -> (..., H). Stock code computes other dtypes, and under autocast."""
        if hidden_states.dtype != self.weight.dtype or torch.is_autocast_enabled(hidden_states.device.type):
            return cast("Tensor", cast("Any", super()).forward(hidden_states))
        normal = functional.rms_norm(hidden_states, hidden_states.shape[-1:], eps=getattr(self, self.epsilon_name))
        return self.weight * normal

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the module by the stock class, since no module has the fused one by its name."""
        return _empty, (type(self).__bases__[1], self.epsilon_name), vars(self)


@functools.cache
def fused_class(stock: type[nn.Module], epsilon_name: str) -> type[nn.Module]:
    """Return the class of a fused norm."""
    return type(f"Fused{stock.__name__}", (FusedNorm, stock), {"epsilon_name": epsilon_name})


def _empty(stock: type[nn.Module], epsilon_name: str) -> nn.Module:
    made = fused_class(stock, epsilon_name)
    return made.__new__(made)


def fuse_norms(model: nn.Module, device: str = "cuda") -> tuple[str, ...]:
    """Give the RMS norms of `model` on devices of this type the class that fuses them, and return their names."""
    classes, fused = dict[_Kind, type[nn.Module] | None](), list[str]()
    for name, norm in _candidates(model, device):
        weight = cast("Tensor", norm.weight)
        kind = _Kind(type(norm), weight.shape[0], weight.dtype, _attributes(norm))
        if kind not in classes:
            classes[kind] = _fused_class(norm)
        if (made := classes[kind]) is not None:
            norm.__class__ = made
            fused.append(name)
    return tuple(fused)


def _attributes(norm: nn.Module) -> tuple[tuple[str, object], ...]:
    """Return the attributes of a module by value, and those that are not plain values by identity."""
    held = {name: value for name, value in vars(norm).items() if not name.startswith("_")}
    plain = str | int | float | bool | None
    return tuple((name, value if isinstance(value, plain) else id(value)) for name, value in held.items())


def _candidates(model: nn.Module, device: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that consist of one vector."""
    for name, module in named_modules(model):
        held = {**vars(module)["_parameters"], **vars(module)["_buffers"]}
        weight = held.get("weight")
        if weight is None or len(held) > 1 or has_hooks(module) or any(True for _ in module.children()):
            continue
        if weight.dim() == 1 and weight.device.type == device and weight.dtype in _DTYPES:
            yield name, module


def _fused_class(norm: nn.Module) -> type[nn.Module] | None:
    """Return the class for a norm, None for a module that computes something else."""
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
        found = random * functional.rms_norm(x, x.shape[-1:], eps=epsilon)
    return fused_class(type(norm), name) if _same(found, expected) else None


def _same(found: Tensor, expected: Tensor) -> bool:
    if expected.dtype != torch.float32:
        return float((found == expected).float().mean()) >= _EQUAL
    return float((found - expected).square().sum()) <= _TOLERANCE**2 * float(expected.square().sum())


def _epsilon(graph: fx.GraphModule) -> float | None:
    """Return epsilon where the graph of a module is that of an RMS norm with a weight, None for every other graph."""
    nodes: list[Any] = list(nodes_of(graph))
    x = nodes[0]
    weight, *more = [node for node in nodes if node.op == "get_attr"] or [None]
    called = [node for node in nodes if node.op == "call_function"]
    casts = [node for node in called if _name(node) == "_to_copy"]
    chain = [node for node in called if node not in casts]
    if more or [_name(node) for node in chain] != [*_STEPS, "mul"]:
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
        and {source(each) for each in scaled.args} == {x, root}
        and {source(each) for each in weighted.args} == {weight, scaled}
        and source(nodes[-1].args[0]) is weighted
    )  # fmt: skip
    return biased.args[1] if is_norm else None


def _name(node: Any) -> str:
    return str(node.target.__name__).partition(".")[0]
