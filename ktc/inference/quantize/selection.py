"""Which tensors of a checkpoint are quantised, and the list of the modules that are not.

In: the headers, the stock model on meta, a scheme and what of the model is meant. Out: a frozen `Selection`. The list
has a pattern per kind of module, with any number for a layer's, and is complete: it names every module with a matrix
that stays, and no module that does not.
Refused: no weight to quantise (Q502), and rows that the scheme's groups do not divide (Q503), all together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ktc.adapters.base_model import BaseModel
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.quantize.expert_matrices import FLOATS
from ktc.inference.quantize.scheme import Scheme
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.index import CheckpointIndex
from ktc.model.hf.conversions import Place, placer
from ktc.model.hf.stock_model import text_tower

Modules = Literal["experts", "linears", "trained"]
"""The routed experts alone, or all linear layers but the head and routers too, or what training rounded."""
_WEIGHT: Final = ".weight"
_SHOWN: Final = 4  # kinds of matrices in a message
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors to quantise, by name, and `ignored`: names and patterns of the modules with other matrices.

    `modules` has the FQN of the module of each matrix of experts or linear layers, quantised or not, by tensor.
    """

    tensors: Mapping[str, TensorEntry]
    ignored: tuple[str, ...]
    modules: Mapping[str, str]

    @property
    def taken(self) -> frozenset[str]:
        """The FQNs of the modules that are quantised."""
        return frozenset(self.modules[name] for name in self.tensors)


def select(
    base: BaseModel, index: CheckpointIndex, scheme: Scheme, modules: Modules, trained: Collection[str] = ()
) -> Selection:
    """Decide what `scheme` is applied to; `trained` are the modules that training rounded.

    Raises InputRefused (Q502, Q503).
    """
    find = placer(base.model, base.model.state_dict())
    linears = _linears(base)
    chosen: dict[str, TensorEntry] = {}
    owners: dict[str, str] = {}
    for entry in index.tensors.values():
        place = find(entry.name, entry.shape)
        if not isinstance(place, Place):
            continue
        target = base.targets.get(place.target)
        experts = target is not None and bool(target.experts)
        module = place.target.rpartition(".")[0]
        if len(entry.shape) != 2 or not entry.name.endswith(_WEIGHT) or entry.dtype not in FLOATS:
            continue
        if experts or place.target in linears:
            owners[entry.name] = module
            if module in trained if modules == "trained" else experts or modules == "linears":
                chosen[entry.name] = entry
    if not chosen:
        raise InputRefused(_nothing(base, modules))
    undivided = [entry for entry in chosen.values() if entry.shape[1] % _size(entry, scheme)]
    if undivided:
        raise InputRefused(_undivided(undivided, scheme))
    return Selection(chosen, _ignored(index.tensors.values(), chosen), owners)


def _size(entry: TensorEntry, scheme: Scheme) -> int:
    return max(1, entry.shape[1]) if scheme.group == -1 else scheme.group


def _linears(base: BaseModel) -> frozenset[str]:
    """Return the weights of linear layers that may be quantised: not the head, no router, no gate of one output,
    and none of a tower.

    Engines keep routers and the gate of shared experts in full precision, and ignore codes for them.
    """
    model: Any = base.model
    head, of_text = model.get_output_embeddings(), set(map(id, text_tower(model).modules()))
    kept = {1, *(target.experts for target in base.targets.values() if target.experts)}
    return frozenset(
        f"{name}{_WEIGHT}"
        for name in base.linears
        if (module := model.get_submodule(name)) is not head
        and id(module) in of_text
        and module.weight.shape[0] not in kept
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
def _nothing(base: BaseModel, modules: Modules) -> Diagnostic:
    if modules == "trained":
        message = f"nothing says that training rounded weights of `{base.name}`"
        hint = "name the compiled model that was trained, or what to quantise: `--modules experts`"
    else:
        message = f"`{base.name}` has no weight to quantise: no stored matrix is one of routed experts"
        hint = "`--modules linears` takes all linear layers"
    return Diagnostic("Q502", message, hint=hint)


def _undivided(entries: Iterable[TensorEntry], scheme: Scheme) -> Diagnostic:
    """Name each kind of matrix once, with `*` for the numbers of layers and experts."""
    columns = {_NUMBER.sub("*", entry.name): entry.shape[1] for entry in entries}
    kinds = ", ".join(f"the {count} columns of `{name}`" for name, count in list(columns.items())[:_SHOWN])
    more = f", and those of {len(columns) - _SHOWN} other kinds" if len(columns) > _SHOWN else ""
    message = f"groups of {scheme.group} do not divide {kinds}{more}"
    return Diagnostic("Q503", message, hint="`--scheme int4-channel` has one scale per row")
