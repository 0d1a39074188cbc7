"""A model's code before and after its layers, run for one micro-batch after the other.

In: the trainer, the layers and the micro-batches of a step. Out: each micro-batch's recorded calls of the layers, and
later its loss from the last layer's output, both by the trainer's own step. Work common to all micro-batches is
done once per step: walking through all modules costs more than all other code around the layers. Refused, as
`CannotStack`: a trainer whose step differs when it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ktc.model.hf.patching import stock_class, with_attributes
from ktc.model.kernels.sent_values import SentValues
from ktc.model.loading.compiled_model import CompiledModel
from ktc.training.trainers.chunked_loss import WholeLogits, causal_model, in_chunks_of_tokens
from ktc.training.trainers.joined_inputs import Batch, Inputs, rows_of
from ktc.training.trainers.layer_calls import ModelCall, caller_of, finished, record
from ktc.training.trainers.own_losses import own_losses_of
from ktc.training.trainers.private_api import positions_follow, prepared_inputs
from ktc.training.trainers.split_layer import CannotStack, SplitLayer

TrainingStep = Callable[..., Tensor]


class EmbedAndHead:
    """The code of one trainer's model before and after its layers.

    `causal` is the model without its adapter's wrapper. `whole_loss` says why the loss needs all logits of a
    micro-batch at once, "" if it does not. It changes where another loss is set, and at the first loss. `in_parts` is
    whether a batch of several micro-batches has the losses that the trainer computes itself. `checks_at_once` is
    whether the first input that is not the recorded one is found before the backward of its loss, for which the host
    waits for the GPU.
    """

    def __init__(self, trainer: Any, model: nn.Module, layers: Sequence[SplitLayer], whole_loss: str = "") -> None:
        self._trainer, self._model, self._layers = trainer, model, layers
        self.causal = causal_model(trainer)
        self._caller = caller_of(model, layers)
        self._modes: list[dict[str, Any]] = []  # the attributes of all modules, after they were set to training
        self._changed: list[Tensor] = []  # per micro-batch of a step, whether its input differed from the recorded one
        self._arriving: list[SentValues] = []  # of earlier passes, on their way to the host
        self._own = own_losses_of(trainer)
        self.whole_loss, self.in_parts = whole_loss, False
        self.checks_at_once = True

    @property
    def against_parts(self) -> str:
        """Why the losses of several micro-batches cannot come from one run, "" if they can. Asked in each step."""
        return self.whole_loss if self._own is None else self._own.reason_against()

    def prepared(self, waiting: Sequence[Inputs]) -> list[Inputs]:
        """Return the micro-batches on the device of the inputs, where preparing them again changes nothing."""
        return [prepared_inputs(self._trainer, inputs) for inputs in waiting]

    @contextmanager
    def in_training(self) -> Generator[None]:
        """Begin a step. Every module is set to training, and `train()` of the model is not repeated inside."""
        model, optimizer = self._model, self._trainer.optimizer
        self._changed, self._arriving = [], []
        if not self._modes or not all(attributes["training"] for attributes in self._modes):
            model.train()
            self._modes = [vars(module) for module in model.modules()]
        elif isinstance(self.causal, CompiledModel) and self.causal.decode_graphs is not None:
            self.causal.decode_graphs.clear()  # as its `train()` does
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # optimizers without schedules keep other weights for evaluation
        walk = model.train

        def train(mode: bool = True) -> nn.Module:
            return model if mode and model.training else walk(mode)

        if self._own is not None:
            self._own.begin()
        with with_attributes(model, train=train):
            yield
        if self._own is not None:
            self._own.finish()

    def record(self, inputs: Inputs, num_items: Any) -> ModelCall:
        """Begin the trainer's step of a micro-batch, and end it at the last layer.

        Raises:
            CannotStack: the model cannot be run layer by layer.
        """

        # a stock model counts positions itself where it gets none
        is_stock = stock_class(self.causal).__module__.startswith("transformers.")
        follow = is_stock and self.in_parts and "position_ids" not in inputs

        def begin() -> None:
            with self._trainer.compute_loss_context_manager(), positions_follow() if follow else nullcontext():
                self._trainer.compute_loss(self._model, dict(inputs), num_items_in_batch=num_items)

        return record(self._layers, begin)

    def losses(
        self, stock_step: TrainingStep, batch: Batch, num_items: Any, call: ModelCall, final: Tensor
    ) -> list[Tensor]:
        """Run the trainer's step of a batch once, from the last layer's output `final` (B, T, H) on.

        Returns:
            The loss of each of its micro-batches, as the trainer's step of it alone returns it.

        Raises:
            CannotStack: as `loss` does.
        """
        parts: list[Tensor] = []
        if self._own is not None and self.in_parts:
            with self._own.of(batch.count, parts, batch.lengths):
                factor = self._run(stock_step, batch.inputs, num_items, call, final)
            return _multiplied(parts, factor)
        if batch.count > 1 and not self.whole_loss:
            try:
                with in_chunks_of_tokens(self.causal, parts, batch.count) as check, self._before_backward(check):
                    factor = self._run(stock_step, batch.inputs, num_items, call, final)
            except WholeLogits as why:  # found before its backward began
                self.whole_loss = str(why)
            else:
                return _multiplied(parts, factor)
        pieces = zip(rows_of(batch), call.hidden.chunk(batch.count), final.chunk(batch.count), strict=True)
        losses: list[Tensor] = []
        for inputs, hidden, rows in pieces:
            length = inputs["input_ids"].shape[1] if batch.lengths else None
            of_one = replace(call, hidden=hidden[:, :length])
            losses.append(self.loss(stock_step, inputs, num_items, of_one, rows[:, :length]))
        return losses

    def loss(self, stock_step: TrainingStep, inputs: Inputs, num_items: Any, call: ModelCall, final: Tensor) -> Tensor:
        """Run the trainer's step of a micro-batch, from the last layer's output `final` on.

        Raises:
            CannotStack: the trainer calls the model twice, or the first micro-batch of the step has changed.
        """
        if not self.whole_loss:
            try:
                with in_chunks_of_tokens(self.causal) as check, self._before_backward(check):
                    return self._run(stock_step, inputs, num_items, call, final)
            except WholeLogits as why:  # found before its backward began
                self.whole_loss = str(why)
        return self._run(stock_step, inputs, num_items, call, final)

    @contextmanager
    def _before_backward(self, check: Callable[[], None]) -> Generator[None]:
        accelerator = self._trainer.accelerator
        stock = accelerator.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            check()
            stock(*args, **kwargs)

        with with_attributes(accelerator, backward=backward):
            yield

    def _run(self, stock_step: TrainingStep, inputs: Inputs, num_items: Any, call: ModelCall, final: Tensor) -> Tensor:
        with finished(self._layers, final, partial(self._compare, call.hidden), self._caller):
            return stock_step(self._model, dict(inputs), num_items)

    def _compare(self, recorded: Tensor, x: Tensor) -> None:
        if x.shape != recorded.shape:
            raise CannotStack(_CHANGED)
        self._changed.append((x != recorded).any())
        # the others are read later together: each reading makes the host wait for the GPU
        if len(self._changed) == 1 and not self._arriving and self.checks_at_once:
            self.check_unchanged()

    def begin_check(self) -> None:
        """Send what `check_unchanged` reads to the host, before the device gets work that it would wait for."""
        if self._changed and self._changed[0].is_cuda:
            self._arriving.append(SentValues(torch.stack(self._changed).any()))
            self._changed = []

    def check_unchanged(self) -> None:
        """Check that every micro-batch entered the layers as it was recorded.

        Raises:
            CannotStack: one has changed.
        """
        arriving, self._arriving = self._arriving, []
        changed = [flag.read() for flag in arriving]
        if any(changed) or (self._changed and bool(torch.stack(self._changed).any())):
            raise CannotStack(_CHANGED)


def _multiplied(parts: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    (losses,) = parts
    return list((losses.to(factor.device) * factor).unbind())


_CHANGED = "the same micro-batch differs when it is computed a second time"
