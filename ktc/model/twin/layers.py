"""The layers that a twin keeps: one of every kind, two with experts if the model has two; or the first of a model.

Input: the settings of a config. Output: the small settings, changed in place: per-layer lists cut to the kept layers,
lists of layer numbers and counts of first or last layers renumbered. Layers defined by a period cannot be cut freely;
then the twin keeps the shortest prefix of the stack that has every kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ktc.model.twin.sizes import Settings, is_size, scaled

_DEPTHS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_BLOCK_LISTS = ("layers_block_type",)  # a config with such a list has no depth of its own
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_LAST_SPARSE = "moe_layer_end_index"
_SHARING_LAST = "num_kv_shared_layers"  # that many layers at the end use the keys and values of earlier ones
_DENSE_LISTED = ("mlp_only_layers",)
_SPARSE_LISTED = ("moe_layers",)
_NUMBERED_FROM_ONE = ("ple_layer_ids",)
# Periods, and their phase: the setting with the phase, or the position within the period, negative from its end.
_SPARSE_PERIODS = {"decoder_sparse_step": -1, "moe_layer_interval": -1, "expert_layer_period": "expert_layer_offset"}
_PERIODS = {**_SPARSE_PERIODS, "attn_layer_period": "attn_layer_offset", "n_layers_per_attn_res_block": 0}
_NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")  # layers that a causal LM leaves out
_EXPERTS_BY_KIND = {"sparse": True, "moe": True, "hash_moe": True, "dense": False, "mlp": False}
_MAX_KINDS = 8  # a list with more different values does not hold kinds of layers

_Scale: TypeAlias = Callable[[str, Any], Any]
Form = Literal["list", "numbers", "first", "to_last", "sharing", "overrides", "period"]


@dataclass(frozen=True, slots=True)
class _Column:
    """The values of one setting for every layer, and whether they imply experts (None: unknown)."""

    name: str
    form: Form
    values: tuple[Any, ...]
    experts: tuple[bool | None, ...]


def shrink_layers(small: dict[str, Any], old: Settings, *, whole: bool) -> None:
    """Cut the stack of layers that the settings `old` describe; settings without a stack are unchanged.

    With `whole` every layer is kept, and only sizes in settings of some layers shrink.
    """
    depth = depth_of(old)
    if depth is None:
        return
    columns = tuple(_columns(old, depth))
    kept = list(range(depth)) if whole else _kept(columns, depth)
    _cut_all(small, columns, kept, lambda name, value: scaled(name, value, old))


def depth_of(settings: Settings) -> int | None:
    """Return the number of layers in the settings of a config, None for settings without a stack."""
    named = next((settings[name] for name in _DEPTHS if is_size(settings.get(name))), None)
    listed = next((settings[name] for name in _BLOCK_LISTS if isinstance(settings.get(name), list)), None)
    return named if named is not None or listed is None else len(listed)


def first_layers(settings: Settings, number: int) -> dict[str, Any]:
    """Return settings whose stack has only the first `number` of its layers, all sizes unchanged."""
    depth = depth_of(settings)
    assert depth is not None, "the settings have no stack of layers"
    assert 1 <= number <= depth, f"the stack has {depth} layers"
    cut = copy.deepcopy(dict(settings))
    _cut_all(cut, tuple(_columns(settings, depth)), range(number), lambda name, value: value)
    return cut


def layers_with_experts(settings: Settings) -> list[int]:
    """Return the numbers of the layers with experts, as far as the settings show; all layers if they show none."""
    depth = depth_of(settings) or 0
    return _sparse(tuple(_columns(settings, depth)), depth)


def _cut_all(small: dict[str, Any], columns: Sequence[_Column], kept: Sequence[int], scale: _Scale) -> None:
    """Keep some layers in every setting of `small`."""
    for column in columns:
        _cut(small, column, kept, scale)
    for name in _DEPTHS:
        if is_size(small.get(name)):
            small[name] = len(kept)
            break
    if small.get("max_window_layers"):
        small["max_window_layers"] = len(kept)
    small |= {name: 0 for name in _NEXT_TOKENS if is_size(small.get(name))}


def _columns(old: Settings, depth: int) -> Iterator[_Column]:
    for name, value in old.items():
        if isinstance(value, list):
            yield from _listed(name, cast("list[Any]", value), depth)
        elif name == "per_layer_config" and isinstance(value, dict):
            overrides = {int(key): settings for key, settings in cast("dict[str, Any]", value).items()}
            yield _column(name, "overrides", [overrides.get(i, {}) for i in range(depth)], {})
        elif is_size(value):
            yield from _counted(name, cast("int", value), old, depth)


def _listed(name: str, values: list[Any], depth: int) -> Iterator[_Column]:
    if _are_numbers(name, values, depth):
        first = int(name in _NUMBERED_FROM_ONE)
        meaning = {True: False} if name in _DENSE_LISTED else {}
        meaning = {True: True, False: False} if name in _SPARSE_LISTED else meaning
        yield _column(name, "numbers", [i + first in values for i in range(depth)], meaning)
    elif len(values) == depth > 2:
        yield _column(name, "list", values, _EXPERTS_BY_KIND)


def _counted(name: str, count: int, old: Settings, depth: int) -> Iterator[_Column]:
    if name in _DENSE_FIRST:
        yield _column(name, "first", [i < count for i in range(depth)], {True: False})
    elif name == _LAST_SPARSE:
        yield _column(name, "to_last", [i <= count for i in range(depth)], {False: False})
    elif name == _SHARING_LAST:
        yield _column(name, "sharing", [i >= depth - count for i in range(depth)], {})
    elif name in _PERIODS and count > 1:
        offset = _PERIODS[name]
        phase = int(old.get(offset) or 0) if isinstance(offset, str) else offset % count
        meaning = {True: True, False: False} if name in _SPARSE_PERIODS else {}
        yield _column(name, "period", [i % count == phase for i in range(depth)], meaning)


def _column(name: str, form: Form, values: Sequence[Any], meaning: Mapping[Any, bool]) -> _Column:
    experts = (meaning.get(v) if isinstance(v, str | bool) else None for v in values)
    return _Column(name, form, tuple(values), tuple(experts))


def _are_numbers(name: str, values: list[Any], depth: int) -> bool:
    """Return whether a list holds the numbers of some layers instead of a value for each layer."""
    if name in (*_DENSE_LISTED, *_SPARSE_LISTED, *_NUMBERED_FROM_ONE):
        return True
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    return (
        whole
        and name.endswith(("_layers", "_layer_ids", "_idxs", "_indices"))
        and values == sorted(set(values))
        and (len(values) > 2 or len(values) != depth)
    )


def _kept(columns: Sequence[_Column], depth: int) -> list[int]:
    """Return the numbers of the layers that a twin keeps, in order."""
    rows = _rows(columns, depth)
    sparse = _sparse(columns, depth)
    wanted = min(2, len(sparse))
    first = {row: index for index, row in reversed(list(enumerate(rows)))}
    if any(column.form == "period" for column in columns):
        return list(range(max(max(first.values()), sparse[wanted - 1]) + 1))
    kept = set(first.values())
    for index in sparse:
        if len(kept.intersection(sparse)) < wanted:
            kept.add(index)
    return sorted(kept)


def _rows(columns: Sequence[_Column], depth: int) -> list[str]:
    """Return, for every layer, a text that identifies its kind."""
    telling = [c for c in columns if len({repr(value) for value in c.values}) <= _MAX_KINDS]
    return [repr([column.values[index] for column in telling]) for index in range(depth)]


def _sparse(columns: Sequence[_Column], depth: int) -> list[int]:
    """Return the layers with experts, as far as the settings show; all layers of a model without experts."""
    flags = [[column.experts[index] for column in columns] for index in range(depth)]
    known = any(True in layer for layer in flags)
    sparse = [i for i, layer in enumerate(flags) if False not in layer and (True in layer or not known)]
    return sparse or list(range(depth))


def _cut(small: dict[str, Any], column: _Column, kept: Sequence[int], scale: _Scale) -> None:
    """Write the values of `column` for the kept layers, sizes among them as `scale` returns them by name."""
    name, values = column.name, [column.values[index] for index in kept]
    if column.form == "list":
        small[name] = [scale(name, value) for value in values]
    elif column.form == "numbers":
        small[name] = [place + int(name in _NUMBERED_FROM_ONE) for place, listed in enumerate(values) if listed]
    elif column.form in ("first", "sharing"):
        small[name] = sum(values)
    elif column.form == "to_last":
        small[name] = sum(values) - 1
    elif column.form == "overrides":
        small[name] = {
            str(place): {setting: scale(setting, value) for setting, value in overrides.items()}
            for place, overrides in enumerate(values)
            if overrides
        }
