"""The rule language: `.ktr` text in, a checked `RuleSet` out; wrong programs are refused with located messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ktc.language.dsl.checker import check
from ktc.language.dsl.former_names import FORMER
from ktc.language.dsl.loader import bundled, read_program
from ktc.language.dsl.ruleset import RuleSet

__all__ = ["RuleSet", "bundled", "load"]


def load(path_or_name: str | Path, settings: Mapping[str, str] | None = None) -> RuleSet:
    """Read and check a rule program: a path, or the bare name of a bundled one (`moe-lora`).

    `settings` are the `--set` values of parameters, as text. Raises InputRefused with the diagnostics of all files;
    warnings are in the result.
    """
    former = FORMER.get(str(path_or_name))
    if former is None:
        return check(read_program(path_or_name), settings or {})
    rules = check(read_program(former.source(str(path_or_name))), {**former.settings, **(settings or {})})
    return replace(rules, warnings=(former.warning(str(path_or_name)), *rules.warnings))
