"""Map the tensors of a GGUF file to parameters: rows of `weights.json`, as `ktc.stages.capture.weights` makes them.

Input: the model on meta and the file's index. Refused, with all problems together: a different architecture or number
of heads than in config.json, a missing tensor, a wrong shape, an unreadable type, and an unused tensor in a layer of
the model, since it may change the meaning of others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, HostLacks, listing
from ktc.foundation import versions
from ktc.model.checkpoint import CheckpointIndex, Step, WeightSource
from ktc.model.checkpoint.gguf_types import UNREADABLE
from ktc.stages.capture.gguf_names import Choices, GgufPlace, gguf_places

# Frequencies that transformers computes from config.json.
_COMPUTED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_LAYER = re.compile(r"blk\.(\d+)\.")
FLOATS = ("bf16", "f16", "f32", "f64")
# Settings of the architecture that shapes do not show, with their names in config.json.
_SETTINGS: Mapping[str, str] = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "expert_used_count": "num_experts_per_tok",
}
_OLDEST_GGUF = (0, 19)  # first version that dequantises every readable type in `BLOCK_TYPES`
_LATENT = "deepseek2"  # its files may count the heads of attention in latent space


@dataclass(frozen=True, slots=True)
class GgufMap:
    """The rows in the order of the bytes, the problems, and the notes."""

    sources: tuple[WeightSource, ...]
    problems: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]


def map_gguf(model: PreTrainedModel, index: CheckpointIndex) -> GgufMap:
    """Return the rows by which the GGUF file behind `index` fills `model`.

    Raises `InputRefused` (I122) for an unsupported architecture, `HostLacks` (H230) without the `gguf` package.
    """
    assert index.gguf is not None, "only a GGUF file has settings"
    _require_gguf()
    architecture = str(index.gguf["general.architecture"])
    config = model.config.get_text_config()
    choices = gguf_places(model, architecture)
    chosen = {target: _first_there(ways, index) for target, ways in choices.items()}
    tied = cast("Mapping[str, str]", getattr(model, "all_tied_weights_keys", None) or {})
    copies = {place.name for copy in tied for place in chosen.get(copy) or ()}
    warnings = list(_settle_tied(chosen, tied))
    problems = list(_contradictions(index, architecture, config))
    targets = cast("Mapping[str, Tensor]", model.state_dict())
    rows: dict[str, WeightSource] = {}
    for target, places in chosen.items():
        if places is None and target not in tied:
            problems.append(_missing(index, target, targets[target], choices[target]))
        for place in places or ():
            row = rows[place.name] = _row(index, place, targets[target])
            problems += _misfits(row, targets[target])
    named = {place.name for ways in choices.values() for way in ways for place in way}
    unasked, left = _others(index, rows.keys() | copies | _COMPUTED, named, config.num_hidden_layers)
    problems += [_unknown(index, name, architecture) for name in unasked]
    ordered = tuple(rows[name] for name in index.tensors if name in rows)
    return GgufMap(ordered, tuple(problems), (*warnings, *_not_loaded(left)))


def _require_gguf() -> None:
    version = versions.installed("gguf")
    if version is None or versions.release(version) < _OLDEST_GGUF:
        state = (
            "is not installed" if version is None else f"is {version} here, {versions.dotted(_OLDEST_GGUF)} at least"
        )
        message = f"GGUF files are read with the package `gguf`, which {state}"
        raise HostLacks(Diagnostic("H230", message, hint="`pip install 'ktc[gguf]'`"))


def _first_there(ways: Choices, index: CheckpointIndex) -> tuple[GgufPlace, ...] | None:
    return next((way for way in ways if way and all(place.name in index.tensors for place in way)), None)


def _settle_tied(chosen: dict[str, tuple[GgufPlace, ...] | None], tied: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Select the source of each pair of tied tensors: either may be in the file; with both, the copy is not read."""
    for copy, original in tied.items():
        places = chosen.get(copy)
        if places is None:
            continue
        chosen[copy] = None
        if chosen.get(original) is None:
            chosen[original] = tuple(replace(place, target=original) for place in places)
            continue
        yield not_read(places[0].name, copy)


def not_read(name: str, target: str) -> Diagnostic:
    """Return the warning (I118) about a stored tensor beside the one that it is tied to."""
    message = f"`{name}` is not read: config.json ties `{target}` to another tensor of the checkpoint"
    hint = "if the two differ, set `tie_word_embeddings` to false in config.json"
    return Diagnostic("I118", message, hint=hint, severity="warning")


def _contradictions(index: CheckpointIndex, architecture: str, config: PreTrainedConfig) -> Iterator[Diagnostic]:
    """Yield the contradictions between the file's settings and config.json."""
    for setting, field in _SETTINGS.items():
        name = f"{architecture}.{setting}"
        stored, expected = (index.gguf or {}).get(name), getattr(config, field, None)
        if stored is None or expected is None or (architecture == _LATENT and field == "num_key_value_heads"):
            continue
        if stored != expected:
            message = f"the GGUF file has `{name}` = {stored!s:.40}, config.json has `{field}` = {expected}"
            yield Diagnostic("I116", message, hint="use config.json of the model that was converted")


def _row(index: CheckpointIndex, place: GgufPlace, target: Tensor) -> WeightSource:
    entry = index.tensors[place.name]
    as_vector = entry.shape == tuple(target.shape[1:]) and target.shape[0] == 1  # some converters drop sizes of 1
    return WeightSource(
        target=place.target,
        expert=None,
        part=place.part,
        source_key=entry.name,
        file=entry.file,
        dtype=entry.dtype,
        shape=entry.shape,
        transform="copy" if place.part is None else "per_expert",
        steps=(Step("unsqueeze", (0,)),) if as_vector else place.steps,
        span=place.span,
        stride=place.stride,
        viewed=place.viewed,
    )


def _misfits(row: WeightSource, target: Tensor) -> Iterator[Diagnostic]:
    expected = list(row.viewed or target.shape)
    if row.span is not None:
        expected[row.span.dim] = row.span.length
    try:
        yielded: list[int] | None = list(row.loaded_shape)
    except ValueError:  # an inapplicable step
        yielded = None
    if yielded != expected:
        stored = f"which yields {yielded}, expected {expected}" if yielded and row.steps else f"expected {expected}"
        message = f"tensor `{row.source_key}` in `{row.file}` has shape {list(row.shape)}, {stored}"
        yield Diagnostic("I116", message, hint="use config.json of the model that was converted")
    if row.dtype in UNREADABLE or (row.block is None and row.dtype not in FLOATS):
        message = f"tensor `{row.source_key}` is stored as {row.dtype}, which ktc does not read as weights"
        yield Diagnostic("I117", message, hint="use a file of another quantisation")


def _missing(index: CheckpointIndex, target: str, tensor: Tensor, ways: Choices) -> Diagnostic:
    names = " or ".join(" and ".join(f"`{place.name}`" for place in way) for way in ways if way)
    if not names:
        message = f"`{target}` {list(tensor.shape)} has no name in this architecture's GGUF files"
        return Diagnostic("I122", message, hint="use the model's safetensors")
    message = f"the GGUF file lacks {names}, for `{target}` {list(tensor.shape)}"
    return Diagnostic("I115", message, hint=_named(index))


def _named(index: CheckpointIndex) -> str:
    name = (index.gguf or {}).get("general.name")
    named = f"the file calls its model `{name!s:.60}`; " if name else ""
    return f"{named}use config.json of the model that was converted"


def _others(
    index: CheckpointIndex, used: Collection[str], named: Collection[str], layers: int
) -> tuple[list[str], list[str]]:
    """Return the remaining tensors: those not allowed in the model's own layers, and those to report."""
    unknown: list[str] = []
    left: list[str] = []
    for name in index.tensors:
        layer = _LAYER.match(name)
        if name in used:
            continue
        beyond = layer is not None and int(layer[1]) >= layers  # layers that predict further tokens
        (left if beyond or name in named else unknown).append(name)
    return unknown, left


def _unknown(index: CheckpointIndex, name: str, architecture: str) -> Diagnostic:
    message = f"tensor `{name}` in `{index.tensors[name].file}` is unknown in `{architecture}` files"
    return Diagnostic("I122", message, hint="use config.json of the model that was converted, or its safetensors")


def _not_loaded(left: Sequence[str]) -> Iterator[Diagnostic]:
    if left:
        message = f"the model has no place for {listing(left, 3)}; {len(left)} tensors of the GGUF file are not loaded"
        yield Diagnostic("I118", message, severity="warning")
