"""Micro-batches that run through the model's own code around its layers as one batch, where that changes nothing.

In: a trainer's prepared micro-batches. Out: batches, each of neighbouring micro-batches with equally many rows, no
padding of their own and no inputs but tokens and labels. So masks and positions are those of each micro-batch, which
`alike` checks on recorded calls. Refused, with the reason in words: code that is not known to treat every row on its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer

from ktc.model.experts.private_api import HOOKS
from ktc.model.hf.patching import stock_class
from ktc.model.manifest.stale_change_guard import StaleChangeGuard
from ktc.model.packed_store.placement import hooks_move_alone, loss_function_of
from ktc.training.trainers.chunked_loss import causal_model, in_tiles, is_stock, reason_for_whole_logits
from ktc.training.trainers.known_columns import known_columns, known_whole, last_named, note_whole
from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.own_losses import own_losses_of
from ktc.training.trainers.private_api import (
    has_head_of_trl,
    hooks_of_all_modules,
    lets_inputs_train,
    package_of,
    pytree,
    wraps_forward_in_autocast,
)
from ktc.training.trainers.several_lengths import as_it_is, calls_of_each, has_room, padded
from ktc.training.trainers.split_layer import LayerCall, SplitLayer

Inputs = Mapping[str, Any]
_KNOWN = frozenset({"torch", "transformers", "peft", "ktc"})  # packages whose modules treat every row on its own
_ROWS = frozenset({"input_ids", "labels", "attention_mask"})  # of which each row is independent of the others


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of `count` micro-batches, whose rows follow each other.

    `lengths` are those of micro-batches that end in padding; none if all have one length.
    """

    inputs: Inputs
    count: int = 1
    lengths: tuple[int, ...] = ()

    def calls(self, call: ModelCall, *, padded: bool = False) -> list[ModelCall]:
        """Return the calls by which the batch, whose recorded call is given, goes through the layers.

        Those of several lengths are one call if it is to be `padded`.
        """
        if self.lengths and padded:
            return [as_it_is(call, self.lengths)]
        calls = calls_of_each(call, self.lengths) if self.lengths else [call]
        assert calls is not None, "a batch of several lengths was compared with its micro-batches, or `has_parts`"
        return calls


def joined(
    passes: Sequence[Sequence[Inputs]], tokens: int, *, of_several_lengths: bool = False
) -> tuple[list[list[Batch]], str]:
    """Join neighbouring micro-batches of each pass, at most `tokens` tokens together. The device is read once.

    They have one length, or, with `of_several_lengths`, may be padded at their ends.

    Returns:
        The batches of each pass in their order, and why a micro-batch was not joined with others of its size, "" if
        all were.
    """
    reasons = _reasons([*chain(*passes)])
    given = iter(reasons)
    several = of_several_lengths
    batches = [list(_batches([(inputs, next(given)) for inputs in of_pass], tokens, several)) for of_pass in passes]
    return batches, next(filter(None, reasons), "")


def _batches(inputs: Sequence[tuple[Inputs, str]], tokens: int, several: bool) -> Iterator[Batch]:
    run: list[Inputs] = []
    for micro_batch, reason in inputs:
        if run and (reason or not _fits(run, micro_batch, tokens, several)):
            yield _joined(run)
            run = []
        if reason:
            yield Batch(micro_batch)
        else:
            run.append(micro_batch)
    if run:
        yield _joined(run)


def _fits(run: Sequence[Inputs], inputs: Inputs, tokens: int, several: bool) -> bool:
    if several:
        return _kinds(run[0]) == _kinds(inputs) and has_room(cast("Any", [*run, inputs]), tokens)
    return _shapes(run[0]) == _shapes(inputs) and (len(run) + 1) * inputs["input_ids"].numel() <= tokens


def _joined(run: Sequence[Inputs]) -> Batch:
    if len(run) == 1:
        return Batch(run[0])
    lengths = tuple(inputs["input_ids"].shape[1] for inputs in run)
    return Batch(padded(cast("Any", run)), len(run), lengths if len({*lengths}) > 1 else ())


def _reasons(inputs: Sequence[Inputs]) -> list[str]:
    """Return for each micro-batch why it is not joined with others, "" if it may be."""
    reasons = [_reason(micro_batch) for micro_batch in inputs]
    given = {index: inputs[index].get("attention_mask") for index, reason in enumerate(reasons) if not reason}
    masks: dict[int, Tensor] = {index: mask for index, mask in given.items() if mask is not None}
    flags: dict[int, bool | None] = {index: known_whole(mask) for index, mask in masks.items()}
    unknown = [index for index, flag in flags.items() if flag is None]
    if unknown:
        read: list[bool] = cast("Any", torch.stack([masks[index].all() for index in unknown])).tolist()
        flags.update(zip(unknown, read, strict=True))
    return [reason or ("" if flags.get(index, True) else "rows have padding") for index, reason in enumerate(reasons)]


def without_padding(inputs: Sequence[Inputs]) -> list[Inputs]:
    """Return micro-batches without the columns at their ends that no mask and no label names. The device is read once.

    A causal model's rows do not depend on them; collators pad to a multiple.
    """
    masked = [index for index, given in enumerate(inputs) if "attention_mask" in given and not _reason(given)]
    if not masked:
        return list(inputs)
    masks, labels = ([inputs[index][name] for index in masked] for name in ("attention_mask", "labels"))
    known = [known_columns(*pair) for pair in zip(masks, labels, strict=True)]
    cut = list(inputs)
    if all(pair is not None for pair in known):  # fetched ahead: the device is not waited for
        for index, (end, whole) in zip(masked, cast("list[tuple[int, bool]]", known), strict=True):
            cut[index] = _up_to(inputs[index], end)
            if end:
                note_whole(cut[index]["attention_mask"], whole=whole)
        return cut
    ends = torch.stack([last_named(*pair) for pair in zip(masks, labels, strict=True)])
    for index, end in zip(masked, cast("list[int]", cast("Any", ends).tolist()), strict=True):
        cut[index] = _up_to(inputs[index], end)
    return cut


def _up_to(inputs: Inputs, length: int) -> Inputs:
    if length in (0, inputs["input_ids"].shape[1]):
        return inputs
    return {name: value[:, :length].contiguous() for name, value in inputs.items()}


def divided_rows(inputs: Inputs, tokens: int) -> list[Inputs]:
    """Divide a micro-batch into ones of at most `tokens` tokens, or one row, if it has rows of tokens and no more."""
    if _reason(inputs):
        return [inputs]
    rows = max(1, tokens // max(1, inputs["input_ids"].shape[1]))
    values = cast("Mapping[str, Tensor]", inputs)
    pieces: dict[str, Sequence[Tensor]] = {name: cast("Any", value).split(rows) for name, value in values.items()}
    return [{name: piece[index] for name, piece in pieces.items()} for index in range(len(pieces["input_ids"]))]


def sums_over_rows(trainer: Any, num_items: Any) -> bool:
    """Return whether a trainer's stock loss is the sum of the losses of rows: divided by the step's tokens."""
    if own_losses_of(trainer) is not None:
        return False  # its metrics are means over the tokens of a micro-batch
    return num_items is not None and bool(getattr(trainer, "model_accepts_loss_kwargs", False))


def reason_against_tokens(inputs: Sequence[Inputs]) -> str:
    """Return why the inputs do not state the sizes of micro-batches, "" if they have tokens."""
    ids = [micro_batch.get("input_ids") for micro_batch in inputs]
    return "" if all(isinstance(value, Tensor) and value.ndim == 2 for value in ids) else "rows are not tokens"


def _reason(inputs: Inputs) -> str:
    others = sorted(set(inputs) - _ROWS)
    if others:
        return f"rows have `{others[0]}`"
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or "labels" not in inputs:
        return "rows are not tokens with labels"
    fits = (isinstance(value, Tensor) and value.shape == ids.shape for value in inputs.values())
    return "" if all(fits) else "rows are not tokens with labels"


def _shapes(inputs: Inputs) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    tensors = cast("Mapping[str, Tensor]", inputs)
    return {name: (value.shape, value.dtype, value.device) for name, value in tensors.items()}


def _kinds(inputs: Inputs) -> dict[str, tuple[int, torch.dtype, torch.device]]:
    return {name: (shape[0], dtype, device) for name, (shape, dtype, device) in _shapes(inputs).items()}


# Which code treats every row on its own -------------------------------------------------------------------------------
def reason_for_each(trainer: Any, stock_step: Any) -> str:
    """Return why a trainer's code has to run once for every micro-batch, "" if one run for several is the same."""
    name, known = type(trainer).__name__, own_losses_of(trainer)
    against = reason_for_whole_logits(trainer) if known is None else known.reason_against()
    if against:
        return against
    if not (_is_stock_step(stock_step) or (known is not None and known.has_step(stock_step))):
        return f"`{name}` has a training step of its own"
    if not is_stock(trainer, "compute_loss_context_manager"):
        return f"`{name}` computes the loss in a context of its own"
    if package_of(trainer.accelerator.backward) not in ("accelerate", "ktc"):
        return "the accelerator has a `backward` of its own"
    model = stock_class(causal_model(trainer))
    known = model.__module__.startswith("transformers.models.")
    return "" if known else f"the code of a `{model.__name__}` is not from transformers"


def _is_stock_step(step: Any) -> bool:
    return getattr(step, "__func__", None) is Trainer.training_step and package_of(step) == "transformers"


def code_of_step(trainer: Any, stock_step: Any, causal: Any) -> tuple[Any, ...]:
    """Return what `reason_for_each` and `reason_for_whole_logits` look at, to see whether it was replaced since.

    `causal` is the trainer's `causal_model`.
    """
    methods = trainer.compute_loss, trainer.compute_loss_context_manager, trainer.accelerator.backward, stock_step
    code = (getattr(method, "__func__", method) for method in methods)
    of_loss = trainer.compute_loss_func, trainer.label_smoother, loss_function_of(causal)
    return (*code, *of_loss, in_tiles(trainer))


def own_modules(model: nn.Module, layers: Sequence[SplitLayer]) -> dict[str, nn.Module]:
    """Return the modules by name whose calls a run for several micro-batches joins: all but those inside of layers."""
    within = {module for split in layers for module in split.layer.modules() if module is not split.layer}
    named = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    return {name: module for name, module in named if module not in within}


def observed(modules: Mapping[str, nn.Module]) -> str:
    """Return which module is observed or runs other code than that of known packages, in words; "" if none does."""
    if hooks_of_all_modules():
        return "all modules have hooks"
    for name, module in modules.items():
        packages = {stock_class(module).__module__.partition(".")[0], package_of(type(module).forward)}
        if not packages <= _KNOWN:
            return f"the code of `{name or type(module).__name__}` is not from transformers"
        if any(vars(module)[kind] for kind in HOOKS) and not _harmless(module):
            return f"`{name or type(module).__name__}` has hooks"
        if "forward" in vars(module) and not (wraps_forward_in_autocast(module) or has_head_of_trl(module)):
            return f"`{name or type(module).__name__}` has a `forward` of its own"
    return ""


def _harmless(module: nn.Module) -> bool:
    if hooks_move_alone(module):
        return True
    hooks = (hook for kind in HOOKS for hook in vars(module)[kind].values())
    return all(isinstance(hook, StaleChangeGuard) or lets_inputs_train(hook) for hook in hooks)


# The calls of several micro-batches and of the batch that they form ---------------------------------------------------
def all_alike(batches: Iterable[Batch], recorded: Iterable[ModelCall], calls: Iterable[ModelCall]) -> bool:
    """Return whether each batch enters the layers as its micro-batches do, whose `calls` were recorded one by one."""
    of_micro_batches = iter(calls)
    for batch, call in zip(batches, recorded, strict=True):
        if batch.count > 1 and call.hidden.shape[:2] != batch.inputs["input_ids"].shape:
            return False
        separate = list(islice(of_micro_batches, batch.count))
        if not batch.lengths:
            if not alike(call, separate):
                return False
            continue
        parts = calls_of_each(call, batch.lengths)
        if parts is None or not all(alike(part, [of_one]) for part, of_one in zip(parts, separate, strict=True)):
            return False
    return True


def alike(batch: ModelCall, calls: Sequence[ModelCall]) -> bool:
    """Return whether a batch enters the layers as its micro-batches do: the same states, and arguments row by row."""
    hidden = [call.hidden for call in calls]
    sizes = [x.shape[0] for x in hidden]
    if any(call.devices != batch.devices or len(call.layers) != len(batch.layers) for call in calls):
        return False
    if not _is_joined(batch.hidden, hidden, sizes):
        return False
    layers = zip(batch.layers, *(call.layers for call in calls), strict=True)
    different = {tuple(map(id, layer)): layer for layer in layers}  # layers share their calls
    return all(_alike(of_batch, separate, sizes) for of_batch, *separate in different.values())


def _alike(of_batch: LayerCall, separate: Sequence[LayerCall], sizes: Sequence[int]) -> bool:
    if any((call.named, call.autocast) != (of_batch.named, of_batch.autocast) for call in separate):
        return False
    leaves, spec = pytree.tree_flatten((of_batch.args, dict(of_batch.kwargs)))
    flat = [pytree.tree_flatten((call.args, dict(call.kwargs))) for call in separate]
    if any(other != spec for _, other in flat):
        return False
    return all(_is_joined(leaf, pieces, sizes) for leaf, *pieces in zip(leaves, *(row for row, _ in flat), strict=True))


def _is_joined(leaf: Any, pieces: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether a value of a batch is that of each micro-batch, or has theirs (of `sizes` rows) one by one."""
    if not isinstance(leaf, Tensor):
        return all(type(piece) is type(leaf) and (piece is leaf or piece == leaf) for piece in pieces)
    if any(piece is None for piece in pieces) and leaf.ndim == 4 and leaf.shape[0] == sum(sizes):  # masks
        pairs = zip(torch.split(leaf, list(sizes)), pieces, strict=True)
        return all(_is_causal(rows) if piece is None else _equal(rows, piece) for rows, piece in pairs)
    if not all(isinstance(piece, Tensor) and piece.dtype == leaf.dtype for piece in pieces):
        return False
    if leaf.ndim and leaf.shape[0] == sum(sizes) and len(pieces) > 1:
        return all(map(_equal, torch.split(leaf, list(sizes)), pieces))
    return all(leaf.shape == piece.shape and torch.equal(leaf, piece) for piece in pieces)


def _is_causal(mask: Tensor) -> bool:
    """Return whether a mask (B, 1, T, T), of flags or of 0 and very negative numbers, says what no mask says."""
    if mask.shape[-1] != mask.shape[-2]:
        return False
    seen = mask if mask.dtype is torch.bool else mask == 0
    return bool((seen == torch.ones_like(seen).tril()).all())


def _equal(rows: Tensor, piece: Tensor) -> bool:
    """Return whether rows of a batch are a micro-batch's own, or the one that its rows share."""
    same_shape = rows.ndim == piece.ndim and rows.shape[1:] == piece.shape[1:] and piece.shape[0] in (1, len(rows))
    return same_shape and bool((rows == piece).all())


def rows_of(batch: Batch) -> Iterator[Inputs]:
    """Split the inputs of a batch into those of its micro-batches."""
    if batch.count == 1:
        yield batch.inputs
        return
    pieces = {name: value.chunk(batch.count) for name, value in cast("Mapping[str, Tensor]", batch.inputs).items()}
    for index in range(batch.count):
        length = batch.lengths[index] if batch.lengths else None
        yield {name: piece[index][:, :length] for name, piece in pieces.items()}
