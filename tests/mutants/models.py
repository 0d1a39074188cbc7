"""The small models that mutants change: families of transformers, and invented ones for what no single family has.

In: a name of `MODELS`. Out: a `Twin`: the model as its own twin, and the blocks that `moe-lora` rewrites. Between
them the models have every feature of `FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from families import CPU, config_of, planned
from invented.registered.models import MODELS as INVENTED
from invented.registered.models import Swish
from invented.registered.skeleton import CHOSEN, EXPERTS, Bank, Fused, Invented, InventedConfig, Still, invent
from places import REMOTE_CODE
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ktc.language import dsl
from ktc.model import twin
from ktc.model.twin.families import default_config
from ktc.stages.capture import ModelSource, capture, open_model
from ktc.stages.proof import Proof, ProofTwin, as_twin, prove_on
from ktc.stages.rewrite import RewrittenBlock, rewrite

RULES: Final = "moe-lora"  # with experts in bf16, although the twins compute in fp32: no kernel multiplies fp32 weights


@dataclass(frozen=True, slots=True)
class Twin:
    """A model that is its own twin, and its rewritten blocks."""

    proof_twin: ProofTwin
    blocks: tuple[RewrittenBlock, ...]

    def proofs(self) -> tuple[Proof, ...]:
        """Prove every rewrite."""
        return prove_on(self.proof_twin, self.proof_twin.captured, self.blocks, CPU)


@lru_cache(maxsize=2)  # mutants of one model follow each other
def twin_of(name: str) -> Twin:
    """Return the twin of a model."""
    return analysed(name)


def analysed(name: str) -> Twin:
    """Return the twin of a model, captured, matched, planned and rewritten now."""
    config = twin.shrink(MODELS[name](), whole=True)
    config.dtype = torch.float32
    proof_twin = as_twin(capture(ModelSource(name, None, config, None)))
    _, plan = planned(proof_twin.captured, dsl.load(RULES, {"format": "bf16"}))
    return Twin(proof_twin, rewrite(proof_twin.captured, plan))


# Invented models ------------------------------------------------------------------------------------------------------
class Twig(nn.Module):
    """One expert of a list."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.w2 = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Hedge(nn.Module):
    """A list of experts behind a router that has everything: groups, a correction, renormalisation, a scaling.

    A shared expert with a gate of its own is added.
    """

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.rank = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.lean = nn.Buffer(torch.zeros(EXPERTS))
        self.twigs = nn.ModuleList(Twig(config) for _ in range(EXPERTS))
        self.stem, self.sap = Swish(config.hidden_size, 40), nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = self.rank(flat).sigmoid()
        leaning = scores + self.lean
        groups = leaning.view(-1, 4, EXPERTS // 4).amax(-1)
        open_ = torch.zeros_like(groups).scatter(1, groups.topk(2, -1).indices, 1.0)
        open_ = open_[..., None].expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS).bool()
        chosen = leaning.masked_fill(~open_, 0.0).topk(CHOSEN, -1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        weights = 2.5 * (weights / (weights.sum(-1, keepdim=True) + 1e-20))
        out = torch.zeros_like(flat)
        for number, twig in enumerate(self.twigs):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, twig(flat[token]) * weights[token, slot, None])
        out = out + torch.sigmoid(self.sap(flat)) * self.stem(flat)
        return out.view_as(hidden_states)


class Terrace(Bank):
    """Experts with a limit that differs by layer."""

    limit = 7.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    def one(self, x: Tensor, expert: int) -> Tensor:
        return functional.linear(
            self._apply_gate(functional.linear(x, self.gate_up_proj[expert])), self.down_proj[expert]
        )


class Slope(nn.Module):
    """softmax and top-k over `Terrace`."""

    def __init__(self, config: InventedConfig) -> None:
        super().__init__()
        self.rank, self.bank = nn.Linear(config.hidden_size, EXPERTS, bias=False), Terrace(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.flatten(0, 1)
        best, chosen = self.rank(flat).softmax(-1).topk(CHOSEN, -1)
        return self.bank(flat, chosen, best).view_as(hidden_states)


class Slopes(Invented):
    """Layers whose experts have other limits."""

    mixture, attention = Slope, Still

    def __init__(self, config: InventedConfig) -> None:
        super().__init__(config)
        for cell, limit in zip(self.cells, (7.0, 0.5), strict=True):
            cell.think.bank.limit = limit


class SlopesConfig(InventedConfig):
    model_type = "invented_slopes"


AutoConfig.register("invented_slopes", SlopesConfig, exist_ok=True)
Slopes.config_class = SlopesConfig
AutoModelForCausalLM.register(SlopesConfig, Slopes, exist_ok=True)
HEDGE: Final = invent("hedge", Hedge, Fused)


def _orchard() -> PreTrainedConfig:
    return open_model(REMOTE_CODE / "orchard", fetch_weights=False, trust_remote_code=True).config


def _family(name: str) -> Callable[[], PreTrainedConfig]:
    """Return the default config with few layers, every kind of them."""
    return lambda: twin.shrink(default_config(name))


# The table ------------------------------------------------------------------------------------------------------------
MODELS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v2": lambda: config_of("deepseek_v2", routed_scaling_factor=1.5),
    "deepseek_v3": _family("deepseek_v3"),
    "gpt_oss": _family("gpt_oss"),
    "qwen2_moe": _family("qwen2_moe"),
    "nemotron_h": _family("nemotron_h"),
    "minimax_m3_vl_text": _family("minimax_m3_vl_text"),
    "gemma4_text": _family("gemma4_text"),
    "basalt": INVENTED["basalt"],
    "hedge": HEDGE,
    "slopes": SlopesConfig,
    "orchard": _orchard,
}
FEATURES: Mapping[str, tuple[str, ...]] = {
    "groups": ("deepseek_v2", "deepseek_v3", "hedge"),
    "scaling": ("deepseek_v2", "deepseek_v3", "hedge"),
    "correction bias": ("deepseek_v3", "hedge"),
    "renormalisation": ("deepseek_v3", "hedge", "orchard"),
    "clamps": ("gpt_oss", "minimax_m3_vl_text", "slopes"),
    "offsets": ("gpt_oss", "minimax_m3_vl_text"),
    "shared experts": ("deepseek_v2", "deepseek_v3"),
    "gated shared experts": ("qwen2_moe", "hedge"),
    "ungated experts": ("nemotron_h",),
    "sinks": ("gpt_oss",),
    "windows": ("gpt_oss", "gemma4_text"),
    "lists of experts": ("hedge", "orchard"),
    "biases": ("gpt_oss", "basalt", "qwen2_moe"),
    "transposed": ("gpt_oss", "basalt"),
    "interleaved": ("gpt_oss",),
    "experts beside their router": ("gemma4_text",),
}
