"""`generate` on a device that feeds itself: a step begins before the host has read the token that it reads.

In: stock `generate` up to its first captured step. Out: the same tokens, cache and random numbers as its loop has.
The token, its position and what ends an answer are computed behind each step, on its device. The host begins the next
step at once, waits for the one before, copies its token through page-locked memory, and only then enqueues the choice
behind the step that is under way. So the host's work is done while the device computes. An answer that a token has
ended costs one step more, whose position the cache does not show. Criteria of a user are asked with each token in turn,
as by stock code; one that reads the device waits for the step that is under way.
Where steps are on the CPU, the same loop reads each token at once.
A step that has to be captured, or that cannot be, is `DecodeGraphs.step`. Errors are those of the earliest step; the
cache then has the positions of the steps before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ktc.model.decode_steps.cuda_graph import CACHE, Begun, DecodeGraphs
from ktc.model.decode_steps.device_feed import feed
from ktc.model.decode_steps.step_ahead import PendingStep, StepAhead, WaitingCriteria
from ktc.model.decode_steps.step_memory import length_of
from ktc.model.decode_steps.token_choice import TokenChoice
from ktc.model.kernels.sent_values import SentValues

OnTokens = Callable[[Tensor], object]  # of the host, (B,)


class FirstSteps(WaitingCriteria):
    """Criteria that end stock code's loop behind its first captured step; `RunAhead` continues."""

    ids: Tensor | None = None
    unfinished: Tensor | None = None  # (B,) bool
    begun: Begun | None = None

    def __init__(self, ahead: StepAhead, criteria: Any) -> None:
        super().__init__(ahead, criteria)
        self._steps = ahead

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return whether each sequence ends for stock code."""
        done: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.ids = input_ids
        self.unfinished = ~done if self.unfinished is None else self.unfinished & ~done
        self.begun = self._steps.begun
        return done if self.begun is None else torch.ones_like(done)


class OpenStreamer:
    """A streamer that stock code does not end, since tokens follow."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer

    def put(self, value: Tensor) -> None:
        """Pass tokens on."""
        self._streamer.put(value)

    def end(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Unread:
    """The tokens behind `step`, and what they end, (B + 2,) on their way to the host."""

    step: PendingStep
    report: SentValues


class RunAhead:
    """The rest of one `generate`, behind its first captured step."""

    def __init__(
        self, model: PreTrainedModel, graphs: DecodeGraphs, ahead: StepAhead, choice: TokenChoice,
        on_tokens: OnTokens | None = None,
    ) -> None:  # fmt: skip
        self._model, self._graphs, self._ahead, self._choice = model, graphs, ahead, choice
        self._on_tokens = on_tokens
        self._under_way = deque[PendingStep]()  # the earliest one first
        self._has_failed = False  # a step

    def run(self, begun: Begun, ids: Tensor, unfinished: Tensor) -> Tensor:
        """Return `ids` (B, L) with the tokens that follow. `begun` has been computed with the token before the last."""
        count = ids.shape[1]
        if count >= self._choice.max_length or not bool(unfinished.any()):
            return ids
        self._begin(begun, ids, unfinished)
        try:
            self._loop()
        except BaseException as error:
            first = self._settled(error)
            self._show(self._computed)
            if first is not error:
                raise first  # noqa: B904 - its cause is set
            raise
        self._show(self._length)
        return self._ids

    def _begin(self, begun: Begun, ids: Tensor, unfinished: Tensor) -> None:
        batch, self._count = ids.shape
        self._ids = ids
        self._choice = self._choice.on(ids.device)
        self._begun, self._is_captured = begun, True
        self._length = self._computed = length_of(begun[1][CACHE])  # positions: begun, and known to be right
        self._first = self._length  # what `begun` has computed, its own position included
        self._tokens, self._unfinished = ids[:, -1], unfinished
        self._report = ids.new_zeros(batch + 2)

    def _loop(self) -> None:
        unread: _Unread | None = None
        while self._count < self._choice.max_length:
            stepped = self._again() if unread is None or self._graphs.recorder.ahead else None
            if stepped is None and unread is not None:
                if self._is_over(unread):
                    return
                unread, stepped = None, self._again()
            logits, step = stepped or self._anew()
            if unread is not None and self._is_over(unread):
                self._finish(step)  # one too many
                return
            unread = self._chosen(logits, step)
            self._length += 1
        if unread is not None:
            self._is_over(unread)

    def _again(self) -> tuple[Tensor, PendingStep] | None:
        """Begin the captured step for the last tokens, and return its logits (B, V). None where it cannot be."""
        captured, batch = self._begun[0], len(self._tokens)
        if not self._is_captured or self._length >= captured.memory.capacity:
            return None
        feed(captured.inputs, self._tokens)
        captured.memory.position.add_(1)
        step = self._graphs.again(self._begun, self._ahead)
        if step is None:
            return None
        self._under_way.append(step)
        return captured.output.logits[:batch, -1], step

    def _anew(self) -> tuple[Tensor, PendingStep]:
        """Let a step be captured, or computed by the model, for the last tokens. None is under way."""
        self._show(self._length)
        inputs = dict(self._begun[1])
        more = self._length + 1 - self._first
        inputs["input_ids"] = self._tokens[:, None].clone()
        inputs["position_ids"] = inputs["position_ids"] + more
        if (mask := inputs.get("attention_mask")) is not None:
            inputs["attention_mask"] = torch.cat((mask, mask.new_ones(len(mask), more)), -1)
        output = self._graphs.step(self._model, **inputs)
        self._is_captured = self._ahead.begun is not None
        if self._is_captured:
            self._begun, self._first = cast("Begun", self._ahead.begun), self._length + 1
        step = self._ahead.last or PendingStep(lambda: None)
        self._under_way.append(step)
        return output.logits[:, -1], step

    def _chosen(self, logits: Tensor, step: PendingStep) -> _Unread:
        """Enqueue the choice of tokens behind a step, and their copy to the host."""
        tokens, impossible = self._choice.chosen(self._ids, logits.to(self._ids.device))
        tokens, self._unfinished = self._choice.after(tokens, self._unfinished)
        self._ids = torch.cat((self._ids, tokens[:, None]), -1)  # as stock code: others may keep or change them
        self._tokens = self._ids[:, -1]
        self._count += 1
        batch = len(tokens)
        if self._on_tokens is not None:
            self._report[:batch] = tokens
        if self._choice.ends is not None:
            self._report[batch] = ~self._unfinished.any()
        if impossible is not None:
            self._report[batch + 1] = impossible
        return _Unread(step, SentValues(self._report))

    def _is_over(self, unread: _Unread) -> bool:
        """Wait for a step and its tokens, pass them on, and return whether they end all rows. Raises its errors."""
        self._finish(unread.step)
        *tokens, is_over, is_impossible = unread.report.read()
        self._computed += 1
        if is_impossible:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if self._choice.others or self._on_tokens is not None:
            self._show(self._computed)  # they may read the cache
        if self._choice.others:
            ends = cast("Any", self._choice.others)(self._ids, None)
            self._unfinished = self._unfinished & ~ends
            is_over = not bool(self._unfinished.any())
        if self._on_tokens is not None:
            self._on_tokens(torch.tensor(tokens))
        return bool(is_over) or any(criterion.is_set() for criterion in self._choice.ended_by_host)

    def _finish(self, step: PendingStep) -> None:
        """Wait for the earliest step. Raises its errors."""
        try:
            step.finish()
        except Exception:
            self._has_failed = True
            self._under_way.popleft()
            raise
        self._under_way.popleft()  # not after an interrupt: it may be under way

    def _settled(self, error: BaseException) -> BaseException:
        """Wait for what is under way; return the error of the earliest step, otherwise `error`."""
        first = error
        while self._under_way:
            of_step = self._under_way.popleft().error_before(error)
            if of_step is not error and first is error and not self._has_failed:
                first = of_step
        return first

    def _show(self, length: int) -> None:
        """Let the cache show these positions, where it is a view of a step's memory."""
        memory, cache = self._begun[0].memory, self._begun[1][CACHE]
        if self._is_captured and memory.is_used_by(cache):
            memory.show(cache, length)
