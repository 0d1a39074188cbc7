"""Kinds of adapters other than LoRA: those that attach to a model, and the values that their configs can have.

In: the JSON object of a config. Out: reasons, in words. PEFT's own classes check no types and allocate by the config
before the file is read, so numbers are bounded by the sizes in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

from ktc.model.checkpoint.header import TensorEntry
from ktc.model.hf.lora_values import LONGEST_PATTERN

_NOT_ATTACHED: Final[Mapping[str, str]] = {
    "XLORA": "it mixes other adapters, whose folders its config names",
    "POLY": "every call of the model names the task",
    "MULTITASK_PROMPT_TUNING": "every call of the model names the task",
    "ADAPTION_PROMPT": "it replaces the attention modules of a few stock classes",
    "SHADOW": "it runs a second model beside this one, which batches and caches do not have",
}
_PREPENDS: Final = "it puts tokens of its own before the prompt, which batches and caches do not have"
_SMALL: Final = 4096  # of a rank or a block: what a layer may always allocate
# Fields that count steps or seed random numbers, and allocate nothing.
_NO_SIZES: Final = frozenset(
    {"total_step", "tinit", "tfinal", "deltaT", "init_warmup", "final_warmup", "mask_interval"}
)  # fmt: skip
_SEEDS: Final = ("_seed", "_key")
_DEPTH: Final = 4


def reason_against(kind: object, tensors: Iterable[TensorEntry]) -> str:
    """Return why an adapter of a kind with these tensors does not attach, or ""."""
    if kind == "LORA":
        return ""
    from peft import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING

    peft_type = next((known for known in PEFT_TYPE_TO_CONFIG_MAPPING if known.value == kind), None)
    if not isinstance(kind, str) or peft_type is None:
        return "the installed peft does not know it"
    if reason := _NOT_ATTACHED.get(kind):
        return reason
    if issubclass(cast("type", PEFT_TYPE_TO_CONFIG_MAPPING[peft_type]), PromptLearningConfig):
        return _PREPENDS
    names = [entry.name for entry in tensors]
    prefix = cast("Mapping[Any, str]", PEFT_TYPE_TO_PREFIX_MAPPING).get(peft_type, "")
    if names and not any(prefix in name for name in names):
        return f"its file has no tensor of that kind, such as `{prefix}...`"
    return ""


def value_faults(config: Mapping[str, Any], tensors: Iterable[TensorEntry]) -> Iterator[str]:
    """Yield the fields of a config, of another kind than LoRA, whose values no adapter of these tensors has."""
    largest = max((size for entry in tensors for size in entry.shape), default=0)
    for name, value in config.items():
        is_size = type(value) is int and name not in _NO_SIZES and not name.endswith(_SEEDS)
        if fault := _fault(value, _DEPTH):
            yield f"`{name:.40}` {fault}"
        elif is_size and not -1 <= value <= max(largest, _SMALL):
            yield f"`{name:.40}` is {value}, and no tensor has that size"


def _fault(value: object, depth: int) -> str:
    """Return the fault of a value of JSON, or ""."""
    if isinstance(value, str):
        return "" if len(value) <= LONGEST_PATTERN else "is a text of more than 10,000 characters"
    if type(value) is float:
        return "" if math.isfinite(value) else "is not finite"
    if type(value) is int:
        return "" if abs(value) < 1 << 53 else "is a number of more than 53 bits"
    if isinstance(value, list | dict):
        if not depth:
            return "is nested too deeply"
        inner = cast("Iterable[object]", value.values() if isinstance(value, dict) else value)
        return next((fault for item in inner if (fault := _fault(item, depth - 1))), "")
    return ""
