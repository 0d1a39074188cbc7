"""Requests to the engine, and its answers.

A `Request` is frozen: tokens, an adapter by name, the generation config of transformers, stop texts. `Event`s carry its
tokens as they come, and how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ktc.inference.serving.answer_grammar import AnswerGrammar

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class PixelKey:
    """The images of a prompt, for the prefix cache: two images have the same tokens.

    `digest` are numbers below 0, which no token is; they replace tokens from the place `first` on. `last` is the place
    of the last token of an image.
    """

    first: int
    last: int
    digest: tuple[int, ...]

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens with the digest in place of the first of the images'."""
        stop = min(self.first + len(self.digest), self.last + 1)
        return [*tokens[: self.first], *self.digest[: stop - self.first], *tokens[stop:]]


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue. `config` is a `GenerationConfig`; `seed` None draws by no seed of the user's.

    `adapter` "" is the model without one. A `stop` text, read by the fast `tokenizer`, ends the answer after the token
    that completes it. With a `grammar` the answer is JSON, and ends with its value. `pixels` are tensors of images, by
    the names of the model's arguments: such a prompt is read alone, in one pass. Without a `pixel_key` it is in no
    prefix cache.
    """

    name: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    config: Any = field(repr=False)
    seed: int | None = None
    adapter: str = ""
    stop: tuple[str, ...] = ()
    tokenizer: Any = field(default=None, repr=False)
    grammar: AnswerGrammar | None = None
    pixels: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    pixel_key: PixelKey | None = field(default=None, repr=False)

    @property
    def may_be_cached(self) -> bool:
        """Whether the prefix cache distinguishes it from prompts with other images."""
        return not self.pixels or self.pixel_key is not None

    @property
    def least_cached(self) -> int:
        """The fewest first tokens that may be read before: none of an image is left without its pixels."""
        return 0 if self.pixel_key is None else self.pixel_key.last + 1

    def key(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return tokens of the sequence as the prefix cache compares them."""
        return tokens if self.pixel_key is None else self.pixel_key.of(tokens)

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens that its cache has: the last token of an answer is not read."""
        return len(self.tokens) + self.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended: `error` is "" where it was answered, or cancelled; `code` is its kind."""

    finish: Finish | None
    error: str = ""
    code: Literal["", "generation_failed", "out_of_memory", "schema_too_complex", "stopping"] = ""


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of a request, and its end with the last of them."""

    name: str
    tokens: tuple[int, ...] = ()
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the engine. `cache_bytes` bounds keys and values of running requests together.

    `batch` requests run at once, `waiting` more are kept; `prefill_chunk` tokens of prompts are read between two steps.
    `prefix_bytes` bounds the keys and values that are kept for prompts with the same beginning.
    """

    batch: int = 64
    waiting: int = 256
    cache_bytes: int | None = None
    prefill_chunk: int = 512
    prefix_bytes: int = 0


class Refused(Exception):
    """A request that the engine does not take. `reason` is "busy", "too long" or "stopping"."""

    def __init__(self, reason: Literal["busy", "too long", "stopping"], message: str) -> None:
        super().__init__(message)
        self.reason = reason
