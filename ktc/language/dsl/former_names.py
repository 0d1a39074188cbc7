"""Names of bundled programs of the version before: in this version they still work, with a warning (U007).

Some were for one family, which a program for any model does now. Others are examples, which are given by their path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ktc.diagnostics import Diagnostic
from ktc.foundation import resources

_EXAMPLES: Final = "docs/examples"


@dataclass(frozen=True, slots=True)
class Former:
    """A program that a former name stands for: a bundled one with settings, or an example (`program` is empty)."""

    program: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    def source(self, name: str) -> str | Path:
        """Return the program to read."""
        return self.program or resources.examples() / f"{name}.ktr"

    def warning(self, name: str) -> Diagnostic:
        """Return the warning (U007) with the command that replaces the name."""
        words = (self.program, *(f"--set {key}={value}" for key, value in self.settings.items()))
        instead = " ".join(words) if self.program else f"{_EXAMPLES}/{name}.ktr"
        message = f"`{name}` is a former name of a bundled program, which the next version does not know"
        return Diagnostic("U007", message, hint=f"instead: `ktc compile MODEL {instead} -o OUT`", severity="warning")


FORMER: Final[Mapping[str, Former]] = {
    "deepseek-v2-lite-lora": Former("moe-lora"),
    "deepseek-v3-multi-gpu-lora": Former(),
    "kimi-k2-lora": Former("moe-lora"),
    "mla-inference": Former("moe-inference", {"format": "int8"}),
    "qwen3-moe-int4-qat": Former(),
    "qwen3-moe-lora": Former("moe-lora"),
}
