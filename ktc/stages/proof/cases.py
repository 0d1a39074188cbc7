"""The inputs of a proof: the calls that a block receives in the twin, and calls made to look for trouble.

Input: the stock twin. Output: for each site its calls, in eval and in train mode, with and without cache, masked on
the left and on the right. Further calls put values beyond every constant, tie every choice, send all tokens to one
expert, and contain NaN and infinity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.model.experts.private_api import pytree
from ktc.model.hf.stock_model import forget_positions, vocabulary_of

SCALES = tuple(8.0**power for power in range(1, 7))  # the factors of hidden states beyond constants, in order
ALWAYS = (SCALES[0], SCALES[-1])  # those compared for every block: limits that stock does not have are beyond them
MANY = 2500  # tokens of a call beyond what authors set as capacity or as the length of a branch

Weights = Callable[[Tensor], Tensor]  # other values for a matrix of experts, element by element


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a block."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fresh(self) -> Call:
        """Return the call with its own tensors and cache, as the block may change them."""
        args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    @property
    def hidden(self) -> Tensor:
        """The hidden states: the argument of this name, otherwise the first tensor."""
        named = self.kwargs.get("hidden_states")
        tensors = (leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor))
        return named if isinstance(named, Tensor) else next(tensors)

    def with_hidden(self, hidden: Tensor) -> Call:
        """Return the call with other hidden states."""
        old = self.hidden

        def other(leaf: object) -> object:
            return hidden if leaf is old else leaf

        args, kwargs = pytree.tree_map(other, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    @property
    def any_length(self) -> bool:
        """Whether hidden states are the only tensor, so that a call of another length can be made."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return sum(isinstance(leaf, Tensor) for leaf in leaves) == 1 and self.hidden.dim() in (2, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: a call, the mode, and what of it is compared.

    `stress` cases are far from what a model computes: gradients that almost vanish there have no digits to compare.
    `poisoned` ones contain NaN or infinity, and those of `inference` run without gradients: only results are compared.
    With `weights` the experts have other ones. With `frozen` only the input needs a gradient, as where PEFT trains.
    """

    name: str
    call: Call
    training: bool = False
    stress: bool = False
    poisoned: bool = False
    inference: bool = False
    weights: Weights | None = None
    frozen: bool = False

    def trained(self) -> Case:
        """Return the case in train mode."""
        return replace(self, name=f"{self.name}, training", training=True)


@dataclass(frozen=True, slots=True)
class _Run:
    """A forward of the whole twin: batch, length, the masked side, the tokens that a cache holds before."""

    name: str
    batch: int
    length: int
    masked: str = ""
    cached: int = 0


_RUNS = (
    _Run("left padding", 3, 37, masked="left"),
    _Run("one token", 1, 1),
    _Run("right padding", 3, 37, masked="right"),
    _Run("two sequences", 2, 64),
    _Run("decoding with a cache", 2, 1, cached=9),
    _Run("300 tokens", 1, 300),
    _Run("a chunk with a cache, left padding", 3, 4, masked="left", cached=20),
)
SHORT = (_RUNS[0].name, _RUNS[4].name)  # the runs whose calls are compared at every site


def record(model: PreTrainedModel, fqns: Sequence[str], seed: int) -> dict[str, list[tuple[str, Call]]]:
    """Return the calls of the modules `fqns` in forwards of `model`, each with the name of its run."""
    calls: dict[str, list[tuple[str, Call]]] = {fqn: [] for fqn in fqns}
    current = [""]

    def remember(fqn: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if current[0]:
                calls[fqn].append((current[0], Call(*copy.deepcopy((args, kwargs)))))

        return hook

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), ExitStack() as hooks:
        for fqn in fqns:
            block = model.get_submodule(fqn)
            hooks.enter_context(block.register_forward_pre_hook(remember(fqn), with_kwargs=True))
        for run in _RUNS:
            _forward(model, run, generator, current, calls)
    return calls


def _forward(
    model: PreTrainedModel, run: _Run, generator: torch.Generator, current: list[str],
    calls: dict[str, list[tuple[str, Call]]],
) -> None:  # fmt: skip
    total = run.cached + run.length
    forget_positions(model)
    tokens = torch.randint(0, vocabulary_of(model), (run.batch, total), generator=generator)
    given: dict[str, Any] = {}
    if run.masked:
        mask = torch.ones(run.batch, total, dtype=torch.long)
        for row in range(1, run.batch):
            mask[row, : 5 * row] = 0
        given["attention_mask"] = mask if run.masked == "left" else mask.flip(1)
    if run.cached:
        cache = _filled_cache(model, tokens[:, : run.cached])
        if cache is None:
            return
        given["past_key_values"] = cache
    current[0] = run.name
    try:
        model(input_ids=tokens[:, run.cached :], use_cache=bool(run.cached), **given)
    except Exception:
        if not run.cached or run.length == 1:  # foreign code may take one token alone after a cache
            raise
        for recorded in calls.values():
            recorded[:] = [call for call in recorded if call[0] != run.name]
    current[0] = ""


def _filled_cache(model: PreTrainedModel, tokens: Tensor) -> Any:
    """Return the cache that the model makes itself, None for a model that does not run with one."""
    try:
        return model(input_ids=tokens, use_cache=True).past_key_values
    except Exception:  # noqa: BLE001 - foreign code; the cases of the proof then have none with a cache
        return None


# Cases ----------------------------------------------------------------------------------------------------------------
def short_cases(calls: Sequence[tuple[str, Call]]) -> Iterator[Case]:
    """Yield the cases of every site: as the model calls it, in both modes, with a cache, and without gradients."""
    for name, call in calls:
        if name in SHORT:
            yield Case(name, _finite(call))
            yield Case(f"{name}, without gradients", _finite(call), inference=True)
        if name == SHORT[0]:
            yield Case(name, _finite(call)).trained()
            yield Case(f"{name}, frozen", _finite(call), frozen=True)


def long_cases(calls: Sequence[tuple[str, Call]], seed: int) -> Iterator[Case]:
    """Yield the cases of one of several equal sites."""
    yield from short_cases(calls)
    yield from (Case(name, _finite(call)) for name, call in calls if name not in SHORT)
    call = next((_finite(call) for name, call in calls if name == "two sequences"), None)
    if call is None:
        return
    hidden, generator = call.hidden, torch.Generator().manual_seed(seed)
    yield Case("equal scores everywhere", call.with_hidden(torch.zeros_like(hidden)), stress=True)
    if call.any_length:
        sizes = (*[1] * (hidden.dim() - 2), MANY, hidden.shape[-1])  # a layer may call its block on rows
        row = hidden.flatten(0, -2)[0]
        yield Case("all tokens to one expert", call.with_hidden(row.expand(sizes).clone()), stress=True)
        noise = torch.randn(sizes, generator=generator) * hidden.std()
        yield Case(f"{MANY} tokens", call.with_hidden(noise))
        yield Case(f"{MANY} tokens", call.with_hidden(noise)).trained()
    poisoned = hidden.clone()
    rows = poisoned.view(-1, hidden.shape[-1])
    rows[3, 0], rows[5, 1], rows[-7, 2] = torch.nan, torch.inf, -torch.inf
    case = Case("NaN and infinity", call.with_hidden(poisoned), poisoned=True)
    yield case
    yield replace(case, name=f"{case.name}, frozen", frozen=True)
    yield replace(case, name=f"{case.name}, without gradients", inference=True)


def overflow_cases(calls: Sequence[tuple[str, Call]]) -> Iterator[Case]:
    """Yield cases in which the experts' products, activations and sums are beyond the largest number of fp32.

    No value is near that number by chance, since the order of a sum would decide: a value of both signs is far beyond
    it in each term, and values of one sign have no order.
    """
    call = next((_finite(call) for name, call in calls if name == "two sequences"), None)
    if call is None:
        return
    hidden = call.hidden
    rows = torch.logspace(-8, 8, hidden.shape[-2]).to(hidden)[:, None]
    inputs: dict[str, tuple[Tensor, Weights | None]] = {
        "activations": (hidden * 1e25, None),
        "products": (hidden, lambda matrix: matrix * 1e30),
        "weights": (hidden * 1e6, lambda matrix: (matrix * 1e39).clamp(-3e38, 3e38)),
        "sums": (hidden.abs() * rows, lambda matrix: matrix.abs() * 1e13),
        "sums behind a limit": (hidden.abs() * rows, lambda matrix: matrix.abs() * 1e37),
    }
    for what, (values, weights) in inputs.items():
        case = Case(f"{what} that overflow", call.with_hidden(values), poisoned=True, weights=weights)
        yield case
        if what == "activations":
            yield replace(case, name=f"{case.name}, frozen", frozen=True)
            yield replace(case, name=f"{case.name}, without gradients", inference=True)
        if call.any_length:
            one = values.flatten(0, -2)[values.shape[-2] // 2].reshape(*[1] * (values.dim() - 1), -1)
            yield Case(f"{what} that overflow, one token", call.with_hidden(one), poisoned=True, weights=weights)


def other_experts_cases(calls: Sequence[tuple[str, Call]], implementation: str) -> Iterator[Case]:
    """Yield the cases for another implementation of stock experts: those of every site, and the model's other lengths.

    Cases that look for trouble compare the block's code, which is the same.
    """
    plain = (Case(name, _finite(call)) for name, call in calls if name not in SHORT)
    for case in (*short_cases(calls), *plain):
        yield replace(case, name=f"{case.name}, experts by {implementation}")


def scaled(calls: Sequence[tuple[str, Call]], factor: float) -> Case | None:
    """Return the case of hidden states `factor` times as large, None for a block that the run does not call."""
    call = next((_finite(call) for name, call in calls if name == "two sequences"), None)
    if call is None:
        return None
    return Case(f"hidden states x {factor:g}", call.with_hidden(call.hidden * factor), stress=True)


def _finite(call: Call) -> Call:
    """Return the call without the NaN that padding leaves in stock attention: gradients would all be NaN."""
    return call if bool(torch.isfinite(call.hidden).all()) else call.with_hidden(call.hidden.nan_to_num())
