"""How the micro-batches of a step enter the layers: recorded for batches of them where that is the same, or one by one.

In: the prepared micro-batches of a step. Out: their sizes, and the batches of each pass with their recorded calls. The
steps of a run record both until one has a batch of several micro-batches, and compare them: code that enters the layers
otherwise for a batch runs for each micro-batch from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from ktc.training.trainers.chunked_loss import reason_for_whole_logits
from ktc.training.trainers.embed_and_head import EmbedAndHead, TrainingStep
from ktc.training.trainers.joined_inputs import (
    Batch,
    Inputs,
    all_alike,
    code_of_step,
    divided_rows,
    joined,
    observed,
    own_modules,
    reason_against_tokens,
    reason_for_each,
    without_padding,
)
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.several_lengths import by_length, frequencies_depend_on_length, has_parts
from ktc.training.trainers.split_layer import SplitLayer

OfPass = tuple[list[Batch], list[ModelCall]]


class Recorder:
    """The facts known of the code around the layers of one trainer's model, from step to step."""

    def __init__(self, trainer: Any, model: nn.Module, layers: Sequence[SplitLayer]) -> None:
        self._trainer, self._modules = trainer, own_modules(model, layers)
        self.against: str | None = None  # why it runs for each micro-batch, "" if for several; None before a step
        self.compared = False  # whether a batch of several micro-batches was compared with them
        depends = frequencies_depend_on_length(self._modules.values())
        self.lengths_compared = False  # whether a batch of several lengths was compared
        self.joins_lengths = not depends  # whether micro-batches of several lengths are one batch
        self.against_lengths = ""  # why those of several lengths are not, where a batch has shown it
        self.rows_compared = False  # whether a micro-batch was compared with its rows
        self.against_rows = ""  # why no micro-batch is divided into its rows
        self.enters: ModelCall | None = None  # a micro-batch of any size, without its values
        self._code: tuple[Any, ...] = ()  # that the reasons were found in
        self.changes = 0  # how often it was found to be other code, in the first step too

    def step(
        self, embed_and_head: EmbedAndHead, stock_step: TrainingStep, inputs: Sequence[Inputs], num_items: Any
    ) -> RecordedStep:
        """Begin a step. Its inputs are compared with the recorded ones at once where they were recorded one by one.

        Raises:
            CannotStack: the model cannot be run layer by layer.
        """
        code = code_of_step(self._trainer, stock_step, embed_and_head.causal)
        if code != self._code:  # also in the middle of a run
            self._code, self.against, self.compared, self.rows_compared = code, None, False, False
            self.changes += 1
            embed_and_head.whole_loss = reason_for_whole_logits(self._trainer)
        first = self.against is None
        if self.against is None:
            self.against = reason_for_each(self._trainer, stock_step)
        why = self.against or embed_and_head.against_parts or observed(self._modules) or reason_against_tokens(inputs)
        if self.joins_lengths and not why:
            inputs = by_length(without_padding(inputs))
        step = RecordedStep(self, embed_and_head, inputs, num_items, why)
        embed_and_head.in_parts = not why
        embed_and_head.checks_at_once = first or bool(why)  # other code differs in the first step or in none
        if why or not self.compared:
            step.record_each()
        return step


class RecordedStep:
    """The micro-batches of a step.

    `one_by_one` says why micro-batches are recorded one by one, "" if none is, and `joins_some` whether others are not.
    `told_of_rows` says whether micro-batches are divided into their rows, "" if none has more tokens than a pass.
    """

    def __init__(
        self,
        recorder: Recorder,
        embed_and_head: EmbedAndHead,
        inputs: Sequence[Inputs],
        num_items: Any,
        one_by_one: str,
    ) -> None:
        self._recorder, self._inputs, self.one_by_one = recorder, inputs, one_by_one
        self._record = partial(embed_and_head.record, num_items=num_items)
        self._calls: list[ModelCall] = []
        self.joins_some, self.told_of_rows = False, ""

    def record_each(self) -> None:
        """Record every micro-batch alone."""
        self._calls = [self._record(inputs) for inputs in self._inputs]
        call = self._calls[0]
        self._recorder.enters = ModelCall(call.hidden.detach().to("meta"), call.devices, ())

    def divided(self, tokens: int, *, sums: bool) -> RecordedStep:
        """Divide micro-batches of more tokens into their rows. `sums` says whether a loss is the sum of their losses.

        The first one is compared with its rows, as a batch is with its micro-batches. `told_of_rows` says what was
        done.

        Raises:
            CannotStack: the model cannot be run layer by layer.
        """
        pieces = [divided_rows(inputs, tokens) for inputs in self._inputs]
        if max(map(len, pieces)) == 1:
            return self
        recorder, rows = self._recorder, copy(self)
        rows._inputs, rows._calls = [*chain(*pieces)], []
        against = "" if sums else "its loss is not the sum of theirs"
        against = against or self.one_by_one or recorder.against_rows
        if not against and not (recorder.compared and recorder.rows_compared):
            rows.record_each()
        if not against and not recorder.rows_compared:
            if not self._calls:
                self.record_each()
            whole = [Batch(inputs, len(of_one)) for inputs, of_one in zip(self._inputs, pieces, strict=True)]
            if not all_alike(whole, self._calls, rows._calls):
                against = recorder.against_rows = "they enter its layers otherwise than it does"
        if against:
            self.told_of_rows = f"a micro-batch of more tokens than a pass is not divided into its rows: {against}"
            return self
        recorder.rows_compared = True
        rows.told_of_rows = "a micro-batch of more tokens than a pass is divided into its rows"
        return rows

    @property
    def enters(self) -> ModelCall:
        """A micro-batch of any size, without its values and the arguments of layers."""
        assert self._recorder.enters is not None, "a step that is not compared records every micro-batch"
        return self._recorder.enters

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The rows and the length of each micro-batch."""
        states = [call.hidden for call in self._calls] or [inputs["input_ids"] for inputs in self._inputs]
        return [(state.shape[0], state.shape[1]) for state in states]

    def batches(self, runs: Iterable[tuple[int, int]], tokens: int) -> list[OfPass]:
        """Return the batches of each pass with their calls; a run is a pass's first micro-batch, and the one after it.

        Batches have at most `tokens` tokens, or one micro-batch.
        """
        runs = list(runs)
        if not self.one_by_one:
            recorder, inputs = self._recorder, [self._inputs[first:last] for first, last in runs]
            batches, self.one_by_one = joined(inputs, tokens, of_several_lengths=recorder.joins_lengths)
            several = any(batch.count > 1 for batch in chain(*batches))
            lengths = any(batch.lengths for batch in chain(*batches))
            if len({length for _, length in self.sizes}) > 1:
                self.one_by_one = self.one_by_one or recorder.against_lengths
            self.joins_some = several and bool(self.one_by_one)
            if lengths and not (recorder.lengths_compared or self._calls):
                self.record_each()
            if several or not self._calls:
                calls = [[self._record(batch.inputs) for batch in of_pass] for of_pass in batches]
                if self._enter_alike([*chain(*batches)], [*chain(*calls)]):
                    recorder.compared |= several
                    recorder.lengths_compared |= lengths
                    return list(zip(batches, calls, strict=True))
                if lengths:
                    recorder.joins_lengths, self.one_by_one = False, ""
                    recorder.against_lengths = "those of several lengths enter its layers otherwise together"
                    return self.batches(runs, tokens)
                self.one_by_one = recorder.against = "several enter its layers otherwise than one"
                self.joins_some = False
        return [
            ([Batch(inputs) for inputs in self._inputs[first:last]], self._calls[first:last]) for first, last in runs
        ]

    def _enter_alike(self, batches: Sequence[Batch], calls: Sequence[ModelCall]) -> bool:
        """Return whether batches enter the layers as their micro-batches do, as far as those were recorded."""
        if self._calls:
            return all_alike(batches, calls, self._calls)
        return all(has_parts(call) for batch, call in zip(batches, calls, strict=True) if batch.lengths)
