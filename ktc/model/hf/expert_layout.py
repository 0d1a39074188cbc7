"""How a stock module of experts lays out its stacks, and the names that a file of single experts has for them.

Input: the stock module, which may be on meta, or a name. Output: whether rows of gate and up alternate; the stack, the
expert and the part that a name of one expert's matrix means.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from ktc.model.checkpoint import Part
from ktc.model.hf.private_api import gate_code

EXPERT_LAYERS: Final[dict[str, Part]] = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"
}  # fmt: skip
"""Which part of an expert a layer of one expert is, by its name."""
_ONE_EXPERT: Final = re.compile(rf"(.+)\.(\d+)\.({'|'.join(EXPERT_LAYERS)})\.weight")


class OneExpert(NamedTuple):
    """A matrix (out, in) of one expert: names of the stack that may have it, first the joined one, and which it is."""

    stacks: tuple[str, ...]
    expert: int
    part: Part


def one_expert(name: str) -> OneExpert | None:
    """Return what `experts.3.gate_proj.weight` and the like mean, `None` for other names."""
    named = _ONE_EXPERT.fullmatch(name)
    if named is None:
        return None
    part = EXPERT_LAYERS[named[3]]
    leaves = {"gate": ("gate_up_proj",), "up": ("gate_up_proj", "up_proj"), "down": ("down_proj",)}[part]
    return OneExpert(tuple(f"{named[1]}.{leaf}" for leaf in leaves), int(named[2]), part)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module of experts says that its stacks are (E, in, out), as PEFT reads it."""
    return bool(getattr(module, "is_transposed", False))


def has_columns(module: nn.Module) -> bool:
    """Return whether the stacks of a module of experts are (E, in, out), also where it does not say so.

    With gate and up in one stack, sizes decide: it has twice the width of an expert, and `down_proj` has it once.
    """
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dim() != 3 or down.dim() != 3:
        return is_transposed(module)
    return gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]


def is_interleaved(module: nn.Module) -> bool:
    """Return whether gate and up are interleaved: then the second row reaches the first output of the gate code."""
    code = gate_code(module)
    if code is None:
        return False
    rows = torch.tensor([[0.5, 0.25, 0.75, 0.125, 1.0, 0.375, 0.625, 0.875]])
    moved = rows.clone()
    moved[0, 1] += 1.0
    before, after = (cast("Tensor", code(values)) for values in (rows, moved))
    return bool((after - before)[0, 0] != 0)
