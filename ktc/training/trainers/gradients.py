"""Start the processes of a run from the same adapter, and average its gradients over them.

In: the trainable parameters, in the same order in every process. gloo reduces CPU tensors and nccl CUDA
tensors, in buckets, because one model may hold both. Refused: processes whose trainable parameters differ.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.training.trainers.private_api import copy_all, in_one_call

BUCKET_BYTES = 25 << 20  # DDP's size too: large enough to fill a network, small enough to copy
_BACKENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl"}
_HALF = frozenset({torch.float16, torch.bfloat16})

Group = Any  # torch.distributed.ProcessGroup, or None for the main group


def distributed() -> bool:
    """Return whether this run has several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def by_nccl() -> bool:
    """Return whether the processes exchange CUDA tensors, each with a GPU of its own."""
    return "nccl" in str(dist.get_backend())


def open_groups(parameters: Iterable[Tensor], timeout: timedelta) -> Mapping[str, Group]:
    """Return the group to reduce over for "cpu", and for "cuda" if a parameter is on a GPU. Every process calls this.

    A device that the main backend does not support (`nccl` has no CPU tensors) gets its own group, created once.
    """
    devices = ["cpu", *sorted({parameter.device.type for parameter in parameters} - {"cpu"})]
    return {device: _group(dist.group.WORLD, device, timeout) for device in devices}


@functools.lru_cache(maxsize=8)
def _group(world: object, device: str, timeout: timedelta) -> Group:
    serves = _backends(None)
    wanted = _BACKENDS.get(device, serves.get(device, "gloo"))
    return None if serves.get(device) == wanted else dist.new_group(backend=wanted, timeout=timeout)


def _backends(group: Group) -> dict[str, str]:
    """Return the backend of each kind of device in a group."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)


def barrier(groups: Mapping[str, Group]) -> None:
    """Wait for every process by gloo, before a collective of nccl, which would hang if one has ended.

    Raises:
        RuntimeError: A process is gone.
    """
    dist.all_reduce(torch.zeros(1), group=groups["cpu"])


def check_alike(named: Sequence[tuple[str, Parameter]], groups: Mapping[str, Group]) -> None:
    """Compare the names, shapes, dtypes and kinds of device of the parameters over the processes.

    Raises:
        InputRefused: T533, in every process, if they differ.
    """
    lines = [f"{name} {tuple(p.shape)} {p.dtype} {p.device.type}" for name, p in named]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    digest_bytes = torch.tensor(list(digest), dtype=torch.uint8)
    gathered = [torch.empty_like(digest_bytes) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, digest_bytes, group=groups["cpu"])
    others = [f"rank {rank}" for rank, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
    if others:
        message = f"the processes train different parameters: {listing(others)} differ from rank 0"
        hint = "give every process the same model, adapter settings and devices"
        raise InputRefused(Diagnostic("T533", message, hint=hint))


@torch.no_grad()
def broadcast(parameters: Sequence[Tensor], groups: Mapping[str, Group]) -> None:
    """Copy rank 0's values to every process, in place."""
    for bucket in _buckets(parameters, BUCKET_BYTES):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, 0, group=groups[flat.device.type])
        _scatter(flat, bucket)


@torch.no_grad()
def average_gradients(
    parameters: Sequence[Parameter],
    groups: Mapping[str, Group],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    waits: bool = False,
) -> bool:
    """Replace every gradient by its mean over the processes, the same bits in each. 16-bit values are summed in fp32.

    The mean is correct for a loss that is a mean over this process's rows. `Trainer.compute_loss` multiplies a loss
    divided by the tokens of all processes (`num_items_in_batch`) by the number of processes, so it is correct too.
    A gradient that is missing in some processes counts as zero there. One that is missing in all stays `None`, so that
    the optimizer skips it as it does in one process.

    Returns:
        Whether a process `waits` for its GPU behind the update: all of them log a step at the same place then.
    """
    nccl = {device: _backends(group).get(device) == "nccl" for device, group in groups.items()}
    present, one_waits = _present(parameters, groups["cpu"], waits=waits)
    _average_together([parameter for parameter in present if nccl[parameter.device.type]], groups, bucket_bytes)
    others = [_gradient(parameter) for parameter in present if not nccl[parameter.device.type]]
    for bucket in _buckets(others, bucket_bytes):
        alone = len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].dtype not in _HALF
        flat = bucket[0] if alone else _flat(bucket)
        dist.all_reduce(flat, group=groups[flat.device.type])
        flat.div_(dist.get_world_size())
        if not alone:
            _scatter(flat, bucket)
    return one_waits


def _average_together(parameters: Sequence[Parameter], groups: Mapping[str, Group], bucket_bytes: int) -> None:
    """Replace gradients by their means by nccl: where they are, and all of a dtype in one call.

    A call for each takes the host longer than the GPU, and nccl fewer bytes at once. Half precision is summed in fp32.
    Parameters, which are alike in all processes, decide which gradients are copied: their order is that of the call.
    """
    in_place = [p for p in parameters if p.is_contiguous() and p.dtype not in _HALF]
    for parameter in in_place:
        if not _gradient(parameter).is_contiguous():
            parameter.grad = _gradient(parameter).contiguous()
    kept = {id(parameter) for parameter in in_place}
    copied = list(_buckets([_gradient(p) for p in parameters if id(p) not in kept], bucket_bytes))
    copies = [_flat(bucket) for bucket in copied]
    calls: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for flat in (*map(_gradient, in_place), *copies):
        calls[flat.device, flat.dtype].append(flat)
    for (device, _), together in calls.items():
        with in_one_call(groups[device.type]):
            for flat in together:
                dist.all_reduce(flat, dist.ReduceOp.AVG, group=groups[device.type])  # it divides too
    for flat, bucket in zip(copies, copied, strict=True):
        _scatter(flat, bucket)


def _gradient(parameter: Parameter) -> Tensor:
    return cast("Tensor", parameter.grad)


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    """Return a copy of gradients one behind another, those in half precision in fp32."""
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    return flat.float() if flat.dtype in _HALF else flat


def _present(parameters: Sequence[Parameter], group: Group, *, waits: bool) -> tuple[list[Parameter], bool]:
    """Return the parameters with a gradient in at least one process, in each with one, and whether one waits."""
    here = torch.tensor([*(parameter.grad is not None for parameter in parameters), waits], dtype=torch.uint8)
    dist.all_reduce(here, op=dist.ReduceOp.MAX, group=group)
    *anywhere, one_waits = cast("list[int]", cast("Any", here).tolist())
    wanted = [parameter for parameter, some in zip(parameters, anywhere, strict=True) if some]
    for parameter in wanted:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return wanted, bool(one_waits)


def _buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Group the tensors by device and dtype, in their order, with at most `limit` bytes or one tensor in a group.

    Tensors of an eighth of that are alone: they are not copied to one another.
    """
    kinds: defaultdict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[str(tensor.device), tensor.dtype].append(tensor)
    for alike in kinds.values():
        bucket, num_bytes = list[Tensor](), 0
        for tensor in alike:
            if tensor.nbytes * 8 > limit:
                yield [tensor]
                continue
            if bucket and num_bytes + tensor.nbytes > limit:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    copy_all(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
