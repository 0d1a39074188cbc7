"""TRL's supervised fine-tuning for a compiled model. Only this module imports TRL.

In: the arguments of `trl.SFTTrainer`. Out: that trainer, whose losses of several micro-batches may come from one run of
the model's code around its layers. TRL's records are those of each micro-batch: the means of the entropy and of the
right guesses over its learned tokens, and the tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, cast

import torch
import trl
from torch import Tensor
from trl.trainer import utils as utilities
from trl.trainer.sft_trainer import SFTTrainer

from ktc.foundation.versions import dotted, release
from ktc.model.hf.patching import with_attributes
from ktc.model.kernels.sent_values import SentValues
from ktc.training.trainers.chunked_loss import unit_sum
from ktc.training.trainers.private_api import add_sft_metrics, package_of, with_all_positions
from ktc.training.trainers.trainer import KTrainerMixin

_KNOWN: Final = (1, 16)  # the release of TRL whose `compute_loss` is computed here for several micro-batches
_MOST_LEARNED: Final = 0.5  # of a step's tokens, from which all positions take less time than a wait for the learned


class KTSFTTrainer(KTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` for a compiled model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own_losses = SftLosses(self)

    @property
    def has_loss_in_tiles(self) -> bool:
        """Whether the loss has some logits at a time (`ktc/model/hf/logit_tiles.py`), and never those of all tokens."""
        return not self.compute_loss_func and not self.args.label_smoothing_factor

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of an optimizer step, and note how many of their tokens are learned."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        self.own_losses.note_learned(batches, items)
        return batches, items


class SftLosses:
    """The losses of TRL's `SFTTrainer` for batches of several micro-batches (`own_losses.OwnLosses`).

    One run of a batch records numbers on the GPU, which are read once at the end of the step: TRL reads four numbers
    after each run, for which the host waits. TRL's head takes the learned positions alone, whose number the host waits
    for in backward; where most tokens are learned it takes all. Several processes gather the numbers as TRL does,
    micro-batch by micro-batch.
    """

    def __init__(self, trainer: KTSFTTrainer) -> None:
        self._trainer = trainer
        # (4, count) of each run: learned tokens, entropy, right guesses, all tokens
        self._recorded: list[SentValues] = []
        self._learned = 0.0  # of the tokens of a step

    def reason_against(self) -> str:
        """Return why losses have to be computed once for every micro-batch, "" if one run for several is the same."""
        trainer = self._trainer
        name, installed = type(trainer).__name__, release(trl.__version__)[:2]
        if not _is_of_trl(trainer.compute_loss, SFTTrainer.compute_loss):
            return f"`{name}` computes the loss itself"
        loss_type: str = cast("Any", trainer.args).loss_type
        parallel: object = cast("Any", trainer.accelerator).parallelism_config
        reasons = {
            f"the loss of TRL {dotted(installed)} is not known, that of {dotted(_KNOWN)} is": installed != _KNOWN,
            "the loss is not the model's own": bool(trainer.compute_loss_func or trainer.label_smoother),
            f"the loss is of the type `{loss_type}`": loss_type != "nll",
            "processes divide sequences or tensors": parallel is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def has_step(self, step: Any) -> bool:
        """Return whether a training step is the one of `SFTTrainer`."""
        return _is_of_trl(step, SFTTrainer.training_step)

    def note_learned(self, batches: Sequence[Any], items: Any) -> None:
        """Note which part of a step's tokens is learned, `items` in all processes. A GPU is waited for.

        It has nothing to do between two steps.
        """
        shares = self._trainer.args.average_tokens_across_devices
        processes = cast("int", self._trainer.accelerator.num_processes) if shares else 1
        labels = (cast("Any", batch).get("labels") for batch in batches if isinstance(batch, Mapping))
        tokens = sum(value.numel() for value in labels if isinstance(value, Tensor)) * processes
        self._learned = float(items) / tokens if items is not None and tokens else 0.0

    def begin(self) -> None:
        """Drop the numbers of a step that did not end."""
        self._recorded = []

    @contextmanager
    def of(self, count: int, parts: list[Tensor], lengths: Sequence[int] = ()) -> Generator[None]:
        """Let the trainer compute the losses of a batch of `count` micro-batches with equally many rows each.

        `lengths` are those of micro-batches that are padded, at least to the longest one; none without padding.
        """
        with with_attributes(self._trainer, compute_loss=partial(self._losses, count, parts, lengths)):
            yield

    def _losses(
        self,
        count: int,
        parts: list[Tensor],
        lengths: Sequence[int],
        model: Any,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Compute what `SFTTrainer.compute_loss` does for each micro-batch, and return 1 with their gradients.

        The losses (count,) are added to `parts`; `lengths` are as for `of`.
        """
        trainer = self._trainer
        columns = cast("Tensor", inputs["input_ids"]).shape[1]  # a GPU has more than the longest length
        filled = sum(lengths) / (count * columns) if lengths else 1.0  # of the positions of this run
        with with_all_positions(utilities) if self._learned * filled >= _MOST_LEARNED else nullcontext():
            out = model(**inputs, use_cache=False, fused_lm_head=True)
        learned, guessed = _sums(out.label_mask, count), _sums(out.is_top1, count)
        items = learned if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        losses = -_sums(out.log_probs, count) / items.to(out.log_probs.device).clamp(min=1)
        if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
            losses = losses * trainer.accelerator.num_processes
        numbers = [learned, _sums(out.entropy.detach(), count), guessed, _tokens(inputs, count, lengths)]
        self._recorded.append(SentValues(_gathered(trainer.accelerator, numbers)))
        parts.append(losses.detach())
        return unit_sum(losses)

    def finish(self) -> None:
        """Add the step's numbers to the metrics of the trainer."""
        if not self._recorded:
            return
        of_all = torch.cat([torch.tensor(sent.read(), dtype=torch.float64) for sent in self._recorded], 1)
        learned, entropy, guessed, tokens = of_all
        means = torch.stack([entropy, guessed]) / learned.clamp(min=1)  # both are zero where no token is learned
        entropies, accuracies, counts = cast("Any", torch.cat([means, tokens[None]])).tolist()
        add_sft_metrics(self._trainer, entropies, accuracies, round(sum(counts)))
        self._recorded = []


def _is_of_trl(method: Any, known: Any) -> bool:
    return getattr(method, "__func__", None) is known and package_of(known) == "trl"


def _sums(values: Tensor, count: int) -> Tensor:
    """Return the sums (count,) of values (B, T) of micro-batches."""
    return values.reshape(count, -1).sum(1)


def _tokens(inputs: dict[str, Any], count: int, lengths: Sequence[int]) -> Tensor:
    """Count the tokens of micro-batches as TRL does: those of masks, or all where sequences are packed.

    Masks of micro-batches that are padded together say nothing.

    Raises:
        ValueError: as TRL's own loss, without either.
    """
    if lengths and "attention_mask" in inputs:
        rows = inputs["input_ids"].shape[0] // count
        return torch.tensor(lengths, device=inputs["input_ids"].device) * rows
    if "attention_mask" in inputs:
        return _sums(inputs["attention_mask"], count)
    if "position_ids" not in inputs:
        raise ValueError("Expected 'attention_mask' or 'position_ids' in inputs.")
    positions: Tensor = inputs["position_ids"]
    return torch.full((count,), positions.shape[1], device=positions.device)


def _gathered(accelerator: Any, numbers: list[Tensor]) -> Tensor:
    """Return the numbers (4, count) of micro-batches, summed over the processes by the calls that TRL makes."""
    if accelerator.num_processes > 1:
        of_each = [
            [accelerator.gather_for_metrics(value).sum() for value in values] for values in zip(*numbers, strict=True)
        ]
        numbers = [torch.stack(values) for values in zip(*of_each, strict=True)]
    return torch.stack([values.to(numbers[0].device, torch.float64) for values in numbers])
