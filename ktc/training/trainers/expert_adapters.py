"""Adapters of routed experts in the memory of the GPU that multiplies these experts, while a trainer runs.

PEFT makes factors beside the weights that they adapt, and those of packed experts are in host memory. From there, every
pass would wait for copies of all factors and of their gradients, and the CPU would update them.
In: a model with adapters. Out: a context in which the factors are on the GPU, if it has room for them, or page-locked
in host memory, and a sentence on where they are. Afterwards they are in host memory again, where the kernels of the CPU
read them.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ktc.model.experts.adapter_memory import fits, trained_bytes
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.peft_wrapper import ExpertsParamWrapper
from ktc.model.hf.foreign_errors import first_line
from ktc.training.trainers.stack_size import MANY, free_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The trained factors whose experts `device` multiplies, and its free bytes before they are there."""

    device: torch.device
    factors: tuple[nn.Parameter, ...]
    free: int

    @property
    def nbytes(self) -> int:
        """Bytes of the factors, their gradients and AdamW's moments."""
        return trained_bytes(sum(factor.nbytes for factor in self.factors))

    @property
    def fits(self) -> bool:
        """Whether they leave enough of the memory to everything else."""
        return fits(self.nbytes, self.free)

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e9:.2f} GB with gradients and optimizer"
        if self.fits:
            return f"adapters of experts on {self.device}: {size}"
        return f"adapters of experts in host memory: {size}, and {self.device} has {self.free / 1e9:.2f} GB free"


@contextmanager
def beside_experts(model: nn.Module) -> Generator[str]:
    """Keep the adapters of routed experts on the GPUs of their experts, where they fit. Yields a sentence, or ""."""
    adapters = tuple(adapters_of(model))
    try:
        for group in adapters:
            if group.fits:
                _move(group.factors, group.device)
            elif group.device.type == "cuda":
                _lock(group.factors)
        yield "; ".join(map(str, adapters))
    finally:
        for group in adapters:
            _move(group.factors, torch.device("cpu"))


def adapters_of(model: nn.Module) -> Iterator[Adapters]:
    """Yield the trained factors by the GPU that multiplies their experts; those of the CPU are left out."""
    factors: dict[torch.device, list[nn.Parameter]] = {}
    for wrapper in model.modules():
        if isinstance(wrapper, ExpertsParamWrapper):
            backend = cast("FusedMoe", wrapper.get_base_layer()).backend(MANY)
            if backend.device.type != "cpu":
                backend.prepare()  # its memory is not free any more
                sides = (*wrapper.lora_A.values(), *wrapper.lora_B.values())
                weights = (cast("nn.Parameter", side.weight) for side in sides)
                factors.setdefault(backend.device, []).extend(weight for weight in weights if weight.requires_grad)
    for device, of_device in factors.items():
        if of_device:
            yield Adapters(device, tuple(of_device), free_bytes(str(device)))


def _lock(factors: tuple[nn.Parameter, ...]) -> None:
    """Keep parameters in page-locked host memory, from which a GPU copies beside other work."""
    try:
        for factor in factors:
            factor.data = factor.data.pin_memory()
    except RuntimeError as error:  # as by a limit of the system: copies wait then
        log.warning("the adapters of experts are not page-locked, and copies to the GPU wait: %s", first_line(error))


def _move(factors: tuple[nn.Parameter, ...], device: torch.device) -> None:
    """Move parameters in place: an optimizer keeps them."""
    for factor in factors:
        grad, factor.grad = factor.grad, None
        factor.data = factor.data.to(device)
        factor.grad = None if grad is None else grad.to(device)
