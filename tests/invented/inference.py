"""The program for inference, for families whose trap is their attention: what it leaves, and the errors of its logits.

In: a case, its model folder and a stock model. Out: the reasons for attention that keeps its own code, the errors of
reference mode, and the error of the kernels beside that of stock in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import ktc
from invented.calls import inputs, real
from invented.errors import relative
from invented.surroundings import forget_code_of_models
from invented.written import stock

_LEFT = ("M092", "M093")  # attention that keeps its own code
_NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Inference:
    """`attention` has the reasons, "" where a kernel decodes; `errors` and `kernel` are as in `compared.Found`."""

    attention: str
    errors: Mapping[str, float]
    kernel: Mapping[str, tuple[float, float]]


def inferred(model: Path, out: Path, exact: PreTrainedModel) -> Inference:
    """Compile `model` for inference into `out` and compare it with `exact`, the stock model in fp32."""
    reasons = list[str]()

    def observe(stage: str, value: Any) -> None:
        if stage == "plan":
            reasons.extend(warning.message for warning in value.warnings if warning.code in _LEFT)

    ktc.compile(model, "moe-inference", out, trust_remote_code=True, observe=observe)
    forget_code_of_models()
    ours = ktc.load(out, reference=True, trust_remote_code=True)
    tokens = 0.0 if torch.equal(_greedy(ours), _greedy(exact)) else math.inf
    errors = {"inference": relative(_logits(ours), _logits(exact)), "inference, greedy tokens": tokens}
    wanted = _decoded(exact)
    of_ours, of_half = _decoded(ktc.load(out, trust_remote_code=True)), _decoded(stock(model, torch.bfloat16))
    kernel = {"inference": (relative(of_ours, wanted), relative(of_half, wanted))}
    return Inference("; ".join(dict.fromkeys(reasons)), errors, kernel)


def _logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return torch.cat([real(model(**call).logits, call).flatten(0, -2) for call in inputs().values()])


def _decoded(model: PreTrainedModel) -> Tensor:
    """Return the logits of texts that are read in pieces, the last of them token by token."""
    ids = inputs()["1 x 700"]["input_ids"][:, :672].view(
        28, 24
    )  # enough tokens that one expert's choice decides little
    cache, parts = None, list[Tensor]()
    with torch.no_grad():
        for piece in ids.split((12, 1, 1, 2, 8), dim=1):
            result = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            parts.append(result.logits)
    return torch.cat(parts, 1)


def _greedy(model: PreTrainedModel) -> Tensor:
    ids = inputs()["3 x 37, padded left"]["input_ids"][:2]
    return model.generate(ids, max_new_tokens=_NEW_TOKENS, do_sample=False, eos_token_id=None)
