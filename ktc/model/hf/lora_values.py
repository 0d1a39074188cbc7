"""The values of a `LoraConfig` in JSON: which of them LoRA can have, and which ranks the tensors of an adapter can.

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
            yield f"`{name}` is {_shown(config[name])}, expected {wanted}"
    if config.get("megatron_config"):
        yield "`megatron_config` is set, by which PEFT imports a module that the file names"


def reason_against(config: Mapping[str, Any]) -> str:
    """Return why an adapter with this config does not attach, or ""."""
    if config.get("layer_replication"):
        return "`layer_replication` repeats layers, of which a compiled model has each one once"
    if str(config.get("init_lora_weights")).startswith("pissa_niter"):
        return "peft draws random numbers for `pissa_niter` whenever it loads, and they are not those of the training"
    return ""


def patterns_of(config: Mapping[str, Any]) -> list[str]:
    """Return the values of a valid config that PEFT matches as regular expressions with the names of modules."""
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


def _shown(value: object) -> str:
    return reprlib.repr(value)


def _is_whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: object) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 53
    return type(value) is float and math.isfinite(value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_PATTERN


def _are(value: object, test: _Test) -> bool:
    return isinstance(value, list) and all(test(item) for item in cast("Sequence[object]", value))


def _pattern(test: _Test) -> _Test:
    def fits(value: object) -> bool:
        if value is None:
            return True
        return isinstance(value, dict) and all(
            _is_name(key) and test(item) for key, item in cast("dict[object, object]", value).items()
        )

    return fits


def _names_or_one(value: object) -> bool:
    return value is None or _is_name(value) or _are(value, _is_name)


def _names(value: object) -> bool:
    return value is None or _are(value, _is_name)


def _truth(value: object) -> bool:
    return type(value) is bool


def _rank(value: object) -> bool:
    return _is_whole(value, 1, 1 << 20)


def _layers(value: object) -> bool:
    return value is None or _is_whole(value, 0, 1 << 20) or _are(value, lambda item: _is_whole(item, 0, 1 << 20))


def _optional_name(value: object) -> bool:
    return value is None or _is_name(value)


_FIELDS: Final[Mapping[str, tuple[_Test, str]]] = {
    "r": (_rank, "a rank"),
    "lora_alpha": (_is_number, "a finite number"),
    "lora_dropout": (lambda value: _is_number(value) and 0 <= cast("float", value) <= 1, "a number from 0 to 1"),
    "rank_pattern": (_pattern(_rank), "an object of ranks"),
    "alpha_pattern": (_pattern(_is_number), "an object of finite numbers"),
    "bias": (lambda value: value in ("none", "all", "lora_only"), "`none`, `all` or `lora_only`"),
    "init_lora_weights": (lambda value: type(value) is bool or _optional_name(value), "a truth value or a name"),
    "task_type": (lambda value: value is None or value in _TASKS, f"one of {', '.join(_TASKS)}"),
    "layers_to_transform": (_layers, "numbers of layers"),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), (_names_or_one, "a text or several")),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (_names, "a list of texts")),
    **dict.fromkeys(
        ("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias", "inference_mode"),
        (_truth, "a truth value"),
    ),
    **dict.fromkeys(
        ("base_model_name_or_path", "revision", "peft_version"), (_optional_name, "a text")
    ),
}  # fmt: skip
