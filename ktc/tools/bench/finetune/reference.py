"""The fp32 reference of a measured model: plain PyTorch on the CPU, with the values that its packed weights have.

In: the measured model with its adapter, and the folder that it was compiled into. Out: the same model without kernels,
in fp32. Weights of experts are unpacked: of a format of codes, the reference has the dequantised values. Refused: a
tensor whose values the measured model does not hold as such (U030).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.model.experts.layouts.stock_layout import parts_of
from ktc.model.experts.module import FusedMoe
from ktc.model.linears.streamed_linear import StreamedLinear
from ktc.model.loading.load import load
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.requests import Finetune

_WRAPPED = ".base_layer"  # how PEFT names the module that it wraps


def reference_of(tuned: PeftModel, out: Path, request: Finetune, sink: ProgressSink) -> PreTrainedModel:
    """Return the reference of `tuned`, which is compiled in `out`. Raises InputRefused (U030)."""
    seed = request.seed if request.random_weights else None
    made = load(out, reference=True, random_weights=seed, progress=sink.part("weights of the reference"))
    base = tuned.get_base_model()
    tensors, wanted = dict(_tensors(base)), cast("dict[str, Tensor]", made.state_dict())
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise request.refused(f"the compiled model does not hold `{missing[0]}` as values", "leave `reference` out")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])
        for plain, packed in zip(_experts(made), _experts(base), strict=True):
            _unpack(packed, plain)
    return made


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by their names without an adapter, with those that are streamed."""
    state: dict[str, Tensor] = model.state_dict()
    yield from ((name.replace(_WRAPPED, ""), tensor) for name, tensor in state.items())
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, StreamedLinear) and module.kept is not None:
            yield f"{name.replace(_WRAPPED, '')}.weight", module.kept


def _experts(model: nn.Module) -> list[FusedMoe]:
    return [module for module in model.modules() if isinstance(module, FusedMoe)]


def _unpack(packed: FusedMoe, plain: FusedMoe) -> None:
    for expert in range(packed.num_experts):
        for part in parts_of(packed.form):
            plain.load_expert(expert, part, packed.expert(expert, part))
