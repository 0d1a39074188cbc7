"""`Generation`: a request that is being answered, with its logits processors and its random numbers.

In: a request and the model. `generate` of transformers prepares it: the processors are those of the model's generation
config and of the request, and the cache is the one that `generate` would use. Out: the next token, from logits. A
`Choice` is enqueued behind what computes the logits, and read when that is done; steps may begin with it before.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ktc.inference.serving.request import End, Request
from ktc.inference.serving.sampling import NOT_DRAWN, Settings, draw, shared_settings
from ktc.inference.serving.stock_passes import StockPasses
from ktc.model.decode_steps.device_feed import sent
from ktc.model.hf.processor import on_device
from ktc.model.hf.stock_model import finds_positions
from ktc.model.kernels.sent_values import SentValues


class Generation:
    """`tokens` are the prompt and the answer so far; the cache of a running one lacks the last of them.

    `passes` are stock's for a prompt with images, and of a model that keeps positions itself.
    """

    def __init__(self, request: Request, model: Any, reads_pixels: bool = True) -> None:
        """Prepare a request. Raises ValueError for a generation config that transformers rejects.

        Without `reads_pixels` all of its images are in a cached beginning, and the rest is a text.
        """
        self.request = request
        self.tokens = list(request.tokens)
        prompt = torch.tensor([request.tokens], device=model.get_input_embeddings().weight.device)
        prepared = _prepared(request, prompt, model, reads_pixels)
        self.cache, self.passes = prepared.cache, prepared.passes(request, reads_pixels)
        self._processors, self._drawn = prepared.processors, bool(prepared.config.do_sample)
        self._ends = _ids(prepared.config)
        self._settings = shared_settings(self._processors) if self._drawn and request.grammar is None else None
        self._seen = prompt if self._processors and self._settings is None else None
        self._generator = torch.Generator(prompt.device)
        self._generator.manual_seed(secrets.randbits(63) if request.seed is None else request.seed)
        self._stop = _StopTexts(request.stop, request.tokenizer) if request.stop else None
        self._json = request.grammar.start() if request.grammar is not None else None

    def restart(self, model: Any, reads_pixels: bool = True) -> None:
        """Take an empty cache, for a prefill of all tokens so far; `reads_pixels` as for a new one."""
        device = model.get_input_embeddings().weight.device
        prepared = _prepared(self.request, torch.tensor([self.request.tokens], device=device), model, reads_pixels)
        self.cache, self.passes = prepared.cache, prepared.passes(self.request, reads_pixels)

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the most probable one, and nothing changes the logits."""
        return not self._drawn and not self._processors and self._json is None

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn by `generator`."""
        return self._drawn

    @property
    def settings(self) -> Settings | None:
        """The processors of a drawn token as values; None where they read more than the logits of this step."""
        return self._settings

    @property
    def generator(self) -> torch.Generator:
        """The random numbers of the request."""
        return self._generator

    def processed(self, logits: Tensor) -> Tensor:
        """Return logits (rows, V) of sequences with the same `settings`, after their processors."""
        return self._processors(None, logits) if self._processors else logits

    @property
    def is_at_limit(self) -> bool:
        """Whether the next token is the last one by the request's limit."""
        return len(self.tokens) + 1 - len(self.request.tokens) >= self.request.max_new_tokens

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token (1,) from logits (1, V), fp32, as `generate` does; or see `draw`."""
        if self._json is not None:
            logits = self._json.masked(logits)  # before `top_p`, which would keep forbidden tokens alone
        if self._processors:
            logits = self._processors(self._seen, logits)
        return draw(logits, [self._generator]) if self._drawn else logits.argmax(-1)

    def add(self, token: int) -> End | None:
        """Append the next token; return the end if it ends the answer."""
        self.tokens.append(token)
        if self._seen is not None:
            self._seen = torch.cat([self._seen, self._seen.new_full((1, 1), token)], dim=1)
        if self._json is not None:
            self._json.add(token)
            if self._json.is_complete:
                return End("stop")
        if token in self._ends or (self._stop is not None and self._stop.completes(token)):
            return End("stop")
        return End("length") if len(self.tokens) - len(self.request.tokens) >= self.request.max_new_tokens else None


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of every sequence, enqueued behind the logits: `tokens` (rows,), where none can be drawn -1.

    `faults` are exceptions of a row's own processors. `states` are those of the random numbers before.
    """

    tokens: Tensor
    faults: Mapping[int, Exception]
    states: Sequence[tuple[torch.Generator, Tensor]]
    copy: SentValues

    @classmethod
    def begin(cls, generations: Sequence[Generation], logits: Tensor) -> Choice:
        """Enqueue the choice from logits (rows, V). It waits for the device only where a processor does.

        Sequences that draw with the same processors share their passes. Each has random numbers of its own.
        """
        states = [(one.generator, one.generator.get_state()) for one in generations if one.draws]
        try:
            tokens, faults = _chosen(generations, logits)
            return cls(tokens, faults, states, SentValues(tokens))
        except BaseException:
            _restore(states)
            raise

    def read(self, finish: Callable[[], None]) -> list[int | Exception]:
        """Wait for the logits by `finish`, and return the tokens, or the exception of a row's own processors."""
        try:
            finish()
            tokens: list[int] = self.copy.read()
        except BaseException:  # the token of a step that failed is drawn again
            _restore(self.states)
            raise
        faults = self.faults
        return [faults.get(at) or (RuntimeError(NOT_DRAWN) if token < 0 else token) for at, token in enumerate(tokens)]


def choose_tokens(generations: Sequence[Generation], logits: Tensor) -> list[int | Exception]:
    """Return the next token of every sequence from logits (rows, V), or the exception of its own processors."""
    return Choice.begin(generations, logits).read(lambda: None)


def _restore(states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _chosen(generations: Sequence[Generation], logits: Tensor) -> tuple[Tensor, dict[int, Exception]]:
    faults, alike = dict[int, Exception](), dict[Settings, list[int]]()
    settings = {generation.settings for generation in generations}
    if len(settings) == 1 and None not in settings:
        return draw(generations[0].processed(logits), [one.generator for one in generations]), faults
    chosen = logits.argmax(-1)
    for at, generation in enumerate(generations):
        if generation.settings is not None:
            alike.setdefault(generation.settings, []).append(at)
        elif not generation.is_greedy:
            try:
                chosen[at] = generation.choose(logits[at : at + 1])[0]
            except Exception as error:  # noqa: BLE001  # the other sequences of the batch continue
                faults[at] = error
    for rows in alike.values():
        first, generators = generations[rows[0]], [generations[at].generator for at in rows]
        together = sent(torch.tensor(rows, device="cpu"), logits.device)
        chosen[together] = draw(first.processed(logits.index_select(0, together)), generators)
    return chosen, faults


class _Prepared:
    """The preparations of `generate`, up to where it would decode."""

    cache: DynamicCache | None
    processors: Any
    config: Any
    model: Any
    arguments: Mapping[str, Any]

    def __call__(
        self, model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **inputs: Any,
    ) -> Tensor:  # fmt: skip
        self.processors, self.config = logits_processor, generation_config
        self.cache = inputs.get("past_key_values")
        self.model, self.arguments = model, inputs
        return input_ids

    def passes(self, request: Request, reads_pixels: bool) -> StockPasses | None:
        """Return the passes of a request as stock makes them; None where ktc's own do."""
        if not (reads_pixels and request.pixels) and not finds_positions(self.model):
            return None
        return StockPasses(self.model, self.arguments, len(request.tokens), request.pixels.keys())


def _prepared(request: Request, prompt: Tensor, model: Any, reads_pixels: bool) -> _Prepared:
    prepared = _Prepared()
    images = on_device(request.pixels, prompt.device, model.dtype) if reads_pixels else {}
    if images:
        images["attention_mask"] = torch.ones_like(prompt)
    model.generate(prompt, **images, generation_config=_config(request), custom_generate=prepared)
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
    ids: Any = config.eos_token_id
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
