"""The form of a layer's experts: activation, gate, biases, sizes, and how their weights are stored.

Capture reads a form from the model's own code, the kernel spec and the recipe carry it, kernels and loader follow it.
A form has one spelling (`silu`, `silu(alpha=1.702, limit=7.0, up_offset=1.0) biased transposed`), which graphs and
manifests hold; `parse_form` reads it back.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple, get_args

Function = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ExpertPart = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
_FLAGS: Final = ("ungated", "biased", "transposed", "interleaved")
_FORM = re.compile(r"(?P<function>\w+)(?:\((?P<settings>[^()]*)\))?(?P<flags>(?: \w+)*)")


class ExpertsSizes(NamedTuple):
    """The sizes of one layer's experts."""

    num_experts: int
    hidden: int
    intermediate: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Activation:
    """`f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)`; without a gate, `f(up)` alone.

    `silu` is `x * sigmoid(alpha * x)`, so that `alpha = 1.702` is the sigmoid form of GELU that GPT-OSS uses; `relu2`
    is the square of ReLU; `gelu_tanh` the tanh form of GELU. `alpha` belongs to `silu` alone.

    A soft cap bounds a value smoothly, `cap * tanh(x / cap)`: `gate_cap` the factor x of `silu`, not the argument of
    its sigmoid, and `up_cap` up. Soft caps and a limit exclude each other.
    """

    function: Function = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    gate_cap: float | None = None
    up_cap: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha) or not math.isfinite(self.up_offset):
            raise ValueError("`alpha` and `up_offset` must be finite")
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"`limit` must be positive and finite, found {self.limit!r}")
        for name, cap in (("gate_cap", self.gate_cap), ("up_cap", self.up_cap)):
            if cap is not None and (not 0 < cap < math.inf or self.limit is not None):
                raise ValueError(f"`{name}` must be positive and finite, without `limit`; found {cap!r}")
        if (self.alpha != 1 or self.gate_cap is not None) and self.function != "silu":
            raise ValueError(f"`alpha` and `gate_cap` belong to `silu` alone, found `{self.function}`")

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != f.default
        ]
        return f"{self.function}({', '.join(changed)})" if changed else self.function


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """The form of one layer's experts.

    Stock weights are `gate_up` (E, 2I, H) with gate first and `down` (E, H, I); `transposed` swaps the last two
    dimensions of both, `interleaved` means that gate and up alternate along 2I, and without `gated` there is only
    `up` (E, I, H). `biased`: gate_up has a bias (E, 2I), ordered as its rows are, and down one of (E, H).
    """

    activation: Activation = Activation()
    gated: bool = True
    biased: bool = False
    transposed: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        act = self.activation
        of_pairs = act.up_offset != 0 or any(bound is not None for bound in (act.limit, act.gate_cap, act.up_cap))
        if (self.interleaved or of_pairs) and not self.gated:
            raise ValueError("experts without a gate have no `interleaved`, `limit`, `up_offset` or soft cap")

    def __str__(self) -> str:
        set_flags = (not self.gated, self.biased, self.transposed, self.interleaved)
        return " ".join([str(self.activation), *(name for name, on in zip(_FLAGS, set_flags, strict=True) if on)])


def parse_form(text: str) -> ExpertsForm:
    """Return the form whose `str` is this text. Raises `ValueError` for any other text."""
    match = _FORM.fullmatch(text)
    if match is None or match["function"] not in get_args(Function):
        raise ValueError(f"`{text}` is not a form of experts")
    flags = match["flags"].split()
    settings = dict(pair.split("=", 1) for pair in (match["settings"] or "").split(", ") if "=" in pair)
    try:
        numbers = {name: float(value) for name, value in settings.items()}
        activation = Activation(match["function"], **numbers)  # pyright: ignore[reportArgumentType]
        form = ExpertsForm(activation, "ungated" not in flags, *(flag in flags for flag in _FLAGS[1:]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{text}` is not a form of experts") from error
    if str(form) != text:
        raise ValueError(f"`{text}` is not a form of experts; expected the spelling `{form}`")
    return form
