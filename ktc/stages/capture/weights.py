"""Map the tensors of a checkpoint to parameters: from the model on meta and an index to one row per tensor.

Names follow transformers' own conversion mapping (per-expert names, fused names, renamed families). No data is read and
no conversion is run. Refused, with all problems together: a parameter without a source, a wrong shape, codes without
scales, a conversion that no row can express. Unused tensors are a warning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.model.checkpoint import (
    CheckpointIndex,
    Part,
    Quantised,
    Span,
    Step,
    StoredWeight,
    WeightSource,
    stored_weights,
)
from ktc.model.checkpoint.quantised import scales_of_activations
from ktc.model.hf.conversions import STACKED_PARTS, Place, Placed, Split, Unmappable, placer
from ktc.model.hf.expert_layout import has_columns
from ktc.model.hf.missing import why_missing
from ktc.model.hf.private_api import unexpected_keys
from ktc.model.hf.stock_model import quantization_config_of
from ktc.stages.capture.gguf_weights import FLOATS, map_gguf, not_read

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The rows that fill the model, and the unused tensors."""

    sources: tuple[WeightSource, ...]
    warnings: tuple[Diagnostic, ...]


def map_weights(model: PreTrainedModel, index: CheckpointIndex) -> WeightMap:
    """Return the rows of `weights.json` for `model` (stock class, on meta) from its checkpoint, in order of the bytes.

    Tied parameters are not required and non-persistent buffers are skipped: the loader ties and computes them.
    Raises `InputRefused` with every missing, misshapen or unconvertible tensor.
    """
    if index.gguf is not None:
        gguf = map_gguf(model, index)
        if gguf.problems:
            raise InputRefused(*_shortened(gguf.problems))
        return WeightMap(gguf.sources, gguf.warnings)
    targets: dict[str, Tensor] = model.state_dict()
    place = placer(model, targets)
    warnings: list[Diagnostic] = []
    weights, broken = stored_weights(index.tensors, quantization_config_of(model.config))
    if broken:
        raise InputRefused(*_shortened(broken))
    if rounded := scales_of_activations(weights, index.tensors):
        warnings.append(_rounds_activations(rounded))
    places = [(weight, spot) for weight in weights for spot in _spots(place(weight.name, _decoded_shape(weight)))]
    tied = _tied(model, {spot.target for _, spot in places if isinstance(spot, Place)})
    problems: list[Diagnostic] = []
    unused: list[str] = []
    taken: dict[Place, WeightSource] = {}
    for weight, spot in places:
        if isinstance(spot, Unmappable):
            hint = "see docs/design.md for what is next"
            problems.append(Diagnostic("I119", f"tensor `{weight.entry.name}` {spot.reason}", hint=hint))
            continue
        target = tied.get(spot.target, spot.target)
        if target is None:
            warnings.append(not_read(weight.name, spot.target))
            continue
        if target not in targets:
            unused.append(weight.entry.name)
            continue
        spot = replace(spot, target=target)
        rows = _as_rows(model, spot, targets[target])
        source = _source(weight, spot, rows)
        problems += _misfits(source, spot, rows, taken.get(spot))
        taken[spot] = source
    why = why_missing(model.config, index, unused)
    taken, gaps = _joined(taken, targets, why)
    demanded = {name: tensor for name, tensor in targets.items() if name not in tied}
    problems += (*gaps, *_missing(demanded, taken.values(), model, why))
    if problems:
        raise InputRefused(*_shortened(problems))
    return WeightMap(tuple(taken.values()), (*warnings, *_unexpected(model, unused), *_unread(index)))


def _as_rows(model: PreTrainedModel, place: Place, target: Tensor) -> Tensor:
    """Return the target as its rows see it: a matrix of one expert is (out, in), also of a stack of (in, out)."""
    turned = place.expert is not None and has_columns(_owner(model, place.target))
    return target.transpose(1, 2) if turned and target.dim() == 3 else target


def _spots(placed: Placed) -> tuple[Place | Unmappable, ...]:
    return placed.places if isinstance(placed, Split) else (placed,)


def _tied(model: PreTrainedModel, present: Collection[str]) -> dict[str, str | None]:
    """Return the substitutes of tied names: the tensor read instead, or `None` if nothing is read.

    A checkpoint may hold only the tied tensor that the model's code calls the copy; it then fills the other.
    """
    pairs = cast("dict[str, str]", getattr(model, "all_tied_weights_keys", None) or {})
    tied: dict[str, str | None] = dict.fromkeys(pairs)
    for copy, original in pairs.items():
        if copy in present and original not in present and original not in tied.values():
            tied[copy] = original
    return tied


def _decoded_shape(weight: StoredWeight) -> tuple[int, ...]:
    """Return the shape of a stored tensor, or of the weights that its codes stand for."""
    return weight.entry.shape if weight.quantised is None else weight.quantised.shape


def _source(weight: StoredWeight, place: Place, target: Tensor) -> WeightSource:
    """Return the row, with its shapes unchecked."""
    entry, quantised, steps = weight.entry, weight.quantised, place.steps
    if quantised is not None and quantised.method == "mxfp4" and target.dim() == 3:
        steps = (*steps, Step("transpose", (1, 2)))  # stored (E, out, in), held (E, in, out)
    part = STACKED_PARTS.get(place.target.rpartition(".")[2])
    stacked = part is not None and target.dim() == (2 if part.endswith("bias") else 3)
    if stacked and place.joined is not None and place.joined[::2] == (1, 2) and part == "gate_up":
        part = ("gate", "up")[place.joined[1]]  # stacks of gate and of up, which are one tensor in the model
    alone = place.joined is None or part in ("gate", "up")
    per_expert = stacked and place.expert is None and alone and all(0 not in s.dims for s in steps)
    source = WeightSource(
        target=place.target,
        expert=place.expert,
        part=part if per_expert else place.part,
        source_key=entry.name,
        file=entry.file,
        dtype=entry.dtype,
        shape=entry.shape,
        transform="per_expert" if per_expert else "copy",
        steps=steps,
    )
    if quantised is None:
        return source
    return replace(source, quantised=_with_columns(quantised, _expected_shape(source, tuple(target.shape))[-1]))


def _with_columns(quantised: Quantised, columns: int) -> Quantised:
    """Set the number of columns: eight packed codes share a word, and only the model defines how many are used."""
    stored = quantised.shape[-1]
    per_row = quantised.method == "int4" and quantised.block[1] == stored
    if not per_row or not stored - 8 < columns <= stored:
        return quantised
    return replace(quantised, shape=(*quantised.shape[:-1], columns), block=(1, columns))


def _misfits(source: WeightSource, place: Place, target: Tensor, earlier: WeightSource | None) -> Iterable[Diagnostic]:
    other = "take config.json and the weights from the same place: they are of different models"
    if earlier is not None:
        message = f"`{source.target}` has two sources: `{earlier.source_key}` and `{source.source_key}`"
        yield Diagnostic("I119", message, hint="keep one of the two in the checkpoint")
    if source.expert is not None and source.expert >= target.shape[0]:
        message = f"tensor `{source.source_key}` is of expert {source.expert}; the config has {target.shape[0]} experts"
        yield Diagnostic("I116", message, hint=other)
    elif (loaded := _comparable(source, place)) != (expected := _comparable_target(source, place, target)):
        message = f"tensor `{source.source_key}` in `{source.file}` has shape {loaded}, expected {expected}"
        yield Diagnostic("I116", message, hint=other)
    if target.is_floating_point() and source.quantised is None and source.dtype not in FLOATS:
        message = f"tensor `{source.source_key}` is stored as {source.dtype}, expected one of {', '.join(FLOATS)}"
        yield Diagnostic("I117", message, hint="use the unquantised checkpoint")


def _comparable(source: WeightSource, place: Place) -> list[int | None]:
    """Return the shape that the row yields; a dimension along which rows are joined is open."""
    try:
        shape: list[int | None] = list(source.loaded_shape)
    except ValueError:  # an inapplicable step: the stored shape, which then differs
        return [*source.shape, None]
    return _opened(shape, place)


def _comparable_target(source: WeightSource, place: Place, target: Tensor) -> list[int | None]:
    return _opened(list(_expected_shape(source, tuple(target.shape))), place)


def _opened(shape: list[int | None], place: Place) -> list[int | None]:
    if place.joined is not None and place.joined[0] < len(shape):
        shape[place.joined[0]] = None
    return shape


def _expected_shape(source: WeightSource, target: tuple[int, ...]) -> tuple[int, ...]:
    if source.expert is None:
        return target
    half = source.part in ("gate", "up") and source.target.endswith(".gate_up_proj")
    return (target[1] // 2 if half else target[1], *target[2:])


def _joined(
    taken: Mapping[Place, WeightSource], targets: Mapping[str, Tensor], why: str
) -> tuple[dict[Place, WeightSource], list[Diagnostic]]:
    """Return the rows with their spans, consecutive in each target, and the problems of their sizes."""
    placed, problems, groups = dict(taken), list[Diagnostic](), dict[str, list[Place]]()
    for place in taken:
        if place.joined is not None:
            groups.setdefault(place.target, []).append(place)
    for target, places in groups.items():
        ordered = sorted(places, key=lambda place: place.joined or ())
        dim, _, number = ordered[0].joined or (0, 0, 0)
        shape = targets[target].shape
        lengths = [([*taken[place].loaded_shape, *[0] * len(shape)])[dim] for place in ordered]
        if len(ordered) != number or sum(lengths) != shape[dim]:
            message = f"`{target}` {list(shape)} is joined of {number} tensors along dimension {dim}"
            together = f"the checkpoint has {len(ordered)}, of {sum(lengths)} together"
            problems.append(Diagnostic("I116", f"{message}; {together}", hint=why))
            continue
        for place, start, length in zip(ordered, accumulate([0, *lengths]), lengths, strict=False):
            placed[place] = replace(taken[place], span=Span(dim, start, length))
    return placed, problems


def _shared(model: PreTrainedModel) -> dict[str, str]:
    """Return the first name of each parameter by its other names: a module at two places has two."""
    first: dict[int, str] = {}
    named = ((name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: original for name, original in named if name != original}


def _owner(model: PreTrainedModel, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _missing(
    targets: Mapping[str, Tensor], taken: Iterable[WeightSource], model: PreTrainedModel, why: str
) -> Iterable[Diagnostic]:
    shared, whole = _shared(model), set[str]()
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
        if name not in stacked and shared.get(name) in whole | stacked.keys():
            if _owner(model, name) is _owner(model, shared[name]):
                continue  # one module at two places, which is filled once
            message = f"`{name}` is the tensor `{shared[name]}` under a second name, and the checkpoint has the first"
            yield Diagnostic("I119", message, hint="ktc compiles layers that have tensors of their own")
            continue
        if name not in stacked:
            yield Diagnostic("I115", f"the checkpoint lacks `{name}` ({_described(tensor)})", hint=why)
            continue
        parts: tuple[Part, ...] = ("gate", "up")
        if not name.endswith(".gate_up_proj"):
            parts = (STACKED_PARTS[name.rpartition(".")[2]],)
        for expert in range(tensor.shape[0]):
            for part in parts:
                if (expert, part) not in stacked[name]:
                    message = f"the checkpoint lacks the {part} projection of expert {expert} of `{name}`"
                    yield Diagnostic("I115", message, hint=why)


def _rounds_activations(count: int) -> Diagnostic:
    message = f"the checkpoint rounds the input of modules to 4 bits too ({count} of NVFP4); ktc multiplies it in bf16"
    hint = "answers differ from those of W4A4 engines by what that rounding changes; the weights are the same"
    return Diagnostic("I124", message, hint=hint, severity="warning")


def _described(tensor: Tensor) -> str:
    return (
        f"{list(tensor.shape)}, {'float' if tensor.is_floating_point() else str(tensor.dtype).removeprefix('torch.')}"
    )


def _unread(index: CheckpointIndex) -> Iterable[Diagnostic]:
    if index.unread:
        message = f"the weights are read from safetensors; {listing(index.unread, 3)} in the same folder is not read"
        hint = "to use the GGUF file, put it into a folder without safetensors, with config.json and the tokenizer"
        yield Diagnostic("I121", message, hint=hint, severity="warning")


def _shortened(problems: Sequence[Diagnostic]) -> Sequence[Diagnostic]:
    if len(problems) <= _MOST_SHOWN:
        return problems
    rest = Diagnostic(
        problems[_MOST_SHOWN].code, f"and {len(problems) - _MOST_SHOWN} more tensors are missing or do not fit"
    )
    return (*problems[:_MOST_SHOWN], rest)


def _unexpected(model: PreTrainedModel, unused: Sequence[str]) -> tuple[Diagnostic, ...]:
    ignored = [re.compile(pattern) for pattern in unexpected_keys(model)]
    names = [name for name in unused if not any(pattern.search(name) for pattern in ignored)]
    if not names:
        return ()
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (Diagnostic("I118", f"the model has no place for {shown}; they are not loaded", severity="warning"),)
