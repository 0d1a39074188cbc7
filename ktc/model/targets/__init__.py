"""The rewrite targets of the rule language: one file and one row each.

The file of a target holds its settings, its claims, its graph pass, its arguments in `ktc.json` and its module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ktc.model.targets.cpu_moe import CpuMoe
from ktc.model.targets.fake_quant import FakeQuant
from ktc.model.targets.fused import Fused
from ktc.model.targets.fused_attention import FusedAttention
from ktc.model.targets.gpu_moe import GpuMoe
from ktc.model.targets.keep import Keep
from ktc.model.targets.kt_linear import LinearTarget
from ktc.model.targets.lora_experts import LoraExperts
from ktc.model.targets.lora_linear import LoraLinear
from ktc.model.targets.mla_absorbed import MlaAbsorbed
from ktc.model.targets.module_target import ModuleTarget
from ktc.model.targets.place import Place
from ktc.model.targets.quantize import Quantize
from ktc.model.targets.sparse_attention import SparseAttention
from ktc.model.targets.target import Target
from ktc.model.targets.train import Train

# In the order in which their passes run; `place` follows all that change nodes, since it moves what is then there.
ROWS: Final[tuple[type[Target], ...]] = (
    LoraLinear,
    LoraExperts,
    Train,
    LinearTarget,
    CpuMoe,
    GpuMoe,
    MlaAbsorbed,
    FusedAttention,
    SparseAttention,
    Fused,
    FakeQuant,
    Quantize,
    Place,
    Keep,
)
TARGETS: Final[Mapping[str, type[Target]]] = {target.name: target for target in ROWS}
# By the name of its module in `ktc.json`: the first target that puts it.
MODULES: Final[Mapping[str, type[ModuleTarget]]] = {
    target.module: target for target in reversed(ROWS) if issubclass(target, ModuleTarget)
}

__all__ = [
    "MODULES", "ROWS", "TARGETS", "CpuMoe", "FakeQuant", "Fused", "FusedAttention", "GpuMoe", "Keep", "LinearTarget",
    "LoraExperts", "LoraLinear", "MlaAbsorbed", "ModuleTarget", "Place", "Quantize", "SparseAttention", "Target",
    "Train",
]  # fmt: skip
