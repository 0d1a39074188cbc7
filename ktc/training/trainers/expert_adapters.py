"""Adapters of routed experts in the memory of the GPU that multiplies these experts, while a trainer runs.

PEFT makes factors beside the weights that they adapt, and those of packed experts are in host memory. From there, every
pass would wait for copies of all factors and of their gradients, and the CPU would update them.
In: a model with adapters. Out: a context in which the factors are on the GPU, if it has room for them, or page-locked
in host memory, and a sentence on where they are. Afterwards they are where they were, where the kernels of the CPU read
them.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained import host_factors
from ktc.model.experts.trained.adapter_memory import fits, trained_bytes
from ktc.model.experts.trained.peft_wrapper import ExpertsParamWrapper
from ktc.model.hf.foreign_errors import first_line
from ktc.training.trainers import gradients
from ktc.training.trainers.stack_size import MANY, free_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The factors whose experts `device` multiplies, trained or not, and its free bytes before they are there."""

    device: torch.device
    factors: tuple[nn.Parameter, ...]
    free: int

    @property
    def nbytes(self) -> int:
        """Bytes of the factors, and of the gradients and AdamW's moments of those that train."""
        frozen = sum(factor.nbytes for factor in self.factors if not factor.requires_grad)
        return frozen + trained_bytes(sum(factor.nbytes for factor in self.factors if factor.requires_grad))

    @property
    def fits(self) -> bool:
        """Whether they leave enough of the memory to everything else."""
        return fits(self.nbytes, self.free)

    def told(self, *, moved: bool) -> str:
        """Return where they are, in words."""
        size = f"{self.nbytes / 1e9:.2f} GB with gradients and optimizer"
        if moved:
            return f"adapters of experts on {self.device}: {size}"
        return f"adapters of experts in host memory: {size}, and {self.device} has {self.free / 1e9:.2f} GB free"


@contextmanager
def beside_experts(model: nn.Module, trainer: Any) -> Generator[str]:
    """Keep the adapters of routed experts on the GPUs of their experts, where they fit. Yields a sentence, or "".

    The state of the trainer's optimizer follows them. All processes of a run decide alike.
    """
    host_factors.forget()
    adapters = tuple(adapters_of(model))
    fitting = of_all_processes([group.fits for group in adapters])
    before = {factor: factor.device for group in adapters for factor in group.factors}
    try:
        for group, moves in zip(adapters, fitting, strict=True):
            if moves:
                _move(dict.fromkeys(group.factors, group.device), trainer.optimizer)
            elif group.device.type == "cuda":
                _lock(group.factors)
        yield "; ".join(group.told(moved=moved) for group, moved in zip(adapters, fitting, strict=True))
    finally:
        host_factors.forget()
        _move(before, trainer.optimizer)
        _unlock(before)


def adapters_of(model: nn.Module) -> Iterator[Adapters]:
    """Yield the factors by the GPU that multiplies their experts; those of the CPU, and frozen ones, are left out."""
    factors: dict[torch.device, list[nn.Parameter]] = {}
    for wrapper in model.modules():
        if isinstance(wrapper, ExpertsParamWrapper):
            backend = cast("FusedMoe", wrapper.get_base_layer()).backend(MANY)
            sides = (*wrapper.lora_A.values(), *wrapper.lora_B.values())
            weights = [cast("nn.Parameter", side.weight) for side in sides]
            if backend.device.type != "cpu" and any(weight.requires_grad for weight in weights):
                backend.prepare()  # its memory is not free any more
                factors.setdefault(backend.device, []).extend(weights)  # active adapters are joined on one device
    for device, of_device in factors.items():
        yield Adapters(device, tuple(of_device), free_bytes(str(device)))


def of_all_processes(fitting: list[bool]) -> list[bool]:
    """Return what fits in every process of the run."""
    if not gradients.distributed():
        return fitting
    everywhere: list[list[bool]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, fitting)
    return [all(column) for column in zip(*everywhere, strict=True)]


def _lock(factors: tuple[nn.Parameter, ...]) -> None:
    """Keep parameters in page-locked host memory, from which a GPU copies beside other work."""
    try:
        for factor in factors:
            if factor.device.type == "cpu":
                factor.data = factor.data.pin_memory()
    except RuntimeError as error:  # as by a limit of the system: copies wait then
        log.warning("the adapters of experts are not page-locked, and copies to the GPU wait: %s", first_line(error))


def _unlock(factors: Iterable[nn.Parameter]) -> None:
    """Return parameters and gradients in page-locked memory to memory that the system may move."""
    for factor in factors:
        if factor.device.type == "cpu" and factor.data.is_pinned():
            grad, factor.grad = factor.grad, None
            factor.data = factor.data.clone()
            factor.grad = None if grad is None else grad.clone()


def _move(devices: Mapping[nn.Parameter, torch.device], optimizer: Optimizer | None) -> None:
    """Move parameters in place, which an optimizer keeps, with their gradients and its state."""
    groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    counted_there = {factor for group in groups if _counts_on_device(group) for factor in group["params"]}
    for factor, device in devices.items():
        if factor.device == device:
            continue
        grad = None if factor.grad is None else factor.grad.to(device)
        factor.grad = None
        factor.data = factor.data.to(device)
        factor.grad = grad
        state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(factor, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and (name != "step" or factor in counted_there):
                state[name] = value.to(device)


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer counts the steps of its parameters on their device, as torch's do."""
    return bool(group.get("fused") or group.get("capturable"))
