"""Which tensor of a checkpoint becomes which parameter: in the model on meta and an index, out one row per tensor.

Names follow transformers' own conversion mapping (per-expert names, fused names, renamed families); the data is not
read and no conversion is run. Refused, all problems together: a parameter without a source, a wrong shape, a dtype
that needs scales, a conversion other than stacking experts. Tensors that nobody asks for are a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,  # pyright: ignore[reportUnknownVariableType]
)

from ktc.checkpoint import CheckpointIndex, Part, TensorEntry, WeightSource
from ktc.diagnostics import Diagnostic, InputRefused

_FLOATS = ("bf16", "f16", "f32", "f64")
_STACKED_PARTS: Mapping[tuple[str, ...], tuple[Part, ...]] = {
    ("MergeModulelist(0)", "Concatenate(1)"): ("gate", "up"),
    ("MergeModulelist(0)",): ("down",),
}
_FUSED: Mapping[str, Part] = {"gate_up_proj": "gate_up", "down_proj": "down"}
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How the checkpoint fills the model, and what in it stays unused."""

    sources: tuple[WeightSource, ...]
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes by its name alone."""

    target: str
    expert: int | None = None
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class _Unmappable:
    reason: str


def map_weights(model: PreTrainedModel, index: CheckpointIndex) -> WeightMap:
    """The rows of `weights.json` for `model` (stock class, on meta) from its checkpoint, in the order of the bytes.

    Tied parameters are not demanded and non-persistent buffers are skipped: the loader ties and computes them.
    Raises `InputRefused` with every missing, misshapen or unconvertible tensor.
    """
    targets: dict[str, Tensor] = model.state_dict()
    place = _namer(model, targets)
    tied = _tied(model)
    problems: list[Diagnostic] = []
    unused: list[str] = []
    taken: dict[_Place, WeightSource] = {}
    for entry in index.tensors.values():
        found = place(entry.name)
        if isinstance(found, _Unmappable):
            problems.append(
                Diagnostic("I119", f"tensor `{entry.name}` {found.reason}", hint="see docs/design.md for what is next")
            )
        elif found.target not in targets:
            unused.append(entry.name)
        elif found.target in tied:
            continue
        else:
            source = _source(entry, found, targets[found.target].dim())
            problems += _misfits(source, targets[found.target], taken.get(found))
            taken[found] = source
    problems += _missing({name: tensor for name, tensor in targets.items() if name not in tied}, taken.values())
    if problems:
        raise InputRefused(*_shortened(problems))
    return WeightMap(tuple(taken.values()), _unexpected(model, unused))


def _tied(model: PreTrainedModel) -> frozenset[str]:
    """Names whose values come from another parameter."""
    return frozenset(getattr(model, "all_tied_weights_keys", None) or {})


def _namer(model: PreTrainedModel, targets: dict[str, Tensor]) -> Callable[[str], _Place | _Unmappable]:
    """From a checkpoint name to its place; transformers' mapping speaks, we read the expert's number out of it."""
    mapping = get_model_conversion_mapping(model)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    prefix = model.base_model_prefix

    def place(name: str) -> _Place | _Unmappable:
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if pattern is None:
            return _Place(target)
        converter = by_pattern[pattern]
        operations = tuple(_spelled(operation) for operation in converter.operations)
        parts = _STACKED_PARTS.get(operations, ())
        renamed, _ = rename_source_key(name, renamings, [], prefix, None)
        number = re.search(pattern.replace("*", r"(\d+)"), renamed)
        if len(parts) != len(converter.source_patterns) or number is None or "*" not in pattern:
            return _Unmappable(f"needs a conversion that ktc does not do: {', '.join(operations)}")
        return _Place(target, int(number[1]), parts[converter.source_patterns.index(pattern)])

    return place


def _spelled(operation: object) -> str:
    return f"{type(operation).__name__}({getattr(operation, 'dim', '')})"


def _source(entry: TensorEntry, place: _Place, target_dims: int) -> WeightSource:
    part, transform = place.part, "copy"
    fused = _FUSED.get(place.target.rpartition(".")[2])
    if place.expert is None and target_dims == 3 and fused is not None:
        part, transform = fused, "per_expert"
    return WeightSource(place.target, place.expert, part, entry.name, entry.file, entry.dtype, entry.shape, transform)


def _misfits(source: WeightSource, target: Tensor, earlier: WeightSource | None) -> Iterable[Diagnostic]:
    again = f"download or copy `{source.file}` again, or check config.json"
    if earlier is not None:
        message = f"`{source.target}` has two sources: `{earlier.source_key}` and `{source.source_key}`"
        yield Diagnostic("I119", message, hint="keep one of the two in the checkpoint")
    expected = _expected_shape(source, tuple(target.shape))
    if source.expert is not None and source.expert >= target.shape[0]:
        message = f"tensor `{source.source_key}` is of expert {source.expert}; the config has {target.shape[0]} experts"
        yield Diagnostic("I116", message, hint=again)
    elif source.shape != expected:
        message = (
            f"tensor `{source.source_key}` in `{source.file}` has shape {list(source.shape)}, expected {list(expected)}"
        )
        yield Diagnostic("I116", message, hint=again)
    if target.is_floating_point() and source.dtype not in _FLOATS:
        message = f"tensor `{source.source_key}` is stored as {source.dtype}, expected one of {', '.join(_FLOATS)}"
        yield Diagnostic("I117", message, hint="use the checkpoint that is not quantised")


def _expected_shape(source: WeightSource, target: tuple[int, ...]) -> tuple[int, ...]:
    if source.expert is None:
        return target
    return (target[1] // 2 if source.part in ("gate", "up") else target[1], *target[2:])


def _missing(targets: Mapping[str, Tensor], taken: Iterable[WeightSource]) -> Iterable[Diagnostic]:
    whole: set[str] = set()
    stacked: dict[str, set[tuple[int | None, Part | None]]] = {}
    for source in taken:
        if source.expert is None:
            whole.add(source.target)
        else:
            stacked.setdefault(source.target, set()).add((source.expert, source.part))
    for name in sorted(whole & stacked.keys()):
        message = f"the checkpoint holds `{name}` twice: as one tensor and expert by expert"
        yield Diagnostic("I119", message, hint="keep one of the two in the checkpoint")
    for name, tensor in targets.items():
        if name in whole:
            continue
        if name not in stacked:
            yield Diagnostic(
                "I115", f"the checkpoint lacks `{name}` ({_described(tensor)})", hint="is a shard missing?"
            )
            continue
        parts: tuple[Part, ...] = ("down",) if any(part == "down" for _, part in stacked[name]) else ("gate", "up")
        for expert in range(tensor.shape[0]):
            for part in parts:
                if (expert, part) not in stacked[name]:
                    message = f"the checkpoint lacks the {part} projection of expert {expert} of `{name}`"
                    yield Diagnostic("I115", message, hint="is a shard missing?")


def _described(tensor: Tensor) -> str:
    return (
        f"{list(tensor.shape)}, {'float' if tensor.is_floating_point() else str(tensor.dtype).removeprefix('torch.')}"
    )


def _shortened(problems: Sequence[Diagnostic]) -> Sequence[Diagnostic]:
    if len(problems) <= _MOST_SHOWN:
        return problems
    rest = Diagnostic(
        problems[_MOST_SHOWN].code, f"and {len(problems) - _MOST_SHOWN} more tensors are missing or do not fit"
    )
    return (*problems[:_MOST_SHOWN], rest)


def _unexpected(model: PreTrainedModel, unused: Sequence[str]) -> tuple[Diagnostic, ...]:
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    names = [name for name in unused if not any(pattern.search(name) for pattern in ignored)]
    if not names:
        return ()
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (Diagnostic("I118", f"the model has no place for {shown}; they are not loaded", severity="warning"),)
