"""Mixtures that differ from a right one in one thing, so that a pattern or a proof that lets it pass is wrong.

`ROUTINGS` differ in what the router computes: no pattern may claim to know their routing. `EXPERTS` differ in what the
experts compute beside what they declare: they must not be rewritten at all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import use_experts_implementation

from invented.registered.skeleton import CHOSEN, EXPERTS, Bank, InventedConfig, Still, invent

Route = Callable[["Router", Tensor], tuple[Tensor, Tensor]]


class Router(nn.Module):
    """Everything that a wrong routing may mix up; `route` gives the indices and the weights."""

    def __init__(self, config: InventedConfig, route: Route) -> None:
        super().__init__()
        self.first = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.second = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.shift = nn.Parameter(torch.zeros(EXPERTS))
        self.route = route

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.route(self, x)


def right(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the near-twins are near to: this one is known."""
    best, chosen = router.first(x).softmax(-1).topk(CHOSEN, -1)
    return chosen, best / best.sum(-1, keepdim=True)


def softmax_before_and_after_top_k(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(x).softmax(-1).topk(CHOSEN, -1)
    return chosen, best.softmax(-1)


def weights_of_corrected_scores(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = (router.first(x).sigmoid() + router.shift).topk(CHOSEN, -1)
    return chosen, best / best.sum(-1, keepdim=True)


def weights_of_another_gate(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    chosen = router.first(x).softmax(-1).topk(CHOSEN, -1).indices
    return chosen, router.second(x).softmax(-1).gather(-1, chosen)


def weights_scored_otherwise_than_the_choice(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = router.first(x)
    chosen = logits.softmax(-1).topk(CHOSEN, -1).indices
    return chosen, logits.sigmoid().gather(-1, chosen)


def the_worst_instead_of_the_best(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(x).softmax(-1).topk(CHOSEN, -1, largest=False)
    return chosen, best / best.sum(-1, keepdim=True)


def renormalised_over_all_experts(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = router.first(x).sigmoid()
    best, chosen = scores.topk(CHOSEN, -1)
    return chosen, best / scores.sum(-1, keepdim=True)


def renormalised_by_the_largest(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(x).softmax(-1).topk(CHOSEN, -1)
    return chosen, best / best.amax(-1, keepdim=True)


def softmax_over_the_tokens(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(x).softmax(0).topk(CHOSEN, -1)
    return chosen, best / best.sum(-1, keepdim=True)


def tanh_scores(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(x).tanh().topk(CHOSEN, -1)
    return chosen, best / best.sum(-1, keepdim=True)


def a_router_that_sees_another_input(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(functional.silu(x)).softmax(-1).topk(CHOSEN, -1)
    return chosen, best / best.sum(-1, keepdim=True)


def groups_that_are_shut_instead_of_open(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = router.first(x).softmax(-1)
    groups = scores.view(-1, 4, EXPERTS // 4).amax(-1)
    shut = torch.zeros_like(groups).scatter(1, groups.topk(2, -1).indices, 1.0)
    shut = shut[..., None].expand(-1, 4, EXPERTS // 4).reshape(scores.shape).bool()
    best, chosen = scores.masked_fill(shut, 0.0).topk(CHOSEN, -1)
    return chosen, best


def weights_that_are_all_one(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(x).softmax(-1).topk(CHOSEN, -1)
    return chosen, torch.ones_like(best)


def a_correction_that_is_subtracted(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = router.first(x).sigmoid()
    chosen = torch.sub(scores, router.shift).topk(CHOSEN, -1).indices
    return chosen, scores.gather(-1, chosen)


def a_correction_added_twice(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = router.first(x).sigmoid()
    chosen = torch.add(scores, router.shift, alpha=2).topk(CHOSEN, -1).indices
    return chosen, scores.gather(-1, chosen)


def scores_on_top_of_softmax(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = router.first(x).softmax(-1).topk(CHOSEN, -1)
    return chosen, best.sigmoid()


ROUTINGS: tuple[Route, ...] = (
    softmax_before_and_after_top_k, weights_of_corrected_scores, weights_of_another_gate,
    weights_scored_otherwise_than_the_choice, the_worst_instead_of_the_best, renormalised_over_all_experts,
    renormalised_by_the_largest, softmax_over_the_tokens, tanh_scores, a_router_that_sees_another_input,
    groups_that_are_shut_instead_of_open, weights_that_are_all_one, a_correction_that_is_subtracted,
    a_correction_added_twice, scores_on_top_of_softmax,
)  # fmt: skip


# Experts that compute something else than they declare ----------------------------------------------------------------
@use_experts_implementation
class WeightsNotApplied(Bank):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.gate_up_proj.shape[0]):
            token, _ = torch.where(top_k_index == expert)
            out = out.index_add(0, token, self.one(hidden_states[token], expert))
        return out + 0.0 * top_k_weights.sum()


class ResidualInside(Bank):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return x + super().one(x, expert)


class HalvesSwapped(Bank):
    def one(self, x: Tensor, expert: int) -> Tensor:
        up, gate = functional.linear(x, self.gate_up_proj[expert]).chunk(2, -1)
        return functional.linear(self.act_fn(gate) * up, self.down_proj[expert])


class NextExpert(Bank):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, (expert + 1) % EXPERTS)


class TanhGate(Bank):
    def __init__(self, config: InventedConfig) -> None:
        super().__init__(config, torch.tanh)


class GateTwice(Bank):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, _ = gate_up.chunk(2, -1)
        return self.act_fn(gate) * gate

    def one(self, x: Tensor, expert: int) -> Tensor:
        return functional.linear(
            self._apply_gate(functional.linear(x, self.gate_up_proj[expert])), self.down_proj[expert]
        )


PROVEN_WRONG: tuple[type[Bank], ...] = (WeightsNotApplied, ResidualInside, HalvesSwapped, NextExpert)
UNKNOWN_ACTIVATION: tuple[type[Bank], ...] = (TanhGate, GateTwice)


def routed_by(route: Route) -> type[InventedConfig]:
    """A model with right experts and the routing `route`."""
    return _model(route.__name__.replace("_", ""), route, Bank)


def with_experts(bank: type[Bank]) -> type[InventedConfig]:
    """A model with the right routing and the experts `bank`."""
    return _model(bank.__name__.lower(), right, bank)


def _model(name: str, route: Route, bank: type[Bank]) -> type[InventedConfig]:
    class Mixture(nn.Module):
        def __init__(self, config: InventedConfig) -> None:
            super().__init__()
            self.steer, self.pool = Router(config, route), bank(config)

        def forward(self, hidden_states: Tensor) -> Tensor:
            flat = hidden_states.flatten(0, 1)
            chosen, weights = self.steer(flat)
            return self.pool(flat, chosen, weights).view_as(hidden_states)

    return invent(name, Mixture, Still)
