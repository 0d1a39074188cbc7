"""The processes of a machine share the experts that are sent to their GPUs, while a trainer runs its steps.

The time of a step is that of the bus where experts are sent, and every process would send all of them. So each sends
its own, and multiplies them by the rows of all processes (`ktc.model.experts.streamed.shared_experts`). They then run
each pass over the layers together: as many passes, of the same micro-batches.
In: a model, and the groups of a run. Out: a context in which steps share, and what the processes agree on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ktc.foundation import environment
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.streamed.shared_experts import Sharing
from ktc.training.trainers import gradients


@contextmanager
def shared_experts(model: nn.Module) -> Generator[Sharing | None]:
    """Let the processes of each machine share streamed experts; None where there are none, or one process.

    Every process calls this. Those of resident experts are not shared: each GPU has all of them.
    """
    size = environment.local_world_size()
    if not gradients.distributed() or size < 2 or dist.get_world_size() % size:
        yield None
        return
    layers = [module for module in model.modules() if isinstance(module, FusedMoe) and _is_sent(module)]
    group = dist.group.WORLD if size == dist.get_world_size() else _of_machine(size)
    if not layers:
        yield None
        return
    sharing = Sharing(group, dist.get_rank() % size, size)
    before = [layer.offload for layer in layers]
    for layer in layers:
        assert layer.offload is not None, "its experts are sent"
        layer.offload = replace(layer.offload, sharing=sharing)
    try:
        yield sharing
    finally:
        for layer, offload in zip(layers, before, strict=True):
            layer.offload = offload


def _of_machine(size: int) -> Any:
    """Return the group of this machine's processes. torchrun numbers those of a machine one after another."""
    made: tuple[Any, ...] = cast("Any", dist).new_subgroups(size)
    return made[0]


def _is_sent(layer: FusedMoe) -> bool:
    """Return whether a layer's experts are sent to a device whose tensors the processes exchange."""
    offload = layer.offload
    if offload is None or offload.resident or offload.devices[1:] or layer.weights.packed is None:
        return False
    return offload.devices[0].type == "cpu" or gradients.by_nccl()


@contextmanager
def in_step(sharing: Sharing | None) -> Generator[None]:
    """Share experts inside of the context, which all processes enter together; nothing changes for None."""
    if sharing is None:
        yield
        return
    sharing.on = True
    try:
        yield
    finally:
        sharing.on = False


def largest(values: Sequence[int], group: Any) -> list[int]:
    """Return the largest of each value over the processes of a group of CPU tensors; they have equally many."""
    agreed = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return cast("list[int]", cast("Any", agreed).tolist())
