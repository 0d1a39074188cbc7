"""The arguments MODEL and RULES in either order, where it is clear which is which.

In: two words. Out: the same words as (MODEL, RULES). Refused (U008): two of one kind, or a program without a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ktc.cli.options import AUTO
from ktc.diagnostics import Diagnostic, InputRefused

_SUFFIX: Final = ".ktr"


def model_and_rules(model: str, rules: str) -> tuple[str, str]:
    """Return MODEL and RULES as `ktc compile` takes them. Raises InputRefused (U008)."""
    if not is_program(model):
        if rules != AUTO and _is_model(rules):
            _refuse_two_models(model, rules)
        return model, rules
    if _is_model(rules):
        return rules, model
    if rules == AUTO:
        message = f"`{model}` is a program, and MODEL is missing"
        raise InputRefused(Diagnostic("U008", message, hint=f"name the model too: `ktc compile MODEL {model}`"))
    message = f"`{model}` is a program, and it is in the place of MODEL"
    raise InputRefused(Diagnostic("U008", message, hint=f"did you swap them? `ktc compile {rules} {model}`"))


def rules_and_model(rules: str, model: str | None) -> tuple[str, str | None]:
    """Return RULES and MODEL as `ktc check` takes them; a model alone is checked with `auto`. Raises InputRefused."""
    if model is None:
        return (AUTO, rules) if _is_model(rules) else (rules, None)
    if is_program(model) and not is_program(rules):
        return model, rules
    if is_program(model):
        message = f"`{rules}` and `{model}` are both programs"
        hint = f"check them one by one: `ktc check {rules}`, `ktc check {model}`"
        raise InputRefused(Diagnostic("U008", message, hint=hint))
    if _is_model(rules):
        _refuse_two_models(rules, model)
    return rules, model


def is_program(word: str) -> bool:
    """Return whether the word is a rule file, or the name of a bundled program that no folder has."""
    if word.endswith(_SUFFIX):
        return not Path(word).is_dir()
    from ktc.language.dsl.former_names import FORMER
    from ktc.language.dsl.loader import bundled

    return not Path(word).is_dir() and (word in bundled() or word in FORMER)


def _is_model(word: str) -> bool:
    """Return whether the word is a folder, a twin or a hub id, and no program."""
    from ktc.model.hf.model_names import TINY, looks_like_hub_id

    is_named = word.startswith(TINY) or Path(word).is_dir() or looks_like_hub_id(word)
    return is_named and not is_program(word)


def _refuse_two_models(first: str, second: str) -> None:
    hint = "RULES is a rule file (`.ktr`) or the name of a bundled program: `ktc list` shows them"
    raise InputRefused(
        Diagnostic("U008", f"`{first}` and `{second}` are both models, and none is a program", hint=hint)
    )
