"""The loss of a causal language model, a few tokens at a time, so that all logits of a micro-batch are never in memory.

In: a trainer and its model. Out: a context in which the model's forward returns the stock loss, with hidden states
instead of logits. Only the stock loss of transformers on the output of `lm_head` is supported. A frozen head computes
its gradient with the loss (`frozen_head`), another head is checkpointed. Refused, as `WholeLogits`: models that scale
or cap their logits, and trainers that read them. The caller then uses whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint as checkpointing
from transformers import Trainer
from transformers.loss import loss_utils

from ktc.foundation.temporary_values import attributes
from ktc.model.hf.logit_tiles import tile_bytes, tokens_of_run
from ktc.model.hf.patching import call_stock, called_as
from ktc.model.packed_store.placement import loss_function_of
from ktc.training.trainers import frozen_head
from ktc.training.trainers.frozen_head import is_frozen_linear, token_losses
from ktc.training.trainers.private_api import package_of

MOST_LOGITS = 1 << 24  # of a chunk; with their gradients some 240 MB
_BYTES = 14  # per logit: itself, fp32 log-probabilities, and the gradients of both


class WholeLogits(Exception):
    """The reason why a model's loss needs all logits of a micro-batch at once."""


def reason_for_whole_logits(trainer: Any) -> str:
    """Return why this trainer's losses cannot be computed in chunks, "" if they can."""
    model = causal_model(trainer)
    if not (is_stock(trainer, "compute_loss") or getattr(trainer, "passes_loss_on", False)):
        return f"`{type(trainer).__name__}` computes the loss itself{', in tiles' if in_tiles(trainer) else ''}"
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        return "the loss is not the model's own"
    if loss_function_of(model) is not cast("Any", loss_utils).ForCausalLMLoss:
        return f"the loss of a `{type(model).__name__}` is not that of a causal language model"
    return "" if isinstance(model.get_output_embeddings(), nn.Module) else "the model has no output embeddings"


def is_stock(trainer: Any, name: str) -> bool:
    """Return whether a trainer's method is the one of transformers, in this class and in this one object."""
    method, stock = getattr(trainer, name), getattr(Trainer, name)
    return getattr(method, "__func__", None) is stock and package_of(stock) == "transformers"


def in_tiles(trainer: Any) -> bool:
    """Return whether the trainer's own loss has some logits at a time (`logit_tiles`)."""
    return bool(getattr(trainer, "has_loss_in_tiles", False))


def tokens_of_losses(trainer: Any, head: Any, tokens: int, vocabulary: int) -> int:
    """Return how many of `tokens` tokens have their losses in one run. `head` is the model's output embedding."""
    if not in_tiles(trainer):
        return tokens
    return tokens_of_run(tokens, vocabulary, on_gpu=head.weight.is_cuda)


def loss_bytes(trainer: Any, head: Any, tokens: int, vocabulary: int, *, whole: bool) -> int:
    """Return the bytes that the loss of `tokens` tokens needs on the device of the head, with `whole` logits or not."""
    logits = tokens * vocabulary
    if in_tiles(trainer):
        return tile_bytes(tokens, vocabulary, head.weight.element_size(), on_gpu=head.weight.is_cuda)
    cast_head = head.weight.numel() * frozen_head.cast_item(head.weight.dtype, trainer.args)
    if whole:
        return cast_head + _BYTES * logits
    if is_frozen_linear(cast("nn.Module", head)):
        return cast_head + frozen_head.BYTES_PER_LOGIT * min(logits, frozen_head.MOST_LOGITS)
    return cast_head + _BYTES * min(logits, MOST_LOGITS)


@contextmanager
def in_chunks_of_tokens(model: Any, parts: list[Tensor] | None = None, count: int = 1) -> Generator[Callable[[], None]]:
    """Compute the loss of a causal model in chunks inside the context.

    With `parts` a batch is `count` micro-batches of equally many rows. Their losses (count,) are added to `parts`, and
    the model's loss is 1 with the gradient of their sum: its caller sees by what the trainer multiplies a loss.
    The model's forward raises `WholeLogits` if that is impossible. So does the function in the context, called after
    the forward, if the model computed another loss.
    """
    head = cast("nn.Module", model.get_output_embeddings())
    frozen = is_frozen_linear(head)  # inside the context it is called as another function
    seen: list[Tensor] = []
    made: list[Tensor] = []

    def check() -> None:
        if len(made) != 1:
            raise WholeLogits(f"`{type(model).__name__}` computes its loss itself")

    def kept_back(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        if len(seen) != 1 or logits is not seen[0]:
            raise WholeLogits(f"`{type(model).__name__}` changes the output of its head")
        rows = max(1, (frozen_head.MOST_LOGITS if frozen else MOST_LOGITS) // vocab_size)
        losses = chunked_losses(losses_by(head, rows, frozen=frozen), logits, labels, count, **kwargs)
        made.append(losses.detach())
        if parts is None:
            return losses.sum().to(labels.device)
        parts.append(made[-1])
        return unit_sum(losses).to(labels.device)

    with called_as(head, kept_back), attributes(model, loss_function=loss):
        yield check


def unit_sum(losses: Tensor) -> Tensor:
    """Return 1 with the gradient of the sum of `losses`: what a trainer makes of it is by what it multiplies a loss."""
    return cast("Tensor", _UnitSum.apply(losses))


class _UnitSum(torch.autograd.Function):
    """The number 1, with the gradient of a sum."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        ctx.shape = losses.shape
        return losses.new_ones(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.expand(ctx.shape)


def losses_by(head: nn.Module, rows: int, *, frozen: bool) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return a function of states (T, H), labels (T,) and the ignored label: the cross entropies (T,) in fp32.

    At most `rows` tokens have their logits in memory. A `frozen` head is an `nn.Linear` (`is_frozen_linear`).
    """

    def losses(hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        pieces = max(1, -(-len(hidden) // rows))
        equal = max(1, -(-len(hidden) // pieces))
        if frozen:
            return token_losses(cast("nn.Linear", head), hidden, labels, equal, ignore_index)
        return _checkpointed_losses(head, hidden, labels, equal, ignore_index)

    return losses


def chunked_losses(
    losses_of: Callable[[Tensor, Tensor, int], Tensor],
    hidden: Tensor,
    labels: Tensor,
    count: int = 1,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return transformers' `ForCausalLMLoss` of a head's logits for each of `count` parts of a batch, fp32 (count,).

    `hidden` is (B, T, H), `labels` (B, T); `losses_of` computes the tokens' losses in chunks. The label of a token is
    the next token, or the one in `shift_labels`. A part's sum over tokens is divided by `num_items_in_batch`, or by the
    number of its labels that are not ignored.
    """
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat, wanted = hidden.flatten(0, -2), shift_labels.flatten().to(hidden.device)
    totals = losses_of(flat, wanted, ignore_index).view(count, -1).sum(1)
    if num_items_in_batch is None:
        return totals / wanted.ne(ignore_index).view(count, -1).sum(1).to(totals.device)
    return totals / torch.as_tensor(num_items_in_batch).to(totals.device)


def _checkpointed_losses(head: nn.Module, hidden: Tensor, labels: Tensor, rows: int, ignore_index: int) -> Tensor:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        logits = call_stock(head, x).float()  # the stock call also when checkpointing recomputes it
        return functional.cross_entropy(logits, y.to(logits.device), ignore_index=ignore_index, reduction="none")

    # backward recomputes each chunk's logits; keeping them would need all logits in memory
    run = cast("Any", checkpointing).checkpoint
    pieces = zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True)
    return torch.cat([run(losses, x, y, use_reentrant=False) for x, y in pieces])


def causal_model(trainer: Any) -> Any:
    """Return the trainer's model without its adapter's wrapper. This walks through all modules."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if isinstance(model, PeftModel) else model
