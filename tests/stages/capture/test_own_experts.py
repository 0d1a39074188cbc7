"""Experts modules that authors write themselves are read from their code, and left alone if they are anything more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import use_experts_implementation

from ktc.model.experts.own_module import OwnExperts, call_routed, stock_experts
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.manifest.configs import OwnExpertsConfig
from ktc.model.targets.config import plain, read_config
from ktc.stages.capture.canonical import NoExperts
from ktc.stages.capture.own_experts import is_candidate, more_than_interface, own_experts

EXPERTS, HIDDEN, WIDTH, CHOSEN, TOKENS = 4, 12, 10, 2, 21


class Loop(nn.Module):
    """A loop over stacked tensors; each part of it is a method that a variant replaces."""

    numbers = EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def one(self, x: Tensor, expert: int) -> Tensor:
        inner = functional.silu(functional.linear(x, self.w1[expert])) * functional.linear(x, self.w3[expert])
        return functional.linear(inner, self.w2[expert])

    def mask(self, index: Tensor, expert: int) -> Tensor:
        return index == expert

    def add(self, out: Tensor, token: Tensor, y: Tensor) -> Tensor:
        return out.index_add(0, token, y)

    def scaled(self, y: Tensor, weights: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return y * weights[token, slot, None]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.numbers):
            token, slot = torch.where(self.mask(top_k_index, expert))
            if token.numel() == 0:
                continue
            y = self.one(hidden_states[token], expert)
            out = self.add(out, token, self.scaled(y, top_k_weights, token, slot).to(out.dtype))
        return out


class Hit(Loop):
    """Only the experts that occur, as transformers writes it, with a last place for no expert."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        mask = functional.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            number = int(expert[0])
            slot, token = torch.where(mask[number])
            out.index_add_(0, token, self.one(x[token], number) * weights[token, slot].unsqueeze(-1))
        return out


class Fused(Loop):
    """Gate and up in one transposed matrix, with biases."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * WIDTH))
        self.last = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.first_bias = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH))
        self.last_bias = nn.Parameter(torch.empty(EXPERTS, HIDDEN))

    def one(self, x: Tensor, expert: int) -> Tensor:
        gate, up = torch.addmm(self.first_bias[expert], x, self.first[expert]).chunk(2, -1)
        return torch.addmm(self.last_bias[expert], functional.gelu(gate) * up, self.last[expert])


class Flat(Loop):
    """All experts in one matrix, the last one transposed; hidden states of a batch."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up, self.down = (nn.Parameter(torch.empty(EXPERTS * WIDTH, HIDDEN)) for _ in range(2))

    def one(self, x: Tensor, expert: int) -> Tensor:
        up, down = (each.view(EXPERTS, WIDTH, HIDDEN)[expert] for each in (self.up, self.down))
        return functional.relu(x @ up.T).square() @ down

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, HIDDEN)
        return super().forward(rows, top_k_index, top_k_weights).view(hidden_states.shape)


class Identity(Loop):
    """Two experts behind the last one return their input."""

    numbers = EXPERTS + 2

    def one(self, x: Tensor, expert: int) -> Tensor:
        return x if expert >= EXPERTS else super().one(x, expert)


class Batched(nn.Module):
    """Products over all experts at once, of rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * WIDTH))
        self.last = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.first).chunk(2, dim=2)
        return torch.bmm(up * functional.silu(gate), self.last).view(-1, HIDDEN)


def inputs(module: nn.Module, device: str, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    """Of a call: on meta for capture, with numbers to compute."""

    def floats(*sizes: int) -> Tensor:
        return torch.empty(sizes, device="meta") if device == "meta" else torch.randn(sizes, generator=generator)

    if isinstance(module, Batched):
        return (floats(EXPERTS * TOKENS, HIDDEN),)
    hidden = floats(3, TOKENS // 3, HIDDEN) if isinstance(module, Flat) else floats(TOKENS, HIDDEN)
    chosen = torch.arange(TOKENS * CHOSEN).view(TOKENS, CHOSEN) % getattr(module, "numbers", EXPERTS)
    index, weights = chosen.to(device), floats(TOKENS, CHOSEN)
    return (hidden, weights, index) if isinstance(module, Hit) else (hidden, index, weights)


def read(make: Callable[[], nn.Module]) -> OwnExperts | None:
    with torch.device("meta"):
        module = make().eval()
    return own_experts(module, module.forward, inputs(module, "meta"), {})


@pytest.mark.parametrize("make", [Loop, Hit, Fused, Flat, Identity, Batched])
def test_what_is_read_computes_what_the_module_does(make: Callable[[], nn.Module]) -> None:
    own, module, generator = read(make), make(), torch.Generator().manual_seed(3)
    assert own is not None
    assert is_candidate(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    given = inputs(module, "cpu", generator)
    stock = list(stock_experts(module, own.form, own.parts, own.sizes).values())

    def compute(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return fused_moe_reference(hidden, index, weights, stock, own.form)

    results: list[list[Tensor]] = []
    for ours in (False, True):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
        role = dict(zip(own.inputs.values(), leaves, strict=True))
        rest = role.get("index"), role.get("weights")
        out = call_routed(own.called, own.sizes[0], compute, role["hidden"], *rest) if ours else module(*leaves)
        direction = torch.cos(torch.arange(out.numel())).view(out.shape)
        results.append([out, *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], direction)])
    for theirs, found in zip(*results, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)


def test_its_config_in_a_manifest_is_read_back() -> None:
    own = read(Flat)
    assert own is not None
    config = OwnExpertsConfig(*own.sizes, str(own.form), own.parts, own.inputs, own.called)
    values = plain(config)
    assert values["parts"]["down"] == {"name": "down", "flat": True, "turned": True}
    assert read_config(OwnExpertsConfig, values) == config


# Near twins ----------------------------------------------------------------------------------------------------------
class Scaled(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return 0.5 * super().one(x, expert)


class OwnScale(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(EXPERTS, 1))

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x * self.scale[expert], expert)


class Cleaned(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, expert).nan_to_num()


class OneDiffers(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x.relu() if expert == 3 else x, expert)


class Neighbour(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        inner = functional.silu(functional.linear(x, self.w1[expert])) * functional.linear(x, self.w3[expert - 1])
        return functional.linear(inner, self.w2[expert])


class Shifted(Loop):
    def mask(self, index: Tensor, expert: int) -> Tensor:
        return index == (expert + 1) % EXPERTS


class Below(Loop):
    def mask(self, index: Tensor, expert: int) -> Tensor:
        return (index == expert) & (index.cumsum(0) < 100)


class Noisy(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(functional.dropout(x, 0.1) if self.training else x, expert)


class Dropped(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(functional.dropout(x, 0.1, self.training), expert)


class Residual(Loop):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states + super().forward(hidden_states, top_k_index, top_k_weights)


class Long(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = top_k_weights * 2 if hidden_states.shape[0] > 256 else top_k_weights
        return super().forward(hidden_states, top_k_index, weights)


class OddLengths(Loop):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = top_k_weights * 2 if hidden_states.shape[0] % 2 else top_k_weights
        return super().forward(hidden_states, top_k_index, weights)


class Capacity(Loop):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(EXPERTS):
            token, slot = (each[:8] for each in torch.where(top_k_index == expert))
            y = self.one(hidden_states[token], expert) * top_k_weights[token, slot, None]
            out = out.index_add(0, token, y)
        return out


class Detached(Loop):
    def scaled(self, y: Tensor, weights: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return y * weights.detach()[token, slot, None]


class Frozen(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        with torch.no_grad():
            return super().one(x, expert)


class Squared(Loop):
    def scaled(self, y: Tensor, weights: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return y * weights[token, slot, None] ** 2


class OtherSlot(Loop):
    def scaled(self, y: Tensor, weights: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return y * weights[token, CHOSEN - 1 - slot, None]


class Whole(Loop):
    def scaled(self, y: Tensor, weights: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return y * weights[token].sum(-1, keepdim=True)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] / 2


class OwnGradient(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(_Halved.apply(x), expert)


class Activation(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        inner = functional.mish(functional.linear(x, self.w1[expert])) * functional.linear(x, self.w3[expert])
        return functional.linear(inner, self.w2[expert])


class InTheWay(Loop):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        hidden_states.mul_(2)
        return super().forward(hidden_states, top_k_index, top_k_weights)


class Counting(Loop):
    calls = 0

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden_states, top_k_index, top_k_weights)


class Turned(Batched):
    def forward(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(-1, EXPERTS, HIDDEN).transpose(0, 1), self.first).chunk(2, dim=2)
        return torch.bmm(up * functional.silu(gate), self.last).view(-1, HIDDEN)


class More(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.empty(3))


class Counter(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(EXPERTS))


TWINS = {
    Scaled: "not that of a linear layer", Cleaned: "not that of a linear layer", OwnScale: "but `mul`",
    Dropped: "but `dropout`",
    OneDiffers: "but `relu`", Neighbour: "another expert", Shifted: "the same",
    Below: "a mask is computed by", Noisy: "training mode", Residual: "not a sum over experts",
    OddLengths: "depends on the number of tokens",
    Long: "depends on the number of tokens", Capacity: "depends on the number of tokens",
    Detached: "scaled by the weights",
    Frozen: "in its own way", Squared: "scaled by the weights", OtherSlot: "those of a mask",
    Whole: "scaled by the weights", OwnGradient: "in its own way", Activation: "an activation that no kernel",
    InTheWay: "in place", Counting: "changes `calls`", Turned: "but `permute`",
    More: "holds `unused` beside its matrices", Counter: "holds `seen` beside its matrices",
}  # fmt: skip


@pytest.mark.parametrize("make", TWINS)
def test_a_near_twin_is_left_alone(make: type[nn.Module]) -> None:
    with pytest.raises(NoExperts, match=TWINS[make]):
        read(make)


# The loop of decorated experts ----------------------------------------------------------------------------------------
CALLS = [0]


@use_experts_implementation
class Decorated(nn.Module):
    """Experts in the interface of transformers, whose own loop ends with code of a variant."""

    def __init__(self, _config: object, end: Callable[[Decorated, Tensor], Tensor]) -> None:
        super().__init__()
        self.end, self.act_fn = end, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(EXPERTS):
            token, slot = torch.where(top_k_index == expert)
            y = self._apply_gate(functional.linear(hidden_states[token], self.gate_up_proj[expert]))
            y = functional.linear(y, self.down_proj[expert]) * top_k_weights[token, slot, None]
            out.index_add_(0, token, y)
        return self.end(self, out)


def counts(_: Decorated, out: Tensor) -> Tensor:
    CALLS[0] += 1
    return out


def halves_with_autocast(_: Decorated, out: Tensor) -> Tensor:
    return out * 0.5 if torch.is_autocast_enabled("cpu") else out


def rarely_drops_in_training(experts: Decorated, out: Tensor) -> Tensor:
    return out * 0 if experts.training and random.random() < 1e-9 else out


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda _, out: out, ""),
        (counts, "it changes"),
        (halves_with_autocast, "it computes something else in inference mode or with autocast"),
        (rarely_drops_in_training, "it changes `random.getstate()`"),
    ],
)
def test_the_loop_of_decorated_experts_is_read_too(end: Callable[[Decorated, Tensor], Tensor], reason: str) -> None:
    with torch.device("meta"):
        found = more_than_interface(Decorated(None, end))
    assert found.startswith(reason)
    assert bool(found) is bool(reason)
