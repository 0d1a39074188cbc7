"""What the checkpoint stores in fewer bits than memory will hold: a reason for each, so that nothing grows in silence."""

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
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    if not weights and captured.stored_format in _QUANTISED:
        text = f"stored as {captured.stored_format} by config.json, dequantised to {name} at load"
        yield Reason(captured.model.base_model_prefix or "model", text)
    groups: dict[tuple[str, str], list[WeightSource]] = {}
    for source in weights:
        if source.quantised is not None:
            module = source.target.rpartition(".")[0]
            kind = ".".join("*" if part.isdigit() else part for part in module.split("."))
            groups.setdefault((source.format, kind), []).append(source)
    for (stored, _), sources in groups.items():
        size = sum(math.prod(source.loaded_shape) for source in sources) * dtype.itemsize
        paths = list(dict.fromkeys(source.target.rpartition(".")[0] for source in sources))
        yield Reason(collapse(paths), f"stored as {stored}, dequantised to {name} at load: {size:,} bytes")
