"""Events of a serving engine, collected by request, and the same answers by `generate` alone."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ktc.inference.serving.engine import Engine
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.request import End, Event, Limits, Request

PROMPTS = [(5, 9, 33), tuple(range(20, 43)), (7,), (50, 4, 4, 61, 8, 90, 12), (5, 9, 34), tuple(range(30, 41))]
# Full attention; latent; sliding windows of 16 tokens and sinks.
FAMILIES = ("qwen3_moe", "deepseek_v2", "gpt_oss")


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


class Served:
    """An engine, and what it answers."""

    def __init__(self, model: Any, limits: Limits, **more: Any) -> None:
        self.answers = Answers()
        self.engine = Engine(ModelRunner(model), limits, self.answers, **more)

    def __enter__(self) -> Served:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def ask(self, name: str, prompt: Sequence[int], num_tokens: int, config: Any, **more: Any) -> None:
        self.engine.submit(Request(name, tuple(prompt), num_tokens, config, **more))


def config_of(model: PreTrainedModel, **settings: Any) -> GenerationConfig:
    config = GenerationConfig.from_model_config(model.config)
    config.update(eos_token_id=None, pad_token_id=0, do_sample=False, **settings)
    return config


def alone(model: PreTrainedModel, prompt: Sequence[int], config: GenerationConfig, num_tokens: int) -> list[int]:
    config = GenerationConfig.from_dict({**config.to_dict(), "max_new_tokens": num_tokens})
    found: Any = model.generate(torch.tensor([prompt]), generation_config=config)
    return found[0, len(prompt) :].tolist()
