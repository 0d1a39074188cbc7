"""Decoding steps of a model on the CPU as programs: recorded once per batch size and capacity, then run in one call.

The steps are those of `cuda_graph.py`, with the model's own forward, memory at fixed addresses and the comparison of
states. Instead of a CUDA graph, a native program computes them (`ktc.steps`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ktc.experts.kernel_library import Kernel, permitted_threads
from ktc.model.cuda_graph import Compute, DecodeGraphs, Means
from ktc.steps.program import record_program

log = logging.getLogger(__name__)


def native_steps(kernel: Kernel, threads: int) -> DecodeGraphs:
    """Return the steps of one model, whose programs `kernel` makes and which use at most this number of threads."""
    threads = permitted_threads(threads)

    def record(
        compute: Compute, device: torch.device, changing: Sequence[Tensor]
    ) -> tuple[Any, Callable[[], None]]:  # fmt: skip
        output, program, (logits,) = record_program(compute, changing, kernel, threads, lambda out: (out.logits,))
        output.logits = logits
        if program.foreign:
            names = ", ".join(dict.fromkeys(program.foreign))
            log.info("%d operations of a decoding step are PyTorch's: %s", len(program.foreign), names)
        return output, program.run

    return DecodeGraphs(Means(record, "cpu", None, rounded=False, code="L453", form="a program of its own"))
