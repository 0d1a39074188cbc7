"""Parse the text of a YAML file into plain values with their places: only scalars, lists and mappings.

Works on the parser's events, so no constructor of any tag ever runs. Refused, each at its place: anchors and aliases,
tags, duplicate and non-text keys, several documents, and files over the limits below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation.regular_files import open_regular

MAX_BYTES = 2**20
MAX_DEPTH = 16
MAX_NODES = 50_000
MAX_ERRORS = 20

_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # as in YAML 1.1
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's where PyYAML was built with it


@dataclass(frozen=True, slots=True)
class Scalar:
    value: str | int | bool | None
    span: Span


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Mapping:
    """`keys` are the places of the keys."""

    entries: dict[str, Node]
    keys: dict[str, Span]
    span: Span


Node = Scalar | Sequence | Mapping


def printable(text: str) -> str:
    """Return `text` with `?` for control characters, which a terminal would execute."""
    return "".join(character if character.isprintable() else "?" for character in text)


def read_text(path: Path) -> str:
    """Return the file's text.

    Raises:
        InputRefused: K001, the file cannot be read, is too large or is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputRefused(Diagnostic("K001", f"cannot read `{path}`: {error.strerror}")) from error
    if len(content) > MAX_BYTES:
        raise InputRefused(Diagnostic("K001", f"`{path}` has more than {MAX_BYTES} bytes"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputRefused(Diagnostic("K001", f"`{path}` is not UTF-8 (byte {error.start})")) from error


def parse(text: str, file: str) -> Node:
    """Parse the only document of the text.

    Raises:
        InputRefused: the document is invalid; every fault is reported.
    """
    builder = _Builder(file)
    try:
        for event in _events(text):
            builder.take(event)
    except _Enough:
        pass
    except yaml.YAMLError as error:
        builder.refuse("K002", f"invalid YAML: {_problem(error)}", _span_of_error(error, file))
    if builder.diagnostics:
        raise InputRefused(*builder.diagnostics, sources={file: text})
    if builder.root is None:
        raise InputRefused(Diagnostic("K002", "the file is empty", Span(file, 1, 1, 1, 1)), sources={file: text})
    return builder.root


class _Enough(Exception):
    """Ends the reading of a document that exceeds a limit."""


@dataclass(slots=True)
class _Open:
    """A list or mapping that is not complete yet. `key` is the key of the next value."""

    start: Span
    items: list[Node] | None  # None for a mapping
    entries: dict[str, Node]
    keys: dict[str, Span]
    key: Scalar | None = None


class _Builder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.root: Node | None = None
        self.diagnostics: list[Diagnostic] = []
        self._open: list[_Open] = []
        self._nodes = 0
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        match event:
            case yaml.AliasEvent():
                self.refuse("K003", "aliases are refused", self._span(event), "write the value out")
                self._add(Scalar(None, self._span(event)))
            case yaml.ScalarEvent():
                self._check(event)
                self._add(Scalar(_value(event), self._span(event)))
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._check(event)
                listing: list[Node] | None = [] if isinstance(event, yaml.SequenceStartEvent) else None
                self._open.append(_Open(self._span(event), listing, {}, {}))
                if len(self._open) > MAX_DEPTH:
                    self._stop(f"values are nested deeper than {MAX_DEPTH}", event)
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._close()
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self._stop("a file has one document", event)
            case _:
                return

    def refuse(self, code: str, message: str, span: Span, hint: str = "") -> None:
        self.diagnostics.append(Diagnostic(code, message, span, hint=hint))
        if len(self.diagnostics) >= MAX_ERRORS:
            raise _Enough

    def _stop(self, message: str, event: yaml.Event) -> None:
        self.refuse("K004", message, self._span(event))
        raise _Enough

    def _check(self, event: Any) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._stop(f"a file has at most {MAX_NODES} values", event)
        if event.anchor is not None:
            self.refuse("K003", f"the anchor `&{event.anchor}` is refused", self._span(event), "write the value out")
        if event.tag is not None:
            self.refuse("K003", f"the tag `{event.tag}` is refused", self._span(event), "only plain values are read")

    def _close(self) -> None:
        done = self._open.pop()
        if done.items is not None:
            self._add(Sequence(tuple(done.items), done.start))
        else:
            self._add(Mapping(done.entries, done.keys, done.start))

    def _add(self, node: Node) -> None:
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        if parent.items is not None:
            parent.items.append(node)
        elif parent.key is None:
            parent.key = self._key(node)
        else:
            self._set(parent, parent.key, node)
            parent.key = None

    def _key(self, node: Node) -> Scalar:
        if isinstance(node, Scalar) and isinstance(node.value, str | int):
            return node
        self.refuse("K005", "a key is a plain text", node.span)
        return Scalar("", node.span)

    def _set(self, parent: _Open, key: Scalar, value: Node) -> None:
        name = str(key.value)
        if name in parent.entries:
            self.refuse("K005", f"the key `{name}` is given twice", key.span, "KTransformers would take the last one")
        parent.entries[name], parent.keys[name] = value, key.span

    def _span(self, event: Any) -> Span:
        start, end = event.start_mark, event.end_mark
        one_line = end.line == start.line and end.column > start.column
        stop = end.column if one_line and isinstance(event, yaml.ScalarEvent) else start.column + 1
        return Span(self.file, start.line + 1, start.column + 1, start.line + 1, stop + (1 if one_line else 0))


def _events(text: str) -> Iterator[yaml.Event]:
    return cast("Iterator[yaml.Event]", yaml.parse(text, Loader=_PARSER))


def _value(event: yaml.ScalarEvent) -> str | int | bool | None:
    """Interpret a scalar. Only a plain scalar has a value other than its text."""
    text = str(event.value)
    if not event.implicit[0]:
        return text
    if text in _NULLS:
        return None
    if text in (text.lower(), text.upper(), text.capitalize()) and text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    digits = text.removeprefix("-").removeprefix("+")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 9 else text


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read")


def _span_of_error(error: yaml.YAMLError, file: str) -> Span:
    mark = getattr(error, "problem_mark", None)
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    return Span(file, line, column, line, column + 1)
