"""Two running batches of the same sequences, one with recorded steps, to compare them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from engine_answers import config_of
from recorded_steps import record_eagerly
from torch import Tensor

from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.generation import Generation
from ktc.inference.serving.graph_rows import GraphRows
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.prefill import PrefillBatch
from ktc.inference.serving.request import Request
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder


class Pair:
    """The same sequences in a batch with recorded steps and in one of eager steps."""

    bound = 0.02  # of relative errors

    def __init__(self, model: Any) -> None:
        self.model, self.runner = model, ModelRunner(model)
        self.batches = [RowBatch(self.runner, standing=0) for _ in range(2)]
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
        logits = [batch.step().logits for batch in self.batches]
        for batch in self.batches:
            batch.finish()
        self.compare(logits)
        for at, token in enumerate(logits[-1].argmax(-1).tolist()):  # the same for all: choices may be close
            for batch in self.batches:
                batch.running[at].add(token)

    def compare(self, logits: list[Tensor]) -> None:
        """Compare the logits (rows, V) of all batches."""
        recorded, eager = logits
        assert recorded.dtype == eager.dtype == torch.float32
        error = float((recorded - eager).norm() / eager.norm())
        assert error < self.bound, f"logits of {len(eager)} rows differ by {error:.3g}"

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
        """Compare the keys and values of all rows in the first two batches."""
        for at in range(len(self.batches[0].running)):
            recorded, eager = (batch.row(at) for batch in self.batches[:2])
            assert recorded.length == eager.length
            for index in range(len(recorded.layers)):
                one, other = recorded.layer(index), eager.layer(index)
                assert one is not None and other is not None
                for a, b in zip(one, other, strict=True):
                    error = float((a - b).norm() / b.norm())
                    assert error <= self.bound, f"row {at} of {recorded.length} tokens, layer {index}: {error:.3g}"


class Replayed(Pair):
    """Three batches: replayed steps, the same steps computed again in such a memory, and eager steps on a cache.

    The first two are equal to the bit. Kernels of the third have other shapes. Where that rounds to another choice of
    experts, a row of a random model goes its own way; so most rows are compared with it, and not all.
    """

    bound = 0.0

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        again = RowBatch(self.runner, standing=0)
        again._graphs = GraphRows(model, DecodeGraphs(StepRecorder(record_eagerly, self.runner.device.type)))
        self.batches.insert(1, again)
        self.errors = list[float]()
        """Of the logits of each row and step, beside eager steps on a cache."""

    def compare(self, logits: list[Tensor]) -> None:
        replayed, again, eager = logits
        assert all(batch._graphs is not None for batch in self.batches[:2]), "no steps are recorded"
        same = (replayed == again).all(-1)
        error = float((replayed - again).norm() / again.norm())
        assert bool(same.all()), f"rows {(~same).nonzero()[:, 0].tolist()} of {len(same)} differ by {error:.3g}"
        self.errors += ((replayed - eager).norm(dim=-1) / eager.norm(dim=-1)).tolist()

    def require_near_eager(self) -> None:
        """Compare most rows and steps with eager ones."""
        ordered = sorted(self.errors)
        median, share = ordered[len(ordered) // 2], sum(error < 0.02 for error in ordered) / len(ordered)
        assert median < 0.02, f"median {median:.3g}, most {ordered[-1]:.3g}; {share:.0%} are below 0.02"
