"""Events of a serving engine, collected by request, and the same answers by `generate` alone."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ktc.inference.serving.request import End, Event


class Answers:
    """Collects events; `wait` returns the tokens and the end of a request."""

    def __init__(self) -> None:
        self._tokens, self._ends = defaultdict[str, list[int]](list), dict[str, End]()
        self._changed = threading.Condition()
        self.on_event: Callable[[Event], None] = lambda event: None

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            for event in events:
                assert event.name not in self._ends, "an event after the end"
                self._tokens[event.name] += event.tokens
                if event.end is not None:
                    self._ends[event.name] = event.end
            self._changed.notify_all()
        for event in events:
            self.on_event(event)

    def wait(self, name: str) -> tuple[list[int], End]:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._ends, 60), f"{name} has no end"
            return self._tokens[name], self._ends[name]


def config_of(model: PreTrainedModel, **settings: Any) -> GenerationConfig:
    config = GenerationConfig.from_model_config(model.config)
    config.update(eos_token_id=None, pad_token_id=0, do_sample=False, **settings)
    return config


def alone(model: PreTrainedModel, prompt: Sequence[int], config: GenerationConfig, num_tokens: int) -> list[int]:
    config = GenerationConfig.from_dict({**config.to_dict(), "max_new_tokens": num_tokens})
    found: Any = model.generate(torch.tensor([prompt]), generation_config=config)
    return found[0, len(prompt) :].tolist()
