"""Text as its tokens come: transformers' `TextStreamer`, whose finished words go to a function, stop texts held back.

In: the tokenizer, the stop texts, the function. Out: a streamer for `generate`, which knows when the first token came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TextStreamer


class TextStream(TextStreamer):
    """What is passed on ends before a stop text, and never with the beginning of one that may still become whole."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.first_token: float | None = None
        self._stop, self._on_text = tuple(stop), on_text
        self._text, self._passed, self._prompted = "", 0, False

    def put(self, value: Any) -> None:
        """A prompt [1, length], then tokens [1]."""
        if self._prompted and self.first_token is None:
            self.first_token = time.perf_counter()
        self._prompted = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with each piece of text that later tokens do not change."""
        self._text += text
        safe = _safe_length(self._text, self._stop, stream_end)
        if safe > self._passed:
            self._on_text(self._text[self._passed : safe])
            self._passed = safe


def _safe_length(text: str, stop: Sequence[str], complete: bool) -> int:
    """How much of `text` is part of the answer for sure."""
    places = [place for word in stop if (place := text.find(word)) >= 0]
    if places:
        return min(places)
    if complete:
        return len(text)
    begun = [n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])]
    return len(text) - max(begun, default=0)
