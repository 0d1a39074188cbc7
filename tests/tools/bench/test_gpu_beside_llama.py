"""`benchmarks/gpu_beside_llama.py`: the layers whose experts llama.cpp keeps on the CPU for a budget."""

from __future__ import annotations

import runpy
from pathlib import Path

from ktc.tools.bench.decode.model_file import config_of, tensors_of
from ktc.tools.bench.sizes import SIZES

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "gpu_beside_llama.py"))


def test_as_many_layers_as_fit_the_budget_keep_their_experts_on_the_gpu() -> None:
    layers_on_cpu = SCRIPT["layers_on_cpu"]
    tensors = tensors_of(config_of(SIZES["gpt_oss_20b"], None), "gpt-oss", "mxfp4")
    of_layer = sum(t.nbytes for t in tensors if t.name.startswith("blk.3.") and "_exps." in t.name)
    whole = sum(t.nbytes for t in tensors if not t.name.startswith("token_embd")) + SCRIPT["_BUFFERS"]
    assert layers_on_cpu(tensors, whole) == 0
    assert layers_on_cpu(tensors, whole - 1) == 1
    assert layers_on_cpu(tensors, whole - of_layer - 1) == 2
    assert layers_on_cpu(tensors, 1) == 24
