"""The fixed vocabulary of rule programs: operators, roles, rewrite targets, settings and facts.

A new rewrite is a row here plus its pass; the grammar does not change. A target that is not implemented yet has
`available = False`: programs with it are checked and planned like any other, and `compile` refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktc.dsl.ruleset import Facet, Value
from ktc.dsl.types import FLOAT, INT, SIZE, STRING, Type
from ktc.formats import FORMATS, Codes, Dense
from ktc.isa import INSTRUCTION_SETS

DECLARATIONS = ("import", "param", "require", "pattern", "rule", "plan", "lora")
_CLAUSES = ("as", "with", "in", "else", "is", "overrides", "match", "at", "except", "where", "expect", "on")
KEYWORDS = frozenset((*DECLARATIONS, *_CLAUSES, "and", "or", "not", "has", "true", "false"))

ENUMS: Mapping[str, tuple[str, ...]] = {
    "format": ("stored", *(name for name, row in FORMATS.items() if not (isinstance(row, Dense) and row.oracle))),
    "isa": ("auto", *INSTRUCTION_SETS),
    "activations": ("keep", "recompute"),
    "kernel": ("torch", "gemv", "marlin", "fp8", "q8", "w8a8", "ipex", "llamafile"),
    "moe_kernel": ("torch", "grouped_mm", "marlin"),
    "expert_part": ("gate", "up", "down"),
    "attn": ("sdpa", "flash", "flashinfer", "eager"),
    "dtype": ("f64", "f32", "f16", "bf16", "fp8", "int8", "int4"),
    "quant": ("int4", "int8", "fp8", "nvfp4"),
    "pack": ("none", "int32x8", "marlin", "gguf_q4_k"),
    "act": ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"),
    "scoring": ("softmax", "sigmoid"),
    "phase": ("never", "decode", "prefill", "always"),
    "cache": ("compressed", "expanded"),
    "numa": ("none", "shard", "replicate"),
    "auto": ("none", "intensity", "sequential", "balanced"),
    "mode": ("train", "infer"),
    "weights": ("safetensors", "gguf"),
    "recompute": ("none", "experts", "layers"),
    "facet": ("kernel", "adapter", "quant", "place"),
    "device": ("auto", "cpu"),  # besides the literals cuda:0, xpu:1, npu:0, hip:0
}
DEVICE_FAMILIES = ("cuda", "xpu", "npu", "hip")
SCALARS = ("int", "float", "bool", "string", "size")


def type_of(name: str) -> Type:
    """Return the type of a schema entry such as `int`, `list[format]` or `set[isa]`."""
    container, _, element = name.removesuffix("]").rpartition("[")
    assert element in SCALARS or element in ENUMS, f"schema names an unknown type {name}"
    return Type(element, "list" if container == "list" else "set" if container == "set" else "one")


def _types(**rows: str) -> dict[str, Type]:
    return {name: type_of(row) for name, row in rows.items()}


# Operators of the normal form ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Operator:
    """`operands` is (fewest, most), most `None` for any number; `results` is `None` if it varies.

    `kind` is the kind of a capture bound to it; `value` is a plain intermediate.
    """

    operands: tuple[int, int | None]
    results: int | None = 1
    kind: str = "value"
    attributes: Mapping[str, Type] = field(default_factory=dict[str, Type])


def _operator(
    fewest: int, most: int | None, results: int | None = 1, kind: str = "value", **attributes: str
) -> Operator:
    return Operator((fewest, most), results, kind, _types(**attributes))


_UNARY = ("silu", "gelu", "relu", "tanh", "sigmoid", "softplus", "exp", "log", "sqrt", "rsqrt", "neg")
_BINARY = ("add", "mul", "sub", "div", "matmul", "pow", "eq", "ge", "gt", "le", "lt")
_ALONG_A_DIMENSION = ("softmax", "log_softmax", "sum", "mean", "amax", "cumsum")

OPERATORS: Mapping[str, Operator] = {
    "linear": _operator(1, 1, kind="linear", in_features="int", out_features="int", bias="bool"),
    "experts": _operator(3, 3, kind="experts", num_experts="int", hidden="int", inter="int", act="act"),
    "embedding": _operator(1, 1, kind="embedding", rows="int", dim="int"),
    "rms_norm": _operator(1, 1, kind="norm", eps="float"),
    "layer_norm": _operator(1, 1, kind="norm", eps="float"),
    "sdpa": _operator(3, None, kind="sdpa", causal="bool", scale="float"),
    "rope": _operator(1, None),
    "weight": _operator(0, 0, kind="weight"),
    "const": _operator(0, 0),
    "from": _operator(1, 1),
    **{name: _operator(1, 1) for name in _UNARY},
    **{name: _operator(2, 2) for name in _BINARY},
    **{name: _operator(1, 1, dim="int") for name in _ALONG_A_DIMENSION},
    "max": _operator(1, 1, results=None, dim="int"),
    "topk": _operator(1, 1, results=2, k="int", dim="int"),
    "sort": _operator(1, 1, results=2, dim="int"),
    "clamp": _operator(1, 3),
    "clamp_min": _operator(2, 2),
    "clamp_max": _operator(2, 2),
    "gather": _operator(2, 2, dim="int"),
    "scatter": _operator(1, None, dim="int"),
    "masked_fill": _operator(2, 3),
    "select": _operator(3, 3),
    "zeros_like": _operator(1, 1),
    "ones_like": _operator(1, 1),
    "logical_not": _operator(1, 1),
    "one_hot": _operator(1, 1),
    "index": _operator(2, None),
    "slice": _operator(1, 1, dim="int"),
    "split": _operator(1, 1, results=None, dim="int"),
    "chunk": _operator(1, 1, results=None, dim="int"),
    "cat": _operator(1, None, dim="int"),
    "stack": _operator(1, None, dim="int"),
}
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}

# Roots of `match` without a pattern, and the kind of the matched node.
MATCHABLE: Mapping[str, str] = {
    "linear": "linear",
    "experts": "experts",
    "embedding": "embedding",
    "rms_norm": "norm",
    "layer_norm": "norm",
    "sdpa": "sdpa",
    "module": "module",
}

# Attributes of captures ----------------------------------------------------------------------------------------------
CAPTURE_ATTRIBUTES: Mapping[str, Type] = {
    "path": STRING,
    "layer": INT,
    "class": STRING,
    "dtype": type_of("dtype"),
    "bytes": SIZE,
    "intensity": FLOAT,  # FLOPs per weight byte at `plan.tokens` tokens
}
KIND_ATTRIBUTES: Mapping[str, Mapping[str, Type]] = {
    operator.kind: operator.attributes for operator in OPERATORS.values() if operator.kind != "value"
}


# Roles ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Role:
    """The promise of `is ROLE`: captures that are always present, optional captures, and computed attributes.

    A member's value is the required kind or role of the capture.
    """

    members: Mapping[str, str]
    optional: Mapping[str, str]
    attributes: Mapping[str, Type]


ROLES: Mapping[str, Role] = {
    "mlp": Role(
        {"down": "linear"},
        {"gate": "linear", "up": "linear", "gate_up": "linear"},
        _types(hidden="int", inter="int", act="act"),
    ),
    "router": Role({"gate": "linear"}, {"bias": "weight"}, _types(top_k="int", num_experts="int", scoring="scoring")),
    "moe": Role(
        {"router": "router", "experts": "experts"},
        {"shared": "mlp"},
        _types(top_k="int", num_experts="int", hidden="int", inter="int", act="act", scoring="scoring"),
    ),
    "attention": Role(
        {"q": "linear", "k": "linear", "v": "linear", "o": "linear", "core": "sdpa"},
        {"q_norm": "norm", "k_norm": "norm"},
        _types(heads="int", kv_heads="int", head_dim="int"),
    ),
    "mla": Role(
        {"q": "linear", "kv_a": "linear", "kv_b": "linear", "o": "linear", "core": "sdpa"},
        {"q_a": "linear"},
        _types(heads="int", kv_rank="int", rope_dim="int", nope_dim="int", v_dim="int"),
    ),
}


# Rewrite targets -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting of a target. `required` has precedence over `default`; with a default of `None` the plan chooses."""

    type: Type
    default: Value = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A rewrite. `facet` is `None` if the setting `facet` names it; the first setting may be positional.

    `accepts` lists roles and kinds (`*` any). `absorbs` lists the captures that are no longer separate nodes
    afterwards. `pins` lists the captures that it forces onto a device. `hosts` lists the targets that it performs
    itself on absorbed captures. `inside` lists the captures that it applies to if a rule names none.
    """

    facet: Facet | None
    accepts: tuple[str, ...]
    settings: Mapping[str, SettingSpec]
    absorbs: tuple[str, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    hosts: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    available: bool = False


def _setting(type_name: str, default: Value = None, required: bool = False) -> SettingSpec:
    return SettingSpec(type_of(type_name), default, required)


_ADAPTER = {"rank": _setting("int"), "alpha": _setting("float")}  # unset: from the `lora` block
_QUANTISATION = {
    "format": _setting("quant", required=True),
    "group": _setting("int", 32),
    "symmetric": _setting("bool", True),
    "scale": _setting("dtype", "bf16"),
    "pack": _setting("pack", "none"),
}
_QUANTISABLE = ("linear", "experts", "moe", "mlp")
_IN_EXPERTS = ("lora_experts", "fake_quant", "quantize")

TARGETS: Mapping[str, Target] = {
    "lora_linear": Target(
        "adapter",
        ("linear",),
        {**_ADAPTER, "dropout": _setting("float"), "dtype": _setting("dtype")},
        available=True,
    ),
    "lora_experts": Target(
        "adapter",
        ("moe", "experts"),
        {"targets": _setting("list[expert_part]", ("gate", "up", "down")), **_ADAPTER},
        inside=("experts",),
        available=True,
    ),
    "kt_linear": Target(
        "kernel",
        ("linear",),
        {"kernel": _setting("kernel", required=True), "prefill": _setting("kernel")},
        available=True,
    ),
    "cpu_moe": Target(
        "kernel",
        ("moe", "experts"),
        {
            "format": _setting("format", "stored"),
            "isa": _setting("isa", "auto"),
            "numa": _setting("numa", "shard"),
            "activations": _setting("activations", "keep"),
            "threads": _setting("int"),
        },
        absorbs=("experts",),
        pins={"experts": "cpu"},
        hosts=_IN_EXPERTS,
        available=True,
    ),
    "gpu_moe": Target(
        "kernel",
        ("moe", "experts"),
        {"kernel": _setting("moe_kernel", required=True)},
        absorbs=("experts",),
        hosts=_IN_EXPERTS,
    ),
    "mla_absorbed": Target(
        "kernel",
        ("mla",),
        {
            "cache": _setting("cache", "compressed"),
            "absorb": _setting("phase", "decode"),
            "move_elision": _setting("bool", True),
            "kernel": _setting("attn", "sdpa"),
        },
        absorbs=("kv_b", "core"),
    ),
    "fused_attention": Target(
        "kernel", ("attention", "mla"), {"kernel": _setting("attn", required=True)}, absorbs=("core",)
    ),
    "sparse_attention": Target(
        "kernel",
        ("attention", "mla"),
        {
            "topk": _setting("int", required=True),
            "block": _setting("int", 64),
            "window": _setting("int", 0),
            "sink": _setting("int", 0),
            "min_context": _setting("int", 0),
        },
        absorbs=("core",),
    ),
    "fused": Target("kernel", ("router", "norm", "mlp", "module"), {"impl": _setting("string", "auto")}),
    "fake_quant": Target("quant", _QUANTISABLE, _QUANTISATION),
    "quantize": Target("quant", _QUANTISABLE, _QUANTISATION),
    "place": Target(
        "place", ("*",), {"device": _setting("device", required=True), "prefill": _setting("device")}, available=True
    ),
    "keep": Target(None, ("*",), {"facet": _setting("facet", required=True)}, available=True),
}

# Compatibility -------------------------------------------------------------------------------------------------------
# Kernels without a backward pass, in any setting.
INFERENCE_ONLY = frozenset({"marlin", "fp8", "q8", "w8a8", "ipex", "llamafile", "flashinfer"})
# Formats of `cpu_moe` that would quantise the weights of a `quant` rewrite again, with the only format that each can
# host. `stored` is decided when the checkpoint is known; floating-point formats host every quantisation.
REQUANTISING: Mapping[str, str | None] = {
    name: name if isinstance(row, Codes) else None for name, row in FORMATS.items() if row.coded
}
# Layouts of packed weights that hold one format only.
PACK_FORMATS: Mapping[str, str] = {"int32x8": "int4", "gguf_q4_k": "int4"}

# Blocks, facts, limits -----------------------------------------------------------------------------------------------
# `plan` also takes a size under each device: its budget.
BLOCKS: Mapping[str, Mapping[str, Type]] = {
    "plan": _types(
        auto="auto", unplaced="device", grads="device", tokens="int", mode="mode", cuda_graph="phase",
        weights="weights", layerwise_prefill="int", recompute="recompute",
    ),
    "lora": _types(rank="int", alpha="float", dropout="float", dtype="dtype", targets="list[string]"),
}  # fmt: skip
FACTS: Mapping[str, Mapping[str, Type]] = {
    "host": {"isa": type_of("set[isa]"), "cores": INT, "numa": INT, "memory": SIZE},
    "gpu": {"count": INT, "memory": SIZE},
    "model": {"type": STRING, "layers": INT, "hidden": INT, "experts": INT, "dtype": type_of("dtype")},
}
# Inclusive bounds of a setting, in any block.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "rank": (1, 1024),
    "alpha": (0, 2**20),
    "dropout": (0, 1),
    "group": (8, 4096),
    "threads": (1, 4096),
    "tokens": (1, 2**24),
    "layerwise_prefill": (0, 2**24),
    **dict.fromkeys(("topk", "block"), (1, 2**20)),
    **dict.fromkeys(("window", "sink", "min_context"), (0, 2**24)),
}
PARAM_TYPES = (*SCALARS, *ENUMS)
