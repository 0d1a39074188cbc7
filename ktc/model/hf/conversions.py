"""The destination of a checkpoint's tensor by name: transformers' own conversion mapping, read but not run.

Input: the stock model on meta. Output: a function from a checkpoint name to a `Place`, and names of experts. Supported
are renamings, the stacking of experts, `Concatenate` of several tensors, `Transpose`, `Interleave`, `PermuteForRope`,
and `Chunk` of one tensor into several; other chains are `Unmappable`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,  # pyright: ignore[reportUnknownVariableType]
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,  # pyright: ignore[reportUnknownVariableType]
)
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from ktc.model.checkpoint import Part, Step
from ktc.model.hf.expert_layout import EXPERT_LAYERS, is_interleaved, one_expert

STACKED_PARTS: Mapping[str, Part] = {
    "gate_up_proj": "gate_up",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj_bias": "gate_up_bias",
    "up_proj_bias": "up_bias",
    "down_proj_bias": "down_bias",
}
"""The contents of the stacked tensor of an experts module, by its own name."""


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of a tensor.

    `expert` and `part` identify a slice of a stack of experts. `joined` is (dimension, index, number of parts) if
    several tensors are concatenated to the target.
    """

    target: str
    expert: int | None = None
    part: Part | None = None
    steps: tuple[Step, ...] = ()
    joined: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """The destinations of a tensor that holds several parameters, such as those of q, k and v."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Unmappable:
    """The reason why a name has no destination."""

    reason: str


Placed: TypeAlias = Place | Split | Unmappable


def renamings_and_converters(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return both kinds of steps of transformers' conversion mapping."""
    mapping = get_model_conversion_mapping(model)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    return renamings, [step for step in mapping if isinstance(step, WeightConverter)]


def placer(model: PreTrainedModel, targets: dict[str, Tensor]) -> Callable[[str, Sequence[int]], Placed]:
    """Return a function from a checkpoint's name and shape to its place among `targets`, the model's state dict."""
    renamings, converters = renamings_and_converters(model)
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    prefix = model.base_model_prefix

    def place(name: str, shape: Sequence[int]) -> Placed:
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if target not in targets and name in targets:  # a renaming for another file's names
            return Place(name)
        if pattern is None:
            single = None if target in targets else _of_one_expert(model, name, targets, renamings, converters)
            return single or Place(target)
        converter = by_pattern[pattern]
        renamed, _ = rename_source_key(name, renamings, [], prefix, None)
        number = re.search(pattern.replace("*", r"(\d+)"), renamed) if "*" in pattern else None
        which = converter.source_patterns.index(pattern)
        if _is_checked_transpose(converter) and target in targets and tuple(shape) == tuple(targets[target].shape):
            return Place(target)
        if number is None and len(converter.source_patterns) == 1:
            return _of_one_tensor(converter, target, model.config)
        expert = number and int(number[1])
        if expert is not None and (split := _of_groups(converter, which, target, expert, targets)):
            return split
        return _of_several(converter, which, target, expert) or _unmappable(converter)

    return place


def _of_one_expert(
    model: PreTrainedModel, name: str, targets: dict[str, Tensor], renamings: list[WeightRenaming],
    converters: list[WeightConverter],
) -> Place | Unmappable | None:  # fmt: skip
    """Return the place of one expert's matrix in a family whose files have stacks; `None` for another name.

    Quantised files have such matrices, since their formats describe single layers.
    """
    single = one_expert(name)
    for stack in single.stacks if single is not None else ():
        target, _ = rename_source_key(stack, renamings, converters, model.base_model_prefix, targets)
        if single is not None and target in targets and targets[target].dim() == 3:
            if target.endswith("gate_up_proj") and is_interleaved(model.get_submodule(target.rpartition(".")[0])):
                return Unmappable(f"is one expert's {single.part}, and rows of gate and up alternate in this model")
            return Place(target, single.expert, single.part)
    return None


def _unmappable(converter: WeightConverter) -> Unmappable:
    chain = ", ".join(spelled(operation) for operation in converter.operations)
    return Unmappable(f"needs a conversion that ktc does not do: {chain}")


def _of_several(converter: WeightConverter, which: int, target: str, number: int | None) -> Place | None:
    """Return the place of the `which`-th source of a chain of operations; `None` for an unknown chain."""
    chain = tuple(spelled(operation) for operation in converter.operations)
    sources, leaf = len(converter.source_patterns), target.rpartition(".")[2]
    if len(converter.target_patterns) != 1:
        return None
    if number is not None:
        if chain == ("MergeModulelist(0)", "Concatenate(1)") and sources == 2 and leaf == "gate_up_proj":
            return Place(target, number, "gate" if which == 0 else "up")
        part = STACKED_PARTS.get(leaf)
        return Place(target, number, part) if chain == ("MergeModulelist(0)",) and part in ("up", "down") else None
    operation = converter.operations[0]
    if len(chain) == 1 and type(operation).__name__ == "Concatenate":
        return Place(target, joined=(int(vars(operation)["dim"]), which, sources))
    return None


def _of_groups(
    converter: WeightConverter, which: int, target: str, number: int, targets: Mapping[str, Tensor]
) -> Place | None:
    """Return the place of an expert where the file counts the experts of text and of images together, text first."""
    if [type(operation).__name__ for operation in converter.operations] != ["ErnieFuseAndSplitTextVisionExperts"]:
        return None
    first = converter.target_patterns[0]
    if target not in targets:
        return None
    group, expert = divmod(number, targets[target].shape[0])
    if group >= len(converter.target_patterns):
        return None
    part = ("gate", "up")[which] if len(converter.source_patterns) == 2 else "down"
    return Place(target.replace(first, converter.target_patterns[group]), expert, part)


def _of_one_tensor(converter: WeightConverter, target: str, config: PreTrainedConfig) -> Placed:
    """Return the place of a tensor that a chain of operations changes, or splits into those of several parameters."""
    first, *others = converter.target_patterns
    chains = [_steps(converter, number, config) for number in range(1 + len(others))]
    names = [target, *(target.replace(first, pattern) for pattern in others)]
    splits = any(type(operation).__name__ == "Chunk" for operation in converter.operations)
    places = tuple(Place(name, steps=chain) for name, chain in zip(names, chains, strict=True) if chain is not None)
    if len(places) != len(chains) or splits != bool(others) or len(set(names)) != len(names):
        return _unmappable(converter)
    return Split(places) if others else places[0]


def _is_checked_transpose(converter: WeightConverter) -> bool:
    """Return whether transformers transposes a tensor only if its shape is not the target's already."""
    checked = (vars(operation).get("check_dims") for operation in converter.operations)
    return len(converter.operations) == 1 and any(checked)


def _steps(converter: WeightConverter, number: int, config: PreTrainedConfig) -> tuple[Step, ...] | None:
    """Return the changes of layout between a tensor and its `number`-th target; `None` for an unknown operation."""
    count = len(converter.target_patterns)
    steps: list[Step] = []
    for operation in converter.operations:
        settings: dict[str, Any] = vars(operation)
        match type(operation).__name__:
            case "Transpose":
                steps.append(Step("transpose", (settings["dim0"], settings["dim1"])))
            case "Interleave" if not settings.get("inverse"):
                steps.append(Step("deinterleave", (settings["dim"],)))
            case "Chunk" if settings["num_shards_attribute"] is None:
                steps.append(Step("chunk", (settings["dim"], number, count)))
            case "PermuteForRope" if not settings["inverse"]:
                pattern = converter.target_patterns[number] if count > 1 else converter.source_patterns[0]
                named = settings["permute_layer_names"]
                if named is None or any(name in pattern for name in named):
                    part = getattr(config, settings["subconfig_key"] or "", config)
                    steps.append(Step("deinterleave_runs", (0, int(getattr(part, "num_attention_heads", 1)))))
            case _:
                return None
    return tuple(steps)


def spelled(operation: ConversionOps) -> str:
    """Return the operation and its dimension, such as `Concatenate(1)`."""
    return f"{type(operation).__name__}({getattr(operation, 'dim', '')})"


def loads_single_experts(model: PreTrainedModel) -> bool:
    """Return whether transformers fills the experts of `model` from quantised matrices of single experts."""
    modules = {type(module).__name__ for module in model.modules()}
    return bool(names_one_by_one(model)) or bool(modules & MODULES_TO_PATCH_FOR_QUANTIZATION.keys())


def names_one_by_one(model: PreTrainedModel) -> Mapping[str, str]:
    """Return the checkpoint's names of gate, up and down of one expert, or nothing if it keeps experts stacked."""
    names: dict[str, str] = {}
    for step in renamings_and_converters(model)[1]:
        if "MergeModulelist" in [type(operation).__name__ for operation in step.operations]:
            leaves = (pattern.removesuffix(".weight").rpartition(".")[2] for pattern in step.source_patterns)
            names |= {EXPERT_LAYERS[leaf]: leaf for leaf in leaves if leaf in EXPERT_LAYERS}
    return names if names.keys() == {"gate", "up", "down"} else {}


def adapted_one_by_one(model: PreTrainedModel) -> Mapping[str, str]:
    """Return the names of one expert's matrices in adapters that PEFT stacks as it reads them, or nothing.

    PEFT stacks none where transformers has no conversions for the whole model's type, as with the towers of Qwen3.5.
    """
    model_type = str(model.config.model_type)
    return names_one_by_one(model) if get_checkpoint_conversion_mapping(model_type) is not None else {}
