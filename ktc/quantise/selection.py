"""Which tensors of a checkpoint are quantised, and the list of the modules that are not.

In: the headers, the stock model on meta, a scheme and what of the model is meant. Out: a frozen `Selection`. The list
has a pattern per kind of module, with any number for a layer's, and is complete: it names every module with a matrix
that stays, and no module that does not.
Refused: experts that are stored as stacks, and no weight to quantise (Q502), and rows that the scheme's groups do not
divide (Q503), all together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from ktc.adapters.base_model import BaseModel
from ktc.checkpoint.header import TensorEntry
from ktc.checkpoint.index import CheckpointIndex
from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.hf.conversions import Place, placer
from ktc.quantise.scheme import Scheme

Modules = Literal["experts", "linears"]
"""The routed experts alone, or all linear layers but the head and routers too."""
_FLOATS: Final = ("bf16", "f16", "f32")
_WEIGHT: Final = ".weight"
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors to quantise, by name, and `ignored`: names and patterns of the modules with other matrices."""

    tensors: Mapping[str, TensorEntry]
    ignored: tuple[str, ...]


def select(base: BaseModel, index: CheckpointIndex, scheme: Scheme, modules: Modules) -> Selection:
    """Decide what `scheme` is applied to. Raises InputRefused (Q502, Q503)."""
    targets: dict[str, Tensor] = base.model.state_dict()
    find = placer(base.model, targets)
    linears = _linears(base) if modules == "linears" else frozenset[str]()
    chosen: dict[str, TensorEntry] = {}
    stacks: list[str] = []
    for entry in index.tensors.values():
        place = find(entry.name)
        if not isinstance(place, Place):
            continue
        target = base.targets.get(place.target)
        if target is not None and target.experts and len(entry.shape) == 3:
            stacks.append(entry.name)
        elif len(entry.shape) != 2 or not entry.name.endswith(_WEIGHT) or entry.dtype not in _FLOATS:
            continue
        elif (target is not None and target.experts) or place.target in linears:
            chosen[entry.name] = entry
    if stacks or not chosen:
        raise InputRefused(_nothing(base, stacks))
    problems = [_undivided(entry, scheme) for entry in chosen.values() if entry.shape[1] % _size(entry, scheme)]
    if problems:
        raise InputRefused(*problems[:10])
    return Selection(chosen, _ignored(index.tensors.values(), chosen))


def _size(entry: TensorEntry, scheme: Scheme) -> int:
    return max(1, entry.shape[1]) if scheme.group == -1 else scheme.group


def _linears(base: BaseModel) -> frozenset[str]:
    """Return the weights of linear layers that may be quantised: not the head, and no router."""
    model: Any = base.model
    head = model.get_output_embeddings()
    experts = {target.experts for target in base.targets.values() if target.experts}
    return frozenset(
        f"{name}{_WEIGHT}"
        for name in base.linears
        if (module := model.get_submodule(name)) is not head and module.weight.shape[0] not in experts
    )


def _ignored(entries: Iterable[TensorEntry], chosen: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Return patterns of the modules with a matrix that stays; names where a pattern would meet one that does not."""
    kept = [
        entry.name.removesuffix(_WEIGHT)
        for entry in entries
        if entry.name.endswith(_WEIGHT) and len(entry.shape) > 1 and entry.name not in chosen
    ]
    quantised = [name.removesuffix(_WEIGHT) for name in chosen]
    by_pattern: dict[str, list[str]] = {}
    for name in kept:
        by_pattern.setdefault(_pattern(name), []).append(name)
    ignored: list[str] = []
    for pattern, names in by_pattern.items():
        meets = re.compile(pattern.removeprefix("re:"))
        plain = len(names) == 1 or any(meets.match(name) for name in quantised)
        ignored += names if plain else [pattern]
    return tuple(ignored)


def _pattern(module: str) -> str:
    return "re:" + r"\d+".join(re.escape(part) for part in _NUMBER.split(module)) + "$"


# What is refused -------------------------------------------------------------------------------------------------
def _nothing(base: BaseModel, stacks: list[str]) -> Diagnostic:
    if stacks:
        message = f"the experts of `{base.name}` are stored as stacks ({listing(stacks, 2)}), and INT4 as matrices"
        hint = "save the model with transformers, which writes a matrix per expert"
    else:
        message = f"`{base.name}` has no weight to quantise: no stored matrix is one of routed experts"
        hint = "`--modules linears` takes all linear layers"
    return Diagnostic("Q502", message, hint=hint)


def _undivided(entry: TensorEntry, scheme: Scheme) -> Diagnostic:
    message = f"groups of {scheme.group} do not divide the {entry.shape[1]} columns of `{entry.name}`"
    return Diagnostic("Q503", message, hint="`--scheme int4-channel` has one scale per row")
