"""Streamed text: transformers' `TextStreamer` passes finished words to a function and holds stop texts back.

Input: the tokenizer, the stop texts, the function. Output: a streamer for `generate` that records the time of the first
token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TextStreamer


class HeldText:
    """Growing text, passed on up to a stop text and never with the beginning of a possible one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._text, self._passed = tuple(stop), "", 0

    def add(self, text: str, *, complete: bool = False) -> str:
        """Return the text that can be passed on now; with `complete` the text is final."""
        self._text += text
        start = self._passed
        self._passed = max(start, self._safe_length(complete))
        return self._text[start : self._passed]

    def _safe_length(self, complete: bool) -> int:
        places = [place for word in self._stop if (place := self._text.find(word)) >= 0]
        if places:
            return min(places)
        begun = [n for word in self._stop for n in range(1, len(word)) if self._text.endswith(word[:n])]
        return len(self._text) - (0 if complete else max(begun, default=0))


class TextStream(TextStreamer):
    """A streamer for one answer. `first_token` is the time of its first token, by `time.perf_counter`."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.first_token: float | None = None
        self._held, self._on_text, self._prompted = HeldText(stop), on_text, False

    def put(self, value: Any) -> None:
        """Receive a prompt [1, length], then tokens [1]."""
        if self._prompted and self.first_token is None:
            self.first_token = time.perf_counter()
        self._prompted = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Receive each piece of text that later tokens do not change."""
        if piece := self._held.add(text, complete=stream_end):
            self._on_text(piece)
