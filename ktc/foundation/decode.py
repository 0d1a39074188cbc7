"""Strict reading of JSON, and decoding of its values into frozen dataclasses, driven by their annotations.

Input: JSON text; a JSON value and a dataclass of str, int, None, Any, Literal, unions, tuples and mappings. Output: the
value; the dataclass. Refused: text that is not JSON or nested too deeply (`ValueError`), missing and unknown keys and
values of a wrong type (`Undecodable`, with the place).
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_DEEPEST = 32
_MOST_SCHEMAS = 1_000_000
Decoded = TypeVar("Decoded")


class Undecodable(Exception):
    """The JSON does not fit the dataclass; the message names the place."""


def read_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text; bytes must be UTF-8. `pairs` builds each object, as in `json.loads`.

    Raises `ValueError` for text that is not JSON, and for JSON nested too deeply.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def has_lone_surrogate(text: str) -> bool:
    """Return whether `text` has a lone surrogate, such as JSON's `\\ud83d` alone, which UTF-8 cannot encode."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def schema_fault(number: object, wanted: int) -> str:
    """Return how the schema number of a file differs from the one that this ktc reads, "" if it does not."""
    if type(number) is int and number == wanted:
        return ""
    named = f"schema {number}" if type(number) is int and abs(number) < _MOST_SCHEMAS else "no schema number"
    return f"has {named}, this ktc reads schema {wanted}"


def decode(value: Any, wanted: type[Decoded]) -> Decoded:
    """Return `value` as the dataclass `wanted`. Raises `Undecodable`."""
    return cast("Decoded", _object(value, wanted, ""))


def _value(value: Any, wanted: Any, place: str) -> Any:
    if is_dataclass(wanted):
        return _object(value, cast("type[Any]", wanted), place)
    origin, options = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        if _deeper(value, _DEEPEST):
            raise Undecodable(f"`{place}` is nested too deeply")
        return value
    if origin is tuple:
        return _tuple(value, options, place)
    if origin is Mapping:
        return _mapping(value, options[1], place)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        inner = [option for option in options if is_dataclass(option) or get_origin(option) is not None]
        if inner:
            return _value(value, inner[0], place)
        options_met = type(value) in options
    else:
        options_met = type(value) is str and value in options if origin is Literal else type(value) is wanted
    if not options_met:
        names = " or ".join(getattr(o, "__name__", repr(o)) for o in (options or (wanted,)))
        raise Undecodable(f"expected {names} at `{place}`, found {_shown(value)}")
    return _text(value, place) if isinstance(value, str) else value


def _text(text: str, place: str) -> str:
    if has_lone_surrogate(text):
        raise Undecodable(f"a text at `{place}` has half of a surrogate pair")
    return text


def _deeper(value: Any, levels: int) -> bool:
    """Return whether a value is nested more deeply than later recursion supports."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    return isinstance(value, list) and (
        levels == 0 or any(_deeper(inner, levels - 1) for inner in cast("list[Any]", value))
    )


def _tuple(value: Any, options: tuple[Any, ...], place: str) -> tuple[Any, ...]:
    items = cast("list[Any]", value) if isinstance(value, list) else None
    if items is None:
        raise Undecodable(f"expected a list at `{place}`, found {_shown(value)}")
    if options[-1] is ...:
        options = (options[0],) * len(items)
    if len(items) != len(options):
        raise Undecodable(f"expected {len(options)} items at `{place}`, found {len(items)}")
    return tuple(_value(items[i], option, f"{place}[{i}]") for i, option in enumerate(options))


def _mapping(value: Any, wanted: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Undecodable(f"expected an object at `{place}`, found {_shown(value)}")
    items = cast("dict[str, Any]", value).items()
    return {_text(key, place): _value(item, wanted, f"{place}.{key}") for key, item in items}


def _object(value: Any, wanted: type[Any], place: str) -> Any:
    if not isinstance(value, dict):
        raise Undecodable(f"expected an object at `{place or '.'}`, found {_shown(value)}")
    fields = cast("dict[str, Any]", value)
    hints = _hints(wanted)
    names = hints.keys()
    if missing := sorted(names - fields.keys()):
        raise Undecodable(f"`{missing[0]}` is missing at `{place or '.'}`")
    if unknown := sorted(fields.keys() - names):
        raise Undecodable(f"`{place}.{unknown[0]}` is not known")
    return wanted(**{name: _value(fields[name], hints[name], f"{place}.{name}") for name in sorted(names)})


@cache
def _hints(wanted: type[Any]) -> dict[str, Any]:
    """Return the field annotations, evaluated once: a table of weights has a hundred thousand rows of one class."""
    hints = get_type_hints(wanted)
    return {field.name: hints[field.name] for field in fields(wanted)}


def _shown(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) and len(value) < 40 else type(value).__name__
