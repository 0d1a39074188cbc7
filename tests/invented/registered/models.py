"""Five mixtures that no model of transformers has, each with another routing, shared expert, storage and spelling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from invented.registered.skeleton import CHOSEN, EXPERTS, Bank, Fused, InventedConfig, TransposedBank, invent


class Swish(nn.Module):
    """A gated MLP whose halves are two layers."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.close = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.close(self.right(x) * functional.silu(self.left(x)))


class Orchid(nn.Module):
    """softmax, top-k, scaled before it is renormalised by sum + eps; the shared expert has a gate and comes first."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.switch = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.pool = Bank(config)
        self.common, self.dim = Swish(config.hidden_size, 56), nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.flatten(0, 1)
        best, chosen = self.switch(flat).softmax(-1, dtype=torch.float32).topk(CHOSEN, -1)
        best = best * 1.5
        best = best / (best.sum(-1, keepdim=True) + 1e-9)
        routed = self.pool(flat, chosen, best.to(flat.dtype))
        return (torch.sigmoid(self.dim(flat)) * self.common(flat) + routed).view_as(hidden_states)


class Basalt(nn.Module):
    """A router with a bias scores the chosen alone; experts with GELU and biases are stored `[experts, in, out]`."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.pick = nn.Linear(config.hidden_size, EXPERTS, bias=True)
        self.rocks = TransposedBank(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, chosen = torch.topk(self.pick(flat), CHOSEN)
        return self.rocks(flat, chosen, functional.softmax(logits, 1)).reshape(hidden_states.shape)


class Heron(nn.Module):
    """sigmoid, a correction that only chooses, weights renormalised and then scaled; the shared expert has no gate."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.compass = nn.Parameter(torch.empty(EXPERTS, config.hidden_size))
        self.tilt = nn.Parameter(torch.zeros(EXPERTS))
        self.flock, self.lead = Bank(config), Swish(config.hidden_size, 40)

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = functional.linear(flat.float(), self.compass.float()).sigmoid()
        chosen = torch.topk(scores + self.tilt, CHOSEN, dim=1, sorted=False).indices
        weights = scores.gather(1, chosen)
        weights = 2.5 * (weights / weights.sum(1, keepdim=True).clamp(min=1e-12))
        return self.flock(flat, chosen, weights.to(flat.dtype)).view_as(hidden_states) + self.lead(hidden_states)


class Lichen(nn.Module):
    """Of groups of experts the better half stays; the routed part is scaled outside; one layer makes shared halves."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.probe = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.patches = Bank(config, functional.relu)
        self.film, self.dry = (
            nn.Linear(config.hidden_size, 96, bias=False),
            nn.Linear(48, config.hidden_size, bias=False),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = self.probe(flat).softmax(-1)
        groups = scores.view(-1, 4, EXPERTS // 4).amax(-1)
        open_ = torch.zeros_like(groups).scatter(1, groups.topk(2, -1).indices, 1.0)
        open_ = open_[..., None].expand(-1, 4, EXPERTS // 4).reshape(scores.shape).bool()
        best, chosen = scores.masked_fill(~open_, 0.0).topk(CHOSEN, -1)
        wet, grown = self.film(flat).split(48, -1)
        return (0.7 * self.patches(flat, chosen, best) + self.dry(functional.gelu(wet) * grown)).view_as(hidden_states)


class Quartz(nn.Module):
    """The chosen are scored by sigmoid, chosen with a correction of the logits, in a block that ends with a norm."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.face = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.flaw = nn.Buffer(torch.zeros(EXPERTS))
        self.crystals, self.gain = Bank(config, functional.gelu), nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.face(flat)
        _, chosen = (logits + self.flaw).topk(CHOSEN, -1)
        out = self.crystals(flat, chosen, logits.gather(-1, chosen).sigmoid())
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain
        return out.reshape(hidden_states.shape)


MODELS = {
    "orchid": invent("orchid", Orchid),
    "basalt": invent("basalt", Basalt, Fused),
    "heron": invent("heron", Heron),
    "lichen": invent("lichen", Lichen, Fused),
    "quartz": invent("quartz", Quartz),
}
