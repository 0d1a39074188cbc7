"""One block beside its rewritten form on one input: everything it returns and keeps, and every gradient.

Input: two modules with equal weights, and a case. Output: their `Comparison`. Both sides get
the same inputs, the same random state and the same output gradients. Compared are the results, the tensors that the
block keeps as attributes, its input after the call, and the gradients of the hidden states, of the routing weights (the
third input of its experts) and of every parameter that the rewrite leaves trainable.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, set_grad_enabled

from ktc.model.compare.comparison import Comparison, Values, compare
from ktc.model.compare.double import InDouble
from ktc.model.compare.errors import norm
from ktc.model.compare.feed import same_random_numbers
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.private_api import TorchDispatchMode, pytree, schema_of, version_of
from ktc.model.graph.typed import named_modules
from ktc.stages.capture.trace import plain_settings
from ktc.stages.proof.cases import MANY, Case
from ktc.stages.proof.types import Constant

# Rounding may tip a choice of experts, which changes single rows of a result. A way that code takes changes most rows.
_ROUNDED = 1e-2
# Far from what a model computes, a gradient may vanish next to the others, and its last digits are rounding.
_VANISHING = 1e-4


def compare_blocks(stock: nn.Module, rewritten: nn.Module, case: Case, seed: int) -> Comparison:
    """Return the error of each result (`output`, `attribute ...`) and gradient (`gradient of ...`)."""
    fused = {name: child for name, child in named_modules(rewritten) if isinstance(child, FusedMoe)}
    frozen = {name for name, child in fused.items() if not child.weights.training.trains}
    # A list of experts is not called, so there only the router's own gradients cover the routing weights.
    called = {name for name in fused if not isinstance(stock.get_submodule(name), nn.ModuleList)}
    with _weights(case, *(model.get_submodule(name) for name in fused for model in (stock, rewritten))):
        return compare(
            lambda: _run(stock, frozen, called, case, seed),
            lambda: _run(rewritten, frozen, called, case, seed),
            _vanishing if case.stress else lambda _: lambda _: 0.0,
        )


def _vanishing(expected: Values) -> Callable[[str], float]:
    """Return the least norm that errors of gradients are relative to: a share of the largest gradient's norm."""
    sizes = [norm(t) for name, t in expected.items() if name.startswith("gradient") and t is not None]
    floor = _VANISHING * max(filter(math.isfinite, sizes), default=0.0)
    return lambda name: floor if name.startswith("gradient") else 0.0


def computes_otherwise_in_double(stock: nn.Module, wide: nn.Module, case: Case, seed: int) -> bool:
    """Return whether most rows of a result of stock code differ in fp64 from those in fp32 by more than rounding."""
    of_results = replace(case, poisoned=True)
    single = _run(stock, set(), set(), of_results, seed)
    with InDouble():
        double = _run(wide, set(), set(), of_results, seed)
    return any(_most_rows_differ(single[name], double.get(name)) for name in single if name.startswith("output"))


def _most_rows_differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or not one.is_floating_point():
        return one is not other and (one is None or other is None or one.shape != other.shape)
    size = one.shape[-1] if one.dim() else 1
    first, second = (tensor.double().reshape(-1, size) for tensor in (one, other))
    gap = torch.where(first == second, torch.zeros_like(first), first - second)
    rounding = gap.square().sum(-1) <= _ROUNDED**2 * second.square().sum(-1)  # False for NaN
    return float((~rounding).double().mean()) > 0.5


@contextmanager
def _weights(case: Case, *experts: nn.Module) -> Generator[None]:
    """Give the experts of both sides the weights of a case."""
    if case.weights is None:
        yield
        return
    before = {parameter: parameter.detach().clone() for module in experts for parameter in module.parameters()}
    try:
        for parameter in before:
            parameter.data.copy_(case.weights(parameter.data))
        yield
    finally:
        for parameter, values in before.items():
            parameter.data.copy_(values)


@contextmanager
def _frozen(block: nn.Module, case: Case) -> Generator[None]:
    trained = [p for p in block.parameters() if p.requires_grad] if case.frozen else list[nn.Parameter]()
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _run(block: nn.Module, frozen: set[str], called: set[str], case: Case, seed: int) -> dict[str, Tensor | None]:
    """Return what one side computes, by name."""
    dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), torch.float32)
    call = case.call.fresh()
    given = call.hidden.detach().to(dtype)
    # Code may change its input in place, which torch allows for no leaf that needs a gradient.
    leaf = given.clone().requires_grad_(not case.inference)
    hidden = leaf * 1

    def as_weights(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(as_weights, (call.args, dict(call.kwargs)))
    if "" in frozen:  # the block is the experts, and the routing weights are its input
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.requires_grad_(True)
    before, modes = _kept(block), {module: module.training for module in block.modules()}
    parameters = {
        name: p
        for name, p in block.named_parameters()
        if p.requires_grad and not case.frozen and not any(f == "" or name.startswith(f + ".") for f in frozen)
    }
    block.train(case.training)
    try:
        with (
            _frozen(block, case), same_random_numbers(seed), _routing_weights(block, called) as routing,
            set_grad_enabled(not case.inference),
        ):  # fmt: skip
            ready = _with(call, hidden, args, kwargs)
            result = block(*ready[0], **ready[1])
        values = _results(result) | _changes(before, _kept(block)) | {"hidden states after the call": hidden}
    finally:
        for module, training in modes.items():
            module.training = training
    if case.poisoned or case.inference:
        return {name: value.detach() for name, value in values.items()}
    wanted = {"hidden_states": leaf, **{f"routing_weights of {n}": w for n, w in routing.items()}, **parameters}
    return {name: value.detach() for name, value in values.items()} | _gradients(values, wanted, seed)


def _with(call: Any, hidden: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with `hidden` in the place of the call's hidden states."""
    place = [leaf is call.hidden for leaf in pytree.tree_leaves((call.args, dict(call.kwargs)))].index(True)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves[place] = hidden
    return pytree.tree_unflatten(leaves, spec)


def _results(result: object) -> dict[str, Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return {f"output {place}" if place else "output": tensor for place, tensor in enumerate(tensors)}


def _gradients(values: Mapping[str, Tensor], wanted: Mapping[str, Tensor], seed: int) -> dict[str, Tensor | None]:
    """Return the gradients of `wanted` for random directions in everything that can be differentiated."""
    generator = torch.Generator().manual_seed(seed)
    outputs, directions = list[Tensor](), list[Tensor]()
    for _, value in sorted(values.items()):
        if value.requires_grad and value.is_floating_point():
            outputs.append(value)
            directions.append(torch.randn(value.shape, generator=generator).to(value.dtype))
    if not outputs:
        return {}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), directions, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def _kept(block: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return what the modules of a block hold besides parameters: settings, buffers, tensors in attributes."""
    kept: dict[str, tuple[object, ...]] = {}
    for path, module in named_modules(block):
        for name, value in plain_settings(module).items():
            kept[f"{path}.{name}"] = (repr(value),)
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules") and not isinstance(module, FusedMoe):
                tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
                if tensors:
                    kept[f"{path}.{name}"] = tuple(_Version(tensor) for tensor in tensors)
    return kept


class _Version:
    """A tensor as it was: the same one unchanged is equal."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version, self._id = tensor, version_of(tensor), id(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and (self._id, self._version) == (other._id, other._version)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _changes(before: Mapping[str, tuple[object, ...]], after: Mapping[str, tuple[object, ...]]) -> dict[str, Tensor]:
    """Return the tensors of attributes that the call changed, and settings that it changed as their hash."""
    changed: dict[str, Tensor] = {}
    for name, values in after.items():
        if before.get(name) != values:
            for place, value in enumerate(values):
                key = f"attribute {name.lstrip('.')}" + f" {place}" * bool(place)
                changed[key] = value.tensor if isinstance(value, _Version) else _as_number(value)
    return changed


def _as_number(setting: object) -> Tensor:
    """Return a number that differs where the text of a setting does."""
    return torch.tensor(zlib.crc32(str(setting).encode()) + 1.0, dtype=torch.float64)


@contextmanager
def _routing_weights(module: nn.Module, experts: set[str]) -> Generator[dict[str, Tensor]]:
    """Collect the routing weights that reach each experts module while inside."""
    seen: dict[str, Tensor] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            weights = kwargs.get("top_k_weights", args[2] if len(args) > 2 else None)
            if isinstance(weights, Tensor) and weights.requires_grad:
                seen[name] = weights

        return hook

    with ExitStack() as hooks:
        for name in sorted(experts):
            part = module.get_submodule(name)
            hooks.enter_context(part.register_forward_pre_hook(remember(name), with_kwargs=True))
        yield seen


class Constants(TorchDispatchMode):
    """Counts, for each constant with which operators inside compare values, the values on both sides of it.

    Integers are compared with places and counts: only limits beyond `MANY` tokens are counted, which no input reaches.
    """

    _COMPARISONS = ("clamp", "hardtanh", "threshold", "gt", "ge", "lt", "le", "minimum", "maximum")

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, float, bool], tuple[int, int]] = {}
        self._replaced = 0  # depth of calls

    @contextmanager
    def replacing(self, modules: Iterable[nn.Module]) -> Generator[None]:
        """Count inside of calls of `modules` as code that the rewrite replaces."""

        def entered(*_: object) -> None:
            self._replaced += 1

        def left(*_: object) -> None:
            self._replaced -= 1

        with ExitStack() as hooks:
            hooks.callback(lambda: setattr(self, "_replaced", 0))
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(entered))
                hooks.enter_context(module.register_forward_hook(left, always_call=True))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if name.rstrip("_").startswith(self._COMPARISONS) and args and isinstance(args[0], Tensor):
            schema = (declared.name for declared in schema_of(func).arguments)
            named: dict[str, object] = {**dict(zip(schema, args, strict=False)), **(kwargs or {})}
            for argument, value in named.items():
                if isinstance(value, Tensor) and value is not args[0] and _is_one_limit(value, args[0]):
                    value = float(value)  # a limit that is a tensor
                if isinstance(value, int | float) and not isinstance(value, bool) and _counts(args[0], value):
                    self._count(f"{name}.{argument}", float(value), args[0])
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, value: float, tensor: Tensor) -> None:
        key = operator, value, self._replaced > 0
        below, above = self._counts.get(key, (0, 0))
        less, more = int((tensor < value).sum()), int((tensor > value).sum())
        self._counts[key] = below + less, above + more

    @property
    def counted(self) -> tuple[Constant, ...]:
        """The constants so far, in the order in which they were met first."""
        return tuple(
            Constant(operator, value, *counts, replaced) for (operator, value, replaced), counts in self._counts.items()
        )


def _is_one_limit(limit: Tensor, values: Tensor) -> bool:
    """Return whether a tensor is one limit of all values. A limit of a single row may be a result, as its maximum."""
    return limit.numel() == 1 and (limit.dim() == 0 or values.shape[:1] != (1,))


def _counts(values: Tensor, constant: float) -> bool:
    return values.is_floating_point() or (values.dtype != torch.bool and abs(constant) >= MANY)


def replaced_code(stock: nn.Module, rewritten: nn.Module) -> list[str]:
    """Return the names of the modules in `stock` whose code does not run in `rewritten`.

    A block that calls a list of experts is replaced as a whole.
    """
    names = [name for name, child in named_modules(rewritten) if isinstance(child, FusedMoe)]
    lists = any(isinstance(stock.get_submodule(name), nn.ModuleList) for name in names)
    return [""] if lists else names
