"""The formats of rows: which one a file has, and the turns of its rows.

In: rows as values of JSON. Out: `Row`s. Faults: keys that match no format, and rows of preferences where answers are
learned (T514), rows without an answer or with values that are not text (T515), unknown roles and turns out of order
(T516).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from ktc.diagnostics import Diagnostic, InputRefused, listing, suggest
from ktc.training.tune.data_files import RowFault
from ktc.training.tune.settings import Format, Method
from ktc.training.tune.turns import Turn, answered, kind_of, messages, sharegpt, text_of, tools_of

Columns = Mapping[str, str]
"""The column of each name of a format; other columns keep their names."""

RowFormat = Literal["alpaca", "sharegpt", "messages", "prompt", "text", "pairs", "judged"]


@dataclass(frozen=True, slots=True)
class Row:
    """Turns with the answers to learn. `rejected` are the same with the answers of a pair that are worse.

    `good` judges the answers of a row, and is None where they are learned as they are.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    rejected: tuple[Turn, ...] | None = None
    good: bool | None = None


_REQUIRED: Final[Mapping[RowFormat, tuple[str, ...]]] = {
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
    "pairs": ("chosen", "rejected"),
    "judged": ("prompt", "completion", "label"),
}
_OPTIONAL: Final[Mapping[RowFormat, tuple[str, ...]]] = {
    "alpaca": ("input", "system", "history"),
    "sharegpt": ("system", "tools"),
    "messages": ("tools",),
    "prompt": ("tools",),
    "text": (),
    "pairs": ("prompt", "tools"),
    "judged": ("tools",),
}
_LEARNED: Final[Mapping[Method, tuple[RowFormat, ...]]] = {
    "sft": ("alpaca", "sharegpt", "messages", "prompt", "text"),
    "dpo": ("pairs",),
    "kto": ("judged", "pairs"),
}


def detected(rows: Iterable[object], method: Method) -> RowFormat:
    """Return the first format whose keys a row has, or the one with the nearest keys, so that rows can be reported."""
    forms = _LEARNED[method]
    first: Mapping[str, Any] = {}
    for row in rows:
        if not isinstance(row, dict):
            continue
        fields = cast("Mapping[str, Any]", row)
        for form in forms:
            if all(key in fields for key in _REQUIRED[form]):
                return form
        first = first or fields
    return max(forms, key=lambda form: sum(_near(key, first) for key in _REQUIRED[form]) / len(_REQUIRED[form]))


def columns_of(words: Sequence[str]) -> Columns:
    """Return the mapping of valid words."""
    return {name: column for name, _, column in (word.partition("=") for word in words)}


def renamed(row: object, columns: Columns) -> object:
    """Return a row with its columns under the names of a format, or the RowFault of a row that lacks one.

    A column that has such a name already is left out.
    """
    if not columns or not isinstance(row, dict):
        return row
    fields = cast("dict[str, Any]", row)
    missing = [column for column in columns.values() if column not in fields]
    if missing:
        named = next(name for name, column in columns.items() if column == missing[0])
        hint = suggest(missing[0], fields) or f"the row has {listing(fields, 6)}"
        return RowFault(
            "T514", f"the row has no column `{missing[0]}`, which `--column {named}={missing[0]}` names", hint
        )
    taken = {*columns, *columns.values()}
    others = {key: value for key, value in fields.items() if key not in taken}
    return {**others, **{name: fields[column] for name, column in columns.items()}}


def require_known_names(columns: Columns, method: Method) -> None:
    """Raise InputRefused (T503) for names of `column` that no format of the method has."""
    known = dict.fromkeys(key for form in _LEARNED[method] for key in (*_REQUIRED[form], *_OPTIONAL[form]))
    faults = [
        Diagnostic(
            "T503", f"`column` names `{name:.100}`, which no format has", hint=suggest(name, known) or _expected(method)
        )
        for name in columns
        if name not in known
    ]
    if faults:
        raise InputRefused(*faults)


def _near(key: str, row: Mapping[str, Any]) -> float:
    return 1.0 if key in row else 0.5 if suggest(key, row) else 0.0


def parsed(form: RowFormat, row: object, method: Method) -> Iterator[Row]:
    """Yield the row, and of a pair that is judged two. Raises RowFault."""
    if isinstance(row, RowFault):
        raise row
    if not isinstance(row, dict):
        raise RowFault("T514", f"a row is an object with keys, found {kind_of(row)}")
    fields = cast("dict[str, Any]", row)
    _check_keys(form, fields, method)
    tools = tools_of(fields["tools"]) if "tools" in _OPTIONAL[form] and "tools" in fields else ()
    if form == "pairs":
        chosen, rejected = _pair(fields)
        if method == "kto":
            yield from (Row(turns, tools, good=turns is chosen) for turns in (chosen, rejected))
        else:
            yield Row(chosen, tools, rejected)
        return
    good = _label(fields["label"]) if form == "judged" else None
    if form == "judged":
        _require_compared(fields, "completion")
    yield Row(answered(_turns(form, fields)), tools, good=good)


def _check_keys(form: RowFormat, row: Mapping[str, Any], method: Method) -> None:
    required, optional = _REQUIRED[form], _OPTIONAL[form]
    missing = [key for key in required if key not in row]
    if missing and method == "sft" and "chosen" in row and "rejected" in row:
        hint = "`--method dpo` learns from pairs, and `--method kto` from answers that are judged"
        raise RowFault("T514", "a row with `chosen` and `rejected` is a pair of preferences, not an answer", hint)
    if len(missing) == len(required) and not any(_near(key, row) for key in required):
        hint = f"rows have the keys of a format: {_expected(method)}"
        raise RowFault("T514", f"the keys of the row fit no format: {listing(row, 6)}", hint)
    if missing:
        hints = (f"`{mistyped}` should be `{key}`" for key in missing if (mistyped := _mistyped(key, row)))
        hint = "; ".join(hints) or f"rows have the keys of a format: {_expected(method)}"
        raise RowFault("T514", f"a row of the format `{form}` lacks {listing(missing)}; it has {listing(row, 6)}", hint)
    if form == "prompt" and isinstance(row.get("label"), bool):
        hint = "`--method kto` learns from both kinds; without `label` every answer is learned"
        raise RowFault("T514", "a row with `label` judges its answer, which may be a bad one", hint)
    known = (*required, *optional)
    for key in row:
        if key not in known and (near := suggest(key, optional)):
            raise RowFault("T514", f"the format `{form}` has no key `{key}`", near)


def _expected(method: Method) -> str:
    return "; ".join(f"{form}: {listing(_REQUIRED[form])}" for form in _LEARNED[method])


def _mistyped(key: str, row: Mapping[str, Any]) -> str:
    """Return the key of the row that the user probably meant: a few typing errors away, or a prefix."""
    near = (given for given in row if suggest(given, [key]) or key.startswith(given) or given.startswith(key))
    return next(near, "")


# Formats -------------------------------------------------------------------------------------------------------------
def _turns(form: RowFormat, fields: Mapping[str, Any]) -> Iterator[Turn]:
    if form == "alpaca":
        yield from _alpaca(fields)
    elif form == "sharegpt":
        yield from _system(fields)
        yield from sharegpt(fields["conversations"])
    elif form == "messages":
        yield from messages(fields["messages"], "messages")
    elif form == "text":
        yield Turn("text", text_of(fields["text"], "text"))
    else:
        yield from _prompted(fields, "completion")


def _system(fields: Mapping[str, Any]) -> Iterator[Turn]:
    if system := text_of(fields.get("system") or "", "system", empty=True):
        yield Turn("system", system)


def _alpaca(row: Mapping[str, Any]) -> Iterator[Turn]:
    yield from _system(row)
    history: Any = row.get("history") or []
    for pair in cast("list[Any]", history) if isinstance(history, list) else [None]:
        if not (isinstance(pair, list) and len(cast("list[Any]", pair)) == 2):
            raise RowFault("T515", "`history` is a list of pairs of a question and an answer")
        question, answer = cast("list[Any]", pair)
        yield Turn("user", text_of(question, "history"))
        yield Turn("assistant", text_of(answer, "history", empty=True))
    asked = (
        text_of(row["instruction"], "instruction", empty=True),
        text_of(row.get("input") or "", "input", empty=True),
    )
    yield Turn("user", "\n".join(filter(None, asked)))
    yield Turn("assistant", text_of(row["output"], "output", empty=True))


def _prompted(row: Mapping[str, Any], answer: str) -> Iterator[Turn]:
    """Yield a prompt and its answer: both are texts, or both are lists of messages."""
    if isinstance(row["prompt"], list) != isinstance(row[answer], list):
        kinds = f"found {kind_of(row['prompt'])} and {kind_of(row[answer])}"
        raise RowFault("T515", f"`prompt` and `{answer}` are two texts, or two lists of messages; {kinds}")
    if isinstance(row["prompt"], list):
        yield from messages(cast("object", row["prompt"]), "prompt", learned=False)
        yield from messages(row[answer], answer)
        return
    yield Turn("prompt", text_of(row["prompt"], "prompt", empty=True))
    yield Turn("completion", text_of(row[answer], answer, empty=True))


# Preferences ---------------------------------------------------------------------------------------------------------
def _label(value: object) -> bool:
    if not isinstance(value, bool):
        raise RowFault("T515", f"`label` is true or false, found {kind_of(value)}", "true: the answer is a good one")
    return value


def _pair(row: Mapping[str, Any]) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """Return the chosen and the rejected turns, which begin with the same prompt."""
    if "prompt" in row:
        for key in ("chosen", "rejected"):
            _require_compared(row, key)
        chosen, rejected = (answered(_prompted(row, key)) for key in ("chosen", "rejected"))
    else:
        chosen, rejected = _without_prompt(row)
    if chosen == rejected:
        raise RowFault("T515", "`chosen` and `rejected` are equal: the row prefers neither")
    return chosen, rejected


def _require_compared(row: Mapping[str, Any], key: str, prompt: int = 0) -> None:
    """Raise RowFault for an answer of weight 0 after the `prompt` first turns: all that follows them is compared."""
    if not isinstance(row[key], list):
        return
    for number, turn in enumerate(messages(row[key], key), start=1):
        if number > prompt and turn.role == "assistant" and not turn.learned:
            hint = "leave `weight` out, or put the turns before the compared answer into `prompt`"
            message = f'turn {number} of `{key}` has `"weight": 0`, and all turns after the prompt are compared'
            raise RowFault("T515", message, hint)


def _without_prompt(row: Mapping[str, Any]) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """Return two whole conversations; the turns that they share at their start are the prompt."""
    if not isinstance(row["chosen"], list) or not isinstance(row["rejected"], list):
        hint = "or `chosen` and `rejected` are two whole conversations, which begin alike"
        raise RowFault("T514", f"a row of the format `pairs` lacks `prompt`; it has {listing(row, 6)}", hint)
    chosen, rejected = (tuple(messages(row[key], key)) for key in ("chosen", "rejected"))
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    while shared and chosen[shared - 1].role == "assistant":
        shared -= 1
    if not shared:
        raise RowFault("T515", "`chosen` and `rejected` do not begin with the same turn: there is no prompt")
    for key in ("chosen", "rejected"):
        _require_compared(row, key, shared)
    as_prompt = tuple(Turn(turn.role, turn.content, False, turn.message) for turn in chosen[:shared])
    return answered((*as_prompt, *chosen[shared:])), answered((*as_prompt, *rejected[shared:]))


def format_of(wanted: Format) -> RowFormat | None:
    """Return the format that the user has set, None to detect it."""
    return None if wanted == "auto" else wanted
