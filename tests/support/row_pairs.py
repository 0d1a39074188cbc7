"""Two running batches of the same sequences, one with recorded steps, to compare them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from engine_answers import config_of

from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.prefill import PrefillBatch
from ktc.inference.serving.request import Request


class Pair:
    """The same sequences in a batch with recorded steps and in one of eager steps."""

    def __init__(self, model: Any) -> None:
        self.model, self.runner = model, ModelRunner(model)
        self.batches = [RowBatch(self.runner) for _ in range(2)]
        self.batches[1]._native = None
        self.batches[1]._leave_memory()
        self.chance = random.Random(1)

    def join(self, length: int) -> None:
        tokens = tuple(self.chance.randrange(3, self.model.config.vocab_size) for _ in range(length))
        config = config_of(self.model)
        for batch in self.batches:
            generation = Generation(Request("", tokens, 400, config), self.model)
            prefill = PrefillBatch(self.runner, [generation])
            logits = prefill.advance(length)
            assert logits is not None
            generation.add(int(logits.argmax()))
            batch.join(generation, prefill.row(0))

    def leave(self, at: int) -> None:
        for batch in self.batches:
            batch.leave(at)

    def step(self) -> None:
        recorded, eager = (batch.step() for batch in self.batches)
        for batch in self.batches:
            batch.finish()
        assert recorded.dtype == eager.dtype == torch.float32
        assert float((recorded - eager).norm() / eager.norm()) < 0.02
        for each, other, logits in zip(self.batches[0].running, self.batches[1].running, eager, strict=True):
            token = int(logits.argmax())
            each.add(token)
            other.add(token)

    def take_turns(self, number: int, after_step: Callable[[], None] = lambda: None) -> None:
        """Take steps; rows join and leave now and then."""
        for length in (5, 17, 3):
            self.join(length)
        for turn in range(number):
            self.step()
            after_step()
            if turn % 9 == 5:
                self.leave(self.chance.randrange(len(self.batches[0].running)))
            if turn % 9 == 8:
                self.join(self.chance.choice((2, 9, 30)))

    def require_same_rows(self) -> None:
        """Compare the keys and values of all rows."""
        for at in range(len(self.batches[0].running)):
            recorded, eager = (batch.row(at) for batch in self.batches)
            assert recorded.length == eager.length
            for index in range(len(recorded.layers)):
                one, other = recorded.layer(index), eager.layer(index)
                assert one is not None and other is not None
                for a, b in zip(one, other, strict=True):
                    assert float((a - b).norm()) <= 0.02 * float(b.norm())
