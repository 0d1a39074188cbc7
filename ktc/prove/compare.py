"""Numeric equivalence of an original block and its rewritten graph: output and every gradient, relative Frobenius.

The two share weights, inputs and output gradients. The comparison covers the output and the gradients of the hidden
states, of the routing weights (the experts' third input) and of every parameter that the rewrite leaves trainable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ktc.capture.export import flatten_call, main_output
from ktc.experts.module import FusedMoe
from ktc.graph.typed import input_names, named_modules
from ktc.targets.module_target import ITSELF

# Witnesses run in fp32 and routers cast to fp32 themselves; measured errors of correct rewrites stay below 1e-6, those
# of wrong ones (tests/prove/test_prove.py) above 1e-3.
TOLERANCE = 2e-5
# Where terms cancel, the error of fp32 may exceed the tolerance. Up to this error fp64 decides; a larger one fails.
CLOSE = 5e-4


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs a block was called with in a forward of the witness model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Proof:
    """One distinct rewrite against its original. Errors are the worst over all shapes, relative Frobenius."""

    rewrite: str
    block: str
    rules: tuple[str, ...]
    forward: float
    gradients: Mapping[str, float]
    shapes: tuple[tuple[int, ...], ...]
    seed: int
    tolerance: float = TOLERANCE

    @property
    def worst_gradient(self) -> float:
        """The largest error of all gradients."""
        return max(self.gradients.values(), default=0.0)

    @property
    def holds(self) -> bool:
        """Whether every error is a number within the tolerance: NaN does not hold."""
        return all(error <= self.tolerance for error in (self.forward, *self.gradients.values()))

    @property
    def is_close(self) -> bool:
        """Whether rounding may explain every error."""
        return all(error <= CLOSE for error in (self.forward, *self.gradients.values()))

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the verdict as `holds`."""
        return {
            "rewrite": self.rewrite, "block": self.block, "rules": list(self.rules), "forward": self.forward,
            "gradients": dict(self.gradients), "shapes": [list(s) for s in self.shapes], "seed": self.seed,
            "tolerance": self.tolerance, "holds": self.holds,
        }  # fmt: skip


def compare(
    original: nn.Module, rewritten: fx.GraphModule, calls: Sequence[Call], seed: int
) -> tuple[float, dict[str, float]]:
    """Return the worst forward error and the worst error of each gradient over `calls`.

    `rewritten` must hold the same tensors as `original` under the same block-relative FQNs. The caller fills its frozen
    experts from those of `original`.
    """
    forward, gradients = 0.0, dict[str, float]()
    generator = torch.Generator().manual_seed(seed)
    for call in calls:
        expected = _run(original, rewritten, call, generator.get_state(), use_original=True)
        actual = _run(original, rewritten, call, generator.get_state(), use_original=False)
        forward = max(forward, relative_error(actual.pop("output"), expected.pop("output")))
        for name in expected.keys() | actual.keys():
            error = relative_error(actual.get(name), expected.get(name))
            gradients[name] = max(gradients.get(name, 0.0), error)
        generator.manual_seed(generator.initial_seed() + 1)
    return forward, gradients


class InDouble(TorchDispatchMode):
    """Replace fp32 by fp64 in every call inside: stock code casts to fp32 wherever it needs to be exact."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wider: Any = pytree.tree_map(_widened, (args, kwargs or {}))
        return func(*wider[0], **wider[1])


def _widened(argument: object) -> object:
    return torch.float64 if argument is torch.float32 else argument


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return ||actual - expected|| / ||expected||. A missing tensor counts as zero; if only one is zero, infinity."""
    if expected is None or not bool(expected.any()):
        return 0.0 if actual is None or not bool(actual.any()) else float("inf")
    if actual is None:
        return float("inf")
    relative = float(_norm(actual.double() - expected.double()) / _norm(expected.double()))
    return float("inf") if math.isnan(relative) else relative


def _norm(tensor: Tensor) -> Tensor:
    return cast("Tensor", tensor.norm())


def _run(
    original: nn.Module, rewritten: fx.GraphModule, call: Call, random_state: Tensor, use_original: bool
) -> dict[str, Tensor | None]:
    """Return the output and the gradients of one side by name."""
    generator = torch.Generator()
    generator.set_state(random_state)
    names, tensors, rebuild = flatten_call(call.args, call.kwargs)
    dtype = next(p.dtype for p in original.parameters() if p.is_floating_point())
    tensors = tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)
    shape = tensors[names.index("hidden_states")].shape
    hidden = torch.randn(shape, generator=generator).to(dtype).requires_grad_(True)
    inputs = {**dict(zip(names, tensors, strict=True)), "hidden_states": hidden}
    module = original if use_original else rewritten
    frozen = {name for name, child in named_modules(rewritten) if isinstance(child, FusedMoe)}
    itself = ITSELF in frozen  # then the routing weights are an input
    if itself:
        inputs = {n: t if not t.is_floating_point() else t.detach().requires_grad_(True) for n, t in inputs.items()}
    # A router's correction bias may be a parameter that its own code never trains.
    parameters = {
        name: p
        for name, p in module.named_parameters()
        if p.requires_grad and not any(itself or name.startswith(f + ".") for f in frozen)
    }
    # A list of experts is not called, so there only the router's own gradients cover the routing weights.
    called = {n for n in frozen if n != ITSELF and not isinstance(original.get_submodule(n), nn.ModuleList)}
    with _routing_weights(module, called) as routing:
        if use_original:
            args, kwargs = rebuild([inputs[n] for n in names])
            output = main_output(module(*args, **kwargs))
        else:
            output = main_output(module(*(inputs[name] for name in input_names(rewritten))))
    direction = torch.randn(output.shape, generator=generator).to(output.dtype)
    given = {name: t for name, t in inputs.items() if t.requires_grad}
    wanted = {**given, **{f"routing_weights of {n}": w for n, w in routing.items()}, **parameters}
    gradients = torch.autograd.grad(output, list(wanted.values()), direction, allow_unused=True)
    return {"output": output.detach(), **dict(zip(wanted, gradients, strict=True))}


@contextmanager
def _routing_weights(module: nn.Module, experts: set[str]) -> Generator[dict[str, Tensor]]:
    """Collect the routing weights that reach each experts module while inside."""
    seen: dict[str, Tensor] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[2]

        return hook

    handles = [module.get_submodule(name).register_forward_pre_hook(remember(name)) for name in sorted(experts)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
