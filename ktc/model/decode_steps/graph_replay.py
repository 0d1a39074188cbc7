"""A step as a CUDA graph: what records it, begins a replay and waits for one.

In: a function that computes the step at fixed addresses. Out: its output, and `Replay`. One more replay may begin while
another is under way: each has an event of its own, and who waits for the first does not wait for the calls of experts
of the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ktc.model.decode_steps.filled_scalars import FilledScalars
from ktc.model.decode_steps.host_constants import GivenConstants, HostConstant, NotedConstants
from ktc.model.experts.host.host_node import HostNodes
from ktc.model.kernels.step_context import StepContext

_WARM: Final = 2  # steps before the capture, in which libraries and allocators set themselves up
_UNDER_WAY: Final = 2  # replays at once
Compute = Callable[[], Any]  # to the output of a causal LM
Wait = Callable[[], None]  # called again after an interrupt
Replay = Callable[[], Wait]  # begins a recorded step; the function that it returns waits until the step is done
Record = Callable[[Compute, torch.device, Sequence[Tensor], HostNodes | None, StepContext], tuple[Any, Replay]]


def record_graph(
    compute: Compute, device: torch.device, changing: Sequence[Tensor], nodes: HostNodes | None, context: StepContext
) -> tuple[Any, Replay]:
    """Return the output of `compute`, and a function that replays it as a CUDA graph.

    Who waits for a replay sleeps while experts on the CPU, those of `nodes`, need the cores, and spins for the rest.
    A replay that raises is over, also where an interrupt came after its launch.
    Raises RuntimeError for an operation that cannot be captured, as one that waits for the GPU.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph, cached = torch.cuda.CUDAGraph(), torch.is_autocast_cache_enabled()
    constants = list[HostConstant]()  # of the last step before the capture
    torch.clear_autocast_cache()  # its casts of weights end with the context, and the graph would keep their addresses
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                constants.clear()
                try:
                    with NotedConstants(constants):
                        compute()
                finally:
                    stream.synchronize()  # host functions in it read memory that an error would free
        captured = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        with captured, GivenConstants(constants), FilledScalars():
            output = compute()
    finally:
        torch.set_autocast_cache_enabled(cached)
    sleeps = nodes is not None and nodes.launched
    events = itertools.cycle([torch.cuda.Event(blocking=sleeps) for _ in range(_UNDER_WAY)])

    def replay(_: Sequence[HostConstant] = constants) -> Wait:  # the graph reads them: they live as long as it does
        done, number = next(events), 0 if nodes is None else nodes.begun

        def wait() -> None:
            if nodes is not None:
                nodes.until_answered(done.query, number)
            done.synchronize()

        try:
            with torch.cuda.device(device):
                graph.replay()
                done.record(torch.cuda.current_stream(device))
            return wait
        except Exception:
            raise
        except BaseException:
            torch.cuda.current_stream(device).synchronize()
            raise

    return output, replay


def with_calls(replay: Replay, nodes: HostNodes, before: Wait | None = None) -> Wait:
    """Begin a replay whose calls of experts are expected. After an error of the GPU none is any more.

    After an interrupt of the wait, the GPU still requests them: it is raised when the step is done, unless another one
    comes. An error or interrupt before the replay has begun is raised when the replay `before` it is done, since the
    GPU still requests that one's calls.
    """
    try:
        nodes.begin()
        wait = replay()
    except BaseException:
        try:
            if before is not None:
                before()
        finally:
            nodes.dismiss()
        raise

    def until_done() -> None:
        try:
            wait()
        except RuntimeError:
            nodes.dismiss()
            raise

    def waited() -> None:
        try:
            until_done()
        except Exception:
            raise
        except BaseException:
            until_done()
            raise

    return waited
