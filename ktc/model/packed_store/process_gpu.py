"""The GPU of each process of torchrun on a machine: a model compiled for one GPU runs on GPU `LOCAL_RANK` in each.

In: a manifest, and the place of this process among those of its machine. Out: the manifest as this process loads it.
Refused: a model that was placed on several GPUs (L447), fewer visible GPUs than processes (L409).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation import environment
from ktc.model.manifest.manifest import Manifest, Rewrite

log = logging.getLogger(__name__)


def for_this_process(manifest: Manifest, folder: Path) -> Manifest:
    """Return the manifest for this process, and make its GPU the current one of torch.

    Outside torchrun, and for a model that uses no GPU, nothing changes.

    Raises:
        InputRefused: L447.
        HostLacks: L409.
    """
    processes, rank = environment.local_world_size(), environment.local_rank()
    if processes == 1 or not any(_is_gpu(device) for _, device in _uses(manifest)):
        return manifest
    changed = require_gpus(manifest, folder, processes, rank)
    torch.cuda.set_device(rank)
    log.info("process %d of %d on this machine runs `%s` on cuda:%d", rank, processes, folder.name, rank)
    return changed


def require_gpus(manifest: Manifest, folder: Path, processes: int, rank: int = 0) -> Manifest:
    """Return the manifest for process `rank` of `processes`, for which this machine has a GPU each.

    A model that uses no GPU needs none.

    Raises:
        InputRefused: L447.
        HostLacks: L409.
    """
    if not any(_is_gpu(device) for _, device in _uses(manifest)):
        return manifest
    changed = for_process(manifest, folder, rank, processes)
    seen = torch.cuda.device_count()
    if seen < processes:
        message = f"this run has {processes} processes on this machine, each on a GPU of its own; {seen} GPUs are seen"
        hint = f"start at most {seen} processes, or make the GPUs visible" if seen else "make the GPUs visible"
        raise HostLacks(Diagnostic("L409", message, hint=hint))
    return changed


def for_process(manifest: Manifest, folder: Path, rank: int, processes: int) -> Manifest:
    """Return `manifest` for process `rank` of `processes` on a machine: everything on a GPU is on `cuda:RANK`.

    Experts that are streamed to several GPUs are streamed to that one alone, and none of them stay there: their memory
    was planned on several.

    Raises:
        InputRefused: L447 if tensors were placed on several GPUs.
    """
    users = {_name(device): fqn for fqn, device in _places(manifest) if _is_gpu(device)}
    if len(users) > 1:
        where = ", ".join(f"`{fqn or 'the model'}` on `{device}`" for device, fqn in sorted(users.items()))
        message = f"`{folder.name}` was placed on {len(users)} GPUs ({where}), and this run has {processes} processes"
        hint = "compile it for one GPU, which every process then has for itself, or run one process per machine"
        raise InputRefused(Diagnostic("L447", message, hint=hint))
    several = len({_name(device) for _, device in _uses(manifest) if _is_gpu(device)}) > 1
    memory = Counter[str]()
    for device, size in manifest.memory.items():
        memory[_own(device, rank)] += size
    return replace(
        manifest,
        placement={fqn: _own(device, rank) for fqn, device in manifest.placement.items()},
        rewrites=tuple(_own_step(step, rank, stay=not several) for step in manifest.rewrites),
        memory=memory,
    )


def _uses(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield every device of the manifest, with the name of a module that uses it."""
    yield from _places(manifest)
    for step in manifest.rewrites:
        yield from ((step.fqn, device) for device in _prefill(step.args))


def _places(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the devices that modules are placed on, and those of streamed linear layers."""
    yield from manifest.placement.items()
    yield from ((step.fqn, step.device) for step in manifest.rewrites if step.module == "streamed_linear")


def _own_step(step: Rewrite, rank: int, *, stay: bool) -> Rewrite:
    args = dict(step.args)
    if devices := _prefill(args):
        args["prefill"] = list(dict.fromkeys(_own(device, rank) for device in devices))
        args["resident"] = stay and args["resident"]
        args["kept"] = args.get("kept") if stay else None
    return replace(step, device=_own(step.device, rank), args=args)


def _prefill(args: Mapping[str, Any]) -> list[str]:
    """Return the devices of calls with many tokens, of a row `fused_moe`."""
    return list(args.get("prefill", ()))


def _own(device: str, rank: int) -> str:
    return f"cuda:{rank}" if _is_gpu(device) else device


def _is_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _name(device: str) -> str:
    return f"cuda:{torch.device(device).index or 0}"
