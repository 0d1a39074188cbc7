"""What the checkpoint stores in fewer bits than memory will hold: a reason for each, so that no growth is silent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ktc.capture import CapturedModel
from ktc.checkpoint import WeightSource
from ktc.plan.explain import collapse
from ktc.plan.types import Reason

_QUANTISED = ("fp8", "int4", "mxfp4")


def dequantised(captured: CapturedModel, weights: Sequence[WeightSource]) -> Iterator[Reason]:
    """The weights that the loader dequantises, by format and module; by the config alone where `weights` is empty."""
    dtype = captured.model.dtype
    loaded = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    if not weights and captured.stored_format in _QUANTISED:
        text = f"stored as {captured.stored_format} by config.json, dequantised to {loaded} at load"
        yield Reason(captured.model.base_model_prefix or "model", text)
    groups: dict[tuple[str, str], list[WeightSource]] = {}
    for source in weights:
        if source.quantised is not None:
            parent, name = _split(source)
            kind = ["*" if part.isdigit() else part for part in (*parent.split("."), *([name] if source.part else []))]
            groups.setdefault((source.format, ".".join(kind)), []).append(source)
    for (stored, _), sources in groups.items():
        size = sum(math.prod(source.loaded_shape) for source in sources) * dtype.itemsize
        yield Reason(_paths(sources), f"stored as {stored}, dequantised to {loaded} at load: {size:,} bytes")


def _paths(sources: Sequence[WeightSource]) -> str:
    """`model.layers.[1..60].self_attn.{q_proj,o_proj}`: the modules of one kind of parent as a choice."""
    parents, names = zip(*map(_split, sources), strict=True)
    choice = list(dict.fromkeys(names))
    return f"{collapse(list(dict.fromkeys(parents)))}.{choice[0] if len(choice) == 1 else '{' + ','.join(choice) + '}'}"


def _split(source: WeightSource) -> tuple[str, str]:
    """The module that holds the parameter, as its parent and its own name."""
    parent, _, name = source.target.rpartition(".")[0].rpartition(".")
    return parent, name
