"""The fixed vocabulary of rule programs: operators, roles, words, settings and facts.

Rewrite targets are the rows of `ktc/model/targets`, whose fields are the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktc.foundation.formats import FORMATS, Codes
from ktc.foundation.isa import INSTRUCTION_SETS
from ktc.language.dsl.settings import SettingSpec, settings_of, words_of
from ktc.language.dsl.types import FLOAT, INT, SIZE, STRING, Type
from ktc.model.targets import TARGETS, LoraLinear
from ktc.model.targets.settings import Bounds

DECLARATIONS = ("import", "param", "require", "pattern", "rule", "plan", "lora")
_CLAUSES = ("as", "with", "in", "else", "is", "overrides", "match", "at", "except", "where", "expect", "on")
KEYWORDS = frozenset((*DECLARATIONS, *_CLAUSES, "and", "or", "not", "has", "true", "false"))


def _on_every_isa(dtype: str) -> bool:
    """Return whether each instruction set has kernels for weights of a dtype, so that no program gets the oracle."""
    return all(dtype in row.dtypes for row in INSTRUCTION_SETS.values())


ENUMS: Mapping[str, tuple[str, ...]] = {
    "format": ("stored", *(name for name, row in FORMATS.items() if _on_every_isa(row.dtype))),
    "isa": ("auto", *INSTRUCTION_SETS),
    "dtype": ("f64", "f32", "f16", "bf16", "fp8", "int8", "int4"),
    "act": ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"),
    "scoring": ("softmax", "sigmoid"),
    "phase": ("never", "decode", "prefill", "always"),
    "auto": ("none", "intensity"),
    "split": ("adaptive", "fixed"),
    "divided": ("off", "auto"),
    "mode": ("train", "infer", "generate", "serve"),
    "device": ("auto", "cpu"),  # besides the literals cuda:0, cuda:1
    **words_of(TARGETS.values()),  # those that only targets' settings have
}
DEVICE_FAMILIES = ("cuda",)
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
    "linear": _operator(
        1, 1, kind="linear", in_features="int", out_features="int", bias="bool", routes="bool", head="bool"
    ),
    "experts": _operator(3, 3, kind="experts", num_experts="int", hidden="int", inter="int", act="act"),
    "embedding": _operator(1, 1, kind="embedding", rows="int", dim="int"),
    "rms_norm": _operator(1, 1, kind="norm", eps="float"),
    "layer_norm": _operator(1, 1, kind="norm", eps="float"),
    "sdpa": _operator(3, None, kind="sdpa", causal="bool", scale="float"),
    "conv1d": _operator(1, 1, kind="conv"),
    "norm": _operator(1, 1, kind="norm", eps="float"),
    "recurrence": _operator(1, 2, kind="recurrence"),
    "rope": _operator(1, None),
    "weight": _operator(0, 0, kind="weight"),
    "const": _operator(0, 0),
    "from": _operator(1, 1),
    "every": _operator(1, 1),
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
} | {"module": _types(tower="bool")}  # a tower for images or sound, or a projector


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
    "recurrent": Role({"inputs": "linear", "o": "linear", "core": "recurrence"}, {"conv": "conv", "norm": "norm"}, {}),
}


# Settings of rewrite targets ------------------------------------------------------------------------------------------
SETTINGS: Mapping[str, Mapping[str, SettingSpec]] = {name: settings_of(target) for name, target in TARGETS.items()}

# Compatibility --------------------------------------------------------------------------------------------------------
# Formats of `cpu_moe` that would quantise the weights of a `quant` rewrite again, with the only format that each can
# host. `stored` is decided when the checkpoint is known; floating-point formats host every quantisation.
REQUANTISING: Mapping[str, str | None] = {
    name: name if isinstance(row, Codes) else None for name, row in FORMATS.items() if row.coded
}
# Blocks, facts, limits -----------------------------------------------------------------------------------------------
# `plan` also takes a size under each device: its budget.
BLOCKS: Mapping[str, Mapping[str, Type]] = {
    "plan": _types(
        auto="auto", unplaced="device", tokens="int", mode="mode", cuda_graph="phase",
        native_step="phase", layerwise_prefill="int", stream_buffer="size",
        experts_split="split", divided_prompts="divided",
    ),
    "lora": _types(rank="int", alpha="float", dropout="float", targets="list[string]"),
}  # fmt: skip
FACTS: Mapping[str, Mapping[str, Type]] = {
    "host": {"isa": type_of("set[isa]"), "cores": INT, "numa": INT, "memory": SIZE},
    "gpu": {"count": INT, "memory": SIZE},
    "model": {
        "type": STRING,
        "layers": INT,
        "hidden": INT,
        "experts": INT,
        "recurrent": INT,
        "dtype": type_of("dtype"),
    },
}
# Of the blocks' keys. Those of the `lora` block are the bounds of an adapter's settings.
BOUNDS: Mapping[str, Bounds] = {
    **{name: spec.bounds for name, spec in SETTINGS[LoraLinear.name].items() if spec.bounds is not None},
    "tokens": Bounds(1, 2**24),
    "layerwise_prefill": Bounds(0, 2**24),
}
PARAM_TYPES = (*SCALARS, *ENUMS)
# What has left the language, and what replaces it: words by their enum, keys by their block.
_PLANNER = "the planner orders modules by FLOPs per byte: write `auto = intensity`, or place modules by rules"
RETIRED: Mapping[tuple[str, str], str] = {
    ("auto", "sequential"): _PLANNER,
    ("auto", "balanced"): _PLANNER,
    ("plan", "weights"): "leave it out: the model's folder decides, and may hold safetensors or a GGUF file",
}
