"""Separate a checkpoint's weights from the tensors that describe their quantisation.

Input: the index and `quantization_config` of config.json. Output: one `StoredWeight` per weight, by the name of the
unquantised weight. Supported: FP8 (`weight` + `weight_scale_inv`), compressed-tensors' packed INT4 (`weight_packed` +
`weight_scale`) and NVFP4 (the same with `weight_global_scale`), NVFP4 of ModelOpt (`weight` + `weight_scale` +
`weight_scale_2`) and MXFP4 (`_blocks` + `_scales`). Scales of activations are ignored. Refused (I117): codes without
scales, scales that do not fit the config's blocks, other methods and bit widths, tensors that the config excludes from
quantisation, and a config that `ktc.model.checkpoint.quantisation_config` refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktc.diagnostics import Diagnostic
from ktc.model.checkpoint import nvfp4
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.checkpoint.quantisation_config import HINT, QuantisationConfig, WeightSettings, read_config
from ktc.model.checkpoint.source import Quantised, Stored, scale_shape

_CODES = ("fp8", "fp8_e5m2")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight: `entry` holds its values, or its codes if it is `quantised`."""

    name: str
    entry: TensorEntry
    quantised: Quantised | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight itself."""
        return self.entry.shape if self.quantised is None else self.quantised.shape


class _Refused(Exception):
    """A tensor that contradicts the config; carries the message."""


def stored_weights(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any] | None
) -> tuple[tuple[StoredWeight, ...], tuple[Diagnostic, ...]]:
    """Return the weights in order of their bytes, and the problems of the others."""
    settings, broken = read_config(config)
    if broken:
        return (), broken
    weights: list[StoredWeight] = []
    problems: list[Diagnostic] = []
    consumed = {name for entry in tensors.values() for name in _companions(entry, tensors)}
    for entry in tensors.values():
        if entry.name in consumed:
            continue
        try:
            weights.append(_weight(entry, tensors, settings))
        except _Refused as error:
            problems.append(Diagnostic("I117", f"tensor `{entry.name}` {error}", hint=HINT))
    return tuple(weights), tuple(problems)


def _companions(entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> Iterable[str]:
    """Return the tensors that belong to `entry` and are not weights."""
    if entry.name.endswith(".weight_packed"):
        stem = entry.name.removesuffix("_packed")
        names = (stem + suffix for suffix in ("_scale", "_shape", "_zero_point", "_global_scale"))
        return [name for name in (*names, _activations_of(entry.name)) if name in tensors]
    if _is_modelopt(entry, tensors):
        return [f"{entry.name}_scale", f"{entry.name}_scale_2", _activations_of(entry.name)]
    if entry.name.endswith("_blocks") and entry.dtype == "u8":
        return [entry.name.removesuffix("_blocks") + "_scales"]
    if entry.dtype in _CODES:
        return [name for suffix in ("_scale_inv", "_scale") if (name := entry.name + suffix) in tensors]
    return []


def _is_modelopt(entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> bool:
    """Return whether a tensor has codes of NVFP4 as ModelOpt writes them, under the name of a plain weight."""
    return entry.dtype == "u8" and f"{entry.name}_scale_2" in tensors


def _activations_of(name: str) -> str:
    """Return the name of the scale of a module's input, beside codes of NVFP4."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.{'input_global_scale' if leaf == 'weight_packed' else 'input_scale'}"


def scales_of_activations(weights: Iterable[StoredWeight], tensors: Mapping[str, TensorEntry]) -> int:
    """Count the modules in NVFP4 whose input has a scale in the checkpoint, which is ignored."""
    coded = (weight for weight in weights if weight.quantised is not None and weight.quantised.method == "nvfp4")
    return sum(_activations_of(weight.entry.name) in tensors for weight in coded)


def _weight(entry: TensorEntry, tensors: Mapping[str, TensorEntry], config: QuantisationConfig) -> StoredWeight:
    if entry.name.endswith(".weight_packed") and entry.dtype == "u8":
        return StoredWeight(entry.name.removesuffix("_packed"), entry, _nvfp4_packed(entry, tensors, config))
    if _is_modelopt(entry, tensors):
        if f"{entry.name.rpartition('.')[0]}.pre_quant_scale" in tensors:
            raise _Refused("has inputs with factors of their own (`pre_quant_scale`), as ModelOpt's NVFP4_AWQ")
        return StoredWeight(entry.name, entry, _nvfp4(entry, tensors, f"{entry.name}_scale", f"{entry.name}_scale_2"))
    if entry.name.endswith(".weight_packed"):
        return StoredWeight(entry.name.removesuffix("_packed"), entry, _int4(entry, tensors, config))
    if entry.name.endswith("_blocks") and entry.dtype == "u8":
        return StoredWeight(entry.name.removesuffix("_blocks"), entry, _mxfp4(entry, tensors))
    if entry.dtype in _CODES:
        return StoredWeight(entry.name, entry, _fp8(entry, tensors, config))
    return StoredWeight(entry.name, entry)


def _fp8(entry: TensorEntry, tensors: Mapping[str, TensorEntry], config: QuantisationConfig) -> Quantised:
    if len(entry.shape) < 2 or 0 in entry.shape:
        raise _Refused(f"is fp8 of shape {list(entry.shape)}; only matrices have scales")
    scale = _companion(tensors, f"{entry.name}_scale_inv", f"{entry.name}_scale")
    rows, columns = entry.shape[-2:]
    configured = _fp8_block(entry, config)
    options = [(1, columns), (rows, columns)] if configured is None else [configured]
    block = next((b for b in options if _fits(scale.shape, entry.shape, b)), None)
    if block is None:
        expected = list(scale_shape(entry.shape, options[0]))
        raise _Refused(f"has scales of shape {list(scale.shape)}, expected {expected} ({_blocks(options[0])})")
    if scale.dtype not in ("f32", "bf16", "f16", "e8m0", "u8"):
        raise _Refused(f"has scales stored as {scale.dtype}")
    _check_not_ignored(entry.name.removesuffix(".weight"), config)
    return Quantised("fp8", entry.shape, block, scale)


def _fits(stored: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Return whether scales fit; those of one block per row or per matrix may omit dimensions of size 1."""
    expected = scale_shape(shape, block)
    return stored == expected or (
        expected[-1] == 1
        and math.prod(stored) == math.prod(expected)
        and _without_ones(stored) == _without_ones(expected)
    )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _blocks(block: tuple[int, int]) -> str:
    return f"one per {block[0]}x{block[1]} weights"


def _fp8_block(entry: TensorEntry, config: QuantisationConfig) -> tuple[int, int] | None:
    """Return the block that the config names for `entry`, `None` if it names none."""
    if config.method != "compressed-tensors":
        return config.block_size
    settings = _settings_of(entry.name.removesuffix(".weight"), config)
    if (settings.num_bits, settings.type) != (8, "float"):
        raise _Refused(f"is fp8, but `quantization_config` has {settings.type} of {settings.num_bits} bits")
    return settings.block(*entry.shape[-2:])


def _int4(entry: TensorEntry, tensors: Mapping[str, TensorEntry], config: QuantisationConfig) -> Quantised:
    stem = entry.name.removesuffix("_packed")
    settings = _settings_of(stem.removesuffix(".weight"), config)
    if entry.dtype != "i32" or len(entry.shape) != 2 or 0 in entry.shape:
        raise _Refused(f"is packed as {entry.dtype} {list(entry.shape)}, expected a matrix of i32")
    if (settings.num_bits, settings.type) != (4, "int"):
        raise _Refused(f"is packed {settings.type} of {settings.num_bits} bits; ktc reads int of 4")
    if settings.strategy not in (None, "channel", "group") or settings.block_structure is not None:
        raise _Refused(f"is packed with a scale per `{settings.strategy or 'block'}`; ktc reads `group` and `channel`")
    if f"{stem}_g_idx" in tensors or settings.actorder not in (None, False, "weight", "static"):
        raise _Refused("is quantised with its columns in another order (`actorder`), which ktc does not read")
    scale = _companion(tensors, f"{stem}_scale")
    rows, words = entry.shape
    _, size = settings.block(rows, 8 * words) or (1, 8 * words)
    groups = 1 if size == 8 * words else scale.shape[-1] if scale.shape else 0
    shape = (rows, groups * size)
    if scale.shape != (rows, groups) or -(-shape[1] // 8) != words:
        expected = [rows, -(-8 * words // size)]
        raise _Refused(f"has scales of shape {list(scale.shape)}, expected {expected} ({_blocks((1, size))})")
    if scale.dtype not in ("bf16", "f16", "f32"):
        raise _Refused(f"has scales stored as {scale.dtype}, expected bf16, f16 or f32")
    zero = None if settings.symmetric else _companion(tensors, f"{stem}_zero_point")
    if zero is not None and (zero.dtype, zero.shape) != ("i32", (-(-rows // 8), scale.shape[1])):
        expected = [-(-rows // 8), scale.shape[1]]
        raise _Refused(f"has zero points {zero.dtype} {list(zero.shape)}, expected i32 {expected}")
    _check_not_ignored(stem.removesuffix(".weight"), config)
    return Quantised("int4", shape, (1, size), scale, zero)


def _nvfp4_packed(
    entry: TensorEntry, tensors: Mapping[str, TensorEntry], config: QuantisationConfig
) -> Quantised:  # fmt: skip
    """Return the codes of compressed-tensors, whose scales are divided by the one of the matrix."""
    stem = entry.name.removesuffix("_packed")
    settings = _settings_of(stem.removesuffix(".weight"), config)
    if (settings.num_bits, settings.type, settings.group_size, settings.symmetric) != (4, "float", nvfp4.GROUP, True):
        raise _Refused(
            f"is packed {settings.type} of {settings.num_bits} bits in groups of {settings.group_size}; of bytes, ktc "
            f"reads symmetric float of 4 in groups of {nvfp4.GROUP}"
        )
    _check_not_ignored(stem.removesuffix(".weight"), config)
    return replace(_nvfp4(entry, tensors, f"{stem}_scale", f"{stem}_global_scale"), divides=True)


def _nvfp4(entry: TensorEntry, tensors: Mapping[str, TensorEntry], scale_name: str, matrix_name: str) -> Quantised:
    if len(entry.shape) != 2 or 0 in entry.shape or entry.shape[1] % (nvfp4.GROUP // 2):
        raise _Refused(f"is NVFP4 of shape {list(entry.shape)}, expected rows and bytes for groups of {nvfp4.GROUP}")
    scale, matrix = _companion(tensors, scale_name), _companion(tensors, matrix_name)
    rows, columns = entry.shape[0], 2 * entry.shape[1]
    expected = (rows, columns // nvfp4.GROUP)
    if (scale.dtype, scale.shape) != ("fp8", expected):
        stored = f"{scale.dtype} {list(scale.shape)}"
        raise _Refused(f"has scales {stored}, expected fp8 {list(expected)} (one per {nvfp4.GROUP} weights)")
    if matrix.dtype != "f32" or math.prod(matrix.shape) != 1:
        raise _Refused(f"has `{matrix_name}` {matrix.dtype} {list(matrix.shape)}, expected one f32")
    return Quantised("nvfp4", (rows, columns), (1, nvfp4.GROUP), scale, matrix_scale=matrix)


def _mxfp4(entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> Quantised:
    if len(entry.shape) < 3 or 0 in entry.shape:
        raise _Refused(f"is MXFP4 of shape {list(entry.shape)}, expected rows, blocks of a row and bytes of a block")
    scale = _companion(tensors, entry.name.removesuffix("_blocks") + "_scales")
    *rows, blocks, size = entry.shape
    if (scale.dtype, scale.shape) != ("u8", entry.shape[:-1]):
        expected = list(entry.shape[:-1])
        raise _Refused(f"has scales {scale.dtype} {list(scale.shape)}, expected u8 {expected} (one per block)")
    return Quantised("mxfp4", (*rows, 2 * blocks * size), (1, 2 * size), scale)


def _companion(tensors: Mapping[str, TensorEntry], *names: str) -> Stored:
    tensor = next((tensors[name] for name in names if name in tensors), None)
    if tensor is None:
        raise _Refused(f"has no scales: the checkpoint lacks `{names[0]}`")
    return Stored(tensor.name, tensor.dtype, tensor.shape)


def _settings_of(module: str, config: QuantisationConfig) -> WeightSettings:
    group = config.group_of(module)
    if group is None or group.weights is None:
        raise _Refused("is quantised, but no group of `quantization_config` in config.json names its module")
    return group.weights


def _check_not_ignored(module: str, config: QuantisationConfig) -> None:
    entry = config.ignored.entry_for(module)
    if entry is not None:
        raise _Refused(f"is quantised, but `quantization_config` ignores its module (`{entry}`)")
