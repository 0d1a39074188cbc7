"""Whether a request is long, and how many tokens its prompt has at least.

transformers' handlers tokenise on the event loop, and no other client is answered meanwhile: five to nine seconds
for 4 MiB. Long prompts are therefore counted on another thread first, in pieces, until they are known to be too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

_LONG: Final = 1 << 16  # characters
_PIECE: Final = 1 << 15  # characters; an encoding takes about a hundred bytes per token
_CUT: Final = 16  # tokens that a piece may have more than the same characters within their text


def is_long(body: Mapping[str, Any]) -> bool:
    """Return whether the texts of a JSON object have together more characters than tokenise at once."""
    characters, rest = 0, list[Any]([body])
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, dict):
            rest.extend(cast("dict[str, Any]", value).values())
        elif isinstance(value, list):
            rest.extend(cast("list[Any]", value))
    return characters > _LONG


def least_tokens(tokenizer: Any, text: str, enough: int) -> int:
    """Return a number of tokens that a text has at least. Counting ends at `enough`."""
    encode = tokenizer.backend_tokenizer.encode  # a call of the tokenizer itself may change its settings
    count = 0
    for begin in range(0, len(text), _PIECE):
        tokens = encode(text[begin : begin + _PIECE], add_special_tokens=False)
        count += max(len(tokens) - _CUT, 0)
        if count >= enough:
            break
    return count
