"""`quantization_config` of config.json, decoded once: quantised modules and their blocks.

Input: the plain values of an untrusted file. Output: a frozen `QuantisationConfig`. Refused, with all problems
together, each with its field (I117): values of a wrong type (a bool is not a number), sizes below 1, contradicting
settings, and patterns that `ktc.model.checkpoint.module_names` does not support. Keys without effect on stored weights
are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, cast

from ktc.diagnostics import Diagnostic
from ktc.foundation.decode import Undecodable, decode
from ktc.foundation.formats import METHODS
from ktc.model.checkpoint.module_names import ModuleNames, UnreadablePattern, read_names

HINT = "use the unquantised checkpoint, or one with FP8 blocks, packed INT4, MXFP4 or NVFP4"
_ROOT = "quantization_config"
_MODELOPT, _NVFP4 = "modelopt", "NVFP4"
_MOST = 1000  # groups, and patterns in total: each is compared with each module
_Settings = TypeVar("_Settings", "_Fields", "_GroupFields", "WeightSettings")


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """The storage of a group's weights, with the names and defaults of compressed-tensors."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"] | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    actorder: str | bool | None = None

    def block(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Return the rows and columns that share a scale in a matrix of this size, `None` if undefined."""
        if self.block_structure is not None:
            return self.block_structure
        if self.group_size is not None:
            return (1, columns if self.group_size == -1 else self.group_size)
        return {"channel": (1, columns), "tensor": (rows, columns)}.get(self.strategy or "")


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Modules stored alike: those named, or with `classes` all. Without `weights` they are not quantised."""

    names: ModuleNames
    classes: bool
    weights: WeightSettings | None


@dataclass(frozen=True, slots=True)
class QuantisationConfig:
    """The quantisation of a checkpoint from config.json; without `quantization_config` all fields are empty."""

    method: str | None = None
    block_size: tuple[int, int] | None = None
    groups: tuple[WeightGroup, ...] = ()
    ignored: ModuleNames = field(default_factory=ModuleNames)

    def group_of(self, module: str) -> WeightGroup | None:
        """Return the group that names `module`; a group that names a class, such as `Linear`, applies to all others."""
        named = (group for group in self.groups if group.names.entry_for(module) is not None)
        return next(named, None) or next((group for group in self.groups if group.classes), None)


@dataclass(frozen=True, slots=True)
class _Fields:
    weight_block_size: tuple[int, int] | None = None
    config_groups: Mapping[str, Any] | None = None
    ignore: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class _GroupFields:
    targets: tuple[str, ...] | None = None
    weights: Mapping[str, Any] | None = None


def read_config(raw: object) -> tuple[QuantisationConfig, tuple[Diagnostic, ...]]:
    """Return the decoded config (`None`: not quantised) and every problem in it (I117)."""
    if raw is None:
        return QuantisationConfig(), ()
    if not isinstance(raw, Mapping):
        return QuantisationConfig(), (_problem(f"`{_ROOT}` in config.json is a {type(raw).__name__}, not an object"),)
    config = cast("Mapping[str, Any]", raw)
    method: object = config.get("quant_method")
    if unknown := unknown_method(config):
        return QuantisationConfig(), (unknown,)
    if method == _MODELOPT:  # quantised modules are known by the names of their tensors
        return QuantisationConfig(str(method)), _modelopt_problems(config)
    problems: list[str] = []
    fields = _fields(config, _Fields, _ROOT, problems)
    _check_sizes(fields.weight_block_size, f"{_ROOT}.weight_block_size", problems)
    groups = [
        group
        for name, value in (fields.config_groups or {}).items()
        if (group := _group(value, f"{_ROOT}.config_groups.{name!s:.40}", problems)) is not None
    ]
    ignored = _names(fields.ignore or (), f"{_ROOT}.ignore", problems)
    if max(len(groups), sum(len(names.patterns) for names in (ignored, *(group.names for group in groups)))) > _MOST:
        problems.append(f"`{_ROOT}` in config.json has more than {_MOST} groups or patterns")
    read = QuantisationConfig(str(method), fields.weight_block_size, tuple(groups), ignored)
    return read, tuple(_problem(problem) for problem in problems)


def unknown_method(config: Mapping[str, Any]) -> Diagnostic | None:
    """Return the problem (I117) of a checkpoint that is quantised by a method that ktc does not read."""
    method: object = config.get("quant_method")
    if isinstance(method, str) and method in METHODS:
        return None
    shown = method[:40] if isinstance(method, str) else "None" if method is None else type(method).__name__
    return _problem(f"the checkpoint is quantised by `{shown}`; ktc reads {', '.join(METHODS)}")


def _modelopt_problems(config: Mapping[str, Any]) -> tuple[Diagnostic, ...]:
    """Return the problem of an algorithm of ModelOpt other than NVFP4."""
    nested: object = config.get("quantization")  # as in hf_quant_config.json
    inner = cast("Mapping[str, Any]", nested if isinstance(nested, Mapping) else {})
    algorithm: object = config.get("quant_algo", inner.get("quant_algo", _NVFP4))
    if algorithm == _NVFP4:
        return ()
    shown = f"`{algorithm:.40}`" if isinstance(algorithm, str) else type(algorithm).__name__
    return (_problem(f"the checkpoint is quantised by ModelOpt's {shown}; ktc reads {_NVFP4} as `quant_algo`"),)


def _problem(message: str) -> Diagnostic:
    return Diagnostic("I117", message, hint=HINT)


def _fields(raw: object, wanted: type[_Settings], place: str, problems: list[str]) -> _Settings:
    """Return the fields of `wanted` in `raw`, each decoded alone; an invalid one is reported and keeps its default."""
    read = wanted()
    if not isinstance(raw, Mapping):
        problems.append(f"`{place}` in config.json is not an object but {type(raw).__name__}")
        return read
    values = cast("Mapping[str, Any]", raw)
    names = [field.name for field in fields(wanted)]
    defaults = {name: getattr(wanted(), name) for name in names}
    for name in names:
        if name not in values:
            continue
        value = list(cast("tuple[Any, ...]", values[name])) if isinstance(values[name], tuple) else values[name]
        try:
            read = replace(read, **{name: getattr(decode({**defaults, name: value}, wanted), name)})
        except Undecodable as error:
            problems.append(f"`{place}` in config.json: {error}")
    return read


def _group(raw: object, place: str, problems: list[str]) -> WeightGroup | None:
    before = len(problems)
    fields = _fields(raw, _GroupFields, place, problems)
    if len(problems) > before:
        return None
    targets = fields.targets or ()
    classes = any(target[:1].isupper() and "." not in target for target in targets)  # `Linear`, and not `lm_head`
    weights = None if fields.weights is None else _weight_settings(fields.weights, f"{place}.weights", problems)
    return WeightGroup(_names(targets, f"{place}.targets", problems), classes, weights)


def _weight_settings(raw: Mapping[str, Any], place: str, problems: list[str]) -> WeightSettings:
    before = len(problems)
    settings = _fields(raw, WeightSettings, place, problems)
    if len(problems) > before:
        return settings
    size, strategy = settings.group_size, settings.strategy
    _check_sizes(settings.block_structure, f"{place}.block_structure", problems)
    if size is not None and size != -1:
        _check_sizes((size,), f"{place}.group_size", problems)
        if strategy not in (None, "group", "tensor_group"):
            problems.append(f"`{place}.group_size` in config.json is {size}, but `strategy` is `{strategy}`")
    elif strategy == "group":
        problems.append(f"`{place}.group_size` in config.json is missing, and `strategy` is `group`")
    if (settings.block_structure is not None and strategy not in (None, "block")) or (
        settings.block_structure is None and strategy == "block"
    ):
        problems.append(f"`{place}.block_structure` in config.json does not fit `strategy`, which is `{strategy}`")
    return settings


def _check_sizes(sizes: Iterable[int] | None, place: str, problems: list[str]) -> None:
    problems += [f"`{place}` in config.json holds {size}, expected 1 or more" for size in sizes or () if size < 1]


def _names(entries: Iterable[str], place: str, problems: list[str]) -> ModuleNames:
    read: list[str] = []
    for entry in entries:
        try:
            read_names((entry,))
        except UnreadablePattern as error:
            problems.append(f"`{place}` in config.json: {error}")
        else:
            read.append(entry)
    return read_names(read)
