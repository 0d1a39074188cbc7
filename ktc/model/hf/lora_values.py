"""The values of a `LoraConfig` in JSON: whether LoRA can have them, and whether the adapter's tensors have its ranks.

In: the JSON object. Out: its faults, each with the field. PEFT's own class checks no types: a rank of 1,000,000,000
allocates before a tensor is read, and `megatron_core` names a module that is imported.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from ktc.model.checkpoint.header import TensorEntry

LONGEST_PATTERN: Final = 10_000  # characters of a name or of a regular expression
_TASKS: Final = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_SMALL_RANK: Final = 4096  # that a file without factors may have: its config allocates none, or a small one
_Test = Callable[[object], bool]


def value_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields whose values LoRA cannot have. `peft_type` has been checked."""
    for name in ("r", "lora_alpha"):
        if name not in config:
            yield f"`{name}` is missing"
    for name, (fits, wanted) in _FIELDS.items():
        if name in config and not fits(config[name]):
            yield f"`{name}` is {reprlib.repr(config[name])}, expected {wanted}"
    if config.get("megatron_config"):
        yield "`megatron_config` is set, which makes PEFT import a module that the file names"


def reason_against(config: Mapping[str, Any]) -> str:
    """Return why an adapter with this config does not attach, or ""."""
    if config.get("layer_replication"):
        return "`layer_replication` repeats layers, of which a compiled model has each one once"
    if str(config.get("init_lora_weights")).startswith("pissa_niter"):
        return "peft draws random numbers for `pissa_niter` whenever it loads, and they are not those of the training"
    return ""


def patterns_of(config: Mapping[str, Any]) -> list[str]:
    """Return the values of a valid config that PEFT uses as regular expressions for names of modules."""
    single = (config.get(name) for name in ("target_modules", "exclude_modules"))
    layers: object = config.get("layers_pattern")
    of_layers = cast("list[str]", layers) if isinstance(layers, list) else [layers]
    by_name = (value for name, value in config.items() if name.endswith("_pattern"))
    keys = (key for entry in by_name if isinstance(entry, dict) for key in cast("dict[str, Any]", entry))
    return [entry for entry in (*single, *of_layers, *keys) if isinstance(entry, str)]


def is_factor(name: str) -> bool:
    """Return whether a tensor in the file of a LoRA adapter has the rank as one of its sizes."""
    return name.removesuffix(".weight").endswith((".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B"))


def rank_fault(config: Mapping[str, Any], factors: Iterable[TensorEntry]) -> str:
    """Return the rank that the factors contradict, or "".

    PEFT allocates by the config before it reads the file. The ranks of stacked experts are concatenated, on
    either axis: a rank divides an axis of every factor of its layers.
    """
    ranks = {int(config["r"]), *cast("Mapping[str, int]", config.get("rank_pattern") or {}).values()}
    largest = 0
    for entry in factors:
        if not any(size and size % rank == 0 for rank in ranks for size in entry.shape):
            return f"`{entry.name}` has the sizes {list(entry.shape)}, and no rank of the config divides one"
        largest = max(largest, *entry.shape)
    return f"no tensor has the rank {max(ranks)}" if max(ranks) > (largest or _SMALL_RANK) else ""


def _whole(low: int) -> _Test:
    return lambda value: type(value) is int and low <= value <= 1 << 20


def _is_number(value: object) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 53
    return type(value) is float and math.isfinite(value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_PATTERN


def _is_truth(value: object) -> bool:
    return type(value) is bool


def _list_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, cast("Sequence[object]", value)))


def _object_of(test: _Test) -> _Test:
    def fits(value: object) -> bool:
        items = cast("dict[object, object]", value).items() if isinstance(value, dict) else [(None, None)]
        return all(_is_name(key) and test(item) for key, item in items)

    return fits


def _optional(*tests: _Test) -> _Test:
    return lambda value: value is None or any(test(value) for test in tests)


_FIELDS: Final[Mapping[str, tuple[_Test, str]]] = {
    "r": (_whole(1), "a rank"),
    "lora_alpha": (_is_number, "a finite number"),
    "lora_dropout": (lambda value: _is_number(value) and 0 <= cast("float", value) <= 1, "a number from 0 to 1"),
    "rank_pattern": (_optional(_object_of(_whole(1))), "an object of ranks"),
    "alpha_pattern": (_optional(_object_of(_is_number)), "an object of finite numbers"),
    "bias": (lambda value: value in ("none", "all", "lora_only"), "`none`, `all` or `lora_only`"),
    "init_lora_weights": (_optional(_is_truth, _is_name), "a truth value or a name"),
    "task_type": (lambda value: value is None or value in _TASKS, f"one of {', '.join(_TASKS)}"),
    "layers_to_transform": (_optional(_whole(0), _list_of(_whole(0))), "numbers of layers"),
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_pattern"),
        (_optional(_is_name, _list_of(_is_name)), "a text or several"),
    ),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (_optional(_list_of(_is_name)), "a list of texts")),
    **dict.fromkeys(
        ("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias", "inference_mode"),
        (_is_truth, "a truth value"),
    ),
    **dict.fromkeys(("base_model_name_or_path", "revision", "peft_version"), (_optional(_is_name), "a text")),
}  # fmt: skip
