"""Turns of conversations, with calls of tools.

In: the messages of a row. Out: `Turn`s, and descriptions of tools. Faults: unknown keys (T514), values of another type
or without an answer (T515), unknown roles and turns out of order (T516).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, cast

from ktc.diagnostics import listing, suggest
from ktc.foundation.decode import has_lone_surrogate
from ktc.training.tune.data_files import RowFault

Role = Literal["system", "user", "assistant", "tool", "prompt", "completion", "text"]

ANSWERS: Final[frozenset[Role]] = frozenset({"assistant", "completion", "text"})
_ROLES: Final[Mapping[str, Role]] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SHAREGPT: Final[Mapping[str, Role]] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
_KEYS: Final[Mapping[Role, tuple[str, ...]]] = {
    "system": ("name",),
    "user": ("name",),
    "assistant": ("name", "tool_calls", "reasoning_content", "thinking", "weight"),
    "tool": ("name", "tool_call_id"),
}
_PARTS: Final = 'parts are like {"type": "text", "text": "..."} and {"type": "image", "path": "photo.png"}'
_CALL: Final = 'a call is like {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}'


@dataclass(frozen=True, slots=True)
class Turn:
    """`prompt` and `completion` are not formatted by a template; the whole of a `text` is trained on.

    `message` is the message that a chat template gets, None for one of role and content. An answer that is not
    `learned` belongs to the prompt. `images` are paths and data URIs; the content has their text alone.
    """

    role: Role
    content: str
    learned: bool = True
    message: Mapping[str, Any] | None = None
    images: tuple[str, ...] = ()

    @property
    def is_answer(self) -> bool:
        return self.learned and self.role in ANSWERS

    @property
    def calls_tools(self) -> bool:
        return bool(self.message and self.message.get("tool_calls"))

    def for_template(self) -> dict[str, Any]:
        """Return the message that a chat template gets."""
        return {"role": self.role, "content": self.content} if self.message is None else dict(self.message)


def messages(listed: object, key: str, *, learned: bool = True) -> Iterator[Turn]:
    """Yield the turns of a list of messages, the value of the row's `key`. Raises RowFault."""
    for number, turn in _numbered(listed, key):
        where = f"turn {number} of `{key}`" if key != "messages" else f"turn {number}"
        role = _role(turn, "role", _ROLES, where)
        _check_keys(turn, ("role", "content"), _KEYS[role], where)
        calls = _calls(turn["tool_calls"], where) if turn.get("tool_calls") else None
        parts = _parts(turn, role, where)
        if parts is not None:
            turn = {**turn, "content": _joined(parts)}
        content = turn.get("content")
        text = (
            "" if calls and content is None else _content(turn, "content", where, empty=role in ("assistant", "tool"))
        )
        weight = turn.get("weight", 1)
        if weight not in (0, 1):
            raise RowFault("T515", f"the `weight` of {where} is 0 or 1", "0 leaves an answer out of the loss")
        kept = turn.keys() - {"weight", "tool_calls"}
        given = {name: value for name, value in turn.items() if name in kept and value is not None}
        message = given | ({"tool_calls": calls} if calls else {})
        images = tuple(part["image"] for part in parts or () if part["type"] == "image")
        if images:
            shown = [{"type": "image"} if part["type"] == "image" else part for part in parts or ()]
            message = {**message, "content": shown}
        is_plain = message.keys() == {"role", "content"} and not images
        yield Turn(role, text, learned and weight == 1, None if is_plain else message, images)


def sharegpt(listed: object) -> Iterator[Turn]:
    """Yield the turns of `conversations`; a `function_call` is the assistant's. Raises RowFault."""
    for number, turn in _numbered(listed, "conversations"):
        where = f"turn {number}"
        role = _role(turn, "from", _SHAREGPT, where)
        _check_keys(turn, ("from", "value"), (), where)
        text = _content(turn, "value", where, empty=role in ("assistant", "tool"))
        if turn["from"] != "function_call":
            yield Turn(role, text)
            continue
        called = _parsed(text)
        calls = _calls(cast("list[Any]", called) if isinstance(called, list) else [called], where)
        yield Turn(role, "", message={"role": role, "content": "", "tool_calls": calls})


def tools_of(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return the descriptions of tools: a list of objects, or the same as a text of JSON. Raises RowFault."""
    listed: object = _parsed(value) if isinstance(value, str) and value.strip() else value or cast("list[object]", [])
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", listed)):
        hint = 'a tool is like {"type": "function", "function": {"name": "add", "parameters": {...}}}'
        raise RowFault("T515", "`tools` is a list of objects, or the same as JSON in a text", hint)
    return tuple(cast("list[Mapping[str, Any]]", listed))


def answered(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Return the turns if there is an answer to learn and their order is valid. Raises RowFault."""
    ordered = tuple(turns)
    if not any(turn.is_answer for turn in ordered):
        raise RowFault("T515", "the row has no answer to learn", "an answer is a turn of the assistant")
    if any(turn.role == "system" for turn in ordered[1:]):
        raise RowFault("T516", "a turn of the system comes first")
    if ordered[0].role == "assistant" or (ordered[0].role == "system" and ordered[1].role == "assistant"):
        raise RowFault("T516", "a conversation begins with a turn of the user")
    if any(first.role == second.role in ("user", "assistant") for first, second in pairwise(ordered)):
        raise RowFault("T516", "the user and the assistant take turns; here one of them speaks twice")
    return ordered


def text_of(value: object, key: str, *, empty: bool = False) -> str:
    """Return a value that has to be a text, not a blank one unless `empty`. Raises RowFault."""
    if not isinstance(value, str):
        raise RowFault("T515", f"`{key}` is a text, found {kind_of(value)}")
    if has_lone_surrogate(value):
        raise RowFault("T515", f"`{key}` has half of a character (a lone `\\ud800` to `\\udfff`)", "write it as UTF-8")
    if not (empty or value.strip()):
        raise RowFault("T515", f"`{key}` is empty")
    return value


def kind_of(value: object) -> str:
    """Return the kind of a JSON value in words."""
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), f"a value of the type `{type(value).__name__}`")


def _parts(turn: Mapping[str, Any], role: Role, where: str) -> list[dict[str, Any]] | None:
    """Return the parts of a content that is a list: texts, and images by their path or data URI. Raises RowFault."""
    listed: object = turn.get("content")
    if not isinstance(listed, list):
        return None
    parts = [_part(part, where) for part in cast("list[object]", listed)]
    if role != "user" and any(part["type"] == "image" for part in parts):
        raise RowFault("T515", f"{where} has an image, and only the user's have some")
    return parts


def _part(part: object, where: str) -> dict[str, Any]:
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    match fields:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text_of(text, where, empty=True)}
        case {"type": "image", "path": str(image)} | {"type": "image", "url": str(image)}:
            pass
        case {"type": "image_url", "image_url": {"url": str(image)}} | {"type": "image_url", "url": str(image)}:
            pass
        case _:
            raise RowFault("T515", f"a part of {where} is neither a text nor an image", _PARTS)
    if "path" not in fields and image[:5].lower() != "data:":
        message = f"an address of an image in {where} must be a data URI, since nothing is fetched"
        raise RowFault("T515", message, _PARTS)
    return {"type": "image", "image": image}


def _joined(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts if part["type"] == "text")


# Parts of a message --------------------------------------------------------------------------------------------------
def _numbered(listed: object, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if listed == []:
        raise RowFault("T515", f"`{key}` is empty", "a conversation has a turn of the user and an answer")
    if not isinstance(listed, list):
        raise RowFault("T515", f"`{key}` is a list of turns, found {kind_of(listed)}")
    for number, turn in enumerate(cast("list[object]", listed), start=1):
        if not isinstance(turn, dict):
            raise RowFault("T514", f"turn {number} of `{key}` is an object with keys, found {kind_of(turn)}")
        yield number, cast("dict[str, Any]", turn)


def _role(turn: Mapping[str, Any], key: str, roles: Mapping[str, Role], where: str) -> Role:
    role = turn.get(key)
    if key not in turn:
        raise RowFault("T514", f"{where} lacks the key `{key}`; it has {listing(turn, limit=6)}")
    if not isinstance(role, str) or role not in roles:
        hint = suggest(str(role), roles) or f"there are {listing(roles)}"
        raise RowFault("T516", f"{where} is of the unknown role `{role}`", hint)
    return roles[role]


def _check_keys(turn: Mapping[str, Any], needed: tuple[str, ...], more: tuple[str, ...], where: str) -> None:
    unknown = [key for key in turn if key not in needed and key not in more]
    if unknown:
        hint = suggest(unknown[0], (*needed, *more)) or f"its keys are {listing((*needed, *more))}"
        raise RowFault("T514", f"{where} has the unknown key `{unknown[0]:.40}`", hint)


def _content(turn: Mapping[str, Any], key: str, where: str, *, empty: bool) -> str:
    if key not in turn:
        raise RowFault("T514", f"{where} lacks the key `{key}`; it has {listing(turn, limit=6)}")
    return text_of(turn[key], where, empty=empty)


def _calls(listed: object, where: str) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as objects, which templates write as JSON."""
    if not isinstance(listed, list):
        raise RowFault("T515", f"`tool_calls` of {where} is a list, found {kind_of(listed)}", _CALL)
    return [_call(call, where) for call in cast("list[object]", listed)]


def _call(call: object, where: str) -> dict[str, Any]:
    fields = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    function: object = fields.get("function", fields)
    called = cast("dict[str, Any]", function) if isinstance(function, dict) else {}
    arguments = called.get("arguments", {})
    arguments = _parsed(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(called.get("name"), str) or not isinstance(arguments, dict):
        raise RowFault("T515", f"a call of a tool in {where} has a `name`, and `arguments` that are an object", _CALL)
    return {**fields, "function": {**called, "arguments": arguments}} if "function" in fields else {
        "type": "function", "function": {"name": called["name"], "arguments": arguments},
    }  # fmt: skip


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
