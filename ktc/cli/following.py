"""The command that usually follows another one, with arguments that exist: every line runs as it is printed.

In: the inputs and results of a command. Out: the words of the next command line, for `Session.next`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ktc.cli.amounts import relative
from ktc.cli.options import AUTO

if TYPE_CHECKING:
    from ktc.language.dsl import RuleSet

Words = tuple[object, ...]
DATA: Final = "capitals"  # of `ktc.training.tune.bundled`, until the user has data of their own
_TOKENIZER: Final = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")  # files that `data_files` copies into OUT
_TWINS: Final = ("deepseek_v2", "qwen3_moe")  # model types, by which a program without a model is tried


def after_compiling(out: Path, *, weights: Path | None = None, trust: bool = False) -> Words:
    """Return the command that uses the compiled model `out`: training if it has an adapter, otherwise answers.

    A model without a tokenizer is compared with the original: the others read text.
    """
    if not _has_tokenizer(out):
        return ("ktc", "prove", relative(out.absolute()), *loading(weights, trust))
    if not _has_adapter(out):
        return answering(out, weights=weights, trust=trust)
    return ("ktc", "train", relative(out.absolute()), "--data", DATA, *loading(weights, trust))


def answering(
    out: Path | str, adapter: Path | None = None, *, weights: Path | None = None, trust: bool = False,
    text_only: bool = False,
) -> Words:  # fmt: skip
    """Return the command that starts a conversation with the compiled model `out`, or with a model by its name.

    A compiled model without a tokenizer is shown.
    """
    if isinstance(out, Path) and not _has_tokenizer(out):
        return ("ktc", "graph", relative(out.absolute()))
    named = relative(out.absolute()) if isinstance(out, Path) else out
    return ("ktc", "chat", named, *_adapter(adapter), *loading(weights, trust, text_only=text_only))


def serving(
    out: Path | str, adapter: Path | None = None, *, weights: Path | None = None, trust: bool = False,
    text_only: bool = False,
) -> Words:  # fmt: skip
    """Return the command that serves the compiled model `out`, or a model by its name."""
    return ("ktc", "serve", out, *_adapter(adapter), *loading(weights, trust, text_only=text_only))


def compiling(
    model: str | Path, rules: str = AUTO, settings: Iterable[str] = (), *, trust: bool = False, text_only: bool = False
) -> Words:
    """Return the command that compiles `model`, into a folder of its name that does not exist yet."""
    chosen = (word for setting in settings for word in ("--set", setting))
    program = () if rules == AUTO else (rules,)
    options = loading(None, trust, text_only=text_only)
    return ("ktc", "compile", model, *program, "-o", _unused(str(model)), *chosen, *options)


def checking(rules: RuleSet, named: str | Path) -> Words | None:
    """Return the command that follows the check of a program alone; `named` is the program as its user named it.

    A bundled program is checked on a small model. None if it is written for a larger one, or rounds rows in groups that
    no small model has. A file of the user's is formatted.
    """
    from ktc.language.dsl.evaluate import evaluate

    if Path(named).is_file():
        return ("ktc", "fmt", named)
    if any(action.target.rounding for rule in rules.rules for action in rule.actions):
        return None
    for family in _TWINS:
        known: dict[tuple[str, ...], str] = {("model", "type"): family}
        if all(
            evaluate(require.condition, rules.units[unit].params, lambda fact, known=known: known.get(fact)) is True
            for unit, require in rules.requires
        ):
            return ("ktc", "check", named, f"tiny:{family}")
    return None


def loading(weights: Path | None, trust: bool, *, text_only: bool = False) -> Iterator[object]:
    """Yield the options with which the model was compiled and loaded: another command needs them too."""
    yield from ("--text-only",) if text_only else ()
    yield from () if weights is None else ("--weights", weights)
    yield from ("--trust-remote-code",) if trust else ()


def _has_tokenizer(folder: Path) -> bool:
    """Return whether a tokenizer's files are in the folder of a model."""
    return any(file.is_file() for name in _TOKENIZER for file in folder.glob(name))


def _has_adapter(out: Path) -> bool:
    """Return whether the rules of the compiled model `out` define an adapter: otherwise its file holds `null`."""
    file = out / "lora.json"
    return file.is_file() and file.read_text(encoding="utf-8").strip() != "null"


def _adapter(folder: Path | None) -> Words:
    return () if folder is None else ("--adapter", folder)


def default_out(model: str) -> str:
    """Return a name for the compiled `model`: an identifier that no module has."""
    stem = re.sub(r"\W+", "_", Path(model.removeprefix("tiny:")).absolute().name).strip("_").lower() or "model"
    return f"{stem}_ktc" if stem[0].isalpha() else f"model_{stem}_ktc"


def _unused(model: str) -> str:
    """Return a name for the compiled `model` that nothing in the working folder has."""
    stem = default_out(model)
    names = (stem, *(f"{stem}_{number}" for number in range(2, 1000)))
    return next(name for name in names if not Path(name).exists())
