"""Answers of a form, JSON of a schema or calls of tools: llguidance masks the tokens that such a text cannot have next.

In: JSON schemas of a request, which are untrusted, and a tokenizer. Out: a frozen `AnswerGrammar`, compiled once for a
request; each sequence starts a `ConstrainedAnswer` of its own. Refused: a keyword that llguidance does not enforce, a
schema that no value satisfies, references to other documents, and a schema beyond the limits of llguidance's parser
(400); a missing llguidance, and a tokenizer that it cannot read (501). Nothing is fetched.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ktc.foundation import versions
from ktc.inference.serving.refusals import RequestRefused
from ktc.model.decode_steps.device_feed import sent

# Separators as models learned them, and no other white space: a small model would repeat line breaks without end. The
# schema of a request must not choose these, nor that unknown keywords are ignored.
_STYLE: Final[Mapping[str, Any]] = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False,
    "coerce_one_of": False,
}  # fmt: skip


# llguidance has one kind of error for a fault of its caller and for its limits; the first has these words.
_OF_TOKEN: Final = "doesn't satisfy the grammar"


class Form(Protocol):
    """A form of answers. `field` is the field of the request that requires it."""

    @property
    def field(self) -> str: ...

    def grammar(self, library: Any, tokenizer: Any) -> str:
        """Return the form as a grammar of llguidance, the module `library`."""
        ...


@dataclass(frozen=True, slots=True)
class JsonForm:
    """One JSON value of a schema. `thought_end`: after the rest of a thought that this mark ends."""

    schema: Mapping[str, Any]
    field: str = "response_format"
    thought_end: str = ""

    def grammar(self, library: Any, tokenizer: Any) -> str:
        if self.thought_end:
            value = json.dumps({**self.schema, "x-guidance": dict(_STYLE)})
            lines = ["start: thought value", f"value: %json {value}", *_thought(self.thought_end, tokenizer)]
            return library.LLMatcher.grammar_from_lark("\n".join(lines))
        return library.LLMatcher.grammar_from_json_schema(json.dumps(self.schema), overrides=dict(_STYLE))


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call of one of some functions between two marks; `may_repeat`: or several calls.

    `thought_end`: after the rest of a thought that this mark ends.
    """

    functions: tuple[Mapping[str, Any], ...]
    begin: str
    end: str
    may_repeat: bool
    field: str = "tool_choice"
    thought_end: str = ""

    def grammar(self, library: Any, tokenizer: Any) -> str:
        begin, end = (_terminal(mark, tokenizer) for mark in (self.begin, self.end))
        again = '("\\n" call)*' if self.may_repeat else ""
        kinds = range(len(self.functions))
        lines = [
            f"start: {'thought ' if self.thought_end else ''}call {again}",
            f'call: {begin} "\\n" ({" | ".join(f"call_{at}" for at in kinds)}) "\\n" {end}',
        ]
        for at, function in enumerate(self.functions):
            name = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
            schema = {**(function.get("parameters") or {"type": "object"}), "x-guidance": dict(_STYLE)}
            lines += [f'call_{at}: {name} arguments_{at} "}}"', f"arguments_{at}: %json {json.dumps(schema)}"]
        lines += _thought(self.thought_end, tokenizer) if self.thought_end else ()
        return library.LLMatcher.grammar_from_lark("\n".join(lines))


def _thought(end: str, tokenizer: Any) -> tuple[str, ...]:
    """Return the rules of a free text up to a mark, and an empty line."""
    mark = _terminal(end, tokenizer)
    if mark.startswith("<["):
        return (f'thought: FREE {mark} "\\n\\n"', r"FREE: /(.|\n)*/")
    return ('thought: free "\\n\\n"', f"free[suffix={mark}]: FREE", r"FREE: /(.|\n)*/")


def _terminal(mark: str, tokenizer: Any) -> str:
    """Return a mark as a terminal: the token's number for a special token, which has no text, otherwise its text."""
    token = tokenizer.convert_tokens_to_ids(mark)
    known = tokenizer.added_tokens_decoder.get(token)
    return f"<[{token}]>" if known is not None and known.special and str(known) == mark else json.dumps(mark)


class SchemaTooComplex(Exception):
    """An answer came to a part of its schema that exceeds a limit of llguidance's parser."""


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A compiled schema. `matcher` is at the beginning of an answer and stays there."""

    matcher: Any = field(repr=False)

    def __deepcopy__(self, _: object) -> AnswerGrammar:
        """Return itself: a copy of a generation config shares what never changes."""
        return self

    def start(self) -> ConstrainedAnswer:
        """Return the state of one answer."""
        return ConstrainedAnswer(self.matcher.deep_copy())


class ConstrainedAnswer:
    """One answer so far."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether no token but an end can follow."""
        return bool(self._matcher.is_stopped())

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits (1, V) with minus infinity for every token that may not follow. Raises SchemaTooComplex."""
        mask: bytes = self._matcher.compute_bitmask()
        self._require_sound()
        octets = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        bits = ((octets[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[: logits.shape[-1]]
        forbidden = torch.ones(logits.shape[-1], dtype=torch.bool)
        forbidden[: len(bits)] = bits == 0
        return logits.masked_fill(sent(forbidden, logits.device), float("-inf"))

    def add(self, token: int) -> None:
        """Append a token. Raises RuntimeError for one that may not follow, and SchemaTooComplex."""
        self._matcher.consume_token(token)
        self._require_sound()

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            words = _error_of(self._matcher)
            if _OF_TOKEN in words:
                raise RuntimeError(f"the JSON schema cannot be followed: {words}")
            raise SchemaTooComplex(f"the JSON schema is too complex: {words}")


class AnswerGrammars:
    """Compiles schemas. The form of a tokenizer that llguidance reads takes about a second, and is kept."""

    def __init__(self) -> None:
        self._tokenizers: dict[int, tuple[Any, Any]] = {}  # by identity; the tokenizer is kept with its form
        self._making = threading.Lock()

    def compile(self, form: Form, tokenizer: Any, num_tokens: int, ends: Collection[int]) -> AnswerGrammar:
        """Return the grammar of a form for logits of `num_tokens` tokens. May take a second.

        Raises RequestRefused (400 for a schema, 501 for llguidance and the tokenizer).
        """
        library = _library(form.field)
        grammar = form.grammar(library, tokenizer)
        read = self._read(library, tokenizer, num_tokens, ends, form.field)
        is_wrong, messages = library.LLMatcher.validate_grammar_with_warnings(grammar, read)
        if is_wrong or messages:
            raise _unenforced(_one_line(str(messages[0])), form.field)
        matcher = library.LLMatcher(read, grammar, log_level=0)
        if matcher.is_error():
            raise _unenforced(_error_of(matcher), form.field)
        _require_beginning(matcher.deep_copy(), form.field)
        return AnswerGrammar(matcher)

    def _read(self, library: Any, tokenizer: Any, num_tokens: int, ends: Collection[int], field: str) -> Any:
        with self._making:
            known = self._tokenizers.get(id(tokenizer))
            if known is None:
                known = tokenizer, _readable(library, tokenizer, num_tokens, ends, field)
                self._tokenizers[id(tokenizer)] = known
        return known[1]


def _require_beginning(matcher: Any, field: str) -> None:
    """Take the first mask, and the tokens that every answer begins with: the limits of the parser show there only."""
    matcher.compute_bitmask()
    if not matcher.is_error() and (tokens := matcher.compute_ff_tokens()):
        matcher.consume_tokens(tokens)
    if matcher.is_error():
        raise _unenforced(_error_of(matcher), field)


def _unenforced(words: str, field: str) -> RequestRefused:
    return RequestRefused(400, f"the JSON schema cannot be enforced: {words}", "invalid_value", field)


def _error_of(matcher: Any) -> str:
    """Return the error of a matcher without the state of its parser, which follows."""
    return _one_line(str(matcher.get_error()).split("<state>")[0])


def _one_line(words: str) -> str:
    return " ".join(words.split())[:300]


def _library(field: str) -> Any:
    if versions.installed("llguidance") is None:
        message = f"`{field}` needs the package `llguidance` on the server: `pip install llguidance`"
        raise RequestRefused(501, message, param=field)
    import llguidance

    return llguidance


def _readable(library: Any, tokenizer: Any, num_tokens: int, ends: Collection[int], field: str) -> Any:
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=sorted(ends) or None)
    except (TypeError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())[:200]
        raise RequestRefused(501, f"llguidance cannot read the model's tokenizer: {words}", param=field) from error
