"""Training data: a file of alpaca, sharegpt, messages, prompt and completion, or plain text, as turns of conversations.

In: JSON, JSONL or text in UTF-8. Out: `TrainingData`, its rows with their line numbers. Refused, all invalid rows of a
file together: unreadable (T510), empty (T511), not UTF-8 (T512), not JSON (T513), keys that match no format (T514),
rows without an answer or with values that are not text (T515), unknown roles and turns out of order (T516).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from ktc.diagnostics import Diagnostic, InputRefused, Span, listing, suggest
from ktc.foundation.decode import has_lone_surrogate
from ktc.foundation.text_files import bounded, read_text
from ktc.training.tune.bundled import data_file, names
from ktc.training.tune.settings import Format

Role = Literal["system", "user", "assistant", "tool", "prompt", "completion", "text"]
Rows = list[tuple[int, Any]]

_ENDINGS = (".json", ".jsonl", ".txt")
_REQUIRED: Mapping[Format, tuple[str, ...]] = {
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
_OPTIONAL: Mapping[Format, tuple[str, ...]] = {
    "alpaca": ("input", "system", "history"),
    "sharegpt": ("system",),
    "messages": (),
    "prompt": (),
    "text": (),
}
_ROLES: Mapping[Format, Mapping[str, Role]] = {
    "sharegpt": {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    "messages": {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"},
}
_MOST_BYTES = 4 << 30  # of a file, which is parsed in memory
_ANSWERS: frozenset[Role] = frozenset({"assistant", "completion", "text"})


@dataclass(frozen=True, slots=True)
class Turn:
    """`prompt` and `completion` are not formatted by a template; the whole of a `text` is trained on."""

    role: Role
    content: str

    @property
    def is_answer(self) -> bool:
        return self.role in _ANSWERS


@dataclass(frozen=True, slots=True)
class Example:
    """One row; `line` is where it begins, from 1."""

    line: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """`detected`: the format was found from the keys, not set by the user."""

    file: str
    format: Format
    detected: bool
    examples: tuple[Example, ...]


class _Fault(Exception):
    """The fault of one row: code, message and hint."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def read_training_data(path: Path, wanted: Format = "auto") -> TrainingData:
    """Return every row of the file, or of the bundled one that `path` names.

    Raise InputRefused with the first faults by line.
    """
    path = data_file(path)
    text = _read(path)
    if path.suffix == ".txt":
        if wanted not in ("auto", "text"):
            raise InputRefused(Diagnostic("T514", f"`{path}` is plain text, and cannot have the format `{wanted}`"))
        return _all_good(path, "text", wanted == "auto", _paragraphs(text), [])
    rows, faults = _array(text, path) if text.lstrip()[:1] == "[" else _lines(text, path)
    chosen = _detected(rows) if wanted == "auto" else wanted
    return _all_good(path, chosen, wanted == "auto", rows, faults)


def _all_good(path: Path, form: Format, detected: bool, rows: Rows, faults: list[Diagnostic]) -> TrainingData:
    examples: list[Example] = []
    for line, row in rows:
        try:
            examples.append(Example(line, _turns(form, row)))
        except _Fault as fault:
            faults.append(_at(path, line, fault))
    if faults:
        raise InputRefused(*bounded(faults))
    if not examples:
        raise InputRefused(Diagnostic("T511", f"`{path}` has no data"))
    return TrainingData(str(path), form, detected, tuple(examples))


def _at(path: Path, line: int, fault: _Fault) -> Diagnostic:
    return Diagnostic(fault.code, fault.message, Span(str(path), line, 1, line, 2), hint=fault.hint)


# Files ---------------------------------------------------------------------------------------------------------------
def _read(path: Path) -> str:
    if path.suffix not in _ENDINGS:
        hint = suggest(path.name, names()) or f"data that ktc ships: {listing(names())}"
        raise InputRefused(Diagnostic("T510", f"`{path}` ends in none of {listing(_ENDINGS)}", hint=hint))
    text = read_text(path, unreadable="T510", not_utf8="T512", most_bytes=_MOST_BYTES)
    if not text.strip():
        raise InputRefused(Diagnostic("T511", f"`{path}` is empty"))
    return text


def _paragraphs(text: str) -> Rows:
    """Yield the stretches between blank lines, each as a row."""
    rows, paragraph = Rows(), list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            rows.append((number - len(paragraph), {"text": "\n".join(paragraph)}))
            paragraph = []
    return rows


def _lines(text: str, path: Path) -> tuple[Rows, list[Diagnostic]]:
    rows, faults = Rows(), list[Diagnostic]()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            faults.append(_at(path, number, _no_json(error)))
    return rows, faults


def _array(text: str, path: Path) -> tuple[Rows, list[Diagnostic]]:
    """Yield the elements of one JSON list with their lines, up to the first invalid one."""
    decoder, rows = json.JSONDecoder(), Rows()
    position, line, seen = _skip(text, text.index("[") + 1), 1, 0
    while text[position : position + 1] != "]":
        line, seen = line + text.count("\n", seen, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            where = getattr(error, "pos", position)
            return rows, [_at(path, text.count("\n", 0, where) + 1, _no_json(error))]
        rows.append((line, value))
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "]":
            fault = _Fault("T513", "this is not JSON: rows of a list are separated by commas, and it ends with `]`")
            return rows, [_at(path, text.count("\n", 0, position) + 1, fault)]
    if text[position + 1 :].strip():
        fault = _Fault("T513", "this is not JSON: the list is followed by other text")
        return rows, [_at(path, text.count("\n", 0, position) + 1, fault)]
    return rows, []


def _skip(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _no_json(error: Exception) -> _Fault:
    said = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"
    return _Fault("T513", f"this is not JSON: {said}", "a .jsonl file has one object a line, a .json file one list")


# Formats -------------------------------------------------------------------------------------------------------------
def _detected(rows: Rows) -> Format:
    """Return the first format whose keys a row has, or the one with the nearest keys, so that rows can be reported."""
    objects = [cast("Mapping[str, Any]", row) for _, row in rows if isinstance(row, dict)]
    for row in objects:
        for form, keys in _REQUIRED.items():
            if all(key in row for key in keys):
                return form
    first: Mapping[str, Any] = objects[0] if objects else {}
    return max(_REQUIRED, key=lambda form: sum(_near(key, first) for key in _REQUIRED[form]) / len(_REQUIRED[form]))


def _near(key: str, row: Mapping[str, Any]) -> float:
    return 1.0 if key in row else 0.5 if suggest(key, row) else 0.0


def _turns(form: Format, row: object) -> tuple[Turn, ...]:
    """Return the turns of one row. Raise _Fault."""
    if not isinstance(row, dict):
        raise _Fault("T514", f"a row is an object with keys, found {_kind(row)}")
    fields = cast("dict[str, Any]", row)
    _check_keys(form, fields)
    if form == "alpaca":
        return _answered(_alpaca(fields))
    if form in ("sharegpt", "messages"):
        return _answered(_conversation(form, fields))
    return _answered(Turn(cast("Role", key), _text(fields[key], key, empty=key != "text")) for key in _REQUIRED[form])


def _check_keys(form: Format, row: Mapping[str, Any]) -> None:
    missing = [key for key in _REQUIRED[form] if key not in row]
    if missing:
        hints = (f"`{mistyped}` should be `{key}`" for key in missing if (mistyped := _mistyped(key, row)))
        hint = "; ".join(hints) or f"name the format with `--format`: {listing(_REQUIRED)}"
        names = listing(row, limit=6)
        raise _Fault("T514", f"a row of the format `{form}` lacks {listing(missing)}; it has {names}", hint)
    known = (*_REQUIRED[form], *_OPTIONAL[form])
    for key in row:
        if key not in known and (near := suggest(key, _OPTIONAL[form])):
            raise _Fault("T514", f"the format `{form}` has no key `{key}`", near)


def _mistyped(key: str, row: Mapping[str, Any]) -> str:
    """Return the key of the row that the user probably meant: a few typing errors away, or a prefix."""
    near = (given for given in row if suggest(given, [key]) or key.startswith(given) or given.startswith(key))
    return next(near, "")


def _alpaca(row: Mapping[str, Any]) -> Iterator[Turn]:
    if system := _text(row.get("system") or "", "system", empty=True):
        yield Turn("system", system)
    history: Any = row.get("history") or []
    for pair in cast("list[Any]", history) if isinstance(history, list) else [None]:
        if not (isinstance(pair, list) and len(cast("list[Any]", pair)) == 2):
            raise _Fault("T515", "`history` is a list of pairs of a question and an answer")
        question, answer = cast("list[Any]", pair)
        yield Turn("user", _text(question, "history"))
        yield Turn("assistant", _text(answer, "history", empty=True))
    asked = (_text(row["instruction"], "instruction", empty=True), _text(row.get("input") or "", "input", empty=True))
    yield Turn("user", "\n".join(filter(None, asked)))
    yield Turn("assistant", _text(row["output"], "output", empty=True))


def _conversation(form: Format, row: Mapping[str, Any]) -> Iterator[Turn]:
    (key,) = _REQUIRED[form]
    listed: Any = row[key]
    if not isinstance(listed, list) or listed == []:
        raise _Fault("T515", f"`{key}` is a list of turns, found {_kind(row[key])}")
    turns = cast("list[Any]", listed)
    if form == "sharegpt" and (system := _text(row.get("system") or "", "system", empty=True)):
        yield Turn("system", system)
    role_key, content_key = ("from", "value") if form == "sharegpt" else ("role", "content")
    roles = _ROLES[form]
    for number, turn in enumerate(turns, start=1):
        if not (isinstance(turn, dict) and turn.keys() == {role_key, content_key}):
            shape = listing(cast("dict[str, Any]", turn)) if isinstance(turn, dict) else _kind(turn)
            raise _Fault("T514", f"turn {number} has the keys `{role_key}` and `{content_key}`, found {shape}")
        fields = cast("dict[str, Any]", turn)
        role = fields[role_key]
        if not isinstance(role, str) or role not in roles:
            hint = suggest(str(role), roles) or f"there are {listing(roles)}"
            raise _Fault("T516", f"turn {number} is of the unknown role `{role}`", hint)
        yield Turn(roles[role], _text(fields[content_key], f"turn {number}", empty=roles[role] == "assistant"))


def _answered(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Return the turns if there is an answer and their order is valid. Raise _Fault."""
    answered = tuple(turns)
    if not any(turn.is_answer for turn in answered):
        raise _Fault("T515", "the row has no answer to learn", "an answer is a turn of the assistant")
    if any(turn.role == "system" for turn in answered[1:]):
        raise _Fault("T516", "a turn of the system comes first")
    if answered[0].role == "assistant" or (answered[0].role == "system" and answered[1].role == "assistant"):
        raise _Fault("T516", "a conversation begins with a turn of the user")
    if any(first.role == second.role in ("user", "assistant") for first, second in pairwise(answered)):
        raise _Fault("T516", "the user and the assistant take turns; here one of them speaks twice")
    return answered


def _text(value: object, key: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _Fault("T515", f"`{key}` is a text, found {_kind(value)}")
    if has_lone_surrogate(value):
        raise _Fault("T515", f"`{key}` has half of a character (a lone `\\ud800` to `\\udfff`)", "write it as UTF-8")
    if not (empty or value.strip()):
        raise _Fault("T515", f"`{key}` is empty")
    return value


def _kind(value: object) -> str:
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "null",
    }
    return names.get(type(value), "a number")
