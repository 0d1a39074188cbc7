"""The loader's conversions of the checkpoint's weights: a reason for each, so that no growth or rounding is silent.

Codes are dequantised unless a kernel multiplies them as stored. Weights are quantised if a rule requests fewer bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ktc.foundation.formats import BLOCKS, CODES, FORMATS, METHODS, WeightFormat
from ktc.model.checkpoint import WeightSource
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.stages.capture import CapturedModel
from ktc.stages.plan.collapse import collapse
from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.types import Reason


def explain_conversions(draft: PlanDraft) -> PlanDraft:
    """Explain what the loader converts, by format and module; from the config without a checkpoint."""
    return draft.with_reasons(*_conversions(draft))


def _conversions(draft: PlanDraft) -> Iterator[Reason]:
    captured, weights, kernels, linears = draft.captured, draft.request.sources, draft.experts, draft.packed_linears
    if not weights:
        yield from _by_config(captured, kernels)
    groups: dict[tuple[str, str], list[WeightSource]] = {}
    for source in weights:
        owner, _, leaf = source.target.rpartition(".")
        if owner in linears and leaf == "weight":
            text = f"stored as {source.format}, multiplied as stored"
        else:
            text = _fate(source, kernels.get(owner), _name(captured))
        if text:
            parent, name = _split(source)
            kind = ["*" if part.isdigit() else part for part in (*parent.split("."), *([name] if source.part else []))]
            groups.setdefault((text, ".".join(kind)), []).append(source)
    for (text, _), sources in groups.items():
        size = sum(math.prod(source.loaded_shape) for source in sources) * captured.model.dtype.itemsize
        yield Reason(_paths(sources), text.format(size=f"{size:,}"))


def _fate(source: WeightSource, spec: FusedMoeSpec | None, loaded: str) -> str:
    """Describe the conversion of a tensor, empty if it is kept; `{size}` is replaced by bytes of the model's dtype."""
    leaf = source.target.rpartition(".")[2]
    if spec is not None and (weight_format := spec.format_of(leaf)) in (*CODES, *BLOCKS):
        if _is_kept(source, spec, weight_format):
            return f"stored as {source.format}, multiplied as stored"
        if (source.part or "").endswith("_bias"):
            return ""
        row = FORMATS[weight_format]
        if not row.coded and source.dtype == row.stored:
            return f"stored as {source.dtype}, multiplied after rounding to bf16"
        return f"stored as {source.format}, {_rounded(spec, weight_format)}"
    return (
        ""
        if source.quantised is None and source.block is None
        else f"stored as {source.format}, dequantised to {loaded} at load: {{size}} bytes"
    )


def _is_kept(source: WeightSource, spec: FusedMoeSpec, weight_format: WeightFormat) -> bool:
    return source.kept_as == (weight_format, _unit(spec, weight_format))


def _unit(spec: FusedMoeSpec, weight_format: WeightFormat) -> int:
    """Return the number of weights in a block of a kernel's format, or in a group with a scale."""
    return BLOCKS[weight_format].weights if weight_format in BLOCKS else spec.group_of(weight_format)


def _rounded(spec: FusedMoeSpec, weight_format: WeightFormat) -> str:
    if not FORMATS[weight_format].coded:
        return f"rounded to {weight_format} at load, and to bf16 as it is multiplied"
    if weight_format in BLOCKS:
        size = BLOCKS[weight_format].weights
        return f"quantised to {weight_format} in blocks of {size} at load, which rounds each weight"
    group = spec.group_of(weight_format)
    groups = f"in groups of {group}" if group else "with a scale per row"
    rows = ", and rows of activations in forward" if FORMATS[weight_format].integer_products else ""
    return f"quantised to {weight_format} {groups} at load, which rounds each weight{rows}"


def _by_config(captured: CapturedModel, kernels: Mapping[str, FusedMoeSpec]) -> Iterable[Reason]:
    stored = captured.stored_format
    kept = False
    by_spec: dict[FusedMoeSpec, list[str]] = {}
    for path, spec in kernels.items():
        by_spec.setdefault(spec, []).append(path)
    for spec, paths in by_spec.items():
        if spec.format_down not in (*CODES, *BLOCKS):  # by a config alone both products are stored alike
            continue
        kept = (stored, captured.stored_group) == (spec.format_down, _unit(spec, spec.format_down))
        fate = "multiplied as stored" if kept else _rounded(spec, spec.format_down)
        yield Reason(collapse(paths), f"stored as {stored} by config.json, {fate}")
    if stored in METHODS.values() and not kept:
        root = captured.model.base_model_prefix or "model"
        yield Reason(root, f"stored as {stored} by config.json, dequantised to {_name(captured)} at load")


def _name(captured: CapturedModel) -> str:
    return str(captured.model.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _paths(sources: Sequence[WeightSource]) -> str:
    """`model.layers.[1..60].self_attn.{q_proj,o_proj}`: the modules of one kind of parent as a choice."""
    parents, names = zip(*map(_split, sources), strict=True)
    choice = list(dict.fromkeys(names))
    leaf = choice[0] if len(choice) == 1 else "{" + ",".join(choice) + "}"
    return f"{collapse(list(dict.fromkeys(parents)))}.{leaf}".lstrip(".")


def _split(source: WeightSource) -> tuple[str, str]:
    """Return the module that holds the parameter, as its parent and its own name."""
    parent, _, name = source.target.rpartition(".")[0].rpartition(".")
    return parent, name
