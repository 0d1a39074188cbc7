"""Where an adapter's file keeps the factors of each weight, in any layout.

In: an `Adapter` and its `BaseModel`. Out: a `Placed` for each adapted weight, which `adapter_factors` reads. Layouts
differ for stacked experts: `peft-fused` (peft 0.19 and newer), `peft-fused-018` (A and B change places where weights
are stored (E, out, in)), `per-expert` (a key for each expert and projection), and one form for plain layers.
Refused, all together: variants of LoRA other than `W + s B A` (A604), tensors that match no weight of the model
(A603), ranks that contradict the config (A602), a layout that is ambiguous by sizes (A607).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from ktc.adapters.adapter import Adapter, require_quick_patterns
from ktc.adapters.base_model import BaseModel, Target
from ktc.adapters.factors import Layout, Placed, Slot, Whole
from ktc.adapters.folder import PREFIX, split_name
from ktc.adapters.plain import PLAIN_HINT, variants
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.hf.conversions import EXPERT_LAYERS

_EXPERT = re.compile(r"(?P<experts>.+)\.(?P<number>\d+)\.(?P<part>\w+)")
_FIT = "use the model that the adapter was trained on"
SWAPPED_SINCE = (0, 19)  # the release of peft from which A holds the inputs of (E, out, in)


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """An adapter with the weight of each of its tensors. `layout` is that of its experts; None: it has none."""

    adapter: Adapter
    base: BaseModel
    layout: Layout | None
    placed: tuple[Placed, ...]
    whole: tuple[Whole, ...] = ()  # tensors of `modules_to_save`


def place(adapter: Adapter, base: BaseModel) -> PlacedAdapter:
    """Place every tensor of the adapter at its weight. Raise `InputRefused` (A602, A603, A604, A607)."""
    problems = [_refused("A604", adapter, what, hint) for what, hint in variants(adapter.config)]
    pairs, loose = _pairs(adapter)
    whole = [_whole(adapter, base, entry) for entry in loose]
    problems += [_refused("A604", adapter, fault, PLAIN_HINT) for fault in whole if isinstance(fault, str)][:3]
    if adapter.config.get("modules_to_save") and not loose:
        problems.append(_refused("A604", adapter, "has `modules_to_save`, and its file none of them", PLAIN_HINT))
    if problems:
        raise InputRefused(*problems)
    reader = _Reader(adapter, base, frozenset(pairs))
    slots_of: dict[str, list[tuple[Slot, Target]]] = {}
    for layer, (a, b) in pairs.items():
        slot = reader.slot(layer, a, b)
        if isinstance(slot, str):
            problems.append(_refused("A603", adapter, f"of `{adapter.base}` does not fit `{base.name}`: {slot}", _FIT))
        else:
            slots_of.setdefault(slot[1].name, []).append(slot)
    if problems:
        raise InputRefused(*problems[:10])
    targets = [target for slots in slots_of.values() for _, target in slots]
    require_quick_patterns(adapter, sorted({*pairs, *slots_of, *(target.module for target in targets)}))
    layout = _layout(adapter, [pair for slots in slots_of.values() for pair in slots])
    placed = tuple(_placed(adapter, [slot for slot, _ in slots], slots[0][1], layout) for slots in slots_of.values())
    tensors = tuple(tensor for tensor in whole if isinstance(tensor, Whole))
    return PlacedAdapter(adapter, base, layout if any(weight.layout for weight in placed) else None, placed, tensors)


def _is_target_parameter(adapter: Adapter, name: str) -> bool:
    """Return whether `target_parameters` has this parameter, compared as PEFT does."""
    return f".{name}".endswith(tuple(f".{parameter}" for parameter in adapter.names("target_parameters")))


def _refused(code: str, adapter: Adapter, what: str, hint: str) -> Diagnostic:
    return Diagnostic(code, f"adapter `{adapter.folder.name}` {what}", hint=hint)


def _whole(adapter: Adapter, base: BaseModel, entry: TensorEntry) -> Whole | str:
    """Return the tensor of the model that this one of the adapter replaces, or why there is none."""
    name = entry.name.removeprefix(PREFIX)
    if not any(f".{module}." in f".{name}" for module in adapter.names("modules_to_save")):
        return f"tensor `{entry.name}` is neither a factor of a plain LoRA nor of a module in `modules_to_save`"
    tensors: Mapping[str, Tensor] = base.model.state_dict()
    if name not in tensors or tuple(tensors[name].shape) != entry.shape:
        shape = f"{list(tensors[name].shape)}" if name in tensors else "missing"
        return f"tensor `{entry.name}` is {list(entry.shape)}, and in the model it is {shape}"
    target = base.targets.get(name)
    return Whole(name, entry, target if target is not None and target.experts else None)


def _pairs(adapter: Adapter) -> tuple[Mapping[str, tuple[TensorEntry, TensorEntry]], list[TensorEntry]]:
    """Return both factors by layer, and the tensors that are not factors."""
    sides: dict[str, dict[str, TensorEntry]] = {}
    loose: list[TensorEntry] = []
    for entry in adapter.tensors:
        factor = split_name(entry.name)
        if factor is None or len(entry.shape) != 2:
            loose.append(entry)
        else:
            sides.setdefault(factor[0], {})[factor[1]] = entry
    return {layer: (pair["lora_A"], pair["lora_B"]) for layer, pair in sides.items()}, loose


# Where a pair belongs


class _Reader:
    """Finds the weight of each pair of factors, by the names of the model and the targets of the config."""

    def __init__(self, adapter: Adapter, base: BaseModel, layers: frozenset[str]) -> None:
        self._adapter, self._targets, self._layers = adapter, base.targets, layers
        self._stacks: dict[str, list[Target]] = {}
        for target in base.targets.values():
            if target.experts:
                self._stacks.setdefault(target.module, []).append(target)

    def slot(self, layer: str, a: TensorEntry, b: TensorEntry) -> tuple[Slot, Target] | str:
        """Return the pair's place, or a description of its fault."""
        bare = re.sub(r"(\.base_layer)+$", "", layer)
        if bare in self._stacks:
            return self._of_stack(bare, layer.count(".base_layer"), a, b)
        target = self._targets.get(f"{bare}.weight")
        if target is None:
            return self._of_expert(bare, a, b)
        if (a.shape[1], b.shape[0]) != (target.in_features, target.out_features) or a.shape[0] != b.shape[1]:
            sizes = f"A {list(a.shape)} and B {list(b.shape)}"
            return f"`{bare}` is {target.out_features} x {target.in_features}, its factors are {sizes}"
        return Slot(a, b), target

    def _of_stack(self, module: str, depth: int, a: TensorEntry, b: TensorEntry) -> tuple[Slot, Target] | str:
        """Return the parameter of a wrapper: PEFT wraps a module once per parameter, so the depth identifies it."""
        adapted = sorted(
            (target for target in self._stacks[module] if _is_target_parameter(self._adapter, target.name)),
            key=lambda target: target.order,
        )
        levels = sum(f"{module}{'.base_layer' * level}" in self._layers for level in range(len(adapted) + 1))
        if levels != len(adapted) or depth >= len(adapted):
            return f"`{module}` has {levels} pairs of factors, `target_parameters` names {len(adapted)} of its weights"
        target = adapted[len(adapted) - 1 - depth]
        sides = {a.shape[1], b.shape[0]}
        if sides != {target.in_features, target.out_features} or a.shape[0] != b.shape[1]:
            sizes = f"{target.experts} x {target.out_features} x {target.in_features}"
            return f"`{target.name}` is {sizes}, its factors are A {list(a.shape)} and B {list(b.shape)}"
        if a.shape[0] % target.experts:
            return f"`{target.name}` has {target.experts} experts, its factors {a.shape[0]} rows"
        return Slot(a, b), target

    def _of_expert(self, layer: str, a: TensorEntry, b: TensorEntry) -> tuple[Slot, Target] | str:
        expert = _EXPERT.fullmatch(layer)
        stacks = self._stacks.get(expert["experts"]) if expert else None
        part = EXPERT_LAYERS.get(expert["part"]) if expert else None
        if expert is None or stacks is None or part is None:
            return f"the model has no layer `{layer}`"
        leaf = "down_proj" if part == "down" else "gate_up_proj"
        target = next((stack for stack in stacks if stack.leaf == leaf), None)
        if target is None or target.interleaved or int(expert["number"]) >= target.experts:
            return f"the model has no expert `{layer}`"
        rows = target.out_features // (1 if part == "down" else 2)
        if (a.shape[1], b.shape[0]) != (target.in_features, rows) or a.shape[0] != b.shape[1]:
            sizes = f"A {list(a.shape)} and B {list(b.shape)}"
            return f"`{layer}` is {rows} x {target.in_features}, its factors are {sizes}"
        return Slot(a, b, int(expert["number"]), part), target


def _layout(adapter: Adapter, pairs: Sequence[tuple[Slot, Target]]) -> Layout:
    """Return the layout of experts: by its own key names, by sizes, and if ambiguous by the config's peft version."""
    stacked = [(slot, target) for slot, target in pairs if target.experts]
    if any(slot.part for slot, _ in stacked):
        return "per-expert"
    by_sizes = {
        "peft-fused" if slot.a.shape[1] == target.in_features else "peft-fused-018"
        for slot, target in stacked
        if not target.transposed and target.in_features != target.out_features
    }
    if len(by_sizes) == 1:
        return cast("Layout", by_sizes.pop())
    if not by_sizes and all(target.transposed for _, target in stacked):
        return "peft-fused"  # the same in all releases
    release = str(adapter.config.get("peft_version") or "")
    if by_sizes or not release:
        what = "has experts whose sizes do not distinguish A from B, and no `peft_version` that decides"
        raise InputRefused(_refused("A607", adapter, what, "write the `peft_version` that saved it into its config"))
    return "peft-fused" if versions.release(release) >= SWAPPED_SINCE else "peft-fused-018"


def _placed(adapter: Adapter, slots: Sequence[Slot], target: Target, layout: Layout) -> Placed:
    """Return the pairs of one weight with their rank and scaling. Raise `InputRefused` (A602)."""
    of_experts = layout if target.experts else None
    stack = target.experts if of_experts and of_experts != "per-expert" else 1
    ranks = {slot.a.shape[0] // stack for slot in slots}
    keys = sorted({_key(adapter, slot, target, of_experts) for slot in slots})
    asked = {int(_by_pattern(adapter.config.get("rank_pattern"), key, adapter.r)) for key in keys}
    alphas = {float(_by_pattern(adapter.config.get("alpha_pattern"), key, adapter.lora_alpha)) for key in keys}
    if ranks != asked or len(asked) > 1:
        in_file, in_config = (", ".join(map(str, sorted(numbers))) for numbers in (ranks, asked))
        what = f"says rank {in_config} for `{keys[0]}`, and its file has rank {in_file}"
        raise InputRefused(_refused("A602", adapter, what, "save the adapter again"))
    if len(alphas) > 1:
        what = f"has several alphas for the experts of `{target.name}`"
        raise InputRefused(_refused("A604", adapter, what, PLAIN_HINT))
    r, alpha = asked.pop(), alphas.pop()
    scaling = alpha / math.sqrt(r) if adapter.config.get("use_rslora") else alpha / r
    return Placed(target, r, scaling, tuple(slots), of_experts)


def _key(adapter: Adapter, slot: Slot, target: Target, layout: Layout | None) -> str:
    """Return the name that `rank_pattern` and `alpha_pattern` match: that of the module, or of the parameter."""
    if layout == "per-expert":
        return (split_name(slot.a.name) or (target.name, ""))[0]
    return target.name if target.experts or _is_target_parameter(adapter, target.name) else target.module


def _by_pattern(patterns: object, key: str, default: float) -> float:
    from peft.utils.other import get_pattern_key  # the comparison is PEFT's own

    known = cast("dict[str, float]", patterns) if isinstance(patterns, dict) else {}
    pattern = cast("str", cast("Any", get_pattern_key)(known.keys(), key))
    return known.get(pattern, default)


def key_of(layer: str, side: str) -> str:
    """Return the name of a factor in the file."""
    return f"{PREFIX}{layer}.{side}.weight"
