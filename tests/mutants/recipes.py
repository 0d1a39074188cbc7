"""Mutants of recipes: rows of `ktc.json` with other arguments, at other places, missing or twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ktc.model.manifest.manifest import Rewrite
from mutants.mutant import Mutant, Recipe

Change = Callable[[Recipe], Recipe]
EXPERTS, BLOCK, LINEAR, BARE = "fused_moe", "graph_block", "kt_linear", "lora_linear"


def rows_of(module: str, change: Callable[[Rewrite], Rewrite], only: slice = slice(None)) -> Change:
    """Return the change of some rows that put `module` in place."""

    def changed(rows: Recipe) -> Recipe:
        chosen = [row for row in rows if row.module == module][only]
        return tuple(change(row) if row in chosen else row for row in rows)

    return changed


def arguments(module: str = EXPERTS, only: slice = slice(None), **change: Callable[[Any], Any]) -> Change:
    """Return the change of some arguments, each from its value."""

    def changed(row: Rewrite) -> Rewrite:
        return replace(row, args={**row.args, **{name: new(row.args[name]) for name, new in change.items()}})

    return rows_of(module, changed, only)


def form(old: str, new: str, only: slice = slice(None)) -> Change:
    """Return the change of a pattern in the text of the form."""
    return arguments(only=only, form=lambda text: re.sub(old, new, text))


def less(value: int) -> int:
    return value - 1


def constant(value: object) -> Callable[[Any], Any]:
    return lambda _: value


def without(module: str) -> Change:
    return lambda rows: tuple(row for row in rows if row.module != module)


def twice(module: str) -> Change:
    return lambda rows: (*rows, *(row for row in rows if row.module == module))


def reversed_rows(rows: Recipe) -> Recipe:
    return rows[::-1]


def places_exchanged(rows: Recipe) -> Recipe:
    """Exchange the FQNs of the first and the last row."""
    first, *between, last = rows
    return (replace(first, fqn=last.fqn), *between, replace(last, fqn=first.fqn))


def at(module: str, new: Mapping[str, str]) -> Change:
    """Return the change of ends of FQNs."""

    def moved(row: Rewrite) -> Rewrite:
        end = next((old for old in new if row.fqn.endswith(old)), None)
        return row if end is None else replace(row, fqn=row.fqn.removesuffix(end) + new[end])

    return rows_of(module, moved)


def to_layer(old: str, new: str) -> Change:
    """Return the change of rows of one layer into rows of another."""
    return lambda rows: tuple(replace(row, fqn=row.fqn.replace(old, new)) for row in rows)


FIRST, LAST = slice(0, 1), slice(-1, None)
_ANY_K = "experts compute any number of choices per token; `top_k` is the kernel's preferred one"
_NO_KERNEL = "it says how a kernel runs, and the same numbers come out"
_SAME = "`FusedLinear` computes what the stock layer computes: only where PEFT puts adapters changes"
_ROWS: tuple[tuple[str, str, Change, str], ...] = (
    ("activation silu -> gelu", "deepseek_v2", form("silu", "gelu"), ""),
    ("activation silu -> relu in the last layer alone", "deepseek_v3", form("silu", "relu", LAST), ""),
    ("activation gelu -> its tanh form", "basalt", form("^gelu", "gelu_tanh"), ""),
    ("activation relu2 -> relu", "nemotron_h", form("relu2", "relu"), ""),
    ("activation with a gate", "nemotron_h", form(" ungated", ""), ""),
    ("limit 7.0 -> 6.5", "gpt_oss", form("limit=7.0", "limit=6.5"), ""),
    ("limit dropped", "gpt_oss", form("limit=7.0, ", ""), ""),
    ("limit dropped in one layer", "gpt_oss", form("limit=7.0, ", "", LAST), ""),
    ("limit 7.0 -> 7.01 in the first layer", "gpt_oss", form("limit=7.0", "limit=7.01", FIRST), ""),
    ("limit 7.0 -> 7.5", "minimax_m3_vl_text", form("limit=7.0", "limit=7.5"), ""),
    ("alpha 1.702 -> 1.7", "gpt_oss", form("1.702", "1.7"), ""),
    ("alpha dropped", "minimax_m3_vl_text", form("alpha=1.702, ", ""), ""),
    ("offset dropped", "gpt_oss", form(", up_offset=1.0", ""), ""),
    ("offset 1.0 -> -1.0", "minimax_m3_vl_text", form("offset=1.0", "offset=-1.0"), ""),
    ("biases dropped", "gpt_oss", form(" biased", ""), ""),
    ("interleaved dropped", "gpt_oss", form(" interleaved", ""), ""),
    ("interleaved added", "deepseek_v2", form("$", " interleaved"), ""),
    ("transposed dropped", "basalt", form(" transposed", ""), ""),
    ("the limit of another layer", "slopes", form("limit=0.5", "limit=7.0"), ""),
    ("num_experts one less", "deepseek_v2", arguments(num_experts=less), ""),
    ("hidden one less", "qwen2_moe", arguments(hidden=less), ""),
    ("top_k one less", "deepseek_v2", arguments(top_k=less), _ANY_K),
    ("activations recomputed", "deepseek_v2", arguments(activations=constant("recompute")), _NO_KERNEL),
    ("seven threads", "deepseek_v2", arguments(threads=constant(7)), _NO_KERNEL),
    ("experts at the shared expert", "deepseek_v2", at(EXPERTS, {".experts": ".shared_experts"}), ""),
    ("experts at the whole block", "deepseek_v2", at(EXPERTS, {".mlp.experts": ".mlp"}), ""),
    ("experts at the router", "qwen2_moe", at(EXPERTS, {".experts": ".gate"}), ""),
    ("a linear layer at the attention", "qwen2_moe", at(LINEAR, {".q_proj": ""}), ""),
    ("a linear layer at a module that is not there", "qwen2_moe", at(LINEAR, {".q_proj": ".q_a_proj"}), ""),
    ("another module of linear layers", "qwen2_moe", rows_of(LINEAR, lambda r: replace(r, module=BARE)), ""),
    ("experts put as a linear layer", "qwen2_moe", rows_of(EXPERTS, lambda r: replace(r, module=LINEAR)), ""),
    ("rows of q and k exchanged", "qwen2_moe", at(LINEAR, {".q_proj": ".k_proj", ".k_proj": ".q_proj"}), _SAME),
    ("rows in reverse order", "deepseek_v2", reversed_rows, "rows of different modules do not depend on each other"),
    ("rows of experts missing", "deepseek_v2", without(EXPERTS), "the stock experts stay, and compute the same"),
    ("rows of experts twice", "deepseek_v2", twice(EXPERTS), "the second module takes the weights of the first"),
    ("rows of a list's experts missing", "orchard", without(EXPERTS), ""),
    ("rows of a list's block missing", "orchard", without(BLOCK), ""),
    ("a list's block twice", "orchard", twice(BLOCK), ""),
    ("a list's block after its experts", "orchard", reversed_rows, ""),
    ("gate and up of a list exchanged", "orchard", arguments(
        BLOCK, parts=lambda parts: {**parts, "gate": parts["up"], "up": parts["gate"]}), ""),
    ("a part of a list twice", "orchard", arguments(BLOCK, parts=lambda parts: {**parts, "up": parts["gate"]}), ""),
    ("a list's number of experts one less", "orchard", arguments(BLOCK, num_experts=less), ""),
    ("the list of another module", "hedge", arguments(BLOCK, experts=constant("stem")), ""),
    ("the form of a list, silu -> gelu", "hedge", form("silu", "gelu"), ""),
)  # fmt: skip
MUTANTS = tuple(Mutant(name, model, "recipe", change, why) for name, model, change, why in _ROWS)
