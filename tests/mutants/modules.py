"""Mutants of what a module computes: experts and linear layers that are wrong in one respect, after the loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktc.model.experts.module import FusedMoe
from ktc.model.linears.lora_linear import KTLinear
from mutants.mutant import Mutant

M = TypeVar("M", bound=nn.Module)
Call = tuple[Tensor, Tensor, Tensor]  # hidden states (T, H), indices (T, K), weights (T, K)
Change = Callable[[Sequence[nn.Module]], bool]


def called(change: Callable[[FusedMoe, Call], Call], last: bool = False) -> Change:
    """Return the change of what experts are called with, in every layer or the last one alone."""

    def broken(module: FusedMoe) -> None:
        stock = module.forward
        module.forward = lambda x, index, weights, lora=None: stock(*change(module, (x, index, weights)), lora)  # type: ignore[method-assign]

    return _each(FusedMoe, broken, last)


def returned(change: Callable[[FusedMoe, Tensor, Call], Tensor], last: bool = False) -> Change:
    """Return the change of what experts return, given what they are called with."""

    def broken(module: FusedMoe) -> None:
        stock = module.forward
        module.forward = lambda x, index, weights, lora=None: change(  # type: ignore[method-assign]
            module, stock(x, index, weights, lora), (x, index, weights)
        )

    return _each(FusedMoe, broken, last)


def loaded(change: Callable[[FusedMoe], None], last: bool = False) -> Change:
    """Return the change of weights that experts hold."""
    return _each(FusedMoe, change, last)


def linear(change: Callable[[KTLinear, Tensor], Tensor], last: bool = False) -> Change:
    """Return the change of what linear layers compute from their input."""

    def broken(module: KTLinear) -> None:
        module.forward = lambda x: change(module, x)  # type: ignore[method-assign]

    return _each(KTLinear, broken, last)


def _each(kind: type[M], broken: Callable[[M], None], last: bool) -> Change:
    def changed(places: Sequence[nn.Module]) -> bool:
        found = [module for module in places if isinstance(module, kind)]
        for module in found[-1:] if last else found:
            broken(module)
        return bool(found)

    return changed


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    return factor * x + (1 - factor) * x.detach()


def row(result: Tensor, place: int, factor: float) -> Tensor:
    """Return the result with one token scaled; short calls stay as they are."""
    if len(result) <= place:
        return result
    scale = torch.ones(len(result), 1)
    scale[place] = factor
    return result * scale


def down_scaled(expert: int, factor: float) -> Callable[[FusedMoe], None]:
    return lambda m: m.load_expert(expert, "down", factor * m.expert(expert, "down"))


def exchanged(one: int, other: int, *parts: str) -> Callable[[FusedMoe], None]:
    def change(module: FusedMoe) -> None:
        for part in parts:
            first, second = module.expert(one, part), module.expert(other, part)  # type: ignore[arg-type]
            module.load_expert(one, part, second)  # type: ignore[arg-type]
            module.load_expert(other, part, first)  # type: ignore[arg-type]

    return change


def gate_and_up(module: FusedMoe) -> None:
    for expert in range(module.num_experts):
        gate, up = module.expert(expert, "gate"), module.expert(expert, "up")
        module.load_expert(expert, "gate", up)
        module.load_expert(expert, "up", gate)


def biases_dropped(*parts: str) -> Callable[[FusedMoe], None]:
    def change(module: FusedMoe) -> None:
        for expert in range(module.num_experts):
            for part in parts:
                module.load_expert(expert, part, 0 * module.expert(expert, part))  # type: ignore[arg-type]

    return change


def _while_training(m: FusedMoe, y: Tensor, factor: float) -> Tensor:
    return factor * y if m.training else y


_ALL = ("gate", "up", "down")
_ROWS: tuple[tuple[str, str, Change, str], ...] = (
    # In some calls alone
    ("result 1 % larger in training", "deepseek_v2", returned(lambda m, y, _: _while_training(m, y, 1.01)), ""),
    ("dropout in training", "deepseek_v2", returned(lambda m, y, _: functional.dropout(y, 0.1, m.training)), ""),
    ("result 1 % larger in evaluation", "deepseek_v2", returned(lambda m, y, _: y if m.training else 1.01 * y), ""),
    ("tokens beyond 128 dropped", "deepseek_v2", returned(lambda m, y, _: torch.cat([y[:128], 0 * y[128:]])), ""),
    ("tokens beyond 2048 dropped", "deepseek_v3", returned(lambda m, y, _: torch.cat([y[:2048], 0 * y[2048:]])), ""),
    ("more than 256 tokens scaled", "deepseek_v3", returned(lambda m, y, _: 1.01 * y if len(y) > 256 else y), ""),
    ("a single token scaled", "deepseek_v3", returned(lambda m, y, _: 1.01 * y if len(y) == 1 else y), ""),
    ("one token of many wrong", "deepseek_v2", returned(lambda m, y, _: row(y, 5, 1.1)), ""),
    ("the first token wrong", "basalt", returned(lambda m, y, _: row(y, 0, 1.1)), ""),
    ("wrong without gradients alone", "basalt",
     returned(lambda m, y, _: y if torch.is_grad_enabled() else 2 * y), ""),
    # In some values alone
    ("NaN removed", "basalt", returned(lambda m, y, _: y.nan_to_num(posinf=torch.inf, neginf=-torch.inf)), ""),
    ("NaN removed, beside a shared expert", "deepseek_v2", returned(
        lambda m, y, _: y.nan_to_num(posinf=torch.inf, neginf=-torch.inf)), ""),
    ("infinity becomes the largest number", "basalt", returned(
        lambda m, y, _: y.clamp(torch.finfo(y.dtype).min, torch.finfo(y.dtype).max)), ""),
    ("large results limited", "deepseek_v2", returned(lambda m, y, _: y.clamp(-50, 50)), ""),
    ("results rounded to bf16", "deepseek_v2", returned(lambda m, y, _: y.bfloat16().to(y.dtype)), ""),
    ("hidden states rounded to fp16", "deepseek_v2", called(lambda m, c: (c[0].half().to(c[0].dtype), *c[1:])), ""),
    ("hidden states limited to 100", "qwen2_moe", called(lambda m, c: (c[0].clamp(-100, 100), *c[1:])), ""),
    ("small routing weights dropped", "qwen2_moe", called(lambda m, c: (*c[:2], c[2] * (c[2] > 0.05))), ""),
    # Gradients
    ("gradient of the result lost", "deepseek_v2", returned(lambda m, y, _: y.detach()), ""),
    ("gradient of routing weights lost", "deepseek_v2", called(lambda m, c: (*c[:2], c[2].detach())), ""),
    ("gradient of routing weights lost, a list", "orchard", called(lambda m, c: (*c[:2], c[2].detach())), ""),
    ("gradient of hidden states lost", "qwen2_moe", called(lambda m, c: (c[0].detach(), *c[1:])), ""),
    ("gradient 1 % larger", "qwen2_moe", returned(lambda m, y, _: scaled_gradient(y, 1.01)), ""),
    ("gradient lost in training alone", "qwen2_moe", returned(lambda m, y, _: y.detach() if m.training else y), ""),
    # One place alone
    ("an additive bias in the last layer", "deepseek_v3", returned(lambda m, y, _: y + 0.01, last=True), ""),
    ("expert 3 switched off", "deepseek_v2", called(lambda m, c: (*c[:2], c[2] * (c[1] != 3))), ""),
    ("expert 3 switched off in training", "deepseek_v2",
     called(lambda m, c: (*c[:2], c[2] * (c[1] != 3) if m.training else c[2])), ""),
    ("the last expert of the last layer 1 % larger", "deepseek_v3", loaded(
        lambda m: down_scaled(m.num_experts - 1, 1.01)(m), last=True), ""),
    ("expert numbers moved by one", "nemotron_h", called(lambda m, c: (c[0], (c[1] + 1) % m.num_experts, c[2])), ""),
    ("the last choice of a token dropped", "deepseek_v2", called(
        lambda m, c: (*c[:2], torch.cat([c[2][:, :-1], 0 * c[2][:, -1:]], -1))), ""),
    ("weights of the next token", "deepseek_v2", called(lambda m, c: (*c[:2], c[2].roll(1, 0))), ""),
    ("weights of another choice", "deepseek_v3", called(lambda m, c: (*c[:2], c[2].flip(-1))), ""),
    ("choices in another order", "deepseek_v3", called(lambda m, c: (c[0], c[1].flip(-1), c[2].flip(-1))),
     "the sum over a token's choices does not depend on their order, up to rounding"),
    ("a residual added", "nemotron_h", returned(lambda m, y, c: y + c[0]), ""),
    # What is loaded
    ("gate and up exchanged", "deepseek_v2", loaded(gate_and_up), ""),
    ("two experts exchanged", "deepseek_v2", loaded(exchanged(0, 1, *_ALL), last=True), ""),
    ("down of two experts exchanged", "nemotron_h", loaded(exchanged(2, 5, "down"), last=True), ""),
    ("bias of gate dropped", "gpt_oss", loaded(biases_dropped("gate_bias")), ""),
    ("bias of down dropped", "gpt_oss", loaded(biases_dropped("down_bias")), ""),
    ("biases of two experts exchanged", "basalt", loaded(exchanged(1, 2, "up_bias"), last=True), ""),
    ("experts of a list exchanged", "hedge", loaded(exchanged(7, 8, *_ALL), last=True), ""),
    # Linear layers
    ("bias of linear layers dropped", "qwen2_moe", linear(lambda m, x: functional.linear(x, m.weight)), ""),
    ("linear layers 1 % larger in training", "qwen2_moe", linear(
        lambda m, x: (1.01 if m.training else 1.0) * functional.linear(x, m.weight, m.bias)), ""),
    ("input of linear layers detached", "qwen2_moe", linear(
        lambda m, x: functional.linear(x.detach(), m.weight, m.bias)), ""),
    ("weight of linear layers detached", "deepseek_v2", linear(
        lambda m, x: functional.linear(x, m.weight.detach(), m.bias)), ""),
    ("a single row of linear layers wrong", "gpt_oss", linear(
        lambda m, x: functional.linear(x, m.weight, m.bias) * (2 if x.shape[-2] == 1 else 1)), ""),
    ("the last linear layer limited", "deepseek_v3", linear(
        lambda m, x: functional.linear(x, m.weight, m.bias).clamp(-2, 2), last=True), ""),
    ("linear layers in fp64", "deepseek_v2", linear(
        lambda m, x: functional.linear(x.double(), m.weight.double(), None if m.bias is None else m.bias.double())
        .to(x.dtype)), "it is the same function, rounded less"),
)  # fmt: skip
MUTANTS = tuple(Mutant(name, model, "module", change, why) for name, model, change, why in _ROWS)
