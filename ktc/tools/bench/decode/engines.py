"""The engines that a run measures: models of transformers in this process, compiled or stock, and peers in their own.

An `Engine` prepares one case at a time and computes it. A decode step of this process is one forward of one token of
every sequence with the model's own growing cache, logits included and without a choice of tokens, as `generate` calls
it. The cache of a case begins with random keys and values: their values do not change the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktc.model.decode_steps.growing_cache import growing
from ktc.model.loading.compiled_model import CompiledModel
from ktc.tools.bench.decode.model_file import head_dim
from ktc.tools.bench.requests import Case
from ktc.tools.bench.rounds import Seconds, measured

STEPS: Final = {1: 4}  # of a round, by the batch; 2 for others


def steps_of(case: Case) -> int:
    """Return the tokens that a round adds to each sequence."""
    return STEPS.get(case.batch, 2)


def prompt_of(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    drawn = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


class Engine(Protocol):
    """`about` describes its build for the report."""

    impl: str
    about: dict[str, Any]

    def prepare(self, case: Case) -> None:
        """Make the cache of a case, in place of the last one's."""
        ...

    def run(self, case: Case) -> Seconds:
        """Compute the prepared case once, and return the time of a step or of the prompt."""
        ...

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits (vocabulary,) in fp32 after a prompt."""
        ...


class LocalEngine:
    """A model of transformers, compiled or stock."""

    def __init__(self, impl: str, model: PreTrainedModel) -> None:
        self.impl, self.model = impl, model
        self.about: dict[str, Any] = {}
        self._config: Any = model.config
        self._cache: Any = None

    def prepare(self, case: Case) -> None:
        """Fill a cache with random keys and values."""
        self._cache = self.filled_cache(case) if case.kind == "decode" else None

    def run(self, case: Case) -> Seconds:
        """Compute the case, timed by the clocks of this process."""
        vocabulary = self._config.vocab_size
        if case.kind == "prefill":
            ids = torch.tensor([prompt_of(case.tokens, vocabulary)])
            with measured() as spent:
                self.step(ids, self._new_cache())
            return spent[0]
        steps = steps_of(case)
        ids = torch.arange(case.batch)[:, None]
        with measured() as spent:
            for _ in range(steps):
                self.step(ids, self._cache)
        self._cache.crop(-steps)
        return spent[0] / steps

    def step(self, ids: Tensor, cache: Any) -> Tensor:
        """Return the logits (batch, vocabulary) after `ids` (batch, tokens), which the cache holds afterwards."""
        given: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        model: Any = self.model
        call = model
        if ids.shape[1] == 1 and getattr(model, "decode_graphs", None) is not None:
            call = model.get_compiled_call()
            given["position_ids"] = torch.full_like(ids, cache.get_seq_length())
        with torch.no_grad():
            out = call(**given)
        return out.logits[:, -1]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Read the prompt in one call."""
        return self.step(torch.tensor([list(tokens)]), self._new_cache())[0].float()

    def _new_cache(self) -> Any:
        """Return the cache that `generate` makes: a compiled model's has room for the next tokens."""
        cache = DynamicCache(config=self._config)
        return growing(cache) if isinstance(self.model, CompiledModel) else cache

    def filled_cache(self, case: Case) -> Any:
        """Return a cache with the tokens of a decode case."""
        config, cache = self._config, self._new_cache()
        size = (case.batch, config.num_key_value_heads, max(1, case.tokens), head_dim(config))  # a step follows a token
        values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(self.model.dtype)
        for layer in range(config.num_hidden_layers):
            cache.update(values.clone(), values.clone(), layer)
        return cache
