"""How tokens are chosen. In: options. Out: a frozen `Sampling`. Refused: invalid values and options without effect."""

from __future__ import annotations

from dataclasses import dataclass

from ktc.diagnostics import Diagnostic, InputRefused

_COLDEST = 1e-6  # logits divided by less have no fp32 numbers


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. `max_new_tokens` None: 256, or the room left in the model's length. `temperature` 0: greedy.

    `top_p` 1 and `top_k` 0 exclude no token. A `stop` text ends an answer and is not part of it.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def check(self) -> None:
        """Raise InputRefused (G707) for options without effect, and for invalid values."""
        if self.temperature == 0 and (self.top_p != 1 or self.top_k != 0):
            message = "`--top-p` and `--top-k` apply to sampling, and without a temperature decoding is greedy"
            raise InputRefused(Diagnostic("G707", message, hint="add `--temperature 0.7`, or remove them"))
        if self.temperature != 0 and not _COLDEST <= self.temperature < float("inf"):
            message = f"`--temperature` must be 0 or from {_COLDEST:g} up, found {self.temperature:g}"
            raise InputRefused(Diagnostic("G707", message, hint="0 is greedy: the most probable token"))
        if not 0 < self.top_p <= 1:
            raise InputRefused(Diagnostic("G707", f"`--top-p` must be above 0 and at most 1, found {self.top_p:g}"))
        if "" in self.stop:
            raise InputRefused(Diagnostic("G707", "`--stop` is empty, so every answer would end immediately"))
