"""Which tensors of a checkpoint are weights, and which only say how codes become weights.

In: the index and `quantization_config` of config.json. Out: one `StoredWeight` per weight, by the name it has where
nothing is quantised. Known are FP8 (`weight` + `weight_scale_inv`), compressed-tensors' packed INT4 (`weight_packed` +
`weight_scale`) and MXFP4 (`_blocks` + `_scales`). Refused (I117): codes without scales, scales of another shape than
the config's blocks, other methods and bit widths, and tensors that the config says are not quantised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ktc.checkpoint.header import TensorEntry
from ktc.checkpoint.source import Quantised, Stored, scale_shape
from ktc.diagnostics import Diagnostic

_READ = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4")  # the quantisation methods that ktc reads
_HINT = "use the checkpoint that is not quantised, or one with FP8 blocks, packed INT4 or MXFP4"
_CODES = ("fp8", "fp8_e5m2")
_REPEATS, _NESTED = re.compile(r"[*+{]"), re.compile(r"[*+{][^()]*\)[*+{]")  # what makes `re` slow


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight: `entry` holds its values, or its codes where it is `quantised`."""

    name: str
    entry: TensorEntry
    quantised: Quantised | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight itself."""
        return self.entry.shape if self.quantised is None else self.quantised.shape


class _Refused(Exception):
    """A tensor that cannot be read as the config says; carries the words."""


def stored_weights(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any] | None
) -> tuple[tuple[StoredWeight, ...], tuple[Diagnostic, ...]]:
    """The weights in the order of their bytes, and what is wrong with the others."""
    method = None if config is None else config.get("quant_method")
    if config is not None and method not in _READ:
        message = f"the checkpoint is quantised by `{method}`; ktc reads {', '.join(_READ)}"
        return (), (Diagnostic("I117", message, hint=_HINT),)
    weights: list[StoredWeight] = []
    problems: list[Diagnostic] = []
    consumed = {name for entry in tensors.values() for name in _companions(entry, tensors)}
    for entry in tensors.values():
        if entry.name in consumed:
            continue
        try:
            weights.append(_weight(entry, tensors, config or {}))
        except _Refused as error:
            problems.append(Diagnostic("I117", f"tensor `{entry.name}` {error}", hint=_HINT))
    return tuple(weights), tuple(problems)


def _companions(entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> Iterable[str]:
    """The tensors beside `entry` that belong to it and are no weights."""
    if entry.name.endswith(".weight_packed"):
        stem = entry.name.removesuffix("_packed")
        return [name for suffix in ("_scale", "_shape", "_zero_point") if (name := stem + suffix) in tensors]
    if entry.name.endswith("_blocks") and entry.dtype == "u8":
        return [entry.name.removesuffix("_blocks") + "_scales"]
    if entry.dtype in _CODES:
        return [name for suffix in ("_scale_inv", "_scale") if (name := entry.name + suffix) in tensors]
    return []


def _weight(entry: TensorEntry, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> StoredWeight:
    if entry.name.endswith(".weight_packed"):
        return StoredWeight(entry.name.removesuffix("_packed"), entry, _int4(entry, tensors, config))
    if entry.name.endswith("_blocks") and entry.dtype == "u8":
        return StoredWeight(entry.name.removesuffix("_blocks"), entry, _mxfp4(entry, tensors))
    if entry.dtype in _CODES:
        return StoredWeight(entry.name, entry, _fp8(entry, tensors, config))
    return StoredWeight(entry.name, entry)


def _fp8(entry: TensorEntry, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> Quantised:
    if len(entry.shape) < 2 or 0 in entry.shape:
        raise _Refused(f"is fp8 of shape {list(entry.shape)}; only matrices have scales")
    scale = _companion(tensors, f"{entry.name}_scale_inv", f"{entry.name}_scale")
    rows, columns = entry.shape[-2:]
    configured = _block_size(config)
    options = [*([configured] if configured else []), (1, columns), (rows, columns)]
    block = next((b for b in options if _fits(scale.shape, entry.shape, b)), None)
    if block is None:
        expected = list(scale_shape(entry.shape, options[0]))
        raise _Refused(f"has scales of shape {list(scale.shape)}, expected {expected} ({_blocks(options[0])})")
    if scale.dtype not in ("f32", "bf16", "f16", "e8m0", "u8"):
        raise _Refused(f"has scales stored as {scale.dtype}")
    _check_not_ignored(entry.name.removesuffix(".weight"), config)
    return Quantised("fp8", entry.shape, block, scale)


def _fits(found: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Scales of one block per row or per matrix may leave out the dimensions of size 1."""
    expected = scale_shape(shape, block)
    return found == expected or (
        expected[-1] == 1
        and math.prod(found) == math.prod(expected)
        and _without_ones(found) == _without_ones(expected)
    )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _blocks(block: tuple[int, int]) -> str:
    return f"one per {block[0]}x{block[1]} weights"


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size`, or the block structure of compressed-tensors' first group."""
    size = config.get("weight_block_size")
    if size is None and config.get("quant_method") == "compressed-tensors":
        size = next((group.get("block_structure") for group in _weight_settings(config)), None)
    sizes = cast("list[object]", size) if isinstance(size, list | tuple) else []
    if len(sizes) != 2 or not all(isinstance(number, int) and number > 0 for number in sizes):
        return None
    return cast("int", sizes[0]), cast("int", sizes[1])


def _int4(entry: TensorEntry, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> Quantised:
    stem = entry.name.removesuffix("_packed")
    settings = _settings_of(stem.removesuffix(".weight"), config)
    if entry.dtype != "i32" or len(entry.shape) != 2 or 0 in entry.shape:
        raise _Refused(f"is packed as {entry.dtype} {list(entry.shape)}, expected a matrix of i32")
    if (settings.get("num_bits"), settings.get("type", "int")) != (4, "int"):
        raise _Refused(
            f"is packed {settings.get('type', 'int')} of {settings.get('num_bits')} bits; ktc reads int of 4"
        )
    if f"{stem}_g_idx" in tensors or settings.get("actorder") not in (None, "weight", "static"):
        raise _Refused("is quantised with its columns in another order (`actorder`), which ktc does not read")
    scale = _companion(tensors, f"{stem}_scale")
    rows, words = entry.shape
    group = settings.get("group_size")
    per_row = settings.get("strategy") == "channel" or group in (None, -1)
    size = 8 * words if per_row or not isinstance(group, int) else group
    shape = (rows, 8 * words if per_row else scale.shape[-1] * size)
    if size < 1 or len(scale.shape) != 2 or scale.shape[0] != rows or -(-shape[1] // 8) != words:
        expected = [rows, -(-8 * words // max(1, size))]
        raise _Refused(f"has scales of shape {list(scale.shape)}, expected {expected} ({_blocks((1, size))})")
    if scale.dtype not in ("bf16", "f16", "f32"):
        raise _Refused(f"has scales stored as {scale.dtype}, expected bf16, f16 or f32")
    zero = None if settings.get("symmetric", True) else _companion(tensors, f"{stem}_zero_point")
    if zero is not None and (zero.dtype, zero.shape) != ("i32", (-(-rows // 8), scale.shape[1])):
        expected = [-(-rows // 8), scale.shape[1]]
        raise _Refused(f"has zero points {zero.dtype} {list(zero.shape)}, expected i32 {expected}")
    _check_not_ignored(stem.removesuffix(".weight"), config)
    return Quantised("int4", shape, (1, size), scale, zero)


def _mxfp4(entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> Quantised:
    scale = _companion(tensors, entry.name.removesuffix("_blocks") + "_scales")
    *rows, blocks, size = entry.shape
    if len(entry.shape) < 3 or 0 in entry.shape or (scale.dtype, scale.shape) != ("u8", entry.shape[:-1]):
        expected = list(entry.shape[:-1])
        raise _Refused(f"has scales {scale.dtype} {list(scale.shape)}, expected u8 {expected} (one per block)")
    return Quantised("mxfp4", (*rows, 2 * blocks * size), (1, 2 * size), scale)


def _companion(tensors: Mapping[str, TensorEntry], *names: str) -> Stored:
    found = next((tensors[name] for name in names if name in tensors), None)
    if found is None:
        raise _Refused(f"has no scales: the checkpoint lacks `{names[0]}`")
    return Stored(found.name, found.dtype, found.shape)


def _weight_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """compressed-tensors' settings of weights, group by group."""
    groups = cast("dict[str, Any]", config.get("config_groups") or {})
    return [cast("dict[str, Any]", group.get("weights") or {}) for group in groups.values() if isinstance(group, dict)]


def _settings_of(module: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the group that names `module`; a class name, as `Linear`, names all of them."""
    groups = cast("dict[str, Any]", config.get("config_groups") or {})
    for group in groups.values():
        targets = cast("list[str]", group.get("targets") or []) if isinstance(group, dict) else []
        if any(_is_class(target) or _names(target, module) for target in targets):
            return cast("dict[str, Any]", group.get("weights") or {})
    raise _Refused("is packed, but no group of `quantization_config` in config.json names its module")


def _is_class(target: str) -> bool:
    return "." not in target and not target.startswith("re:")


def _check_not_ignored(module: str, config: Mapping[str, Any]) -> None:
    ignore = cast("list[str]", config.get("ignore") or [])
    pattern = next((pattern for pattern in ignore if _names(pattern, module)), None)
    if pattern is not None:
        raise _Refused(f"is quantised, but `quantization_config` ignores its module (`{pattern}`)")


def _names(pattern: str, module: str) -> bool:
    """compressed-tensors' way to name modules: `re:` and a regular expression from the start, or the whole name."""
    if not pattern.startswith("re:"):
        return pattern == module
    if len(pattern) > 200 or len(_REPEATS.findall(pattern)) > 4 or _NESTED.search(pattern):
        raise _Refused(f"cannot be looked up: `{pattern:.80}` in config.json could take too long to match")
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as error:
        raise _Refused(f"cannot be looked up: `{pattern}` in config.json is no regular expression ({error})") from error
