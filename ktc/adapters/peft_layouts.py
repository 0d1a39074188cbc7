"""Adapters in PEFT's layouts.

In: factors. Out: the tensors and the `adapter_config.json` of a layout. Layers that share a name with the projections
of experts are named by their weights: peft 0.19 and newer take such names in `target_modules` for the routed experts.
Families whose names it does not take have the stacks in `target_parameters`, with experts one by one in the file.
Refused (A606): experts one by one for a model whose experts PEFT reads stacked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from peft import LoraConfig
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ktc.adapters.base_model import BaseModel, Target
from ktc.adapters.factors import Factors, Layout, halves, packed
from ktc.adapters.layouts import SWAPPED_SINCE, key_of
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import versions
from ktc.model.checkpoint.adapter_uses import only_stacked
from ktc.model.hf.conversions import adapted_one_by_one
from ktc.model.hf.expert_layout import EXPERT_LAYERS

EXPERT_NAMES = frozenset({"gate", *EXPERT_LAYERS})
# The release that a config names, if the fused layouts cannot be distinguished otherwise.
_WRITTEN_BY: Mapping[Layout, str] = {"peft-fused": "0.19.0", "per-expert": "0.19.0", "peft-fused-018": "0.18.1"}


@dataclass(frozen=True, slots=True)
class Written:
    """The content of an adapter folder, and notes for its user."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...]


def written(adapter_config: Mapping[str, Any], factors: Iterable[Factors], base: BaseModel, layout: Layout) -> Written:
    """Return the adapter of these `factors` in a layout; `adapter_config` supplies the unchanged settings."""
    factors = tuple(factors)
    plain = [weight for weight in factors if not weight.target.experts]
    stacks = [weight for weight in factors if weight.target.experts]
    notes: list[str] = []
    if stacks and layout == "per-expert":
        stacks = _even(stacks, base, notes)
        tensors, names = _one_by_one(stacks, base)
    else:
        tensors, names = _fused(stacks, layout), []
    for weight in plain:
        tensors[key_of(weight.target.module, "lora_A")] = weight.a.contiguous()
        tensors[key_of(weight.target.module, "lora_B")] = weight.b.contiguous()
    config = _config(adapter_config, plain, stacks, base, layout, names)
    if adapter_config.get("lora_dropout") and not config["lora_dropout"]:
        notes.append("lora_dropout is written as 0: peft takes none for weights that are adapted by their names")
    return Written(config, tensors, tuple(notes))


# Tensors


def _fused(stacks: Sequence[Factors], layout: Layout) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    by_module: dict[str, list[Factors]] = {}
    for factors in stacks:
        by_module.setdefault(factors.target.module, []).append(factors)
    for module, adapted in by_module.items():
        # PEFT wraps the first parameter of a module innermost.
        for depth, factors in enumerate(sorted(adapted, key=lambda factors: factors.target.order, reverse=True)):
            a, b = packed(factors, layout)
            layer = module + ".base_layer" * depth
            tensors[key_of(layer, "lora_A")], tensors[key_of(layer, "lora_B")] = a, b
    return tensors


def _one_by_one(stacks: Sequence[Factors], base: BaseModel) -> tuple[dict[str, Tensor], list[str]]:
    """Return a key for each expert and projection, and the names of the projections."""
    names = _projections(base)
    tensors: dict[str, Tensor] = {}
    used: list[str] = []
    for stack in stacks:
        bs = dict(zip(("gate", "up"), halves(stack), strict=True)) if stack.target.is_gate_up else {"down": stack.b}
        for part, b in bs.items():
            used.append(names[part])
            for expert in range(stack.target.experts):
                layer = f"{stack.target.module}.{expert}.{names[part]}"
                tensors[key_of(layer, "lora_A")] = stack.a[expert].clone()
                tensors[key_of(layer, "lora_B")] = b[expert].contiguous()
    return tensors, sorted(set(used))


def _projections(base: BaseModel) -> Mapping[str, str]:
    """Return the names of gate, up and down in the model's checkpoints. Raise `InputRefused` (A606)."""
    if not (names := adapted_one_by_one(base.model)):
        message = f"experts of the adapter have no layout one by one: {only_stacked(base.model_type)}"
        raise InputRefused(Diagnostic("A606", message, hint="use `--layout peft-fused`"))
    return names


def _even(stacks: Sequence[Factors], base: BaseModel, notes: list[str]) -> list[Factors]:
    """Return stacks of one rank and one scaling for all layers with experts: this layout's config has no others."""
    r, scaling = max(stack.r for stack in stacks), stacks[0].scaling
    even: list[Factors] = []
    for stack in stacks:
        a = functional.pad(stack.a, (0, 0, 0, r - stack.r))
        b = functional.pad(stack.b * (stack.scaling / scaling), (0, r - stack.r))
        even.append(Factors(stack.target, a, b, scaling))
    if any(stack.r != r or stack.scaling != scaling for stack in stacks):
        notes.append(f"experts are brought to rank {r} and scaling {scaling:g}: in this layout all have the same")
    adapted = {stack.target.name for stack in stacks}
    leaves = {stack.target.leaf for stack in stacks}
    others = [t for t in base.targets.values() if t.experts and t.leaf in leaves and t.name not in adapted]
    for target in others:
        a = stacks[0].a.new_zeros(target.experts, r, target.in_features)
        even.append(Factors(target, a, a.new_zeros(target.experts, target.out_features, r), scaling))
    if others:
        notes.append(f"{len(others)} stacks of experts that have no adapter get zeros: this layout is of all layers")
    return even


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
    by_module = [weight for weight in plain if _goes_by_module(weight.target, base)]
    by_name = [weight for weight in plain if not _goes_by_module(weight.target, base)]
    if layout != "per-expert":
        by_name += stacks
    elif stacks and not _takes_names(base.model, expert_names):
        by_name, expert_names = by_name + [_joined(stack) for stack in stacks], ()
    named = [(weight, weight.target.module) for weight in by_module]
    named += [(weight, weight.target.name) for weight in by_name]
    leading = stacks if layout == "per-expert" and stacks else [weight for weight, _ in named]
    (r, alpha), _ = Counter((weight.r, _alpha(weight)) for weight in leading).most_common(1)[0]
    return {
        **old,
        "peft_type": "LORA",
        "task_type": old.get("task_type") or "CAUSAL_LM",
        "peft_version": _version(old, layout),
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": False,
        "lora_dropout": 0.0 if by_name or stacks else old.get("lora_dropout", 0.0),
        "target_modules": [*_shortened([weight.target.module for weight in by_module], base), *expert_names],
        "target_parameters": [weight.target.name for weight in by_name] or None,
        "rank_pattern": {name: weight.r for weight, name in named if weight.r != r},
        "alpha_pattern": {name: _alpha(weight) for weight, name in named if _alpha(weight) != alpha},
        **dict.fromkeys(("layers_to_transform", "layers_pattern", "exclude_modules"), None),
    }


def _takes_names(model: PreTrainedModel, names: Sequence[str]) -> bool:
    """Return whether PEFT takes these names of single experts' layers in `target_modules` for the stacks."""
    try:
        from peft.utils import transformers_weight_conversion as peft_conversion
    except ImportError:  # before 0.19 PEFT takes them in no family
        return True
    config = LoraConfig(target_modules=list(names))
    cast("Any", peft_conversion).convert_peft_config_for_transformers(config, model, None)
    return bool(config.target_parameters)


def _joined(stack: Factors) -> Factors:
    """Return the stack as PEFT joins it of single experts: factors of gate and up have rows of their own in A."""
    if not stack.target.is_gate_up:
        return stack
    a, b = (functional.pad(side, pad) for side, pad in ((stack.a, (0, 0, 0, stack.r)), (stack.b, (0, stack.r))))
    return Factors(stack.target, a, b, stack.scaling)


def _goes_by_module(target: Target, base: BaseModel) -> bool:
    return target.module in base.linears and target.leaf not in EXPERT_NAMES


def _alpha(factors: Factors) -> float:
    """Return an integer if the value is one up to rounding, as in configs."""
    alpha = factors.scaling * factors.r
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 * max(1.0, abs(alpha)) else alpha


def _version(old: Mapping[str, Any], layout: Layout) -> str:
    """Return the release that the old config names if it wrote this layout, otherwise one that did."""
    release = str(old.get("peft_version") or "")
    is_new = versions.release(release or "0") >= SWAPPED_SINCE
    return release if release and is_new == (layout != "peft-fused-018") else _WRITTEN_BY[layout]


def _shortened(modules: Sequence[str], base: BaseModel) -> list[str]:
    """Return `q_proj` if every layer of that name is adapted, otherwise full names."""
    not_whole = {name.rpartition(".")[2] for name in base.linears - set(modules)}
    return sorted({name if (leaf := name.rpartition(".")[2]) in not_whole else leaf for name in modules})
