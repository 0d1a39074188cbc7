"""Decoding steps of a model on the CPU as programs: recorded once per batch size and capacity, then run in one call.

The steps are those of `cuda_graph.py`, with the model's own forward, memory at fixed addresses and the comparison of
states. Instead of a CUDA graph, a native program computes them (`ktc.model.steps`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.decode_steps.graph_replay import Compute, Replay, Wait
from ktc.model.kernels.kernel_library import Kernel, permitted_threads
from ktc.model.kernels.step_context import StepContext
from ktc.model.steps.program import StepProgram, record_program

log = logging.getLogger(__name__)
_TRIES: Final = 3
_TOLERANCE: Final = 0.1  # of logits, relative: where a rounding sends a token to another expert they differ that much


def native_steps(kernel: Kernel, threads: int) -> DecodeGraphs:
    """Return the steps of one model, whose programs `kernel` makes and which use at most this number of threads."""
    threads = permitted_threads(threads)

    def record(
        compute: Compute, device: torch.device, changing: Sequence[Tensor], _: object, context: StepContext
    ) -> tuple[Any, Replay]:
        try:
            output, program, (logits,) = record_program(
                compute, changing, kernel, threads, lambda out: (out.logits,), context
            )
            _require_same(compute, program, logits, changing[0])
        except ValueError:
            raise
        except Exception as error:  # of code that was never recorded before: the step stays the model's own
            raise ValueError(f"{type(error).__name__}: {error}") from error
        output.logits = logits
        if program.foreign:
            names = ", ".join(dict.fromkeys(program.foreign))
            log.info("%d operations of a decoding step are PyTorch's: %s", len(program.foreign), names)

        def replay() -> Wait:
            program.run()
            return _done

        return output, replay

    return DecodeGraphs(
        StepRecorder(record, "cpu", None, rounded=False, ahead=False, code="L453", form="a program of its own")
    )


def _done() -> None:
    """Return at once: a step on the CPU is done when it has begun."""


def _require_same(compute: Compute, program: StepProgram, logits: Tensor, ids: Tensor) -> None:
    """Compare the program with the model on other tokens than the recorded ones. Raises ValueError.

    A program with a wrong constant is wrong for all others. One that only rounds differently sends a token to another
    expert now and then, so some of them decide. The keys and values that this writes are written again by the step
    itself.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        recorded = ids.clone()
        try:
            for by in range(1, _TRIES + 1):
                ids.copy_(torch.where(recorded >= by, recorded - by, recorded + by))
                expected = compute().logits.double()
                program.run()
                if float((logits.double() - expected).norm()) <= _TOLERANCE * float(expected.norm()):
                    return
        finally:
            ids.copy_(recorded)
    raise ValueError("its program computes other logits for other tokens")
