"""The first layers of a model on meta tensors: enough of them that every rewrite of the recipe occurs, or all.

In: the stock model of a compiled folder, its recipe, and the bytes up to which a model is kept whole. Out: the same
model with a shorter list of layers, and the part of the recipe that it has. Settings stay, so caches have room for all
layers. Ties of weights in removed layers are dropped.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from ktc.model.hf.private_api import set_tie_patterns, tie_patterns
from ktc.model.hf.stock_model import parameter_bytes
from ktc.model.manifest.manifest import Rewrite

_NUMBERED: Final = re.compile(r"^(.*?)\.(\d+)\.(.*)$")
_LEAST, _MOST = 2, 12  # layers


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The recipe of the layers that were kept, their number and that of the model; both 0 if no list was found."""

    recipe: tuple[Rewrite, ...]
    kept: int
    all: int

    @property
    def is_whole(self) -> bool:
        """Whether the model has all of its layers."""
        return self.kept == self.all


def keep_first_layers(model: nn.Module, recipe: Sequence[Rewrite], most_whole: int) -> FirstLayers:
    """Shorten `model` in place, if its tensors have over `most_whole` bytes."""
    name, layers = _layers(model, recipe)
    if layers is None:
        return FirstLayers(tuple(recipe), 0, 0)
    total = len(layers)
    if parameter_bytes(model) <= most_whole:
        return FirstLayers(tuple(recipe), total, total)
    kept = min(total, _MOST, max(_LEAST, _last_new(name, recipe) + 1))
    before = _tensor_names(model)
    del layers[kept:]
    _untie_removed(model, before)
    return FirstLayers(tuple(step for step in recipe if _number(name, step) < kept), kept, total)


def _tensor_names(model: nn.Module) -> dict[nn.Module, frozenset[str]]:
    """Return the names of the tensors of every model within a model, as each names them itself."""
    return {
        inner: frozenset(name for name, _ in (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers()))
        for inner in model.modules()
        if isinstance(inner, PreTrainedModel)
    }


def _untie_removed(model: nn.Module, before: Mapping[nn.Module, frozenset[str]]) -> None:
    """Keep, in place, the ties whose patterns match tensors that are left.

    A tie that matched nothing before stays: transformers refuses it with its own message.
    """
    for inner, left in _tensor_names(model).items():
        ties, removed = tie_patterns(inner), before[inner] - left
        kept = {
            target: source
            for target, source in ties.items()
            if not any(_matches(end, removed) and not _matches(end, left) for end in (target, source))
        }
        if kept != ties:
            set_tie_patterns(inner, kept)


def _matches(pattern: str, names: frozenset[str]) -> bool:
    return any(re.search(f"^{pattern}", name) for name in names)


def _layers(model: nn.Module, recipe: Sequence[Rewrite]) -> tuple[str, nn.ModuleList | None]:
    """Return the list of modules that holds most of the recipe."""
    lists = Counter(match[1] for step in recipe if (match := _NUMBERED.match(step.fqn)))
    for name, _ in lists.most_common(1):
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            return name, module
    return "", None


def _number(name: str, step: Rewrite) -> int:
    """Return the layer of a step; -1 outside of the layers."""
    match = _NUMBERED.match(step.fqn)
    return int(match[2]) if match is not None and match[1] == name else -1


def _last_new(name: str, recipe: Sequence[Rewrite]) -> int:
    """Return the first layer up to which every kind of step has occurred."""
    first: dict[str, int] = {}
    for step in sorted(recipe, key=lambda step: _number(name, step)):
        match = _NUMBERED.match(step.fqn)
        kind = json.dumps((step.module, step.kernel, match[3] if match else step.fqn, dict(step.args)), sort_keys=True)
        first.setdefault(kind, _number(name, step))
    return max(first.values(), default=0)
