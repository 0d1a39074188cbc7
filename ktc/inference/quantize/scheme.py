"""The quantisation schemes of `ktc quantize`, by name, and how config.json describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Scheme:
    """Symmetric INT4 with a scale for `group` columns of a row, or for the whole row (-1)."""

    name: str
    group: int

    @property
    def grid(self) -> str:
        """The grid as recipes of compiled models spell it."""
        return f"int4 {self.group} scale_first"

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config` of config.json: compressed-tensors' `pack-quantized`, for all but `ignored`."""
        weights: dict[str, Any] = {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": None if self.group == -1 else self.group,
            "num_bits": 4,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": "channel" if self.group == -1 else "group",
            "symmetric": True,
            "type": "int",
        }
        group: dict[str, Any] = {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": weights,
        }
        return {
            "config_groups": {"group_0": group},
            "format": "pack-quantized",
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }


SCHEMES: Final = {
    scheme.name: scheme
    for scheme in (
        Scheme("int4-g32", 32),
        Scheme("int4-g64", 64),
        Scheme("int4-g128", 128),
        Scheme("int4-channel", -1),
    )
}
