"""`Generation`: a request that is being answered, with its processors of scores and its random numbers.

In: a request and the model. `generate` of transformers prepares it: the processors are those of the model's generation
config and of the request, and the cache is the one that `generate` would use. Out: the next token, from scores.
"""

from __future__ import annotations

import copy
import secrets
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ktc.inference.serving.request import End, Request


class Generation:
    """`tokens` are the prompt and the answer so far; the cache of a running one lacks the last of them."""

    def __init__(self, request: Request, model: Any) -> None:
        """Prepare a request. Raises ValueError for a generation config that transformers rejects."""
        self.request = request
        self.tokens = list(request.tokens)
        prompt = torch.tensor([request.tokens], device=model.get_input_embeddings().weight.device)
        prepared = _prepared(request, prompt, model)
        self.cache = prepared.cache
        self._processors, self._drawn = prepared.processors, bool(prepared.config.do_sample)
        self._ends = _ids(prepared.config)
        self._seen = prompt if self._processors else None
        self._generator = torch.Generator(prompt.device)
        self._generator.manual_seed(secrets.randbits(63) if request.seed is None else request.seed)
        self._stop = _StopTexts(request.stop, request.tokenizer) if request.stop else None

    def begin_again(self, model: Any) -> None:
        """Take an empty cache: all tokens so far are read again."""
        device = model.get_input_embeddings().weight.device
        self.cache = _prepared(self.request, torch.tensor([self.request.tokens], device=device), model).cache

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether the next token is the one of the highest score, unprocessed."""
        return not self._drawn and not self._processors

    def choose(self, scores: Tensor) -> int:
        """Return the next token from scores (1, V), fp32, as `generate` does."""
        if self._seen is not None:
            scores = self._processors(self._seen, scores)
        if not self._drawn:
            return int(scores.argmax(-1))
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))

    def add(self, token: int) -> End | None:
        """Append the next token; return the end if it ends the answer."""
        self.tokens.append(token)
        if self._seen is not None:
            self._seen = torch.cat([self._seen, self._seen.new_tensor([[token]])], dim=1)
        if token in self._ends or (self._stop is not None and self._stop.completes(token)):
            return End("stop")
        return End("length") if len(self.tokens) - len(self.request.tokens) >= self.request.max_new_tokens else None


class _Prepared:
    """The preparations of `generate`, up to where it would decode."""

    cache: DynamicCache | None
    processors: Any
    config: Any

    def __call__(
        self, model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **inputs: Any,
    ) -> Tensor:  # fmt: skip
        self.processors, self.config = logits_processor, generation_config
        self.cache = inputs.get("past_key_values")
        return input_ids


def _prepared(request: Request, prompt: Tensor, model: Any) -> _Prepared:
    prepared = _Prepared()
    model.generate(prompt, generation_config=_config(request), custom_generate=prepared)
    return prepared


class _StopTexts:
    """The text of an answer, searched for stop texts."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._stop, self._tokenizer, self._text = stop, tokenizer.backend_tokenizer, ""
        self._stream: Any = DecodeStream([], True)
        self._longest = max(map(len, stop))

    def completes(self, token: int) -> bool:
        """Add a token; return whether the text has a stop text now."""
        new = self._stream.step(self._tokenizer, token) or ""
        self._text = self._text[-self._longest :] + new
        return any(text in self._text for text in self._stop)


def _config(request: Request) -> Any:
    """Return the request's config for one sequence: one beam, its limit, and stop texts left to the engine."""
    config = copy.deepcopy(request.config)
    config.update(
        max_new_tokens=request.max_new_tokens, num_beams=1, num_return_sequences=1, stop_strings=None,
        cache_implementation=None, use_cache=True, return_dict_in_generate=False, prompt_lookup_num_tokens=None,
    )  # fmt: skip
    return config


def _ids(config: Any) -> frozenset[int]:
    found: Any = config.eos_token_id
    return frozenset(() if found is None else [found] if isinstance(found, int) else found)
