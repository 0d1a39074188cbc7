"""Parse the text of a YAML file into plain values with their places: only scalars, lists and mappings.

Works on the parser's events and nodes, so no constructor of any tag ever runs. Refused, each at its place: anchors and
aliases, tags, duplicate and non-text keys, several documents, and files over the limits below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import yaml

from ktc.diagnostics import Diagnostic, InputRefused, Span

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


def parse(text: str, file: str) -> Node:
    """Parse the only document of the text.

    Raises:
        InputRefused: the document is invalid; every fault is reported.
    """
    reader = _Reader(file)
    root: Node | None = None
    try:
        reader.check(cast("Any", yaml).parse(text, Loader=_PARSER))
        composed: Any = None if reader.diagnostics else cast("Any", yaml).compose(text, Loader=_PARSER)
        root = None if composed is None else reader.node(composed)
    except _Enough:
        pass
    except yaml.YAMLError as error:
        reader.refuse("K002", f"invalid YAML: {_problem(error)}", _span_of_error(error, file))
    if reader.diagnostics:
        raise InputRefused(*reader.diagnostics, sources={file: text})
    if root is None:
        raise InputRefused(Diagnostic("K002", "the file is empty", Span(file, 1, 1, 1, 1)), sources={file: text})
    return root


class _Enough(Exception):
    """Ends the reading of a document that exceeds a limit."""


class _Reader:
    """Checks the events of a document, then converts its nodes."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []

    def check(self, events: Iterable[Any]) -> None:
        """Report anchors, aliases, tags and a document beyond the limits: composing any other document is safe."""
        depth, nodes, documents = 0, 0, 0
        for event in events:
            match event:
                case yaml.AliasEvent():
                    self.refuse("K003", "aliases are refused", self._span(event), "write the value out")
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    depth -= 1
                case yaml.DocumentStartEvent():
                    documents += 1
                    if documents > 1:
                        self._stop("a file has one document", event)
                case yaml.NodeEvent():
                    nodes += 1
                    depth += not isinstance(event, yaml.ScalarEvent)
                    if nodes > MAX_NODES:
                        self._stop(f"a file has at most {MAX_NODES} values", event)
                    if depth > MAX_DEPTH:
                        self._stop(f"values are nested deeper than {MAX_DEPTH}", event)
                    self._check_plain(event)
                case _:
                    pass

    def _check_plain(self, event: Any) -> None:
        if event.anchor is not None:
            self.refuse("K003", f"the anchor `&{event.anchor}` is refused", self._span(event), "write the value out")
        if event.tag is not None:
            self.refuse("K003", f"the tag `{event.tag}` is refused", self._span(event), "only plain values are read")

    def node(self, node: Any) -> Node:
        """Return a value with its place, and report invalid and repeated keys."""
        span = self._span(node)
        if isinstance(node, yaml.ScalarNode):
            return Scalar(_value(node), span)
        if isinstance(node, yaml.SequenceNode):
            return Sequence(tuple(map(self.node, node.value)), span)
        entries, keys = dict[str, Node](), dict[str, Span]()
        for key, value in node.value:
            place, name = self._span(key), _value(key) if isinstance(key, yaml.ScalarNode) else None
            if not isinstance(name, str | int):
                self.refuse("K005", "a key is a plain text", place)
            elif str(name) in entries:
                self.refuse("K005", f"the key `{name}` is given twice", place, "KTransformers would take the last one")
            entries[str(name)], keys[str(name)] = self.node(value), place
        return Mapping(entries, keys, span)

    def refuse(self, code: str, message: str, span: Span, hint: str = "") -> None:
        self.diagnostics.append(Diagnostic(code, message, span, hint=hint))
        if len(self.diagnostics) >= MAX_ERRORS:
            raise _Enough

    def _stop(self, message: str, event: Any) -> None:
        self.refuse("K004", message, self._span(event))
        raise _Enough

    def _span(self, place: Any) -> Span:
        """Return the place of a scalar on one line, or of the first character of another value."""
        start, end = place.start_mark, place.end_mark
        scalar = isinstance(place, yaml.ScalarEvent | yaml.ScalarNode) and end.line == start.line
        stop = max(end.column, start.column + 1) if scalar else start.column + 1
        return Span(self.file, start.line + 1, start.column + 1, start.line + 1, stop + 1)


def _value(node: Any) -> str | int | bool | None:
    """Interpret a scalar. Only a plain scalar has a value other than its text."""
    text = str(node.value)
    if node.style:  # quoted, or a block
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
