"""Micro-batches of several lengths as one batch: rows end with padding, which no code around the layers mixes in.

In: micro-batches of whole rows, and the recorded call of the batch that they form. Out: that batch, each micro-batch's
call as a part of the recorded one, and the layers' outputs as a batch again. Layers run on rows of their own lengths,
or of a GPU on the batch as it is, and experts on its real tokens. A causal model's states, masks and positions of a row
do not depend on later tokens; the padding has no labels.
Refused: rotary embeddings whose frequencies depend on the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.private_api import pytree
from ktc.training.trainers.split_layer import LayerCall, SplitLayer

# By which frequencies do not depend on lengths.
_ROTARY: Final = frozenset({"default", "linear", "llama3", "yarn"})
# In the padding of a batch: any token, no label, and a mask that says nothing.
_PADDING: Final[Mapping[str, int]] = {"input_ids": 0, "labels": -100, "attention_mask": 1}
_MOST_ON_CPU: Final = 16  # tokens of padding for each micro-batch: its head takes longer for more than a run of its own
_MULTIPLE: Final = 64
_MOST_ON_GPU: Final = 2048  # of padding in a batch: launches for a run of its own take about as long as these tokens


def frequencies_depend_on_length(modules: Iterable[nn.Module]) -> bool:
    """Return whether a module's rotary frequencies depend on the length of the longest row, or are not known."""
    kinds = [getattr(module, "rope_type", "default") for module in modules]
    names = [name for kind in kinds for name in (cast("Any", kind).values() if isinstance(kind, Mapping) else [kind])]
    return not {*names} <= _ROTARY


def has_room(run: Sequence[Mapping[str, Tensor]], tokens: int) -> bool:
    """Return whether micro-batches with equally many rows, padded, have at most `tokens` tokens and little padding."""
    lengths, rows = [inputs["input_ids"].shape[1] for inputs in run], run[0]["input_ids"].shape[0]
    if is_launched(run[0]):
        return pads_little(lengths, tokens, rows)
    padding = rows * (len(run) * max(lengths) - sum(lengths))
    return rows * len(run) * max(lengths) <= tokens and padding <= _MOST_ON_CPU * len(run)


def pads_little(lengths: Sequence[int], tokens: int, rows: int = 1) -> bool:
    """Return whether a GPU computes micro-batches of these lengths sooner together, padded to `tokens` at most."""
    whole = len(lengths) * padded_length(lengths)
    return rows * whole <= tokens and rows * (whole - sum(lengths)) <= _MOST_ON_GPU


def padded_length(lengths: Sequence[int]) -> int:
    """Return the length to which a GPU pads several: libraries plan attention again for each shape, 50 ms and more."""
    longest = max(lengths)
    return longest if min(lengths) == longest else -(-longest // _MULTIPLE) * _MULTIPLE


def is_launched(inputs: Mapping[str, Tensor]) -> bool:
    """Return whether a GPU computes what is around the layers of a micro-batch."""
    return inputs["input_ids"].device.type != "cpu"


def by_length(inputs: Sequence[Mapping[str, Tensor]]) -> list[Mapping[str, Tensor]]:
    """Return the micro-batches of a step in the order in which batches need least padding, as they are on the CPU.

    A sum of losses does not depend on it but by rounding.
    """
    if not inputs or not is_launched(inputs[0]):
        return list(inputs)
    return sorted(inputs, key=lambda given: given["input_ids"].shape[1])


def padded(run: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the inputs of micro-batches with equally many rows as those of one batch, as long as the longest.

    On a GPU rows of several lengths may be longer (`padded_length`).
    """
    lengths = [inputs["input_ids"].shape[1] for inputs in run]
    longest = padded_length(lengths) if is_launched(run[0]) else max(lengths)

    def filled(name: str, value: Tensor) -> Tensor:
        return functional.pad(value, (0, longest - value.shape[1]), value=_PADDING[name])

    return {name: torch.cat([filled(name, inputs[name]) for inputs in run]) for name in run[0]}


def as_it_is(call: ModelCall, lengths: Sequence[int]) -> ModelCall:
    """Return the call of a batch of micro-batches with equally many rows, which says which tokens are real."""
    rows, longest = call.hidden.shape[:2]
    of_rows = torch.tensor([length for length in lengths for _ in range(rows // len(lengths))])
    real = (torch.arange(longest) < of_rows[:, None]).flatten().nonzero().flatten()
    if call.hidden.is_cuda:
        real = real.pin_memory().to(call.hidden.device, non_blocking=True)
    return replace(call, real=real)


class HiddenPadding:
    """Whether no token of a model's layers sees padding behind it, as far as it is known.

    It is found once for a number of masks, until `forget`: other code may make as many others.
    """

    def __init__(self, layers: Sequence[SplitLayer]) -> None:
        attention = [split.attention for split in layers]
        self.is_causal = all(module is not None and getattr(module, "is_causal", False) for module in attention)
        self._hides: dict[int, bool] = {}  # by the number of masks: the same code makes them in each step

    def forget(self) -> None:
        """Look at the next masks again."""
        self._hides.clear()

    def of(self, call: ModelCall) -> bool:
        """Return it for a batch's call. Waits for the device where it has other masks than calls before."""
        if not self.is_causal:
            return False
        layers = {id(layer): (layer.args, dict(layer.kwargs)) for layer in call.layers}
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves([*layers.values()]) if isinstance(leaf, Tensor)}
        masks = [leaf for leaf in leaves.values() if leaf.ndim == 4]
        if len(masks) not in self._hides:
            self._hides[len(masks)] = not any(_shows_later(mask) for mask in masks)
        return self._hides[len(masks)]


def _shows_later(mask: Tensor) -> bool:
    """Return whether a mask (B, 1, T, T), of flags or of 0 and very negative numbers, shows a token a later one."""
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        return True  # nothing is known of it
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return bool(seen.triu(1).any())


def calls_of_each(call: ModelCall, lengths: Sequence[int]) -> list[ModelCall] | None:
    """Return the calls of micro-batches with equally many rows from that of their batch; None if none are known."""
    rows = call.hidden.shape[0] // len(lengths)
    calls = [_part(call, slice(index * rows, (index + 1) * rows), length) for index, length in enumerate(lengths)]
    return None if any(part is None for part in calls) else cast("list[ModelCall]", calls)


def has_parts(call: ModelCall) -> bool:
    """Return whether `calls_of_each` knows the parts of a batch's call. Nothing is copied."""
    batch, longest = call.hidden.shape[:2]
    layers = {id(layer): (layer.args, dict(layer.kwargs)) for layer in call.layers}
    leaves = (leaf for leaf in pytree.tree_leaves([*layers.values()]) if isinstance(leaf, Tensor))
    return all(_dimensions(leaf, (batch, longest)) is not None for leaf in leaves)


def _part(call: ModelCall, rows: slice, length: int) -> ModelCall | None:
    batch, longest = call.hidden.shape[:2]
    parts: dict[int, Tensor | None] = {}  # layers share their masks and positions
    layers: dict[int, LayerCall] = {}

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in parts:
            parts[id(leaf)] = _cut(leaf, rows, length, (batch, longest))
        return parts[id(leaf)]

    for layer in call.layers:
        if id(layer) not in layers:
            args, kwargs = pytree.tree_map(part, (layer.args, dict(layer.kwargs)))
            layers[id(layer)] = replace(layer, args=args, kwargs=kwargs)
    if any(leaf is None for leaf in parts.values()):
        return None
    hidden = _of_its_own(call.hidden[rows, :length])
    return ModelCall(hidden, call.devices, tuple(layers[id(layer)] for layer in call.layers))


def _cut(leaf: Tensor, rows: slice, length: int, sizes: tuple[int, int]) -> Tensor | None:
    """Return some rows of a batch's argument, up to a length; None where `_dimensions` knows none."""
    along = _dimensions(leaf, sizes)
    if not along:
        return None if along is None else leaf
    if leaf.ndim > 1 and leaf.shape[0] != 1:
        leaf = leaf[rows]
    for dimension in along:
        leaf = leaf.narrow(dimension, 0, length)
    return _of_its_own(leaf)


def _dimensions(leaf: Tensor, sizes: tuple[int, int]) -> tuple[int, ...] | None:
    """Return the dimensions of tokens: of positions (T,), (B, T) or (B, T, D), of masks (B, 1, T, T), of scalars none.

    `sizes` are B and T of the batch; arguments that its rows share have 1 in the place of B. None for others.
    """
    batch, longest = sizes
    along = {0: (), 1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}.get(leaf.ndim)
    if along is None or any(leaf.shape[dimension] != longest for dimension in along):
        return None
    return along if leaf.ndim <= 1 or leaf.shape[0] in (1, batch) else None


def _of_its_own(part: Tensor) -> Tensor:
    """Copy a part of a tensor, even a contiguous one: parts are compiled for strides, along single rows too."""
    return part.clone(memory_format=torch.contiguous_format)


def as_batch(finals: Sequence[Tensor], longest: int) -> Tensor:
    """Return the outputs of micro-batches (B, T, H) as those of their batch, with zeros in its padding."""
    if len(finals) == 1:
        return finals[0]
    return torch.cat([functional.pad(final, (0, 0, 0, longest - final.shape[1])) for final in finals])
