"""Adapters written in PEFT's layouts: in factors, out the tensors and the `adapter_config.json` of a layout.

Layers that share a name with the projections of experts go by their weights, since peft 0.19 and newer take such names
in `target_modules` for the routed experts. Refused (A606): experts one by one for a model that keeps them stacked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ktc.adapters.base_model import BaseModel, Target
from ktc.adapters.factors import Factors, Layout, halves, packed
from ktc.adapters.layouts import SWAPPED_SINCE, key_of
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.model.checkpoint.adapter_uses import keeps_stacked
from ktc.model.hf.conversions import EXPERT_LAYERS, names_one_by_one

EXPERT_NAMES = frozenset({"gate", *EXPERT_LAYERS})
# The release that a config names, if the fused layouts cannot be distinguished otherwise.
_WRITTEN_BY: Mapping[Layout, str] = {"peft-fused": "0.19.0", "per-expert": "0.19.0", "peft-fused-018": "0.18.1"}


@dataclass(frozen=True, slots=True)
class Written:
    """The content of an adapter folder, and what its user should know of it."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...]


def written(adapter_config: Mapping[str, Any], factors: Iterable[Factors], base: BaseModel, layout: Layout) -> Written:
    """Return the adapter of these `factors` in a layout; `adapter_config` supplies the unchanged settings."""
    factors = tuple(factors)
    plain = [each for each in factors if not each.target.experts]
    stacks = [each for each in factors if each.target.experts]
    notes: list[str] = []
    if stacks and layout == "per-expert":
        stacks = _even(stacks, base, notes)
        tensors, names = _one_by_one(stacks, base)
    else:
        tensors, names = _fused(stacks, layout), []
    for each in plain:
        tensors[key_of(each.target.module, "lora_A")] = each.a.contiguous()
        tensors[key_of(each.target.module, "lora_B")] = each.b.contiguous()
    config = _config(adapter_config, plain, stacks, base, layout, names)
    if adapter_config.get("lora_dropout") and not config["lora_dropout"]:
        notes.append("lora_dropout is written as 0: peft takes none beside weights that are adapted by their names")
    return Written(config, tensors, tuple(notes))


# Tensors


def _fused(stacks: Sequence[Factors], layout: Layout) -> dict[str, Tensor]:
    """PEFT wraps the first parameter of a module innermost."""
    tensors: dict[str, Tensor] = {}
    by_module: dict[str, list[Factors]] = {}
    for each in stacks:
        by_module.setdefault(each.target.module, []).append(each)
    for module, adapted in by_module.items():
        for depth, each in enumerate(sorted(adapted, key=lambda f: f.target.order, reverse=True)):
            a, b = packed(each, layout)
            layer = module + ".base_layer" * depth
            tensors[key_of(layer, "lora_A")], tensors[key_of(layer, "lora_B")] = a, b
    return tensors


def _one_by_one(stacks: Sequence[Factors], base: BaseModel) -> tuple[dict[str, Tensor], list[str]]:
    """Return a key for each expert and projection, and the names of the projections."""
    names = _projections(base)
    tensors: dict[str, Tensor] = {}
    used: list[str] = []
    for each in stacks:
        bs = dict(zip(("gate", "up"), halves(each), strict=True)) if each.target.is_gate_up else {"down": each.b}
        for part, b in bs.items():
            used.append(names[part])
            for expert in range(each.target.experts):
                layer = f"{each.target.module}.{expert}.{names[part]}"
                tensors[key_of(layer, "lora_A")] = each.a[expert].clone()
                tensors[key_of(layer, "lora_B")] = b[expert].contiguous()
    return tensors, sorted(set(used))


def _projections(base: BaseModel) -> Mapping[str, str]:
    """Return the names of gate, up and down in the model's checkpoints. Raise `InputRefused` (A606)."""
    if not (found := names_one_by_one(base.model)):
        message = f"experts of the adapter have no layout one by one: {keeps_stacked(base.model_type)}"
        raise InputRefused(Diagnostic("A606", message, hint="use `--layout peft-fused`"))
    return found


def _even(stacks: Sequence[Factors], base: BaseModel, notes: list[str]) -> list[Factors]:
    """Stacks of one rank and one scaling, of every layer that has such: all that this layout's config can say."""
    r, scaling = max(each.r for each in stacks), stacks[0].scaling
    even = [_padded(_rescaled(each, scaling), r) for each in stacks]
    if any(each.r != r or each.scaling != scaling for each in stacks):
        notes.append(f"experts are brought to rank {r} and scaling {scaling:g}: in this layout all have the same")
    adapted = {each.target.name for each in stacks}
    leaves = {each.target.leaf for each in stacks}
    others = [t for t in base.targets.values() if t.experts and t.leaf in leaves and t.name not in adapted]
    dtype = stacks[0].a.dtype
    even += [_nothing(target, r, scaling, dtype) for target in others]
    if others:
        notes.append(f"{len(others)} stacks of experts that have no adapter get zeros: this layout is of all layers")
    return even


def _rescaled(factors: Factors, scaling: float) -> Factors:
    return replace(factors, b=factors.b * (factors.scaling / scaling), scaling=scaling)


def _padded(factors: Factors, r: int) -> Factors:
    more = r - factors.r
    pad = torch.nn.functional.pad
    return replace(factors, a=pad(factors.a, (0, 0, 0, more)), b=pad(factors.b, (0, more)))


def _nothing(target: Target, r: int, scaling: float, dtype: torch.dtype) -> Factors:
    a = torch.zeros(target.experts, r, target.in_features, dtype=dtype)
    return Factors(target, a, torch.zeros(target.experts, target.out_features, r, dtype=dtype), scaling)


# The config


def _config(
    old: Mapping[str, Any],
    plain: Sequence[Factors],
    stacks: Sequence[Factors],
    base: BaseModel,
    layout: Layout,
    expert_names: Sequence[str],
) -> dict[str, Any]:
    """Return the old config with targets, ranks and alphas of the layout; use_rslora is folded into the alphas."""
    modules = [each for each in plain if _by_module(each.target, base)]
    parameters = [each.target.name for each in plain if not _by_module(each.target, base)]
    named = [(each, each.target.module if _by_module(each.target, base) else each.target.name) for each in plain]
    if layout != "per-expert":
        parameters += [each.target.name for each in stacks]
        named += [(each, each.target.name) for each in stacks]
    leading = stacks if layout == "per-expert" and stacks else [each for each, _ in named]
    (r, alpha), _ = Counter((each.r, _alpha(each)) for each in leading).most_common(1)[0]
    by_weight = bool(parameters or stacks)
    return {
        **old,
        "peft_type": "LORA",
        "task_type": old.get("task_type") or "CAUSAL_LM",
        "peft_version": _version(old, layout),
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": False,
        "lora_dropout": 0.0 if by_weight else old.get("lora_dropout", 0.0),
        "target_modules": [*_shortened([each.target.module for each in modules], base), *expert_names],
        "target_parameters": parameters or None,
        "rank_pattern": {name: each.r for each, name in named if each.r != r},
        "alpha_pattern": {name: _alpha(each) for each, name in named if _alpha(each) != alpha},
        **dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules"), None),
    }


def _by_module(target: Target, base: BaseModel) -> bool:
    return target.module in base.linears and target.leaf not in EXPERT_NAMES


def _alpha(factors: Factors) -> float:
    """Return an integer if the value is one up to rounding, as in configs."""
    alpha = factors.scaling * factors.r
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 * max(1.0, abs(alpha)) else alpha


def _version(old: Mapping[str, Any], layout: Layout) -> str:
    """Return the release that the old config names if it wrote this layout, otherwise one that did."""
    found = str(old.get("peft_version") or "")
    is_new = versions.release(found or "0") >= SWAPPED_SINCE
    return found if found and is_new == (layout != "peft-fused-018") else _WRITTEN_BY[layout]


def _shortened(modules: Sequence[str], base: BaseModel) -> list[str]:
    """Return `q_proj` if every layer of that name is adapted, otherwise full names."""
    meant = set(modules)
    of_leaf: dict[str, set[str]] = {}
    for name in base.linears:
        of_leaf.setdefault(name.rpartition(".")[2], set()).add(name)
    whole = {leaf for leaf, names in of_leaf.items() if names <= meant}
    shown = {leaf if (leaf := name.rpartition(".")[2]) in whole else name for name in modules}
    return sorted(shown)
