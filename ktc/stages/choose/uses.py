"""The uses that a program is planned for, each with its weight in the sum that the planner makes least."""

from __future__ import annotations

from ktc.stages.cost import Use
from ktc.stages.plan.types import ANY_SIZE, BatchShape

# An optimizer step of 16 sequences; a request with a prompt, and the tokens of its answer.
_STEP = 16, 512
_PROMPT, _ANSWER = 2048, 256


def uses_of(mode: str, shape: BatchShape = ANY_SIZE) -> tuple[tuple[Use, float], ...]:
    """Return the uses of a program in `mode` at the size that the user named, and how often each happens."""
    if mode == "train":
        return ((Use("train", shape.batch or _STEP[0], shape.length or _STEP[1]), 1.0),)
    batch, length = shape.batch or 1, shape.length or _PROMPT
    return (Use("prefill", batch, length), 1.0), (Use("decode", batch, length), float(_ANSWER))
