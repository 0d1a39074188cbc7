"""Convert a Lark error into a diagnostic for the author of the file, with the likely fix as the hint."""

from __future__ import annotations

from typing import cast

from lark import Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from ktc.diagnostics import Diagnostic, Related, Span, listing, suggest
from ktc.language.dsl.schema import DECLARATIONS, KEYWORDS
from ktc.language.dsl.source_text import OpenBrace, SourceText

_TERMINALS = {
    "NAME": "a name",
    "STRING": 'a text such as "model.layers.*"',
    "INT": "a number",
    "FLOAT": "a number",
    "SIZE": "a size such as 22GiB",
    "DEVICE": "a device such as cuda:0",
    "VARIABLE": "a parameter such as $x",
    "TRUE": "`true`",
    "FALSE": "`false`",
    "ADDOP": "`+`",
    "MULOP": "`*`",
    "MINUS": "`-`",
    "CMP": "a comparison",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "EQUAL": "`=`",
    "COMMA": "`,`",
    "VBAR": "`|`",
    "QMARK": "`?`",
    "DOT": "`.`",
    "DOTS": "`..`",
    "ARROW": "`->`",
    "REWRITE": "`=>`",
    "COLON": "`:`",
    "$END": "the end of the file",
}
_MOST_EXPECTED = 6  # a longer list of alternatives is not helpful


def explain(error: UnexpectedInput, source: SourceText) -> Diagnostic:
    """Return the diagnostic for a syntax error: E001 unexpected word, E002 unclosed brace, E003 character or string."""
    if isinstance(error, UnexpectedToken):
        return _unexpected_token(error, source)
    if isinstance(error, UnexpectedCharacters):
        return _unexpected_character(error, source)
    return Diagnostic("E001", "the file ends too early", source.end())


def _unexpected_character(error: UnexpectedCharacters, source: SourceText) -> Diagnostic:
    offset = source.offset(error.line, error.column)
    character = source.text[offset]
    span = source.span(offset, offset + 1)
    if character == '"':
        return Diagnostic(
            "E003", "this string is not closed", span, hint='close it with `"` on the same line; `\\` is `\\\\`'
        )
    hint = (
        'strings have double quotes: "..."'
        if character == "'"
        else "comments start with `#`"
        if character == "/"
        else ""
    )
    return Diagnostic("E003", f"unexpected character `{character}`", span, hint=hint)


def _unexpected_token(error: UnexpectedToken, source: SourceText) -> Diagnostic:
    token = cast("Token", error.token)
    at_end = token.type == "$END"
    span = source.end() if at_end else _token_span(token, source)
    brace = source.open_brace(len(source.text) if at_end else source.offset(span.line, span.column))
    if brace and (at_end or str(token) in DECLARATIONS):
        return _unclosed(brace, span, None if at_end else str(token))
    expected = set(error.accepts or error.expected or ())
    word = str(token)
    unexpected = "the end of the file" if at_end else f"`{word}`"
    keywords = [keyword for keyword in KEYWORDS if keyword.upper() in expected]
    if token.type == "NAME" and brace is None and "IMPORT" in expected:
        hint = suggest(word, DECLARATIONS) or f"a file is a list of {listing(DECLARATIONS)}"
        return Diagnostic("E001", f"unknown declaration `{word}`", span, hint=hint)
    if word in KEYWORDS and "NAME" in expected:
        return Diagnostic("E001", f"`{word}` is a reserved word and cannot be a name", span, hint="choose another name")
    if word == "=" and "CMP" in expected:
        return Diagnostic("E001", "`=` is not a comparison", span, hint="write `==`")
    hint = suggest(word, keywords) if token.type == "NAME" else "" if at_end else _foreign_habit(source, span)
    return Diagnostic("E001", f"unexpected {unexpected}", span, hint=hint or _expectation(expected))


def _foreign_habit(source: SourceText, span: Span) -> str:
    """Return the hint for what other languages have here: comments with slashes, colons after words."""
    offset = source.offset(span.line, span.column)
    if source.text.startswith(("//", "/*"), offset):
        return "a comment starts with `#`"
    before = source.text[:offset].split()[-1:]
    if source.text.startswith(":", offset) and before and before[0] in KEYWORDS:
        return f"`{before[0]}` has no `:` after it"
    return ""


def _unclosed(brace: OpenBrace, span: Span, before: str | None) -> Diagnostic:
    where = f"before `{before}`" if before else "at the end of the file"
    return Diagnostic(
        "E002",
        f"expected `}}` to close `{brace.owner}` {where}",
        span,
        label="expected `}` here",
        related=(Related(brace.span, "opened here"),),
    )


def _expectation(expected: set[str]) -> str:
    words = sorted({_TERMINALS.get(name, f"`{name.lower()}`") for name in expected})
    if not words or len(words) > _MOST_EXPECTED:
        return ""
    *others, last = words
    return f"expected {', '.join(others)} or {last}" if others else f"expected {last}"


def _token_span(token: Token, source: SourceText) -> Span:
    line, column = token.line or 1, token.column or 1
    return Span(source.file, line, column, token.end_line or line, token.end_column or column)
