"""Tool calls in answers: transformers reads them by the response template of the model or of its tokenizer.

In: a request with tools, and what the model wrote. Refused (400): tools for a model whose calls transformers cannot
read, and for a chat template that does not show them. A call that is not JSON, or that ends early, stays text: its
client sees what the model wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from ktc.inference.serving import private_api
from ktc.inference.serving.refusals import RequestRefused

log = logging.getLogger(__name__)
UNREAD: Final = SimpleNamespace(config=SimpleNamespace(model_type=""))
"""Stands for a model and its tokenizer where transformers is to read no answer: it has no response template."""
UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError)
"""The exceptions of transformers for a call that does not follow its template."""
_END: Final = 256  # tokens of a prompt, which have the beginning of the answer's turn
_REGION: Final = "tool_calls"


def require_readable_calls(tokenizer: Any, model: Any, messages: Sequence[Any], tools: Sequence[Any]) -> None:
    """Check that the template shows `tools`, and that their calls can be read. Raises RequestRefused (400)."""
    render = tokenizer.apply_chat_template
    options: Mapping[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    shown: str = render(messages, tools=list(tools), **options)
    if not private_api.reads_tool_calls(tokenizer, model, shown):
        kind = model.config.model_type
        message = f"transformers cannot read the tool calls of this `{kind}` model: no response template fits its chats"
        raise RequestRefused(400, message, "unsupported_value", "tools")
    if shown == render(messages, **options):
        raise RequestRefused(400, "the model's chat template does not show tools", "unsupported_value", "tools")


def has_template(tokenizer: Any, model: Any, prompt: Sequence[int]) -> bool:
    """Return whether a response template fits the end of a prompt, so that answers are read by it."""
    return private_api.reads_tool_calls(tokenizer, model, tokenizer.decode(list(prompt[-_END:])))


class ForgivingParser:
    """A parser of streams of transformers, which passes on as text what it cannot read."""

    def __init__(self, parser: Any, marks: Collection[str]) -> None:
        """`marks` are the special tokens, which no text shows."""
        self._parser, self._marks = parser, marks
        self._unread = ""
        """The text from the beginning of the call that is open."""
        self._is_plain = False
        self.initial_events: list[dict[str, Any]] = parser.initial_events

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return the events of more text."""
        if self._is_plain:
            return self._text(text)
        self._unread += text
        try:
            events: list[dict[str, Any]] = self._parser.feed(text)
            _require_calls(events)
        except UNREADABLE as error:
            return self._give_up(error)
        self._forget(events)
        return events

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message and the last events."""
        if self._is_plain:
            return {}, []
        try:
            message, events = self._parser.finalize()
            _require_calls(events)
        except UNREADABLE as error:
            return {}, self._give_up(error)
        return message, events

    def _give_up(self, error: Exception) -> list[dict[str, Any]]:
        log.warning("an answer stays text, since its tool calls cannot be read: %s", type(error).__name__)
        self._is_plain = True
        return self._text(self._unread)

    def _text(self, text: str) -> list[dict[str, Any]]:
        for mark in self._marks:
            text = text.replace(mark, "")
        return [{"type": "region_chunk", "field": "content", "text": text, "dirty": False}] if text else []

    def _forget(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Drop the text that events have passed on. The beginning of a mark of a call may be behind it."""
        for event in events:
            if event["type"] == "region_chunk" and not event.get("dirty"):
                passed = str(event["text"])
                at = self._unread.rfind(passed)
                self._unread = self._unread[at + len(passed) :] if at >= 0 else ""
            elif event["type"] == "region_close" and event["field"] != "content":  # a call closes the text before it
                self._unread = ""


def _require_calls(events: Sequence[Mapping[str, Any]]) -> None:
    """Check that each call has a name and arguments. Raises one of `UNREADABLE`."""
    for event in events:
        if event["type"] == "region_close" and event["field"] == _REGION:
            function = event["value"]["function"]
            if not isinstance(function["name"], str) or function["arguments"] is None:
                raise ValueError("a call has a name and arguments")


class RememberedAnswer:
    """The generation of one request, which gives its answer again where a handler reads it twice."""

    def __init__(self, generating: Any, model: Any, tokenizer: Any) -> None:
        self._generating, self._model, self._tokenizer = generating, model, tokenizer
        self._answer: tuple[str, int, Any] | None = None

    @property
    def is_given(self) -> bool:
        """Whether the answer was generated."""
        return self._answer is not None

    async def generate_non_streaming(self, _model: Any, _tokenizer: Any, *given: Any, **named: Any) -> Any:
        """Return the text, the length of the prompt and the new tokens of the answer."""
        if self._answer is None:
            generate = self._generating.generate_non_streaming
            self._answer = await generate(self._model, self._tokenizer, *given, **named)
        return self._answer
