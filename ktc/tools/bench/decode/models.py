"""The models of this process: the GGUF file compiled and loaded by ktc, and the stock model with the same weights.

In: the checkpoint folder and a request. Out: an engine. Refused: what `compile` and `load` refuse.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ktc import compiler
from ktc.foundation import host
from ktc.foundation.host import Host
from ktc.model.checkpoint import open_index
from ktc.model.loading.buffers import compute_buffers
from ktc.model.loading.load import load
from ktc.model.packed_store.weight_store import fill
from ktc.stages.capture.model import build_on_meta
from ktc.stages.capture.weights import map_weights
from ktc.tools.bench.decode.request import Request


def host_of(request: Request) -> Host:
    """Return this machine with the threads and the instruction set of the request."""
    here = host.detect()
    here = host.restrict(here, request.isa) if request.isa else here
    return replace(here, cores=min(here.cores, request.threads), threads=min(here.threads, request.threads))


def compiled_model(request: Request, folder: Path, out: Path) -> PreTrainedModel:
    """Return the compiled model. Raises what `compile` and `load` raise."""
    compiler.compile(folder, request.rule, out, settings=request.settings, host=host_of(request))
    return load(out)


def stock_model(folder: Path, config: Any) -> PreTrainedModel:
    """Return the stock model in bf16 with the file's weights, dequantised."""
    model = build_on_meta(config)
    index = open_index(folder)
    fill(model, map_weights(model, index).sources, index, {})
    compute_buffers(model, {})
    return model
