"""The meaning of the names in KTransformers' rule files, as text in tables: no name is ever imported or called.

A replacement class without a row is refused: KTransformers would import it, which runs its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["default", "linear", "experts", "attention", "fused", "block", "rope", "model"]

PACKAGE = "ktransformers.operators."
DEFAULT = "default"

# The first row that fits the last part of the class name decides.
_KINDS: tuple[tuple[str, Kind], ...] = (
    ("KTransformersLinear*", "linear"),
    ("KTransformersExperts*", "experts"),
    ("*Attention*", "attention"),
    ("flashinfer_attn", "attention"),
    ("deepseek_torch_attn", "attention"),
    ("*RotaryEmbedding*", "rope"),
    ("*RMSNorm*", "fused"),
    ("*Gate*", "fused"),
    ("*MLP*", "fused"),
    ("K*Model", "model"),
    ("K*MoE*", "block"),
    ("K*SparseMo[Ee]Block*", "block"),
)

_DEVICES = ("generate_device", "prefill_device")
_OPERATIONS = ("generate_op", "prefill_op")
SETTINGS: Mapping[Kind, tuple[str, ...]] = {
    "default": (*_DEVICES, "out_device"),
    "linear": (*_DEVICES, *_OPERATIONS, "out_device"),
    "experts": (*_DEVICES, *_OPERATIONS, "out_device", "backend"),
    "attention": (*_DEVICES, "out_device", "absorb_for_prefill"),
    "fused": (*_DEVICES, "out_device"),
    "block": (*_DEVICES, "out_device"),
    "rope": (*_DEVICES, "out_device"),
    "model": (*_DEVICES, "out_device", "per_layer_prefill_intput_threshold", "transfer_map"),
}
REFUSED_SETTINGS: Mapping[str, str] = {"dump_dir": "rules must not write tensors to a folder that the file chooses"}

# Operation -> our kernel, None where ktc has none and plans none. LOSSES says what a row loses.
LINEAR_KERNELS: Mapping[str, str | None] = {
    "KLinearTorch": "torch",
    "KLinearMarlin": None,
    "VLinearMarlin": None,
    "KLinearFP8": None,
    "KLinearQ8": None,
    "KLinearIPEXLLM": None,
    "KLinearTorchW8A8A2": None,
    "KLinearCPUInfer": None,
}
CPU_EXPERTS = ("KExpertsCPU", "KSFTExpertsCPU", "KExpertsCPUW8A8")
TRAINING_EXPERTS = "KSFTExpertsCPU"
GPU_EXPERTS: Mapping[str, str | None] = {"KExpertsMarlin": None, "KExpertsTorch": "stored"}  # the format
# Backend -> format and instruction set of the kernel that ktc generates. llamafile computes in the stored format.
BACKENDS: Mapping[str, tuple[str, str]] = {
    "llamafile": ("stored", "auto"),
    "AMXBF16": ("bf16", "amx"),
    "AMXInt8": ("int8", "amx"),
    "AMXInt4": ("int4", "amx"),
}
LOSSES: Mapping[str, str] = {
    "KExpertsCPUW8A8": "the experts keep their stored format",
}


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of KTransformers' constructors."""

    generate_device: str = "cuda"
    prefill_device: str = "cuda"
    generate_op: str | None = None
    prefill_op: str | None = None


DEFAULTS: Mapping[Kind, Defaults] = {
    "linear": Defaults(generate_op="KLinearMarlin", prefill_op="KLinearTorch"),
    "experts": Defaults(generate_device="cpu", generate_op="KExpertsCPU", prefill_op="KExpertsTorch"),
}


def kind_of(class_path: str) -> Kind | None:
    """Return the kind of a replacement class, None if it is not KTransformers' own or its kind is unknown."""
    if class_path == DEFAULT:
        return "default"
    name = class_path.rpartition(".")[2]
    if not class_path.startswith(PACKAGE) or not name.isidentifier():
        return None
    return next((kind for pattern, kind in _KINDS if fnmatchcase(name, pattern)), None)


# Classes of modules --------------------------------------------------------------------------------------------------
# KTransformers matches its own copies of the models' code; Hugging Face's names differ a little.
_ROTARY_VARIANTS = ("yarn", "linearscaling", "dynamicntkscaling")
_ROUTERS = {"modeling_deepseek": "deepseekv2topkrouter", "modeling_deepseek_v3": "deepseekv3topkrouter"}  # of `MoEGate`
_ONCE_LINEAR = ("qwen2moetopkrouter", "qwen3moetopkrouter")  # a plain Linear in KTransformers' copies


def answers_to(class_name: str) -> frozenset[str]:
    """Return the spellings of `match.class` that match a module of Hugging Face's class."""
    plain = class_name.casefold()
    return frozenset((plain, "linear")) if plain in _ONCE_LINEAR else frozenset((plain,))


def spelling(match_class: str) -> str:
    """Normalise a class path: `ktransformers.models.modeling_deepseek.DeepseekV2MoE` to `deepseekv2moe`."""
    module, _, name = match_class.rpartition(".")
    if name == "MoEGate":
        return _ROUTERS.get(module.rpartition(".")[2], "moegate")
    plain = name.casefold()
    if plain.endswith("rotaryembedding"):
        for variant in _ROTARY_VARIANTS:
            plain = plain.replace(f"{variant}rotaryembedding", "rotaryembedding")
    return plain
